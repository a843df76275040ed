"""What XLA allocates for a compiled loop and its gradients, beside what the plan says.

The network is the spiking one of brainstate's tutorial: 80 inputs, n neurons, 2 outputs, batch 64, float32. Nothing is
run: `memory_analysis().temp_size_in_bytes` is what the program takes besides its arguments and results.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import lowtide.jax as lt
from lowtide import BudgetError, Plan
from tests.jax.networks import spike

BATCH, INPUTS = 64, 80
KIB = 1024


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def step(weights: Any, carry: Any, x: Any) -> Any:
    (w1, b1, w2, b2), (g, v, o) = weights, carry
    g = g * 0.82 + x @ w1 + b1
    v = v - spike(v - 1)
    v = v + 0.05 * (g - v)
    o = o * 0.9 + spike(v - 1) @ w2 + b2
    return (g, v, o), o


def weights_of(n: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    return shape(INPUTS, n), shape(n), shape(n, 2), shape(2)


def state_of(n: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    return shape(BATCH, n), shape(BATCH, n), shape(BATCH, 2)


def lowered(loop: Any, n: int, length: int, **options: Any) -> Any:
    """The gradients of the weights; the loss is of the mean output."""

    def loss(weights: Any, init: Any, xs: Any) -> Any:
        _, ys = loop(lambda carry, x: step(weights, carry, x), init, xs, **options)
        return jnp.square(ys if options.get("reduce") else ys.mean(0)).sum()

    return jax.jit(jax.grad(loss)).lower(weights_of(n), state_of(n), shape(length, BATCH, INPUTS))


@cache
def compiled_bytes(loop: Any, n: int, length: int, **options: Any) -> int:
    compiled = lowered(loop, n, length, **options).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def plan_of(n: int, length: int, **options: Any) -> Plan:
    weights = [jnp.asarray(np.zeros(w.shape, np.float32)) for w in weights_of(n)]
    xs = shape(length, BATCH, INPUTS)
    return lt.plan_scan(lambda carry, x: step(weights, carry, x), state_of(n), xs, reduce="mean", **options)


@pytest.mark.long
@pytest.mark.parametrize(("length", "share"), [(400, 1 / 10), (4000, 1 / 25)])
def test_without_a_knob_it_is_a_small_share_of_plain(length: int, share: float, record_property: Any) -> None:
    plain = compiled_bytes(lax.scan, 256, length)
    found = compiled_bytes(lt.checkpointed_scan, 256, length)
    record_property("figure", f"jax, n=256, T={length}: {found:,} B, {found / plain:.1%} of lax.scan's {plain:,} B")
    assert found <= share * plain


# States that no gradient is made of (the last potentials and the running sum, 2 x 64 x 2 floats) need not be stored;
# a step's working set comes on top: two states, two cotangents, a row of the inputs, the sums and their last term.
NOT_NEEDED, WORKING = 2 * BATCH * 2 * 4, 48 * KIB
FEW_BASES = (2, 10, 17, 27, 133, 199, 300)
BASES = (2, 5, 10, 14, 17, 20, 27, 40, 80, 133, 199, 200, 300)


@pytest.mark.long
@pytest.mark.parametrize("bases", [FEW_BASES, pytest.param(BASES, marks=pytest.mark.slow)], ids=len)
def test_base_takes_base_tapes_and_a_state_for_each_stretch(bases: tuple[int, ...]) -> None:
    """And so the best one is near the one that balances tapes and states."""
    cost = plan_of(8, 400, base=20).chain[0]
    found = {base: compiled_bytes(lt.checkpointed_scan, 8, 400, reduce="mean", base=base) for base in bases}
    for base in bases:
        stretches = -(-400 // base) - 1
        promised = base * cost.tape + stretches * cost.state
        assert found[base] <= promised + WORKING, base
        if stretches > 1:  # a single one before the last may be halved
            assert found[base] >= promised - stretches * NOT_NEEDED - KIB, base
    best = min(bases, key=lambda base: found[base])
    balance = (400 * cost.state / cost.tape) ** 0.5
    assert balance / 1.5 <= best <= balance * 1.5
    falling = [found[base] for base in bases if base <= best]
    rising = [found[base] for base in bases if best <= base < 200]
    assert (falling, rising) == (sorted(falling, reverse=True), sorted(rising))


def knobs(length: int) -> list[dict[str, Any]]:
    return [{}, {"budget": "12%" if length == 400 else "3%"}, {"checkpoints": 10}, {"base": round(length**0.5)}]


def sizes_and_knobs() -> list[Any]:
    """Every knob for the small network over few steps, and for the large one over many."""
    return [
        pytest.param(n, length, options, marks=[] if (n == 8) == (length == 400) else [pytest.mark.slow])
        for n in (8, 256)
        for length in (400, 4000)
        for options in knobs(length)
    ]


@pytest.mark.long
@pytest.mark.parametrize(("n", "length", "options"), sizes_and_knobs(), ids=str)
def test_predicted_bytes_are_compiled_bytes(n: int, length: int, options: dict[str, Any], record_property: Any) -> None:
    predicted = plan_of(n, length, **options).bill.peak_memory
    found = compiled_bytes(lt.checkpointed_scan, n, length, reduce="mean", **options)
    record_property("figure", f"jax, n={n}, T={length}, {options}: {predicted:,} B predicted, {found:,} B compiled")
    assert 0.8 * found <= predicted <= 1.2 * found


def least_of(n: int, length: int) -> int:
    with pytest.raises(BudgetError) as caught:
        plan_of(n, length, budget=1)
    return caught.value.least


def check_budget(seed: int) -> None:
    """A random network, length and budget, from the least one on."""
    chance = random.Random(seed)
    n, length = chance.choice([8, 64, 256]), chance.randrange(50, 2000)
    least = least_of(n, length)
    budget = least if seed % 5 == 0 else int(least * 10 ** chance.uniform(0, 1.5))
    found = compiled_bytes(lt.checkpointed_scan, n, length, reduce="mean", budget=budget)
    assert plan_of(n, length, budget=budget).bill.peak_memory <= budget
    assert found <= 1.05 * budget + 64 * KIB, (n, length, budget / least)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_budgets_are_kept(seed: int) -> None:
    check_budget(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 40))
def test_more_budgets_are_kept(seed: int) -> None:
    check_budget(seed)


@pytest.mark.parametrize("n", [8, 256])
def test_one_byte_less_than_the_least_is_refused(n: int) -> None:
    least = least_of(n, 400)
    lowered(lt.checkpointed_scan, n, 400, reduce="mean", budget=least)
    with pytest.raises(BudgetError, match=f"the least that works is {least:,} B") as caught:
        lowered(lt.checkpointed_scan, n, 400, reduce="mean", budget=least - 1)
    assert (caught.value.budget, caught.value.least) == (least - 1, least)


@pytest.mark.parametrize("options", [{}, {"checkpoints": 10}, {"budget": "20%"}, {"base": 25}], ids=str)
def test_the_program_is_as_long_for_ten_times_the_steps(options: dict[str, Any]) -> None:
    """Line by line; only the tables grow, each of which is one line."""
    short, long = (lowered(lt.checkpointed_scan, 8, length, **options).as_text() for length in (401, 4001))
    assert short.count("\n") == long.count("\n")
    tables = [sum(len(line) for line in text.splitlines() if "dense<" in line) for text in (short, long)]
    assert len(long) - tables[1] <= 1.02 * (len(short) - tables[0])
    assert tables[1] <= 2 * 4 * 9 * 3 * 4001 + 64 * KIB  # hexadecimal digits of at most nine integers for each run


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"base": 20}, {"checkpoints": 10}], ids=str)
def test_outputs_are_held_once(options: dict[str, Any]) -> None:
    """Stacked outputs and their cotangents cost what they are, and nothing more."""
    reduced = compiled_bytes(lt.checkpointed_scan, 8, 400, reduce="mean", **options)
    stacked = compiled_bytes(lt.checkpointed_scan, 8, 400, **options)
    assert stacked - reduced <= 400 * BATCH * 2 * 4 + 32 * KIB
