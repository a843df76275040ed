from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lowtide import Chain, Disk, Plan, StepCost
from lowtide.cli import main
from lowtide.planners.choose import choose
from lowtide.planners.equal import Uniform
from lowtide.version import __version__
from tests.cli.running import Runner

MILLION = ["plan", "--steps", "1000000", "--state", "64KiB", "--tape", "320KiB"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    output = capsys.readouterr()
    return int(caught.value.code or 0), output.out, output.err


def test_the_plan_of_a_million_steps(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *MILLION, "--budget", "64MiB")
    assert code == 0
    assert "1,896,162 plain and 1,000,000 taping: 2.896 forward runs per step" in out
    assert "1,896,162 plain runs at least with 64 MiB of snapshots and tape\n" in out
    assert "this plan makes 0 more: it is optimal" in out
    assert max(len(line) for line in out.splitlines()) <= 80


def test_json_is_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *MILLION, "--budget", "64MiB", "--json")
    assert code == 0
    assert Plan.from_json(out).schedule == Uniform(64 * 2**20)


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *MILLION, "--budget", "1KiB")
    assert (code, out) == (1, "")
    assert "no plan fits budget=1,024 B: the least that works is 393,216 B" in err
    assert run(capsys, *MILLION, "--budget", "393216")[0] == 0
    assert run(capsys, *MILLION, "--budget", "393215")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["plan"], "--steps, --state, --tape missing"),
        (["plan", "--steps", "10", "--state", "1"], "--tape missing"),
        (["plan", "--steps", "0", "--state", "1", "--tape", "1"], "steps=0 is too small"),
        (["plan", "--steps", "-4", "--state", "1", "--tape", "1"], "steps=-4 is too small"),
        (["plan", "--steps", "9", "--state", "8", "--tape", "1"], "a tape holds its step's input"),
        (["plan", "--steps", "9", "--state", "1", "--tape", "big"], "tape='big' is not a size"),
        ([*MILLION, "--budget", "0"], "budget='0' comes to less than one byte"),
        ([*MILLION, "--budget", "1.5"], "budget='1.5' is not a whole number of bytes"),
        ([*MILLION, "--budget", "1GiB", "--base", "4"], "are two knobs"),
        ([*MILLION, "--base", "0"], "base=0 is too small"),
        ([*MILLION, "--forward", "nan"], "forward is not a time"),
        ([*MILLION, "--budget", "9" * 5000], "is not a size"),
        (
            ["plan", "--steps", str(10**20), "--state", "1", "--tape", "1"],
            "steps=100,000,000,000,000,000,000 is too large",
        ),
        (["plan", "--steps", "9", "--state", "10000000TiB", "--tape", "10000000TiB"], "state=.*too large"),
        (["plan", "--chain", "x.json", "--forward", "2"], "--chain describes every step"),
        (["demo", "--only", "nothing"], "there is no example 'nothing'; there are paper, torch, jax"),
        ([*MILLION, "--disk-read", "1GB"], "--disk-read needs --disk-write"),
        ([*MILLION, "--disk-write", "1GB"], "disk goes with budget="),
        ([*MILLION, "--sweep", "--base", "4"], "--sweep tries every budget"),
        ([*MILLION, "--sweep", "--points", "1"], "points=1 is too small"),
        ([*MILLION, "--chain", "nowhere.json"], "--chain describes every step"),
        (["plan", "--chain", "nowhere.json"], "--chain nowhere.json: No such file"),
    ],
)
def test_input_that_cannot_be_read(capsys: pytest.CaptureFixture[str], arguments: list[str], why: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert re.search(why, err.replace("\n", " ")) or why in err
    assert "Traceback" not in err


def test_the_other_knobs(capsys: pytest.CaptureFixture[str]) -> None:
    assert "checkpoints=20" in run(capsys, *MILLION, "--checkpoints", "20")[1]
    assert "base=1,000" in run(capsys, *MILLION, "--base", "1000")[1]
    assert "none given" in run(capsys, *MILLION)[1]
    assert "0 B at most besides" in run(capsys, *MILLION, "--budget", "1GiB", "--working", "0")[1]
    assert "8 KiB at most besides" in run(capsys, *MILLION, "--budget", "1GiB", "--working", "8KiB")[1]
    fast = run(capsys, *MILLION, "--budget", "64MiB", "--disk-write", "2GB", "--disk-read", "4GB", "--forward", "0.01")
    assert "of disk" in fast[1]


def test_the_frontier(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *MILLION, "--sweep", "--points", "5")
    assert code == 0
    assert "384 KiB" in out
    assert "305.2 GiB" in out
    assert "1.000x" in out
    code, out, _ = run(capsys, *MILLION, "--sweep", "--points", "3", "--json")
    assert Plan.from_json(json.dumps(json.loads(out)[0])).knob.value == 393_216


@pytest.mark.parametrize("options", [{"rooms": True}, {"disk": Disk(1e-3, 1e-3)}, {}])
def test_the_frontier_of_a_saved_plan_has_plans_like_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: dict[str, Any]
) -> None:
    chain = Chain.equal(StepCost(64, 320), 400)
    path = tmp_path / "saved.json"
    path.write_text(choose(chain, "10%", **options).to_json())
    code, out, _ = run(capsys, "plan", str(path), "--sweep", "--points", "6", "--json")
    assert code == 0
    plans = [Plan.from_json(json.dumps(plan)) for plan in json.loads(out)]
    assert plans == [choose(chain, plan.knob.value, **options) for plan in plans]
    assert len(plans) == 6


def test_a_compiled_loop_has_no_snapshots_on_disk(lowtide: Runner) -> None:
    code = """
        from lowtide import Chain, StepCost
        from lowtide.planners.choose import choose
        def make():
            return choose(Chain.equal(StepCost(64, 320), 400), "10%", rooms=True)
    """
    lowtide.file("made.py", code)
    complaint = lowtide.refused("plan", "made.py:make", "--sweep", "--disk-write", "1GB")
    assert "a compiled loop keeps its snapshots in memory; leave out --disk-write and --disk-read" in complaint


def test_a_chain_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    layers = [
        {"name": f"[bold]{k}", "state": "1KiB", "tape": 2048 + k, "forward": 0.5, "cotangent": 0} for k in range(6)
    ]
    path.write_text(json.dumps(layers))
    code, out, _ = run(capsys, "plan", "--chain", str(path), "--budget", "5KiB")
    assert code == 0
    assert "6 unequal steps" in out
    assert "[bold]5" in out


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is not JSON"),
        ("{}", "give a list of steps"),
        ("[3]", "give a list of steps"),
        ("[]", "empty list"),
        ('[{"state": 4}]', "step 0: has ['state']; needs state and tape"),
        ('[{"state": 4, "tape": 8, "colour": 1}]', "knows ['backward'"),
        ('[{"state": 0, "tape": 8}]', "state=0 is too small"),
        ('[{"state": false, "tape": 8}]', "state=False is a boolean"),
        ('[{"state": 4, "tape": 8, "name": [1]}]', "each a str"),
        ("[" * 100_000, "is not JSON"),
        ('[{"state": 4, "tape": 8, "forward": "x"}]', "forward='x' is a str"),
    ],
)
def test_files_that_are_no_chain(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "chain.json"
    path.write_text(text)
    code, _, err = run(capsys, "plan", "--chain", str(path), "--budget", "1KiB")
    assert code == 2
    assert why in err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version")[1] == f"lowtide {__version__}\n"
    assert "plan" in run(capsys)[1]
    code, out, _ = run(capsys, "plan", "--help")
    assert code == 0
    assert "--budget" in out


@pytest.mark.long
def test_demo(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "demo", "--quick", "--only", "paper", "--output", str(tmp_path))
    assert code == 0
    assert "every one was legal, and the bill is the one predicted" in " ".join(out.split())
    plan = Plan.from_json((tmp_path / "paper.json").read_text())
    assert len(plan.chain) == 20_000


def test_demo_into_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "taken"
    path.write_text("")
    code, _, err = run(capsys, "demo", "--output", str(path), "--only", "paper")
    assert code == 2
    assert "taken" in err


def test_as_a_module_in_a_fresh_process() -> None:
    code = (
        "from lowtide.cli import main; main(['plan', '--steps', '9', '--state', '1', '--tape', '2', '--budget', '1'])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("lowtide: no plan fits budget=1 B: the least that works is 3 B")
