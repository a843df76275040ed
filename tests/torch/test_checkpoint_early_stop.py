"""How far a rerun goes that draws random numbers: not beyond torch's, and the numbers are those of the first run."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide.torch as lt
from lowtide.errors import CheckpointError
from lowtide.torch.bits import same_bits

Checkpoint = Callable[..., Any]
torchs = partial(torch_checkpoint, use_reentrant=False)


class Counting(TorchDispatchMode):
    """Counts the operations that run, by their names."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def plainly(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def linear() -> nn.Module:
    return nn.Linear(4, 4, bias=False)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "at the start": lambda: nn.Sequential(nn.Dropout(0.3), linear(), nn.Tanh(), linear(), linear()),
    "in the middle": lambda: nn.Sequential(linear(), nn.Dropout(0.3), linear(), nn.Tanh(), linear()),
    "at the end": lambda: nn.Sequential(linear(), nn.Tanh(), linear(), linear(), nn.Dropout(0.3)),
    "everywhere": lambda: nn.Sequential(nn.Dropout(0.3), linear(), nn.Dropout(0.3), linear(), nn.Dropout(0.3)),
    "nowhere": lambda: nn.Sequential(linear(), nn.Tanh(), linear(), linear()),
    "rrelu": lambda: nn.Sequential(linear(), nn.RReLU(), linear()),
    "rrelu at the end": lambda: nn.Sequential(linear(), linear(), nn.RReLU()),
}
WAYS: dict[str, Callable[[Checkpoint, nn.Module, torch.Tensor], Any]] = {
    "a call": lambda checkpoint, block, x: checkpoint(block, x),
    "a call in a call": lambda checkpoint, block, x: checkpoint(lambda x: checkpoint(block, x), x),
    "an inner call first": lambda checkpoint, block, x: checkpoint(lambda x: checkpoint(block, x).sin().sin(), x),
    "an inner call last": lambda checkpoint, block, x: checkpoint(lambda x: checkpoint(block, x.sin()), x),
    "inner calls in a row": lambda checkpoint, block, x: checkpoint(
        lambda x: checkpoint(block, checkpoint(block, x).sin()), x
    ),
    "three calls": lambda checkpoint, block, x: checkpoint(
        lambda x: checkpoint(lambda x: checkpoint(block, x.sin()), block(x)), x
    ),
}


def run(checkpoint: Checkpoint, block: nn.Module, way: str) -> tuple[list[torch.Tensor], Counter[str]]:
    """Output, gradients and the random number after all of it; the operations that ran."""
    torch.manual_seed(0)
    x = torch.randn(3, 4, requires_grad=True)
    with Counting() as counting:
        y = WAYS[way](checkpoint, block, x)
        gradients = torch.autograd.grad(y.sum(), [x, *block.parameters()])
    return [y, *gradients, torch.rand(1)], counting.counts


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("block", BLOCKS)
def test_no_product_more_than_torchs(block: str, way: str) -> None:
    made = BLOCKS[block]()
    expected, _ = run(plainly, made, way)
    found, counts = run(lt.checkpoint, made, way)
    _, torchs_counts = run(torchs, made, way)
    assert all(map(same_bits, found, expected))
    assert counts["aten.mm.default"] == torchs_counts["aten.mm.default"]


def test_a_number_that_is_drawn_after_all_that_is_needed_is_drawn_again() -> None:
    drawn: SimpleQueue[float] = SimpleQueue()  # a list would be put back

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() + torch.rand_like(x)
        drawn.put(random.random())
        return y

    x = torch.randn(3, requires_grad=True)
    lt.checkpoint(function, x).sum().backward()
    assert drawn.get_nowait() == drawn.get_nowait()


DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(1),
    "python": random.random,
    "numpy": lambda: np.random.rand(),  # noqa: NPY002  (it is this one that is followed)
}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize(("first", "again"), [(2, 1), (1, 2)])
def test_more_or_fewer_draws_are_seen(draw: str, first: int, again: int) -> None:
    numbers = iter([first, again])

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(next(numbers)):
            DRAWS[draw]()
        return x.sin().sin()

    x = torch.randn(3, requires_grad=True)
    y = lt.checkpoint(function, x)
    with pytest.raises(CheckpointError, match="may have drawn other random numbers"):
        y.sum().backward()


def test_a_function_that_takes_the_stop_for_an_error_and_draws_more() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        try:
            return torch.dropout(x, 0.5, train=True).sin()
        except BaseException:  # as some do
            torch.rand(3)
            return x.sin().sin()

    x = torch.randn(3, requires_grad=True)
    torch.manual_seed(0)
    found = torch.autograd.grad(lt.checkpoint(function, x).sum(), [x])
    torch.manual_seed(0)
    expected = torch.autograd.grad(function(x).sum(), [x])
    assert all(map(same_bits, found, expected))


def test_generators_of_its_own_are_asked_too() -> None:
    own, layer = torch.Generator().manual_seed(3), linear()
    starts: SimpleQueue[torch.Tensor] = SimpleQueue()

    def inner(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = layer(x * torch.rand(4, generator=own))
        return y.sin()

    def outer(x: torch.Tensor) -> torch.Tensor:
        starts.put(own.get_state())
        y = layer(x * torch.rand(4, generator=own))
        return lt.checkpoint(inner, y * torch.rand(4))

    torch.manual_seed(0)
    x = torch.randn(3, 4, requires_grad=True)
    y = lt.checkpoint(outer, x)
    after = own.get_state()
    (found,) = torch.autograd.grad(y.sum(), [x])
    start = starts.get_nowait()
    assert torch.equal(starts.get_nowait(), start)
    assert torch.equal(own.get_state(), after)
    own.set_state(start)
    torch.manual_seed(0)
    torch.randn(3, 4)
    (expected,) = torch.autograd.grad(outer(x).sum(), [x])
    assert same_bits(found, expected)


def scripted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = torch.dropout((x @ w).sin(), 0.3, True) @ w
    return x.cos()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_end_of_a_rerun_in_torchscript() -> None:
    """It makes errors of its own of those that pass through it."""
    function = torch.jit.script(scripted)
    x, w = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    for _ in range(3):  # the first ones only look at what it does
        function(x, w).sum().backward()
    found: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []
    for results, checkpoint in ((found, lt.checkpoint), (expected, plainly)):
        torch.manual_seed(0)
        results += torch.autograd.grad(checkpoint(function, x, w).sum(), [x, w])
        results.append(torch.rand(1))
    assert all(map(same_bits, found, expected))


def test_an_error_of_the_functions_own_passes_through() -> None:
    runs = iter([False, True])

    def function(x: torch.Tensor) -> torch.Tensor:
        if next(runs):
            raise RuntimeError("gone")
        return torch.dropout(x, 0.5, train=True).sin()

    y = lt.checkpoint(function, torch.randn(3, requires_grad=True))
    with pytest.raises(RuntimeError, match="gone"):
        y.sum().backward()


def test_a_function_that_is_none_of_pythons_runs_to_its_end() -> None:
    x = torch.randn(3, requires_grad=True)
    torch.manual_seed(0)
    found = [*torch.autograd.grad(lt.checkpoint(torch.dropout, x, 0.5, True).sum(), [x]), torch.rand(1)]
    torch.manual_seed(0)
    expected = [*torch.autograd.grad(torch.dropout(x, 0.5, train=True).sum(), [x]), torch.rand(1)]
    assert all(map(same_bits, found, expected))
    assert sys.getprofile() is None
