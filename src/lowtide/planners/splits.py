"""Plans over equal steps as a rule: given a stretch, how far to advance before splitting it.

Every planner for equal steps builds the same kind of tree. A stretch is either taped whole, or its start is stored, its
first `left` steps are run without tape, the right part is reversed from there, and then the left part from the stored
start. A rule decides which, from the stretch's length, the number of snapshots held in memory below it, and where its
start is stored, and from nothing else. So equal stretches are split alike, a million steps need a few thousand answers,
and the bill follows from the distinct stretches alone.

This module has the actions and the bill that follow from any rule, and the two rules whose bills have a closed form:
one sweep, and one slot. `equal`, `revolve` and `tiers` decide which rule to use for an amount of memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import NamedTuple, Protocol

from lowtide.actions import Action, Advance, Backward, Drop, Restore, Save, Tape, Tier
from lowtide.chain import Chain, Disk, StepCost
from lowtide.errors import InputError
from lowtide.plan import Bill

# (length, snapshots held in memory below, where the start is stored) -> (steps to advance, tier for the start);
# 0 steps to advance means: tape the stretch whole.
Rule = Callable[[int, int, Tier | None], tuple[int, Tier]]


class Solver(Protocol):
    """Where to split, and the cost that follows, for one amount of memory and stretches of up to some length."""

    def rule(self, length: int, held: int, stored: Tier | None) -> tuple[int, Tier]:
        """A `Rule`."""

    def bound(self, length: int) -> int:
        """A proven lower bound on the plain runs of a stretch with nothing held below."""

    def bill(self, chain: Chain, option: int) -> Bill:
        """The cost of the whole chain."""


# --- any rule: its actions and its bill


def play(rule: Rule, start: int, stop: int, *, held: int = 0, option: int = 0) -> Iterator[Action]:
    """The actions that reverse [start, stop).

    On entry the state at `start` is current and not stored, and `held` snapshots are in memory. On exit the
    backward has come from `stop` to `start`, and nothing of the stretch is stored.
    """
    # Left parts whose right part is being reversed: start, stop, where the start is stored, and `held` for the part.
    waiting: list[tuple[int, int, Tier, int]] = []
    stored: Tier | None = None
    # On entry of each turn: [start, stop) is to be reversed next; the state at `start` is current, and stored in the
    # tier `stored` unless that is None; `held` snapshots are in memory beside it, its own not counted.
    while True:
        left, tier = rule(stop - start, held, stored)
        if left:
            if stored is not tier:
                if stored is not None:
                    yield Drop(start, stored)
                yield Save(start, tier)
            mid = start + left
            yield Advance(start, mid)
            waiting.append((start, mid, tier, held))
            start, stored = mid, None
            held += tier is Tier.MEMORY
        else:
            if stored is not None:
                yield Drop(start, stored)  # the tape holds its own input
            yield Tape(start, stop, option)
            yield Backward(start, stop)
            if not waiting:
                return
            start, stop, stored, held = waiting.pop()
            yield Restore(start, stored)


class _Tally(NamedTuple):
    """The cost of one stretch."""

    plain_runs: int
    memory: int  # peak bytes, those of the snapshots below included
    snapshots: int  # most at once, those below not included
    on_disk: int  # of these, most at once on disk
    writes: int  # snapshots written to disk
    reads: int  # snapshots read from disk


def bill(rule: Rule, chain: Chain, *, option: int = 0, disk: Disk | None = None) -> Bill:
    """The cost of `play` over the whole chain, from its distinct stretches."""
    step, length = equal_step(chain), len(chain)
    tape, pulling = step.menu[option].tape, step.pulling[option]
    # A stretch's cost depends on (size, held, stored, first) alone. `first` means that it is reached before any
    # backward, so that no cotangent is held.
    tallies: dict[tuple[int, int, Tier | None, bool], _Tally] = {}
    root = (length, 0, None, True)
    # Depth first, but not by recursion, whose limit chains with thousands of levels would exceed. A stretch stays on
    # the stack until both of its parts have their tallies, so each distinct one is tallied once.
    pending: list[tuple[int, int, Tier | None, bool]] = [root]
    while pending:
        node = pending[-1]
        size, held, stored, first = node
        cotangent = 0 if first else step.cotangent
        left, tier = rule(size, held, stored)
        if not left:
            peak = held * step.state + size * tape + max(step.working.tape + cotangent, pulling)
            tallies[node] = _Tally(0, peak, 0, 0, 0, 0)
            pending.pop()
            continue
        inside = held + (tier is Tier.MEMORY)
        right_node = (size - left, inside, None, first)
        left_node = (left, held, tier, False)
        missing = [child for child in (right_node, left_node) if child not in tallies]
        if missing:
            pending += missing
            continue
        on_right, on_left = tallies[right_node], tallies[left_node]
        tallies[node] = _Tally(
            plain_runs=left + on_left.plain_runs + on_right.plain_runs,
            memory=max(inside * step.state + step.working.advance + cotangent, on_left.memory, on_right.memory),
            snapshots=max(1 + on_right.snapshots, on_left.snapshots),
            on_disk=max((tier is Tier.DISK) + on_right.on_disk, on_left.on_disk),
            writes=(tier is Tier.DISK and stored is not tier) + on_left.writes + on_right.writes,
            reads=(tier is Tier.DISK) + on_left.reads + on_right.reads,
        )
        pending.pop()
    total = tallies[root]
    disk_seconds = 0.0
    if disk is not None:
        disk_seconds = total.writes * step.state * disk.write + total.reads * step.state * disk.read
    return _bill_of_counts(
        chain,
        option,
        plain_runs=total.plain_runs,
        peak_memory=total.memory,
        peak_snapshots=total.snapshots,
        on_disk=total.on_disk,
        disk_seconds=disk_seconds,
    )


def _bill_of_counts(
    chain: Chain,
    option: int,
    *,
    plain_runs: int,
    peak_memory: int,
    peak_snapshots: int,
    on_disk: int = 0,
    disk_seconds: float = 0.0,
) -> Bill:
    """The bill that follows from these counts for equal steps, each of which is taped and pulled back once."""
    step, length = equal_step(chain), len(chain)
    pulling = length * step.menu[option].extra + length * step.backward
    return Bill(
        plain_runs=plain_runs,
        taping_runs=length,
        backward_runs=length,
        peak_memory=peak_memory,
        peak_disk=on_disk * step.state,
        peak_snapshots=peak_snapshots,
        seconds=(plain_runs + length) * step.forward + pulling + disk_seconds,
    )


def equal_step(chain: Chain) -> StepCost:
    """The step of a chain of equal steps; any other chain is refused, because rules are for equal steps."""
    if not chain.is_equal:
        raise InputError(f"this planner is for equal steps; {chain}: use the planners for unequal ones")
    return chain[0]


def beside_tape(step: StepCost, option: int) -> int:
    """Bytes that taping a step in this form and pulling it back take beside the tape, while a cotangent is held."""
    return max(step.working.tape + step.cotangent, step.pulling[option])


# --- one sweep: no step has more than one plain run


def sweep_bill(chain: Chain, count: int, last: int, fullest: int, option: int = 0) -> Bill:
    """The cost of one sweep over equal steps.

    It has `count` stretches, the last of `last` steps; `fullest` is the most bytes of starts and tape held while any of
    the others is taped.
    """
    step, length = chain[0], len(chain)
    tape, pulling = step.menu[option].tape, step.pulling[option]
    # The last stretch is taped beside the starts of all others, and before there is a cotangent. The last plain run of
    # the sweep holds the same starts, and no cotangent either.
    peaks = [(count - 1) * step.state + last * tape + max(step.working.tape, pulling)]
    if count > 1:
        peaks.append(fullest + beside_tape(step, option))
        peaks.append((count - 1) * step.state + step.working.advance)
    return _bill_of_counts(chain, option, plain_runs=length - last, peak_memory=max(peaks), peak_snapshots=count - 1)


class OneSweep:
    """The solver for c_0 + ... + c_n >= length, where c_i steps of tape fit beside i snapshots.

    Every stretch but the first is full: stretch i has c_i steps. The last is stretch n, for the least such n.
    """

    def __init__(self, capacities: tuple[int, ...]) -> None:
        self._capacities = capacities
        self._covered = list(accumulate(capacities, initial=0))

    def rule(self, length: int, held: int, stored: Tier | None) -> tuple[int, Tier]:
        """A `Rule`: advance until the remaining steps fill all following levels up to the last."""
        if length <= self._capacities[held]:
            return 0, Tier.MEMORY
        last = self._last_level(length, held)
        return length - (self._covered[last + 1] - self._covered[held + 1]), Tier.MEMORY

    def bound(self, length: int) -> int:
        """P = l - c_n, which is the optimum."""
        return max(0, length - self._capacities[self._last_level(length, 0)])

    def bill(self, chain: Chain, option: int) -> Bill:
        """The cost of the whole chain, for whose length the capacities were made."""
        step, rooms = chain[0], self._capacities
        first = len(chain) - (self._covered[-1] - rooms[0])
        stretches = (first, *rooms[1:])
        tape = step.menu[option].tape
        fullest = max((k * step.state + size * tape for k, size in enumerate(stretches[:-1])), default=0)
        return sweep_bill(chain, len(stretches), stretches[-1], fullest, option)

    def _last_level(self, length: int, held: int) -> int:
        """The least n with c_held + ... + c_n >= length."""
        return bisect_left(self._covered, self._covered[held] + length) - 1


# --- one slot: run from the start again and again


class OneSlot:
    """The solver for one snapshot: run from the start again and again, each time c_1 steps less, until c_0 are left."""

    def __init__(self, capacities: tuple[int, ...]) -> None:
        self._last, self._taped = capacities

    def rule(self, length: int, held: int, stored: Tier | None) -> tuple[int, Tier]:
        """A `Rule`: all steps that one tape does not cover are run without tape."""
        if held or length <= self._last:
            return 0, Tier.MEMORY
        return length - self._taped, Tier.MEMORY

    def bound(self, length: int) -> int:
        """The optimum, since there is no other way."""
        # Sweep k of n runs length - k*c_1 steps; they add up to n*length - c_1 * n(n+1)/2.
        sweeps = self._sweeps(length)
        return sweeps * length - self._taped * sweeps * (sweeps + 1) // 2

    def bill(self, chain: Chain, option: int) -> Bill:
        """The cost of the whole chain, in closed form: `splits.bill` would visit a stretch for each sweep."""
        step, length = chain[0], len(chain)
        sweeps, plain_runs = self._sweeps(length), self.bound(length)
        tape = step.menu[option].tape
        again = beside_tape(step, option)
        first = max(step.working.tape, step.pulling[option])
        peaks = [
            step.state + step.working.advance + (step.cotangent if sweeps > 1 else 0),
            step.state + self._taped * tape + (again if sweeps > 1 else first),
            (length - sweeps * self._taped) * tape + again,
        ]
        return _bill_of_counts(chain, option, plain_runs=plain_runs, peak_memory=max(peaks), peak_snapshots=1)

    def _sweeps(self, length: int) -> int:
        """The number of runs from the start: the least n with length - n*c_1 <= c_0."""
        return max(0, -((self._last - length) // self._taped))
