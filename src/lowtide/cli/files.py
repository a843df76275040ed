"""Files that a command writes at its end: whether that will work is found out at its beginning."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from lowtide.errors import InputError


def check_file(path: Path | None, option: str) -> None:
    """Refuse a file that cannot be written; a folder that is not there yet is no reason, `make_room` makes it."""
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"{option} {path} is a folder; give the name of a file in it")
    there = next(above for above in path.absolute().parents if above.exists())
    if not there.is_dir() or not os.access(path if path.exists() else there, os.W_OK):
        raise InputError(f"{option} {path} cannot be written: {there} does not let it; give another file")


def make_room(path: Path) -> Path:
    """The path, with its folder made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def write(path: Path, text: str) -> None:
    """Write the text, and say so."""
    make_room(path).write_text(text, encoding="utf-8")
    wrote(path)


def wrote(path: Path) -> None:
    """Say so, beside what is printed."""
    typer.echo(f"wrote {path} ({path.stat().st_size:,} bytes)", err=True)
