"""Every exercise solved: what `.solution()` prints, pasted into a cell of its own."""

from collections.abc import Callable

from mini_dist import check

SLOW = {"missing_collective"}  # This search takes a second, and no rank needs it.


def paste(name: str) -> Callable:
    cell = {"__name__": "__main__"}  # Ranks get it by value, like a notebook's functions.
    exec(compile(check.exercises()[name].answer(), f"<the solution of {name}>", "exec"), cell)
    return cell[name]


globals().update({name: paste(name) for name in check.exercises() if name not in SLOW})


def __getattr__(name: str) -> Callable:
    if name not in SLOW:
        raise AttributeError(name)
    return globals().setdefault(name, paste(name))
