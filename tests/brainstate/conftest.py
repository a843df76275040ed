"""Every test begins with the same random numbers and steps of 1 ms; float64 is for those that ask for it."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 2)  # as tests/jax wants it; importing brainstate asks for a device

from tests.brainstate.partners import brainstate, u  # noqa: E402


@pytest.fixture(autouse=True)
def _surroundings() -> Iterator[None]:
    brainstate.random.seed(0)
    with brainstate.environ.context(dt=1.0 * u.ms):
        yield


@pytest.fixture
def x64() -> Iterator[None]:
    """Double precision for one test."""
    with jax.enable_x64(True), brainstate.environ.context(precision=64):
        yield
