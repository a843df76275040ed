"""Equal steps, and memory that holds snapshots and tape as needed: the fewest plain runs.

State a bytes, tape w bytes (including the step's input), M bytes for both. With i snapshots held below, the tape of
c_i = floor((M - i*a) / w) steps fits. Every step is taped exactly once, so only plain runs are counted:

    P_i(l) = 0                                            if l <= c_i
    P_i(l) = min over j of  j + P_i(j) + P_{i+1}(l-j)     otherwise (infinite when c_i < 1)

The first j steps are run without tape, the right part is reversed from there while the start waits in memory, then the
left part is reversed from the start. A start that is about to be taped is dropped, because the tape holds it; so i
counts the starts waiting below, the chain's own initial state included. (Maddison's mixed schedules are the case
a = w.) The recurrence is evaluated in one of three ways, tried in this order:

- One sweep. If c_0 + ... + c_n >= l for some n, no step needs two plain runs: P = l - c_n for the least n. And with
  room for only one snapshot there is nothing to choose. Both have a closed form.
- The envelope (`envelope.py`): split where the proven bounds of both parts add up to the bound of the whole. Bounds are
  met in nearly all cases, and then the split is proven optimal.
- Exact dynamic programming, where the envelope's answer is above its bound and the chain is short enough.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from lowtide.actions import Action, Tier
from lowtide.chain import Chain, StepCost
from lowtide.checks import MOST_TOTAL, keep_whole
from lowtide.errors import BudgetError, InputError
from lowtide.plan import Bill, Bound, ChainSchedule, registered
from lowtide.planners import splits
from lowtide.planners.envelope import Envelope
from lowtide.sizes import format_size

# Work of exact dynamic programming, where the envelope's answer is not proven; this much takes about a second.
MOST_ADDITIONS = 2 * 10**8


# --- how many steps of tape fit


def least_memory(state: int, tape: int, length: int) -> int:
    """The fewest bytes of snapshots and tape with which `length` equal steps can be reversed."""
    return min(length * tape, state + tape)


def capacities(memory: int, state: int, tape: int, length: int, slots: int | None = None) -> tuple[int, ...]:
    """c_0, c_1, ...: the steps of tape that fit beside 0, 1, ... snapshots, for every level that can be of use.

    Once c_0 + ... + c_n covers the chain, further levels only have less room and are left out, as are those with more
    than `slots` snapshots.
    """
    levels = _levels(memory, state, length, tape)
    if slots is not None:
        levels = min(levels, slots + 1)
    covering = bisect_left(range(1, levels), length, key=lambda n: _covered(memory, state, tape, n)) + 1
    return tuple((memory - i * state) // tape for i in range(covering))


def one_sweep_memory(state: int, tape: int, length: int) -> int:
    """The fewest bytes with which no step has more than one plain run: c_0 + c_1 + ... >= length."""
    low, high = least_memory(state, tape, length), length * tape
    while low < high:
        middle = (low + high) // 2
        enough = _covered(middle, state, tape, _levels(middle, state, length, tape)) >= length
        low, high = (low, middle) if enough else (middle + 1, high)
    return low


def _levels(memory: int, state: int, length: int, tape: int) -> int:
    """The number of levels that have room for a step of tape, at most one for each step."""
    return min((memory - tape) // state, length - 1) + 1


def _covered(memory: int, state: int, tape: int, levels: int) -> int:
    """c_0 + ... + c_{levels-1}, without adding them up one by one."""
    return _floor_sum(levels, tape, state, memory - (levels - 1) * state)


def _floor_sum(count: int, divisor: int, slope: int, offset: int) -> int:
    """The sum of (slope*i + offset) // divisor over i < count, by Euclid's algorithm.

    Whole parts of slope and offset are summed in closed form. The remaining sum counts the lattice points under a line
    with a slope below 1; counted along the other axis, it is the same problem with slope and divisor swapped.
    """
    total = 0
    while count > 0:
        total += slope // divisor * (count * (count - 1) // 2) + offset // divisor * count
        slope, offset = slope % divisor, offset % divisor
        height = slope * count + offset
        count, offset = height // divisor, height % divisor
        divisor, slope = slope, divisor
    return total


# --- where to split


class _ByEnvelope:
    """The solver for several slots and more than one sweep: split where the bounds of both parts add up."""

    def __init__(self, capacities: tuple[int, ...], length: int) -> None:
        self._capacities = capacities
        self._envelope = Envelope(capacities, length)
        self._lefts: dict[tuple[int, int], int] = {}
        if len(capacities) * length**2 <= MOST_ADDITIONS:
            units = Chain.equal(StepCost(1, 1), length)  # only the runs are counted, so any cost will do
            if splits.bill(self.rule, units).plain_runs > self.bound(length):
                self._lefts = _exact_lefts(capacities, length)

    def rule(self, length: int, held: int, stored: Tier | None) -> tuple[int, Tier]:
        """A `splits.Rule`: exact if there is a table, else by the envelope."""
        if length <= self._capacities[held]:
            return 0, Tier.MEMORY
        left = self._lefts.get((length, held))
        if left is None:
            left = self._lefts[length, held] = self._envelope.split(held, length)
        return left, Tier.MEMORY

    def bound(self, length: int) -> int:
        """The envelope, rounded up."""
        return self._envelope.least(0, length)

    def bill(self, chain: Chain, option: int) -> Bill:
        """The cost of the whole chain, from its distinct stretches."""
        return splits.bill(self.rule, chain, option=option)


def _exact_lefts(capacities: tuple[int, ...], length: int) -> dict[tuple[int, int], int]:
    """The left part by (length, held), from the recurrence itself, for all lengths up to `length`."""
    lefts: dict[tuple[int, int], int] = {}
    steps = np.arange(length + 1, dtype=np.int64)
    unreachable = np.iinfo(np.int64).max // 4  # a sum of two of these and a length does not overflow
    right = np.full(length + 1, unreachable)  # P_{i+1}; above the last level nothing fits
    for held in range(len(capacities) - 1, -1, -1):
        runs = np.full(length + 1, unreachable)  # P_i, filled from the shortest on, since it needs P_i(j) for j < l
        runs[: capacities[held] + 1] = 0
        for size in range(capacities[held] + 1, length + 1):
            costs = steps[1:size] + runs[1:size] + right[size - 1 : 0 : -1]
            left = int(np.argmin(costs))
            runs[size] = min(costs[left], unreachable)
            lefts[size, held] = left + 1
        right = runs
    return lefts


@lru_cache(maxsize=8)
def solver(memory: int, state: int, tape: int, length: int, slots: int | None = None) -> splits.Solver:
    """The solver for stretches of up to `length` equal steps in `memory` bytes of snapshots and tape."""
    rooms = capacities(memory, state, tape, length, slots)
    if sum(rooms) >= length:
        return splits.OneSweep(rooms)
    return splits.OneSlot(rooms) if len(rooms) == 2 else _ByEnvelope(rooms, length)


# --- the schedule, and the one for a budget


@registered
@dataclass(frozen=True, slots=True)
class Uniform(ChainSchedule):
    """At most `memory` bytes of snapshots and tape, and at most `slots` snapshots if it is not None.

    Each step is taped in the form of entry `option` of its menu.
    """

    planner: ClassVar[str] = "uniform"
    disk: ClassVar[None] = None

    memory: int
    option: int = 0
    slots: int | None = None

    def __post_init__(self) -> None:
        keep_whole(self, "memory", least=1, most=MOST_TOTAL)
        keep_whole(self, "option", least=0)
        if self.slots is not None:
            keep_whole(self, "slots", least=0, most=MOST_TOTAL)

    def actions(self, chain: Chain) -> Iterator[Action]:
        """The actions, made one by one as they are requested."""
        return splits.play(self._solver(chain).rule, 0, len(chain), option=self.option)

    def bill(self, chain: Chain) -> Bill:
        """The cost of the actions."""
        return self._solver(chain).bill(chain, self.option)

    def bound(self, chain: Chain) -> Bound:
        """The bound that the envelope proves; the optimum where there is a closed form."""
        scope = f"with {format_size(self.memory)} of snapshots and tape"
        if self.slots is not None:
            scope += f" and {self.slots:,} snapshots"
        return Bound(self._solver(chain).bound(len(chain)), scope)

    def _solver(self, chain: Chain) -> splits.Solver:
        step, length = splits.equal_step(chain), len(chain)
        if self.option >= len(step.menu):
            raise InputError(f"option={self.option} is not on a menu of {len(step.menu)} entries")
        tape = step.menu[self.option].tape
        least = least_memory(step.state, tape, length) if self.slots != 0 else length * tape
        if self.memory < least:
            raise BudgetError(self.memory, least, "this is what its snapshots and tape take")
        return solver(min(self.memory, length * tape), step.state, tape, length, self.slots)


def uniform_least(step: StepCost, length: int) -> int:
    """The least budget, working set included, for which `uniform_within` finds a plan."""
    return min(_least_with(step, length, option) for option in range(len(step.menu)))


def uniform_within(chain: Chain, budget: int) -> list[Uniform]:
    """For each form of tape that fits, the schedule within a budget for snapshots, tape and working set.

    A step that is taped or pulled back needs its working set beside snapshots and tape; a plain run needs its working
    set beside the snapshots alone. So the first is subtracted from the memory, and the second limits the number of
    snapshots.
    """
    step, length = chain[0], len(chain)
    advancing = budget - step.working.advance - step.cotangent
    most = max(0, advancing // step.state)
    schedules = []
    # Each form has its own optimum. Seconds decide between them, which follow from the bill: so the caller chooses.
    for option, entry in enumerate(step.menu):
        if budget < _least_with(step, length, option):
            continue
        memory = budget - splits.beside_tape(step, option)
        would_use = len(capacities(min(memory, length * entry.tape), step.state, entry.tape, length)) - 1
        schedules.append(Uniform(memory, option, most if most < would_use else None))
    return schedules


def _least_with(step: StepCost, length: int, option: int) -> int:
    """The least budget with this form of tape: that of taping everything, or of storing one state at a time."""
    tape, beside = step.menu[option].tape, splits.beside_tape(step, option)
    one_slot = step.state + max(tape + beside, step.working.advance + step.cotangent)
    return min(length * tape + beside, one_slot)
