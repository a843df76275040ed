"""Rooms of fixed size for snapshots and tape, against every way to divide a small budget."""

from __future__ import annotations

from functools import cache
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.chain import Chain, StepCost, Working
from lowtide.errors import BudgetError
from lowtide.plan import Knob, Plan
from lowtide.planners.revolve import Revolve, rooms_least, rooms_of_one_sweep, rooms_within
from lowtide.planners.sweep import Base
from lowtide.simulate import simulate


@cache
def recurrence(length: int, slots: int, steps: int) -> float:
    """The least plain runs with so many slots and steps of tape: tape it whole, or store the start and split."""
    if length <= steps:
        return 0
    if slots == 0:
        return inf
    return min(j + recurrence(j, slots, steps) + recurrence(length - j, slots - 1, steps) for j in range(1, length))


@st.composite
def steps(draw: st.DrawFn) -> StepCost:
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
@given(steps(), st.integers(1, 30), st.integers(0, 150))
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
@given(steps(), st.integers(1, 60))
def test_more_memory_never_costs_more_runs(step: StepCost, length: int) -> None:
    chain = Chain.equal(step, length)
    least = rooms_least(step, length)
    most = step.working_set + length * step.tape
    budgets = sorted({*range(least, min(most, least + 60)), *range(least, most, max(1, (most - least) // 40)), most})
    runs = [rooms_within(chain, budget).bill(chain).plain_runs for budget in budgets]
    assert runs == sorted(runs, reverse=True)
    assert runs[-1] == 0


@settings(max_examples=150)
@given(steps(), st.integers(1, 40))
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
