from __future__ import annotations

import dataclasses
import re
import struct
import xml.etree.ElementTree as ET
import zlib
from base64 import b64decode

import pytest

import lowtide.torch as lt
from lowtide.chain import Chain, StepCost
from lowtide.plan import Plan, Receipt
from lowtide.planners.choose import choose
from lowtide.report.notebook import MOST_RUNS, plan_html, receipt_html
from lowtide.report.timeline import played
from lowtide.sizes import format_size
from tests.report.chains import HOSTILE, measured, network, on_disk, rollout, untimed

SVG = "{http://www.w3.org/2000/svg}"
PLANS = {
    "base": choose(rollout(), base=20),
    "few runs": choose(rollout(100), "20%"),
    "budget": choose(rollout(), "5%"),
    "wide budget": choose(rollout(2), "50MiB"),
    "raster": choose(rollout(3_000), "1MiB"),
    "layers": choose(network(), "60%"),
    "hostile": choose(network(5, HOSTILE), "70%"),
    "disk": on_disk(),
    "one step": choose(rollout(1)),
    "untimed": untimed(),
}


def pictures(html: str) -> list[ET.Element]:
    return list(ET.fromstring(html).iter(f"{SVG}svg"))


def text_of(html: str) -> str:
    return " ".join("".join(ET.fromstring(html).itertext()).split())


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_plan_is_one_small_element(plan: Plan) -> None:
    html = plan_html(plan)
    root = ET.fromstring(html)  # well formed throughout, the pictures too
    assert root.tag == "div"
    assert root.get("class") == "lowtide-print"
    assert len(html) < 150_000
    assert len(pictures(html)) == 2
    assert not any("id" in element.attrib for element in root.iter())
    tags = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert "script" not in tags
    assert "<script" not in html
    assert not any(name.startswith("on") for element in root.iter() for name in element.attrib)
    assert not re.search(r"""(?:src|href)="(?!data:image/png)""", html)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_it_has_the_plans_own_numbers(plan: Plan) -> None:
    text = text_of(plan_html(plan))
    for _, line in plan.lines():
        assert " ".join(line.split()) in text
    assert f"Peak {format_size(plan.bill.peak_memory)}: " in text
    assert 'lowtide.report.write(plan, path="plan.html")' in text
    assert ("The dashed line is the budget" in text) == (plan.knob.name == "budget")


def test_names_are_text() -> None:
    html = plan_html(choose(network(5, HOSTILE), "70%"))
    assert not set("\x07\x1b\x9b\u202e\u2066\ud800") & set(html)
    assert "[red]bold[..." not in html
    assert "[red]bold..." in text_of(html)


def test_each_run_is_drawn() -> None:
    plan = PLANS["few runs"]
    timeline = played(plan)
    assert timeline.runs is not None
    schedule = pictures(plan_html(plan))[0]
    boxes = sum((path.get("d") or "").count("z") for path in schedule.iter(f"{SVG}path"))
    assert boxes == len(timeline.runs) + len(timeline.stored or ())


@pytest.mark.parametrize("name", ["base", "raster"])
def test_many_runs_are_an_image(name: str) -> None:
    schedule = pictures(plan_html(PLANS[name]))[0]
    (image,) = schedule.iter(f"{SVG}image")
    png = b64decode((image.get("href") or "").removeprefix("data:image/png;base64,"))
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert png.endswith(b"IEND" + struct.pack(">I", zlib.crc32(b"IEND")))
    wide, high = struct.unpack(">II", png[16:24])
    size = struct.unpack(">I", png[33:37])[0]
    assert len(zlib.decompress(png[41 : 41 + size])) == high * (1 + 4 * wide)
    assert {"base": (280, 150), "raster": (280, 100)}[name] == (wide, high)


def test_the_budget_is_a_line_where_it_is_near() -> None:
    near, far = (pictures(plan_html(PLANS[name]))[1] for name in ("budget", "wide budget"))
    assert sum(path.get("class") == "limit" for path in near.iter(f"{SVG}path")) == 1
    assert sum(path.get("class") == "limit" for path in far.iter(f"{SVG}path")) == 0


@pytest.mark.parametrize(
    "plan",
    [
        choose(Chain.equal(StepCost(64 * 1024, 320 * 1024), 1_000_000), "64MiB"),
        choose(Chain.equal(StepCost(64 * 1024, 320 * 1024), 250_000), "100%"),
        choose(Chain.equal(StepCost(64 * 1024, 320 * 1024), 2_000), "384KiB"),
    ],
    ids=["long", "many steps", "many runs"],
)
def test_a_plan_that_takes_long_to_play_is_told_in_words(plan: Plan) -> None:
    html = plan_html(plan)
    text = text_of(html)
    assert pictures(html) == []
    assert f"{plan.bill.plain_runs + plan.bill.taping_runs:,} runs take a while to play" in text
    assert 'lowtide.report.write(plan, path="plan.html")' in text
    assert " ".join(dict(plan.lines())["peak"].split()) in text
    assert len(html) < 10_000
    assert plan.chain.length > 200_000 or plan.bill.plain_runs + plan.bill.taping_runs > MOST_RUNS


def test_what_is_held_besides() -> None:
    chain = dataclasses.replace(network(), parameters=2**20)
    assert "parameters 1 MiB, gradients 0 B: held with or without a plan" in text_of(plan_html(choose(chain, "60%")))


def test_a_receipt() -> None:
    html = receipt_html(measured(200_000))
    text = text_of(html)
    assert "380 plain, 400 taping, 400 backward, 2 to measure" in text
    assert f"{format_size(200_000)} of memory" in text
    assert "1.5 s" in text
    (curve,) = pictures(html)
    (drawn,) = (path for path in curve.iter(f"{SVG}path") if path.get("class") == "seen")
    assert (drawn.get("d") or "").count("h") == 252
    assert 'lowtide.report.write(plan, receipt, path="plan.html")' in text
    assert pictures(receipt_html(Receipt(1, 2, 3))) == []
    assert len(pictures(receipt_html(Receipt(curve=(0, 0))))) == 1


def test_notebooks_ask_plans_receipts_and_recordings_themselves() -> None:
    plan = choose(Chain.equal(StepCost(64, 320), 40), "50%")
    assert plan._repr_html_() == plan_html(plan)
    with lt.record(memory=False) as recording:
        pass
    assert recording._repr_html_() == receipt_html(recording.receipt) == recording.receipt._repr_html_()
