"""Explorer of lesson 12: any schedule, its timeline, bubble and memory, and a run of it."""

from __future__ import annotations

from mini_dist.plan.calculators.bubble import bubble_seconds
from mini_dist.plan.config import Layout
from mini_dist.plan.schedule import (
    SCHEDULES,
    V_SHAPED,
    Schedule,
    Timeline,
    Times,
    build,
    simulate,
    versions_held,
)
from mini_dist.ranks.launch import launch

from ..draw.schedules import holdings, lanes, legend
from ..draw.svg import WIDEST, Drawing, numbered, round_places
from ..lab import choice, flag, real, whole
from . import page
from .explorer import Explorer

NAMES = [name for name in SCHEDULES if name != "pipedream_2bw"]  # it needs another argument
MOST_RANKS = 8  # the ranks of a run are processes of this machine


def schedule_of(name: str, num_ranks: int, num_micro_batches: int, chunks: int = 2) -> Schedule:
    options = {"chunks": chunks} if name == "interleaved" else {}
    return build(name, num_ranks, num_micro_batches, **options)


def thin(times: Times, schedule: Schedule) -> Times:
    """Return the times of one stage, from the `times` of a rank's whole share."""
    chunks = schedule.num_stages // schedule.num_ranks
    return Times(times.forward / chunks, times.backward / chunks, times.weight / chunks, times.comm)


def predicted(name: str, num_ranks: int, num_micro_batches: int, chunks: int, times: Times):
    """Return (bubble, formula) as the papers state it, for even stages and free messages.

    For zero-bubble schedules it is the idle time over the longest single rank's span.
    """
    if num_ranks == 1:
        return 0.0, "one rank waits for nobody"
    chunks = 2 if name in V_SHAPED else chunks if name == "interleaved" else 1
    layout = Layout(
        pp=num_ranks,
        num_micro_batches=num_micro_batches,
        schedule="1f1b" if name == "pipedream" else name,
        num_chunks=chunks,
    )
    whole_backward = times.backward + times.weight
    idle, formula = bubble_seconds(
        layout,
        [times.forward] * num_ranks,
        [whole_backward] * num_ranks,
        [times.weight] * num_ranks,
    )
    busy = num_micro_batches * (times.forward + whole_backward)
    return idle / (busy + idle), f"idle: {formula}"


def run(schedule: Schedule, times: Times) -> Timeline:
    """Run the schedule on real ranks that sleep instead of computing. Times are in ms."""
    from mini_dist.strategies.pipeline import run_emulated

    names = ("forward", "backward", "weight", "comm")
    seconds = Times(*[getattr(times, name) / 1e3 for name in names])
    ranks = launch(run_emulated, schedule.num_ranks, (schedule, seconds), quiet=True)
    timeline = Timeline.of_run(schedule, ranks.results)
    return Timeline(
        schedule,
        tuple(
            tuple(span._replace(start=1e3 * span.start, end=1e3 * span.end) for span in spans)
            for spans in timeline.spans
        ),
    )


def explorer(**start) -> Explorer:
    """Return the explorer; `start` sets controls. `measured` adds a run on real ranks."""

    def render(
        schedule: str = "1f1b",
        num_ranks: int = 4,
        num_micro_batches: int = 8,
        chunks: int = 2,
        forward_ms: float = 5.0,
        backward_ms: float = 5.0,
        weight_ms: float = 5.0,
        comm_ms: float = 0.0,
        measured: bool = False,
    ) -> tuple[Drawing, str]:
        lists = schedule_of(schedule, num_ranks, num_micro_batches, chunks)
        whole_rank = Times(forward_ms, backward_ms, weight_ms, comm_ms)
        times = thin(whole_rank, lists)
        shown = {"simulated": simulate(lists, times)}
        if measured:
            shown["measured"] = run(lists, times)
        said = predicted(schedule, num_ranks, num_micro_batches, chunks, whole_rank)
        return draw(lists, shown), describe(lists, shown, said)

    shown = Explorer(
        render,
        {"chunks": lambda values: values["schedule"] == "interleaved"},
        schedule=choice(*NAMES),
        num_ranks=whole(1, MOST_RANKS),
        num_micro_batches=whole(1, 32),
        chunks=whole(1, 4),
        forward_ms=real(0.5, 20, "ms"),
        backward_ms=real(0.5, 20, "ms"),
        weight_ms=real(0.5, 20, "ms"),
        comm_ms=real(0, 10, "ms"),
        measured=flag(),
    )
    shown.change(**start)
    return shown


def draw(schedule: Schedule, shown: dict[str, Timeline]) -> Drawing:
    last = max(timeline.makespan for timeline in shown.values())
    places = numbered(round_places(0, last, 9))
    panels = []
    for label, timeline in shown.items():
        title = f"{label}: bubble {percent(timeline.bubble)}"
        panels.append(lanes(timeline, last, title=title, xticks=places, width=WIDEST))
    chunks = schedule.num_stages // schedule.num_ranks
    simulated = shown["simulated"]
    most = max(simulated.peak_in_flight) / chunks  # in micro-batches of a rank's whole share
    marks = {chunks * place: name for place, name in numbered(round_places(0, most, 3)).items()}
    panels[0].legend = legend(simulated)
    panels.append(
        holdings(
            simulated, last, width=WIDEST, xticks=places, yticks=marks, xlabel="ms",
            title="held, in micro-batches of a rank's whole share",
        )
    )  # fmt: skip
    said = ", ".join(f"{label} {percent(t.bubble)}" for label, t in shown.items())
    return Drawing(panels, f"{schedule.name}, {schedule.num_ranks} ranks: bubble {said}")


def describe(schedule: Schedule, shown: dict[str, Timeline], said: tuple[float, str]) -> str:
    """Return bubble and memory as HTML; the formula stands in the row of its own bubble."""
    split = bool(schedule.split)
    formula = f"{percent(said[0])}  ({said[1]})"
    rows = [
        ("bubble: idle / makespan", "" if split else formula, percent_of("bubble")),
        ("idle / computing (Megatron-LM)", "", percent_of("bubble_over_ideal")),
        (
            "over the longest single rank's span (zero-bubble)",
            formula if split else "",
            percent_of("bubble_over_longest_span"),
        ),
        ("makespan, ms", "", lambda timeline: f"{timeline.makespan:.1f}"),
    ]
    chunks = schedule.num_stages // schedule.num_ranks
    held = ", ".join(f"{count / chunks:g}" for count in shown["simulated"].peak_in_flight)
    borders = sum(schedule.crosses(stage) for stage in range(schedule.num_stages - 1))
    text = (
        f"Held at most, rank by rank, in micro-batches of a rank's whole share: {held}. "
        f"Messages in a step: {2 * borders * schedule.num_micro_batches}."
    )
    if schedule.asynchronous:
        text += f" Weight versions kept: {', '.join(map(str, versions_held(schedule)))}."
    if "measured" in shown:
        text += (
            " Measured: real ranks that sleep as long as they would compute. A gap that the "
            "simulation does not have is a moment in which this machine was busy; it is caught up."
        )
    table = page.table(
        [(name, formula, *map(value, shown.values())) for name, formula, value in rows],
        head=("", "formula", *shown),
    )
    return table + page.paragraph(text)


def percent_of(name: str):
    return lambda timeline: percent(getattr(timeline, name))


def percent(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:.1f} %"  # (never -0.0)
