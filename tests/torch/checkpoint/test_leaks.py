"""Whatever of a graph a backward asks for: once the step is over, its tensors are gone, without the collector."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide import CheckpointError
from lowtide.torch.memory.tracker import Log, watching

PATTERNS: dict[str, Callable[[Callable[..., Any]], None]] = {}
WIDTH = 64
COUNTS = [(10, 60), pytest.param((20, 200), marks=pytest.mark.slow)]
CALLS = [40, pytest.param(100, marks=pytest.mark.slow)]  # of each thread


def pattern(step: Callable[[Callable[..., Any]], None]) -> Callable[[Callable[..., Any]], None]:
    PATTERNS[step.__name__] = step
    return step


def _block(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = torch.tanh(x @ w)
    return (h @ w).sin(), (h * 2).exp()


def _leaves() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(WIDTH, WIDTH, requires_grad=True), torch.randn(WIDTH, WIDTH).div(9).requires_grad_()


@pattern
def whole_backward(checkpoint: Callable[..., Any]) -> None:
    a, b = checkpoint(_block, *_leaves())
    (a.sum() + b.sum()).backward()


@pattern
def no_backward(checkpoint: Callable[..., Any]) -> None:
    checkpoint(_block, *_leaves())


@pattern
def an_output_that_is_not_used(checkpoint: Callable[..., Any]) -> None:
    checkpoint(_block, *_leaves())[0].sum().backward()


@pattern
def a_metric_with_grad(checkpoint: Callable[..., Any]) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a, b = _block(x, w)
        metric = b.square().mean()
        return a if float(metric.detach()) > 0 else b

    checkpoint(function, *_leaves()).sum().backward()


class _Measured(nn.Module):
    """Keeps a metric with its graph, until the next call."""

    metric: torch.Tensor

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a, b = _block(x, w)
        self.metric = b.square().mean()
        return a


_measured = _Measured()


@pattern
def a_metric_with_grad_that_a_module_keeps(checkpoint: Callable[..., Any]) -> None:
    checkpoint(_measured, *_leaves()).sum().backward()


@pattern
def two_losses_and_retain_graph(checkpoint: Callable[..., Any]) -> None:
    a, b = checkpoint(_block, *_leaves())
    a.sum().backward(retain_graph=True)
    b.sum().backward(retain_graph=True)


@pattern
def one_of_two_losses(checkpoint: Callable[..., Any]) -> None:
    a, b = checkpoint(_block, *_leaves())
    a.sum().backward(retain_graph=True)
    del b


@pattern
def chosen_inputs(checkpoint: Callable[..., Any]) -> None:
    x, w = _leaves()
    a, b = checkpoint(_block, x, w)
    (a.sum() + b.sum()).backward(inputs=[x])


@pattern
def a_chosen_weight(checkpoint: Callable[..., Any]) -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    checkpoint(net, _leaves()[0]).sum().backward(inputs=[net[2].weight])


@pattern
def a_gradient_penalty(checkpoint: Callable[..., Any]) -> None:
    x, w = _leaves()
    a, _ = checkpoint(_block, x, w)
    (slope,) = torch.autograd.grad(a.sum(), x, create_graph=True)
    (a.sum() + slope.square().sum()).backward()


@pattern
def a_penalty_that_is_not_used(checkpoint: Callable[..., Any]) -> None:
    x, w = _leaves()
    torch.autograd.grad(checkpoint(_block, x, w)[0].sum(), x, create_graph=True)


@pattern
def a_backward_that_fails(checkpoint: Callable[..., Any]) -> None:
    x, w = _leaves()
    a, b = checkpoint(_block, x, w)
    b.register_hook(_fails)
    with suppress(ZeroDivisionError):
        (a.sum() + b.sum()).backward()


@pattern
def a_backward_that_fails_halfway(checkpoint: Callable[..., Any]) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ w)
        if not lt.is_recomputing():
            h.register_hook(_fails)
        return (h @ w).sin()

    with suppress(ZeroDivisionError):
        checkpoint(function, *_leaves()).sum().backward()


def _fails(_: torch.Tensor) -> None:
    raise ZeroDivisionError


@pattern
def a_rerun_that_fails(checkpoint: Callable[..., Any]) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a, b = _block(x, w)
        if lt.is_recomputing():
            raise ZeroDivisionError
        return (a + b).sin()

    with suppress(ZeroDivisionError):
        checkpoint(function, *_leaves()).sum().backward()


@pattern
def a_rerun_that_differs(checkpoint: Callable[..., Any]) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a, b = _block(x, w * (2 if lt.is_recomputing() else 1))
        return (a + b).sin()

    with suppress(CheckpointError):
        checkpoint(function, *_leaves()).sum().backward()


@pattern
def nested_and_not_used(checkpoint: Callable[..., Any]) -> None:
    def outer(x: torch.Tensor, w: torch.Tensor) -> Any:
        a, b = checkpoint(_block, x, w)
        return checkpoint(_block, a + b, w)

    checkpoint(outer, *_leaves())[1].sum().backward()


@pattern
def modules_with_statistics(checkpoint: Callable[..., Any]) -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Tanh())
    a, _ = checkpoint(lambda x: (net(x), net(x).exp()), _leaves()[0])
    a.sum().backward(inputs=list(net.parameters()), retain_graph=True)


@pattern
def arguments_in_containers(checkpoint: Callable[..., Any]) -> None:
    def function(given: dict[str, Any]) -> Any:
        given["seen"] = _block(given["x"], given["w"])
        return given["seen"]

    x, w = _leaves()
    checkpoint(function, {"x": x, "w": w})[0].sum().backward(inputs=[x])


def _alive(log: Log) -> int:
    return log.bytes(log.alive())


@pytest.fixture
def _without_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _after_steps(
    step: Callable[[Callable[..., Any]], None], options: dict[str, Any], counts: tuple[int, int]
) -> tuple[int, int]:
    """Bytes alive after few steps, and after many."""

    def checkpoint(*args: Any) -> Any:
        return lt.checkpoint(*args, **options)

    found, log = [], Log()
    with watching(log):
        for number in range(1, counts[1] + 1):
            step(checkpoint)
            if number in counts:
                found.append(_alive(log))
    return found[0], found[1]


@pytest.mark.long
@pytest.mark.usefixtures("_without_gc")
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("options", [{}, {"check_rerun": True, "early_stop": False}], ids=str)
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_as_many_bytes_are_alive_after_many_steps_as_after_few(
    name: str, options: dict[str, Any], counts: tuple[int, int]
) -> None:
    early, late = _after_steps(PATTERNS[name], options, counts)
    assert late == early


@pytest.mark.long
@pytest.mark.usefixtures("_without_gc")
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("calls", CALLS)
def test_so_it_is_in_four_threads(name: str, calls: int) -> None:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(calls):
                with suppress(CheckpointError):
                    PATTERNS[name](lt.checkpoint)
        except BaseException as error:
            failed.append(error)

    def bytes_of_process() -> int:
        return sum(t.untyped_storage().nbytes() for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter))

    def in_threads() -> None:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    in_threads()
    early = bytes_of_process()
    in_threads()
    assert failed == []
    # A hundred calls or more were made; a failed backward may leave the tensors of its last step with the thread,
    # plainly too.
    assert bytes_of_process() <= early + 4 * 4 * (WIDTH * WIDTH * 4)
