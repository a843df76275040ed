"""How far a rerun goes that draws random numbers: not beyond torch's, and the numbers are those of the first run.

Also of functions that draw and put the generator back, so that nothing seems to have been drawn.
"""

from __future__ import annotations

import itertools
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
from lowtide.torch.state.bits import same_bits
from tests.torch.calls import plainly

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


def test_a_rerun_ends_before_numbers_that_only_come_later() -> None:
    drawn: list[float] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() + torch.rand_like(x)
        drawn.append(random.random())
        return y

    x = torch.randn(3, requires_grad=True)
    lt.checkpoint(function, x).sum().backward()
    assert len(drawn) == 1


DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(1),
    "python": random.random,
    "numpy": lambda: np.random.rand(),  # noqa: NPY002  (it is this one that is followed)
}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize(("first", "again"), [(2, 1), (1, 2)])
def test_more_or_fewer_draws_that_change_no_value_change_nothing(draw: str, first: int, again: int) -> None:
    numbers = iter([first, again])

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(next(numbers)):
            DRAWS[draw]()
        return x.sin().sin()

    x = torch.randn(3, requires_grad=True)
    y = lt.checkpoint(function, x)
    before = DRAWS[draw]()
    (found,) = torch.autograd.grad(y.sum(), [x])
    assert same_bits(found, torch.autograd.grad(x.sin().sin().sum(), [x])[0])
    assert DRAWS[draw]() != before


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize(("first", "again"), [(2, 1), (1, 2)])
def test_more_or_fewer_draws_that_change_values_are_refused(draw: str, first: int, again: int) -> None:
    numbers = itertools.chain([first], itertools.repeat(again))

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(next(numbers)):
            scale = float(DRAWS[draw]())
        return (x * scale).sin()

    y = lt.checkpoint(function, torch.randn(3, requires_grad=True))
    with pytest.raises(CheckpointError, match=r"sin.*values are not those of the first run"):
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


own_torch, own_python, own_bits = torch.Generator(), random.Random(3), np.random.PCG64(3)


def in_a_fork(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        return torch.dropout(x.sin(), 0.5, train=True).sin()


def drawn_and_put_back(x: torch.Tensor) -> torch.Tensor:
    state, pythons, numpys = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    y = (x * torch.rand(8) * random.random() * np.random.rand()).sin().sin()  # noqa: NPY002
    torch.set_rng_state(state)
    random.setstate(pythons)
    np.random.set_state(numpys)  # noqa: NPY002
    return y


def seeded_and_put_back(x: torch.Tensor) -> torch.Tensor:
    state, pythons, numpys = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    y = (x * torch.rand(8) * random.random() * np.random.rand()).sin().sin()  # noqa: NPY002
    torch.set_rng_state(state)
    random.setstate(pythons)
    np.random.set_state(numpys)  # noqa: NPY002
    return y


def read_only(x: torch.Tensor) -> torch.Tensor:
    return (x * torch.rand(8, generator=torch.Generator().set_state(torch.get_rng_state()))).sin()


def its_own_put_back(x: torch.Tensor) -> torch.Tensor:
    state, pythons = own_torch.get_state(), own_python.getstate()
    y = (x * torch.rand(8, generator=own_torch) * own_python.random()).sin().sin()
    own_torch.set_state(state)
    own_python.setstate(pythons)
    return y


def its_own_seeded(x: torch.Tensor) -> torch.Tensor:
    own_torch.manual_seed(5)
    return (x * torch.rand(8, generator=own_torch)).sin().sin()


def bare_bits(x: torch.Tensor) -> torch.Tensor:
    return (x * float(np.random.Generator(own_bits).random())).sin()


def nothing(x: torch.Tensor) -> torch.Tensor:
    return x.sin().sin()


def everywhere_drawn() -> list[float]:
    return [
        *(torch.rand(1).item(), random.random(), np.random.rand()),  # noqa: NPY002
        *(torch.rand(1, generator=own_torch).item(), own_python.random(), np.random.Generator(own_bits).random()),
    ]


@pytest.mark.parametrize("moved_since", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        *(in_a_fork, drawn_and_put_back, seeded_and_put_back, read_only, its_own_put_back, its_own_seeded, bare_bits),
        nothing,
    ],
)
def test_a_generator_that_ends_where_it_began_starts_there_again(function: Checkpoint, moved_since: bool) -> None:
    """And is left where it was, although the rerun ends before the function puts anything back."""

    def results(checkpoint: Checkpoint) -> tuple[list[torch.Tensor], list[float]]:
        torch.manual_seed(0)
        own_torch.manual_seed(5)
        for seed in (random.seed, np.random.seed, own_python.seed):
            seed(0)
        own_bits.state = np.random.PCG64(3).state
        x = torch.linspace(0.1, 0.9, 8, requires_grad=True)
        y = checkpoint(function, checkpoint(function, x))
        drawn = everywhere_drawn() if moved_since else []
        (gradient,) = torch.autograd.grad(y.sum(), [x])
        return [y, gradient], drawn + everywhere_drawn()

    (found, numbers), (expected, expected_numbers) = results(lt.checkpoint), results(plainly)
    assert all(map(same_bits, found, expected))
    assert numbers == expected_numbers


def test_it_ends_as_early_as_one_that_draws_nothing() -> None:
    ended: SimpleQueue[str] = SimpleQueue()

    def function(x: torch.Tensor) -> torch.Tensor:
        y = in_a_fork(x)
        ended.put("again")
        return y

    y = lt.checkpoint(function, torch.randn(8, requires_grad=True))
    torch.rand(1)
    y.sum().backward()
    assert ended.qsize() == 1
