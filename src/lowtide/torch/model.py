"""`plan_model`, `auto_checkpoint`: a whole training step within a peak, in one line.

The model is put aside (`planning`), measured and planned (`model_planning.py`), and put back as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lowtide.errors import InputError
from lowtide.plan import Plan
from lowtide.progress import Stages
from lowtide.sizes import parse_size
from lowtide.torch.devices import Device, device_of
from lowtide.torch.measure import storage_bytes
from lowtide.torch.model_apply import apply, check_model, unapplied
from lowtide.torch.model_loss import Loss, hooks_aside
from lowtide.torch.model_planning import Planning
from lowtide.torch.model_step import Resident
from lowtide.torch.optimizer_bytes import OptimizerCost, optimizer_cost
from lowtide.torch.paper import on_paper as fake
from lowtide.torch.traceless import RandomStates, aside, left_as_it_was, objects_aside


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

    The model is measured, and left as it was: parameters, gradients, buffers, random numbers. Its hooks on parameters
    are silent meanwhile; hooks on the nodes that accumulate gradients, as some wrappers for several devices have them,
    are not, so plan the model before it is wrapped. See `apply`.

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
        pbar: shows how far it is: True for a tqdm bar, a label, or an object with `update(n)`. It moves for each block
            that is measured and for each whole step that is run.
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
    card = device_of(device or "a100") if on_paper else None
    with planning(model, args, kwargs, optimizer, loss, card, Stages(pbar, "planning")) as found:
        return found.plan(asked)


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
        hooks_aside(model.parameters()),
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
    **kwargs: Any,
) -> Plan:
    """Let a model train within a peak: `plan_model`, then `apply`. Gives the plan; see there for the arguments."""
    plan = plan_model(model, *args, peak=peak, optimizer=optimizer, loss=loss, pbar=pbar, **kwargs)
    apply(plan, model)
    return plan


def _check_checkpointing(model: nn.Module) -> None:
    """A model that checkpoints its blocks itself leaves nothing to plan."""
    if getattr(model, "is_gradient_checkpointing", False):
        raise InputError(
            "the model's own gradient checkpointing is on; turn it off with model.gradient_checkpointing_disable()"
        )


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
