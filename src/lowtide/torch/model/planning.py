"""`plan_model`, `auto_checkpoint`: a whole training step within a memory peak, in one line.

The model's state is saved before it is measured, and restored afterwards. First one forward finds the blocks
(`blocks.py`). Then each kind of block is run by itself in all its forms (`costs.py`), and a whole step with every block
in its smallest form (`step.py`): that makes a chain, for which the core chooses forms. Then the step is run once as
planned, and if it takes more than allowed, it is planned again with a lower aim.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map

from lowtide.chain import Chain, Role
from lowtide.errors import BudgetError, InputError
from lowtide.forms import Form
from lowtide.interface.progress import Stages
from lowtide.plan import Knob, Plan
from lowtide.planners.blocks import Blocks, choose_blocks, least_peak, untimed
from lowtide.sizes import format_size, parse_size
from lowtide.torch.memory.tracker import Log, keeping_nothing, storage_bytes, tensors_of, watching
from lowtide.torch.model.apply import apply, check_model, unapplied, unapply
from lowtide.torch.model.blocks import FoundBlock, Survey, few
from lowtide.torch.model.costs import Bench, BlockCost
from lowtide.torch.model.loss import Loss, hooks_aside, loss_of, pull_back
from lowtide.torch.model.optimizer import OptimizerCost, optimizer_cost
from lowtide.torch.model.step import BaseRun, Resident
from lowtide.torch.paper.devices import Device, device_of
from lowtide.torch.paper.on_paper import on_paper as fake
from lowtide.torch.state.ambient import RandomStates, aside
from lowtide.torch.state.hidden import left_as_it_was
from lowtide.torch.state.stand_in import StandIn, original, standing_in

_logger = logging.getLogger(__name__)

# The share of the requested peak by which a plan aims lower: if the step is run once as planned, and if it is planned
# on paper. No prediction in the tests was too low by more than this.
MARGIN = 0.01
MARGIN_ON_PAPER = 0.03
_MOST_PLANS_RUN = 6  # each is run once; if it took too much, the next one aims lower by the excess
_SEEDS_TRIED = 16  # where layers are skipped at random, to find a step that calls all of them
_ROOM_FOR_ANOTHER_RUN = 1.005  # factor on a measured peak, in case the next run takes a little more
_WELL_PREDICTED = 0.05  # relative error of the predicted peak above which the plan has a note
_WAYS = "raise the peak, give smaller arguments (a smaller batch), or an optimizer with less state"


class Planning:
    """Measures a model once, and plans its training step."""

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
        self._unsettled: set[tuple[str, Form]] = set()  # (block, form) pairs that were found by measured seconds
        self._randomness = randomness
        self._caches = caches
        self._stages = stages

    def measure(self, *, timed: bool = True) -> Chain:
        """The training step as a chain, with bytes and seconds, or with bytes alone."""
        survey = self._survey()
        as_given, best, drawn = self._randomness, self._randomness, False
        # Layers may be skipped at random: a step that calls all of them takes the most memory.
        for seed in range(_SEEDS_TRIED):
            if not survey.uncalled():
                break
            self._randomness = as_given.seeded(seed)
            other = self._survey()
            drawn |= other.uncalled() != survey.uncalled()
            if len(other.uncalled()) < len(survey.uncalled()):
                survey, best = other, self._randomness
        self._randomness = best
        self._notes = survey.notes
        blocks, steps = survey.blocks(), 1 + timed  # if seconds count, the step is also run as planned
        self._stages.begin(len(blocks) + steps)
        costs = self._costs(blocks, timed)
        self._stages.reach(steps)
        base = BaseRun(costs, self._notes)
        is_settled = False
        while not is_settled:
            step = self._step()
            with base.watched():
                held = step()
            del held
            is_settled = base.is_in_order()
        self._stages.move()
        if not base.blocks:
            self._notes.append("nothing of this model can be planned: it runs as it is")
        self._unsettled = {
            (block.name, form.form) for block, cost in base.blocks for form in cost.forms if not form.is_settled
        }
        chain = base.chain(self._resident)
        _logger.debug("measured a model: %s", chain)
        return self._with_siblings(chain, survey.uncalled()) if drawn else self._noting(chain, survey.uncalled())

    def _noting(self, chain: Chain, uncalled: dict[str, str]) -> Chain:
        """The chain itself; adds a note of blocks that were not called, which is not a matter of random numbers."""
        if uncalled:
            self._notes.append(f"not called in the step that was measured, and so left as they are: {few(uncalled)}")
        return chain

    def _survey(self) -> Survey:
        survey = Survey(self._model, self._loss)
        self._randomness.restore()
        survey.run(*self._arguments())
        return survey

    def _with_siblings(self, chain: Chain, uncalled: dict[str, str]) -> Chain:
        """The chain with the blocks that this step skipped at random: each is assumed to cost what its sibling does."""
        rows = [(name, chain.role(k), chain[k]) for k, name in enumerate(chain.names)]
        for path, sibling in uncalled.items():
            if sibling in chain.names:
                place = next(k for k, (name, *_) in enumerate(rows) if name == sibling)
                rows.insert(place + 1, (path, Role.BLOCK, chain[chain.names.index(sibling)]))
                self._unsettled |= {(path, form) for block, form in self._unsettled if block == sibling}
                self._notes.append(f"{path} was not called in the step that was measured: planned like {sibling}")
        names, roles, steps = zip(*rows, strict=True)
        return replace(Chain.of(steps, names, roles), parameters=chain.parameters, gradients=chain.gradients)

    def plan(self, peak: int) -> Plan:
        """The fastest plan within the peak."""
        chain = self.measure()
        share = 0.0 if self._device is None else MARGIN_ON_PAPER
        most = peak - int(peak * share)  # that a step which is run here may take, with values or on paper
        smallest = untimed(chain, self._unsettled)
        least = least_peak(smallest)
        # No margin where it would rule out the smallest plan: the plan is run once, which shows whether it fits.
        aim = min(most, max(least, peak - int(peak * MARGIN)))
        for _ in range(_MOST_PLANS_RUN):
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
            need = least if measured <= least else measured * _ROOM_FOR_ANOTHER_RUN
            raise BudgetError(peak, math.ceil(need / (1 - share)), _WAYS, "peak")
        return self._noted(plan, measured)

    def _noted(self, plan: Plan, measured: int) -> Plan:
        """The plan, with a note if the measured peak differs much from the predicted one."""
        predicted = plan.bill.peak_memory
        if abs(measured / predicted - 1) <= _WELL_PREDICTED:
            return plan
        note = f"a step that was run as planned took {format_size(measured)} at its worst moment, not what is predicted"
        assert isinstance(plan.schedule, Blocks)
        return replace(plan, schedule=replace(plan.schedule, notes=(*plan.schedule.notes, note)))

    def _planned(self, chain: Chain, peak: int, aim: int, options: tuple[int, ...] | None = None) -> Plan:
        """The plan with these options, or the fastest plan whose predicted peak is within `aim`."""
        held = self._resident
        options = options or choose_blocks(chain, aim, ways=_WAYS)
        return Plan.make(
            chain,
            Knob("peak", peak),
            Blocks(options, held.optimizer, held.inputs, max(0, peak - aim), tuple(self._notes)),
        )

    def _step(self) -> Callable[[], Any]:
        """A function that runs a step without the optimizer's part, and returns what a training loop would hold."""
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
        """Copies of the model's arguments, which it may change in place."""
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
        """The cost of each block; of blocks of the same kind, only the first is measured."""
        if not blocks:
            return []
        bench = Bench(self._device, timed=timed)
        costs: dict[Hashable, BlockCost | None] = {}
        found: dict[FoundBlock, BlockCost] = {}

        def probe(block: FoundBlock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            kind = _kind(block)
            if kind not in costs:
                drawn = RandomStates([self._model])  # which blocks are called next may depend on random numbers
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
        hooks = keeping_nothing()
        with hooks, standing_in([_Probe(block, probe, hooks) for block in blocks]):
            self._model(*args, **kwargs)
        return [(block, found[block]) for block in blocks if block in found]

    def _measured(self, plan: Plan) -> int:
        """The peak of a step that is run as planned, in bytes; the optimizer's part of it is predicted."""
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
    """Measures a block at the moment when it is called."""

    def __init__(self, block: FoundBlock, probe: Callable[..., None], hooks: saved_tensors_hooks) -> None:
        super().__init__(block.call.module)
        self._block = block
        self._probe = probe
        self._hooks = hooks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Measure the block with these arguments, then run it."""
        self.remove()  # a block is called once, and measured with its own forward
        self._hooks.__exit__()  # these hooks let the model keep no tape; the block that is measured keeps one
        try:
            self._probe(self._block, args, kwargs)
        finally:
            self._hooks.__enter__()
        return original(self.module)(*args, **kwargs)


def _kind(block: FoundBlock) -> Hashable:
    """A key that is equal for blocks that cost the same."""
    call = block.call
    parameters = tuple((p.shape, p.dtype, p.requires_grad) for p in call.module.parameters())
    training = tuple(module.training for module in call.module.modules())
    kind = type(call.module), repr(call.module), parameters, training
    return kind, call.forms, call.needs, tuple(call.packs), call.tape, block.is_row, block.children


def plan_model(
    model: nn.Module,
    *args: Any,
    peak: int | str,
    optimizer: Any = None,
    loss: Loss | None = None,
    on_paper: bool = False,
    device: str | Device | None = None,
    pbar: Any = None,
    **kwargs: Any,
) -> Plan:
    """The fastest plan with which a whole training step of the model stays within a peak.

    The model is measured, and left as it was: parameters, gradients, buffers, random numbers. Hooks on its parameters
    do not run meanwhile. Hooks on the nodes that accumulate gradients, which some wrappers for several devices add, do:
    plan the model before it is wrapped. Use `apply` to run the model as planned.

    Args:
        model: any `nn.Module`, in the mode in which it will be trained.
        args: its arguments, with the largest shapes that will occur.
        peak: the most bytes of tensors alive at any moment of a step, "8GiB" or a number: parameters, gradients, the
            optimizer's state, arguments, tapes, and what reruns need. Gradients that exist when this is called are
            assumed to exist during the step, as in gradient accumulation.
        optimizer: the optimizer that will be used, so that its state counts; on paper also a function that makes it
            from parameters, such as `torch.optim.AdamW`.
        loss: a function that takes the loss from the model's output; None takes the output's `.loss`, its `["loss"]`,
            or the output itself if it is one number.
        on_paper: allocate nothing and run nothing: for models larger than this machine.
        device: the device whose speed counts on paper: "a100", "h100", "rtx4090", or a `Device`.
        pbar: shows progress: True for a tqdm bar, a label, or an object with `update(n)`. It advances with each block
            that is measured and each whole step that is run.
        kwargs: the model's keyword arguments.

    Raises:
        BudgetError: no plan fits; the error names the least peak that works.
        InputError: another argument that cannot be used.
    """
    check_model(model)
    asked = parse_size(peak, "peak")
    _check_checkpointing(model)
    if device is not None and not on_paper:
        raise InputError(f"device={device!r} is for planning on paper; give on_paper=True too, or no device")
    card = device_of(device or "a100") if on_paper else None
    with planning(model, args, kwargs, optimizer, loss, card, Stages(pbar, "planning")) as found:
        return found.plan(asked).logged(type(model).__name__)


@contextmanager
def planning(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    optimizer: Any,
    loss: Loss | None,
    device: Device | None,
    stages: Stages,
) -> Iterator[Planning]:
    """Inside, a model may be measured and planned, for real or on paper for a device; afterwards it is as it was."""
    gradients = [parameter.grad for parameter in model.parameters()]
    held = storage_bytes([gradient for gradient in gradients if gradient is not None])
    adding = [gradient is not None for gradient in gradients]
    randomness = RandomStates([model])
    caches = torch.is_autocast_cache_enabled()
    with (
        unapplied(model),
        aside([model]),
        left_as_it_was([model]),
        hooks_aside(model.parameters()),
        warnings.catch_warnings(),
        ExitStack() as stack,
    ):
        warnings.filterwarnings("ignore", "a lean tape of .* was planned")  # forms are only tried here
        stack.callback(randomness.restore)
        cost = OptimizerCost(0, 0)
        if optimizer is not None:
            cost = optimizer_cost(optimizer, list(model.parameters()), None if device is None else "cuda")
        if device is None:
            with _added(model, adding):
                there = Resident.of(model, (args, kwargs), cost, held)
                yield Planning(model, args, kwargs, loss, there, randomness, caches, None, stages)
        else:
            with fake(model, args, kwargs) as (fake_args, fake_kwargs), _added(model, adding):
                there = Resident.of(model, (fake_args, fake_kwargs), cost, held)
                yield Planning(model, fake_args, fake_kwargs, loss, there, randomness, caches, device, stages)


def auto_checkpoint(
    model: nn.Module,
    *args: Any,
    peak: int | str,
    optimizer: Any = None,
    loss: Loss | None = None,
    pbar: Any = None,
    check_rerun: bool | None = None,
    **kwargs: Any,
) -> Plan:
    """Make a model train within a peak: `plan_model`, whose arguments these are, then `apply`. Returns the plan.

    `check_rerun` says what is compared when blocks are rerun, as for `apply`: samples, with True every bit, with False
    only shapes.
    """
    plan = plan_model(model, *args, peak=peak, optimizer=optimizer, loss=loss, pbar=pbar, **kwargs)
    apply(plan, model, check_rerun=check_rerun)
    return plan


def _check_checkpointing(model: nn.Module) -> None:
    """Refuse a model whose own gradient checkpointing is on: its blocks have no tapes to plan."""
    if getattr(model, "is_gradient_checkpointing", False):
        raise InputError(
            "the model's own gradient checkpointing is on; turn it off with model.gradient_checkpointing_disable()"
        )


@contextmanager
def _added(model: nn.Module, adding: list[bool]) -> Iterator[None]:
    """Inside, the new gradient of a parameter is freed if a training step would add it to an existing one."""

    def let_go(parameter: torch.Tensor) -> None:
        parameter.grad = None

    parameters = zip(model.parameters(), adding, strict=True)
    handles = [parameter.register_post_accumulate_grad_hook(let_go) for parameter, yes in parameters if yes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
