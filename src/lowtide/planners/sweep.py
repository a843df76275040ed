"""One sweep: a snapshot at the start of each stretch, and each stretch taped once on the way back.

No step has more than one plain run. Either all stretches are `base` steps long (so that there are `base` tapes and
T/`base` states), or each has its own length. The last stretch, which may be shorter, is taped in the sweep itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lowtide.actions import Action, Advance, Backward, Drop, Restore, Save, Tape
from lowtide.chain import Chain
from lowtide.checks import MOST_STEPS, keep_whole
from lowtide.errors import InputError
from lowtide.plan import Bill, ChainSchedule, registered
from lowtide.planners.splits import sweep_bill
from lowtide.planners.unequal import MemoryNeeds
from lowtide.simulate import simulate_actions


@registered
@dataclass(frozen=True, slots=True)
class Base(ChainSchedule):
    """A snapshot every `base` steps, and the tape of `base` steps."""

    planner: ClassVar[str] = "base"
    disk: ClassVar[None] = None

    base: int

    def __post_init__(self) -> None:
        keep_whole(self, "base", least=1, most=MOST_STEPS)

    def actions(self, chain: Chain) -> Iterator[Action]:
        """The actions, made one by one as they are requested."""
        return _sweep(range(0, len(chain), self.base), len(chain))

    def bill(self, chain: Chain) -> Bill:
        """The cost of the actions; in closed form for equal steps."""
        if not chain.is_equal:
            return simulate_actions(chain, self.actions(chain))
        step, count = chain[0], -(-len(chain) // self.base)
        # Of the full stretches before the last one, the latest is taped beside the most starts.
        fullest = (count - 2) * step.state + self.base * step.tape
        return sweep_bill(chain, count, len(chain) - self.base * (count - 1), fullest)

    def bound(self, chain: Chain) -> None:
        """None: a base was asked for, not the fewest runs in an amount of memory."""


@registered
@dataclass(frozen=True, slots=True)
class Sweep(ChainSchedule):
    """Stretches of the given lengths, which make up the chain; `forms` has the menu entry of each step, or nothing."""

    planner: ClassVar[str] = "sweep"
    disk: ClassVar[None] = None

    stretches: tuple[int, ...]
    forms: tuple[int, ...] = ()

    def actions(self, chain: Chain) -> Iterator[Action]:
        """The actions, made one by one as they are requested."""
        if sum(self.stretches) != len(chain) or min(self.stretches, default=0) < 1:
            raise InputError(f"stretches of {self.stretches} steps do not make up a chain of {len(chain):,}")
        if len(self.forms) not in (0, len(chain)):
            raise InputError(f"{len(self.forms):,} forms of tape were given for a chain of {len(chain):,} steps")
        starts = list(accumulate(self.stretches[:-1], initial=0))
        return _sweep(starts, len(chain), self.forms)

    def bill(self, chain: Chain) -> Bill:
        """The cost of the actions, found by simulating them."""
        return simulate_actions(chain, self.actions(chain))

    def bound(self, chain: Chain) -> None:
        """None: no bound is proven for unequal steps."""


def _sweep(starts: range | list[int], length: int, forms: tuple[int, ...] = ()) -> Iterator[Action]:
    """Store the start of every stretch but the last, then tape each stretch and pull it back, from the last on."""
    for start, stop in pairwise(starts):
        yield Save(start)
        yield Advance(start, stop)
    stop = length
    for start in reversed(starts):
        if stop < length:
            yield Restore(start)
            yield Drop(start)  # the tape holds its own input
        if forms:
            yield from (Tape(k, k + 1, forms[k]) for k in range(start, stop))
        else:
            yield Tape(start, stop)
        yield Backward(start, stop)
        stop = start


# --- unequal steps: the sweep with the lowest peak


def least_sweep(chain: Chain) -> Sweep:
    """The sweep over unequal steps with the lowest peak, found by bisection.

    For a given peak only the snapshot bytes held where a stretch starts matter, and fewer are always better. So one
    pass over the steps, with the fewest held bytes for each start, decides whether a sweep within the peak exists. For
    that, each step of a stretch is in its smallest form; of the forms within the lowest peak, the fastest are taken.
    """
    taping = _taping(chain)
    needs = _needs(chain, taping)
    low, high = 0, int(needs[0, len(chain)])
    best: tuple[int, ...] = (len(chain),)
    while low < high:
        middle = (low + high) // 2
        stretches = _stretches_within(chain, needs, middle)
        if stretches is None:
            low = middle + 1
        else:
            best, high = stretches, middle
    forms = _forms_within(chain, taping, best, high)
    return Sweep(best, forms if any(forms) else ())


def _taping(chain: Chain) -> NDArray[np.int64]:
    """taping[start, stop]: the least peak bytes of taping a stretch and pulling it back, each step in its best form."""
    length, needs = len(chain), MemoryNeeds(chain)
    taping = np.zeros((length + 1, length + 1), dtype=np.int64)
    cotangents = np.array(needs.cotangent)  # of the state at which a stretch stops
    # From the last start to the first: the peak of [start, stop) follows from that of [start + 1, stop), beside the
    # tape of step `start`. All stretches that start here are computed at once.
    for start in reversed(range(length)):
        beside = np.maximum(needs.tape[start] + cotangents[start:], taping[start + 1, start + 1 :])
        peaks = [
            tape + np.maximum(beside, pulling)
            for tape, pulling in zip(needs.tapes[start], needs.pulling[start], strict=True)
        ]
        taping[start, start + 1 :] = np.min(peaks, axis=0)
    return taping


def _needs(chain: Chain, taping: NDArray[np.int64]) -> NDArray[np.int64]:
    """needs[start, stop]: the peak bytes, beyond the snapshots below, of running over a stretch and later taping it."""
    length, needs = len(chain), taping[:-1].copy()
    advance = [chain[k].working.advance for k in range(length)]
    for start in range(length):
        # The last stretch has no plain run: it is taped when the sweep reaches it.
        sweeping = chain[start].state + np.maximum.accumulate(advance[start:-1])
        needs[start, start + 1 : -1] = np.maximum(needs[start, start + 1 : -1], sweeping)
    return needs


def _forms_within(chain: Chain, taping: NDArray[np.int64], stretches: tuple[int, ...], peak: int) -> tuple[int, ...]:
    """For each step, from the first on, the fastest form that leaves the rest of its stretch within the peak."""
    # `stored` has the bytes of snapshots below the stretch, `held` those and the tapes of the stretch so far.
    needs, forms, stored, start = MemoryNeeds(chain), [], 0, 0
    for size in stretches:
        stop, held = start + size, stored
        for k in range(start, stop):
            menu = chain[k].menu
            fitting = [
                form
                for form, entry in enumerate(menu)
                if held + entry.tape + max(needs.beside_tape(k, stop, form), taping[k + 1, stop]) <= peak
            ]
            forms.append(min(fitting, key=lambda form: (menu[form].extra, menu[form].tape)))
            held += menu[forms[-1]].tape
        stored, start = stored + chain[start].state, stop
    return tuple(forms)


def _stretches_within(chain: Chain, needs: NDArray[np.int64], peak: int) -> tuple[int, ...] | None:
    """The lengths of stretches whose sweep stays within `peak` bytes; None if there are none."""
    length = len(chain)
    held = np.full(length + 1, peak + 1, dtype=np.int64)  # fewest snapshot bytes below a stretch that starts here
    before = np.full(length + 1, -1, dtype=np.int64)  # where the stretch before that one starts
    held[0] = 0
    for start in range(length):
        stops = np.arange(start + 1, length + 1)
        after = held[start] + chain[start].state
        better = (held[start] + needs[start, start + 1 :] <= peak) & (after < held[start + 1 :])
        # The stretch that ends the chain stores nothing and has no plain run, so the longest one is the best: the first
        # start from which it fits.
        better[-1] = before[length] < 0 and held[start] + needs[start, length] <= peak
        held[stops[better]], before[stops[better]] = after, start
    if before[length] < 0:
        return None
    bounds = [length]
    while bounds[-1]:
        bounds.append(int(before[bounds[-1]]))
    return tuple(stop - start for start, stop in pairwise(reversed(bounds)))
