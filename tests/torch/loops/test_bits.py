"""Outputs, final state, random states and every gradient equal the plain Python loop's to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lowtide.torch as lt
from tests.torch.networks import NETWORKS, differences, outcome, plain

KNOBS: dict[str, dict[str, Any]] = {
    "base 6": {"base": 6},
    **{f"checkpoints {k}": {"checkpoints": k} for k in range(1, 6)},
    "budget": {"budget": 40_000},
    "no knob": {},
    "reverse": {"base": 5, "reverse": True},
    "sum": {"checkpoints": 3, "reduce": "sum"},
    "mean": {"base": 4, "reduce": "mean"},
    "last": {"checkpoints": 2, "reduce": "last"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("knob", KNOBS)
@pytest.mark.parametrize("name", NETWORKS)
def test_everything_equals_the_plain_loop(name: str, knob: str, dtype: torch.dtype) -> None:
    options = KNOBS[knob]
    oracle = {key: options[key] for key in ("reverse", "reduce") if key in options}
    expected, _ = outcome(lambda: NETWORKS[name](23, dtype), lambda net: plain(net, **oracle))
    found, _ = outcome(
        lambda: NETWORKS[name](23, dtype), lambda net: lt.checkpointed_scan(net.counted, net.init, net.xs, **options)
    )
    assert differences(expected, found) == []
