"""The text of a plan of blocks: its lines, its worst moment, and a row for each block with the reason for its form.

A reason depends on one entry of one menu alone, so it is the same in every plan that chooses the entry. Gradients are
made one by one in the backward, and it is not known how many of them exist at a step's worst moment: until the
optimizer's step they are counted together with the transients.

This module chooses nothing and imports no planner. `BlockSchedule` has the attributes that it reads; `blocks.Blocks`
inherits from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lowtide.chain import Chain, Role
from lowtide.forms import FormKind
from lowtide.plan import FrontierPoint, Plan
from lowtide.sizes import format_size

SECONDS = "s"  # the unit of measured times; counts of operations have another
_PREFIXES_OF_SECONDS = (("", 1.0), ("m", 1e-3), ("u", 1e-6), ("n", 1e-9))
_PREFIXES_OF_COUNTS = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3), ("", 1.0))


class BlockSchedule:
    """The part of a schedule of blocks that its text needs; `blocks.Blocks` describes the attributes."""

    __slots__ = ()
    options: tuple[int, ...]
    optimizer: int
    inputs: int
    margin: int
    notes: tuple[str, ...]
    unit: str

    @property
    def is_timed(self) -> bool:
        """Whether the chain's times are seconds, rather than counts of operations."""
        return self.unit == SECONDS

    def lines(self, plan: Plan) -> Iterator[tuple[str, str]]:
        """The plan as (label, text) pairs."""
        return lines(plan, self)

    def table(self, plan: Plan) -> Iterator[str]:
        """A line for each block."""
        return table(plan.chain, self)


@dataclass(frozen=True, slots=True)
class BlockRow:
    """What a plan does with one block.

    Attributes:
        step: the block's step in the chain.
        name: the block's name.
        tape: bytes that it holds if its whole tape is kept.
        held: bytes that it holds in the form that the plan chose.
        seconds: the time of its forward and backward if its whole tape is kept, in the schedule's unit.
        extra: the time that the chosen form adds.
        level: bytes of everything that is held at its worst moment.
        decision: the chosen entry of its menu, in words.
        kind: the kind of that form.
        why: the reason, in a few words.
    """

    step: int
    name: str
    tape: int
    held: int
    seconds: float
    extra: float
    level: int
    decision: str
    kind: FormKind
    why: str


@dataclass(frozen=True, slots=True)
class Worst:
    """The moment at which memory peaks: the step, its place in a sentence, all bytes, and what they consist of."""

    step: int
    where: str
    total: int
    parts: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return f"{self.where}: {', '.join(f'{name} {format_size(size)}' for name, size in self.parts)}"


def format_time(time: float, unit: str = SECONDS) -> str:
    """A time to three digits, with the largest prefix that leaves at least 1: 0.0012 -> "1.2 ms"."""
    prefixes = _PREFIXES_OF_SECONDS if unit == SECONDS else _PREFIXES_OF_COUNTS
    for prefix, factor in prefixes:
        number = time / factor
        if number >= 0.9995:
            return f"{number:,.0f} {prefix}{unit}" if number >= 999.5 else f"{number:.3g} {prefix}{unit}"
    return f"0 {unit}"


def fixed_parts(chain: Chain, schedule: BlockSchedule) -> tuple[tuple[str, int], ...]:
    """The name and bytes of everything that is held from the beginning of a training step to its end."""
    return (
        ("parameters", chain.parameters),
        ("optimizer state", schedule.optimizer),
        ("inputs and buffers", schedule.inputs),
    )


def levels(chain: Chain, options: Sequence[int]) -> list[int]:
    """The bytes of everything that is held at the worst moment of each step."""
    held = accumulate(chain[k].menu[option].tape for k, option in enumerate(options))
    return [tapes + chain[k].beside_tapes[option] for k, (tapes, option) in enumerate(zip(held, options, strict=True))]


def worst_moment(chain: Chain, schedule: BlockSchedule) -> Worst:
    """The moment at which the plan's memory peaks, and what it consists of then."""
    options = schedule.options
    reached = levels(chain, options)
    step = reached.index(max(reached))
    fixed = fixed_parts(chain, schedule)
    tapes = sum(chain[k].menu[options[k]].tape for k in chain.blocks() if k <= step)
    rest = max(0, reached[step] - tapes - sum(size for _, size in fixed))
    parts = [*fixed, ("tapes", tapes)]
    if chain.role(step) is Role.OPTIMIZER:
        gradients = min(chain.gradients, rest)
        parts += [("gradients", gradients), ("the rest", rest - gradients)]
    else:
        parts.append(("gradients so far and transients", rest))
    return Worst(step, where(chain, step), reached[step], tuple((name, size) for name, size in parts if size))


def where(chain: Chain, step: int) -> str:
    """A step's place, as part of a sentence."""
    match chain.role(step):
        case Role.BLOCK:
            return f"in {chain.name(step)}"
        case Role.LOSS:
            return "in the loss"
        case Role.OPTIMIZER:
            return "in the optimizer step"
    before = [k for k in chain.blocks() if k < step]
    return f"outside the blocks, after {chain.name(before[-1])}" if before else "outside the blocks, before the first"


def why(chain: Chain, k: int, option: int, unit: str) -> str:
    """The reason why block k is in this form."""
    step = chain[k]
    menu, needs = step.menu, step.beside_tapes
    kept, entry = menu[0], menu[option]
    if option == 0:
        return "fits" if len(menu) > 1 else "fits; it has no other form"
    price = f"for {format_time(entry.extra, unit)}" if entry.extra else "at no cost"
    if entry.tape < kept.tape:
        return f"frees {format_size(kept.tape - entry.tape)} {price}"
    less = kept.tape + needs[0] - entry.tape - needs[option]
    return f"needs {format_size(less)} less at its worst moment {price}" if less > 0 else price


def rows(chain: Chain, schedule: BlockSchedule) -> list[BlockRow]:
    """A row for each block, in the order of the chain."""
    options = schedule.options
    reached = levels(chain, options)
    return [
        BlockRow(
            step=k,
            name=chain.name(k),
            tape=chain[k].tape,
            held=chain[k].menu[options[k]].tape,
            seconds=chain[k].forward + chain[k].backward,
            extra=chain[k].menu[options[k]].extra,
            level=reached[k],
            decision=decision(chain, k, options[k]),
            kind=kind(chain, k, options[k]),
            why=why(chain, k, options[k], schedule.unit),
        )
        for k in chain.blocks()
    ]


def decision(chain: Chain, k: int, option: int) -> str:
    """An entry of a block's menu in words, with sizes as people write them."""
    entry = chain[k].menu[option]
    return (entry.name or f"option {option}") if entry.form is None else entry.form.in_words()


def kind(chain: Chain, k: int, option: int) -> FormKind:
    """The kind of form of an entry of a block's menu."""
    form = chain[k].menu[option].form
    return FormKind.OTHER if form is None else form.kind


def kinds(chosen: Iterable[FormKind]) -> str:
    """The number of blocks of each kind of form, in words: "8 kept, 3 lean, 1 rerun"."""
    counts = Counter(chosen)
    return ", ".join(f"{counts[kind]:,} {kind}" for kind in FormKind if kind in counts)


def plain_of(chain: Chain) -> str:
    """The thing whose time the chain has: some front ends time only the blocks, others the whole step."""
    blocks = set(chain.blocks())
    is_whole = any(chain[k].forward + chain[k].backward for k in range(len(chain)) if k not in blocks)
    return "plain step's" if is_whole else "plain blocks'"


def title(chain: Chain) -> str:
    """The model in a few words."""
    blocks = chain.blocks()
    noun = "block" if len(blocks) == 1 else "blocks"
    return f"{len(blocks):,} {noun}, {format_size(sum(chain[k].tape for k in blocks))} of tape if all are kept"


def lines(plan: Plan, schedule: BlockSchedule) -> Iterator[tuple[str, str]]:
    """The plan as (label, text) pairs."""
    chain, peak, asked = plan.chain, plan.bill.peak_memory, plan.knob.value
    yield "model", title(chain)
    held = [(name, size) for name, size in (*fixed_parts(chain, schedule), ("gradients", chain.gradients)) if size]
    if held:
        yield "holds", ", ".join(f"{name} {format_size(size)}" for name, size in held)
    margin = f"; the plan aims {format_size(schedule.margin)} below it, its margin" if schedule.margin else ""
    yield "asked", f"{plan.knob}{margin}"
    share = f", {peak / asked:.1%} of the one asked for" if plan.knob.in_bytes and asked else ""
    yield "peak", f"{format_size(peak)} predicted{share}"
    yield "worst", str(worst_moment(chain, schedule))
    extra = plan.bill.seconds - chain.plain_seconds
    factor = f"{plan.time_factor:.3f}x the {plain_of(chain)} time"
    yield "time", f"{format_time(extra, schedule.unit)} extra: {factor}, predicted"
    yield "blocks", kinds(kind(chain, k, schedule.options[k]) for k in chain.blocks()) or "none"
    yield "frontier", _told(plan.frontier, schedule.unit)
    yield "planner", plan.planner
    yield from (("note", note) for note in schedule.notes)


def _told(points: Sequence[FrontierPoint], unit: str) -> str:
    """A frontier in words: the number of its points, and its two ends."""
    first, last = [
        f"{format_size(point.peak)} with {format_time(point.extra, unit)} extra" for point in (points[0], points[-1])
    ]
    return f"{len(points):,} choices, from {first} to {last}" if len(points) > 1 else f"one choice, {first}"


def table(chain: Chain, schedule: BlockSchedule) -> Iterator[str]:
    """The rows as text in columns, with a line of titles; nothing if there are no blocks."""
    cells = [
        (row.name, format_size(row.tape), format_time(row.seconds, schedule.unit), row.decision, row.why)
        for row in rows(chain, schedule)
    ]
    if not cells:
        return
    cells.insert(0, ("block", "tape", "time", "decision", "why"))
    name, tape, time, form = (max(len(row[column]) for row in cells) for column in range(4))
    for row in cells:
        yield f"{row[0]:<{name}}  {row[1]:>{tape}}  {row[2]:>{time}}  {row[3]:<{form}}  {row[4]}"
