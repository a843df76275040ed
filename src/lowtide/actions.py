"""The instructions that make up a plan, and the places where a snapshot may live.

Actions are plain values: compare them, hash them, print them. Ranges are [start, stop), for the backward too.
`lowtide.simulate` decides which action is legal when; front ends decide what it does to tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Tier(Enum):
    """Where a snapshot lives."""

    MEMORY = "memory"
    DISK = "disk"

    # Members are singletons; hashing them by identity is what keeps a million `Save`s cheap.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Advance:
    """Run steps [start, stop) and keep nothing but the final state."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Save:
    """Store the current state, from which step `step` starts, as a snapshot."""

    step: int
    tier: Tier = Tier.MEMORY


@dataclass(frozen=True, slots=True)
class Restore:
    """Make the snapshot of `step` the current state; it stays stored."""

    step: int
    tier: Tier = Tier.MEMORY


@dataclass(frozen=True, slots=True)
class Drop:
    """Delete the snapshot of `step`."""

    step: int
    tier: Tier = Tier.MEMORY


@dataclass(frozen=True, slots=True)
class Tape:
    """Run steps [start, stop) and keep each one's tape, in the form of entry `option` of its menu."""

    start: int
    stop: int
    option: int = 0


@dataclass(frozen=True, slots=True)
class Backward:
    """Pull the gradient back from state `stop` to state `start` and free the tapes on the way."""

    start: int
    stop: int


Action = Advance | Save | Restore | Drop | Tape | Backward
