"""Run what needs other frameworks, and store the results for readers who do not have them.

    python tools/keep.py                     all of mini_dist/course/elsewhere
    python tools/keep.py in_deepspeed        one of its modules
    python tools/keep.py in_deepspeed.runs   one function

In an environment with `pip install -e '.[frameworks]'`, and in_torchtitan.exports in the one of
`make torchtitan`; what is not installed there stays as it is. Times are kept, too, so nothing else
should run meanwhile. tests/course/frameworks compares what is kept with a run there.
"""

import importlib
import sys
from pathlib import Path

from mini_dist.course import elsewhere
from mini_dist.course.elsewhere.kept import is_installed

FOLDER = Path(elsewhere.__file__).parent
HEAD = ("__init__", "kept")  # no framework is run by these


def all_kept(names=()):
    """The functions decorated with `kept`, of all of mini_dist/course/elsewhere or those named, as
    a module or as MODULE.FUNCTION."""
    for stem in sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in HEAD):
        module = importlib.import_module(f"mini_dist.course.elsewhere.{stem}")
        for name, fn in vars(module).items():
            named = not names or stem in names or f"{stem}.{name}" in names
            if named and hasattr(fn, "needs") and fn.__module__ == module.__name__:
                yield fn


if __name__ == "__main__":
    chosen = list(all_kept(sys.argv[1:]))
    if not chosen:
        sys.exit(
            f"nothing is kept of {' or '.join(sys.argv[1:])}: see mini_dist/course/elsewhere/kept"
        )
    for fn in chosen:
        missing = [module for module in fn.needs if not is_installed(module)]
        said = f"{missing[0]} is not installed here ({fn.how}): kept as it was" if missing else ""
        print(f"{fn.__module__}.{fn.__name__}:", said or elsewhere.record(fn), flush=True)
