"""Run what needs other frameworks, and keep what it gives for readers who do not have them.

    python tools/keep.py               all of mini_dist/elsewhere
    python tools/keep.py in_deepspeed  one of its modules

In an environment with `pip install -e '.[frameworks]'`; tests/frameworks compares what is kept
with a run there.
"""

import importlib
import sys
from pathlib import Path

from mini_dist import elsewhere

FOLDER = Path(elsewhere.__file__).parent
HEAD = ("__init__", "kept")  # no framework is run by these


def all_kept(modules=()):
    """The functions decorated with `kept`, of these modules of mini_dist/elsewhere or of all."""
    modules = modules or sorted(p.stem for p in FOLDER.glob("*.py") if p.stem not in HEAD)
    for name in modules:
        module = importlib.import_module(f"mini_dist.elsewhere.{name}")
        for fn in vars(module).values():
            if hasattr(fn, "needs") and fn.__module__ == module.__name__:
                yield fn


if __name__ == "__main__":
    for fn in all_kept(sys.argv[1:]):
        print(elsewhere.record(fn))
