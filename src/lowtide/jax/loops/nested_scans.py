"""A snapshot every `base` steps, from scans and `jax.checkpoint` alone, so that every derivative is supported.

An outer scan runs all stretches but the last, each under `jax.checkpoint`; the last, which may be shorter, keeps its
tapes. Nothing is padded or cut into blocks: inputs are read from, and outputs written to, one array each.

How the inputs get their gradients. If a row were read by index from an array that the loop closes over, the gradient of
each row would be an array of all rows. So a scan also runs over a *shadow* of the inputs: zeros with the inputs'
tangent, whose value nobody reads and which XLA therefore drops. A row has the value that is read by index and the
tangent of the shadow. For outputs it is the other way round: their values are written into one array, and their
tangents are stacked by the scans.

Taking a value from one array and its tangent from another is done by two primitives, not by a `jax.custom_jvp`
function: JAX forgets the rule of the latter once a scan around it has been differentiated. A first derivative does not
need it any more, but second derivatives do. The rule of a primitive stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from lowtide.errors import FunctionError
from lowtide.jax.loops.step import Step
from lowtide.jax.loops.ticks import Ticks
from lowtide.jax.xla.buffers import buffers, read
from lowtide.jax.xla.jaxprs import Leaves, batched_first, holds_complex, is_float

_JOINED_NAME = "lowtide_with_tangent_of"
# Primitives that only select or rearrange: their results, above all rows of the inputs, are recomputed, not taped.
_RECOMPUTED = frozenset(("dynamic_slice", "slice", "squeeze", "reshape", "broadcast_in_dim", _JOINED_NAME))


@dataclass(frozen=True, slots=True, eq=False)
class Nested:
    """A loop with a snapshot every `base` steps; the first run of every stretch is reported to `ticks`, if any."""

    step: Step
    base: int
    length: int
    reverse: bool
    unroll: int
    ticks: Ticks | None

    def __call__(self, consts: Leaves, init: Leaves, xs: Leaves) -> tuple[Leaves, Leaves]:
        """The last carry and the outputs of all steps."""
        self._refuse_io()
        segments = self._segments()
        shadows = [_cut(shadow(x), segments, self.reverse) if is_float(x) else [None] * len(segments) for x in xs]
        given = consts, [lax.stop_gradient(x) for x in xs]
        carry, ys = init, buffers(self.step.y, self.length)
        parts: list[Leaves] = []
        for place, segment in enumerate(segments):
            rows = [column[place] for column in shadows]
            one = self._one_of(segment, given, keeps_tapes=segment is segments[-1])
            (carry, ys), part = lax.scan(one, (carry, ys), (jnp.arange(segment.count, dtype=jnp.int32), rows))
            parts.append(part)
        columns = zip(ys, *parts, strict=True)
        return carry, [with_tangent_of(_joined(rows, self.reverse), y) if is_float(y) else y for y, *rows in columns]

    def _refuse_io(self) -> None:
        if any("IO" in type(effect).__name__ for effect in self.step.jaxpr.effects):
            raise FunctionError(
                f"base={self.base:,} cannot differentiate a step that calls io_callback; use another knob, or "
                "jax.debug.callback"
            )

    def _segments(self) -> list[_Segment]:
        """The starts, lengths and numbers of stretches; the last stretch is the one that keeps its tapes.

        A single stretch before the last would be a loop of one iteration. XLA inlines such a loop, and would then rerun
        it before the last stretch is pulled back, beside the tapes of the last. So that stretch is halved.
        """
        count = -(-self.length // self.base) - 1
        done = count * self.base
        last = _Segment(done, self.length - done, 1)
        if count != 1:
            return [_Segment(0, self.base, count), last] if count else [last]
        half, odd = divmod(self.base, 2)
        return [_Segment(0, 1, 1)] * odd + [_Segment(odd, half, 2), last]

    def _one_of(
        self, segment: _Segment, given: tuple[Leaves, Leaves], *, keeps_tapes: bool
    ) -> Callable[[Any, Any], Any]:
        """A function that runs one stretch of a segment, as the step of the scan over its stretches."""
        run: Callable[..., Any] = partial(self._stretch, segment.length)
        if not keeps_tapes:
            run = jax.checkpoint(run, prevent_cse=False)

        def one(held: Any, now: Any) -> Any:
            (carry, ys), (i, rows) = held, now
            start = segment.start + i * segment.length
            carry, y = run(given, carry, start, rows)
            if self.ticks is not None:
                self.ticks.stretch(start, segment.length)
            return (carry, self._put(ys, start, y, segment.length)), y

        return one

    def _stretch(
        self, length: int, given: tuple[Leaves, Leaves], carry: Leaves, start: Any, rows: list[Any]
    ) -> tuple[Leaves, Leaves]:
        """The carry after `length` steps from step `start` on, and their outputs; `rows` are the inputs' shadows."""
        consts, values = given

        def step(carry: Leaves, now: tuple[Any, list[Any]]) -> tuple[Leaves, Leaves]:
            k, tangents = now
            place = self.length - 1 - k if self.reverse else k
            rows = [
                row if tangent is None else with_tangent_of(tangent, row)
                for row, tangent in zip(read(values, place), tangents, strict=True)
            ]
            return self.step.run(consts, carry, rows)

        # Not for a step with effects, which would happen once more, nor with complex numbers, for which JAX fails.
        if not self.step.jaxpr.effects and not holds_complex(self.step.jaxpr):
            step = jax.checkpoint(step, prevent_cse=False, policy=_keep_the_rest)
        ks = start + jnp.arange(length, dtype=jnp.int32)
        return lax.scan(step, carry, (ks, rows), length, unroll=min(self.unroll, length))

    def _put(self, ys: Leaves, start: Any, new: Leaves, length: int) -> Leaves:
        """The array of all outputs with those of one stretch written into it, as values without tangents."""
        if self.reverse:
            start, new = self.length - length - start, [lax.rev(y, (0,)) for y in new]
        pairs = zip(ys, map(lax.stop_gradient, new), strict=True)
        return [lax.dynamic_update_slice_in_dim(y, part, start, 0) for y, part in pairs]


@dataclass(frozen=True, slots=True)
class _Segment:
    """`count` stretches of `length` steps each, from step `start` on."""

    start: int
    length: int
    count: int


def _cut(x: Any, segments: list[_Segment], reverse: bool) -> list[Any]:
    """For each segment the rows of its stretches, in the order of the steps."""
    x = lax.rev(x, (0,)) if reverse else x
    rows = [(part, x[part.start : part.start + part.length * part.count]) for part in segments]
    return [some.reshape(part.count, part.length, *x.shape[1:]) for part, some in rows]


def _joined(parts: list[Any], reverse: bool) -> Any:
    """The rows of all stretches, in order."""
    joined = lax.concatenate([part.reshape(part.shape[0] * part.shape[1], *part.shape[2:]) for part in parts], 0)
    return lax.rev(joined, (0,)) if reverse else joined


def _keep_the_rest(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in _RECOMPUTED


def shadow(x: Any) -> Any:
    """Zeros with the tangent of `x`."""
    return _shadow_p.bind(x)


def with_tangent_of(shadow: Any, value: Any) -> Any:
    """The value, with the tangent of `shadow`, which has the same type, instead of its own."""
    return _joined_p.bind(value, shadow)


def _shadow_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return _shadow_p.bind(*primals), tangents[0]


_shadow_p = core.Primitive("lowtide_shadow")
_shadow_p.def_impl(jnp.zeros_like)
_shadow_p.def_abstract_eval(lambda aval: aval)
ad.primitive_jvps[_shadow_p] = _shadow_jvp
batching.defvectorized(_shadow_p)
mlir.register_lowering(_shadow_p, mlir.lower_fun(jnp.zeros_like, multiple_results=False))


def _joined_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return _joined_p.bind(*primals), tangents[1]


def _joined_batch(args: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, int]:
    size = next(arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None)
    return _joined_p.bind(*batched_first(args, dims, size)), 0


_joined_p = core.Primitive(_JOINED_NAME)
_joined_p.def_impl(lambda value, _: value)
_joined_p.def_abstract_eval(lambda _, shadow: shadow)  # the shadow's type, which may be weak
ad.primitive_jvps[_joined_p] = _joined_jvp
batching.primitive_batchers[_joined_p] = _joined_batch
mlir.register_lowering(_joined_p, lambda _, value, __: [value])
