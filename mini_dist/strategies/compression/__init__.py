"""Gradients in fewer bits: what is dropped, and where it goes.

Read ideas.py first; train with engine.py, whose objects are the `reduce` of Naive, Bucketed and
Overlapped in data_parallel. sharded.py is for ZeRO: it compresses the messages of its units.
"""

from .engine import Compressed, OneBit, PowerSGD, half, int8, random_k, sign, top_k, vote
from .ideas import (
    BLOCK,
    dequantize,
    half_mean,
    majority,
    one_bit_mean,
    pack,
    power_mean,
    quantize,
    quantized_all_gather,
    quantized_mean,
    quantized_reduce_scatter,
    quantized_reduce_scatter_by_nodes,
    random_k_mean,
    round_by_lot,
    sign_mean,
    top_k_mean,
    unpack,
    with_feedback,
)
from .sharded import Quantized

__all__ = [
    "BLOCK",
    "Compressed",
    "OneBit",
    "PowerSGD",
    "Quantized",
    "dequantize",
    "half",
    "half_mean",
    "int8",
    "majority",
    "one_bit_mean",
    "pack",
    "power_mean",
    "quantize",
    "quantized_all_gather",
    "quantized_mean",
    "quantized_reduce_scatter",
    "quantized_reduce_scatter_by_nodes",
    "random_k",
    "random_k_mean",
    "round_by_lot",
    "sign",
    "sign_mean",
    "top_k",
    "top_k_mean",
    "unpack",
    "vote",
    "with_feedback",
]
