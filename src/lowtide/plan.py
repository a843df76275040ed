"""A plan is a value: a chain, the option it was made for, the schedule that a planner chose, and its bill.

`plan.actions()` is a lazy iterator, so a plan over a million steps is a few hundred bytes. Its JSON stores the
planner's name and parameters, from which the actions follow. A schedule is anything that can list its actions and its
bill for a chain; planners register theirs here by name, so this module imports no planner.

A `Bill` is the predicted cost of a plan, a `Receipt` the measured cost of a run.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Protocol, Self, TypeVar, cast

from lowtide.actions import Action, Advance, Save, Tape
from lowtide.chain import Chain, Disk
from lowtide.chain_json import chain_document, chain_of
from lowtide.checks import MOST_TOTAL, keep_seconds, keep_whole, whole_number
from lowtide.errors import InputError
from lowtide.sizes import format_size

FORMAT = 1  # of the JSON; any other is refused

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Bill:
    """The predicted cost of a plan.

    Attributes:
        plain_runs: step runs that keep no tape.
        taping_runs: step runs that keep their tape; one for each step.
        backward_runs: steps pulled back; one for each step.
        peak_memory: the most bytes of snapshots, tapes and working set at once.
        peak_disk: the most bytes of snapshots on disk at once.
        peak_snapshots: the most snapshots at once, in memory and on disk together.
        seconds: the time of all runs, and of writing to and reading from disk.
    """

    plain_runs: int
    taping_runs: int
    backward_runs: int
    peak_memory: int
    peak_disk: int
    peak_snapshots: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Bound:
    """A proven lower bound: of the plans that `scope` names ("with 10 snapshots"), none has fewer plain `runs`."""

    runs: int
    scope: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """The measured cost of a run.

    Attributes:
        plain_runs: step runs that kept no tape.
        taping_runs: step runs that kept their tape.
        backward_runs: steps pulled back.
        probe_runs: step runs that measured something and were not part of the plan.
        peak_memory: the most bytes of tensors that were made inside and alive at once; 0 if not measured.
        peak_disk: the most bytes of snapshots on disk at once.
        seconds: wall-clock time.
        held: the part of `peak_memory` that no budget counts, because the plain run holds it too: outputs, gradients,
            and whatever was still alive at the end.
        curve: the run's time is divided into `len(curve)` equal parts; for each, the most bytes alive, without those in
            `held`. Empty if the bytes were not followed.
        kept_whole: calls of lean functions that did not go as traced and kept their whole tape.
    """

    plain_runs: int = 0
    taping_runs: int = 0
    backward_runs: int = 0
    probe_runs: int = 0
    peak_memory: int = 0
    peak_disk: int = 0
    seconds: float = 0.0
    held: int = 0
    curve: tuple[int, ...] = ()
    kept_whole: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "curve", tuple(self.curve))
        for field in dataclasses.fields(self):
            if field.name == "seconds":
                keep_seconds(self, field.name)
            elif field.name == "curve":
                for bytes_ in self.curve:
                    whole_number(bytes_, field.name, least=0, most=MOST_TOTAL)
            else:
                keep_whole(self, field.name, least=0, most=MOST_TOTAL)

    def lines(self) -> Iterator[tuple[str, str]]:
        """The receipt as (label, text) pairs. Runs are listed only if any were counted: a whole model's are not."""
        runs = []
        if self.plain_runs or self.taping_runs or self.backward_runs or self.probe_runs:
            runs += [f"{self.plain_runs:,} plain, {self.taping_runs:,} taping, {self.backward_runs:,} backward"]
            runs += [f"{self.probe_runs:,} to measure"]
        if self.kept_whole:
            runs.append(f"{self.kept_whole:,} lean calls kept their whole tape")
        if runs:
            yield "runs", ", ".join(runs)
        held = f" ({format_size(self.held)} of it results and gradients)" if self.held else ""
        yield "peak", f"{format_size(self.peak_memory)} of memory{held}, {format_size(self.peak_disk)} of disk"
        yield "time", f"{self.seconds:,.3g} s"

    def __str__(self) -> str:
        return "\n".join(f"{label:<8}{text}" for label, text in self.lines())

    def _repr_html_(self) -> str:
        """The HTML that notebooks show."""
        return _notebook_html(self)

    def to_json(self) -> str:
        """The receipt as JSON."""
        return json.dumps({"lowtide": FORMAT, "receipt": dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Receipt:
        """The receipt that `to_json` wrote."""
        with _form_of("receipt"):
            return cls(**_document(text, "receipt")["receipt"])


@dataclass(frozen=True, slots=True)
class Knob:
    """The option that the user gave: "budget", "peak", "checkpoints" or "base" with its value, or "none"."""

    name: str
    value: int | None = None

    def __post_init__(self) -> None:
        if self.name not in ("budget", "peak", "checkpoints", "base", "none"):
            raise InputError(f"there is no knob {self.name!r}; it is budget, peak, checkpoints, base or none")
        if self.name != "none":
            keep_whole(self, "value", least=1, most=MOST_TOTAL)

    @property
    def in_bytes(self) -> bool:
        """Whether the option limits memory in bytes, rather than counting snapshots or steps."""
        return self.name in ("budget", "peak")

    def __str__(self) -> str:
        if self.value is None:
            return "none given: the least memory that runs no step more than one extra time"
        return f"{self.name}={format_size(self.value) if self.in_bytes else f'{self.value:,}'}"


@dataclass(frozen=True, slots=True)
class StepDecision:
    """What a plan does with one step: how often it runs without a tape, whether its state is stored, how it is taped.

    `state` and `tape` are bytes; `form` is the text of the menu entry in which the step is taped.
    """

    name: str
    state: int
    tape: int
    plain_runs: int
    stored: bool
    form: str

    def __str__(self) -> str:
        stored = "state stored" if self.stored else "state not stored"
        again = f"run again {self.plain_runs}x" if self.plain_runs else "kept"
        return f"{self.name:<16} {format_size(self.tape):>10}  {again}, {stored}, tape: {self.form}"


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """A peak, in bytes, at which a faster choice becomes possible.

    Attributes:
        peak: the bytes.
        extra: the seconds that the choice takes beyond those of keeping every tape.
        options: the choice: for each step, the entry of its menu.
    """

    peak: int
    extra: float
    options: tuple[int, ...]


class Schedule(Protocol):
    """A planner's answer: a frozen dataclass of parameters from which actions and bill follow."""

    planner: ClassVar[str]

    def actions(self, chain: Chain) -> Iterator[Action]:
        """The actions, made one by one as they are requested."""

    def bill(self, chain: Chain) -> Bill:
        """The cost of the actions; must equal what `simulate` finds by playing them."""

    def bound(self, chain: Chain) -> Bound | None:
        """A proven lower bound on plain runs, if there is one."""

    @property
    def disk(self) -> Disk | None:
        """The disk tier, if the schedule uses one."""

    def frontier(self, chain: Chain) -> tuple[FrontierPoint, ...]:
        """For a whole model: every choice worth making, from the largest peak to the least."""

    def lines(self, plan: Plan) -> Iterator[tuple[str, str]]:
        """The (label, text) pairs of `Plan.lines` for a plan with this schedule."""

    def table(self, plan: Plan) -> Iterator[str]:
        """A line for each step or block that is not like all others."""


class ChainSchedule:
    """The text of plans for loops and layers: the part of `Schedule` that their schedules share."""

    __slots__ = ()
    planner: ClassVar[str]

    def frontier(self, chain: Chain) -> tuple[FrontierPoint, ...]:
        """Refused: only a whole model's blocks have a frontier."""
        raise InputError(
            f"planner {self.planner!r} has no frontier of blocks; "
            "lowtide.frontier(plan.chain) makes a plan for each of many budgets"
        )

    def lines(self, plan: Plan) -> Iterator[tuple[str, str]]:
        """The plan as (label, text) pairs."""
        bill, chain = plan.bill, plan.chain
        yield "chain", str(chain)
        yield "plain", f"{format_size(chain.plain_tape)} of tape without a plan"
        yield "knob", str(plan.knob)
        working = max(step.working_set for step in chain.steps)
        yield "working", f"{format_size(working)} at most besides snapshots and tape"
        peak = f"{format_size(bill.peak_memory)} of memory, {bill.peak_memory / chain.plain_tape:.3%} of plain"
        if plan.knob.name == "budget" and plan.knob.value is not None:
            peak += f", {bill.peak_memory / plan.knob.value:.1%} of the budget"
        yield "peak", peak + (f"; {format_size(bill.peak_disk)} of disk" if bill.peak_disk else "")
        yield "slots", f"{bill.peak_snapshots:,} snapshots at most at once"
        runs = f"{bill.plain_runs:,} plain and {bill.taping_runs:,} taping"
        yield "runs", f"{runs}: {plan.runs_per_step:.4g} forward runs per step"
        yield "time", f"{plan.time_factor:.3f}x the plain loop, predicted"
        yield "planner", plan.planner
        bound = plan.bound
        if bound is not None:
            above = bill.plain_runs - bound.runs
            yield "bound", f"{bound.runs:,} plain runs at least {bound.scope}"
            yield "", f"this plan makes {above:,} more" + (": it is optimal" if above == 0 else "")

    def table(self, plan: Plan) -> Iterator[str]:
        """A line for each step, unless all are equal."""
        return iter(()) if plan.chain.is_equal else map(str, plan.decisions())


# Reports import plans, so plans cannot import reports: the function that makes notebook HTML is handed in.
_notebook_html: Callable[[Plan | Receipt], str] = str


def show_in_notebooks(html: Callable[[Plan | Receipt], str]) -> None:
    """Let notebooks show plans and receipts as the HTML that `html` returns."""
    global _notebook_html
    _notebook_html = html


_SCHEDULES: dict[str, type[Schedule]] = {}
_S = TypeVar("_S", bound=Schedule)


def registered(schedule: type[_S]) -> type[_S]:
    """Class decorator: lets plans with this schedule be read back from JSON."""
    _SCHEDULES[schedule.planner] = schedule
    return schedule


@lru_cache(maxsize=1024)
def _log_once(text: str) -> None:
    """Log a decision; a loop that is planned in every step of training makes the same one each time."""
    _logger.info(text)


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """The decision which states to keep, which tapes to keep and what to run again.

    Attributes:
        chain: the steps and their costs.
        knob: the option that the plan was made for.
        schedule: the planner's answer, from which the actions follow.
        bill: the predicted cost.
        rooms: whether the plan is for a program whose buffers are laid out before it runs (`planners/revolve.py`).
    """

    chain: Chain
    knob: Knob
    schedule: Schedule
    bill: Bill
    rooms: bool = False

    @classmethod
    def make(cls, chain: Chain, knob: Knob, schedule: Schedule, *, rooms: bool = False) -> Self:
        """The plan with the bill that its schedule predicts."""
        return cls(chain, knob, schedule, schedule.bill(chain), rooms)

    def actions(self) -> Iterator[Action]:
        """The actions in order, made one by one as they are requested."""
        return self.schedule.actions(self.chain)

    @property
    def planner(self) -> str:
        """The name of the planner that made the plan."""
        return self.schedule.planner

    @property
    def bound(self) -> Bound | None:
        """A proven lower bound on plain runs, where the planner has one."""
        return self.schedule.bound(self.chain)

    @property
    def frontier(self) -> tuple[FrontierPoint, ...]:
        """For a whole model's plan: every choice worth making, from the largest peak (all kept) to the least.

        Raises:
            InputError: the plan is not one of blocks with menus.
        """
        return self.schedule.frontier(self.chain)

    @property
    def runs_per_step(self) -> float:
        """Forward runs of an average step, the taping one included: 1.0 is what the plain loop does."""
        return (self.bill.plain_runs + self.bill.taping_runs) / self.chain.length

    @property
    def time_factor(self) -> float:
        """Predicted time as a multiple of the plain loop's; for a whole model, of the time that its blocks take."""
        plain = self.chain.plain_seconds
        return self.bill.seconds / plain if plain else 1.0

    def __repr__(self) -> str:
        return (
            f"<Plan of {self.chain.length:,} steps by {self.planner}, {self.knob.name}={self.knob.value}: "
            f"{self.runs_per_step:.4g} runs per step in {format_size(self.bill.peak_memory)}>"
        )

    def __str__(self) -> str:
        rows = [f"{name:<8}  {text}" for name, text in self.lines()]
        return "\n".join([*rows, *(f"  {line}" for line in self.schedule.table(self))])

    def _repr_html_(self) -> str:
        """The HTML that notebooks show."""
        return _notebook_html(self)

    def logged(self, what: str) -> Self:
        """The plan itself; logs at INFO that it was chosen for `what`, unless a plan with these figures was before."""
        if _logger.isEnabledFor(logging.INFO):
            peak, runs = format_size(self.bill.peak_memory), f"{self.runs_per_step:.4g} runs per step"
            _log_once(f"{what}: {len(self.chain):,} steps, {self.knob}: {peak} at the peak, {runs} ({self.planner})")
        return self

    def decisions(self) -> list[StepDecision]:
        """What the plan does with each step, in the order of the chain."""
        length = self.chain.length
        runs, stored, forms = [0] * length, [False] * length, [0] * length
        for action in self.actions():
            match action:
                case Advance(start, stop):
                    for k in range(start, stop):
                        runs[k] += 1
                case Save(step):
                    stored[step] = True
                case Tape(start, stop, option):
                    forms[start:stop] = [option] * (stop - start)
        steps = (self.chain[k] for k in range(length))
        return [
            StepDecision(
                self.chain.name(k),
                step.state,
                step.menu[form].tape,
                plain_runs,
                is_stored,
                step.menu[form].name or f"option {form}",
            )
            for k, (step, plain_runs, is_stored, form) in enumerate(zip(steps, runs, stored, forms, strict=True))
        ]

    def lines(self) -> Iterator[tuple[str, str]]:
        """The report, as (label, text) pairs."""
        return self.schedule.lines(self)

    def to_json(self) -> str:
        """The plan as JSON: the planner and its parameters, not the actions."""
        document = {
            "lowtide": FORMAT,
            "chain": chain_document(self.chain),
            "knob": dataclasses.asdict(self.knob),
            "planner": self.planner,
            "parameters": dataclasses.asdict(cast(Any, self.schedule)),
            "bill": dataclasses.asdict(self.bill),
            "rooms": self.rooms,
        }
        return json.dumps(document, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote; refused if its bill would be another in this version."""
        document = _document(text, "chain", "knob", "planner", "parameters", "bill")
        name = document["planner"]
        if not isinstance(name, str) or name not in _SCHEDULES:
            raise InputError(f"planner {name!r} is not known here; known are {', '.join(sorted(_SCHEDULES))}")
        schedule: Callable[..., Schedule] = _SCHEDULES[name]
        with _form_of("plan"):
            chain, knob = chain_of(document["chain"]), Knob(**document["knob"])
            rooms = document.get("rooms")
            if rooms is None:  # by a version that did not store it
                rooms = _had_rooms(chain, knob, name)
            plan = cls.make(chain, knob, schedule(**_values(document["parameters"])), rooms=rooms)
            stored = Bill(**document["bill"])
        if plan.bill != stored:
            raise InputError(
                f"this plan was made by another version of planner {name!r}: it promised {stored}, "
                f"and would cost {plan.bill} here; plan again"
            )
        return plan


def check_plan(plan: object, maker: str) -> None:
    """Refuse what is neither None nor a plan; `maker` is the function that makes one."""
    if plan is not None and not isinstance(plan, Plan):
        raise InputError(f"plan={plan!r} is a {type(plan).__name__}; give what {maker} returned")


@contextmanager
def _form_of(what: str) -> Iterator[None]:
    """Turn the errors that malformed JSON causes into an InputError that says what the JSON was meant to be."""
    try:
        yield
    except InputError:
        raise
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise InputError(f"this {what}'s JSON does not have the form that to_json writes: {error}") from error


def _had_rooms(chain: Chain, knob: Knob, planner: str) -> bool:
    """Whether an earlier version planned with rooms: then, given bytes or no option, it chose slots or a base."""
    asked = knob.name in ("budget", "none")
    return asked and chain.is_equal and chain.ways is None and planner in ("revolve", "base")


def _values(parameters: dict[str, Any]) -> dict[str, Any]:
    """Parameters as they were before JSON, where tuples became lists and a disk became an object."""
    return {
        name: tuple(value) if isinstance(value, list) else Disk(**value) if isinstance(value, dict) else value
        for name, value in parameters.items()
    }


def _document(text: str, *keys: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("lowtide") != FORMAT:
        raise InputError(f'not written by this version of Lowtide: "lowtide": {FORMAT} is missing at the top')
    missing = [key for key in keys if key not in document]
    if missing:
        raise InputError(f"this JSON lacks {', '.join(missing)}")
    return document
