"""The report of a plan and a run: a page, text, notebook HTML and figures, from plans, bills and receipts alone.

import lowtide.report
lowtide.report.write(plan, receipt, "plan.html")
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lowtide.plan import Plan, Receipt
from lowtide.report.content import HasReceipt, Story, View, tell
from lowtide.report.page import write
from lowtide.report.usual_tools import Mark

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

__all__ = ["Mark", "Story", "View", "figure", "show", "tell", "write"]
__dir__ = sorted(__all__).copy  # what `dir` and tab completion show


def show(
    plan: Plan,
    receipt: Receipt | HasReceipt | None = None,
    *,
    measured: Iterable[Mark] = (),
    points: int = 12,
    console: Console | None = None,
) -> None:
    """Print the report in a terminal; needs rich (`lowtide[report]`). Arguments are those of `write`."""
    from lowtide.report import terminal  # rich is wanted by nobody who writes pages only

    terminal.show(tell(plan, receipt, measured=measured, points=points), console)


def figure(
    plan: Plan,
    receipt: Receipt | HasReceipt | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    measured: Iterable[Mark] = (),
    points: int = 32,
) -> Figure:
    """The report as a matplotlib figure, saved to `path` (.png, .svg or .pdf) if there is one.

    Needs matplotlib (`lowtide[report]`). Arguments are those of `write`.
    """
    from lowtide.report import figures  # matplotlib is wanted by nobody who writes pages only

    figures.check_path(path)  # before the wait
    return figures.figure(tell(plan, receipt, measured=measured, points=points), path)
