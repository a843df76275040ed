"""A model measured, once, and planned: what `plan_model` and `largest_batch` do.

First one forward shows the blocks (`model_blocks.py`). Then each kind of block is run by itself in all its forms
(`model_costs.py`), and a whole step with every block in its smallest (`model_step.py`): that makes a chain, for which
the core chooses forms. Then the step is run once as planned, and where it takes more than predicted, planned again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map

from lowtide.chain import Chain
from lowtide.errors import BudgetError
from lowtide.plan import Knob, Plan
from lowtide.planners.blocks import Blocks, choose_blocks, least_peak
from lowtide.progress import Stages
from lowtide.sizes import format_size
from lowtide.torch.devices import Device
from lowtide.torch.layer_groups import unpack_dropped
from lowtide.torch.measure import watching
from lowtide.torch.model_apply import apply, unapply
from lowtide.torch.model_blocks import FoundBlock, Survey, few
from lowtide.torch.model_costs import Bench, BlockCost
from lowtide.torch.model_loss import Loss, loss_of, pull_back
from lowtide.torch.model_step import BaseRun, Resident
from lowtide.torch.settled import settled
from lowtide.torch.stand_in import StandIn, plainly, standing_in
from lowtide.torch.storages import Log, tensors_of
from lowtide.torch.traceless import RandomStates

# Shares of the peak asked for by which a plan aims lower: predictions were never so much too low in the tests, where
# the step is run once as planned, and where it is not.
MARGIN = 0.01
MARGIN_ON_PAPER = 0.03
_TRIES = 6
_DRAWS = 16
_SLACK = 1.005
_WELL_PREDICTED = 0.05
_WAYS = "raise the peak, give smaller arguments (a smaller batch), or an optimizer with less state"


class Planning:
    """Measures a model, once, and plans."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss: Loss | None,
        resident: Resident,
        randomness: RandomStates,
        caches: bool,
        device: Device | None,
        stages: Stages,
    ) -> None:
        self._model = model
        self._args = args
        self._kwargs = kwargs
        self._loss = loss
        self._device = device
        self._resident = resident
        self._notes: list[str] = []
        self._unsettled: set[tuple[str, str]] = set()  # forms that were found by measured seconds
        self._randomness = randomness
        self._caches = caches
        self._stages = stages

    def measure(self, *, timed: bool = True) -> Chain:
        """The step as a chain, with bytes and seconds, or bytes alone."""
        survey = self._survey()
        as_given, best, drawn = self._randomness, self._randomness, False
        for seed in range(_DRAWS):  # which layers are left out may be drawn: a step that calls all of them takes most
            if not survey.uncalled():
                break
            self._randomness = as_given.seeded(seed)
            other = self._survey()
            drawn |= other.uncalled() != survey.uncalled()
            if len(other.uncalled()) < len(survey.uncalled()):
                survey, best = other, self._randomness
        self._randomness = best
        self._notes = survey.notes
        blocks, steps = survey.blocks(), 1 + timed  # where seconds count, the step is run as planned too
        self._stages.begin(len(blocks) + steps)
        costs = self._costs(blocks, timed)
        self._stages.reach(steps)
        base = BaseRun(costs, self._notes)
        base.run(self._step)
        self._stages.move()
        if not base.blocks:
            self._notes.append("nothing of this model can be planned: it runs as it is")
        self._unsettled = {
            (block.name, form.name) for block, cost in base.blocks for form in cost.forms if not form.is_settled
        }
        chain = base.chain(self._resident)
        return self._with_siblings(chain, survey.uncalled()) if drawn else self._noting(chain, survey.uncalled())

    def _noting(self, chain: Chain, uncalled: dict[str, str]) -> Chain:
        """The chain itself, with a note of what was not called and is not drawn: values decide, or nobody."""
        if uncalled:
            self._notes.append(f"not called in the step that was measured, and so left as they are: {few(uncalled)}")
        return chain

    def _survey(self) -> Survey:
        survey = Survey(self._model)
        self._randomness.restore()
        survey.run(*self._arguments(), lambda output: loss_of(output, self._loss))
        return survey

    def _with_siblings(self, chain: Chain, uncalled: dict[str, str]) -> Chain:
        """With blocks that this step left out, as some do at random: each is taken to cost what its sibling does."""
        rows = [(name, chain[k]) for k, name in enumerate(chain.names)]
        for path, sibling in uncalled.items():
            if sibling in chain.names:
                place = next(k for k, (name, _) in enumerate(rows) if name == sibling)
                rows.insert(place + 1, (path, chain[chain.names.index(sibling)]))
                self._unsettled |= {(path, form) for block, form in self._unsettled if block == sibling}
                self._notes.append(f"{path} was not called in the step that was measured: planned like {sibling}")
        longer = Chain.of([step for _, step in rows], [name for name, _ in rows])
        return replace(longer, parameters=chain.parameters, gradients=chain.gradients)

    def plan(self, peak: int) -> Plan:
        """The fastest plan within the peak."""
        chain = self.measure()
        share = 0.0 if self._device is None else MARGIN_ON_PAPER
        most = peak - int(peak * share)  # what a step may take that is run here, with values or on paper
        smallest = settled(chain, self._unsettled)
        least = least_peak(smallest)
        # A plan that will be run once needs no more room than there is.
        aim = min(most, max(least, peak - int(peak * MARGIN)))
        for _ in range(_TRIES):
            if aim < least:
                break
            plan = self._planned(chain, peak, aim)
            measured = self._measured(plan)
            if measured <= most:
                return self._noted(plan, measured)
            aim = plan.bill.peak_memory - (measured - most)
        plan = self._planned(chain, peak, least, choose_blocks(smallest, least))
        measured = self._measured(plan)
        if most < max(measured, least):
            # A step that took more than predicted may take a little more the next time.
            need = least if measured <= least else measured * _SLACK
            raise BudgetError(peak, math.ceil(need / (1 - share)), _WAYS, "peak")
        return self._noted(plan, measured)

    def _noted(self, plan: Plan, measured: int) -> Plan:
        """The plan with a word about a prediction that was not good."""
        predicted = plan.bill.peak_memory
        if abs(measured / predicted - 1) <= _WELL_PREDICTED:
            return plan
        note = f"a step that was run as planned took {format_size(measured)} at its worst moment, not what is predicted"
        assert isinstance(plan.schedule, Blocks)
        return replace(plan, schedule=replace(plan.schedule, notes=(*plan.schedule.notes, note)))

    def _planned(self, chain: Chain, peak: int, aim: int, options: tuple[int, ...] | None = None) -> Plan:
        """The plan with these options, or the fastest that is predicted to stay within what it aims at."""
        held = self._resident
        options = options or choose_blocks(chain, aim, ways=_WAYS)
        return Plan.make(
            chain,
            Knob("peak", peak),
            Blocks(options, held.optimizer, held.inputs, max(0, peak - aim), tuple(self._notes)),
        )

    def _step(self) -> Callable[[], Any]:
        """One step but for the optimizer's part, to be run; it gives what whoever trains the model holds meanwhile."""
        args, kwargs = self._arguments()
        for parameter in self._model.parameters():
            parameter.grad = None
        self._randomness.restore()

        def run() -> Any:
            caching = torch.is_autocast_cache_enabled()
            torch.set_autocast_cache_enabled(self._caches)
            try:
                output = self._model(*args, **kwargs)
                value = loss_of(output, self._loss)
                ours = {id(tensor) for tensor in (*self._model.parameters(), *tensors_of((args, kwargs)))}
                return output, value, pull_back(value, ours)
            finally:
                torch.clear_autocast_cache()
                torch.set_autocast_cache_enabled(caching)

        return run

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copies of what the model is called with: it may change them."""
        copies: dict[int, torch.Tensor] = {}

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) not in copies:
                copies[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
            return copies[id(leaf)]

        args, kwargs = tree_map(copied, (self._args, self._kwargs))
        return args, kwargs

    def _costs(self, blocks: list[FoundBlock], timed: bool) -> list[tuple[FoundBlock, BlockCost]]:
        """What each block costs; one of a kind is measured."""
        if not blocks:
            return []
        bench = Bench(self._device, timed=timed)
        costs: dict[Hashable, BlockCost | None] = {}
        found: dict[FoundBlock, BlockCost] = {}

        def probe(block: FoundBlock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            kind = _kind(block)
            if kind not in costs:
                drawn = RandomStates([self._model])  # which blocks come next may depend on it
                try:
                    costs[kind] = bench.cost(block, args, kwargs)
                except RuntimeError as error:
                    costs[kind] = None
                    self._notes.append(f"{block.name} cannot be run by itself, and is left as it is: {error}")
                drawn.restore()
            cost = costs[kind]
            if cost is not None:
                found[block] = cost
            self._stages.move()

        self._randomness.restore()
        args, kwargs = self._arguments()
        hooks = saved_tensors_hooks(_let_go, unpack_dropped)
        with hooks, standing_in([_Probe(block, probe, hooks) for block in blocks]):
            self._model(*args, **kwargs)
        return [(block, found[block]) for block in blocks if block in found]

    def _measured(self, plan: Plan) -> int:
        """Bytes at the worst moment of a step that is run as planned, the optimizer's part among it as predicted."""
        log, step = Log(), self._step()
        apply(plan, self._model)
        try:
            with watching(log):
                held = step()
        finally:
            unapply(self._model)
        now, most = log.level(0, len(log.events))
        del held
        self._stages.reach(0)
        return self._resident.before + max(most, now + self._resident.stepping)


class _Probe(StandIn):
    """Has a block measured when it is called."""

    def __init__(self, block: FoundBlock, probe: Callable[..., None], hooks: saved_tensors_hooks) -> None:
        super().__init__(block.call.module)
        self._block = block
        self._probe = probe
        self._hooks = hooks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        self.remove()  # it is called once, and measured as it is
        self._hooks.__exit__()  # the model keeps no tape meanwhile, and the block does
        try:
            self._probe(self._block, args, kwargs)
        finally:
            self._hooks.__enter__()
        return plainly(self.module, args, kwargs)


def _let_go(_: torch.Tensor) -> None:
    """The pack hook of a run that keeps nothing."""


def _kind(block: FoundBlock) -> Hashable:
    """What blocks have in common that cost the same."""
    call = block.call
    parameters = tuple((p.shape, p.dtype, p.requires_grad) for p in call.module.parameters())
    training = tuple(module.training for module in call.module.modules())
    kind = type(call.module), repr(call.module), parameters, training
    return kind, call.forms, call.needs, tuple(call.packs), call.tape, block.is_row, block.children
