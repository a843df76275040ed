"""Help that fits a terminal, and completion."""

from __future__ import annotations

import subprocess
import sys

import pytest

import lowtide.demo
from lowtide.cli import bench, demo, plan
from lowtide.cli.commands import app
from tests.cli.running import Runner

COMMANDS = ["plan", "report", "bench", "demo", "doctor"]


@pytest.mark.parametrize("arguments", [[], *([command] for command in COMMANDS)])
def test_help(lowtide: Runner, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = lowtide(*arguments, "--help")
    assert code == 0
    example = " ".join(["lowtide", *arguments])
    assert example in out.split("Example")[1]
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "\b" not in out


def test_the_commands() -> None:
    assert [command.name for command in app.registered_commands] == COMMANDS


def test_names_are_completed() -> None:
    assert plan.complete_framework() == ["torch", "jax"]
    assert [name for name, _ in bench.complete_benchmark("torch_")] == [
        "torch_rollouts",
        "torch_checkpoint",
        "torch_sequential",
        "torch_lean",
        "torch_models",
    ]
    assert demo.complete_demo("") == list(lowtide.demo.NAMES)


def test_completion_in_a_shell() -> None:
    code = "from lowtide.cli import main; main()"
    asked = {
        "COMP_WORDS": "lowtide bench pla",
        "COMP_CWORD": "2",
        "_LOWTIDE_COMPLETE": "complete_bash",
        "PATH": "/usr/bin:/bin",
    }
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.argv[0] = 'lowtide'; {code}"],
        env=asked,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "planners" in result.stdout
