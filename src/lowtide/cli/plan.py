"""`lowtide plan`: plan a user's own function, a chain on paper, or a model's saved plan for another peak."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lowtide.chain import Chain
from lowtide.cli.chains import equal_chain, read_chain, read_disk
from lowtide.cli.files import check_file, read_plan, write
from lowtide.cli.frontier import frontier_plans, print_frontier
from lowtide.cli.report import tell
from lowtide.errors import InputError
from lowtide.plan import Plan
from lowtide.planners.blocks import for_peak
from lowtide.planners.choose import choose
from lowtide.report.page import page as report_page
from lowtide.sizes import parse_size
from lowtide.targets import plan_target
from lowtide.targets.frameworks import FRAMEWORKS

EXAMPLES = """\b
What MODULE:NAME may name:
  a function without parameters that returns (step, init, xs) for a loop,
    (layers, x) for layers, a lowtide.Plan or a lowtide.Chain
  a step y = f(x), a module for example, with --input and --steps
  layers, an nn.Sequential for example, with --input
A file that ends in .json is a plan that was saved.

\b
Examples:
  lowtide plan mymodule:make --budget 64MiB --report plan.html
  lowtide plan net.py:net --input 'float32[64,80]' --steps 1000 --budget 25%
  lowtide plan --steps 1000000 --state 64KiB --tape 320KiB --budget 64MiB
  lowtide plan --steps 1000000 --state 64KiB --tape 320KiB --sweep
  lowtide plan model.json --peak 8GiB --save smaller.json"""


def complete_framework() -> list[str]:
    """The values of --framework."""
    return list(FRAMEWORKS)


def plan_command(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="MODULE:NAME",
            help="Your function: mymodule:make, or path/to/file.py:make; or a saved plan, plan.json.",
        ),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="DTYPE[SHAPE]", help="An input of each step, or of the layers; repeatable."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Number of steps, e.g. 1000000.")] = None,
    framework: Annotated[
        str | None,
        typer.Option(help="torch or jax, where it cannot be told.", autocompletion=complete_framework),
    ] = None,
    state: Annotated[str | None, typer.Option(help="Bytes of the state between steps, e.g. 64KiB.")] = None,
    tape: Annotated[str | None, typer.Option(help="Bytes autograd saves for a step, its input included.")] = None,
    chain: Annotated[
        Path | None,
        typer.Option(
            help='A JSON list of unequal steps instead: [{"state": 4096, "tape": 65536, "forward": 1.5}, ...].'
        ),
    ] = None,
    budget: Annotated[str | None, typer.Option(help='Bytes for snapshots, tape and working set: 64MiB, "25%".')] = None,
    peak: Annotated[
        str | None,
        typer.Option(help="Bytes of a whole training step at its worst moment: 8GiB; for a model's saved plan."),
    ] = None,
    checkpoints: Annotated[int | None, typer.Option(help="At most so many snapshots, and one step of tape.")] = None,
    base: Annotated[int | None, typer.Option(help="A snapshot every so many steps.")] = None,
    working: Annotated[str | None, typer.Option(help="Bytes a step needs while it runs; none by default.")] = None,
    forward: Annotated[float | None, typer.Option(help="Seconds of a step's forward; 1 if left out.")] = None,
    backward: Annotated[float | None, typer.Option(help="Seconds of a step's backward; 2 if left out.")] = None,
    disk_write: Annotated[str | None, typer.Option(help="Let snapshots go to disk: bytes written per second.")] = None,
    disk_read: Annotated[str | None, typer.Option(help="Bytes read per second; as fast as writing by default.")] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Print the memory-time frontier instead of one plan.")] = False,
    points: Annotated[int, typer.Option(help="Budgets on the frontier.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write the plan's JSON here; `lowtide report` reads it.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write the plan's page (HTML) here.")] = None,
) -> None:
    """Plan your own function, or a chain on paper.

    Prints what the plan will cost. With no knob (--budget, --checkpoints or --base) it is the least memory that runs no
    step more than one extra time.
    """
    knobs: dict[str, Any] = {"budget": budget, "checkpoints": checkpoints, "base": base}
    if sweep:
        _refuse({**knobs, "peak": peak}, "--sweep tries every budget")
        _refuse({"save": save, "report": report}, "--sweep makes many plans")
    check_file(save, "--save")
    check_file(report, "--report")
    disk = read_disk(disk_write, disk_read)
    costs = {"state": state, "tape": tape, "working": working, "forward": forward, "backward": backward}
    own = {"input": inputs or None, "steps": steps, "framework": framework}
    made: Plan | None = None
    if target is not None and target.endswith(".json"):
        _refuse({**knobs, **costs, **own, "chain": chain, "disk-write": disk_write}, f"{target} is a plan already")
        made = read_plan(Path(target))
    elif target is not None:
        _refuse({**costs, "chain": chain}, f"{target} is measured")
        asked = {} if sweep else {**knobs, "disk": disk}
        made = _planned(target, inputs=inputs or (), steps=steps, framework=framework, **asked)
    else:
        _refuse({**own, "steps": None, "peak": peak}, "there is no MODULE:NAME")
        on_paper = _on_paper(chain, steps, costs)
    if sweep:
        print_frontier(frontier_plans(on_paper if made is None else made, points, disk), as_json)
        return
    if made is None:
        made = choose(on_paper, budget, checkpoints=checkpoints, base=base, disk=disk)
    if peak is not None:
        made = for_peak(made, parse_size(peak, "peak"))
    typer.echo(made.to_json() if as_json else str(made))
    if save is not None:
        write(save, made.to_json())
    if report is not None:
        write(report, report_page(tell(made, None)))


def _on_paper(file: Path | None, steps: int | None, costs: dict[str, Any]) -> Chain:
    """The chain that the file describes, or that the options describe if there is no file."""
    if file is None:
        return equal_chain(steps, **costs)
    _refuse({"steps": steps, **costs}, "--chain describes every step")
    return read_chain(file)


def _planned(target: str, **options: Any) -> Plan:
    """Plan the user's own function. What its code prints goes to standard error, because the answer may be JSON."""
    with Console(stderr=True).status(f"planning {target}"), redirect_stdout(sys.stderr):
        return plan_target(target, **options)


def _refuse(options: dict[str, Any], why: str) -> None:
    """Raise `InputError` if an option is given that makes no sense, for the reason `why`."""
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if given:
        raise InputError(f"{why}; leave out {', '.join(given)}")
