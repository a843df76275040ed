"""Bytes that XLA sets aside for the tutorial's gradient: what is promised is what is compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import lowtide.brainstate as lt
from examples.brainstate_tutorial import N_OUT, NUM_SAMPLE, compiled, make_task, promised
from tests.brainstate.partners import transform

pytestmark = pytest.mark.long
STEPS = 400


def temp_bytes(loop: Any) -> int:
    return compiled("", loop, *make_task(STEPS)).temp_bytes


def test_the_tutorial_takes_less_than_half(record_property: Callable[[str, object], None]) -> None:
    plain = temp_bytes(transform.for_loop)
    theirs = temp_bytes(partial(transform.checkpointed_for_loop, base=16))
    base = temp_bytes(partial(lt.checkpointed_for_loop, base=16))
    none = temp_bytes(lt.checkpointed_for_loop)
    record_property(
        "figure",
        f"brainstate's tutorial, T={STEPS}: {plain:,} B plain, {theirs:,} B with brainstate's base=16, {base:,} B with "
        f"Lowtide's, {none:,} B without a knob",
    )
    assert plain < theirs  # what Lowtide is for
    assert base < plain / 2
    assert none < plain / 4
    (tapes_and_states,), outputs = promised(STEPS, [16])
    assert outputs == STEPS * NUM_SAMPLE * N_OUT * 4
    assert none <= 1.2 * (tapes_and_states + outputs)  # the same plan as base=16


def test_a_budget_is_kept_beside_the_outputs() -> None:
    _, outputs = promised(STEPS, [])
    budget = 96 * 1024
    assert temp_bytes(partial(lt.checkpointed_for_loop, budget=budget)) <= 1.2 * (budget + outputs)
