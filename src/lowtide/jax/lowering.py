"""A plan as one program of fixed size: nested loops whose bounds are read from the plan's tables.

Forward: legs of plain steps, each beginning with a snapshot, then the last stretch is taped. Backward, for each stretch
from the last to the first: restore its snapshot, run its legs, tape it, pull the tape back. Slots and tape are buffers
that are written in place; outputs and gradients of the inputs are written where they belong.

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
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from lowtide.jax.buffers import buffers, instantiated, read, write, zeros
from lowtide.jax.linear import LinearMap, apply, once
from lowtide.jax.step import Leaves, Step
from lowtide.jax.tables import Tables
from lowtide.jax.taping import Taping, active_leaves, replaced
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
        run = jax.custom_jvp(self.plain)
        run.defjvp(self._differentiated, symbolic_zeros=True)
        carry, ys = run(consts, init, xs)
        return carry, ys

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

    def plain(self, consts: Leaves, init: Leaves, xs: Leaves, *, told: bool = True) -> tuple[Leaves, Leaves]:
        """Every step once: no snapshots, no tape."""

        def step(carry: Leaves, k_and_x: tuple[Any, Leaves]) -> tuple[Leaves, Leaves]:
            k, x = k_and_x
            if told:
                self.ticks.step(self.place(k))
            return self.step.run(consts, carry, x)

        ks = jnp.arange(self.length, dtype=jnp.int32)
        carry, ys = lax.scan(step, init, (ks, xs), self.length, self.reverse, self.unroll)
        return carry, ys

    def _differentiated(self, primals: Any, tangents: Any) -> tuple[tuple[Leaves, Leaves], tuple[Leaves, Leaves]]:
        """Values and tangents; what is not perturbed has a `SymbolicZero` for its tangent."""
        perturbed = [[not isinstance(tangent, SymbolicZero) for tangent in leaves] for leaves in tangents]
        taping = Taping(self.step, active_leaves(self.step, *perturbed))
        back = Backward(self, self.follow(taping), taping, tuple(k for k, moves in enumerate(perturbed[1]) if moves))
        (carry, ys), held = back.forward_pass(*primals)
        carry, ys = once(carry), once(ys)
        active = taping.active
        moving = [tangent for leaves in tangents for tangent in leaves if not isinstance(tangent, SymbolicZero)]
        like = [*(carry[k] for k in active.carry), *(ys[k] for k in active.y)]
        out = apply(LinearMap(back.tangents, back.cotangents), held.leaves(), moving, like)
        carry_out = with_zeros(carry, active.carry, out[: len(active.carry)])
        return (carry, ys), (carry_out, with_zeros(ys, active.y, out[len(active.carry) :]))


@dataclass(frozen=True, slots=True)
class Held:
    """What the forward pass leaves for the way back."""

    consts: Leaves
    init: Leaves
    xs: Leaves
    slots: Leaves
    tape: Leaves

    def leaves(self) -> Leaves:
        """All of it in one list."""
        return [*self.consts, *self.init, *self.xs, *self.slots, *self.tape]


@dataclass(frozen=True, slots=True, eq=False)
class Backward:
    """A loop whose tables are known: its forward pass, and the ways of tangents and cotangents through it."""

    lowering: Lowering
    tables: Tables
    taping: Taping
    init: tuple[int, ...]  # places of the leaves of the first carry that are perturbed

    def forward_pass(self, consts: Leaves, init: Leaves, xs: Leaves) -> tuple[tuple[Leaves, Leaves], Held]:
        """The results, and what the way back needs."""
        lowering, step, tables = self.lowering, self.lowering.step, self.tables

        def put(ys: Leaves, k: Any, y: Leaves) -> Leaves:
            lowering.ticks.step(k)
            return write(ys, lowering.place(k), y)

        def advance(k: Any, now: tuple[Leaves, Leaves]) -> tuple[Leaves, Leaves]:
            state, ys = now
            state, y = step.run(consts, state, read(xs, lowering.place(k)))
            return state, put(ys, k, y)

        def leg(i: Any, now: tuple[Leaves, Leaves, Leaves]) -> tuple[Leaves, Leaves, Leaves]:
            state, slots, ys = now
            slot, start, stop = _entries(tables.legs, i)
            slots = write(slots, slot, state)
            state, ys = lowering.loop(start, stop, advance, (state, ys))
            return state, slots, ys

        def tape_step(k: Any, now: tuple[Leaves, Leaves, Leaves]) -> tuple[Leaves, Leaves, Leaves]:
            state, tape, ys = now
            state, y, row = self.taping.run(consts, state, read(xs, lowering.place(k)))
            return state, write(tape, k - first, row), put(ys, k, y)

        slots, ys = buffers(step.carry, tables.slots), buffers(step.y, lowering.length)
        state, slots, ys = lax.fori_loop(0, tables.sweep, leg, (init, slots, ys))
        first, end = jnp.int32(tables.stretches[0, 3]), jnp.int32(lowering.length)
        tape = buffers(self.taping.tape, tables.rows)
        state, tape, ys = lowering.loop(first, end, tape_step, (state, tape, ys))
        return (state, ys), Held(consts, init, xs, slots, tape)

    def tangents(self, residuals: Leaves, moving: Leaves) -> Leaves:
        """Forward mode: tangents of the active results, by a plain scan."""
        held, active = self._held(residuals), self.taping.active
        places = (active.consts, self.init, active.x)
        given = (held.consts, held.init, held.xs)
        some = [[leaves[k] for k in where] for leaves, where in zip(given, places, strict=True)]

        def run(some: list[Leaves]) -> Leaves:
            carry, ys = self.lowering.plain(*map(replaced, given, places, some), told=False)
            return [*(carry[k] for k in active.carry), *(ys[k] for k in active.y)]

        rest = iter(moving)
        directions = [[next(rest) for _ in where] for where in places]
        out: Leaves = jax.jvp(run, [some], [directions])[1]
        return out

    def cotangents(self, residuals: Leaves, cotangents: Leaves) -> Leaves:
        """Reverse mode: cotangents of what is perturbed, closed over, in the first carry and in the inputs."""
        held, active, tables = self._held(residuals), self.taping.active, self.tables
        lowering, step = self.lowering, self.lowering.step
        same = self.taping.same(held.consts)
        final, ys = cotangents[: len(active.carry)], cotangents[len(active.carry) :]
        blank = [zeros(step.consts[k]) for k in active.consts]

        def stretch(i: Any, now: tuple[Leaves, Leaves, Leaves, Leaves, Leaves]) -> Any:
            state, sums, x_sums, slots, tape = now
            slot, first, end, start, taped, stop = _entries(tables.stretches, i)
            slots, tape = self._prepare(held, slots, tape, slot, (first, end), (start, taped))

            def pull(n: Any, now: tuple[Leaves, Leaves, Leaves]) -> tuple[Leaves, Leaves, Leaves]:
                state, block, x_sums = now
                k = stop - 1 - n
                place = lowering.place(k)
                y = [
                    zeros(step.y[p]) if isinstance(cotangent, SymbolicZero) else read([cotangent], place)[0]
                    for p, cotangent in zip(active.y, ys, strict=True)
                ]
                x = read(held.xs, place) if self.taping.reads_x else []
                new, state, x_new = self.taping.pull(read(tape, k - start), same, x, state, y)
                return state, added(block, new), write(x_sums, place, x_new)

            state, block, x_sums = lowering.loop(jnp.int32(0), stop - start, pull, (state, blank, x_sums))
            return state, added(sums, block), x_sums, slots, tape

        state = [instantiated(cotangent, step.carry[k]) for k, cotangent in zip(active.carry, final, strict=True)]
        x_sums = buffers([step.x[k] for k in active.x], lowering.length)
        now = (state, blank, x_sums, held.slots, held.tape)
        state, sums, x_sums, _, _ = lax.fori_loop(0, len(tables.stretches), stretch, now)
        carry = dict(zip(active.carry, state, strict=True))
        return once([*sums, *(carry[k] for k in self.init), *x_sums])

    def _prepare(
        self, held: Held, slots: Leaves, tape: Leaves, slot: Any, legs: tuple[Any, Any], taped: tuple[Any, Any]
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

    def _held(self, leaves: Leaves) -> Held:
        step, rest = self.lowering.step, iter(leaves)
        counts = (len(step.consts), len(step.carry), len(step.x), len(step.carry), len(self.taping.tape))
        return Held(*([next(rest) for _ in range(count)] for count in counts))


def _entries(table: Any, row: Any) -> list[Any]:
    """One row of a table, entry by entry."""
    found = lax.dynamic_index_in_dim(jnp.asarray(table), row, keepdims=False)
    return [found[k] for k in range(table.shape[1])]


def added(one: Leaves, other: Leaves) -> Leaves:
    """Leaf by leaf."""
    return [a + b for a, b in zip(one, other, strict=True)]


def with_zeros(leaves: Leaves, places: tuple[int, ...], tangents: Leaves) -> Leaves:
    """Tangents for all leaves, zero but for those at `places`."""
    return replaced([zero_from_primal(leaf, symbolic_zeros=True) for leaf in leaves], places, tangents)
