"""One sweep: a snapshot at the start of each stretch, and each stretch taped once on the way back.

No step is run plainly more than once. The stretches are all `base` steps long (the promise "b tapes and T/b
states"), or have lengths of their own. The last stretch, which may be shorter, is taped straight away.
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
from lowtide.checks import whole_number
from lowtide.errors import InputError
from lowtide.plan import Bill, registered
from lowtide.simulate import simulate_actions


@registered
@dataclass(frozen=True, slots=True)
class Base:
    """A snapshot every `base` steps, and `base` steps of tape."""

    planner: ClassVar[str] = "base"
    disk: ClassVar[None] = None

    base: int

    def __post_init__(self) -> None:
        whole_number(self.base, "base", least=1)

    def actions(self, chain: Chain) -> Iterator[Action]:
        """See `Schedule`."""
        return _sweep(range(0, len(chain), self.base), len(chain))

    def bill(self, chain: Chain) -> Bill:
        """See `Schedule`; in closed form where the steps are equal."""
        if not chain.is_equal:
            return simulate_actions(chain, self.actions(chain))
        stretches = np.full(-(-len(chain) // self.base), self.base, dtype=np.int64)
        stretches[-1] = len(chain) - self.base * (len(stretches) - 1)
        return sweep_bill(chain, stretches)

    def bound(self, chain: Chain) -> None:
        """None: its memory is not what it was made for."""


@registered
@dataclass(frozen=True, slots=True)
class Sweep:
    """Stretches of the given lengths, which make up the chain."""

    planner: ClassVar[str] = "sweep"
    disk: ClassVar[None] = None

    stretches: tuple[int, ...]

    def actions(self, chain: Chain) -> Iterator[Action]:
        """See `Schedule`."""
        if sum(self.stretches) != len(chain) or min(self.stretches, default=0) < 1:
            raise InputError(f"stretches of {self.stretches} steps do not make up a chain of {len(chain):,}")
        starts = list(accumulate(self.stretches[:-1], initial=0))
        return _sweep(starts, len(chain))

    def bill(self, chain: Chain) -> Bill:
        """See `Schedule`."""
        return simulate_actions(chain, self.actions(chain))

    def bound(self, chain: Chain) -> None:
        """None: there is no proof for unequal steps."""


def _sweep(starts: range | list[int], length: int) -> Iterator[Action]:
    for start, stop in pairwise(starts):
        yield Save(start)
        yield Advance(start, stop)
    last = starts[-1]
    yield Tape(last, length)
    yield Backward(last, length)
    for k in range(len(starts) - 2, -1, -1):
        start, stop = starts[k], starts[k + 1]
        yield Restore(start)
        yield Drop(start)  # the tape holds its own input
        yield Tape(start, stop)
        yield Backward(start, stop)


def sweep_bill(chain: Chain, stretches: NDArray[np.int64], option: int = 0) -> Bill:
    """What one sweep over equal steps costs, in closed form."""
    step, length, last = chain[0], len(chain), int(stretches[-1])
    tape, extra = step.menu[option].tape, step.menu[option].extra
    # Stretch k is taped beside the k starts below it and the cotangent, which the last one comes before. The sweep
    # holds every start while it runs.
    peaks = np.arange(len(stretches)) * step.state + stretches * tape
    peaks[:-1] += max(step.working.tape + step.cotangent, step.working.backward)
    peaks[-1] += max(step.working.tape, step.working.backward)
    sweeping = (len(stretches) - 1) * step.state + step.working.advance if len(stretches) > 1 else 0
    return Bill(
        plain_runs=length - last,
        taping_runs=length,
        backward_runs=length,
        peak_memory=max(int(peaks.max()), sweeping),
        peak_disk=0,
        peak_snapshots=len(stretches) - 1,
        seconds=(2 * length - last) * step.forward + (length * extra + length * step.backward),
    )


def least_sweep(chain: Chain) -> Sweep:
    """The sweep over unequal steps that peaks lowest, by halving on the peak.

    For a given peak only the snapshot bytes held where a stretch starts matter, and fewer are always better: so
    one pass over the steps, with the fewest held bytes for each start, decides whether the peak can be kept.
    """
    needs = _needs(chain)
    low, high = 0, int(needs[0, len(chain)])
    best: tuple[int, ...] = (len(chain),)
    while low < high:
        middle = (low + high) // 2
        stretches = _stretches_within(chain, needs, middle)
        if stretches is None:
            low = middle + 1
        else:
            best, high = stretches, middle
    return Sweep(best)


def _needs(chain: Chain) -> NDArray[np.int64]:
    """needs[start, stop]: peak bytes, beyond the snapshots below, of sweeping over and then taping a stretch."""
    length = len(chain)
    steps = [chain[k] for k in range(length)]
    needs = np.zeros((length, length + 1), dtype=np.int64)
    cotangents = np.array([step.cotangent for step in steps[1:]] + [0])  # of the state where a stretch stops
    for start in range(length):
        taped = np.cumsum([step.tape for step in steps[start:]])
        taping = np.maximum.accumulate(taped + [step.working.tape for step in steps[start:]]) + cotangents[start:]
        pulling = np.maximum.accumulate(taped + [step.working.backward for step in steps[start:]])
        sweeping = steps[start].state + np.maximum.accumulate([step.working.advance for step in steps[start:]])
        sweeping[-1] = 0  # the stretch that ends the chain is taped straight away
        needs[start, start + 1 :] = np.maximum(np.maximum(taping, pulling), sweeping)
    return needs


def _stretches_within(chain: Chain, needs: NDArray[np.int64], peak: int) -> tuple[int, ...] | None:
    """Lengths of stretches that never hold more than `peak` bytes, or None."""
    length = len(chain)
    held = np.full(length + 1, peak + 1, dtype=np.int64)  # fewest snapshot bytes below a stretch that starts here
    before = np.full(length + 1, -1, dtype=np.int64)
    held[0] = 0
    for start in range(length):
        stops = np.arange(start + 1, length + 1)
        after = held[start] + chain[start].state
        better = (held[start] + needs[start, start + 1 :] <= peak) & (after < held[start + 1 :])
        # Nothing is stored after the last stretch, and only that one is run once: the longest is the best.
        better[-1] = before[length] < 0 and held[start] + needs[start, length] <= peak
        held[stops[better]], before[stops[better]] = after, start
    if before[length] < 0:
        return None
    bounds = [length]
    while bounds[-1]:
        bounds.append(int(before[bounds[-1]]))
    return tuple(stop - start for start, stop in pairwise(reversed(bounds)))
