"""Everything that a report shows of a plan, in whatever form: the plan, other budgets, the usual tools, the receipt."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from lowtide.checks import whole_number
from lowtide.errors import InputError
from lowtide.plan import Plan, Receipt
from lowtide.planners.block_words import fixed_parts
from lowtide.planners.blocks import Blocks, least_peak, to_ask
from lowtide.planners.choose import has_rooms, least_budget
from lowtide.planners.frontier import frontier
from lowtide.report.peers import Mark, block_peers, peers
from lowtide.report.playing import played
from lowtide.report.rows import Row, rows
from lowtide.report.timeline import Timeline
from lowtide.report.words import budget_of, limit_name, size_at_least
from lowtide.sizes import format_size

# A plan of more runs has its point on the frontier, but nobody waits for its picture unless it is the plan itself.
MOST_RUNS_DRAWN = 4_000_000

OTHER_CODE = (
    "That is above the budget though less was predicted: a recording counts every tensor that is made inside it, a "
    "loss's and other code's too. Record the checkpointed call and its backward alone to compare."
)
OTHER_CODE_OF_MODEL = (
    "That is above the peak asked for though less was predicted: a recording counts every tensor that is made inside "
    "it. Record one training step alone, with the inputs it was planned for, to compare."
)

Progress = Callable[[int, int], object]


class HasReceipt(Protocol):
    """A recording that is still open, say."""

    @property
    def receipt(self) -> Receipt:
        """What it cost so far."""


@dataclass(frozen=True, slots=True)
class View:
    """One plan, played."""

    plan: Plan
    timeline: Timeline
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Story:
    """A plan and what belongs beside it.

    Attributes:
        views: the plan among plans for other budgets, the smallest first.
        chosen: which of the views is the plan.
        least: the least budget that works, for a model the least peak predicted; 0 where no other was planned.
        frontier: every budget that was planned, those that are not drawn among them, as points.
        peers: the plain run, and what the usual tools would do.
        measured: what was measured.
    """

    plan: Plan
    receipt: Receipt | None
    views: tuple[View, ...]
    chosen: int
    least: int
    frontier: tuple[Mark, ...]
    peers: tuple[Mark, ...]
    measured: tuple[Mark, ...]

    @property
    def view(self) -> View:
        """The plan itself, played."""
        return self.views[self.chosen]

    @property
    def fits(self) -> bool:
        """Whether the predicted peak keeps the budget; `measuring` says how the measured one is to be read."""
        budget = budget_of(self.plan)
        return budget is None or self.plan.bill.peak_memory <= budget

    @property
    def verdict(self) -> str:
        """That, in a sentence with numbers."""
        budget, measured = budget_of(self.plan), measured_peak(self.plan, self.receipt)
        peak = f"a predicted peak of {format_size(self.plan.bill.peak_memory)}"
        if measured is not None and not self.is_measured_above:
            peak += f" and a measured one of {format_size(measured)}"
        limit = limit_name(self.plan)
        if budget is None:
            return f"Takes {peak}; no {limit} was named."
        kept = "Fits" if self.fits else "Does not fit"
        given = f"a budget of {format_size(budget)}" if limit == "budget" else f"{format_size(budget)} asked for"
        return f"{kept}: {peak}, with {given}."

    @property
    def measuring(self) -> str:
        """How the measured peak is to be read; empty if there is none."""
        measured = measured_peak(self.plan, self.receipt)
        if self.receipt is None or measured is None:
            return ""
        if isinstance(self.plan.schedule, Blocks):
            told = _measured_model(self.plan, self.receipt, measured)
            return f"{told} {OTHER_CODE_OF_MODEL}" if self.is_measured_above else told
        told = f"Measured: {format_size(self.receipt.peak_memory)} at most"
        if self.receipt.held:
            told += f", {format_size(self.receipt.held)} of it results and gradients, which no budget counts"
        return f"{told}. {OTHER_CODE}" if self.is_measured_above else f"{told}."

    @property
    def curve(self) -> tuple[int, ...]:
        """The measured bytes over time, counted as the budget or the peak counts them; empty if they were not followed.

        A model's gradients are not among them: the receipt leaves them out.
        """
        return () if self.receipt is None else tuple(size + held_before(self.plan) for size in self.receipt.curve)

    @property
    def is_measured_above(self) -> bool:
        """Whether the measured peak is above a budget that the predicted one keeps."""
        measured, budget = measured_peak(self.plan, self.receipt), budget_of(self.plan)
        return budget is not None and measured is not None and measured > budget >= self.plan.bill.peak_memory


def measured_peak(plan: Plan, receipt: Receipt | None) -> int | None:
    """Bytes at the worst moment, counted as the plan's budget or peak counts them; None if they were not measured.

    A budget leaves out what the plain run holds too. The peak of a model counts everything, and a recording counts what
    was made inside it, which is all but what was there before the step.
    """
    if receipt is None or not receipt.peak_memory:
        return None
    if isinstance(plan.schedule, Blocks):
        return held_before(plan) + receipt.peak_memory
    return max(0, receipt.peak_memory - receipt.held)


def held_before(plan: Plan) -> int:
    """Bytes that the peak counts and that are there before the run; for a budget there are none."""
    schedule = plan.schedule
    return sum(size for _, size in fixed_parts(plan.chain, schedule)) if isinstance(schedule, Blocks) else 0


def _measured_model(plan: Plan, receipt: Receipt, measured: int) -> str:
    share, made = measured / plan.bill.peak_memory - 1, format_size(receipt.peak_memory)
    against = f"{abs(share):.1%} {'more' if share > 0 else 'less'} than predicted"
    if abs(share) < 0.0005:
        against = "as predicted"
    return (
        f"Measured: {format_size(measured)} at the worst moment, {against}; {made} of it made in the step, beside "
        f"{format_size(held_before(plan))} of parameters, optimizer state, inputs and buffers."
    )


def tell(
    plan: Plan,
    receipt: Receipt | HasReceipt | None = None,
    *,
    measured: Iterable[Mark] = (),
    points: int = 32,
    progress: Progress | None = None,
) -> Story:
    """Plan the chain for other budgets too, and play every plan on paper.

    Args:
        plan: what the story is about.
        receipt: what a run of it did cost.
        measured: more measured points, for the frontier.
        points: how many other budgets, besides the peaks of the usual tools; 0 for the plan alone, which is quick. A
            whole model has all choices of its frontier, or none.
        progress: called with how many plans are done and of how many, each time one is.
    """
    if not isinstance(plan, Plan):
        raise InputError(f"plan={plan!r} is a {type(plan).__name__}; give a Plan, such as plan_scan returns")
    if receipt is not None and not isinstance(receipt, Receipt) and not hasattr(receipt, "receipt"):
        raise InputError(f"receipt={receipt!r} is a {type(receipt).__name__}; give a Receipt, or what record() gave")
    taken = receipt if isinstance(receipt, Receipt) or receipt is None else receipt.receipt
    whole_number(points, "points", least=0)
    if isinstance(plan.schedule, Blocks):
        return _tell_model(plan, plan.schedule, taken, tuple(measured), alone=points == 0)
    chain, rooms = plan.chain, has_rooms(plan)
    tools = peers(chain) if points else ()
    at_their_peaks = {tool.peak for tool in tools}  # so that each is seen beside the plan for the same memory
    others = frontier(chain, max(points, 2), plan.schedule.disk, rooms=rooms, also=at_their_peaks) if points else ()
    total, views, marks = points + len(at_their_peaks) + 1, [_view(plan)], [_mark(plan)]
    for done, other in enumerate(others, start=1):
        if progress is not None:
            progress(done, total)
        if other.knob == plan.knob:
            continue
        marks.append(_mark(other))
        if other.bill.plain_runs + other.bill.taping_runs <= MOST_RUNS_DRAWN:
            views.append(_view(other))
    if progress is not None:
        progress(total, total)
    views.sort(key=lambda view: budget_of(view.plan) or view.plan.bill.peak_memory)
    marks.sort(key=lambda mark: (mark.peak, -mark.time_factor))
    return Story(
        plan=plan,
        receipt=taken,
        views=tuple(views),
        chosen=next(k for k, view in enumerate(views) if view.plan is plan),
        least=least_budget(chain, plan.schedule.disk, rooms=rooms) if points else 0,
        frontier=tuple(marks),
        peers=tools,
        measured=(*_measured(plan, taken), *measured),
    )


def _tell_model(
    plan: Plan, schedule: Blocks, receipt: Receipt | None, measured: tuple[Mark, ...], *, alone: bool
) -> Story:
    """Its frontier is in the plan, so nothing is planned; pages make its other views from the menus."""
    chain, plain = plan.chain, plan.chain.plain_seconds
    marks = [_mark(plan)]
    for point in () if alone else plan.frontier:
        factor = (plain + point.extra) / plain if plain else 1.0
        if point.options != schedule.options:
            marks.append(Mark(f"peak={size_at_least(to_ask(plan, point.peak))}", point.peak, factor))
    marks.sort(key=lambda mark: (mark.peak, -mark.time_factor))
    return Story(
        plan=plan,
        receipt=receipt,
        views=(View(plan, played(plan), ()),),
        chosen=0,
        least=0 if alone else least_peak(chain),
        frontier=tuple(marks),
        peers=() if alone else block_peers(chain),
        measured=(*_measured(plan, receipt), *measured),
    )


def _view(plan: Plan) -> View:
    timeline = played(plan)
    return View(plan, timeline, rows(plan, timeline.tally))


def _mark(plan: Plan) -> Mark:
    return Mark(str(plan.knob), plan.bill.peak_memory, plan.time_factor)


def _measured(plan: Plan, receipt: Receipt | None) -> list[Mark]:
    """The receipt as a point: bytes as measured, time from the runs that were counted, at the chain's costs."""
    peak = measured_peak(plan, receipt)
    if receipt is None or peak is None:
        return []
    chain = plan.chain
    times, rest = divmod(receipt.backward_runs, len(chain))  # a recording may hold many rounds of training
    forward, whole = chain.forward_seconds(0, len(chain)), chain.plain_seconds
    if not (times and whole) or rest or isinstance(plan.schedule, Blocks):
        return [Mark("measured", peak, plan.time_factor, "bytes alone; drawn at the predicted time", is_timed=False)]
    runs = (receipt.plain_runs + receipt.taping_runs + receipt.probe_runs) / times
    factor = (runs / len(chain) * forward + whole - forward) / whole
    return [Mark("measured", peak, factor, "bytes and runs as measured, times of a run as predicted")]
