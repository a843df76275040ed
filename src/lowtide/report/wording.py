"""Text that every form of a report prints: numbers for people, and names from elsewhere, made safe to print."""

from __future__ import annotations

import unicodedata

from lowtide.plan import Plan
from lowtide.report.usual_tools import Mark
from lowtide.sizes import format_size, parse_size


def clean(text: str) -> str:
    """The text on one line, without control characters: no escapes, no direction marks, no lone surrogates."""
    spaced = " ".join(text.split())
    return "".join(letter for letter in spaced if not unicodedata.category(letter).startswith("C"))


def cut(text: str, most: int) -> str:
    """The text in at most `most` characters, with three dots in place of what was cut off."""
    return text if len(text) <= most else text[: most - 3] + "..."


def figure_of(number: float) -> str:
    """A number to about four digits, never in exponent notation."""
    return f"{number:,.4g}" if number < 1_000 else f"{number:,.0f}"


def times_of(factor: float) -> str:
    """A multiple of the plain run's time, as text."""
    return f"{factor:.3f}x" if factor < 100 else f"{factor:,.0f}x"


def share_of(part: float, whole: float) -> str:
    """A percentage to three significant digits, however small."""
    return f"{figure_of(float(f'{100 * part / whole:.3g}'))}%"


def size_at_least(size: int) -> str:
    """The size in four digits, rounded up, so that a budget of the written size is enough."""
    written = format_size(size)
    if parse_size(written) >= size:
        return written
    unit = next(unit for unit in (1024**4, 1024**3, 1024**2, 1024) if size >= unit)
    return format_size(size + unit // 10 ** max(0, 4 - len(str(size // unit))))


def measured_name(mark: Mark) -> str:
    """The name of a measured point, with the word "measured" in it."""
    return mark.name if mark.name == "measured" else f"{mark.name}, measured"


def budget_of(plan: Plan) -> int | None:
    """The budget or peak that the plan was made for, in bytes; None if it was made for another option."""
    return plan.knob.value if plan.knob.in_bytes else None
