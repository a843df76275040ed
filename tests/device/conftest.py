"""Tests that take `device` run on each device of `--device`: by default the CPU, and the one that is made for tests.

Torch counts devices when the first backward of a process runs, so that device has to be there before. That is why these
tests run by themselves, as `make test` does it; beside others they are skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.device import tide

_HERE = Path(__file__).parent


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        # On the CPU most of it is tested elsewhere too.
        names = metafunc.config.getoption("--device") or [pytest.param("cpu", marks=pytest.mark.slow), tide.NAME]
        metafunc.parametrize("device", names, indirect=True)


def pytest_collection_finish(session: pytest.Session) -> None:
    alone = all(_HERE in item.path.parents for item in session.items)
    wanted = not session.config.getoption("--device")
    if alone and wanted and session.items and tide.compiler() is not None:
        tide.extension()


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """A device of those that were asked for."""
    if request.param == tide.NAME:
        request.getfixturevalue("the_tide")
    return torch.device(request.param)


@pytest.fixture(scope="session")
def the_tide() -> None:
    """The device that is made for tests."""
    if not tide.is_there():
        pytest.skip("needs a C++ compiler" if tide.compiler() is None else "run by itself: pytest tests/device")


@pytest.fixture(autouse=True)
def _the_same_random_numbers() -> None:
    torch.manual_seed(0)
