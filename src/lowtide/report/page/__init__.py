"""The report as one self-contained HTML file: the assets in this folder, filled in with a story as compressed JSON.

In: a `Story`. Out: a page that loads nothing from anywhere. `data` returns what the scripts read, and `model.py` the
part of it that only a whole model has; there is a script for each panel. Numbers that are read rather than drawn are
formatted here, so that the page writes them like the rest of the library. It may import the rest of the report, but no
other medium.
"""

from __future__ import annotations

import base64
import html
import json
import os
import platform
import zlib
from collections.abc import Iterable
from datetime import datetime
from functools import singledispatch
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.actions import Tier
from lowtide.errors import InputError
from lowtide.plan import Plan, Receipt
from lowtide.report.content import HasReceipt, Story, View, measured_peak, tell
from lowtide.report.decisions import StepRow
from lowtide.report.kinds import ModelKind, PlanKind, Progress, kind_of
from lowtide.report.moments import Moment
from lowtide.report.page.model import Column, model_data
from lowtide.report.snippets import PLAN_FILE
from lowtide.report.timeline import Raster, Run, Stored, Timeline
from lowtide.report.usual_tools import Mark
from lowtide.report.wording import budget_of
from lowtide.sizes import format_size
from lowtide.version import __version__

TIME_TICKS = 100_000  # of the whole time; times in the data are whole numbers of ticks, which take few digits
_SCRIPTS = ("tools.js", "verdict.js", "frontier.js", "schedule.js", "memory.js", "table.js", "model.js", "main.js")
_PACKAGES = ("torch", "jax", "brainstate", "numpy")

_COLUMNS = (
    Column("name", "step", "text"),
    Column("steps", "steps", "number"),
    Column("state", "state", "bytes"),
    Column("tape", "tape", "bytes"),
    Column("time", "forward, of plain", "number"),
    Column("again", "run again", "number"),
    Column("stored", "states stored", "number"),
    Column("form", "tape form", "text"),
    Column("decision", "decision", "text"),
    Column("why", "why", "text"),
)


def write(
    plan: Plan,
    receipt: Receipt | HasReceipt | str | os.PathLike[str] | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    measured: Iterable[Mark] = (),
    points: int = 32,
    progress: Progress | None = None,
) -> Path:
    """Write the report page of a plan, and of a run of it, to `path`; it opens offline in any browser.

    Args:
        plan: the plan that the page is about.
        receipt: a run's `Receipt`, or what `record()` returned; may be left out, `write(plan, "plan.html")`.
        path: the file to write; "plan.html" if left out.
        measured: more measured points for the frontier, `Mark("torch's checkpoint", peak=..., time_factor=...)`.
        points: the number of budgets on the slider, besides the plan's own; each is planned and played on paper.
        progress: called with the number of finished plans and their total.

    Returns:
        The path of the page.
    """
    if isinstance(receipt, str | os.PathLike):
        if path is not None:
            raise InputError(f"two paths were given, {receipt!s} and {path!s}; give a plan, a receipt and one path")
        target, taken = Path(receipt), None
    else:
        target, taken = Path("plan.html" if path is None else path), receipt
    if target.is_dir():
        raise InputError(f"path={str(target)!r} is a folder; give the name of the page's file")
    story = tell(plan, taken, measured=measured, points=points, progress=progress)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(story), encoding="utf-8")
    return target


def page(story: Story) -> str:
    """The page as HTML text."""
    packed = base64.b64encode(zlib.compress(json.dumps(data(story), allow_nan=False).encode(), 9)).decode()
    assets = files(__name__)
    parts = {
        "<!--TITLE-->": html.escape(f"Lowtide: {story.kind.title}"),
        "/*CSS*/": (assets / "page.css").read_text(encoding="utf-8"),
        "/*JS*/": "\n".join((assets / name).read_text(encoding="utf-8") for name in _SCRIPTS),
        "<!--DATA-->": f'<script id="data" type="text/plain">{packed}</script>',
    }
    text = (assets / "page.html").read_text(encoding="utf-8")
    for place, part in parts.items():
        text = text.replace(place, part)
    return text


def data(story: Story) -> dict[str, Any]:
    """The data that the page's scripts read."""
    plan, chain = story.plan, story.plan.chain
    shared = {
        "title": story.kind.title,
        "lowtide": __version__,
        "versions": [["Python", platform.python_version()], *_versions()],
        "written": f"{datetime.now():%Y-%m-%d %H:%M}",
        "chain": {
            "length": len(chain),
            "equal": chain.is_equal,
            "parameters": chain.parameters,
            "gradients": chain.gradients,
        },
        "plain": {"memory": story.kind.whole, "seconds": chain.plain_seconds, "name": story.kind.plain_name},
        "knob": str(plan.knob),
        "limit": {"name": story.kind.limit_name, "label": story.kind.limit_label},
        "budget": budget_of(plan),
        "least": story.least,
        "fits": story.fits,
        "verdict": story.verdict,
        "frontier": [_mark(mark) for mark in story.frontier],
        "peers": [_mark(mark) for mark in story.peers],
        "measured": [_mark(mark) for mark in story.measured],
        "receipt": None if story.receipt is None else _receipt(story, story.receipt),
    }
    return shared | _of_kind(story.kind, story)


@singledispatch
def _of_kind(_: PlanKind, story: Story) -> dict[str, Any]:
    """The data that differs by kind of plan: for a loop or layers, every view with its timeline."""
    return {
        "chosen": story.chosen,
        "columns": [column._asdict() for column in _COLUMNS],
        "views": [_view(view, own=k == story.chosen) for k, view in enumerate(story.views)],
        "model": None,
    }


_of_kind.register(ModelKind, model_data)


def _versions() -> list[list[str]]:
    found = []
    for package in _PACKAGES:
        try:
            found.append([package, version(package)])
        except PackageNotFoundError:  # a front end that is not installed
            continue
    return found


def _mark(mark: Mark) -> dict[str, Any]:
    return {
        "name": mark.name,
        "peak": mark.peak,
        "factor": mark.time_factor,
        "note": mark.note,
        "isTimed": mark.is_timed,
    }


def _receipt(story: Story, receipt: Receipt) -> dict[str, Any]:
    peak = measured_peak(story.plan, receipt)
    return {
        "measured": peak,
        "curve": story.curve,
        "text": None if peak is None else format_size(peak),
        "measuring": story.measuring,
        "lines": list(receipt.lines()),
    }


def _view(view: View, *, own: bool) -> dict[str, Any]:
    plan, bill = view.plan, view.plan.bill
    budget = budget_of(plan)
    return {
        "name": str(plan.knob),
        "budget": budget,
        "own": own,
        "peak": bill.peak_memory,
        "disk": bill.peak_disk,
        "snapshots": bill.peak_snapshots,
        "plainRuns": bill.plain_runs,
        "runsPerStep": plan.runs_per_step,
        "factor": plan.time_factor,
        "seconds": bill.seconds,
        "planner": plan.planner,
        "text": {
            "peak": format_size(bill.peak_memory),
            "share": f"{bill.peak_memory / plan.chain.plain_tape:.3%} of plain",
            "budget": "none" if budget is None else format_size(budget),
            "snapshots": f"{bill.peak_snapshots:,}",
            "runs": f"{bill.plain_runs:,} plain, {bill.taping_runs:,} taping",
            "runsPerStep": f"{plan.runs_per_step:.4g}",
            "factor": f"{plan.time_factor:.3f}x",
            "disk": format_size(bill.peak_disk),
        },
        "lines": list(plan.lines()),
        # A plan file has only the plan itself, so views for other budgets have no such snippet.
        "code": [snippet for snippet in kind_of(plan).snippets() if own or snippet.name != PLAN_FILE],
        "timeline": _timeline(view.timeline),
        "rows": [_cells(row, plan) for row in view.rows],
    }


def _cells(row: StepRow, plan: Plan) -> list[Any]:
    whole = plan.chain.plain_seconds
    return [
        row.name,
        row.stop - row.start,
        row.state,
        row.tape,
        _digits(row.seconds / whole) if whole else 0,
        _digits(row.again),
        row.stored,
        row.form,
        row.decision,
        row.why,
    ]


def _digits(number: float) -> float:
    return float(f"{number:.4g}")


def _timeline(timeline: Timeline) -> dict[str, Any]:
    memory = timeline.memory
    at = next(k for k, moment in enumerate(memory) if moment.start <= timeline.worst.start < moment.stop)
    return {
        "seconds": timeline.seconds,
        "ticks": TIME_TICKS,
        "runs": timeline.runs and _runs(timeline, timeline.runs),
        "stored": None if timeline.stored is None else _stored(timeline, timeline.stored),
        "raster": timeline.raster and _raster(timeline.raster),
        "memory": {
            **_ticks(timeline, memory),
            "snapshots": [moment.snapshots for moment in memory],
            "tape": [moment.tape for moment in memory],
            "cotangent": [moment.cotangent for moment in memory],
            "working": [moment.working for moment in memory],
            "what": [moment.what for moment in memory],
        },
        "worst": at,
    }


def _ticks(timeline: Timeline, spans: Iterable[Run | Stored | Moment]) -> dict[str, list[int]]:
    """When each span begins and ends, in whole ticks of the time axis."""
    rate, both = TIME_TICKS / timeline.seconds, [(span.start, span.stop) for span in spans]
    return {"start": [round(start * rate) for start, _ in both], "stop": [round(stop * rate) for _, stop in both]}


def _runs(timeline: Timeline, runs: tuple[Run, ...]) -> dict[str, Any]:
    return {"kind": [run.kind for run in runs], "step": [run.step for run in runs], **_ticks(timeline, runs)}


def _stored(timeline: Timeline, stored: tuple[Stored, ...]) -> dict[str, Any]:
    on_disk = [int(snapshot.tier is Tier.DISK) for snapshot in stored]
    return {"step": [snapshot.step for snapshot in stored], "disk": on_disk, **_ticks(timeline, stored)}


def _raster(raster: Raster) -> dict[str, Any]:
    return {
        "columns": raster.columns,
        "rows": raster.rows,
        "share": [_bytes(plane) for plane in raster.share],
        "memory": _bytes(raster.memory),
        "disk": _bytes(raster.disk),
    }


def _bytes(plane: NDArray[np.uint8]) -> str:
    return base64.b64encode(plane.tobytes()).decode()
