"""Forms of blocks are timed once instead of five times: no test here asks which of two is the faster."""

from __future__ import annotations

import pytest

from lowtide.torch.model import costs


@pytest.fixture(autouse=True)
def _timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_MOST_TIMINGS", 1)
