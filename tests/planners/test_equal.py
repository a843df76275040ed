from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.chain import Chain, StepCost, Working
from lowtide.errors import BudgetError
from lowtide.plan import Knob, Plan
from lowtide.planners.choose import choose, least_budget
from lowtide.planners.equal import Uniform, capacities, least_memory, one_sweep_memory, uniform_least, uniform_within
from lowtide.planners.revolve import plain_runs
from lowtide.simulate import simulate
from tests.planners.checkpoint_schedules_runs import peer_plain_runs
from tests.planners.exhaustive import Step, cheapest
from tests.planners.strategies import in_words_of_search, step_costs


def planned(length: int, memory: int, state: int, tape: int) -> Plan:
    return Plan.make(Chain.equal(StepCost(state, tape), length), Knob("budget", memory), Uniform(memory))


def bound(plan: Plan) -> int:
    assert plan.bound is not None
    return plan.bound.runs


def recurrence(length: int, memory: int, state: int, tape: int, slots: int | None = None) -> list[int]:
    """P_0(0..length) of the design's recurrence, as it stands: no levels left out, no bounds, no shortcuts.

    With `slots`, at most so many snapshots are held.
    """
    levels = length if slots is None else slots + 1
    rooms = list(itertools.takewhile(lambda room: room >= 1, ((memory - i * state) // tape for i in range(levels))))
    infinite = 10**12
    above = np.full(length + 1, infinite)
    for room in reversed(rooms):
        runs = np.full(length + 1, infinite)
        runs[: room + 1] = 0
        for size in range(room + 1, length + 1):
            j = np.arange(1, size)
            runs[size] = (j + runs[1:size] + above[size - 1 : 0 : -1]).min()
        above = runs
    return [int(value) for value in above]


@pytest.mark.parametrize(
    ("length", "memory", "runs"),
    [(1000, 10, 3265), (1000, 11, 2921), (1000, 51, 974), (10**4, 11, 50960), (10**4, 51, 18912)],
)
def test_published_counts_with_tape(length: int, memory: int, runs: int) -> None:
    plan = planned(length, memory, 1, 1)
    assert plan.bill.plain_runs == runs
    assert bound(plan) == runs


@pytest.mark.parametrize(
    ("memory", "state", "tape", "per_step", "revolve_per_step"),
    [(60, 1, 5, 3.927, 4.512), (1000, 1, 10, 1.951, 2.508), (50, 1, 1, 3.730, 4.684)],
)
def test_a_million_steps(memory: int, state: int, tape: int, per_step: float, revolve_per_step: float) -> None:
    plan = planned(10**6, memory, state, tape)
    assert round(plan.bill.plain_runs / 10**6, 3) == per_step
    revolve = plain_runs(10**6, (memory - tape) // state) / 10**6
    assert revolve == pytest.approx(revolve_per_step, abs=1e-3)


SHAPES = [(60, 1, 5), (1000, 1, 10), (50, 1, 1), (200, 7, 9), (3000, 1, 100), (10, 1, 1), (8, 2, 3), (500, 13, 31)]


@pytest.mark.untraced
@pytest.mark.parametrize("length", [10**4, 10**5, 10**6])
@pytest.mark.parametrize(("memory", "state", "tape"), SHAPES)
def test_long_chains_are_within_two_runs_of_the_bound(length: int, memory: int, state: int, tape: int) -> None:
    plan = planned(length, memory, state, tape)
    assert bound(plan) <= plan.bill.plain_runs <= bound(plan) + 2
    assert plan.bill.peak_memory <= memory


@pytest.mark.parametrize(
    "length", [*range(1, 5), *(pytest.param(length, marks=pytest.mark.slow) for length in (5, 6, 7))]
)
def test_no_schedule_at_all_needs_fewer_runs(length: int) -> None:
    for state, tape in [(1, 1), (1, 2), (2, 3), (1, 3), (2, 2), (3, 4)]:
        for memory in range(1, min(length * tape, 4 * state + 3 * tape) + 1):
            least = cheapest([Step(state, ((tape, 0.0, 0),))] * length, memory)
            if memory < least_memory(state, tape, length):
                assert least == float("inf")
            else:
                bill = planned(length, memory, state, tape).bill
                assert bill.plain_runs + bill.taping_runs == least
                assert bill.peak_memory <= memory


@settings(max_examples=60)
@given(st.integers(1, 8), st.integers(0, 12), st.integers(0, 120), st.integers(2, 260))
def test_equals_the_recurrence(state: int, more: int, extra: int, length: int) -> None:
    tape = state + more
    memory = least_memory(state, tape, length) + extra
    plan = planned(length, memory, state, tape)
    assert plan.bill.plain_runs == recurrence(length, memory, state, tape)[length]
    assert bound(plan) <= plan.bill.plain_runs
    assert plan.bill.peak_memory <= memory
    assert simulate(plan) == plan.bill


@given(st.integers(1, 9), st.integers(1, 40), *[st.integers(0, 30)] * 4)
def test_closed_forms_agree_with_the_simulation(
    state: int, length: int, advance: int, tape: int, backward: int, cotangent: int
) -> None:
    """One slot at the least memory, one sweep without a knob, and what lies between, with all kinds of working sets."""
    step = StepCost(state, 10, 0.5, 0.25, cotangent=cotangent, working=Working(advance, tape, backward))
    chain = Chain.equal(step, length)
    least = least_memory(state, 10, length)
    for memory in {least, least + 7, least + state, one_sweep_memory(state, 10, length)}:
        plan = Plan.make(chain, Knob("budget", memory), Uniform(memory))
        assert simulate(plan) == plan.bill


@pytest.mark.parametrize(("length", "memory", "state", "tape"), [(246, 111, 6, 9), (272, 57, 6, 7)])
def test_where_the_envelope_alone_would_miss_by_one(length: int, memory: int, state: int, tape: int) -> None:
    assert planned(length, memory, state, tape).bill.plain_runs == recurrence(length, memory, state, tape)[length]


@settings(max_examples=120)
@given(st.integers(1, 50), st.integers(0, 50), st.integers(0, 3000), st.integers(1, 60), st.integers(1, 20_000))
def test_more_memory_never_costs_more_runs(state: int, more: int, extra: int, step_up: int, length: int) -> None:
    tape = state + more
    memory = least_memory(state, tape, length) + extra
    small, large = planned(length, memory, state, tape), planned(length, memory + step_up, state, tape)
    assert large.bill.plain_runs <= small.bill.plain_runs
    assert bound(large) <= bound(small)


def test_the_whole_frontier_of_a_rollout_falls() -> None:
    runs = [planned(400, memory, 3, 7).bill.plain_runs for memory in range(10, 2801, 3)]
    assert runs == sorted(runs, reverse=True)
    assert runs[-1] == 0


@pytest.mark.parametrize(("length", "slots"), [(40, 3), (100, 5), (200, 10)])
def test_agrees_with_checkpoint_schedules_mixed(length: int, slots: int) -> None:
    theirs = peer_plain_runs(lambda peer: peer.MixedCheckpointSchedule(length, slots), length)
    assert planned(length, slots + 1, 1, 1).bill.plain_runs == theirs


def test_least_memory_works_and_a_byte_less_does_not() -> None:
    for length in (1, 2, 3, 50):
        least = least_memory(4, 9, length)
        assert planned(length, least, 4, 9).bill.peak_memory <= least
        with pytest.raises(BudgetError) as caught:
            planned(length, least - 1, 4, 9)
        assert caught.value.least == least


def test_one_sweep_runs_no_step_twice() -> None:
    for length in (1, 2, 7, 100, 397):
        memory = one_sweep_memory(4, 9, length)
        plan = planned(length, memory, 4, 9)
        runs = [decision.plain_runs for decision in plan.decisions()]
        assert max(runs) <= 1
        assert sum(capacities(memory, 4, 9, length)) >= length
        if memory > least_memory(4, 9, length):
            assert sum(capacities(memory - 1, 4, 9, length)) < length
            assert max(d.plain_runs for d in planned(length, memory - 1, 4, 9).decisions()) > 1


def test_one_sweep_needs_less_than_a_snapshot_every_sqrt() -> None:
    # base tapes + T/base states is least at sqrt(T*a/w); the staircase of shrinking tapes saves a factor of sqrt(2).
    chain = Chain.equal(StepCost(100, 100), 10_000)
    assert choose(chain).bill.peak_memory < 0.75 * choose(chain, base=100).bill.peak_memory


def test_the_budget_includes_the_working_set() -> None:
    step = StepCost(10, 20, cotangent=5, working=Working(30, 40, 25))
    plan = choose(Chain.equal(step, 50), 145)
    assert plan.schedule == Uniform(100)
    assert plan.bill.peak_memory <= 145
    assert simulate(plan) == plan.bill


def test_room_to_run_limits_the_snapshots_and_not_the_tape() -> None:
    step = StepCost(1, 2, 1.0, 0.0, working=Working(advance=6))
    assert choose(Chain.equal(step, 5), 10).bill.plain_runs == 0  # five tapes, and nothing is run without tape
    tight = choose(Chain.equal(step, 60), 11)
    assert tight.schedule == Uniform(11, slots=5)
    assert tight.bill.peak_memory <= 11
    assert tight.bound is not None
    assert tight.bound.scope == "with 11 B of snapshots and tape and 5 snapshots"
    assert choose(Chain.equal(StepCost(10, 100, working=Working(advance=1000)), 1), 100).bill.peak_memory == 100


def test_room_to_run_has_to_hold_a_cotangent_too() -> None:
    step = StepCost(1, 2, 1.0, 0.0, cotangent=4, working=Working(advance=6))
    plan = choose(Chain.equal(step, 60), 15)
    assert plan.schedule == Uniform(11, slots=5)
    assert plan.bill.peak_memory <= 15


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
@pytest.mark.parametrize("memory", [22, 30, 47, 70])
def test_snapshots_may_be_fewer_than_there_is_room_for(memory: int, slots: int) -> None:
    length, state, tape = 61, 3, 7
    plan = Plan.make(Chain.equal(StepCost(state, tape), length), Knob("none"), Uniform(memory, slots=slots))
    assert plan.bill.plain_runs == recurrence(length, memory, state, tape, slots)[length]
    assert plan.bill.peak_snapshots <= slots
    assert simulate(plan) == plan.bill


@pytest.mark.parametrize(("length", "memory"), [(7, 3), (16, 4), (17, 5)])
def test_on_the_way_to_the_last_step_there_is_no_cotangent(length: int, memory: int) -> None:
    """The most snapshots are held before the first backward, where a cotangent would make the bill too high."""
    chain = Chain.equal(StepCost(1, 1, cotangent=9, working=Working(advance=9)), length)
    plan = Plan.make(chain, Knob("none"), Uniform(memory))
    assert simulate(plan) == plan.bill


@settings(max_examples=40)
@given(st.integers(1, 3), st.integers(0, 2), *[st.integers(0, 3)] * 4, st.integers(1, 5), st.integers(1, 16))
def test_no_schedule_is_faster_whatever_the_working_set(
    state: int, more: int, advance: int, tape: int, backward: int, cotangent: int, length: int, budget: int
) -> None:
    step = StepCost(state, state + more, 1.0, 0.0, cotangent=cotangent, working=Working(advance, tape, backward))
    chain = Chain.equal(step, length)
    least = cheapest(in_words_of_search(chain), budget)
    if budget < least_budget(chain):
        assert least == float("inf")
    else:
        assert choose(chain, budget).bill.seconds == least


@pytest.mark.long
@settings(max_examples=150)
@given(step_costs(), st.integers(1, 80), st.integers(0, 120))
def test_every_form_keeps_the_budget(step: StepCost, length: int, more: int) -> None:
    chain = Chain.equal(step, length)
    budget = uniform_least(step, length) + more
    schedules = uniform_within(chain, budget)
    assert schedules
    for schedule in schedules:
        plan = Plan.make(chain, Knob("budget", budget), schedule)
        assert plan.bill.peak_memory <= budget
        assert simulate(plan) == plan.bill
    assert not uniform_within(chain, budget - more - 1)


@settings(max_examples=60)
@given(step_costs(), st.integers(1, 4), st.integers(1, 30))
def test_no_persistent_schedule_of_equal_steps_is_faster(step: StepCost, length: int, budget: int) -> None:
    chain = Chain.equal(step, length)
    least = cheapest(in_words_of_search(chain), budget, persistent=True)
    if budget < least_budget(chain):
        assert least == float("inf")
    else:
        assert choose(chain, budget).bill.seconds == least


def test_budgets_beyond_everything_are_no_trouble() -> None:
    chain = Chain.equal(StepCost(2**48, 2**48), 10**6)
    assert choose(chain, 10**30).bill.plain_runs == 0
    tight = choose(chain, 2**60)
    assert tight.bill.peak_memory <= 2**60
    short = choose(Chain.equal(StepCost(2**48, 2**48), 3000), base=1)
    assert simulate(short) == short.bill
    assert choose(Chain.equal(StepCost(2**48, 2**48), 10**9), base=1).bill.plain_runs == 10**9 - 1


@pytest.mark.slow
def test_a_million_steps_played_on_paper() -> None:
    for memory, state, tape in [(60, 1, 5), (50, 1, 1), (1000, 1, 10)]:
        plan = planned(10**6, memory, state, tape)
        assert simulate(plan) == plan.bill
