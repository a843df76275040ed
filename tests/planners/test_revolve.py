"""Schedules of equal steps with slots for snapshots: published counts, the recurrence, and rooms of fixed size."""

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
from lowtide.planners.revolve import (
    Revolve,
    beta,
    least_with_slots,
    plain_runs,
    rooms_least,
    rooms_of_one_sweep,
    rooms_within,
    slots_within,
)
from lowtide.planners.sweep import Base
from lowtide.simulate import simulate, simulate_actions
from tests.planners.checkpoint_schedules_runs import peer_plain_runs

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


@pytest.mark.long
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


# Rooms of fixed size for snapshots and tape, against every way to divide a small budget


@st.composite
def step_costs(draw: st.DrawFn) -> StepCost:
    state = draw(st.integers(1, 6))
    small = st.integers(0, 4)
    working = Working(draw(small), draw(small), draw(small))
    return StepCost(state, state + draw(st.integers(0, 8)), cotangent=draw(small), working=working)


def ways(step: StepCost, length: int, budget: int) -> list[tuple[int, int]]:
    """Every (slots, steps) whose rooms fit beside the working set, a room without slots among them."""
    memory = budget - step.working_set
    return [
        (slots, tape)
        for slots in range(length + 1)
        for tape in range(1, length + 1)
        if slots * step.state + tape * step.tape <= memory and (slots or tape >= length)
    ]


@settings(max_examples=150)
@given(step_costs(), st.integers(1, 30), st.integers(0, 150))
def test_no_other_rooms_within_the_budget_need_fewer_runs(step: StepCost, length: int, more: int) -> None:
    chain = Chain.equal(step, length)
    budget = rooms_least(step, length) + more
    schedule = rooms_within(chain, budget)
    plan = Plan.make(chain, Knob("budget", budget), schedule)
    assert simulate(plan) == plan.bill
    assert plan.bill.peak_memory <= budget
    assert plan.bill.plain_runs == min(recurrence(length, *way) for way in ways(step, length, budget))
    if isinstance(schedule, Revolve):
        assert schedule.slots * step.state + schedule.steps * step.tape + step.working_set <= budget
    else:
        assert schedule == Base(length)


@settings(max_examples=60)
@given(step_costs(), st.integers(1, 60))
def test_more_memory_never_costs_more_runs(step: StepCost, length: int) -> None:
    chain = Chain.equal(step, length)
    least = rooms_least(step, length)
    most = step.working_set + length * step.tape
    budgets = sorted({*range(least, min(most, least + 60)), *range(least, most, max(1, (most - least) // 40)), most})
    runs = [rooms_within(chain, budget).bill(chain).plain_runs for budget in budgets]
    assert runs == sorted(runs, reverse=True)
    assert runs[-1] == 0


@settings(max_examples=150)
@given(step_costs(), st.integers(1, 40))
def test_the_least_budget_is_exact(step: StepCost, length: int) -> None:
    chain = Chain.equal(step, length)
    least = rooms_least(step, length)
    assert ways(step, length, least)
    assert not ways(step, length, least - 1)
    with pytest.raises(BudgetError) as caught:
        rooms_within(chain, least - 1)
    assert (caught.value.budget, caught.value.least) == (least - 1, least)
    assert simulate(Plan.make(chain, Knob("budget", least), rooms_within(chain, least))).peak_memory <= least


@pytest.mark.parametrize("length", [9_999, 100_000])
@pytest.mark.parametrize(("state", "tape"), [(1, 1), (1, 7), (3, 50), (1, 400)])
@pytest.mark.parametrize("share", [0.31, 0.6, 0.95])
def test_thousands_of_slots_are_searched_on_a_grid(length: int, state: int, tape: int, share: float) -> None:
    """The grid finds what trying 2,000 others, spread over all numbers of slots, does not beat."""
    chain = Chain.equal(StepCost(state, tape), length)
    budget = int(share * length * tape)
    schedule = rooms_within(chain, budget)
    assert isinstance(schedule, Revolve)
    found = schedule.bound(chain).runs
    most = min((budget - tape) // state, length - 1)
    for slots in range(1, most + 1, max(1, most // 2011)):
        other = Revolve(slots, (budget - slots * state) // tape)
        assert other.bound(chain).runs >= found


@pytest.mark.untraced
@pytest.mark.parametrize("state", [1, 3, 20, *(pytest.param(state, marks=pytest.mark.slow) for state in (2, 7))])
@pytest.mark.parametrize("more", [0, 5, 1000, *(pytest.param(more, marks=pytest.mark.slow) for more in (1, 40))])
def test_one_sweep_in_the_fewest_bytes(state: int, more: int) -> None:
    tape = state + more
    for length in [*range(1, 120), 400, 999, 4000]:
        chain = Chain.equal(StepCost(state, tape), length)
        schedule = rooms_of_one_sweep(chain)
        slots, room = (schedule.slots, schedule.steps) if isinstance(schedule, Revolve) else (0, length)
        # So many slots and steps of tape are one sweep exactly if slots + 1 stretches make up the chain.
        assert (slots + 1) * room >= length
        fewest = min((-(-length // steps) - 1) * state + steps * tape for steps in range(1, length + 1))
        assert slots * state + room * tape == fewest
        if length < 120:
            plan = Plan.make(chain, Knob("none"), schedule)
            assert simulate(plan) == plan.bill
            assert max(decision.plain_runs for decision in plan.decisions()) <= 1


@settings(max_examples=200)
@given(st.integers(1, 10**5), st.integers(1, 10**4), st.integers(0, 10**5))
def test_one_sweep_of_long_chains(length: int, state: int, more: int) -> None:
    chain = Chain.equal(StepCost(state, state + more), length)
    schedule = rooms_of_one_sweep(chain)
    slots, room = (schedule.slots, schedule.steps) if isinstance(schedule, Revolve) else (0, length)
    found = slots * state + room * (state + more)
    # Of all lengths that need the same number of stretches the shortest is the best.
    counts = {*range(1, min(length, 1000) + 1), *(-(-length // steps) for steps in range(1, min(length, 1000) + 1))}
    assert found == min((count - 1) * state + -(-length // count) * (state + more) for count in counts)


def test_one_step_needs_no_slot() -> None:
    chain = Chain.equal(StepCost(4, 10), 1)
    assert rooms_of_one_sweep(chain) == rooms_within(chain, 10) == Base(1)
