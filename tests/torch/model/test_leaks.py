"""Planned models leave nothing behind, whatever a backward asks for."""

from __future__ import annotations

import pytest
import torch

import lowtide.torch as lt
from lowtide import BudgetError
from tests.torch.calls import Function, drawn_leaf
from tests.torch.leaking import CASES, WIDTH, Backward, MeteredNet, check


def _loss(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def _planned() -> Function:
    model, x = MeteredNet(), drawn_leaf(4, WIDTH)
    with pytest.raises(BudgetError) as caught:
        lt.plan_model(model, x, peak=1, loss=_loss)
    lt.auto_checkpoint(model, x, peak=int(1.02 * caught.value.least), loss=_loss)
    return model


@pytest.mark.long
@pytest.mark.parametrize(("backward", "threads"), CASES)
def test_nothing_is_left_behind(backward: Backward, threads: int) -> None:
    check(_planned, backward, threads)
