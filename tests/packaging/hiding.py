"""Packages that seem not to be installed, in this process."""

from __future__ import annotations

import sys

import pytest


def hide(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Let imports of these packages fail, as if they were not installed."""
    loaded = [name for name in sys.modules if name.partition(".")[0] in packages]
    for name in {*packages, *loaded}:
        monkeypatch.setitem(sys.modules, name, None)  # halts the import


def forget(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Let these modules, and those inside them, be imported afresh."""
    for name in list(sys.modules):
        if any(f"{name}.".startswith(f"{module}.") for module in modules):
            monkeypatch.delitem(sys.modules, name)
