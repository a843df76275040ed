"""The command line: `lowtide plan`, `report`, `bench` and `demo`.

In: arguments and files. Out: text, files and an exit code: 0 for success, 1 if no plan fits the budget (the least that
works is printed) or a benchmark fails, 2 for input that cannot be used, 130 if Ctrl-C stops it.

    plan.py, report.py, bench.py, demo.py   one command each
    chains.py     chains described by options or by a file
    frontier.py   the table that `plan --sweep` prints
    files.py      files that commands read and write

It plans nothing itself. It may import the demo, `targets`, the report and the planners, but no framework. It needs rich
and typer, which `lowtide[report]` installs.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from lowtide.cli import bench, demo, plan, report
from lowtide.errors import BudgetError, LowtideError
from lowtide.version import __version__

__all__ = ["app", "main"]

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


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; prints Lowtide's own errors on one line, and exits with a code for each kind."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that cannot be printed must not end the output
    try:
        app(arguments)
    except BudgetError as error:
        sys.exit(_complain(error, 1))
    except (LowtideError, OSError) as error:
        sys.exit(_complain(error, 2))


def _complain(error: Exception, code: int) -> int:
    typer.echo(f"lowtide: {error}", err=True)
    return code
