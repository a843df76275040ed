"""`checkpoint` is `jax.checkpoint`, with its signature."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import lowtide.jax as lt


def test_the_tape_is_not_kept() -> None:
    def deep(x: Any) -> Any:
        for _ in range(20):
            x = jnp.sin(x)
        return x.sum()

    x = jnp.linspace(0.0, 1.0, 1000)
    assert jnp.array_equal(jax.grad(lt.checkpoint(deep))(x), jax.grad(deep)(x))
    kept = [len(jax.tree.leaves(jax.vjp(fun, x)[1])) for fun in (deep, lt.checkpoint(deep))]
    assert kept[0] >= 20
    assert kept[1] <= 2


def test_words_are_those_of_jax() -> None:
    theirs = inspect.signature(jax.checkpoint).parameters
    for name, parameter in inspect.signature(lt.checkpoint).parameters.items():
        assert theirs[name].kind == parameter.kind
        assert theirs[name].default == parameter.default
    assert set(theirs) - set(inspect.signature(lt.checkpoint).parameters) == {"concrete"}  # which is deprecated


def test_arguments_get_through() -> None:
    seen: list[type] = []

    def power(x: Any, n: int, m: int = 1) -> Any:
        seen.append(type(n))
        return x**n * m

    by_place = lt.checkpoint(power, static_argnums=1, policy=jax.checkpoint_policies.everything_saveable)
    assert jax.grad(lambda x: by_place(x, 3))(2.0) == 12.0
    assert set(seen) == {int}
    by_name = lt.checkpoint(power, static_argnames=("n", "m"), prevent_cse=False)
    assert jax.grad(lambda x: by_name(x, n=3, m=2))(2.0) == 24.0


def test_refusals() -> None:
    with pytest.raises(TypeError, match="fun=3 is a int, which cannot be called"):
        lt.checkpoint(3)  # type: ignore[arg-type]  # that is the point
