"""Plans over equal steps as a rule: given a stretch, how far to advance before splitting it.

Every planner for equal steps builds the same kind of tree. A stretch is either taped whole, or its start is
stored, its first `left` steps are run without tape, the right part is dealt with from there, and then the
left part from the stored start. A rule says which, from nothing but the stretch's length, the snapshots
held in memory below it, and where its start is stored; so equal stretches are split alike, a million
steps need a few thousand answers, and the bill comes from the distinct stretches alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from lowtide.actions import Action, Advance, Backward, Drop, Restore, Save, Tape, Tier
from lowtide.chain import Chain, Disk, StepCost
from lowtide.errors import InputError
from lowtide.plan import Bill

# (length, snapshots held in memory below, where the start is stored) -> (steps to advance, tier for the start);
# 0 steps to advance means: tape the stretch whole.
Rule = Callable[[int, int, Tier | None], tuple[int, Tier]]


def equal_step(chain: Chain) -> StepCost:
    """The step of a chain of equal steps, which is what rules are for."""
    if not chain.is_equal:
        raise InputError(f"this planner is for equal steps; {chain}: use the planners for unequal ones")
    return chain[0]


def equal_bill(
    chain: Chain,
    option: int,
    *,
    plain_runs: int,
    peak_memory: int,
    peak_snapshots: int,
    on_disk: int = 0,
    disk_seconds: float = 0.0,
) -> Bill:
    """The bill of counts over equal steps, each taped and pulled back once."""
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


def play(rule: Rule, start: int, stop: int, *, held: int = 0, option: int = 0) -> Iterator[Action]:
    """The actions that reverse [start, stop).

    On entry the state at `start` is current and not stored, and `held` snapshots are in memory. On exit the
    backward has come from `stop` to `start`, and nothing of the stretch is stored.
    """
    waiting: list[tuple[int, int, Tier, int]] = []  # left parts whose right part is being dealt with
    stored: Tier | None = None
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
    plain_runs: int
    memory: int  # peak bytes, those of the snapshots below included
    snapshots: int  # most at once, those below not included
    on_disk: int
    writes: int
    reads: int


def bill(rule: Rule, chain: Chain, *, option: int = 0, disk: Disk | None = None) -> Bill:
    """What `play` over the whole chain costs, from its distinct stretches."""
    step, length = equal_step(chain), len(chain)
    tape, pulling = step.menu[option].tape, step.pulling[option]
    tallies: dict[tuple[int, int, Tier | None, bool], _Tally] = {}
    root = (length, 0, None, True)
    pending: list[tuple[int, int, Tier | None, bool]] = [root]
    while pending:
        node = pending[-1]
        size, held, stored, first = node  # first: reached before any backward, so there is no cotangent yet
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
    return equal_bill(
        chain,
        option,
        plain_runs=total.plain_runs,
        peak_memory=total.memory,
        peak_snapshots=total.snapshots,
        on_disk=total.on_disk,
        disk_seconds=disk_seconds,
    )
