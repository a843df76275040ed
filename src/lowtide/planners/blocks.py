"""A whole model's blocks, each with a menu of tapes: every choice that no other beats in both peak and seconds.

A block is run once and pulled back once. Whatever it runs again, it runs again inside its own backward: that is an
entry of its menu. So only the entries have to be chosen, and the peak is the largest level of any step: the tapes up to
its own, and what its worst moment needs beside them. From the last step to the first, where M_k is the peak of the
steps from k on beyond what earlier steps hold,

    M_k = tape + max(beside, M_{k+1}),    extra_k = extra + extra_{k+1}

for each entry of the menu, and the pairs (M_k, extra_k) that no other pair beats are kept. Those of the first step are
the frontier.

It is exact until a step has more than `MOST_POINTS` such pairs. Then some are left out, evenly in bytes. The others are
not rounded: a choice has the peak that the frontier states, and the least peak is exact. But between the ends a choice
may be a little slower than necessary (less than 0.1% for 200 blocks with 12 entries each). Steps that could be run
again together are planned by `unequal`, not here.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lowtide.actions import Action, Backward, Tape
from lowtide.chain import Chain, StepCost, TapeOption
from lowtide.checks import MOST_TOTAL, keep_whole, whole_number
from lowtide.errors import BudgetError, InputError
from lowtide.forms import Form
from lowtide.plan import Bill, FrontierPoint, Knob, Plan, registered
from lowtide.planners.block_text import SECONDS, BlockSchedule
from lowtide.simulate import simulate_actions

MOST_POINTS = 4096  # on the front of each step; if there are more, some are left out
_REMEDY = "raise the peak, or make the step smaller (a smaller batch, shorter inputs)"

_Ints = NDArray[np.int64]


@registered
@dataclass(frozen=True, slots=True)
class Blocks(BlockSchedule):
    """Every step taped once, in one of its forms, and pulled back.

    Attributes:
        options: for each step, the entry of its menu.
        optimizer: bytes of the optimizer's state, which the peak includes.
        inputs: bytes that exist before the training step and are neither parameters nor optimizer state.
        margin: bytes by which the plan aims below the requested peak.
        notes: sentences that say what was planned and what was not, and why.
        unit: the unit of the chain's times: seconds, or of a count such as "FLOP"; for reports.
    """

    planner: ClassVar[str] = "blocks"
    disk: ClassVar[None] = None

    options: tuple[int, ...]
    optimizer: int = 0
    inputs: int = 0
    margin: int = 0
    notes: tuple[str, ...] = ()
    unit: str = SECONDS

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", tuple(whole_number(o, "options", least=0) for o in self.options))
        for name in ("optimizer", "inputs", "margin"):
            keep_whole(self, name, least=0, most=MOST_TOTAL)
        if isinstance(self.notes, str) or not all(isinstance(note, str) for note in self.notes):
            raise InputError(f"notes={self.notes!r} is no row of sentences; give a tuple of str")
        if not isinstance(self.unit, str):
            raise InputError(f"unit={self.unit!r} is a {type(self.unit).__name__}; give a str, such as 's'")
        object.__setattr__(self, "notes", tuple(self.notes))

    def actions(self, chain: Chain) -> Iterator[Action]:
        """Tape every step in its form, then pull all of them back."""
        length = len(chain)
        if len(self.options) != length:
            raise InputError(f"{len(self.options):,} options do not fit a chain of {length:,} steps")
        for k, option in enumerate(self.options):
            entries = len(chain[k].menu)
            if option >= entries:
                raise InputError(f"step {k:,} has {entries:,} forms of tape, and option {option:,} is none of them")
            yield Tape(k, k + 1, option)
        yield from (Backward(k, k + 1) for k in reversed(range(length)))

    def bill(self, chain: Chain) -> Bill:
        """The cost of the actions, found by simulating them."""
        return simulate_actions(chain, tuple(self.actions(chain)))

    def bound(self, chain: Chain) -> None:
        """None: there are no plain runs to bound."""

    def frontier(self, chain: Chain) -> tuple[FrontierPoint, ...]:
        """Every choice that no other beats, from the largest peak to the least."""
        return block_frontier(chain)


@lru_cache(maxsize=8)
def block_frontier(chain: Chain) -> tuple[FrontierPoint, ...]:
    """Every choice that no other beats, from the largest peak (all kept, unless less costs nothing) to the least."""
    return frontier_of(chain, MOST_POINTS)


def least_peak(chain: Chain) -> int:
    """The smallest peak of any choice."""
    return block_frontier(chain)[-1].peak


def choose_blocks(chain: Chain, peak: int, *, margin: int = 0, ways: str | None = None) -> tuple[int, ...]:
    """The fastest choice whose peak is at most `peak - margin`.

    Raises:
        BudgetError: there is none; the error names the least peak that works, margin included, and `ways` out.
    """
    points = block_frontier(chain)
    for point in points:
        if point.peak <= peak - margin:
            return point.options
    raise BudgetError(peak, points[-1].peak + margin, ways or _REMEDY, "peak")


def for_peak(plan: Plan, peak: int) -> Plan:
    """The same blocks, planned for another peak, with a margin that is the same share of it.

    Raises:
        InputError: the plan is not one of blocks.
        BudgetError: no choice fits; the error names the least peak that works.
    """
    schedule, asked = _asked(plan)
    least = to_ask(plan, least_peak(plan.chain))
    if peak < least:
        raise BudgetError(peak, least, _REMEDY, "peak")
    margin = schedule.margin * peak // asked
    options = choose_blocks(plan.chain, peak, margin=margin)
    return Plan.make(plan.chain, Knob("peak", peak), replace(schedule, options=options, margin=margin))


def to_ask(plan: Plan, peak: int) -> int:
    """The least peak to pass to `for_peak` that leaves room, beside the margin, for a choice with this peak."""
    schedule, asked = _asked(plan)
    return -(-peak * asked // (asked - schedule.margin))


def _asked(plan: Plan) -> tuple[Blocks, int]:
    """The schedule, and the bytes that its margin is a share of: the requested peak, or one that suffices."""
    schedule = plan.schedule
    if not isinstance(schedule, Blocks):
        raise InputError(f"a peak is for plans of a whole model's blocks; this one is by planner {plan.planner!r}")
    asked = plan.knob.value if plan.knob.name == "peak" else None
    return schedule, max(asked or 0, plan.bill.peak_memory + schedule.margin)


def frontier_of(chain: Chain, most: int) -> tuple[FrontierPoint, ...]:
    """The frontier, with at most `most` points (at least 2) for each step; `block_frontier` is the usual one."""
    steps = [chain[k] for k in range(len(chain))]
    unit = _unit(steps)
    peaks, seconds = np.zeros(1, np.int64), np.zeros(1, np.int64)
    # For each step, the last first, and each of its points: the menu entry, and the index of the next step's point.
    chosen: list[tuple[_Ints, _Ints]] = []
    for step in reversed(steps):
        peaks, seconds, options, after = _front(step, peaks, seconds, unit, most)
        chosen.append((options, after))
    rows = np.empty((len(peaks), len(steps)), np.int64)
    at = np.arange(len(peaks))
    for k, (options, after) in enumerate(reversed(chosen)):
        rows[:, k] = options[at]
        at = after[at]
    extras = [[entry.extra for entry in step.menu] for step in steps]
    points: list[FrontierPoint] = []
    for peak, row in zip(peaks.tolist(), rows.tolist(), strict=True):
        extra = math.fsum(entry[option] for entry, option in zip(extras, row, strict=True))
        # The front counted seconds in units; a point that was faster there by rounding alone is left out.
        if not points or extra < points[-1].extra:
            points.append(FrontierPoint(peak, extra, tuple(row)))
    return tuple(reversed(points))


def _front(step: StepCost, peaks: _Ints, seconds: _Ints, unit: float, most: int) -> tuple[_Ints, _Ints, _Ints, _Ints]:
    """The points of the steps from this one on, by rising peak and falling seconds, given those of the next step.

    For each point, also its menu entry for this step, and the index of the next step's point.
    """
    menu = step.menu
    beyond = zip(menu, step.beside_tapes, strict=True)
    reached = np.concatenate([entry.tape + np.maximum(peaks, worst) for entry, worst in beyond])
    taken = np.concatenate([seconds + round(entry.extra / unit) for entry in menu])
    order = np.argsort(reached, kind="stable")  # merges: `reached` is one rising sequence after another
    reached, taken = reached[order], taken[order]
    better = np.ones(len(order), dtype=bool)
    better[1:] = taken[1:] < np.minimum.accumulate(taken)[:-1]
    kept = np.flatnonzero(better)
    kept = kept[np.append(reached[kept[1:]] > reached[kept[:-1]], True)]  # the fastest of those with the same peak
    if len(kept) > most:
        kept = kept[_spread(reached[kept], most)]
    return reached[kept], taken[kept], order[kept] // len(peaks), order[kept] % len(peaks)


def _spread(peaks: _Ints, most: int) -> _Ints:
    """The indices of at most `most` of these rising numbers, evenly spread, both ends included."""
    shares = (peaks - peaks[0]) / (peaks[-1] - peaks[0])
    parts = np.minimum((shares * (most - 1)).astype(np.int64), most - 2)
    last_of_part = np.append(parts[1:] > parts[:-1], True)
    last_of_part[0] = True
    return np.flatnonzero(last_of_part)


def _unit(steps: list[StepCost]) -> float:
    """The unit in which seconds are counted in whole numbers, so that the same entries have the same sum in any order.

    It is a power of two, small enough for all extra seconds together to be less than 2**50 units.
    """
    most = math.fsum(max(entry.extra for entry in step.menu) for step in steps)
    return math.ldexp(1.0, max(math.frexp(most)[1] - 50, -1000))


def untimed(chain: Chain, unsettled: Container[tuple[str, Form | None]]) -> Chain:
    """The chain with seconds that depend only on the menus: a form that comes later takes longer.

    Measured seconds differ from run to run. The least peak that works must not, or an error could name one that does
    not work the next time.

    Forms in `unsettled`, each the name of a block and a form, get the bytes of keeping everything, so that they are
    never chosen.
    """

    def options(name: str, step: StepCost) -> tuple[TapeOption, ...]:
        return tuple(
            replace(option, tape=step.tape, backward=step.working.backward, extra=float(k + 1))
            if (name, option.form) in unsettled
            else replace(option, extra=float(k + 1))
            for k, option in enumerate(step.options)
        )

    steps = [replace(chain[k], options=options(name, chain[k])) for k, name in enumerate(chain.names)]
    return chain.with_steps(steps)
