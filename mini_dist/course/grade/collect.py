"""In a notebook's kernel, while it is graded: keep the function that each exercise is given.

`check.NAME(fn)` keeps fn instead of judging it: what is said here would not count. Of an exercise
whose check is not called, the function that has its name in the lesson is kept.
"""

from __future__ import annotations

import base64
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import cloudpickle

from mini_dist.ranks.transport import pickler

from ..check.engine import Exercise

LARGEST = 16 << 20  # bytes of a function with all that it uses


class Kept:
    """The result of `check.NAME(fn)` while a notebook is graded."""

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return f"{self.name}: kept, and judged elsewhere (see the report)"


class Collector:
    """functions: a file, there once the notebook is, that says of each exercise of the lesson the
    name that its function has in it."""

    def __init__(self, shell, functions: str, folder: str):
        self.shell, self.functions, self.folder = shell, Path(functions), Path(folder)
        self.checked: set[str] = set()
        self.seen: dict[str, object] = {}

    def start(self) -> None:
        def keep_instead(exercise: Exercise, fn: Callable):
            self.checked.add(exercise.name)
            self.keep(exercise.name, fn, "check")
            return Kept(exercise.name)

        Exercise.__call__ = keep_instead
        self.shell.events.register("post_run_cell", self.look_round)

    def look_round(self, *_) -> None:
        for exercise, name in json.loads(self.functions.read_text()).items():
            found = self.shell.user_ns.get(name)
            defined_here = inspect.isfunction(found) and found.__module__ == "__main__"
            if defined_here and found is not self.seen.get(name) and exercise not in self.checked:
                self.keep(exercise, found, "name")
            self.seen[name] = found

    def keep(self, exercise: str, fn: Callable, how: str) -> None:
        try:
            record = {"how": how, "pickle": base64.b64encode(by_value(fn)).decode()}
        except Exception as error:  # whatever it is that cannot travel
            record = {"how": how, "error": f"{type(error).__name__}: {error}"[:1000]}
        early = self.folder / f"{exercise}.new"
        early.write_text(json.dumps(record))
        early.replace(self.folder / f"{exercise}.json")


def by_value(fn: Callable) -> bytes:
    """The function and what it uses of this notebook and of the files that came with it."""
    import io

    here = os.getcwd()
    for module in list(sys.modules.values()):
        if (getattr(module, "__file__", None) or "").startswith(here):
            cloudpickle.register_pickle_by_value(module)
    buffer = io.BytesIO()
    pickler()(buffer, protocol=5).dump(fn)
    if buffer.tell() > LARGEST:
        raise ValueError(f"the function brings {buffer.tell() >> 20} MB of data along")
    return buffer.getvalue()
