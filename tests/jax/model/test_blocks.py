"""Which entries of a pytree are taken for blocks."""

from __future__ import annotations

from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowtide.jax as lt
from lowtide.jax.model.blocks import chosen_blocks, found_blocks
from lowtide.planners.blocks import Blocks

W, B = jnp.ones((2, 2)), jnp.ones(2)
KEY = jax.random.key(0)


def linear() -> Any:
    return equinox.nn.Linear(2, 2, key=KEY)


STACK = equinox.nn.Sequential([linear(), equinox.nn.Lambda(jnp.tanh), linear(), equinox.nn.Sequential([linear()] * 2)])
TREES: dict[str, tuple[Any, list[str]]] = {
    "pairs": ([(W, B)] * 3, ["0", "1", "2"]),
    "arrays in a list": ([W, W], ["0", "1"]),
    "one layer": ((W, B), []),
    "arrays in a tuple": ((W, W), []),
    "arrays under names": ({"w1": W, "w2": W}, []),
    "one array": (W, []),
    "a list of one": ({"blocks": [{"w": W}]}, ["blocks.0"]),
    "a list of one array": ([W], []),
    "nothing": ({}, []),
    "no arrays": ([3.0, 4.0], []),
    "between others": (
        {"table": W, "blocks": [{"w": W, "more": [W, W]}] * 2, "head": (W, B)},
        ["blocks.0", "blocks.1"],
    ),
    "in a tuple": (({"e": W}, [(W, B)] * 2, {"h": W}), ["1.0", "1.1"]),
    "lists of lists": ([[{"w": W}] * 2] * 2, ["0.0", "0.1", "1.0", "1.1"]),
    "numbered": (
        {"params": {"Dense_0": {"k": W}, "Dense_1": {"k": W}, "out": {"k": W}}},
        ["params.Dense_0", "params.Dense_1"],
    ),
    "not alike": ([{"a": W}, {"b": W}], []),
    "equinox": (STACK, ["layers.0", "layers.2", "layers.3.layers.0", "layers.3.layers.1"]),
    "attributes": (equinox.nn.MLP(2, 2, 2, 1, key=KEY), ["layers.0", "layers.1"]),
}


@pytest.mark.parametrize("name", TREES)
def test_blocks_are_entries_that_are_alike(name: str) -> None:
    tree, names = TREES[name]
    assert found_blocks(tree) == names


def test_patterns_choose_the_outermost() -> None:
    assert chosen_blocks(STACK, "layers.*") == ["layers.0", "layers.2", "layers.3"]
    assert chosen_blocks(STACK, ["layers.0", "layers.3.*.1"]) == ["layers.0", "layers.3.layers.1"]


@pytest.mark.long
def test_names_that_begin_like_those_of_outside_parts() -> None:
    """They are planned under a name that cannot be mistaken."""

    def loss(params: Any, x: Any) -> Any:
        for weight in params["(blocks)"]:
            x = x + jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    params = {"(blocks)": [jnp.eye(16) for _ in range(4)]}
    plan = lt.plan_model(loss, params, jnp.ones((256, 16)), peak="70%")
    assert [plan.chain.names[k] for k in plan.chain.blocks()] == [f"(blocks).{k}" for k in range(4)]
    assert isinstance(plan.schedule, Blocks)
    assert any(plan.schedule.options)
    found = jax.grad(lt.apply(plan, loss))(params, jnp.ones((256, 16)))
    expected = jax.grad(loss)(params, jnp.ones((256, 16)))
    np.testing.assert_allclose(found["(blocks)"][0], expected["(blocks)"][0], rtol=1e-6)
