"""Randomness repeats in reruns, and is afterwards where the plain loop leaves it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide import CheckpointError
from lowtide.torch.state.bits import same_bits

KNOBS: list[dict[str, Any]] = [{"base": 1}, {"base": 5}, {"checkpoints": 2}, {}, {"budget": "300KB"}]
XS = torch.randn(30, 2, 4)


def _outcome(run: Any, generators: list[torch.Generator]) -> list[torch.Tensor]:
    torch.manual_seed(4)
    for k, generator in enumerate(generators):
        generator.manual_seed(k)
    ys, leaves = run()
    states = [torch.get_rng_state(), *(generator.get_state() for generator in generators)]
    grads = torch.autograd.grad(ys.pow(2).sum(), leaves)
    after = [torch.get_rng_state(), *(generator.get_state() for generator in generators)]
    return [ys, *states, *grads, *after]


@pytest.mark.parametrize("options", KNOBS, ids=str)
def test_dropout_and_generators_of_every_kind(options: dict[str, Any]) -> None:
    passed, named = torch.Generator(), torch.Generator()
    w = torch.randn(4, 4, requires_grad=True)
    drop = nn.Dropout(0.3)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        noise = torch.randn(h.shape, generator=passed)
        h = torch.tanh(drop(h) @ w + x + 0.1 * noise)
        if float(x[0, 0]) > 0:  # only at some steps
            h = h + torch.empty_like(h).normal_(generator=named).detach() * 0.1
        return h, h

    def plain() -> Any:
        h, rows = torch.zeros(2, 4), []
        for x in XS:
            h, y = step(h, x)
            rows.append(y)
        return torch.stack(rows), [w]

    expected = _outcome(plain, [passed, named])
    found = _outcome(
        lambda: (lt.checkpointed_scan(step, torch.zeros(2, 4), XS, generators=[named], **options)[1], [w]),
        [passed, named],
    )
    assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True))


def test_a_generator_that_comes_late_and_unnamed_is_refused() -> None:
    late = torch.Generator().manual_seed(0)
    out_of_sight: ContextVar[torch.Generator] = ContextVar("out_of_sight")
    out_of_sight.set(late)
    w = torch.randn(4, requires_grad=True)

    def step(h: torch.Tensor, k: torch.Tensor) -> Any:
        h = torch.tanh(h * w)
        return (h + torch.rand(4, generator=out_of_sight.get()) if k > 5 else h), None

    h, _ = lt.checkpointed_scan(step, torch.ones(4), torch.arange(30), base=6)
    with pytest.raises(CheckpointError, match="name the generator"):
        h.sum().backward()
    h, _ = lt.checkpointed_scan(step, torch.ones(4), torch.arange(30), base=6, generators=(late,))
    h.sum().backward()


def test_a_generator_that_the_step_refers_to_is_followed_from_the_start() -> None:
    """Its draws change nothing but gradients, so nothing else could tell."""
    generator = torch.Generator()
    w = torch.randn(3, requires_grad=True)

    def step(carry: Any, x: torch.Tensor) -> Any:
        h, k = carry
        mask = torch.bernoulli(torch.full((3,), 0.5), generator=generator) if k >= 4 else torch.ones(3)
        h = torch.tanh(h * (w * mask + (w * (1 - mask)).detach()) + x)
        return (h, k + 1), h

    def run(loop: Any, **options: Any) -> Any:
        return lambda: (loop(step, (torch.zeros(2, 3), 0), XS[..., :3], **options)[1], [w])

    expected = _outcome(run(lt.scan), [generator])
    for options in KNOBS:
        found = _outcome(run(lt.checkpointed_scan, **options), [generator])
        assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True))


def test_random_numbers_first_drawn_late_repeat_too() -> None:
    w = torch.randn(4, requires_grad=True)

    def step(h: torch.Tensor, k: torch.Tensor) -> Any:
        h = torch.tanh(h * w)
        return (nn.functional.dropout(h, 0.5) if k > 12 else h), h

    def plain() -> Any:
        h, rows = torch.ones(4), []
        for k in torch.arange(30):
            h, y = step(h, k)
            rows.append(y)
        return torch.stack(rows), [w]

    for options in KNOBS[:4]:
        expected = _outcome(plain, [])
        found = _outcome(
            lambda options=options: (
                lt.checkpointed_scan(step, torch.ones(4), torch.arange(30), **options)[1],
                [w],
            ),
            [],
        )
        assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True))


def test_check_rerun_can_be_turned_off() -> None:
    """For kernels that do not repeat to the last bit: the difference is the user's then."""
    w = torch.randn(4, requires_grad=True)
    noise = iter(range(10**6))

    def step(h: torch.Tensor, _: Any) -> Any:
        return torch.tanh(h * w) + 1e-9 * next(noise), None

    h, _ = lt.checkpointed_scan(step, torch.ones(4), length=30, base=6, check_rerun=False)
    h.sum().backward()
    assert w.grad is not None
