"""The command line: `lowtide plan` and `lowtide demo`.

Exit codes: 0 for an answer, 1 when no plan fits the budget (the least that works is printed), 2 for input that
cannot be read. Rich and typer are imported here and in `demo` only; install them with `lowtide[report]`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lowtide import __version__
from lowtide.chain import Chain, Disk, StepCost, Working
from lowtide.errors import BudgetError, InputError, LowtideError
from lowtide.plan import Plan
from lowtide.planners.choose import choose
from lowtide.planners.frontier import frontier
from lowtide.sizes import format_size, parse_size

app = typer.Typer(
    name="lowtide",
    help="Plan which states to keep and what to run again, so that training fits the memory you have.",
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    if version:
        typer.echo(f"lowtide {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def plan(
    steps: Annotated[int | None, typer.Option(help="Number of equal steps, e.g. 1000000.")] = None,
    state: Annotated[str | None, typer.Option(help="Bytes of the state between steps, e.g. 64KiB.")] = None,
    tape: Annotated[str | None, typer.Option(help="Bytes autograd saves for a step, its input included.")] = None,
    chain: Annotated[
        Path | None,
        typer.Option(
            help='A JSON list of unequal steps instead: [{"state": 4096, "tape": 65536, "forward": 1.5}, ...].'
        ),
    ] = None,
    budget: Annotated[str | None, typer.Option(help='Bytes for snapshots, tape and working set: 64MiB, "25%".')] = None,
    checkpoints: Annotated[int | None, typer.Option(help="At most so many snapshots, and one step of tape.")] = None,
    base: Annotated[int | None, typer.Option(help="A snapshot every so many steps.")] = None,
    working: Annotated[str | None, typer.Option(help="Bytes a step needs while it runs; none by default.")] = None,
    forward: Annotated[float | None, typer.Option(help="Seconds of a step's forward; 1 if left out.")] = None,
    backward: Annotated[float | None, typer.Option(help="Seconds of a step's backward; 2 if left out.")] = None,
    disk_write: Annotated[str | None, typer.Option(help="Let snapshots go to disk: bytes written per second.")] = None,
    disk_read: Annotated[str | None, typer.Option(help="Bytes read per second; as fast as writing by default.")] = None,
    sweep: Annotated[bool, typer.Option(help="Print the memory-time frontier instead of one plan.")] = False,
    points: Annotated[int, typer.Option(help="Budgets on the frontier.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Plan a chain on paper and print what it costs; with no knob, the least memory for one extra run of each step."""
    if chain is not None:
        if any(given is not None for given in (steps, state, tape, working, forward, backward)):
            raise InputError(
                "--chain describes every step; leave out --steps, --state, --tape, --working, --forward and --backward"
            )
        the_chain = _read_chain(chain)
    else:
        the_chain = _equal_chain(steps, state, tape, working, forward, backward)
    disk = _disk(disk_write, disk_read)
    if sweep:
        if not (budget is None and checkpoints is None and base is None):
            raise InputError("--sweep tries every budget; leave out --budget, --checkpoints and --base")
        stderr = Console(stderr=True)
        plans = list(track(frontier(the_chain, points, disk), "planning", points, console=stderr, transient=True))
        _print_frontier(plans, as_json)
        return
    made = choose(the_chain, budget, checkpoints=checkpoints, base=base, disk=disk)
    typer.echo(made.to_json() if as_json else str(made))


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Where the plan is written.")] = Path("demo-output"),
    steps: Annotated[int, typer.Option(help="Length of the rollout.")] = 1_000_000,
) -> None:
    """Show what a budget buys: a million-step rollout, the frontier, and a network with unequal layers."""
    from lowtide.demo import run

    run(Console(), output, steps)


def main(arguments: list[str] | None = None) -> None:
    """Entry point; turns Lowtide's own errors into one line and an exit code."""
    try:
        app(arguments)
    except BudgetError as error:
        sys.exit(_complain(error, 1))
    except (LowtideError, OSError) as error:
        sys.exit(_complain(error, 2))


def _complain(error: Exception, code: int) -> int:
    typer.echo(f"lowtide: {error}", err=True)
    return code


def _equal_chain(
    steps: int | None,
    state: str | None,
    tape: str | None,
    working: str | None,
    forward: float | None,
    backward: float | None,
) -> Chain:
    missing = [f"--{name}" for name, value in (("steps", steps), ("state", state), ("tape", tape)) if value is None]
    if steps is None or state is None or tape is None:
        raise InputError(
            f"{', '.join(missing)} missing; give --steps, --state and --tape, or --chain FILE, for example\n"
            "  lowtide plan --steps 1000000 --state 64KiB --tape 320KiB --budget 64MiB"
        )
    used = _size_or_zero(working or 0, "working")
    step = StepCost(
        parse_size(state, "state"),
        parse_size(tape, "tape"),
        1.0 if forward is None else forward,
        2.0 if backward is None else backward,
        working=Working(used, used, used),
    )
    return Chain.equal(step, steps)


def _read_chain(path: Path) -> Chain:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--chain {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"--chain {path} is not JSON: {error}") from error
    known = {"name", "state", "tape", "forward", "backward", "cotangent"}
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"--chain {path}: give a list of steps, each an object with state and tape")
    for k, row in enumerate(rows):
        if not {"state", "tape"} <= row.keys() <= known:
            raise InputError(
                f"--chain {path}, step {k}: has {sorted(row)}; needs state and tape, knows {sorted(known)}"
            )
    names = [row.pop("name", f"step {k:,}") for k, row in enumerate(rows)]
    return Chain.of([_step(row) for row in rows], names)


def _step(row: dict[str, Any]) -> StepCost:
    sizes: dict[str, Any] = {
        name: _size_or_zero(row[name], name) for name in ("state", "tape", "cotangent") if name in row
    }
    return StepCost(**(row | sizes))


def _size_or_zero(size: int | str, name: str) -> int:
    """A size that may be 0; where it may not, `StepCost` says so."""
    return 0 if size in (0, "0") and size is not False else parse_size(size, name)


def _disk(write: str | None, read: str | None) -> Disk | None:
    if write is None:
        if read is not None:
            raise InputError("--disk-read needs --disk-write")
        return None
    writing = parse_size(write, "disk-write")
    return Disk(1 / writing, 1 / (parse_size(read, "disk-read") if read is not None else writing))


def _print_frontier(plans: list[Plan], as_json: bool) -> None:
    if as_json:
        typer.echo("[" + ",\n".join(made.to_json() for made in plans) + "]")
        return
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
    Console().print(table)
