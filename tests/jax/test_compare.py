"""With Lowtide and without it: what differs is said, what does not is not, and nothing is left behind."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import lowtide.jax as lt
from lowtide import FunctionError, InputError, Receipt
from lowtide.interface.comparison import Comparison
from lowtide.jax.compare import _compared


def _loss(p: Any, h: Any, *, xs: Any = None) -> Any:
    def step(h: Any, x: Any) -> Any:
        h = jnp.tanh(h @ p["w"] + (0 if x is None else x))
        return h, h

    return lt.checkpointed_scan(step, h, xs, 60, checkpoints=4)[0]


@pytest.mark.long
def test_it_compares_every_argument() -> None:
    found = lt.compare_gradients(_loss, {"w": jnp.eye(8) / 2}, jnp.ones((16, 8)), xs=jnp.ones((60, 16, 8)))
    assert [row.name for row in found.rows] == [
        "the result",
        "gradient of argument [0]['w']",
        "gradient of argument [1]",
        "gradient of keyword ['xs']",
    ]
    assert found.same
    assert found.relative < 1e-5
    assert found.lowtide_bytes < found.plain_bytes
    assert "of temporaries" in str(found)


@pytest.mark.long
def test_a_jitted_function_is_traced_anew_and_stays_what_it_was() -> None:
    fn = jax.jit(_loss)
    args = ({"w": jnp.eye(64) / 2}, jnp.ones((64, 64)))

    def temp() -> int:
        compiled = jax.jit(jax.grad(lambda p, h: fn(p, h).sum())).lower(*args).compile()
        memory: Any = compiled.memory_analysis()
        return int(memory.temp_size_in_bytes)

    before = temp()
    found = lt.compare_gradients(fn, *args)
    assert found.plain_bytes > 2 * found.lowtide_bytes
    assert temp() == before


def test_numbers_are_arguments_too() -> None:
    assert lt.compare_gradients(lambda x: lt.scan(lambda c, _: (jnp.sin(c), None), x, None, 9)[0], 3.0).same


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2.0], [1.0, 2.1], False),
        ([1.0, 1.0], [math.nan, 1.0], False),
        ([math.nan, 1.0], [math.nan, 1.0], True),
        ([math.inf, 1.0], [math.inf, 1.0], True),
        ([math.inf, 1.0], [-math.inf, 1.0], False),
        ([1.0, 1.0], [math.inf, 1.0], False),
        ([0.0], [0.0], True),
        ([0.0], [1e-30], False),
        ([], [], True),
    ],
)
def test_what_is_the_same(one: list[float], other: list[float], same: bool) -> None:
    row = _compared("it", np.array(one), np.array(other))
    assert Comparison((row,), Receipt(), Receipt()).same is same
    assert ("the same" in str(row)) is same


def test_single_precision_is_held_to_less() -> None:
    one = np.array([1.0], np.float32)
    assert _compared("it", one, one + np.float32(1e-5)).rounding == 1e-3
    assert _compared("it", one.astype(np.float64), one).rounding == 1e-12


def _root(a: Any) -> Any:
    """Newton's iteration for the square root."""

    def moves(carry: Any) -> Any:
        return jnp.abs(carry[0] - carry[1]) > 1e-6

    def body(carry: Any) -> Any:
        return (carry[0] + a / carry[0]) / 2, carry[0]

    return lt.checkpointed_while_loop(moves, body, (a, 2 * a), checkpoints=4, max_steps=50)[0]


def test_a_while_loop_has_nothing_to_be_compared_with() -> None:
    with pytest.raises(FunctionError, match=r"no reverse derivative; compare jax.grad\(fn\) with finite differences"):
        lt.compare_gradients(_root, 9.0)
    check_grads(_root, (9.0,), order=1, modes=["rev"], rtol=1e-2)  # as it says


@pytest.mark.long
def test_the_bounded_loop_is_compared() -> None:
    def root(a: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            x, before = carry
            return jax.tree.map(
                lambda new, old: jnp.where(jnp.abs(x - before) > 1e-6, new, old), ((x + a / x) / 2, x), carry
            ), None

        return lt.checkpointed_scan(step, (a, 2 * a), None, 50, checkpoints=4)[0][0]

    found = lt.compare_gradients(root, 9.0)
    assert found.same
    assert float(jax.grad(root)(9.0)) == pytest.approx(1 / 6, rel=1e-4)


def test_other_errors_are_the_functions_own() -> None:
    def fails(x: Any) -> Any:
        raise ValueError(f"something else about {x.shape}")

    with pytest.raises(ValueError, match=r"something else about \(\)"):
        lt.compare_gradients(fails, 3.0)


def test_refusals() -> None:
    with pytest.raises(TypeError, match="fn=None is a NoneType"):
        lt.compare_gradients(None, 1.0)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(InputError, match="none of fn's arguments is a float array"):
        lt.compare_gradients(lambda n: n * 1.0, 3)
    with pytest.raises(InputError, match="fn returned nothing that has a gradient"):
        lt.compare_gradients(lambda x: x > 0, 3.0)
