"""What is seen of an answer before it runs: its arguments, and whether it looks at the judge."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType

from .watch import LIBRARY, within

# With these a function sees the frames around it, or switches off what notes its calls.
LOOKS_AROUND = {"_getframe", "currentframe", "f_back", "f_locals", "setprofile", "settrace"}


def mistake_of_form(fn: Callable, wanted: inspect.Signature) -> str:
    """The hint for a function that cannot be an answer; "" if it can. wanted: the signature of the
    library's function, which is called with all arguments that have no default."""
    names = [p.name for p in wanted.parameters.values() if p.default is p.empty]
    if not callable(fn):
        return f"{fn!r} is no function: give the function itself, without parentheses."
    try:
        inspect.signature(fn).bind(*names)
    except TypeError as error:
        return f"Your function is called with ({', '.join(names)}): {error}."
    except ValueError:  # it does not say what it takes
        pass
    if found := sorted(LOOKS_AROUND & {*words_of(fn, set())}):
        return (
            f"Your function uses {found[0]}, by which it could see the judge at work or escape it. "
            "No answer needs that: leave it out."
        )
    return ""


def words_of(value, seen: set[int]) -> Iterator[str]:
    """The names that a function, and the learner's functions that it reaches, look up."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, FunctionType) and not value.__code__.co_filename.startswith(LIBRARY):
        yield from words_in(value.__code__)
        for _, held in within(value):
            yield from words_of(held, seen)


def words_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from words_in(each)
