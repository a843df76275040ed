"""The installation: versions, the machine in general terms, and what is missing. It names no paths and no hosts."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib import metadata

from lowtide import packages
from lowtide.doctor.findings import Fact
from lowtide.version import __version__


def facts() -> tuple[Fact, ...]:
    """What is known before any framework is imported."""
    return tuple(_facts())


def _facts() -> Iterator[Fact]:
    yield Fact("lowtide", __version__)
    yield Fact("Python", f"{platform.python_implementation()} {platform.python_version()}")
    yield Fact("system", f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores")
    for name in dict.fromkeys(("numpy", *packages.USED)):
        found = _version(name)
        if found is None:
            yield Fact(name, f"not installed: `{packages.command(name)}`")
        else:
            tested = packages.TESTED.get(name)
            yield Fact(name, found if tested in (None, packages.series(found)) else f"{found} (tested: {tested})")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
