"""Lowtide for Lightning: a LightningModule that is trained within a peak.

from lowtide.lightning import LowtideCallback
Trainer(..., callbacks=[LowtideCallback(peak="8GiB")])

The plan is for `training_step`, with the first batch and the trainer's precision. Nothing is logged while the step is
run for planning.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lowtide.torch as lt
from lowtide.errors import InputError
from lowtide.packages import check_version, needed_for
from lowtide.plan import Plan
from lowtide.sizes import parse_size
from lowtide.torch.model.trainer import Gradients, in_short, plan_step

try:
    import lightning
    from lightning.pytorch import Callback
    from lightning.pytorch.loggers.logger import DummyLogger
except ImportError:  # the same package under its earlier name
    with needed_for("lowtide.lightning"):
        import pytorch_lightning as lightning
        from pytorch_lightning import Callback
        from pytorch_lightning.loggers.logger import DummyLogger

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["LowtideCallback"]
__dir__ = sorted(__all__).copy  # what `dir` and tab completion show

check_version(lightning)


_LOGGING_METHODS = ("log", "log_dict", "print")


class LightningCallback(Callback):  # type: ignore[misc]  # lightning is not followed
    """Trains a LightningModule within a peak: the plan is made at the first batch of training.

    Losses and gradients are those of the run without it, to the last bit.

    Args:
        peak: the most bytes of tensors alive at any moment of a step, "8GiB" or a number: parameters, gradients, the
            optimizer's state, the batch, tapes, and what reruns need.
        batch: plan for this batch instead of the first one; give the largest if batches differ.
        keep: leave the plan applied when training ends.
        verbose: print the plan when it is made, without its table of blocks.

    Attributes:
        plan: the plan, once training has begun.
    """

    def __init__(self, peak: int | str, *, batch: Any = None, keep: bool = False, verbose: bool = True) -> None:
        self.peak = parse_size(peak, "peak")
        self.batch = batch
        self.keep = keep
        self.verbose = verbose
        self.plan: Plan | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Discard the plan of an earlier training."""
        if not pl_module.automatic_optimization:
            raise InputError(
                f"{type(pl_module).__name__} optimizes by hand, so its training_step cannot be run to be measured; "
                "plan the network inside it with lowtide.torch.auto_checkpoint"
            )
        lt.unapply(pl_module)
        self.plan = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Make and apply the plan at the first batch."""
        if self.plan is not None:
            return
        if self.batch is not None:
            batch = trainer.strategy.batch_to_device(self.batch)
        accumulates = trainer.accumulate_grad_batches > 1
        with _nothing_logged(trainer, pl_module):
            self.plan = plan_step(
                pl_module,
                _step_of(trainer, pl_module),
                (batch, batch_idx),
                {},
                peak=self.peak,
                optimizer=trainer.optimizers[0] if trainer.optimizers else None,
                # Lightning frees gradients between the forward and the backward.
                gradients=Gradients.NEVER if accumulates else Gradients.BEFORE_BACKWARD,
            )
        lt.apply(self.plan, pl_module)
        if self.verbose and trainer.is_global_zero:
            print(in_short(self.plan))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Undo the plan, unless it is to be kept."""
        if not self.keep:
            lt.unapply(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Undo the plan when training fails, too."""
        self.on_train_end(trainer, pl_module)


LowtideCallback = LightningCallback  # what users import, and read in logs
LowtideCallback.__name__ = LowtideCallback.__qualname__ = "LowtideCallback"


def _step_of(trainer: Trainer, module: LightningModule) -> Any:
    """A function that runs a training step as the trainer does."""
    parameters = inspect.signature(module.training_step).parameters.values()
    takes_index = len(parameters) > 1 or any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)

    def step(batch: Any, batch_idx: int) -> Any:
        with trainer.precision_plugin.train_step_context():
            return module.training_step(batch, batch_idx) if takes_index else module.training_step(batch)

    return step


@contextmanager
def _nothing_logged(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """Discard whatever a training step logs, by any of Lightning's ways to log."""
    loggers = trainer.loggers
    for name in _LOGGING_METHODS:
        module.__dict__[name] = _silent
    trainer.loggers = [DummyLogger()] if loggers else []
    try:
        yield
    finally:
        trainer.loggers = loggers
        for name in _LOGGING_METHODS:
            del module.__dict__[name]


def _silent(*args: Any, **kwargs: Any) -> None:
    """Log nothing."""
