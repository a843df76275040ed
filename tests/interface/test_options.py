"""What a user asks of a loop is checked before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from lowtide import InputError
from lowtide.chain import Chain, StepCost
from lowtide.interface.options import DEFAULT_CHECKPOINTS, Knobs, WhileKnobs, fold_of, refuse_reducing_nothing
from lowtide.planners.choose import choose

PLAN = choose(Chain.equal(StepCost(2, 3), 9), checkpoints=3)
NO_END = 2**31 - 1


def knobs(**given: Any) -> Knobs:
    return Knobs(**{"base": None, "checkpoints": None, "budget": None, "plan": None} | given)


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(
        InputError, match=r'^reduce=\'max\' is not known; give "mean", "sum", "last", or \(init, fold\)$'
    ):
        fold_of("max")


@pytest.mark.parametrize("reduce", [("a",), (0, 1), 3, [0, 1, 2]], ids=str)
def test_what_is_no_fold_is_refused(reduce: Any) -> None:
    with pytest.raises(InputError, match=r'give "mean", "sum", "last", or \(init, fold\) with a function'):
        fold_of(reduce)


def test_a_fold_is_a_start_and_a_function() -> None:
    assert fold_of((0, max)) == (0, max)
    assert [fold_of(word) for word in (None, "mean", "sum", "last")] == [None] * 4


def test_no_steps_have_a_sum_alone() -> None:
    refuse_reducing_nothing("sum")
    for word in ("mean", "last"):
        with pytest.raises(InputError, match=f'reduce="{word}" of no steps has no value; give at least one step'):
            refuse_reducing_nothing(word)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"base": 3, "budget": "1MB"}, "base=3 and budget='1MB' are two knobs; give one of base, checkpoints, budget"),
        ({"plan": 3}, "plan=3 is a int; give what plan_scan returned"),
        ({"base": 0}, "base=0"),
        ({"checkpoints": 0}, "checkpoints=0"),
        ({"budget": "much"}, "budget='much'"),
    ],
    ids=str,
)
def test_knobs_that_cannot_be_turned(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        knobs(**given)


def test_a_plan_is_for_as_many_steps_as_it_has() -> None:
    assert knobs(plan=PLAN).choose(None, 9) is PLAN
    with pytest.raises(InputError, match="the plan is for 9 steps, the loop has 8; plan again"):
        knobs(plan=PLAN).choose(None, 8)


@pytest.mark.parametrize(
    ("given", "needs_costs", "keeps"),
    [
        ({}, True, [True, True, False]),
        ({"base": 5}, False, [True, True, True]),
        ({"checkpoints": 2}, False, [True, False, False]),
        ({"budget": "1KiB"}, True, [True, True, False]),
        ({"plan": PLAN}, False, [False, False, False]),
    ],
    ids=str,
)
def test_what_is_known_before_the_costs_are(given: dict[str, Any], needs_costs: bool, keeps: list[bool]) -> None:
    found = knobs(**given)
    assert found.needs_costs() is needs_costs
    assert [found.keeps_first_tape(length) for length in (1, 2, 5)] == keeps


def test_without_costs_snapshots_are_counted() -> None:
    assert knobs(checkpoints=2).choose(None, 9).knob.value == 2
    assert knobs(base=4).choose(None, 9).knob.value == 4


def test_while_loops_have_snapshots_or_bytes() -> None:
    assert WhileKnobs.of(max, min, None, None, None, NO_END) == WhileKnobs(DEFAULT_CHECKPOINTS, None, NO_END)
    assert WhileKnobs.of(max, min, None, "1KiB", 7, NO_END) == WhileKnobs(DEFAULT_CHECKPOINTS, 1024, 7)
    message = "checkpoints=1 and budget='1MB' are two knobs; give one of checkpoints, budget, or none"
    with pytest.raises(InputError, match=message):
        WhileKnobs.of(max, min, 1, "1MB", None, NO_END)
