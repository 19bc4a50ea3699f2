"""A schedule in a CSV file: a line a rank, a cell an action, as one would type it in a table."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

from ..fields import checks_kinds
from .action import Schedule, ScheduleError

INPUT_BACKWARD = re.compile(r"(\d+)I(\d+)")
PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")
OF_FSDP = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)")


def to_csv(schedule: Schedule, path: str | Path) -> None:
    """Write the lists; the name and `mixed` are not in the file."""
    with open(path, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(schedule.ranks)


@checks_kinds(error=ScheduleError)
def from_csv(path: str | Path, name: str | None = None, mixed: bool = False) -> Schedule:
    """Read the lists; empty cells are skipped, so that columns may stand for moments.

    What torch.distributed.pipelining writes (`_dump_csv`, both formats) is read, too. Its 1I0 is
    our 1B0 that has a 1W0. Beside such cells its 1B0 is a full backward, and the schedule `mixed`.
    A pair that it overlaps, (0F1;1B0)OVERLAP_F_B, is here the one after the other. UNSHARD, RESHARD
    and REDUCE_GRAD are left out: they are FSDP's, and no part of a pipeline.

    The schedule is called by `name`, else by the file's. Raises ScheduleError for a cell that is no
    action, and for an I without its W; whether the schedule can run is validate()'s to say.
    """
    with open(path, newline="") as file:
        rows = [[a for cell in row for a in actions_of(cell.strip())] for row in csv.reader(file)]
    every = {action for row in rows for action in row}
    if any(INPUT_BACKWARD.fullmatch(action) for action in every):
        mixed = mixed or any(re.fullmatch(r"\d+B\d+", action) for action in every)
        check_halves(every)
        rows = [[INPUT_BACKWARD.sub(r"\1B\2", action) for action in row] for row in rows]
    return Schedule(name or Path(path).stem, [row for row in rows if row], mixed)


def actions_of(cell: str) -> Iterator[str]:
    """What a cell stands for here: nothing, an action, or two."""
    if pair := PAIR.fullmatch(cell):
        for part in pair[1].split(";"):
            yield from actions_of(part.strip())
    elif cell and not OF_FSDP.fullmatch(cell):
        yield cell


def check_halves(every: set[str]) -> None:
    """Where there are Is, each has its W, and each W its I."""
    inputs = {INPUT_BACKWARD.sub(r"\1W\2", a) for a in every if INPUT_BACKWARD.fullmatch(a)}
    weights = {action for action in every if re.fullmatch(r"\d+W\d+", action)}
    for alone in sorted(inputs ^ weights):
        other = alone.replace("W", "I")
        has, lacks = (other, alone) if alone in inputs else (alone, other)
        raise ScheduleError(f"{has} is half a backward, and the other half, {lacks}, is missing")
