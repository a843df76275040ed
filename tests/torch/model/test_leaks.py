"""Planned models leave nothing behind, whatever a backward asks for."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import lowtide.torch as lt
from tests.torch.calls import Function, drawn_leaf
from tests.torch.leaking import CASES, WIDTH, Backward, Counts, MeteredNet, check
from tests.torch.state.steered import with_form


def _loss(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def _planned(form: str) -> Function:
    """Every block has this form: at the least peak so small ones would all be kept."""
    model = MeteredNet()
    chain = lt.plan_model(model, drawn_leaf(4, WIDTH), peak="1GB", loss=_loss).chain
    lt.apply(with_form(chain, form), model)
    return model


@pytest.mark.long
@pytest.mark.parametrize(("backward", "threads", "counts"), CASES)
@pytest.mark.parametrize("form", ["rerun", "lean"])
def test_nothing_is_left_behind(form: str, backward: Backward, threads: int, counts: Counts) -> None:
    check(partial(_planned, form), backward, threads, counts)
