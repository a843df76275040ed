"""Every test begins with the same random numbers and steps of 1 ms; float64 is for those that ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 2)  # as tests/jax wants it


def partners() -> Any:
    """brainstate and its units, imported late: that asks for a device."""
    return import_module("tests.brainstate.partners")


@pytest.fixture(autouse=True)
def _surroundings() -> Iterator[None]:
    of = partners()
    of.brainstate.random.seed(0)
    with of.brainstate.environ.context(dt=1.0 * of.u.ms):
        yield


@pytest.fixture
def x64() -> Iterator[None]:
    """Double precision for one test."""
    with jax.enable_x64(True), partners().brainstate.environ.context(precision=64):
        yield
