"""A plan for layers as nested ranges: which steps are called, and which are run again together from their start.

A schedule in which every snapshot and tape stays until its own backward is called persistent, and every planner that
uses memory alone makes such schedules. A persistent plan is a nest: the steps that it advances over are a part that is
run again, and what the plan does after restoring the start of that part is what the part contains. So the nest is read
from a plan's actions, without asking the planner. Both front ends run layers by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from lowtide.actions import Action, Advance, Backward, Drop, Restore, Save, Tape, Tier
from lowtide.errors import InputError
from lowtide.plan import Plan
from lowtide.simulate import judged

_Bounds = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Part:
    """Steps [start, stop): called, if nothing is inside; else run again together, as the parts inside.

    Attributes:
        start, stop: the range of steps.
        inside: the parts that a rerun of this part consists of; empty for steps that are called.
        option: for steps that are called, the entry of their menus that they are taped in; 0 keeps the whole tape.
        depth: the number of reruns that are nested in one another, this part's included.
    """

    start: int
    stop: int
    inside: tuple[Part, ...] = ()
    option: int = 0
    depth: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "depth", 1 + max(part.depth for part in self.inside) if self.inside else 0)


def nest_of(actions: Iterable[Action], length: int, planner: str) -> tuple[Part, ...]:
    """The nest of a plan over `length` steps, made by `planner`, whose actions are known to be legal.

    Raises:
        InputError: the plan drops something early and recomputes it later, or uses a disk.
    """
    reading = _Reading(length)
    for action in actions:
        if not reading.follow(action):
            raise InputError(
                f"this plan (by {planner}) is not one for layers: {action} cannot be done by running a part again from "
                "its start; plan again with plan_sequential"
            )
    return reading.parts()


@lru_cache(maxsize=64)
def nest_of_plan(plan: Plan) -> tuple[Part, ...]:
    """The plan's nest.

    Raises:
        InputError: the plan drops something early and recomputes it later, or uses a disk.
        PlanError: the plan is not legal.
    """
    return nest_of(judged(plan), len(plan.chain), plan.planner)


def kept_by(parts: tuple[Part, ...], kept: tuple[int, ...]) -> int:
    """The most bytes that checkpoint calls keep at once; `kept` has the bytes that a call keeps for each step in it.

    Calls side by side are alive together, the calls inside them only in one of them at a time. While a call is rerun,
    it also sets aside the state that it finds, which takes its own bytes once more.
    """
    own = {part: sum(kept[part.start : part.stop]) for part in parts if part.inside}
    return sum(own.values()) + max((own.get(part, 0) + kept_by(part.inside, kept) for part in parts), default=0)


def copied_by(parts: tuple[Part, ...], copied: tuple[int, ...]) -> list[int]:
    """For each step, the bytes of copies while it runs without a tape; a call from step k copies `copied[k]`."""
    found = [0] * len(copied)
    for part in parts:
        if part.inside:
            inner = copied_by(part.inside, copied)
            for k in range(part.start, part.stop):
                found[k] = copied[part.start] + inner[k]
    return found


def has_forms(parts: tuple[Part, ...]) -> bool:
    """Whether any step has a smaller tape."""
    return any(part.option or has_forms(part.inside) for part in parts)


def forms_passed(parts: tuple[Part, ...], inside: bool = False) -> dict[int, set[int]]:
    """By step, the smaller forms that it has inside checkpoint calls, where its tape is not kept in the first run."""
    found: dict[int, set[int]] = {}
    for part in parts:
        if inside and part.option:
            for k in range(part.start, part.stop):
                found.setdefault(k, set()).add(part.option)
        for k, forms in forms_passed(part.inside, inside=True).items():
            found.setdefault(k, set()).update(forms)
    return found


def starts(parts: tuple[Part, ...]) -> set[int]:
    """The steps whose input is held by a checkpoint call that begins with them."""
    firsts = {part.inside[0].start for part in parts if part.inside and not part.inside[0].inside}
    return firsts.union(*(starts(part.inside) for part in parts))


class _Reading:
    """Reads the nest from a plan's actions, one by one.

    A sweep is one run from a stored state up to the state that the backward has reached. There is one for the whole
    chain, and one for each range that is advanced over, in which that range is run again. A sweep is recorded as the
    ranges that it tapes or advances over, each with the menu entry in which it is taped.
    """

    def __init__(self, length: int) -> None:
        self._whole = (0, length)
        self._sweeps: dict[_Bounds, list[tuple[int, int, int]]] = {self._whole: []}
        self._sweep = self._sweeps[self._whole]
        self._front = length  # the state that the backward has reached
        self._advanced: set[_Bounds] = set()
        self._stored: set[int] = set()

    def follow(self, action: Action) -> bool:
        """Record the action; False if no nest has it."""
        match action:
            case Advance(start, stop):
                self._advance(start, stop)
            case Tape(start, stop, option):
                self._sweep.append((start, stop, option))
            case Backward(start):
                self._front = start
            # A persistent plan restores a state to treat the range that was advanced over from there, and it does so
            # when everything after that range has been pulled back. Any other restore is not one of a nest.
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
        # Without a snapshot between them, two runs in a row are one range: it can only be run again from its start.
        if self._sweep and self._sweep[-1][:2] in self._advanced and start not in self._stored:
            start = self._sweep.pop()[0]
        self._sweep.append((start, stop, 0))
        self._advanced.add((start, stop))

    def parts(self) -> tuple[Part, ...]:
        """The parts of the whole chain, once all actions are recorded."""
        # A range is run again only after it was advanced over, so its sweep was recorded after the one that contains
        # it: in reverse order, what is inside a part is known when the part is made.
        parts: dict[_Bounds, tuple[Part, ...]] = {}
        for bounds in reversed(self._sweeps):
            parts[bounds] = tuple(
                Part(start, stop, parts.get((start, stop), ()), option) for start, stop, option in self._sweeps[bounds]
            )
        return parts[self._whole]
