"""Plans played and watched: the timeline has to tell exactly what the judge of plans counts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide import Chain, Disk, Plan, StepCost, TapeOption, Working
from lowtide.actions import Tier
from lowtide.planners.choose import choose, least_budget
from lowtide.planners.frontier import frontier
from lowtide.report import timeline
from lowtide.report.timeline import RunKind, Timeline, played

STEP = StepCost(64, 320, cotangent=32, working=Working(10, 20, 30))
ROLLOUT = Chain.equal(STEP, 60)
LAYERS = Chain.of(
    [
        StepCost(100, 400, 1.0, 2.0, cotangent=100, working=Working(10, 20, 30)),
        StepCost(50, 900, 3.0, 5.0, cotangent=50, options=(TapeOption(300, 0.5, "lean"),)),
        StepCost(200, 200, 0.5, 1.0, cotangent=200),
        StepCost(20, 800, 2.0, 4.0),
    ],
    ["in", "attention", "norm", "out"],
)
PLANS = {
    "budget": choose(ROLLOUT, 3_000),
    "all": choose(ROLLOUT, "100%", rooms=True),
    "base": choose(ROLLOUT, base=7),
    "checkpoints": choose(ROLLOUT, checkpoints=3),
    "none": choose(ROLLOUT),
    "disk": choose(ROLLOUT, 3_000, disk=Disk(0.001, 0.002)),
    "one step": choose(Chain.equal(StepCost(1, 1), 1)),
    "layers": choose(LAYERS, least_budget(LAYERS)),
    "layers with room": choose(LAYERS, 1_600),
    "no time": choose(Chain.equal(StepCost(64, 320, 0.0, 0.0), 60), 3_000),
    "no time on disk": choose(Chain.equal(StepCost(64, 320, 0.0, 0.0), 60), 3_000, disk=Disk(0.0, 0.0)),
}


def kinds(timeline: Timeline) -> Counter[RunKind]:
    assert timeline.runs is not None
    return Counter(run.kind for run in timeline.runs)


@pytest.mark.parametrize("name", PLANS)
def test_runs_snapshots_and_peak_are_those_of_the_bill(name: str) -> None:
    plan = PLANS[name]
    timeline, bill = played(plan), plan.bill
    assert timeline.runs is not None
    assert timeline.stored is not None
    counts = kinds(timeline)
    assert counts[RunKind.FORWARD] + counts[RunKind.RERUN] == bill.plain_runs
    assert counts[RunKind.FORWARD_TAPED] + counts[RunKind.RERUN_TAPED] == bill.taping_runs
    assert counts[RunKind.FORWARD] + counts[RunKind.FORWARD_TAPED] == len(plan.chain)
    assert counts[RunKind.BACKWARD] == bill.backward_runs
    assert timeline.worst.total == max(moment.total for moment in timeline.memory) == bill.peak_memory
    assert timeline.runs[-1].stop == pytest.approx(timeline.seconds)
    if bill.seconds:
        assert timeline.seconds == bill.seconds
    for before, after in zip(timeline.runs, timeline.runs[1:], strict=False):
        assert before.stop <= after.start + 1e-9
    assert next(run for run in timeline.runs if run.kind is RunKind.BACKWARD).step == len(plan.chain) - 1
    assert timeline.tally.again.sum() == bill.plain_runs
    assert {snapshot.step for snapshot in timeline.stored} == set(np.flatnonzero(timeline.tally.stored).tolist())


@pytest.mark.parametrize("name", PLANS)
def test_snapshots_live_as_long_as_the_plan_says(name: str) -> None:
    plan = PLANS[name]
    stored = played(plan).stored
    assert stored is not None
    moments = sorted({snapshot.start for snapshot in stored})
    most = max((sum(s.start <= at < s.stop or s.start == at for s in stored) for at in moments), default=0)
    if plan.bill.seconds:  # otherwise everything takes no time at all, or as long as it is counted
        assert most >= plan.bill.peak_snapshots
    assert all(snapshot.start <= snapshot.stop for snapshot in stored)
    assert any(s.tier is Tier.DISK for s in stored) == (plan.bill.peak_disk > 0)


def test_memory_covers_the_whole_time_without_gaps() -> None:
    for plan in PLANS.values():
        timeline = played(plan)
        assert timeline.memory[0].start == 0
        assert timeline.memory[-1].stop == pytest.approx(timeline.seconds)
        for before, after in zip(timeline.memory, timeline.memory[1:], strict=False):
            assert before.stop == after.start


def test_the_cause_of_the_peak_is_named() -> None:
    assert played(PLANS["layers with room"]).worst.what.split()[-1] in LAYERS.names
    assert played(PLANS["checkpoints"]).worst.what == "taping step 58"  # beside the first cotangent
    without_working = played(choose(Chain.equal(StepCost(64, 320), 60), base=7))
    assert "storing state 7" in {moment.what for moment in without_working.memory}


@pytest.mark.usefixtures("few")
def test_the_cause_of_the_peak_of_a_long_plan_is_a_range() -> None:
    plan = choose(Chain.equal(StepCost(64, 320), 10_000), "100%")
    assert played(plan).worst.what == "taping steps [9,975, 10,000)"


def test_a_form_of_tape_is_told() -> None:
    forms = played(choose(LAYERS, least_budget(LAYERS))).tally.forms.tolist()
    decisions = choose(LAYERS, least_budget(LAYERS)).decisions()
    assert [LAYERS[k].menu[form].name for k, form in enumerate(forms)] == [decision.form for decision in decisions]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Aggregate even the shortest."""
    monkeypatch.setattr(timeline, "MOST_RUNS", 0)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("name", PLANS)
def test_an_aggregated_timeline_loses_nothing(name: str) -> None:
    plan = PLANS[name]
    timeline, bill = played(plan), plan.bill
    raster = timeline.raster
    assert raster is not None
    assert (timeline.runs, timeline.stored) == (None, None)
    assert raster.share.shape == (len(RunKind), raster.columns, raster.rows)
    assert timeline.worst.total == bill.peak_memory
    # Every column is filled: its time is spent on something, up to rounding, and on disk if there is one.
    filled = raster.share.astype(int).sum(axis=(0, 2))
    if not bill.peak_disk:
        assert filled.min() >= 255
    assert filled.max() <= 255 + len(RunKind) * raster.rows
    assert (raster.memory.any() or raster.disk.any()) == (bill.peak_snapshots > 0)
    assert raster.disk.any() == (bill.peak_disk > 0)
    assert not raster.memory[-1].any()
    assert timeline.tally.again.sum() == bill.plain_runs


@pytest.mark.usefixtures("few")
def test_rows_of_a_raster_are_where_the_steps_are() -> None:
    raster = played(choose(Chain.equal(StepCost(1, 1), 1_000), "100%")).raster
    assert raster is not None
    forward = raster.share[RunKind.FORWARD_TAPED]
    backward = raster.share[RunKind.BACKWARD]
    assert [int(column.argmax()) for column in forward[:100]] == list(range(100))  # a third of the time, upwards
    assert [int(column.argmax()) for column in backward[100::2]] == list(range(99, -1, -1))


def test_a_million_steps_are_a_few_hundred_columns() -> None:
    plan = choose(Chain.equal(StepCost(64 * 1024, 320 * 1024), 1_000_000), "1GiB")
    timeline = played(plan)
    assert timeline.raster is not None
    assert timeline.raster.rows == 100
    assert len(timeline.memory) <= 400
    assert timeline.worst.total == plan.bill.peak_memory
    assert timeline.tally.again.sum() == plan.bill.plain_runs
    assert timeline.tally.stretches == ()


@pytest.mark.long
@settings(deadline=None, max_examples=60)
@given(st.integers(1, 120), st.integers(1, 9), st.integers(0, 9), st.integers(0, 5))
def test_every_frontier_can_be_played(length: int, state: int, more: int, working: int) -> None:
    chain = Chain.equal(StepCost(state, state + more, working=Working(working, working, 2 * working)), length)
    for plan in frontier(chain, 4):
        timeline = played(plan)
        assert timeline.worst.total == plan.bill.peak_memory
        assert timeline.tally.again.sum() == plan.bill.plain_runs
        assert sum(stop - start for start, stop in timeline.tally.stretches) in (0, length)
    assert isinstance(plan, Plan)
