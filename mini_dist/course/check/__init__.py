"""Exercises that judge structure: `check.NAME(your_function)`.

    check.ring_all_reduce(my_all_reduce)      # values, bytes, rounds, route; and a hint if wrong
    check.ring_all_reduce.hint(1)             # then hint(2), skeleton(), solution()

With MINI_DIST_STRICT=1 in the environment, as graders set it, an answer that is not right, or not
the learner's own, raises CheckFailed.
"""

import importlib
from pathlib import Path

from .engine import CheckFailed, Exercise, Verdict

_FILES = (
    "all_axes",
    "asynchronous",
    "at_scale",
    "busy",
    "capstone",
    "clinic",
    "collectives",
    "compression",
    "context_parallel",
    "data_parallel",
    "elastic",
    "expert_parallel",
    "fast_data_parallel",
    "frameworks",
    "hosts",
    "offload",
    "one_device",
    "pipeline",
    "planner",
    "scaling",
    "sequence_parallel",
    "serving",
    "sharding",
    "sick_twice",
    "slow_clinic",
    "tensor_parallel",
    "wrappers",
    "zero",
)  # each has exercises of one lesson or of two

__all__ = ["CheckFailed", "Exercise", "Verdict"]


def exercises() -> dict[str, Exercise]:
    """Return all exercises of the course, by name."""
    modules = [importlib.import_module(f".{name}", __name__) for name in _FILES]
    return {exercise.name: exercise for module in modules for exercise in module.EXERCISES}


def __getattr__(name: str) -> Exercise:
    # `from . import answers` also asks here; to find a file, no exercise has to be imported.
    if not name.startswith("_") and not (Path(__file__).parent / f"{name}.py").exists():
        found = exercises()
        if name in found:
            return found[name]
        raise AttributeError(f"no exercise is called {name!r}; there are {', '.join(found)}")
    raise AttributeError(name)


def __dir__() -> list[str]:
    return sorted([*__all__, *exercises()])
