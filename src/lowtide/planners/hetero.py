"""Unequal steps, each with a menu of tapes: the fastest persistent schedule within a peak.

The dynamic program of Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova for heterogeneous chains ("Optimal
checkpointing for heterogeneous chains", 2019), with several tapes to choose from for each step. For the steps
[s, t) with state s current, and m bytes for all that they hold, their cheapest treatment is either

- tape step s (in one of its forms), treat [s+1, t) beside that tape, pull step s back; or
- store state s, run [s, k) without tape, treat [k, t) beside the snapshot, restore s, treat [s, k).

It is optimal among persistent schedules: those in which a snapshot or tape, once made, stays until its own backward,
and no step runs while the tape of a later one is kept. Dropping one early and making it again later can win, seldom
and little (the tests measure it). Up to `EXACT_STEPS` steps of one form, or fewer of more, the program is evaluated
exactly, in bytes (`fronts`); other chains get a table of memory levels (`levels`), and those above `MOST_STEPS` have
their smallest neighbours joined first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import ClassVar

import numpy as np

from lowtide.actions import Action, Advance, Backward, Drop, Restore, Save, Tape
from lowtide.chain import Chain, StepCost, TapeOption, Working
from lowtide.errors import InputError
from lowtide.plan import Bill, registered
from lowtide.planners.fronts import fronts
from lowtide.planners.levels import Levels
from lowtide.planners.memory_needs import MemoryNeeds
from lowtide.planners.revolve import Revolve
from lowtide.simulate import simulate_actions

EXACT_STEPS = 48
MOST_STEPS = 200
LEVELS = 500


@registered
@dataclass(frozen=True, slots=True)
class Hetero:
    """A persistent schedule as the row of its decisions, outermost and leftmost first.

    A decision n > 0 stores the first state and advances n steps; n <= 0 tapes the first step with entry -n of its
    menu. Each decision is followed by those for the right part, then by those for the left.
    """

    planner: ClassVar[str] = "hetero"
    disk: ClassVar[None] = None

    decisions: tuple[int, ...]

    def actions(self, chain: Chain) -> Iterator[Action]:
        """See `Schedule`."""
        decisions = iter(self.decisions)
        # What is still to do, innermost last: pull step `start` back (stop = 0), or treat [start, stop) from its
        # stored start.
        pending: list[tuple[int, int]] = []
        start, stop, stored = 0, len(chain), False
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
        """See `Schedule`."""
        return simulate_actions(chain, self.actions(chain))

    def bound(self, chain: Chain) -> None:
        """None: optimal among persistent schedules is not a bound on all schedules."""

    def _misfit(self, chain: Chain) -> InputError:
        return InputError(f"{len(self.decisions):,} decisions do not fit a chain of {len(chain):,} steps")


def is_exact(chain: Chain) -> bool:
    """Whether nothing is rounded: staircases have corners in proportion to the forms of all steps."""
    length = len(chain)
    return length <= EXACT_STEPS and length**3 * sum(len(chain[k].menu) for k in range(length)) <= EXACT_STEPS**4


def least(chain: Chain) -> int:
    """The fewest bytes, working set included, in which the chain has a persistent schedule."""
    return fronts(chain).least if is_exact(chain) else _smallest(chain)[0]


def fastest(chain: Chain, budget: int) -> Hetero:
    """The fastest persistent schedule found whose peak is at most `budget`, which must be at least `least(chain)`."""
    if is_exact(chain):
        return Hetero(tuple(fronts(chain).decisions(budget)))
    everything = Hetero((0,) * len(chain))
    return everything if everything.bill(chain).peak_memory <= budget else by_levels(chain, budget)


def by_levels(chain: Chain, budget: int, levels: int = LEVELS) -> Hetero:
    """The fastest schedule that a table of so many levels finds; see `fastest`."""
    joined, sizes = _joined(chain)
    levels = min(levels, budget)
    table = Levels(joined, -(-budget // levels), levels + levels // 8)
    for level in range(table.levels, 0, -1):
        # Seconds only rise on the way down, so the first plan that keeps the budget is the best. Where a level less
        # takes the same time, that plan is the smaller one.
        if table.seconds(level) < table.seconds(level - 1):
            schedule = Hetero(tuple(_expanded(chain, table.decisions(level), sizes)))
            if schedule.bill(chain).peak_memory <= budget:
                return schedule
    return Hetero(_smallest(chain)[1])  # so close to the least that rounding leaves no other


def with_slots(chain: Chain, slots: int) -> Hetero | Revolve:
    """The fastest schedule with at most `slots` snapshots, the initial state among them, and one step of tape.

    Beyond `MOST_STEPS` steps, the one with the fewest runs.
    """
    levels = min(slots, len(chain)) + 1
    if len(chain) > MOST_STEPS or levels > LEVELS:
        return Revolve(slots)
    return Hetero(tuple(Levels(chain, 1, levels, count_slots=True).decisions(levels)))


def _joined(chain: Chain) -> tuple[Chain, list[int]]:
    """The chain with its smallest neighbours joined until `MOST_STEPS` are left, and how many steps each holds.

    Joined steps have as many forms as the one of them with the most, and all are taped in the same; see `_form`.
    """
    sizes = [1] * len(chain)
    tapes = [chain[k].tape for k in range(len(chain))]
    while len(sizes) > MOST_STEPS:
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
    """The entry of its menu that the step is taped in where its neighbours are taped in this one: its last, at most."""
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
    """The least peak, exactly, and the decisions of a schedule that reaches it."""
    length = len(chain)
    needs = MemoryNeeds(chain)
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
