"""A plan as one program of fixed size: nested loops whose bounds are read from the plan's tables.

Forward: legs of plain steps, each beginning with a snapshot, then the last stretch is taped. Backward, for each stretch
from the last to the first: pull its tape back; restore the next one's snapshot, run its legs, tape it. Slots and tape
are buffers that are written in place; outputs and gradients of the inputs are written where they belong.

Gradients of what the step closes over are summed per stretch and then added up: over many steps that rounds less than
one running sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from lowtide.jax.buffers import buffers, instantiated, read, write, zeros
from lowtide.jax.step import Leaves, Step
from lowtide.jax.tables import Tables
from lowtide.jax.taping import Taping, active_leaves
from lowtide.jax.ticks import Ticks


@dataclass(frozen=True, slots=True, eq=False)
class Lowering:
    """A loop. `follow` gives the tables once it is known what is taped; `ticks` is told of every first run."""

    step: Step
    follow: Callable[[Taping], Tables]
    length: int
    reverse: bool
    unroll: int
    ticks: Ticks

    def __call__(self, consts: Leaves, init: Leaves, xs: Leaves) -> tuple[Leaves, Leaves]:
        """The last carry and the outputs of all steps."""
        run = jax.custom_vjp(self._plain)
        run.defvjp(self._forward, _backward, symbolic_zeros=True)
        return run(consts, init, xs)

    def place(self, k: Any) -> Any:
        """Where step k finds its input and puts its output."""
        return self.length - 1 - k if self.reverse else k

    def loop(self, start: Any, stop: Any, body: Callable[[Any, Any], Any], held: Any) -> Any:
        """`body(k, held)` for k in [start, stop), so many at a time as the user asked for."""
        if self.unroll == 1:
            return lax.fori_loop(start, stop, body, held)

        def several(i: Any, held: Any) -> Any:
            for k in range(self.unroll):
                held = body(start + i * self.unroll + k, held)
            return held

        count = (stop - start) // self.unroll
        held = lax.fori_loop(0, count, several, held)
        return lax.fori_loop(start + count * self.unroll, stop, body, held)

    def _plain(self, consts: Leaves, init: Leaves, xs: Leaves) -> tuple[Leaves, Leaves]:
        """Nothing is differentiated: no snapshots, no tape."""

        def step(carry: Leaves, k_and_x: tuple[Any, Leaves]) -> tuple[Leaves, Leaves]:
            k, x = k_and_x
            self.ticks.step(self.place(k))
            return self.step.run(consts, carry, x)

        ks = jnp.arange(self.length, dtype=jnp.int32)
        return lax.scan(step, init, (ks, xs), self.length, self.reverse, self.unroll)

    def _forward(self, consts: Any, init: Any, xs: Any) -> tuple[tuple[Leaves, Leaves], _Pass]:
        perturbed = tuple(tuple(leaf.perturbed for leaf in leaves) for leaves in (consts, init, xs))
        consts, init, xs = ([leaf.value for leaf in leaves] for leaves in (consts, init, xs))
        taping = Taping(self.step, active_leaves(self.step, *perturbed))
        tables = self.follow(taping)
        ys = buffers(self.step.y, self.length)
        slots = buffers(self.step.carry, tables.slots)

        def advance(k: Any, held: tuple[Leaves, Leaves]) -> tuple[Leaves, Leaves]:
            state, ys = held
            state, y = self.step.run(consts, state, read(xs, self.place(k)))
            return state, self._put(ys, k, y)

        def leg(i: Any, held: tuple[Leaves, Leaves, Leaves]) -> tuple[Leaves, Leaves, Leaves]:
            state, slots, ys = held
            slot, start, stop = _entries(tables.legs, i)
            slots = write(slots, slot, state)
            state, ys = self.loop(start, stop, advance, (state, ys))
            return state, slots, ys

        state, slots, ys = lax.fori_loop(0, tables.sweep, leg, (init, slots, ys))
        start = int(tables.stretches[0, 3])

        def tape_step(k: Any, held: tuple[Leaves, Leaves, Leaves]) -> tuple[Leaves, Leaves, Leaves]:
            state, tape, ys = held
            state, y, row = taping.run(consts, state, read(xs, self.place(k)))
            return state, write(tape, k - start, row), self._put(ys, k, y)

        tape = buffers(taping.tape, tables.rows)
        state, tape, ys = self.loop(jnp.int32(start), jnp.int32(self.length), tape_step, (state, tape, ys))
        return (state, ys), _Pass(_Backward(self, tables, taping, perturbed[1]), consts, xs, slots, tape)

    def _put(self, ys: Leaves, k: Any, y: Leaves) -> Leaves:
        self.ticks.step(k)
        return write(ys, self.place(k), y)


@dataclass(frozen=True, slots=True, eq=False)
class _Backward:
    """The way back through a loop that has been run forward."""

    lowering: Lowering
    tables: Tables
    taping: Taping
    init: tuple[bool, ...]  # which leaves of the first carry want a gradient

    def __call__(self, held: _Pass, cotangents: tuple[Leaves, Leaves]) -> tuple[Leaves, Leaves, Leaves]:
        """Cotangents of what is closed over, the first carry and the inputs."""
        step, active, tables = self.lowering.step, self.taping.active, self.tables
        final, ys = cotangents
        same = self.taping.same(held.consts)
        inputs = [step.x[k] for k in active.x]
        blank = [zeros(step.consts[k]) for k in active.consts]

        def stretch(i: Any, now: tuple[Leaves, Leaves, Leaves, Leaves, Leaves]) -> Any:
            state, sums, x_sums, slots, tape = now
            slot, first, end, start, taped, stop = _entries(tables.stretches, i)
            slots, tape = self._prepare(held, slots, tape, slot, (first, end), (start, taped))

            def pull(n: Any, now: tuple[Leaves, Leaves, Leaves]) -> tuple[Leaves, Leaves, Leaves]:
                state, block, x_sums = now
                k = stop - 1 - n
                place = self.lowering.place(k)
                y = [zeros(step.y[p]) if isinstance(ys[p], SymbolicZero) else read([ys[p]], place)[0] for p in active.y]
                x = read(held.xs, place) if self.taping.reads_x else []
                new, state, x_new = self.taping.pull(read(tape, k - start), same, x, state, y)
                return state, _added(block, new), write(x_sums, place, x_new)

            state, block, x_sums = self.lowering.loop(jnp.int32(0), stop - start, pull, (state, blank, x_sums))
            return state, _added(sums, block), x_sums, slots, tape

        state = [instantiated(final[k], step.carry[k]) for k in active.carry]
        now = (state, blank, buffers(inputs, self.lowering.length), held.slots, held.tape)
        state, sums, x_sums, _, _ = lax.fori_loop(0, len(tables.stretches), stretch, now)
        carry = dict(zip(active.carry, state, strict=True))
        return (
            _at(active.consts, sums, len(step.consts)),
            [carry[k] if wanted else None for k, wanted in enumerate(self.init)],
            _at(active.x, x_sums, len(step.x)),
        )

    def _prepare(
        self, held: _Pass, slots: Leaves, tape: Leaves, slot: Any, legs: tuple[Any, Any], taped: tuple[Any, Any]
    ) -> tuple[Leaves, Leaves]:
        """Restore a snapshot, run legs from there, and tape the steps after them."""
        lowering, consts = self.lowering, held.consts

        def advance(k: Any, state: Leaves) -> Leaves:
            return lowering.step.run(consts, state, read(held.xs, lowering.place(k)))[0]

        def leg(i: Any, now: tuple[Leaves, Leaves]) -> tuple[Leaves, Leaves]:
            state, slots = now
            slot, start, stop = _entries(self.tables.legs, i)
            slots = write(slots, slot, state)
            return lowering.loop(start, stop, advance, state), slots

        def tape_step(k: Any, now: tuple[Leaves, Leaves]) -> tuple[Leaves, Leaves]:
            state, tape = now
            state, _, row = self.taping.run(consts, state, read(held.xs, lowering.place(k)))
            return state, write(tape, k - taped[0], row)

        state, slots = lax.fori_loop(*legs, leg, (read(slots, slot), slots))
        _, tape = lowering.loop(*taped, tape_step, (state, tape))
        return slots, tape


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, slots=True, eq=False)
class _Pass:
    """What the forward pass leaves for the backward."""

    backward: _Backward
    consts: Leaves
    xs: Leaves
    slots: Leaves
    tape: Leaves

    def tree_flatten(self) -> tuple[tuple[Leaves, ...], _Backward]:
        """The arrays, and what is known when the program is made."""
        return (self.consts, self.xs, self.slots, self.tape), self.backward

    @classmethod
    def tree_unflatten(cls, backward: _Backward, leaves: tuple[Leaves, ...]) -> _Pass:
        """The other way round."""
        return cls(backward, *leaves)


def _backward(held: _Pass, cotangents: tuple[Leaves, Leaves]) -> tuple[Leaves, Leaves, Leaves]:
    return held.backward(held, cotangents)


def _entries(table: Any, row: Any) -> list[Any]:
    """One row of a table, entry by entry."""
    found = lax.dynamic_index_in_dim(jnp.asarray(table), row, keepdims=False)
    return [found[k] for k in range(table.shape[1])]


def _added(one: Leaves, other: Leaves) -> Leaves:
    return [a + b for a, b in zip(one, other, strict=True)]


def _at(places: tuple[int, ...], leaves: Leaves, count: int) -> Leaves:
    """The leaves at their places, None elsewhere."""
    found = dict(zip(places, leaves, strict=True))
    return [found.get(k) for k in range(count)]
