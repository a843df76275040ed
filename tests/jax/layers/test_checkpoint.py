"""`checkpoint` does what `jax.checkpoint` does, with its signature, and saves memory on the CPU too."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowtide.jax as lt
from lowtide.errors import InputError


@pytest.mark.long
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


def test_static_arguments_are_seen_as_they_are() -> None:
    seen: list[Any] = []

    def power(n: int, x: Any, *, m: int = 1) -> Any:
        seen.append((n, m))
        return x**n * m

    for places in (0, (0,), -2):
        run = lt.checkpoint(power, static_argnums=places, static_argnames="m")
        assert jax.grad(lambda x, run=run: run(3, x, m=2))(2.0) == 24.0
    assert set(seen) == {(3, 2)}
    with pytest.raises(InputError, match="names argument 2 of a call with 2"):
        lt.checkpoint(power, static_argnums=2)(3, 2.0)


WEIGHTS = jnp.linspace(-1.0, 1.0, 5)


def wave(x: Any, by: dict[str, Any]) -> Any:
    return {"y": jnp.sin(x * WEIGHTS) * by["a"] + jnp.cos(x), "none": None}


def looped(x: Any, by: dict[str, Any]) -> Any:
    turned, rows = jax.lax.scan(lambda x, w: (jnp.sin(x * w), x), x * jnp.ones(5), WEIGHTS)
    return {"y": turned * by["a"] + jnp.cos(rows).sum(0)}


TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "plain": lambda f: f(1.5),
    "grad": lambda f: jax.grad(lambda x: f(x).sum())(WEIGHTS),
    "jit": lambda f: jax.jit(jax.grad(lambda x: f(x).sum()))(WEIGHTS),
    "vmap": lambda f: jax.vmap(jax.grad(lambda x: f(x).sum()))(jnp.ones((3, 5))),
    "jvp": lambda f: jax.jvp(f, (WEIGHTS,), (WEIGHTS,)),
    "linearize": lambda f: jax.linearize(f, WEIGHTS)[1](WEIGHTS),
    "hessian": lambda f: jax.hessian(lambda x: f(x).sum())(WEIGHTS),
    "twice": lambda f: jax.grad(lambda x: jnp.sum(jax.grad(lambda x: f(x).sum())(x) ** 2))(WEIGHTS),
    "scan": lambda f: jax.grad(lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 3)[0].sum())(WEIGHTS),
    "nested": lambda f: jax.grad(lambda x: lt.checkpoint(lambda x: f(f(x)))(x).sum())(WEIGHTS),
    "closed over": lambda f: jax.grad(lambda w: lt.checkpoint(lambda x: f(x * w))(WEIGHTS).sum())(2.0),
}


@pytest.mark.parametrize("how", TRANSFORMS)
@pytest.mark.parametrize("fun", [wave, looped])
def test_every_transform(how: str, fun: Callable[..., Any]) -> None:
    taken = TRANSFORMS[how]
    ours = taken(lambda x: lt.checkpoint(fun)(x, by={"a": 3.0})["y"])
    theirs = taken(lambda x: jax.checkpoint(fun)(x, by={"a": 3.0})["y"])
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6), ours, theirs)


def test_effects_and_comparing() -> None:
    def noisy(x: Any) -> Any:
        jax.debug.callback(lambda _: None, x)
        return jnp.sin(x)

    assert jax.grad(lt.checkpoint(noisy))(0.0) == 1.0
    assert lt.compare_gradients(lambda x: lt.checkpoint(noisy)(x).sum(), WEIGHTS).same


@pytest.mark.long
def test_a_rerun_waits_until_it_is_needed() -> None:
    """Four parts of four layers, batch 4096, width 64: a quarter of the layers' tapes at a time."""
    weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 16
    x = jax.ShapeDtypeStruct((4096, 64), jnp.float32)

    def part(weights: Any, x: Any) -> Any:
        for w in weights:
            x = jax.nn.gelu(x @ w)
        return x

    def bytes_of(wrap: Any) -> int:
        def loss(weights: Any, x: Any) -> Any:
            for k in range(0, 16, 4):
                x = wrap(part)(weights[k : k + 4], x)
            return jnp.sum(x**2)

        compiled: Any = jax.jit(jax.grad(loss)).lower(weights, x).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    assert bytes_of(lt.checkpoint) <= 0.55 * bytes_of(jax.checkpoint)


@pytest.mark.long
def test_rows_that_a_loop_writes_are_not_made_before_it_runs() -> None:
    """Four loops of three steps: the tape of one of them at a time, and what the others start from."""
    weights = [jax.ShapeDtypeStruct((12, 12), jnp.float32)] * 4
    x = jax.ShapeDtypeStruct((256, 12), jnp.float32)

    def loop(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, _: (jax.nn.gelu(x @ w), None), x, None, 3)[0]

    def bytes_of(fun: Any) -> int:
        step = jax.grad(lambda weights, x: functools.reduce(lambda x, w: fun(w, x), weights, x).sum())
        compiled: Any = jax.jit(step).lower(weights, x).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    assert bytes_of(lt.checkpoint(loop)) <= 0.4 * bytes_of(loop)
    elsewhere = jax.jit(jax.grad(lambda w, x: lt.checkpoint(loop)(w, x).sum())).trace(weights[0], x)
    assert "optimization_barrier" in elsewhere.lower(lowering_platforms=("tpu",)).as_text()


def test_refusals() -> None:
    with pytest.raises(InputError, match=r"arguments\[0\]\[1\] is a str; give arrays"):
        lt.checkpoint(lambda x, _: x)(1.0, "no")
    with pytest.raises(TypeError, match="fun returns a str; make it return arrays"):
        lt.checkpoint(lambda _: "no")(1.0)
    with pytest.raises(TypeError, match="fun=3 is a int, which cannot be called"):
        lt.checkpoint(3)  # type: ignore[arg-type]  # that is the point


@pytest.mark.long
def test_masks_that_are_drawn_from_closed_over_keys_wait_too() -> None:
    """Else all are drawn early: of three parts of two layers, each with a mask as large as its state."""
    weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 6
    keys, x = jax.ShapeDtypeStruct((6, 2), jnp.uint32), jax.ShapeDtypeStruct((4096, 64), jnp.float32)

    def loss(weights: Any, keys: Any, x: Any) -> Any:
        for start in range(0, 6, 2):

            def part(x: Any, start: int = start) -> Any:
                for w, key in zip(weights[start : start + 2], keys[start : start + 2], strict=True):
                    x = jax.nn.gelu(x @ w) * jax.random.bernoulli(key, 0.5, x.shape)
                return x

            x = lt.checkpoint(part)(x)
        return jnp.sum(x**2)

    compiled: Any = jax.jit(jax.grad(loss)).lower(weights, keys, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 17 * 4096 * 64 * 4
