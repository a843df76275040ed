"""Every test begins with the same random numbers, whichever ran before it, and times a form of a block once."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lowtide.torch.model import costs


@pytest.fixture(autouse=True)
def _the_same_random_numbers() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  (what layers use)


@pytest.fixture(autouse=True)
def _timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of five times: no test here asks which of two forms is the faster."""
    monkeypatch.setattr(costs, "_MOST_TIMINGS", 1)
