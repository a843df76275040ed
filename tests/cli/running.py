"""The command line in this process, and code of a user's own for it to find."""

from __future__ import annotations

import textwrap
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
