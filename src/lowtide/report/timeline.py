"""A plan over time, as values to be drawn: which step runs when, which snapshots live meanwhile, what memory holds.

Short plans are told run by run. Long ones are told as a raster, time columns by step rows, so that a million steps are
as readable as a hundred. Memory over time is always a few hundred shares of time, each at its worst moment. How a plan
becomes one is in `playing.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.actions import Tier


class Kind(IntEnum):
    """What a run of a step is for. "Forward" is its first run; a taped run keeps its tape."""

    FORWARD = 0
    FORWARD_TAPED = 1
    RERUN = 2
    RERUN_TAPED = 3
    BACKWARD = 4


class Run(NamedTuple):
    """One run of one step, in seconds from the beginning."""

    kind: Kind
    step: int
    start: float
    stop: float


class Stored(NamedTuple):
    """The life of one snapshot."""

    step: int
    tier: Tier
    start: float
    stop: float


class Moment(NamedTuple):
    """What memory holds at the worst moment of a share of time, and what is being done then."""

    start: float
    stop: float
    snapshots: int
    tape: int
    cotangent: int
    working: int
    what: str

    @property
    def total(self) -> int:
        """Bytes of all of it."""
        return self.snapshots + self.tape + self.cotangent + self.working


@dataclass(frozen=True, slots=True)
class Raster:
    """A long plan, aggregated: row r covers the steps [r*T//rows, (r+1)*T//rows).

    Attributes:
        share: for each kind, column and row, the share of the column's time; 255 is all of it.
        memory, disk: for each column and row, the share of the row's states that is stored when the column ends.
    """

    columns: int
    rows: int
    share: NDArray[np.uint8]
    memory: NDArray[np.uint8]
    disk: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Tally:
    """What a plan does with each step.

    Attributes:
        again: plain runs of each step, which are its runs beyond the taping one.
        stored: whether its state is ever stored.
        forms: which entry of its menu it is taped in.
        stretches: what is taped in one go, [start, stop) in the order of the chain; empty if there are very many.
    """

    again: NDArray[np.int64]
    stored: NDArray[np.bool_]
    forms: NDArray[np.int64]
    stretches: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """A plan as it will be played. Either `runs` and `stored` are there, or `raster` is.

    Attributes:
        seconds: of the whole, by the chain's own costs (steps count 1 forward and 2 backward where it has none).
        worst: the moment at which memory peaks.
    """

    seconds: float
    runs: tuple[Run, ...] | None
    stored: tuple[Stored, ...] | None
    raster: Raster | None
    memory: tuple[Moment, ...]
    worst: Moment
    tally: Tally
