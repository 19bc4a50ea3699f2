"""What a field of a config may hold: one sentence names the field, its value, and what would do."""

from __future__ import annotations

import operator


def whole_number(config, field: str, at_least: int):
    value = getattr(config, field)
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ValueError(
            f"{field}={value!r} is not a whole number: give an int of {at_least} or more."
        ) from None
    if number < at_least:
        raise ValueError(f"{field}={number} is too small: give {at_least} or more.")
    object.__setattr__(config, field, number)  # numpy's integers become plain ones


def true_or_false(config, field: str):
    if not isinstance(getattr(config, field), bool):
        raise ValueError(f"{field}={getattr(config, field)!r} is not True or False.")


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
