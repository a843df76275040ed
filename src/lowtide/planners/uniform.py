"""Equal steps, memory spent on snapshots and tape alike: the least plain runs.

State a bytes, tape w bytes (holding its own input), M bytes for both. With i snapshots held below, the tape
of c_i = floor((M - i*a) / w) steps fits. Every step is taped exactly once, so only plain runs are counted:

    P_i(l) = 0                                            if l <= c_i
    P_i(l) = min over j of  j + P_i(j) + P_{i+1}(l-j)     otherwise (infinite when c_i < 1)

The first j steps are run without tape, the right part is reversed from there while the start waits in
memory, then the left part from the start. A start that is about to be taped is dropped, because the tape
holds it; so i counts the starts waiting below, the chain's own initial state among them. (Maddison's mixed
schedules are the case a = w.) Three ways to evaluate it, in this order:

- One sweep. If c_0 + ... + c_n >= l for some n, no step need run plainly twice: P = l - c_n for the least n. And
  with room for one snapshot only, there is no choice; both have a closed form.
- The envelope (`envelope.py`): split where the proven bounds of both parts add up to the bound of the whole.
  Bounds are met in nearly all cases, and then the split is proven optimal.
- Exact dynamic programming, where the envelope's answer is above its bound and the chain short enough.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import ClassVar, Protocol

import numpy as np

from lowtide.actions import Action, Tier
from lowtide.chain import Chain, StepCost
from lowtide.errors import BudgetError
from lowtide.plan import Bill, registered
from lowtide.planners import splits
from lowtide.planners.envelope import Envelope
from lowtide.planners.sweep import sweep_bill

# Additions that exact dynamic programming may take where the envelope's answer is not proven: about a second.
EXACT_WORK = 2 * 10**8


def working_set(step: StepCost) -> int:
    """Bytes beyond snapshots and tape at the worst moment."""
    return max(max(step.working.advance, step.working.tape) + step.cotangent, step.working.backward)


def least_memory(state: int, tape: int, length: int) -> int:
    """The fewest bytes of snapshots and tape with which `length` equal steps can be reversed."""
    return min(length * tape, state + tape)


def capacities(memory: int, state: int, tape: int, length: int) -> tuple[int, ...]:
    """c_0, c_1, ...: steps of tape that fit beside 0, 1, ... snapshots, as many as can be of use.

    Once c_0 + ... + c_n covers the chain, deeper levels only have less room and are left out.
    """
    most = min((memory - tape) // state, length - 1)
    room = (memory - np.arange(most + 1, dtype=np.int64) * state) // tape
    covered = np.cumsum(room) >= length
    return tuple(room[: int(np.argmax(covered)) + 1 if covered.any() else most + 1].tolist())


def one_sweep_memory(state: int, tape: int, length: int) -> int:
    """The fewest bytes with which no step is run plainly more than once: c_0 + c_1 + ... >= length."""
    low, high = least_memory(state, tape, length), length * tape
    while low < high:
        middle = (low + high) // 2
        enough = sum(capacities(middle, state, tape, length)) >= length
        low, high = (low, middle) if enough else (middle + 1, high)
    return low


class Solver(Protocol):
    """Where to split, and what it costs, for one amount of memory and stretches of up to some length."""

    bound: int

    def rule(self, length: int, held: int, stored: Tier | None) -> tuple[int, Tier]:
        """See `splits.Rule`."""

    def bill(self, chain: Chain, option: int) -> Bill:
        """What the whole chain costs."""


class _OneSweep:
    """c_0 + ... + c_n >= length: the last stretch is full, c_n for the least n; so are all but the first."""

    def __init__(self, capacities: tuple[int, ...], length: int) -> None:
        self._capacities = capacities
        self._covered = list(accumulate(capacities, initial=0))
        self.bound = length - min(length, capacities[-1])

    def rule(self, length: int, held: int, stored: Tier | None) -> tuple[int, Tier]:
        """See `splits.Rule`."""
        if length <= self._capacities[held]:
            return 0, Tier.MEMORY
        covered = self._covered
        last = bisect_left(covered, covered[held] + length) - 1
        return length - (covered[last + 1] - covered[held + 1]), Tier.MEMORY

    def bill(self, chain: Chain, option: int) -> Bill:
        """In closed form."""
        stretches = np.array(self._capacities, dtype=np.int64)
        stretches[0] = len(chain) - stretches[1:].sum()
        return sweep_bill(chain, stretches, option)


class _OneSlot:
    """Room for one snapshot: from the start again and again, one tape of c_1 less far each time, until c_0 is left."""

    def __init__(self, capacities: tuple[int, ...], length: int) -> None:
        self._last, self._taped = capacities
        self._sweeps = -((self._last - length) // self._taped)
        self.bound = self._sweeps * length - self._taped * self._sweeps * (self._sweeps + 1) // 2

    def rule(self, length: int, held: int, stored: Tier | None) -> tuple[int, Tier]:
        """See `splits.Rule`."""
        if held or length <= self._last:
            return 0, Tier.MEMORY
        return length - self._taped, Tier.MEMORY

    def bill(self, chain: Chain, option: int) -> Bill:
        """In closed form; `splits.bill` would visit as many stretches as there are sweeps."""
        step, length, sweeps = chain[0], len(chain), self._sweeps
        tape, extra = step.menu[option].tape, step.menu[option].extra
        again = max(step.working.tape + step.cotangent, step.working.backward)
        first = max(step.working.tape, step.working.backward)
        peaks = [
            step.state + step.working.advance + (step.cotangent if sweeps > 1 else 0),
            step.state + self._taped * tape + (again if sweeps > 1 else first),
            (length - sweeps * self._taped) * tape + again,
        ]
        return Bill(
            plain_runs=self.bound,
            taping_runs=length,
            backward_runs=length,
            peak_memory=max(peaks),
            peak_disk=0,
            peak_snapshots=1,
            seconds=(self.bound + length) * step.forward + (length * extra + length * step.backward),
        )


class _ByEnvelope:
    """Several slots, and steps that run plainly more than once: split where the bounds of both parts add up."""

    def __init__(self, capacities: tuple[int, ...], length: int) -> None:
        self._capacities = capacities
        self._envelope = Envelope(capacities, length)
        self._lefts: dict[tuple[int, int], int] = {}
        self.bound = self._envelope.least(0, length)
        if len(capacities) * length**2 <= EXACT_WORK:
            units = Chain.equal(StepCost(1, 1), length)
            if splits.bill(self.rule, units).plain_runs > self.bound:
                self._lefts = _exact_lefts(capacities, length)

    def rule(self, length: int, held: int, stored: Tier | None) -> tuple[int, Tier]:
        """See `splits.Rule`."""
        if length <= self._capacities[held]:
            return 0, Tier.MEMORY
        left = self._lefts.get((length, held))
        if left is None:
            left = self._lefts[length, held] = self._envelope.split(held, length)
        return left, Tier.MEMORY

    def bill(self, chain: Chain, option: int) -> Bill:
        """From the distinct stretches."""
        return splits.bill(self.rule, chain, option=option)


def _exact_lefts(capacities: tuple[int, ...], length: int) -> dict[tuple[int, int], int]:
    """The recurrence itself, for all lengths up to `length`: (length, held) -> left part."""
    lefts: dict[tuple[int, int], int] = {}
    steps = np.arange(length + 1, dtype=np.int64)
    unreachable = np.iinfo(np.int64).max // 4
    right = np.full(length + 1, unreachable)
    for held in range(len(capacities) - 1, -1, -1):
        runs = np.full(length + 1, unreachable)
        runs[: capacities[held] + 1] = 0
        for size in range(capacities[held] + 1, length + 1):
            costs = steps[1:size] + runs[1:size] + right[size - 1 : 0 : -1]
            left = int(np.argmin(costs))
            runs[size] = min(costs[left], unreachable)
            lefts[size, held] = left + 1
        right = runs
    return lefts


@lru_cache(maxsize=8)
def solver(memory: int, state: int, tape: int, length: int) -> Solver:
    """The solver for stretches of up to `length` equal steps in `memory` bytes of snapshots and tape."""
    rooms = capacities(memory, state, tape, length)
    if sum(rooms) >= length:
        return _OneSweep(rooms, length)
    return _OneSlot(rooms, length) if len(rooms) == 2 else _ByEnvelope(rooms, length)


@registered
@dataclass(frozen=True, slots=True)
class Uniform:
    """At most `memory` bytes of snapshots and tape, each step taped in the form that `option` says."""

    planner: ClassVar[str] = "uniform"
    disk: ClassVar[None] = None

    memory: int
    option: int = 0

    def actions(self, chain: Chain) -> Iterator[Action]:
        """See `Schedule`."""
        return splits.play(self._solver(chain).rule, 0, len(chain), option=self.option)

    def bill(self, chain: Chain) -> Bill:
        """See `Schedule`."""
        return self._solver(chain).bill(chain, self.option)

    def bound(self, chain: Chain) -> int:
        """Proven by the envelope, or exact where there is a closed form."""
        return self._solver(chain).bound

    def _solver(self, chain: Chain) -> Solver:
        step, length = chain[0], len(chain)
        tape = step.menu[self.option].tape
        least = least_memory(step.state, tape, length)
        if self.memory < least:
            raise BudgetError(self.memory, least, "this is what its snapshots and tape take")
        return solver(self.memory, step.state, tape, length)
