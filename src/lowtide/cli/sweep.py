"""The memory-time frontier on the terminal: a line for each of some budgets, or of a model's peaks."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Table

from lowtide.checks import whole_number
from lowtide.plan import Plan
from lowtide.planners.block_text import kinds
from lowtide.planners.blocks import for_peak, to_ask
from lowtide.report.kinds import ModelKind, kind_of
from lowtide.report.wording import share_of, size_at_least
from lowtide.sizes import format_size


def block_plans(plan: Plan, points: int) -> list[Plan]:
    """A model's plans for at most so many peaks, the smallest first, spread over all choices of its frontier."""
    whole_number(points, "points", least=2)
    last = len(plan.frontier) - 1
    places = sorted({round(k * last / (points - 1)) for k in range(points)}, reverse=True)
    return [for_peak(plan, to_ask(plan, plan.frontier[place].peak)) for place in places]


def print_frontier(plans: list[Plan], as_json: bool) -> None:
    """Print plans of one chain, as a table or as JSON."""
    if as_json:
        typer.echo("[" + ",\n".join(made.to_json() for made in plans) + "]")
        return
    models = [kind for kind in map(kind_of, plans) if isinstance(kind, ModelKind)]
    Console().print(_peaks(models) if models else _budgets(plans))


def _budgets(plans: list[Plan]) -> Table:
    table = Table("budget", "peak", "of plain", "snapshots", "runs/step", "time", title=str(plans[0].chain))
    for made in plans:
        bill = made.bill
        table.add_row(
            format_size(made.knob.value or 0),
            format_size(bill.peak_memory),
            f"{bill.peak_memory / made.chain.plain_tape:.2%}",
            f"{bill.peak_snapshots:,}",
            f"{made.runs_per_step:.4g}",
            f"{made.time_factor:.3f}x",
        )
    return table


def _peaks(models: list[ModelKind]) -> Table:
    table = Table("ask for", "peak", "of all kept", "extra", "time", "blocks", title=models[0].title)
    for kind in models:
        made, peak = kind.plan, kind.plan.bill.peak_memory
        table.add_row(
            size_at_least(made.knob.value or 0),
            format_size(peak),
            share_of(peak, kind.whole),
            kind.time(made.bill.seconds - made.chain.plain_seconds),
            f"{made.time_factor:.3f}x",
            kinds(row.kind for row in kind.block_rows()),
        )
    return table
