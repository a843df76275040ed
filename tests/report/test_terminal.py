from __future__ import annotations

import dataclasses
import io
import re
from typing import Literal

import pytest
from rich.cells import cell_len
from rich.console import Console

from lowtide.plan import Knob, Plan, Receipt
from lowtide.planners.choose import choose
from lowtide.report.content import Story, tell
from lowtide.report.terminal import render, show
from lowtide.report.usual_tools import Mark
from lowtide.sizes import format_size
from tests.report.chains import HOSTILE, measured, network, on_disk, rollout, untimed

PLANS = {
    "base": choose(rollout(), base=20),
    "budget": choose(rollout(), "5%"),
    "wide budget": choose(rollout(), "90%"),
    "checkpoints": choose(rollout(), checkpoints=4),
    "no knob": choose(rollout()),
    "raster": choose(rollout(3_000), "1MiB"),
    "layers": choose(network(), "60%"),
    "many layers": choose(network(60), "60%"),
    "hostile": choose(network(5, HOSTILE), "70%"),
    "disk": on_disk(),
    "one step": choose(rollout(1)),
    "untimed": untimed(),
}


def printed(
    story: Story, width: int = 80, encoding: str = "utf-8", *, colour: bool = False, no_color: bool | None = None
) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    kind: Literal["truecolor"] | None = "truecolor" if colour else None
    show(story, Console(file=file, width=width, force_terminal=colour, color_system=kind, no_color=no_color))
    file.flush()
    return raw.getvalue().decode(encoding)


def section(text: str, title: str) -> list[str]:
    """The lines between one heading and the next."""
    lines = text.splitlines()
    start = next(k for k, line in enumerate(lines) if line.startswith(title)) + 1
    return next((lines[start:k] for k in range(start, len(lines)) if re.search("[─-]{5}$", lines[k])), lines[start:])


@pytest.fixture(scope="module", params=PLANS)
def story(request: pytest.FixtureRequest) -> Story:
    return tell(PLANS[request.param], points=6, measured=[Mark(HOSTILE, 70_000, 1.2, "by hand")])


@pytest.mark.untraced
@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_no_line_is_wider_than_the_page(story: Story, width: int, encoding: str) -> None:
    text = printed(story, width, encoding)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert "\x1b" not in text


def test_with_colour_it_is_the_same_text(story: Story) -> None:
    coloured = printed(story, colour=True)
    assert "\x1b[38;2;" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == printed(story)


def test_no_colour_when_asked_for_none(story: Story) -> None:
    assert not re.search(r"\x1b\[[0-9;]*(?:38|48|3[0-7]|9[0-7])[;m]", printed(story, colour=True, no_color=True))


def test_names_are_text() -> None:
    plan = choose(network(5, HOSTILE), "70%")
    marks = [Mark(HOSTILE, 100_000, 1.1, HOSTILE)]
    text = printed(tell(plan, points=4, measured=marks), 200, colour=True)
    assert "[red]bold[/red]" in text
    assert not re.search(r"\x1b(?!\[[0-9;]*m)", text)  # rich's own colours only
    assert not set("\x07\r\t\x9b\u202e\u2066\ud800") & set(text)
    assert "\x1b[31m" not in text


def test_ascii_asks_for_nothing_more() -> None:
    text = printed(tell(choose(network(5, HOSTILE), "70%"), measured(100_000), points=4), 120, "ascii")
    assert "???" in text  # letters that ASCII does not have
    assert ">" in text
    assert "~" in text
    assert "..." in text


def test_the_verdict_has_the_plans_own_numbers() -> None:
    plan = choose(rollout(), "5%")
    text = printed(tell(plan, points=0))
    budget = plan.knob.value or 0
    verdict, *lines = section(text, "Lowtide")
    assert verdict == (
        f"Fits: a predicted peak of {format_size(plan.bill.peak_memory)}, with a budget of {format_size(budget)}."
    )
    for label, line in plan.lines():
        assert any(shown.startswith(label) and line in shown for shown in lines), label


def test_a_run_beside_its_plan() -> None:
    plan = choose(rollout(), "5%")
    budget = plan.knob.value or 0
    kept = printed(tell(plan, measured(budget + 1_000), points=0))
    assert f"and a measured one of {format_size(budget)}" in " ".join(kept.split())
    assert kept.splitlines()[1].startswith("Fits")
    assert "run's runs  380 plain, 400 taping, 400 backward, 2 to measure" in kept
    assert f"most measured: {format_size(budget + 1_000)}" in kept
    line = next(line for line in kept.splitlines() if line.startswith("  measured ▁"))
    assert len(line) == 80
    assert "█" in line
    assert f"Measured: {format_size(budget + 1_000)} at most, 1,000 B of it results" in " ".join(kept.split())
    assert "most measured" not in printed(tell(plan, Receipt(1, 2, 3), points=0))  # no bytes were followed


def test_a_run_above_its_budget_is_told_apart_from_the_plan() -> None:
    plan = choose(rollout(), "5%")
    above = tell(plan, measured(2 * (plan.knob.value or 0)), points=0)
    text = printed(above, colour=True)
    assert "\x1b[1;32mFits: a predicted peak of " in text
    assert "\x1b[33mMeasured: " in text
    assert "\x1b[33mMeasured: " not in printed(tell(plan, measured(9_000), points=0), colour=True)
    broken = dataclasses.replace(plan, knob=Knob("budget", plan.bill.peak_memory - 1))
    assert "\x1b[1;31mDoes not fit: " in printed(tell(broken, points=0), colour=True)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_verdict_is_never_cut(width: int) -> None:
    plan = choose(rollout(), "5%")
    for peak in (9_000, 2 * (plan.knob.value or 0)):
        story = tell(plan, measured(peak), points=0)
        words = " ".join(printed(story, width).split())
        assert f"{story.verdict} {story.measuring} chain " in words


def test_a_short_curve_fills_the_line() -> None:
    text = printed(tell(choose(rollout(), base=20), Receipt(peak_memory=8, curve=(0, 8, 4)), points=0))
    line = next(line for line in text.splitlines() if line.startswith("  measured ▁"))
    assert line[11:] == "▁" * 23 + "█" * 23 + "▄" * 23
    flat = printed(tell(choose(rollout(), base=20), Receipt(curve=(0, 0)), points=0))
    assert "▁" * 69 in flat


def test_what_is_held_besides() -> None:
    chain = dataclasses.replace(rollout(), parameters=2**20, gradients=2**19)
    text = printed(tell(choose(chain, base=20), points=0))
    assert "parameters 1 MiB, gradients 512 KiB: held with or without a plan" in text


def test_the_frontier_marks_the_plan() -> None:
    plan = choose(rollout(), "5%")
    story = tell(plan, points=30, measured=[Mark("by hand", 100_000, 1.25)])
    lines = section(printed(story), "What each budget buys")
    own = [line for line in lines if line.startswith("▶")]
    assert own == [line for line in lines if f"▶ {plan.knob}" in line]
    assert format_size(plan.bill.peak_memory) in own[0]
    assert f"{plan.time_factor:.3f}x" in own[0]
    assert f"{plan.runs_per_step:.4g}" in own[0]
    for mark in story.peers:
        assert any(mark.name[:20] in line and format_size(mark.peak) in line for line in lines), mark
    assert any("by hand, measured" in line and "1.250x" in line for line in lines)
    assert len(lines) <= 1 + 13 + len(story.peers) + 1
    assert "━" in own[0]


def test_very_long_times_are_whole_numbers() -> None:
    lines = section(printed(tell(choose(rollout(), base=20), points=6)), "What each budget buys")
    assert any("67.500x" in line for line in lines)
    mark = Mark("slow", 10_000, 166_667.5)
    assert "166,668x" in printed(tell(choose(rollout(), base=20), points=0, measured=[mark]))


def test_the_schedule_has_a_line_for_each_layer() -> None:
    plan = choose(network(), "60%")
    lines = section(printed(tell(plan, points=0)), "Schedule")
    assert [line.split()[0] + line.split()[1] for line in lines[:9]] == [f"layer{k}" for k in reversed(range(9))]
    assert lines[9].split()[0] == "░" or lines[9].split()[0] == "▒"
    again = {name for name, runs in zip(plan.chain.names, plan.decisions(), strict=True) if runs.plain_runs}
    rerun = {f"layer {k}" for k, line in zip(reversed(range(9)), lines, strict=False) if set("▞▓") & set(line)}
    assert rerun == again


@pytest.mark.parametrize(("name", "glyph"), [("base", "─"), ("disk", "═")])
def test_the_schedule_shows_where_snapshots_are(name: str, glyph: str) -> None:
    lines = section(printed(tell(PLANS[name], points=0)), "Schedule")
    assert sum(line.count(glyph) for line in lines) > 50
    assert sum(line.count("█") for line in lines) > 12  # the backward, in every one of the lines
    assert lines[11].startswith("         0 ")


def test_memory_names_the_peak_and_its_cause() -> None:
    plan = choose(rollout(), "5%")
    story = tell(plan, points=0)
    lines = section(printed(story), "Memory over time")
    worst = story.view.timeline.worst
    assert lines[-1].startswith(f"peak {format_size(plan.bill.peak_memory)} after ")
    assert lines[-1].endswith(worst.what)
    assert lines[0].startswith("    budget ")
    assert lines[7].startswith("       0 B ")
    assert f"tape {format_size(worst.tape)}" in lines[8]
    assert len({len(line.rstrip("\n")) for line in lines[:8]}) == 1


def test_a_budget_far_above_the_peak_is_not_drawn() -> None:
    plan = choose(rollout(2), "50MiB")
    lines = section(printed(tell(plan, points=0)), "Memory over time")
    assert lines[0].strip().startswith(format_size(plan.bill.peak_memory))
    assert not any("╌" in line for line in lines)


def test_many_rows_are_counted() -> None:
    text = printed(tell(choose(network(60), "60%"), points=0))
    lines = section(text, "What happens to each part")
    assert sum(line.startswith("layer ") for line in lines) == 40
    assert lines[-1] == "… and 20 more"
    assert "... and 20 more" in printed(tell(choose(network(60), "60%"), points=0), encoding="ascii")


def test_reasons_where_there_is_room() -> None:
    story = tell(choose(network(), "60%"), points=0)
    assert "stay out of memory" in printed(story, 120)
    assert "stay out of memory" not in printed(story, 80)


def test_the_form_of_a_smaller_tape_is_named() -> None:
    story = tell(choose(network(), "60%"), points=0)
    row = dataclasses.replace(story.view.rows[0], form="half", is_whole=False)
    view = dataclasses.replace(story.view, rows=(row,))
    assert "taped as half; " in printed(dataclasses.replace(story, views=(view,), chosen=0), 120)


def test_the_code_to_paste() -> None:
    code = "\n".join(section(printed(tell(PLANS["base"], points=0)), "The code to paste"))
    assert "ys = lt.checkpointed_for_loop(step, xs, base=20)" in code
    assert "# JAX\nimport lowtide.jax as lt\n" in code


def test_it_prints_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    plan: Plan = PLANS["base"]
    show(tell(plan, points=0))
    assert "base=20" in capsys.readouterr().out


def test_it_is_something_rich_can_print() -> None:
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(render(tell(PLANS["base"], points=0)))
    assert "What each budget buys" in console.export_text()
