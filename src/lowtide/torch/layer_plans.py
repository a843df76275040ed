"""Plans for a measured row of layers, with what checkpoint calls take beyond what a chain can say.

That depends on where the calls are, so it is known once there is a plan: the plan is made first, then its bill, and
where that is above the budget, another plan for so much less.
"""

from __future__ import annotations

from dataclasses import replace

from lowtide.chain import Chain, Working
from lowtide.errors import BudgetError
from lowtide.plan import Knob, Plan
from lowtide.planners.choose import choose, least_budget
from lowtide.sizes import parse_budget
from lowtide.torch.layers import Row
from lowtide.torch.nest import Part, copied_by, forms_passed, kept_by, nest_of, starts

# How many checkpoint calls may be inside one another: Python's stack has room for more, but not for many more.
_MOST_DEPTH = 100


class LayerPlans:
    """What a row costs, and the plans that were made for it."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self._plans: dict[int | str | None, tuple[Plan, tuple[Part, ...]]] = {}

    def plan(self, budget: int | str | None) -> tuple[Plan, tuple[Part, ...]]:
        """The fastest plan within the budget, and its nest."""
        if budget not in self._plans:
            if len(self._plans) >= 16:  # a sweep over budgets
                self._plans.clear()
            plan = self._choose(budget)
            self._plans[budget] = plan, nest_of(plan)
        return self._plans[budget]

    def _choose(self, budget: int | str | None) -> Plan:
        if budget is None:
            return self._billed(choose(self._chain), Knob("none"))
        asked = parse_budget(budget, self._bare.plain_tape)
        plan = self._within(asked)
        if plan is not None:
            return plan
        least = self._least_that_works()
        if least > asked:
            ways = "raise the budget, or make the layers smaller (a smaller batch)"
            raise BudgetError(asked, least, ways)
        plan = self._within(least)  # the way down from the budget has passed this one by
        assert plan is not None
        return replace(plan, knob=Knob("budget", asked))

    @property
    def _chain(self) -> Chain:
        """With every step's input in its tape."""
        assert self.row.chain is not None
        return self.row.chain

    @property
    def _bare(self) -> Chain:
        """With tapes that do not count an input that no tape holds."""
        return self._with_tapes(set())

    def _with_tapes(self, begun: set[int]) -> Chain:
        """Steps that are `begun` have their input in their tape, whether autograd holds it or not."""
        if not any(self.row.unheld):
            return self._chain
        steps = [self._chain[k] for k in range(len(self._chain))]
        for k, unheld in enumerate(self.row.unheld):
            if k not in begun:
                # A smaller tape may hold the input although the whole one does not.
                options = tuple(
                    replace(option, tape=max(steps[k].state, option.tape - min(unheld, let_go)))
                    for option, let_go in zip(steps[k].options, self.row.unheld_by[k], strict=True)
                )
                steps[k] = replace(steps[k], tape=max(steps[k].state, steps[k].tape - unheld), options=options)
        return self._chain.with_steps(steps)

    def _within(self, asked: int) -> Plan | None:
        """The fastest plan found within so many bytes."""
        chains = [self._chain, self._bare] if any(self.row.unheld) else [self._chain]
        plans = [plan for chain in chains if (plan := self._within_by(chain, asked)) is not None]
        return min(plans, key=lambda plan: plan.bill.seconds, default=None)

    def _within_by(self, chain: Chain, asked: int) -> Plan | None:
        budget = asked
        while budget >= max(self.row.peak, least_budget(chain)):
            plan = choose(chain, budget)
            if max(part.depth for part in nest_of(plan)) > _MOST_DEPTH:
                return None
            plan = self._billed(plan, Knob("budget", asked))
            if plan.bill.peak_memory <= asked:
                return plan
            budget -= plan.bill.peak_memory - asked
        return None

    def _billed(self, plan: Plan, knob: Knob) -> Plan:
        """The same plan for a chain that has the bytes of its checkpoint calls."""
        nest = nest_of(plan)
        chain = self._with_tapes(starts(nest))
        kept, copied, passed = kept_by(nest, self.row.kept), copied_by(nest, self.row.copied), forms_passed(nest)
        if not (kept or passed or any(copied)):
            return Plan.make(chain, knob, plan.schedule)
        steps = []
        for k, more in enumerate(copied):
            step, was = chain[k], chain[k].working
            advance = max([was.advance, *(self.row.passing[k][form - 1] for form in passed.get(k, ()))])
            working = Working(advance + kept + more, was.tape + kept, was.backward + kept)
            options = tuple(replace(option, backward=(option.backward or 0) + kept) for option in step.options)
            steps.append(replace(step, working=working, options=options))
        return Plan.make(chain.with_steps(steps), knob, plan.schedule)

    def _least_that_works(self) -> int:
        """To the byte, unless it depends on where checkpoint calls are, or there are very many."""
        row = self.row
        low = high = max(row.peak, least_budget(self._bare))
        while self._within(high) is None:
            low, high = high, high + 1 + high // 8
        while any((*row.kept, *row.copied, *row.unheld)) and high - low > high // 100:
            middle = (low + high) // 2
            low, high = (low, middle) if self._within(middle) else (middle, high)
        return high
