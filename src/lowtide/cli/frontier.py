"""The memory-time frontier on the terminal: a line for each of a few budgets, or of a few peaks of a model."""

from __future__ import annotations

from collections.abc import Iterable

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lowtide.chain import Chain, Disk
from lowtide.errors import InputError
from lowtide.plan import Plan
from lowtide.planners.frontier import frontier
from lowtide.report.kinds import kind_of


def frontier_plans(what: Plan | Chain, points: int, disk: Disk | None) -> list[Plan]:
    """Plans of a chain for at most `points` budgets, or of a plan's own chain for other limits of its kind."""
    if disk is not None and isinstance(what, Plan) and what.rooms:
        raise InputError("a compiled loop keeps its snapshots in memory; leave out --disk-write and --disk-read")
    plans = frontier(what, points, disk) if isinstance(what, Chain) else kind_of(what).plans(points, disk)
    return _with_bar(plans, points)


def _with_bar(plans: Iterable[Plan], points: int) -> list[Plan]:
    console = Console(stderr=True)
    return list(track(plans, "planning", points, console=console, transient=True, disable=not console.is_terminal))


def print_frontier(plans: list[Plan], as_json: bool) -> None:
    """Print several plans of one chain, as a table or as JSON."""
    if as_json:
        typer.echo("[" + ",\n".join(made.to_json() for made in plans) + "]")
        return
    kinds = [kind_of(plan) for plan in plans]
    table = Table(*kinds[0].summary_titles, title=kinds[0].title)
    for kind in kinds:
        table.add_row(*kind.summary())
    Console().print(table)
