"""Lean calls leave nothing behind, whatever a backward asks for."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide.torch.memory.tracker import Log
from tests.torch.calls import Function, drawn_leaf
from tests.torch.leaking import CASES, Backward, Counts, Metered, MeteredNet, check


def _light() -> Function:
    return partial(lt.lean, Metered())


def _with_a_budget() -> Function:
    return partial(lt.lean, MeteredNet(), tape="70%")


def _in_a_checkpoint() -> Function:
    return partial(lt.checkpoint, lt.Lean(Metered()))


@pytest.mark.long
@pytest.mark.parametrize(("backward", "threads", "counts"), CASES)
@pytest.mark.parametrize("make", [_light, _with_a_budget, _in_a_checkpoint])
def test_nothing_is_left_behind(make: Callable[[], Function], backward: Backward, threads: int, counts: Counts) -> None:
    check(make, backward, threads, counts)


def test_a_call_that_fails_leaves_nothing_behind() -> None:
    """It is traced anew each time; what a trace has seen so far is of no use, also while its parameters live."""
    net = nn.Linear(4, 4)

    def fail(x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError(f"{net(x).shape}")

    def logs() -> int:
        gc.collect()
        return sum(type(thing) is Log for thing in gc.get_objects())

    before = logs()
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            lt.lean(fail, drawn_leaf(2, 4))
    assert logs() == before
