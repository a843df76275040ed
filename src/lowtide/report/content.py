"""Everything that a report shows of a plan, in any medium: the plan, other choices, the usual tools, the receipt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from lowtide.checks import whole_number
from lowtide.errors import InputError
from lowtide.plan import Plan, Receipt
from lowtide.report.decisions import StepRow, rows
from lowtide.report.kinds import PlanKind, Progress, Section, kind_of, no_progress
from lowtide.report.timeline import Timeline, played
from lowtide.report.usual_tools import Mark
from lowtide.report.wording import budget_of
from lowtide.sizes import format_size

# An alternative with more forward runs takes long to play, so it has a point on the frontier but no picture.
MOST_RUNS_DRAWN = 4_000_000


class HasReceipt(Protocol):
    """An object with a receipt, such as a recording, which may still be open."""

    @property
    def receipt(self) -> Receipt:
        """The measured cost so far."""


@dataclass(frozen=True, slots=True)
class View:
    """A plan and its timeline; `rows` is empty for a whole model, whose blocks have a table of their own."""

    plan: Plan
    timeline: Timeline
    rows: tuple[StepRow, ...]


@dataclass(frozen=True, slots=True)
class Story:
    """A plan and everything that a report shows beside it.

    Attributes:
        plan: the plan that the report is about.
        receipt: the measured cost of a run of it, if there is one.
        views: the plan among plans for other budgets, the smallest budget first.
        chosen: the index of the plan's own view.
        least: the least budget that works, or for a model the least predicted peak; 0 if no other budget was planned.
        frontier: every budget that was planned, as a point, including those that are not drawn.
        peers: the plain run, and what the usual tools would do, as points.
        measured: measurements, as points.
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
        """The view of the plan itself."""
        return self.views[self.chosen]

    @property
    def kind(self) -> PlanKind:
        """The kind of the plan."""
        return kind_of(self.plan)

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is within the budget; `measuring` is about the measured one."""
        budget = budget_of(self.plan)
        return budget is None or self.plan.bill.peak_memory <= budget

    @property
    def verdict(self) -> str:
        """Whether the plan fits, in a sentence with numbers."""
        budget, measured = budget_of(self.plan), measured_peak(self.plan, self.receipt)
        peak = f"a predicted peak of {format_size(self.plan.bill.peak_memory)}"
        if measured is not None and not self.is_measured_above:
            peak += f" and a measured one of {format_size(measured)}"
        if budget is None:
            return f"Takes {peak}; no {self.kind.limit_name} was named."
        return f"{'Fits' if self.fits else 'Does not fit'}: {peak}, with {self.kind.limit_told(budget)}."

    @property
    def measuring(self) -> str:
        """How to read the measured peak, in a sentence or two; empty if there is none."""
        measured = measured_peak(self.plan, self.receipt)
        if self.receipt is None or measured is None:
            return ""
        told = self.kind.measuring(self.receipt, measured)
        return f"{told} {self.kind.measured_above}" if self.is_measured_above else told

    @property
    def curve(self) -> tuple[int, ...]:
        """The measured bytes over time, counted as the budget or the peak counts them; empty if they were not recorded.

        A model's gradients are not included: the receipt does not count them.
        """
        return () if self.receipt is None else tuple(size + self.kind.held_before for size in self.receipt.curve)

    @property
    def is_measured_above(self) -> bool:
        """Whether the measured peak is above a budget that the predicted one is within."""
        measured, budget = measured_peak(self.plan, self.receipt), budget_of(self.plan)
        return budget is not None and measured is not None and measured > budget >= self.plan.bill.peak_memory


def measured_peak(plan: Plan, receipt: Receipt | None) -> int | None:
    """The measured peak in bytes, counted as the plan's budget or peak counts them; None if it was not measured."""
    return None if receipt is None or not receipt.peak_memory else kind_of(plan).measured_peak(receipt)


def tell(
    plan: Plan,
    receipt: Receipt | HasReceipt | None = None,
    *,
    measured: Iterable[Mark] = (),
    points: int = 32,
    progress: Progress | None = None,
) -> Story:
    """The story of a plan: plans the chain for other budgets too, and plays every plan on paper.

    Args:
        plan: the plan that the story is about.
        receipt: the measured cost of a run of it.
        measured: more measured points, for the frontier.
        points: how many other budgets to plan for, besides the peaks of the usual tools; 0 for the plan alone, which is
            quick. For a whole model, any number but 0 means all choices of its frontier.
        progress: called with the number of finished plans and their total, each time one is finished.
    """
    if not isinstance(plan, Plan):
        raise InputError(f"plan={plan!r} is a {type(plan).__name__}; give a Plan, such as plan_scan returns")
    if receipt is not None and not isinstance(receipt, Receipt) and not hasattr(receipt, "receipt"):
        raise InputError(f"receipt={receipt!r} is a {type(receipt).__name__}; give a Receipt, or what record() gave")
    taken = receipt if isinstance(receipt, Receipt) or receipt is None else receipt.receipt
    whole_number(points, "points", least=0)
    return _story(plan, taken, tuple(measured), points, progress or no_progress)


def _story(plan: Plan, receipt: Receipt | None, measured: tuple[Mark, ...], points: int, progress: Progress) -> Story:
    """The story, with those alternatives played that have a plan of their own."""
    kind = kind_of(plan)
    tools = kind.usual_tools() if points else ()
    views, marks = [_view(plan)], [kind.mark]
    # Alternatives at the tools' own peaks too, so that each tool can be compared with the plan for the same memory.
    for mark, other in kind.alternatives(points, {tool.peak for tool in tools}, progress):
        marks.append(mark)
        if other is not None and other.bill.plain_runs + other.bill.taping_runs <= MOST_RUNS_DRAWN:
            views.append(_view(other))
    views.sort(key=lambda view: budget_of(view.plan) or view.plan.bill.peak_memory)
    marks.sort(key=lambda mark: (mark.peak, -mark.time_factor))
    return Story(
        plan=plan,
        receipt=receipt,
        views=tuple(views),
        chosen=next(k for k, view in enumerate(views) if view.plan is plan),
        least=kind.least() if points else 0,
        frontier=tuple(marks),
        peers=tools,
        measured=(*_measured(plan, receipt), *measured),
    )


def _view(plan: Plan) -> View:
    timeline = played(plan)
    return View(plan, timeline, rows(plan, timeline.tally) if Section.STEPS in kind_of(plan).sections else ())


def _measured(plan: Plan, receipt: Receipt | None) -> list[Mark]:
    """The receipt as a point: measured bytes, and the time of the counted runs by the chain's costs."""
    peak = measured_peak(plan, receipt)
    if receipt is None or peak is None:
        return []
    chain = plan.chain
    times, rest = divmod(receipt.backward_runs, len(chain))  # a recording may hold many rounds of training
    forward, whole = chain.forward_seconds(0, len(chain)), chain.plain_seconds
    if not (times and whole and kind_of(plan).counts_runs) or rest:
        return [Mark("measured", peak, plan.time_factor, "bytes alone; drawn at the predicted time", is_timed=False)]
    runs = (receipt.plain_runs + receipt.taping_runs + receipt.probe_runs) / times
    factor = (runs / len(chain) * forward + whole - forward) / whole
    return [Mark("measured", peak, factor, "bytes and runs as measured, times of a run as predicted")]
