"""What another program gave where it was installed, for readers who do not have it.

A function that needs such a program is decorated with `kept`.  Its result is data that JSON has
words for, and the file kept/MODULE.NAME.json holds the result of the tested environment, with the
versions it came from.  `python tools/keep.py` writes these files anew.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).parent / "kept"
PACKAGES = {  # where names differ
    "megatron.core": "megatron-core",
    "torchft": "torchft-nightly",
    "torchtitan.trainer": "torchtitan",
}


def kept(*needs: str, how: str = "pip install -e '.[frameworks]'") -> Callable:
    """Decorate a function without arguments that imports the modules `needs`.

    Where all of them are installed, it runs.  Else it prints one line that names what is missing
    and `how` to get it, and returns what it returned in the tested environment.
    """

    def decorate(fn: Callable) -> Callable:
        @functools.wraps(fn)
        def run_or_recall():
            missing = [module for module in needs if not is_installed(module)]
            if not missing:
                return fn()
            record = json.loads(path_of(fn).read_text())
            versions = " and ".join(f"{name} {v}" for name, v in record["versions"].items())
            print(
                f"{missing[0]} is not installed here ({how}). "
                f"These results were saved from a run with {versions}."
            )
            return record["result"]

        run_or_recall.needs, run_or_recall.how = needs, how
        return run_or_recall

    return decorate


def record(fn: Callable) -> Path:
    """Run a function that is decorated with `kept`, and keep what it returns; the file's path."""
    packages = [PACKAGES.get(module, module) for module in ("torch", *fn.needs)]
    versions = {package: importlib.metadata.version(package) for package in packages}
    result = fn.__wrapped__()
    FOLDER.mkdir(exist_ok=True)
    path_of(fn).write_text(json.dumps({"versions": versions, "result": result}, indent=1) + "\n")
    return path_of(fn)


def path_of(fn: Callable) -> Path:
    return FOLDER / f"{fn.__module__.rsplit('.', 1)[-1]}.{fn.__name__}.json"


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of `megatron.core` where there is no `megatron`
        return False
