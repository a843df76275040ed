"""Steps of training whose backward does not ask for everything that was saved, and what is alive after many of them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.torch.memory.tracker import peak
from tests.torch.calls import Function, drawn_leaf

WIDTH = 8


class Metered(nn.Module):
    """A block that computes a metric with grad, keeps it, and leaves it to nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.metric: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x)).sin()
        self.metric = (y.exp() * y).mean()
        z: torch.Tensor = x + self.second(y)
        return z


class MeteredNet(nn.Module):
    """A model of such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Metered() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _whole(y: torch.Tensor, x: torch.Tensor) -> None:
    y.square().mean().backward()


def _two_losses(y: torch.Tensor, x: torch.Tensor) -> None:
    y.square().mean().backward(retain_graph=True)
    y.sum().backward()


def _kept_for_nothing(y: torch.Tensor, x: torch.Tensor) -> None:
    y.square().mean().backward(retain_graph=True)


def _some_inputs(y: torch.Tensor, x: torch.Tensor) -> None:
    y.square().mean().backward(inputs=[x])


def _penalty(y: torch.Tensor, x: torch.Tensor) -> None:
    (gradient,) = torch.autograd.grad(y.square().mean(), x, create_graph=True)
    (gradient.square().sum() + y.sum()).backward()


def _none(y: torch.Tensor, x: torch.Tensor) -> None:
    pass


def _failing(y: torch.Tensor, x: torch.Tensor) -> None:
    def fail(_: Any) -> None:
        raise ZeroDivisionError

    x.register_hook(fail)
    try:
        y.square().mean().backward()
    except ZeroDivisionError:
        return
    raise AssertionError("it did not fail")


Backward = Callable[[torch.Tensor, torch.Tensor], None]
Counts = tuple[int, int]
_ALL = (_whole, _two_losses, _kept_for_nothing, _some_inputs, _penalty, _none, _failing)
# A backward, threads, and after how many steps to look.
CASES: list[Any] = [*((backward, 1, (10, 60)) for backward in _ALL), (_whole, 4, (10, 40))]
CASES += [pytest.param(backward, 1, (20, 200), marks=pytest.mark.slow) for backward in _ALL]
CASES += [pytest.param(backward, 4, (20, 200), marks=pytest.mark.slow) for backward in (_whole, _failing)]


def alive(run: Function, backward: Backward, counts: Counts) -> tuple[int, int]:
    """The bytes alive after few steps and after many, without the garbage collector."""
    levels = []
    with peak() as memory:
        for number in range(1, counts[1] + 1):
            x = drawn_leaf(4, WIDTH, seed=number % 3)
            backward(run(x), x)
            del x
            if number in counts:
                levels.append(memory.now)
    return levels[0], levels[1]


def check(make: Callable[[], Function], backward: Backward, threads: int, counts: Counts) -> None:
    """Fail if steps leave more and more behind, each thread with a model of its own."""
    runs = [make() for _ in range(threads)]
    found: list[tuple[int, int]] = []
    for run in runs:  # plans, traces and gradients
        _whole(run(drawn_leaf(4, WIDTH)), drawn_leaf(4, WIDTH))
    gc.collect()
    gc.disable()
    try:
        workers = [threading.Thread(target=lambda run=run: found.append(alive(run, backward, counts))) for run in runs]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        gc.enable()
    assert len(found) == threads
    assert all(early == late for early, late in found), found
