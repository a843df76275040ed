"""The command line in this process, and code of a user's own for it to find."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide.cli import main


class Runner:
    """Calls the command line in a folder of its own."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, what was printed, what was complained about."""
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        output = self._capsys.readouterr()
        return int(caught.value.code or 0), output.out, output.err

    def refused(self, *arguments: str) -> str:
        """The complaint, on one line; nothing else is printed."""
        code, out, err = self(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("lowtide: ")
        assert "Traceback" not in err
        return " ".join(err.split())

    def file(self, name: str, code: str) -> Path:
        """A file in the folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(code))
        return path


@pytest.fixture
def lowtide(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    """The command line in an empty folder; modules that it imports from there are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    path = list(sys.path)
    yield Runner(tmp_path, capsys)
    assert sys.path == path
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and Path(file).is_relative_to(tmp_path):
            del sys.modules[name]
