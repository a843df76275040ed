"""Masks and spikes are kept as bits, and come back as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812  (everybody's name for it)

import lowtide.torch as lt
from lowtide.torch.state.bits import same_bits
from tests.torch.calls import Function, drawn_leaf, plainly
from tests.torch.lean.calls import tape_of

N = 64 * 64 * 4  # bytes of the tensors here


class _Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (v,) = ctx.saved_tensors
        result: torch.Tensor = grad / (1 + v.abs()) ** 2
        return result


def _dropout(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.5)


def _random_mask(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(torch.rand(64, 64) > 0.5, 0.0)


def _random_spikes(x: torch.Tensor) -> torch.Tensor:
    return x * (torch.rand(64, 64) > 0.5).float()


def _bernoulli(x: torch.Tensor) -> torch.Tensor:
    return x * torch.bernoulli(torch.full((64, 64), 0.3))


@pytest.mark.parametrize("function", [_dropout, _random_mask, _random_spikes, _bernoulli], ids=lambda f: f.__name__)
def test_masks_are_kept_as_bits(function: Function) -> None:
    x = drawn_leaf(64, 64)
    assert lt.lean_frontier(function, x)[-1].tape == 64 * 64 // 8
    for number in range(3):
        assert tape_of(lambda: lt.lean(function, x)) == 64 * 64 // 8
        outcomes = []
        for call in (plainly, lt.lean):
            torch.manual_seed(number)
            y = call(function, x)
            outcomes.append([y, *torch.autograd.grad(y.square().sum(), x)])
        assert all(same_bits(a, b) for a, b in zip(*outcomes, strict=True))


def test_spikes_and_masks_of_what_is_kept_take_a_bit_or_nothing() -> None:
    v, w = drawn_leaf(64, 64), drawn_leaf(64, 64, seed=1)

    def function(v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        u = v @ w
        spike: torch.Tensor = _Spike.apply(u)  # type: ignore[no-untyped-call]  # torch's own
        return spike * w - u.relu() * (u > 0.5)

    points = lt.lean_frontier(function, v, w)
    assert points[0].plain_tape == 3 * N + 64 * 64
    bits = 2 * 64 * 64 // 8
    assert points[-1].tape <= bits  # u is made again
    found = tape_of(lambda: lt.lean(function, v, w))
    assert found in (N, N + bits)  # u, from which masks and spikes are made, or they are kept as bits


def test_masks_without_a_spike_and_with_nothing_else() -> None:
    """Nothing is 1 when it is traced; later a few are, then all."""
    w = drawn_leaf(4000)

    def function(v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((v > torch.rand(4000)).float() * w).sin() * w

    for places in ([], [5, 1777], range(4000), []):
        v = torch.full((4000,), -1.0)
        v[list(places)] = 2.0
        found = torch.autograd.grad(lt.lean(function, v, w).sum(), w)
        assert same_bits(found[0], torch.autograd.grad(function(v, w).sum(), w)[0])


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.complex64]
)
def test_masks_of_every_dtype(dtype: torch.dtype) -> None:
    w = drawn_leaf(301)

    def function(w: torch.Tensor) -> torch.Tensor:
        mask = (torch.rand(301) > 0.7).to(dtype) * 3
        result: torch.Tensor = (mask * w).abs() * w[mask.real.long() if dtype.is_complex else mask.long()]
        return result

    for number in range(3):
        outcomes = []
        for call in (plainly, lt.lean):
            torch.manual_seed(number)
            outcomes.append(torch.autograd.grad(call(function, w).sum(), w))
        assert same_bits(outcomes[0][0], outcomes[1][0])


@pytest.mark.parametrize("scale", [-1.0, 1e-45, float("inf"), float("nan"), 0.0, -0.0])
def test_masks_times_numbers_that_are_hard_to_keep(scale: float) -> None:
    w = drawn_leaf(300)

    def function(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        mask = torch.empty(300).bernoulli_(0.3).mul_(scale)
        return (mask * w).sin() * w

    for number, factor in enumerate([2.0, scale, scale, 3.0]):
        outcomes = []
        for call in (plainly, lt.lean):
            torch.manual_seed(number)
            outcomes.append(torch.autograd.grad(call(function, w, torch.tensor(factor)).sum(), w))
        assert same_bits(outcomes[0][0], outcomes[1][0])


def test_a_part_that_is_a_mask() -> None:
    """What else is there in the tensor has any numbers, and none when it is traced."""
    w, other = drawn_leaf(400), torch.arange(400).remainder(50).eq(3) * 7.0

    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        mask = x.clone()
        mask[:200].bernoulli_(0.5)
        return (mask * w).sin() * w

    for number in range(3):
        outcomes = []
        for call in (plainly, lt.lean):
            torch.manual_seed(number)
            outcomes.append(torch.autograd.grad(call(function, w, other * number).sum(), w))
        assert same_bits(outcomes[0][0], outcomes[1][0])


def test_dropout_that_leaves_nothing_when_it_is_traced() -> None:
    x = drawn_leaf(400)

    def function(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return (x * torch.bernoulli(p) * 2).exp()

    for p in (0.0, 0.1, 1.0):
        outcomes = []
        for call in (plainly, lt.lean):
            torch.manual_seed(0)
            outcomes.append(torch.autograd.grad(call(function, x, torch.full((400,), p)).sum(), x))
        assert same_bits(outcomes[0][0], outcomes[1][0])


def test_masks_of_nothing_and_masks_that_are_used_twice() -> None:
    for count in (0, 400):
        x, w = drawn_leaf(count), drawn_leaf(count, seed=1)

        def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            mask = torch.bernoulli(torch.full(x.shape, 0.5))
            return (x * mask).exp() * (w * mask).sin()

        for number in range(3):
            outcomes = []
            for call in (plainly, lt.lean):
                torch.manual_seed(number)
                outcomes.append(torch.autograd.grad(call(function, x, w).sum(), [x, w]))
            assert all(map(same_bits, *outcomes))
