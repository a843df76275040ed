"""The words that every form of a report prints: numbers for people, and names from elsewhere made fit to print."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

from lowtide.plan import Plan
from lowtide.planners.block_words import BlockRow, format_time, levels, plain_of, rows, title
from lowtide.planners.blocks import Blocks
from lowtide.report.peers import Mark
from lowtide.sizes import format_size, parse_size


def clean(text: str) -> str:
    """The text on one line, without control characters: no escape, no turned direction, no half character."""
    spaced = " ".join(text.split())
    return "".join(letter for letter in spaced if not unicodedata.category(letter).startswith("C"))


def cut(text: str, most: int) -> str:
    """The text in at most so many characters, with dots where some were left out."""
    return text if len(text) <= most else text[: most - 3] + "..."


def figure_of(number: float) -> str:
    """A number to four digits, and never in powers of ten."""
    return f"{number:,.4g}" if number < 1_000 else f"{number:,.0f}"


def times_of(factor: float) -> str:
    """A multiple of the plain run's time."""
    return f"{factor:.3f}x" if factor < 100 else f"{factor:,.0f}x"


def share_of(part: float, whole: float) -> str:
    """A share to three digits, however small."""
    return f"{figure_of(float(f'{100 * part / whole:.3g}'))}%"


def size_at_least(size: int) -> str:
    """The size in four digits, rounded up: whoever asks for so much has enough."""
    written = format_size(size)
    if parse_size(written) >= size:
        return written
    unit = next(unit for unit in (1024**4, 1024**3, 1024**2, 1024) if size >= unit)
    return format_size(size + unit // 10 ** max(0, 4 - len(str(size // unit))))


def measured_name(mark: Mark) -> str:
    """The name of a measured point, which says that it was measured."""
    return mark.name if mark.name == "measured" else f"{mark.name}, measured"


def budget_of(plan: Plan) -> int | None:
    """The budget or the peak asked for in bytes, if that is the knob."""
    return plan.knob.value if plan.knob.name in ("budget", "peak") else None


def is_model(plan: Plan) -> bool:
    """Whether it is the plan of a whole model's blocks."""
    return isinstance(plan.schedule, Blocks)


def block_rows(plan: Plan) -> list[BlockRow]:
    """What the plan does with each block; empty if it is not a model's."""
    return rows(plan.chain, plan.schedule) if isinstance(plan.schedule, Blocks) else []


def time_of(plan: Plan, time: float) -> str:
    """A time of a model's plan, in the unit that its times are in."""
    return format_time(time, plan.schedule.unit if isinstance(plan.schedule, Blocks) else "s")


def limit_name(plan: Plan) -> str:
    """What the plan has to keep: a budget, or the peak of a whole model's training step."""
    return "peak" if is_model(plan) else "budget"


def plain_name(plan: Plan) -> str:
    """Whose time its own is a multiple of."""
    return plain_of(plan.chain) if is_model(plan) else "plain loop's"


def title_of(plan: Plan) -> str:
    """What the plan is for, in a few words."""
    return title(plan.chain) if is_model(plan) else str(plan.chain)


def whole_of(plan: Plan) -> int:
    """What the plan's bytes are a share of: all tapes, or a model's peak with all blocks kept."""
    return max(levels(plan.chain, (0,) * len(plan.chain))) if is_model(plan) else plan.chain.plain_tape


def limit_label(plan: Plan) -> str:
    """How its line is called in pictures."""
    return "asked for" if is_model(plan) else "budget"


def plan_lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """The plan's own lines, and what is held besides."""
    yield from plan.lines()
    chain = plan.chain
    if (chain.parameters or chain.gradients) and not is_model(plan):
        held = f"parameters {format_size(chain.parameters)}, gradients {format_size(chain.gradients)}"
        yield "besides", f"{held}: held with or without a plan, in no budget"
