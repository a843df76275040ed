"""A chain whose length is not known until it ends: which snapshots to keep while it runs.

The sweep keeps at most s snapshots p_0 = 0 < p_1 < ..., and the chain may turn out to be over after any step. The
stretch from p_k to p_{k+1} is then reversed with the s - k slots that are free by its turn, so the cost of a set of
snapshots at length T is known in closed form:

    T + sum over k of t(p_{k+1} - p_k, s - k)        with p_s = T and Revolve's t

Whenever all slots are taken and the chain goes on, one snapshot is dropped (or the newest state is not stored): the one
without which this sum is least. Up to beta(s, 2) - 1 steps that reaches 2T - s, like the online schedules of Stumm and
Walther (2010), and this is the least possible: T runs in the sweep, and one more for each of the T - s starts that are
not stored when it ends. Beyond that, Wang, Moin and Iaccarino's (2009) rule of levels bounds how often any one step is
repeated, but needs up to 1.47 times the runs of the offline optimum where this greedy choice stays within 1.19
(docs/decisions/0005-online-snapshots.md has the comparison).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar

from lowtide.actions import Action, Advance, Drop, Restore, Save
from lowtide.chain import Chain
from lowtide.checks import MOST_TOTAL, keep_whole, whole_number
from lowtide.plan import Bill, Bound, ChainSchedule, registered
from lowtide.planners import splits
from lowtide.planners.revolve import Revolve, plain_runs
from lowtide.simulate import simulate_actions


def online(slots: int) -> Generator[Action, bool | None, None]:
    """Actions for a chain of unknown length.

    After an Advance, send True if the chain goes on from the state it reached, or False if it ended there; then the
    actions of the backward follow. After any other action, send None (or call next).
    """
    whole_number(slots, "checkpoints", least=1)
    keeper = _Keeper(slots)
    length = 0
    goes_on: bool | None = True
    while goes_on:
        dropped = keeper.make_room(length)
        if dropped is not None:
            yield Drop(dropped)
        if keeper.positions[-1] == length:
            yield Save(length)
        goes_on = yield Advance(length, length + 1)
        length += 1
    rule = Revolve(slots).rule
    for k, (start, stop) in reversed(list(enumerate(pairwise([*keeper.positions, length])))):
        yield Restore(start)
        yield Drop(start)
        yield from splits.play(rule, start, stop, held=k)


@lru_cache(maxsize=16)
def online_slots(slots: int, length: int) -> tuple[int, ...]:
    """For each of the first `length` states, the slot in which it is stored when it is reached; `slots` if in none."""
    keeper = _Keeper(slots)
    where: dict[int, int] = {}
    chosen = []
    for newest in range(length):
        dropped = keeper.make_room(newest)
        if keeper.positions[-1] == newest:
            where[newest] = len(where) if dropped is None else where.pop(dropped)
        chosen.append(where.get(newest, slots))
    return tuple(chosen)


class _Keeper:
    """The positions of the snapshots kept so far, and the choice which one to drop."""

    def __init__(self, slots: int) -> None:
        self.positions: list[int] = []
        self._slots = slots

    def make_room(self, newest: int) -> int | None:
        """Add the state `newest` to the snapshots if that pays; the position that was dropped for it, if any.

        Costs are compared for a chain that ends one step further on. Dropping p_i joins the stretches on either side of
        it, and leaves one more slot to every later stretch.
        """
        positions, slots = self.positions, self._slots
        if len(positions) < slots:
            positions.append(newest)
            return None
        # Changes are relative to storing all slots + 1 states, in which the newest one's stretch of a single step costs
        # nothing. Not storing the newest makes the last stretch, with one slot, longer by that step.
        best, least = None, plain_runs(newest + 1 - positions[-1], 1) - plain_runs(newest - positions[-1], 1)
        saved_later = 0  # runs that the stretches from p_{i+1} on save by having one more slot
        stop = newest
        for i in range(slots - 1, 0, -1):
            before, start = positions[i - 1], positions[i]
            own, eased = plain_runs(stop - start, slots - i), plain_runs(stop - start, slots - i + 1)
            joined = plain_runs(stop - before, slots - i + 1) - plain_runs(start - before, slots - i + 1)
            change = joined - own - saved_later
            if change <= least:
                best, least = i, change
            saved_later += own - eased
            stop = start
        if best is None:
            return None
        dropped = positions.pop(best)
        positions.append(newest)
        return dropped


@registered
@dataclass(frozen=True, slots=True)
class Online(ChainSchedule):
    """The actions of `online` on a chain whose length is known by now."""

    planner: ClassVar[str] = "online"
    disk: ClassVar[None] = None

    slots: int

    def __post_init__(self) -> None:
        keep_whole(self, "slots", least=1, most=MOST_TOTAL, label="checkpoints")

    def actions(self, chain: Chain) -> Iterator[Action]:
        """The sweep with its snapshots, then the reversal of each stretch between two of them."""
        generator = online(self.slots)
        action = next(generator)
        while True:
            yield action
            try:
                goes_on = isinstance(action, Advance) and action.stop < len(chain)
                action = generator.send(goes_on)
            except StopIteration:
                return

    def bill(self, chain: Chain) -> Bill:
        """The cost of the actions, found by simulating them."""
        return simulate_actions(chain, self.actions(chain))

    def bound(self, chain: Chain) -> Bound:
        """The optimum for a length that is known from the beginning."""
        scope = f"with {self.slots:,} snapshots and one step of tape, had the length been known"
        return Bound(plain_runs(len(chain), self.slots), scope)
