"""Models whose training step is planned, and what tests ask of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import lowtide.jax as lt
from lowtide import BudgetError, Plan
from lowtide.planners.blocks import Blocks
from tests.jax.networks import draw


@dataclass(frozen=True)
class Case:
    """A loss with its parameters and arguments."""

    loss: Callable[..., Any]
    params: Any
    args: tuple[Any, ...]


def normal(x: Any) -> Any:
    apart = x - x.mean(-1, keepdims=True)
    return apart * jax.lax.rsqrt((apart**2).mean(-1, keepdims=True) + 1e-5)


def dropped(x: Any, key: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0)


def block(params: Any, x: Any, key: Any = None) -> Any:
    """Attention with two heads and two layers, each behind a norm and beside a shortcut."""
    heads = [(normal(x) @ params[name]).reshape(*x.shape[:2], 2, -1) for name in "qkv"]
    scores = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", heads[0], heads[1]))
    seen = jnp.einsum("bhst,bthd->bshd", scores, heads[2]).reshape(x.shape)
    x = x + checkpoint_name(seen @ params["o"], "attention")
    if key is not None:
        x = dropped(x, key)
    return x + jax.nn.gelu(checkpoint_name(normal(x) @ params["up"], "up")) @ params["down"]


def weights(seed: int, width: int) -> dict[str, Any]:
    square = {name: draw(seed + k, width, width, scale=0.2) for k, name in enumerate("qkvo")}
    return square | {"up": draw(seed + 8, width, 4 * width, scale=0.2), "down": draw(seed + 9, 4 * width, width)}


def transformer(count: int = 2, width: int = 16, batch: int = 4, tokens: int = 24) -> Case:
    """Tokens, blocks with dropout, and a table that is read at both ends."""
    params = {"table": draw(1, 11, width), "blocks": [weights(100 * k, width) for k in range(count)]}

    def loss(params: Any, tokens: Any, key: Any) -> Any:
        x = params["table"][tokens]
        for some, one in zip(params["blocks"], jax.random.split(key, count), strict=True):
            x = block(some, x, one)
        logits = jax.nn.log_softmax(normal(x) @ params["table"].T)
        return -jnp.mean(jnp.take_along_axis(logits, tokens[..., None], -1))

    return Case(loss, params, (jnp.arange(batch * tokens).reshape(batch, tokens) % 11, jax.random.key(7)))


def mlp(widths: tuple[int, ...] = (48, 32, 40, 24, 16, 36), batch: int = 512, function: Any = jax.nn.gelu) -> Case:
    pairs = enumerate(pairwise(widths))
    params = [(draw(k, a, b, scale=0.2), draw(90 + k, b)) for k, (a, b) in pairs]

    def loss(params: Any, x: Any) -> Any:
        for some, bias in params:
            x = function(x @ some + bias)
        return jnp.mean(x**2)

    return Case(loss, params, (draw(50, batch, widths[0]),))


class Block(equinox.Module):
    """Two layers behind a norm, with dropout, beside a shortcut."""

    norm: equinox.nn.LayerNorm
    up: equinox.nn.Linear
    down: equinox.nn.Linear
    dropout: equinox.nn.Dropout

    def __init__(self, width: int, key: Any) -> None:
        keys = jax.random.split(key)
        self.norm, self.dropout = equinox.nn.LayerNorm(width), equinox.nn.Dropout(0.2)
        self.up = equinox.nn.Linear(width, 4 * width, key=keys[0])
        self.down = equinox.nn.Linear(4 * width, width, key=keys[1])

    def __call__(self, x: Any, key: Any) -> Any:
        return x + self.dropout(self.down(jax.nn.gelu(self.up(self.norm(x)))), key=key)


class Net(equinox.Module):
    """Blocks between two layers."""

    first: equinox.nn.Linear
    layers: list[Block]
    last: equinox.nn.Linear

    def __init__(self, width: int, count: int, key: Any) -> None:
        first, *keys, last = jax.random.split(key, count + 2)
        self.first = equinox.nn.Linear(6, width, key=first)
        self.layers = [Block(width, key) for key in keys]
        self.last = equinox.nn.Linear(width, 3, key=last)

    def __call__(self, x: Any, key: Any) -> Any:
        x = self.first(x)
        for layer, one in zip(self.layers, jax.random.split(key, len(self.layers)), strict=True):
            x = layer(x, one)
        return self.last(x)


def net(width: int = 16, count: int = 2, batch: int = 96) -> Case:
    def loss(net: Any, x: Any, y: Any, key: Any) -> Any:
        return jnp.mean((jax.vmap(net)(x, jax.random.split(key, len(x))) - y) ** 2)

    like = equinox.filter_eval_shape(Net, width, count, jax.random.key(1))
    seeds = iter(range(100, 1000))
    # Random weights, without compiling equinox's own draws.
    params = jax.tree.map(lambda leaf: draw(next(seeds), *leaf.shape) / 4 if hasattr(leaf, "shape") else leaf, like)
    return Case(loss, params, (draw(1, batch, 6), draw(2, batch, 3), jax.random.key(5)))


def looped(count: int = 4, width: int = 12, batch: int = 256) -> Case:
    """Blocks that are loops of three steps."""
    params = [{"w": draw(k, width, width, scale=0.3)} for k in range(count)]

    def loss(params: Any, x: Any) -> Any:
        for some in params:
            x = jax.lax.fori_loop(0, 3, lambda _, x, some=some: jax.nn.gelu(x @ some["w"]), x)
        return jnp.mean(x**2)

    return Case(loss, params, (draw(9, batch, width),))


def tied(count: int = 4, width: int = 16, batch: int = 256) -> Case:
    """Blocks with scales of their own, and one matrix that all of them read, twice."""
    scales = [{"a": draw(k, width), "b": draw(50 + k, width)} for k in range(count)]
    params = {"shared": draw(99, width, 4 * width, scale=0.3), "blocks": scales}

    def loss(params: Any, x: Any) -> Any:
        for some in params["blocks"]:
            x = x + jax.nn.gelu(x * some["a"] @ params["shared"]) @ params["shared"].T * some["b"]
        return jnp.mean(x**2)

    return Case(loss, params, (draw(9, batch, width),))


CASES: dict[str, Callable[[], Case]] = {
    "small transformer": lambda: transformer(4),
    "small equinox": lambda: net(count=4),
    "loops": lambda: looped(6),
    "tied": tied,
    "transformer": lambda: transformer(8, 32, 4, 64),
    "mlp": lambda: mlp((217, 170, 143, 90, 98, 40, 47, 34, 69, 209), 1024),
    "equinox": lambda: net(64, 8, 512),
}


def total(compiled: Any) -> int:
    memory = compiled.memory_analysis()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(kept + memory.temp_size_in_bytes)


def compiled(loss: Any, case: Case, jit: Callable[..., Any] = jax.jit) -> tuple[Any, Any]:
    """The compiled gradient as users take it, and what it gives; `quick` is enough where only that is looked at."""
    floats, rest = equinox.partition(case.params, equinox.is_inexact_array)
    step: Any = jit(jax.value_and_grad(lambda floats, *args: loss(equinox.combine(floats, rest), *args)))
    program = step.lower(floats, *case.args).compile()
    return program, program(floats, *case.args)


def close(ours: Any, theirs: Any, rtol: float = 1e-12) -> None:
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert one.dtype == other.dtype
        scale = float(jnp.max(jnp.abs(other.astype(float))))
        np.testing.assert_allclose(one.astype(float), other.astype(float), rtol=rtol, atol=rtol * scale)


def least_of(case: Case, **more: Any) -> int:
    with pytest.raises(BudgetError) as caught:
        lt.plan_model(case.loss, case.params, *case.args, peak=1, **more)
    assert f"{caught.value.least:,} B" in str(caught.value)
    return caught.value.least


def expected(plan: Plan) -> int | None:
    """What the plan says was expected of its choice before it was compiled; None of what is compiled in any case."""
    found = [note for note in schedule_of(plan).notes if note.startswith("Before")]
    return int("".join(letter for letter in found[0] if letter.isdigit())) if found else None


def schedule_of(plan: Plan) -> Blocks:
    assert isinstance(plan.schedule, Blocks)
    return plan.schedule


def notes_of(plan: Plan) -> str:
    return " ".join(schedule_of(plan).notes)


def planned(case: Case, **more: Any) -> Plan:
    """A plan that runs something again."""
    plan = lt.plan_model(case.loss, case.params, *case.args, **{"peak": "75%"} | more)
    assert any(schedule_of(plan).options)
    return plan


def names_of(plan: Plan) -> list[str]:
    return [plan.chain.name(k) for k in range(len(plan.chain))]


SMALL = (12, 10, 14, 9)


@cache
def small() -> tuple[Case, Plan]:
    """A small model with the plan for the least peak, in double precision."""
    with jax.enable_x64(True):  # whichever test asks first
        case = mlp(SMALL, 64)
        return case, planned(case, peak=least_of(case))
