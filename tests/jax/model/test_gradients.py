"""A planned loss gives what the plain one does: values, gradients and more derivatives, whatever the model."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import lowtide.jax as lt
from lowtide import Plan
from lowtide.errors import FunctionError
from lowtide.planners.blocks import Blocks
from tests.jax.model.models import (
    SMALL,
    Case,
    close,
    compiled,
    looped,
    mlp,
    names_of,
    net,
    planned,
    schedule_of,
    small,
    total,
    transformer,
)
from tests.jax.networks import draw, quick


@pytest.mark.long
@pytest.mark.usefixtures("x64")
def test_blocks_of_equinox_with_dropout() -> None:
    case = net()
    plan = planned(case)
    program, ours = compiled(lt.apply(plan, case.loss), case)
    assert total(program) == plan.bill.peak_memory
    close(ours, compiled(case.loss, case, quick)[1])


def squares(tree: Any) -> Any:
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "how",
    [
        "jit",
        pytest.param("eager", marks=pytest.mark.long),
        "vmap",
        "vmapped gradient",
        "jvp",
        pytest.param("hessian", marks=pytest.mark.long),
        pytest.param("gradient of a gradient", marks=pytest.mark.long),
        "other shapes",
        "from JSON",
        "no gradient",
    ],
)
def test_every_transform(how: str) -> None:
    case, plan = small()
    light = lt.apply(Plan.from_json(plan.to_json()) if how == "from JSON" else plan, case.loss)
    params, (x,) = case.params, case.args

    def taken(loss: Any) -> Any:
        match how:
            case "eager":
                return jax.value_and_grad(loss)(params, x)
            case "vmap":
                of_rows: Any = jax.vmap(lambda params, row: loss(params, row[None]), (None, 0))
                return quick(jax.grad(lambda params: of_rows(params, x[:3]).sum()))(params)
            case "vmapped gradient":
                return quick(jax.vmap(jax.value_and_grad(loss), (None, 0)))(params, x[:3, None])
            case "jvp":
                return quick(lambda *args: jax.jvp(loss, args, args))(params, x)
            case "no gradient":
                return loss(params, x)
            case "hessian":
                return quick(jax.hessian(lambda x: loss(params, x)))(x[:1])
            case "gradient of a gradient":
                return quick(jax.grad(lambda params: squares(jax.grad(loss)(params, x))))(params)
            case "other shapes":
                return quick(jax.value_and_grad(loss))(params, x[:5])
            case _:
                return quick(jax.value_and_grad(loss, (0, 1)))(params, x)

    close(taken(light), taken(case.loss))


@pytest.mark.long
@pytest.mark.usefixtures("x64")
def test_every_form_gives_the_same_gradients_and_computes_no_more_than_it_must() -> None:
    case = transformer(1, 8, 2, 4)
    plan = lt.plan_model(case.loss, case.params, *case.args, peak="100%")
    menu = {entry.name: entry.extra for entry in plan.chain[1].menu}
    names = ["attention", "up", "attention, up", "products", "products of weights"]
    assert list(menu) == ["keep", "rerun", *(f"rerun, keep {name}" for name in names)]
    products, theirs = {}, compiled(case.loss, case, quick)[1]
    for k, name in enumerate(menu):
        loss = lt.apply(Plan.make(plan.chain, plan.knob, Blocks((0, k, 0))), case.loss)
        program, found = compiled(loss, case, quick)
        products[name] = program.as_text().count(" dot(")
        close(found, theirs)
    more = {name: count - products["keep"] for name, count in products.items()}
    assert more["rerun"] == 7  # all but the last of eight, whose result no derivative reads
    assert more["rerun, keep attention"] == more["rerun, keep up"] == 6
    assert more["rerun, keep products of weights"] == 2
    assert more["rerun, keep products"] == 0
    assert menu["rerun"] > menu["rerun, keep attention"] > menu["rerun, keep products"] > menu["keep"] == 0


@pytest.mark.usefixtures("x64")
def test_more_results_than_the_loss() -> None:
    case = mlp(SMALL, 128)

    def loss(params: Any, x: Any, *, scale: float) -> Any:
        value = case.loss(params, x) * scale
        return value, {"twice": 2 * value, "count": jnp.arange(3), "weights": params[0][0].sum(), "one": 1.0}

    plan = lt.plan_model(loss, case.params, *case.args, peak="75%", has_aux=True, scale=3.0)
    assert any(schedule_of(plan).options)
    ours, theirs = (
        quick(jax.value_and_grad(lambda params, f=f: f(params, *case.args, scale=3.0), has_aux=True))(case.params)
        for f in (lt.apply(plan, loss), loss)
    )
    close(ours, theirs)
    with pytest.raises(FunctionError, match="5 arrays; has_aux=True"):
        lt.plan_model(loss, case.params, *case.args, peak="75%", scale=3.0)


@pytest.mark.long
def test_half_precision_of_all_parameters_at_once() -> None:
    case = mlp(SMALL, 256)

    def loss(params: Any, x: Any) -> Any:
        decay = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        return case.loss(half, x.astype(jnp.bfloat16)).astype(jnp.float32) + 1e-3 * decay

    half = Case(loss, case.params, case.args)
    plan = planned(half)
    assert names_of(plan) == ["0", "1", "2", "(loss)"]
    program, ours = compiled(lt.apply(plan, loss), half)
    assert total(program) == plan.bill.peak_memory
    close(ours, compiled(loss, half, quick)[1], rtol=0.03)


@pytest.mark.long
@pytest.mark.usefixtures("x64")
def test_values_that_pass_by_blocks_and_blocks_that_are_called_twice() -> None:
    @jax.jit
    def layer(params: Any, x: Any) -> Any:
        return jax.nn.gelu(x @ params["w"])

    @jax.jit
    def loss(params: dict[str, Any], x: Any) -> Any:
        held = []
        for some in params["down"]:
            x = layer(some, x)
            held.append(x)
        for some in params["down"]:
            x = layer(some, x) + held.pop()
        return jnp.mean(x**2)

    case = Case(loss, {"down": [{"w": draw(k, 12, 12)} for k in range(3)]}, (draw(9, 256, 12),))
    plan = planned(case)
    assert names_of(plan) == [f"down.{k}{call}" for call in ("", " (call 2)") for k in range(3)] + ["(loss)"]
    program, ours = compiled(lt.apply(plan, loss), case)
    assert total(program) == plan.bill.peak_memory
    close(ours, compiled(loss, case, quick)[1])


@pytest.mark.usefixtures("x64")
def test_comparing_with_the_plain_loss() -> None:
    case, plan = small()
    comparison = lt.compare_gradients(lt.apply(plan, case.loss), case.params, *case.args)
    assert comparison.same
    assert comparison.lowtide_bytes < comparison.plain_bytes


class Pair(NamedTuple):
    """A pytree of its own, with a place for nothing."""

    w: Any
    nothing: None = None


def odd(name: str) -> Case:
    """Models of other forms than a list of blocks that are alike."""
    x, w = draw(1, 8, 6), [draw(10 + k, 6, 6, scale=0.4) for k in range(4)]
    masks = [{"w": some, "mask": jnp.arange(6) % 2} for some in w]
    params: Any = {
        "names": {f"layer_{k}": {"w": some} for k, some in enumerate(w)},
        "unequal": [{"w": w[0]}, {"w": w[1], "b": draw(5, 6)}, {"w": w[2]}],
        "one": [{"w": w[0]}],
        "none": {"w": w[0]},
        "pytrees": {"deep": (Pair(w[0]), Pair(w[1])), "more": None},
        "integers": masks,
        "a number": [{"w": w[0], "times": 2.0}, {"w": w[1], "times": 3.0}],
    }[name]

    def layer(some: Any, x: Any, rows: Any) -> Any:
        found = some if isinstance(some, dict) else some._asdict()
        x = jnp.sin(x[rows] @ found["w"]) + found.get("b", 0.0)
        return x * found.get("times", 1.0) * found.get("mask", 1)

    def loss(params: Any, x: Any, rows: Any) -> Any:
        every = jax.tree.leaves(params, is_leaf=lambda some: isinstance(some, Pair) or "w" in (some or ()))
        for some in every:
            x = layer(some, x, rows)
        return jnp.mean(x**2)

    return Case(loss, params, (x, jnp.arange(8)[::-1]))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["names", "unequal", "one", "none", "pytrees", "integers", "a number"])
def test_models_of_other_forms(name: str) -> None:
    case = odd(name)
    plan = lt.plan_model(case.loss, case.params, *case.args, peak="100%")
    options = tuple(len(plan.chain[k].menu) - 1 for k in range(len(plan.chain)))
    assert sum(map(bool, options)) == {"none": 0, "one": 1, "unequal": 3, "names": 4, "integers": 4}.get(name, 2)
    again = Plan.make(plan.chain, plan.knob, Blocks(options))
    close(compiled(lt.apply(again, case.loss), case, quick)[1], compiled(case.loss, case, quick)[1])


@pytest.mark.long
@pytest.mark.usefixtures("x64")
def test_a_loop_in_a_block_has_every_derivative() -> None:
    case = looped(2, 3, 4)
    plan = lt.plan_model(case.loss, case.params, *case.args, peak="100%")
    light = lt.apply(Plan.make(plan.chain, plan.knob, Blocks((1, 1, 0))), case.loss)

    def taken(loss: Any) -> Any:
        first = jax.value_and_grad(loss)
        both = quick(lambda *args: (first(*args), jax.grad(lambda *args: squares(first(*args)))(*args)))
        return both(case.params, *case.args), quick(jax.vmap(first, (None, 0)))(case.params, case.args[0][:, None])

    close(taken(light), taken(case.loss))
