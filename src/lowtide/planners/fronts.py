"""Unequal steps, exactly: for every stretch, all pairs of (bytes, seconds) that no other schedule beats.

The recurrence is that of `hetero`. As a function of the bytes m, the least seconds of a stretch is a staircase, kept as
its corners. Taping a step shifts a staircase; splitting adds two of them at the same m, so the corners of the sum are
those of its parts, and their number does not multiply: a chain of 50 steps with sizes at random has about 800. One set
of staircases answers every budget, so a larger budget can never come out slower.

It takes a few microseconds for each (start, split, stop) and corner. Five forms for each step instead of one make four
times as many corners; `levels` is for longer chains and longer menus.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lowtide.chain import Chain
from lowtide.planners.memory_needs import MemoryNeeds

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Front:
    """Corners by rising bytes and falling seconds, and the decision that leads to each."""

    bytes: _Ints
    seconds: _Floats
    decisions: _Ints

    def at(self, room: _Ints) -> _Floats:
        return self.seconds[np.searchsorted(self.bytes, room, side="right") - 1]


class Fronts:
    """The staircase of every stretch of the chain."""

    def __init__(self, chain: Chain) -> None:
        length = self._length = len(chain)
        self._needs = MemoryNeeds(chain)
        self._own = [
            [step.forward + step.backward + option.extra for option in step.menu]
            for step in (chain[k] for k in range(length))
        ]
        self._running = [chain.forward_seconds(0, k) for k in range(length + 1)]
        self._fronts: dict[tuple[int, int], _Front] = {}
        for width in range(1, length + 1):
            for start in range(length - width + 1):
                self._fronts[start, start + width] = self._front(start, start + width)

    @property
    def least(self) -> int:
        """The fewest bytes in which the chain has a persistent schedule."""
        return int(self._fronts[0, self._length].bytes[0])

    def decisions(self, budget: int) -> list[int]:
        """The fastest persistent schedule within `budget`, as the decisions that `Hetero` keeps."""
        decisions = []
        pending = [(0, self._length, min(budget, int(self._fronts[0, self._length].bytes[-1])))]
        while pending:
            start, stop, room = pending.pop()
            front = self._fronts[start, stop]
            decision = int(front.decisions[np.searchsorted(front.bytes, room, side="right") - 1])
            decisions.append(decision)
            pending += self._needs.parts(start, stop, room, decision)
        return decisions

    def _front(self, start: int, stop: int) -> _Front:
        candidates = [self._taped(start, stop, option) for option in range(len(self._own[start]))]
        candidates += [self._split(start, middle, stop) for middle in range(start + 1, stop)]
        room = np.concatenate([front.bytes for front in candidates])
        seconds = np.concatenate([front.seconds for front in candidates])
        decisions = np.concatenate([front.decisions for front in candidates])
        order = np.lexsort((seconds, room))
        seconds = seconds[order]
        better = np.ones(len(order), dtype=bool)
        better[1:] = seconds[1:] < np.minimum.accumulate(seconds)[:-1]
        return _Front(room[order][better], seconds[better], decisions[order][better])

    def _taped(self, start: int, stop: int, option: int) -> _Front:
        tape = self._needs.tapes[start][option]
        beside = self._needs.beside_tape(start, stop, option)
        room, seconds = np.array([tape + beside]), np.array([self._own[start][option]])
        if stop - start > 1:
            rest = self._fronts[start + 1, stop]
            room, seconds = np.maximum(room, tape + rest.bytes), seconds + rest.seconds
        return _Front(room, seconds, np.full(len(room), -option))

    def _split(self, start: int, middle: int, stop: int) -> _Front:
        left, right = self._fronts[start, middle], self._fronts[middle, stop]
        state = self._needs.state[start]
        beside_start = state + right.bytes
        least = max(self._needs.running(start, middle, stop), int(left.bytes[0]), int(beside_start[0]))
        corners = np.concatenate([left.bytes, beside_start])
        room = np.concatenate([[least], np.sort(corners[corners > least])])
        seconds = left.at(room) + right.at(room - state) + (self._running[middle] - self._running[start])
        return _Front(room, seconds, np.full(len(room), middle - start))


@lru_cache(maxsize=8)
def fronts(chain: Chain) -> Fronts:
    """The staircases of a chain, kept for the next budget."""
    return Fronts(chain)
