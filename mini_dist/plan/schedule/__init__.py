"""Pipeline schedules as data (lessons 12 and 13). No torch in here.

    schedule = one_f_one_b(num_ranks=4, num_micro_batches=8)
    print(schedule)                          # the lists
    timeline = simulate(schedule)            # who runs what when
    print(timeline, timeline.bubble, timeline.peak_in_flight)

Read in this order:
    action.py         what an action is, what a schedule is, who waits for whom
    sizes.py          how many micro-batches each of them takes
    orders.py         naive, GPipe, 1F1B, interleaved 1F1B
    simulate.py       timeline, bubble, activations in flight
    validate.py       refuse what cannot run
    communication.py  add sends and receives; fuse them for NCCL; forwards alone
    zero_bubble.py    ZB-H1, ZB-H2, ZB-V, DualPipeV
    asynchronous.py   PipeDream, PipeDream-2BW: weight versions
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from ..fields import checks_kinds
from .action import Action, Fused, Schedule, ScheduleError, timetable
from .asynchronous import (
    gradient_delay,
    pipedream,
    pipedream_2bw,
    versions_held,
)
from .communication import add_communication, forward_only, fuse_communication
from .orders import gpipe, interleaved, naive, one_f_one_b
from .simulate import Span, Timeline, Times, in_flight, peak_in_flight, simulate
from .sizes import check_micro_batches
from .validate import validate
from .zero_bubble import (
    dualpipe_v,
    zb_h1,
    zb_h2,
    zb_v,
)

__all__ = [
    "SCHEDULES",
    "SPLIT",
    "SYNCHRONOUS",
    "V_SHAPED",
    "Action",
    "Fused",
    "Schedule",
    "ScheduleError",
    "Span",
    "Timeline",
    "Times",
    "add_communication",
    "build",
    "check_micro_batches",
    "dualpipe_v",
    "forward_only",
    "fuse_communication",
    "gpipe",
    "gradient_delay",
    "in_flight",
    "interleaved",
    "naive",
    "one_f_one_b",
    "peak_in_flight",
    "pipedream",
    "pipedream_2bw",
    "simulate",
    "timetable",
    "validate",
    "versions_held",
    "zb_h1",
    "zb_h2",
    "zb_v",
]

SYNCHRONOUS: dict[str, Callable[..., Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zb_v": zb_v,
    "dualpipe_v": dualpipe_v,
}
SCHEDULES = SYNCHRONOUS | {"pipedream": pipedream, "pipedream_2bw": pipedream_2bw}
SPLIT = ("zb_h1", "zb_h2", "zb_v", "dualpipe_v")  # backward in B and W: zero-bubble
V_SHAPED = ("zb_v", "dualpipe_v")  # rank r of p holds the stages r and 2 p - 1 - r


@checks_kinds(error=ScheduleError)
def build(name: str, num_ranks: int, num_micro_batches: int, **options: int) -> Schedule:
    """The schedule of that name; options: `chunks` (interleaved), `micro_batches_a_step` (2BW)."""
    if name not in SCHEDULES:
        raise ScheduleError(f"unknown schedule {name!r}: there are {', '.join(SCHEDULES)}")
    parameters = inspect.signature(SCHEDULES[name]).parameters.values()
    takes = [p.name for p in parameters][2:]
    missing = [p.name for p in parameters if p.default is p.empty and p.name in takes]
    if not set(missing) <= set(options) <= set(takes):
        raise ScheduleError(
            f"schedule {name!r} takes {', '.join(takes) or 'no options'}, and was given "
            f"{', '.join(options) or 'none'}"
        )
    return SCHEDULES[name](num_ranks, num_micro_batches, **options)
