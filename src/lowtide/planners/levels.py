"""Unequal steps, with memory cut into levels: the recurrence of `hetero` as a table, for chains too long for `fronts`.

It is the budget that is cut, not the total. Sizes are rounded so that sums come out right (`memory_needs`), so a plan's
real peak can be a few levels off either way: the table goes beyond the budget by an eighth, and from the top the first
plan whose exact peak keeps the budget is taken.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lowtide.chain import Chain
from lowtide.planners.memory_needs import MemoryNeeds

_Floats = NDArray[np.float64]


class Levels:
    """Seconds of the cheapest treatment of every [s, t) in every number of levels.

    With `count_slots`, every state takes one level and every tape one, only stretches of one step are taped, and
    nothing else counts: so many slots, and one step of tape.
    """

    def __init__(self, chain: Chain, unit: int, levels: int, *, count_slots: bool = False) -> None:
        length = len(chain)
        self.levels = levels
        self._length, self._one_tape = length, count_slots
        needs = self._needs = MemoryNeeds(chain, unit)
        if count_slots:
            needs.state, needs.tapes, needs.pulling = [1] * length, [[1]] * length, [[0]] * length
            needs.advance = needs.tape = needs.cotangent = [0] * length
        self._own = [
            [step.forward + step.backward + option.extra for option in step.menu[: len(needs.tapes[k])]]
            for k, step in ((k, chain[k]) for k in range(length))
        ]
        self._running = np.array([chain.forward_seconds(0, k) for k in range(length + 1)])
        self._table: _Floats = np.empty((length, length + 1, levels + 1))
        for width in range(1, length + 1):
            for start in range(length - width + 1):
                self._fill(start, start + width)

    def seconds(self, level: int) -> float:
        """Of the whole chain in that many levels."""
        return float(self._table[0, self._length, level])

    def decisions(self, level: int) -> list[int]:
        """The decisions of the cheapest treatment, in the order that `Hetero` keeps them."""
        decisions = []
        pending = [(0, self._length, level)]
        while pending:
            start, stop, room = pending.pop()
            decision = self._decide(start, stop, room)
            decisions.append(decision)
            pending += self._needs.parts(start, stop, room, decision)
        return decisions

    def _fill(self, start: int, stop: int) -> None:
        row = self._table[start, stop]
        row[:] = np.inf
        for option in range(len(self._own[start])):
            low, seconds = self._taping(start, stop, option)
            np.minimum(row[low:], seconds, out=row[low:])
        state = self._needs.state[start]
        if stop - start > 1 and state <= self.levels:
            seconds = self._splitting(start, stop, state, self.levels + 1).min(axis=0)
            np.minimum(row[state:], seconds, out=row[state:])

    def _taping(self, start: int, stop: int, option: int) -> tuple[int, _Floats]:
        """The least levels in which step `start` can be taped first, and the seconds from there on up."""
        tape = self._needs.tapes[start][option]
        low = min(tape + self._needs.beside_tape(start, stop, option), self.levels + 1)
        own = self._own[start][option]
        if stop - start == 1:
            return low, np.full(self.levels + 1 - low, own)
        if self._one_tape:
            return low, np.full(self.levels + 1 - low, np.inf)
        return low, own + self._table[start + 1, stop, low - tape : self.levels + 1 - tape]

    def _splitting(self, start: int, stop: int, low: int, high: int) -> _Floats:
        """Seconds for every place to split at (rows) in the levels [low, high), which hold state `start`."""
        state = self._needs.state[start]
        right = self._table[start + 1 : stop, stop, low - state : high - state]
        total: _Floats = self._table[start, start + 1 : stop, low:high] + right
        total += (self._running[start + 1 : stop] - self._running[start])[:, None]
        running = np.maximum.accumulate(self._needs.advance[start : stop - 1])
        if running[-1]:
            needed = state + running + self._needs.cotangent[stop - 1]
            total[np.arange(low, high) < needed[:, None]] = np.inf
        return total

    def _decide(self, start: int, stop: int, room: int) -> int:
        """The decision behind an entry of the table, found by making its candidates again."""
        best, decision = np.inf, 0
        for option in range(len(self._own[start])):
            low, seconds = self._taping(start, stop, option)
            if room >= low and seconds[room - low] < best:
                best, decision = float(seconds[room - low]), -option
        if stop - start > 1 and room >= self._needs.state[start]:
            column = self._splitting(start, stop, room, room + 1)[:, 0]
            split = int(np.argmin(column))
            if column[split] < best:
                decision = split + 1
        return decision
