"""A heavy model made light: 100,000 tensors saved for the backward become 100 at a time, and one import says so.

A model calls a function 1,000 times, and the function has 100 operations. Autograd saves tensors for the backward in
every operation, 100,000 in all. A checkpoint around the function drops them after each call and computes them again
when the backward gets there, so that only the 100 of one call are alive at once.

    python examples/heavy_model.py --output demo-output

`LightModel` is written as a tutorial on `torch.utils.checkpoint` prints it, with the import changed to Lowtide's. Its
function adds, and an addition saves nothing at all: it shows that results and gradients are the same. What is counted
is a second function, x = sin(x + a), where each sine saves its input. The function hands each of these to a counter,
which watches its storage until it dies. The inputs that the 1,000 calls keep, to start again from, are counted apart,
because they are real too.
"""

from __future__ import annotations

import argparse
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import process_time

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from rich.console import Console
from rich.table import Table
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from lowtide.torch import checkpoint

GREY, BLUE, ORANGE = "#8a8a8a", "#1f6fb4", "#c9621a"
PLAIN, TORCH, OURS = "plain", "torch checkpoint", "lt.checkpoint"


def heavy_function(x, a):  # type: ignore[no-untyped-def]  # this and the models are as they were printed
    for _ in range(100):
        x = x + a
    return x


class HeavyModel(torch.nn.Module):
    """The model as it was printed."""

    def __init__(self):  # type: ignore[no-untyped-def]
        super(HeavyModel, self).__init__()  # noqa: UP008
        self.a = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x):  # type: ignore[no-untyped-def]
        """1,000 calls, each of which keeps all that autograd wants."""
        for _ in range(1000):
            x = heavy_function(x, self.a)  # type: ignore[no-untyped-call]
        return x


class LightModel(torch.nn.Module):
    """The same with a checkpoint around the function, as it was printed; only the import is another."""

    def __init__(self):  # type: ignore[no-untyped-def]
        super(LightModel, self).__init__()  # noqa: UP008
        self.a = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x):  # type: ignore[no-untyped-def]
        """1,000 calls, each of which starts again when the backward gets there."""
        for _ in range(1000):
            x = checkpoint(heavy_function, x, self.a)
        return x


def gradients_as_printed() -> list[tuple[float, float, float]]:
    """The result and both gradients of the heavy and of the light model."""
    found = []
    for model in (HeavyModel(), LightModel()):  # type: ignore[no-untyped-call]
        x = torch.tensor(0.0, requires_grad=True)
        y = model(x)
        y.backward()
        assert x.grad is not None
        assert model.a.grad is not None
        found.append((float(y.detach()), float(x.grad), float(model.a.grad)))
    return found


@dataclass
class Count:
    """How many watched tensors are alive, and how many were at each moment that it changed."""

    began: float
    alive: int = 0
    seconds: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """Most at once."""
        return max(self.counts)

    def watch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count the tensor from now until its storage dies."""
        self._change(1)
        weakref.finalize(tensor.untyped_storage(), self._change, -1).atexit = False
        return tensor

    def _change(self, by: int) -> None:
        self.alive += by
        self.seconds.append(process_time() - self.began)
        self.counts.append(self.alive)


@dataclass
class Run:
    """One forward and one backward: what was alive when, and what came out."""

    saved: Count  # inside the function, for the backward
    kept: Count  # what the calls start from
    backward_began: float
    seconds: float
    gradients: list[float]


def run_counting(way: str, calls: int, operations: int, *, counting: bool = True) -> Run:
    """Run the function that saves tensors, `calls` times in one of the ways, counting as it goes."""
    began = process_time()
    saved, kept = Count(began), Count(began)
    # Lowtide sees to it that objects a function changes are changed once, however often it is run. A counter of runs
    # must not be treated so: behind a weak reference it is not the function's.
    counter = weakref.ref(saved)

    def watch(tensor: torch.Tensor) -> torch.Tensor:
        count = counter() if counting else None
        return tensor if count is None else count.watch(tensor)

    def function(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        for _ in range(operations):
            x = torch.sin(watch(x + a))
        return x

    ways: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        PLAIN: function,
        TORCH: partial(torch_checkpoint, function, use_reentrant=False),
        OURS: partial(checkpoint, function),
    }
    x0, a = torch.tensor(0.5, requires_grad=True), torch.tensor(1.0, requires_grad=True)
    x = x0
    for _ in range(calls):
        x = ways[way](x, a)
        if counting:
            kept.watch(x)
    backward_began = process_time() - began
    gradients = [float(each) for each in torch.autograd.grad(x, (x0, a))]
    return Run(saved, kept, backward_began, process_time() - began, gradients)


@contextmanager
def no_collecting() -> Iterator[None]:
    """Nothing here needs the garbage collector, and its pauses would be steps in the curves."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def compare(calls: int, operations: int, console: Console) -> dict[str, Run]:
    """Every way, counted; the gradients must be those of the plain one."""
    runs = {}
    for way in (PLAIN, TORCH, OURS):
        with console.status(f"counting: {way}"), no_collecting():
            runs[way] = run_counting(way, calls, operations)
        if runs[way].gradients != runs[PLAIN].gradients:
            raise AssertionError(f"{way}: the gradients are not those of the plain model")
    return runs


def table_of(runs: dict[str, Run], calls: int, operations: int, console: Console) -> Table:
    """Counts, and CPU time measured again without the counting."""
    title = f"{calls:,} calls of {operations} x = sin(x + a), forward and backward"
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.caption = "Tensors alive at once, at the worst moment. Time without the counting."
    table.add_column("way")
    for heading in ("saved in the function", "inputs of calls", "CPU time", "gradients"):
        table.add_column(heading, justify="right")
    usual = 0.0
    for way, run in runs.items():
        with console.status(f"timing: {way}"):
            seconds = run_counting(way, calls, operations, counting=False).seconds
        usual = usual or seconds
        bits = "" if way == PLAIN else "same bits"
        table.add_row(way, f"{run.saved.peak:,}", f"{run.kept.peak:,}", f"{seconds / usual:.2f}x", bits)
    return table


def envelope(count: Count, seconds: float, bins: int = 400) -> tuple[list[float], list[int]]:
    """The most that were alive in each of `bins` equal spans of time."""
    most, alive, at = [], 0, 0
    for k in range(bins):
        highest = alive
        while at < len(count.seconds) and count.seconds[at] <= (k + 1) * seconds / bins:
            alive = count.counts[at]
            highest = max(highest, alive)
            at += 1
        most.append(highest)
    return [(k + 0.5) * seconds / bins for k in range(bins)], most


def draw(runs: dict[str, Run], calls: int, operations: int, path: Path) -> None:
    """Live tensors over time, plain and checkpointed side by side on the same logarithmic axis."""
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    plain, ours = runs[PLAIN], runs[OURS]
    left.set_yscale("log")
    left.set_ylim(0.7, 4 * plain.saved.peak)
    left.yaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{int(count):,}"))
    left.set_ylabel("tensors alive")
    for axes, run, title in ((left, plain, "plain"), (right, ours, "with lt.checkpoint")):
        if run is ours:
            axes.plot(*envelope(run.kept, run.seconds), color=ORANGE, linewidth=2, linestyle=(0, (5, 1.5)))
            label = f"{run.kept.peak:,} inputs that the calls keep"
            axes.text(run.seconds / 2, 1.6 * run.kept.peak, label, color=ORANGE, ha="center")
        axes.plot(*envelope(run.saved, run.seconds), color=BLUE, linewidth=2)
        axes.axvspan(0, run.backward_began, color=GREY, alpha=0.13, linewidth=0)
        middles = {"forward": run.backward_began / 2, "backward": (run.backward_began + run.seconds) / 2}
        for phase, middle in middles.items():
            axes.text(middle, 2.2 * plain.saved.peak, phase, color=GREY, ha="center", fontsize=9)
        axes.set_title(title, loc="left", weight="bold")
        axes.set_xlabel("CPU time since the forward began (s)")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    label = f"{plain.saved.peak:,} tensors\nsaved for the\nbackward"
    left.text(plain.seconds / 2, 0.3 * plain.saved.peak, label, color=BLUE, ha="center", va="top")
    label = f"{ours.saved.peak:,} tensors saved,\nof one call at a time"
    right.text(middles["backward"], 0.7 * ours.saved.peak, label, color=BLUE, ha="center", va="top")
    left.set_xlim(left=0)
    figure.suptitle(f"{calls:,} calls of a function in which autograd saves {operations} tensors", x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def run(output: Path, calls: int, operations: int, console: Console) -> dict[str, Run]:
    """Everything in order: the models as printed, the counts, the table, the figure."""
    heavy, light = gradients_as_printed()
    if heavy != light:
        raise AssertionError(f"the heavy model gives {heavy}, the light one {light}")
    y, x_grad, a_grad = light
    console.print(
        f"as printed, 1,000 calls of 100 additions: y = {y:,.0f}, dy/dx = {x_grad:g}, dy/da = {a_grad:,.0f}, "
        "the same with lt.checkpoint"
    )
    runs = compare(calls, operations, console)
    console.print(table_of(runs, calls, operations, console))
    path = output / "heavy-model.png"
    draw(runs, calls, operations, path)
    console.print(f"figure: {path}", soft_wrap=True)
    return runs


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="A heavy model with checkpoints: how many tensors are alive when.")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for the figure")
    parser.add_argument("--quick", action="store_true", help="20 calls of 10 operations")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    calls, operations = (20, 10) if given.quick else (1_000, 100)
    run(given.output, calls, operations, Console())


if __name__ == "__main__":
    main()
