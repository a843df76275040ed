"""A plan for layers as ranges in ranges: read from its actions, or refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide import InputError
from lowtide.actions import Action, Advance, Backward, Drop, Restore, Save, Tape
from lowtide.chain import Chain, Disk, StepCost, TapeOption
from lowtide.nest import Part, copied_by, kept_by, nest_of, nest_of_plan
from lowtide.plan import Knob, Plan, Schedule
from lowtide.planners.choose import choose, least_budget
from lowtide.planners.sweep import Base, Sweep
from lowtide.planners.unequal import Hetero
from lowtide.simulate import simulate_actions

STEP = StepCost(state=2, tape=3)
MENU = (TapeOption(4, 0.1), TapeOption(3, 0.2))


def nest_with(schedule: Schedule, length: int) -> tuple[Part, ...]:
    """Of a schedule over steps that have smaller forms."""
    chain = Chain.of([StepCost(2, 6 + k, options=MENU) for k in range(length)])
    return nest_of_plan(Plan.make(chain, Knob("none"), schedule))


def test_the_nest_of_a_plan() -> None:
    plan = Plan.make(Chain.equal(STEP, 3), Knob("none"), Hetero((2, 0, 1, 0, 0)))
    assert nest_of_plan(plan) == (Part(0, 2, (Part(0, 1, (Part(0, 1),)), Part(1, 2))), Part(2, 3))
    assert nest_of_plan(Plan.make(Chain.equal(STEP, 3), Knob("none"), Base(2))) == (
        Part(0, 2, (Part(0, 2),)),
        Part(2, 3),
    )


def test_parts_say_in_which_form_their_steps_are_taped() -> None:
    # Advance over three steps, of which two are advanced over once more.
    assert nest_with(Hetero((3, -1, 0, 2, -2, -1, 0)), 5) == (
        Part(0, 3, (Part(0, 2, (Part(0, 1, option=1), Part(1, 2))), Part(2, 3, option=2))),
        Part(3, 4, option=1),
        Part(4, 5),
    )
    swept = nest_with(Sweep((2, 2), (1, 2, 0, 1)), 4)
    assert swept == (
        Part(0, 2, (Part(0, 1, option=1), Part(1, 2, option=2))),
        Part(2, 3),
        Part(3, 4, option=1),
    )
    assert [part.depth for part in swept] == [1, 0, 0]


def advanced_over(parts: tuple[Part, ...]) -> int:
    """Plain runs of steps: a part that is run again is advanced over each time that what it is in runs."""
    return sum(part.stop - part.start + advanced_over(part.inside) for part in parts if part.inside)


def taped(parts: tuple[Part, ...]) -> list[int]:
    """The steps that are called in the end, from left to right."""
    return [k for part in parts for k in (taped(part.inside) if part.inside else range(part.start, part.stop))]


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=12), st.floats(0, 1))
def test_a_nest_runs_what_the_bill_says(sizes: list[tuple[int, int]], share: float) -> None:
    chain = Chain.of(StepCost(state, state + more) for state, more in sizes)
    least = least_budget(chain)
    plan = choose(chain, int(least + share * max(0, chain.plain_tape - least)))
    parts = nest_of_plan(plan)
    assert advanced_over(parts) == plan.bill.plain_runs
    assert taped(parts) == list(range(len(chain)))


def read(*row: Action) -> tuple[Part, ...]:
    """What three steps with these actions, which are legal, are as a nest."""
    simulate_actions(Chain.equal(STEP, 3), row)
    return nest_of(row, 3, "by hand")


def test_advances_in_a_row_are_one_part() -> None:
    begin = Save(0), Advance(0, 1), Advance(1, 2), Tape(2, 3), Backward(2, 3)
    assert read(*begin, Restore(0), Drop(0), Tape(0, 2), Backward(0, 2)) == (Part(0, 2, (Part(0, 2),)), Part(2, 3))


def test_a_plan_that_drops_early_what_it_makes_again_is_refused() -> None:
    begin = Save(0), Advance(0, 1), Save(1), Advance(1, 2), Drop(1), Tape(2, 3), Backward(2, 3)
    with pytest.raises(InputError, match=r"by hand.* is not one for layers: Restore\(step=0.*plan again with plan_seq"):
        read(*begin, Restore(0), Drop(0), Tape(0, 2), Backward(0, 2))


def test_a_plan_with_a_disk_is_refused() -> None:
    with pytest.raises(InputError, match="cannot be done by running a part again from its start"):
        nest_of_plan(choose(Chain.equal(STEP, 9), 12, disk=Disk(0.0, 0.0)))


def test_what_calls_keep_and_copy_at_once() -> None:
    """Calls side by side keep their bytes together, those inside them one at a time, and a rerun its own twice."""
    inner = Part(1, 3, (Part(1, 3),))
    outer, last = Part(0, 3, (Part(0, 1), inner)), Part(3, 5, (Part(3, 5),))
    kept = (1, 20, 20, 300, 4000)
    assert kept_by((inner,), kept) == 2 * 40
    assert kept_by((outer,), kept) == 2 * 41 + 2 * 40
    assert kept_by((outer, last), kept) == 41 + 4300 + 4300
    assert kept_by((outer, Part(3, 5)), kept) == 2 * 41 + 2 * 40
    assert copied_by((outer, last), kept) == [1, 21, 21, 300, 300]
