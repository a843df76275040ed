"""A plan as integer tables, for a program that cannot branch on it.

A *leg* stores the current state in a slot and runs some steps from there. A *stretch* is taped and pulled back whole:
before it is taped, its state is restored from a slot and brought there by a few legs. The first stretch is reached by
the legs of the forward pass, the others by their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide.actions import Action, Advance, Backward, Drop, Restore, Save, Tape, Tier
from lowtide.errors import InputError

_Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """The legs, in order, and the stretches, from the last steps to the first.

    Attributes:
        legs: for each leg its slot, and the steps [start, stop) it runs; an idle one if there is none.
        stretches: for each stretch the slot it begins from, its legs [first, end), its first step, up to where it is
            still to be taped, and up to where it is pulled back. The first has been taped by the forward pass.
        slots: how many slots there are, at least one.
        rows: steps of tape of the longest stretch.
        sweep: how many legs belong to the forward pass.
    """

    legs: _Ints
    stretches: _Ints
    slots: int
    rows: int
    sweep: int


def tables(actions: Iterable[Action]) -> Tables:
    """The tables of a plan's actions, which have been found legal.

    Raises:
        InputError: a plan that a static program cannot follow: one that runs other steps while a tape waits, or that
            stores on disk.
    """
    free: list[int] = []
    stored: dict[int, int] = {}
    slots = 0
    legs: list[tuple[int, int, int]] = []
    stretches: list[tuple[int, int, int, int, int, int]] = []
    restored, first, sweep = 0, 0, 0
    taped: tuple[int, int] | None = None
    for action in actions:
        if getattr(action, "tier", Tier.MEMORY) is not Tier.MEMORY:
            raise InputError("a jitted loop keeps its snapshots in memory; plan without disk=")
        match action:
            case Save(step):
                if not free:
                    free.append(slots)
                    slots += 1
                stored[step] = free.pop()
            case Drop(step):
                free.append(stored.pop(step))
            case Restore(step):
                restored, first = stored[step], len(legs)
            case Advance(start, stop):
                if taped is not None:
                    raise InputError(
                        f"the plan runs steps [{start:,}, {stop:,}) while the tape of [{taped[0]:,}, {taped[1]:,}) "
                        "waits, which a jitted loop cannot do; plan with lowtide.jax.plan_scan"
                    )
                legs.append((stored.get(start, -1), start, stop))
            case Tape(start, stop):
                taped = (start if taped is None else taped[0], stop)
            case Backward(start, stop):
                if taped != (start, stop):
                    raise InputError(
                        f"the plan pulls steps [{start:,}, {stop:,}) back in parts, which a jitted loop cannot do; "
                        "plan with lowtide.jax.plan_scan"
                    )
                if stretches:
                    stretches.append((restored, first, len(legs), start, stop, stop))
                else:
                    sweep = len(legs)
                    stretches.append((0, 0, 0, start, start, stop))
                taped = None
    spare = slots  # for a state that is only passed through
    places = [(spare if slot < 0 else slot, start, stop) for slot, start, stop in legs] or [(0, 0, 0)]
    return Tables(
        np.array(places, np.int32),
        np.array(stretches, np.int32),
        max(1, slots + any(slot < 0 for slot, _, _ in legs)),
        max(stop - start for *_, start, _, stop in stretches),
        sweep,
    )
