"""What cannot be done is refused, with the words of `lax.scan` where it has some, before anything is run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import lowtide.jax as lt
from lowtide import BudgetError, Chain, FunctionError, InputError, Plan, StepCost
from lowtide.chain import Disk
from lowtide.planners.choose import choose

XS = jnp.ones((40, 2, 3))
H0 = jnp.zeros((2, 3))
W = jnp.full(3, 0.5)
KS = jnp.arange(4)
LOOPS = [lt.scan, lt.checkpointed_scan, lt.plan_scan]
every_loop = pytest.mark.parametrize("loop", LOOPS, ids=["scan", "checkpointed_scan", "plan_scan"])


def step(h: Any, x: Any) -> Any:
    return jnp.tanh(h * W + x), h


def refused(error: type[Exception], match: str | None, loop: Any, *args: Any, **options: Any) -> Exception:
    with pytest.raises(error, match=match) as caught:
        loop(*args, **options)
    return caught.value


@every_loop
@pytest.mark.parametrize("bad", [3, None, "f"])
def test_a_step_that_cannot_be_called(loop: Any, bad: Any) -> None:
    error = refused(FunctionError, "cannot be called", loop, bad, H0, XS)
    assert isinstance(error, TypeError)
    assert isinstance(error, ValueError)
    refused(TypeError, None, lax.scan, bad, H0, XS)
    for of_rows in (lt.for_loop, lt.checkpointed_for_loop, lt.plan_for_loop):
        refused(FunctionError, "cannot be called", of_rows, bad, XS)


@every_loop
@pytest.mark.parametrize(
    ("given", "match"),
    [
        (((XS, XS[1:]),), r"xs\[0\] says 40, xs\[1\] says 39"),
        ((XS, 5), r"xs says 40, length says 5"),
        ((), "nothing says how many steps"),
        ((None, None), "nothing says how many steps"),
        (((jnp.float32(1),),), r"xs\[0\].* has no axis to run over"),
        ((3.0,), r"xs.* has no axis to run over"),
        (({"a": XS, "b": np.zeros(())},), r"xs\['b'\].* has no axis"),
    ],
    ids=["unequal", "contradicting", "none", "no leaves", "no axis", "a number", "a scalar array"],
)
def test_lengths_that_do_not_fit(loop: Any, given: Any, match: str) -> None:
    """`lax.scan` raises a ValueError too, but for a scalar, which it does not expect."""
    with pytest.raises((ValueError, IndexError)):
        lax.scan(step, H0, *given)
    refused(InputError, match, loop, step, H0, *given)


@every_loop
@pytest.mark.parametrize("length", [-1, 2.5, True, "3"])
def test_lengths_that_are_none(loop: Any, length: Any) -> None:
    refused(InputError, "length=", loop, lambda h, _: (h, None), H0, length=length)


@every_loop
@pytest.mark.parametrize(
    ("f", "match"),
    [
        (lambda h, x: h, "pair"),
        (lambda h, x: (h, h, h), "pair"),
        (lambda h, x: None, "pair"),
        (lambda h, x: (h[:1], None), r"\[2,3\].*\[1,3\]|shape"),
        (lambda h, x: (h.astype(jnp.int32), None), "int32"),
        (lambda h, x: (h.astype(jnp.bfloat16), None), "bfloat16"),
        (lambda h, x: ((h, h), None), "tuple"),
        (lambda h, x: ({"h": h}, None), "dict"),
        (lambda h, x: (None, h), "None"),
    ],
    ids=["carry only", "three", "None", "shape", "integer", "bfloat16", "tuple", "dict", "no carry"],
)
def test_steps_that_do_not_give_what_they_take(loop: Any, f: Any, match: str) -> None:
    """The type of the error and what it says are those of `lax.scan`."""
    theirs = refused(TypeError, match, lax.scan, f, H0, XS)
    ours = refused(TypeError, match, loop, f, H0, XS)
    assert str(ours) == str(theirs)
    if loop is not lt.scan:  # which is lax.scan itself
        assert isinstance(ours, FunctionError)
    refused(TypeError, None, loop, f, H0, XS, reduce=(jnp.zeros(()), lambda acc, y: acc))


@every_loop
def test_errors_of_the_step_itself_come_through(loop: Any) -> None:
    def f(h: Any, x: Any) -> Any:
        raise KeyError("mine")

    refused(KeyError, "mine", loop, f, H0, XS)
    refused(TypeError, None, loop, lambda h: (h, h), H0, XS)
    refused(jax.errors.TracerBoolConversionError, None, loop, lambda h, x: (h, h) if h[0, 0] > 0 else (h, x), H0, XS)


@every_loop
@pytest.mark.parametrize("reduce", ["max", "Mean", 3, (1, 2), (1, 2, 3), jnp.add], ids=lambda what: str(what)[:20])
def test_folds_that_are_not_known(loop: Any, reduce: Any) -> None:
    refused(InputError, r'reduce=.*"mean", "sum", "last", or \(init, fold\)', loop, step, H0, XS, reduce=reduce)


@every_loop
def test_a_mean_of_whole_numbers(loop: Any) -> None:
    refused(
        InputError, 'reduce="mean" needs outputs that can be divided', loop, lambda h, k: (h, k), 0, KS, reduce="mean"
    )


def test_a_fold_that_changes_its_type() -> None:
    refused(TypeError, None, lt.checkpointed_scan, step, H0, XS, reduce=(jnp.zeros(2), lambda acc, y: y))


KNOBS: list[tuple[dict[str, Any], str]] = [
    ({"base": 1}, "base=1 is too small; give a whole number of at least 2"),
    ({"base": 0}, "base=0 is too small"),
    ({"base": True}, "base=True is a boolean"),
    ({"base": 2.0}, r"base=2\.0 is a float"),
    ({"checkpoints": 0}, "checkpoints=0 is too small"),
    ({"checkpoints": 1.5}, "checkpoints=1.5 is a float"),
    ({"budget": 0.5}, "budget=0.5 is a float"),
    ({"budget": "64M"}, "unit 'M'"),
    ({"base": 3, "checkpoints": 3}, "base=3 and checkpoints=3 are two knobs"),
    ({"budget": "1MB", "base": 2}, "base=2 and budget='1MB' are two knobs"),
]


@pytest.mark.parametrize("loop", [lt.checkpointed_scan, lt.plan_scan])
@pytest.mark.parametrize(("options", "match"), KNOBS, ids=lambda what: str(what)[:40])
def test_knobs_that_cannot_be_used(loop: Any, options: dict[str, Any], match: str) -> None:
    refused(InputError, match, loop, step, H0, XS, **options)


@pytest.mark.parametrize("loop", [lt.checkpointed_scan, lt.scan])
@pytest.mark.parametrize("unroll", [0, -1, 1.5, "all"])
def test_unrolling_that_cannot_be_done(loop: Any, unroll: Any) -> None:
    refused(InputError, "unroll=", loop, step, H0, XS, unroll=unroll)


def test_plans_that_do_not_fit() -> None:
    plan = lt.plan_scan(step, H0, XS, checkpoints=3)
    run = lt.checkpointed_scan
    refused(InputError, "the plan is for 40 steps, the loop has 39", run, step, H0, XS[1:], plan=plan)
    base = lt.plan_scan(step, H0, XS, base=3)
    refused(InputError, "the plan is for 40 steps, the loop has 41", run, step, H0, jnp.ones((41, 2, 3)), plan=base)
    refused(InputError, "plan='plan' is a str", run, step, H0, XS, plan="plan")
    refused(InputError, "are two knobs", run, step, H0, XS, plan=plan, budget="1MB")
    refused(InputError, "a loop of no steps needs no plan", lt.plan_scan, step, H0, XS[:0])


def gradient(plan: Plan, length: int) -> Any:
    return jax.grad(lambda h: lt.checkpointed_scan(step, h, jnp.ones((length, 2, 3)), plan=plan)[0].sum())(H0)


def test_plans_that_a_compiled_loop_cannot_follow() -> None:
    on_disk = choose(Chain.equal(StepCost(4, 10), 60), 40, disk=Disk(0.01, 0.01))
    refused(InputError, "plan without disk=", gradient, on_disk, 60)
    chain = Chain.of([StepCost(1, 2), StepCost(9, 30), StepCost(1, 2), StepCost(9, 30), StepCost(1, 2)])
    refused(InputError, "while the tape of .*plan_scan", gradient, choose(chain, 45), 5)


@pytest.mark.parametrize("wrt", ["closure", ("weights",), ("init", "y")])
def test_what_gradients_cannot_be_of(wrt: Any) -> None:
    refused(InputError, r'wrt=.*"closure", "init", "xs"', lt.plan_scan, step, H0, XS, wrt=wrt)


@pytest.mark.long
def test_a_budget_too_small_says_what_works_and_that_works() -> None:
    told: list[int] = []

    def telling(w: Any, h: Any, x: Any) -> Any:
        jax.debug.callback(lambda: told.append(1))
        return jnp.tanh(h * w + x), None

    def run(w: Any, budget: int) -> Any:
        return lt.checkpointed_scan(lambda h, x: telling(w, h, x), H0, XS, budget=budget)[0].sum()

    with pytest.raises(BudgetError) as caught:
        jax.grad(run)(W, 100)
    assert caught.value.budget == 100
    least = caught.value.least
    assert f"the least that works is {least:,} B; raise the budget" in str(caught.value)
    with pytest.raises(BudgetError):
        jax.grad(run)(W, least - 1)
    jax.effects_barrier()
    assert told == []  # nothing was run
    jax.grad(run)(W, least)
    jax.effects_barrier()
    assert len(told) > 40
    run(W, 100)  # without a gradient there is nothing to keep


def test_while_loops_refuse_too() -> None:
    loop = lt.checkpointed_while_loop
    refused(FunctionError, "cond=3", loop, 3, lambda c: c, H0)
    refused(FunctionError, "body=3", loop, lambda c: False, 3, H0)
    refused(InputError, "are two knobs", loop, lambda c: True, lambda c: c, H0, checkpoints=1, budget="1MB")
    refused(TypeError, None, loop, lambda c: True, lambda c: (c, c), H0)
    refused(TypeError, None, loop, lambda c: c, lambda c: c, H0)
    refused(InputError, "max_steps=-1", loop, lambda c: True, lambda c: c, H0, max_steps=-1)
