"""Equal steps, memory for snapshots and tape, and a disk whose writes and reads take time.

The recurrence of H-Revolve (Herrmann and Pallez, 2020), extended by tape. With f seconds for a plain run, W and R
seconds for writing and reading one snapshot, i snapshots held in memory below, and c_i as in `equal`:

    V_i(l) = 0                                                    if l <= c_i
    V_i(l) = min over j of  j*f + V_{i+1}(l-j) + V_i(j)           the start waits in memory
                        or  W + j*f + V_i(l-j) + R + D_i(j)       the start waits on disk
    D_i(l) = min(V_i(l),  min over j of  j*f + V_i(l-j) + R + D_i(j))     it is on disk already: no second write

V is for a start that is current and not on disk, D for one that has just been read and is still on disk. Filling the
tables takes length^2 * levels additions. Longer chains get a snapshot on disk every `period` steps and the equal-step
optimum in between, with the period that costs least per step (Aupy and Herrmann's periodic schedules, 2017, which are
asymptotically optimal).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lowtide.actions import Action, Tier
from lowtide.chain import Chain, Disk, StepCost
from lowtide.checks import MOST_STEPS, MOST_TOTAL, keep_whole
from lowtide.errors import BudgetError, InputError
from lowtide.plan import Bill, ChainSchedule, registered
from lowtide.planners import splits
from lowtide.planners.equal import MOST_ADDITIONS, Uniform, capacities, least_memory, solver

_Floats = NDArray[np.float64]


@registered
@dataclass(frozen=True, slots=True)
class Tiers(ChainSchedule):
    """At most `memory` bytes of snapshots and tape in memory, and further snapshots on `disk`.

    `period` is 0 for the exact table, otherwise the number of steps between snapshots on disk.
    """

    planner: ClassVar[str] = "tiers"

    memory: int
    disk: Disk
    period: int = 0

    def __post_init__(self) -> None:
        keep_whole(self, "memory", least=1, most=MOST_TOTAL)
        keep_whole(self, "period", least=0, most=MOST_STEPS)
        if not isinstance(self.disk, Disk):
            raise InputError(f"disk={self.disk!r} is a {type(self.disk).__name__}; give a Disk")

    def actions(self, chain: Chain) -> Iterator[Action]:
        """The actions, made one by one as they are requested."""
        return splits.play(self._rule(chain), 0, len(chain))

    def bill(self, chain: Chain) -> Bill:
        """The cost of the actions, transfers to and from the disk included."""
        return splits.bill(self._rule(chain), chain, disk=self.disk)

    def bound(self, chain: Chain) -> None:
        """None: this planner minimises seconds, not plain runs."""

    def _rule(self, chain: Chain) -> splits.Rule:
        step, length = splits.equal_step(chain), len(chain)
        if self.memory < step.tape:  # one tape is enough, because every start can wait on disk
            raise BudgetError(self.memory, step.tape, "one tape has to be in memory")
        if self.period:
            between = min(self.period, length)
            if self.memory < least_memory(step.state, step.tape, between):
                raise InputError(f"memory={self.memory:,} does not reverse the {between:,} steps between two snapshots")
            return _periodic(self.memory, self.period, step)
        return _table(min(self.memory, length * step.tape), step, self.disk, length).rule


def two_tiers(chain: Chain, memory: int, disk: Disk) -> Tiers | Uniform:
    """The exact schedule where its table is affordable; otherwise the faster of the best periodic one and no disk."""
    step, length = splits.equal_step(chain), len(chain)
    memory = min(memory, length * step.tape)
    levels = len(capacities(memory, step.state, step.tape, length))
    if 3 * levels * length**2 <= MOST_ADDITIONS:
        return Tiers(memory, disk)
    periodic = Tiers(memory, disk, _best_period(memory, step, disk, length))
    if memory < least_memory(step.state, step.tape, length):
        return periodic
    without = Uniform(memory)
    return periodic if periodic.bill(chain).seconds < without.bill(chain).seconds else without


def _periodic(memory: int, period: int, step: StepCost) -> splits.Rule:
    between = solver(memory, step.state, step.tape, period)

    def rule(length: int, held: int, stored: Tier | None) -> tuple[int, Tier]:
        if length > period:
            return period, Tier.DISK
        return between.rule(length, held, stored)

    return rule


def _best_period(memory: int, step: StepCost, disk: Disk, length: int) -> int:
    """The period with the fewest seconds per step; each candidate is an eighth longer than the one before."""
    trip = step.state * (disk.write + disk.read)
    room = memory // step.tape  # steps: a period this long is taped whole
    if memory < least_memory(step.state, step.tape, length):
        return room  # a snapshot does not fit beside a tape
    between = solver(memory, step.state, step.tape, length)
    best, least = room, trip / room
    period = room
    while period < length:
        cost = (trip + step.forward * between.bound(period)) / period
        if cost < least:
            best, least = period, cost
        period += max(1, period // 8)
    return best


class _Table:
    """V and D for every level and length, and the split that leads to each value."""

    def __init__(self, memory: int, step: StepCost, disk: Disk, length: int) -> None:
        self._capacities = capacities(memory, step.state, step.tape, length)
        self._forward, self._write, self._read = step.forward, step.state * disk.write, step.state * disk.read
        self._left: dict[tuple[int, int, bool], tuple[int, Tier]] = {}
        # V of the level with one more snapshot. Above the last level there is none: that many snapshots do not fit.
        above: _Floats = np.full(length + 1, np.inf)
        for held in range(len(self._capacities) - 1, -1, -1):
            above = self._level(held, length, above)

    def rule(self, length: int, held: int, stored: Tier | None) -> tuple[int, Tier]:
        """A `splits.Rule`: how far to advance before splitting a stretch, and where its start waits."""
        if length <= self._capacities[held]:
            return 0, Tier.MEMORY
        return self._left[length, held, stored is Tier.DISK]

    def _level(self, held: int, length: int, above: _Floats) -> _Floats:
        fits = self._capacities[held]
        running = self._forward * np.arange(length + 1)
        fresh: _Floats = np.zeros(length + 1)  # V
        on_disk: _Floats = np.zeros(length + 1)  # D
        # Both parts of a split are shorter than the stretch, so going up in size all values needed are known.
        for size in range(fits + 1, length + 1):
            parts = slice(1, size)
            rest = slice(size - 1, 0, -1)
            in_memory = running[parts] + above[rest] + fresh[parts]
            waiting = running[parts] + fresh[rest] + self._read + on_disk[parts]
            j_memory, j_disk = int(np.argmin(in_memory)), int(np.argmin(waiting))
            by_memory = (float(in_memory[j_memory]), (j_memory + 1, Tier.MEMORY))
            by_disk = (float(waiting[j_disk]), (j_disk + 1, Tier.DISK))
            written = (self._write + by_disk[0], by_disk[1])
            fresh[size], self._left[size, held, False] = min(by_memory, written, key=itemgetter(0))
            on_disk[size], self._left[size, held, True] = min(by_memory, by_disk, key=itemgetter(0))
        return fresh


@lru_cache(maxsize=4)
def _table(memory: int, step: StepCost, disk: Disk, length: int) -> _Table:
    return _Table(memory, step, disk, length)
