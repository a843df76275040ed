"""Layers called one after the other within a budget: the same gradients, the bytes as promised, clear refusals."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowtide.jax as lt
from lowtide import BudgetError, Plan
from lowtide.chain import Chain, Disk, StepCost, TapeOption
from lowtide.errors import FunctionError, InputError
from lowtide.interface.cache import Cache
from lowtide.jax.layers import plans
from lowtide.jax.layers.costs import cost_of
from lowtide.jax.layers.nested import nest
from lowtide.jax.layers.trace import trace_layers
from lowtide.jax.xla import compiled as looked_at
from lowtide.plan import Knob
from lowtide.planners.choose import choose
from lowtide.planners.unequal import Hetero
from tests.jax.networks import draw, quick

WIDTHS = (12, 30, 7, 22, 22, 5, 16, 9)
BATCH = 4096
MIB = 2**20


def dense(params: Any, x: Any) -> Any:
    weights, bias = params
    return jnp.tanh(x @ weights + bias)


def gelu(params: Any, x: Any) -> Any:
    weights, bias = params
    return jax.nn.gelu(x @ weights + bias)


def linear(params: Any, x: Any) -> Any:
    weights, bias = params
    return x @ weights + bias


def mlp(widths: Any = WIDTHS) -> list[Any]:
    pairs = enumerate(pairwise(widths))
    return [(draw(k, a, b, scale=0.4), draw(90 + k, b, scale=0.4)) for k, (a, b) in pairs]


def plain(layers: Any, x: Any) -> Any:
    for layer in layers:
        x = layer[0](layer[1], x) if isinstance(layer, tuple) else layer(x)
    return x


def rows_of(params: Any, function: Callable[..., Any] = dense) -> list[Any]:
    return [(function, some) for some in params]


def least_of(layers: Any, x: Any) -> int:
    with pytest.raises(BudgetError) as caught:
        lt.plan_sequential(layers, x, budget=1)
    return caught.value.least


def close(ours: Any, theirs: Any) -> None:
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def gradients(run: Callable[[Any, Any], Any], params: Any, x: Any) -> Any:
    return quick(jax.value_and_grad(lambda params, x: jnp.sum(jnp.sin(run(params, x))), (0, 1)))(params, x)


RUNS: dict[str, Callable[..., Any]] = {
    "none": lambda rows, x: lt.sequential(rows, x),
    "least": lambda rows, x: lt.sequential(rows, x, budget=least_of(rows, x)),
    "some": lambda rows, x: lt.sequential(rows, x, budget=least_of(rows, x) * 5 // 4),
    "much": lambda rows, x: lt.sequential(rows, x, budget="1GiB"),
    "share": lambda rows, x: lt.sequential(rows, x, budget="100%"),
    "planned": lambda rows, x: lt.sequential(rows, x, plan=lt.plan_sequential(rows, x)),
    "1": lambda rows, x: lt.checkpoint_sequential(rows, 1, x),
    "3": lambda rows, x: lt.checkpoint_sequential(rows, 3, x),
    "99": lambda rows, x: lt.checkpoint_sequential(rows, 99, x),
}


def gradients_by(run: Callable[..., Any]) -> Any:
    return gradients(lambda params, x: run(rows_of(params), x), mlp(), draw(50, 11, 12))


@cache
def plain_gradients() -> Any:
    return gradients_by(plain)


@pytest.mark.long
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", RUNS)
def test_gradients_are_those_of_the_plain_calls(name: str) -> None:
    close(gradients_by(RUNS[name]), plain_gradients())


def taken_by(how: str, run: Callable[..., Any]) -> Any:
    """The result of a transform of the loss."""
    params, x = mlp((4, 5, 3, 4)), draw(50, 6, 4)

    def f(params: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(run(rows_of(params), x)))

    match how:
        case "eager":
            return jax.grad(f, (0, 1))(params, x)
        case "jit":
            return quick(jax.grad(f, (0, 1)))(params, x)
        case "vmap":
            return quick(jax.grad(lambda params: jax.vmap(lambda row: f(params, row[None]))(x).sum()))(params)
        case "vmapped gradient":
            return quick(jax.vmap(jax.grad(f, (0, 1)), (None, 0)))(params, x[:, None])
        case "jvp":
            return quick(lambda *given: jax.jvp(f, given, given))(params, x)
        case "hessian":
            return quick(jax.hessian(lambda x: f(params, x)))(x[:1])
        case _:
            inner = jax.grad(lambda x: f(params, x))
            return quick(jax.grad(lambda x: jnp.sum(inner(x) ** 2)))(x)


@cache
def taken_plainly(how: str) -> Any:
    return taken_by(how, plain)


HOWS = ("eager", "jit", "vmap", "vmapped gradient", "jvp", "hessian", "gradient of a gradient")
TRANSFORMED = [
    pytest.param(how, name, marks=() if how == "eager" else pytest.mark.untraced)
    for how in HOWS
    for name in ("none", "least", "3")
]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("how", "name"), TRANSFORMED)
def test_every_transform(how: str, name: str) -> None:
    close(taken_by(how, RUNS[name]), taken_plainly(how))


@pytest.mark.long
@pytest.mark.usefixtures("x64")
def test_modules_of_equinox() -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = zip(pairwise((3, 8, 8, 2)), keys, strict=False)
    layers: list[Any] = [equinox.nn.Linear(a, b, key=key) for (a, b), key in sizes]
    layers[1:1] = [equinox.nn.Lambda(jnp.tanh)]
    model = equinox.nn.Sequential(layers)
    x = draw(3, 3)

    def loss(run: Any) -> Any:
        return equinox.filter_value_and_grad(lambda model: jnp.sum(run(model.layers, x) ** 2))(model)

    close(loss(lambda layers, x: lt.sequential(layers, x, budget=least_of(layers, x))), loss(plain))
    close(loss(lambda layers, x: lt.checkpoint_sequential(layers, 2, x)), loss(plain))
    shapes = equinox.filter_eval_shape(lambda: model)
    assert isinstance(lt.plan_sequential(shapes.layers, jax.ShapeDtypeStruct((3,), x.dtype)), Plan)


@pytest.mark.long
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["least", "3"])
def test_pytrees_closures_and_several_types_between_layers(name: str) -> None:
    weights = draw(1, 6, 6, scale=0.5)
    key = jax.random.key(3)

    def run(call: Callable[..., Any]) -> Any:
        def f(weights: Any, x: Any) -> Any:
            layers = [
                lambda x: {"a": jnp.sin(x @ weights), "n": jnp.arange(4), "key": key},
                lambda t: (t["a"].astype(jnp.float32), t["a"] * t["n"][1], jax.random.bernoulli(t["key"], 0.5, (4, 6))),
                lambda t: (t[0] ** 2, jnp.where(t[2], t[1], 0.0), None),
                lambda t: jnp.cos(t[0].astype(jnp.float64) + t[1]) @ weights,
            ]
            return call(layers, x)

        return gradients(f, weights, draw(2, 4, 6))

    close(run(RUNS[name]), run(plain))


def test_a_layer_runs_as_often_as_the_plan_says() -> None:
    params, x = mlp((8,) * 9), draw(1, 64, 8)
    plan = lt.plan_sequential(rows_of(params), x)
    text = jax.jit(jax.grad(lambda p: jnp.sum(lt.sequential(rows_of(p), x, plan=plan) ** 2))).lower(params).as_text()
    forward = plan.bill.plain_runs + plan.bill.taping_runs
    assert plan.bill.plain_runs > 0
    # A product for each run forward, two for each way back but the first, which has one; those of results that
    # nobody reads are dropped, one for each range that is run again.
    assert 0 <= forward + 2 * len(params) - 1 - text.count("stablehlo.dot_general") <= plan.bill.plain_runs


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def weights_of(widths: Any) -> list[Any]:
    return [(shape(a, b), shape(b)) for a, b in pairwise(widths)]


def compiled_bytes(run: Callable[..., Any], function: Any, params: Any, x: Any) -> int:
    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jnp.square(run(rows_of(params, function), x)))

    compiled: Any = jax.jit(jax.grad(loss)).lower(params, x).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


UNEQUAL = (217, 170, 143, 90, 98, 40, 47, 34, 69, 209, 173, 230, 141)


def convolution(kernel: Any, x: Any) -> Any:
    y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(y)


def pooled(kernel: Any, x: Any) -> Any:
    """A convolution, and the largest of each window."""
    y = jax.lax.reduce_window(convolution(kernel, x), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jax.nn.relu(y)


def normal(x: Any) -> Any:
    apart = x - x.mean(-1, keepdims=True)
    return apart * jax.lax.rsqrt((apart**2).mean(-1, keepdims=True) + 1e-5)


def block(params: Any, x: Any) -> Any:
    """Attention with four heads and two layers, each behind a norm and beside a shortcut."""
    first, second, *factors = params
    heads = [(normal(x) @ factor).reshape(*x.shape[:2], 4, -1) for factor in factors]
    scores = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", heads[0], heads[1]))
    x = x + jnp.einsum("bhst,bthd->bshd", scores, heads[2]).reshape(x.shape)
    return x + jax.nn.gelu(normal(x) @ first) @ second


def blocks(count: int, tokens: int) -> tuple[list[Any], Any]:
    return [(block, (shape(64, 256), shape(256, 64), *[shape(64, 64)] * 3))] * count, shape(8, tokens, 64)


def images(*channels: int) -> tuple[list[Any], Any]:
    pairs = enumerate(pairwise(channels))
    return [(pooled if k % 2 else convolution, shape(3, 3, a, b)) for k, (a, b) in pairs], shape(8, 32, 32, 3)


def deep(function: Any, widths: Any) -> tuple[list[Any], Any]:
    return rows_of(weights_of(widths), function), shape(BATCH, widths[0])


SMALL = rows_of(weights_of((32, 32, 32)), gelu), shape(64, 32)
NETWORKS: dict[str, tuple[list[Any], Any]] = {
    "tanh": deep(dense, UNEQUAL[6:]),
    "gelu": deep(gelu, UNEQUAL[8:]),
    "convolutions": images(3, 16, 16, 32),
    "blocks": blocks(2, 64),
}
SLOW_NETWORKS: dict[str, tuple[list[Any], Any]] = {
    "tanh": deep(dense, UNEQUAL),
    "gelu": deep(gelu, UNEQUAL),
    "equal tanh": deep(dense, (128,) * 17),
    "equal gelu": deep(gelu, (128,) * 17),
    "convolutions": images(3, 16, 16, 32, 32, 64, 64),
    "blocks": blocks(6, 128),
    "many blocks": blocks(12, 64),
}


def taken(run: Callable[..., Any], rows: Any, x: Any, *, of_x: bool) -> int:
    """Bytes of the compiled gradient, besides its arguments and results."""
    functions, params = [row[0] for row in rows], [row[1] for row in rows]

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jnp.square(run(list(zip(functions, params, strict=True)), x)))

    compiled: Any = jax.jit(jax.grad(loss, (0, 1) if of_x else 0)).lower(params, x).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def check_budgets(rows: Any, x: Any, record_property: Any, ways: Any = (False,)) -> None:
    """In programs that take the gradient of `x` or do not."""
    least = least_of(rows, x)
    for budget in (least, least * 5 // 4, 2 * least):
        predicted = lt.plan_sequential(rows, x, budget=budget).bill.peak_memory
        run = partial(lt.sequential, budget=budget)
        found = [taken(run, rows, x, of_x=of_x) for of_x in ways]
        record_property("figure", f"budget {budget:,} B: {predicted:,} B predicted, {max(found):,} B compiled")
        assert max(found) <= budget
        assert 0.99 * max(found) <= predicted <= budget


def test_budgets_of_a_small_network_are_kept(record_property: Any) -> None:
    check_budgets(*SMALL, record_property)


@pytest.mark.long
@pytest.mark.parametrize("name", NETWORKS)
def test_budgets_are_kept_by_the_compiled_program(name: str, record_property: Any) -> None:
    check_budgets(*NETWORKS[name], record_property)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_NETWORKS)
def test_more_budgets_are_kept_as_users_compile(name: str, record_property: Any) -> None:
    check_budgets(*SLOW_NETWORKS[name], record_property, (False, True))


@pytest.mark.parametrize("name", NETWORKS)
def test_without_a_budget_bytes_are_estimated(name: str, record_property: Any) -> None:
    rows, x = NETWORKS[name]
    predicted = lt.plan_sequential(rows, x).bill.peak_memory
    found = taken(lt.sequential, rows, x, of_x=False)
    record_property("figure", f"{name}: {predicted:,} B predicted, {found:,} B compiled")
    assert found / 1.6 <= predicted <= 1.5 * found


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is compiled to see whether a plan fits, as it happens."""
    seen: list[Any] = []
    monkeypatch.setattr(looked_at, "_bytes", Cache(2048))
    measure = plans.compiled_bytes

    def counted(layers: Any, items: Any, *, of_x: bool) -> int:
        seen.append((items, of_x))
        return measure(layers, items, of_x=of_x)

    monkeypatch.setattr(plans, "compiled_bytes", counted)
    return seen


@pytest.mark.long
def test_a_plan_is_compiled_once(compiled: list[Any]) -> None:
    params, x = mlp((12, 30, 7)), draw(1, 64, 12)
    budget = least_of(rows_of(params), x) * 3 // 2
    lt.plan_sequential(rows_of(params), x, budget=budget)
    count = len(compiled)
    assert 0 < count == len(set(compiled)) <= 16

    def loss(params: Any, x: Any) -> Any:
        return lt.sequential(rows_of(params, lambda some, x: dense(some, x)), x, budget=budget).sum()

    for _ in range(2):  # functions made anew are the same layers if they say the same
        jax.grad(loss)(params, x)
        jax.eval_shape(jax.jit(jax.grad(loss)), params, x)
    jax.vmap(lambda x: loss(params, x))(x[None])
    assert len(compiled) == count
    lt.plan_sequential(rows_of(params, gelu), x, budget="100%")
    assert len(compiled) > count


@pytest.mark.long
def test_nothing_is_compiled_without_a_budget(compiled: list[Any]) -> None:
    params, x = mlp(), draw(1, 11, 12)
    lt.sequential(rows_of(params), x, plan=lt.plan_sequential(rows_of(params), x))
    lt.sequential(rows_of(params), x)
    lt.checkpoint_sequential(rows_of(params), 2, x)
    assert not compiled


@pytest.mark.long
def test_what_is_remembered_is_bounded_and_holds_no_model(compiled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looked_at, "_bytes", known := Cache[int](3))
    weights = jnp.ones((3, 3))

    def layer(x: Any) -> Any:
        return jnp.sin(x @ weights)

    alive = weakref.ref(layer)
    for rows in range(1, 4):
        lt.plan_sequential([layer, layer], shape(rows, 3), budget="1MiB")
    assert len(compiled) > len(known) == 3
    del layer
    jax.clear_caches()
    gc.collect()
    assert alive() is None


def test_layers_that_talk_to_others_are_planned_by_estimate(compiled: list[Any]) -> None:
    def near(x: Any) -> Any:
        return jnp.sin(x - jax.lax.pmean(x, "i"))

    def run(x: Any) -> Any:
        return lt.sequential([near, jnp.cos, near], x, budget="1MiB")

    x = draw(1, 4, 6)
    expected = jax.vmap(lambda x: plain([near, jnp.cos, near], x), axis_name="i")(x)
    np.testing.assert_allclose(jax.vmap(run, axis_name="i")(x), expected, rtol=1e-6)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    spread = jax.sharding.PartitionSpec("i")
    mapped: Any = jax.shard_map(
        lambda x: lt.sequential([jnp.cos, lambda x: x @ jnp.ones((6, 6))], x, budget="1MiB"),
        mesh=mesh,
        in_specs=spread,
        out_specs=spread,
    )
    np.testing.assert_allclose(mapped(x), jnp.cos(x) @ jnp.ones((6, 6)), rtol=1e-5)
    assert not compiled


@pytest.mark.long
def test_less_memory_than_plain_and_than_jax_checkpoint() -> None:
    params, x = weights_of((128,) * 17), shape(BATCH, 128)
    found = compiled_bytes(lt.sequential, gelu, params, x)
    assert found <= 0.3 * compiled_bytes(plain, gelu, params, x)
    segmented = compiled_bytes(lambda rows, x: lt.checkpoint_sequential(rows, 4, x), gelu, params, x)
    assert segmented <= 0.35 * compiled_bytes(plain, gelu, params, x)


def test_one_byte_less_than_the_least_is_refused() -> None:
    rows, x = NETWORKS["tanh"]
    least = least_of(rows, x)
    widths = UNEQUAL[6:]
    with pytest.raises(BudgetError, match=f"the least that works is {least:,} B") as caught:
        lt.sequential(rows_of(mlp(widths)), jnp.zeros((BATCH, widths[0])), budget=least - 1)
    assert (caught.value.budget, caught.value.least) == (least - 1, least)


@pytest.mark.long
def test_tapes_that_fit_into_gradients_are_kept() -> None:
    """Weights are much larger than states, and until their gradients are there, tapes take their room."""
    rows, x = rows_of(weights_of((256,) * 7)), shape(8, 256)
    without = taken(plain, rows, x, of_x=False) * 11 // 10
    plan = lt.plan_sequential(rows, x, budget=without)
    assert plan.bill.plain_runs == 0
    assert plan.bill.peak_memory <= without


def test_elsewhere_than_on_the_cpu_a_barrier_is_enough() -> None:
    gradient = jax.jit(jax.grad(lambda x: lt.checkpoint_sequential([jnp.sin, jnp.cos, jnp.tanh], 2, x).sum()))
    for platform, word in (("tpu", "optimization_barrier"), ("cpu", "while")):
        assert f"stablehlo.{word}" in gradient.trace(jnp.ones(3)).lower(lowering_platforms=(platform,)).as_text()


def test_the_largest_of_each_window_costs_integers_on_the_way_back() -> None:
    def pool(x: Any) -> Any:
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    found = cost_of(trace_layers([pool], shape(8, 32, 32, 3)).layers)
    assert found.backward > 4 * found.state


def test_softmax_scans_and_loops_are_counted() -> None:
    def attention(weights: Any, x: Any) -> Any:
        scores = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", x @ weights, x))
        return jnp.einsum("bhst,bthd->bshd", scores, x)

    x, weights = shape(4, 64, 2, 16), shape(16, 16)
    found = cost_of(trace_layers([(attention, weights)], x).layers)
    assert found.held >= 2 * 4 * 2 * 64 * 64 * 4
    assert found.forward_work >= 2 * 2 * 4 * 2 * 64 * 64 * 16
    once = cost_of(trace_layers([(lambda w, x: jnp.tanh(x @ w), weights)], x).layers)
    ten = cost_of(
        trace_layers(
            [(lambda w, x: jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, 10)[0], weights)], x
        ).layers
    )
    assert ten.forward_work >= 9 * once.forward_work
    assert ten.held >= 9 * once.state


def test_layers_that_need_no_input_are_one_step_with_the_one_before() -> None:
    params = mlp()
    layers: list[Any] = [layer for some in params for layer in ((linear, some), jnp.tanh)]
    layers.append(lambda x: x.reshape(-1))
    plan = lt.plan_sequential(layers, draw(1, 5, 12))
    assert len(plan.chain) == len(params)
    assert plan.chain.name(0) == "layers 0 to 1"
    assert plan.chain.name(len(params) - 1) == "layers 12 to 14"


@pytest.mark.long
def test_planning_is_the_same_every_time_and_needs_types_only() -> None:
    params, x = mlp(), draw(1, 11, 12)
    plans = [lt.plan_sequential(rows_of(params), x, budget="100%") for _ in range(2)]
    types = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (params, x))
    plans.append(lt.plan_sequential(rows_of(types[0]), types[1], budget="100%"))
    assert plans[0] == plans[1] == plans[2]
    assert Plan.from_json(plans[0].to_json()) == plans[0]


def _over(run: Callable[..., Any], params: Any, x: Any) -> Any:
    return run(rows_of(params), x)


@pytest.mark.long
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("knob", [{"budget": 40}, {"budget": 60}, {"checkpoints": 3}, {"base": 3}, {}], ids=str)
def test_plans_of_any_planner_can_be_followed(knob: Any) -> None:
    """Made for chains of equal steps as well as for unequal ones."""
    params, x = mlp((6,) * 10), draw(1, 4, 6)
    equal = Chain.equal(StepCost(6, 8), 9)
    unequal = Chain.of(StepCost(6, 8 + k % 3) for k in range(9))
    for chain in (equal, unequal):
        run = partial(lt.sequential, plan=choose(chain, **knob))
        ours = gradients(partial(_over, run), params, x)
        close(ours, gradients(lambda params, x: plain(rows_of(params), x), params, x))


def test_plans_that_cannot_be_followed_are_refused() -> None:
    with pytest.raises(
        InputError,
        match=r"not one for layers: .* cannot be done by running a part again.*plan again",
    ):
        nest(choose(Chain.equal(StepCost(6, 8), 40), 40, disk=Disk(1e-9, 1e-9)))
    lean = Chain.of([StepCost(6, 20, options=(TapeOption(6, 0.1),)), StepCost(6, 21, options=(TapeOption(6, 0.1),))])
    with pytest.raises(InputError, match="in a smaller form, which layers in JAX do not have; plan again"):
        nest(choose(lean, 12))


def test_one_layer_and_no_parameters() -> None:
    x = jnp.linspace(0.0, 1.0, 5)
    for run in (lambda x: lt.sequential([jnp.sin], x), lambda x: lt.checkpoint_sequential([jnp.sin], 1, x)):
        close(jax.grad(lambda x, run=run: run(x).sum())(x), jnp.cos(x))
    assert lt.sequential([lambda x: x, jnp.sin], 0.5) == jnp.sin(0.5)
    assert lt.sequential([lambda _: 3.0], ()) == 3.0


def test_what_is_empty_has_gradients_too() -> None:
    x = jnp.zeros((0, 4))
    grads = jax.jit(jax.grad(lambda x: lt.checkpoint_sequential([jnp.sin, jnp.cos, jnp.tanh], 3, x).sum()))(x)
    assert grads.shape == (0, 4)


@pytest.mark.long
def test_ranges_in_ranges_forty_deep() -> None:
    # Each range but for its last layer is run again.
    order = tuple(n for pair in zip(range(39, 0, -1), [0] * 39, strict=True) for n in pair)
    plan = Plan.make(Chain.of([StepCost(6, 8)] * 40), Knob("none"), Hetero((*order, 0)))
    x = jnp.ones(3)
    ours = jax.grad(lambda x: lt.sequential([jnp.sin] * 40, x, plan=plan).sum())(x)
    np.testing.assert_allclose(ours, jax.grad(lambda x: plain([jnp.sin] * 40, x).sum())(x), rtol=1e-5)


def test_a_part_of_the_results_that_nobody_reads() -> None:
    def f(x: Any, run: Any) -> Any:
        return run([lambda x: (jnp.sin(x), jnp.cos(x)), lambda t: (t[0] * 2, t[1] ** 2)], x)[0].sum()

    x = jnp.linspace(0.0, 1.0, 5)
    segmented = jax.grad(lambda x: f(x, lambda rows, x: lt.checkpoint_sequential(rows, 2, x)))(x)
    np.testing.assert_allclose(segmented, jax.grad(lambda x: f(x, plain))(x), rtol=1e-6)


def test_comparing_runs_the_layers_plainly() -> None:
    params, x = mlp(WIDTHS[:4]), draw(1, 11, 12)
    for run in (lt.sequential, lambda rows, x: lt.checkpoint_sequential(rows, 2, x)):
        found = lt.compare_gradients(lambda params, run=run: run(rows_of(params), x), params)
        assert found.same


ROWS = [jnp.sin, jnp.cos, jnp.tanh]


@pytest.mark.parametrize(
    ("layers", "x", "options", "words"),
    [
        ([], 1.0, {}, "layers is empty; give at least one layer"),
        (jnp.sin, 1.0, {}, "not a row of layers; give a list"),
        ([jnp.sin, 3], 1.0, {}, r"layers\[1\]=3 is a int, which cannot be called"),
        ([(3, 4)], 1.0, {}, r"layers\[0\]=3 is a int, which cannot be called"),
        ([jnp.sin, lambda _: "no"], 1.0, {}, r"layers\[1\] returns a str; make it return arrays"),
        (ROWS, "no", {}, "x is a str; give arrays"),
        (ROWS, {"a": object()}, {}, r"x\['a'\] is a object; give arrays"),
        (ROWS, 1.0, {"budget": 1.5}, "budget=1.5"),
        (ROWS, 1.0, {"budget": "many"}, "budget='many' is not a size"),
        (ROWS, 1.0, {"budget": "120%"}, "must be more than 0% and at most 100%"),
        (ROWS, 1.0, {"budget": True}, "budget=True is a boolean"),
        (ROWS, 1.0, {"plan": 3}, "plan=3 is a int; give what plan_sequential returned"),
    ],
)
def test_refusals(layers: Any, x: Any, options: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        lt.sequential(layers, x, **options)
    if "plan" not in options:
        with pytest.raises(ValueError, match=words):
            lt.plan_sequential(layers, x, **options)


def test_more_refusals() -> None:
    x = jnp.ones(3)
    plan = lt.plan_sequential(ROWS[:1], x)
    with pytest.raises(InputError, match="the plan is for 1 steps, these 2 layers make 2; plan again"):
        lt.sequential([jnp.sin, jnp.cos], x, plan=plan)
    with pytest.raises(InputError, match="are two knobs"):
        lt.sequential(ROWS, x, plan=plan, budget=100)
    with pytest.raises(FunctionError, match=r"functions\[0\]=3 is a int"):
        lt.checkpoint_sequential([3], 1, x)
    with pytest.raises(ZeroDivisionError):
        lt.sequential([lambda x: x / (1 // 0)], x)


@pytest.mark.parametrize(
    ("segments", "words"),
    [(0, "leaves no segment"), (-1, "is negative"), (True, "is a boolean"), (2.0, "is a float")],
)
def test_numbers_of_segments_that_are_refused(segments: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        lt.checkpoint_sequential(ROWS, segments, jnp.ones(3))
    with pytest.raises(InputError, match="functions is empty"):
        lt.checkpoint_sequential([], segments, jnp.ones(3))
