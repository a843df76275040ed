"""The page as a file: where it goes, and what it says that no browser is needed for."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest

from lowtide import Chain, InputError, Receipt, StepCost, report
from lowtide.planners.choose import choose
from lowtide.report import page as pages

PLAN = choose(Chain.equal(StepCost(64, 320), 40), "50%")


def told(path: Path) -> Any:
    packed = re.search(r'<script id="data" type="text/plain">([^<]*)</script>', path.read_text(encoding="utf-8"))
    assert packed is not None
    return json.loads(zlib.decompress(base64.b64decode(packed[1])))


def test_the_receipt_may_be_left_out_and_folders_are_made(tmp_path: Path) -> None:
    first = report.write(PLAN, tmp_path / "new" / "folder" / "plan.html", points=2)
    second = report.write(PLAN, None, str(tmp_path / "plan.html"), points=2)
    assert first == tmp_path / "new" / "folder" / "plan.html"
    assert told(first)["views"] == told(second)["views"]
    third = report.write(PLAN, Receipt(peak_memory=900, held=100), tmp_path / "third.html", points=0)
    assert told(third)["receipt"]["text"] == "800 B"
    assert told(report.write(PLAN, Receipt(), tmp_path / "fourth.html", points=0))["receipt"]["text"] is None


def test_a_path_is_one_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="two paths were given"):
        report.write(PLAN, "one.html", "two.html")
    with pytest.raises(InputError, match="is a folder; give the name of the page's file"):
        report.write(PLAN, tmp_path)


def test_only_the_plan_itself_is_in_the_file(tmp_path: Path) -> None:
    views = told(report.write(PLAN, tmp_path / "plan.html", points=3))["views"]
    for view in views:
        assert ("plan file" in dict(view["code"])) == view["own"]


def test_hardly_any_time_is_none(tmp_path: Path) -> None:
    plan = choose(Chain.equal(StepCost(64, 320, 5e-324, 1e-310), 40), "50%")
    assert told(report.write(plan, tmp_path / "plan.html", points=2))["views"]


def test_only_packages_that_are_there_have_a_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_PACKAGES", ("numpy", "a-package-that-nobody-wrote"))
    versions = told(report.write(PLAN, tmp_path / "plan.html", points=0))["versions"]
    assert [name for name, _ in versions] == ["Python", "numpy"]
