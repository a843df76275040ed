"""The example of a whole model on paper, small, and the real one: what fits, what does not, and the page."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import lowtide.torch as lt
from examples import fit_a_model
from lowtide import Plan


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=120)


def _printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _peak(plan: Plan | None, form: str) -> int:
    assert plan is not None
    return fit_a_model.all_in_form(plan, form).bill.peak_memory


@pytest.mark.long
def test_a_small_model(tmp_path: Path, console: Console) -> None:
    memory = 28 * 2**20
    with_momentum, adam, fused = fit_a_model.run(tmp_path / "new", fit_a_model.SMALL, lt.H100, memory, console)
    assert with_momentum.plan is not None
    assert with_momentum.plan.time_factor == 1.0  # it fits as it is
    assert adam.plan is None
    assert adam.least > memory  # its step makes temporary values as large as the parameters
    assert fused.plan is not None
    assert _peak(fused.plan, "rerun") < fused.plan.bill.peak_memory <= memory < _peak(fused.plan, "keep")
    assert fused.plan.time_factor < fit_a_model.all_in_form(fused.plan, "rerun").time_factor
    assert (tmp_path / "new" / "fit-a-model.html").exists()
    text = _printed(console)
    assert "The plan with AdamW, fused" in text
    assert "any plan, at least" in text


@pytest.mark.long
def test_where_nothing_fits_there_is_no_page(tmp_path: Path, console: Console) -> None:
    answers = fit_a_model.run(tmp_path, fit_a_model.SMALL, lt.H100, 2**20, console)
    assert [answer.plan for answer in answers] == [None, None, None]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_eight_billion_parameters(tmp_path: Path, console: Console) -> None:
    memory = lt.H100.memory
    with_momentum, adam, fused = fit_a_model.run(tmp_path, fit_a_model.Shape(), lt.H100, memory, console)
    assert adam.plan is None
    for plan in (with_momentum.plan, fused.plan):
        assert plan is not None
        assert len(plan.chain) >= 32
        assert plan.chain.parameters == 16_060_522_496  # two bytes each
        assert _peak(plan, "rerun") < plan.bill.peak_memory <= memory < _peak(plan, "keep")
        assert plan.time_factor < 1.2 < fit_a_model.all_in_form(plan, "rerun").time_factor


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(fit_a_model, "run", lambda *given: calls.append(given))
    fit_a_model.main(["--quick", "--output", str(tmp_path)])
    fit_a_model.main(["--output", str(tmp_path)])
    quick, whole = calls
    assert quick[:2] == (tmp_path, fit_a_model.SMALL)
    assert whole[:4] == (tmp_path, fit_a_model.Shape(), lt.H100, 80 * 10**9)
