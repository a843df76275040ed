"""Outputs, final state, random states and every gradient equal the plain Python loop's to the last bit."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import lowtide.torch as lt
from tests.torch.networks import NETWORKS, differences, outcome, plain

KNOBS: dict[str, dict[str, Any]] = {
    "base 6": {"base": 6},
    **{f"checkpoints {k}": {"checkpoints": k} for k in range(1, 6)},
    "budget": {"budget": 60_000},
    "no knob": {},
    "reverse": {"base": 5, "reverse": True},
    "sum": {"checkpoints": 3, "reduce": "sum"},
    "mean": {"base": 4, "reduce": "mean"},
    "last": {"checkpoints": 2, "reduce": "last"},
}


# Every network with every knob, in one of the dtypes; in the other with the whole sweeps.
SWEEP = [
    pytest.param(name, knob, dtype, marks=() if (n + k + d) % 2 == 0 else pytest.mark.slow)
    for n, name in enumerate(NETWORKS)
    for k, knob in enumerate(KNOBS)
    for d, dtype in enumerate([torch.float32, torch.float64])
]


@cache
def _plainly(name: str, dtype: torch.dtype, **oracle: Any) -> dict[str, Any]:
    return outcome(lambda: NETWORKS[name](23, dtype), lambda net: plain(net, **oracle))[0]


@pytest.mark.untraced
@pytest.mark.parametrize(("name", "knob", "dtype"), SWEEP, ids=str)
def test_everything_equals_the_plain_loop(name: str, knob: str, dtype: torch.dtype) -> None:
    options = KNOBS[knob]
    oracle = {key: options[key] for key in ("reverse", "reduce") if key in options}
    expected = _plainly(name, dtype, **oracle)
    found, _ = outcome(
        lambda: NETWORKS[name](23, dtype), lambda net: lt.checkpointed_scan(net.counted, net.init, net.xs, **options)
    )
    assert differences(expected, found) == []
