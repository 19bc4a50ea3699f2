"""What a pipeline waits for: the bubble, by formula and by simulation, and messages in flight."""

from __future__ import annotations

from functools import lru_cache

from ..config import Layout
from ..schedule import SCHEDULES, SPLIT, Schedule, Times
from ..schedule import simulate as run_schedule
from ..schedule.sizes import round_size
from .activations import tokens_of_micro_batch
from .collective_time import collective_seconds, crossings, message_seconds
from .frameworks import Framework
from .lines import Line, readable
from .stage_time import StageTime
from .timed_step import TimedStep


def pipeline_lines(step: TimedStep, stages: list[StageTime], simulate: bool) -> list[Line]:
    """Return what the slowest stage waits for in addition to its work: other stages and
    messages."""
    layout, hops = step.layout, hop_seconds(step)
    if layout.pp == 1:
        return []
    if simulate:
        work = layout.num_micro_batches * max(stage.total for stage in stages)
        idle = max(0.0, simulated(layout, stages, hops) - work)
        said = "makespan - slowest stage's work", "mini_dist.plan.schedule.simulate"
        return [Line("pipeline bubble", idle, "s", *said)]
    seconds, formula = bubble_seconds(
        layout,
        [stage.forward for stage in stages],
        [stage.backward for stage in stages],
        [stage.weight for stage in stages],
    )
    source = "Narayanan et al. 2021 s2.2; Qi et al. 2023"
    busiest = max(stages, key=lambda stage: stage.total)
    times = busiest.forward, busiest.backward
    sent, of_messages = message_line(layout, step.how, hops, *times)
    return [
        Line("pipeline bubble", seconds, "s", formula, source),
        Line("pipeline messages", sent, "s", of_messages, "Narayanan et al. 2021 s2.2"),
    ]


def bubble_seconds(
    layout: Layout, forward: list[float], backward: list[float], weight: list[float]
) -> tuple[float, str]:
    """Return the idle seconds of the slowest stage per step, and the formula.

    `forward`, `backward` (whole) and `weight` (the part of backward that a zero-bubble schedule
    defers) are each rank's seconds per micro-batch.
    """
    work = [f + b for f, b in zip(forward, backward)]
    others = sum(work) - max(work)  # what must run before and after the slowest stage
    if layout.schedule == "naive":
        return layout.num_micro_batches * others, "m * the other stages' work"
    if layout.schedule == "interleaved":
        return others / layout.num_chunks, "(other stages' F + B) / chunks"
    if layout.schedule in SPLIT:
        share = 2 if layout.schedule == "zb_h1" else 3
        mine = weight[work.index(max(work))]
        theirs = sum(weight) - mine
        # There are no more weights to defer than the slowest stage has in a step.
        put_off = theirs + min((share - 1) * theirs, layout.num_micro_batches * mine)
        return max(0.0, others - put_off), f"other stages' F + B - {share} W"
    return others, "other stages' F + B"


def simulated(layout, stages, hops: list[float]) -> float:
    """Return the makespan of the schedule's own lists; `hops` as in `hop_seconds`.

    After the second round of micro-batches (at least p of them each) every further round adds the
    same time, so long steps are simulated with two and three rounds and extrapolated.
    (If a message takes longer than a computation, four rounds together do, after the fourth.)
    """
    p, m = layout.pp, layout.num_micro_batches
    size = round_size(p, m) if layout.schedule == "interleaved" else p
    shortest = min(stage.forward for stage in stages) / layout.num_chunks
    first, more = (2, 1) if max(hops) < shortest else (4, 4)
    if m <= (first + more) * size:
        return _makespan(layout, stages, hops, m)
    few = first * size + (0 if layout.schedule == "interleaved" else m % size)
    many = few + more * size
    short, long = (_makespan(layout, stages, hops, n) for n in (few, many))
    return long + (m - many) * (long - short) / (more * size)


def num_simulated_actions(layout: Layout) -> int:
    """Return the minimum number of forwards and backwards that a simulation executes."""
    rounds = min(layout.num_micro_batches, 5 * layout.pp)
    return 2 * rounds * layout.num_stages


def _makespan(layout, stages, hops, num_micro_batches) -> float:
    v = layout.num_chunks
    schedule = _lists(layout.schedule, layout.pp, num_micro_batches, v)
    ranks = [schedule.rank_of[stage] for stage in range(schedule.num_stages)]
    each = [
        stages[rank].of_chunk(schedule.stages_of[rank].index(stage), v)
        for stage, rank in enumerate(ranks)
    ]
    times = Times(
        forward=[forward for forward, _, _ in each],
        backward=[backward - weight for _, backward, weight in each],
        weight=[weight for _, _, weight in each],
        comm=_from_stages(ranks, hops),
    )
    return run_schedule(schedule, times).makespan


def _from_stages(ranks: list[int], hops: list[float]) -> list[float]:
    """Return the time of a message from each stage to the previous or next: the slower of both."""
    ways = [_between(a, b, hops) for a, b in zip(ranks, ranks[1:])]
    return [max(pair) for pair in zip([0.0, *ways], [*ways, 0.0])]


def _between(rank: int, other: int, hops: list[float]) -> float:
    """Return the time between neighbors, on one rank (a V's turn), or from the last to the
    first."""
    return max(hops[min(rank, other) : max(rank, other)], default=0.0)


@lru_cache(maxsize=256)
def _lists(name: str, p: int, m: int, v: int) -> Schedule:
    return SCHEDULES[name](p, m, *((v,) if name == "interleaved" else ()))


def hop_seconds(step: TimedStep) -> list[float]:
    """Return the seconds of one activation from each pipeline rank to the next: [pp - 1]."""
    layout, machine = step.layout, step.machine
    tokens = tokens_of_micro_batch(step.config, layout)
    message = step.how.activation_bytes * tokens * step.config.d_model
    # Scatter/gather (Narayanan et al. 2021 section 4.1): each tp rank sends a part of it.
    whole = layout.sequence_parallel or layout.tp == 1
    joined = 0.0 if whole else collective_seconds(machine, "all_gather", message, layout.tp)
    ways = [message_seconds(machine, message / layout.tp, leaves) for leaves in (False, True)]
    return [joined + ways[leaves] for leaves in crossings(layout, machine.devices_per_node)]


def message_line(
    layout: Layout, how: Framework, hops: list[float], forward: float, backward: float
) -> tuple[float, str]:
    """Return the seconds that a step waits for messages between stages, and the formula.

    forward, backward: seconds of one micro-batch on the slowest rank.
    The first micro-batch goes to the last stage, and its gradient comes back. Between these, a rank
    waits for each message of its slowest neighbor. In an interleaved schedule it computes other
    chunks meanwhile, if the framework lets messages overlap. Then mostly the ends of the schedule
    wait: there, a lap of the messages around all ranks has only the micro-batches of a round beyond
    pp to hide behind; later, all of a round. (`simulate` finds the same seconds, up to messages
    that take as long as a chunk.)
    """
    slowest, m, v = max(hops), layout.num_micro_batches, layout.num_chunks
    there_and_back = f"2 * {readable(sum(hops), 's')} there and back"
    if layout.schedule != "interleaved" or not how.overlaps_messages:
        seconds = 2 * m * v * slowest + 2 * sum(hops)
        return seconds, f"{2 * m * v} * {readable(slowest, 's')} + {there_and_back}"
    size = round_size(layout.pp, m)

    def late(meanwhile: int) -> float:
        """A lap around all ranks, less the computation of this many micro-batches of a chunk."""
        lap, times = sum(hops) + slowest, (forward, backward)
        return sum(max(0.0, lap - (meanwhile * each / v if meanwhile else 0.0)) for each in times)

    laps = late(size - layout.pp) + (m // size - 1) * late(size)
    seconds = (v - 1) * laps + 2 * sum(hops)
    return seconds, f"{v - 1} laps * {readable(laps, 's')} + {there_and_back}"
