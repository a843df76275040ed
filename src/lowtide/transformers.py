"""Lowtide for Hugging Face transformers: the Trainer within a peak, and models' own gradient checkpointing made exact.

from lowtide.transformers import LowtideCallback
Trainer(..., callbacks=[LowtideCallback(peak="8GiB")])

The plan is made when the Trainer calls the model for the first time, with the arguments and in the environment of that
very call. So planning takes nothing from the data set and draws no random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

import lowtide.torch as lt
from lowtide.errors import InputError
from lowtide.packages import check_version, needed_for
from lowtide.plan import Plan
from lowtide.sizes import parse_size
from lowtide.torch.model.loss import Loss, loss_of
from lowtide.torch.model.trainer import Gradients, in_short, plan_step
from lowtide.torch.state.stand_in import original

with needed_for("lowtide.transformers"):
    import transformers
    from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

__all__ = ["LowtideCallback", "use_lowtide_checkpointing"]
__dir__ = sorted(__all__).copy  # what `dir` and tab completion show

check_version(transformers)


# Settings of the Trainer that cannot be combined with a plan, and why.
_REFUSED_SETTINGS = {
    "gradient_checkpointing": "it runs every layer again by itself; leave that to the plan",
    "torch_compile": "a compiled model decides by itself what to keep",
    "fsdp": "it moves parameters in and out while the model runs",
    "deepspeed": "it moves parameters in and out while the model runs",
}


class TransformersCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Trains the Trainer's model within a peak: the plan is made at the first step of training, with its batch.

    Losses and gradients are those of the run without it, to the last bit.

    Args:
        peak: the most bytes of tensors alive at any moment of a step, "8GiB" or a number: parameters, gradients, the
            optimizer's state, the batch, tapes, and what reruns need.
        batch: plan for this batch instead of the first one; give the largest if batches differ.
        loss: takes the loss from what the model returns; None takes the model's own loss, the Trainer's default.
        keep: leave the plan applied when training ends.
        verbose: print the plan when it is made, without its table of blocks.

    Attributes:
        plan: the plan, once training has begun.
    """

    def __init__(
        self,
        peak: int | str,
        *,
        batch: dict[str, Any] | None = None,
        loss: Loss | None = None,
        keep: bool = False,
        verbose: bool = True,
    ) -> None:
        self.peak = parse_size(peak, "peak")
        self.batch = batch
        self.loss = loss
        self.keep = keep
        self.verbose = verbose
        self.plan: Plan | None = None
        self._waiting: RemovableHandle | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Arrange for the model to be planned when it is first called."""
        _check(args)
        model, optimizer = kwargs["model"], _inner(kwargs["optimizer"])
        gradients = Gradients.NEVER if args.gradient_accumulation_steps > 1 else Gradients.BEFORE_FORWARD
        lt.unapply(model)
        self._stop_waiting()
        self.plan = None

        def plan(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.plan = self._planned(model, args, kwargs, optimizer, gradients)
            lt.apply(self.plan, model)
            if self.verbose and state.is_world_process_zero:
                print(in_short(self.plan))

        self._waiting = _before_first_call(model, plan)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Undo the plan, unless it is to be kept."""
        self._stop_waiting()
        if not self.keep:
            lt.unapply(kwargs["model"])

    def _planned(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        optimizer: Optimizer | None,
        gradients: Gradients,
    ) -> Plan:
        return plan_step(
            model,
            lambda *args, **kwargs: original(model)(*args, **kwargs),
            args,
            kwargs if self.batch is None else kwargs | _on_device_of(model, self.batch),
            peak=self.peak,
            optimizer=optimizer,
            gradients=gradients,
            loss=self.loss or _trainers_loss,
        )

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.remove()
            self._waiting = None


LowtideCallback = TransformersCallback  # what users import, and read in logs
LowtideCallback.__name__ = LowtideCallback.__qualname__ = "LowtideCallback"


def _before_first_call(model: nn.Module, do: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> RemovableHandle:
    """Call `do` with the arguments of a model's first call in training, just before that call."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # An evaluation before training does not count, nor does a copy of the model, which has the hook too.
        if module is model and module.training and torch.is_grad_enabled():
            handle.remove()
            do(args, kwargs)

    handle = model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    return handle


def use_lowtide_checkpointing(model: PreTrainedModel, *, every_n_layers: int = 1, **settings: Any) -> None:
    """Turn on a model's own gradient checkpointing, with `lowtide.torch.checkpoint` in place of torch's.

    The model still decides which layers are run again. State that they change, such as BatchNorm's statistics and
    counters, changes only once; random numbers of every kind are the same in a rerun; a rerun ends as soon as it has
    what the backward needs. To undo it, call `model.gradient_checkpointing_disable()`, or
    `gradient_checkpointing_enable()` to go back to torch's.

    Args:
        model: a model of transformers that supports gradient checkpointing.
        every_n_layers: run only every n-th layer again.
        settings: keyword arguments of `lowtide.torch.checkpoint`, such as `check_rerun=True`.

    Raises:
        InputError: the model does not support it.
    """
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise InputError(
            f"{type(model).__name__} has no gradient checkpointing of its own; plan it with "
            "lowtide.torch.auto_checkpoint"
        )
    wanted = bool(getattr(model, "_require_grads_hooks", None))
    model.gradient_checkpointing_enable(every_n_layers=every_n_layers)
    if not wanted:
        # Only torch's reentrant checkpoint needs inputs that require grad, and disabling checkpointing keeps them so.
        model.disable_input_require_grads()
    checkpoint = _Checkpoint(settings)
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = checkpoint


class _Checkpoint:
    """`lowtide.torch.checkpoint` with fixed keyword arguments."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings

    def __call__(self, function: Any, *args: Any) -> Any:
        """Call a layer."""
        return lt.checkpoint(function, *args, **self._settings)


def _check(args: TrainingArguments) -> None:
    for name, why in _REFUSED_SETTINGS.items():
        if getattr(args, name):
            raise InputError(f"LowtideCallback does not go with TrainingArguments({name}=...): {why}; take one of them")
    if args.n_gpu > 1:
        raise InputError(
            f"one process with {args.n_gpu} GPUs copies the model for each; start one process for each GPU (torchrun)"
        )


def _inner(optimizer: Any) -> Optimizer | None:
    """The optimizer that accelerate has wrapped."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer  # type: ignore[no-any-return]  # whatever the Trainer has


def _trainers_loss(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else loss_of(output, None)


def _on_device_of(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    device = next(model.parameters()).device
    return tree_map(  # type: ignore[no-any-return]  # a dictionary, as it was
        lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, dict(batch)
    )
