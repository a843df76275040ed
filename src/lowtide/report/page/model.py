"""What the page needs to show a whole model at every choice of its frontier: its menus once, and each choice.

A frontier may have thousands of choices, so their tables and pictures are made in the browser, when they are shown.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lowtide.chain import Chain, Role
from lowtide.forms import FormKind
from lowtide.plan import FrontierPoint, Plan
from lowtide.planners.block_text import decision, fixed_parts, kind, where, why
from lowtide.planners.blocks import Blocks, to_ask
from lowtide.report.content import Story
from lowtide.report.snippets import for_model, snippets
from lowtide.report.wording import size_at_least


class Column(NamedTuple):
    """What it is called in the scripts and on the page, and whether it holds text, a number, bytes or a time."""

    key: str
    label: str
    kind: str


MOST_CELLS = 2_000_000  # blocks of all choices; of more, some are left out
PEAK = "(PEAK)"  # where the code has the peak, which no name and no number has in it

_FIXED = ("parameters", "optimizer", "inputs")
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


def model_data(story: Story) -> dict[str, Any]:
    """What is different in the page's data if the plan is a model's; empty if it is not."""
    plan, schedule = story.plan, story.kind.model
    if schedule is None:
        return {}
    chain = plan.chain
    points, chosen, left_out = _points(plan, schedule, alone=not story.least)
    fixed = zip(_FIXED, fixed_parts(chain, schedule), strict=True)
    return {
        "chosen": chosen,
        "columns": [column._asdict() | {"unit": schedule.unit} for column in _COLUMNS],
        "model": {
            "margin": schedule.margin,
            "unit": schedule.unit,
            "kinds": list(FormKind),
            "fixed": [[key, name, size] for key, (name, size) in fixed],
            "steps": [_step(chain, k, schedule.unit) for k in range(len(chain))],
            "blocks": chain.blocks(),
            "points": [
                [point.peak, point.extra, _letters(point.options), asked, size_at_least(asked)]
                for point, asked in ((point, to_ask(plan, point.peak)) for point in points)
            ],
            "leftOut": left_out,
            "planner": plan.planner,
            "lines": list(plan.lines()),
            "code": snippets(plan),
            "otherCode": for_model(schedule, f", peak={PEAK}"),
            "place": PEAK,
        },
    }


def _points(plan: Plan, schedule: Blocks, *, alone: bool) -> tuple[list[FrontierPoint], int, int]:
    """The choices from the least peak on, the plan's own among them, its place, and how many were left out."""
    own = FrontierPoint(plan.bill.peak_memory, plan.bill.seconds - plan.chain.plain_seconds, schedule.options)
    others = [] if alone else [point for point in plan.frontier if point.options != own.options]
    every = -(-len(others) * len(plan.chain) // MOST_CELLS)
    shown = [point for k, point in enumerate(reversed(others)) if k % max(1, every) == 0]  # the least among them
    points = sorted([own, *shown], key=lambda point: (point.peak, -point.extra))
    return points, points.index(own), len(others) - len(shown)


def _step(chain: Chain, k: int, unit: str) -> dict[str, Any]:
    step = chain[k]
    return {
        "name": chain.names[k].encode(errors="replace").decode() if chain.names else chain.name(k),
        "where": where(chain, k),
        "forward": step.forward,
        "backward": step.backward,
        "taping": step.working.tape,
        "menu": [
            {
                "name": decision(chain, k, option),
                "kind": kind(chain, k, option),
                "tape": entry.tape,
                "extra": entry.extra,
                "pulling": pulling,
                "why": why(chain, k, option, unit) if chain.role(k) is Role.BLOCK else "",
            }
            for option, (entry, pulling) in enumerate(zip(step.menu, step.pulling, strict=True))
        ],
    }


def _letters(options: tuple[int, ...]) -> str:
    """The entries as one letter each, "0" for the first."""
    return "".join(chr(ord("0") + option) for option in options)
