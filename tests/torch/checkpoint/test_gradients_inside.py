"""Functions that take gradients inside themselves, so that a call is rerun before its first run is over."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide.torch as lt
from tests.torch.calls import Function, drawn_leaf, plainly, same

WIDTH = 4


class Slope(nn.Module):
    """Goes down the slope of an energy, as energy-based models do."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = x if x.requires_grad else x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.energy(z).sum(), z, create_graph=True)
        return x - 0.1 * slope


class Remembers(nn.Module):
    """Keeps tensors in a tuple, as recurrent networks keep their state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.state = nn.Linear(WIDTH, WIDTH), (torch.zeros(3, WIDTH), torch.ones(3, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x) + self.state[0]) * self.state[1]
        self.state = y.detach(), 1 + y.detach().square()
        return y


class Counts(nn.Module):
    """Has a counter, lists, buffers and generators, all of which steer it."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.drawn = nn.Linear(WIDTH, WIDTH), 0, [0.0]
        self.own, self.numpys = random.Random(1), np.random.default_rng(2)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.drawn.append(self.own.random() + float(self.numpys.normal()))
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return torch.tanh(self.linear(x) - self.mean) * (self.calls + self.drawn[-1])


class Balances(nn.Module):
    """Keeps a loss of its own, as a router does, which it replaces at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(WIDTH, WIDTH), torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        self.loss = y.square().mean()
        return y


def in_a_row(layers: list[nn.Module]) -> Function:
    """The layers in a list that the function closes over: they are found when they are called."""

    def run(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
        return x

    return run


def nested(layers: list[nn.Module]) -> Function:
    def run(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = lt.checkpoint(in_a_row([layer]), x)
        return x

    return run


def first_nested(layers: list[nn.Module]) -> Function:
    return lambda x: in_a_row(layers[1:])(lt.checkpoint(layers[0], x))


def trained(
    call: Callable[..., Any], arrange: Callable[..., Any], kinds: tuple[type[nn.Module], ...], data: bool
) -> list[Any]:
    """Losses, gradients, buffers, counters and places of generators after three steps."""
    torch.manual_seed(0)
    layers = [kind() for kind in kinds]
    net, found = nn.ModuleList(layers), []
    for step in range(3):
        x = drawn_leaf(3, WIDTH, seed=step).requires_grad_(not data)
        loss = call(arrange(layers), x).square().mean()
        loss = loss + sum(layer.loss for layer in layers if isinstance(layer, Balances))
        loss.backward()
        found += [loss.detach(), x.grad, *[p.grad for p in net.parameters()], *[b.clone() for b in net.buffers()]]
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.grad is not None:  # no slope depends on an energy's last bias
                    parameter.sub_(parameter.grad)
                parameter.grad = None
    for layer in layers:
        if isinstance(layer, Counts):
            draws = layer.own.random(), layer.numpys.normal()
            found.append(torch.tensor([layer.calls, *layer.drawn, *draws], dtype=torch.float64))
    return found


KINDS = [
    (Slope, Counts),
    (Remembers, Slope),
    (Counts, Slope, Remembers, Counts),
    (Slope, Slope),
    (Remembers, Slope, Slope),
    (Balances, Slope),
]


@pytest.mark.parametrize("data", [False, True], ids=["with a gradient", "data"])
@pytest.mark.parametrize("options", [{}, {"check_rerun": True, "early_stop": False}], ids=str)
@pytest.mark.parametrize("arrange", [in_a_row, nested, first_nested])
@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: "-".join(kind.__name__ for kind in kinds))
def test_gradients_taken_inside(kinds: Any, arrange: Callable[..., Any], options: dict[str, Any], data: bool) -> None:
    found = trained(lambda function, x: lt.checkpoint(function, x, **options), arrange, kinds, data)
    same(found, trained(plainly, in_a_row, kinds, data))


def drawn(layers: list[nn.Module], draw: random.Random) -> Function:
    """The layers in calls of several kinds, one inside another, as the draw has it."""
    if len(layers) == 1 or draw.random() < 0.2:
        return in_a_row(layers)
    cut = draw.randint(1, len(layers) - 1)
    parts = [drawn(part, draw) for part in (layers[:cut], layers[cut:])]
    calls = [draw.choice((lt.checkpoint, lt.checkpoint, lt.lean, plainly)) for _ in parts]

    def run(x: torch.Tensor) -> torch.Tensor:
        for call, part in zip(calls, parts, strict=True):
            x = call(part, x)
        return x

    return run


SEEDS = [*range(15), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(15, 400))]


@pytest.mark.filterwarnings("ignore:.*keep their whole tape")
@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_nests(seed: int) -> None:
    draw = random.Random(seed)
    kinds = tuple(draw.choices([Slope, Remembers, Counts, Balances], k=draw.randint(2, 6)))
    found = trained(lt.checkpoint, lambda layers: drawn(layers, random.Random(seed)), kinds, seed % 2 == 0)
    same(found, trained(plainly, in_a_row, kinds, seed % 2 == 0))
