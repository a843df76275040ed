"""Tests that take `device` run on each device of `--device`: by default the CPU, and the one that is made for tests."""

from __future__ import annotations

import pytest
import torch

from tests.device import tide


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        names = metafunc.config.getoption("--device") or ["cpu", tide.NAME]
        metafunc.parametrize("device", [pytest.param(name, id=name) for name in names], indirect=True)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """A device of those that were asked for."""
    if request.param == tide.NAME:
        request.getfixturevalue("the_tide")
    return torch.device(request.param)


@pytest.fixture(scope="session")
def the_tide() -> None:
    """The device that is made for tests."""
    if tide.compiler() is None:
        pytest.skip("no C++ compiler")
    tide.extension()


@pytest.fixture(autouse=True)
def _the_same_random_numbers() -> None:
    torch.manual_seed(0)
