"""A fixed number of snapshots and a fixed number of steps of tape: the binomial optimum, in closed form.

Griewank and Walther, "Algorithm 799: Revolve" (2000). With s snapshots, the initial state included, and
beta(s, r) = C(s+r, s), a chain of beta(s, r-1) < l <= beta(s, r) steps needs

    t(l, s) = r*l - beta(s+1, r-1)

plain runs. No schedule needs fewer, and no step has more than r plain runs. That is for one step of tape. With c steps,
stretches of up to c steps are taped whole, and the same holds in units of c:

    t(l, s, c) = r*l - c*beta(s+1, r-1)        for c*beta(s, r-1) < l <= c*beta(s, r)

Where memory can be used for snapshots or tape as needed, a plan keeps fewer steps of tape the more snapshots it holds;
`equal` does that. A program whose buffers are laid out before it runs cannot: all the time it has s slots and room for
c steps of tape, s*a + c*w bytes. The only choice is how to divide a budget between the two (`rooms_within`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import comb, isqrt
from typing import ClassVar

import numpy as np

from lowtide.actions import Action, Tier
from lowtide.chain import Chain, StepCost
from lowtide.checks import MOST_STEPS, MOST_TOTAL, keep_whole
from lowtide.errors import BudgetError
from lowtide.plan import Bill, Bound, ChainSchedule, registered
from lowtide.planners import splits, unequal
from lowtide.planners.sweep import Base
from lowtide.simulate import simulate_actions

MORE_ROOM = "raise the budget, or make the steps smaller (a smaller batch, a cheaper step)"


def beta(slots: int, repeats: int) -> int:
    """The longest chain that can be reversed with `slots` snapshots and at most `repeats` plain runs of each step."""
    return comb(slots + repeats, slots) if slots >= 0 and repeats >= 0 else 0


@lru_cache(maxsize=1 << 16)
def repeats(length: int, slots: int) -> int:
    """The least r with length <= beta(slots, r)."""
    if slots == 1:
        return length - 1
    # Doubling, then bisection: r can be in the thousands for two or three slots.
    high = 1
    while beta(slots, high) < length:
        high *= 2
    low = 0
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if beta(slots, middle) < length else (low, middle)
    return low


@lru_cache(maxsize=1 << 17)
def plain_runs(length: int, slots: int, steps: int = 1) -> int:
    """t(length, slots, steps): the fewest plain runs with `slots` snapshots, the initial state included."""
    r = repeats(-(-length // steps), slots)
    return r * length - steps * beta(slots + 1, r - 1)


@lru_cache(maxsize=1 << 16)
def left_part(length: int, slots: int, steps: int = 1) -> int:
    """The number of steps to advance from a stored start; 0 for a stretch that is taped whole.

    t is linear between consecutive betas, so a split is optimal exactly when the left part stays on the linear piece
    below (r-1 repeats with all slots) and the right part on its own (r repeats with one slot fewer). Of that range the
    longest left part is taken, which leaves stretches of few different lengths.
    """
    if length <= steps:
        return 0
    if slots == 1:
        return length - steps
    r = repeats(-(-length // steps), slots)
    return min(steps * beta(slots, r - 1), length - steps * beta(slots - 1, r - 1))


@registered
@dataclass(frozen=True, slots=True)
class Revolve(ChainSchedule):
    """At most `slots` snapshots, the initial state included, and the tape of `steps` steps."""

    planner: ClassVar[str] = "revolve"
    disk: ClassVar[None] = None

    slots: int
    steps: int = 1

    def __post_init__(self) -> None:
        keep_whole(self, "slots", least=1, most=MOST_TOTAL, label="checkpoints")
        keep_whole(self, "steps", least=1, most=MOST_STEPS)

    def rule(self, length: int, held: int, stored: Tier | None) -> tuple[int, Tier]:
        """A `splits.Rule`: the optimal split with the slots that are still free."""
        return left_part(length, self.slots - held, self.steps), Tier.MEMORY

    def actions(self, chain: Chain) -> Iterator[Action]:
        """The actions, made one by one as they are requested."""
        return splits.play(self.rule, 0, len(chain))

    def bill(self, chain: Chain) -> Bill:
        """The cost of the actions; in closed form for one sweep and for one slot, which have many stretches."""
        length = len(chain)
        if not chain.is_equal:
            return simulate_actions(chain, self.actions(chain))
        if (self.slots + 1) * self.steps >= length:
            return self._sweep_bill(chain)
        if self.slots == 1:
            return splits.OneSlot((self.steps, self.steps)).bill(chain, 0)
        return splits.bill(self.rule, chain)

    def _sweep_bill(self, chain: Chain) -> Bill:
        """The cost of one sweep, in which every stretch is full except for the last but one."""
        step, tape = chain[0], min(self.steps, len(chain))
        count = -(-len(chain) // tape)
        rest = len(chain) - (count - 1) * tape
        # The last but one is taped beside count - 2 starts; of the full ones before it, the last is taped beside the
        # most, count - 3.
        fullest = max(
            (count - 2) * step.state + rest * step.tape, (count - 3) * step.state + tape * step.tape * (count > 2)
        )
        return splits.sweep_bill(chain, count, tape, fullest)

    def bound(self, chain: Chain) -> Bound:
        """The optimum itself, t(length, slots, steps)."""
        tape = "one step" if self.steps == 1 else f"{self.steps:,} steps"
        return Bound(
            plain_runs(len(chain), self.slots, self.steps), f"with {self.slots:,} snapshots and {tape} of tape"
        )


# --- how much fits in a budget


def slots_within(step: StepCost, budget: int, *, beside: int = 0) -> int:
    """The most snapshots that fit `budget` beside one step of tape and the working set.

    Args:
        step: what a step costs.
        budget: bytes.
        beside: bytes that come with each snapshot but the first.

    Raises:
        BudgetError: not even one snapshot fits.
    """
    least = least_with_slots(step)
    if budget < least:
        raise BudgetError(budget, least, MORE_ROOM)
    return 1 + (budget - least) // (step.state + beside)


def least_with_slots(step: StepCost) -> int:
    """The least budget for which `slots_within` finds room, for one snapshot."""
    # The snapshot is held at both kinds of moments: while a step is taped or pulled back, and during plain runs.
    return step.state + max(step.tape + splits.beside_tape(step, 0), step.working.advance + step.cotangent)


def rooms_least(step: StepCost, length: int) -> int:
    """The least budget for which `rooms_within` finds a schedule."""
    return step.working_set_in(0) + min(length * step.tape, step.state + step.tape)


# Numbers of slots. Up to this many are all tried; if there are more, a grid of about this many, and then the
# neighbourhood of the best of them.
_MOST_ONE_BY_ONE = 2048


def rooms_within(chain: Chain, budget: int) -> Revolve | Base:
    """The numbers of slots and of steps of tape, within a budget, that need the fewest plain runs.

    Raises:
        BudgetError: not even one slot and one step of tape fit.
    """
    step, length = chain[0], len(chain)
    least = rooms_least(step, length)
    if budget < least:
        raise BudgetError(budget, least, MORE_ROOM)
    memory = budget - step.working_set_in(0)
    if memory >= length * step.tape:
        return Base(length)

    def runs(slots: int) -> int:
        return plain_runs(length, slots, (memory - slots * step.state) // step.tape)

    most = min((memory - step.tape) // step.state, length - 1)
    stride = max(1, most // _MOST_ONE_BY_ONE)
    near = min(range(1, most + 1, stride), key=runs)
    best = min(range(max(1, near - stride), min(most, near + stride) + 1), key=runs)
    return Revolve(best, (memory - best * step.state) // step.tape)


def rooms_of_one_sweep(chain: Chain) -> Revolve | Base:
    """The schedule with the fewest bytes of slots and tape in which no step has more than one plain run."""
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


# --- unequal steps, too many for a table


def uneven_with_slots(chain: Chain, budget: int) -> unequal.Hetero:
    """A schedule for chains that are too long for a table: each stretch is split as one of equal steps would be.

    Of those, the number of slots is what there is room for if each of its steps were as large as the largest. The
    budget is at least `least(chain)`.
    """
    needs, length = unequal.MemoryNeeds(chain), len(chain)
    state, advance = np.array(needs.state), np.array(needs.advance)
    tapes, cotangent = np.array([forms[0] for forms in needs.tapes]), np.array(needs.cotangent)
    beside = np.array([needs.beside_tape(k, k + 1, 0) for k in range(length)])
    all_tapes = np.concatenate([[0], np.cumsum(tapes)])
    decisions: list[int] = []
    pending = [(0, length, budget)]
    while pending:
        start, stop, room = pending.pop()
        held = needs.cotangent[stop - 1]
        if all_tapes[stop] - all_tapes[start] + int(beside[start:stop].max()) + held <= room:
            decisions += [0] * (stop - start)
            continue
        one = max(
            int((tapes + beside)[start:stop].max()), int(advance[start:stop].max()) + int(cotangent[start:stop].max())
        )
        slots = max(1, 1 + (room - int(state[start]) - one) // int(state[start:stop].max()))
        decisions.append(left_part(stop - start, slots))
        pending += needs.parts(start, stop, room, decisions[-1])
    return unequal.Hetero(tuple(decisions))
