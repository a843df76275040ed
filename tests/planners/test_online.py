from __future__ import annotations

from collections.abc import Callable

import pytest

from lowtide.actions import Advance, Drop, Save
from lowtide.chain import Chain, StepCost
from lowtide.errors import InputError
from lowtide.plan import Knob, Plan
from lowtide.planners.online import Online, online
from lowtide.planners.revolve import beta, plain_runs
from lowtide.simulate import simulate_actions


def online_costs(slots: int, longest: int) -> list[int]:
    """Plain runs for every length up to `longest`, from one sweep that is never told to stop.

    Where the sweep stands when the chain ends decides everything after, so one sweep serves all lengths.
    """
    generator = online(slots)
    kept: list[int] = []
    costs: list[int] = []
    action = next(generator)
    while len(costs) < longest:
        match action:
            case Advance(_, stop):
                bounds = [*kept, stop]
                parts = (plain_runs(bounds[k + 1] - bounds[k], slots - k) for k in range(len(kept)))
                costs.append(stop + sum(parts))
                action = generator.send(True)
            case Drop(step):
                kept.remove(step)
                action = next(generator)
            case Save(step):
                kept.append(step)
                assert len(kept) <= slots
                action = next(generator)
            case other:
                pytest.fail(f"{other} in the sweep")
    generator.close()
    return costs


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8])
def test_the_backward_is_what_the_sweep_was_kept_for(slots: int) -> None:
    costs = online_costs(slots, 90)
    for length in range(1, 91):
        chain = Chain.equal(StepCost(2, 3), length)
        bill = simulate_actions(chain, Online(slots).actions(chain))
        assert bill.plain_runs == costs[length - 1]
        assert bill.peak_snapshots <= slots
        assert bill.peak_memory <= 2 * slots + 3


@pytest.mark.parametrize("slots", [1, 2, 5, 12, 30])
def test_the_online_optimum_up_to_beta_2(slots: int) -> None:
    """2T - s: one plain run for each step in the sweep, and one more for each that is not stored."""
    for length, cost in enumerate(online_costs(slots, beta(slots, 2) - 1), start=1):
        assert cost == max(length, 2 * length - slots)


def within_a_fifth(slots: int) -> tuple[float, float]:
    """Worst ratio to the optimum with known length: of plain runs (from 12 steps on) and of all forward runs."""
    plain = total = 0.0
    for length, cost in enumerate(online_costs(slots, 5000), start=1):
        offline = plain_runs(length, slots)
        # Not knowing the end costs one run of the last step; with one or two steps that is all there is.
        if length <= 2:
            assert cost == offline + 1
            continue
        total = max(total, (cost + length) / (offline + length))
        if length >= 12:
            plain = max(plain, cost / offline)
    assert plain <= 1.2
    assert total <= 1.2
    return plain, total


def test_within_a_fifth_of_the_offline_optimum(record_property: Callable[[str, object], None]) -> None:
    worst = [within_a_fifth(slots) for slots in (5, 11, 27, 50)]
    record_property(
        "figure",
        f"online against offline, 5 to 50 slots, up to 5,000 steps: worst {max(p for p, _ in worst):.3f}x the plain "
        f"runs (from 12 steps on), {max(t for _, t in worst):.3f}x all forward runs (from 3 steps on)",
    )


@pytest.mark.slow
@pytest.mark.parametrize("slots", range(5, 51))
def test_within_a_fifth_for_every_number_of_slots(slots: int) -> None:
    within_a_fifth(slots)


def test_as_a_schedule() -> None:
    plan = Plan.make(Chain.equal(StepCost(1, 1), 100), Knob("checkpoints", 5), Online(5))
    assert plan.bound is not None
    assert plan.bound.runs == plain_runs(100, 5) <= plan.bill.plain_runs
    assert plan.bound.scope.endswith("had the length been known")


def test_slots_are_checked() -> None:
    with pytest.raises(InputError, match="checkpoints=0"):
        next(online(0))
