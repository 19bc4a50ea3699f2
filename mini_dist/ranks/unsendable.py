"""Why something cannot be sent to a rank: the variable that holds it, and what to do instead."""

from __future__ import annotations

import dis
import functools
import io
import socket
import types
from collections.abc import Callable, Iterator
from contextlib import suppress

DEPTH = 12  # of variables in variables
GENERAL = (
    "Numbers, strings, tensors, Modules, functions and containers of them can; open files, locks, "
    "generators, sockets and process groups cannot."
)
OTHERWISE = "Make it inside the function, or pass what it is made from."


def blame(obj, pickled: Callable) -> str:
    """Explain in one or two sentences an object that `pickled` refuses."""
    names, part = [], obj
    for _ in range(DEPTH):
        if advice(part) is not None:  # its parts would explain less
            break
        found = next(((n, p) for n, p in parts(part) if not goes(p, pickled)), None)
        if found is None:
            break
        names += [found[0]] if found[0] else []
        part = found[1]
    if not names:
        return f"{GENERAL} {advice(part) or ''}".strip()
    kind = type(part)
    article = "an" if kind.__name__[0].lower() in "aeiou" else "a"
    of = "".join(f" of {name}" for name in reversed(names[:-1]))
    what = f"{article} {kind.__module__}.{kind.__name__}"
    return f"It is {names[-1]}{of}, {what}. {advice(part) or OTHERWISE}"


def goes(obj, pickled: Callable) -> bool:
    try:
        pickled(obj)
        return True
    except Exception:
        return False


def parts(obj) -> Iterator[tuple[str, object]]:
    """Yield what an object refers to and takes along, each with a reader's name for it."""
    with suppress(Exception):  # (objects may do anything when inspected)
        if isinstance(obj, types.FunctionType):
            for name, value in variables(obj):
                yield f"the variable {name!r}", value
            for value in obj.__defaults__ or ():
                yield "a default", value
        elif isinstance(obj, types.MethodType):
            yield f"the object whose method {obj.__name__!r} is", obj.__self__
        elif isinstance(obj, functools.partial):
            for value in (obj.func, *obj.args, *obj.keywords.values()):
                yield "", value
        elif isinstance(obj, dict):
            for name, value in obj.items():
                yield f"the entry {name!r}", value
        elif isinstance(obj, (list, tuple, set, frozenset)):
            for value in obj:
                yield "", value
        elif isinstance(obj, type):
            for value in vars(obj).values():
                yield "", value
        else:
            if type(obj).__module__ == "__main__":
                yield "", type(obj)
            for name, value in vars(obj).items():
                yield f"the attribute {name!r}", value


def variables(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Yield the variables in a function's cells, and the globals that it or an inner one names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with suppress(ValueError):  # it has no value yet
            yield name, cell.cell_contents
    codes = [function.__code__]
    for code in codes:
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        for step in dis.get_instructions(code):
            if "GLOBAL" in step.opname and step.argval in function.__globals__:
                yield step.argval, function.__globals__[step.argval]


def advice(obj) -> str | None:
    """Return what to do instead, for the kinds that learners try."""
    kind = type(obj)
    module = kind.__module__.partition(".")[0]
    owner = getattr(obj, "__self__", obj)  # get_ipython is a method of the shell
    if type(owner).__module__.partition(".")[0] in ("IPython", "ipykernel"):
        return (
            "It is what %magic and !command lines call, and a rank is no notebook: use "
            "time.perf_counter() for %time, subprocess.run(...) for !command."
        )
    if module in ("ipywidgets", "traitlets"):
        return "A widget lives in the notebook: pass its value."
    if kind.__name__ in ("lock", "RLock", "Condition", "Event", "Thread", "Queue"):
        return "It belongs to one process: make it inside the function, on each rank."
    if isinstance(obj, types.GeneratorType):
        return "A generator cannot be copied: pass a list, or make it inside the function."
    if isinstance(obj, types.CoroutineType):
        return "Calling an async function only makes one: in a plain function, asyncio.run runs it."
    if isinstance(obj, (io.IOBase, socket.socket)):
        return "Open files and sockets belong to one process: open it inside the function."
    return None
