"""What layers see outside of modules: measuring moves it, and reruns do. Then a row is refused, if that matters."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide import CheckpointError
from tests.torch.calls import drawn_leaf, same


class _Slope(torch.autograd.Function):
    """Its gradient depends on a number, its value does not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slope: float) -> torch.Tensor:
        ctx.slope = slope
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.slope, None


def _annealed(x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = _Slope.apply(x, next(SLOPES)) + x.sin() * x.exp()  # type: ignore[no-untyped-call]  # torch's own
    return y


SLOPES = count(1)


class _Annealed(nn.Module):
    total = [0, 0, 0, 0]  # noqa: RUF012  (a home of state)
    calls, steps, epochs = 0, 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = type(self)
        kind.calls, kind.steps, kind.epochs = kind.calls + 1, kind.steps + 1, kind.epochs + 1
        self.total[0] += 1
        y: torch.Tensor = _Slope.apply(x, self.total[0]) + x.sin() * x.exp()  # type: ignore[no-untyped-call]  # torch's own
        return y


def test_a_slope_that_measuring_moves_is_refused() -> None:
    x = drawn_leaf(6, 6)
    with pytest.raises(CheckpointError, match=r"layer 0 \(_annealed\) computes the same, but.*moved SLOPES, "):
        lt.sequential([_annealed] * 4, x)
    with pytest.raises(CheckpointError, match=r"layer 1 \(_Annealed\) computes the same, but.* and 1 more, "):
        lt.sequential([nn.Tanh(), _Annealed(), _Annealed()], x)
    with pytest.raises(CheckpointError, match="Make the counter, iterator or cache that the layer uses an attribute"):
        lt.checkpoint_sequential([_annealed] * 4, 2, x)
    with pytest.warns(UserWarning, match="computes the same, but gradients flow through it in another way"):
        lt.plan_sequential([_annealed] * 3, x)


def test_it_is_not_refused_if_nothing_is_to_be_compared() -> None:
    lt.sequential([_annealed] * 5, drawn_leaf(6, 6), check_rerun=False).sum().backward()


def test_what_moves_and_does_not_matter_is_not_refused() -> None:
    seen: list[torch.Tensor] = []
    ticks = count()

    def recording(x: torch.Tensor) -> torch.Tensor:
        next(ticks)
        if not lt.is_recomputing():
            seen.append(x.detach())
        return x.sin() * torch.rand(()) + x.exp()

    x = drawn_leaf(6, 6)
    outcomes = []
    for run in (lambda: lt.sequential([recording] * 4, x), lambda: recording(recording(recording(recording(x))))):
        torch.manual_seed(3)
        y = run()
        outcomes.append([y, *torch.autograd.grad(y.sum(), x)])
    same(*outcomes)
    assert len(seen) == 8


class _Noisy(nn.Module):
    """In a rerun, one number of many is another one: a sample may miss it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spot = torch.zeros_like(x)
        if lt.is_recomputing() and RERUN[0]:
            spot.view(-1)[PLACE] = 1e-3
        return (x + spot).sin() * x.exp()


RERUN = [False]
PLACE = 12_346


def _planned(check_rerun: bool | None) -> Any:
    model, x = nn.Sequential(*(_Noisy() for _ in range(4))), drawn_leaf(200, 200)
    plan = lt.plan_sequential(model, x)
    assert plan.bill.plain_runs
    return lt.Sequential(model, plan=plan, check_rerun=check_rerun), x


@pytest.mark.parametrize("check_rerun", [None, False, True])
def test_rows_compare_as_they_are_told(check_rerun: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    row, x = _planned(check_rerun)
    monkeypatch.setattr(f"{__name__}.RERUN", [True])
    y = row(x)
    if check_rerun:
        with pytest.raises(CheckpointError, match="differs from the first run"):
            y.sum().backward()
    else:  # the samples of so large a tensor leave that number out
        y.sum().backward()
    assert row[:2].check_rerun is check_rerun
    monkeypatch.setattr(f"{__name__}.PLACE", 0)
    y = row(x)
    if check_rerun is False:
        y.sum().backward()
    else:
        with pytest.raises(CheckpointError, match="differs from the first run"):
            y.sum().backward()
