"""What differs in a report between the plan of a loop or layers and that of a whole model.

A budget is what a call takes beyond what the plain call holds too; a model's peak is everything that a training step
holds. So words, shares and measured bytes differ, and each kind of plan has its own. `kind_of` tells which it is, here
and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lowtide.chain import Chain, Role
from lowtide.plan import Plan, Receipt
from lowtide.planners.block_text import (
    BlockRow,
    fixed_parts,
    format_time,
    levels,
    plain_of,
    rows,
    title,
    where,
)
from lowtide.planners.blocks import Blocks
from lowtide.sizes import format_size


@dataclass(frozen=True, slots=True)
class ChainKind:
    """The plan of a loop or of layers: a chain of steps within a budget."""

    plan: Plan

    @property
    def chain(self) -> Chain:
        """What was planned."""
        return self.plan.chain

    @property
    def model(self) -> Blocks | None:
        """A whole model's schedule, if it is one."""
        return None

    @property
    def limit_name(self) -> str:
        """What the plan has to keep."""
        return "budget"

    @property
    def limit_label(self) -> str:
        """What the line of its limit is called in pictures."""
        return "budget"

    def limit_told(self, size: int) -> str:
        """The limit, in a sentence."""
        return f"a budget of {format_size(size)}"

    @property
    def plain_name(self) -> str:
        """Whose time the plan's own is a multiple of."""
        return "plain loop's"

    @property
    def title(self) -> str:
        """What the plan is for, in a few words."""
        return str(self.chain)

    @property
    def whole(self) -> int:
        """What the plan's bytes are a share of."""
        return self.chain.plain_tape

    def lines(self) -> Iterator[tuple[str, str]]:
        """The plan's own lines, and what is held besides."""
        yield from self.plan.lines()
        chain = self.chain
        if chain.parameters or chain.gradients:
            held = f"parameters {format_size(chain.parameters)}, gradients {format_size(chain.gradients)}"
            yield "besides", f"{held}: held with or without a plan, in no budget"

    @property
    def besides(self) -> tuple[int, int]:
        """Bytes of parameters and gradients that the limit does not count."""
        return self.chain.parameters, self.chain.gradients

    def told(self, verb: str, start: int, stop: int) -> str:
        """What runs at some moment, in words."""
        if verb == "storing":
            return f"storing state {start:,}"
        if stop - start == 1:
            return f"{verb} {self.chain.name(start)}"
        return f"{verb} steps [{start:,}, {stop:,})"

    @property
    def held_before(self) -> int:
        """Bytes that the limit counts and that are there before the run."""
        return 0

    def measured_peak(self, receipt: Receipt) -> int:
        """Bytes at a run's worst moment, counted as the limit counts them: without what the plain run holds too."""
        return max(0, receipt.peak_memory - receipt.held)

    def measuring(self, receipt: Receipt, measured: int) -> str:
        """How the measured peak is to be read."""
        told = f"Measured: {format_size(receipt.peak_memory)} at most"
        if receipt.held:
            told += f", {format_size(receipt.held)} of it results and gradients, which no budget counts"
        return f"{told}."

    @property
    def measured_above(self) -> str:
        """Why a measured peak may be above the limit though less was predicted."""
        return (
            "That is above the budget though less was predicted: a recording counts every tensor that is made inside "
            "it, a loss's and other code's too. Record the checkpointed call and its backward alone to compare."
        )

    @property
    def not_in_curve(self) -> str:
        """What the limit counts and the measured bytes over time do not."""
        return ""


@dataclass(frozen=True, slots=True)
class ModelKind(ChainKind):
    """The plan of a whole model: its blocks, in a training step within a peak."""

    schedule: Blocks

    @property
    def model(self) -> Blocks:
        """The schedule of its blocks."""
        return self.schedule

    @property
    def limit_name(self) -> str:
        """What the plan has to keep."""
        return "peak"

    @property
    def limit_label(self) -> str:
        """What the line of its limit is called in pictures."""
        return "asked for"

    def limit_told(self, size: int) -> str:
        """The limit, in a sentence."""
        return f"{format_size(size)} asked for"

    @property
    def plain_name(self) -> str:
        """Whose time the plan's own is a multiple of."""
        return plain_of(self.chain)

    @property
    def title(self) -> str:
        """The model in a few words."""
        return title(self.chain)

    @property
    def whole(self) -> int:
        """What the plan's bytes are a share of: the peak with all blocks kept."""
        return max(levels(self.chain, (0,) * len(self.chain)))

    def time(self, time: float) -> str:
        """A time in the unit that the plan's times are in."""
        return format_time(time, self.schedule.unit)

    def lines(self) -> Iterator[tuple[str, str]]:
        """The plan's own lines."""
        return self.plan.lines()

    @property
    def besides(self) -> tuple[int, int]:
        """None: the peak counts everything."""
        return 0, 0

    def block_rows(self) -> list[BlockRow]:
        """What the plan does with each block."""
        return rows(self.chain, self.schedule)

    def told(self, verb: str, start: int, stop: int) -> str:
        """A moment of a training step, in words. Of equal blocks that are played together, the first is told."""
        if self.chain.role(start) is not Role.BLOCK:
            return where(self.chain, start)
        return f"in the {'forward' if verb == 'taping' else 'backward'} of {self.chain.name(start)}"

    @property
    def fixed(self) -> tuple[tuple[str, int], ...]:
        """What is held from the beginning to the end of a step, and how many bytes of it."""
        return fixed_parts(self.chain, self.schedule)

    @property
    def held_before(self) -> int:
        """Bytes that the peak counts and that are there before the step."""
        return sum(size for _, size in self.fixed)

    def measured_peak(self, receipt: Receipt) -> int:
        """Bytes at a step's worst moment: a recording counts all but what was there before it."""
        return self.held_before + receipt.peak_memory

    def measuring(self, receipt: Receipt, measured: int) -> str:
        """How the measured peak is to be read."""
        share, made = measured / self.plan.bill.peak_memory - 1, format_size(receipt.peak_memory)
        against = f"{abs(share):.1%} {'more' if share > 0 else 'less'} than predicted"
        if abs(share) < 0.0005:
            against = "as predicted"
        return (
            f"Measured: {format_size(measured)} at the worst moment, {against}; {made} of it made in the step, beside "
            f"{format_size(self.held_before)} of parameters, optimizer state, inputs and buffers."
        )

    @property
    def measured_above(self) -> str:
        """Why a measured peak may be above the limit though less was predicted."""
        return (
            "That is above the peak asked for though less was predicted: a recording counts every tensor that is made "
            "inside it. Record one training step alone, with the inputs it was planned for, to compare."
        )

    @property
    def not_in_curve(self) -> str:
        """What the peak counts and the measured bytes over time do not: a receipt leaves gradients out."""
        return " without results and gradients"


def kind_of(plan: Plan) -> ChainKind:
    """What kind of plan it is."""
    return ModelKind(plan, plan.schedule) if isinstance(plan.schedule, Blocks) else ChainKind(plan)
