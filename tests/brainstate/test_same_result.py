"""The tutorial's training in float64: with Lowtide's loops, every loss is that of brainstate's plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from examples.brainstate_tutorial import NUM_SAMPLE, make_task, make_train_step

pytestmark = pytest.mark.usefixtures("x64")
EPOCHS = 120
STEPS = 400


def losses(epochs: int, **knobs: Any) -> Any:
    net, x_data, y_data = make_task(STEPS, seed=11)
    step = make_train_step(net, x_data, y_data, NUM_SAMPLE, use_checkpoint=bool(knobs), **knobs)
    return np.array([float(step()) for _ in range(epochs)])


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return {}


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
def test_all_losses_of_the_tutorial(
    knobs: dict[str, Any], plain: dict[str, Any], record_property: Callable[[str, object], None]
) -> None:
    if not plain:
        plain["losses"] = losses(EPOCHS)
    expected = plain["losses"]
    assert expected[0] == pytest.approx(np.log(2), abs=1e-12)  # the network begins silent
    assert expected[-1] < 0.68
    found = losses(EPOCHS, **knobs)
    worst = float(np.abs(found - expected).max())
    name = ", ".join(f"{knob}={value}" for knob, value in knobs.items() if value is not None) or "no knob"
    record_property(
        "figure",
        f"brainstate's tutorial in float64, {name}: {EPOCHS} losses from {found[0]:.4f} to {found[-1]:.4f}, "
        f"at most {worst:.1e} from the plain loop's",
    )
    assert worst <= 1e-9
