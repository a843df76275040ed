"""`plan_model`, `auto_checkpoint`: a whole training step within a peak, in one line.

First one forward shows the blocks (`model_blocks.py`). Then each kind of block is run by itself in all its forms
(`model_costs.py`), and a whole step with every block in its smallest (`model_step.py`): that makes a chain, for which
the core chooses forms. Then the step is run once as planned, and where it takes more than predicted, planned again.
"""

from __future__ import annotations

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

from lowtide.chain import Chain
from lowtide.errors import BudgetError, InputError
from lowtide.plan import Knob, Plan
from lowtide.planners.blocks import Blocks, choose_blocks, least_peak
from lowtide.sizes import format_size, parse_size
from lowtide.torch.devices import Device, device_of
from lowtide.torch.layer_groups import unpack_dropped
from lowtide.torch.measure import storage_bytes, watching
from lowtide.torch.model_apply import apply, check_model, unapplied, unapply
from lowtide.torch.model_blocks import FoundBlock, Survey, few
from lowtide.torch.model_costs import Bench, BlockCost
from lowtide.torch.model_step import BaseRun, Resident
from lowtide.torch.optimizer_bytes import OptimizerCost, optimizer_cost
from lowtide.torch.paper import on_paper as fake
from lowtide.torch.stand_in import StandIn, plainly, standing_in
from lowtide.torch.storages import Log, tensors_of
from lowtide.torch.traceless import RandomStates, aside, left_as_it_was, objects_aside

Loss = Callable[[Any], torch.Tensor]
# Shares of the peak asked for by which a plan aims lower: predictions were never so much too low in the tests, where
# the step is run once as planned, and where it is not.
MARGIN = 0.01
MARGIN_ON_PAPER = 0.03
_TRIES = 6
_DRAWS = 16
_SLACK = 1.005
_WELL_PREDICTED = 0.05
_WAYS = "raise the peak, give smaller arguments (a smaller batch), or an optimizer with less state"


def plan_model(
    model: nn.Module,
    *args: Any,
    peak: int | str,
    optimizer: Any = None,
    loss: Loss | None = None,
    on_paper: bool = False,
    device: str | Device | None = None,
    **kwargs: Any,
) -> Plan:
    """The fastest plan with which a whole training step of the model stays within a peak.

    The model is measured, and left as it was: parameters, gradients, buffers, random numbers. See `apply`.

    Args:
        model: any `nn.Module`, in the mode in which it will be trained.
        args: what it is called with, in the largest form that will come.
        peak: most bytes of tensors alive at any moment of a step, "8GiB" or a number: parameters, gradients, the
            optimizer's state, arguments, tapes, and what reruns need. Gradients that are there when it is called are
            taken to be there during the step, as where they are accumulated.
        optimizer: the one that will be used, so that its state counts; on paper also a function of parameters that
            makes it, such as `torch.optim.AdamW`.
        loss: takes the loss from what the model returns; None takes its `.loss`, its `["loss"]`, or the one number
            that it is.
        on_paper: allocate nothing and run nothing: for models larger than this machine.
        device: whose speed counts on paper: "a100", "h100", "rtx4090", or a `Device`.
        kwargs: more arguments of the model.

    Raises:
        BudgetError: no plan fits; it names the least peak that works.
        InputError: another argument that cannot be used.
    """
    check_model(model)
    asked = parse_size(peak, "peak")
    _check_checkpointing(model)
    if device is not None and not on_paper:
        raise InputError(f"device={device!r} is for planning on paper; give on_paper=True too, or no device")
    with planning(model, args, kwargs, optimizer, loss, device_of(device or "a100") if on_paper else None) as found:
        return found.plan(asked)


@contextmanager
def planning(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    optimizer: Any,
    loss: Loss | None,
    device: Device | None,
) -> Iterator[Planning]:
    """Inside, a model may be measured and planned: for a device on paper, or for real; afterwards it is as it was."""
    gradients = [parameter.grad for parameter in model.parameters()]
    held = storage_bytes([gradient for gradient in gradients if gradient is not None])
    adding = [gradient is not None for gradient in gradients]
    randomness = RandomStates([model])
    caches = torch.is_autocast_cache_enabled()
    with (
        unapplied(model),
        aside([model]),
        left_as_it_was([model]),
        objects_aside(model),
        _hooks_aside(model),
        warnings.catch_warnings(),
        ExitStack() as stack,
    ):
        warnings.filterwarnings("ignore", "a lean tape of .* was planned")  # planned here, and not for good
        stack.callback(randomness.restore)
        cost = OptimizerCost(0, 0)
        if optimizer is not None:
            cost = optimizer_cost(optimizer, list(model.parameters()), None if device is None else "cuda")
        if device is None:
            with _added(model, adding):
                there = Resident.of(model, (args, kwargs), cost, held)
                yield Planning(model, args, kwargs, loss, there, randomness, caches, None)
        else:
            with fake(model, args, kwargs) as (fake_args, fake_kwargs), _added(model, adding):
                there = Resident.of(model, (fake_args, fake_kwargs), cost, held)
                yield Planning(model, fake_args, fake_kwargs, loss, there, randomness, caches, device)


def least_to_ask_for(chain: Chain, share: float) -> int:
    """The least peak for which a plan can aim lower by such a share of it."""
    return math.ceil(least_peak(chain) / (1 - share))


def auto_checkpoint(
    model: nn.Module,
    *args: Any,
    peak: int | str,
    optimizer: Any = None,
    loss: Loss | None = None,
    **kwargs: Any,
) -> Plan:
    """Let a model train within a peak: `plan_model`, then `apply`. Gives the plan; see there for the arguments."""
    plan = plan_model(model, *args, peak=peak, optimizer=optimizer, loss=loss, **kwargs)
    apply(plan, model)
    return plan


def loss_of(output: Any, loss: Loss | None) -> torch.Tensor:
    """The loss in what a model returned."""
    value: Any
    if loss is not None:
        value = loss(output)
    elif isinstance(output, torch.Tensor):
        value = output
    elif isinstance(output, dict) and "loss" in output:
        value = output["loss"]
    else:
        value = getattr(output, "loss", None)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        what = (
            f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(type(value).__name__)
        )
        raise InputError(
            f"the model's {type(output).__name__} gives no loss of one number, but {what}; give loss=, a function that "
            "takes the loss from what the model returns"
        )
    if not value.requires_grad:
        raise InputError("the loss needs no gradient, so there is nothing to plan; let a parameter require one")
    return value


def _check_checkpointing(model: nn.Module) -> None:
    """A model that checkpoints its blocks itself leaves nothing to plan."""
    if getattr(model, "is_gradient_checkpointing", False):
        raise InputError(
            "the model's own gradient checkpointing is on; turn it off with model.gradient_checkpointing_disable()"
        )


@contextmanager
def _hooks_aside(model: nn.Module) -> Iterator[None]:
    """Inside, parameters' hooks are silent: some take an optimizer's step."""
    hooked = [
        (hooks, dict(hooks))
        for parameter in model.parameters()
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
        if (hooks := getattr(parameter, name))
    ]
    for hooks, _ in hooked:
        hooks.clear()  # the very dictionary that the engine looks into
    try:
        yield
    finally:
        for hooks, before in hooked:
            hooks.update(before)


@contextmanager
def _added(model: nn.Module, adding: list[bool]) -> Iterator[None]:
    """Inside, a new gradient is let go where it would be added to one that is there."""

    def let_go(parameter: torch.Tensor) -> None:
        parameter.grad = None

    parameters = zip(model.parameters(), adding, strict=True)
    handles = [parameter.register_post_accumulate_grad_hook(let_go) for parameter, yes in parameters if yes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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
    ) -> None:
        self._model = model
        self._args = args
        self._kwargs = kwargs
        self._loss = loss
        self._device = device
        self._resident = resident
        self._notes: list[str] = []
        self._randomness = randomness
        self._caches = caches

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
        base = BaseRun(self._costs(survey.blocks(), timed), self._notes, self._device is not None)
        base.run(self._step)
        if not base.blocks:
            self._notes.append("nothing of this model can be planned: it runs as it is")
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
                self._notes.append(f"{path} was not called in the step that was measured: planned like {sibling}")
        longer = Chain.of([step for _, step in rows], [name for name, _ in rows])
        return replace(longer, parameters=chain.parameters, gradients=chain.gradients)

    def plan(self, peak: int) -> Plan:
        """The fastest plan within the peak."""
        chain = self.measure()
        on_paper = self._device is not None
        least = least_to_ask_for(chain, MARGIN_ON_PAPER if on_paper else 0.0)
        if peak < least and on_paper:
            raise BudgetError(peak, least, _WAYS, "peak")
        # A plan that will be run once needs no more room than there is.
        margin = int(peak * MARGIN_ON_PAPER) if on_paper else max(0, min(int(peak * MARGIN), peak - least))
        aim = peak - margin
        for _ in range(_TRIES):
            if aim < least:
                break
            plan = self._planned(chain, peak, aim)
            if on_paper:
                return plan
            measured = self._measured(plan)
            if measured <= peak:
                return self._noted(plan, measured)
            aim = plan.bill.peak_memory - (measured - peak)
        plan = self._planned(chain, peak, least)
        measured = self._measured(plan)
        if peak < max(least, measured):
            # A step that took more than predicted may take a little more the next time.
            raise BudgetError(peak, least if measured <= least else math.ceil(measured * _SLACK), _WAYS, "peak")
        return self._noted(plan, measured)

    def _noted(self, plan: Plan, measured: int) -> Plan:
        """The plan with a word about a prediction that was not good."""
        if abs(measured / plan.bill.peak_memory - 1) <= _WELL_PREDICTED:
            return plan
        note = f"a step that was run as planned took {format_size(measured)} at its worst moment, not what is predicted"
        assert isinstance(plan.schedule, Blocks)
        return replace(plan, schedule=replace(plan.schedule, notes=(*plan.schedule.notes, note)))

    def _planned(self, chain: Chain, peak: int, aim: int) -> Plan:
        """The fastest plan that is predicted to stay within what it aims at."""
        held = self._resident
        options = choose_blocks(chain, aim, ways=_WAYS)
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
            torch.set_autocast_cache_enabled(self._caches)
            output = self._model(*args, **kwargs)
            value = loss_of(output, self._loss)
            ours = (*self._model.parameters(), *tensors_of((args, kwargs)))
            value.backward(inputs=[t for t in ours if t.requires_grad])  # a loss may have parameters of its own
            torch.clear_autocast_cache()
            torch.set_autocast_cache_enabled(False)
            return output, value

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
                try:
                    costs[kind] = bench.cost(block, args, kwargs)
                except RuntimeError as error:
                    costs[kind] = None
                    self._notes.append(f"{block.name} cannot be run by itself, and is left as it is: {error}")
            cost = costs[kind]
            if cost is not None:
                found[block] = cost

        self._randomness.restore()
        args, kwargs = self._arguments()
        hooks = saved_tensors_hooks(_let_go, unpack_dropped)
        with hooks, standing_in([_Probe(block, probe, hooks) for block in blocks]):
            self._model(*args, **kwargs)
        return [(block, found[block]) for block in blocks if block in found]

    def _measured(self, plan: Plan) -> int:
        """Bytes at the worst moment of a step that is run as planned."""
        log, step = Log(), self._step()
        apply(plan, self._model)
        try:
            with watching(log):
                held = step()
        finally:
            unapply(self._model)
        del held
        return self._resident.before + log.level(0, len(log.events))[1]


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
