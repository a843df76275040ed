"""The report of a plan and of a run of it: a page, text, notebook HTML and figures.

    import lowtide.report
    lowtide.report.write(plan, receipt, "plan.html")

In: a plan and the receipt of a run of it, as values. Out: what people read: a file, text, HTML or a figure.

    kinds.py                      what differs between a loop or layers and a whole model, and which of them a plan is
    usual_tools.py                what other tools would do with the same chain, on paper
    moments.py, timeline.py       the plan over time: played on paper, and what memory holds
    decisions.py                  what happens to each step, and why
    content.py                    all of that in one value, the `Story` that every medium shows
    wording.py, drawing.py, snippets.py   words, colours and code that the media share
    page/, terminal.py, notebook.py, figures.py   the media

It decides nothing about a plan, measures nothing and knows no framework: it may import the core and the planners. Only
`terminal` imports rich and only `figures` imports matplotlib, and both are imported only when they are used.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lowtide.packages import needed_for
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
    with needed_for("report.show"):
        from lowtide.report import terminal  # imported here, because writing pages does not need rich

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
    from lowtide.report import figures  # imported here, because writing pages does not need matplotlib

    figures.check_path(path)  # before planning, which may take long
    return figures.figure(tell(plan, receipt, measured=measured, points=points), path)
