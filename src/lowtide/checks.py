"""Checks of what users pass in: whole numbers, seconds, functions, and that at most one option is given."""

from __future__ import annotations

import operator
from collections.abc import Mapping

from lowtide.errors import FunctionError, InputError

# A larger number is taken for a mistake in its unit.
MOST_BYTES = 2**48  # of one state, tape or working set
MOST_STEPS = 2**40
MOST_TOTAL = 2**200  # bytes or counts summed over a chain, and options that may be given generously


def whole_number(value: int, name: str, *, least: int, most: int | None = None) -> int:
    """`value` as an int, refused unless it is a whole number from `least` to `most`."""
    if isinstance(value, bool):
        raise InputError(f"{name}={value!r} is a boolean; give a whole number of at least {least:,}")
    try:
        number = operator.index(value)
    except TypeError:
        raise InputError(
            f"{name}={value!r} is a {type(value).__name__}; give a whole number of at least {least:,}"
        ) from None
    if number.bit_length() > 256:
        raise InputError(f"{name} is a number of {number.bit_length():,} bits; give one that fits a computer")
    if number < least:
        raise InputError(f"{name}={number:,} is too small; give a whole number of at least {least:,}")
    if most is not None and number > most:
        raise InputError(f"{name}={number:,} is too large; give a whole number of at most {most:,}")
    return number


def seconds(value: float, name: str) -> float:
    """`value` as a float, refused unless it is finite and at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{name}={value!r} is a {type(value).__name__}; give seconds, 0 or more")
    if not 0 <= value < 1e100:
        raise InputError(f"{name} is not a time; give seconds, from 0 to 1e100")
    return float(value)


def keep_whole(value: object, field_name: str, *, least: int, most: int = MOST_BYTES, label: str = "") -> None:
    """Check a field of a frozen value and store it as an int: numpy's integers hash alike, but JSON refuses them."""
    number = whole_number(getattr(value, field_name), label or field_name, least=least, most=most)
    object.__setattr__(value, field_name, number)


def keep_seconds(value: object, field_name: str, *, label: str = "") -> None:
    """Check a field of seconds of a frozen value and store it as a float."""
    object.__setattr__(value, field_name, seconds(getattr(value, field_name), label or field_name))


def function(value: object, name: str) -> None:
    """Refuse a value that cannot be called."""
    if not callable(value):
        raise FunctionError(f"{name}={value!r} is a {type(value).__name__}, which cannot be called; give a function")


def one_knob(given: Mapping[str, object]) -> None:
    """Refuse more than one of these options; None stands for an option that was not given."""
    turned = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    if len(turned) > 1:
        raise InputError(f"{' and '.join(turned)} are two knobs; give one of {', '.join(given)}, or none")
