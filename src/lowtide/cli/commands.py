"""The commands as one program with subcommands, help and completion. Importing it needs typer and rich."""

from __future__ import annotations

from typing import Annotated

import typer

from lowtide.cli import bench, demo, doctor, plan, report
from lowtide.version import __version__

# \b keeps click from rewrapping the paragraph that follows.
EXAMPLE = """\b
Example:
  lowtide plan mymodule:make --budget 64MiB --save plan.json
  lowtide report plan.json --open

Each command has examples: lowtide plan --help"""

app = typer.Typer(name="lowtide", rich_markup_mode=None, epilog=EXAMPLE)
app.command("plan", epilog=plan.EXAMPLES)(plan.plan_command)
app.command("report", epilog=report.EXAMPLE)(report.report_command)
app.command("bench", epilog=bench.EXAMPLE)(bench.bench_command)
app.command("demo", epilog=demo.EXAMPLE)(demo.demo_command)
app.command("doctor", context_settings=doctor.UNPARSED)(doctor.doctor_command)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """Plan which states to keep and what to run again, so that training fits the memory you have."""
    if version:
        typer.echo(f"lowtide {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
