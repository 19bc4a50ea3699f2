"""Explorer of a run's timeline: move along it, and look closer."""

from __future__ import annotations

from mini_dist.ranks.report import Run

from ..draw import ledgers
from ..draw.svg import Drawing
from ..lab import real, whole
from . import page
from .explorer import Explorer

ROWS = 5  # that fit into an explorer, and stay legible


def timeline_zoom(run: Run, **start) -> Explorer:
    """Return the explorer of a run; `start` sets controls, as in timeline_zoom(run, share=0.1).

    from_ms: where the picture begins, in milliseconds from the first start. share: how much of the
    run it shows. first_row: the topmost of five rows (ranks, or kinds of ranks).
    """
    span = run.ledger.span
    whole_run = 1e3 * (max(end for _, end in span) - min(begin for begin, _ in span))
    last_row = max(len(span) - ROWS, 0)

    def render(from_ms: float = 0.0, share: float = 1.0, first_row: int = 0) -> tuple[Drawing, str]:
        length = share * whole_run
        begin = min(from_ms, whole_run - length)
        rows = range(first_row, min(first_row + ROWS, len(span)))
        picture = ledgers.timeline(run, between=(begin, begin + length), rows=rows)
        return picture, page.table(told(run, begin, begin + length, rows), HEAD)

    explorer = Explorer(
        render,
        {"first_row": lambda values: last_row > 0},
        from_ms=real(0.0, whole_run),
        share=real(0.001, 1.0, log=True),
        first_row=whole(0, max(last_row, 1)),
    )
    explorer.change(**start)
    return explorer


HEAD = ("in this window", "calls", "longest", "ms together")


def told(run: Run, begin: float, end: float, rows: range) -> list[tuple]:
    """Return for each row its calls that overlap the window (in ms): how many, which is the
    longest, and their milliseconds inside the window, which count twice where two overlap."""
    first, names = min(start for start, _ in run.ledger.span), ledgers.row_names(run.ledger)
    lines = []
    for row in rows:
        inside = {}
        for number, comm in enumerate(run.ledger.calls(rank=row)):
            left, right = 1e3 * (comm.start - first), 1e3 * (comm.end - first)
            if left < end and right > begin:
                inside[number, comm.op] = min(right, end) - max(left, begin)
        most = max(inside, key=inside.get)[1] if inside else ""
        lines.append((names[row], len(inside), most, f"{sum(inside.values()):,.1f}"))
    return lines
