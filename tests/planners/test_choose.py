from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.chain import Chain, Disk, StepCost, TapeOption, Working
from lowtide.errors import BudgetError, InputError
from lowtide.plan import Schedule
from lowtide.planners.choose import choose, least_budget
from lowtide.planners.equal import Uniform
from lowtide.planners.frontier import frontier
from lowtide.planners.revolve import Revolve, rooms_of_one_sweep, rooms_within
from lowtide.planners.sweep import Base, Sweep
from lowtide.planners.tiers import Tiers
from lowtide.planners.unequal import Hetero
from lowtide.simulate import simulate
from tests.planners.strategies import chains

EQUAL = Chain.equal(StepCost(4, 10), 100)
UNEQUAL = Chain.of([StepCost(4, 10 + k) for k in range(10)])


def test_each_knob_has_its_planner() -> None:
    assert choose(EQUAL, 100).schedule == Uniform(100)
    assert choose(EQUAL, "10%").schedule == Uniform(100)
    assert choose(EQUAL, checkpoints=3).schedule == Revolve(3)
    assert choose(EQUAL, base=10).schedule == Base(10)
    assert isinstance(choose(EQUAL).schedule, Uniform)
    assert isinstance(choose(EQUAL, 100, disk=Disk(1.0, 1.0)).schedule, Tiers)
    assert isinstance(choose(UNEQUAL, 60).schedule, Hetero)
    assert isinstance(choose(UNEQUAL, checkpoints=3).schedule, Hetero)
    assert choose(UNEQUAL, base=3).schedule == Base(3)
    assert isinstance(choose(UNEQUAL).schedule, Sweep)


def test_two_knobs_are_refused() -> None:
    with pytest.raises(InputError, match="budget='1MiB' and base=4 are two knobs"):
        choose(EQUAL, "1MiB", base=4)
    with pytest.raises(InputError, match="checkpoints=2 and base=4"):
        choose(EQUAL, checkpoints=2, base=4)


@pytest.mark.parametrize(
    "knobs", [{"checkpoints": 0}, {"checkpoints": 1.0}, {"base": 0}, {"base": True}, {"budget": 1.5}]
)
def test_knobs_are_checked(knobs: dict[str, Any]) -> None:
    (name,) = knobs
    with pytest.raises(InputError, match=f"{name}="):
        choose(EQUAL, **knobs)


def test_disk_needs_a_budget_and_equal_steps() -> None:
    with pytest.raises(InputError, match="disk goes with budget="):
        choose(EQUAL, disk=Disk(1.0, 1.0))
    with pytest.raises(InputError, match="disk goes with budget="):
        choose(UNEQUAL, 60, disk=Disk(1.0, 1.0))


def test_rooms_are_planned_by_their_own_planner() -> None:
    assert choose(EQUAL, 100, rooms=True).schedule == rooms_within(EQUAL, 100)
    assert choose(EQUAL, "10%", rooms=True).schedule == rooms_within(EQUAL, 100)
    assert choose(EQUAL, "10%", rooms=True).knob.value == 100
    assert choose(EQUAL, rooms=True).schedule == rooms_of_one_sweep(EQUAL)
    assert choose(EQUAL, checkpoints=3, rooms=True).schedule == Revolve(3)
    assert choose(EQUAL, base=10, rooms=True).schedule == Base(10)


@pytest.mark.parametrize("budget", [14, 40, 150, 400, 999, 1000])
def test_rooms_never_need_fewer_runs_than_memory_that_goes_to_either(budget: int) -> None:
    rooms, either = choose(EQUAL, budget, rooms=True), choose(EQUAL, budget)
    assert rooms.bill == simulate(rooms)
    assert rooms.bill.peak_memory <= budget
    assert rooms.bill.plain_runs >= either.bill.plain_runs


def test_rooms_too_small_name_the_least() -> None:
    with pytest.raises(BudgetError) as caught:
        choose(EQUAL, 13, rooms=True)
    assert (caught.value.budget, caught.value.least) == (13, 14)
    assert choose(EQUAL, 14, rooms=True).schedule == Revolve(1, 1)


def test_rooms_need_equal_steps_and_no_disk() -> None:
    with pytest.raises(InputError, match="rooms goes with a chain of equal steps and without disk"):
        choose(UNEQUAL, 60, rooms=True)
    with pytest.raises(InputError, match="rooms goes with a chain of equal steps and without disk"):
        choose(EQUAL, 60, disk=Disk(1.0, 1.0), rooms=True)


@pytest.mark.parametrize("chain", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
def test_budgets_that_cannot_work_name_the_least_that_can(chain: Chain) -> None:
    least = least_budget(chain)
    with pytest.raises(BudgetError) as caught:
        choose(chain, least - 1)
    assert (caught.value.budget, caught.value.least) == (least - 1, least)
    assert f"no plan fits budget={least - 1} B: the least that works is {least} B; raise" in str(caught.value)
    assert choose(chain, least).bill.peak_memory <= least


def test_of_a_menu_the_cheapest_form_is_taken_for_all_equal_steps() -> None:
    lean = (TapeOption(5, 0.01, "lean"),)
    chain = Chain.equal(StepCost(4, 20, 1.0, 2.0, options=lean), 250)  # too long to mix forms along the chain
    assert choose(chain, 5000).schedule == Uniform(5000, option=0)
    tight = choose(chain, 1250)
    assert tight.schedule == Uniform(1250, option=1)
    assert tight.bill.seconds == pytest.approx(750 + 250 * 0.01)
    assert simulate(tight) == tight.bill
    assert least_budget(chain) == 9
    assert choose(chain, 9).schedule == Uniform(9, option=1)


def test_forms_are_mixed_along_a_short_chain() -> None:
    chain = Chain.equal(StepCost(1, 10, 5.0, 5.0, options=(TapeOption(2, 1.0, "lean"),)), 4)
    assert [choose(chain, budget).bill.seconds for budget in (8, 16, 24, 32, 40)] == [44.0, 43.0, 42.0, 41.0, 40.0]
    assert choose(chain).bill.peak_memory == 4  # two lean tapes, or one beside two states; whole tapes would take 13
    assert {decision.form for decision in choose(chain).decisions()} == {"lean"}
    longer = choose(Chain.equal(chain[0], 60), 360)  # thirty whole tapes and as many lean ones
    assert longer.bill.seconds == 60 * 10.0 + 30 * 1.0
    assert simulate(longer) == longer.bill


def test_what_a_smaller_tape_needs_in_its_backward_counts() -> None:
    def planned(backward: int | None, budget: int | None = None) -> tuple[Schedule, int]:
        lean = TapeOption(5, 0.01, "lean", backward)
        plan = choose(Chain.equal(StepCost(4, 20, options=(lean,), working=Working(1, 2, 3)), 250), budget)
        assert simulate(plan) == plan.bill
        return plan.schedule, plan.bill.peak_memory

    assert planned(None, 1253) == planned(3, 1253) == (Uniform(1250, option=1), 1253)
    assert planned(40, 1290) == (Uniform(1250, option=1), 1290)
    assert least_budget(Chain.equal(StepCost(4, 20, options=(TapeOption(5, 0.01, "lean", 40),)), 250)) == 4 + 20
    # Without a knob, the form with the lower peak: 122 lean tapes and snapshots, unless their backward takes too much.
    schedule, lean_peak = planned(3)
    assert isinstance(schedule, Uniform)
    assert schedule.option == 1
    assert planned(40)[1] == lean_peak + 37
    schedule, whole_peak = planned(1000)
    assert schedule == Uniform(whole_peak - 3)


def test_planners_that_keep_whole_tapes_need_not_know_what_smaller_ones_take() -> None:
    bare = StepCost(4, 20, working=Working(1, 2, 3))
    menu = replace(bare, options=(TapeOption(5, 0.01, "lean", 1000),))
    for knobs in ({"rooms": True}, {"disk": Disk(1.0, 1.0)}):
        assert least_budget(Chain.equal(menu, 250), **knobs) == least_budget(Chain.equal(bare, 250), **knobs)
        planned = [choose(Chain.equal(step, 250), 100, **knobs) for step in (bare, menu)]
        assert planned[0].bill == planned[1].bill
    assert list(frontier(Chain.equal(menu, 3), points=3))[-1].knob.value == 63


@pytest.mark.long
@given(chains(most=5), st.integers(0, 60))
def test_plans_keep_the_budget_and_pass_the_judge(chain: Chain, more: int) -> None:
    plan = choose(chain, least_budget(chain) + more)
    assert plan.bill.peak_memory <= least_budget(chain) + more
    assert simulate(plan) == plan.bill


@pytest.mark.long
@given(chains(most=7))
def test_without_a_knob_no_step_runs_more_than_one_extra_time(chain: Chain) -> None:
    plan = choose(chain)
    assert max(decision.plain_runs for decision in plan.decisions()) <= 1
    assert simulate(plan) == plan.bill


@settings(max_examples=25)
@given(st.integers(1, 300), st.integers(1, 20), st.integers(0, 30))
def test_the_frontier_falls(length: int, state: int, more: int) -> None:
    plans = list(frontier(Chain.equal(StepCost(state, state + more), length), points=9))
    budgets = [plan.knob.value or 0 for plan in plans]
    times = [plan.bill.seconds for plan in plans]
    assert budgets == sorted(budgets)
    assert times == sorted(times, reverse=True)
    assert plans[-1].bill.plain_runs == 0
    assert all(plan.bill.peak_memory <= budget for plan, budget in zip(plans, budgets, strict=True))


def test_the_frontier_of_unequal_steps_ends_with_everything_kept() -> None:
    plans = list(frontier(UNEQUAL, points=4))
    assert plans[0].knob.value == least_budget(UNEQUAL)
    assert plans[-1].bill.plain_runs == 0
    with pytest.raises(InputError, match="points=1"):
        next(frontier(UNEQUAL, points=1))
