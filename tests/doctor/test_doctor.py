"""The doctor says that everything holds where it does, and names what does not where an engine is broken."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide.jax
import lowtide.torch as lt
from lowtide import doctor, packages
from lowtide.cli import main
from lowtide.doctor import environment, examine, jax_checks, planner_checks, programs, torch_checks
from lowtide.doctor.findings import Fact, Finding, Report, from_line, to_line
from lowtide.errors import InputError, MissingPackageError
from lowtide.planners import choose as planning
from lowtide.torch import measure

CPU = torch.device("cpu")


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frameworks are examined in this process, where a test can break something."""
    monkeypatch.setattr(examine, "apart", examine.here)


def asked(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    """The exit code and the output of `lowtide doctor` with small sizes."""
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--quick", *options])
    return int(caught.value.code or 0), capsys.readouterr().out


@pytest.fixture(autouse=True)
def same_random_numbers() -> Iterator[None]:
    """Other tests find the random generators as they would be without this one."""
    states = torch.get_rng_state(), random.getstate()
    yield
    torch.set_rng_state(states[0])
    random.setstate(states[1])


# --- where everything is right


@pytest.mark.usefixtures("in_this_process")
def test_torch_on_the_cpu_holds(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = asked(capsys, "--device", "torch:cpu", "--json")
    found = json.loads(out)
    assert code == 0, out
    assert found["holds"] is True
    held = {each["check"]: each["holds"] for each in found["findings"]}
    assert {name for name, holds in held.items() if holds is None} == {
        "speed: loop",
        "speed: checkpoint",
        "host copies",
    }
    assert len(held) == 11
    names = {fact["name"] for fact in found["facts"]}
    assert {"lowtide", "Python", "system", "torch", "torch build"} <= names


@pytest.mark.usefixtures("in_this_process")
def test_jax_on_the_cpu_holds(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = asked(capsys, "--device", "jax:cpu:0")
    assert code == 0, out
    assert out.endswith("All 3 checks hold.\n")


def test_the_core_holds() -> None:
    assert [check().holds for check in planner_checks.CHECKS.values()] == [True, True]


@pytest.mark.slow
def test_all_of_it_in_processes_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = asked(capsys)
    assert code == 0, out
    rows = [line for line in out.splitlines() if line.startswith("|")]
    assert len([row for row in rows if "torch:cpu" in row]) == 11
    assert len([row for row in rows if "jax:cpu:0 " in row]) == 4 + 1  # its kind, too


# --- where something is broken


def break_scan(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    """Let Lowtide's scan return something else."""
    right = lt.checkpointed_scan
    monkeypatch.setattr(lt, "checkpointed_scan", lambda *args, **kwargs: change(right(*args, **kwargs)))


@pytest.mark.usefixtures("in_this_process")
def test_a_last_bit_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    break_scan(monkeypatch, lambda result: (torch.nextafter(result[0], result[0] + 1), result[1]))
    right = torch_checks.checks
    few = ("bits: loop", "bits: checkpoint")
    monkeypatch.setattr(torch_checks, "checks", lambda *a, **k: {name: right(*a, **k)[name] for name in few})
    code, out = asked(capsys, "--device", "torch:cpu")
    assert code == 1
    row = next(line for line in out.splitlines() if "bits: loop" in line)
    assert "**NO**" in row
    assert "different: the loss" in row
    assert out.splitlines()[-1] == "1 of 2 checks do not hold."


def test_an_engine_that_keeps_everything_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(step: Any, init: Any, xs: Any, **_: Any) -> Any:
        return lt.scan(step, init, xs)

    monkeypatch.setattr(lt, "checkpointed_scan", kept)
    assert torch_checks.loop_budget(programs.QUICK, CPU).holds is False
    assert torch_checks.same_bits(programs.LOOP, programs.QUICK, CPU).holds is True


def test_reruns_that_repeat_nothing_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own checkpoint call counts twice, and knows nothing of Python's generator."""

    def loop(net: Any, xs: Any, **_: Any) -> Any:
        return torch.stack([torch_checkpoint(net, x, use_reentrant=False) for x in xs])

    monkeypatch.setattr(lt, "checkpointed_for_loop", loop)
    for step in (programs.STATEFUL, programs.RANDOM):
        finding = examine._finding("here", "x", partial(torch_checks.same_bits, step, programs.QUICK, CPU))
        assert finding.holds is False, finding


@pytest.mark.long
def test_a_plan_that_is_not_followed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lt, "apply", lambda *_: None)
    outcome = torch_checks.model_peak(programs.QUICK, CPU)
    assert outcome.holds is False
    assert "the same bits" in outcome.text


def test_a_lean_tape_that_is_not_lean_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lt, "lean", lambda function, *args: function(*args))
    assert torch_checks.lean(programs.QUICK, CPU).holds is False


@pytest.mark.long
def test_wrong_gradients_and_bytes_in_jax_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(step: Any, init: Any, xs: Any, **_: Any) -> Any:
        carry, ys = jax.lax.scan(step, init, xs)
        return carry * 1.01, ys

    loops = jax_checks.Loops(jax_checks.QUICK._replace(steps=400))
    monkeypatch.setattr(lowtide.jax, "checkpointed_scan", wrong)
    assert jax_checks.gradients(loops).holds is False
    assert jax_checks.loop_budget(loops).holds is False


def test_a_planner_that_makes_more_runs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = planning.choose
    monkeypatch.setattr(planner_checks, "choose", lambda chain, *_, **__: right(chain, checkpoints=3))
    assert planner_checks.planned_runs().holds is False
    assert planner_checks.played_plans().holds is False


def test_an_exception_does_not_hold_and_a_missing_package_is_left_out() -> None:
    def fails(error: Exception) -> Any:
        raise error

    assert examine._finding("d", "c", lambda: fails(KeyError("x"))) == Finding("d", "c", False, "KeyError: 'x'")
    found = examine._finding("d", "c", lambda: fails(MissingPackageError("lean needs scipy")))
    assert found == Finding("d", "c", None, "left out: lean needs scipy")


def test_a_process_that_crashes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    assert list(examine.apart("torch", (), quick=True)) == [
        Finding("torch", "process", False, "it ended with exit code 1")
    ]


# --- what is asked for, and how it is shown


def test_only_devices_that_there_are() -> None:
    with pytest.raises(InputError, match="write torch:cpu"):
        list(examine.everything(["cuda:0"], quick=True))
    *_, found = examine.here("torch", ["torch:cuda:7"], quick=True)
    assert found == Finding("torch:cuda:7", "device", False, "there is no such device here; there is torch:cpu")


def test_findings_are_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Fact | Finding] = [Fact("a", "b|c\nd"), Finding("e", "f", None, "g")]
    monkeypatch.setattr(examine, "here", lambda *_, **__: iter(found))
    examine.report("torch", (), quick=True)
    assert (
        [from_line(line) for line in capsys.readouterr().out.splitlines()]
        == found
        == [from_line(to_line(each)) for each in found]
    )


def test_the_other_end_of_the_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A process that prints findings as `report` does."""
    found: list[Fact | Finding] = [Fact("a", "b"), Finding("e", "f", True, "g")]
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\n" + "".join(f"echo '{to_line(each)}'\n" for each in found))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    assert list(examine.apart("torch", (), quick=True)) == found
    monkeypatch.setattr(examine, "apart", lambda *_, **__: iter(()))
    assert [each.device for each in examine.everything(None, quick=True)] == ["planners", "planners"]  # type: ignore[union-attr]


def test_a_table_has_one_line_for_each_row() -> None:
    report = Report((Fact("a", "b|c\nd"),), (Finding("e", "f", False, "g"), Finding("e", "f", True, "g")))
    assert doctor.table.markdown(report).splitlines() == [
        "| what | found |",
        "|------|---|",
        "| a    | b/c d |",
        "",
        "| device | check | holds  | found |",
        "|--------|-------|--------|---|",
        "| e      | f     | **NO** | g |",
        "| e      | f     | yes    | g |",
        "",
        "1 of 2 checks do not hold.",
    ]


class OfTensors:
    """An allocator that says what the tensors of a run take, and reserves twice as much."""

    def __init__(self) -> None:
        self._context = measure.peak()
        self._memory = self._context.__enter__()

    def memory_allocated(self, _: torch.device) -> int:
        return self._memory.now

    def max_memory_allocated(self, _: torch.device) -> int:
        return self._memory.peak

    def max_memory_reserved(self, _: torch.device) -> int:
        return 2 * self._memory.peak

    def reset_peak_memory_stats(self, _: torch.device) -> None:
        self._memory.restart_peak()

    def close(self) -> None:
        self._context.__exit__(None, None, None)


def test_an_allocator_is_asked_where_there_is_one() -> None:
    allocator = OfTensors()
    try:
        outcome = torch_checks.loop_budget(programs.QUICK, CPU, allocator)
    finally:
        allocator.close()
    assert outcome.holds
    assert "allocated" in outcome.text
    assert "reserved" in outcome.text


def test_a_device_that_does_not_count_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = torch.device("meta")
    assert torch_checks.allocator_of(meta) is None
    assert torch_checks.measured(lambda: None, meta, None) is None
    monkeypatch.setattr(torch_checks, "measured", lambda *_: None)
    assert torch_checks.loop_budget(programs.QUICK, CPU).holds is None
    assert torch_checks.model_peak(programs.QUICK, CPU).holds is None


def test_copies_to_the_host_are_counted() -> None:
    with torch_checks.HostCopies(CPU) as copies:
        x = torch.ones(2)
        x.sum().item()
        x.to("meta")
    assert copies.count == 2


def test_where_there_is_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of torch about one, without one."""
    meta = torch.device("meta")
    asked_for: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", asked_for.append)
    torch_checks.synchronize(meta)
    assert asked_for == [meta]
    monkeypatch.setattr(torch_checks, "_copies", lambda _, steps, __: [steps, steps])
    assert torch_checks.host_copies(programs.QUICK, meta) == (True, "1 for each step, 1 in the plain loop")
    monkeypatch.setattr(torch_checks, "_copies", lambda _, steps, __: [0, steps])
    assert torch_checks.host_copies(programs.QUICK, meta).holds is False
    allocator = OfTensors()
    allocator.close()
    monkeypatch.setattr(torch, "accelerator", allocator)
    assert torch_checks.allocator_of(CPU) is allocator


def test_what_is_no_number_of_the_other_is_different() -> None:
    one = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2), "d": torch.tensor(0.0)}
    other = {"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.int32), "d": torch.tensor(-0.0), "e": torch.ones(1)}
    assert programs.differences(one, other) == ["a", "b", "c", "d", "e"]


def test_what_is_missing_is_said_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("scipy", "matplotlib"):
            raise metadata.PackageNotFoundError(name)
        return "2.99.1" if name == "torch" else packages.TESTED.get(name, "1") + ".0"

    monkeypatch.setattr(metadata, "version", version)
    found = {fact.name: fact.text for fact in environment.facts()}
    assert found["scipy"] == "not installed: `pip install scipy`"
    assert found["matplotlib"] == 'not installed: `pip install "lowtide[report]"`'
    assert found["torch"] == "2.99.1 (tested: 2.13)"
    assert found["jax"] == "0.10.0"


@pytest.mark.slow
def test_a_broken_engine_is_found_by_the_command_itself(tmp_path: Path) -> None:
    """A copy of the source in which a loop leaves out its last step."""
    source = Path(lowtide.__file__).parent
    shutil.copytree(source, tmp_path / "lowtide", ignore=shutil.ignore_patterns("__pycache__"))
    broken = tmp_path / "lowtide" / "torch" / "__init__.py"
    broken.write_text(
        broken.read_text() + "\n\ndef checkpointed_for_loop(f, xs, **_):\n    return for_loop(f, xs[:-1])\n"
    )
    command = [sys.executable, "-m", "lowtide", "doctor", "--quick", "--device", "torch:cpu"]
    there = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=there, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    bad = [line.split("|")[2].strip() for line in done.stdout.splitlines() if "**NO**" in line]
    assert bad == ["random numbers", "hidden state"]
