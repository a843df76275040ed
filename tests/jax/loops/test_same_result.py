"""Values, last carry, outputs and gradients of every kind of loop are those of `lax.scan`, in double precision."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import lowtide.jax as lt
from tests.jax.networks import NETWORKS, Network, differences, draw, outcome, quick

CLOSE = 1e-12  # of the greatest value; the sums of 1,009 steps are added in another order

KNOBS: dict[str, dict[str, Any]] = {
    "none": {},
    "base": {"base": 13},
    "checkpoints": {"checkpoints": 7},
    "budget": {"budget": "20%"},
    "plan": {},  # made below
    "reverse": {"reverse": True},
    "unroll": {"unroll": 2},
    "base, reverse": {"base": 32, "reverse": True},
    "base, unroll": {"base": 10, "unroll": 2},
    "checkpoints, reverse, unroll": {"checkpoints": 3, "reverse": True, "unroll": 2},
}
LENGTHS = (97, 400, 1009)
CASES = [(name, length, knob) for name in NETWORKS for length in LENGTHS for knob in KNOBS]
# Of each network four knobs: 44 cases, and every knob has four networks or more.
SAMPLE = {
    name: [(LENGTHS[n % 3], knob) for m, knob in enumerate(KNOBS) if (m - 3 * n) % 10 in (0, 3, 5, 8)]
    for n, name in enumerate(NETWORKS)
}


@cache
def plain(name: str, length: int, jit: Any, reverse: bool) -> dict[str, Any]:
    return outcome(NETWORKS[name](length), lax.scan, jit, reverse=reverse)


def check(name: str, length: int, knob: str, jit: Any) -> None:
    net, options = NETWORKS[name](length), dict(KNOBS[knob])
    if knob == "plan":
        options["plan"] = lt.plan_scan(
            lambda carry, x: net.step(net.params, carry, x), net.init, net.xs, net.length, checkpoints=11
        )
    found = outcome(net, lt.checkpointed_scan, jit, **options)
    assert differences(plain(name, length, jit, bool(options.get("reverse"))), found, CLOSE) == [], knob


@pytest.mark.long
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", SAMPLE)
def test_networks(name: str) -> None:
    for length, knob in SAMPLE[name]:
        check(name, length, knob, quick)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("name", "length", "knob"), CASES)
def test_networks_with_every_knob(name: str, length: int, knob: str) -> None:
    check(name, length, knob, jax.jit)


def small(length: int) -> Network:
    """Quick to compile; its output is not its carry."""

    def step(w: Any, h: Any, x: Any) -> Any:
        h = jnp.sin(h * w + x)
        return h, h * h

    return Network(step, draw(1, 3), draw(2, 3), draw(3, length, 3), length)


def check_length(length: int, which: slice = slice(None)) -> None:
    """Four knobs and the plain loop; which budget and base depends on the length, too."""
    net = small(length)
    expected = outcome(net, lax.scan)
    knobs: list[dict[str, Any]] = [
        {},
        {"base": 2 + length % 17},
        {"checkpoints": 1 + length % 6},
        {"budget": f"{20 + length % 60}%" if length > 60 else "1KiB"},
    ]
    for options in knobs[which]:
        assert differences(expected, outcome(net, lt.checkpointed_scan, **options), CLOSE) == [], options


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 7, 17, 64, 121, 199, 256, 300])
def test_lengths(length: int) -> None:
    check_length(length, slice(length % 2, None, 2))


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("length", range(301))
def test_every_length(length: int) -> None:
    check_length(length)


@pytest.mark.parametrize(
    ("dtype", "options"), [("bfloat16", {}), ("bfloat16", {"base": 8}), ("float16", {"checkpoints": 4})], ids=str
)
def test_half_precision(dtype: str, options: dict[str, Any]) -> None:
    """Types are kept, and numbers are as near as so few digits allow: sums of 60 steps, each rounded to 2**-8."""
    net = small(60)
    params, init, xs = jax.tree.map(lambda leaf: leaf.astype(dtype), (net.params, net.init, net.xs))
    net = Network(net.step, params, init, xs, net.length)
    expected, found = outcome(net, lax.scan), outcome(net, lt.checkpointed_scan, **options)
    for name in expected.keys() - {"form"}:
        assert found[name].dtype == expected[name].dtype
        a, b = (side[name].astype(np.float32) for side in (expected, found))
        assert np.abs(a - b).max() <= 0.1 * np.abs(a).max(), name
