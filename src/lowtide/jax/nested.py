"""A snapshot every `base` steps, from scans and `jax.checkpoint` alone, so that every derivative can be taken of it.

An outer scan runs all stretches but the last, each under `jax.checkpoint`; the last, which may be shorter, keeps its
tapes. Nothing is padded or cut up: inputs are read from, and outputs written to, one array each.

How gradients of inputs get out. A row read by index from an array that the loop closes over would give each row's
gradient as an array of all rows. So a scan runs over a *shadow* of the inputs as well: zeros with the inputs' tangent,
whose value nobody reads, and which XLA therefore drops. A row has the value read by index and the shadow's tangent. The
outputs are the other way round: their values are written into one array, their tangents come stacked by the scans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lowtide.jax.buffers import buffers, read
from lowtide.jax.jaxprs import holds_complex
from lowtide.jax.shadows import JOINED, shadow, with_tangent_of
from lowtide.jax.step import Leaves, Step
from lowtide.jax.taping import is_float
from lowtide.jax.ticks import Ticks

# What only picks or rearranges is made again rather than kept on the tape: a row of the inputs above all.
_PICKED = frozenset(("dynamic_slice", "slice", "squeeze", "reshape", "broadcast_in_dim", JOINED))


def _keep_the_rest(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in _PICKED


@dataclass(frozen=True, slots=True, eq=False)
class Nested:
    """A loop with a snapshot every `base` steps; `ticks` is told of every stretch that has been run."""

    step: Step
    base: int
    length: int
    reverse: bool
    unroll: int
    ticks: Ticks

    def __call__(self, consts: Leaves, init: Leaves, xs: Leaves) -> tuple[Leaves, Leaves]:
        """The last carry and the outputs of all steps."""
        count = -(-self.length // self.base) - 1  # stretches before the last
        done = count * self.base
        shadows = [_stretches(shadow(x), count, self.base, self.reverse) if is_float(x) else (None, None) for x in xs]
        main, rest = [first for first, _ in shadows], [last for _, last in shadows]

        values = [lax.stop_gradient(x) for x in xs]

        def stretch(carry: Leaves, start: Any, length: int, rows: list[Any]) -> tuple[Leaves, Leaves]:
            def step(carry: Leaves, now: tuple[Any, list[Any]]) -> tuple[Leaves, Leaves]:
                k, tangents = now
                place = self.length - 1 - k if self.reverse else k
                rows = [
                    row if tangent is None else with_tangent_of(tangent, row)
                    for row, tangent in zip(read(values, place), tangents, strict=True)
                ]
                return self.step.run(consts, carry, rows)

            # Not where the step tells the outside something, which it would be told once more; and JAX cannot do it
            # with complex numbers.
            if not self.step.jaxpr.effects and not holds_complex(self.step.jaxpr):
                step = jax.checkpoint(step, prevent_cse=False, policy=_keep_the_rest)

            ks = start + jnp.arange(length, dtype=jnp.int32)
            return lax.scan(step, carry, (ks, rows), length, unroll=min(self.unroll, length))

        # XLA takes a loop that is run once apart, and would then join first run and rerun.
        inner = jax.checkpoint(stretch, prevent_cse=count == 1, static_argnums=(2,))

        def outer(held: tuple[Leaves, Leaves], now: tuple[Any, list[Any]]) -> tuple[tuple[Leaves, Leaves], Leaves]:
            (carry, ys), (i, rows) = held, now
            carry, y = inner(carry, i * self.base, self.base, rows)
            self.ticks.stretch(i * self.base, self.base)
            return (carry, self._put(ys, i * self.base, y, self.base)), y

        held = (init, buffers(self.step.y, self.length))
        held, earlier = lax.scan(outer, held, (jnp.arange(count, dtype=jnp.int32), main))
        carry, last = stretch(held[0], jnp.int32(done), self.length - done, rest)
        self.ticks.stretch(done, self.length - done)
        ys = self._put(held[1], done, last, self.length - done)
        return carry, [
            with_tangent_of(_joined(before, after, self.reverse), y) if is_float(y) else y
            for y, before, after in zip(ys, earlier, last, strict=True)
        ]

    def _put(self, ys: Leaves, start: Any, new: Leaves, length: int) -> Leaves:
        """The outputs of a stretch, as values, where they belong."""
        if self.reverse:
            start, new = self.length - length - start, [lax.rev(y, (0,)) for y in new]
        pairs = zip(ys, map(lax.stop_gradient, new), strict=True)
        return [lax.dynamic_update_slice_in_dim(y, part, start, 0) for y, part in pairs]


def _stretches(x: Any, count: int, base: int, reverse: bool) -> tuple[Any, Any]:
    """The rows of all stretches before the last, and those of the last, in the order of the steps."""
    x = lax.rev(x, (0,)) if reverse else x
    return x[: count * base].reshape(count, base, *x.shape[1:]), x[count * base :]


def _joined(earlier: Any, last: Any, reverse: bool) -> Any:
    """The rows of all stretches in order."""
    joined = lax.concatenate([earlier.reshape(-1, *last.shape[1:]), last], 0)
    return lax.rev(joined, (0,)) if reverse else joined
