"""The documentation's pages as programs: their code blocks, in order, with what they are said to print.

A page is run as a reader would: from top to bottom, in one namespace, in an empty folder.

    ```python   is run; if its first line is `# name.py`, it is written to that file instead
    ```sh       has one command a line: `lowtide ...`, `python name.py`, or one that is only looked at (pip, make, git)
    ```text     is what the block before it prints; `...` stands for anything
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
ROOT = DOCS.parent
_FENCE = re.compile(r"^(?P<ticks>`{3,})(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=ticks)[ ]*$", re.M | re.S)
_FILE = re.compile(r"# (\w+\.py)\n")
# What others install or fetch is not run here; these are the forms that the pages may show.
_SHOWN = (
    'pip install --constraint constraints.txt --editable ".[all]"',
    "pip install --editable .",
    'pip install --editable ".[report]"',
    "pytest tests/device --device cuda",
)


@dataclass(frozen=True)
class Block:
    """A block of code: its language, text, and the line of the page on which the text begins."""

    language: str
    text: str
    line: int


def pages() -> list[Path]:
    """Every page but the decisions, which have no code to run."""
    found = sorted(path for path in DOCS.rglob("*.md"))
    return [path for path in found if path.relative_to(DOCS).parts[0] not in ("decisions", "_build", "_generated")]


def name_of(page: Path) -> str:
    """The page as the tests call it."""
    return page.relative_to(DOCS).with_suffix("").as_posix()


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(match["language"].strip(), match["text"], text.count("\n", 0, match.start("text")) + 1)
        for match in _FENCE.finditer(text)
    ]


def told(page: Path) -> Iterator[tuple[Block, Block | None]]:
    """The blocks that do something, each with the block that says what it prints."""
    row = blocks(page)
    for k, block in enumerate(row):
        if block.language in ("python", "sh"):
            after = row[k + 1] if k + 1 < len(row) and row[k + 1].language == "text" else None
            yield block, after


def matches(said: str, printed: str) -> bool:
    """Whether a program printed what the page says, where `...` is anything; blanks at ends of lines do not count."""
    said, printed = (re.sub(r"[ \t]+$", "", text.rstrip("\n") + "\n", flags=re.M) for text in (said, printed))
    return doctest.OutputChecker().check_output(said, printed, doctest.ELLIPSIS | doctest.DONT_ACCEPT_BLANKLINE)


class Reader:
    """Whoever follows a page: runs its blocks in the current folder, which should be an empty one."""

    def __init__(self, page: Path) -> None:
        self._page = page
        self._namespace: dict[str, Any] = {"__name__": "__page__"}

    def do(self, block: Block) -> str:
        """Run a block; gives what it printed."""
        if block.language == "sh":
            return "".join(self._command(line) for line in _joined(block.text))
        file = _FILE.match(block.text)
        if file is not None:
            Path(file[1]).write_text(block.text, encoding="utf-8")
            return ""
        program = compile("\n" * (block.line - 1) + block.text, str(self._page), "exec")  # tracebacks say the line
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(program, self._namespace)
        return printed.getvalue()

    def _command(self, line: str) -> str:
        word, *rest = shlex.split(line, comments=True)
        if word == "lowtide":
            return _lowtide(rest)
        if word == "python":
            return _run([sys.executable, *rest])
        if word == "make":
            targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
            assert set(rest) <= set(targets), f"{line}: the Makefile has {targets}"
            return ""
        assert line.split(" #")[0].rstrip() in _SHOWN, f"{line}: not among the commands that a page may show"
        return ""


def _lowtide(arguments: list[str]) -> str:
    if "--help" in arguments:  # it says how it was called
        return _run([str(Path(sys.executable).with_name("lowtide")), *arguments])
    from lowtide.cli import main  # most pages have no commands

    code: object = 0
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            main(arguments)
        except SystemExit as left:
            code = left.code
    assert not code, f"lowtide {shlex.join(arguments)} ended with {code}"
    return printed.getvalue()


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _joined(text: str) -> list[str]:
    """The commands of a block, each on one line."""
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
