"""The same words mean the same in both front ends: numbers, plans, refusals."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from lowtide.errors import BudgetError, InputError
from lowtide.plan import Plan
from tests.conformance.sides import SIDES, Side

LENGTH, BATCH, WIDTH = 37, 3, 4
KNOBS: dict[str, dict[str, Any]] = {
    "none": {},
    "base": {"base": 5},
    "checkpoints": {"checkpoints": 3},
    "budget": {"budget": "4KiB"},
    "reverse": {"base": 6, "reverse": True},
    "sum": {"reduce": "sum"},
    "mean": {"checkpoints": 4, "reduce": "mean"},
    "last": {"base": 8, "reduce": "last"},
    "fold": {"reduce": "fold"},
    "unroll": {"unroll": 3},
}


@pytest.fixture(params=list(SIDES))
def side(request: pytest.FixtureRequest) -> Side:
    return SIDES[request.param]


def _arrays() -> list[Any]:
    draw = np.random.default_rng(0).normal
    return [draw(size=(WIDTH, WIDTH)) / 2, draw(size=(BATCH, WIDTH)), draw(size=(LENGTH, BATCH, WIDTH)) / 9]


def _loss(side: Side, loop: str, **knobs: Any) -> Any:
    def loss(w: Any, h: Any, xs: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            h = side.tanh(h @ w + x)
            return h, h * h

        if knobs.get("reduce") == "fold":
            knobs["reduce"] = (side.array(np.ones(WIDTH)), lambda acc, y: acc + y.sum(0))
        h, ys = getattr(side.lt, loop)(step, h, xs, **knobs)
        return (h * h * h).sum() + side.tanh(ys).sum()

    return loss


@pytest.mark.parametrize("knob", KNOBS)
def test_values_and_gradients_agree_with_each_other_and_with_the_plain_loop(knob: str) -> None:
    knobs = KNOBS[knob]
    plain = {name: value for name, value in knobs.items() if name in ("reverse", "reduce")}
    found = [
        SIDES[name].gradients(_loss(SIDES[name], loop, **given), _arrays())
        for name in SIDES
        for loop, given in (("scan", plain), ("checkpointed_scan", knobs))
    ]
    value, gradients = found[0]
    for other, others in found[1:]:
        assert other == pytest.approx(value, rel=1e-12)
        for one, two in zip(gradients, others, strict=True):
            assert np.max(np.abs(one - two)) <= 1e-12 * np.max(np.abs(one))


@pytest.mark.parametrize("knobs", [{"base": 5}, {"checkpoints": 3}, {"checkpoints": 1}, {"base": 100}], ids=str)
def test_plans_make_the_same_runs(knobs: dict[str, Any]) -> None:
    plans: list[Plan] = []
    for side in SIDES.values():
        w, h, xs = (side.array(array.astype(np.float32)) for array in _arrays())
        plans.append(side.lt.plan_scan(lambda h, x, side=side, w=w: (side.tanh(h @ w + x), None), h, xs, **knobs))
    assert plans[0].bill.plain_runs == plans[1].bill.plain_runs
    assert plans[0].knob == plans[1].knob
    assert str(plans[0].chain).split(",")[0] == str(plans[1].chain).split(",")[0] == f"{LENGTH} equal steps"


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "two knobs": ({"base": 4, "checkpoints": 2}, InputError, "base=4 and checkpoints=2 are two knobs"),
    "a boolean": ({"base": True}, InputError, "base=True is a boolean"),
    "a float": ({"checkpoints": 2.5}, InputError, "checkpoints=2.5 is a float"),
    "nothing": ({"checkpoints": 0}, InputError, "checkpoints=0 is too small"),
    "a bare float": ({"budget": 0.5}, InputError, "budget=0.5"),
    "no unit": ({"budget": "64 apples"}, InputError, "apples"),
    "no room": ({"budget": 8}, BudgetError, "no plan fits budget=8 B: the least that works is"),
    "no plan": ({"plan": "fast"}, InputError, "plan='fast' is a str"),
    "no fold": ({"reduce": "median"}, InputError, "reduce='median'"),
    "no bar": ({"pbar": -1}, InputError, "pbar=-1"),
    "unroll": ({"unroll": 0}, InputError, "unroll=0 is too small"),
    "length": ({"length": 5}, InputError, "5"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals_are_the_same(side: Side, what: str) -> None:
    knobs, error, words = REFUSED[what]
    with pytest.raises(error) as caught:
        side.gradients(_loss(side, "checkpointed_scan", **knobs), _arrays())
    assert words in str(caught.value)


def test_the_same_words_are_there() -> None:
    shared = set(SIDES["torch"].lt.__all__) & set(SIDES["jax"].lt.__all__)
    assert shared >= {
        "checkpointed_for_loop",
        "checkpointed_scan",
        "checkpointed_while_loop",
        "compare_gradients",
        "for_loop",
        "plan_for_loop",
        "plan_scan",
        "scan",
    }
    for name in ("checkpointed_scan", "checkpointed_for_loop", "scan", "for_loop", "checkpointed_while_loop"):
        theirs = inspect.signature(getattr(SIDES["torch"].lt, name)).parameters
        for word, parameter in inspect.signature(getattr(SIDES["jax"].lt, name)).parameters.items():
            assert theirs[word].kind == parameter.kind
            assert theirs[word].default == parameter.default
