"""Backwards that do not ask for everything leave nothing behind: live bytes after many steps are those after few."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide.torch import measure

Step = Callable[[], None]
LENGTH, ROWS, WIDTH = 6, 8, 16


class HookError(Exception):
    """Raised by a hook in the middle of a backward."""


class Rollout:
    """A cell, its inputs, and the loop that they go through."""

    def __init__(self, option: dict[str, Any]) -> None:
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / 4)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.h = torch.zeros(ROWS, WIDTH, requires_grad=True)
        self.xs = torch.randn(LENGTH, ROWS, WIDTH, generator=generator).requires_grad_()
        self.option = option
        self.fails = False

    def run(self) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """The last state, and two rows of outputs."""
        carry, ys = lt.checkpointed_scan(self._step, self.h, self.xs, **self.option)
        return carry, ys

    def _step(self, h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.tanh(h @ self.weight + x + self.bias)
        if self.fails and h.requires_grad:
            h.register_hook(_fail)
        return h, (h.sin(), (h * self.bias).exp())

    def forget(self) -> None:
        """Let all gradients go."""
        for leaf in (self.weight, self.bias, self.h, self.xs):
            leaf.grad = None


def _fail(_: torch.Tensor) -> None:
    raise HookError


def unused_output(rollout: Rollout) -> Step:
    """One of two outputs is not used."""

    def step() -> None:
        _, (ys, _) = rollout.run()
        ys.sum().backward()

    return step


def two_losses(rollout: Rollout) -> Step:
    """Two backwards through one graph, which is kept for the second and never freed by one."""

    def step() -> None:
        carry, (ys, zs) = rollout.run()
        ys.square().sum().backward(retain_graph=True)
        (carry.sum() + zs.sum()).backward(retain_graph=True)

    return step


def some_inputs(rollout: Rollout) -> Step:
    """A gradient of some inputs only."""

    def step() -> None:
        _, (ys, _) = rollout.run()
        torch.autograd.grad(ys.square().sum(), [rollout.bias])
        _, (ys, zs) = rollout.run()
        torch.autograd.grad(ys.square().sum() + zs.sum(), [rollout.h], retain_graph=True)
        _, (ys, zs) = rollout.run()
        (ys.square().sum() + zs.sum()).backward(inputs=[rollout.xs])

    return step


def failed_outside(rollout: Rollout) -> Step:
    """A hook on an output raises, so that nothing of the loop is asked for."""

    def step() -> None:
        _, (ys, _) = rollout.run()
        ys.register_hook(_fail)
        with pytest.raises(HookError):
            ys.square().sum().backward()

    return step


def failed_on_the_way(rollout: Rollout) -> Step:
    """A hook inside a step raises, so that the backward of the loop ends in the middle."""

    def step() -> None:
        rollout.fails = True
        _, (ys, _) = rollout.run()
        with pytest.raises(HookError):
            ys.square().sum().backward()

    return step


def gradient_penalty(rollout: Rollout) -> Step:
    """The gradient's norm is a part of the loss."""

    def step() -> None:
        _, (ys, _) = rollout.run()
        (gradient,) = torch.autograd.grad(ys.square().sum(), rollout.xs, create_graph=True)
        (gradient.square().sum() + ys.sum()).backward()

    return step


def no_backward(rollout: Rollout) -> Step:
    """The loss is looked at and let go."""

    def step() -> None:
        rollout.run()

    return step


def hooks_around(rollout: Rollout) -> Step:
    """Somebody's hooks keep the saved tensors themselves, as those of `save_on_cpu` do on the CPU."""

    def step() -> None:
        with torch.autograd.graph.save_on_cpu():
            _, (ys, zs) = rollout.run()
        (ys.sum() + zs.sum()).backward()

    return step


PATTERNS = [
    hooks_around,
    unused_output,
    two_losses,
    some_inputs,
    failed_outside,
    failed_on_the_way,
    gradient_penalty,
    no_backward,
]
OPTIONS: list[dict[str, Any]] = [{}, {"checkpoints": 1}]
COUNTS = [(3, 9), pytest.param((20, 200), marks=pytest.mark.slow)]


def _live_bytes(make: Callable[[Rollout], Step], option: dict[str, Any], counts: tuple[int, int]) -> list[int]:
    """The bytes of tensors that are alive after so many steps."""
    rollout = Rollout(option)
    step, found, done = make(rollout), [], 0
    with measure.peak() as memory:
        for count in counts:
            for _ in range(count - done):
                step()
                rollout.forget()
            done = count
            gc.collect()
            found.append(memory.now)
    return found


@pytest.mark.untraced
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("option", OPTIONS, ids=str)
@pytest.mark.parametrize("make", PATTERNS)
def test_live_bytes_do_not_grow(
    make: Callable[[Rollout], Step], option: dict[str, Any], counts: tuple[int, int]
) -> None:
    few, many = _live_bytes(make, option, counts)
    assert many == few


@pytest.mark.untraced
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_nor_do_they_in_four_threads(counts: tuple[int, int]) -> None:
    patterns = [unused_output, two_losses, some_inputs, gradient_penalty]
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(_live_bytes, make, {"checkpoints": 1}, counts) for make in patterns]
        for (few, many), make in zip([each.result() for each in running], patterns, strict=True):
            assert many == few, make


def test_what_is_left_of_a_failed_backward_goes_without_the_garbage_collector() -> None:
    rollout = Rollout({"checkpoints": 1})
    rollout.fails = True
    gc.collect()
    gc.disable()
    try:
        with measure.peak() as memory:
            _, (ys, zs) = rollout.run()
            with suppress(HookError):
                ys.square().sum().backward()
            del ys, zs, _
            rollout.forget()
            assert memory.now == 0
    finally:
        gc.enable()


def test_results_that_live_on_keep_nothing_of_their_loop() -> None:
    rollout = Rollout({"checkpoints": 2})
    inputs = rollout.xs.detach()
    losses, kept = [], []
    for _ in range(3):
        with measure.peak() as memory:
            rollout.xs = inputs.clone()
            _, (ys, zs) = rollout.run()
            losses.append(ys.square().mean() + zs.mean())
            losses[-1].backward()
            del _, ys, zs
            rollout.xs = inputs
            rollout.forget()
            kept.append(memory.now)
    assert kept == [losses[0].nbytes] * 3


def test_somebody_elses_hooks_may_take_what_a_loop_saves() -> None:
    rollout = Rollout({"checkpoints": 2})
    _, (ys, _) = rollout.run()
    ys.sum().backward()
    expected, rollout.weight.grad = rollout.weight.grad, None
    with torch.autograd.graph.save_on_cpu():
        _, (ys, _) = rollout.run()
    for _ in range(2):
        rollout.weight.grad = None
        ys.sum().backward(retain_graph=True)
        assert rollout.weight.grad is not None
        assert expected is not None
        assert torch.equal(rollout.weight.grad, expected)
