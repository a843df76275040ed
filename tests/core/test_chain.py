from __future__ import annotations

import numpy as np
import pytest

from lowtide.chain import Chain, Disk, Role, StepCost, TapeOption, Working
from lowtide.errors import InputError
from lowtide.forms import KEEP

BAD_NUMBERS = [
    (0, "too small; give a whole number of at least 1"),
    (-3, "too small"),
    (1.0, "is a float; give a whole number"),
    (True, "is a boolean"),
    ("4", "is a str"),
    (None, "is a NoneType"),
]


@pytest.mark.parametrize(("bad", "why"), BAD_NUMBERS)
@pytest.mark.parametrize("field", ["state", "tape"])
def test_sizes_of_a_step(field: str, bad: object, why: str) -> None:
    good: dict[str, object] = {"state": 4, "tape": 8}
    with pytest.raises(InputError, match=why) as caught:
        StepCost(**(good | {field: bad}))  # type: ignore[arg-type]  # that is the point
    assert f"{field}=" in str(caught.value)


@pytest.mark.parametrize(("bad", "why"), BAD_NUMBERS)
def test_number_of_steps(bad: object, why: str) -> None:
    with pytest.raises(InputError, match=why) as caught:
        Chain.equal(StepCost(4, 8), bad)  # type: ignore[arg-type]  # that is the point
    assert "steps=" in str(caught.value)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), True, "1", None])
@pytest.mark.parametrize("field", ["forward", "backward"])
def test_seconds_of_a_step(field: str, bad: object) -> None:
    with pytest.raises(InputError, match=f"{field}.*give seconds"):
        StepCost(4, 8, **{field: bad})  # type: ignore[arg-type]  # that is the point


def test_a_tape_holds_its_input() -> None:
    with pytest.raises(InputError, match=r"tape=3 B is smaller than state=4 B.*at least 4 B"):
        StepCost(4, 3)
    with pytest.raises(InputError, match=r"option\.tape=3 B is smaller than state=4 B"):
        StepCost(4, 8, options=(TapeOption(3, 0.1),))


def test_other_values_are_checked_too() -> None:
    with pytest.raises(InputError, match=r"working\.tape=-1"):
        Working(tape=-1)
    with pytest.raises(InputError, match=r"option\.extra is not a time"):
        TapeOption(4, -1.0)
    with pytest.raises(InputError, match=r"option\.tape=0"):
        TapeOption(0, 0.0)
    with pytest.raises(InputError, match=r"option\.backward=-1 is too small"):
        TapeOption(4, 0.0, backward=-1)
    with pytest.raises(InputError, match=r"option\.backward=1\.5 is a float"):
        TapeOption(4, 0.0, backward=1.5)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(InputError, match="cotangent=-1"):
        StepCost(4, 8, cotangent=-1)
    with pytest.raises(InputError, match=r"disk\.read is not a time"):
        Disk(1.0, float("nan"))


def test_inconsistent_lengths() -> None:
    with pytest.raises(InputError, match="a chain of 3 steps was given 2 costs"):
        Chain((StepCost(1, 1), StepCost(1, 2)), 3)
    with pytest.raises(InputError, match="empty list"):
        Chain.of([])


def test_equal_steps_are_kept_once() -> None:
    chain = Chain.of([StepCost(4, 8)] * 5)
    assert chain == Chain.equal(StepCost(4, 8), 5)
    assert chain.is_equal
    assert len(chain) == 5
    assert len(chain.steps) == 1
    assert chain[4] == StepCost(4, 8)


def test_totals() -> None:
    equal = Chain.equal(StepCost(4, 8, 0.5, 1.5), 10)
    unequal = Chain.of([StepCost(4, 8, 0.5, 1.5), StepCost(2, 16, 1.0, 0.0)])
    assert (equal.plain_tape, equal.plain_seconds, equal.forward_seconds(2, 6)) == (80, 20.0, 2.0)
    assert (unequal.plain_tape, unequal.plain_seconds, unequal.forward_seconds(1, 2)) == (24, 3.0, 1.0)
    assert str(equal) == "10 equal steps, state 4 B, tape 8 B each"
    assert str(unequal) == "2 unequal steps, states 2 B to 4 B, tapes 24 B in all"
    assert str(Chain.equal(StepCost(4, 8), 1)) == "1 step, state 4 B, tape 8 B each"


def test_values_are_python_numbers_that_hash_and_compare() -> None:
    from_numpy = StepCost(np.int64(4), np.int32(8), forward=1, working=Working(np.int64(2)))  # type: ignore[arg-type]
    assert from_numpy == StepCost(4, 8, 1.0, working=Working(2))
    assert hash(from_numpy) == hash(StepCost(4, 8, 1.0, working=Working(2)))
    assert type(from_numpy.state) is int
    assert type(from_numpy.forward) is float
    assert len({Chain.equal(from_numpy, 3), Chain.equal(StepCost(4, 8, 1.0, working=Working(2)), 3)}) == 1


def test_names_are_for_reports() -> None:
    chain = Chain.of([StepCost(4, 8)] * 3, names=["conv", "two\nlines", "x" * 99])
    assert chain.is_equal
    assert [chain.name(k) for k in range(3)] == ["conv", "two lines", "x" * 18 + "..." + "x" * 19]
    assert Chain.of([StepCost(4, 8)] * 3).name(1) == "step 1"
    with pytest.raises(InputError, match="a chain of 3 steps needs as many names"):
        Chain.of([StepCost(4, 8)] * 3, names=["conv"])
    with pytest.raises(InputError, match="each a str"):
        Chain((StepCost(4, 8),), 1, names=(3,))  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize("field", ["state", "tape", "cotangent"])
def test_sizes_beyond_any_machine_are_slips_of_a_unit(field: str) -> None:
    good = {"state": 4, "tape": 2**48}
    with pytest.raises(InputError, match=f"{field}=.*too large; give a whole number of at most 281,474,976,710,656"):
        StepCost(**(good | {field: 2**48 + 1}))  # type: ignore[arg-type]  # mypy reads every value as every field
    with pytest.raises(InputError, match="bits; give one that fits a computer"):
        StepCost(**(good | {field: 10**5000}))  # type: ignore[arg-type]  # as above
    with pytest.raises(InputError, match="not a time"):
        StepCost(4, 8, forward=10**400)


def test_a_list_of_options_is_kept_as_a_tuple() -> None:
    step = StepCost(4, 8, options=[TapeOption(5, 0.1)])  # type: ignore[arg-type]  # that is the point
    assert hash(step) == hash(StepCost(4, 8, options=(TapeOption(5, 0.1),)))


def test_the_menu_begins_with_the_whole_tape() -> None:
    lean = TapeOption(5, 0.25, "lean")
    assert StepCost(4, 8, options=(lean,)).menu == (TapeOption(8, 0.0, form=KEEP), lean)


def test_each_form_has_its_own_backward() -> None:
    forms = (TapeOption(5, 0.25, backward=90), TapeOption(6, 0.25), TapeOption(7, 0.25, backward=np.int64(0)))  # type: ignore[arg-type]
    step = StepCost(4, 8, cotangent=3, working=Working(10, 20, 30), options=forms)
    assert step.pulling == (30, 90, 30, 0)
    assert [step.working_set_in(form) for form in range(4)] == [30, 90, 30, 23]
    assert step.working_set == 90
    assert type(step.options[2].backward) is int


def test_roles_are_for_all_steps_or_none() -> None:
    with pytest.raises(InputError, match="a chain of 2 steps needs as many roles, or none; got 1"):
        Chain.of([StepCost(1, 2), StepCost(1, 3)], roles=[Role.BLOCK])
    chain = Chain.of([StepCost(1, 2), StepCost(1, 3)], roles=[Role.BLOCK, Role.LOSS])
    assert chain.blocks() == [0]
