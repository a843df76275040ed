"""The page in a real browser: its numbers are the planner's own, it runs offline, and hostile names stay text."""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser

from lowtide import Chain, Disk, Plan, Receipt, StepCost, Working
from lowtide.planners.choose import choose, least_budget
from lowtide.report import Mark, write
from lowtide.report.kinds import kind_of
from lowtide.report.snippets import PLAN_FILE
from lowtide.sizes import format_size
from tests.report.browser import Visit, chromium, data_of, visit, without_data

pytestmark = pytest.mark.long  # in a browser

ROLLOUT = dataclasses.replace(
    Chain.equal(StepCost(4_608, 6_656, 1e-3, 2e-3, cotangent=4_608, working=Working(2_000, 3_000, 2_500)), 120),
    parameters=40_000,
    gradients=40_000,
)
LAYERS = Chain.of(
    [
        StepCost(900 * k, 2_500 * k, 1e-3 * k, 2e-3 * k, cotangent=900 * k, working=Working(k, k, k))
        for k in (9, 7, 5, 3)
    ]
    + [StepCost(4_000, 9_000, 4e-3, 9e-3, cotangent=4_000) for _ in range(6)],
    [f"conv{k}" for k in range(10)],
)
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "=HYPERLINK(1)",
    '+1, "two"',
    "-1",
    "@sum",
    "x" * 10_000,
    "\u202emirror 名前 🌊 \u0007",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


def receipt_of(plan: Plan) -> Receipt:
    """What a run that keeps the plan would have cost, with some results and gradients left at the end."""
    peak, runs = plan.bill.peak_memory, plan.bill
    curve = tuple(peak * k // 40 for k in (*range(1, 41), *range(40, 0, -1)))
    return Receipt(runs.plain_runs, runs.taping_runs, runs.backward_runs, 2, peak, 0, 1.5, peak // 8, curve)


@pytest.fixture(scope="module")
def rollout(folder: Path) -> Path:
    plan = choose(ROLLOUT, "80KiB")
    return write(plan, receipt_of(plan), folder / "rollout.html", points=14)


@pytest.fixture(scope="module")
def layers(folder: Path) -> Path:
    return write(choose(LAYERS, 60_000), path=folder / "layers.html", points=8)


def figures(plan: Plan) -> dict[str, str]:
    """What the page must say of a plan."""
    bill = plan.bill
    budget = plan.knob.value if plan.knob.name == "budget" else None
    return {
        "peak": format_size(bill.peak_memory),
        "share": f"{bill.peak_memory / plan.chain.plain_tape:.3%} of plain",
        "snapshots": f"{bill.peak_snapshots:,}",
        "runs": f"{bill.plain_runs:,} plain, {bill.taping_runs:,} taping",
        "runs-per-step": f"{plan.runs_per_step:.4g}",
        "factor": f"{plan.time_factor:.3f}x",
    } | ({} if budget is None else {"budget": format_size(budget)})


# The slider and the numbers


def test_every_budget_shows_the_planners_own_numbers(browser: Browser, rollout: Path) -> None:
    views = data_of(rollout)["views"]
    assert len(views) > 10
    with visit(browser, rollout) as seen:
        for index in (0, 3, 6, 9, len(views) - 1):
            seen.show(index)
            plan = choose(ROLLOUT, views[index]["budget"])
            expected = figures(plan)
            assert {name: seen.text(name) for name in expected} == expected
            assert seen.text("verdict") == "Fits"
            assert expected["peak"] in seen.text("cause")
            assert seen.text("code").strip() == kind_of(plan).snippets()[0].code.strip()


def test_buttons_keys_and_dots_move_all_panels_and_the_plan_is_found_again(browser: Browser, rollout: Path) -> None:
    data = data_of(rollout)
    views, chosen = data["views"], data["chosen"]
    with visit(browser, rollout) as seen:
        assert seen.find("back").is_disabled()
        seen.find("slider").press("ArrowRight")
        assert seen.text("peak") == views[chosen + 1]["text"]["peak"]
        seen.page.get_by_label("Next smaller budget").click()
        seen.page.get_by_label("Next smaller budget").click()
        assert seen.text("peak") == views[chosen - 1]["text"]["peak"]
        assert "not the plan" in seen.page.locator("#verdict").inner_text().lower()
        seen.find("back").click()
        assert seen.text("peak") == views[chosen]["text"]["peak"]
        seen.page.locator("circle.dot").nth(2).scroll_into_view_if_needed()
        dot = seen.page.locator("circle.dot").nth(2).bounding_box()
        assert dot is not None
        seen.page.mouse.click(dot["x"] + dot["width"] / 2, dot["y"] + dot["height"] / 2)
        assert seen.text("factor") == views[2]["text"]["factor"]


def test_a_typed_budget_shows_the_largest_that_fits(browser: Browser, rollout: Path) -> None:
    views = data_of(rollout)["views"]
    with visit(browser, rollout) as seen:
        for typed, answer in [
            ("some", "not a size"),
            ("64M", "not a size"),
            ("constructor", "not a size"),
            ("5.", "not a size"),
            ("1.5", "not a whole number of bytes"),
            ("0.5 B", "not a whole number of bytes"),
            ("100.01%", "at most 100%"),
            ("101%", "at most 100%"),
            ("0%", "less than one byte"),
            (".001 KiB", "Nothing fits in 1 B"),
            ("1.005 KB", "Nothing fits in 1,005 B"),
            ("3 B", f"the least is {format_size(least_budget(ROLLOUT))}"),
            ("100%", f"With {format_size(ROLLOUT.plain_tape)}: the plan for "),
            ("1,000.5 TiB", "With "),
        ]:
            seen.find("have").fill(typed)
            seen.find("have").press("Enter")
            assert answer in seen.text("have-answer")
        seen.find("have").fill(str(views[5]["budget"] + 1))
        seen.find("have").press("Enter")
        assert seen.text("budget") == views[5]["text"]["budget"]
        assert f"the plan for {views[5]['text']['budget']}, the largest on this page" in seen.text("have-answer")
        seen.find("have").fill(str(views[5]["budget"] - 1))
        seen.find("have").press("Enter")
        assert seen.text("budget") == views[4]["text"]["budget"]


# What was measured


def test_the_receipt_is_shown_beside_the_plan_only(browser: Browser, rollout: Path) -> None:
    peak = choose(ROLLOUT, "80KiB").bill.peak_memory
    with visit(browser, rollout) as seen:
        assert seen.text("measured") == format_size(peak - peak // 8)
        assert (
            f"{format_size(peak // 8)} of it results and gradients, which no budget counts."
            in seen.page.locator("#verdict").inner_text()
        )
        assert seen.find("warning").count() == 0
        assert seen.find("curve").get_attribute("class") == "curve"
        assert {"parameters", "gradients"} <= set(seen.page.locator("#memory-legend").inner_text().split())
        seen.show(0)
        assert seen.find("curve").get_attribute("class") == "curve dim"
        assert "not to the budget shown" in seen.page.locator("#memory-note").inner_text()


def test_a_measurement_above_the_budget_is_a_note_and_the_plan_still_fits(browser: Browser, folder: Path) -> None:
    path = write(choose(LAYERS, 60_000), Receipt(peak_memory=90_000, held=5), folder / "over.html", points=3)
    for scheme in SCHEMES:
        with visit(browser, path, scheme=scheme) as seen:
            assert seen.text("measured") == format_size(89_995)
            assert seen.text("verdict") == "Fits"
            assert seen.find("verdict").get_attribute("class") == "fits"
            assert seen.text("warning") == f"Note {data_of(path)['receipt']['measuring']}"
            assert "above the budget" in seen.text("warning")
            assert seen.page.locator(".row.above").count() == 1
            assert seen.page.locator(".row.over").count() == 0
            assert seen.find("curve").count() == 0
            assert seen.page.evaluate(CONTRAST) == []
            seen.show(len(data_of(path)["views"]) - 1)
            assert seen.find("warning").count() == 0


def test_a_page_without_a_receipt_says_so(browser: Browser, layers: Path) -> None:
    with visit(browser, layers) as seen:
        assert seen.find("measured").count() == 0
        assert "No receipt was handed over: predicted figures only." in seen.page.locator("#verdict").inner_text()
        assert seen.find("curve").count() == 0


# The frontier


def test_the_frontier_is_a_staircase_that_only_goes_right_and_down(browser: Browser, rollout: Path) -> None:
    marks = data_of(rollout)["frontier"]
    better = [k for k, mark in enumerate(marks) if mark["factor"] < min((m["factor"] for m in marks[:k]), default=9e9)]
    with visit(browser, rollout) as seen:
        drawn = seen.find("frontier-line").get_attribute("d") or ""
    assert re.fullmatch(r"M[\d.-]+ [\d.-]+(H[\d.-]+V[\d.-]+)*H[\d.-]+", drawn)
    across, down = ([float(number) for number in re.findall(rf"{letter}([\d.-]+)", drawn)] for letter in "HV")
    assert len(down) == len(better) - 1
    assert across == sorted(across)
    assert down == sorted(down)  # a larger y is further down


LABELS = """() => {
  const box = (node) => node.getBoundingClientRect();
  const far = (mark, text) => Math.hypot(
    Math.max(text.left - mark.x, 0, mark.x - text.right), Math.max(text.top - mark.y, 0, mark.y - text.bottom));
  const points = [...document.querySelectorAll('#frontier .mark, #frontier circle.dot')].map(box)
    .map((b) => ({ x: b.x + b.width / 2, y: b.y + b.height / 2 }));
  const marks = [...document.querySelectorAll('#frontier .mark')].map(box)
    .map((b) => ({ x: b.x + b.width / 2, y: b.y + b.height / 2 }));
  const ends = [...document.querySelectorAll('#frontier .leader')].map(box);
  const meets = (b, p, by) => p.x > b.left - by && p.x < b.right + by && p.y > b.top - by && p.y < b.bottom + by;
  const labels = [...document.querySelectorAll('#frontier .label.peer, #frontier .label.run')];
  return labels.map((label) => {
    const own = marks[parseInt(label.textContent, 10) - 1];
    const text = box(label);
    const isNearest = points.every((point) => far(own, text) <= far(point, text) + 1);
    const isLed = ends.some((line) => meets(line, own, 3) && line.right > text.left - 4 && line.left < text.right + 4
      && line.bottom > text.top - 4 && line.top < text.bottom + 4);
    return [label.textContent, isNearest || isLed];
  });
}"""


@pytest.mark.parametrize("width", [1280, 390])
def test_labels_of_marks_close_together_belong_to_their_marks(browser: Browser, folder: Path, width: int) -> None:
    marks = [Mark(f"run {k}", 90_000 + 1_200 * k, 1.4 + 0.02 * (3 * k % 8)) for k in range(8)]
    path = write(choose(ROLLOUT, "80KiB"), path=folder / "close.html", measured=marks, points=14)
    with visit(browser, path, width=width) as seen:
        found = seen.page.evaluate(LABELS)
        assert len(found) == 8 + len(data_of(path)["peers"])
        assert [label for label, is_clear in found if not is_clear] == []


def test_huge_numbers_stay_inside_the_page(browser: Browser, folder: Path) -> None:
    marks = [Mark("huge", 2**47, 1e30, "a note"), Mark("x" * 50, 2**48, 3.5)]
    path = write(choose(ROLLOUT, "80KiB"), path=folder / "huge.html", measured=marks, points=3)
    for width in (1280, 390):
        with visit(browser, path, width=width) as seen:
            assert "128 TiB · 1e30x" in seen.page.locator("#marks").inner_text()
            ticks = seen.page.locator("svg.frontier .axes text").all_text_contents()
            assert "1e27x" in ticks
            assert len(ticks) < 25
            assert seen.overflow() == 0


# The schedule and the memory


def test_layers_are_named_on_the_axis_and_in_the_tooltip(browser: Browser, layers: Path) -> None:
    with visit(browser, layers) as seen:
        names = seen.find("step-names").locator("text")
        assert [text.split("\n")[-1] for text in names.all_text_contents()] == [f"{name}" * 2 for name in LAYERS.names]
        heights = [float(name.get_attribute("y") or "") for name in names.all()]
        assert heights == sorted(heights, reverse=True)  # step 0 is at the bottom
        assert "steps go up" in seen.page.locator("#schedule-lead").inner_text()
        schedule = seen.page.locator("svg.schedule")
        schedule.focus()
        schedule.press("ArrowRight")
        tip = seen.page.locator("#tip")
        assert "step 0, conv0" in tip.inner_text()
        assert "forward" in tip.inner_text()
        assert seen.page.locator("#say").inner_text().startswith("step 0, conv0, forward")
        assert tip.inner_text().split("\n")[2] == "0x to 0.06x"
        low = seen.page.locator("svg.schedule .pointer").bounding_box()
        top = seen.page.locator("svg.schedule .field").bounding_box()
        assert low is not None
        assert top is not None
        assert low["y"] > top["y"] + 0.85 * top["height"]
        schedule.press("End")
        assert "backward" in tip.inner_text()
        schedule.press("Escape")
        assert tip.is_hidden()
        seen.page.locator("svg.memory").hover()
        assert re.search(r"B at [\d.]+x", tip.inner_text())


def level(seen: Visit, name: str, attribute: str = "y1") -> float:
    """How high something is drawn, in the chart's own units."""
    return float(seen.find(name).get_attribute(attribute) or "")


def test_the_budget_line_is_at_its_own_value_and_what_it_does_not_count_is_below_zero(
    browser: Browser, rollout: Path
) -> None:
    with visit(browser, rollout) as seen:
        zero = level(seen, "zero")
        ticks = seen.page.locator("svg.memory .axes text").all()
        at = {tick.text_content(): float(tick.get_attribute("y") or "") - 4 for tick in ticks}
        assert at["0"] == pytest.approx(zero)
        assert at["80 KiB"] == pytest.approx(level(seen, "memory-budget"))
        assert level(seen, "band-parameters", "y") == pytest.approx(zero)
        depth = level(seen, "band-parameters", "height")
        assert level(seen, "band-gradients", "y") == pytest.approx(zero + depth)  # as many bytes
        assert level(seen, "band-gradients", "height") == pytest.approx(depth)
        curve = re.findall(r"[ML][\d.]+ ([\d.]+)h", seen.find("curve").get_attribute("d") or "")
        scale = (zero - at["80 KiB"]) / (80 * 1024)
        peak = choose(ROLLOUT, "80KiB").bill.peak_memory
        assert zero - min(map(float, curve)) == pytest.approx(peak * scale, abs=0.1)
        assert not any(text.startswith(("-", "\u2212")) for text in at if text)


def test_times_are_multiples_of_the_plain_run_in_whatever_unit_the_chain_counts(browser: Browser, folder: Path) -> None:
    for seconds in (1e-3, 1.0, 3_600.0):
        plan = choose(Chain.equal(StepCost(64, 320, seconds, 2 * seconds), 60), "40%")
        with visit(browser, write(plan, path=folder / "unit.html", points=0)) as seen:
            for name in ("schedule", "memory"):
                texts = seen.page.locator(f"svg.{name} .axes text").all_text_contents()
                assert "predicted time, as a multiple of the plain loop's" in texts
                assert {"0x", "0.2x", "1x"} <= set(texts)
                told = seen.page.locator(f"svg.{name}").get_attribute("aria-label") or ""
                assert f"{plan.time_factor:.3g}x the plain loop's time" in told


def test_a_chain_that_takes_no_time_is_told_in_shares(browser: Browser, folder: Path) -> None:
    plan = choose(Chain.equal(StepCost(10, 100, forward=0.0, backward=0.0), 30), base=5)
    with visit(browser, write(plan, path=folder / "untimed.html", points=0)) as seen:
        texts = seen.page.locator("svg.schedule .axes text").all_text_contents()
        assert {"0%", "20%", "predicted time, as a share of the whole"} <= set(texts)
        assert "over the whole time" in (seen.page.locator("svg.schedule").get_attribute("aria-label") or "")


def test_every_run_is_drawn_once(browser: Browser, rollout: Path) -> None:
    data = data_of(rollout)
    view = data["views"][data["chosen"]]
    kinds = ["forward", "forward-taped", "rerun", "rerun-taped", "backward"]
    with visit(browser, rollout) as seen:
        drawn = [(seen.find(f"runs-{kind}").get_attribute("d") or "").count("M") for kind in kinds]
        assert drawn == [view["timeline"]["runs"]["kind"].count(kind) for kind in range(5)]
        plan = choose(ROLLOUT, "80KiB")
        assert sum(drawn) == plan.bill.plain_runs + plan.bill.taping_runs + plan.bill.backward_runs


def test_snapshots_on_disk_are_told_from_those_in_memory(browser: Browser, folder: Path) -> None:
    chain = Chain.equal(StepCost(65_536, 327_680, 1e-3, 2e-3), 60)
    plan = choose(chain, "2MiB", disk=Disk(write=1e-9, read=1e-9))
    path = write(plan, path=folder / "disk.html", points=3)
    with visit(browser, path) as seen:
        assert seen.text("disk") == format_size(plan.bill.peak_disk)
        assert "snapshot on disk" in seen.page.locator("#schedule-legend").inner_text()
        assert seen.page.locator("svg path.stored-disk").get_attribute("d")


def test_a_chain_of_one_step(browser: Browser, folder: Path) -> None:
    plan = choose(Chain.equal(StepCost(1_024, 4_096), 1), "4KiB")
    path = write(plan, path=folder / "one.html", points=4)
    with visit(browser, path, width=390) as seen:
        expected = figures(plan)
        assert {name: seen.text(name) for name in expected} == expected
        assert seen.overflow() == 0


def test_a_plan_without_a_budget(browser: Browser, folder: Path) -> None:
    plan = choose(ROLLOUT, checkpoints=7)
    path = write(plan, path=folder / "slots.html", points=5)
    with visit(browser, path) as seen:
        expected = figures(plan)
        assert {name: seen.text(name) for name in expected} == expected
        assert seen.text("verdict") == f"Takes {expected['peak']}"
        assert seen.page.locator("svg.memory .budget").count() == 0
        assert "checkpoints=7" in seen.page.locator("#subtitle").inner_text()


def test_a_million_steps_are_small_and_quick_to_read(browser: Browser, folder: Path) -> None:
    chain = Chain.equal(StepCost(64 * 1024, 320 * 1024), 1_000_000)
    path = write(choose(chain, "64MiB"), path=folder / "million.html", points=6)
    assert path.stat().st_size < 2_000_000
    times = []
    for _ in range(3):
        with visit(browser, path) as seen:
            times.append(seen.page.evaluate("window.lowtide.readyAt"))
            assert seen.text("snapshots") == "1,019"
            assert seen.text("runs-per-step") == "2.896"
            assert seen.text("factor") == "1.632x"
            assert (seen.find("raster").get_attribute("href") or "").startswith("data:image/png")
            assert re.fullmatch(r"each cell is 10,000 steps high and 0\.\d+x wide", seen.text("cell"))
            schedule = seen.page.locator("svg.schedule")
            schedule.focus()
            schedule.press("ArrowRight")
            schedule.press("End")
            assert seen.page.locator("#tip").inner_text().startswith("steps [0, ")
            pointer = seen.page.locator("svg.schedule .pointer")
            lowest = float(pointer.get_attribute("y") or "") + float(pointer.get_attribute("height") or "")
            field = seen.page.locator("svg.schedule .field")
            bottom = float(field.get_attribute("y") or "") + float(field.get_attribute("height") or "")
            assert lowest == pytest.approx(bottom + 1.5)
            assert "of this time" in seen.page.locator("#tip").inner_text()
    assert min(times) < 2_000


# The table


def table_in(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def test_the_table_is_sorted_by_click_and_by_key(browser: Browser, layers: Path) -> None:
    data = data_of(layers)
    rows = data["views"][data["chosen"]]["rows"]
    with visit(browser, layers) as seen:
        heads = seen.page.locator("#table thead th")
        shown = (
            "[...document.querySelectorAll('#table tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"
        )
        first = seen.page.evaluate(shown)
        assert len(first) == len(rows)
        for place, found in enumerate(data["columns"]):
            button = heads.nth(place).locator("button")
            button.click()
            assert heads.nth(place).get_attribute("aria-sort") == "ascending"
            button.press("Enter")
            assert heads.nth(place).get_attribute("aria-sort") == "descending"
            if found["kind"] != "text":
                largest = max(row[place] for row in rows)
                position = next(k for k, row in enumerate(rows) if row[place] == largest)
                assert seen.page.evaluate(shown)[0][place] == first[position][place]
            button.press("Space")
            assert heads.nth(place).get_attribute("aria-sort") == "none"
            assert seen.page.evaluate(shown) == first


def test_the_table_is_filtered_and_saved_as_csv(browser: Browser, layers: Path, tmp_path: Path) -> None:
    data = data_of(layers)
    rows = data["views"][data["chosen"]]["rows"]
    labels = [found["label"] for found in data["columns"]]
    name = [found["key"] for found in data["columns"]].index("name")
    with visit(browser, layers) as seen:
        with seen.page.expect_download() as waiting:
            seen.find("csv").click()
        assert waiting.value.suggested_filename.endswith(".csv")
        waiting.value.save_as(tmp_path / "all.csv")
        seen.find("filter").fill("CONV7")
        assert seen.text("count") == f"1 row of {len(rows)}."
        with seen.page.expect_download() as waiting:
            seen.find("csv").click()
        waiting.value.save_as(tmp_path / "one.csv")
        seen.find("filter").fill("no such row")
        assert seen.text("count") == f"0 rows of {len(rows)}."
    head, *lines = table_in(tmp_path / "all.csv")
    assert head == labels
    for line, row in zip(lines, rows, strict=True):
        for cell, value, found in zip(line, row, data["columns"], strict=True):
            assert cell == value if found["kind"] == "text" else float(cell) == float(value)
    assert [line[name] for line in table_in(tmp_path / "one.csv")][1:] == ["conv7"]


def test_many_rows_are_shown_when_asked_for(browser: Browser, folder: Path) -> None:
    chain = Chain.equal(StepCost(64, 320), 300)
    named = dataclasses.replace(chain, names=tuple(f"step number {k}" for k in range(300)))
    path = write(choose(named, "40%"), path=folder / "many.html", points=0)
    with visit(browser, path) as seen:
        assert seen.page.locator("#table tbody tr").count() == 200
        assert seen.text("count") == "200 of 300 rows."
        seen.find("show-all").click()
        assert seen.page.locator("#table tbody tr").count() == 300
        assert seen.find("show-all").is_hidden()


# Names from elsewhere


def test_long_names_are_cut_by_the_width_and_whole_in_the_title_and_the_csv(
    browser: Browser, folder: Path, tmp_path: Path
) -> None:
    long = ".".join(["encoder", "layers", "3", "attention"] * 5)
    chain = Chain.of(LAYERS.steps, [f"{long}.{k}" for k in range(len(LAYERS))])
    path = write(choose(chain, 60_000), path=folder / "long.html", points=0)
    for width in (1280, 390):
        with visit(browser, path, width=width) as seen:
            cell = seen.page.locator("#table tbody td").first
            assert cell.get_attribute("title") == f"{long}.0"
            assert cell.evaluate("(cell) => cell.scrollWidth > cell.clientWidth")
            assert cell.evaluate("(cell) => getComputedStyle(cell).textOverflow") == "ellipsis"
            assert seen.overflow() == 0
            with seen.page.expect_download() as waiting:
                seen.find("csv").click()
            waiting.value.save_as(tmp_path / "long.csv")
    assert [line[0] for line in table_in(tmp_path / "long.csv")][1:] == list(chain.names)


def test_hostile_names_appear_as_text(browser: Browser, folder: Path, tmp_path: Path) -> None:
    chain = Chain.of(LAYERS.steps[: len(HOSTILE)], HOSTILE)
    marks = [Mark(name, 30_000 + 4_000 * k, 1.1 + k / 10, note=name) for k, name in enumerate(HOSTILE)]
    marks.append(Mark("nothing", 0, 0.0))  # neither axis has a zero
    path = write(choose(chain, 60_000), path=folder / "hostile.html", measured=marks, points=4)
    data = data_of(path)
    for width in (1280, 390):
        with visit(browser, path, width=width) as seen:
            assert seen.page.locator("main img, main script, svg script").count() == 0
            text = seen.page.locator("#table").inner_text() + seen.page.locator("#marks").inner_text()
            for name in HOSTILE[:6]:
                assert text.count(name) >= 3  # in the table, and as name and note of a mark
            assert not {"\u202e", "\u0007"} & set(text)
            assert "x" * 1_000 not in text
            assert "…" in text
            assert seen.page.locator("#marks [title]").first.get_attribute("title") == HOSTILE[6]
            assert seen.overflow() == 0
            with seen.page.expect_download() as waiting:
                seen.find("csv").click()
            waiting.value.save_as(tmp_path / "hostile.csv")
    place = [found["key"] for found in data["columns"]].index("name")
    _, *lines = table_in(tmp_path / "hostile.csv")
    expected = [row[place] for row in data["views"][data["chosen"]]["rows"]]
    guarded = [f"'{name}" if name[0] in "=+-@" else name for name in expected]
    assert [line[place] for line in lines] == guarded
    assert sum(name.startswith("'") for name in guarded) == 4


# The code to paste


def test_the_code_has_tabs_and_is_copied(browser: Browser, layers: Path) -> None:
    found = kind_of(choose(LAYERS, 60_000)).snippets()
    with visit(browser, layers) as seen:
        tabs = seen.page.get_by_role("tab")
        assert tabs.all_text_contents() == [snippet.name for snippet in found]
        tabs.nth(0).press("ArrowLeft")
        assert tabs.nth(len(found) - 1).get_attribute("aria-selected") == "true"
        assert seen.text("code").strip() == found[-1].code.strip()
        seen.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        seen.find("copy").click()
        seen.page.get_by_text("Copied.").wait_for()
        seen.find("filter").press("Control+v")
        assert "".join(seen.find("filter").input_value().split()) == "".join(found[-1].code.split())
        seen.show(0)  # another budget: the file does not hold its plan
        assert found[-1].name == PLAN_FILE
        assert seen.text("code").strip() == "# The file holds the plan itself: go back to the plan."


# Looks


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_window(
    browser: Browser, rollout: Path, layers: Path, tmp_path: Path, width: int, scheme: Literal["light", "dark"]
) -> None:
    for path in (rollout, layers):
        with visit(browser, path, width=width, scheme=scheme) as seen:
            assert seen.overflow() == 0
            seen.show(0)
            assert seen.overflow() == 0
            picture = tmp_path / f"{path.stem}.png"
            seen.page.screenshot(path=picture, full_page=True)
            assert picture.stat().st_size > 20_000


def test_charts_follow_the_width(browser: Browser, layers: Path) -> None:
    with visit(browser, layers) as seen:
        schedule = seen.page.locator("svg.schedule")
        wide = schedule.get_attribute("width") or ""
        seen.page.set_viewport_size({"width": 600, "height": 900})
        seen.wait_for_another("width", schedule, wide)
        assert int(schedule.get_attribute("width") or "") < int(wide)
        assert seen.overflow() == 0


def test_waiting_for_the_page_is_waiting(browser: Browser, layers: Path) -> None:
    """What comes late is waited for, under the page's own policy, and what never comes is told."""
    with visit(browser, layers) as seen:
        schedule = seen.page.locator("svg.schedule")
        schedule.evaluate("(chart) => { chart.id = 'early'; setTimeout(() => { chart.id = 'late'; }, 500); }")
        seen.wait_for_another("id", schedule, "early")
        assert schedule.get_attribute("id") == "late"
        with pytest.raises(AssertionError, match="not to have attribute"):
            seen.wait_for_another("id", schedule, "late", seconds=0.2)


CONTRAST = """() => {
  const context = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const read = (colour) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ground = (node) => {
    for (let up = node; up; up = up.parentElement) {
      const colour = read(getComputedStyle(up).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const node of document.querySelectorAll('body *')) {
    const isText = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!isText || !node.getClientRects().length || node.closest(':disabled, script, title')) continue;
    const style = getComputedStyle(node);
    const [a, b] = [light(read(node instanceof SVGElement ? style.fill : style.color)), light(ground(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push([node.tagName, node.textContent.slice(0, 30), ratio.toFixed(2)].join(' '));
  }
  return poor;
}"""


def test_text_has_contrast_in_both_themes_and_the_button_switches(browser: Browser, rollout: Path) -> None:
    with visit(browser, rollout, scheme="light") as seen:
        assert seen.page.evaluate(CONTRAST) == []
        ground = "getComputedStyle(document.body).backgroundColor"
        light = seen.page.evaluate(ground)
        seen.page.get_by_label("Switch to the dark theme").click()
        assert seen.page.evaluate(ground) != light
        assert seen.page.evaluate(CONTRAST) == []
        seen.page.get_by_label("Switch to the light theme").click()
        assert seen.page.evaluate(ground) == light


def test_every_control_has_a_name(browser: Browser, rollout: Path) -> None:
    nameless = """() => [...document.querySelectorAll('button, input, svg[role=img]')]
      .filter((node) => !(node.getAttribute('aria-label') || node.textContent.trim() || node.labels?.length))
      .map((node) => node.outerHTML)"""
    with visit(browser, rollout) as seen:
        assert seen.page.evaluate(nameless) == []


def test_it_can_be_printed(browser: Browser, layers: Path) -> None:
    with visit(browser, layers, scheme="dark") as seen:
        seen.page.emulate_media(media="print")
        assert seen.page.locator(".bar").is_hidden()
        assert seen.page.locator("#theme").is_hidden()
        assert seen.find("verdict").is_visible()
        assert seen.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert seen.page.evaluate(CONTRAST) == []
        seen.page.set_viewport_size({"width": 720, "height": 1000})
        assert seen.overflow() == 0
        assert seen.page.pdf().startswith(b"%PDF")


def test_without_its_data_the_page_is_small_and_says_so(browser: Browser, layers: Path, tmp_path: Path) -> None:
    path = without_data(layers, tmp_path / "empty.html")
    assert path.stat().st_size < 300_000
    with visit(browser, path) as seen:
        assert seen.page.get_by_role("alert").inner_text() == "This page holds no data."
        assert seen.page.locator("main").is_hidden()
