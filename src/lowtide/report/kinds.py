"""What differs in a report between the plan of a loop or of layers and the plan of a whole model.

A budget limits what a call takes beyond what the plain call holds too; a model's peak limits everything that a training
step holds. So words, sections, parts of memory, alternatives and the code to paste differ. Each kind of plan has all of
them as attributes and methods. Only `kind_of` decides which kind a plan is; all code that shows a plan asks its kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar, NamedTuple

from lowtide.chain import Chain, Disk, Role
from lowtide.checks import whole_number
from lowtide.plan import Plan, Receipt
from lowtide.planners.block_text import (
    SECONDS,
    BlockRow,
    fixed_parts,
    format_time,
    kinds,
    levels,
    plain_of,
    rows,
    title,
    where,
)
from lowtide.planners.blocks import Blocks, for_peak, least_peak, to_ask
from lowtide.planners.choose import least_budget
from lowtide.planners.frontier import frontier
from lowtide.report.moments import Activity, MemoryPart, Moment
from lowtide.report.snippets import (
    Snippet,
    as_argument,
    layer_snippets,
    loop_snippets,
    model_file_snippet,
    model_snippets,
)
from lowtide.report.usual_tools import Mark, block_peers, peers
from lowtide.report.wording import figure_of, share_of, size_at_least
from lowtide.sizes import format_size

Progress = Callable[[int, int], object]  # called with the number of finished plans and their total


def no_progress(done: int, total: int) -> None:
    """The callback that is used if no other was given: it does nothing."""


class Section(Enum):
    """A section of a report with little room, such as one in a terminal."""

    FRONTIER = auto()
    SCHEDULE = auto()
    MEMORY = auto()
    STEPS = auto()  # a table of layers, or of ranges of steps
    BLOCKS = auto()  # a table of a model's blocks
    CODE = auto()


class Alternative(NamedTuple):
    """An alternative to the plan: a point on the frontier, and its plan if one was made."""

    mark: Mark
    plan: Plan | None


@dataclass(frozen=True, slots=True)
class PlanKind(ABC):
    """A plan, and what a report needs to know about its kind.

    Attributes:
        sections: the sections of a report with little room, in order.
        limit_name: what the user limits: the "budget", or the "peak".
        limit_label: the label of that limit's line in pictures.
        memory_parts: the parts that memory over time is stacked from, the lowest first.
        frontier_titles: the columns of the frontier in a report; the fourth is what `effort` returns.
        summary_titles: the columns of the row that `summary` returns.
        not_in_curve: what the limit counts and a receipt's bytes over time do not, as the end of a phrase.
        measured_above: why a measured peak may be above the limit although less was predicted.
        counts_runs: whether a receipt counts the runs of the chain's steps, from which a run's time follows.
        plan: the plan itself.
    """

    sections: ClassVar[tuple[Section, ...]]
    limit_name: ClassVar[str]
    limit_label: ClassVar[str]
    memory_parts: ClassVar[tuple[MemoryPart, ...]]
    frontier_titles: ClassVar[tuple[str, ...]]
    summary_titles: ClassVar[tuple[str, ...]]
    not_in_curve: ClassVar[str]
    measured_above: ClassVar[str]
    counts_runs: ClassVar[bool]

    plan: Plan

    @property
    def chain(self) -> Chain:
        """The chain that was planned."""
        return self.plan.chain

    # Words

    @property
    @abstractmethod
    def title(self) -> str:
        """What was planned, in a few words."""

    @property
    @abstractmethod
    def plain_name(self) -> str:
        """The run whose time the plan's time is a multiple of, in the possessive."""

    @property
    def frontier_heading(self) -> str:
        """The heading above the frontier."""
        return f"What each {self.limit_name} buys"

    @abstractmethod
    def limit_told(self, size: int) -> str:
        """The limit, in a sentence."""

    @abstractmethod
    def lines(self) -> Iterator[tuple[str, str]]:
        """The plan as (label, text) pairs."""

    @property
    def unit(self) -> str:
        """The unit of the chain's times."""
        return SECONDS

    def time(self, time: float) -> str:
        """A time of the chain, with its unit."""
        return format_time(time, self.unit)

    # Memory

    @property
    @abstractmethod
    def whole(self) -> int:
        """The bytes without a plan, which the plan's bytes are shown as a share of."""

    @property
    @abstractmethod
    def besides(self) -> tuple[int, int]:
        """The bytes of parameters and of gradients that the limit does not count."""

    @property
    @abstractmethod
    def held_before(self) -> int:
        """The bytes that the limit counts and that are held before the run begins."""

    @abstractmethod
    def parts_of(self, moment: Moment) -> tuple[int, ...]:
        """The bytes of a moment, in the order of `memory_parts`."""

    @abstractmethod
    def told(self, activity: Activity, start: int, stop: int) -> str:
        """What is being done with the steps [start, stop), in words."""

    # A run beside its plan

    @abstractmethod
    def measured_peak(self, receipt: Receipt) -> int:
        """The peak of a run in bytes, counted as the limit counts them."""

    @abstractmethod
    def measuring(self, receipt: Receipt, measured: int) -> str:
        """How to read that measured peak, in a sentence."""

    # Other choices

    @abstractmethod
    def least(self) -> int:
        """The least limit that works."""

    @abstractmethod
    def usual_tools(self) -> tuple[Mark, ...]:
        """The plain run, and what people do without a planner, as points beside the frontier."""

    @abstractmethod
    def alternatives(self, points: int, also: Collection[int], progress: Progress) -> Iterator[Alternative]:
        """Alternatives for about `points` limits and for those in `also`; none if `points` is 0."""

    @abstractmethod
    def plans(self, points: int, disk: Disk | None = None) -> Iterator[Plan]:
        """Plans for at most `points` limits (at least 2), the smallest first, from the least that works on."""

    @property
    def mark(self) -> Mark:
        """The plan as a point on the frontier."""
        return Mark(str(self.plan.knob), self.plan.bill.peak_memory, self.plan.time_factor)

    @abstractmethod
    def effort(self, time_factor: float, runs: float | None) -> str:
        """The cost of a choice besides its `time_factor`, as text; `runs` are the runs of a step, if they are known."""

    @abstractmethod
    def summary(self) -> tuple[str, ...]:
        """The plan as a row of a table with `summary_titles`."""

    # The table of blocks, and the code to paste

    def block_rows(self) -> Sequence[BlockRow]:
        """What the plan does with each block of a model; empty if there are no blocks."""
        return ()

    @abstractmethod
    def snippets(self) -> tuple[Snippet, ...]:
        """The code to paste: one snippet for each front end, the likely one first, and one that reads a file."""


@dataclass(frozen=True, slots=True)
class ChainKind(PlanKind):
    """The plan of a loop or of layers: a chain of steps within a budget."""

    sections = (Section.FRONTIER, Section.SCHEDULE, Section.MEMORY, Section.STEPS, Section.CODE)
    limit_name = "budget"
    limit_label = "budget"
    memory_parts = (MemoryPart.SNAPSHOTS, MemoryPart.TAPE, MemoryPart.COTANGENT, MemoryPart.WORKING)
    frontier_titles = ("knob", "peak", "of plain", "runs/step", "time")
    summary_titles = ("budget", "peak", "of plain", "snapshots", "runs/step", "time")
    not_in_curve = ""
    measured_above = (
        "That is above the budget though less was predicted: a recording counts every tensor that is made inside "
        "it, a loss's and other code's too. Record the checkpointed call and its backward alone to compare."
    )
    counts_runs = True

    @property
    def title(self) -> str:
        """What was planned, in a few words."""
        return str(self.chain)

    @property
    def plain_name(self) -> str:
        """The run whose time the plan's time is a multiple of, in the possessive."""
        return "plain loop's"

    def limit_told(self, size: int) -> str:
        """The limit, in a sentence."""
        return f"a budget of {format_size(size)}"

    def lines(self) -> Iterator[tuple[str, str]]:
        """The plan's own lines, and one for parameters and gradients, which are held besides."""
        yield from self.plan.lines()
        parameters, gradients = self.besides
        if parameters or gradients:
            held = f"parameters {format_size(parameters)}, gradients {format_size(gradients)}"
            yield "besides", f"{held}: held with or without a plan, in no budget"

    @property
    def whole(self) -> int:
        """The bytes of all tapes."""
        return self.chain.plain_tape

    @property
    def besides(self) -> tuple[int, int]:
        """The bytes of parameters and of gradients: no budget counts them."""
        return self.chain.parameters, self.chain.gradients

    @property
    def held_before(self) -> int:
        """0: a budget counts only what the call makes."""
        return 0

    def parts_of(self, moment: Moment) -> tuple[int, ...]:
        """The bytes of a moment, in the order of `memory_parts`."""
        return moment.parts

    def told(self, activity: Activity, start: int, stop: int) -> str:
        """What is being done with the steps [start, stop), in words."""
        if activity is Activity.STORING:
            return f"{activity} state {start:,}"
        if stop - start == 1:
            return f"{activity} {self.chain.name(start)}"
        return f"{activity} steps [{start:,}, {stop:,})"

    def measured_peak(self, receipt: Receipt) -> int:
        """The peak of a run in bytes, without what the plain run holds too."""
        return max(0, receipt.peak_memory - receipt.held)

    def measuring(self, receipt: Receipt, measured: int) -> str:
        """How to read the measured peak, in a sentence."""
        told = f"Measured: {format_size(receipt.peak_memory)} at most"
        if receipt.held:
            told += f", {format_size(receipt.held)} of it results and gradients, which no budget counts"
        return f"{told}."

    def least(self) -> int:
        """The least budget that works."""
        return least_budget(self.chain, self.plan.schedule.disk, rooms=self.plan.rooms)

    def usual_tools(self) -> tuple[Mark, ...]:
        """The plain run, and what people do without a planner, as points beside the frontier."""
        return peers(self.chain)

    def alternatives(self, points: int, also: Collection[int], progress: Progress) -> Iterator[Alternative]:
        """The same chain planned for other budgets; planning takes a while, so progress is reported."""
        plan, total = self.plan, points + len(also) + 1
        others = frontier(plan.chain, max(points, 2), plan.schedule.disk, rooms=plan.rooms, also=also) if points else ()
        for done, other in enumerate(others, start=1):
            progress(done, total)
            if other.knob != plan.knob:
                yield Alternative(ChainKind(other).mark, other)
        progress(total, total)

    def plans(self, points: int, disk: Disk | None = None) -> Iterator[Plan]:
        """Plans for at most `points` budgets, with the plan's own disk if no other is given."""
        used = self.plan.schedule.disk if disk is None else disk
        return frontier(self.chain, points, used, rooms=self.plan.rooms)

    def effort(self, time_factor: float, runs: float | None) -> str:
        """The forward runs of a step."""
        return "" if runs is None else figure_of(runs)

    def summary(self) -> tuple[str, ...]:
        """The plan as a row of a table with `summary_titles`."""
        plan, bill = self.plan, self.plan.bill
        return (
            format_size(plan.knob.value or 0),
            format_size(bill.peak_memory),
            f"{bill.peak_memory / self.whole:.2%}",
            f"{bill.peak_snapshots:,}",
            f"{plan.runs_per_step:.4g}",
            f"{plan.time_factor:.3f}x",
        )

    def snippets(self) -> tuple[Snippet, ...]:
        """The code for layers if the steps are unequal, else for a loop; only compiled JAX programs have rooms."""
        knob = self.plan.knob
        return loop_snippets(knob, jax_first=self.plan.rooms) if self.chain.is_equal else layer_snippets(knob)


@dataclass(frozen=True, slots=True)
class ModelKind(PlanKind):
    """The plan of a whole model: its blocks, in a training step within a peak."""

    # No schedule: all of a model's blocks run forward, then all of them backward.
    sections = (Section.FRONTIER, Section.MEMORY, Section.BLOCKS, Section.CODE)
    limit_name = "peak"
    limit_label = "asked for"
    memory_parts = (
        MemoryPart.PARAMETERS,
        MemoryPart.OPTIMIZER,
        MemoryPart.INPUTS,
        MemoryPart.TAPES,
        MemoryPart.REST,
    )
    frontier_titles = ("ask for", "peak", "of kept", "extra", "time")
    summary_titles = ("ask for", "peak", "of all kept", "extra", "time", "blocks")
    not_in_curve = " without results and gradients"
    measured_above = (
        "That is above the peak asked for though less was predicted: a recording counts every tensor that is made "
        "inside it. Record one training step alone, with the inputs it was planned for, to compare."
    )
    counts_runs = False

    schedule: Blocks

    @property
    def title(self) -> str:
        """The model in a few words."""
        return title(self.chain)

    @property
    def plain_name(self) -> str:
        """The run whose time the plan's time is a multiple of, in the possessive."""
        return plain_of(self.chain)

    @property
    def frontier_heading(self) -> str:
        """The heading above the frontier, which also says what its times are relative to."""
        return f"What each {self.limit_name} buys; time over the {self.plain_name}"

    def limit_told(self, size: int) -> str:
        """The limit, in a sentence."""
        return f"{format_size(size)} asked for"

    def lines(self) -> Iterator[tuple[str, str]]:
        """The plan's own lines."""
        return self.plan.lines()

    @property
    def unit(self) -> str:
        """The unit of the chain's times: seconds, or what was counted instead."""
        return self.schedule.unit

    @property
    def whole(self) -> int:
        """The peak in bytes if all blocks are kept."""
        return max(levels(self.chain, (0,) * len(self.chain)))

    @property
    def besides(self) -> tuple[int, int]:
        """0 and 0: the peak counts everything."""
        return 0, 0

    @property
    def fixed(self) -> tuple[tuple[str, int], ...]:
        """The parts of memory that are held from the beginning of a step to its end, each with its bytes."""
        return fixed_parts(self.chain, self.schedule)

    @property
    def held_before(self) -> int:
        """The bytes that are held from the beginning of a step to its end."""
        return sum(size for _, size in self.fixed)

    def parts_of(self, moment: Moment) -> tuple[int, ...]:
        """The bytes of a moment, in the order of `memory_parts`."""
        chain, blocks = self.chain, set(self.chain.blocks())
        # Steps outside blocks have a tape of a byte or so, because every step of a chain has a tape; it is not shown.
        tapes = max(0, moment.tape - sum(chain[k].tape for k in range(len(chain)) if k not in blocks))
        # The fixed parts are held during every step, although the costs of a step need not include them.
        left = max(moment.total - tapes, min(self.held_before, self.plan.bill.peak_memory - tapes))
        found = []
        for _, size in self.fixed:
            found.append(min(size, left))
            left -= found[-1]
        return *found, tapes, left

    def told(self, activity: Activity, start: int, stop: int) -> str:
        """A moment of a training step, in words. Of equal blocks that are played together, the first is named."""
        if self.chain.role(start) is not Role.BLOCK:
            return where(self.chain, start)
        return f"in the {'forward' if activity is Activity.TAPING else 'backward'} of {self.chain.name(start)}"

    def measured_peak(self, receipt: Receipt) -> int:
        """The peak of a step in bytes: the recorded peak, and what was held before, which a recording leaves out."""
        return self.held_before + receipt.peak_memory

    def measuring(self, receipt: Receipt, measured: int) -> str:
        """How to read the measured peak, in a sentence."""
        share, made = measured / self.plan.bill.peak_memory - 1, format_size(receipt.peak_memory)
        against = f"{abs(share):.1%} {'more' if share > 0 else 'less'} than predicted"
        if abs(share) < 0.0005:  # it would be written as 0.0%
            against = "as predicted"
        return (
            f"Measured: {format_size(measured)} at the worst moment, {against}; {made} of it made in the step, beside "
            f"{format_size(self.held_before)} of parameters, optimizer state, inputs and buffers."
        )

    def least(self) -> int:
        """The smallest peak of any choice."""
        return least_peak(self.chain)

    def usual_tools(self) -> tuple[Mark, ...]:
        """All blocks kept, and every block run again."""
        return block_peers(self.chain)

    def alternatives(self, points: int, also: Collection[int], progress: Progress) -> Iterator[Alternative]:
        """All choices of the frontier, however many; the plan has them already, so there is no progress to report."""
        plain = self.chain.plain_seconds
        for point in self.plan.frontier if points else ():
            if point.options != self.schedule.options:
                name = f"{self.limit_name}={size_at_least(to_ask(self.plan, point.peak))}"
                factor = (plain + point.extra) / plain if plain else 1.0
                yield Alternative(Mark(name, point.peak, factor), None)

    def plans(self, points: int, disk: Disk | None = None) -> Iterator[Plan]:
        """Plans for at most `points` peaks, spread over all choices of the frontier; a model's tapes stay in memory."""
        whole_number(points, "points", least=2)
        last = len(self.plan.frontier) - 1
        places = sorted({round(k * last / (points - 1)) for k in range(points)}, reverse=True)
        return (for_peak(self.plan, to_ask(self.plan, self.plan.frontier[place].peak)) for place in places)

    def effort(self, time_factor: float, runs: float | None) -> str:
        """The time beyond that of keeping all blocks."""
        return self.time(self.chain.plain_seconds * (time_factor - 1))

    def summary(self) -> tuple[str, ...]:
        """The plan as a row of a table with `summary_titles`."""
        plan, peak = self.plan, self.plan.bill.peak_memory
        return (
            size_at_least(plan.knob.value or 0),
            format_size(peak),
            share_of(peak, self.whole),
            self.time(plan.bill.seconds - self.chain.plain_seconds),
            f"{plan.time_factor:.3f}x",
            kinds(row.kind for row in self.block_rows()),
        )

    def block_rows(self) -> Sequence[BlockRow]:
        """What the plan does with each block."""
        return rows(self.chain, self.schedule)

    @property
    def is_likely_jax(self) -> bool:
        """Whether JAX's front end made the plan: it counts operations, where torch's measures seconds."""
        return not self.schedule.is_timed

    def snippets(self) -> tuple[Snippet, ...]:
        """The code to paste, with the plan's own peak, and one snippet that reads a file."""
        return *self.snippets_with(as_argument(self.plan.knob)), model_file_snippet(is_jax=self.is_likely_jax)

    def snippets_with(self, peak: str) -> tuple[Snippet, Snippet]:
        """The code to paste; `peak` is the code of the argument for the peak."""
        return model_snippets(peak, has_optimizer=bool(self.schedule.optimizer), jax_first=self.is_likely_jax)


def kind_of(plan: Plan) -> PlanKind:
    """The kind of the plan."""
    return ModelKind(plan, plan.schedule) if isinstance(plan.schedule, Blocks) else ChainKind(plan)
