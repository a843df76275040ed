"""The spiking network in JAX, wider and through more steps; memory is what XLA allocates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lowtide.jax as lt
from lowtide.demo import programs
from lowtide.demo.contest import PLAIN, Contest, Tool, with_lowtide
from lowtide.plan import Plan

FAST, SLOW, LEAK = math.exp(-1 / 5), math.exp(-1 / 10), -math.expm1(-1 / 20)
Scan = Callable[..., Any]


@jax.custom_jvp
def spike(x: jax.Array) -> jax.Array:
    """1 where x >= 0, else 0; its surrogate derivative is a triangle."""
    return (x >= 0).astype(x.dtype)


@spike.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    return spike(x), jnp.maximum(0.0, 0.3 - 0.3 * jnp.abs(x)) * dx


def step(weights: Any, carry: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    """Run one step of 1 ms: synapse, neurons, readout."""
    (enter, leave), (g, v, o) = weights, carry
    g = g * FAST + x @ enter
    v = v - spike(v - 1)
    v = v + LEAK * (g - v)
    o = o * SLOW + spike(v - 1) @ leave
    return (g, v, o), o


def nested(f: Any, init: Any, xs: jax.Array, segment: int) -> tuple[Any, Any]:
    """A scan of scans, the inner ones in `jax.checkpoint`, as one would write it by hand."""
    inner = jax.checkpoint(partial(jax.lax.scan, f), prevent_cse=False)
    carry, ys = jax.lax.scan(inner, init, xs.reshape(-1, segment, *xs.shape[1:]))
    return carry, ys.reshape(-1, *ys.shape[2:])


@contextmanager
def contest(*, quick: bool) -> Iterator[Contest]:
    """The example: 2,000 steps of 100 neurons, or fewer of both if `quick`."""
    steps, neurons, segment, budget = (60, 8, 6, "30%") if quick else (2_000, 100, 40, "2%")
    rng = np.random.default_rng(0)
    weights = tuple(
        jnp.asarray(rng.standard_normal(shape) * deviation, jnp.float32)
        for shape, deviation in (((80, neurons), 4 * math.sqrt(2 / 80)), ((neurons, 2), math.sqrt(2 / neurons)))
    )
    spikes = jnp.asarray(rng.random((steps, 64, 80)) < 0.005, jnp.float32)
    labels = jnp.asarray(rng.integers(2, size=64))
    init = tuple(jnp.zeros((64, width)) for width in (neurons, neurons, 2))

    def loss(weights: Any, spikes: jax.Array, scan: Scan) -> jax.Array:
        logits = jax.nn.log_softmax(scan(partial(step, weights), init, spikes)[1].mean(0))
        return -jnp.take_along_axis(logits, labels[:, None], 1).mean()

    scans: dict[Tool, Scan] = {
        PLAIN: jax.lax.scan,
        Tool(f"jax, every {segment} steps"): partial(nested, segment=segment),
        with_lowtide("no knob"): lt.checkpointed_scan,
        with_lowtide(f"budget={budget}"): partial(lt.checkpointed_scan, budget=budget),
    }

    def page() -> tuple[Plan, None]:
        return lt.plan_scan(partial(step, weights), init, spikes, budget=budget), None

    yield Contest(
        f"A spiking network of {neurons:,} neurons through {steps:,} steps, JAX",
        programs.NOTE,
        {
            tool: partial(programs.contestant, jax.grad(partial(loss, scan=scan)), weights, spikes)
            for tool, scan in scans.items()
        },
        perf_counter,
        repeats=1 if quick else 20,
        exact=False,
        page=page,
    )
