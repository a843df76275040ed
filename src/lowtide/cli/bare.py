"""The command line where typer and rich are not installed: the version, the doctor, and how to have the rest."""

from __future__ import annotations

import sys

from lowtide import doctor
from lowtide.errors import MissingPackageError
from lowtide.version import __version__

HELP = """\
Usage: lowtide [--version] [--help] COMMAND

Plan which states to keep and what to run again, so that training fits the memory you have.

Commands that work here:
  doctor   Show what is installed, and whether Lowtide keeps its promises.

Commands that do not:
  plan, report, bench, demo
"""


def run(arguments: list[str], missing: MissingPackageError) -> None:
    """Do what can be done without the missing package; raise what says how to have it for everything else."""
    match arguments:
        case ["--version", *_]:
            print(f"lowtide {__version__}")
        case [] | ["--help", *_]:
            print(f"{HELP}\n{missing}")
        case ["doctor", *options]:
            sys.exit(doctor.main(options))
        case _:
            raise missing
