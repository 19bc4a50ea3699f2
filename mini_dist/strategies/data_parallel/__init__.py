"""The same model on every rank, a part of the batch on each, gradients averaged.

Read ideas.py first and train with wrappers.py. The wrappers send the same bytes in the same order
as the ideas (tests/strategies/test_data_parallel.py); the top of wrappers.py lists what they add.
"""

from .ideas import (
    average_in_buckets,
    average_through_rank_0,
    flatten,
    mean,
    overlapped_backward,
    unflatten,
)
from .wrappers import Bucketed, Naive, Overlapped, backend_mean_, make_buckets, mean_, ring_mean

__all__ = [
    "Bucketed",
    "Naive",
    "Overlapped",
    "average_in_buckets",
    "average_through_rank_0",
    "backend_mean_",
    "flatten",
    "make_buckets",
    "mean",
    "mean_",
    "overlapped_backward",
    "ring_mean",
    "unflatten",
]
