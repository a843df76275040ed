"""The list of torch's private names is that of the source, and a torch that lacks one is refused by name."""

from __future__ import annotations

import ast
import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lowtide
from lowtide import MissingPackageError, packages
from lowtide.torch import installed

SOURCE = Path(lowtide.__file__).parent
PUBLIC = {"torch.__file__", "torch.__version__"}


def dotted(node: ast.expr) -> list[str]:
    """The names of `a.b.c`; empty for an expression that begins with something else."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return [*before, node.attr] if before else []
    return [node.id] if isinstance(node, ast.Name) else []


def of_torch(module: Path) -> Iterator[str]:
    """The names of torch that a module uses, in full."""
    tree = ast.parse(module.read_text())
    names = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    yield from names.values()
    for node in ast.walk(tree):
        parts = dotted(node) if isinstance(node, ast.Attribute) else []
        if parts and parts[0] in names:
            yield ".".join([names[parts[0]], *parts[1:]])


@pytest.mark.long
def test_every_private_name_is_in_the_list() -> None:
    used = {
        name
        for module in SOURCE.rglob("*.py")
        if module != Path(installed.__file__)
        for name in of_torch(module)
        if "._" in name and not name.startswith("torch._dynamo")
    } - PUBLIC
    listed = {f"{home}.{name}" for home, names in installed.PRIVATE.items() for name in names}
    known = {
        name
        for name in used
        if any(f"{name}.".startswith(f"{each}.") or each.startswith(f"{name}.") for each in listed)
    }
    assert used - known == set()
    assert {each for each in listed if not any(f"{name}.".startswith(f"{each}.") for name in used)} == set()


def test_this_torch_lacks_nothing() -> None:
    assert installed.lacking() == []
    installed.refuse_lacking()


def test_a_torch_that_lacks_something_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "PRIVATE", {"torch._C": ("_no_such",), "torch.no": ("a",), "torch.nn": ("Module",)})
    said = r"does not have: torch\._C\._no_such, torch\.no\.a\. It is tested with torch 2\.13: pip install"
    with pytest.raises(MissingPackageError, match=said):
        installed.refuse_lacking()


def test_a_version_that_was_not_tested_is_named() -> None:
    other = SimpleNamespace(__name__="torch", __version__="2.99.0.dev2026+cpu")
    with pytest.warns(UserWarning, match=r"^torch 2\.99\.0\.dev2026\+cpu has not been tested with .*, torch 2\.13 has"):
        packages.check_version(other)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        packages.check_version(torch)


def test_the_warning_comes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the front end is first imported, and not again."""
    monkeypatch.setitem(packages.TESTED, "torch", "1.0")
    with pytest.warns(UserWarning, match=r"torch 1\.0 has"):
        importlib.reload(installed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.import_module("lowtide.torch.installed")
