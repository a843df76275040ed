"""One moment of a plan: what memory holds, in which parts, and what is being done."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Activity(StrEnum):
    """What is being done, in the words that begin a sentence about it."""

    RUNNING = "running"
    TAPING = "taping"
    BACKWARD = "backward through"
    STORING = "storing"


class MemoryPart(StrEnum):
    """A part that memory over time is stacked from, by its name in legends. Each kind of plan has parts of its own."""

    SNAPSHOTS = "snapshots"
    TAPE = "tape"
    COTANGENT = "cotangent"
    WORKING = "working"
    # Of a whole model:
    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer state"
    INPUTS = "inputs and buffers"
    TAPES = "tapes"
    REST = "the rest"


class Moment(NamedTuple):
    """The worst moment of a span of time: when the span begins and ends, the bytes held, and what is being done."""

    start: float
    stop: float
    snapshots: int
    tape: int
    cotangent: int
    working: int
    what: str

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """The bytes of snapshots, tape, cotangent and working set."""
        return self.snapshots, self.tape, self.cotangent, self.working

    @property
    def total(self) -> int:
        """The bytes of all parts."""
        return self.snapshots + self.tape + self.cotangent + self.working
