"""Checked options of a loop: how much memory it may take, and what happens to its outputs.

The memory option has four spellings, `budget`, `checkpoints`, `base` and none; two at once are refused, and
`planners.choose` decides which plan follows from it. While loops have options of their own. `reduce` is a word or a
fold.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lowtide.chain import Chain, StepCost
from lowtide.checks import function, one_knob, whole_number
from lowtide.errors import InputError
from lowtide.plan import Plan, check_plan
from lowtide.planners.choose import choose
from lowtide.sizes import check_budget, parse_budget, parse_size

_logger = logging.getLogger(__name__)

Fold = tuple[Any, Callable[[Any, Any], Any]]
Reduce = str | Fold | None


def fold_of(reduce: Reduce) -> Fold | None:
    """The initial value and the function of the user's own fold; None where `reduce` is a word or None."""
    if reduce is None or isinstance(reduce, str):
        if reduce not in (None, "mean", "sum", "last"):
            raise InputError(f'reduce={reduce!r} is not known; give "mean", "sum", "last", or (init, fold)')
        return None
    if not isinstance(reduce, tuple | list) or len(reduce) != 2 or not callable(reduce[1]):
        raise InputError(
            f'reduce={reduce!r}: give "mean", "sum", "last", or (init, fold) with a function fold(acc, y) -> acc'
        )
    return reduce[0], reduce[1]


def refuse_reducing_nothing(reduce: Reduce) -> None:
    """Refuse a reduction without a value for a loop of no steps, which has a sum but no mean and no last output."""
    if reduce in ("mean", "last"):
        raise InputError(f'reduce="{reduce}" of no steps has no value; give at least one step')


# Snapshots of a while loop that was given no option: steps are rerun at most twice in loops of up to 1,325 steps, at
# most three times up to 23,425.
DEFAULT_CHECKPOINTS = 50


class Costs(Protocol):
    """The costs of a loop, as a front end found them."""

    @property
    def chain(self) -> Chain:
        """The loop as a chain."""

    @property
    def rooms(self) -> bool:
        """Whether snapshots and tape have buffers of fixed size (rooms); see `choose`."""

    def within(self, budget: int) -> Plan:
        """The plan with the fewest reruns within the budget."""


@dataclass(frozen=True, slots=True)
class Knobs:
    """The memory options of a loop, of which at most one is given."""

    base: int | None
    checkpoints: int | None
    budget: int | str | None
    plan: Plan | None
    least_base: int = 1

    def __post_init__(self) -> None:
        given = {"base": self.base, "checkpoints": self.checkpoints, "budget": self.budget, "plan": self.plan}
        one_knob(given)
        check_plan(self.plan, "plan_scan")
        if self.base is not None:
            whole_number(self.base, "base", least=self.least_base)
        if self.checkpoints is not None:
            whole_number(self.checkpoints, "checkpoints", least=1)
        if self.budget is not None:
            check_budget(self.budget)

    def needs_costs(self) -> bool:
        """Whether the plan depends on the costs of a step."""
        return self.base is None and self.checkpoints is None and self.plan is None

    def choose(self, costs: Costs | None, length: int) -> Plan:
        """The plan for `length` steps."""
        if self.plan is not None:
            if len(self.plan.chain) != length:
                raise InputError(f"the plan is for {len(self.plan.chain):,} steps, the loop has {length:,}; plan again")
            return self.plan
        return self._chosen(costs, length).logged("a loop")

    def _chosen(self, costs: Costs | None, length: int) -> Plan:
        if costs is None:
            return choose(Chain.equal(StepCost(1, 1), length), base=self.base, checkpoints=self.checkpoints)
        _logger.debug("measured a loop: %s", costs.chain)
        if self.budget is not None:
            return costs.within(parse_budget(self.budget, costs.chain.plain_tape))
        return choose(costs.chain, base=self.base, checkpoints=self.checkpoints, rooms=costs.rooms)

    def keeps_first_tape(self, length: int) -> bool:
        """Whether the plan may begin by taping, as far as is known before the costs are."""
        if self.plan is not None:
            return self.plan.bill.plain_runs == 0
        if self.base is not None:
            return self.base >= length
        return length <= (2 if self.checkpoints is None else 1)


@dataclass(frozen=True, slots=True)
class WhileKnobs:
    """The options of a while loop: the number of snapshots, or the bytes from which it follows, and the most steps."""

    slots: int
    budget: int | None
    most: int

    @classmethod
    def of(
        cls,
        cond: object,
        body: object,
        checkpoints: int | None,
        budget: int | str | None,
        max_steps: int | None,
        no_end: int,
    ) -> WhileKnobs:
        """The checked arguments of a call; `no_end` is the value of `most` if `max_steps` is None."""
        function(cond, "cond")
        function(body, "body")
        one_knob({"checkpoints": checkpoints, "budget": budget})
        return cls(
            DEFAULT_CHECKPOINTS if checkpoints is None else whole_number(checkpoints, "checkpoints", least=1),
            None if budget is None else parse_size(budget, "budget"),
            no_end if max_steps is None else whole_number(max_steps, "max_steps", least=0, most=no_end),
        )
