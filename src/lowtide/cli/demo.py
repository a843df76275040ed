"""`lowtide demo`: shows what a budget buys. The demo and its imports are loaded only when it is run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

EXAMPLE = """\b
Example:
  lowtide demo --quick --only torch"""


def complete_demo(incomplete: str) -> list[str]:
    """The names of examples that begin like this, for --only."""
    from lowtide.demo import NAMES

    return [name for name in NAMES if name.startswith(incomplete)]


def demo_command(
    quick: Annotated[bool, typer.Option("--quick", help="Small and short, within a minute.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this example; repeatable.", autocompletion=complete_demo),
    ] = None,
    output: Annotated[Path, typer.Option(help="Where plans, pages and figures are written.")] = Path("demo-output"),
) -> None:
    """Show what a budget buys, beside what the usual tools take."""
    from lowtide.demo import run

    run(Console(), output, quick=quick, only=only or None)
