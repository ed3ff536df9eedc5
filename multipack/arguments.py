"""Checks that the arguments of many parts have in common."""

from __future__ import annotations

import operator
from typing import Any


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """`value` as Python's int, of whatever integer type it is: numpy's would overflow in sums and stay out of
    JSON.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is below `least`.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a whole number, not {value!r}.")
    number = operator.index(value)
    if least is not None and number < least:
        raise ValueError(f"{name} is {number}, below {least}.")
    return number


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Refuse a value that is none of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} {value!r} is none of {', '.join(map(repr, choices))}.")
