"""A schedule in a CSV file: a line a rank, a cell an action, as one would type it in a table."""

from __future__ import annotations

import csv
from pathlib import Path

from mini_dist.schedule.action import Schedule


def to_csv(schedule: Schedule, path: str | Path) -> None:
    """Write the lists; the name and `mixed` are not in the file."""
    with open(path, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(schedule.ranks)


def from_csv(path: str | Path, name: str | None = None, mixed: bool = False) -> Schedule:
    """Read the lists; empty cells are skipped, so that columns may stand for moments.

    The schedule is called by `name`, else by the file's. Raises ScheduleError for a cell that is no
    action; whether the schedule can run is validate()'s to say.
    """
    with open(path, newline="") as file:
        rows = [[cell.strip() for cell in row if cell.strip()] for row in csv.reader(file)]
    return Schedule(name or Path(path).stem, [row for row in rows if row], mixed)
