"""What a plan says of what was planned and what was not, and of arguments that cannot be used."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import lowtide.jax as lt
from lowtide import Plan
from lowtide.chain import Chain, StepCost
from lowtide.errors import FunctionError, InputError
from lowtide.planners.choose import choose
from tests.jax.model.models import (
    SMALL,
    Case,
    least_of,
    mlp,
    names_of,
    net,
    notes_of,
    small,
)
from tests.jax.networks import draw


def test_a_loop_in_a_block_is_run_again_as_a_whole() -> None:
    def loss(params: Any, x: Any) -> Any:
        for some in params:
            x = jax.lax.fori_loop(0, 3, partial(step, some), x)
        return x.sum()

    def step(some: Any, _: Any, x: Any) -> Any:
        return jnp.sin(x @ some)

    plan = lt.plan_model(loss, [draw(1, 4, 4), draw(2, 4, 4)], draw(3, 8, 4), peak="100%")
    assert [entry.name for entry in plan.chain[0].menu] == ["keep", "rerun"]
    assert plan.chain[0].menu[1].extra >= plan.chain[0].forward / 2 > 0


def test_of_many_names_each_and_all_are_forms() -> None:
    def loss(params: Any, x: Any) -> Any:
        for some in params:
            for name in "abcd":
                x = checkpoint_name(jnp.sin(x * some), name)
            x = jnp.cos(x * some)
        return x.sum()

    plan = lt.plan_model(loss, [draw(1, 3), draw(2, 3)], draw(3, 8, 3), peak="100%")
    assert [entry.name for entry in plan.chain[0].menu] == [
        "keep",
        "rerun",
        *(f"rerun, keep {name}" for name in ("a", "b", "c", "d", "a, b, c, d")),
    ]


def test_a_plan_that_keeps_everything_is_the_loss_itself() -> None:
    case = mlp(SMALL, 16)
    plan = lt.plan_model(case.loss, case.params, *case.args, peak="1GiB")
    assert lt.apply(plan, case.loss) is case.loss
    assert plan.time_factor == 1


def scanned(params: Any, x: Any) -> Any:
    def step(x: Any, _: Any) -> Any:
        for some, bias in params:
            x = jnp.tanh(x @ some + bias)
        return x, None

    return jnp.mean(jax.lax.scan(step, x, None, 3)[0] ** 2)


def test_what_cannot_be_split_is_said() -> None:
    flat = {"w": draw(1, 8, 8), "b": draw(2, 8)}

    def single(params: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]))

    plan = lt.plan_model(single, flat, draw(3, 64, 8), peak="100%")
    assert names_of(plan) == ["(loss)"]
    assert "There is nothing to split" in notes_of(plan)
    assert "Not planned" not in notes_of(plan)
    least = least_of(Case(single, flat, (draw(3, 64, 8),)))
    assert least == plan.bill.peak_memory

    square = [(draw(k, 8, 8), draw(k, 8)) for k in range(8)]
    plan = lt.plan_model(scanned, square, draw(3, 64, 8), peak="100%")
    assert "There is nothing to split" in notes_of(plan)
    assert "Not planned: 0, 1, 2, 3, 4, 5 and 2 more." in notes_of(plan)
    assert "checkpointed_scan" in notes_of(plan)

    case = mlp((8, 8, 8, 8), 64, jnp.tanh)
    plan = lt.plan_model(case.loss, case.params, *case.args, peak="100%")
    assert "To run a block again saves nothing here" in notes_of(plan)


def test_a_model_of_parameters_alone_and_results_that_are_numbers() -> None:
    def loss(params: Any) -> Any:
        return sum(jnp.sum(some**2) for some in params), {"one": jnp.ones(()), "two": params[0]}

    params = [draw(1, 4), draw(2, 4)]
    plan = lt.plan_model(loss, params, peak="1MiB", has_aux=True)
    assert names_of(plan) == ["(loss)"]
    assert "Not planned: 0, 1." in notes_of(plan)


def test_calls_with_shardings_stay_calls() -> None:
    spread = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:1]), "i"), jax.P())
    layer = jax.jit(lambda some, x: jax.nn.gelu(x @ some), out_shardings=spread)

    def loss(params: Any, x: Any) -> Any:
        for some in params:
            x = layer(some, x)
        return jnp.mean(x)

    plan = lt.plan_model(loss, [draw(1, 8, 8), draw(2, 8, 8)], draw(3, 64, 8), peak="100%")
    assert names_of(plan) == ["0", "1", "(loss)"]


def test_arguments_that_cannot_be_used() -> None:
    case = mlp(SMALL, 16)

    def plan(**more: Any) -> Plan:
        return lt.plan_model(case.loss, case.params, *case.args, **{"peak": "100%"} | more)

    with pytest.raises(InputError, match="peak='much' is not a size"):
        plan(peak="much")
    with pytest.raises(InputError, match="has no init and update; give one as optax"):
        plan(optimizer="adam")
    with pytest.raises(InputError, match=r"blocks='layers\.\*' matches no part of the parameters; they have 0, 0\.0, "):
        plan(blocks="layers.*")
    for wrong in (3, [3]):
        with pytest.raises(InputError, match=r"is no name; give names or patterns of them, such as 'layers\.\*'"):
            plan(blocks=wrong)
    with pytest.raises(InputError, match="they have no arrays"):
        lt.plan_model(lambda params, x: jnp.sum(x), {}, *case.args, peak="100%", blocks=["a"])
    with pytest.raises(FunctionError, match="loss='x' is a str"):
        lt.plan_model("x", case.params, peak=1)  # type: ignore[arg-type]
    with pytest.raises(FunctionError, match=r"the loss returns float32\[16,9\] first"):
        lt.plan_model(lambda params, x: x[:, :9], case.params, *case.args, peak="100%")
    with pytest.raises(FunctionError, match="the loss returns nothing first"):
        lt.plan_model(lambda params, x: None, case.params, *case.args, peak="100%")
    with pytest.raises(FunctionError, match="which cannot be called"):
        lt.apply(plan(), 3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="is not a plan for a model; give what plan_model returned"):
        lt.apply(choose(Chain.equal(StepCost(1, 2), 3)), case.loss)
    light = lt.apply(small()[1], case.loss)
    with pytest.raises(InputError, match=r"of 3 blocks \(0, 1, 2\), and here are 2 \(0, 1\); plan again"):
        light(case.params[:2], *case.args)


def test_blocks_by_name() -> None:
    case = mlp(SMALL, 16)
    plan = lt.plan_model(case.loss, case.params, *case.args, peak="100%", blocks=["0", "2"])
    assert names_of(plan) == ["0", "2", "(loss)"]
    net_ = net(4, 2, 8)
    plan = lt.plan_model(net_.loss, net_.params, *net_.args, peak="100%", blocks="layers.*")
    assert names_of(plan) == ["(outside)", "layers.0", "layers.1", "(loss)"]
