"""Plays a plan on paper: whether every action is legal, and what the whole plan costs.

The rules. State 0 is current when a plan begins, and a plan has to store it like any other. An action may use only what
exists: Advance, Tape and Save start from the current state, Restore and Drop name a stored snapshot, Backward starts
where the previous one stopped and needs its tapes to be the newest. No step runs beyond the state that the backward has
reached, nor below a tape that is kept. At the end the backward is at state 0 and no snapshot is left.

Memory is the snapshots, the tapes and the working set of the step being run; once the backward has reached a state, the
cotangent of that state is held as well. No budget is checked here: compare the bill with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NoReturn, Protocol

from lowtide.actions import Action, Advance, Backward, Drop, Restore, Save, Tape, Tier
from lowtide.chain import Chain, Disk
from lowtide.errors import PlanError
from lowtide.plan import Bill, Plan


def simulate(plan: Plan) -> Bill:
    """The bill of playing the plan.

    Raises:
        PlanError: at the first action that is not legal.
    """
    return simulate_actions(plan.chain, plan.actions(), disk=plan.schedule.disk)


def simulate_actions(chain: Chain, actions: Iterable[Action], *, disk: Disk | None = None) -> Bill:
    """The bill of playing any sequence of actions on `chain`; see `simulate`."""
    ledger = Ledger(chain, disk)
    for action in actions:
        ledger.play(action)
    return ledger.close()


def judged(plan: Plan) -> Iterator[Action]:
    """The plan's actions, each checked before it is yielded: for callers that run them as they come."""
    ledger = Ledger(plan.chain, plan.schedule.disk)
    for action in plan.actions():
        ledger.play(action)
        yield action
    ledger.close()


class Watcher(Protocol):
    """An observer of a plan being played: called with each action, and with the bytes held at each of its moments."""

    def advanced(self, start: int, stop: int) -> None:
        """Steps [start, stop) are run without a tape."""

    def taped(self, start: int, stop: int, option: int) -> None:
        """Steps [start, stop) are run and taped in the form of this menu entry."""

    def pulled(self, start: int, stop: int, option: int) -> None:
        """Steps [start, stop), taped in the form of this menu entry, are pulled back."""

    def held(self, snapshots: int, tapes: int, cotangent: int, working: int) -> None:
        """Bytes of each kind are in memory at this moment."""

    def stored(self, step: int, tier: Tier) -> None:
        """A snapshot is stored."""

    def restored(self, step: int, tier: Tier) -> None:
        """A snapshot becomes the current state."""

    def dropped(self, step: int, tier: Tier) -> None:
        """A snapshot is dropped."""


class Ledger:
    """What is current, stored and taped while a plan is played, and its cost so far; reports to a `watcher`."""

    __slots__ = (
        "_backward_seconds",
        "_chain",
        "_current",
        "_disk",
        "_disk_bytes",
        "_disk_read",
        "_disk_written",
        "_forward_seconds",
        "_front",
        "_menus",
        "_peak_disk",
        "_peak_memory",
        "_peak_snapshots",
        "_place",
        "_plain_runs",
        "_pulling",
        "_snapshot_bytes",
        "_snapshots",
        "_tape_bytes",
        "_tapes",
        "_taping_runs",
        "_watcher",
    )

    def __init__(self, chain: Chain, disk: Disk | None = None, watcher: Watcher | None = None) -> None:
        self._chain = chain
        self._disk = disk
        self._watcher = watcher
        self._menus = [step.menu for step in chain.steps]
        self._pulling = [step.pulling for step in chain.steps]
        self._current: int | None = 0
        self._front = len(chain)  # the backward has reached this state
        self._snapshots: dict[tuple[int, Tier], int] = {}
        self._tapes: list[tuple[int, int, int]] = []  # (start, stop, option), the newest last
        self._snapshot_bytes = 0  # in memory; those on disk are `_disk_bytes`
        self._tape_bytes = 0
        self._disk_bytes = 0
        self._place = 0  # actions played so far, for errors
        self._plain_runs = self._taping_runs = 0
        self._peak_memory = self._peak_disk = self._peak_snapshots = 0
        self._disk_written = self._disk_read = 0
        self._forward_seconds = self._backward_seconds = 0.0

    def play(self, action: Action) -> None:
        """Play one action; PlanError if it is not legal."""
        match action:
            case Advance():
                self._advance(action)
            case Save():
                self._save(action)
            case Restore():
                self._restore(action)
            case Drop():
                self._drop(action)
            case Tape():
                self._tape(action)
            case Backward():
                self._backward(action)
            case _:
                self._refuse(action, "is not an action")
        self._place += 1

    def close(self) -> Bill:
        """The bill of all actions played; PlanError unless the backward is at state 0 and no snapshot is left."""
        if self._front != 0:
            self._refuse(None, f"the backward stopped at state {self._front:,} instead of 0")
        if self._snapshots:
            self._refuse(None, f"{len(self._snapshots):,} snapshots are still stored")
        chain, length = self._chain, len(self._chain)
        if chain.is_equal:
            # Counts times cost, not a sum over a million actions: rounding errors do not add up.
            step = chain[0]
            self._forward_seconds = (self._plain_runs + self._taping_runs) * step.forward
            self._backward_seconds += length * step.backward
        seconds = self._forward_seconds + self._backward_seconds
        if self._disk is not None:
            seconds += self._disk_written * self._disk.write + self._disk_read * self._disk.read
        return Bill(
            plain_runs=self._plain_runs,
            taping_runs=self._taping_runs,
            backward_runs=length,
            peak_memory=self._peak_memory,
            peak_disk=self._peak_disk,
            peak_snapshots=self._peak_snapshots,
            seconds=seconds,
        )

    def _advance(self, action: Advance) -> None:
        self._check_run(action, action.start, action.stop)
        chain = self._chain
        if self._watcher is not None:
            self._watcher.advanced(action.start, action.stop)
        if chain.is_equal:
            self._reach(self._cotangent(), chain[0].working.advance)
        else:
            most = max(step.working.advance for step in chain.steps[action.start : action.stop])
            self._reach(self._cotangent(), most)
            self._forward_seconds += chain.forward_seconds(action.start, action.stop)
        self._plain_runs += action.stop - action.start
        self._current = action.stop

    def _tape(self, action: Tape) -> None:
        start, stop, option = action.start, action.stop, action.option
        self._check_run(action, start, stop)
        chain = self._chain
        cotangent = self._cotangent()
        menus = self._menus if chain.is_equal else self._menus[start:stop]
        if option < 0 or any(option >= len(menu) for menu in menus):
            self._refuse(action, f"there is no entry {option} on the menu of every step in it")
        if self._watcher is not None:
            self._watcher.taped(start, stop, option)
        if chain.is_equal:
            self._tape_bytes += (stop - start) * menus[0][option].tape
            self._reach(cotangent, chain[0].working.tape)
        else:
            # `working.tape` is what a step needs beside its own complete tape, so the tape is added first.
            for step, menu in zip(chain.steps[start:stop], menus, strict=True):
                self._tape_bytes += menu[option].tape
                self._reach(cotangent, step.working.tape)
            self._forward_seconds += chain.forward_seconds(start, stop)
        self._tapes.append((start, stop, option))
        self._taping_runs += stop - start
        self._current = stop

    def _backward(self, action: Backward) -> None:
        start, stop = action.start, action.stop
        if stop != self._front:
            self._refuse(action, f"the backward is at state {self._front:,}")
        if not 0 <= start < stop:
            self._refuse(action, "the range is empty or out of order")
        chain = self._chain
        # On entry of each turn: every step from `_front` on is pulled back. One Backward may cross several tapes, and
        # end inside one, whose rest stays on the stack. The peak is taken before a tape is freed.
        while self._front > start:
            if not self._tapes or self._tapes[-1][1] != self._front:
                self._refuse(action, f"step {self._front - 1:,} is not taped")
            begin, end, option = self._tapes.pop()
            low = max(begin, start)
            if self._watcher is not None:
                self._watcher.pulled(low, end, option)
            if chain.is_equal:  # the first step pulled back is the worst: all tapes are still there
                entry = self._menus[0][option]
                self._reach(0, self._pulling[0][option])
                self._tape_bytes -= (end - low) * entry.tape
                self._backward_seconds += (end - low) * entry.extra
            else:
                for k in reversed(range(low, end)):
                    step, entry = chain.steps[k], self._menus[k][option]
                    self._reach(0, self._pulling[k][option])
                    self._tape_bytes -= entry.tape
                    self._backward_seconds += step.backward + entry.extra
            if low > begin:
                self._tapes.append((begin, low, option))
            self._front = low
        self._current = None  # what was current was the end of steps that are now pulled back

    def _save(self, action: Save) -> None:
        step, tier = action.step, action.tier
        if self._current != step:
            self._refuse(action, "only the current state can be stored")
        if (step, tier) in self._snapshots:
            self._refuse(action, f"state {step:,} is stored there already")
        if step >= len(self._chain):
            self._refuse(action, "the final state starts no step")
        size = self._chain[step].state
        if tier is not Tier.MEMORY and self._disk is None:
            self._refuse(action, "this plan has no disk tier")
        if self._watcher is not None:
            self._watcher.stored(step, tier)
        if tier is Tier.MEMORY:
            self._snapshot_bytes += size
            self._reach(0, 0)
        else:
            self._disk_bytes += size
            self._disk_written += size
            self._peak_disk = max(self._peak_disk, self._disk_bytes)
        self._snapshots[step, tier] = size
        self._peak_snapshots = max(self._peak_snapshots, len(self._snapshots))

    def _restore(self, action: Restore) -> None:
        size = self._snapshots.get((action.step, action.tier))
        if size is None:
            self._refuse(action, f"state {action.step:,} is not stored there")
        if action.tier is Tier.DISK:
            self._disk_read += size
        if self._watcher is not None:
            self._watcher.restored(action.step, action.tier)
        self._current = action.step

    def _drop(self, action: Drop) -> None:
        size = self._snapshots.pop((action.step, action.tier), None)
        if size is None:
            self._refuse(action, f"state {action.step:,} is not stored there")
        if action.tier is Tier.MEMORY:
            self._snapshot_bytes -= size
        else:
            self._disk_bytes -= size
        if self._watcher is not None:
            self._watcher.dropped(action.step, action.tier)

    def _check_run(self, action: Action, start: int, stop: int) -> None:
        if start != self._current:
            self._refuse(action, "it does not start at the current state")
        if stop <= start:
            self._refuse(action, "the range is empty or out of order")
        if stop > self._front:
            self._refuse(action, f"the backward has reached state {self._front:,} already")
        if self._tapes and start < self._tapes[-1][1]:
            self._refuse(action, f"the tape of step {self._tapes[-1][1] - 1:,} is kept: nothing runs below it")

    def _cotangent(self) -> int:
        return self._chain[self._front].cotangent if self._front < len(self._chain) else 0

    def _reach(self, cotangent: int, working: int) -> None:
        memory = self._snapshot_bytes + self._tape_bytes + cotangent + working
        if memory > self._peak_memory:
            self._peak_memory = memory
        if self._watcher is not None:
            self._watcher.held(self._snapshot_bytes, self._tape_bytes, cotangent, working)

    def _refuse(self, action: object, reason: str) -> NoReturn:
        stored = sorted(step for step, _ in self._snapshots)
        shown = ", ".join(f"{step:,}" for step in stored[-8:])
        taped = ", ".join(f"[{start:,}, {stop:,})" for start, stop, _ in self._tapes[-8:])
        state = (
            f"current state: {'none' if self._current is None else f'{self._current:,}'}; "
            f"snapshots: {'..., ' if len(stored) > 8 else ''}{shown or 'none'}; "
            f"tapes: {'..., ' if len(self._tapes) > 8 else ''}{taped or 'none'}; backward at {self._front:,}"
        )
        raise PlanError(reason, place=self._place, action=action, state=state)
