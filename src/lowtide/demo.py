"""What `lowtide demo` shows: plans on paper, the million-step one played action by action."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from lowtide.actions import Backward
from lowtide.chain import Chain, StepCost, Working
from lowtide.errors import BudgetError
from lowtide.plan import Bill, Plan
from lowtide.planners.choose import choose
from lowtide.planners.sweep import Sweep
from lowtide.simulate import Ledger, simulate_actions
from lowtide.sizes import format_size


def run(console: Console, output: Path, steps: int) -> None:
    """Print the demo and write the rollout's plan to `output`."""
    _rollout(console, output, steps)
    _tutorial(console)
    _network(console)


def _rollout(console: Console, output: Path, steps: int) -> None:
    chain = Chain.equal(StepCost(64 * 1024, 320 * 1024), steps)
    console.rule(f"A rollout of {steps:,} steps in 64 MiB")
    began = perf_counter()
    plan = choose(chain, "64MiB")
    console.print(Text(str(plan)))
    console.print(f"planned in {perf_counter() - began:.2f} s; now played on paper, action by action:")
    played, bill = _played(console, plan)
    verdict = "is the one predicted" if bill == plan.bill else f"is NOT the one predicted: {bill}"
    console.print(f"{played:,} actions, every action was legal, and the bill {verdict}.")
    output.mkdir(parents=True, exist_ok=True)
    path = output / "rollout.json"
    path.write_text(plan.to_json(), encoding="utf-8")
    console.print(Text(f"the plan is in {path} ({path.stat().st_size:,} bytes; Plan.from_json reads it)"))
    try:
        choose(chain, "64KiB")
    except BudgetError as error:
        console.print(Text(f"a budget that cannot work says so before anything runs: {error}"))


def _played(console: Console, plan: Plan) -> tuple[int, Bill]:
    """Number of actions and the bill, from playing them on paper with a progress bar."""
    columns = (TextColumn("backward"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    ledger, length = Ledger(plan.chain), len(plan.chain)
    front, played = length, 0
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("backward", total=length)
        for action in plan.actions():
            ledger.play(action)
            played += 1
            if isinstance(action, Backward):
                front = action.start
            if played % 1_000 == 0:
                progress.update(bar, completed=length - front)
    return played, ledger.close()


def _tutorial(console: Console) -> None:
    """The setting of the brainstate tutorial: 400 steps of a spiking network, batch 64, 8 hidden neurons, 2 outputs.

    Its state is 8 currents, 8 voltages and 2 outputs for each sample; beside these the tape keeps the 8 spikes. That is
    6,656 bytes a step, where a plain `lax.scan` has been measured to keep 6,750.
    """
    console.rule("400 steps of a spiking network: what each knob buys")
    chain = Chain.equal(StepCost(64 * 18 * 4, 64 * 26 * 4), 400)
    table = Table("knob", "peak", "of plain", "snapshots", "runs per step", "time")
    knobs = [
        ("keep everything", choose(chain, "100%")),
        ("base=16", choose(chain, base=16)),
        ("base=20", choose(chain, base=20)),
        ("none", choose(chain)),
        ("checkpoints=10", choose(chain, checkpoints=10)),
        ('budget="10%"', choose(chain, "10%")),
        ('budget="5%"', choose(chain, "5%")),
    ]
    for name, plan in knobs:
        table.add_row(Text(name), *_figures(plan, chain))
    console.print(table)


def _network(console: Console) -> None:
    console.rule("A network in the shape of VGG-16, batch 32")
    chain = vgg16()
    table = Table("schedule", "peak", "of plain", "snapshots", "runs per step", "time")
    cuts = [_equal_count(chain, segments) for segments in range(1, len(chain) + 1)]
    bills = [(simulate_actions(chain, cut.actions(chain)), cut) for cut in cuts]
    lowest, cut = min(bills, key=lambda entry: entry[0].peak_memory)
    segmented = Plan.make(chain, choose(chain).knob, cut)
    planned = choose(chain, lowest.peak_memory)
    table.add_row(f"{len(cut.stretches)} equal segments", *_figures(segmented, chain))
    table.add_row("plan, same peak", *_figures(planned, chain))
    table.add_row("plan, no knob", *_figures(choose(chain), chain))
    console.print(table)
    extra = (planned.time_factor - 1) / (segmented.time_factor - 1)
    console.print(
        f"{len(cut.stretches)} is the number of equal segments that peaks lowest. At that peak the plan takes "
        f"{extra:.2f}x their extra time:"
    )
    for decision in planned.decisions():
        console.print(Text(f"  {decision}"))


def _figures(plan: Plan, chain: Chain) -> list[str]:
    bill = plan.bill
    return [
        format_size(bill.peak_memory),
        f"{bill.peak_memory / chain.plain_tape:.1%}",
        f"{bill.peak_snapshots:,}",
        f"{plan.runs_per_step:.3g}",
        f"{plan.time_factor:.3f}x",
    ]


def _equal_count(chain: Chain, segments: int) -> Sweep:
    """Segments cut by number of layers, the last taking what is left over, as checkpoint_sequential cuts them."""
    size = len(chain) // segments
    return Sweep((size,) * (segments - 1) + (len(chain) - size * (segments - 1),))


def vgg16() -> Chain:
    """Thirteen convolutions, each with its ReLU, and five poolings, in bytes and multiply-adds on paper."""
    batch, side, width, float_bytes = 32, 224, 3, 4
    steps, names = [], []
    for block, (count, channels) in enumerate([(2, 64), (2, 128), (3, 256), (3, 512), (3, 512)], start=1):
        for k in range(1, count + 1):
            came = batch * width * side**2 * float_bytes
            goes = batch * channels * side**2 * float_bytes
            work = batch * side**2 * width * channels * 9 / 1e12
            # The convolution keeps its input, the ReLU its output, which is the next step's input.
            steps.append(_layer(came, came, goes, work))
            names.append(f"conv{block}_{k}")
            width = channels
        came = batch * width * side**2 * float_bytes
        goes = came // 4
        indices = 2 * goes  # eight bytes for each output
        steps.append(_layer(came, came + indices, goes, came / 1e12))
        names.append(f"pool{block}")
        side //= 2
    return Chain.of(steps, names)


def _layer(came: int, tape: int, goes: int, work: float) -> StepCost:
    working = Working(advance=came + goes, tape=goes, backward=came + goes)
    return StepCost(came, tape, work, 2 * work, cotangent=came, working=working)
