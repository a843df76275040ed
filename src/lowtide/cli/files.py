"""Files that commands read and write. Commands check that a file can be written before the work, not after it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import typer

from lowtide.errors import InputError
from lowtide.plan import Plan

_V = TypeVar("_V")


def read(path: Path, reader: Callable[[str], _V], what: str, maker: str) -> _V:
    """The value that `reader` returns for the file's text; errors call it `what`, and `maker` the way to make one."""
    try:
        return reader(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except ValueError as error:  # Lowtide's own error, or bytes that are not UTF-8
        raise InputError(f"{path} is not {what}: {error}; make one with {maker}") from error


def read_plan(path: Path) -> Plan:
    """The plan in a file."""
    return read(path, Plan.from_json, "a plan", "lowtide plan ... --save plan.json")


def check_file(path: Path | None, option: str) -> None:
    """Raise `InputError` if a file cannot be written; its folder may be missing, because `make_room` creates it."""
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"{option} {path} is a folder; give the name of a file in it")
    there = next(above for above in path.absolute().parents if above.exists())
    if not there.is_dir() or not os.access(path if path.exists() else there, os.W_OK):
        raise InputError(f"{option} {path} cannot be written: {there} does not let it; give another file")


def make_room(path: Path) -> Path:
    """Create the path's folder, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def write(path: Path, text: str) -> None:
    """Write the text to a file, and report that on standard error."""
    make_room(path).write_text(text, encoding="utf-8")
    wrote(path)


def wrote(path: Path) -> None:
    """Report that a file was written, on standard error, because standard output may be JSON."""
    typer.echo(f"wrote {path} ({path.stat().st_size:,} bytes)", err=True)
