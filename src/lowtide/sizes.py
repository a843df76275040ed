"""Sizes in bytes, as people write them: "64MiB" <-> 67108864.

Powers of 1000 are KB, MB, GB, TB; powers of 1024 are KiB, MiB, GiB, TiB. A bare "64M" is refused,
because it means either. Everything is computed exactly, with fractions, and rounded down to a byte.
"""

from __future__ import annotations

import operator
import re
from fractions import Fraction

from lowtide.errors import InputError

_UNITS = {"b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_SPELLED = {"kb": "KB", "mb": "MB", "gb": "GB", "tb": "TB", "kib": "KiB", "mib": "MiB", "gib": "GiB", "tib": "TiB"}
_NUMBER = re.compile(r"\s*([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)?(\.[0-9]+)?\s*([a-zA-Z]+|%)?\s*", re.ASCII)

# Bytes. A percentage is checked before its whole is known; of a whole this large, every percentage that people write
# comes to more than a byte.
_ANY_WHOLE = 2**40
ACCEPTED = 'an int of bytes (67108864), or a string such as "67108864", "64MiB", "1.5 GB" (1 GB = 10^9, 1 GiB = 2^30)'
ACCEPTED_BUDGET = f'{ACCEPTED}, or "25%"'


def parse_size(size: int | str, name: str = "size") -> int:
    """The bytes that `size` stands for, at least one; error messages call the argument `name`."""
    number, unit = _read(size, name, ACCEPTED)
    if unit == "%":
        raise InputError(f"{name}={size!r} is a share of nothing here; give {ACCEPTED}")
    return _at_least_one(number * _UNITS[unit or "b"], size, name, ACCEPTED)


def parse_budget(budget: int | str, whole: int, name: str = "budget") -> int:
    """The bytes that `budget` stands for, at least one; a percentage is taken of `whole` bytes."""
    number, unit = _read(budget, name, ACCEPTED_BUDGET)
    if unit != "%":
        return _at_least_one(number * _UNITS[unit or "b"], budget, name, ACCEPTED_BUDGET)
    if not 0 < number <= 100:
        raise InputError(f"{name}={budget!r} must be more than 0% and at most 100%")
    return _at_least_one(number * whole / 100, budget, name, ACCEPTED_BUDGET)


def check_budget(budget: int | str, name: str = "budget") -> None:
    """Refuse what `parse_budget` would refuse, before the whole of a percentage is known."""
    parse_budget(budget, _ANY_WHOLE, name)


def format_size(size: int) -> str:
    """The size in the largest binary unit that leaves at least 1, to four digits: 67108864 -> "64 MiB"."""
    for unit, factor in (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if size >= factor:
            return f"{size / factor:,.4g} {unit}" if size < 1000 * factor else f"{size / factor:,.0f} {unit}"
    return f"{size:,} B"


def _read(size: int | str, name: str, accepted: str) -> tuple[Fraction, str]:
    """The number and the unit in lower case ("" when there is none)."""
    if isinstance(size, bool):
        raise InputError(f"{name}={size!r} is a boolean; give {accepted}")
    if isinstance(size, str):
        return _read_text(size, name, accepted)
    try:
        whole = operator.index(size)
    except TypeError:
        raise InputError(f"{name}={size!r} is a {type(size).__name__}; give {accepted}") from None
    if whole.bit_length() > 256:
        raise InputError(f"{name} is a number of {whole.bit_length():,} bits; give {accepted}")
    return Fraction(whole), ""


def _read_text(size: str, name: str, accepted: str) -> tuple[Fraction, str]:
    match = _NUMBER.fullmatch(size) if len(size) <= 80 else None
    if match is None or (match[1] is None and match[2] is None):
        raise InputError(f"{name}={size[:80]!r} is not a size; give {accepted}")
    unit = (match[3] or "").lower()
    if unit and unit != "%" and unit not in _UNITS:
        known = ", ".join(["B", *_SPELLED.values()])
        raise InputError(f"{name}={size!r}: the unit {match[3]!r} is not one of {known}; give {accepted}")
    number = Fraction((match[1] or "0").replace(",", "") + (match[2] or ""))
    if unit in ("", "b") and number.denominator != 1:
        raise InputError(f"{name}={size!r} is not a whole number of bytes; give {accepted}")
    return number, unit


def _at_least_one(exact: Fraction, given: int | str, name: str, accepted: str) -> int:
    size = exact.numerator // exact.denominator
    if size < 1:
        raise InputError(f"{name}={given!r} comes to less than one byte; give {accepted}")
    return size
