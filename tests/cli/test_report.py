"""`lowtide report`: text, page and figure of a plan that was saved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import webbrowser
from pathlib import Path

import pytest

from lowtide import Chain, Plan, Receipt, StepCost
from lowtide.planners.choose import choose
from tests.cli.running import Runner


@pytest.fixture
def saved(lowtide: Runner) -> Runner:
    plan = choose(Chain.equal(StepCost(4096, 65536), 60), "512KiB")
    lowtide.file("plan.json", plan.to_json())
    receipt = Receipt(plain_runs=53, taping_runs=60, backward_runs=60, peak_memory=512 * 1024, seconds=0.5)
    lowtide.file("receipt.json", receipt.to_json())
    return lowtide


def test_text_and_page(saved: Runner) -> None:
    code, out, err = saved("report", "plan.json")
    assert code == 0
    assert "60 equal steps, state 4 KiB, tape 64 KiB each" in out
    assert "budget=512 KiB" in out
    page = saved.folder / "plan.html"
    assert err == f"wrote plan.html ({page.stat().st_size:,} bytes)\n"
    assert 'id="data"' in page.read_text()


@pytest.mark.long
def test_everything_at_once(saved: Runner) -> None:
    code, out, err = saved(
        "report", "plan.json", "--receipt", "receipt.json", "--output", "new/page.html", "--figure", "more/plan.svg",
        "--points", "4", "--no-text",
    )  # fmt: skip
    assert (code, out) == (0, "")
    assert [line.split()[1] for line in err.splitlines()] == ["new/page.html", "more/plan.svg"]
    assert "<svg" in (saved.folder / "more" / "plan.svg").read_text()
    assert not (saved.folder / "plan.html").exists()


def test_the_receipt_is_in_the_text(saved: Runner) -> None:
    assert "measured" in saved("report", "plan.json", "--receipt", "receipt.json", "--points", "0")[1]
    assert "measured" not in saved("report", "plan.json", "--points", "0")[1]


class Recorder(webbrowser.BaseBrowser):
    """A browser that writes down what it is asked to open."""

    def __init__(self) -> None:
        super().__init__("recorder")
        self.opened: list[str] = []

    def open(self, url: str, new: int = 0, autoraise: bool = True) -> bool:
        self.opened.append(url)
        return True


def test_the_page_is_opened(saved: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    browser = Recorder()
    monkeypatch.setattr(webbrowser, "_tryorder", [])
    monkeypatch.setattr(webbrowser, "_browsers", {})
    webbrowser.register("recorder", None, browser, preferred=True)
    assert saved("report", "plan.json", "--points", "0", "--no-text", "--open")[0] == 0
    assert browser.opened == [(saved.folder / "plan.html").as_uri()]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["nowhere.json"], "nowhere.json: No such file or directory"),
        (["."], ".: Is a directory"),
        (["text.txt"], "text.txt is not a plan: not JSON: Expecting value"),
        (["bytes.bin"], "bytes.bin is not a plan: 'utf-8' codec can't decode byte 0xff"),
        (["receipt.json"], "receipt.json is not a plan: this JSON lacks chain, knob, planner"),
        (["plan.json", "--receipt", "plan.json"], "plan.json is not a receipt: this JSON lacks receipt"),
        (["plan.json", "--receipt", "none.json"], "none.json: No such file or directory"),
        (["plan.json", "--output", "plan.json"], "the page would replace plan.json, which it is made from"),
        (
            ["plan.json", "--receipt", "receipt.json", "--output", "../{here}/receipt.json"],
            "replace receipt.json",
        ),
        (["plan.json", "--points", "-1", "--no-text"], "points=-1 is too small"),
    ],
)
def test_what_cannot_be_shown(saved: Runner, arguments: list[str], why: str) -> None:
    saved.file("text.txt", "words")
    (saved.folder / "bytes.bin").write_bytes(b"\xff\xfe")
    assert why in saved.refused("report", *(each.format(here=saved.folder.name) for each in arguments))
    assert not (saved.folder / "plan.html").exists()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--figure", "plan.bmp"], "path='plan.bmp': a figure is saved as .png, .svg, .pdf"),
        (["--figure", "folder.png"], "--figure folder.png is a folder; give the name of a file in it"),
        (["--figure", "text.txt/new/plan.png"], "--figure text.txt/new/plan.png cannot be written: "),
        (["--output", "folder.png"], "--output folder.png is a folder"),
        (["--output", "text.txt/plan.html"], "--output text.txt/plan.html cannot be written: "),
    ],
)
def test_what_cannot_be_written_is_found_out_before_anything_is_planned(
    saved: Runner, arguments: list[str], why: str
) -> None:
    saved.file("text.txt", "words")
    (saved.folder / "folder.png").mkdir()
    # Fewer points than none are refused when planning begins: the other complaint must come before that one.
    assert why in saved.refused("report", "plan.json", *arguments, "--points", "-1")
    assert not (saved.folder / "plan.html").exists()


def test_a_plan_is_saved_in_a_folder_that_is_made(lowtide: Runner) -> None:
    chain = ["--steps", "40", "--state", "1KiB", "--tape", "8KiB", "--budget", "64KiB"]
    assert lowtide("plan", *chain, "--save", "new/folder/a.json", "--report", "new/page/a.html")[0] == 0
    assert Plan.from_json((lowtide.folder / "new/folder/a.json").read_text()).planner == "uniform"
    lowtide.file("made.py", "raise RuntimeError('imported')")
    for option, path, why in (
        ("--save", "new", "--save new is a folder"),
        ("--report", "new/folder", "--report new/folder is a folder"),
        ("--save", "new/folder/a.json/b.json", "--save new/folder/a.json/b.json cannot be written"),
    ):
        assert why in lowtide.refused("plan", "made.py:make", option, path)


def test_half_a_character_in_a_name(lowtide: Runner) -> None:
    steps = [{"name": f"a\ud800{k}\u65e5", "state": 8, "tape": 100 + k} for k in range(4)]
    lowtide.file("chain.json", json.dumps(steps))
    code, out, err = lowtide(
        "plan", "--chain", "chain.json", "--budget", "70%", "--save", "a.json", "--report", "a.html"
    )
    assert code == 0, err
    assert "\u65e5" in out
    for command in (["plan", "--chain", "chain.json", "--sweep"], ["report", "a.json", "--figure", "a.svg"]):
        code, _, err = lowtide(*command)
        assert code == 0, err
    steps[1]["n\ud800"] = 1
    lowtide.file("chain.json", json.dumps(steps))
    assert "knows ['backward'" in lowtide.refused("plan", "--chain", "chain.json", "--budget", "70%")


def test_letters_that_a_terminal_does_not_have(lowtide: Runner) -> None:
    steps = [{"name": f"\u65e5{k}", "state": 8, "tape": 100 + k} for k in range(4)]
    lowtide.file("chain.json", json.dumps(steps))
    code = "from lowtide.cli import main; main(['plan', '--chain', 'chain.json', '--budget', '70%'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "\n  ?0 " in done.stdout


def test_from_plan_to_page(lowtide: Runner) -> None:
    chain = ["--steps", "40", "--state", "1KiB", "--tape", "8KiB", "--budget", "64KiB"]
    assert lowtide("plan", *chain, "--save", "a.json", "--report", "a.html")[0] == 0
    assert lowtide("report", "a.json", "--output", "b.html", "--no-text")[0] == 0
    sizes = [Path(lowtide.folder / name).stat().st_size for name in ("a.html", "b.html")]
    assert abs(sizes[0] - sizes[1]) < 100  # the date may differ
