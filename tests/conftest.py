"""Figures that a test measured are printed at the end of the run: record_property("figure", text)."""

from __future__ import annotations

import gc

import pytest
from hypothesis import settings

settings.register_profile("lowtide", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("lowtide")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lines are counted in the tests that are neither long nor slow: they reach all of them, and tracing takes time."""
    for item in items:
        if any(item.get_closest_marker(name) for name in ("long", "slow")):
            item.add_marker("no_cover")


def pytest_collection_finish() -> None:
    """The million objects of the frameworks are set aside, so that collecting garbage looks at what tests made."""
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
