"""Finds what `module:name` or `path/to/file.py:name` names, and reports errors in the code that is found."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from lowtide.errors import InputError, LowtideError

_USAGE = "give module:name or path/to/file.py:name, for example mymodule:make"


@contextmanager
def importable(target: str) -> Iterator[None]:
    """Inside, modules in the target's folder can be imported, also by functions when they are called."""
    where, _, _ = target.rpartition(":")
    folders = [str(Path.cwd()), *([str(Path(where).resolve().parent)] if where.endswith(".py") else [])]
    path, before = sys.path, list(sys.path)
    path[:0] = folders
    try:
        yield
    finally:
        sys.path = path  # the target may have replaced the list
        path[:] = before


@contextmanager
def showing(what: str) -> Iterator[None]:
    """Turn exceptions of the user's code into an `InputError` that names the line; Lowtide's own pass unchanged."""
    try:
        yield
    except LowtideError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"{what} failed: {_described(error)}") from error


def find(target: str) -> Any:
    """The object that `target` names."""
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise InputError(f"{target!r} does not say what to plan; {_USAGE}")
    with showing(f"importing {where}"):
        module = _file(Path(where)) if where.endswith(".py") else _module(where)
    found: Any = module
    holder = where
    for part in name.split("."):
        with showing(f"reading {part!r} of {holder}"):  # a property may raise anything
            try:
                found = getattr(found, part)
            except AttributeError as error:
                raise InputError(f"{holder} has no {part!r}; {_others(found, part)}") from error
        holder = f"{holder}{':' if holder == where else '.'}{part}"
    return found


def _module(where: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            raise  # the module was found, but it imports another one that was not
        raise InputError(
            f"there is no module {where!r} in {Path.cwd()}, nor on Python's path; go to the folder that holds it, "
            f"or give its file: path/to/{where.rpartition('.')[2]}.py:name"
        ) from error


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"there is no file {path} in {Path.cwd()}; {_USAGE}")
    name = f"_target_{path.stem}"  # a name that nothing imports, or a file `torch.py` would replace torch
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # a .py file has a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def _others(holder: Any, name: str) -> str:
    names = [each for each in dir(holder) if not each.startswith("_")]
    near = difflib.get_close_matches(name, names)
    if near:
        return f"did you mean {' or '.join(near)}?"
    held = getattr(holder, "__dict__", {})  # not by getattr, which would run properties
    own = sorted(each for each in names if not isinstance(held.get(each), ModuleType))
    return f"it has {', '.join(own[:12])}{', ...' if len(own) > 12 else ''}" if own else "it has no names at all"


def _described(error: BaseException) -> str:
    """Type, message and line of an exception; the line is the last one outside libraries."""
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError):  # its message names the line already
        return said
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if not _of_a_library(frame.filename)), frames[-1])
    line = f": {frame.line}" if frame.line else ""
    return f"{said} ({_short(frame.filename)}, line {frame.lineno}, in {frame.name}{line})"


def _of_a_library(file: str) -> bool:
    paths = sysconfig.get_paths()
    folders = [str(Path(__file__).parent.parent), *(paths[key] for key in ("stdlib", "purelib", "platlib"))]
    return file.startswith("<") or any(file.startswith(folder + os.sep) for folder in folders)


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
