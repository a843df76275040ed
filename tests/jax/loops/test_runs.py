"""Steps are run as often as the plan's bill says, counted on the host from inside a compiled step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import lowtide.jax as lt
from lowtide import BudgetError, Plan
from lowtide.planners.revolve import plain_runs
from tests.jax.networks import quick

H0 = jnp.ones((2, 3))


class Runs:
    """A loop over a step that tells which step it is, each time that it is run."""

    def __init__(self) -> None:
        self.seen: Counter[int] = Counter()

    def _told(self, k: Any) -> None:
        self.seen[int(k)] += 1

    def step(self, w: Any, h: Any, k: Any) -> Any:
        jax.debug.callback(self._told, k)
        return jnp.tanh(h @ w), h.sum()

    def loss(self, length: int, loop: Any = lt.checkpointed_scan, **options: Any) -> Any:
        def run(w: Any) -> Any:
            h, ys = loop(lambda h, k: self.step(w, h, k), H0, jnp.arange(length), **options)
            return h.sum() + (ys * ys).sum()

        return run

    def of(self, f: Any) -> Counter[int]:
        """How often each step is run while f(w) is computed once."""
        run = quick(f).lower(jnp.eye(3)).compile()
        jax.effects_barrier()
        assert not self.seen  # tracing and compiling run nothing
        jax.block_until_ready(run(jnp.eye(3)))
        jax.effects_barrier()
        seen, self.seen = self.seen, Counter()
        return seen


def plan_of(length: int, **options: Any) -> Plan:
    """Of the same loop without telling; types are enough."""
    like = jax.ShapeDtypeStruct((length,), jnp.int32)
    w = jnp.eye(3)
    return lt.plan_scan(lambda h, k: (jnp.tanh(h @ w), h.sum()), H0, like, **options)


def counted(length: int, **options: Any) -> Counter[int]:
    runs = Runs()
    return runs.of(jax.grad(runs.loss(length, **options)))


@pytest.mark.parametrize(("length", "slots"), [(1, 1), (2, 1), (13, 1), (50, 2), (97, 5), (97, 200)])
def test_a_number_of_snapshots_costs_the_binomial_optimum(length: int, slots: int) -> None:
    runs = counted(length, checkpoints=slots)
    assert runs.total() == plain_runs(length, slots) + length
    bill = plan_of(length, checkpoints=slots).bill
    assert (bill.plain_runs, bill.taping_runs) == (plain_runs(length, slots), length)


@pytest.mark.parametrize(
    ("length", "options"),
    [
        *[(length, {}) for length in (1, 2, 7, 97)],
        *[(length, {"base": 4}) for length in (1, 4, 5, 31)],
        *[(64, {"base": base}) for base in (2, 7, 63, 64)],
    ],
    ids=str,
)
def test_one_sweep_costs_its_bill(length: int, options: dict[str, Any]) -> None:
    runs, bill = counted(length, **options), plan_of(length, **options).bill
    assert sorted(runs) == list(range(length))
    assert runs.total() == bill.plain_runs + bill.taping_runs
    assert max(runs.values()) <= 2


@pytest.mark.long
def test_each_step_runs_as_often_as_its_line_in_the_plan_says() -> None:
    knobs: list[dict[str, Any]] = [{"checkpoints": 3}, {"base": 9}, {}]
    for options in knobs:
        plan = plan_of(40, **options)
        assert counted(40, **options) == {k: 1 + step.plain_runs for k, step in enumerate(plan.decisions())}


@pytest.mark.parametrize("budget", ["least", "11%", "25%", "60%"])
def test_a_budget_costs_its_bill(budget: str) -> None:
    given: Any = budget
    if budget == "least":
        with pytest.raises(BudgetError) as caught:
            plan_of(120, budget=1)
        given = caught.value.least
    bill = plan_of(120, budget=given).bill
    assert counted(120, budget=given).total() == bill.plain_runs + bill.taping_runs


def test_a_budget_that_holds_every_tape_costs_nothing_extra() -> None:
    assert counted(60, budget="1MB") == dict.fromkeys(range(60), 1)


@pytest.mark.parametrize("options", [{"checkpoints": 4}, {"base": 6}], ids=str)
def test_a_plan_made_before_is_followed(options: dict[str, Any]) -> None:
    plan = plan_of(50, **options)
    assert counted(50, plan=Plan.from_json(plan.to_json())).total() == plan.bill.plain_runs + 50


@pytest.mark.long
@pytest.mark.parametrize("options", [{"checkpoints": 3}, {"base": 6}], ids=str)
def test_backwards_and_unrolled_it_costs_the_same(options: dict[str, Any]) -> None:
    runs = counted(40, **options)
    mirrored = Counter({39 - k: times for k, times in runs.items()})
    assert counted(40, **options, reverse=True) == mirrored
    assert counted(40, **options, unroll=3) == runs


@pytest.mark.parametrize("options", [{}, {"base": 4}, {"checkpoints": 2}, {"budget": "20%"}], ids=str)
def test_without_a_gradient_each_step_runs_once(options: dict[str, Any]) -> None:
    runs = Runs()
    assert runs.of(runs.loss(50, **options)) == dict.fromkeys(range(50), 1)


@pytest.mark.long
@pytest.mark.parametrize("options", [{"base": 4}, {"checkpoints": 2}], ids=str)
def test_value_and_gradient_come_from_one_run(options: dict[str, Any]) -> None:
    runs = Runs()
    together = runs.of(jax.value_and_grad(runs.loss(50, **options)))
    assert together == runs.of(jax.grad(runs.loss(50, **options)))


def test_plain_loops_run_each_step_once() -> None:
    runs = Runs()
    for loop in (lt.scan, lax.scan):
        assert runs.of(jax.grad(runs.loss(30, loop))) == dict.fromkeys(range(30), 1)


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"base": 4}], ids=str)
def test_outside_of_jit_it_costs_the_same(options: dict[str, Any]) -> None:
    runs = Runs()
    jax.block_until_ready(jax.grad(runs.loss(20, **options))(jnp.eye(3)))
    jax.effects_barrier()
    assert runs.seen == counted(20, **options)
