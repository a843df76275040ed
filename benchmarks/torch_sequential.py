"""Layers in a row within a budget: `lt.sequential` beside `torch.utils.checkpoint.checkpoint_sequential`.

    python benchmarks/torch_sequential.py [--quick] [--only VGG]

Chains of layers: one in the shape of VGG-16; three whose widths fall and rise again (a U), linear ones by halves and by
equal amounts, and convolutions as in a U-Net without its skips; 48 equal transformer blocks. Torch's function is run
with every number of segments, and its peak measured. For each peak on its frontier (nothing it can do is both smaller
and faster) Lowtide gets that very peak as its budget. Then chains of L equal residual blocks, and the transformer, with
room for 2 sqrt(L) tapes. What that costs on paper is (1 - kept / L) of all forwards, where `kept` is how many tapes
there is room for from the start; so it rises with L, and falls with what a backward takes beside a forward.

How it measures. A peak is the most bytes of live tensors in one forward and backward, beyond input, output and the
gradients of the parameters made so far, which the plain call holds too. Times are CPU seconds of this process
(`time.process_time`), one thread; plain, torch and Lowtide take turns and the least of the repeats counts. Because a
machine that others use is noisy all the same, there is also the extra time on paper: what is run again, from the
seconds of each layer as Lowtide measured them; that both stop a rerun early, at the last tensor needed, is left out.

    peak       torch's peak, which is Lowtide's budget; of plain: as a share of what the plain call takes
    used       Lowtide's measured peak as a share of the budget, and what its plan predicted as a share of that peak
    extra      time beyond the plain call, as a share of the plain call's
    /torch     Lowtide's extra time as a multiple of torch's, measured and on paper

Gradients are asserted to have the plain call's bits.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from ratios import Ratio, command, cpu_in_turns, heading
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

import lowtide.torch as lt
from lowtide import BudgetError, Plan
from lowtide.actions import Advance
from lowtide.chain import Chain
from lowtide.sizes import format_size

Results = tuple[torch.Tensor, ...]
Run = Callable[[], Results]


def vgg(width: int = 32, size: int = 64, batch: int = 4) -> tuple[nn.Sequential, torch.Tensor]:
    """VGG-16 with `width` channels in its first block instead of 64, for images of `size` x `size`."""
    layers: list[nn.Module] = []
    channels = 3
    for times, convolutions in ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3)):
        for _ in range(convolutions):
            layers += [nn.Conv2d(channels, times * width, 3, padding=1), nn.ReLU()]
            channels = times * width
        layers.append(nn.MaxPool2d(2))
    features = channels * (size // 32) ** 2
    layers += [nn.Flatten(), nn.Linear(features, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers), torch.randn(batch, 3, size, size)


def u_net(width: int = 16, size: int = 64, batch: int = 4) -> tuple[nn.Sequential, torch.Tensor]:
    """Four halvings of the image and four doublings, two convolutions at each size."""
    layers: list[nn.Module] = []
    channels = 3
    for times in (1, 2, 4, 8):
        layers += [*_twice(channels, times * width), nn.MaxPool2d(2)]
        channels = times * width
    layers += _twice(channels, 16 * width)
    for times in (8, 4, 2, 1):
        layers += [nn.ConvTranspose2d(2 * times * width, times * width, 2, 2), *_twice(times * width, times * width)]
    return nn.Sequential(*layers, nn.Conv2d(width, 3, 1)), torch.randn(batch, 3, size, size)


def _twice(channels: int, wanted: int) -> list[nn.Module]:
    both = [nn.Conv2d(channels, wanted, 3, padding=1), nn.Conv2d(wanted, wanted, 3, padding=1)]
    return [each for convolution in both for each in (convolution, nn.GELU())]


def u_of_halves(widest: int = 1024, batch: int = 256) -> tuple[nn.Sequential, torch.Tensor]:
    """Linear layers whose widths are halved down to a 32nd, and doubled again, each with an activation."""
    return _linear([widest >> k for k in (0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0)], batch)


def u_of_steps(widest: int = 1024, batch: int = 256) -> tuple[nn.Sequential, torch.Tensor]:
    """Linear layers whose widths fall by equal amounts to a 16th, and rise again, each with an activation."""
    falling = [widest * k // 16 for k in (16, 14, 12, 10, 8, 6, 4, 3, 2, 1)]
    return _linear(falling + falling[-2::-1], batch)


def _linear(widths: list[int], batch: int) -> tuple[nn.Sequential, torch.Tensor]:
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.GELU())]
    return nn.Sequential(*layers), torch.randn(batch, widths[0])


def transformer(blocks: int = 48, width: int = 64, batch: int = 4, tokens: int = 64) -> tuple[nn.Sequential, Any]:
    """Equal transformer blocks."""
    block = partial(nn.TransformerEncoderLayer, width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
    return nn.Sequential(*[block() for _ in range(blocks)]), torch.randn(batch, tokens, width)


class Residual(nn.Module):
    """x + MLP(norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        changed: torch.Tensor = x + self.body(x)
        return changed


def residual(blocks: int = 48, width: int = 1024, batch: int = 64) -> tuple[nn.Sequential, torch.Tensor]:
    """Equal residual blocks."""
    return nn.Sequential(*[Residual(width) for _ in range(blocks)]), torch.randn(batch, width)


@dataclass
class Network:
    """A chain of layers, its input, and the gradient that its output gets."""

    name: str
    layers: nn.Sequential
    x: torch.Tensor
    cotangent: torch.Tensor

    @classmethod
    def make(cls, name: str, layers: nn.Sequential, x: torch.Tensor) -> Network:
        """With a gradient of the output's shape."""
        with torch.no_grad():
            y = layers(x)
        return cls(name, layers, x, torch.randn_like(y))

    def results(self, y: torch.Tensor) -> Results:
        """The backward: the output and the gradients of all parameters."""
        return (y.detach(), *torch.autograd.grad(y, list(self.layers.parameters()), self.cotangent))

    def plain(self) -> Results:
        """As anybody would write it."""
        return self.results(self.layers(self.x))

    def torchs(self, segments: int) -> Results:
        """With torch's function."""
        return self.results(checkpoint_sequential(self.layers, segments, self.x, use_reentrant=False))

    def lowtides(self, plan: Plan) -> Results:
        """With Lowtide's."""
        return self.results(lt.sequential(self.layers, self.x, plan=plan))

    def peak(self, run: Run) -> int:
        """Most bytes beyond what every way of running holds."""
        with lt.measure.peak() as memory:
            results = run()
            beyond = memory.beyond()
        del results  # alive until here, so that they are no part of it
        return beyond


def forward_seconds(layers: nn.Sequential, x: torch.Tensor, chain: Chain, repeats: int = 5) -> list[float]:
    """For each layer, in the seconds of the chain, whose steps may be several layers each: the name says which."""
    measured = []
    for layer in layers:
        x = x.detach().requires_grad_()
        measured += cpu_in_turns([partial(layer, x)], repeats)
        x = layer(x)
    scaled: list[float] = []
    for k, name in enumerate(chain.names):
        first, _, last = name.split()[0].partition("-")
        those = measured[int(first) : int(last or first) + 1]
        scaled += [each * chain[k].forward / sum(those) for each in those]
    assert len(scaled) == len(layers), "the names of the chain do not cover the layers"
    return scaled


def torch_extra(forward: Sequence[float], segments: int) -> float:
    """Seconds that torch's function runs again, on paper: all segments but the last, which gets what is left over."""
    return sum(forward[: len(forward) // segments * (segments - 1)])


@dataclass(frozen=True)
class Point:
    """What torch's function reaches with a number of segments: measured peak, extra seconds on paper."""

    segments: int
    peak: int
    extra: float


def frontier(points: Sequence[Point]) -> list[Point]:
    """Those that nothing beats in both, the largest peak first."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda each: (each.peak, each.extra)):
        if not kept or point.extra < kept[-1].extra:
            kept.append(point)
    return kept[::-1]


def verdict(kept: bool) -> str:
    return "kept" if kept else "NOT KEPT"


def same_bits(found: Results, expected: Results) -> None:
    assert all(map(torch.equal, found, expected)), "output or gradients are not the plain call's"
    assert all(bool(each.abs().sum()) for each in expected), "a gradient is zero: nothing was compared"


def beside_torch(network: Network, least_limit: float, repeats: int, most_points: int) -> list[Ratio]:
    """The table for one network; `least_limit` is for the extra time at torch's lowest peak."""
    chain = lt.plan_sequential(network.layers, network.x).chain
    forward = forward_seconds(network.layers, network.x, chain)
    plain_peak = network.peak(network.plain)
    points = [
        Point(segments, network.peak(partial(network.torchs, segments)), torch_extra(forward, segments))
        for segments in range(2, len(forward) + 1)
    ]
    best = frontier([point for point in points if point.peak < plain_peak])
    while len(best) > most_points:  # thin out, keeping both ends
        best = best[:1] + best[1:-1][::2] + best[-1:]
    heading(f"{network.name}: {len(forward)} layers, the plain call takes {format_size(plain_peak)}")
    print(
        f"{'segments':>8} {'peak':>11} {'of plain':>8} {'used':>6} {'predicted':>9} {'torch':>8} {'lowtide':>8} "
        f"{'/torch':>7} {'torch':>8} {'lowtide':>8} {'/torch':>7}\n"
        f"{'':>46} {'extra time, measured':>25} {'extra time, on paper':>25}",
        flush=True,
    )
    expected = network.plain()
    ratios: list[float] = []
    papers: list[float] = []
    slower: list[int] = []
    by_torch = used = apart = 0.0
    for point in best:
        try:
            plan = lt.plan_sequential(network.layers, network.x, budget=point.peak)
        except BudgetError as error:
            print(f"{point.segments:>8} {format_size(point.peak):>11}  NOT REACHED: {error}", flush=True)
            ratios, papers = [*ratios, math.inf], [*papers, math.inf]
            continue
        ours = partial(network.lowtides, plan)
        same_bits(ours(), expected)
        usual, theirs, taken = cpu_in_turns([network.plain, partial(network.torchs, point.segments), ours], repeats)
        peak, predicted = network.peak(ours), plan.bill.peak_memory
        paper = plan.bill.seconds - chain.plain_seconds
        ratios.append((taken - usual) / (theirs - usual))
        papers.append(paper / point.extra)
        if taken > theirs:
            slower.append(point.segments)
        by_torch, used = max(by_torch, taken / theirs), max(used, peak / point.peak)
        apart = max(apart, abs(predicted / peak - 1))
        print(
            f"{point.segments:>8} {format_size(point.peak):>11} {point.peak / plain_peak:>8.1%} "
            f"{peak / point.peak:>6.1%} {predicted / peak:>9.1%} {theirs / usual - 1:>8.1%} {taken / usual - 1:>8.1%} "
            f"{ratios[-1]:>7.2f} {point.extra / chain.plain_seconds:>8.1%} {paper / chain.plain_seconds:>8.1%} "
            f"{papers[-1]:>7.2f}",
            flush=True,
        )
    print(
        f"at torch's lowest peak, extra time {ratios[-1]:.2f}x of torch's (on paper {papers[-1]:.2f}x), "
        f"limit {least_limit}: {verdict(ratios[-1] <= least_limit)} (on paper {verdict(papers[-1] <= least_limit)})\n"
        f"no slower than torch at any of its peaks: {verdict(not slower)}"
        f"{f' with {slower} segments' if slower else ''} (on paper {verdict(max(papers) <= 1)})\n"
        f"measured peak within the budget: {verdict(used <= 1)}; prediction within 10% of it: {verdict(apart <= 0.1)}",
        flush=True,
    )
    return [
        Ratio(f"{network.name}: extra time of torch's, at its lowest peak", ratios[-1], least_limit),
        Ratio(f"{network.name}: the same on paper", papers[-1], least_limit),
        Ratio(f"{network.name}: time of torch's at any of its peaks, at worst", by_torch, 1.0),
        Ratio(f"{network.name}: peak of the budget, at worst", used, 1.0),
        Ratio(f"{network.name}: prediction apart from the peak, at worst", apart, 0.1),
    ]


def uniform(network: Network, repeats: int, limit: float = 0.25) -> Ratio:
    """A chain of equal layers with room for 2 sqrt(L) tapes."""
    chain = lt.plan_sequential(network.layers, network.x).chain
    length = len(chain)
    budget = int(2 * math.sqrt(length) * chain.plain_tape / length)
    plan = lt.plan_sequential(network.layers, network.x, budget=budget)
    ours = partial(network.lowtides, plan)
    same_bits(ours(), network.plain())
    usual, taken, forward = cpu_in_turns([network.plain, ours, lambda: network.layers(network.x)], repeats)
    kept = length - len({k for act in plan.actions() if isinstance(act, Advance) for k in range(act.start, act.stop)})
    paper = plan.bill.plain_runs / length * forward / usual
    peak = network.peak(ours)
    print(
        f"{network.name:<24} {length:>4} {2 * math.sqrt(length):>8.1f} {kept:>6} {plan.bill.plain_runs:>6} "
        f"{peak / budget:>6.1%} {plan.bill.peak_memory / peak:>9.1%} {forward / usual:>8.1%} {paper:>7.1%} "
        f"{taken / usual - 1:>9.1%} {verdict(taken / usual - 1 <= limit):>9}",
        flush=True,
    )
    return Ratio(f"{network.name}: extra time with room for 2 sqrt(L) tapes, of plain's", taken / usual - 1, limit)


def main(arguments: list[str]) -> list[Ratio]:
    parser = argparse.ArgumentParser(description="lt.sequential beside torch's checkpoint_sequential.")
    parser.add_argument("--quick", action="store_true", help="small networks, few repeats")
    parser.add_argument("--only", help="only networks with this in their name")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    quick = given.quick
    repeats, most_points = (2, 3) if quick else (7, 8)
    made = {
        "VGG-16 shape": (vgg(8, 32, 2) if quick else vgg(), 0.65),
        "U of linear layers, by halves": (u_of_halves(128, 64) if quick else u_of_halves(), 0.65),
        "U of linear layers, by equal amounts": (u_of_steps(128, 64) if quick else u_of_steps(), 0.65),
        "U of convolutions": (u_net(4, 32, 2) if quick else u_net(), 0.65),
        "48 transformer blocks": (transformer(48, 16, 2, 16) if quick else transformer(), 1.0),
    }
    wanted = (given.only or "").lower()
    ratios: list[Ratio] = []
    for name, ((layers, x), limit) in made.items():
        if wanted in name.lower():
            ratios += beside_torch(Network.make(name, layers, x), limit, repeats, most_points)
    deep = {f"residual blocks, {length}": length for length in (16, 24, 32, 48)}
    rows = {name: (residual(length, 32, 32) if quick else residual(length)) for name, length in deep.items()}
    chosen = {
        name: row for name, row in {**rows, "transformer": made["48 transformer blocks"][0]}.items() if wanted in name
    }
    if chosen:
        heading("Equal layers, room for 2 sqrt(L) tapes; limit of the extra time 25%")
        print(
            f"{'':<24} {'L':>4} {'room for':>8} {'kept':>6} {'reruns':>6} {'used':>6} {'predicted':>9} {'forward':>8} "
            f"{'paper':>7} {'measured':>9}"
        )
    for name, (layers, x) in chosen.items():
        ratios.append(uniform(Network.make(name, layers, x), repeats))
    return ratios


if __name__ == "__main__":
    command(main)
