"""The README is run as a stranger would run it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from lowtide.cli import main

README = Path(__file__).parents[2] / "README.md"
BLOCKS: list[tuple[str, str]] = re.findall(r"^```([^\n]*)\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)
COMMANDS = [line for fence, block in BLOCKS if not fence for line in block.splitlines() if line.startswith("lowtide ")]


def test_it_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.long
def test_its_python_runs_and_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    programs = [block for fence, block in BLOCKS if fence == "python"]
    assert len(programs) == 4
    outputs = []
    for program in programs:
        exec(compile(program, "README.md", "exec"), {})
        outputs.append(capsys.readouterr().out)
    (expected,) = [block for fence, block in BLOCKS if fence == "text"]
    assert outputs == ["", "", "", expected]
    assert (tmp_path / "demo-output" / "million.html").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(shlex.split(command)[1:])
    assert caught.value.code == 0
    assert capsys.readouterr().out


def test_there_are_commands_in_it() -> None:
    assert len(COMMANDS) == 3


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)|src=\"([^\"]+)\"", README.read_text(encoding="utf-8")):
        assert (README.parent / "".join(target)).exists(), target
