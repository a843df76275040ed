"""A network in two segments: the same gradients in less memory, and a larger batch in the same memory.

The network calls `checkpoint_sequential(self.net, 2, x)` in its forward, as in the usual introductions to activation
checkpointing: the layers are cut into two segments, the first forgets its activations after the forward and computes
them again for the backward. The import is Lowtide's, which cuts where half of the bytes are; torch's cuts at half of
the layers, which is early in a network whose layers get smaller.

    python examples/two_segments.py --output demo-output

Four ways to train one step of it: plain, torch's two segments, Lowtide's two segments, and `lt.sequential` with a
budget in bytes, for which Lowtide decides what to keep. First all with the same batch. Then each with the largest
batch that stays within the memory of the plain step: checkpointing computes more for each sample, a larger batch
sometimes less, and the samples per second say what is left.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import process_time
from typing import Any

import torch
import torch.utils.checkpoint
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import nn

import lowtide.torch as lt
from lowtide.sizes import format_size
from lowtide.torch import checkpoint_sequential

GREY, ORANGE, BLUE, GREEN = "#8a8a8a", "#c9621a", "#1f6fb4", "#2e8b57"
BUDGET = "30%"
WIDTHS = (784, 256, 256, 256, 256, 192, 192, 192, 192, 128, 128, 128, 128, 64, 64, 64, 64, 10)


class Network(nn.Module):
    """A classifier whose layers get smaller, in two segments."""

    def __init__(self, widths: Sequence[int] = WIDTHS) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for wide, narrow in pairwise(widths):
            layers += [nn.Linear(wide, narrow), nn.GELU()]
        self.net = nn.Sequential(*layers[:-1])

    def forward(self, x: torch.Tensor) -> Any:
        """The layers, in two segments."""
        return checkpoint_sequential(self.net, 2, x)


class Plain(Network):
    """The same, keeping everything."""

    def forward(self, x: torch.Tensor) -> Any:
        """The layers."""
        return self.net(x)


class TorchSegments(Network):
    """The same with torch's function."""

    def forward(self, x: torch.Tensor) -> Any:
        """The layers, in two segments of as many layers each."""
        return torch.utils.checkpoint.checkpoint_sequential(self.net, 2, x, use_reentrant=False)


class Budgeted(Network):
    """The same within a budget."""

    def forward(self, x: torch.Tensor) -> Any:
        """The layers, of which as much is kept as the budget allows."""
        return lt.sequential(self.net, x, budget=BUDGET)


WAYS: dict[str, type[Network]] = {
    "plain": Plain,
    "torch, 2 segments": TorchSegments,
    "Lowtide, 2 segments": Network,
    f"Lowtide, budget {BUDGET}": Budgeted,
}
COLORS = dict(zip(WAYS, (GREY, ORANGE, BLUE, GREEN), strict=True))


def gradients(model: Network, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """One forward and one backward."""
    return torch.autograd.grad(nn.functional.cross_entropy(model(x), labels), list(model.parameters()))


def data(batch: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, inputs, generator=generator), torch.randint(10, (batch,), generator=generator)


def peak_bytes(model: Network, batch: int, inputs: int) -> int:
    """Most bytes of tensors that a step makes and holds at once, gradients included."""
    x, labels = data(batch, inputs)
    gradients(model, x, labels)  # so that what is measured for a plan, once for all, is not measured with it
    with lt.measure.peak() as memory:
        gradients(model, x, labels)
    return memory.peak


def largest_batch(model: Network, memory: int, batch: int, inputs: int) -> int:
    """The largest multiple of an eighth of `batch` whose step stays within `memory`; `batch` itself does."""
    unit = max(1, batch // 8)
    low, high = batch // unit, 2 * batch // unit
    while peak_bytes(model, high * unit, inputs) <= memory:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if peak_bytes(model, middle * unit, inputs) <= memory:
            low = middle
        else:
            high = middle
    return low * unit


def cpu_seconds(works: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Least CPU seconds of each, taking turns; every one is run once before."""
    for work in works:
        work()
    best = [math.inf] * len(works)
    for _ in range(repeats):
        for k, work in enumerate(works):
            began = process_time()
            work()
            best[k] = min(best[k], process_time() - began)
    return best


@dataclass(frozen=True)
class Row:
    """What one way takes: memory at the plain batch, the largest batch in the plain memory, samples per second."""

    peak: int
    batch: int
    rate: float
    rate_larger: float


def measure(batch: int, widths: Sequence[int], repeats: int, console: Console) -> dict[str, Row]:
    """Every way; refuses to go on if a gradient differs from the plain one in any bit."""
    models = {}
    for name, kind in WAYS.items():
        torch.manual_seed(0)
        models[name] = kind(widths)
    inputs = widths[0]
    x, labels = data(batch, inputs)
    expected = gradients(models["plain"], x, labels)
    peaks, batches = {}, {}
    for name, model in models.items():
        if not all(map(torch.equal, gradients(model, x, labels), expected)):
            raise AssertionError(f"{name}: the gradients are not those of the plain network")
        with console.status(f"measuring memory: {name}"):
            peaks[name] = peak_bytes(model, batch, inputs)
            batches[name] = batch if name == "plain" else largest_batch(model, peaks["plain"], batch, inputs)
    works = [partial(gradients, model, x, labels) for model in models.values()]
    works += [partial(gradients, model, *data(batches[name], inputs)) for name, model in models.items()]
    with console.status("timing"):
        seconds = cpu_seconds(works, repeats)
    same, larger = seconds[: len(models)], seconds[len(models) :]
    return {
        name: Row(peaks[name], batches[name], batch / same[k], batches[name] / larger[k])
        for k, name in enumerate(models)
    }


def table_of(rows: dict[str, Row], batch: int) -> Table:
    plain = rows["plain"]
    table = Table(title=f"One training step, batch {batch:,}", title_justify="left", caption_justify="left")
    table.caption = (
        f"Speed in samples per second; plain makes {plain.rate:,.0f}. Larger batch: the largest\n"
        f"within {format_size(plain.peak)}, the plain step's peak. All gradients have the same bits."
    )
    table.add_column("way", no_wrap=True)
    for heading in ("peak", "of plain", "speed", "larger batch", "its speed"):
        table.add_column(heading, justify="right")
    for name, row in rows.items():
        shares = [f"{rate / plain.rate:.0%}" for rate in (row.rate, row.rate_larger)]
        table.add_row(
            name, format_size(row.peak), f"{row.peak / plain.peak:.0%}", shares[0], f"{row.batch:,}", shares[1]
        )
    return table


def draw(rows: dict[str, Row], batch: int, path: Path) -> None:
    """Three panels of bars: memory at the same batch, the batch at the same memory, the samples per second there."""
    plain = rows["plain"]
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3, sharey=True)
    mib = 1024**2
    _bars(
        left,
        [(row.peak / mib, f"{row.peak / mib:.0f} MiB") for row in rows.values()],
        f"memory, batch {batch:,}",
        "peak of live tensors (MiB)",
    )
    _bars(
        middle,
        [(row.batch, f"{row.batch:,}") for row in rows.values()],
        f"batch within {plain.peak / mib:.0f} MiB",
        "samples in a batch",
    )
    _bars(
        right,
        [(row.rate_larger / 1000, f"{row.rate_larger / plain.rate:.0%} of plain") for row in rows.values()],
        "speed with that batch",
        "thousand samples for each CPU second",
    )
    left.set_yticks(range(len(rows)), list(rows))
    left.invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _bars(axes: Axes, values: Sequence[tuple[float, str]], title: str, label: str) -> None:
    sizes = [size for size, _ in values]
    axes.barh(range(len(values)), sizes, color=list(COLORS.values()), height=0.62)
    for k, (size, text) in enumerate(values):
        axes.text(size, k, f" {text}", va="center", fontsize=9)
    axes.set_xlim(0, 1.3 * max(sizes))
    axes.set_title(title, loc="left", weight="bold", fontsize=11)
    axes.set_xlabel(label)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def run(output: Path, batch: int, widths: Sequence[int], repeats: int, console: Console) -> dict[str, Row]:
    """Everything in order: measure, print, draw."""
    rows = measure(batch, widths, repeats, console)
    console.print(table_of(rows, batch))
    path = output / "two-segments.png"
    draw(rows, batch, path)
    console.print(f"figure: {path}", soft_wrap=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="A network in two segments: memory, larger batches, speed.")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for the figure")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--quick", action="store_true", help="a small network and few repeats")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.quick:
        run(given.output, 1024, (32, *[24] * 6, *[12] * 6, 10), 1, Console())
    else:
        run(given.output, given.batch, WIDTHS, 5, Console())


if __name__ == "__main__":
    main()
