"""A step, traced once: what it takes, gives and closes over, without running anything.

The function that the user gave becomes a jaxpr over flat leaves. Whatever it closes over, values of an enclosing trace
among them, becomes an argument of its own, so that gradients reach it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from lowtide.errors import FunctionError

Leaves = list[Any]
StepFunction = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """`carry, y = f(carry, x)` on flat leaves; the types are those of one step."""

    jaxpr: core.Jaxpr
    consts: tuple[Any, ...]  # types of what it closes over
    carry: tuple[Any, ...]
    x: tuple[Any, ...]
    y: tuple[Any, ...]

    def run(self, consts: Sequence[Any], carry: Sequence[Any], x: Sequence[Any]) -> tuple[Leaves, Leaves]:
        """The carry and the outputs after one step."""
        out = call(self.jaxpr, consts, *carry, *x)
        return out[: len(self.carry)], out[len(self.carry) :]


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """A step with everything a loop over it begins with."""

    step: Step
    consts: Leaves
    init: Leaves
    xs: Leaves
    carry_tree: Any
    y_tree: Any


def call(jaxpr: core.Jaxpr, consts: Sequence[Any], *args: Any) -> Leaves:
    """Run a jaxpr with what it closes over."""
    results: Leaves = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, list(consts)))(*args)
    return results


def trace(f: StepFunction, init: Any, xs: Any, plain: Callable[[], Any] | None = None) -> Traced:
    """Trace the step of a loop over `xs`.

    Raises:
        FunctionError: f gives no pair, or another type of carry than it takes; the words are those of the plain loop,
            `lax.scan` unless another is given.
    """
    ask = plain or (lambda: lax.scan(f, init, xs, None if jax.tree.leaves(xs) else 1))
    carry_tree: Any
    xs_tree: Any
    carry, carry_tree = jax.tree.flatten(init)
    carry = [_array(leaf) for leaf in carry]
    xs_leaves, xs_tree = jax.tree.flatten(xs)
    xs_leaves = [_array(leaf) for leaf in xs_leaves]
    rows = [_row(leaf) for leaf in xs_leaves]
    trees: list[Any] = []

    def flat(*leaves: Any) -> Leaves:
        out = f(carry_tree.unflatten(leaves[: len(carry)]), xs_tree.unflatten(leaves[len(carry) :]))
        if not isinstance(out, tuple | list) or len(out) != 2:
            raise as_lax_says(ask)
        new, tree = jax.tree.flatten(out[0])
        if tree != carry_tree:
            raise as_lax_says(ask)
        ys, y_tree = jax.tree.flatten(out[1])
        trees[:] = [y_tree]
        return [*new, *ys]

    # A carry that begins as a Python number takes the type that the step gives it.
    for _ in range(3):
        closed = jax.make_jaxpr(flat)(*carry, *rows)
        given = closed.out_avals[: len(carry)]
        if all(_alike(old, new) for old, new in zip(closed.in_avals[: len(carry)], given, strict=True)):
            break
        carry = [_promoted(leaf, new) for leaf, new in zip(carry, given, strict=True)]
    else:
        raise as_lax_says(ask)
    step = Step(
        closed.jaxpr,
        tuple(jax.typeof(const) for const in closed.consts),
        tuple(given),
        tuple(closed.in_avals[len(carry) :]),
        tuple(closed.out_avals[len(carry) :]),
    )
    return Traced(step, list(closed.consts), carry, xs_leaves, carry_tree, trees[0])


def _array(leaf: Any) -> Any:
    """The leaf as an array, or as it is if it only says what an array would be like."""
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf)


def _row(xs: Any) -> Any:
    """What one row of an array is like, also where there is none."""
    if not xs.shape[0]:
        return jax.ShapeDtypeStruct(xs.shape[1:], xs.dtype)
    return jax.eval_shape(lambda xs: lax.index_in_dim(xs, 0, keepdims=False), xs)


def _alike(old: Any, new: Any) -> bool:
    same = (old.shape, old.dtype, old.sharding) == (new.shape, new.dtype, new.sharding)
    return bool(same and old.manual_axis_type == new.manual_axis_type)


def _promoted(leaf: Any, new: Any) -> Any:
    """The leaf in the step's own type, where it has no firm one itself."""
    aval = None if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    if aval is None or not aval.weak_type or aval.shape != new.shape:
        return leaf
    if jnp.result_type(leaf, jnp.zeros((), new.dtype)) == new.dtype:
        return lax.convert_element_type(leaf, new.dtype)
    return leaf


def as_lax_says(plain: Callable[[], Any]) -> FunctionError:
    """What is wrong with a step, in the words of the plain loop."""
    try:
        jax.eval_shape(plain)
    except TypeError as error:
        return FunctionError(str(error))
    return FunctionError("the step gives another type of carry than it takes; make both the same")
