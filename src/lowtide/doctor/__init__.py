"""The doctor: what is installed here, and whether Lowtide keeps its promises on each device that is found.

In: which devices, and how thoroughly. Out: a table to paste into an issue, or JSON, and an exit code: 1 if something
does not hold.

    environment.py    versions, packages that are missing and the commands that install them
    findings.py       what was found, as values and as lines of JSON
    planner_checks.py, torch_checks.py, jax_checks.py   the checks; only the latter two import a framework
    programs.py       small training steps in PyTorch, each plain and with Lowtide
    examine.py        runs the checks of a framework on its devices, in a process of its own
    table.py          the findings as a table

It trusts nothing that it checks: what is right is what plain PyTorch and plain JAX compute, and bytes are counted by
the device's own allocator where it says them. It needs neither typer nor rich, so that it works in every installation.
"""

from __future__ import annotations

import argparse

from lowtide.doctor import environment, examine, table
from lowtide.doctor.findings import Report

__all__ = ["main"]

_EPILOG = """Example:
  lowtide doctor > doctor.md

It takes about a minute for each device; --quick takes seconds, with small
sizes, whose speeds say little. Exit code 1: something does not hold."""


def main(options: list[str]) -> int:
    """Run the command with these options, and return its exit code."""
    asked = _parser().parse_args(options)
    report = Report(environment.facts(), ())
    for found in examine.everything(asked.device, quick=asked.quick):
        report = report.with_(found)
    print(report.to_json() if asked.json else table.markdown(report))
    return 0 if report.holds else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lowtide doctor",
        description="Show what is installed, and whether Lowtide keeps its promises.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, seconds instead of a minute")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--device",
        action="append",
        metavar="NAME",
        help="only this device, e.g. torch:cpu, torch:cuda:1 or jax:cpu:0; repeatable",
    )
    return parser
