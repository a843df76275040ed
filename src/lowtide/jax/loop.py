"""A loop as the user asked for it, in one form for scans and for loops, with or without a fold of the outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lowtide.checks import MOST_STEPS, function, whole_number
from lowtide.errors import InputError
from lowtide.folds import Fold, Reduce, fold_of, refuse_reducing_nothing
from lowtide.jax.buffers import zeros
from lowtide.jax.jaxprs import is_float
from lowtide.jax.step import Leaves, StepFunction, Traced, trace
from lowtide.jax.ticks import Ticks


def without_carry(f: Callable[..., Any]) -> StepFunction:
    """The step of a for loop: `f(*x)` and no carry."""
    function(f, "f")
    return lambda carry, x: (carry, f(*x))


class Loop:
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
        """A word as a fold, which begins with zeros like the outputs."""
        if self._reduce is None:
            return None
        if self.length == 0:
            refuse_reducing_nothing(self._reduce)
        outputs = trace(self._f, self._init, self._xs)
        blank = outputs.y_tree.unflatten([zeros(y) for y in outputs.step.y])
        if self._reduce == "last":
            return blank, lambda _, y: y
        if self._reduce == "mean" and not all(map(is_float, outputs.step.y)):
            raise InputError('reduce="mean" needs outputs that can be divided, some are not floats; use "sum"')
        # From 0 on, as in Python: true outputs are counted.
        blank = jax.tree.map(lambda y: y if is_float(y) else 0 + y, blank)
        return blank, lambda acc, y: jax.tree.map(jnp.add, acc, y)

    def _step(self) -> tuple[StepFunction, Any]:
        """The step and the first carry; a fold is part of both."""
        if self._fold is None:
            return self._f, self._init
        f, (blank, fold) = self._f, self._fold

        def folding(carry: Any, x: Any) -> Any:
            out = f(carry[0], x)
            if not isinstance(out, tuple | list) or len(out) != 2:
                return out  # tracing says what is wrong with it
            return (out[0], fold(carry[1], out[1])), None

        return folding, (self._init, blank)

    def trace(self) -> Traced:
        """The step, traced once."""
        step, init = self._step()
        return trace(step, init, self._xs)

    def plain(self, ticks: Ticks) -> tuple[Any, Any]:
        """`lax.scan` itself."""
        step, init = self._step()

        def told(carry: Any, now: tuple[Any, Any]) -> Any:
            k, x = now
            ticks.step(self.length - 1 - k if self.reverse else k)
            return step(carry, x)

        if ticks.off:
            carry, ys = lax.scan(step, init, self._xs, self.length, self.reverse, self.unroll)
        else:
            ks = jnp.arange(self.length, dtype=jnp.int32)
            carry, ys = lax.scan(told, init, (ks, self._xs), self.length, self.reverse, self.unroll)
        return self._unfolded(carry, ys)

    def result(self, traced: Traced, carry: Leaves, ys: Leaves) -> tuple[Any, Any]:
        """Last carry and outputs as the user gets them."""
        return self._unfolded(traced.carry_tree.unflatten(carry), traced.y_tree.unflatten(ys))

    def _unfolded(self, carry: Any, ys: Any) -> tuple[Any, Any]:
        if self._fold is None:
            return carry, ys
        carry, acc = carry
        return carry, jax.tree.map(lambda leaf: leaf / self.length, acc) if self._reduce == "mean" else acc


def loop_length(xs: Any, length: int | None) -> int:
    """The number of steps that `xs` and `length` agree on.

    Raises:
        InputError: they do not, or do not say.
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
