"""What a report tells: rows, the usual tools' choices, code to paste, and the story of all of it."""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import pytest
import torch
from torch import nn

import lowtide.jax as ltj
import lowtide.torch as lt
from lowtide import BudgetError, Chain, Disk, InputError, Plan, Receipt, StepCost, TapeOption, Working
from lowtide.chain import Ways
from lowtide.plan import Knob
from lowtide.planners.choose import choose, least_budget
from lowtide.planners.revolve import Revolve, plain_runs
from lowtide.planners.sweep import Sweep
from lowtide.report import Mark, content, tell
from lowtide.report.content import measured_peak
from lowtide.report.decisions import rows
from lowtide.report.kinds import kind_of
from lowtide.report.timeline import played
from lowtide.report.usual_tools import equal_count, peers

ROLLOUT = Chain.equal(StepCost(64, 320), 400)
LAYERS = Chain.of(
    [StepCost(100 * k, 400 * k, k, 2 * k, cotangent=100 * k, working=Working(k, k, k)) for k in range(1, 10)],
    [f"layer {k}" for k in range(9)],
)


# Rows


def test_layers_have_a_row_each_that_agrees_with_the_plans_decisions() -> None:
    plan = choose(LAYERS, 9_000)
    table = rows(plan, played(plan).tally)
    decisions = plan.decisions()
    assert [row.name for row in table] == list(LAYERS.names)
    assert [row.again for row in table] == [decision.plain_runs for decision in decisions]
    assert [row.stored for row in table] == [decision.stored for decision in decisions]
    assert [row.tape for row in table] == [decision.tape for decision in decisions]
    assert {row.decision for row in table} == {"keep", "rerun"}
    for row in table:
        assert row.decision == ("rerun" if row.again else "keep")
        assert ("run again" in row.why) == (row.decision == "rerun")
    first = next(row for row in table if row.again and row.stored)
    assert first.why.endswith("it is run again from the state stored at its start")
    below = next(row for row in table if row.again and not row.stored)
    assert below.why.endswith(f"it is run again from the state stored before {table[below.start - 1].name}")


def test_equal_steps_have_a_row_for_each_stretch() -> None:
    plan = choose(ROLLOUT, base=20)
    table = rows(plan, played(plan).tally)
    assert [(row.start, row.stop) for row in table] == [(k, k + 20) for k in range(0, 400, 20)]
    assert [row.again for row in table] == [1.0] * 19 + [0.0]
    assert table[0].name == "steps [0, 20)"
    assert table[0].tape == 20 * 320
    assert table[-1].why == "its tape of 6.25 KiB is kept from the first run on, so nothing of it is run twice"


def test_names_are_whole_in_the_table() -> None:
    names = [f"encoder.transformer.layers.11.self_attention.{part}\ud800" for part in ("query", "value")]
    plan = choose(Chain.of([StepCost(10, 100), StepCost(11, 120)], names))
    assert [row.name for row in rows(plan, played(plan).tally)] == [name[:-1] + "?" for name in names]


def test_many_stretches_are_ranges() -> None:
    plan = choose(ROLLOUT, checkpoints=3)
    table = rows(plan, played(plan).tally)
    assert len(table) == 50
    several = next(row for row in table if row.stored > 1)
    assert several.why.endswith(f"each from the nearest of its {several.stored} stored states")
    assert sum(row.again * (row.stop - row.start) for row in table) == pytest.approx(plain_runs(400, 3))


def test_a_row_whose_start_is_stored_nowhere_runs_from_the_beginning() -> None:
    plan = choose(Chain.equal(StepCost(64, 320), 100), checkpoints=2)
    why = rows(plan, played(plan).tally)[-2].why
    assert "it is run again from the state stored before step" in why
    sweep = Plan.make(Chain.equal(StepCost(1, 1, 0.0, 0.0), 60), Knob("none"), Revolve(2))
    assert "of the plain time" not in rows(sweep, played(sweep).tally)[0].why


def test_forms_of_tape_are_named() -> None:
    step = StepCost(10, 100, options=(TapeOption(40, 0.5, "lean"), TapeOption(20, 1.0)))
    chain = Chain.of([step, StepCost(10, 90, options=step.options), step])
    plan = Plan.make(chain, Knob("none"), Sweep((3,), (0, 1, 2)))
    assert [row.form for row in rows(plan, played(plan).tally)] == ["keep", "lean", "option 2"]
    long = Chain.of([StepCost(10, 100 + k % 2, options=step.options) for k in range(2_001)])
    mixed = Plan.make(long, Knob("none"), Sweep((2_001,), tuple(k % 3 for k in range(2_001))))
    assert {row.form for row in rows(mixed, played(mixed).tally)} == {"several forms"}


# The usual tools


def test_peers_of_a_rollout_cost_what_their_own_plans_say() -> None:
    marks = {mark.name: mark for mark in peers(ROLLOUT)}
    assert list(marks) == ["plain", "checkpoint on every step", "segments of 20 steps", "10 snapshots"]
    assert (marks["plain"].peak, marks["plain"].time_factor) == (400 * 320, 1.0)
    segments, base = marks["segments of 20 steps"], choose(ROLLOUT, base=20)
    assert segments.peak == base.bill.peak_memory
    assert segments.time_factor == pytest.approx(4 / 3)  # every step twice forward, the last segment's too
    assert marks["checkpoint on every step"].time_factor == pytest.approx(4 / 3)
    assert base.time_factor < 4 / 3
    assert marks["10 snapshots"].time_factor == choose(ROLLOUT, checkpoints=10).time_factor


def test_peers_of_layers_are_cut_by_count() -> None:
    names = [mark.name for mark in peers(LAYERS)]
    assert names[:2] == ["plain", "checkpoint on every layer"]
    assert "2 segments by count" in names
    assert "3 segments by count" in names
    assert equal_count(9, 5).stretches == (1, 1, 1, 1, 5)


def test_short_chains_have_few_choices() -> None:
    one = peers(Chain.equal(StepCost(5, 5), 1))
    assert [(mark.name, mark.peak) for mark in one] == [("plain", 5), ("checkpoint on every step", 5)]
    assert one[1].time_factor == pytest.approx(4 / 3)
    two = peers(Chain.of([StepCost(5, 5, 1.0, 2.0), StepCost(6, 6, 10.0, 20.0)]))
    assert [mark.name for mark in two] == ["plain", "checkpoint on every layer"]
    assert two[1].time_factor == pytest.approx(44 / 33)
    no_time = peers(Chain.equal(StepCost(5, 5, 0.0, 0.0), 1))
    assert [mark.name for mark in no_time] == ["plain"]


@pytest.mark.parametrize(
    "mark",
    [("x", 10, float("nan")), ("x", 10, float("inf")), ("x", -1, 1.0), ("x", 2**80, 1.0), ("x", 1.5, 1.0), (3, 1, 1.0)],
)
def test_a_mark_is_a_point_that_can_be_drawn(mark: tuple[Any, Any, Any]) -> None:
    with pytest.raises(InputError):
        Mark(*mark)


# Code to paste


@pytest.mark.parametrize(
    ("knobs", "given"),
    [
        ({"budget": "64KiB"}, ', budget="64KiB"'),
        ({"budget": 65_537}, ", budget=65537"),
        ({"base": 20}, ", base=20"),
        ({"checkpoints": 9}, ", checkpoints=9"),
        ({}, ""),
    ],
)
def test_the_code_to_paste_has_the_knob(knobs: dict[str, int | str], given: str) -> None:
    found = dict(kind_of(choose(ROLLOUT, **knobs)).snippets())  # type: ignore[arg-type]  # the values fit their names
    assert list(found) == ["PyTorch", "JAX", "brainstate", "plan file"]
    assert f"lt.checkpointed_for_loop(step, xs{given})" in found["PyTorch"]
    assert f"lt.checkpointed_scan(step, init, xs{given})" in found["PyTorch"]
    assert f"lt.checkpointed_scan(step, init, xs{given})" in found["JAX"]
    for name, code in found.items():
        compile(code, name, "exec")


def test_a_plan_with_rooms_is_likely_to_be_for_jax() -> None:
    found = kind_of(choose(ROLLOUT, "10%", rooms=True)).snippets()
    assert [snippet.name for snippet in found] == ["JAX", "brainstate", "PyTorch", "plan file"]


@pytest.mark.parametrize(("knobs", "given"), [({"budget": 9_000}, ", budget=9000"), ({}, "")])
def test_the_code_for_layers(knobs: dict[str, int], given: str) -> None:
    found = dict(kind_of(choose(LAYERS, **knobs)).snippets())  # type: ignore[arg-type]  # the values fit their names
    assert list(found) == ["PyTorch", "JAX", "plan file"]
    assert f"y = lt.sequential(layers, x{given})" in found["PyTorch"]
    for name, code in found.items():
        compile(code, name, "exec")


def test_layers_planned_for_another_knob_take_the_plan_itself() -> None:
    found = dict(kind_of(choose(LAYERS, base=3)).snippets())
    assert list(found) == ["PyTorch", "JAX"]
    for code in found.values():
        assert "plan = Plan.from_json" in code
        assert code.endswith("y = lt.sequential(layers, x, plan=plan)")


# The story


def test_views_are_the_planners_answers_and_the_plan_is_among_them() -> None:
    plan = choose(ROLLOUT, "10%")
    seen: list[tuple[int, int]] = []
    story = tell(plan, points=6, progress=lambda done, total: seen.append((done, total)))
    assert story.view.plan is plan
    assert len(story.views) == 10  # of the four tools' peaks, one is that which keeps everything
    budgets = [view.plan.knob.value for view in story.views]
    assert budgets == sorted(budgets, key=lambda value: value or 0)
    for view in story.views:
        assert view.plan == choose(ROLLOUT, view.plan.knob.value)
    assert story.least == least_budget(ROLLOUT) == budgets[0]
    assert seen == [*((k, 11) for k in range(1, 10)), (11, 11)]
    assert [mark.peak for mark in story.frontier] == sorted(mark.peak for mark in story.frontier)
    assert story.fits
    assert story.verdict == "Fits: a predicted peak of 12.5 KiB, with a budget of 12.5 KiB."


def test_the_plan_alone_is_quick_and_a_budget_on_the_way_is_not_told_twice() -> None:
    assert len(tell(choose(ROLLOUT, base=20), points=0).views) == 1
    assert len(tell(choose(ROLLOUT, least_budget(ROLLOUT)), points=5).views) == 8
    assert len(tell(choose(ROLLOUT, peers(ROLLOUT)[1].peak), points=5).views) == 8


def test_no_tool_is_better_than_the_plan_for_its_own_peak() -> None:
    for chain in (ROLLOUT, LAYERS):
        story = tell(choose(chain, "60%"), points=4)
        for tool in story.peers:
            assert tool.time_factor >= min(m.time_factor for m in story.frontier if m.peak <= tool.peak) - 1e-12


def test_a_plan_without_a_budget_stands_where_its_peak_is() -> None:
    story = tell(choose(ROLLOUT, base=20), points=5)
    budgets = [view.plan.knob.value for view in story.views[: story.chosen]]
    assert all(budget is not None and budget <= story.plan.bill.peak_memory for budget in budgets)
    assert story.verdict == "Takes a predicted peak of 7.438 KiB; no budget was named."
    assert story.fits


@pytest.mark.long
def test_plans_with_disk_or_rooms_are_among_their_own_kind() -> None:
    disk = Disk(1e-3, 1e-3)
    for view in tell(choose(ROLLOUT, "5%", disk=disk), points=4).views:
        assert view.plan.schedule.disk == disk
    with_rooms = choose(ROLLOUT, "10%", rooms=True)
    story = tell(with_rooms, points=4)
    assert story.least == 64 + 320
    for view in story.views:
        assert view.plan == choose(ROLLOUT, view.plan.knob.value, rooms=True)


def test_plans_of_too_many_runs_are_points_without_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "MOST_RUNS_DRAWN", 1_500)
    story = tell(choose(ROLLOUT, "50%"), points=8)
    assert len(story.frontier) == 12
    assert 2 < len(story.views) < 12
    assert all(view.plan.bill.plain_runs + 400 <= 1_500 for view in story.views)


def test_a_receipt_is_measured_beyond_what_is_held_anyway() -> None:
    plan = choose(ROLLOUT, 20_000)
    bill = plan.bill
    receipt = Receipt(bill.plain_runs, 400, 400, peak_memory=20_500, held=1_000, seconds=1.0)
    story = tell(plan, receipt, points=0, measured=[Mark("torch", 99, 1.5)])
    assert measured_peak(plan, receipt) == 19_500
    assert story.fits
    mine, other = story.measured
    assert mine.peak == 19_500
    assert mine.time_factor == pytest.approx(plan.time_factor)
    assert other == Mark("torch", 99, 1.5)
    assert "and a measured one of 19.04 KiB" in story.verdict
    assert story.measuring == (
        "Measured: 20.02 KiB at most, 1,000 B of it results and gradients, which no budget counts."
    )
    over = tell(plan, Receipt(peak_memory=30_000), points=0)
    assert over.fits
    assert over.is_measured_above
    assert over.verdict == "Fits: a predicted peak of 19.5 KiB, with a budget of 19.53 KiB."
    assert over.measuring.startswith("Measured: 29.3 KiB at most. That is above the budget though less was predicted")
    assert tell(plan, points=0).measuring == ""
    assert over.measured[0].time_factor == plan.time_factor
    assert not over.measured[0].is_timed  # no runs were counted
    assert tell(plan, Receipt(), points=0).measured == ()
    assert measured_peak(plan, None) is None


def test_a_recording_is_as_good_as_a_receipt() -> None:
    with lt.record() as recording:
        pass
    assert tell(choose(ROLLOUT, base=20), recording, points=0).receipt == recording.receipt


@pytest.mark.parametrize(("times", "backward"), [(1, 400), (10, 4_000)])
def test_many_rounds_of_training_in_one_receipt_are_one_point(times: int, backward: int) -> None:
    plan = choose(ROLLOUT, 20_000)
    receipt = Receipt(times * plan.bill.plain_runs, times * 400, backward, peak_memory=20_000)
    assert tell(plan, receipt, points=0).measured[0].time_factor == pytest.approx(plan.time_factor)


@pytest.mark.parametrize("backward", [0, 399, 401])
def test_half_a_round_has_no_time(backward: int) -> None:
    plan = choose(ROLLOUT, 20_000)
    (mark,) = tell(plan, Receipt(50, 400, backward, peak_memory=20_000), points=0).measured
    assert (mark.time_factor, mark.is_timed) == (plan.time_factor, False)
    assert mark.note == "bytes alone; drawn at the predicted time"


def test_a_plan_whose_prediction_is_over_its_budget_does_not_fit() -> None:
    plan = Plan.make(ROLLOUT, Knob("budget", 500), Revolve(20))
    story = tell(plan, points=0)
    assert not story.fits
    assert story.verdict.startswith("Does not fit: a predicted peak of 1.562 KiB, with a budget of 500 B")


def test_what_is_no_plan_or_no_receipt_is_refused() -> None:
    with pytest.raises(InputError, match="points='3' is a str"):
        tell(choose(ROLLOUT, base=20), points="3")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="plan=3 is a int; give a Plan"):
        tell(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="receipt=3 is a int; give a Receipt"):
        tell(choose(ROLLOUT, base=20), 3)  # type: ignore[arg-type]


# What front ends tell


def test_torch_tells_what_parameters_and_their_gradients_take() -> None:
    cell = nn.GRUCell(8, 8)
    own = sum(parameter.nbytes for parameter in cell.parameters())
    rollout = lt.plan_scan(lambda h, x: (cell(x, h), h), torch.zeros(4, 8), torch.zeros(50, 4, 8), budget="30%")
    assert (rollout.chain.parameters, rollout.chain.gradients) == (own, own)
    deep = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5)])
    deep[0].requires_grad_(False)
    layers = lt.plan_sequential(deep, torch.zeros(4, 8)).chain
    assert (layers.parameters, layers.gradients) == (5 * 72 * 4, 4 * 72 * 4)


def test_jax_tells_them_too() -> None:
    w = jnp.eye(8)
    plan = ltj.plan_scan(lambda h, x: (jnp.tanh(h @ w + x), h), jnp.zeros(8), jnp.zeros((50, 8)), budget="50%")
    assert plan.chain.parameters == 8 * 8 * 4
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.chain.parameters == 8 * 8 * 4


def test_the_slider_of_a_torch_loop_has_the_plans_that_torch_would_make() -> None:
    """One step at a time takes less beside its tape, so small budgets have other plans than a chain alone tells."""
    weight = torch.full((64,), 0.5, requires_grad=True)

    def plan_for(budget: int | str) -> Plan:
        step, xs = lambda h, x: (torch.tanh(h * weight + x), h.sum()), torch.ones(200, 64)
        return lt.plan_scan(step, torch.zeros(64), xs, budget=budget, reduce="mean")

    story = tell(plan_for("20%"), points=8)
    with pytest.raises(BudgetError) as caught:
        plan_for(1)
    assert caught.value.least == story.least
    assert {view.plan.planner for view in story.views} == {"revolve", "uniform"}
    for view in story.views:
        assert view.plan.knob.value is not None
        assert plan_for(view.plan.knob.value).bill.plain_runs == view.plan.bill.plain_runs
        assert Plan.from_json(view.plan.to_json()) == view.plan


def test_two_ways_of_taping_belong_to_equal_steps() -> None:
    ways = Ways(StepCost(64, 320, working=Working(10, 20, 30)), StepCost(64, 320))
    with pytest.raises(InputError, match="one of the two as their cost"):
        Chain((StepCost(1, 1),), 10, ways=ways)


def test_plans_from_before_there_were_parameters_can_be_read() -> None:
    document = json.loads(choose(ROLLOUT, base=20).to_json())
    del document["chain"]["parameters"], document["chain"]["gradients"], document["chain"]["ways"]
    assert Plan.from_json(json.dumps(document)) == choose(ROLLOUT, base=20)
