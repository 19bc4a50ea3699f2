"""Check an answer before it runs: its arguments, and names with which it could see the judge."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import CodeType

from .ways import Complaint

# With these names a function sees the frames around it, or switches off what notes its calls.
LOOKS_AROUND = {"_getframe", "currentframe", "f_back", "f_locals", "setprofile", "settrace"}


def mistake_of_form(fn: Callable, solution: Callable) -> str:
    """Return the hint for a function that cannot be an answer; "" if it can. It must accept all
    arguments of `solution` that have no default."""
    parameters = inspect.signature(inspect.unwrap(solution)).parameters.values()
    names = [p.name for p in parameters if p.default is p.empty]
    if not callable(fn):
        return f"{fn!r} is no function: give the function itself, without parentheses."
    try:
        inspect.signature(fn, follow_wrapped=False).bind(*names)
    except TypeError as error:
        return f"Your function is called with ({', '.join(names)}): {error}."
    except ValueError:  # it has no signature
        pass
    return ""


def stays_inside(fn: Callable) -> None:
    """Raise Complaint if a function uses a name of LOOKS_AROUND. For a grader this runs on a rank,
    because a grader opens the learner's function nowhere else."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    if found := sorted(LOOKS_AROUND & {*(words_in(code) if code else ())}):
        raise Complaint(
            f"Your function uses {found[0]}, which lets it see the judge at work or escape it. "
            "No answer needs that: leave it out."
        )


def words_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from words_in(each)
