"""Unequal steps, each with a menu of tapes: the fastest persistent schedule within a peak.

The dynamic program of Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova for heterogeneous chains ("Optimal
checkpointing for heterogeneous chains", 2019), with several tapes to choose from for each step. For the steps
[s, t) with state s current, and m bytes for all that they hold, their cheapest treatment is either

- tape step s (in one of its forms), treat [s+1, t) beside that tape, pull step s back; or
- store state s, run [s, k) without tape, treat [k, t) beside the snapshot, restore s, treat [s, k).

It is optimal among persistent schedules: those in which a snapshot or tape, once made, stays until its
own backward. Dropping one early and making it again later can win, seldom and little (the tests measure it).

Memory is cut into levels: every size is rounded up to a level, so a plan never takes more than it was given. It
is the budget that is cut, not the total; and since rounding makes plans smaller than they need be, budgets a
little above the real one are tried too, judged by their exact peak.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lowtide.actions import Action, Advance, Backward, Drop, Restore, Save, Tape
from lowtide.chain import Chain
from lowtide.errors import InputError
from lowtide.plan import Bill, registered
from lowtide.simulate import simulate_actions

LEVELS = 500


@registered
@dataclass(frozen=True, slots=True)
class Hetero:
    """A persistent schedule as the row of its decisions, outermost and leftmost first.

    A decision n > 0 stores the first state and advances n steps; n <= 0 tapes the first step with entry -n of its
    menu. Each decision is followed by those for the right part, then by those for the left.
    """

    planner: ClassVar[str] = "hetero"
    disk: ClassVar[None] = None

    decisions: tuple[int, ...]

    def actions(self, chain: Chain) -> Iterator[Action]:
        """See `Schedule`."""
        decisions = iter(self.decisions)
        # What is still to do, innermost last: pull step `start` back (stop = 0), or treat [start, stop) from its
        # stored start.
        pending: list[tuple[int, int]] = []
        start, stop, stored = 0, len(chain), False
        while True:
            while start < stop:
                decision = next(decisions, None)
                if decision is None or decision >= stop - start:
                    raise InputError(f"{len(self.decisions):,} decisions do not fit a chain of {len(chain):,} steps")
                if decision > 0:
                    if not stored:
                        yield Save(start)
                    yield Advance(start, start + decision)
                    pending.append((start, start + decision))
                    start += decision
                else:
                    if stored:
                        yield Drop(start)  # the tape holds its own input
                    yield Tape(start, start + 1, -decision)
                    pending.append((start, 0))
                    start += 1
                stored = False
            while pending and not pending[-1][1]:
                done, _ = pending.pop()
                yield Backward(done, done + 1)
            if not pending:
                return
            start, stop = pending.pop()
            yield Restore(start)
            stored = True

    def bill(self, chain: Chain) -> Bill:
        """See `Schedule`."""
        return simulate_actions(chain, self.actions(chain))

    def bound(self, chain: Chain) -> None:
        """None: optimal among persistent schedules is not a bound on all schedules."""


def fastest(chain: Chain, budget: int, levels: int = LEVELS) -> Hetero:
    """The fastest persistent schedule found whose peak is at most `budget`, which must be at least `least(chain)`."""
    levels = min(levels, budget)
    # Rounding up loses half a level for each snapshot and tape held; an eighth more covers a few dozen of them.
    spare = levels // 8
    table = _Table(chain, -(-budget // levels), levels + spare)
    for level in range(levels + spare, 0, -1):
        # Costs only rise on the way down, so the first plan that keeps the budget is the best. Where a level
        # less costs the same, that plan is the smaller one.
        if np.isfinite(table.seconds(level)) and table.seconds(level) < table.seconds(level - 1):
            schedule = Hetero(tuple(table.decisions(level)))
            if schedule.bill(chain).peak_memory <= budget:
                return schedule
    return _Smallest(chain).schedule()  # so close to the least that rounding leaves no other


def least(chain: Chain) -> int:
    """The fewest bytes, working set included, in which the chain has a persistent schedule."""
    return _Smallest(chain).peak


def with_slots(chain: Chain, slots: int) -> Hetero:
    """The fastest schedule with at most `slots` snapshots, the initial state among them, and one step of tape."""
    levels = min(slots, len(chain)) + 1
    return Hetero(tuple(_Table(chain, 1, levels, count_slots=True).decisions(levels)))


class _Sizes:
    """The chain's bytes as arrays, in levels of `unit` bytes, rounded up."""

    def __init__(self, chain: Chain, unit: int) -> None:
        def up(sizes: list[int]) -> NDArray[np.int64]:
            return -(-np.array(sizes, dtype=np.int64) // unit)

        steps = [chain[k] for k in range(len(chain))]
        self.state = up([step.state for step in steps])
        self.tapes = [up([option.tape for option in step.menu]) for step in steps]
        self.advance = up([step.working.advance for step in steps])
        # Beside its own tape, a step needs this much when it is taped and when it is pulled back ...
        self.tape = up([step.working.tape for step in steps])
        self.backward = up([step.working.backward for step in steps])
        # ... and while [s, t) is treated, the cotangent of state t is there, unless t is the end of the chain.
        self.cotangent = up([step.cotangent for step in steps[1:]] + [0])


class _Table:
    """Seconds of the cheapest treatment of every [s, t) in every number of levels."""

    def __init__(self, chain: Chain, unit: int, levels: int, *, count_slots: bool = False) -> None:
        length = len(chain)
        self._chain, self._levels, self._one_tape = chain, levels, count_slots
        sizes = _Sizes(chain, unit)
        if count_slots:  # every state takes one slot, every tape one, and nothing else counts
            sizes.state, sizes.tapes = np.ones_like(sizes.state), [np.ones_like(tapes) for tapes in sizes.tapes]
            for none in (sizes.advance, sizes.tape, sizes.backward, sizes.cotangent):
                none[:] = 0
        self._sizes = sizes
        self._own = [
            [step.forward + step.backward + option.extra for option in step.menu]
            for step in (chain[k] for k in range(length))
        ]
        self._running = np.array([chain.forward_seconds(0, k) for k in range(length + 1)])
        self._table: NDArray[np.float64] = np.empty((length, length + 1, levels + 1))
        for width in range(1, length + 1):
            for start in range(length - width + 1):
                self._fill(start, start + width)

    def seconds(self, level: int) -> float:
        """Of the whole chain in that many levels."""
        return float(self._table[0, len(self._chain), level])

    def decisions(self, level: int) -> Iterator[int]:
        """The decisions of the cheapest treatment, in the order that `Hetero` keeps them."""
        pending = [(0, len(self._chain), level)]
        while pending:
            start, stop, room = pending.pop()
            decision = self._decide(start, stop, room)
            yield decision
            if decision > 0:
                middle = start + decision
                pending += [(start, middle, room), (middle, stop, room - int(self._sizes.state[start]))]
            elif stop - start > 1:
                pending.append((start + 1, stop, room - int(self._sizes.tapes[start][-decision])))

    def _fill(self, start: int, stop: int) -> None:
        row = self._table[start, stop]
        row[:] = np.inf
        for option in range(len(self._own[start])):
            low, cost = self._taping(start, stop, option)
            np.minimum(row[low:], cost, out=row[low:])
        state = int(self._sizes.state[start])
        if stop - start > 1 and state <= self._levels:
            splitting = self._splitting(start, stop, slice(state, self._levels + 1)).min(axis=0)
            np.minimum(row[state:], splitting, out=row[state:])

    def _taping(self, start: int, stop: int, option: int) -> tuple[int, NDArray[np.float64] | float]:
        """The least levels in which step `start` can be taped first, and the seconds from there on up."""
        sizes = self._sizes
        tape = int(sizes.tapes[start][option])
        beside = max(int(sizes.tape[start] + sizes.cotangent[stop - 1]), int(sizes.backward[start]))
        low = min(tape + beside, self._levels + 1)
        if stop - start == 1:
            return low, self._own[start][option]
        if self._one_tape:
            return low, np.inf
        rest: NDArray[np.float64] = self._table[start + 1, stop, low - tape : self._levels + 1 - tape]
        return low, self._own[start][option] + rest

    def _splitting(self, start: int, stop: int, levels: slice) -> NDArray[np.float64]:
        """Seconds for every place to split at (rows) in the given levels (columns), which hold state `start`."""
        state = int(self._sizes.state[start])
        right = self._table[start + 1 : stop, stop, levels.start - state : levels.stop - state]
        total: NDArray[np.float64] = self._table[start, start + 1 : stop, levels] + right
        total += (self._running[start + 1 : stop] - self._running[start])[:, None]
        running = np.maximum.accumulate(self._sizes.advance[start : stop - 1])
        if running[-1]:
            needed = state + running + self._sizes.cotangent[stop - 1]
            total[np.arange(levels.start, levels.stop) < needed[:, None]] = np.inf
        return total

    def _decide(self, start: int, stop: int, room: int) -> int:
        """The decision behind an entry of the table, found by making its candidates again."""
        best, decision = np.inf, 0
        for option in range(len(self._own[start])):
            low, cost = self._taping(start, stop, option)
            if room >= low:
                value = cost if isinstance(cost, float) else float(cost[room - low])
                if value < best:
                    best, decision = value, -option
        if stop - start > 1 and room >= self._sizes.state[start]:
            column = self._splitting(start, stop, slice(room, room + 1))[:, 0]
            split = int(np.argmin(column))
            if column[split] < best:
                decision = split + 1
        return decision


class _Smallest:
    """The least peak of every [s, t), exactly, and the schedule that reaches it for the whole chain."""

    def __init__(self, chain: Chain) -> None:
        length = len(chain)
        sizes = _Sizes(chain, 1)
        peaks = np.zeros((length + 1, length + 1), dtype=np.int64)
        self._chosen = np.zeros((length, length + 1), dtype=np.int64)
        for width in range(1, length + 1):
            for start in range(length - width + 1):
                stop = start + width
                cotangent = sizes.cotangent[stop - 1]
                beside = max(sizes.tape[start] + cotangent, sizes.backward[start], peaks[start + 1, stop])
                option = int(np.argmin(sizes.tapes[start]))
                peak, decision = sizes.tapes[start][option] + beside, -option
                if width > 1:
                    running = np.maximum.accumulate(sizes.advance[start : stop - 1]) + cotangent
                    right = sizes.state[start] + np.maximum(running, peaks[start + 1 : stop, stop])
                    split_peaks = np.maximum(right, peaks[start, start + 1 : stop])
                    split = int(np.argmin(split_peaks))
                    if split_peaks[split] < peak:
                        peak, decision = split_peaks[split], split + 1
                peaks[start, stop], self._chosen[start, stop] = peak, decision
        self._length = length
        self.peak = int(peaks[0, length])

    def schedule(self) -> Hetero:
        decisions = []
        pending = [(0, self._length)]
        while pending:
            start, stop = pending.pop()
            decision = int(self._chosen[start, stop])
            decisions.append(decision)
            if decision > 0:
                pending += [(start, start + decision), (start + decision, stop)]
            elif stop - start > 1:
                pending.append((start + 1, stop))
        return Hetero(tuple(decisions))
