"""A spiking network trained through 400 steps: the same losses to the last bit, in a fraction of the memory.

Network, data and training are those of brainstate's tutorial on long rollouts, in PyTorch: 80 input channels that spike
at 5 Hz, 8 leaky integrate-and-fire neurons between two exponential synapses, 2 classes, 64 samples, 120 epochs.

    python examples/spiking_rollout.py --output demo-output

It trains twice from one seed, with Lowtide and with the plain loop, and stops if a loss differs in any bit. Then it
measures the bytes of tensors alive at the worst moment of one forward and backward. Two figures go to the output.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

import lowtide.torch as lt
from lowtide.sizes import format_size
from lowtide.torch import spiking

BASE = 20
BUDGET = "128KiB"
CURVES = ("plain loop", "Lowtide, no knob", "Lowtide, base = √T", f"Lowtide, budget = {BUDGET}")
GREY, BLUE, ORANGE, GREEN = "#9a9a9a", "#1f6fb4", "#d9731a", "#2e8b57"
Knobs = dict[str, Any]


class SpikingNet(nn.Module):
    """Linear, synapse, spiking neurons, linear, synapse. It keeps its state, so a call of it is a step."""

    def __init__(self, inputs: int = 80, hidden: int = 8, classes: int = 2) -> None:
        super().__init__()
        self.enter = nn.Linear(inputs, hidden)
        self.synapse = spiking.Expon(tau=5.0)
        self.neurons = spiking.LIF(tau=20.0, spike=spiking.ReluGrad())
        self.leave = nn.Linear(hidden, classes)
        self.readout = spiking.Expon(tau=10.0)
        for linear in (self.enter, self.leave):
            nn.init.normal_(linear.weight, std=math.sqrt(2 / linear.in_features))
            nn.init.zeros_(linear.bias)

    def forward(self, spikes: torch.Tensor) -> torch.Tensor:
        """One step of 1 ms."""
        outputs: torch.Tensor = self.readout(self.leave(self.neurons(self.synapse(self.enter(spikes)))))
        return outputs


def make_data(steps: int, samples: int = 64, channels: int = 80) -> tuple[torch.Tensor, torch.Tensor]:
    """Spikes at 5 Hz in steps of 1 ms, and a random class for each sample."""
    spikes = (torch.rand(steps, samples, channels) < 0.005).float()
    return spikes, (torch.rand(samples) < 0.5).long()


def plain_loss(net: nn.Module, spikes: torch.Tensor, labels: torch.Tensor, reduce: str | None = None) -> torch.Tensor:
    """The loss through the loop as anybody would write it, or with a running mean of the outputs: all tapes stay."""
    spiking.reset(net)
    if reduce is not None:
        return nn.functional.cross_entropy(lt.for_loop(net, spikes, reduce=reduce), labels)
    return nn.functional.cross_entropy(torch.stack([net(x) for x in spikes]).mean(0), labels)


def lowtide_loss(net: nn.Module, spikes: torch.Tensor, labels: torch.Tensor, **knobs: Any) -> torch.Tensor:
    """The same through Lowtide. With `reduce="mean"` the outputs are averaged as they come and never stacked."""
    spiking.reset(net)
    outputs = lt.checkpointed_for_loop(net, spikes, **knobs)
    return nn.functional.cross_entropy(outputs if "reduce" in knobs else outputs.mean(0), labels)


def train(epochs: int, steps: int, console: Console, seed: int = 0) -> tuple[list[float], list[float]]:
    """Losses with the plain loop and with Lowtide, from the same seed; refuses to go on if they differ in any bit."""
    runs: list[tuple[Callable[[], torch.Tensor], torch.optim.Optimizer, list[float]]] = []
    for loss_of in (plain_loss, partial(lowtide_loss, base=BASE)):
        torch.manual_seed(seed)
        spikes, labels = make_data(steps)
        net = SpikingNet()
        adam = torch.optim.Adam(net.parameters(), lr=2e-3)
        runs.append((partial(loss_of, net, spikes, labels), adam, []))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("training twice", total=epochs)
        for epoch in range(epochs):
            for closure, optimizer, losses in runs:
                optimizer.zero_grad()
                loss = closure()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            plain, ours = (losses[-1] for _, _, losses in runs)
            if plain != ours:
                raise AssertionError(f"epoch {epoch}: the loss is {plain!r} with the plain loop, {ours!r} with Lowtide")
            progress.update(bar, advance=1, description=f"training twice, loss {ours:.4f}")
    return runs[0][2], runs[1][2]


def gradients(net: nn.Module, closure: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """One forward and one backward."""
    return torch.autograd.grad(closure(), list(net.parameters()))


def peak_bytes(net: nn.Module, closure: Callable[[], torch.Tensor]) -> int:
    """Most bytes of tensors alive at once, forward or backward, beyond parameters, inputs and resulting gradients."""
    spiking.reset(net)
    with lt.measure.peak() as memory:
        loss = closure()
        forward = memory.peak
        memory.restart_peak()
        found = torch.autograd.grad(loss, list(net.parameters()))
    return max(forward, memory.peak - lt.measure.storage_bytes(list(found)))


def memory_by_length(lengths: Sequence[int], console: Console) -> dict[str, list[int]]:
    """Peak bytes for each length: plain, and with Lowtide for three knobs."""
    curves: dict[str, list[int]] = {name: [] for name in CURVES}
    for steps in lengths:
        torch.manual_seed(0)
        spikes, labels = make_data(steps)
        net = SpikingNet()
        knobs: list[Knobs] = [{}, {"base": round(math.sqrt(steps))}, {"budget": BUDGET}]
        closures = [partial(lowtide_loss, net, spikes, labels, reduce="mean", **knob) for knob in knobs]
        closures.insert(0, partial(plain_loss, net, spikes, labels))
        with console.status(f"measuring memory, {steps:,} steps"):
            for curve, closure in zip(curves.values(), closures, strict=True):
                curve.append(peak_bytes(net, closure))
    return curves


def bases_up_to(steps: int, count: int) -> list[int]:
    """About `count` values from 1 to `steps`, evenly spread on a logarithmic axis."""
    return sorted({round(steps ** (k / (count - 1))) for k in range(count)})


@dataclass(frozen=True)
class ByBase:
    """The promise as a curve: for each base, bytes measured, bytes planned, and `base` tapes with `T/base` states."""

    bases: list[int]
    measured: list[int]
    planned: list[int]
    promised: list[int]


def memory_by_base(steps: int, count: int, console: Console) -> ByBase:
    """Peak bytes over `base`, beside what was predicted before the loop ran."""
    torch.manual_seed(0)
    spikes, labels = make_data(steps)
    net = SpikingNet()
    curve = ByBase(bases_up_to(steps, count), [], [], [])
    for base in curve.bases:
        spiking.reset(net)
        plan = lt.plan_for_loop(net, spikes, base=base, reduce="mean")
        step = plan.chain[0]
        curve.planned.append(plan.bill.peak_memory)
        curve.promised.append(base * step.tape + math.ceil(steps / base) * step.state)
        with console.status(f"measuring memory, base={base}"):
            closure = partial(lowtide_loss, net, spikes, labels, base=base, reduce="mean")
            curve.measured.append(peak_bytes(net, closure))
    return curve


def cpu_seconds(works: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Least CPU seconds of each, taking turns."""
    best = [math.inf] * len(works)
    for _ in range(repeats):
        for k, work in enumerate(works):
            began = process_time()
            work()
            best[k] = min(best[k], process_time() - began)
    return best


def compare(steps: int, repeats: int, console: Console) -> Table:
    """Plain against Lowtide: memory, time, runs, and whether every gradient agrees to the last bit."""
    torch.manual_seed(0)
    spikes, labels = make_data(steps)
    net = SpikingNet()
    rows: list[Knobs] = [{"base": BASE}]
    rows += [knob | {"reduce": "mean"} for knob in ({"base": BASE}, {}, {"budget": BUDGET}, {"checkpoints": 10})]
    closures = [partial(plain_loss, net, spikes, labels)]
    closures += [partial(lowtide_loss, net, spikes, labels, **knobs) for knobs in rows]
    table = Table(title=f"{steps:,} steps, forward and backward", title_justify="left", caption_justify="left")
    table.caption = "With reduce=mean outputs are averaged as they come, else stacked first."
    table.add_column("loop")
    for heading in ("peak", "of plain", "CPU time", "runs", "gradients"):
        table.add_column(heading, justify="right", no_wrap=True)
    with console.status("comparing"):
        seconds = cpu_seconds([partial(gradients, net, closure) for closure in closures], repeats)
        plain = peak_bytes(net, closures[0])
        table.add_row("plain", format_size(plain), "100%", "1.00x", "1.00", "")
        for knobs, closure, taken in zip(rows, closures[1:], seconds[1:], strict=True):
            name = ", ".join(f"{knob}={value}" for knob, value in knobs.items())
            expected = gradients(net, partial(plain_loss, net, spikes, labels, reduce=knobs.get("reduce")))
            with lt.record(memory=False) as receipt:
                found = gradients(net, closure)
            if not all(map(torch.equal, found, expected)):
                raise AssertionError(f"{name}: the gradients are not those of the plain loop")
            peak, runs = peak_bytes(net, closure), receipt.plain_runs + receipt.taping_runs + receipt.probe_runs
            share, ratio = f"{peak / plain:.1%}", f"{taken / seconds[0]:.2f}x"
            table.add_row(name, format_size(peak), share, ratio, f"{runs / steps:.2f}", "same bits")
    return table


def draw_losses(plain: Sequence[float], ours: Sequence[float], path: Path) -> None:
    """The loss curves; they lie on one another, so one is drawn as a band behind the other."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.plot(plain, color=GREY, linewidth=6, solid_capstyle="round", label="plain loop")
    axes.plot(ours, color=BLUE, linewidth=1.8, label=f"Lowtide, base={BASE}")
    axes.set(xlabel="epoch", ylabel="training loss", title=f"{len(ours)} epochs: every loss the same to the last bit")
    _finish(axes)
    _save(figure, path)


def draw_memory(lengths: Sequence[int], curves: dict[str, list[int]], steps: int, by_base: ByBase, path: Path) -> None:
    """Memory against the number of steps, and against `base`."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, sizes), color, marker in zip(curves.items(), (GREY, BLUE, ORANGE, GREEN), "osD^", strict=True):
        left.plot(lengths, sizes, color=color, marker=marker, markersize=5, label=name)
    left.set(xlabel="steps T", title="Forward and backward of T steps")
    _log_axes(left, lengths)
    right.plot(by_base.bases, by_base.measured, "o", color=BLUE, label="measured")
    right.plot(by_base.bases, by_base.planned, color=ORANGE, label="planned, working set included")
    right.plot(by_base.bases, by_base.promised, ":", color=GREY, label="base tapes + T/base states")
    right.set(xlabel="base", title=f"T = {steps:,}: a snapshot every base steps")
    _log_axes(right, [base for base in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if base <= steps])
    for axes in (left, right):
        axes.set_ylabel("peak of live tensors")
        _finish(axes)
    _save(figure, path)


def _log_axes(axes: Axes, ticks: Sequence[int]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(list(ticks), [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_locator(LogLocator(base=2, numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: format_size(int(size))))


def _finish(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def run(output: Path, epochs: int, steps: int, *, quick: bool, console: Console) -> tuple[list[float], list[float]]:
    """Everything, in order: train, measure, draw, compare. Gives both rows of losses."""
    plain, ours = train(epochs, steps, console)
    console.print(
        f"{epochs} epochs of {steps:,} steps: first loss {ours[0]:.4f}, last {ours[-1]:.4f}; "
        "all losses equal to the last bit"
    )
    draw_losses(plain, ours, output / "spiking-loss.png")
    lengths = [50, 100] if quick else [100, 200, 400, 800, 1600]
    curves = memory_by_length(lengths, console)
    by_base = memory_by_base(steps, 4 if quick else 12, console)
    draw_memory(lengths, curves, steps, by_base, output / "spiking-memory.png")
    console.print(compare(steps, 1 if quick else 2, console))
    console.print(f"figures: {output / 'spiking-loss.png'} and {output / 'spiking-memory.png'}", soft_wrap=True)
    return plain, ours


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a spiking network with Lowtide and without, and compare.")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for the figures")
    parser.add_argument("--epochs", type=int, default=120)
    parser.add_argument("--steps", type=int, default=400, help="steps of the rollout")
    parser.add_argument("--quick", action="store_true", help="3 epochs, 50 steps, few measurements")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the tensors are small: more threads only wait for each other
    epochs, steps = (3, 50) if given.quick else (given.epochs, given.steps)
    run(given.output, epochs, steps, quick=given.quick, console=Console())


if __name__ == "__main__":
    main()
