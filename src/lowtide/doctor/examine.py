"""Runs the checks. Those of a framework run in a process of its own, so that a crash is a finding like any other."""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from lowtide import packages
from lowtide.doctor import planner_checks
from lowtide.doctor.findings import Fact, Finding, Outcome, from_line, to_line
from lowtide.errors import InputError, MissingPackageError

FRAMEWORKS = ("torch", "jax")
_CORE = "planners"


class Checks(Protocol):
    """The module of a framework's checks."""

    def devices(self) -> dict[str, Any]:
        """The devices that are found, by name; the framework's own name is not part of it."""

    def facts(self) -> Iterator[Fact]:
        """The framework's builds and devices, in words."""

    def checks(self, device: Any, *, quick: bool) -> dict[str, Callable[[], Outcome]]:
        """The checks of a device, by name."""


def everything(wanted: Sequence[str] | None, *, quick: bool) -> Iterator[Fact | Finding]:
    """What is found in all frameworks that are installed, or only on the devices that are wanted ("torch:cuda:1")."""
    for device in wanted or ():
        if device.partition(":")[0] not in FRAMEWORKS:
            raise InputError(f"--device {device}: write torch:cpu or jax:cpu:0, for example")
    if not wanted:
        for name, check in planner_checks.CHECKS.items():
            yield _finding(_CORE, name, check)
    for framework in FRAMEWORKS:
        only = [device for device in wanted or () if device.partition(":")[0] == framework]
        if packages.is_installed(framework) and (only or not wanted):
            yield from apart(framework, only, quick=quick)


def apart(framework: str, only: Sequence[str], *, quick: bool) -> Iterator[Fact | Finding]:
    """What is found in a framework, in a process of its own; what it prints otherwise goes to standard error."""
    code = f"from lowtide.doctor.examine import report; report({framework!r}, {list(only)!r}, quick={quick})"
    with subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None  # it is a pipe
        for line in process.stdout:
            found = from_line(line)
            if isinstance(found, Finding):
                print(f"{found.device}: {found.check}", file=sys.stderr)
            yield found
    if process.returncode:
        yield Finding(framework, "process", False, f"it ended with exit code {process.returncode}")


def report(framework: str, only: Sequence[str], *, quick: bool) -> None:
    """Print what is found in a framework, a line for each fact and each finding: the other end of `apart`."""
    lines = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        for found in here(framework, only, quick=quick):
            print(to_line(found), file=lines, flush=True)


def here(framework: str, only: Sequence[str], *, quick: bool) -> Iterator[Fact | Finding]:
    """What is found in a framework, in this process."""
    found: Checks = importlib.import_module(f"lowtide.doctor.{framework}_checks")
    yield from found.facts()
    devices = {f"{framework}:{name}": device for name, device in found.devices().items()}
    for name in only:
        if name not in devices:
            yield Finding(name, "device", False, f"there is no such device here; there is {', '.join(devices)}")
    for name, device in devices.items():
        if not only or name in only:
            for check, run in found.checks(device, quick=quick).items():
                yield _finding(name, check, run)


def _finding(device: str, check: str, run: Callable[[], Outcome]) -> Finding:
    """The outcome of a check; one that raises does not hold, unless a package is missing."""
    try:
        outcome = run()
    except MissingPackageError as error:
        outcome = Outcome(None, f"left out: {error}")
    except Exception as error:
        outcome = Outcome(False, f"{type(error).__name__}: {error}")
    return Finding(device, check, outcome.holds, outcome.text)
