"""What is refused: the type of error that brainstate raises, with names, numbers and a way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import lowtide.brainstate as lt
from lowtide.errors import FunctionError, InputError, LowtideError
from tests.brainstate.partners import brainstate, transform, u

XS = jnp.arange(6.0)


def pair(carry: Any, x: Any) -> Any:
    return carry + x, x


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda lt: lt.checkpointed_for_loop(3, XS), TypeError, "f=3 is a int, which cannot be called"),
        (lambda lt: lt.checkpointed_scan(None, 0.0, XS), TypeError, "f=None is a NoneType"),
        (
            lambda lt: lt.checkpointed_for_loop(lambda a, b: a, XS, XS[:4]),
            ValueError,
            r"xs\[0\] says 6, xs\[1\] says 4",
        ),
        (lambda lt: lt.checkpointed_for_loop(abs, XS, length=4), ValueError, r"xs\[0\] says 6, length says 4"),
        (lambda lt: lt.checkpointed_for_loop(abs, 3.0), ValueError, r"xs\[0\]=3.0 has no axis to run over"),
        (lambda lt: lt.checkpointed_for_loop(lambda: XS), ValueError, "nothing says how many steps there are"),
        (lambda lt: lt.checkpointed_for_loop(abs, XS, base=1), ValueError, "base=1 is too small"),
        (lambda lt: lt.checkpointed_for_loop(abs, XS, base=True), ValueError, "base=True is a boolean"),
        (lambda lt: lt.checkpointed_for_loop(abs, XS, base=2.0), ValueError, "base=2.0 is a float"),
        (
            lambda lt: lt.checkpointed_scan(lambda c, x: c + x, 0.0, XS),
            ValueError,
            r"f returned PyTreeDef\(\*\); .* a pair",
        ),
        (lambda lt: lt.checkpointed_scan(lambda c, x: (c, x, x), 0.0, XS), ValueError, r"PyTreeDef\(\(\*, \*, \*\)\)"),
    ],
)
def test_errors_are_those_of_brainstate(call: Callable[[Any], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error):
        call(transform)
    with pytest.raises(error, match=message) as raised:
        call(lt)
    assert isinstance(raised.value, LowtideError)


@pytest.mark.parametrize(
    ("carry", "new", "message"),
    [
        (jnp.zeros(3), jnp.zeros(2), r"the carry from float32\[3\] to float32\[2\]"),
        (jnp.zeros(3), jnp.zeros(3, int), r"the carry from float32\[3\] to int32\[3\]"),
        (jnp.zeros(3), (jnp.zeros(3), 1), r"the carry from PyTreeDef\(\*\) to PyTreeDef\(\(\*, \*\)\)"),
        (1.0 * u.mV, 1.0 * u.mA, r"the carry from .*Quantity\[mV\].* to .*Quantity\[mA\]"),
        ({"a": 1.0, "b": jnp.zeros(2)}, {"a": 1.0, "b": jnp.zeros(3)}, r"float32\[2\] to float32\[3\]"),
    ],
)
def test_a_carry_keeps_its_type(carry: Any, new: Any, message: str) -> None:
    with pytest.raises(FunctionError, match=message):
        lt.checkpointed_scan(lambda c, x: (new, x), carry, XS)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (jnp.zeros(4), r"HiddenState 'v' from float32\[3\] to float32\[4\]; shape, dtype and unit stay the same"),
        (jnp.zeros(3, int), r"HiddenState 'v' from float32\[3\] to int32\[3\]"),
    ],
)
def test_a_state_keeps_its_type(value: Any, message: str) -> None:
    state = brainstate.HiddenState(jnp.zeros(3), name="v")

    def step(x: Any) -> Any:
        state.value = value
        return x

    with pytest.raises(TypeError):
        transform.for_loop(step, XS)
    with pytest.raises(FunctionError, match=message):
        lt.checkpointed_for_loop(step, XS)
    assert state.value.tolist() == [0.0, 0.0, 0.0]


def test_a_state_without_a_name_is_called_by_its_type() -> None:
    state = brainstate.ShortTermState(jnp.zeros(()))

    def step(x: Any) -> Any:
        state.value = jnp.zeros(2)

    with pytest.raises(FunctionError, match=r"changes ShortTermState from float32\[\] to float32\[2\]"):
        lt.plan_for_loop(step, XS)


def test_a_state_cannot_be_an_output() -> None:
    state = brainstate.ShortTermState(jnp.zeros(()))
    with pytest.raises(ValueError, match="cannot be an instance of State"):
        lt.checkpointed_for_loop(lambda x: state, XS)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"base": 2, "budget": "1MiB"}, "base=2 and budget='1MiB' are two knobs"),
        ({"checkpoints": 0}, "checkpoints=0 is too small"),
        ({"budget": 1.5}, "budget=1.5"),
        ({"plan": 3}, "plan=3 is a int"),
        ({"plan": lt.plan_for_loop(abs, XS[:4])}, "the plan is for 4 steps, the loop has 6"),
        ({"unroll": 0}, "unroll=0 is too small"),
        ({"reduce": "median"}, "reduce='median'"),
        ({"pbar": 2.5}, "pbar=2.5"),
        ({"pbar": transform.ProgressBar(desc=("{y}", lambda data: {"y": data["y"]}))}, "its desc asks for 'y'"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_knobs_that_cannot_be_used(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        lt.checkpointed_for_loop(jnp.sin, XS, **knobs)


@pytest.mark.parametrize("pbar", [0, 7, transform.ProgressBar(freq=7)], ids=["0", "7", "ProgressBar"])
def test_bars_that_brainstate_refuses(pbar: Any) -> None:
    for loop in (transform.for_loop, lt.checkpointed_for_loop):
        with pytest.raises(ValueError, match="Print rate"):
            loop(jnp.sin, XS, pbar=pbar)


@pytest.mark.parametrize("wrt", ["xs", ("weights",)], ids=str)
def test_what_gradients_are_taken_of(wrt: Any) -> None:
    with pytest.raises(InputError, match='give a tuple of "closure", "init", "xs"'):
        lt.plan_for_loop(jnp.sin, XS, wrt=wrt)
