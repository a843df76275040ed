"""What a step costs, from its types alone: nothing is run and nothing allocated.

Beside slots and tape a compiled program holds the current state, its cotangent, a row of the inputs, the sums of
gradients of one stretch, and what a step needs while it runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from lowtide.chain import Chain, StepCost, Working
from lowtide.jax.jaxprs import nbytes
from lowtide.jax.taping import Taping
from lowtide.plan import Plan
from lowtide.planners.choose import choose


@dataclass(frozen=True, slots=True)
class Costs:
    """A loop as a chain; see `lowtide.knobs.Costs`."""

    chain: Chain
    rooms: ClassVar[bool] = True  # a compiled program's buffers are laid out before it runs

    def within(self, budget: int) -> Plan:
        """The plan with the fewest reruns that keeps the budget."""
        return choose(self.chain, budget, rooms=True)


def costs(taping: Taping, length: int, *, nested: bool = False) -> Costs:
    """The loop of `length` steps over a step with this tape; nested scans hold a stretch's outputs and sums twice."""
    step, active = taping.step, taping.active
    state = max(nbytes(step.carry), 1)
    cotangent = nbytes(step.carry[k] for k in active.carry)
    sums = nbytes(step.consts[k] for k in active.consts) * (1 + nested)
    # Buffers of a compiled program are there all the time; those of a step forward and of one backward hardly overlap.
    working = state + sums + nbytes(step.x) + sum(taping.transients())
    cost = StepCost(
        state,
        max(nbytes(taping.tape) + 2 * nested * nbytes(step.y), state),
        cotangent=cotangent,
        working=Working(advance=working, tape=working, backward=working + cotangent),
    )
    gradients = nbytes(step.consts[k] for k in active.consts)
    return Costs(replace(Chain.equal(cost, length), parameters=nbytes(step.consts), gradients=gradients))
