"""Checks of the planning core, which needs no framework: published figures, and plans that are played on paper."""

from __future__ import annotations

from lowtide.chain import Chain, StepCost
from lowtide.doctor.findings import Outcome
from lowtide.planners.choose import choose
from lowtide.simulate import simulate

# (steps, snapshots, forward runs beside the taping ones), of Revolve.
_PUBLISHED = ((100, 5, 316), (1_000, 10, 3_636), (1_000, 50, 1_948))


def planned_runs() -> Outcome:
    """Plans of equal steps make as many runs as Revolve's formula says."""
    found = [
        choose(Chain.equal(StepCost(1, 1), steps), checkpoints=slots).bill.plain_runs for steps, slots, _ in _PUBLISHED
    ]
    right = [runs for _, _, runs in _PUBLISHED]
    return Outcome(found == right, f"{found} runs, {right} published")


def played_plans() -> Outcome:
    """A plan that is played action by action costs what its bill says, and stays within its budget."""
    steps = tuple(StepCost(1_000 + 10 * k, 5_000 + 70 * (k % 7), 1.0 + k % 3) for k in range(24))
    plans = [choose(Chain.of(steps), "40%"), choose(Chain.equal(StepCost(64, 320), 1_000), "5%")]
    right = [simulate(plan) == plan.bill and plan.bill.peak_memory <= (plan.knob.value or 0) for plan in plans]
    return Outcome(all(right), f"{sum(right)} of {len(plans)} plans cost what their bills say")


CHECKS = {"published figures": planned_runs, "plans played on paper": played_plans}
