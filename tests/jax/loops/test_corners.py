"""What a hostile reader found: each was wrong once."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType, PartitionSpec

import lowtide.jax as lt
from lowtide import FunctionError, InputError
from lowtide.jax.loops.step import as_lax_says
from tests.jax.networks import quick

KNOBS: list[dict[str, Any]] = [{}, {"base": 3}, {"checkpoints": 2}]


def _loss(w: Any, xs: Any, scan: Any = lt.checkpointed_scan, **knobs: Any) -> Any:
    carry, ys = scan(lambda c, x: (jnp.tanh(c * w) + x, c * w), jnp.ones(3), xs, **knobs)
    return jnp.sin(carry).sum() + jnp.square(ys).sum()


@pytest.mark.long
@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_nothing_is_left_behind(knobs: dict[str, Any]) -> None:
    def run(value: float) -> None:
        init = jnp.full(100_000, value)
        jax.grad(lambda i: lt.checkpointed_scan(lambda c, _: (jnp.sin(c), None), i, None, 4, **knobs)[0].sum())(init)

    run(0.0)
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    for k in range(3):
        run(float(k))
    gc.collect()
    assert sum(array.nbytes for array in jax.live_arrays()) <= before


@pytest.mark.long
@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_the_checks_of_jax_pass(knobs: dict[str, Any]) -> None:
    w, xs = jnp.ones(3), jnp.ones((7, 3))
    with jax.checking_leaks():
        quick(jax.grad(lambda w, xs: _loss(w, xs, **knobs)))(w, xs)
        jax.grad(jax.jit(lambda w, xs: _loss(w, xs, **knobs)))(w, xs)
        quick(lambda w, xs: _loss(w, xs, **knobs))(w, xs)
    with jax.enable_checks(True):
        quick(jax.grad(lambda w, xs: _loss(w, xs, **knobs)))(w, xs)


@pytest.mark.long
@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_a_gradient_that_ignores_its_cotangent(knobs: dict[str, Any]) -> None:
    @jax.custom_vjp
    def f(x: Any) -> Any:
        return x * 2

    f.defvjp(lambda x: (x * 2, None), lambda _, __: (jnp.full((2,), 7.0),))

    def loss(w: Any, scan: Any, **knobs: Any) -> Any:
        carry, ys = scan(lambda c, x: (c * 0.5 + x, f(w)), jnp.ones(2), jnp.ones((5, 2)), **knobs)
        return ys.sum() + carry.sum()

    found = jax.grad(lambda w: loss(w, lt.checkpointed_scan, **knobs))(jnp.ones(2))
    assert found.tolist() == jax.grad(lambda w: loss(w, lax.scan))(jnp.ones(2)).tolist() == [35.0, 35.0]


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_outputs_without_a_number_in_them(knobs: dict[str, Any]) -> None:
    carry, ys = lt.checkpointed_scan(lambda c, x: (c * 2, x), 1.0, jnp.zeros((4, 0)), **knobs)
    assert carry == 16.0
    assert ys.shape == (4, 0)
    gradient = jax.grad(lambda c: lt.checkpointed_scan(lambda c, x: (c * 2, x), c, jnp.zeros((4, 0)), **knobs)[0])(1.0)
    assert gradient == 16.0


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_a_number_takes_the_type_of_the_step(knobs: dict[str, Any]) -> None:
    single, byte = jnp.array(2.0, jnp.float32), jnp.array(2, jnp.int8)
    for init, by in ((1.0, single), (1, byte), (1, single)):

        def step(c: Any, _: None, by: Any = by) -> tuple[Any, None]:
            return c * by, None

        found, _ = lt.checkpointed_scan(step, init, None, 3, **knobs)
        plain: Any = lax.scan(step, init, None, 3)[0]
        assert (found.dtype, found) == (plain.dtype, plain)
    _, total = lt.checkpointed_scan(
        lambda c, x: (c, x), 1, jnp.ones(3, jnp.float32), reduce=(0.0, lambda a, y: a + y), **knobs
    )
    assert (total.dtype, total) == (jnp.float32, 3.0)


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_a_fold_under_shard_map(knobs: dict[str, Any]) -> None:
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    xs, w = jnp.ones((2, 7, 3)), jnp.ones(3)

    def gradient(scan: Any, **how: Any) -> Any:
        def one(w: Any, x: Any) -> Any:
            _, ys = scan(lambda c, x: (c * w + x, c * w), x[0, 0] * 0, x[0], **how)
            return ys.sum()[None]

        specs: Any = {"in_specs": (PartitionSpec(), PartitionSpec("d")), "out_specs": PartitionSpec("d")}
        mapped: Any = jax.shard_map(one, mesh=mesh, **specs)
        return quick(jax.grad(lambda w: mapped(w, xs).sum()))(w)

    assert jnp.allclose(gradient(lt.checkpointed_scan, reduce="sum", **knobs), gradient(lax.scan))


def test_a_carry_whose_mapped_axes_change_is_refused_as_by_lax() -> None:
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))

    def one(x: Any) -> Any:
        return lt.checkpointed_scan(lambda c, x: (c + x, None), jnp.zeros(()), x)[0][None]

    with pytest.raises(TypeError, match="carry"):
        jax.shard_map(one, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d"))(jnp.ones(4))


def test_base_and_callbacks_that_change_the_world() -> None:
    def step(c: Any, x: Any) -> Any:
        return c * io_callback(lambda v: v, jax.ShapeDtypeStruct((), jnp.float32), x), None

    with pytest.raises(FunctionError, match="base=2 cannot differentiate a step that calls io_callback"):
        lt.checkpointed_scan(step, 1.0, jnp.ones(5), base=2)


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_true_outputs_are_counted(knobs: dict[str, Any]) -> None:
    assert lt.checkpointed_for_loop(lambda x: x > 0, jnp.ones(4), reduce="sum", **knobs) == 4
    with pytest.raises(InputError, match="needs outputs that can be divided"):
        lt.checkpointed_for_loop(lambda x: x > 0, jnp.ones(4), reduce="mean", **knobs)


@pytest.mark.long
@pytest.mark.usefixtures("x64")
def test_a_gradient_of_a_tangent() -> None:
    """It needs base=, unless the loop's own values do not matter."""
    w, xs = jnp.full(3, 0.5), jnp.ones((7, 3))

    def second(scan: Any, **knobs: Any) -> Any:
        return quick(jax.grad(lambda w: jax.jvp(lambda w: _loss(w, xs, scan, **knobs), (w,), (w,))[1]))(w)

    assert jnp.allclose(second(lt.checkpointed_scan, base=3), second(lax.scan), rtol=1e-12)
    with pytest.raises(FunctionError, match="base="):
        second(lt.checkpointed_scan)


def test_what_lax_has_no_words_for() -> None:
    with pytest.raises(TypeError, match="carry"):
        lt.checkpointed_scan(lambda c, _: (jnp.int32(1), None), 0.5, None, 3)
    assert "make both the same" in str(as_lax_says(lambda: 1))


def test_names_and_numbers() -> None:
    with pytest.raises(InputError, match="xs='abc' has no axis to run over"):
        lt.checkpointed_scan(lambda c, x: (c, x), 1.0, "abc")
    with pytest.raises(InputError, match="wrt=None"):
        lt.plan_scan(lambda c, x: (c, x), 1.0, None, 3, wrt=None)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(InputError, match="wrt='xs'"):
        lt.plan_scan(lambda c, x: (c, x), 1.0, None, 3, wrt="xs")
    plan = lt.plan_scan(lambda c, x: (c, x), 1.0, None, 3)
    with pytest.raises(InputError, match="the plan is for 3 steps, the loop has 0"):
        lt.checkpointed_scan(lambda c, x: (c, x), 1.0, None, 0, plan=plan)
