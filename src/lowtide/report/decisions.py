"""What a plan does with each layer, or with each range of equal steps, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from lowtide.chain import Chain
from lowtide.plan import Plan
from lowtide.report.timeline import Tally
from lowtide.sizes import format_size

MOST_NAMED = 2_000  # steps with a name or a cost of their own that get a row each; more are grouped into ranges
MOST_RANGES = 50  # rows for ranges of steps


class Decision(StrEnum):
    """What is done with a layer or a range of steps."""

    KEEP = "keep"
    RERUN = "rerun"


@dataclass(frozen=True, slots=True)
class StepRow:
    """A layer, or a range of equal steps.

    Attributes:
        start, stop: the steps [start, stop).
        name: the layer's name, or the range in words.
        state: bytes of the state it starts from.
        tape: bytes of all its tapes.
        seconds: the time of running it once, by the chain's costs.
        again: the average number of plain runs of its steps, which are those beyond the one that keeps the tape.
        stored: how many of its states are ever stored.
        form: how its tape is kept, in words.
        is_whole: whether all its steps keep their whole tape.
        decision: whether it is run again.
        why: the reason, in a sentence.
    """

    start: int
    stop: int
    name: str
    state: int
    tape: int
    seconds: float
    again: float
    stored: int
    form: str
    is_whole: bool
    decision: Decision
    why: str


def rows(plan: Plan, tally: Tally) -> tuple[StepRow, ...]:
    """The table of a plan that was played."""
    return tuple(_row(plan, tally, start, stop) for start, stop in _ranges(plan.chain, tally))


def _ranges(chain: Chain, tally: Tally) -> list[tuple[int, int]]:
    length = len(chain)
    if length <= MOST_RANGES or (length <= MOST_NAMED and (chain.names or not chain.is_equal)):
        return [(k, k + 1) for k in range(length)]
    if tally.stretches and chain.is_equal:
        return list(tally.stretches)
    return list(pairwise(r * length // MOST_RANGES for r in range(MOST_RANGES + 1)))


def _row(plan: Plan, tally: Tally, start: int, stop: int) -> StepRow:
    chain = plan.chain
    steps = 1 if chain.is_equal else stop - start  # if all steps are equal, one stands for the others
    times = (stop - start) // steps
    forms = [int(tally.forms[k]) for k in range(start, start + steps)]
    entries = [chain[k].menu[form] for k, form in zip(range(start, start + steps), forms, strict=True)]
    tape = times * sum(entry.tape for entry in entries)
    again = float(tally.again[start:stop].mean())
    seconds = chain.forward_seconds(start, stop)
    stored = int(tally.stored[start:stop].sum())
    names = {entry.name or f"option {form}" for entry, form in zip(entries, forms, strict=True)}
    return StepRow(
        start=start,
        stop=stop,
        name=_name(chain, start, stop),
        state=chain[start].state,
        tape=tape,
        seconds=seconds,
        again=again,
        stored=stored,
        form=names.pop() if len(names) == 1 else "several forms",
        is_whole=not any(forms),
        decision=Decision.RERUN if again else Decision.KEEP,
        why=_why(plan, tally, start, stop, tape, again * seconds),
    )


def _name(chain: Chain, start: int, stop: int) -> str:
    if stop - start > 1:
        return f"steps [{start:,}, {stop:,})"
    return chain.names[start].encode(errors="replace").decode() if chain.names else chain.name(start)


def _why(plan: Plan, tally: Tally, start: int, stop: int, tape: int, extra: float) -> str:
    size, whole = format_size(tape), plan.chain.plain_seconds
    if not tally.again[start:stop].any():
        return f"its tape of {size} is kept from the first run on, so nothing of it is run twice"
    share = f" for {extra / whole:.2%} of the plain time" if whole else ""
    freed = f"{size} of tape stay out of memory until the backward is there{share}"
    inside = int(tally.stored[start:stop].sum())
    if inside > 1:
        return f"{freed}; its steps are run again, each from the nearest of its {inside:,} stored states"
    if tally.stored[start]:
        return f"{freed}; it is run again from the state stored at its start"
    below = tally.stored[:start].nonzero()[0]
    origin = plan.chain.name(int(below[-1])) if below.size else plan.chain.name(0)
    return f"{freed}; it is run again from the state stored before {origin}"
