"""A plan over time, as values to be drawn: which step runs when, which snapshots are stored then, what memory holds.

A short plan is listed run by run. A long one is a raster, time columns by step rows, so that a million steps are as
readable as a hundred. Memory over time is always a few hundred equal spans of time, each with its worst moment.
`played` makes the `Timeline` of a plan by playing its actions on paper.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.actions import Action, Advance, Backward, Tape, Tier
from lowtide.chain import Chain
from lowtide.plan import Plan
from lowtide.report.kinds import kind_of
from lowtide.report.moments import Activity, Moment
from lowtide.simulate import Ledger


class RunKind(IntEnum):
    """The kind of a step's run. "Forward" is its first run; a taped run keeps its tape."""

    FORWARD = 0
    FORWARD_TAPED = 1
    RERUN = 2
    RERUN_TAPED = 3
    BACKWARD = 4


class Run(NamedTuple):
    """One run of one step; times are in seconds from the beginning."""

    kind: RunKind
    step: int
    start: float
    stop: float


class Stored(NamedTuple):
    """The time during which one snapshot is stored."""

    step: int
    tier: Tier
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Raster:
    """A long plan, aggregated: row r covers the steps [r*T//rows, (r+1)*T//rows).

    Attributes:
        share: for each kind, column and row, the share of the column's time; 255 is all of it.
        memory, disk: for each column and row, the share of the row's states that is stored when the column ends.
    """

    columns: int
    rows: int
    share: NDArray[np.uint8]
    memory: NDArray[np.uint8]
    disk: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Tally:
    """What a plan does with each step.

    Attributes:
        again: the number of plain runs of each step, which are those beyond the one that keeps its tape.
        stored: whether the step's state is ever stored.
        forms: the entry of its menu that the step is taped in.
        stretches: ranges [start, stop) that are taped together, in the order of the chain; empty if there are too many.
    """

    again: NDArray[np.int64]
    stored: NDArray[np.bool_]
    forms: NDArray[np.int64]
    stretches: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """A plan over time: with `runs` and `stored` if it is short, and with `raster` if it is long.

    Attributes:
        seconds: the time of the whole plan, by the chain's costs; if these are 0, a forward counts 1 and a backward 2.
        memory: the worst moment of each span of time, in order.
        worst: the moment at which memory peaks.
        tally: what the plan does with each step.
    """

    seconds: float
    runs: tuple[Run, ...] | None
    stored: tuple[Stored, ...] | None
    raster: Raster | None
    memory: tuple[Moment, ...]
    worst: Moment
    tally: Tally


MOST_RUNS = 4_000  # runs that are listed one by one; a plan with more is a raster
RASTER_COLUMNS, RASTER_ROWS = 300, 100  # columns of time, rows of steps
TIME_SHARES = 400  # equal spans of the whole time, each with one moment of memory
LEAST_SECONDS = 1e-200  # a whole plan that takes less counts as taking no time, because dividing by it overflows
MOST_STRETCHES = 60  # stretches that are listed one by one

_Told = Callable[[Activity, int, int], str]  # what is being done with the steps [start, stop), in words


class _Doing(NamedTuple):
    """What is being done with the steps [start, stop)."""

    activity: Activity
    start: int
    stop: int


_NOTHING_YET = _Doing(Activity.RUNNING, 0, 0)


def played(plan: Plan) -> Timeline:
    """The timeline of a plan: its actions are played by `lowtide.simulate`, which also checks that they are legal."""
    bill = plan.bill
    is_short = bill.plain_runs + bill.taping_runs + bill.backward_runs <= MOST_RUNS
    clock = _Clock(plan)
    told = kind_of(plan).told
    player = (_RunByRun if is_short else _Aggregated)(plan.chain, clock, told)
    ledger = Ledger(plan.chain, plan.schedule.disk, player)
    share = clock.total / TIME_SHARES
    most = {kind: 1 if is_short else clock.steps_in(share, kind) for kind in (Advance, Tape, Backward)}
    for action in plan.actions():
        if isinstance(action, Advance | Tape | Backward) and action.stop - action.start > most[type(action)]:
            for piece in _pieces(action, most[type(action)]):
                ledger.play(piece)
        else:
            ledger.play(action)
    ledger.close()
    return player.timeline()


class _Clock:
    """The seconds of every run, and of the whole plan."""

    def __init__(self, plan: Plan) -> None:
        bill = plan.bill
        self.chain, self._disk = plan.chain, plan.schedule.disk
        self._timed = bill.seconds > LEAST_SECONDS
        self.total = bill.seconds if self._timed else bill.plain_runs + bill.taping_runs + 2.0 * bill.backward_runs

    def forward(self, start: int, stop: int) -> float:
        return self.chain.forward_seconds(start, stop) if self._timed else stop - start

    def backward(self, start: int, stop: int, option: int) -> float:
        if not self._timed:
            return 2.0 * (stop - start)
        chain = self.chain
        if chain.is_equal:
            return (stop - start) * (chain[0].backward + chain[0].menu[option].extra)
        return sum(chain[k].backward + chain[k].menu[option].extra for k in range(start, stop))

    def steps_in(self, seconds: float, kind: type[Action]) -> int:
        """How many steps of an action take at most `seconds`, at least one; always one if steps are unequal."""
        each = self.backward(0, 1, 0) if kind is Backward else self.forward(0, 1)
        if not self.chain.is_equal:
            return 1
        return max(1, int(seconds / each)) if each else len(self.chain)

    def write(self, step: int) -> float:
        return 0.0 if self._disk is None or not self._timed else self.chain[step].state * self._disk.write

    def read(self, step: int) -> float:
        return 0.0 if self._disk is None or not self._timed else self.chain[step].state * self._disk.read


def _pieces(action: Advance | Tape | Backward, most: int) -> Iterator[Action]:
    """The action in pieces of at most `most` steps, in the order in which it runs them."""
    start, stop = action.start, action.stop
    if isinstance(action, Backward):
        for end in range(stop, start, -most):
            yield Backward(max(start, end - most), end)
    else:
        for begin in range(start, stop, most):
            yield replace(action, start=begin, stop=min(stop, begin + most))


class _Memory:
    """Finds the worst moment of each span of time, and of the whole plan."""

    def __init__(self, total: float) -> None:
        self._share = total / TIME_SHARES
        self._most = [-1] * TIME_SHARES  # bytes; -1 until something is held in the span
        self._parts = [(0, 0, 0, 0)] * TIME_SHARES
        self._doing = [_NOTHING_YET] * TIME_SHARES
        self._peak = -1
        self._worst = (0, (0, 0, 0, 0), _NOTHING_YET)

    def see(self, start: float, stop: float, parts: tuple[int, int, int, int], doing: _Doing) -> None:
        """Note that these bytes are held from `start` to `stop`."""
        total = sum(parts)
        first = min(int(start / self._share), TIME_SHARES - 1)
        last = max(first, min(ceil(stop / self._share) - 1, TIME_SHARES - 1))
        if total > self._peak:
            self._peak = total
            self._worst = (first, parts, doing)
        for share in range(first, last + 1):
            if total > self._most[share]:
                self._most[share] = total
                self._parts[share], self._doing[share] = parts, doing

    def moments(self, told: _Told) -> tuple[tuple[Moment, ...], Moment]:
        """The moments of all spans of time, equal neighbours joined, and the worst moment."""
        found: list[Moment] = []
        for share in range(TIME_SHARES):
            moment = self._moment(share, self._parts[share], self._doing[share], told)
            if found and (self._most[share] < 0 or found[-1][2:] == moment[2:]):  # nothing new in this span
                found[-1] = found[-1]._replace(stop=moment.stop)
            else:
                found.append(moment)
        return tuple(found), self._moment(*self._worst, told)

    def _moment(self, share: int, parts: tuple[int, int, int, int], doing: _Doing, told: _Told) -> Moment:
        return Moment(share * self._share, (share + 1) * self._share, *parts, told(*doing))


class _RunCounts:
    """Gathers a `Tally`, one action at a time."""

    def __init__(self, length: int) -> None:
        # By step, runs that begin there minus runs that end there: the cumulative sum is the number of runs.
        self._edges = [0] * (length + 1)
        self.stored = np.zeros(length, dtype=np.bool_)
        self._forms = np.zeros(length, dtype=np.int64)
        self._stretches: list[tuple[int, int]] = []

    def advanced(self, start: int, stop: int) -> None:
        self._edges[start] += 1
        self._edges[stop] -= 1

    def taped(self, start: int, stop: int, option: int) -> None:
        if option:
            self._forms[start:stop] = option
        if self._stretches and self._stretches[-1][1] == start:
            self._stretches[-1] = (self._stretches[-1][0], stop)
        elif len(self._stretches) <= MOST_STRETCHES:
            self._stretches.append((start, stop))

    def tally(self) -> Tally:
        few = len(self._stretches) <= MOST_STRETCHES
        stretches = tuple(sorted(self._stretches)) if few else ()
        return Tally(np.cumsum(self._edges[:-1]), self.stored, self._forms, stretches)


class _Player(ABC):
    """Observes a ledger and keeps the time; subclasses decide how runs and snapshots are recorded."""

    def __init__(self, chain: Chain, clock: _Clock, told: _Told) -> None:
        self._clock, self._told = clock, told
        self._now = self._began = 0.0
        self._reached = 0  # the steps below this one have run already
        self._memory = _Memory(clock.total)
        self._doing = _NOTHING_YET
        self._counts = _RunCounts(len(chain))

    def advanced(self, start: int, stop: int) -> None:
        self._counts.advanced(start, stop)
        self._begin(Activity.RUNNING, start, stop)
        self._now += self._clock.forward(start, stop)
        self._forward(start, stop, RunKind.FORWARD, RunKind.RERUN)

    def taped(self, start: int, stop: int, option: int) -> None:
        self._counts.taped(start, stop, option)
        self._begin(Activity.TAPING, start, stop)
        self._now += self._clock.forward(start, stop)
        self._forward(start, stop, RunKind.FORWARD_TAPED, RunKind.RERUN_TAPED)

    def pulled(self, start: int, stop: int, option: int) -> None:
        self._begin(Activity.BACKWARD, start, stop)
        self._now += self._clock.backward(start, stop, option)
        self._run(RunKind.BACKWARD, start, stop)

    def held(self, snapshots: int, tapes: int, cotangent: int, working: int) -> None:
        self._memory.see(self._began, self._now, (snapshots, tapes, cotangent, working), self._doing)

    def restored(self, step: int, tier: Tier) -> None:
        if tier is Tier.DISK:
            self._now += self._clock.read(step)

    def _write(self, step: int, tier: Tier) -> None:
        self._counts.stored[step] = True
        self._begin(Activity.STORING, step, step)
        if tier is Tier.DISK:
            self._now += self._clock.write(step)

    def _begin(self, activity: Activity, start: int, stop: int) -> None:
        self._began, self._doing = self._now, _Doing(activity, start, stop)

    def _forward(self, start: int, stop: int, first: RunKind, again: RunKind) -> None:
        # Runs follow the chain, so a run that starts at or above every step that has run is a first run.
        self._run(first if start >= self._reached else again, start, stop)
        self._reached = max(self._reached, stop)

    @abstractmethod
    def timeline(self) -> Timeline:
        """The timeline of what was observed."""

    @abstractmethod
    def _run(self, kind: RunKind, start: int, stop: int) -> None:
        """Record that steps [start, stop) ran from `_began` until `_now`."""

    @abstractmethod
    def stored(self, step: int, tier: Tier) -> None:
        """Record that a state was stored."""

    @abstractmethod
    def dropped(self, step: int, tier: Tier) -> None:
        """Record that a stored state was dropped."""


class _RunByRun(_Player):
    """Records every run of a step, and how long every snapshot is stored."""

    def __init__(self, chain: Chain, clock: _Clock, told: _Told) -> None:
        super().__init__(chain, clock, told)
        self._runs: list[Run] = []
        self._stored: list[Stored] = []
        self._since: dict[tuple[int, Tier], float] = {}

    def timeline(self) -> Timeline:
        memory, worst = self._memory.moments(self._told)
        return Timeline(
            self._clock.total,
            tuple(self._runs),
            tuple(sorted(self._stored, key=_birth)),
            None,
            memory,
            worst,
            self._counts.tally(),
        )

    def _run(self, kind: RunKind, start: int, stop: int) -> None:
        self._runs.append(Run(kind, start, self._began, self._now))

    def stored(self, step: int, tier: Tier) -> None:
        self._write(step, tier)
        self._since[step, tier] = self._now

    def dropped(self, step: int, tier: Tier) -> None:
        self._stored.append(Stored(step, tier, self._since.pop((step, tier)), self._now))


def _birth(stored: Stored) -> tuple[float, int]:
    return stored.start, stored.step


class _Aggregated(_Player):
    """Sums up the time of runs by column and row, and counts stored states by row at the end of each column."""

    def __init__(self, chain: Chain, clock: _Clock, told: _Told) -> None:
        super().__init__(chain, clock, told)
        self._length = len(chain)
        self._rows = min(RASTER_ROWS, self._length)
        self._column = clock.total / RASTER_COLUMNS
        self._share = [[0.0] * (RASTER_COLUMNS * self._rows) for _ in RunKind]
        self._sizes = np.diff(np.arange(self._rows + 1) * self._length // self._rows)
        self._live = {tier: [0] * self._rows for tier in Tier}
        self._columns: dict[Tier, list[list[int]]] = {tier: [] for tier in Tier}

    def timeline(self) -> Timeline:
        self._close_columns(RASTER_COLUMNS)
        shape = (len(RunKind), RASTER_COLUMNS, self._rows)
        share = np.ceil(255 * np.clip(np.array(self._share).reshape(shape) / self._column, 0, 1) - 1e-9)
        stored = {tier: np.ceil(255 * np.array(self._columns[tier]) / self._sizes).astype(np.uint8) for tier in Tier}
        raster = Raster(RASTER_COLUMNS, self._rows, share.astype(np.uint8), stored[Tier.MEMORY], stored[Tier.DISK])
        memory, worst = self._memory.moments(self._told)
        return Timeline(self._clock.total, None, None, raster, memory, worst, self._counts.tally())

    def _run(self, kind: RunKind, start: int, stop: int) -> None:
        cells, began, now = self._share[kind], self._began, self._now
        first, last = int(began / self._column), min(int(now / self._column), RASTER_COLUMNS - 1)
        low, high = self._row(start), self._row(stop - 1)
        if low == high and first >= last:
            cells[min(first, RASTER_COLUMNS - 1) * self._rows + low] += now - began
            return
        for column in range(first, last + 1):
            inside = min(now, (column + 1) * self._column) - max(began, column * self._column)
            for row in range(low, high + 1):
                part = min(stop, (row + 1) * self._length // self._rows) - max(start, row * self._length // self._rows)
                cells[column * self._rows + row] += max(0.0, inside) * part / (stop - start)

    def stored(self, step: int, tier: Tier) -> None:
        self._write(step, tier)
        self._close_columns(int(self._now / self._column))
        self._live[tier][self._row(step)] += 1

    def dropped(self, step: int, tier: Tier) -> None:
        self._close_columns(int(self._now / self._column))
        self._live[tier][self._row(step)] -= 1

    def _row(self, step: int) -> int:
        # The row that the step is in: the last one that begins at or below it.
        return ((step + 1) * self._rows - 1) // self._length

    def _close_columns(self, count: int) -> None:
        """Record the states stored now for all columns before `count` that have not been recorded yet."""
        for tier, columns in self._columns.items():
            columns += [list(self._live[tier])] * (min(count, RASTER_COLUMNS) - len(columns))
