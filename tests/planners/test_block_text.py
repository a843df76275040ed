"""The text of a whole model's plan: its blocks, what was decided for each and why, and its worst moment."""

from __future__ import annotations

import dataclasses
import re
from typing import cast

import pytest

from lowtide import Chain, StepCost, TapeOption, Working
from lowtide.chain import Role
from lowtide.forms import FormKind, form_named
from lowtide.planners import block_text
from lowtide.planners.block_text import format_time, kind, kinds, rows, worst_moment
from lowtide.planners.blocks import Blocks
from lowtide.sizes import format_size
from tests.report.models import INPUTS, OPTIMIZER, PARAMETERS, gpt, model_plan

PLAN = model_plan(gpt())
SCHEDULE = cast(Blocks, PLAN.schedule)


def test_the_plan_tells_its_blocks() -> None:
    text = str(PLAN)
    lines = text.splitlines()
    assert lines[0] == "model     12 blocks, 864.3 MiB of tape if all are kept"
    assert lines[1] == (
        "holds     parameters 324 MiB, optimizer state 648 MiB, inputs and buffers 2 MiB, gradients 324 MiB"
    )
    asked, peak = PLAN.knob.value or 0, PLAN.bill.peak_memory
    assert lines[2] == f"asked     peak={format_size(asked)}; the plan aims 16 MiB below it, its margin"
    assert lines[3] == f"peak      {format_size(peak)} predicted, {peak / asked:.1%} of the one asked for"
    assert lines[4].startswith("worst     in ")
    extra = PLAN.bill.seconds - PLAN.chain.plain_seconds
    assert lines[5] == f"time      {format_time(extra)} extra: {PLAN.time_factor:.3f}x the plain step's time, predicted"
    assert lines[7].startswith(f"frontier  {len(PLAN.frontier)} choices, from ")
    assert lines[8] == "planner   blocks"
    assert [line[10:] for line in lines if line.startswith("note ")] == list(SCHEDULE.notes)
    table = lines[lines.index(next(line for line in lines if line.startswith("  block"))) :]
    assert len(table) == 13
    assert table[0].split() == ["block", "tape", "time", "decision", "why"]
    assert [line.split()[0] for line in table[1:]] == [f"transformer.h.{k}" for k in range(12)]


def test_every_reason_has_its_numbers() -> None:
    for row in rows(PLAN.chain, SCHEDULE):
        if row.decision == "keep":
            assert (row.why, row.held, row.extra) == ("fits", row.tape, 0.0)
        else:
            assert row.why == f"frees {format_size(row.tape - row.held)} for {format_time(row.extra)}"
    assert len({row.decision for row in rows(PLAN.chain, SCHEDULE)}) > 1


def test_the_worst_moment_is_the_peak_and_its_parts_are_all_of_it() -> None:
    for share in (0.0, 0.3, 0.7, 1.0):
        plan = model_plan(gpt(), share)
        worst = worst_moment(plan.chain, plan.schedule)  # type: ignore[arg-type]
        assert worst.total == plan.bill.peak_memory == sum(size for _, size in worst.parts)
        parts = dict(worst.parts)
        assert parts["parameters"] == PARAMETERS
        assert parts["optimizer state"] == OPTIMIZER
        assert parts["inputs and buffers"] == INPUTS


@pytest.mark.parametrize(
    ("roles", "where", "told"),
    [
        ([Role.OPTIMIZER, Role.BLOCK], 0, "in the optimizer step: parameters 10 B, gradients 5 B, the rest 86 B"),
        ([Role.BLOCK, Role.LOSS], 1, "in the loss: parameters 10 B, tapes 7 B, gradients so far and transients 91 B"),
        (
            [Role.BETWEEN, Role.BLOCK],
            0,
            "outside the blocks, before the first: parameters 10 B, gradients so far and transients",
        ),
        ([Role.BLOCK, Role.BETWEEN], 1, "outside the blocks, after a: parameters 10 B, tapes 7 B, gradients so far"),
        ([Role.BLOCK, Role.BLOCK], 1, "in b: parameters 10 B, tapes 8 B, gradients so far and transients 90 B"),
        ([], 1, "in b: parameters 10 B, tapes 8 B, gradients so far"),
    ],
)
def test_where_the_worst_moment_is(roles: list[Role], where: int, told: str) -> None:
    light, heavy = StepCost(1, 7), StepCost(1, 1, working=Working(backward=100))
    steps = [heavy, light] if where == 0 else [light, heavy]
    chain = dataclasses.replace(Chain.of(steps, ["a", "b"], roles), parameters=10, gradients=5)
    worst = worst_moment(chain, Blocks((0, 0)))
    assert worst.step == where
    assert str(worst).startswith(told)


def test_forms_that_free_nothing_are_told_too() -> None:
    options = (TapeOption(10, 0.5, "", 20), TapeOption(10, 0.0, "same"), TapeOption(4, 0.0, "free", 50))
    chain = Chain.of([StepCost(1, 10, working=Working(backward=50), options=options), StepCost(1, 11)])
    told = [block_text.why(chain, 0, option, "s") for option in range(4)]
    assert told == ["fits", "needs 30 B less at its worst moment for 500 ms", "at no cost", "frees 6 B at no cost"]
    assert block_text.why(chain, 1, 0, "s") == "fits; it has no other form"
    assert rows(chain, Blocks((1, 0)))[0].decision == "option 1"


def test_decisions_are_counted_by_their_sort() -> None:
    texts = ["rerun", "lean 3 + 0 B", "rerun, lean 3 + 0 B", "a: rerun; b: lean 1 + 0 B", "rerun, keep x", "nest (0-3)"]
    options = [TapeOption(2, 1.0, form=form_named(text)) for text in texts]
    step = StepCost(1, 10, options=(*options, TapeOption(2, 1.0, "odd one")))
    chain = Chain.of([step])
    found = [kind(chain, 0, option) for option in range(len(step.menu))]
    assert kinds([*found, FormKind.KEPT]) == "2 kept, 1 lean, 1 in parts, 1 nested, 3 rerun, 1 other"
    assert kinds([]) == ""


def test_sizes_in_the_names_of_forms_are_made_readable() -> None:
    text = str(model_plan(gpt(), 0.5))
    assert re.search(r"lean 4\d\.\d+ MiB \+ 512 KiB|lean 28\.8 MiB \+ 1 MiB", text)
    assert "45298483" not in text


@pytest.mark.parametrize(
    ("time", "unit", "text"),
    [
        (0.0, "s", "0 s"),
        (1.0, "s", "1 s"),
        (0.0012, "s", "1.2 ms"),
        (0.99996, "s", "1 s"),
        (3.4e-5, "s", "34 us"),
        (2e-9, "s", "2 ns"),
        (1e-12, "s", "0 s"),
        (1234.0, "s", "1,234 s"),
        (1.5e9, "FLOP", "1.5 GFLOP"),
        (12.0, "FLOP", "12 FLOP"),
        (3e18, "FLOP", "3,000 PFLOP"),
    ],
)
def test_times_for_people(time: float, unit: str, text: str) -> None:
    assert format_time(time, unit) == text
