"""The tutorial's training in float64: with Lowtide's loops, every loss is that of brainstate's plain loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from examples.brainstate_tutorial import NUM_SAMPLE, make_task, make_train_step

pytestmark = pytest.mark.usefixtures("x64")
FEW, MANY = 20, 120  # epochs
STEPS = 400


def losses(epochs: int, **knobs: Any) -> Any:
    net, x_data, y_data = make_task(STEPS, seed=11)
    step = make_train_step(net, x_data, y_data, NUM_SAMPLE, use_checkpoint=bool(knobs), **knobs)
    return np.array([float(step()) for _ in range(epochs)])


@cache
def plain_losses(epochs: int) -> Any:
    return losses(epochs)


@pytest.mark.long
@pytest.mark.parametrize(
    "knobs",
    [
        {"base": 16},
        pytest.param({"base": None}, marks=pytest.mark.slow),
        {"base": None, "budget": "256KiB"},
    ],
    ids=["base=16", "no knob", "budget=256KiB"],
)
@pytest.mark.parametrize("epochs", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_all_losses_of_the_tutorial(
    knobs: dict[str, Any], epochs: int, record_property: Callable[[str, object], None]
) -> None:
    expected = plain_losses(epochs)
    assert expected[0] == pytest.approx(np.log(2), abs=1e-12)  # the network begins silent
    assert expected[-1] < 0.68
    found = losses(epochs, **knobs)
    worst = float(np.abs(found - expected).max())
    name = ", ".join(f"{knob}={value}" for knob, value in knobs.items() if value is not None) or "no knob"
    record_property(
        "figure",
        f"brainstate's tutorial in float64, {name}: {epochs} losses from {found[0]:.4f} to {found[-1]:.4f}, "
        f"at most {worst:.1e} from the plain loop's",
    )
    assert worst <= 1e-9
