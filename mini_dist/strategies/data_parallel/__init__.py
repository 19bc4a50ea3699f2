"""The same model everywhere, a part of the batch each, gradients averaged.

ideas.py is to be read, wrappers.py to train with. The wrappers send what the ideas send, byte by
byte and in the same order (tests/strategies/test_data_parallel.py); what they add is told at their
head.
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
