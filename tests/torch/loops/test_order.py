"""Where three cotangents or more arrive at one tensor, they are added in the plain loop's order: to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lowtide.torch as lt
from tests.torch.calls import drawn_leaf, same

LENGTH, WIDTH = 26, 40
KNOBS: list[dict[str, Any]] = [{"base": 1}, {"base": 4}, {"checkpoints": 2}, {"checkpoints": 3}, {}]

Step = Callable[[Any, torch.Tensor], Any]


def agree(make: Callable[[torch.Tensor], Step], init: Any, options: dict[str, Any], reduce: str | None = None) -> None:
    """The gradient of a loss over all outputs and the final state, plainly and checkpointed, in either direction."""
    w = drawn_leaf(WIDTH, seed=1)
    xs = drawn_leaf(LENGTH, WIDTH, seed=2)
    for reverse in (False, True):
        found = []
        for scan, knobs in ((lt.scan, {}), (lt.checkpointed_scan, options)):
            final, ys = scan(make(w), init, xs, reverse=reverse, reduce=reduce, **knobs)
            leaves = [leaf for part in (final, ys) for leaf in (part if isinstance(part, tuple) else (part,))]
            loss = sum((leaf * drawn_leaf(*leaf.shape, seed=k).detach()).sum() for k, leaf in enumerate(leaves))
            found.append(torch.autograd.grad(loss, [w, xs]))
        same(*found)


@pytest.mark.parametrize("options", KNOBS, ids=str)
def test_outputs_that_are_the_final_state(options: dict[str, Any]) -> None:
    def make(w: torch.Tensor) -> Step:
        def step(h: torch.Tensor, x: torch.Tensor) -> Any:
            h = torch.tanh(h * w + x)
            return h, (h, h, h)

        return step

    agree(make, torch.zeros(WIDTH), options)


@pytest.mark.parametrize("options", KNOBS, ids=str)
def test_a_part_of_the_state_that_is_the_output_of_many_steps(options: dict[str, Any]) -> None:
    def make(w: torch.Tensor) -> Step:
        def step(carry: Any, x: torch.Tensor) -> Any:
            h, held, k = carry
            h = torch.tanh(h * w + x * held)
            held = h if k % 7 == 0 else held
            return (h, held, k + 1), (held, h)

        return step

    agree(make, (torch.zeros(WIDTH), torch.ones(WIDTH), torch.zeros(1)), options)


@pytest.mark.parametrize("options", KNOBS, ids=str)
def test_a_window_that_is_an_output_too(options: dict[str, Any]) -> None:
    def make(w: torch.Tensor) -> Step:
        def step(window: Any, x: torch.Tensor) -> Any:
            window = (*window[1:], torch.tanh((window[0] + window[2]) * w + x * window[3]))
            return window, window

        return step

    agree(make, tuple(torch.full((WIDTH,), 0.1 * k) for k in range(4)), options)


@pytest.mark.parametrize("options", KNOBS, ids=str)
def test_a_state_that_is_summed_where_it_is_made(options: dict[str, Any]) -> None:
    def make(w: torch.Tensor) -> Step:
        def step(h: torch.Tensor, x: torch.Tensor) -> Any:
            h = torch.tanh(h * w + x * h - torch.sin(h))
            return h, (h, h)

        return step

    for reduce in ("sum", "mean"):
        agree(make, torch.full((WIDTH,), 0.3), options, reduce)
