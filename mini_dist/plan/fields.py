"""What a field or an argument may hold: one sentence names it, its value, and what would do.

`@checks_kinds` above a public class or function refuses values of another kind than annotated: what
merely counts as true ("no", 1), a number that is infinite or a string. The functions below it are
for `__post_init__`, where a field has a smallest value or a few known ones.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import reprlib
from collections.abc import Callable
from numbers import Real

KINDS = {
    "bool": "True or False",
    "int": "a whole number: give an int",
    "float": "a finite number: give an int or a float",
    "str": "a string: give a str",
}


def checks_kinds(
    public=None, *, error: type[Exception] = ValueError, infinite: tuple[str, ...] = ()
):
    """Let a function, or the __init__ of a class, refuse arguments of another kind than annotated.

    Checks what is annotated as bool, int, float, str, or as a choice of these and None; defaults
    and other annotations are left alone. NumPy's integers become plain ones. `infinite` names the
    arguments that may be infinite. `error`: what is raised instead of ValueError.
    """
    if public is None:
        return functools.partial(checks_kinds, error=error, infinite=infinite)
    call = public.__init__ if isinstance(public, type) else public
    names, by_place, by_name, others = kinds_of(call)

    def of_its_kind(name: str, value, allowed: tuple[str, ...]):
        if not allowed or type(value).__name__ in allowed and type(value) is not float:
            return value
        return of_kind(name, value, allowed, error, name in infinite)

    @functools.wraps(call)
    def checking(*args, **kwargs):
        first = list(map(of_its_kind, names, args, by_place))
        named = {
            name: of_its_kind(name, value, by_name.get(name, others))
            for name, value in kwargs.items()
        }
        return call(*first, *args[len(first) :], **named)

    if isinstance(public, type):
        public.__init__ = checking
        return public
    return checking


def kinds_of(call: Callable) -> tuple[list, list, dict, tuple]:
    """The names of the parameters that take a place, the kinds of each of them, the kinds of those
    that may be given by name, and the kinds of `**others`."""
    names, by_place, by_name, others = [], [], {}, ()
    for parameter in inspect.signature(call).parameters.values():
        allowed = simple_kinds(parameter.annotation)
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
            by_place.append(allowed)
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            by_name[parameter.name] = allowed
        if parameter.kind is parameter.VAR_KEYWORD:
            others = allowed
    return names, by_place, by_name, others


def simple_kinds(annotation: object) -> tuple[str, ...]:
    """("int", "None") for `int | None`; nothing for an annotation with any other part."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    parts = tuple(part.strip() for part in text.split("|"))
    return parts if set(parts) <= {*KINDS, "None"} and parts != ("None",) else ()


def of_kind(name: str, value, allowed: tuple[str, ...], error=ValueError, infinite: bool = False):
    """The value, as a plain int if it is some other integer; raises `error` for another kind."""
    is_bool = isinstance(value, bool)
    if value is None and "None" in allowed or is_bool and "bool" in allowed:
        return value
    if isinstance(value, str) and "str" in allowed:
        return value
    if "int" in allowed and hasattr(value, "__index__") and not is_bool:
        try:
            return operator.index(value)
        except TypeError:  # a tensor of another kind
            pass
    if "float" in allowed and isinstance(value, Real) and not is_bool:
        # (math.isfinite cannot take an int that is too large for a float.)
        if infinite and value == value or -math.inf < value < math.inf:
            return value
    wanted = ", or ".join([KINDS[kind] for kind in allowed if kind != "None"])
    wanted += ", or None" if "None" in allowed else ""
    raise error(f"{name}={reprlib.repr(value)} is not {wanted}.")


def at_least(field: str, value: float, least: float, why: str = "") -> float:
    """The value; ValueError says in one sentence what would be right."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{field}={value!r} is no number: give {least:g} or more.")
    if value < least:
        because = f" ({why})" if why else ""
        raise ValueError(f"{field}={value!r} is too small{because}: give {least:g} or more.")
    return value


def whole(
    field: str, value, at_least: int = 1, why: str = "", error: type[Exception] = ValueError
) -> int:
    """Return a number of things as a plain int; raise `error` if it is no int or too small."""
    try:
        number = of_kind(field, value, ("int",))
    except ValueError:
        raise error(
            f"{field}={value!r} is not a whole number: give an int of {at_least} or more."
        ) from None
    if number < at_least:
        because = f" ({why})" if why else ""
        raise error(f"{field}={number} is too small{because}: give {at_least} or more.")
    return number


def whole_number(config, field: str, at_least: int):
    object.__setattr__(config, field, whole(field, getattr(config, field), at_least))


def true_or_false(config, field: str):
    of_kind(field, getattr(config, field), ("bool",))


def one_of(config, field: str, known: tuple):
    value = getattr(config, field)
    if isinstance(value, (bool, float)) or value not in known:  # True == 1 == 1.0
        raise ValueError(
            f"{field}={value!r} is not known: give one of "
            f"{', '.join(repr(name) for name in known)}."
        )


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` that is nearest to `wanted`; 1 always is one, so it is not far."""
    divisors = [d for d in range(1, min(number, 2 * wanted) + 1) if number % d == 0]
    return min(divisors, key=lambda divisor: abs(divisor - wanted))
