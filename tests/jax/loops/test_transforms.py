"""Under JAX's transformations a checkpointed loop is `lax.scan`: batches, derivatives, devices, control flow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lowtide.jax as lt
from lowtide import FunctionError
from tests.jax.networks import differences, draw, flat, quick

pytestmark = pytest.mark.usefixtures("x64")

LENGTH, WIDTH = 23, 3
CLOSE = 1e-12
KNOBS: list[dict[str, Any]] = [{}, {"base": 5}, {"checkpoints": 3}]
PLANNED: list[dict[str, Any]] = [{}, {"checkpoints": 3}]
every_knob = pytest.mark.parametrize("options", KNOBS, ids=str)
planned = pytest.mark.parametrize("options", PLANNED, ids=str)

Scan = Callable[..., Any]


def step(w: Any, h: Any, x: Any) -> Any:
    h = jnp.tanh(h @ w + x)
    return h, h * x


def loss(scan: Scan, w: Any, h: Any, xs: Any) -> Any:
    h, ys = scan(partial(step, w), h, xs)
    return (h * h).sum() + jnp.sin(ys).sum()


def args(*batch: int) -> tuple[Any, Any, Any]:
    return draw(1, WIDTH, WIDTH, scale=0.5), draw(2, *batch, WIDTH), draw(3, LENGTH, *batch, WIDTH)


def agree(make: Callable[[Scan], Any], options: dict[str, Any], *given: Any, close: float = CLOSE) -> None:
    """What `make(scan)` computes is the same for the checkpointed loop as for the plain one."""
    expected = flat(quick(make(lax.scan))(*given))
    found = flat(quick(make(partial(lt.checkpointed_scan, **options)))(*given))
    assert differences(expected, found, close) == []


# Reverse mode


@pytest.mark.long
@every_knob
def test_gradients_without_jit(options: dict[str, Any]) -> None:
    expected = jax.grad(partial(loss, lax.scan), argnums=(0, 1, 2))(*args())
    found = jax.grad(partial(loss, partial(lt.checkpointed_scan, **options)), argnums=(0, 1, 2))(*args())
    assert differences(flat(expected), flat(found), CLOSE) == []


@every_knob
def test_a_pullback_can_be_called_again(options: dict[str, Any]) -> None:
    def make(scan: Scan) -> Any:
        def run(w: Any, h: Any, xs: Any, dh: Any, dys: Any) -> Any:
            results, pull = jax.vjp(lambda *some: scan(partial(step, some[0]), *some[1:]), w, h, xs)
            return results, pull((dh, dys)), pull((2 * dh, jnp.zeros_like(dys))), pull((dh * 0, dys))

        return run

    agree(make, options, *args(), draw(4, WIDTH), draw(5, LENGTH, WIDTH))


@every_knob
def test_jacobians(options: dict[str, Any]) -> None:
    agree(lambda scan: jax.jacrev(lambda w, h, xs: scan(partial(step, w), h, xs)[0], (0, 1)), options, *args())


@every_knob
def test_auxiliary_results(options: dict[str, Any]) -> None:
    def make(scan: Scan) -> Any:
        def run(w: Any, h: Any, xs: Any) -> Any:
            h, ys = scan(partial(step, w), h, xs)
            return h.sum(), {"h": h, "ys": ys, "n": jnp.argmax(ys)}

        return jax.value_and_grad(run, argnums=2, has_aux=True)

    agree(make, options, *args())


@every_knob
def test_only_outputs_or_only_the_carry_in_the_loss(options: dict[str, Any]) -> None:
    def make(scan: Scan) -> Any:
        def run(which: int, w: Any, h: Any, xs: Any) -> Any:
            return jnp.sin(scan(partial(step, w), h, xs)[which]).sum()

        return lambda *some: [jax.grad(partial(run, which), argnums=(0, 1, 2))(*some) for which in (0, 1)]

    agree(make, options, *args())


# Batches


@pytest.mark.parametrize(
    ("options", "in_axes"),
    [
        *[(options, (None, 0, 1)) for options in KNOBS],
        ({}, (0, None, None)),
        ({"base": 5}, (None, None, 1)),
        ({"checkpoints": 3}, (0, 0, 2)),
    ],
    ids=str,
)
def test_batches(options: dict[str, Any], in_axes: tuple[int | None, ...]) -> None:
    """The gradient of each example, in one program; what has no batch axis is shared."""
    w, h, xs = args(4)
    given = [w if in_axes[0] is None else jnp.stack([w, w * 0.5, w.T, -w])]
    given += [h[0] if in_axes[1] is None else h]
    given += [xs[:, 0] if in_axes[2] is None else jnp.moveaxis(xs, 1, in_axes[2])]
    agree(lambda scan: jax.vmap(jax.grad(partial(loss, scan), (0, 1, 2)), in_axes), options, *given)


@every_knob
def test_gradients_of_batches(options: dict[str, Any]) -> None:
    def make(scan: Scan) -> Any:
        def run(w: Any, h: Any, xs: Any) -> Any:
            return jax.vmap(partial(loss, scan), (None, 0, 1))(w, h, xs).sum()

        return jax.grad(run, argnums=(0, 1, 2))

    agree(make, options, *args(4))


@planned
def test_batches_of_batches_and_a_named_axis(options: dict[str, Any]) -> None:
    def centred(h: Any, x: Any) -> Any:
        h = jnp.sin(h + x)
        h = h - lax.pmean(h, "batch")
        return h, h

    def make(scan: Scan) -> Any:
        def run(h: Any, xs: Any) -> Any:
            return jnp.square(jax.vmap(partial(scan, centred), (0, 1), axis_name="batch")(h, xs)[1]).sum()

        return jax.grad(run)

    agree(make, options, *args(4)[1:])


# Derivatives of other kinds


def curved(scan: Scan, w: Any, h: Any, xs: Any) -> Any:
    """Few parameters, so that second derivatives are small."""
    h, ys = scan(lambda h, x: (jnp.sin(h * w + x), h * h), h, xs)
    return (h * h).sum() + ys.sum()


def forward_and_mixed(scan: Scan) -> Any:
    """Tangents alone, and tangents of gradients."""
    run = partial(curved, scan)

    def derivatives(*v: Any) -> Any:
        value, push = jax.linearize(run, *v)
        return {
            "jvp": jax.jvp(run, v, v),
            "of one argument": jax.jvp(lambda h: run(v[0], h, v[2]), v[1:2], v[:1]),
            "jacfwd": jax.jacfwd(run, (0, 1))(*v),
            "linearize": (value, push(*v), push(*(2 * a for a in v))),
            "jvp of grad": jax.jvp(jax.grad(run, (0, 1, 2)), v, v),
            "hessian": jax.hessian(run)(*v),
            "vmap of jvp": jax.vmap(lambda h: jax.jvp(partial(run, v[0], h), v[2:], v[2:]))(jnp.stack([v[1], v[0]])),
        }

    return derivatives


@pytest.mark.long
@every_knob
def test_forward_mode(options: dict[str, Any]) -> None:
    agree(forward_and_mixed, options, draw(1, WIDTH), draw(2, WIDTH), draw(3, LENGTH, WIDTH))


@pytest.mark.long
def test_with_base_every_derivative_can_be_taken() -> None:
    given = draw(1, WIDTH), draw(2, WIDTH), draw(3, LENGTH, WIDTH)

    def make(scan: Scan) -> Any:
        run = partial(curved, scan)

        def derivatives(*v: Any) -> Any:
            squared = jax.grad(lambda *v: sum((g * g).sum() for g in jax.grad(run, (0, 1, 2))(*v)), (0, 1, 2))
            of_tangents = jax.grad(lambda *v: jax.jvp(run, v, v)[1], (0, 2))
            return jax.jacrev(jax.jacrev(run, 2), 1)(*v), jax.jacrev(jax.grad(run))(*v), squared(*v), of_tangents(*v)

        return derivatives

    agree(make, {"base": 5}, *given)


@pytest.mark.long
@pytest.mark.parametrize("options", [{"base": 4, "reverse": True}, {"base": 7, "unroll": 3}], ids=str)
def test_second_derivatives_backwards_and_unrolled(options: dict[str, Any]) -> None:
    given = draw(1, WIDTH), draw(2, WIDTH), draw(3, LENGTH, WIDTH)
    reverse = options.get("reverse", False)

    def make(scan: Scan) -> Any:
        if scan is lax.scan:
            scan = partial(scan, reverse=reverse)
        return jax.hessian(partial(curved, scan), argnums=(0, 1))

    agree(make, options, *given)


@pytest.mark.parametrize(
    ("options", "jit"),
    [
        pytest.param({}, jax.jit, id="jit"),
        pytest.param({"checkpoints": 3}, lambda f: f, id="eager", marks=pytest.mark.long),
    ],
)
def test_a_gradient_of_the_gradient_with_a_plan_names_base(options: dict[str, Any], jit: Any) -> None:
    run = partial(curved, partial(lt.checkpointed_scan, **options))
    given = draw(1, WIDTH), draw(2, WIDTH), draw(3, LENGTH, WIDTH)
    for derivative in (
        jax.grad(lambda *v: jax.grad(run)(*v).sum()),
        jax.jacrev(jax.jacrev(run, 2), 2),
        jax.grad(lambda *v: jax.jvp(run, v, v)[1]),
    ):
        with pytest.raises(FunctionError, match=r"reverse mode.*base=") as caught:
            jit(derivative)(*given)
        assert isinstance(caught.value, TypeError)


# Inside other things


@every_knob
def test_inside_a_checkpoint(options: dict[str, Any]) -> None:
    policy = jax.checkpoint_policies.everything_saveable if "checkpoints" in options else None
    agree(
        lambda scan: jax.grad(jax.checkpoint(partial(loss, scan), policy=policy), (0, 1, 2)),
        options,
        *args(),
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("outer", "inner"),
    [({}, {"base": 2}), ({"base": 5}, {"checkpoints": 2}), ({"checkpoints": 3}, {}), ({"base": 5}, {"base": 2})],
    ids=str,
)
def test_a_loop_inside_a_loop(outer: dict[str, Any], inner: dict[str, Any]) -> None:
    def nested(scan: Scan, inside: Scan, w: Any, h: Any, xs: Any) -> Any:
        def block(h: Any, rows: Any) -> Any:
            h, ys = inside(partial(step, w), h, rows)
            return h * 0.9, ys.sum(0)

        h, ys = scan(block, h, xs)
        return (h * h).sum() + jnp.sin(ys).sum()

    given = draw(1, WIDTH, WIDTH, scale=0.5), draw(2, WIDTH), draw(3, 11, 5, WIDTH)
    expected = flat(quick(jax.grad(partial(nested, lax.scan, lax.scan), (0, 1, 2)))(*given))
    scans = partial(lt.checkpointed_scan, **outer), partial(lt.checkpointed_scan, **inner)
    found = flat(quick(jax.grad(partial(nested, *scans), (0, 1, 2)))(*given))
    assert differences(expected, found, CLOSE) == []


@pytest.mark.long
@every_knob
def test_inside_a_condition(options: dict[str, Any]) -> None:
    def make(scan: Scan) -> Any:
        def run(w: Any, h: Any, xs: Any, flag: Any) -> Any:
            return lax.cond(flag, partial(loss, scan), lambda w, h, xs: (w * w).sum(), w, h, xs)

        gradient = jax.value_and_grad(run, argnums=(0, 1, 2))
        return lambda *v: (gradient(*v, v[0][0, 0] < 9), gradient(*v, v[0][0, 0] > 9))

    agree(make, options, *args())


@every_knob
def test_inside_a_while_loop(options: dict[str, Any]) -> None:
    """Gradient descent as a loop on the device: the loop has no derivative, its body takes one."""

    def make(scan: Scan) -> Any:
        def descend(now: Any) -> Any:
            k, w, h, xs = now
            return k + 1, w - 0.01 * jax.grad(partial(loss, scan))(w, h, xs), h, xs

        return lambda w, h, xs: lax.while_loop(lambda now: now[0] < 4, descend, (0, w, h, xs))[1]

    agree(make, options, *args())


@pytest.mark.long
@every_knob
def test_inside_a_plain_scan(options: dict[str, Any]) -> None:
    def make(scan: Scan) -> Any:
        def run(w: Any, h: Any, xs: Any) -> Any:
            h, losses = lax.scan(lambda h, k: (h * 0.5, loss(scan, w * k, h, xs)), h, jnp.arange(3.0))
            return losses.sum() + h.sum()

        return jax.grad(run, (0, 1, 2))

    agree(make, options, *args())


# What the step is made of


@jax.custom_vjp
def clipped(x: Any) -> Any:
    """The identity; its gradient is kept small."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, dx: (jnp.clip(dx, -0.1, 0.1),))


@every_knob
def test_a_derivative_of_ones_own_inside_the_step(options: dict[str, Any]) -> None:
    def run(scan: Scan, w: Any, h: Any, xs: Any) -> Any:
        return loss(lambda f, h, xs: scan(lambda h, x: f(clipped(h), x), h, xs), w, h, xs)

    agree(lambda scan: jax.grad(partial(run, scan), (0, 1, 2)), options, *args())


@pytest.mark.long
@every_knob
def test_parts_of_the_carry_without_a_gradient(options: dict[str, Any]) -> None:
    def mixed(w: Any, carry: Any, x: Any) -> Any:
        h, average, still, n = carry
        h = jnp.tanh(h @ w + x + 0.1 * still)
        average = 0.9 * average + 0.1 * lax.stop_gradient(h)
        return (h, average, still, n + 1), (h * average, n)

    def run(scan: Scan, w: Any, h: Any, average: Any, still: Any, xs: Any) -> Any:
        (h, average, _, n), (ys, ns) = scan(partial(mixed, w), (h, average, still, jnp.int32(0)), xs)
        return h.sum() + average.sum() + (ys * ys).sum() + n + ns.sum()

    w, h, xs = args()
    agree(lambda scan: jax.grad(partial(run, scan), (0, 1, 2, 3, 4)), options, w, h, h * 2, h * 3, xs)
    agree(lambda scan: jax.grad(partial(run, scan)), options, w, h, h * 2, h * 3, xs)


@every_knob
def test_integer_inputs(options: dict[str, Any]) -> None:
    """Tokens look up rows of a table, which is closed over."""

    def run(scan: Scan, table: Any, h: Any, tokens: Any) -> Any:
        h, ys = scan(lambda h, k: (jnp.tanh(h + table[k]), k + 1), h, tokens)
        return (h * h).sum() + ys.sum()

    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 7, LENGTH))
    agree(lambda scan: jax.grad(partial(run, scan), (0, 1)), options, draw(1, 7, WIDTH), draw(2, WIDTH), tokens)


@every_knob
def test_a_step_that_uses_nothing_that_has_a_gradient(options: dict[str, Any]) -> None:
    def run(scan: Scan, w: Any, h: Any) -> Any:
        ys = scan(lambda k, x: (k + 1, h * k), jnp.float64(0), None, LENGTH)[1]
        return (ys.sum() * w).sum()

    agree(lambda scan: jax.grad(partial(run, scan)), options, draw(1, WIDTH), draw(2, WIDTH))


# Buffers and devices


@pytest.mark.long
@every_knob
def test_what_has_no_gradient_gets_no_buffer_for_one(options: dict[str, Any]) -> None:
    def run(scan: Scan, w: Any, h: Any, xs: Any) -> Any:
        return (scan(lambda h, x: (jnp.tanh(h @ w + x), None), h, xs)[0] ** 2).sum()

    w, h, xs = jnp.ones((8, 8)), jnp.ones((16, 8)), jax.ShapeDtypeStruct((400, 16, 8), jnp.float64)
    scan = partial(lt.checkpointed_scan, **options)

    def total(argnums: Any) -> int:
        compiled = quick(jax.grad(partial(run, scan), argnums)).lower(w, h, xs).compile().memory_analysis()
        return int(compiled.temp_size_in_bytes + compiled.output_size_in_bytes)

    every_row = 400 * 16 * 8 * 8
    more = total((0, 2)) - total(0)
    # The gradient itself, which is a result; with base, rows of all stretches but the last are there once more.
    assert every_row <= more <= (2.0 if "base" in options else 1.2) * every_row
    assert total(0) < every_row


@every_knob
def test_donated_arguments(options: dict[str, Any]) -> None:
    def update(scan: Scan, w: Any, h: Any, xs: Any) -> Any:
        return w - 0.1 * jax.grad(partial(loss, scan))(w, h, xs)

    w, h, xs = args()
    expected = quick(partial(update, lax.scan))(w, h, xs)
    run = quick(partial(update, partial(lt.checkpointed_scan, **options)), donate_argnums=0)
    given = w + 0
    found = run(given, h, xs)
    assert given.is_deleted()
    assert differences(flat(expected), flat(found), CLOSE) == []


def mesh(kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((2,), ("d",), axis_types=(kind,))


@every_knob
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(options: dict[str, Any], check_vma: bool) -> None:
    """Weights on both devices, data shared out; their gradients, the weights' summed over the devices."""

    def make(scan: Scan) -> Any:
        def on_each(w: Any, h: Any, xs: Any) -> Any:
            return lax.psum(loss(scan, w, h, xs), "d")

        places = (P(), P("d"), P(None, "d"))
        whole = jax.shard_map(on_each, mesh=mesh(), in_specs=places, out_specs=P(), check_vma=check_vma)
        return jax.value_and_grad(whole, argnums=(0, 1, 2))

    given = args(4)
    expected = flat(quick(jax.value_and_grad(partial(loss, lax.scan), argnums=(0, 1, 2)))(*given))
    found = flat(quick(make(partial(lt.checkpointed_scan, **options)))(*given))
    assert differences(expected, found, CLOSE) == []


@every_knob
def test_gradients_inside_a_shard_map(options: dict[str, Any]) -> None:
    def make(scan: Scan) -> Any:
        def on_each(w: Any, h: Any, xs: Any) -> Any:
            return jax.grad(partial(loss, scan), argnums=(0, 1, 2))(w, h, xs)

        places = (P(), P("d"), P(None, "d"))
        return jax.shard_map(on_each, mesh=mesh(), in_specs=places, out_specs=places)

    agree(make, options, *args(4))


@pytest.mark.long
@every_knob
def test_sharded_arguments(options: dict[str, Any]) -> None:
    """Under jit alone: the results are the same, and each device holds its share of snapshots and tape."""
    devices = mesh()

    def run(w: Any, h: Any, xs: Any) -> Any:
        h, _ = lt.checkpointed_scan(lambda h, x: (jnp.tanh(h @ w + x), None), h, xs, **options)
        return (h * h).sum()

    def given(split: bool) -> tuple[Any, Any, Any]:
        """As many examples as make the states large beside the weights."""
        place = partial(NamedSharding, devices)
        w = jax.device_put(draw(1, 8, 8, scale=0.3), place(P()))
        h = jax.device_put(draw(2, 64, 8), place(P("d") if split else P()))
        return w, h, jax.device_put(draw(3, 100, 64, 8), place(P(None, "d") if split else P()))

    gradients = quick(jax.grad(run, (0, 1)))
    whole, shared = gradients(*given(False)), gradients(*given(True))
    assert tuple(shared[1].sharding.spec)[:1] == ("d",)
    assert differences(flat(whole), flat(shared), CLOSE) == []
    one, half = (
        gradients.lower(*given(split)).compile().memory_analysis().temp_size_in_bytes for split in (False, True)
    )
    assert half <= 0.6 * one


def test_explicit_shardings() -> None:
    """Types that say where an array is: the loop keeps them."""
    with jax.set_mesh(mesh(AxisType.Explicit)):
        w, h, xs = args(4)
        h, xs = jax.device_put(h, P("d")), jax.device_put(xs, P(None, "d"))
        for options in KNOBS:
            agree(lambda scan: jax.grad(partial(loss, scan), argnums=(1, 2)), options, w, h, xs)
