"""Figures that a test measured are printed at the end of the run: record_property("figure", text)."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Generator

import pytest
from hypothesis import settings

settings.register_profile("lowtide", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("lowtide")

UNTRACED = ("long", "slow", "untraced")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        action="append",
        help="a device for the tests in tests/device, such as cuda; by default cpu and tide, a device made for them",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Lines are counted in the tests that are not marked so: these reach all of them, and tracing doubles the time.

    Fixtures are traced in any case. pytest-cov's own mark for this does nothing in a worker: two tracers are at work
    there, and it stops one.
    """
    traced = sys.gettrace(), threading.gettrace()
    if any(item.get_closest_marker(name) for name in UNTRACED):
        sys.settrace(None)
        threading.settrace(None)
    try:
        yield
    finally:
        sys.settrace(traced[0])
        threading.settrace(traced[1])


@pytest.fixture(scope="module", autouse=True)
def _set_aside() -> None:
    """The million objects of the frameworks are set aside, so that collecting garbage looks at what tests made.

    Once for each file, since much is imported only when it is used.
    """
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    figures = [
        text
        for report in terminalreporter.getreports("passed")
        for name, text in report.user_properties
        if name == "figure" and report.when == "call"
    ]
    if figures:
        terminalreporter.section("measured")
        for text in figures:
            terminalreporter.write_line(str(text))
