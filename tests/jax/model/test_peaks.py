"""Whole models within a peak: bytes as XLA allocates them, and what was expected of them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import optax  # type: ignore[import-untyped]
import pytest

import lowtide.jax as lt
from lowtide import BudgetError
from lowtide.interface.cache import Cache
from lowtide.jax.model import program as model_program
from lowtide.jax.xla import compiled as looked_at
from lowtide.simulate import simulate
from tests.jax.model.models import (
    CASES,
    SMALL,
    Case,
    close,
    compiled,
    expected,
    least_of,
    looped,
    mlp,
    names_of,
    net,
    notes_of,
    planned,
    schedule_of,
    tied,
    total,
)


def check_peaks(case: Case, record_property: Any) -> None:
    """At five peaks from the least to the plain one."""
    least = least_of(case)
    plain, theirs = compiled(case.loss, case)
    most = total(plain)
    assert least < most
    for share in range(5):
        peak = least + (most - least) * share // 4
        plan = lt.plan_model(case.loss, case.params, *case.args, peak=peak)
        program, ours = compiled(lt.apply(plan, case.loss), case)
        found = total(program)
        assert found == plan.bill.peak_memory <= peak
        assert simulate(plan) == plan.bill
        close(ours, theirs)
        if share == 4:
            assert not any(schedule_of(plan).options)
            continue
        guess = expected(plan)
        said = "an end" if guess is None else f"{guess:,} B expected ({guess / found - 1:+.1%})"
        record_property("figure", f"peak {peak:,} B: {said}, {found:,} B compiled")
        assert guess is None or abs(guess - found) <= 0.1 * found
    with pytest.raises(BudgetError, match=f"{least:,} B"):
        lt.plan_model(case.loss, case.params, *case.args, peak=least - 1)


@pytest.mark.long
@pytest.mark.usefixtures("x64")
def test_peaks_are_kept_as_expected_with_the_same_gradients(record_property: Any) -> None:
    check_peaks(mlp((48, 32, 24, 36)), record_property)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", CASES)
def test_peaks_of_more_models_are_kept_as_users_compile(name: str, record_property: Any) -> None:
    check_peaks(CASES[name](), record_property)


def two_tied() -> Case:
    return tied(2, 8, 64)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "make",
    [
        two_tied,
        pytest.param(looped, marks=pytest.mark.long),
        *(pytest.param(make, marks=pytest.mark.slow) for make in (tied, net)),
    ],
)
def test_the_least_peak_is_the_same_again_and_works_each_time(make: Callable[[], Case]) -> None:
    case = make()
    least = least_of(case)
    for _ in range(2):
        plan = planned(case, peak=least)
        assert total(compiled(lt.apply(plan, case.loss), case)[0]) == plan.bill.peak_memory == least
        assert least_of(case) == least


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("donate", [True, pytest.param(False, marks=pytest.mark.long)])
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
    assert total(jitted.lower(case.params, state, *case.args).compile()) <= plan.bill.peak_memory
    assert names_of(plan)[0] == "(optimizer step)"
    assert schedule_of(plan).optimizer == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert schedule_of(plan).inputs == case.args[0].nbytes
    assert plan.chain.parameters == sum(leaf.nbytes for leaf in jax.tree.leaves(case.params))
    assert ("donated" in notes_of(plan)) == donate


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


@pytest.mark.long
def test_one_program_is_compiled_once_and_no_model_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looked_at, "_bytes", known := Cache[int](3))
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
    assert len(known) == 3 <= len(seen)
    alive = weakref.ref(loss)
    del loss
    jax.clear_caches()
    gc.collect()
    assert alive() is None


def test_the_least_peak_works_where_estimates_do_not_lead_to_it() -> None:
    case = mlp((32, 24, 4, 4), 256)
    least = least_of(case)
    plan = planned(case, peak=least)
    assert total(compiled(lt.apply(plan, case.loss), case)[0]) == plan.bill.peak_memory == least
