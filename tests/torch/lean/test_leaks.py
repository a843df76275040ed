"""Lean calls leave nothing behind, whatever a backward asks for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

import lowtide.torch as lt
from tests.torch.calls import Function
from tests.torch.leaking import CASES, Backward, Metered, MeteredNet, check


def _light() -> Function:
    return partial(lt.lean, Metered())


def _with_a_budget() -> Function:
    return partial(lt.lean, MeteredNet(), tape="70%")


def _in_a_checkpoint() -> Function:
    return partial(lt.checkpoint, lt.Lean(Metered()))


@pytest.mark.long
@pytest.mark.parametrize(("backward", "threads"), CASES)
@pytest.mark.parametrize("make", [_light, _with_a_budget, _in_a_checkpoint])
def test_nothing_is_left_behind(make: Callable[[], Function], backward: Backward, threads: int) -> None:
    check(make, backward, threads)
