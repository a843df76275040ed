"""The page's data for a whole model at every choice of its frontier: its menus once, and each choice.

A frontier may have thousands of choices, so `model.js` makes a choice's table and picture only when it is shown.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lowtide.chain import Chain, Role
from lowtide.forms import FormKind
from lowtide.plan import FrontierPoint
from lowtide.planners import block_text
from lowtide.planners.blocks import to_ask
from lowtide.report.content import Story
from lowtide.report.kinds import ModelKind
from lowtide.report.wording import size_at_least


class Column(NamedTuple):
    """A column of a table: its name in the scripts, its label on the page, and its kind (text, number, bytes, time)."""

    key: str
    label: str
    kind: str


MOST_CELLS = 2_000_000  # choices times steps; if there would be more, some choices are left out
PEAK = "(PEAK)"  # placeholder for the peak in the code; in parentheses, so that it occurs nowhere else in it

_FIXED = ("parameters", "optimizer", "inputs")  # what the scripts call the parts of `ModelKind.fixed`
_COLUMNS = (
    Column("name", "block", "text"),
    Column("decision", "decision", "text"),  # beside the name, so that a narrow window shows it
    Column("tape", "tape if kept", "bytes"),
    Column("held", "tape held", "bytes"),
    Column("time", "time if kept", "time"),
    Column("extra", "extra time", "time"),
    Column("level", "level at its worst", "bytes"),
    Column("why", "why", "text"),
)


def model_data(kind: ModelKind, story: Story) -> dict[str, Any]:
    """The data that differs by kind of plan: for a whole model, its menus and choices. The scripts make all views."""
    plan, chain = kind.plan, kind.chain
    points, chosen, left_out = _points(kind, alone=not story.least)
    fixed = zip(_FIXED, kind.fixed, strict=True)
    return {
        "chosen": chosen,
        "columns": [column._asdict() | {"unit": kind.unit} for column in _COLUMNS],
        "views": [],
        "model": {
            "margin": kind.schedule.margin,
            "unit": kind.unit,
            "kinds": list(FormKind),
            "fixed": [[key, name, size] for key, (name, size) in fixed],
            "steps": [_step(chain, k, kind.unit) for k in range(len(chain))],
            "blocks": chain.blocks(),
            "points": [
                [point.peak, point.extra, _letters(point.options), asked, size_at_least(asked)]
                for point, asked in ((point, to_ask(plan, point.peak)) for point in points)
            ],
            "leftOut": left_out,
            "planner": plan.planner,
            "lines": list(plan.lines()),
            "code": kind.snippets(),
            "otherCode": kind.snippets_with(f", peak={PEAK}"),
            "place": PEAK,
        },
    }


def _points(kind: ModelKind, *, alone: bool) -> tuple[list[FrontierPoint], int, int]:
    """The choices from the least peak on, including the plan's own, its index, and how many were left out."""
    plan = kind.plan
    own = FrontierPoint(plan.bill.peak_memory, plan.bill.seconds - plan.chain.plain_seconds, kind.schedule.options)
    others = [] if alone else [point for point in plan.frontier if point.options != own.options]
    every = -(-len(others) * len(plan.chain) // MOST_CELLS)
    # Reversed, so that the least peak is always among those shown.
    shown = [point for k, point in enumerate(reversed(others)) if k % max(1, every) == 0]
    points = sorted([own, *shown], key=lambda point: (point.peak, -point.extra))
    return points, points.index(own), len(others) - len(shown)


def _step(chain: Chain, k: int, unit: str) -> dict[str, Any]:
    step = chain[k]
    return {
        "name": chain.names[k].encode(errors="replace").decode() if chain.names else chain.name(k),
        "where": block_text.where(chain, k),
        "forward": step.forward,
        "backward": step.backward,
        "taping": step.working.tape,
        "menu": [
            {
                "name": block_text.decision(chain, k, option),
                "kind": block_text.kind(chain, k, option),
                "tape": entry.tape,
                "extra": entry.extra,
                "pulling": pulling,
                "why": block_text.why(chain, k, option, unit) if chain.role(k) is Role.BLOCK else "",
            }
            for option, (entry, pulling) in enumerate(zip(step.menu, step.pulling, strict=True))
        ],
    }


def _letters(options: tuple[int, ...]) -> str:
    """The chosen entries as one character each: "0" for the first of a menu, and the characters after it for others."""
    return "".join(chr(ord("0") + option) for option in options)
