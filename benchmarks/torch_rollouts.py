"""What a checkpointed rollout in PyTorch costs beside the plain loop and `torch.utils.checkpoint`.

    python benchmarks/torch_rollouts.py [--quick] [--skip-long]

How it measures: CPU seconds of this process (`time.process_time`), one thread, so that a busy machine disturbs little.
All loops of a row take turns in one process, each is run once before, and the least of the repeats counts. A run is one
forward and one backward of the spiking network of brainstate's tutorial (80 inputs, n hidden, 2 outputs, batch 64),
written as a step function. Lowtide and torch's checkpoint both cut the rollout into segments of round(sqrt(T)) steps.

    /plain    Lowtide's time as a multiple of the plain loop's
    extra     what it takes beyond the plain loop, in forwards without grad: 1 is a bare rerun of every step
    /torch    its time as a multiple of torch's checkpoint
    us/step   microseconds for each step beyond the plain loop and one forward without grad
    memory    its peak of live tensors (`lt.measure.peak`, once, outputs and gradients included), as a share of plain's
    reduced   the same with reduce="mean", where no outputs are stacked

Gradients are asserted to have the plain loop's bits. A compiled step is timed against the plain eager loop after a
warm-up, and its bits are those of a plain loop over `torch.compile(step)`. The long rollout is a million tiny steps
with 20 snapshots; peak resident memory is the operating system's figure for the process, so it comes first.
"""

from __future__ import annotations

import argparse
import math
import resource
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from ratios import Ratio, command, cpu_in_turns, heading
from torch.utils.checkpoint import checkpoint

import lowtide.torch as lt
from lowtide.sizes import format_size
from lowtide.torch import spiking

Step = Callable[[Any, torch.Tensor], tuple[Any, torch.Tensor]]
Gradients = tuple[torch.Tensor, ...]
BATCH, INPUTS, CLASSES = 64, 80, 2


@dataclass
class Rollout:
    """A step, where it starts, what it reads, and what gradients are taken of."""

    step: Step
    init: tuple[torch.Tensor, ...]
    xs: torch.Tensor
    weights: list[torch.Tensor]
    labels: torch.Tensor

    def loss(self, ys: torch.Tensor) -> torch.Tensor:
        """Cross entropy of the mean output."""
        return torch.nn.functional.cross_entropy(ys.mean(0), self.labels)

    def gradients(self, ys: torch.Tensor) -> Gradients:
        """The backward."""
        return torch.autograd.grad(self.loss(ys), self.weights)


def spiking_rollout(hidden: int, length: int) -> Rollout:
    torch.manual_seed(0)
    # Four times the tutorial's deviation: its untrained network is silent, and a silent one has zeros for gradients.
    w1 = torch.randn(INPUTS, hidden).mul_(4 * math.sqrt(2 / INPUTS)).requires_grad_()
    w2 = torch.randn(hidden, CLASSES).mul_(math.sqrt(2 / hidden)).requires_grad_()
    b1, b2 = torch.zeros(hidden, requires_grad=True), torch.zeros(CLASSES, requires_grad=True)
    spike = spiking.ReluGrad()
    fast, slow, leak = math.exp(-1 / 5), math.exp(-1 / 10), -math.expm1(-1 / 20)

    def step(carry: Any, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
        g, v, o = carry
        g = spiking.expon_step(g, torch.addmm(b1, x, w1), fast)
        v, z = spiking.lif_step(v, g, spike=spike, leak=leak)
        o = spiking.expon_step(o, torch.addmm(b2, z, w2), slow)
        return (g, v, o), o

    init = tuple(torch.zeros(BATCH, n) for n in (hidden, hidden, CLASSES))
    xs = (torch.rand(length, BATCH, INPUTS) < 0.005).float()
    return Rollout(step, init, xs, [w1, b1, w2, b2], torch.randint(CLASSES, (BATCH,)))


def loop(step: Step, carry: Any, xs: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """The loop as anybody would write it."""
    ys = []
    for x in xs:
        carry, y = step(carry, x)
        ys.append(y)
    return carry, torch.stack(ys)


def plain(rollout: Rollout, step: Step | None = None) -> Gradients:
    return rollout.gradients(loop(step or rollout.step, rollout.init, rollout.xs)[1])


def forward(rollout: Rollout) -> torch.Tensor:
    with torch.no_grad():
        return rollout.loss(loop(rollout.step, rollout.init, rollout.xs)[1])


def lowtide(rollout: Rollout, base: int, *, compiling: bool = False) -> Gradients:
    _, ys = lt.checkpointed_scan(rollout.step, rollout.init, rollout.xs, base=base, compile=compiling)
    return rollout.gradients(ys)


def lowtide_reduced(rollout: Rollout, base: int) -> Gradients:
    _, mean = lt.checkpointed_scan(rollout.step, rollout.init, rollout.xs, base=base, reduce="mean")
    return torch.autograd.grad(torch.nn.functional.cross_entropy(mean, rollout.labels), rollout.weights)


def torch_checkpoint(rollout: Rollout, base: int) -> Gradients:
    carry: Any = rollout.init
    ys = []
    for xs in torch.split(rollout.xs, base):
        carry, y = checkpoint(loop, rollout.step, carry, xs, use_reentrant=False)
        ys.append(y)
    return rollout.gradients(torch.cat(ys))


def peak(work: Callable[[], Any]) -> int:
    with lt.measure.peak() as memory:
        work()
    return memory.peak


def same_bits(found: Gradients, expected: Gradients) -> str:
    assert all(map(torch.equal, found, expected)), "gradients are not the plain loop's"
    assert all(bool(gradient.abs().sum()) for gradient in expected), "a gradient is zero: nothing was compared"
    return "same bits"


def eager(sizes: list[int], lengths: list[int], repeats: int) -> list[Ratio]:
    heading("Eager, base = round(sqrt(T)): Lowtide")
    ratios = []
    print(
        f"{'n':>4} {'T':>6} {'/plain':>8} {'extra':>7} {'/torch':>8} {'us/step':>8} {'memory':>8} "
        f"{'reduced':>8}  gradients",
        flush=True,
    )
    for hidden in sizes:
        for length in lengths:
            rollout, base = spiking_rollout(hidden, length), round(math.sqrt(length))
            works: list[Callable[[], Any]] = [partial(plain, rollout), partial(forward, rollout)]
            works += [partial(lowtide, rollout, base), partial(torch_checkpoint, rollout, base)]
            usual, once, ours, theirs = cpu_in_turns(works, repeats)
            bits = same_bits(lowtide(rollout, base), plain(rollout))
            usually = peak(works[0])
            share, reduced = peak(works[2]) / usually, peak(partial(lowtide_reduced, rollout, base)) / usually
            beyond = (ours - usual - once) / length * 1e6
            print(
                f"{hidden:>4} {length:>6,} {ours / usual:>8.2f} {(ours - usual) / once:>7.2f} {ours / theirs:>8.2f} "
                f"{beyond:>8.1f} {share:>8.1%} {reduced:>8.1%}  {bits}",
                flush=True,
            )
            case = f"n={hidden}, T={length:,}"
            ratios.append(Ratio(f"time of the plain loop's, {case}", ours / usual))
            ratios.append(Ratio(f"time of torch's checkpoint's, {case}", ours / theirs))
            ratios.append(Ratio(f"memory of the plain loop's, {case}", share))
    return ratios


def compiled(sizes: list[int], length: int, repeats: int) -> list[Ratio]:
    heading(f"compile=True, T={length}: Lowtide beside the plain eager loop")
    print(f"{'n':>4} {'/plain':>8} {'/compiled':>10} {'warm-up':>9}  gradients", flush=True)
    ratios = []
    for hidden in sizes:
        rollout, base = spiking_rollout(hidden, length), round(math.sqrt(length))
        began = perf_counter()
        ours = lowtide(rollout, base, compiling=True)
        seconds = perf_counter() - began
        step = torch.compile(rollout.step)
        bits = same_bits(ours, plain(rollout, step))
        works: list[Callable[[], Any]] = [partial(plain, rollout), partial(plain, rollout, step)]
        works.append(partial(lowtide, rollout, base, compiling=True))
        usual, plainly, taken = cpu_in_turns(works, repeats)
        print(f"{hidden:>4} {taken / usual:>8.2f} {taken / plainly:>10.2f} {seconds:>7.1f} s  {bits}", flush=True)
        ratios.append(Ratio(f"time of the plain loop's, n={hidden}, T={length}, compiled", taken / usual))
    return ratios


def resident() -> int:
    """The most bytes that this process ever had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def long_rollout(length: int, checkpoints: int = 20) -> None:
    heading(f"{length:,} tiny steps, checkpoints={checkpoints}")
    w = torch.linspace(0.5, 0.9, 4, requires_grad=True)

    def step(h: torch.Tensor, _: None) -> tuple[torch.Tensor, None]:
        return torch.sin(h * w + 0.1), None

    before = resident()
    with lt.record(memory=False) as receipt:
        h, _ = lt.checkpointed_scan(
            step, torch.ones(4), length=length, checkpoints=checkpoints, pbar=max(1, length // 100)
        )
        (gradient,) = torch.autograd.grad(h.sum(), [w])
    runs = (receipt.plain_runs + receipt.taping_runs) / length
    print(
        f"{receipt.seconds:.1f} s, {runs:.2f} runs per step; peak resident memory {format_size(before)} before, "
        f"{format_size(resident())} after; the gradient is {gradient.tolist()}",
        flush=True,
    )


def main(arguments: list[str]) -> list[Ratio]:
    parser = argparse.ArgumentParser(description="What a checkpointed rollout in PyTorch costs.")
    parser.add_argument("--quick", action="store_true", help="8 neurons, 400 steps, few repeats, 10,000 tiny steps")
    parser.add_argument("--skip-long", action="store_true", help="leave out the million tiny steps")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sizes, lengths, repeats = ([8], [400], 3) if given.quick else ([256, 8], [400, 2000], 7)
    if not given.skip_long:  # first, because a peak of resident memory never comes down again
        long_rollout(10_000 if given.quick else 1_000_000)
    return [*eager(sizes, lengths, repeats), *compiled(sizes, 400, repeats)]


if __name__ == "__main__":
    command(main)
