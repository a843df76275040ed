"""Rows of layers leave nothing behind, whatever a backward asks for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

import lowtide.torch as lt
from lowtide import BudgetError
from tests.torch.calls import Function, drawn_leaf
from tests.torch.leaking import CASES, WIDTH, Backward, Counts, Metered, check


def _planned() -> Function:
    layers = nn.Sequential(*(Metered() for _ in range(4)))
    with pytest.raises(BudgetError) as caught:
        lt.sequential(layers, drawn_leaf(4, WIDTH), budget=1)
    budget = int(1.05 * caught.value.least)  # there are calls in calls
    return lambda x: lt.sequential(layers, x, budget=budget)


def _in_segments() -> Function:
    layers = nn.Sequential(*(Metered() for _ in range(4)))
    return lambda x: lt.checkpoint_sequential(layers, 2, x)


@pytest.mark.long
@pytest.mark.parametrize(("backward", "threads", "counts"), CASES)
@pytest.mark.parametrize("make", [_planned, _in_segments])
def test_nothing_is_left_behind(make: Callable[[], Function], backward: Backward, threads: int, counts: Counts) -> None:
    check(make, backward, threads, counts)
