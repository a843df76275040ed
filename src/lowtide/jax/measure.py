"""What a step costs, from its types alone: nothing is run and nothing allocated.

A compiled program holds a loop's state and cotangents, the sums of gradients of one stretch, and what a step needs
while it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
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


def costs(taping: Taping, length: int) -> Costs:
    """The loop of `length` steps over a step with this tape."""
    step, active = taping.step, taping.active
    state = nbytes(step.carry)
    cotangent = nbytes(step.carry[k] for k in active.carry)
    sums = nbytes(step.consts[k] for k in active.consts)
    forward, backward = taping.transients()
    tape = max(nbytes(taping.tape), state, 1)
    return Costs(
        Chain.equal(
            StepCost(
                max(state, 1),
                tape,
                cotangent=cotangent,
                working=Working(
                    advance=state + forward,
                    tape=state + forward,
                    backward=cotangent + sums + backward,
                ),
            ),
            length,
        )
    )
