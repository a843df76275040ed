"""A number of snapshots and of steps of tape, each with a room of its own: the binomial optimum, in closed form.

Griewank and Walther, "Algorithm 799: Revolve" (2000). With s snapshots, the start among them, and
beta(s, r) = C(s+r, s), a chain of beta(s, r-1) < l <= beta(s, r) steps needs

    t(l, s) = r*l - beta(s+1, r-1)

plain runs, no schedule needs fewer, and no step is run plainly more than r times. That is for one step of tape. With c
steps, stretches of up to c steps are taped whole, and the same holds in units of c:

    t(l, s, c) = r*l - c*beta(s+1, r-1)        for c*beta(s, r-1) < l <= c*beta(s, r)

What is left over in memory is not spent on more tape here; `uniform` does that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import comb
from typing import ClassVar

from lowtide.actions import Action, Tier
from lowtide.chain import Chain, StepCost
from lowtide.checks import MOST_STEPS, MOST_TOTAL, keep_whole
from lowtide.errors import BudgetError
from lowtide.plan import Bill, Bound, registered
from lowtide.planners import splits
from lowtide.planners.sweep import sweep_bill
from lowtide.planners.uniform import OneSlot
from lowtide.simulate import simulate_actions


def beta(slots: int, repeats: int) -> int:
    """The longest chain that `slots` snapshots reverse with no step run plainly more than `repeats` times."""
    return comb(slots + repeats, slots) if slots >= 0 and repeats >= 0 else 0


@lru_cache(maxsize=1 << 16)
def repeats(length: int, slots: int) -> int:
    """The least r with length <= beta(slots, r)."""
    if slots == 1:
        return length - 1
    # Doubling, then halving: r can be in the thousands for two or three slots.
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
    """t(length, slots, steps), the least plain runs with `slots` snapshots, the start among them."""
    r = repeats(-(-length // steps), slots)
    return r * length - steps * beta(slots + 1, r - 1)


@lru_cache(maxsize=1 << 16)
def left_part(length: int, slots: int, steps: int = 1) -> int:
    """Steps to advance from a stored start; 0 for a stretch that is taped.

    t is linear between consecutive betas, so a split is optimal exactly when the left part stays on the
    linear piece below (r-1 repeats with all slots) and the right part on its own (r repeats with one slot
    fewer). Of that range the longest left part is taken: it leaves stretches of few different lengths.
    """
    if length <= steps:
        return 0
    if slots == 1:
        return length - steps
    r = repeats(-(-length // steps), slots)
    return min(steps * beta(slots, r - 1), length - steps * beta(slots - 1, r - 1))


def slots_within(step: StepCost, budget: int) -> int:
    """The most snapshots that fit `budget` beside one step of tape and the working set.

    Raises:
        BudgetError: not even one fits.
    """
    least = least_with_slots(step)
    if budget < least:
        raise BudgetError(
            budget, least, "raise the budget, or make the steps smaller (a smaller batch, a cheaper step)"
        )
    return 1 + (budget - least) // step.state


def least_with_slots(step: StepCost) -> int:
    """The least budget for which `slots_within` finds room: one snapshot."""
    taping = step.tape + max(step.working.tape + step.cotangent, step.working.backward)
    return step.state + max(taping, step.working.advance + step.cotangent)


@registered
@dataclass(frozen=True, slots=True)
class Revolve:
    """At most `slots` snapshots, the initial state among them, and `steps` steps of tape."""

    planner: ClassVar[str] = "revolve"
    disk: ClassVar[None] = None

    slots: int
    steps: int = 1

    def __post_init__(self) -> None:
        keep_whole(self, "slots", least=1, most=MOST_TOTAL, label="checkpoints")
        keep_whole(self, "steps", least=1, most=MOST_STEPS)

    def rule(self, length: int, held: int, stored: Tier | None) -> tuple[int, Tier]:
        """See `splits.Rule`."""
        return left_part(length, self.slots - held, self.steps), Tier.MEMORY

    def actions(self, chain: Chain) -> Iterator[Action]:
        """See `Schedule`."""
        return splits.play(self.rule, 0, len(chain))

    def bill(self, chain: Chain) -> Bill:
        """See `Schedule`; in closed form where the stretches would be as many as the steps."""
        length = len(chain)
        if not chain.is_equal:
            return simulate_actions(chain, self.actions(chain))
        if (self.slots + 1) * self.steps >= length:
            return self._sweep_bill(chain)
        if self.slots == 1:
            return OneSlot((self.steps, self.steps)).bill(chain, 0)
        return splits.bill(self.rule, chain)

    def _sweep_bill(self, chain: Chain) -> Bill:
        """One sweep: all stretches are full but the last but one."""
        step, tape = chain[0], min(self.steps, len(chain))
        count = -(-len(chain) // tape)
        rest = len(chain) - (count - 1) * tape
        fullest = max(
            (count - 2) * step.state + rest * step.tape, (count - 3) * step.state + tape * step.tape * (count > 2)
        )
        return sweep_bill(chain, count, tape, fullest)

    def bound(self, chain: Chain) -> Bound:
        """The optimum itself."""
        tape = "one step" if self.steps == 1 else f"{self.steps:,} steps"
        return Bound(
            plain_runs(len(chain), self.slots, self.steps), f"with {self.slots:,} snapshots and {tape} of tape"
        )
