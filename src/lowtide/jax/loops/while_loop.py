"""A loop that ends when a condition becomes false, in bounded memory: snapshots are chosen online, while it runs.

Which snapshot is replaced by a new one depends only on the number of steps so far, so it is read from a table
(`lowtide.planners.online`). In the backward the length is known, and each stretch between two snapshots is reversed by
Revolve's rule with the free slots; how far to advance is computed when it is needed, from a table of binomials.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend import core
from numpy.typing import NDArray

from lowtide.chain import StepCost
from lowtide.interface.options import WhileKnobs
from lowtide.jax.compare import runs_plainly
from lowtide.jax.loops.step import Step, as_lax_says, trace_step
from lowtide.jax.loops.tape import Taping, active_leaves, costs
from lowtide.jax.xla.buffers import added, buffers, instantiated, read, with_zeros, write, zeros
from lowtide.jax.xla.jaxprs import Leaves, call, replaced
from lowtide.jax.xla.linear import LinearMap, apply, once
from lowtide.planners.online import online_slots
from lowtide.planners.revolve import slots_within

_NO_END = 2**31 - 1  # the largest step number: the limit of a loop without one, and the step of an empty slot
# Steps for which the table of slots is made. Beyond, every second state is a candidate, then every fourth, and so on.
_TABLE_STEPS = 4096
# Columns of the table of binomials: with two slots, beta(2, 95) = 4,656 is beyond the table of slots.
_MOST_REPEATS = 96
_MOST_SLOTS = 1024  # more save next to nothing, and all of them are searched at each step of the backward


def checkpointed_while_loop(
    cond: Callable[[Any], Any],
    body: Callable[[Any], Any],
    init: Any,
    *,
    checkpoints: int | None = None,
    budget: int | str | None = None,
    max_steps: int | None = None,
) -> Any:
    """`jax.lax.while_loop` with reverse-mode derivatives, in bounded memory and without knowing the length.

    Args:
        cond: whether to continue from this carry.
        body: one step, `carry = body(carry)`; a pure function.
        init: the carry before the first step, any pytree.
        checkpoints: the most snapshots, the initial state included; 50 if no option is given.
        budget: bytes for snapshots, the tape of one step and the working set: 67108864 or "64MiB".
        max_steps: stop after this number of steps even if `cond` still holds.
    """
    knobs = WhileKnobs.of(cond, body, checkpoints, budget, max_steps, _NO_END)

    def plain() -> Any:
        return lax.while_loop(cond, body, init)

    traced = trace_step(lambda carry, _: (body(carry), None), init, None, plain)
    goes_on, like = jax.make_jaxpr(lambda *leaves: cond(traced.carry_tree.unflatten(leaves)), return_shape=True)(
        *traced.init
    )
    if (getattr(like, "shape", None), getattr(like, "dtype", None)) != ((), np.dtype(bool)):
        raise as_lax_says(plain)
    loop = _While(traced.step, goes_on.jaxpr, len(traced.consts), knobs)
    carry = (loop.plain if runs_plainly() else loop)([*traced.consts, *goes_on.consts], traced.init)
    return traced.carry_tree.unflatten(carry)


@dataclass(frozen=True, slots=True, eq=False)
class _While:
    """A while loop over flat leaves; the constants that body and cond close over are one list, the body's first."""

    step: Step
    cond: core.Jaxpr
    own: int  # the number of constants that are the body's
    knobs: WhileKnobs

    def __call__(self, consts: Leaves, init: Leaves) -> Leaves:
        run = jax.custom_jvp(self.plain)
        run.defjvp(self._differentiated, symbolic_zeros=True)
        carry: Leaves = run(consts, init)
        return carry

    def goes_on(self, consts: Leaves, k: Any, state: Leaves) -> Any:
        """Whether step k is run."""
        return call(self.cond, consts[self.own :], *state)[0] & (k < self.knobs.most)

    def advance(self, consts: Leaves, state: Leaves) -> Leaves:
        """The state after one step."""
        return self.step.run(consts[: self.own], state, [])[0]

    def plain(self, consts: Leaves, init: Leaves) -> Leaves:
        """Run every step once, without snapshots or tape."""
        _, carry = lax.while_loop(
            lambda now: self.goes_on(consts, *now),
            lambda now: (now[0] + 1, self.advance(consts, now[1])),
            (jnp.int32(0), init),
        )
        return carry

    def _differentiated(self, primals: tuple[Leaves, Leaves], tangents: tuple[Leaves, Leaves]) -> tuple[Leaves, Leaves]:
        """The values and tangents; the tangent of a leaf that is not perturbed is a `SymbolicZero`."""
        consts, init = primals
        perturbed = [[not isinstance(tangent, SymbolicZero) for tangent in leaves] for leaves in tangents]
        taping = Taping(self.step, active_leaves(self.step, perturbed[0][: self.own], perturbed[1], []))
        slots, budget = self.knobs.slots, self.knobs.budget
        if budget is not None:
            slots = _slots_within(costs(taping, 1).chain[0], budget)
        slots = max(1, min(slots, self.knobs.most, _MOST_SLOTS))
        back = _WhileBackward(self, taping, slots, tuple(k for k, moves in enumerate(perturbed[1]) if moves))
        carry, held = back.forward_pass(consts, init)
        active = taping.active.carry
        moving = [tangents[0][k] for k in taping.active.consts] + [tangents[1][k] for k in back.init]
        out = apply(LinearMap(back.tangents, back.cotangents), held, moving, [carry[k] for k in active])
        return carry, with_zeros(carry, active, out)


@dataclass(frozen=True, slots=True, eq=False)
class _WhileBackward:
    """A while loop with its tape and its number of slots: its forward pass, and how derivatives pass through it."""

    loop: _While
    taping: Taping
    slots: int
    init: tuple[int, ...]  # indices of the leaves of the first carry that are perturbed

    def forward_pass(self, consts: Leaves, init: Leaves) -> tuple[Leaves, Leaves]:
        """The result, and what the backward needs: consts, init, slots, the steps stored in them, and the length."""
        table = jnp.asarray(
            online_slots(self.slots, min(self.loop.knobs.most, _TABLE_STEPS)) or (self.slots,), jnp.int32
        )

        def step(now: tuple[Any, Leaves, Leaves, Any]) -> tuple[Any, Leaves, Leaves, Any]:
            k, state, slots, steps = now
            # The least shift that brings k into the table. Only multiples of 2**shift are candidates; the others go to
            # the spare slot.
            shift = 32 - lax.clz(k // _TABLE_STEPS)
            slot = jnp.where(k & ((1 << shift) - 1) == 0, table[k >> shift], self.slots)
            slots, steps = write(slots, slot, state), steps.at[slot].set(k)
            return k + 1, self.loop.advance(consts, state), slots, steps

        # One spare slot takes the states that are not kept, so that there is no branch.
        slots = buffers(self.loop.step.carry, self.slots + 1)
        steps = jnp.full(self.slots + 1, _NO_END, jnp.int32)
        start = (jnp.int32(0), init, slots, steps)
        length, state, slots, steps = lax.while_loop(lambda now: self.loop.goes_on(consts, *now[:2]), step, start)
        return state, [*consts, *init, *slots, steps, length]

    def tangents(self, residuals: Leaves, moving: Leaves) -> Leaves:
        """Forward mode: the tangents of the active results, from a plain loop."""
        consts, init, *_ = self._held(residuals)
        active = self.taping.active
        count = len(active.consts)
        some = [consts[k] for k in active.consts], [init[k] for k in self.init]

        def run(own: Leaves, first: Leaves) -> Leaves:
            carry = self.loop.plain(replaced(consts, active.consts, own), replaced(init, self.init, first))
            return [carry[k] for k in active.carry]

        out: Leaves = jax.jvp(run, some, (moving[:count], moving[count:]))[1]
        return out

    def cotangents(self, residuals: Leaves, cotangents: Leaves) -> Leaves:
        """Reverse mode: the cotangents of the perturbed leaves of the closure and of the first carry."""
        consts, _, slots, steps, length = self._held(residuals)
        active, own = self.taping.active, consts[: self.loop.own]
        types = self.loop.step
        same = self.taping.same(own)
        binomials = jnp.asarray(_binomials(self.slots))

        def one(now: tuple[Any, Leaves, Leaves, Leaves, Any]) -> tuple[Any, Leaves, Leaves, Leaves, Any]:
            """Pull back the step before `stop`, from the newest state that is stored below it."""
            stop, cots, sums, slots, steps = now
            newest = jnp.argmax(jnp.where(steps < stop, steps, -1))
            held = (steps[newest], read(slots, newest), slots, steps)
            start, state, slots, steps = lax.while_loop(
                lambda now: stop - now[0] > 1, lambda now: nearer(stop, now), held
            )
            _, _, tape = self.taping.run(own, state, [])
            new, cots, _ = self.taping.pull(tape, same, [], cots, [])
            return start, cots, added(sums, new), slots, steps

        def nearer(stop: Any, now: tuple[Any, Leaves, Leaves, Any]) -> tuple[Any, Leaves, Leaves, Any]:
            """Advance part of the way from `start` to the step before `stop`, and store the state unless it is that."""
            start, state, slots, steps = now
            # A slot whose step is not below `stop` belongs to steps that are pulled back, or is empty: it is free.
            free = steps[: self.slots] >= stop
            left = _left_part(binomials, stop - start, 1 + jnp.sum(free, dtype=jnp.int32))
            state = lax.fori_loop(0, left, lambda _, state: self.loop.advance(consts, state), state)
            start = start + left
            slot = jnp.where(stop - start > 1, jnp.argmax(free), self.slots)
            return (
                start,
                state,
                write(slots, slot, state),
                steps.at[slot].set(jnp.where(slot < self.slots, start, _NO_END)),
            )

        cots = [instantiated(ct, types.carry[k]) for k, ct in zip(active.carry, cotangents, strict=True)]
        sums = [zeros(types.consts[k]) for k in active.consts]
        steps = steps.at[self.slots].set(_NO_END)
        now = (length, cots, sums, slots, steps)
        _, cots, sums, _, _ = lax.while_loop(lambda now: now[0] > 0, one, now)
        first = dict(zip(active.carry, cots, strict=True))
        return once([*sums, *(first[k] for k in self.init)])

    def _held(self, leaves: Leaves) -> tuple[Leaves, Leaves, Leaves, Any, Any]:
        count = len(self.loop.step.carry)
        *front, steps, length = leaves
        own = len(front) - 2 * count
        return front[:own], front[own : own + count], front[own + count :], steps, length


def _slots_within(step: StepCost, budget: int) -> int:
    """The most slots that fit, each with its row of the table of binomials and the number of its step."""
    return slots_within(step, budget, beside=4 * (_MOST_REPEATS + 1))


def _binomials(slots: int) -> NDArray[np.int32]:
    """beta(s, r) = beta(s-1, r) + beta(s, r-1) for s up to `slots`, limited to 32 bits."""
    table = np.ones((slots + 1, _MOST_REPEATS), np.int64)
    for s in range(1, slots + 1):
        table[s] = np.minimum(np.cumsum(table[s - 1]), _NO_END)
    return table.astype(np.int32)


def _left_part(binomials: Any, length: Any, slots: Any) -> Any:
    """`lowtide.planners.revolve.left_part` for one step of tape; for lengths beyond the table any legal part."""
    row = lax.dynamic_index_in_dim(binomials, slots, keepdims=False)
    below = jnp.sum(row < length, dtype=jnp.int32) - 1  # r - 1
    left = jnp.minimum(row[below], length - binomials[slots - 1, below])
    return jnp.where(slots == 1, length - 1, jnp.clip(left, 1, length - 1))
