"""Unequal steps, each with a menu of tapes: the fastest persistent schedule within a peak.

The dynamic program of Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova for heterogeneous chains ("Optimal
checkpointing for heterogeneous chains", 2019), with several tapes to choose from for each step. To *treat* [s, t) is to
tape and pull back all of its steps, starting with state s current. Within m bytes for everything that is held, the
cheapest way is either to

- tape step s (in one of its forms), treat [s+1, t) beside that tape, pull step s back; or
- store state s, run [s, k) without tape, treat [k, t) beside the snapshot, restore s, treat [s, k).

It is optimal among persistent schedules: those in which a snapshot or tape, once made, stays until its own backward,
and no step runs while the tape of a later one is kept. Dropping something early and recomputing it later can win,
rarely and by little (the tests measure it). The recurrence is evaluated in one of two ways:

- Exactly, in bytes (`Fronts`), for up to `EXACT_STEPS` steps of one form, or fewer steps with more forms. As a function
  of the bytes m, the fewest seconds of a stretch are a staircase, stored as its corners. Taping a step shifts a
  staircase; splitting adds two of them at the same m, so the corners of the sum are those of its parts, and their
  number does not multiply: a chain of 50 steps with random sizes has about 800. One set of staircases answers every
  budget, so a larger budget never gets a slower plan. It takes a few microseconds for each (start, split, stop) and
  corner; five forms for each step instead of one make four times as many corners.
- As a table of memory levels (`Levels`), for longer chains and longer menus; above `MOST_TABLE_STEPS` steps the
  smallest neighbours are joined first. The budget is divided into levels, not the total. Sizes are rounded so that
  their sums are right (`MemoryNeeds`), so a plan's real peak can be a few levels off either way: the table goes beyond
  the budget by an eighth, and from the top the first plan whose exact peak is within the budget is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lowtide.actions import Action, Advance, Backward, Drop, Restore, Save, Tape
from lowtide.chain import Chain, StepCost, TapeOption, Working
from lowtide.errors import InputError
from lowtide.plan import Bill, ChainSchedule, registered
from lowtide.simulate import simulate_actions

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


class MemoryNeeds:
    """The memory that treating a stretch of unequal steps needs beyond what is held below it, in units of `unit` bytes.

    With a unit above 1, states and tapes are rounded so that the *sum* over any stretch is within one unit of the true
    one: each is the difference of two rounded running totals. Rounding every size separately would add up to a fifth.
    Working sets do not add up, and are rounded up.
    """

    def __init__(self, chain: Chain, unit: int = 1) -> None:
        steps = [chain[k] for k in range(len(chain))]
        self.state = _spread([step.state for step in steps], unit)
        menus = [step.menu for step in steps]
        forms = max(map(len, menus))
        columns = [_spread([menu[min(form, len(menu) - 1)].tape for menu in menus], unit) for form in range(forms)]
        self.tapes = [[columns[form][k] for form in range(len(menu))] for k, menu in enumerate(menus)]
        self.advance = [-(-step.working.advance // unit) for step in steps]
        self.tape = [-(-step.working.tape // unit) for step in steps]
        self.pulling = [[-(-backward // unit) for backward in step.pulling] for step in steps]
        # By the last step of [s, t): while it is treated, the cotangent of state t is held, unless t ends the chain.
        self.cotangent = [-(-step.cotangent // unit) for step in steps[1:]] + [0]

    def beside_tape(self, start: int, stop: int, form: int) -> int:
        """The memory that step `start` needs beside its own tape, if [start, stop) is treated by taping it first."""
        return max(self.tape[start] + self.cotangent[stop - 1], self.pulling[start][form])

    def running(self, start: int, middle: int, stop: int) -> int:
        """The memory for running [start, middle) from a stored start, while [start, stop) is treated."""
        return self.state[start] + max(self.advance[start:middle]) + self.cotangent[stop - 1]

    def parts(self, start: int, stop: int, room: int, decision: int) -> list[tuple[int, int, int]]:
        """The stretches (start, stop, room) that are left to treat after a decision; the last of them comes first.

        A decision n > 0 stores state `start` and advances n steps; n <= 0 tapes step `start` in form -n. The order is
        that of a stack: callers pop the stretch to treat next from the end.
        """
        if decision > 0:
            middle = start + decision
            return [(start, middle, room), (middle, stop, room - self.state[start])]
        if stop - start > 1:
            return [(start + 1, stop, room - self.tapes[start][-decision])]
        return []


def _spread(sizes: list[int], unit: int) -> list[int]:
    """The sizes in units, rounded so that each partial sum from the first on is rounded correctly."""
    total, rounded, spread = 0, 0, []
    for size in sizes:
        total += size
        reached = (total + unit // 2) // unit
        spread.append(reached - rounded)
        rounded = reached
    return spread


@dataclass(frozen=True, slots=True)
class _Front:
    """A staircase: its corners by rising bytes and falling seconds, and the decision that leads to each."""

    bytes: _Ints
    seconds: _Floats
    decisions: _Ints

    def at(self, room: _Ints) -> _Floats:
        """The fewest seconds in these numbers of bytes, none of which is below the first corner."""
        return self.seconds[np.searchsorted(self.bytes, room, side="right") - 1]


class Fronts:
    """The staircase of every stretch of the chain."""

    def __init__(self, chain: Chain) -> None:
        length = self._length = len(chain)
        self._needs = MemoryNeeds(chain)
        self._own = [
            [step.forward + step.backward + option.extra for option in step.menu]
            for step in (chain[k] for k in range(length))
        ]
        self._running = [chain.forward_seconds(0, k) for k in range(length + 1)]
        self._fronts: dict[tuple[int, int], _Front] = {}
        # By rising width: a stretch's front needs only those of stretches inside it.
        for width in range(1, length + 1):
            for start in range(length - width + 1):
                self._fronts[start, start + width] = self._front(start, start + width)

    @property
    def least(self) -> int:
        """The fewest bytes in which the chain has a persistent schedule."""
        return int(self._fronts[0, self._length].bytes[0])

    def decisions(self, budget: int) -> list[int]:
        """The fastest persistent schedule within `budget`, as the decisions that `Hetero` stores."""
        decisions = []
        pending = [(0, self._length, min(budget, int(self._fronts[0, self._length].bytes[-1])))]
        while pending:
            start, stop, room = pending.pop()
            front = self._fronts[start, stop]
            decision = int(front.decisions[np.searchsorted(front.bytes, room, side="right") - 1])
            decisions.append(decision)
            pending += self._needs.parts(start, stop, room, decision)
        return decisions

    def _front(self, start: int, stop: int) -> _Front:
        candidates = [self._taped(start, stop, option) for option in range(len(self._own[start]))]
        candidates += [self._split(start, middle, stop) for middle in range(start + 1, stop)]
        room = np.concatenate([front.bytes for front in candidates])
        seconds = np.concatenate([front.seconds for front in candidates])
        decisions = np.concatenate([front.decisions for front in candidates])
        # By bytes, then by seconds: a corner stays if it is faster than every one before it, which all fit its bytes.
        order = np.lexsort((seconds, room))
        seconds = seconds[order]
        better = np.ones(len(order), dtype=bool)
        better[1:] = seconds[1:] < np.minimum.accumulate(seconds)[:-1]
        return _Front(room[order][better], seconds[better], decisions[order][better])

    def _taped(self, start: int, stop: int, option: int) -> _Front:
        tape = self._needs.tapes[start][option]
        beside = self._needs.beside_tape(start, stop, option)
        room, seconds = np.array([tape + beside]), np.array([self._own[start][option]])
        if stop - start > 1:
            rest = self._fronts[start + 1, stop]
            room, seconds = np.maximum(room, tape + rest.bytes), seconds + rest.seconds
        return _Front(room, seconds, np.full(len(room), -option))

    def _split(self, start: int, middle: int, stop: int) -> _Front:
        left, right = self._fronts[start, middle], self._fronts[middle, stop]
        state = self._needs.state[start]
        beside_start = state + right.bytes
        least = max(self._needs.running(start, middle, stop), int(left.bytes[0]), int(beside_start[0]))
        # The sum changes only where one of its two parts does, so its corners are among theirs.
        corners = np.concatenate([left.bytes, beside_start])
        room = np.concatenate([[least], np.sort(corners[corners > least])])
        seconds = left.at(room) + right.at(room - state) + (self._running[middle] - self._running[start])
        return _Front(room, seconds, np.full(len(room), middle - start))


@lru_cache(maxsize=8)
def fronts(chain: Chain) -> Fronts:
    """The staircases of a chain, cached for the next budget."""
    return Fronts(chain)


class Levels:
    """The seconds of the cheapest treatment of every [s, t) in every number of levels.

    With `count_slots`, every state takes one level, the tape one, only stretches of one step are taped, and nothing
    else counts: n + 1 levels are then n slots and one step of tape.
    """

    def __init__(self, chain: Chain, unit: int, levels: int, *, count_slots: bool = False) -> None:
        length = len(chain)
        self.levels = levels
        self._length, self._one_tape = length, count_slots
        needs = self._needs = MemoryNeeds(chain, unit)
        if count_slots:
            needs.state, needs.tapes, needs.pulling = [1] * length, [[1]] * length, [[0]] * length
            needs.advance = needs.tape = needs.cotangent = [0] * length
        self._own = [
            [step.forward + step.backward + option.extra for option in step.menu[: len(needs.tapes[k])]]
            for k, step in ((k, chain[k]) for k in range(length))
        ]
        self._running = np.array([chain.forward_seconds(0, k) for k in range(length + 1)])
        # By start, stop and level; infinite where the levels do not suffice. Filled by rising width, like `Fronts`.
        self._table: _Floats = np.empty((length, length + 1, levels + 1))
        for width in range(1, length + 1):
            for start in range(length - width + 1):
                self._fill(start, start + width)

    def seconds(self, level: int) -> float:
        """The seconds of the whole chain in this many levels."""
        return float(self._table[0, self._length, level])

    def decisions(self, level: int) -> list[int]:
        """The decisions of the cheapest treatment in this many levels, in the order in which `Hetero` stores them."""
        decisions = []
        pending = [(0, self._length, level)]
        while pending:
            start, stop, room = pending.pop()
            decision = self._decide(start, stop, room)
            decisions.append(decision)
            pending += self._needs.parts(start, stop, room, decision)
        return decisions

    def _fill(self, start: int, stop: int) -> None:
        row = self._table[start, stop]
        row[:] = np.inf
        for option in range(len(self._own[start])):
            low, seconds = self._taping(start, stop, option)
            np.minimum(row[low:], seconds, out=row[low:])
        state = self._needs.state[start]
        if stop - start > 1 and state <= self.levels:
            seconds = self._splitting(start, stop, state, self.levels + 1).min(axis=0)
            np.minimum(row[state:], seconds, out=row[state:])

    def _taping(self, start: int, stop: int, option: int) -> tuple[int, _Floats]:
        """The fewest levels in which step `start` can be taped first, and the seconds in each number from there on."""
        tape = self._needs.tapes[start][option]
        low = min(tape + self._needs.beside_tape(start, stop, option), self.levels + 1)
        own = self._own[start][option]
        if stop - start == 1:
            return low, np.full(self.levels + 1 - low, own)
        if self._one_tape:
            return low, np.full(self.levels + 1 - low, np.inf)
        return low, own + self._table[start + 1, stop, low - tape : self.levels + 1 - tape]

    def _splitting(self, start: int, stop: int, low: int, high: int) -> _Floats:
        """The seconds for every place to split at (rows) and the levels [low, high), which have room for state `start`.

        Infinite where the levels do not suffice.
        """
        state = self._needs.state[start]
        right = self._table[start + 1 : stop, stop, low - state : high - state]
        total: _Floats = self._table[start, start + 1 : stop, low:high] + right
        total += (self._running[start + 1 : stop] - self._running[start])[:, None]
        running = np.maximum.accumulate(self._needs.advance[start : stop - 1])
        if running[-1]:
            needed = state + running + self._needs.cotangent[stop - 1]
            total[np.arange(low, high) < needed[:, None]] = np.inf
        return total

    def _decide(self, start: int, stop: int, room: int) -> int:
        """The decision that leads to an entry of the table, found by computing its candidates once more."""
        best, decision = np.inf, 0
        for option in range(len(self._own[start])):
            low, seconds = self._taping(start, stop, option)
            if room >= low and seconds[room - low] < best:
                best, decision = float(seconds[room - low]), -option
        if stop - start > 1 and room >= self._needs.state[start]:
            column = self._splitting(start, stop, room, room + 1)[:, 0]
            split = int(np.argmin(column))
            if column[split] < best:
                decision = split + 1
        return decision


# Limits, with their reasons in docs/decisions/0006-levels-of-the-budget.md.
EXACT_STEPS = 48  # of one form each; up to here nothing is rounded and planning takes under a second
MOST_TABLE_STEPS = 200  # in a table of levels; longer chains have neighbours joined until this many are left
BUDGET_LEVELS = 500  # into which a table divides the budget


@registered
@dataclass(frozen=True, slots=True)
class Hetero(ChainSchedule):
    """A persistent schedule as the sequence of its decisions, the outermost and leftmost first.

    A decision n > 0 stores the first state of a stretch and advances n steps; n <= 0 tapes the first step in the form
    of entry -n of its menu. Each decision is followed by those for the right part, then by those for the left.
    """

    planner: ClassVar[str] = "hetero"
    disk: ClassVar[None] = None

    decisions: tuple[int, ...]

    def actions(self, chain: Chain) -> Iterator[Action]:
        """The actions in order: each stretch taped step by step, or split."""
        decisions = iter(self.decisions)
        # What is still to do, innermost last: pull step `start` back (stop = 0), or treat [start, stop) from its
        # stored start.
        pending: list[tuple[int, int]] = []
        start, stop, stored = 0, len(chain), False
        # On entry of each turn: the state at `start` is current, and a snapshot if `stored`; the backward is at `stop`.
        while True:
            while start < stop:
                decision = next(decisions, None)
                if not isinstance(decision, int) or decision >= stop - start:
                    raise self._misfit(chain)
                if decision > 0:
                    if not stored:
                        yield Save(start)
                    yield Advance(start, start + decision)
                    pending.append((start, start + decision))
                    start += decision
                else:
                    if stored:
                        yield Drop(start)  # the tape holds its own input
                    yield Tape(start, start + 1, -decision)
                    pending.append((start, 0))
                    start += 1
                stored = False
            while pending and not pending[-1][1]:
                done, _ = pending.pop()
                yield Backward(done, done + 1)
            if not pending:
                break
            start, stop = pending.pop()
            yield Restore(start)
            stored = True
        if next(decisions, None) is not None:
            raise self._misfit(chain)

    def bill(self, chain: Chain) -> Bill:
        """The cost of the actions, found by simulating them."""
        return simulate_actions(chain, tuple(self.actions(chain)))

    def bound(self, chain: Chain) -> None:
        """None: the optimum among persistent schedules is no bound for all schedules."""

    def _misfit(self, chain: Chain) -> InputError:
        return InputError(f"{len(self.decisions):,} decisions do not fit a chain of {len(chain):,} steps")


def is_exact(chain: Chain) -> bool:
    """Whether the chain is planned exactly, without rounding."""
    # A limit on the work: stretches and splits are length**3, and staircases have corners in proportion to the forms
    # of all steps.
    length = len(chain)
    return length <= EXACT_STEPS and length**3 * sum(len(chain[k].menu) for k in range(length)) <= EXACT_STEPS**4


def least(chain: Chain) -> int:
    """The fewest bytes, working set included, in which the chain has a persistent schedule."""
    return fronts(chain).least if is_exact(chain) else _smallest(chain)[0]


@lru_cache(maxsize=16)
def fastest(chain: Chain, budget: int) -> Hetero:
    """The fastest persistent schedule found whose peak is at most `budget`, which must be at least `least(chain)`."""
    if is_exact(chain):
        return Hetero(tuple(fronts(chain).decisions(budget)))
    everything = Hetero((0,) * len(chain))
    return everything if everything.bill(chain).peak_memory <= budget else by_levels(chain, budget)


def by_levels(chain: Chain, budget: int, levels: int = BUDGET_LEVELS) -> Hetero:
    """The fastest schedule that a table of this many levels finds; see `fastest`."""
    joined, sizes = _joined(chain)
    levels = min(levels, budget)
    table = Levels(joined, -(-budget // levels), levels + levels // 8)
    for level in range(table.levels, 0, -1):
        # Seconds only rise on the way down, so the first plan within the budget is the fastest. Where one level less
        # takes the same time, its plan is the smaller one, so this level is skipped.
        if table.seconds(level) < table.seconds(level - 1):
            schedule = Hetero(tuple(_expanded(chain, table.decisions(level), sizes)))
            if schedule.bill(chain).peak_memory <= budget:
                return schedule
    return Hetero(_smallest(chain)[1])  # the budget is so close to the least that rounding rules out every other plan


def with_slots(chain: Chain, slots: int) -> Hetero:
    """The fastest schedule with at most `slots` snapshots, the initial state included, and the tape of one step.

    The chain has at most `MOST_TABLE_STEPS` steps.
    """
    levels = min(slots, len(chain)) + 1
    return Hetero(tuple(Levels(chain, 1, levels, count_slots=True).decisions(levels)))


def _joined(chain: Chain) -> tuple[Chain, list[int]]:
    """The chain with its smallest neighbours joined until `MOST_TABLE_STEPS` are left, and the steps in each of them.

    A joined step has as many forms as the one of its steps with the most, and all are taped in the same; see `_form`.
    """
    sizes = [1] * len(chain)
    tapes = [chain[k].tape for k in range(len(chain))]
    while len(sizes) > MOST_TABLE_STEPS:
        k = min(range(len(tapes) - 1), key=lambda k: tapes[k] + tapes[k + 1])
        tapes[k : k + 2] = [tapes[k] + tapes[k + 1]]
        sizes[k : k + 2] = [sizes[k] + sizes[k + 1]]
    if len(sizes) == len(chain):
        return chain, sizes
    steps, start = [], 0
    for size in sizes:
        steps.append(_as_one([chain[k] for k in range(start, start + size)]))
        start += size
    return Chain.of(steps), sizes


def _as_one(parts: list[StepCost]) -> StepCost:
    options = []
    for form in range(1, max(len(part.menu) for part in parts)):
        forms = [(part, _form(part, form)) for part in parts]
        entries = [part.menu[form] for part, form in forms]
        tape, extra = sum(entry.tape for entry in entries), sum(entry.extra for entry in entries)
        options.append(TapeOption(tape, extra, backward=max(part.pulling[form] for part, form in forms)))
    return StepCost(
        parts[0].state,
        sum(part.tape for part in parts),
        sum(part.forward for part in parts),
        sum(part.backward for part in parts),
        cotangent=parts[0].cotangent,
        working=Working(
            max(part.working.advance for part in parts),
            max(part.working.tape for part in parts),
            max(part.working.backward for part in parts),
        ),
        options=tuple(options),
    )


def _form(step: StepCost, form: int) -> int:
    """The entry of the step's menu for a joined step that is taped in form `form`: that one, or the step's last."""
    return min(form, len(step.menu) - 1)


def _expanded(chain: Chain, decisions: list[int], sizes: list[int]) -> Iterator[int]:
    """Decisions over joined steps as decisions over the steps themselves."""
    first = list(accumulate(sizes, initial=0))
    pending = [(0, len(sizes))]
    for decision in decisions:
        start, stop = pending.pop()
        if decision > 0:
            yield first[start + decision] - first[start]
            pending += [(start, start + decision), (start + decision, stop)]
        else:
            yield from (-_form(chain[k], -decision) for k in range(first[start], first[start + 1]))
            if stop - start > 1:
                pending.append((start + 1, stop))


@lru_cache(maxsize=8)
def _smallest(chain: Chain) -> tuple[int, tuple[int, ...]]:
    """The least peak, and the decisions of a schedule that has it; exact for chains that fit a table."""
    length = len(chain)
    needs = MemoryNeeds(chain)
    if length > MOST_TABLE_STEPS:
        return _with_one_slot(needs, length)
    state, advance = np.array(needs.state), np.array(needs.advance)
    peaks = np.zeros((length + 1, length + 1), dtype=np.int64)
    chosen = np.zeros((length, length + 1), dtype=np.int64)
    for width in range(1, length + 1):
        for start in range(length - width + 1):
            stop = start + width
            rest = int(peaks[start + 1, stop])
            peaks_in = [
                tape + max(needs.beside_tape(start, stop, option), rest)
                for option, tape in enumerate(needs.tapes[start])
            ]
            peak = min(peaks_in)
            decision = -peaks_in.index(peak)
            if width > 1:
                running = np.maximum.accumulate(advance[start : stop - 1]) + needs.cotangent[stop - 1]
                right = state[start] + np.maximum(running, peaks[start + 1 : stop, stop])
                splits = np.maximum(right, peaks[start, start + 1 : stop])
                split = int(np.argmin(splits))
                if splits[split] < peak:
                    peak, decision = int(splits[split]), split + 1
            peaks[start, stop], chosen[start, stop] = peak, decision
    decisions = []
    pending = [(0, length, 0)]
    while pending:
        start, stop, _ = pending.pop()
        decisions.append(int(chosen[start, stop]))
        pending += needs.parts(start, stop, 0, decisions[-1])
    return int(peaks[0, length]), tuple(decisions)


def _with_one_slot(needs: MemoryNeeds, length: int) -> tuple[int, tuple[int, ...]]:
    """The peak and the decisions of running to each step from the start again, which is all that is stored."""
    running = np.maximum.accumulate(needs.advance)
    peaks = [needs.tapes[0][0] + needs.beside_tape(0, 1, 0)]
    for k in range(1, length):
        advancing = int(running[k - 1]) + needs.cotangent[k]
        peaks.append(needs.state[0] + max(advancing, needs.tapes[k][0] + needs.beside_tape(k, k + 1, 0)))
    decisions = (decision for k in range(length - 1, 0, -1) for decision in (k, 0))
    return max(peaks), (*decisions, 0)
