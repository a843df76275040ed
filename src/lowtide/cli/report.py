"""`lowtide report`: shows a plan, and the cost of a run of it, as text, as a page and as a figure."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lowtide import report
from lowtide.cli.files import check_file, make_room, read, read_plan, write, wrote
from lowtide.errors import InputError
from lowtide.plan import Plan, Receipt
from lowtide.report import Story, figures, terminal
from lowtide.report.page import page as report_page

EXAMPLE = """\b
Example:
  lowtide plan mymodule:make --budget 64MiB --save plan.json
  lowtide report plan.json --figure plan.png --open"""


def report_command(
    plan_file: Annotated[
        Path, typer.Argument(metavar="PLAN.json", help="What `lowtide plan --save` or plan.to_json() wrote.")
    ],
    receipt_file: Annotated[
        Path | None, typer.Option("--receipt", help="What a run did cost: what receipt.to_json() wrote.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="The page; beside the plan, with .html, if left out.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw a figure too: .png, .svg or .pdf.")] = None,
    text: Annotated[bool, typer.Option(help="Print the report, or only write the page.")] = True,
    points: Annotated[int, typer.Option(help="Budgets on the frontier; 0 for the plan alone.")] = 32,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Show a plan as text, as a page and as a figure.

    What it keeps, what it runs again, when memory peaks, what other budgets would cost, and the code to paste. The page
    is one file of HTML that loads nothing from elsewhere.
    """
    plan = read_plan(plan_file)
    receipt = (
        None
        if receipt_file is None
        else read(receipt_file, Receipt.from_json, "a receipt", "receipt.to_json() after a run")
    )
    page = plan_file.with_suffix(".html") if output is None else output
    taken = [path for path in (plan_file, receipt_file) if path is not None and path.resolve() == page.resolve()]
    if taken:
        raise InputError(f"the page would replace {taken[0]}, which it is made from; give another --output")
    check_file(page, "--output")
    figures.check_path(figure)
    check_file(figure, "--figure")
    story = tell(plan, receipt, points)
    if text:
        terminal.show(story, Console())
    write(page, report_page(story))
    if figure is not None:
        figures.figure(story, make_room(figure))
        wrote(figure)
    if open_page:
        webbrowser.open(page.resolve().as_uri())


def tell(plan: Plan, receipt: Receipt | None, points: int = 32) -> Story:
    """The story of a plan, with a progress bar on the terminal while the frontier is planned."""
    columns = (TextColumn("planning the frontier"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("frontier", total=points)
        return report.tell(
            plan,
            receipt,
            points=points,
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )
