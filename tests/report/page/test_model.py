"""The page of a whole model in a real browser: every choice of its frontier shows the core's own numbers."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from lowtide import Chain, Plan, StepCost
from lowtide.chain import Role
from lowtide.plan import Knob
from lowtide.planners.block_text import format_time, kinds, worst_moment
from lowtide.planners.blocks import Blocks, for_peak, least_peak, to_ask
from lowtide.report import write
from lowtide.report.kinds import ModelKind, kind_of
from lowtide.report.page import model as model_page
from lowtide.report.wording import size_at_least
from lowtide.sizes import format_size
from tests.report.browser import Visit, chromium, data_of, visit
from tests.report.chains import HOSTILE
from tests.report.models import HELD, MIB, NOTES, gpt, measured_model, model_plan
from tests.report.page.test_page import CONTRAST, SCHEMES

pytestmark = pytest.mark.long  # in a browser
PLAN = model_plan(gpt())


def model_of(plan: Plan) -> ModelKind:
    """The kind of a model's plan."""
    kind = kind_of(plan)
    assert isinstance(kind, ModelKind)
    return kind


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write(PLAN, measured_model(PLAN), folder / "model.html")


def table(seen: Visit) -> list[list[str]]:
    """The rows of the table as they are written."""
    cells = seen.page.locator("#table tbody td").all_text_contents()
    return [cells[k : k + 8] for k in range(0, len(cells), 8)]


def written(plan: Plan) -> list[list[str]]:
    """The rows that the core has for a plan, as people write them."""
    unit = plan.schedule.unit if isinstance(plan.schedule, Blocks) else ""
    return [
        [
            row.name,
            row.decision,
            format_size(row.tape),
            format_size(row.held),
            format_time(row.seconds, unit),
            format_time(row.extra, unit),
            format_size(row.level),
            row.why,
        ]
        for row in model_of(plan).block_rows()
    ]


def check(seen: Visit, plan: Plan, asked: str) -> None:
    """The page shows this plan."""
    peak, schedule = plan.bill.peak_memory, plan.schedule
    assert isinstance(schedule, Blocks)
    worst = worst_moment(plan.chain, schedule)
    extra = plan.bill.seconds - plan.chain.plain_seconds
    assert {
        name: seen.text(name) for name in ("verdict", "peak", "share", "budget", "factor", "extra", "kinds", "worst")
    } == {
        "verdict": "Fits",
        "peak": format_size(peak),
        "share": f"{100 * peak / kind_of(plan).whole:.1f}% of all kept",
        "budget": asked,
        "factor": f"{plan.time_factor:.3f}x",
        "extra": format_time(extra, schedule.unit),
        "kinds": kinds(row.kind for row in model_of(plan).block_rows()),
        "worst": worst.where,
    }
    assert table(seen) == written(plan)
    cause = seen.text("cause")
    assert cause.startswith(f"The peak of {format_size(peak)} is reached ")
    assert worst.where.removeprefix("in ") in cause
    for name, size in worst.parts:
        if name in ("parameters", "optimizer state", "inputs and buffers", "tapes"):
            assert f"{name} {format_size(size)}" in cause
    assert "tapes 1 B" not in cause


# The slider


def test_every_choice_shows_the_cores_own_numbers(browser: Browser, model: Path) -> None:
    data = data_of(model)
    points = sorted(PLAN.frontier, key=lambda point: point.peak)
    assert [point[0] for point in data["model"]["points"]] == [point.peak for point in points]
    with visit(browser, model) as seen:
        check(seen, PLAN, format_size(PLAN.knob.value or 0))
        for index in {*range(0, len(points), 60), len(points) - 1} - {data["chosen"]}:
            seen.show(index)
            asked = to_ask(PLAN, points[index].peak)
            plan = for_peak(PLAN, asked)
            check(seen, plan, size_at_least(asked))
            assert seen.text("code").strip().endswith(f"*inputs, peak={asked}, optimizer=optimizer)")
            assert "not the plan" in seen.page.locator("#verdict").inner_text().lower()
        seen.find("back").click()
        check(seen, PLAN, format_size(PLAN.knob.value or 0))


def test_keys_buttons_and_the_line_move_it(browser: Browser, model: Path) -> None:
    data = data_of(model)
    points, chosen = data["model"]["points"], data["chosen"]
    with visit(browser, model) as seen:
        seen.find("slider").press("ArrowRight")
        assert seen.text("peak") == format_size(points[chosen + 1][0])
        seen.page.get_by_label("Next smaller peak").click()
        seen.page.get_by_label("Next smaller peak").click()
        assert seen.text("peak") == format_size(points[chosen - 1][0])
        assert seen.page.locator("circle.dot").count() == 2  # of hundreds: the one shown, and the plan
        line = seen.find("frontier-line").bounding_box()
        assert line is not None
        seen.page.locator("#frontier").scroll_into_view_if_needed()
        line = seen.find("frontier-line").bounding_box()
        assert line is not None
        seen.page.mouse.move(line["x"] + 3, line["y"] + 3)
        assert "extra" in seen.page.locator("#tip").inner_text()
        assert "in parts" in seen.page.locator("#tip").inner_text()
        seen.page.mouse.click(line["x"] + 1, line["y"] + 1)
        assert seen.text("peak") == format_size(points[0][0])


def test_a_typed_peak_shows_the_fastest_choice_that_fits(browser: Browser, model: Path) -> None:
    points = data_of(model)["model"]["points"]
    with visit(browser, model) as seen:
        for typed, shown in [(points[5][3], 5), (points[5][3] - 1, 4), (2**40, len(points) - 1)]:
            seen.find("have").fill(str(typed))
            seen.find("have").press("Enter")
            assert seen.text("peak") == format_size(points[shown][0])
        least = to_ask(PLAN, least_peak(PLAN.chain))
        seen.find("have").fill(str(least - 1))
        seen.find("have").press("Enter")
        assert f"the least is {size_at_least(least)}" in seen.text("have-answer")


# Words


def test_a_model_has_words_of_its_own(browser: Browser, model: Path) -> None:
    with visit(browser, model) as seen:
        text = seen.page.locator("body").inner_text()
        assert "12 blocks, 864.3 MiB of tape if all are kept" in text
        assert "less a margin of 16 MiB" in text
        assert "PEAK SHOWN" in text.upper()
        assert "Block by block" in text
        for note in NOTES:
            assert note in text
        assert "udget" not in text
        marks = seen.page.locator("#marks").inner_text()
        assert "all kept" in marks
        assert "every block rerun" in marks
        names = seen.find("step-names").locator("text")
        assert names.count() == 16
        assert seen.find("runs-rerun-taped").get_attribute("d") != ""


def test_measured_beside_predicted(browser: Browser, model: Path) -> None:
    receipt = measured_model(PLAN)
    with visit(browser, model) as seen:
        assert seen.text("measured") == format_size(HELD + receipt.peak_memory)
        assert "1.0% less than predicted" in seen.page.locator("#verdict").inner_text()
        assert seen.find("warning").count() == 0
        bill = seen.page.locator("#verdict .bill").last.inner_text()
        assert "RECEIPT" in bill.upper()
        assert "taping" not in bill  # a model's receipt counts no runs
        mark = seen.page.locator("#marks li").last
        assert mark.locator(".figures").inner_text() == format_size(HELD + receipt.peak_memory)  # and no time
        assert "bytes alone" in mark.inner_text()
        assert seen.find("curve").get_attribute("class") == "curve"
        seen.show(0)
        assert seen.find("curve").get_attribute("class") == "curve dim"
        assert "not to the peak shown" in seen.page.locator("#memory-note").inner_text()


def test_a_measurement_above_the_peak_is_a_note(browser: Browser, folder: Path) -> None:
    path = write(PLAN, measured_model(PLAN, 1.3), folder / "above.html", points=0)
    with visit(browser, path) as seen:
        assert seen.text("verdict") == "Fits"
        assert "Record one training step alone" in seen.text("warning")


def test_memory_is_stacked_on_what_is_held_all_along(browser: Browser, model: Path) -> None:
    with visit(browser, model) as seen:
        for name in ("parameters", "optimizer", "inputs", "tape", "working"):
            assert seen.find(f"band-{name}").count() == 1
        assert seen.find("zero").count() == 0
        assert "Below zero" not in seen.page.locator("#memory-note").inner_text()
        ticks = seen.page.locator("svg.memory .axes text").all()
        at = {tick.text_content(): float(tick.get_attribute("y") or "") - 4 for tick in ticks}
        scale = (at["0"] - at["1 GiB"]) / 2**30
        line = float(seen.find("memory-budget").get_attribute("y1") or "")
        assert at["0"] - line == pytest.approx((PLAN.knob.value or 0) * scale, abs=0.1)
        dot = float(seen.page.locator("svg.memory .peak-dot").get_attribute("cy") or "")
        assert at["0"] - dot == pytest.approx(PLAN.bill.peak_memory * scale, abs=0.1)


def test_the_table_is_saved_with_plain_numbers(browser: Browser, model: Path, tmp_path: Path) -> None:
    with visit(browser, model) as seen:
        with seen.page.expect_download() as download:
            seen.find("csv").click()
        download.value.save_as(tmp_path / "blocks.csv")
    head, *lines = list(csv.reader((tmp_path / "blocks.csv").read_text(encoding="utf-8").splitlines()))
    assert head[:4] == ["block", "decision", "tape if kept", "tape held"]
    assert [(line[0], int(line[2]), float(line[5])) for line in lines] == [
        (row.name, row.tape, row.extra) for row in model_of(PLAN).block_rows()
    ]


# Other models


def test_times_that_were_counted(browser: Browser, folder: Path) -> None:
    plan = model_plan(gpt(4), unit="FLOP")
    with visit(browser, write(plan, folder / "counted.html")) as seen:
        check(seen, plan, format_size(plan.knob.value or 0))
        assert "lt.plan_model(loss, params" in seen.text("code")


def test_a_model_without_times_or_blocks(browser: Browser, folder: Path) -> None:
    chain = Chain.of(
        [StepCost(1, 1, 0.0, 0.0), StepCost(1, 2, 0.0, 0.0)], ["(outside)", "(loss)"], [Role.BETWEEN, Role.LOSS]
    )
    plan = Plan.make(chain, Knob("none"), Blocks((0, 0)))
    with visit(browser, write(plan, folder / "nothing.html")) as seen:
        assert seen.text("verdict") == "Takes 3 B"
        assert seen.text("kinds") == "none"
        assert table(seen) == []
        assert seen.find("slider").is_disabled()


def test_where_there_is_too_much_some_choices_are_left_out(
    browser: Browser, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_page, "MOST_CELLS", 16 * 100)
    path = write(PLAN, folder / "some.html")
    points = data_of(path)["model"]["points"]
    assert len(points) <= 101
    assert points[0][0] == least_peak(PLAN.chain)
    with visit(browser, path) as seen:
        check(seen, PLAN, format_size(PLAN.knob.value or 0))
        left = len(PLAN.frontier) - len(points)
        assert f"{left} choices between these are in the plan" in seen.page.locator("#frontier-note").inner_text()


def test_hundreds_of_blocks(browser: Browser, folder: Path) -> None:
    plan = model_plan(gpt(200), margin=0)
    path = write(plan, folder / "many.html")
    assert path.stat().st_size < 2 * MIB
    with visit(browser, path) as seen:
        assert table(seen) == written(plan)
        assert "less a margin" not in seen.page.locator("#verdict").inner_text()
        seen.show(1000)
        assert seen.text("peak") == format_size(data_of(path)["model"]["points"][1000][0])


@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_its_window_in_both_themes(browser: Browser, folder: Path, width: int) -> None:
    path = write(model_plan(gpt(3, HOSTILE)), folder / f"hostile-{width}.html")
    assert "<script>alert(1)" not in path.read_text(encoding="utf-8")
    for scheme in SCHEMES:
        with visit(browser, path, width=width, scheme=scheme) as seen:
            assert seen.overflow() == 0
            assert seen.page.evaluate(CONTRAST) == []
            seen.show(3)
            assert seen.overflow() == 0
