"""Which constants of the time and memory models were chosen with what in view: one table.

A constant that came from a datasheet, from a timing of one kernel or one collective, or from a
program's source stands where it is used, with its source.  What stands here was chosen, or picked
among sources, while whole runs were in view: a table named here is no independent test of it.
`benchmarks/planner.py` prints this list above its errors.

The last column says what the choice was made on; "assumed" is a round number that no table chose.
"""

from __future__ import annotations

from typing import NamedTuple

from .frameworks import CUDA_OUTSIDE, FRAGMENTATION, FRAMEWORKS
from .intervals import ACROSS_NODES, IN_A_NODE
from .machines import FLASH_2_HOPPER, SLOWED
from .published import LIMITED


class Chosen(NamedTuple):
    name: str
    value: object
    chosen_on: str  # which published table was in view


CHOSEN = (
    Chosen(
        "host's seconds a layer, Megatron 2021 and 2022",
        FRAMEWORKS["megatron-2021"].host_seconds,
        "vTrain on 2 to 8 A100: where steps stop getting faster",
    ),
    Chosen(
        "host's seconds a layer, all others",
        FRAMEWORKS["nanotron"].host_seconds,
        "nanotron on H100: where steps stop getting faster",
    ),
    Chosen(
        "passes over memory of unfused frameworks (twice)",
        FRAMEWORKS["nanotron"].fused_activation,
        "nanotron on H100",
    ),
    Chosen("bytes a gradient, nanotron", FRAMEWORKS["nanotron"].gradient_bytes, "nanotron on H100"),
    Chosen("gathered inputs kept, nanotron", FRAMEWORKS["nanotron"].keeps_gathered, "the same"),
    Chosen(
        "weight gradients kept, Megatron-Core",
        FRAMEWORKS["megatron-core"].weight_gradients,
        "Megatron-Core on B200",
    ),
    Chosen("speed of the first FlashAttention", 0.5, "MPT on A100 (and Dao 2023)"),
    Chosen("share lost to fragments", FRAGMENTATION, "assumed, with nanotron's crashes in view"),
    Chosen("bytes outside the allocator", CUDA_OUTSIDE, "assumed"),
    Chosen(
        "slower beside a collective",
        SLOWED,
        "Lee et al. 2025's mean, in their abstract; taken before any table was computed with it",
    ),
    Chosen(
        "the host and the device: the slower sets the pace, no soft maximum",
        "max",
        "vTrain on 2 to 8 A100, which said it plainly; and how deep queues are",
    ),
    Chosen(
        "an H100 limited to 500 W, of its matrices' speed at 700 W",
        round(LIMITED, 3),
        "the datasheets of SXM and NVL, straight in watts; torchtitan's table had been seen",
    ),
    Chosen(
        "FlashAttention 2 on Hopper, forward, of the peak",
        FLASH_2_HOPPER,
        "Shah et al. 2024, abstract; torchtitan's table had been seen",
    ),
    Chosen(
        "the interval: factors low and high",
        tuple((kind.low, kind.high) for kind in (IN_A_NODE, *ACROSS_NODES)),
        "half of all rows, by a checksum of the run (benchmarks/planner.py); scored on the other",
    ),
)
