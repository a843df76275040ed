"""A loop that ends when it ends: the gradients of the unrolled loop, with as many runs as the online plan says."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import lowtide.jax as lt
from lowtide import BudgetError, Chain, FunctionError, InputError, StepCost
from lowtide.planners.online import Online, online_slots
from tests.jax.networks import draw, quick

Loop = Callable[..., Any]


def _loss(loop: Loop, w: Any, h: Any, length: Any) -> Any:
    """The loop's last state, after as many steps as `length` says while it runs."""

    def body(carry: Any) -> Any:
        return jnp.tanh(carry[0] @ w + 0.1 * jnp.cos(carry[1])), carry[1] + 1

    return jnp.square(loop(lambda carry: carry[1] < length, body, (h, 0))[0]).sum()


def _scanned(w: Any, h: Any, length: int) -> Any:
    def step(h: Any, k: Any) -> tuple[Any, None]:
        return jnp.tanh(h @ w + 0.1 * jnp.cos(k)), None

    return jnp.square(lax.scan(step, h, jnp.arange(length))[0]).sum()


def _given() -> tuple[Any, Any]:
    return draw(0, 3, 3, scale=0.6), draw(1, 2, 3)


def _apart(one: Any, other: Any) -> float:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(a))) for a, b in pairs)


@cache
def _plain_gradients(length: int) -> Any:
    return quick(jax.value_and_grad(_scanned, (0, 1)), static_argnums=2)(*_given(), length)


@pytest.mark.long
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("slots", [1, 2, 5, 50])
def test_gradients_and_runs(slots: int) -> None:
    runs: list[int] = []

    def counted(cond: Any, body: Any, init: Any) -> Any:
        def told(carry: Any) -> Any:
            jax.debug.callback(lambda k: runs.append(int(k)), carry[1])
            return body(carry)

        return lt.checkpointed_while_loop(cond, told, init, checkpoints=slots)

    w, h = _given()
    gradients = quick(jax.value_and_grad(lambda w, h, n: _loss(counted, w, h, n), (0, 1)))
    for length in (1, 2, 3, 7, 20, 61):
        runs.clear()
        found = jax.block_until_ready(gradients(w, h, length))
        jax.effects_barrier()
        assert _apart(_plain_gradients(length), found) < 1e-12
        bill = Online(slots).bill(Chain.equal(StepCost(1, 1), length))
        assert len(runs) == bill.plain_runs + bill.taping_runs


@pytest.mark.usefixtures("x64")
def test_longer_than_its_table() -> None:
    w, h = _given()
    loop = partial(lt.checkpointed_while_loop, checkpoints=12)
    found = quick(jax.grad(lambda w: _loss(loop, w, h, 9000)))(w)
    assert _apart(quick(jax.grad(lambda w: _scanned(w, h, 9000)))(w), found) < 1e-12


@pytest.mark.usefixtures("x64")
def test_tangents() -> None:
    w, h = _given()
    loop = partial(lt.checkpointed_while_loop, checkpoints=4)

    def forward(f: Any) -> Any:
        return jax.jvp(f, (w,), (w,))  # without jit

    assert _apart(forward(lambda w: _scanned(w, h, 9)), forward(lambda w: _loss(loop, w, h, 9))) < 1e-12


@pytest.mark.long
@pytest.mark.usefixtures("x64")
def test_modes_and_mapping() -> None:
    w, h = _given()
    loop = partial(lt.checkpointed_while_loop, checkpoints=4)
    ours, plain = (lambda w: _loss(loop, w, h, 9)), (lambda w: _scanned(w, h, 9))

    assert _apart(quick(jax.hessian(plain))(w), quick(jax.hessian(ours))(w)) < 1e-12
    with pytest.raises(FunctionError, match="base="):
        jax.jacrev(jax.grad(ours))(w)
    lengths = [3, 9, 14]
    found = quick(jax.vmap(jax.grad(lambda w, n: _loss(loop, w, h, n)), (None, 0)))(w, jnp.array(lengths))
    expected = jnp.stack([_plain_gradients(n)[1][0] for n in lengths])
    assert _apart(expected, found) < 1e-12
    first = jax.grad(lambda h: _loss(loop, w, h, 6))(h)  # without jit
    assert _apart(_plain_gradients(6)[1][1], first) < 1e-12


@pytest.mark.long
def test_no_steps_and_a_last_one() -> None:
    def loop(init: Any) -> Any:
        return lt.checkpointed_while_loop(lambda c: c < 1e9, lambda c: c * 2.0, init, max_steps=5)

    assert loop(1.0) == 32.0
    assert jax.grad(loop)(1.0) == 32.0
    assert jax.grad(loop)(2e9) == 1.0
    assert jax.grad(lambda c: lt.checkpointed_while_loop(lambda c: c < 9, lambda c: c * 2, c, max_steps=0))(1.0) == 1.0


@pytest.mark.long
def test_what_there_is_no_gradient_of() -> None:
    """An integer carry, and a carry without a leaf."""
    assert lt.checkpointed_while_loop(lambda c: c < 10, lambda c: c + 3, 1) == 10
    assert lt.checkpointed_while_loop(lambda c: jnp.bool_(False), lambda c: c, ()) == ()

    def loss(w: Any) -> Any:
        state, _ = lt.checkpointed_while_loop(lambda c: c[1] < 4, lambda c: (c[0] * w, c[1] + 1), (1.0, 0))
        return state

    assert jax.grad(loss)(2.0) == 4 * 2.0**3


def test_a_budget_is_kept() -> None:
    """Snapshots grow with the budget, and are no more than are of use."""

    def temp(budget: Any, **most: int) -> int:
        def loss(w: Any) -> Any:
            def body(carry: Any) -> Any:
                return jnp.tanh(carry[0] @ w), carry[1] + 1

            start = (jnp.ones((16, 64)), 0)
            return lt.checkpointed_while_loop(lambda c: c[1] < 99, body, start, budget=budget, **most)[0].sum()

        compiled = jax.jit(jax.grad(loss)).lower(jnp.eye(64)).compile()
        memory: Any = compiled.memory_analysis()
        return int(memory.temp_size_in_bytes)

    small, large = temp("96KiB"), temp("512KiB")
    assert small < 96 * 1024 * 1.05 + 64 * 1024
    assert 256 * 1024 < large < 512 * 1024 * 1.05 + 64 * 1024
    assert temp("64MiB", max_steps=8) < 256 * 1024
    with pytest.raises(BudgetError, match="the least that works"):
        temp(64)


def test_where_states_go() -> None:
    """No slot is left empty before all are taken, and the first state stays."""
    for slots in (1, 2, 7):
        chosen = online_slots(slots, 50)
        assert chosen[:slots] == tuple(range(slots))
        assert 0 not in chosen[1:]
        assert set(chosen) <= set(range(slots + 1))
        stored: dict[int, int] = {}
        for step, slot in enumerate(chosen):
            stored[slot] = step
        stored.pop(slots, None)
        kept: set[int] = set()
        for action in Online(slots).actions(Chain.equal(StepCost(1, 1), 50)):
            match type(action).__name__:
                case "Save":
                    kept.add(action.step)  # type: ignore[union-attr]  # by its name
                case "Drop":
                    kept.discard(action.step)  # type: ignore[union-attr]  # by its name
                case "Restore":
                    break
        assert set(stored.values()) == kept


def test_refusals() -> None:
    go: Any = lambda c: c < 9  # noqa: E731
    on: Any = lambda c: c + 1  # noqa: E731
    with pytest.raises(TypeError, match="cond=3 is a int"):
        lt.checkpointed_while_loop(3, on, 0)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(TypeError, match="body=None is a NoneType"):
        lt.checkpointed_while_loop(go, None, 0)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(InputError, match="two knobs"):
        lt.checkpointed_while_loop(go, on, 0, checkpoints=3, budget=100)
    with pytest.raises(InputError, match="checkpoints=0"):
        lt.checkpointed_while_loop(go, on, 0, checkpoints=0)
    with pytest.raises(InputError, match="max_steps=-1"):
        lt.checkpointed_while_loop(go, on, 0, max_steps=-1)
    wrong: list[tuple[Any, Any]] = [(lambda c: c, on), (lambda c: (c < 9,), on), (go, lambda c: jnp.stack([c, c]))]
    for cond, body in wrong:
        with pytest.raises(TypeError) as theirs:
            lax.while_loop(cond, body, 0)
        with pytest.raises(TypeError) as ours:
            lt.checkpointed_while_loop(cond, body, 0)
        assert str(ours.value).splitlines()[0] == str(theirs.value).splitlines()[0]
    assert np.asarray(lt.checkpointed_while_loop(go, on, 0)) == 9
