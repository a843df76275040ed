from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.actions import Action, Advance, Backward, Drop, Restore, Save, Tape, Tier
from lowtide.chain import Chain, StepCost, Working
from lowtide.errors import BudgetError, InputError
from lowtide.plan import Bound, Knob, Plan
from lowtide.planners import splits
from lowtide.planners.equal import _exact_lefts
from lowtide.planners.revolve import Revolve, beta, least_with_slots, plain_runs, slots_within
from lowtide.simulate import simulate, simulate_actions
from tests.planners.peers import peer_plain_runs

INFINITE = 10**9


@cache
def recurrence(length: int, slots: int, steps: int = 1) -> int:
    """Griewank and Walther's recurrence, evaluated as it stands; `steps` of them can be taped at once."""
    if length <= steps:
        return 0
    if slots == 0:
        return INFINITE
    return min(j + recurrence(j, slots, steps) + recurrence(length - j, slots - 1, steps) for j in range(1, length))


@pytest.mark.parametrize(
    ("length", "slots", "runs"),
    [
        (100, 5, 316),
        (1000, 10, 3636),
        (1000, 50, 1948),
        (10**4, 10, 57624),
        (10**4, 200, 19798),
        (10**5, 20, 534220),
        (10**6, 50, 4658945),
    ],
)
def test_published_counts(length: int, slots: int, runs: int) -> None:
    assert plain_runs(length, slots) == runs
    plan = Plan.make(Chain.equal(StepCost(1, 1), length), Knob("checkpoints", slots), Revolve(slots))
    assert plan.bill.plain_runs == runs
    assert plan.bound == Bound(runs, f"with {slots:,} snapshots and one step of tape")


def test_longest_chains() -> None:
    assert beta(10, 5) == 3003
    assert beta(20, 10) == 30045015
    assert beta(-1, 3) == beta(3, -1) == 0


@pytest.mark.parametrize("slots", range(1, 8))
def test_schedules_reach_the_recurrence(slots: int) -> None:
    for length in range(1, 70):
        plan = Plan.make(Chain.equal(StepCost(3, 5), length), Knob("checkpoints", slots), Revolve(slots))
        bill = simulate(plan)
        assert bill == plan.bill
        assert bill.plain_runs == recurrence(length, slots)
        assert bill.peak_snapshots <= slots
        assert bill.peak_memory <= slots * 3 + 5


@pytest.mark.parametrize("steps", [2, 3, 5, 8, 13])
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_several_steps_of_tape_reach_the_recurrence(slots: int, steps: int) -> None:
    for length in range(1, 70):
        chain = Chain.equal(StepCost(3, 5, cotangent=2, working=Working(1, 4, 2)), length)
        plan = Plan.make(chain, Knob("checkpoints", slots), Revolve(slots, steps))
        bill = simulate(plan)
        assert bill == plan.bill
        assert bill.plain_runs == plain_runs(length, slots, steps) == recurrence(length, slots, steps)
        assert bill.peak_snapshots <= slots
        assert bill.peak_memory <= slots * 3 + steps * 5 + chain[0].working_set
        assert max(action.stop - action.start for action in plan.actions() if isinstance(action, Tape)) <= steps


@settings(max_examples=40)
@given(st.integers(1, 900), st.integers(1, 12), st.integers(1, 40))
def test_equal_rooms_are_the_exact_recurrence_of_constant_capacities(length: int, slots: int, steps: int) -> None:
    """`uniform`'s own dynamic program, with the same room for tape however many snapshots are held."""
    lefts = _exact_lefts((steps,) * (slots + 1), length)

    def rule(size: int, held: int, stored: Tier | None) -> tuple[int, Tier]:
        return (0 if size <= steps else lefts[size, held]), Tier.MEMORY

    chain = Chain.equal(StepCost(3, 5), length)
    plan = Plan.make(chain, Knob("none"), Revolve(slots, steps))
    assert plan.bill.plain_runs == splits.bill(rule, chain).plain_runs
    assert plan.bill == simulate(plan)
    assert plan.bound is not None
    assert plan.bound.runs == plan.bill.plain_runs


@pytest.mark.parametrize("steps", [1, 2, 7, 100])
@pytest.mark.parametrize("slots", [1, 2, 50])
def test_several_steps_of_tape_have_a_closed_form_too(slots: int, steps: int) -> None:
    chain = Chain.equal(StepCost(2, 3, cotangent=2, working=Working(1, 5, 4)), 10**6)
    assert Revolve(slots, steps).bill(chain).plain_runs == plain_runs(10**6, slots, steps)
    scope = f"with {slots:,} snapshots and {'one step' if steps == 1 else f'{steps:,} steps'} of tape"
    assert Revolve(slots, steps).bound(chain) == Bound(plain_runs(10**6, slots, steps), scope)


def test_golden_order() -> None:
    expected: list[Action] = [
        Save(0), Advance(0, 3),
        Save(3), Advance(3, 4),
        Tape(4, 5), Backward(4, 5),
        Restore(3), Drop(3), Tape(3, 4), Backward(3, 4),
        Restore(0), Advance(0, 1),
        Save(1), Advance(1, 2),
        Tape(2, 3), Backward(2, 3),
        Restore(1), Drop(1), Tape(1, 2), Backward(1, 2),
        Restore(0), Drop(0), Tape(0, 1), Backward(0, 1),
    ]  # fmt: skip
    assert list(Revolve(2).actions(Chain.equal(StepCost(1, 1), 5))) == expected


@pytest.mark.parametrize("slots", [1, 10**5, 10**6, 10**7])
def test_as_many_stretches_as_steps_have_a_closed_form(slots: int) -> None:
    chain = Chain.equal(StepCost(2, 3, cotangent=2, working=Working(1, 5, 4)), 10**6)
    bill = Revolve(slots).bill(chain)
    assert bill.plain_runs == plain_runs(10**6, slots)
    short = Chain.equal(chain[0], 40)
    for few in (1, 38, 39, 40, 50):
        assert simulate_actions(short, Revolve(few).actions(short)) == Revolve(few).bill(short)


def test_over_unequal_steps_the_bill_is_played() -> None:
    chain = Chain.of([StepCost(1, 1), StepCost(5, 9), StepCost(1, 3)])
    plan = Plan.make(chain, Knob("checkpoints", 2), Revolve(2))
    assert plan.bill == simulate(plan)
    assert plan.bill.peak_memory == 10


@pytest.mark.parametrize("slots", [0, -1, True, 2.0])
def test_slots_are_checked(slots: int) -> None:
    with pytest.raises(InputError, match="checkpoints="):
        Revolve(slots)
    with pytest.raises(InputError, match="steps="):
        Revolve(2, slots)


@pytest.mark.parametrize(("length", "slots"), [(50, 3), (100, 5), (300, 7), (1000, 10)])
def test_agrees_with_checkpoint_schedules(length: int, slots: int) -> None:
    theirs = peer_plain_runs(lambda peer: peer.MultistageCheckpointSchedule(length, slots, 0), length)
    assert plain_runs(length, slots) == theirs


def test_slots_within_a_budget() -> None:
    step = StepCost(10, 50, cotangent=10, working=Working(advance=30, tape=20, backward=25))
    least = least_with_slots(step)
    assert least == 10 + 50 + 30
    for budget, slots in ((least, 1), (least + 9, 1), (least + 10, 2), (least + 100, 11)):
        assert slots_within(step, budget) == slots
        plan = Plan.make(Chain.equal(step, 40), Knob("budget", budget), Revolve(slots))
        assert simulate(plan).peak_memory <= budget
    with pytest.raises(BudgetError) as caught:
        slots_within(step, least - 1)
    assert caught.value.least == least
