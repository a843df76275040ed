"""Loops as `lax.scan` has them: Python numbers for a carry, folds of the outputs, few steps, and plans made before."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import lowtide.jax as lt
from lowtide import InputError, Plan
from tests.jax.networks import NETWORKS, differences, draw, flat, outcome, quick, weighed

KNOBS: list[dict[str, Any]] = [{}, {"base": 4}, {"checkpoints": 2}]
every_knob = pytest.mark.parametrize("options", KNOBS, ids=str)
ALL = [(lt.scan, {"reverse": True}), *[(lt.checkpointed_scan, options) for options in KNOBS]]
every_loop = pytest.mark.parametrize(("loop", "options"), ALL, ids=lambda what: getattr(what, "__name__", str(what)))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "options"),
    [("gru", {}), ("keys", {"reverse": True}), ("units", {"unroll": 4}), ("dataclasses", {"unroll": True})],
    ids=str,
)
def test_plain_loops_are_lax_scan_to_the_last_bit(name: str, options: dict[str, Any]) -> None:
    net = NETWORKS[name](6)
    assert differences(outcome(net, lax.scan, **options), outcome(net, lt.scan, **options), within=0) == []


@every_loop
@pytest.mark.parametrize("init", [0, 0.0, True, 1j, (0, 0.5)], ids=repr)
def test_a_carry_may_begin_as_a_number(loop: Any, options: dict[str, Any], init: Any) -> None:
    """Its type, and whether it is a firm one, is what `lax.scan` makes of it."""

    def step(carry: Any, x: Any) -> Any:
        carry = jax.tree.map(lambda c: c * x, carry)
        return carry, carry

    rows = [jnp.arange(1, 6) > 0] if init is True else [jnp.arange(1.0, 6), jnp.arange(1, 6)]
    for xs in rows:

        def ours(xs: Any) -> Any:
            return loop(step, init, xs, **options)

        try:
            expected = quick(lambda xs: lax.scan(step, init, xs, reverse=options.get("reverse", False)))(xs)
        except TypeError:
            with pytest.raises(TypeError):
                ours(xs)
            continue
        found = quick(ours)(xs)
        assert differences(flat(expected), flat(found), within=1e-6) == []
        assert [leaf.weak_type for leaf in jax.tree.leaves(found)] == [
            leaf.weak_type for leaf in jax.tree.leaves(expected)
        ]


@pytest.mark.long
@every_knob
def test_a_gradient_through_a_carry_that_begins_as_a_number(options: dict[str, Any]) -> None:
    def run(loop: Any, w: Any, **options: Any) -> Any:
        total, ys = loop(lambda c, x: (c + w * x, c * x), 0.0, jnp.arange(7.0), **options)
        return total * total + ys.sum()

    expected = jax.value_and_grad(lambda w: run(lax.scan, w))(3.0)
    found = jax.value_and_grad(lambda w: run(lt.checkpointed_scan, w, **options))(3.0)
    assert differences(flat(expected), flat(found), within=1e-6) == []


@every_knob
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("reduce", "reverse"), [("sum", False), ("mean", True), ("last", True), ("fold", False)])
def test_outputs_are_folded(options: dict[str, Any], reduce: str, reverse: bool) -> None:
    """Against the stack, which the oracle folds afterwards, in the order of the steps."""

    def step(w: Any, h: Any, x: Any) -> Any:
        h = jnp.tanh(h * w + x)
        return h, {"h": h, "squared": (h * h).sum()}

    def fold(acc: Any, y: Any) -> Any:
        return jnp.maximum(acc, y["h"]) * 1.01

    def afterwards(ys: Any) -> Any:
        ys = jax.tree.map(lambda y: y[::-1], ys) if reverse else ys
        if reduce == "fold":
            return lax.scan(lambda acc, y: (fold(acc, y), None), jnp.full(3, -2.0), ys)[0]
        how: Any = {"sum": lambda y: y.sum(0), "mean": lambda y: y.mean(0), "last": lambda y: y[-1]}
        return jax.tree.map(how[reduce], ys)

    def plain(w: Any, xs: Any) -> Any:
        carry, ys = lax.scan(lambda h, x: step(w, h, x), jnp.zeros(3), xs, reverse=reverse)
        results = carry, afterwards(ys)
        return weighed(results), results

    def folded(loop: Any, w: Any, xs: Any, **options: Any) -> Any:
        how: Any = (jnp.full(3, -2.0), fold) if reduce == "fold" else reduce
        results = loop(lambda h, x: step(w, h, x), jnp.zeros(3), xs, reduce=how, reverse=reverse, **options)
        return weighed(results), results

    given = draw(1, 3), draw(2, 13, 3)
    expected = flat(quick(jax.value_and_grad(plain, (0, 1), has_aux=True))(*given))
    for loop, knob in ((lt.checkpointed_scan, options), (lt.scan, {}))[: 1 if options else 2]:

        def run(w: Any, xs: Any, loop: Any = loop, knob: Any = knob) -> Any:
            return folded(loop, w, xs, **knob)

        found = flat(quick(jax.value_and_grad(run, (0, 1), has_aux=True))(*given))
        assert differences(expected, found, within=1e-13) == []


@pytest.mark.parametrize("reduce", ["sum", "mean", "last"])
def test_types_of_folded_outputs(reduce: str) -> None:
    """They are kept; whole numbers have no mean."""
    xs = {"float": jnp.arange(5.0), "half": jnp.arange(5.0).astype(jnp.bfloat16)}
    xs |= {} if reduce == "mean" else {"int": jnp.arange(5)}
    how: Any = {"sum": lambda y: y.sum(0), "mean": lambda y: y.mean(0), "last": lambda y: y[-1]}
    expected = jax.tree.map(how[reduce], xs)
    for options in KNOBS:
        found = lt.checkpointed_for_loop(lambda x: x, xs, reduce=reduce, **options)
        assert jax.tree.map(lambda leaf: leaf.dtype, found) == jax.tree.map(lambda leaf: leaf.dtype, expected)
        assert jax.tree.all(jax.tree.map(jnp.allclose, found, expected))


@every_knob
def test_no_steps(options: dict[str, Any]) -> None:
    def step(h: Any, x: Any) -> Any:
        return h * x, {"y": h + x, "n": None}

    def run(loop: Any, h: Any, xs: Any, **options: Any) -> Any:
        h, ys = loop(step, h, xs, **options)
        return h.sum() + ys["y"].sum(), (h, ys)

    given = jnp.ones((2, 3)), jnp.ones((0, 3))
    expected = jax.value_and_grad(lambda *v: run(lax.scan, *v), (0, 1), has_aux=True)(*given)
    found = jax.value_and_grad(lambda *v: run(lt.checkpointed_scan, *v, **options), (0, 1), has_aux=True)(*given)
    assert differences(flat(expected), flat(found), within=0) == []
    assert lt.checkpointed_scan(step, given[0], given[1], reduce="sum", **options)[1]["y"].shape == (2, 3)
    for reduce in ("mean", "last"):
        with pytest.raises(InputError, match="of no steps has no value"):
            lt.checkpointed_scan(step, *given, reduce=reduce, **options)
    assert lt.checkpointed_for_loop(lambda x: x * 2, jnp.ones((0, 3)), **options).shape == (0, 3)


@every_knob
def test_one_step(options: dict[str, Any]) -> None:
    def run(loop: Any, w: Any, **options: Any) -> Any:
        h, ys = loop(lambda h, x: (h * w + x, h * w), jnp.ones(3), jnp.ones((1, 3)), **options)
        return (h * h).sum() + ys.sum()

    expected = jax.value_and_grad(lambda w: run(lax.scan, w))(2.0)
    found = jax.value_and_grad(lambda w: run(lt.checkpointed_scan, w, **options))(2.0)
    assert differences(flat(expected), flat(found), within=1e-6) == []


@pytest.mark.parametrize("options", [{"unroll": True}, {"base": 5, "unroll": 100}], ids=str)
@pytest.mark.parametrize("length", [1, 2, 7])
def test_unrolled_as_far_as_it_goes(options: dict[str, Any], length: int) -> None:
    def run(loop: Any, w: Any, **options: Any) -> Any:
        h, ys = loop(lambda h, x: (jnp.sin(h * w + x), h), jnp.ones(3), jnp.ones((length, 3)), **options)
        return (h * h).sum() + ys.sum()

    expected = quick(jax.value_and_grad(lambda w: run(lax.scan, w)))(2.0)
    for loop in (lt.checkpointed_scan, lt.scan):
        knobs = {name: value for name, value in options.items() if loop is not lt.scan or name == "unroll"}
        found = quick(jax.value_and_grad(lambda w, loop=loop, knobs=knobs: run(loop, w, **knobs)))(2.0)
        assert differences(flat(expected), flat(found), within=1e-5) == []


@pytest.mark.long
@every_knob
def test_loops_without_a_carry(options: dict[str, Any]) -> None:
    def f(x: Any, more: Any) -> Any:
        return {"sum": x + more["a"], "sin": jnp.sin(x)}

    xs, more = jnp.arange(9.0), {"a": jnp.arange(9)}
    expected = {"sum": xs + more["a"], "sin": jnp.sin(xs)}
    for loop in (lt.for_loop, lt.checkpointed_for_loop):
        knobs = options if loop is lt.checkpointed_for_loop else {}
        found = loop(f, xs, more, **knobs)
        assert differences(flat(expected), flat(found), within=1e-6) == []
        backwards = loop(f, xs, more, reverse=True, **knobs)
        assert differences(flat(expected), flat(backwards), within=1e-6) == []
        assert jnp.array_equal(loop(lambda: jnp.ones(2), length=4, **knobs), jnp.ones((4, 2)))
    gradient = jax.grad(lambda w: lt.checkpointed_for_loop(lambda x: jnp.sin(w * x), xs, **options).sum())(0.5)
    assert gradient == pytest.approx(float((xs * jnp.cos(0.5 * xs)).sum()), rel=1e-5)


def test_numpy_arrays_and_lists_are_inputs() -> None:
    rows = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    expected = lax.scan(lambda h, x: (h + x, h), np.zeros(3, np.float32), rows)
    found = lt.checkpointed_scan(lambda h, x: (h + x, h), np.zeros(3, np.float32), rows, base=2)
    assert differences(flat(expected), flat(found), within=0) == []


SHAPES = jax.ShapeDtypeStruct((16, 8), jnp.float32), jax.ShapeDtypeStruct((500, 16, 8), jnp.float32)


def tanh_step(w: Any) -> Any:
    return lambda h, x: (jnp.tanh(h @ w + x), h.sum())


@pytest.mark.parametrize("options", [{}, {"base": 20}, {"checkpoints": 5}, {"budget": "20%"}], ids=str)
def test_types_are_enough_for_a_plan(options: dict[str, Any]) -> None:
    """And nothing is run: the arrays would give the same one."""
    w = jnp.eye(8)
    planned = lt.plan_scan(tanh_step(w), *SHAPES, **options)
    h, xs = (jnp.zeros(shape.shape, shape.dtype) for shape in SHAPES)
    assert planned == lt.plan_scan(tanh_step(w), h, xs, **options)
    assert (len(planned.chain), planned.chain[0].state) == (500, 16 * 8 * 4)
    # The tape: the state before the product, and what tanh and the sum keep.
    assert planned.chain[0].tape < 4 * 16 * 8 * 4
    assert Plan.from_json(planned.to_json()) == planned
    hash(planned)


def test_what_gradients_are_of_decides_what_is_taped() -> None:
    w = jnp.eye(8)
    tapes = {}
    for wrt in (("closure",), ("init",), ("xs",), ("closure", "init", "xs"), ()):
        tapes[wrt] = lt.plan_scan(tanh_step(w), *SHAPES, wrt=wrt).chain[0].tape
    assert tapes["init",] <= tapes["closure",]
    assert max(tapes.values()) == tapes["closure", "init", "xs"]


@every_knob
def test_reversed_loops_read_and_write_from_the_last_place_on(options: dict[str, Any]) -> None:
    def weigh(scan: Any, **options: Any) -> Any:
        def loss(xs: Any) -> Any:
            ys = scan(lambda h, x: (jnp.sin(h + x), h * x), 0.5, xs, reverse=True, **options)[1]
            return jnp.sum(ys * jnp.arange(1.0, 7.0)), ys

        return jax.jit(jax.grad(loss, has_aux=True))(jnp.linspace(0.1, 0.9, 6))

    for expected, found in zip(weigh(lax.scan), weigh(lt.checkpointed_scan, **options), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_what_is_a_row_of_the_inputs_is_read_again_and_not_taped() -> None:
    def step(h: Any, x: Any) -> Any:
        return h * x, h.sum()

    plan = lt.plan_scan(step, *SHAPES, wrt=("init", "xs"))
    assert plan.chain[0].tape == plan.chain[0].state == SHAPES[0].size * SHAPES[0].dtype.itemsize


def test_plans_of_loops_without_a_carry() -> None:
    w = jnp.ones((8, 8))
    planned = lt.plan_for_loop(lambda x: jnp.sin(x @ w), SHAPES[1], budget="30%")
    assert (len(planned.chain), planned.chain[0].state) == (500, 1)


@every_knob
def test_a_plan_from_json_is_followed(options: dict[str, Any]) -> None:
    def run(w: Any, **options: Any) -> Any:
        h, ys = lt.checkpointed_scan(tanh_step(w), jnp.ones((2, 3)), jnp.ones((40, 2, 3)), **options)
        return h.sum() + ys.sum()

    w = jnp.eye(3) * 0.5
    plan = lt.plan_scan(tanh_step(w), jnp.ones((2, 3)), jnp.ones((40, 2, 3)), **options)
    again = Plan.from_json(plan.to_json())
    with_knob, with_plan = (quick(jax.grad(lambda w, o=o: run(w, **o))) for o in (options, {"plan": again}))
    assert with_knob.lower(w).as_text() == with_plan.lower(w).as_text()


def test_a_plan_may_be_a_static_argument() -> None:
    def run(w: Any, plan: Plan) -> Any:
        return lt.checkpointed_scan(tanh_step(w), jnp.ones((2, 3)), jnp.ones((40, 2, 3)), plan=plan)[1].sum()

    w = jnp.eye(3) * 0.5
    plan = lt.plan_scan(tanh_step(w), jnp.ones((2, 3)), jnp.ones((40, 2, 3)), checkpoints=3)
    gradient = quick(jax.grad(run), static_argnums=1)
    expected = jax.grad(lambda w: lax.scan(tanh_step(w), jnp.ones((2, 3)), jnp.ones((40, 2, 3)))[1].sum())(w)
    assert differences(flat(expected), flat(gradient(w, plan)), within=1e-5) == []
