# mypy: disable-error-code="untyped-decorator"
"""Loops over States: outputs, gradients and what the States hold afterwards are those of brainstate's plain loop."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowtide.brainstate as lt
from lowtide.errors import BudgetError, FunctionError
from lowtide.plan import Plan
from lowtide.simulate import simulate
from tests.brainstate.networks import CASES, KNOBS, STEPS, Case, Cell, a_module, inputs, quick, without_gradients
from tests.brainstate.partners import brainstate, transform, u

pytestmark = pytest.mark.usefixtures("x64")
OPTIONS = [{"reverse": True}, {"unroll": 3}, pytest.param({"unroll": True}, marks=pytest.mark.slow)]


def same(found: Any, expected: Any) -> None:
    """The same pytrees, units and types included, with the same values."""
    assert repr(jax.tree.structure(found)) == repr(jax.tree.structure(expected))
    for one, other in zip(map(jnp.asarray, jax.tree.leaves(found)), jax.tree.leaves(expected), strict=True):
        assert one.dtype == jnp.asarray(other).dtype
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-13)


@cache
def plain(case: Case) -> Any:
    brainstate.random.seed(7)
    return case(transform.for_loop)


def name_of(part: Any) -> str:
    return getattr(part, "__name__", str(part))


def pairs() -> list[Any]:
    """Every case with two knobs, and with the others where there is time for it."""
    marks = {1: [pytest.mark.long], 2: [pytest.mark.slow], 3: [pytest.mark.slow], 4: [pytest.mark.slow]}
    return [
        pytest.param(case, knobs, marks=marks.get(place, []) if case is not a_module else [])
        for case in CASES
        for place, knobs in enumerate(KNOBS)
    ]


@pytest.mark.parametrize(("case", "knobs"), pairs(), ids=name_of)
def test_everything_is_as_with_the_plain_loop(case: Case, knobs: dict[str, Any]) -> None:
    expected = plain(case)
    brainstate.random.seed(7)
    same(case(partial(lt.checkpointed_for_loop, **knobs)), expected)


@pytest.mark.long
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_are_those_of_the_plain_loop(options: dict[str, Any]) -> None:
    expected = a_module(partial(transform.for_loop, **options))
    for knobs in KNOBS[:2]:
        same(a_module(partial(lt.checkpointed_for_loop, **options, **knobs)), expected)


def test_the_plain_loops_are_brainstates() -> None:
    assert lt.scan is transform.scan
    same(a_module(lt.for_loop), plain(a_module))


@pytest.mark.long
@pytest.mark.parametrize("knobs", KNOBS[:2], ids=str)
def test_scans_with_a_carry_in_units(knobs: dict[str, Any]) -> None:
    def outcome(scan: Any) -> Any:
        cell = Cell()

        def step(carry: Any, x: Any) -> Any:
            current, count = carry
            v, _ = cell.update(x["a"] / u.mA + current / u.mA)
            return (current * 0.9 + x["b"], count + 1), (v * x["b"], None)

        def loss(xs: Any) -> Any:
            (current, count), (ys, _) = scan(step, (jnp.ones(3) * u.mA, 0), xs)
            return (ys / (u.mV * u.mA)).sum() + (current / u.mA).sum(), count

        xs = {"a": inputs(3) * u.mA, "b": inputs(3) * 2 * u.mA}
        return quick(transform.grad(loss, {"w": cell.w}, argnums=0, has_aux=True))(xs), cell.seen()

    same(outcome(partial(lt.checkpointed_scan, **knobs)), outcome(transform.scan))


def test_base_may_be_positional_as_in_brainstate() -> None:
    def step(carry: Any, x: Any) -> Any:
        return jnp.sin(carry + x), carry

    expected = transform.checkpointed_scan(step, 0.0, inputs(), STEPS, 4, None)
    same(lt.checkpointed_scan(step, 0.0, inputs(), STEPS, 4, None), transform.scan(step, 0.0, inputs()))
    np.testing.assert_allclose(expected[0], lt.checkpointed_scan(step, 0.0, inputs(), STEPS, 4, None)[0])


@pytest.mark.parametrize("knobs", KNOBS[:2], ids=str)
def test_no_inputs_and_whole_numbers(knobs: dict[str, Any]) -> None:
    count = brainstate.ShortTermState(jnp.int32(0))

    def step() -> Any:
        count.value = count.value + 2
        return count.value

    assert lt.checkpointed_for_loop(step, length=4, **knobs).tolist() == [2, 4, 6, 8]
    assert lt.for_loop(step, length=2).tolist() == [10, 12]
    carry, ys = lt.checkpointed_scan(lambda c, x: (c + 1, c), 0, None, 3, **knobs)
    assert (int(carry), ys.tolist()) == (3, [0, 1, 2])
    assert int(count.value) == 12


@pytest.mark.parametrize("knobs", KNOBS[:2], ids=str)
def test_no_steps(knobs: dict[str, Any]) -> None:
    cell, other = Cell(), Cell()
    found = lt.checkpointed_for_loop(cell.update, jnp.zeros((0, 3)), pbar=transform.ProgressBar(), **knobs)
    same(found, transform.for_loop(other.update, jnp.zeros((0, 3))))
    same(cell.seen(), other.seen())


@pytest.mark.long
def test_results_without_jit_are_the_same() -> None:
    with jax.disable_jit():
        found = without_gradients(lt.checkpointed_for_loop)
    same(found, plain(without_gradients))


@pytest.mark.parametrize("reduce", ["mean", "sum", "last"])
def test_outputs_with_units_are_folded(reduce: str) -> None:
    cell, other = Cell(), Cell()
    v, counts = transform.for_loop(other.update, inputs(3))
    expected = {"mean": (v.mean(0), counts.mean()), "sum": (v.sum(0), counts.sum()), "last": (v[-1], counts[-1])}[
        reduce
    ]

    def step(x: Any) -> Any:
        v, count = cell.update(x)
        return v, count * 1.0  # whole numbers have no mean

    found = lt.checkpointed_for_loop(step, inputs(3), reduce=reduce)
    assert u.get_unit(found[0]) == u.mV
    np.testing.assert_allclose(found[0] / u.mV, expected[0] / u.mV, rtol=1e-12)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)
    same(cell.seen(), other.seen())


@pytest.mark.long
@pytest.mark.parametrize("knobs", KNOBS[:2], ids=str)
def test_forward_mode_and_second_derivatives(knobs: dict[str, Any]) -> None:
    def along(scan: Any) -> Any:
        w = brainstate.ParamState(jnp.array([0.4, -0.6]))

        def loss(scale: Any) -> Any:
            return scan(lambda c, x: (jnp.sin(c * w.value + scale * x), c.sum()), jnp.ones(2), inputs(2))[0].sum()

        hessian = quick(transform.hessian(lambda: loss(1.0), {"w": w}))()
        return hessian, quick(lambda: transform.jvp(loss, (0.5,), (1.0,)))()

    same(along(partial(lt.checkpointed_scan, **knobs)), along(transform.scan))


@pytest.mark.long
def test_plans() -> None:
    cell = Cell()
    before = cell.seen()
    plans = [
        lt.plan_for_loop(cell.update, inputs(3), base=4),
        lt.plan_for_loop(cell.update, jax.ShapeDtypeStruct((STEPS, 3), jnp.float64), checkpoints=3),
        lt.plan_scan(lambda c, x: (c, cell.update(x)), None, inputs(3), STEPS, budget="16KiB"),
        lt.plan_for_loop(cell.update, inputs(3), reduce="last", wrt=("closure", "init")),
    ]
    same(cell.seen(), before)
    for plan in plans:
        assert isinstance(plan, Plan)
        assert len(plan.chain) == STEPS
        assert simulate(plan) == plan.bill
        same(a_module(partial(lt.checkpointed_for_loop, plan=plan)), plain(a_module))
    # v, count and trace: 3 + 3 + 1 numbers of 8 bytes, and one of 4
    assert {plan.chain[0].state for plan in plans[:3]} == {60}


class Snapshot:
    """Cells whose States must not change."""

    def __init__(self) -> None:
        self.cell = Cell()
        self.before = [(state, state.value) for state in brainstate.graph.states(self.cell).values()]

    def holds(self) -> bool:
        return all(state.value is value for state, value in self.before)


def fails(cell: Cell, x: Any) -> Any:
    cell.update(x)
    raise RuntimeError("on purpose")


def loses_its_unit(cell: Cell, x: Any) -> Any:
    cell.update(x)
    cell.v.value = x


def grows(cell: Cell, x: Any) -> Any:
    cell.update(x)
    cell.v.value = jnp.zeros(4) * u.mV


@pytest.mark.parametrize(
    ("step", "error"), [(fails, RuntimeError), (loses_its_unit, ValueError), (grows, FunctionError)], ids=name_of
)
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jitted"])
def test_an_error_leaves_states_alone(step: Any, error: type[Exception], jitted: bool) -> None:
    held = Snapshot()
    call = partial(lt.checkpointed_for_loop, partial(step, held.cell), inputs(3))
    with pytest.raises(error):
        (transform.jit(call) if jitted else call)()
    assert held.holds()
    same(lt.checkpointed_for_loop(held.cell.update, inputs(3)), plain(without_gradients)[0])


def test_a_budget_that_cannot_work_leaves_states_alone() -> None:
    held = Snapshot()

    def loss() -> Any:
        return (lt.checkpointed_for_loop(held.cell.update, inputs(3), budget=100)[0] / u.mV).sum()

    with pytest.raises(BudgetError, match="the least that works is"):
        transform.grad(loss, {"w": held.cell.w})()
    assert held.holds()


def test_an_error_that_is_caught_inside_a_trace() -> None:
    held = Snapshot()

    @transform.jit
    def whole() -> Any:
        with pytest.raises(ValueError, match="does not match"):
            lt.checkpointed_for_loop(partial(loses_its_unit, held.cell), inputs(3))
        return lt.checkpointed_for_loop(held.cell.update, inputs(3))

    same((whole(), held.cell.seen()), plain(without_gradients))


def test_states_made_in_a_step_do_not_leak() -> None:
    made = []

    def step(x: Any) -> Any:
        state = brainstate.ShortTermState(x * 2)
        state.value = state.value + 1
        made.append(state)
        return state.value

    expected = transform.for_loop(step, inputs())
    with jax.checking_leaks():
        same(lt.checkpointed_for_loop(step, inputs()), expected)
    for state in made:
        with pytest.raises(brainstate.TraceContextError):
            _ = state.value


def test_states_that_are_only_read_stay_read_only() -> None:
    cell = Cell()
    with brainstate.StateTraceStack() as trace:
        lt.checkpointed_for_loop(cell.update, inputs(3))
    assert {id(state) for state in trace.get_write_states()} == {id(s) for s in (cell.v, cell.count, cell.trace)}
    assert {id(state) for state in trace.get_read_states()} == {id(s) for s in (cell.w, cell.tau)}
