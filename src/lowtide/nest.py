"""A plan for layers as ranges in ranges: what is called, and what is run again together from where it starts.

Schedules in which every snapshot and tape stays until its own backward are called persistent, and every planner for
memory alone makes them. Such a plan is a nest: the steps that it advances over are a part that is run again, and what
it does after restoring that part's start is what is inside. So the shape is read from a plan's actions, and not asked
of the planner; both front ends run layers by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lowtide.actions import Action, Advance, Backward, Drop, Restore, Save, Tape, Tier
from lowtide.errors import InputError

_Bounds = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Part:
    """Steps [start, stop): called, or run again together, with parts of their own inside.

    `option` is the entry of their menus that steps which are called are taped in: 0 for as they are. `depth` is how
    many reruns are inside one another.
    """

    start: int
    stop: int
    inside: tuple[Part, ...] = ()
    option: int = 0
    depth: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "depth", 1 + max(part.depth for part in self.inside) if self.inside else 0)


def nest_of(actions: Iterable[Action], length: int, planner: str) -> tuple[Part, ...]:
    """The nest of a plan over `length` steps, made by `planner`, whose actions were judged to be legal.

    Raises:
        InputError: it drops something early and makes it again later, or uses a disk.
    """
    reading = _Reading(length)
    for action in actions:
        if not reading.follow(action):
            raise InputError(
                f"this plan (by {planner}) is not one for layers: {action} cannot be done by running a part again from "
                "its start; plan again with plan_sequential"
            )
    return reading.parts()


class _Reading:
    """Reads actions one by one.

    A sweep is one run from a stored state up to where the backward has come. For the whole, and for each range that is
    advanced over, it is kept what is called and what is advanced over in its sweep, and the form in which what is
    called is taped.
    """

    def __init__(self, length: int) -> None:
        self._whole = (0, length)
        self._sweeps: dict[_Bounds, list[tuple[int, int, int]]] = {self._whole: []}
        self._sweep = self._sweeps[self._whole]
        self._front = length  # the backward has come so far
        self._advanced: set[_Bounds] = set()
        self._stored: set[int] = set()

    def follow(self, action: Action) -> bool:
        """Whether the action, which is taken in, is one of a nest."""
        match action:
            case Advance(start, stop):
                self._advance(start, stop)
            case Tape(start, stop, option):
                self._sweep.append((start, stop, option))
            case Backward(start):
                self._front = start
            case Restore(start) if (start, self._front) in self._advanced:
                self._sweep = self._sweeps[start, self._front] = []
            case Save(step, Tier.MEMORY):
                self._stored.add(step)
            case Drop(step, Tier.MEMORY):
                self._stored.discard(step)
            case _:
                return False
        return True

    def _advance(self, start: int, stop: int) -> None:
        if self._sweep and self._sweep[-1][:2] in self._advanced and start not in self._stored:
            start = self._sweep.pop()[0]  # it goes on from where it was
        self._sweep.append((start, stop, 0))
        self._advanced.add((start, stop))

    def parts(self) -> tuple[Part, ...]:
        """The nest. Inner parts come later in the actions: they are put together first."""
        parts: dict[_Bounds, tuple[Part, ...]] = {}
        for bounds in reversed(self._sweeps):
            parts[bounds] = tuple(
                Part(start, stop, parts.get((start, stop), ()), option) for start, stop, option in self._sweeps[bounds]
            )
        return parts[self._whole]
