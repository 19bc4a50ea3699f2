"""Which constants of the time and memory models were chosen with which data in view: one table.

A constant from a datasheet, from a timing of one kernel or one collective, or from a program's
source is defined where it is used, with its source.  The constants listed here were chosen, or
selected among sources, while whole runs were in view: a table named here is not an independent test
of them. `benchmarks/planner.py` prints this list above its errors.

`decided` says what the value is based on now.  HALF: the constant was chosen on all rows of the
table and then read again on a declared half of them (`first_half` in the benchmark, a checksum of
the run), with the same value at the given precision; the benchmark reads it again each time and
prints errors on both halves.  WHOLE: it was chosen on all rows, without a half.  NONE: the value
comes from a cited source or is a round number; no table was used to choose it.
"""

from __future__ import annotations

from typing import NamedTuple

from .devices import FLASH_2_HOPPER
from .frameworks import CUDA_OUTSIDE, FRAGMENTATION, FRAMEWORKS, LAUNCHES
from .intervals import ACROSS_NODES, IN_A_NODE
from .machines import HOST_ADAM_FRACTION, SLOWED
from .published import LIMITED, MPT

HALF, WHOLE = "read on a declared half", "chosen on the whole table"
NONE = "no table decided"


class Chosen(NamedTuple):
    name: str
    value: object
    in_view: str  # the published table that was in view
    decided: str  # HALF, WHOLE, NONE


CHOSEN = (
    Chosen(
        "host's seconds a layer, Megatron 2021 and 2022",
        FRAMEWORKS["megatron-2021"].host_seconds,
        "vTrain on 2 to 8 A100: where steps stop getting faster",
        HALF,
    ),
    Chosen(
        "host's seconds a layer, all others",
        FRAMEWORKS["nanotron"].host_seconds,
        "nanotron on H100: where steps stop getting faster",
        HALF,
    ),
    Chosen(
        "elementwise kernels fused, nanotron (without, memory is passed over twice as often)",
        FRAMEWORKS["nanotron"].fused_activation,
        "nanotron on H100",
        HALF,
    ),
    Chosen(
        "bytes a gradient, nanotron",
        FRAMEWORKS["nanotron"].gradient_bytes,
        "nanotron on H100",
        HALF,
    ),
    Chosen(
        "gathered inputs kept, nanotron",
        FRAMEWORKS["nanotron"].keeps_gathered,
        "nanotron on H100",
        HALF,
    ),
    Chosen(
        "weight gradients kept, Megatron-Core",
        FRAMEWORKS["megatron-core"].weight_gradients,
        "Megatron-Core on B200",
        HALF,
    ),
    # To two digits the half says 0.55. 0.5 is the source's word, "twice", and is left.
    Chosen(
        "speed of the first FlashAttention", MPT.flash_speed, "MPT on A100 (and Dao 2023)", HALF
    ),
    Chosen("share lost to fragments", FRAGMENTATION, "nanotron's crashes, BLOOM's 59 GB", WHOLE),
    Chosen("bytes outside the allocator", CUDA_OUTSIDE, "assumed", NONE),
    Chosen(
        "share of the host's memory bandwidth that Adam's step gets",
        HOST_ADAM_FRACTION,
        "CPU-Adam's times of 4 and 10 billion parameters on a DGX-2 (Ren et al. 2021)",
        WHOLE,
    ),
    Chosen(
        "slower beside a collective",
        SLOWED,
        "Lee et al. 2025's mean, in their abstract; taken before any table was computed with it",
        NONE,
    ),
    Chosen(
        "the host and the device: the slower sets the pace, no soft maximum",
        "max",
        "vTrain on 2 to 8 A100, which said it plainly; and how deep queues are",
        WHOLE,
    ),
    Chosen(
        "launches of a layer's forward, of which an unfused softmax adds four",
        LAUNCHES,
        "counted in Megatron-LM's source; vTrain on 2 to 8 A100 had been seen",
        NONE,
    ),
    Chosen(
        "an H100 limited to 500 W, of its matrices' speed at 700 W",
        round(LIMITED, 3),
        "the datasheets of SXM and NVL, straight in watts; torchtitan's table had been seen",
        NONE,
    ),
    Chosen(
        "FlashAttention 2 on Hopper, forward, of the peak",
        FLASH_2_HOPPER,
        "Shah et al. 2024, abstract; torchtitan's table had been seen",
        NONE,
    ),
    Chosen(
        "the interval: factors low and high",
        tuple((kind.low, kind.high) for kind in (IN_A_NODE, *ACROSS_NODES)),
        "all tables but those that were looked at last (benchmarks/planner.py)",
        HALF,
    ),
)
