"""Two deep networks: what less memory costs in time, for torch's segments and for Lowtide's budgets.

Activations that a network keeps for its backward can be dropped and computed again. Torch's `checkpoint_sequential`
does it for a number of segments of as many layers each. Lowtide's `sequential` takes a budget in bytes, measures what
each layer holds and takes, and keeps what is dear and drops what is cheap, so that the budget is kept at the least
extra time.

    python examples/deep_networks.py --output demo-output

The networks: residual blocks of an MLP, all alike, and convolutions in the shape of VGG-16, whose first layers hold
nearly all of the memory. For each the plain call, torch's function with every number of segments, and Lowtide with
several budgets: one forward and one backward, the most bytes of tensors alive at once, and the CPU time. All
gradients are checked to be the plain ones to the last bit.
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
from matplotlib.ticker import FuncFormatter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

import lowtide.torch as lt
from lowtide import BudgetError, Plan
from lowtide.sizes import format_size

GREY, ORANGE, BLUE = "#6f6f6f", "#d9731a", "#1f6fb4"
SLOWEST = 1.6  # budgets whose plans predict more than so many times the plain time are left out


class Residual(nn.Module):
    """x + MLP(norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        changed: torch.Tensor = x + self.body(x)
        return changed


def residual_mlp(blocks: int, width: int, batch: int) -> tuple[nn.Sequential, torch.Tensor]:
    """Residual blocks, all alike."""
    return nn.Sequential(*[Residual(width) for _ in range(blocks)]), torch.randn(batch, width)


def vgg(width: int, size: int, batch: int) -> tuple[nn.Sequential, torch.Tensor]:
    """VGG-16 with `width` channels in its first block instead of 64, for images of `size` x `size`."""
    layers: list[nn.Module] = []
    channels = 3
    for times, convolutions in ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3)):
        for _ in range(convolutions):
            layers += [nn.Conv2d(channels, times * width, 3, padding=1), nn.ReLU()]
            channels = times * width
        layers.append(nn.MaxPool2d(2))
    features = channels * (size // 32) ** 2
    layers += [nn.Flatten(), nn.Linear(features, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers), torch.randn(batch, 3, size, size)


@dataclass(frozen=True)
class Point:
    """One way to run a network: measured peak, and CPU seconds of a forward and a backward."""

    name: str
    peak: int
    seconds: float


@dataclass(frozen=True)
class Measured:
    """All ways to run one network."""

    title: str
    plain: Point
    torch: list[Point]
    lowtide: list[Point]


Run = Callable[[torch.Tensor], Any]


def gradients(layers: nn.Sequential, x: torch.Tensor, run: Run) -> tuple[torch.Tensor, ...]:
    """One forward and one backward."""
    return torch.autograd.grad(run(x).square().mean(), list(layers.parameters()))


def ways_of(layers: nn.Sequential, x: torch.Tensor, budgets: int) -> dict[str, dict[str, Run]]:
    """The plain call, torch's with every number of segments, Lowtide's with several budgets."""
    segments = range(2, len(layers) + 1)
    torchs = {f"{n}": partial(checkpoint_sequential, layers, n, use_reentrant=False) for n in segments}
    lowtides = {
        format_size(plan.knob.value or 0): partial(_planned, layers, plan) for plan in plans(layers, x, budgets)
    }
    return {"plain": {"": layers}, "torch": dict(torchs), "lowtide": dict(lowtides)}


def plans(layers: nn.Sequential, x: torch.Tensor, count: int) -> list[Plan]:
    """Plans for budgets from the least that works to nearly all tapes; of several with one bill, the least budget's."""
    try:
        lt.plan_sequential(layers, x, budget=1)
    except BudgetError as error:
        least = error.least
    whole = lt.plan_sequential(layers, x, budget="100%").chain.plain_tape
    sizes = [int(least * (whole / least) ** (k / count)) for k in range(count)]
    made = [lt.plan_sequential(layers, x, budget=size) for size in sizes]
    return list({plan.bill: plan for plan in reversed(made) if plan.time_factor <= SLOWEST}.values())[::-1]


def _planned(layers: nn.Sequential, plan: Plan, x: torch.Tensor) -> Any:
    return lt.sequential(layers, x, plan=plan)


def measure(
    title: str, layers: nn.Sequential, x: torch.Tensor, *, budgets: int, repeats: int, console: Console
) -> Measured:
    """Peaks, bits, then times, all ways taking turns and the least of each counting."""
    ways = ways_of(layers, x, budgets)
    runs = {(kind, name): partial(gradients, layers, x, run) for kind in ways for name, run in ways[kind].items()}
    expected = runs["plain", ""]()
    peaks, best = {}, dict.fromkeys(runs, math.inf)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(title, total=len(runs) * (1 + repeats))
        for key, run in runs.items():
            with lt.measure.peak() as memory:
                found = run()
            if not all(map(torch.equal, found, expected)):
                raise AssertionError(f"{title}, {' '.join(key)}: the gradients are not those of the plain network")
            peaks[key] = memory.peak
            progress.advance(bar)
        for _ in range(repeats):
            for key, run in runs.items():
                began = process_time()
                run()
                best[key] = min(best[key], process_time() - began)
                progress.advance(bar)
    points = {kind: [Point(name, peaks[kind, name], best[kind, name]) for name in ways[kind]] for kind in ways}
    return Measured(title, points["plain"][0], points["torch"], points["lowtide"])


def frontier(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats in both memory and time, the smallest peak first."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda each: (each.peak, each.seconds)):
        if not kept or point.seconds < kept[-1].seconds:
            kept.append(point)
    return kept


def table_of(measured: Measured) -> Table:
    """The frontier of torch's function, and all of Lowtide's budgets."""
    plain = measured.plain
    table = Table(title=measured.title, title_justify="left", caption_justify="left")
    table.caption = (
        "Peaks count results and gradients of parameters too, which a budget does not. Of torch's segments, the best."
    )
    table.add_column("way", no_wrap=True)
    for heading in ("peak", "of plain", "extra time", "gradients"):
        table.add_column(heading, justify="right")
    table.add_row("plain", format_size(plain.peak), "100%", "", "")
    less = [point for point in measured.torch if point.peak < plain.peak]
    rows = [(f"torch, {point.name} segments", point) for point in frontier(less)]
    rows += [(f"Lowtide, budget {point.name}", point) for point in measured.lowtide]
    for name, point in rows:
        share, extra = f"{point.peak / plain.peak:.0%}", f"{point.seconds / plain.seconds - 1:.0%}"
        table.add_row(name, format_size(point.peak), share, extra, "same bits")
    return table


def draw(networks: Sequence[Measured], path: Path) -> None:
    """Time against memory, a panel for each network."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    for axes, measured in zip(figure.subplots(1, len(networks)), networks, strict=True):
        _panel(axes, measured)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=len(labels), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _panel(axes: Axes, measured: Measured) -> None:
    plain = measured.plain
    best = frontier([point for point in measured.torch if point.peak < plain.peak])

    def place(points: Sequence[Point]) -> tuple[list[float], list[float]]:
        return [each.peak / 1024**2 for each in points], [each.seconds / plain.seconds - 1 for each in points]

    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.plot(*place([plain]), "D", color=GREY, markersize=8, label="plain")
    axes.plot(
        *place(measured.torch), "o", color=ORANGE, markersize=4, alpha=0.4, label="torch, every number of segments"
    )
    axes.plot(*place(best), "-", color=ORANGE, linewidth=1.5, label="torch, at its best")
    axes.plot(*place(measured.lowtide), "s", color=BLUE, markersize=5)
    axes.plot(*place(frontier(measured.lowtide)), "-s", color=BLUE, markersize=5, label="Lowtide, several budgets")
    larger = [point for point in measured.torch if point.peak > plain.peak]
    if larger:
        x, y = (min(each) for each in place(larger))
        axes.text(x, y, "more than plain:\none layer in a segment ", color=ORANGE, fontsize=8, ha="right", va="top")
    axes.set_title(measured.title, loc="left", weight="bold", fontsize=11)
    axes.set_xlabel("peak of live tensors in a forward and backward (MiB)")
    axes.set_ylabel("extra CPU time, of plain")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def run(output: Path, *, quick: bool, console: Console) -> list[Measured]:
    """Everything in order: measure both networks, print, draw."""
    torch.manual_seed(0)
    made = {
        "Residual MLP, 24 blocks": residual_mlp(24, 16, 64) if quick else residual_mlp(24, 64, 1024),
        "VGG-16 shape, 37 layers": vgg(4, 64, 2) if quick else vgg(8, 96, 4),
    }
    networks = []
    for title, (layers, x) in made.items():
        budgets, repeats = (4, 1) if quick else (10, 5)
        networks.append(measure(title, layers, x, budgets=budgets, repeats=repeats, console=console))
        console.print(table_of(networks[-1]))
    path = output / "deep-networks.png"
    draw(networks, path)
    console.print(f"figure: {path}", soft_wrap=True)
    return networks


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Deep networks: memory against time, torch's segments and Lowtide.")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for the figure")
    parser.add_argument("--quick", action="store_true", help="small networks, one repeat")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    run(given.output, quick=given.quick, console=Console())


if __name__ == "__main__":
    main()
