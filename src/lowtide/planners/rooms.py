"""Snapshots and tape in rooms of fixed size, side by side: what a compiled program has.

Where memory can go to either at any moment, a plan keeps fewer steps of tape the more snapshots it holds (`uniform`). A
program whose buffers are laid out before it runs cannot: it has s slots and room for c steps of tape all the time, with
s*a + c*w bytes at most. How to spend a budget on the two is all there is to choose; the rest is `revolve`.
"""

from __future__ import annotations

from math import isqrt

from lowtide.chain import Chain, StepCost
from lowtide.errors import BudgetError
from lowtide.planners.revolve import Revolve, plain_runs
from lowtide.planners.sweep import Base

# Numbers of slots that are tried one by one; of more, a grid and then the neighbourhood of its best.
_ONE_BY_ONE = 2048


def rooms_least(step: StepCost, length: int) -> int:
    """The least budget for which `rooms_within` finds a schedule."""
    return step.working_set_in(0) + min(length * step.tape, step.state + step.tape)


def rooms_within(chain: Chain, budget: int) -> Revolve | Base:
    """The slots and steps of tape, within a budget, that need the fewest plain runs.

    Raises:
        BudgetError: not even one slot and one step of tape fit.
    """
    step, length = chain[0], len(chain)
    least = rooms_least(step, length)
    if budget < least:
        ways = "raise the budget, or make the steps smaller (a smaller batch, a cheaper step)"
        raise BudgetError(budget, least, ways)
    memory = budget - step.working_set_in(0)
    if memory >= length * step.tape:
        return Base(length)

    def runs(slots: int) -> int:
        return plain_runs(length, slots, (memory - slots * step.state) // step.tape)

    most = min((memory - step.tape) // step.state, length - 1)
    stride = max(1, most // _ONE_BY_ONE)
    near = min(range(1, most + 1, stride), key=runs)
    best = min(range(max(1, near - stride), min(most, near + stride) + 1), key=runs)
    return Revolve(best, (memory - best * step.state) // step.tape)


def rooms_of_one_sweep(chain: Chain) -> Revolve | Base:
    """The fewest bytes of slots and tape with which no step is run plainly more than once."""
    step, length = chain[0], len(chain)

    def bytes_with(steps: int) -> int:
        return (-(-length // steps) - 1) * step.state + steps * step.tape

    # (T/c - 1)*a + c*w is least at c = sqrt(T*a/w); rounding T/c up moves that by less than its own square root.
    middle = isqrt(length * step.state // step.tape)
    reach = 2 * isqrt(middle) + 2
    tried = range(max(1, middle - reach), min(length, middle + reach) + 1)
    best = min(tried, key=bytes_with, default=length)
    count = -(-length // best)
    return Revolve(count - 1, best) if count > 1 else Base(length)
