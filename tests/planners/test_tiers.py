from __future__ import annotations

import pytest

from lowtide.actions import Save, Tier
from lowtide.chain import Chain, Disk, StepCost, Working
from lowtide.errors import BudgetError, InputError
from lowtide.plan import Knob, Plan
from lowtide.planners.choose import choose
from lowtide.planners.equal import Uniform
from lowtide.planners.tiers import Tiers, two_tiers
from lowtide.simulate import simulate
from tests.planners.exhaustive import Step, cheapest

SPEEDS = [(0.5, 0.5), (1.0, 0.25), (3.0, 1.0), (0.0, 0.0)]


@pytest.mark.parametrize(
    "length", [*range(1, 4), *(pytest.param(length, marks=pytest.mark.slow) for length in (4, 5, 6))]
)
@pytest.mark.parametrize(("write", "read"), SPEEDS)
def test_no_schedule_over_two_tiers_is_faster(length: int, write: float, read: float) -> None:
    is_fastest(length, write, read)


@pytest.mark.long
def test_no_schedule_of_four_steps_over_two_tiers_is_faster() -> None:
    is_fastest(4, 1.0, 0.25)


def is_fastest(length: int, write: float, read: float) -> None:
    for state, tape in [(1, 1), (1, 2)]:
        for memory in range(tape, 6):
            chain = Chain.equal(StepCost(state, tape, 1.0, 0.0), length)
            plan = choose(chain, memory, disk=Disk(write / state, read / state))
            steps = [Step(state, ((tape, 0.0, 0),))] * length
            assert plan.bill.seconds == cheapest(steps, memory, write=write, read=read)
            assert plan.bill.peak_memory <= memory
            assert simulate(plan) == plan.bill


def test_a_slow_disk_is_left_alone_and_a_free_one_is_not() -> None:
    chain = Chain.equal(StepCost(4, 9, 1.0, 2.0), 60)
    slow = choose(chain, 60, disk=Disk(1e6, 1e6))
    assert slow.bill.peak_disk == 0
    assert slow.bill.plain_runs == Uniform(60).bill(chain).plain_runs
    free = choose(chain, 60, disk=Disk(0.0, 0.0))
    assert free.bill.plain_runs < slow.bill.plain_runs
    assert free.bill.peak_disk > 0


def test_one_tape_is_enough_with_a_disk() -> None:
    step = StepCost(4, 9, working=Working(1, 2, 3))
    chain = Chain.equal(step, 20)
    plan = choose(chain, 12, disk=Disk(0.1, 0.1))
    assert plan.bill.peak_memory <= 12
    with pytest.raises(BudgetError, match="the least that works is 12 B"):
        choose(chain, 11, disk=Disk(0.1, 0.1))
    with pytest.raises(BudgetError, match="the least that works is 9 B"):
        Plan.make(chain, Knob("budget", 8), Tiers(8, Disk(0.1, 0.1)))


def test_a_period_too_long_for_the_memory_is_refused() -> None:
    with pytest.raises(InputError, match="memory=9 does not reverse the 20 steps between two snapshots"):
        Plan.make(Chain.equal(StepCost(4, 9), 20), Knob("budget", 9), Tiers(9, Disk(0.1, 0.1), 100))


def test_nothing_is_written_twice() -> None:
    plan = choose(Chain.equal(StepCost(1, 1, 1.0, 0.0), 40), 3, disk=Disk(2.0, 0.5))
    written = [action.step for action in plan.actions() if isinstance(action, Save) and action.tier is Tier.DISK]
    assert written
    assert len(written) == len(set(written))


@pytest.mark.parametrize("trip", [0.01, 1.0, 30.0])
def test_periods_come_close_to_the_exact_table(trip: float) -> None:
    chain, disk = Chain.equal(StepCost(1, 2, 1.0, 0.0), 600), Disk(trip / 2, trip / 2)
    exact = two_tiers(chain, 12, disk)
    assert exact == Tiers(12, disk)
    best = exact.bill(chain).seconds
    periodic = min(Tiers(12, disk, period).bill(chain).seconds for period in range(6, 600, 6))
    assert best <= periodic <= 1.1 * best


@pytest.mark.long
def test_long_chains_get_a_period() -> None:
    chain, disk = Chain.equal(StepCost(1, 5, 1.0, 0.0), 10**6), Disk(5.0, 5.0)
    plan = choose(chain, 60, disk=disk)
    assert isinstance(plan.schedule, Tiers)
    assert plan.schedule.period == 12  # the disk is as fast as ten runs: tape each stretch from its snapshot
    assert plan.bill.peak_memory <= 60
    assert plan.bill.seconds < Uniform(60).bill(chain).seconds


def test_memory_for_a_single_tape_leaves_a_snapshot_on_disk_for_every_step() -> None:
    chain, disk = Chain.equal(StepCost(1, 5, 1.0, 0.0), 10**6), Disk(5.0, 5.0)
    assert two_tiers(chain, 5, disk) == Tiers(5, disk, 1)


@pytest.mark.parametrize(
    ("length", "state", "tape", "memory", "trip"),
    [(10**5, 1, 5, 60, 1e9), (3000, 1, 1000, 40_000, 10.0), (10**5, 1, 5, 6000, 100.0), (10**6, 1, 5, 60, 40.0)],
)
def test_a_disk_never_makes_a_plan_slower(length: int, state: int, tape: int, memory: int, trip: float) -> None:
    chain = Chain.equal(StepCost(state, tape, 1.0, 0.0), length)
    assert choose(chain, memory, disk=Disk(trip, trip)).bill.seconds <= choose(chain, memory).bill.seconds


def test_a_periodic_plan_passes_the_judge() -> None:
    chain, disk = Chain.equal(StepCost(1, 5, 1.0, 2.0), 3000), Disk(5.0, 5.0)
    plan = Plan.make(chain, Knob("budget", 60), Tiers(60, disk, 97))
    assert simulate(plan) == plan.bill
