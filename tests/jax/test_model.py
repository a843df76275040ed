"""Whole models within a peak: bytes as XLA allocates them, the same gradients, and what is said of what was planned."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
import pytest
from jax.ad_checkpoint import checkpoint_name

import lowtide.jax as lt
from lowtide import BudgetError, Plan
from lowtide.chain import Chain, StepCost
from lowtide.errors import FunctionError, InputError
from lowtide.jax import model_program
from lowtide.planners.blocks import Blocks
from lowtide.planners.choose import choose
from lowtide.simulate import simulate
from tests.jax.networks import QUICK, draw


@dataclass(frozen=True)
class Case:
    """A loss with its parameters and arguments."""

    loss: Callable[..., Any]
    params: Any
    args: tuple[Any, ...]


def normal(x: Any) -> Any:
    apart = x - x.mean(-1, keepdims=True)
    return apart * jax.lax.rsqrt((apart**2).mean(-1, keepdims=True) + 1e-5)


def dropped(x: Any, key: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0)


def block(params: Any, x: Any, key: Any = None) -> Any:
    """Attention with two heads and two layers, each behind a norm and beside a shortcut."""
    heads = [(normal(x) @ params[name]).reshape(*x.shape[:2], 2, -1) for name in "qkv"]
    scores = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", heads[0], heads[1]))
    seen = jnp.einsum("bhst,bthd->bshd", scores, heads[2]).reshape(x.shape)
    x = x + checkpoint_name(seen @ params["o"], "attention")
    if key is not None:
        x = dropped(x, key)
    return x + jax.nn.gelu(checkpoint_name(normal(x) @ params["up"], "up")) @ params["down"]


def weights(seed: int, width: int) -> dict[str, Any]:
    square = {name: draw(seed + k, width, width, scale=0.2) for k, name in enumerate("qkvo")}
    return square | {"up": draw(seed + 8, width, 4 * width, scale=0.2), "down": draw(seed + 9, 4 * width, width)}


def transformer(count: int = 2, width: int = 16, batch: int = 4, tokens: int = 24) -> Case:
    """Tokens, blocks with dropout, and a table that is read at both ends."""
    params = {"table": draw(1, 11, width), "blocks": [weights(100 * k, width) for k in range(count)]}

    def loss(params: Any, tokens: Any, key: Any) -> Any:
        x = params["table"][tokens]
        for some, one in zip(params["blocks"], jax.random.split(key, count), strict=True):
            x = block(some, x, one)
        logits = jax.nn.log_softmax(normal(x) @ params["table"].T)
        return -jnp.mean(jnp.take_along_axis(logits, tokens[..., None], -1))

    return Case(loss, params, (jnp.arange(batch * tokens).reshape(batch, tokens) % 11, jax.random.key(7)))


def mlp(widths: tuple[int, ...] = (48, 32, 40, 24, 16, 36), batch: int = 512, function: Any = jax.nn.gelu) -> Case:
    pairs = enumerate(pairwise(widths))
    params = [(draw(k, a, b, scale=0.2), draw(90 + k, b)) for k, (a, b) in pairs]

    def loss(params: Any, x: Any) -> Any:
        for some, bias in params:
            x = function(x @ some + bias)
        return jnp.mean(x**2)

    return Case(loss, params, (draw(50, batch, widths[0]),))


class Block(equinox.Module):
    """Two layers behind a norm, with dropout, beside a shortcut."""

    norm: equinox.nn.LayerNorm
    up: equinox.nn.Linear
    down: equinox.nn.Linear
    dropout: equinox.nn.Dropout

    def __init__(self, width: int, key: Any) -> None:
        keys = jax.random.split(key)
        self.norm, self.dropout = equinox.nn.LayerNorm(width), equinox.nn.Dropout(0.2)
        self.up = equinox.nn.Linear(width, 4 * width, key=keys[0])
        self.down = equinox.nn.Linear(4 * width, width, key=keys[1])

    def __call__(self, x: Any, key: Any) -> Any:
        return x + self.dropout(self.down(jax.nn.gelu(self.up(self.norm(x)))), key=key)


class Net(equinox.Module):
    """Blocks between two layers."""

    first: equinox.nn.Linear
    layers: list[Block]
    last: equinox.nn.Linear

    def __init__(self, width: int, count: int, key: Any) -> None:
        first, *keys, last = jax.random.split(key, count + 2)
        self.first = equinox.nn.Linear(6, width, key=first)
        self.layers = [Block(width, key) for key in keys]
        self.last = equinox.nn.Linear(width, 3, key=last)

    def __call__(self, x: Any, key: Any) -> Any:
        x = self.first(x)
        for layer, one in zip(self.layers, jax.random.split(key, len(self.layers)), strict=True):
            x = layer(x, one)
        return self.last(x)


def net(width: int = 16, count: int = 2, batch: int = 96) -> Case:
    def loss(net: Any, x: Any, y: Any, key: Any) -> Any:
        return jnp.mean((jax.vmap(net)(x, jax.random.split(key, len(x))) - y) ** 2)

    return Case(loss, Net(width, count, jax.random.key(1)), (draw(1, batch, 6), draw(2, batch, 3), jax.random.key(5)))


CASES: dict[str, Callable[[], Case]] = {
    "small transformer": lambda: transformer(4),
    "small equinox": lambda: net(count=4),
    "transformer": lambda: transformer(8, 32, 4, 64),
    "mlp": lambda: mlp((217, 170, 143, 90, 98, 40, 47, 34, 69, 209), 1024),
    "equinox": lambda: net(64, 8, 512),
}


def total(compiled: Any) -> int:
    memory = compiled.memory_analysis()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(kept + memory.temp_size_in_bytes)


def compiled(loss: Any, case: Case, options: Any = QUICK) -> tuple[Any, Any]:
    """The compiled gradient as users take it, and what it gives."""
    floats, rest = equinox.partition(case.params, equinox.is_inexact_array)
    step: Any = jax.jit(jax.value_and_grad(lambda floats, *args: loss(equinox.combine(floats, rest), *args)))
    program = step.lower(floats, *case.args).compile(options)
    return program, program(floats, *case.args)


def close(ours: Any, theirs: Any, rtol: float = 1e-12) -> None:
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert one.dtype == other.dtype
        scale = float(jnp.max(jnp.abs(other.astype(float))))
        np.testing.assert_allclose(one.astype(float), other.astype(float), rtol=rtol, atol=rtol * scale)


def least_of(case: Case, **more: Any) -> int:
    with pytest.raises(BudgetError) as caught:
        lt.plan_model(case.loss, case.params, *case.args, peak=1, **more)
    assert f"{caught.value.least:,} B" in str(caught.value)
    return caught.value.least


def expected(plan: Plan) -> int:
    """What the plan says was expected of its choice before it was compiled."""
    (note,) = [note for note in schedule_of(plan).notes if note.startswith("Before")]
    return int("".join(letter for letter in note if letter.isdigit()))


def check_peaks(case: Case, record_property: Any, options: Any = QUICK, off_by: float = 0.1) -> None:
    """At five peaks from the least to the plain one."""
    least = least_of(case)
    plain, theirs = compiled(case.loss, case, options)
    most = total(plain)
    assert least < most
    for share in range(5):
        peak = least + (most - least) * share // 4
        plan = lt.plan_model(case.loss, case.params, *case.args, peak=peak)
        program, ours = compiled(lt.apply(plan, case.loss), case, options)
        found = total(program)
        assert found == plan.bill.peak_memory <= peak
        assert simulate(plan) == plan.bill
        close(ours, theirs)
        if share == 4:
            assert not any(schedule_of(plan).options)
            continue
        guess = expected(plan)
        off = f"{guess / found - 1:+.1%}"
        record_property("figure", f"peak {peak:,} B: {guess:,} B expected ({off}), {found:,} B compiled")
        assert abs(guess - found) <= off_by * found
    with pytest.raises(BudgetError, match=f"{least:,} B"):
        lt.plan_model(case.loss, case.params, *case.args, peak=least - 1)


@pytest.mark.usefixtures("x64")
def test_peaks_are_kept_as_expected_with_the_same_gradients(record_property: Any) -> None:
    check_peaks(mlp(), record_property)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("make", [transformer, net])
def test_blocks_with_dropout(make: Callable[[], Case]) -> None:
    case = make()
    plan = planned(case)
    program, ours = compiled(lt.apply(plan, case.loss), case)
    assert total(program) == plan.bill.peak_memory
    close(ours, compiled(case.loss, case)[1])


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", CASES)
def test_peaks_of_more_models_are_kept_as_users_compile(name: str, record_property: Any) -> None:
    # The least peak of the last one is expected 17% too high; its others are within 2%.
    check_peaks(CASES[name](), record_property, None, 0.2 if name == "equinox" else 0.1)


def schedule_of(plan: Plan) -> Blocks:
    assert isinstance(plan.schedule, Blocks)
    return plan.schedule


def notes_of(plan: Plan) -> str:
    return " ".join(schedule_of(plan).notes)


def planned(case: Case, **more: Any) -> Plan:
    """A plan that runs something again."""
    plan = lt.plan_model(case.loss, case.params, *case.args, **{"peak": "75%"} | more)
    assert any(schedule_of(plan).options)
    return plan


def names_of(plan: Plan) -> list[str]:
    return [plan.chain.name(k) for k in range(len(plan.chain))]


SMALL = (12, 10, 14, 9)


@cache
def small() -> tuple[Case, Plan]:
    """A small model with the plan for the least peak, in double precision."""
    case = mlp(SMALL, 64)
    return case, planned(case, peak=least_of(case))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("donate", [True, False])
def test_the_step_of_an_optimizer_is_part_of_the_peak(donate: bool) -> None:
    case, optimizer = mlp(SMALL, 256), optax.sgd(1e-3, momentum=0.9)
    plan = planned(case, peak="85%", optimizer=optimizer, donate=donate)
    loss = lt.apply(plan, case.loss)

    def step(params: Any, state: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    jitted: Any = jax.jit(step, donate_argnums=(0, 1) if donate else ())
    state = optimizer.init(case.params)
    assert total(jitted.lower(case.params, state, *case.args).compile(QUICK)) <= plan.bill.peak_memory
    assert names_of(plan)[0] == "(optimizer step)"
    assert schedule_of(plan).optimizer == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert schedule_of(plan).inputs == case.args[0].nbytes
    assert plan.chain.parameters == sum(leaf.nbytes for leaf in jax.tree.leaves(case.params))
    assert ("donated" in notes_of(plan)) == donate


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "how", ["jit", "eager", "vmap", "vmapped gradient", "jvp", "hessian", "other shapes", "from JSON", "no gradient"]
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
                return jax.jit(jax.grad(lambda params: of_rows(params, x[:3]).sum()))(params)
            case "vmapped gradient":
                return jax.jit(jax.vmap(jax.value_and_grad(loss), (None, 0)))(params, x[:3, None])
            case "jvp":
                return jax.jit(lambda *args: jax.jvp(loss, args, args))(params, x)
            case "no gradient":
                return loss(params, x)
            case "hessian":
                return jax.jit(jax.hessian(lambda x: loss(params, x)))(x[:1])
            case "other shapes":
                return jax.jit(jax.value_and_grad(loss))(params, x[:5])
            case _:
                return jax.jit(jax.value_and_grad(loss, (0, 1)))(params, x)

    close(taken(light), taken(case.loss))


@pytest.mark.usefixtures("x64")
def test_every_form_gives_the_same_gradients_and_computes_no_more_than_it_must() -> None:
    case = transformer(1, 8, 2, 4)
    plan = lt.plan_model(case.loss, case.params, *case.args, peak="100%")
    menu = {entry.name: entry.extra for entry in plan.chain[1].menu}
    names = ["attention", "up", "attention, up", "products", "products of weights"]
    assert list(menu) == ["keep", "rerun", *(f"rerun, keep {name}" for name in names)]
    products = {}
    for k, name in enumerate(menu):
        loss = lt.apply(Plan.make(plan.chain, plan.knob, Blocks((0, k, 0))), case.loss)
        program, found = compiled(loss, case)
        products[name] = program.as_text().count(" dot(")
        if name == "keep":
            theirs = found
        close(found, theirs)
    more = {name: count - products["keep"] for name, count in products.items()}
    assert more["rerun"] == 7  # all but the last of eight, whose result no derivative reads
    assert more["rerun, keep attention"] == more["rerun, keep up"] == 6
    assert more["rerun, keep products of weights"] == 2
    assert more["rerun, keep products"] == 0
    assert menu["rerun"] > menu["rerun, keep attention"] > menu["rerun, keep products"] > menu["keep"] == 0


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


@pytest.mark.usefixtures("x64")
def test_more_results_than_the_loss() -> None:
    case = mlp(SMALL, 128)

    def loss(params: Any, x: Any, *, scale: float) -> Any:
        value = case.loss(params, x) * scale
        return value, {"twice": 2 * value, "count": jnp.arange(3), "weights": params[0][0].sum(), "one": 1.0}

    plan = lt.plan_model(loss, case.params, *case.args, peak="75%", has_aux=True, scale=3.0)
    assert any(schedule_of(plan).options)
    ours, theirs = (
        jax.jit(jax.value_and_grad(lambda params, f=f: f(params, *case.args, scale=3.0), has_aux=True))(case.params)
        for f in (lt.apply(plan, loss), loss)
    )
    close(ours, theirs)
    with pytest.raises(FunctionError, match="5 arrays; has_aux=True"):
        lt.plan_model(loss, case.params, *case.args, peak="75%", scale=3.0)


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
    close(ours, compiled(loss, half)[1], rtol=0.03)


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
    close(ours, compiled(loss, case)[1])


def test_types_are_enough_and_a_share_is_one_of_the_plain_step() -> None:
    case = mlp(SMALL, 4096)
    params, args = jax.eval_shape(lambda: (case.params, case.args))
    plan = lt.plan_model(case.loss, params, *args, peak="80%")
    plain = total(compiled(case.loss, case)[0])
    assert plan.knob.name == "peak"
    assert plan.knob.value == plain * 80 // 100
    assert f"{plain:,} B if all is kept" in notes_of(plan)
    assert f"{plan.bill.peak_memory:,} B for this step on cpu" in notes_of(plan)
    assert schedule_of(plan).unit == "FLOP"


def test_a_plan_that_keeps_everything_is_the_loss_itself() -> None:
    case = mlp(SMALL, 16)
    plan = lt.plan_model(case.loss, case.params, *case.args, peak="1GiB")
    assert lt.apply(plan, case.loss) is case.loss
    assert plan.time_factor == 1


def test_one_program_is_compiled_once_and_no_model_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_program, "_remembered", {})
    monkeypatch.setattr(model_program, "_MOST", 3)
    seen: list[Any] = []
    measure = model_program._allocated

    def counted(lowered: Any) -> int:
        seen.append(lowered)
        return measure(lowered)

    monkeypatch.setattr(model_program, "_allocated", counted)
    case = mlp((6, 5, 4), 32)

    def loss(params: Any, x: Any) -> Any:
        return case.loss(params, x)

    for _ in range(2):
        lt.plan_model(loss, case.params, *case.args, peak="100%")
    assert len(seen) == 1
    least_of(Case(loss, case.params, case.args))
    assert len(model_program._remembered) == 3 <= len(seen)
    alive = weakref.ref(loss)
    del loss
    jax.clear_caches()
    gc.collect()
    assert alive() is None


@pytest.mark.usefixtures("x64")
def test_comparing_with_the_plain_loss() -> None:
    case, plan = small()
    comparison = lt.compare_gradients(lt.apply(plan, case.loss), case.params, *case.args)
    assert comparison.same
    assert comparison.lowtide_bytes < comparison.plain_bytes


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
    with pytest.raises(InputError, match="they have no arrays"):
        lt.plan_model(lambda params, x: jnp.sum(x), {}, *case.args, peak="100%", blocks=["a"])
    with pytest.raises(FunctionError, match="loss='x' is a str"):
        lt.plan_model("x", case.params, peak=1)  # type: ignore[arg-type]
    with pytest.raises(FunctionError, match=r"the loss gives float32\[16,9\] first"):
        lt.plan_model(lambda params, x: x[:, :9], case.params, *case.args, peak="100%")
    with pytest.raises(FunctionError, match="the loss gives nothing first"):
        lt.plan_model(lambda params, x: None, case.params, *case.args, peak="100%")
    with pytest.raises(FunctionError, match="which cannot be called"):
        lt.apply(plan(), 3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="is not a plan for a model; give what plan_model returned"):
        lt.apply(choose(Chain.equal(StepCost(1, 2), 3)), case.loss)
    light = lt.apply(small()[1], case.loss)
    with pytest.raises(InputError, match=r"of 3 blocks \(0, 1, 2\), and here are 2 \(0, 1\); plan again"):
        light(case.params[:2], *case.args)


def test_the_least_peak_works_where_estimates_do_not_lead_to_it() -> None:
    case = mlp((10, 16, 6, 12, 4), 256)
    least = least_of(case)
    plan = planned(case, peak=least)
    assert total(compiled(lt.apply(plan, case.loss), case)[0]) == plan.bill.peak_memory == least


def test_blocks_by_name() -> None:
    case = mlp(SMALL, 16)
    plan = lt.plan_model(case.loss, case.params, *case.args, peak="100%", blocks=["0", "2"])
    assert names_of(plan) == ["0", "2", "(loss)"]
    net_ = net(4, 2, 8)
    plan = lt.plan_model(net_.loss, net_.params, *net_.args, peak="100%", blocks="layers.*")
    assert names_of(plan) == ["(outside)", "layers.0", "layers.1", "(loss)"]
