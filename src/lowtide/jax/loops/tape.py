"""A step's tape: the residuals that `jax.vjp` saves for it, those of them that have to be stored, and the step's costs.

A residual is stored only if it depends on the step's own state or input. A residual that is closed over, or depends on
nothing else, is the same at every step and computed once; one that is a row of the inputs is read again.

Costs come from types alone: nothing is run or allocated. Beside slots and tape a compiled program holds the current
state, its cotangent, a row of the inputs, the sums of gradients of one stretch, and what a step needs while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
from jax.extend import core

from lowtide.chain import Chain, StepCost, Working
from lowtide.jax.loops.step import Step
from lowtide.jax.xla.jaxprs import Leaves, call, depends, invariant, nbytes, needed_for, replaced, transient
from lowtide.plan import Plan
from lowtide.planners.choose import choose


@dataclass(frozen=True, slots=True)
class Active:
    """The indices of the leaves through which a gradient flows."""

    consts: tuple[int, ...]
    carry: tuple[int, ...]
    x: tuple[int, ...]
    y: tuple[int, ...]


def active_leaves(step: Step, consts: Sequence[bool], carry: Sequence[bool], x: Sequence[bool]) -> Active:
    """The leaves through which a gradient flows, given the loop's arguments with respect to which it is taken.

    A leaf of the carry that begins without a gradient may get one from the step, and pass it on in the next step. So
    the step is applied until no leaf is added: leaves are only ever added, so this ends, and the result holds for any
    number of steps.
    """
    outer, given = step.jaxpr.constvars, step.jaxpr.invars
    on = list(carry)
    while True:
        moving = [var for var, yes in zip((*outer, *given), (*consts, *on, *x), strict=True) if yes]
        out = depends(step.jaxpr, moving)
        grown = [was or now for was, now in zip(on, out[: len(on)], strict=True)]
        if grown == on:
            break
        on = grown
    return Active(_true(consts), _true(on), _true(x), _true(out[len(on) :]))


class Taping:
    """A step that keeps its tape, and its pullback."""

    def __init__(self, step: Step, active: Active) -> None:
        self.step = step
        self.active = active
        closed = jax.make_jaxpr(self._vjp)(step.consts, step.carry, step.x)
        self._jaxpr, self._own = closed.jaxpr, closed.consts
        first = len(step.carry) + len(step.y)
        consts, _, x = _cut(self._jaxpr.invars, len(step.consts), len(step.carry))
        made_once = invariant(self._jaxpr, consts)
        tape: list[Any] = []
        same: list[Any] = []
        # Where each residual is found in the backward: in "same", "x" or "tape", and at which index.
        self._sources: list[tuple[str, int]] = []
        for var in self._jaxpr.outvars[first:]:
            if isinstance(var, core.Literal) or var in made_once:
                self._sources.append(("same", len(same)))
                same.append(var)
            elif var in x:
                self._sources.append(("x", x.index(var)))
            else:
                self._sources.append(("tape", len(tape)))
                tape.append(var)
        self._taped = self._jaxpr.replace(outvars=[*self._jaxpr.outvars[:first], *tape])
        self._made_once = self._jaxpr.replace(
            eqns=needed_for(self._jaxpr, same), invars=consts, outvars=same, effects=set()
        )
        self.tape = tuple(var.aval for var in tape)
        self.reads_x = any(kind == "x" for kind, _ in self._sources)

    def _vjp(self, consts: Sequence[Any], carry: Sequence[Any], x: Sequence[Any]) -> Leaves:
        """The carry, the outputs and all residuals of one step."""
        given, active = (consts, carry, x), self.active
        places = (active.consts, active.carry, active.x)

        def run(some: Sequence[Leaves]) -> tuple[list[Leaves], tuple[Leaves, Leaves]]:
            new, y = self.step.run(*map(replaced, given, places, some))
            return [_some(new, active.carry), _some(y, active.y)], (new, y)

        _, pull, (new, y) = jax.vjp(run, list(map(_some, given, places)), has_aux=True)
        residuals, self._pull_tree = jax.tree.flatten(pull)
        return [*new, *y, *residuals]

    def same(self, consts: Sequence[Any]) -> Leaves:
        """The residuals that are the same at every step."""
        return call(self._made_once, self._own, *consts)

    def run(self, consts: Sequence[Any], carry: Sequence[Any], x: Sequence[Any]) -> tuple[Leaves, Leaves, Leaves]:
        """The carry, the outputs and the tape of one step."""
        out = call(self._taped, self._own, *consts, *carry, *x)
        new, y, tape = _cut(out, len(self.step.carry), len(self.step.y))
        return new, y, tape

    def pull(self, tape: Leaves, same: Leaves, x: Leaves, carry: Leaves, y: Leaves) -> tuple[Leaves, Leaves, Leaves]:
        """The cotangents of the closure, the carry and the input, from those of the new carry and the outputs.

        All of them have the active leaves only.
        """
        values = {"tape": tape, "same": same, "x": x}
        pull = jax.tree.unflatten(self._pull_tree, [values[kind][place] for kind, place in self._sources])
        ((consts, before, inputs),) = pull([carry, y])
        return consts, before, inputs

    def transients(self) -> tuple[int, int]:
        """The bytes that XLA needs beyond arguments and results: to run the step with its tape, and to pull it back."""
        return transient(self._taped), transient(self._pull_jaxpr())

    def _pull_jaxpr(self) -> core.Jaxpr:
        step, active = self.step, self.active
        same = jax.eval_shape(self.same, step.consts)
        cotangents = _some(step.carry, active.carry), _some(step.y, active.y)
        jaxpr: core.Jaxpr = jax.make_jaxpr(self.pull)(list(self.tape), same, list(step.x), *cotangents).jaxpr
        return jaxpr


@dataclass(frozen=True, slots=True)
class StepCosts:
    """A loop as a chain; the `Costs` that `lowtide.interface.options` plans with."""

    chain: Chain
    rooms: ClassVar[bool] = True  # a compiled program's buffers are laid out before it runs

    def within(self, budget: int) -> Plan:
        """The plan with the fewest reruns within the budget."""
        return choose(self.chain, budget, rooms=True)


def costs(taping: Taping, length: int, *, nested: bool = False) -> StepCosts:
    """The costs of `length` steps with this tape; nested scans hold a stretch's outputs and sums twice."""
    step, active = taping.step, taping.active
    state = max(nbytes(step.carry), 1)
    cotangent = nbytes(_some(step.carry, active.carry))
    gradients = nbytes(_some(step.consts, active.consts))
    sums = gradients * (1 + nested)
    # The buffers of a compiled program exist all the time, and those of the step and of its pullback hardly overlap in
    # memory: so their sum counts, at every moment.
    working = state + sums + nbytes(step.x) + sum(taping.transients())
    cost = StepCost(
        state,
        max(nbytes(taping.tape) + 2 * nested * nbytes(step.y), state),
        cotangent=cotangent,
        working=Working(advance=working, tape=working, backward=working + cotangent),
    )
    return StepCosts(replace(Chain.equal(cost, length), parameters=nbytes(step.consts), gradients=gradients))


def _true(flags: Sequence[bool]) -> tuple[int, ...]:
    return tuple(k for k, flag in enumerate(flags) if flag)


def _some(leaves: Sequence[Any], places: Sequence[int]) -> Leaves:
    return [leaves[place] for place in places]


def _cut(leaves: Sequence[Any], first: int, second: int) -> tuple[Leaves, Leaves, Leaves]:
    return list(leaves[:first]), list(leaves[first : first + second]), list(leaves[first + second :])
