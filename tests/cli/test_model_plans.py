"""A whole model's plan that was saved: printed again, planned for another peak, swept, and reported."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from lowtide import Chain, Plan, StepCost
from lowtide.planners.blocks import for_peak, least_peak, to_ask
from lowtide.planners.choose import choose
from tests.cli.running import Runner
from tests.report.models import gpt, measured_model, model_plan

PLAN = model_plan(gpt())


@pytest.fixture
def saved(lowtide: Runner) -> Runner:
    lowtide.file("model.json", PLAN.to_json())
    lowtide.file("receipt.json", measured_model(PLAN).to_json())
    lowtide.file("loop.json", choose(Chain.equal(StepCost(64, 320), 40), "50%").to_json())
    return lowtide


def test_a_saved_plan_is_printed_again(saved: Runner) -> None:
    code, out, _ = saved("plan", "model.json")
    assert (code, out) == (0, f"{PLAN}\n")
    assert saved("plan", "loop.json")[1].startswith("chain     40 equal steps")


def test_another_peak(saved: Runner) -> None:
    code, out, err = saved(
        "plan", "model.json", "--peak", "1.4GiB", "--json", "--save", "smaller.json", "--report", "s.html"
    )
    assert code == 0
    expected = for_peak(PLAN, int(1.4 * 2**30))
    assert Plan.from_json(out) == expected == Plan.from_json((saved.folder / "smaller.json").read_text())
    assert expected.bill.peak_memory < PLAN.bill.peak_memory
    assert [line.split()[1] for line in err.splitlines()] == ["smaller.json", "s.html"]


def test_a_peak_that_is_too_small_names_the_least(saved: Runner) -> None:
    code, out, err = saved("plan", "model.json", "--peak", "1GiB")
    assert (code, out) == (1, "")
    assert f"the least that works is {to_ask(PLAN, least_peak(PLAN.chain)):,} B" in err


def test_the_sweep_of_a_model(saved: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    code, out, _ = saved("plan", "model.json", "--sweep", "--points", "7")
    assert code == 0
    assert "12 blocks, 864.3 MiB of tape if all are kept" in out
    assert "12 kept" in out
    assert "of all kept" in out
    plans = json.loads(saved("plan", "model.json", "--sweep", "--points", "7", "--json")[1])
    made = [Plan.from_json(json.dumps(plan)) for plan in plans]
    assert len(made) == 7
    assert made[0].bill.peak_memory == least_peak(PLAN.chain)
    assert made[-1].bill.peak_memory == PLAN.frontier[0].peak
    assert all(a.bill.peak_memory < b.bill.peak_memory for a, b in pairwise(made))


def test_a_function_that_returns_a_models_plan(saved: Runner) -> None:
    code = """
        from pathlib import Path
        from lowtide import Plan
        def make():
            return Plan.from_json(Path("model.json").read_text())
    """
    saved.file("made.py", code)
    assert saved("plan", "made.py:make")[1] == f"{PLAN}\n"
    assert "asked     peak=1.4 GiB" in saved("plan", "made.py:make", "--peak", "1.4GiB")[1]
    assert "ask for" in saved("plan", "made.py:make", "--sweep")[1]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["model.json", "--budget", "1GiB"], "model.json is a plan already; leave out --budget"),
        (["model.json", "--steps", "3"], "model.json is a plan already; leave out --steps"),
        (["model.json", "--sweep", "--peak", "1GiB"], "--sweep tries every budget; leave out --peak"),
        (["model.json", "--sweep", "--points", "1"], "points=1 is too small"),
        (["loop.json", "--peak", "1GiB"], "a peak is for plans of a whole model's blocks; this one is by planner"),
        (["nowhere.json"], "nowhere.json: No such file or directory"),
        (["receipt.json"], "receipt.json is not a plan: this JSON lacks chain"),
        (
            ["--peak", "1GiB", "--steps", "3", "--state", "1", "--tape", "1"],
            "there is no MODULE:NAME; leave out --peak",
        ),
        (["model.json", "--peak", "much"], "peak='much' is not a size"),
    ],
)
def test_what_makes_no_sense_is_refused(saved: Runner, arguments: list[str], why: str) -> None:
    assert why in saved.refused("plan", *arguments)


def test_the_report(saved: Runner) -> None:
    code, out, err = saved("report", "model.json", "--receipt", "receipt.json", "--figure", "model.png")
    assert code == 0
    words = " ".join(out.split())
    assert "What each peak buys" in words
    assert "1.0% less than predicted" in words
    assert "lt.auto_checkpoint(model" in words
    assert [line.split()[1] for line in err.splitlines()] == ["model.html", "model.png"]
    assert 'id="data"' in (saved.folder / "model.html").read_text()
