"""A plan as one program of fixed size: nested loops whose bounds are read from the plan's tables.

A program cannot branch on a plan, so the plan becomes integer tables. A *leg* stores the current state in a slot and
runs some steps from there. A *stretch* is taped and pulled back whole; before it is taped, a state is restored from a
slot and a few legs advance from there to the stretch's start. The last stretch of the chain is reached by the legs of
the forward pass, the others by their own.

Why the tables suffice: in a legal plan a state is current only where it was restored or advanced to. So the steps that
are run from a restore up to the next backward are one range without gaps, which is first advanced through, leg by leg,
and then taped: a slot to start from, a sequence of legs, and a stretch. A snapshot is taken at the start of a leg. At
the start of a stretch none is needed, because everything after it is pulled back with the stretch. Legal plans of
another shape, which no planner of equal steps makes, are refused. The slot of each state is assigned when the tables
are made, by following the plan's saves and drops, so there are as many slots as snapshots at once.

Forward: legs of plain steps, each of which begins by storing its state, then the last stretch is taped. Backward, for
each stretch from the last to the first: restore its snapshot, run its legs, tape it, pull the tape back. Slots and tape
are buffers that are written in place; outputs and gradients of the inputs are written straight into their arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from numpy.typing import NDArray

from lowtide.actions import Action, Advance, Backward, Drop, Restore, Save, Tape, Tier
from lowtide.errors import InputError
from lowtide.interface.options import Knobs
from lowtide.jax.loops.step import Step
from lowtide.jax.loops.tape import Taping, active_leaves, costs
from lowtide.jax.loops.ticks import Ticks
from lowtide.jax.xla.buffers import added, buffers, instantiated, read, with_zeros, write, zeros
from lowtide.jax.xla.jaxprs import Leaves, replaced
from lowtide.jax.xla.linear import LinearMap, apply, once
from lowtide.simulate import judged

_Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """The legs, in order, and the stretches, from the last one of the chain to the first.

    Attributes:
        legs: for each leg its slot and the steps [start, stop) that it runs; one idle leg if there are none.
        stretches: for each stretch the slot to restore from, its legs [first, end), and three steps: where it starts,
            where taping it on the way back stops, and where it ends. The first entry is taped by the forward pass, so
            its taping stops where it starts.
        slots: the number of slots, at least one.
        rows: the number of steps in the longest stretch, which are the rows of the tape.
        sweep: the number of legs that belong to the forward pass.
    """

    legs: _Ints
    stretches: _Ints
    slots: int
    rows: int
    sweep: int


def tables(actions: Iterable[Action]) -> Tables:
    """The tables of a plan's actions, which are known to be legal.

    Raises:
        InputError: a static program cannot follow the plan: it runs other steps while a tape waits, pulls a tape back
            in parts, restores a state out of order, or stores on disk.
    """
    # `first` is the number of legs before the current stretch, `restored` the slot that it starts from, `taped` the
    # range that is taped and not yet pulled back. Consecutive tapes are one range, and so one stretch.
    slots = _TakenSlots()
    legs: list[tuple[int, int, int]] = []
    stretches: list[tuple[int, int, int, int, int, int]] = []
    restored, first, sweep = 0, 0, 0
    taped: tuple[int, int] | None = None
    for action in actions:
        _refuse_disk(action)
        match action:
            case Save(step):
                slots.store(step)
            case Drop(step):
                slots.release(step)
            case Restore(step):
                _refuse_restore(step, out_of_order=len(legs) > first or step in slots.unwritten)
                restored = slots.held[step]
            case Advance(start, stop):
                _refuse_waiting(taped, start, stop)
                legs.append((slots.written(start), start, stop))
            case Tape(start, stop):
                taped = (start if taped is None else taped[0], stop)
            case Backward(start, stop):
                _refuse_parts(taped, start, stop)
                if stretches:
                    stretches.append((restored, first, len(legs), start, stop, stop))
                else:
                    sweep = len(legs)
                    stretches.append((0, 0, 0, start, start, stop))
                taped, first = None, len(legs)
    leg_table = np.array(legs or [(0, 0, 0)], np.int32)
    # A leg always stores its state, since a program cannot branch here; a state that the plan does not store goes to a
    # spare slot.
    leg_table[leg_table[:, 0] == _NO_SLOT, 0] = slots.count
    stretch_table = np.array(stretches, np.int32)
    most_slots = max(slots.count, int(leg_table[:, 0].max()) + 1)
    rows = int((stretch_table[:, 5] - stretch_table[:, 3]).max())
    return Tables(leg_table, stretch_table, most_slots, rows, sweep)


_NO_SLOT = -1  # the slot of a state that the plan does not store


class _TakenSlots:
    """The slot of each stored state; a released slot is used again before a new one is added."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}  # step: slot
        self.unwritten: set[int] = set()  # steps whose state no leg has begun with since the plan stored it
        self.count = 0
        self._free: list[int] = []

    def store(self, step: int) -> None:
        if not self._free:
            self._free.append(self.count)
            self.count += 1
        self.held[step] = self._free.pop()
        self.unwritten.add(step)

    def written(self, step: int) -> int:
        """The slot that a leg starting at this step writes to."""
        self.unwritten.discard(step)
        return self.held.get(step, _NO_SLOT)

    def release(self, step: int) -> None:
        self._free.append(self.held.pop(step))
        self.unwritten.discard(step)


def _refuse_disk(action: Action) -> None:
    if getattr(action, "tier", Tier.MEMORY) is not Tier.MEMORY:
        raise InputError("a jitted loop keeps its snapshots in memory; plan without disk=")


def _refuse_restore(step: int, *, out_of_order: bool) -> None:
    """Refuse a restore before the steps that were run are pulled back, or of a state that no leg has written."""
    if out_of_order:
        raise InputError(
            f"the plan restores the state at step {step:,} out of order, which a jitted loop cannot do; "
            "plan with lowtide.jax.plan_scan"
        )


def _refuse_waiting(taped: tuple[int, int] | None, start: int, stop: int) -> None:
    """Refuse to run steps between a stretch's tape and its backward: there is only one buffer of tape."""
    if taped is not None:
        raise InputError(
            f"the plan runs steps [{start:,}, {stop:,}) while the tape of [{taped[0]:,}, {taped[1]:,}) "
            "waits, which a jitted loop cannot do; plan with lowtide.jax.plan_scan"
        )


def _refuse_parts(taped: tuple[int, int] | None, start: int, stop: int) -> None:
    """Refuse to pull back anything but the whole range that was taped."""
    if taped != (start, stop):
        raise InputError(
            f"the plan pulls steps [{start:,}, {stop:,}) back in parts, which a jitted loop cannot do; "
            "plan with lowtide.jax.plan_scan"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Lowering:
    """A loop that is planned when it is differentiated: only then is it known what is taped.

    The first run of every step is reported to `ticks`, if any. JAX keeps this object in its caches, so it holds no
    arrays.
    """

    step: Step
    knobs: Knobs
    length: int
    reverse: bool
    unroll: int
    ticks: Ticks | None

    def __call__(self, consts: Leaves, init: Leaves, xs: Leaves) -> tuple[Leaves, Leaves]:
        """The last carry and the outputs of all steps."""
        run = jax.custom_jvp(self.plain)
        run.defjvp(self._differentiated, symbolic_zeros=True)
        carry, ys = run(consts, init, xs)
        return carry, ys

    def place(self, k: Any) -> Any:
        """The index of the input and of the output of step k."""
        return self.length - 1 - k if self.reverse else k

    def loop(self, start: Any, stop: Any, body: Callable[[Any, Any], Any], held: Any) -> Any:
        """Run `body(k, held)` for k in [start, stop), `unroll` of them in one iteration of the compiled loop."""
        if self.unroll == 1:
            return lax.fori_loop(start, stop, body, held)

        def several(i: Any, held: Any) -> Any:
            for k in range(self.unroll):
                held = body(start + i * self.unroll + k, held)
            return held

        count = (stop - start) // self.unroll
        held = lax.fori_loop(0, count, several, held)
        return lax.fori_loop(start + count * self.unroll, stop, body, held)

    def plain(self, consts: Leaves, init: Leaves, xs: Leaves, *, reported: bool = True) -> tuple[Leaves, Leaves]:
        """Run every step once, without snapshots or tape."""

        def step(carry: Leaves, k_and_x: tuple[Any, Leaves]) -> tuple[Leaves, Leaves]:
            k, x = k_and_x
            if reported and self.ticks is not None:
                self.ticks.step(self.place(k))
            return self.step.run(consts, carry, x)

        ks = jnp.arange(self.length, dtype=jnp.int32)
        carry, ys = lax.scan(step, init, (ks, xs), self.length, self.reverse, self.unroll)
        return carry, ys

    def _differentiated(self, primals: Any, tangents: Any) -> tuple[tuple[Leaves, Leaves], tuple[Leaves, Leaves]]:
        """The values and tangents; the tangent of a leaf that is not perturbed is a `SymbolicZero`."""
        # Leaves that are not perturbed need no gradient buffer, which for the inputs would be as large as they are.
        perturbed = [[not isinstance(tangent, SymbolicZero) for tangent in leaves] for leaves in tangents]
        taping = Taping(self.step, active_leaves(self.step, *perturbed))
        moving = tuple(k for k, moves in enumerate(perturbed[1]) if moves)
        plan = self.knobs.choose(costs(taping, self.length), self.length)
        back = LoopBackward(self, tables(judged(plan)), taping, moving)
        (carry, ys), held = back.forward_pass(*primals)
        carry, ys = once(carry), once(ys)
        active = taping.active
        nonzero = [tangent for leaves in tangents for tangent in leaves if not isinstance(tangent, SymbolicZero)]
        like = [*(carry[k] for k in active.carry), *(ys[k] for k in active.y)]
        out = apply(LinearMap(back.tangents, back.cotangents), held.leaves(), nonzero, like)
        carry_out = with_zeros(carry, active.carry, out[: len(active.carry)])
        return (carry, ys), (carry_out, with_zeros(ys, active.y, out[len(active.carry) :]))


@dataclass(frozen=True, slots=True)
class LoopResiduals:
    """What the forward pass leaves for the backward."""

    consts: Leaves
    init: Leaves
    xs: Leaves
    slots: Leaves
    tape: Leaves

    def leaves(self) -> Leaves:
        """All leaves in one list."""
        return [*self.consts, *self.init, *self.xs, *self.slots, *self.tape]


@dataclass(frozen=True, slots=True, eq=False)
class LoopBackward:
    """A loop whose tables are known: its forward pass, and how tangents and cotangents pass through it."""

    lowering: Lowering
    tables: Tables
    taping: Taping
    init: tuple[int, ...]  # indices of the leaves of the first carry that are perturbed

    def forward_pass(self, consts: Leaves, init: Leaves, xs: Leaves) -> tuple[tuple[Leaves, Leaves], LoopResiduals]:
        """The results, and what the backward needs."""
        lowering, step, tables = self.lowering, self.lowering.step, self.tables

        def put(ys: Leaves, k: Any, y: Leaves) -> Leaves:
            if lowering.ticks is not None:
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
        return (state, ys), LoopResiduals(consts, init, xs, slots, tape)

    def tangents(self, residuals: Leaves, moving: Leaves) -> Leaves:
        """Forward mode: the tangents of the active results, from a plain scan."""
        held, active = self._held(residuals), self.taping.active
        places = (active.consts, self.init, active.x)
        given = (held.consts, held.init, held.xs)
        some = [[leaves[k] for k in where] for leaves, where in zip(given, places, strict=True)]

        def run(some: list[Leaves]) -> Leaves:
            carry, ys = self.lowering.plain(*map(replaced, given, places, some), reported=False)
            return [*(carry[k] for k in active.carry), *(ys[k] for k in active.y)]

        rest = iter(moving)
        directions = [[next(rest) for _ in where] for where in places]
        out: Leaves = jax.jvp(run, [some], [directions])[1]
        return out

    def cotangents(self, residuals: Leaves, cotangents: Leaves) -> Leaves:
        """Reverse mode: the cotangents of the perturbed leaves of the closure, the first carry and the inputs."""
        held, active, tables = self._held(residuals), self.taping.active, self.tables
        lowering, step = self.lowering, self.lowering.step
        same = self.taping.same(held.consts)
        final, ys = cotangents[: len(active.carry)], cotangents[len(active.carry) :]
        # Gradients of what the step closes over are summed in two levels, within a stretch and then over stretches: the
        # rounding error of a sum grows with the number of terms that are added one after another, which is c + n/c for
        # n steps in stretches of c, instead of n.
        blank = [zeros(step.consts[k]) for k in active.consts]

        def stretch(i: Any, now: tuple[Leaves, Leaves, Leaves, Leaves, Leaves]) -> Any:
            """Tape stretch i, unless the forward pass did, and pull it back; `state` has the cotangents of its end."""
            state, sums, x_sums, slots, tape = now
            slot, first, end, start, taped, stop = _entries(tables.stretches, i)
            # Taped and pulled back in the same iteration. Pulling back one stretch and taping the next would not depend
            # on each other, and XLA would copy the whole tape to be safe.
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
        self, held: LoopResiduals, slots: Leaves, tape: Leaves, slot: Any, legs: tuple[Any, Any], taped: tuple[Any, Any]
    ) -> tuple[Leaves, Leaves]:
        """Restore a snapshot, run legs from it, and tape the steps after them."""
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

    def _held(self, leaves: Leaves) -> LoopResiduals:
        step, rest = self.lowering.step, iter(leaves)
        counts = (len(step.consts), len(step.carry), len(step.x), len(step.carry), len(self.taping.tape))
        return LoopResiduals(*([next(rest) for _ in range(count)] for count in counts))


def _entries(table: Any, row: Any) -> list[Any]:
    """The entries of one row of a table."""
    found = lax.dynamic_index_in_dim(jnp.asarray(table), row, keepdims=False)
    return [found[k] for k in range(table.shape[1])]
