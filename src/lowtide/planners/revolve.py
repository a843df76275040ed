"""States only, one step of tape: the binomial optimum, in closed form.

Griewank and Walther, "Algorithm 799: Revolve" (2000). With s snapshots, the start among them, and
beta(s, r) = C(s+r, s), a chain of beta(s, r-1) < l <= beta(s, r) steps needs

    t(l, s) = r*l - beta(s+1, r-1)

plain runs, no schedule needs fewer, and no step is run plainly more than r times. What is left over in
memory is not spent on tape here; `uniform` does that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import comb
from typing import ClassVar

from lowtide.actions import Action, Tier
from lowtide.chain import Chain, StepCost
from lowtide.checks import MOST_TOTAL, keep_whole
from lowtide.errors import BudgetError
from lowtide.plan import Bill, Bound, registered
from lowtide.planners import splits
from lowtide.planners.sweep import Base
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
def plain_runs(length: int, slots: int) -> int:
    """t(length, slots), the least plain runs with `slots` snapshots, the start among them."""
    r = repeats(length, slots)
    return r * length - beta(slots + 1, r - 1)


@lru_cache(maxsize=1 << 16)
def left_part(length: int, slots: int) -> int:
    """Steps to advance from a stored start; 0 for a stretch of one step, which is taped.

    t is linear between consecutive betas, so a split is optimal exactly when the left part stays on the
    linear piece below (r-1 repeats with all slots) and the right part on its own (r repeats with one slot
    fewer). Of that range the longest left part is taken: it leaves stretches of few different lengths.
    """
    if length == 1:
        return 0
    if slots == 1:
        return length - 1
    r = repeats(length, slots)
    return min(beta(slots, r - 1), length - max(1, beta(slots - 1, r - 1)))


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
    """At most `slots` snapshots, the initial state among them, and one step of tape."""

    planner: ClassVar[str] = "revolve"
    disk: ClassVar[None] = None

    slots: int

    def __post_init__(self) -> None:
        keep_whole(self, "slots", least=1, most=MOST_TOTAL, label="checkpoints")

    def rule(self, length: int, held: int, stored: Tier | None) -> tuple[int, Tier]:
        """See `splits.Rule`."""
        return left_part(length, self.slots - held), Tier.MEMORY

    def actions(self, chain: Chain) -> Iterator[Action]:
        """See `Schedule`."""
        return splits.play(self.rule, 0, len(chain))

    def bill(self, chain: Chain) -> Bill:
        """See `Schedule`; in closed form where the stretches would be as many as the steps."""
        length = len(chain)
        if not chain.is_equal:
            return simulate_actions(chain, self.actions(chain))
        if self.slots >= length - 1:
            return Base(1).bill(chain)
        return OneSlot((1, 1)).bill(chain, 0) if self.slots == 1 else splits.bill(self.rule, chain)

    def bound(self, chain: Chain) -> Bound:
        """The optimum itself."""
        return Bound(plain_runs(len(chain), self.slots), f"with {self.slots:,} snapshots and one step of tape")
