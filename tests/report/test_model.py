"""What a report tells of a whole model's plan, in words: the plan's own, a terminal's, a notebook's and a figure's."""

from __future__ import annotations

import dataclasses
import html
import io
import re
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console

from lowtide import BudgetError, Chain, Plan, Receipt, StepCost
from lowtide.chain import Role
from lowtide.plan import Knob
from lowtide.planners.block_text import format_time, rows
from lowtide.planners.blocks import Blocks, block_frontier, for_peak, least_peak, to_ask
from lowtide.report import Mark, figure, show, tell
from lowtide.report.content import measured_peak
from lowtide.report.kinds import ModelKind, kind_of
from lowtide.report.terminal import render
from lowtide.report.wording import size_at_least
from lowtide.sizes import format_size, parse_size
from tests.report.chains import HOSTILE
from tests.report.models import HELD, INPUTS, MIB, OPTIMIZER, PARAMETERS, gpt, measured_model, model_plan

PLAN = model_plan(gpt())
SCHEDULE = cast(Blocks, PLAN.schedule)


def printed(
    plan: Plan, receipt: Receipt | None = None, width: int = 100, encoding: str = "utf-8", points: int = 5
) -> str:
    buffer = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    Console(file=buffer, width=width, color_system=None).print(render(tell(plan, receipt, points=points)))
    buffer.flush()
    return buffer.buffer.getvalue().decode(encoding)


# The plan's own text


def test_times_that_were_counted_are_no_seconds() -> None:
    plan = model_plan(gpt(), unit="FLOP")
    assert " FLOP extra" in str(plan) or "FLOP extra: " in str(plan)
    assert " ms" not in str(plan)
    assert Plan.from_json(plan.to_json()) == plan
    assert [snippet.name for snippet in kind_of(plan).snippets()] == ["JAX", "PyTorch", "plan file"]
    assert kind_of(plan).snippets()[2].code.endswith("import lowtide.jax as lt\n\nloss = lt.apply(plan, loss)")


def test_a_model_without_anything_to_choose() -> None:
    chain = Chain.of(
        [StepCost(1, 1, 1.0, 2.0), StepCost(1, 1, 1.0, 3.0)], ["(outside)", "(loss)"], [Role.BETWEEN, Role.LOSS]
    )
    plan = Plan.make(chain, Knob("none"), Blocks((0, 0), notes=("Nothing is repeated in this model.",)))
    text = str(plan)
    assert "model     0 blocks, 0 B of tape if all are kept" in text
    assert "holds" not in text
    assert "peak      2 B predicted\n" in text
    assert "blocks    none" in text
    assert "frontier  one choice, 2 B with 0 s extra" in text
    assert text.endswith("note      Nothing is repeated in this model.")
    assert "there are no blocks to choose for" in printed(plan)
    assert tell(plan).verdict == "Takes a predicted peak of 2 B; no peak was named."


# Another peak


@pytest.mark.parametrize("margin", [0, 16 * MIB])
def test_another_peak_has_the_same_share_as_its_margin(margin: int) -> None:
    plan = model_plan(gpt(), margin=margin)
    for point in (plan.frontier[0], plan.frontier[7], plan.frontier[-1]):
        asked = to_ask(plan, point.peak)
        other = for_peak(plan, asked)
        assert other.bill.peak_memory == point.peak
        assert for_peak(plan, parse_size(size_at_least(asked))).bill.peak_memory >= point.peak
        assert other.schedule.margin / asked == pytest.approx(margin / (plan.knob.value or 0), rel=1e-5)  # type: ignore[attr-defined]
    least = to_ask(plan, least_peak(plan.chain))
    with pytest.raises(BudgetError, match=f"the least that works is {least:,} B"):
        for_peak(plan, least - 1)


def test_sizes_to_ask_for_are_rounded_up() -> None:
    for size in (1, 999, 1023, 1024, 1025, 12_119, 1023 * 1024 + 1, 3 * 2**30 + 1, 2**40 + 12_345, 54_321 * 2**40 + 1):
        assert size <= parse_size(size_at_least(size)) <= 1.0011 * size + 1
    assert size_at_least(2**30) == "1 GiB"


# The story


def test_the_story_has_the_whole_frontier_and_the_usual_choices() -> None:
    story = tell(PLAN)
    peaks = [mark.peak for mark in story.frontier]
    assert peaks == sorted(point.peak for point in PLAN.frontier)
    assert [mark.name for mark in story.frontier].count(str(PLAN.knob)) == 1
    kept, again = story.peers
    assert (kept.name, kept.peak, kept.time_factor) == ("all kept", PLAN.frontier[0].peak, 1.0)
    assert again.name == "every block rerun"
    fastest = next(point.extra for point in PLAN.frontier if point.peak <= again.peak)
    assert fastest <= PLAN.chain.plain_seconds * (again.time_factor - 1)
    assert story.least == least_peak(PLAN.chain)
    assert story.fits
    asked, peak = format_size(PLAN.knob.value or 0), format_size(PLAN.bill.peak_memory)
    assert story.verdict == f"Fits: a predicted peak of {peak}, with {asked} asked for."
    alone = tell(PLAN, points=0)
    assert (len(alone.frontier), alone.peers, alone.least) == (1, (), 0)


def test_a_choice_of_ones_own_is_told_beside_the_frontier() -> None:
    last = len(PLAN.chain[12].menu) - 1
    plan = Plan.make(PLAN.chain, PLAN.knob, dataclasses.replace(SCHEDULE, options=(*(0,) * 12, last, 0, 0, 0)))
    assert (*(0,) * 12, last, 0, 0, 0) not in [point.options for point in PLAN.frontier]
    story = tell(plan)
    assert len(story.frontier) == len(PLAN.frontier) + 1
    assert not story.fits
    assert story.verdict.startswith("Does not fit: a predicted peak of ")


def test_measured_beside_predicted() -> None:
    receipt = measured_model(PLAN)
    story = tell(PLAN, receipt, measured=[Mark("by hand", 2 * 2**30, 1.3)])
    measured = HELD + receipt.peak_memory
    assert measured_peak(PLAN, receipt) == measured
    assert f"and a measured one of {format_size(measured)}, with " in story.verdict
    assert story.measuring == (
        f"Measured: {format_size(measured)} at the worst moment, 1.0% less than predicted; "
        f"{format_size(receipt.peak_memory)} of it made in the step, beside 974 MiB of parameters, optimizer state, "
        "inputs and buffers."
    )
    assert [(mark.name, mark.peak) for mark in story.measured] == [("measured", measured), ("by hand", 2 * 2**30)]
    assert [mark.is_timed for mark in story.measured] == [False, True]
    assert max(story.curve) == HELD + max(receipt.curve)
    above = tell(PLAN, measured_model(PLAN, 1.2))
    assert above.is_measured_above
    assert "20.0% more than predicted" in above.measuring
    assert "Record one training step alone" in above.measuring
    assert "at the worst moment, as predicted; " in tell(PLAN, measured_model(PLAN, 1.0)).measuring
    assert tell(PLAN, Receipt()).measuring == ""


# A terminal


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_terminal(width: int, encoding: str) -> None:
    text = printed(PLAN, measured_model(PLAN), width, encoding)
    assert max(len(line) for line in text.splitlines()) <= width
    words = " ".join(text.split())
    assert "What each peak buys; time over the plain step's" in words
    assert "run's peak" in text
    assert "run's runs" not in text  # a model's receipt counts none
    assert "every block rerun" in words
    assert "Schedule" not in text
    assert "most measured without results and gradients: " in words
    for name in (part.value for part in ModelKind.memory_parts):
        assert name in words
    assert "transformer.h.11" in text
    assert "lt.auto_checkpoint(model, *inputs, peak=" in words


def test_the_terminal_shows_of_a_measurement_what_was_measured() -> None:
    receipt = measured_model(PLAN)
    measured = next(line for line in printed(PLAN, receipt, 120).splitlines() if line.startswith("  measured"))
    peak = HELD + receipt.peak_memory
    share = f"{100 * peak / PLAN.frontier[0].peak:.3g}%"
    assert measured.split() == ["measured", *format_size(peak).split(), share]


def test_times_are_the_blocks_where_nothing_else_has_one() -> None:
    free = [dataclasses.replace(step, forward=0.0, backward=0.0) for step in PLAN.chain.steps]
    blocks = PLAN.chain.blocks()
    steps = [step if k in blocks else free[k] for k, step in enumerate(PLAN.chain.steps)]
    plan = Plan.make(dataclasses.replace(PLAN.chain, steps=tuple(steps)), PLAN.knob, SCHEDULE)
    assert f"{plan.time_factor:.3f}x the plain blocks' time, predicted" in str(plan)
    assert "time over the plain blocks'" in printed(plan, width=120)


def test_the_terminal_marks_the_plan_among_the_choices() -> None:
    lines = printed(PLAN, width=120).splitlines()
    own = next(line for line in lines if line.startswith("▶"))
    assert f"▶ {PLAN.knob}" in own
    assert format_time(PLAN.bill.seconds - PLAN.chain.plain_seconds) in own
    assert f"{PLAN.time_factor:.3f}x" in own
    assert any("frees " in line for line in lines)
    assert " asked for " in " ".join(lines)


def test_it_is_shown_on_a_console() -> None:
    console = Console(file=io.StringIO(), width=100, record=True)
    show(PLAN, measured_model(PLAN), console=console)
    assert "What happens to each block" in console.export_text()


def test_many_blocks_are_counted() -> None:
    text = printed(model_plan(gpt(60)))
    assert "… and 20 more" in text
    assert "transformer.h.39" in text
    assert "transformer.h.40" not in text


def test_names_from_elsewhere_are_text() -> None:
    plan = model_plan(gpt(3, HOSTILE))
    text = printed(plan)
    assert not set("\x07\r\t\x9b\u202e\u2066\ud800\x1b") & set(text)
    page = plan._repr_html_()
    assert "<script>alert" not in page
    assert "\x1b" not in page


# A notebook


def test_the_notebook_has_the_table_and_memory() -> None:
    page = PLAN._repr_html_()
    assert page.count("<svg") == 1
    assert "Memory over time, stacked" in page
    cells = [html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", page.split("class='blocks'")[1])]
    table = [cells[k : k + 5] for k in range(0, len(cells), 5)]
    assert table == [
        [row.name, format_size(row.tape), format_time(row.seconds), row.decision, row.why]
        for row in rows(PLAN.chain, SCHEDULE)
    ]
    assert f"The dashed line is the peak, {format_size(PLAN.knob.value or 0)}." in page
    assert "optimizer state 648 MiB" in page
    assert "Every peak, every tool and the code to paste" in page
    assert "and 20 more" in model_plan(gpt(120))._repr_html_()


# Pictures


def test_the_layers_of_a_moment_are_what_it_holds() -> None:
    story = tell(PLAN, points=0)
    for moment in story.view.timeline.memory:
        parts = kind_of(PLAN).parts_of(moment)
        assert parts[:3] == (PARAMETERS, OPTIMIZER, INPUTS)
        assert sum(parts) == moment.total
    assert sum(kind_of(PLAN).parts_of(story.view.timeline.worst)) == PLAN.bill.peak_memory
    told = {moment.what for moment in story.view.timeline.memory}
    assert {"in the loss", "in the optimizer step", "outside the blocks, before the first"} <= told
    assert {f"in the {way} of transformer.h.3" for way in ("forward", "backward")} <= told
    bare = story.view.timeline.worst._replace(working=5)
    assert kind_of(PLAN).parts_of(bare)[:3] == (PARAMETERS, OPTIMIZER, INPUTS)


def test_the_figure(tmp_path: Path) -> None:
    made = figure(PLAN, measured_model(PLAN), tmp_path / "model.png")
    frontier, _, memory = made.axes
    assert frontier.get_title(loc="left") == "What each peak buys"
    assert frontier.get_ylabel() == "time / plain step's"
    shown = [text.get_text() for text in frontier.get_legend().get_texts()]  # type: ignore[union-attr]
    assert "measured: bytes alone" in shown
    labels = [text.get_text().replace("\n", " ") for text in memory.get_legend().get_texts()]  # type: ignore[union-attr]
    assert any(label.startswith("asked for ") for label in labels)
    assert not any("in no budget" in label for label in labels)
    assert memory.get_ylim()[0] == 0


# Code to paste


@pytest.mark.parametrize(("peak", "given"), [(2 * 2**30, 'peak="2GiB"'), (2 * 2**30 + 1, "peak=2147483649")])
def test_the_code_has_the_peak(peak: int, given: str) -> None:
    plan = Plan.make(PLAN.chain, Knob("peak", peak), PLAN.schedule)
    torch, jax, file = kind_of(plan).snippets()
    assert torch.code.endswith(f"plan = lt.auto_checkpoint(model, *inputs, {given}, optimizer=optimizer)")
    assert f"plan = lt.plan_model(loss, params, *inputs, {given}, optimizer=optimizer)" in jax.code
    assert file.code.endswith("import lowtide.torch as lt\n\nlt.apply(plan, model)")
    for snippet in (torch, jax, file):
        compile(snippet.code, snippet.name, "exec")
    without = Plan.make(PLAN.chain, Knob("peak", peak), Blocks(SCHEDULE.options))
    assert "optimizer" not in kind_of(without).snippets()[0].code


def test_block_frontiers_reach_both_ends() -> None:
    points = block_frontier(PLAN.chain)
    assert points[0].options == (0,) * 16
    assert points[-1].peak == least_peak(PLAN.chain)
