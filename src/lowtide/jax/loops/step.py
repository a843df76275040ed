"""A loop as the user wrote it, and its step, traced once.

The user's function becomes a jaxpr over flat leaves; nothing is run. Whatever it closes over, including values of an
enclosing trace, becomes an argument of the jaxpr, so that gradients reach it. `TracedLoop` treats scans and for loops,
with or without a fold of the outputs, alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from lowtide.checks import MOST_STEPS, function, whole_number
from lowtide.errors import FunctionError, InputError
from lowtide.interface.options import Fold, Reduce, fold_of, refuse_reducing_nothing
from lowtide.jax.installed import manual_axes
from lowtide.jax.loops.ticks import Ticks
from lowtide.jax.xla.buffers import zeros
from lowtide.jax.xla.jaxprs import Leaves, call, is_float

StepFunction = Callable[[Any, Any], Any]
_MOST_TRACES = 3  # of one step, until its carry's types stop changing


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """`carry, y = f(carry, x)` on flat leaves, and the types of its arguments and results in one step."""

    jaxpr: core.Jaxpr
    consts: tuple[Any, ...]  # what the step closes over
    carry: tuple[Any, ...]
    x: tuple[Any, ...]
    y: tuple[Any, ...]

    def run(self, consts: Sequence[Any], carry: Sequence[Any], x: Sequence[Any]) -> tuple[Leaves, Leaves]:
        """The carry and the outputs after one step."""
        out = call(self.jaxpr, consts, *carry, *x)
        return out[: len(self.carry)], out[len(self.carry) :]


@dataclass(frozen=True, slots=True, eq=False)
class TracedStep:
    """A step with the values from which a loop over it starts."""

    step: Step
    consts: Leaves
    init: Leaves
    xs: Leaves
    carry_tree: Any
    y_tree: Any


def trace_step(f: StepFunction, init: Any, xs: Any, plain: Callable[[], Any] | None = None) -> TracedStep:
    """Trace the step of a loop over `xs`.

    Raises:
        FunctionError: f returns something other than a pair, or a carry of another type than it takes. The message is
            that of the plain loop, which is `lax.scan` unless `plain` is passed.
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

    # A carry that begins as a Python number takes the type that the step returns. That type is not weak, so each leaf
    # changes at most once; but its change may make another one change in the next trace. The last trace is the one that
    # finds all types unchanged.
    for _ in range(_MOST_TRACES):
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
    return TracedStep(step, list(closed.consts), carry, xs_leaves, carry_tree, trees[0])


def _array(leaf: Any) -> Any:
    """The leaf as an array; a `ShapeDtypeStruct` is left as it is."""
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf)


def _row(xs: Any) -> Any:
    """The type of one row of an array, also of an array without rows."""
    if not xs.shape[0]:
        return jax.ShapeDtypeStruct(xs.shape[1:], xs.dtype)
    return jax.eval_shape(lambda xs: lax.index_in_dim(xs, 0, keepdims=False), xs)


def _alike(old: Any, new: Any) -> bool:
    same = (old.shape, old.dtype, old.sharding) == (new.shape, new.dtype, new.sharding)
    return bool(same and manual_axes(old) == manual_axes(new))


def _promoted(leaf: Any, new: Any) -> Any:
    """The leaf in the type that the step returns, if its own type is weak and promotes to that."""
    aval = None if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    if aval is None or not aval.weak_type or aval.shape != new.shape:
        return leaf
    if jnp.result_type(leaf, jnp.zeros((), new.dtype)) == new.dtype:
        return lax.convert_element_type(leaf, new.dtype)
    return leaf


def as_lax_says(plain: Callable[[], Any]) -> FunctionError:
    """An error about a step, with the message of the plain loop."""
    try:
        jax.eval_shape(plain)
    except TypeError as error:
        return FunctionError(str(error))
    return FunctionError("the step returns another type of carry than it takes; make both the same")


class TracedLoop:
    """`carry, y = f(carry, x)` over the rows of `xs`."""

    def __init__(
        self, f: StepFunction, init: Any, xs: Any, length: int | None, reverse: bool, unroll: Any, reduce: Reduce
    ) -> None:
        function(f, "f")
        self.length = loop_length(xs, length)
        self.reverse = bool(reverse)
        if isinstance(unroll, bool):
            unroll = self.length if unroll else 1  # as in lax.scan
        self.unroll = max(1, min(whole_number(unroll, "unroll", least=1), self.length))
        self._f, self._init, self._xs = f, init, xs
        self._reduce = reduce
        self._fold = fold_of(reduce) or self._fold_of_word()

    def _fold_of_word(self) -> Fold | None:
        """The fold that a word stands for; it starts from zeros of the outputs' types."""
        if self._reduce is None:
            return None
        if self.length == 0:
            refuse_reducing_nothing(self._reduce)
        outputs = trace_step(self._f, self._init, self._xs)
        blank = outputs.y_tree.unflatten([zeros(y) for y in outputs.step.y])
        if self._reduce == "last":
            return blank, lambda _, y: y
        if self._reduce == "mean" and not all(map(is_float, outputs.step.y)):
            raise InputError('reduce="mean" needs outputs that can be divided, some are not floats; use "sum"')
        # Starting from the integer 0, as Python's `sum` does, turns booleans into integers: true outputs are counted.
        blank = jax.tree.map(lambda y: y if is_float(y) else 0 + y, blank)
        return blank, lambda acc, y: jax.tree.map(jnp.add, acc, y)

    def _step(self) -> tuple[StepFunction, Any]:
        """The step and the first carry, both extended by the fold if there is one."""
        if self._fold is None:
            return self._f, self._init
        f, (blank, fold) = self._f, self._fold

        def folding(carry: Any, x: Any) -> Any:
            out = f(carry[0], x)
            if not isinstance(out, tuple | list) or len(out) != 2:
                return out  # tracing it raises the error
            return (out[0], fold(carry[1], out[1])), None

        return folding, (self._init, blank)

    def trace(self) -> TracedStep:
        """The step, traced once."""
        step, init = self._step()
        return trace_step(step, init, self._xs)

    def plain(self, ticks: Ticks | None) -> tuple[Any, Any]:
        """`lax.scan` itself."""
        step, init = self._step()
        xs = self._xs
        if ticks is not None:
            step, xs = self._reporting(step, ticks), (jnp.arange(self.length, dtype=jnp.int32), xs)
        carry, ys = lax.scan(step, init, xs, self.length, self.reverse, self.unroll)
        return self._unfolded(carry, ys)

    def _reporting(self, step: StepFunction, ticks: Ticks) -> StepFunction:
        """The step over pairs of an index and an input, which reports each of its runs."""

        def reporting(carry: Any, k_and_x: tuple[Any, Any]) -> Any:
            k, x = k_and_x
            ticks.step(self.length - 1 - k if self.reverse else k)
            return step(carry, x)

        return reporting

    def result(self, traced: TracedStep, carry: Leaves, ys: Leaves) -> tuple[Any, Any]:
        """The last carry and the outputs in the user's own structure."""
        return self._unfolded(traced.carry_tree.unflatten(carry), traced.y_tree.unflatten(ys))

    def _unfolded(self, carry: Any, ys: Any) -> tuple[Any, Any]:
        if self._fold is None:
            return carry, ys
        carry, acc = carry
        return carry, jax.tree.map(lambda leaf: leaf / self.length, acc) if self._reduce == "mean" else acc


def loop_length(xs: Any, length: int | None) -> int:
    """The number of steps that `xs` and `length` agree on.

    Raises:
        InputError: they disagree, or neither determines the number.
    """
    sizes: dict[int, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(xs):
        name = f"xs{jax.tree_util.keystr(path)}"
        shape = jnp.shape(leaf)
        if not shape:
            raise InputError(f"{name}={leaf!r} has no axis to run over; give an array with a row for each step")
        sizes.setdefault(shape[0], name)
    if length is not None:
        whole_number(length, "length", least=0, most=MOST_STEPS)
        sizes.setdefault(int(length), "length")
    if len(sizes) > 1:
        said = ", ".join(f"{name} says {size:,}" for size, name in sizes.items())
        raise InputError(f"the inputs do not agree on the number of steps: {said}; make them equal")
    if not sizes:
        raise InputError("nothing says how many steps there are: give xs, or length=")
    return next(iter(sizes))


def without_carry(f: Callable[..., Any]) -> StepFunction:
    """The step of a for loop, `f(*x)`, as the step of a scan whose carry is unused."""
    function(f, "f")
    return lambda carry, x: (carry, f(*x))
