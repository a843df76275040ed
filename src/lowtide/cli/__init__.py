"""The command line: `lowtide plan`, `report`, `bench`, `demo` and `doctor`.

In: arguments and files. Out: text, files and an exit code: 0 for success, 1 if no plan fits the budget (the least that
works is printed), a benchmark fails or the doctor finds something that does not hold, 2 for input that cannot be used
or a package that is missing, 130 if Ctrl-C stops it.

    plan.py, report.py, bench.py, demo.py, doctor.py   one command each
    commands.py   all of them as one program
    bare.py       what there is without typer and rich
    chains.py     chains described by options or by a file
    frontier.py   the table that `plan --sweep` prints
    files.py      files that commands read and write

It plans nothing itself. It may import the demo, the doctor, `targets`, the report and the planners, but no framework.
Only `main` can be used without rich and typer, which `lowtide[report]` installs.
"""

from __future__ import annotations

import io
import sys

from lowtide.cli import bare
from lowtide.errors import BudgetError, LowtideError, MissingPackageError
from lowtide.packages import needed_for

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; prints Lowtide's own errors on one line, and exits with a code for each kind."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that cannot be printed must not end the output
    try:
        _run(sys.argv[1:] if arguments is None else arguments)
    except BudgetError as error:
        sys.exit(_complain(error, 1))
    except (LowtideError, OSError) as error:
        sys.exit(_complain(error, 2))


def _run(arguments: list[str]) -> None:
    try:
        with needed_for("the command line"):
            from lowtide.cli.commands import app
    except MissingPackageError as missing:
        bare.run(arguments, missing)
    else:
        app(arguments)


def _complain(error: Exception, code: int) -> int:
    print(f"lowtide: {error}", file=sys.stderr)
    return code
