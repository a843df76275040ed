"""Two devices on the CPU, and float64 for the tests that ask for it."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 2)  # before anything asks for a device


@pytest.fixture
def x64() -> Iterator[None]:
    """Double precision for one test."""
    with jax.enable_x64(True):
        yield
