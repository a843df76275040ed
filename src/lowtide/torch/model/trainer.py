"""Plans a training step as a trainer runs it: with the code around the model, and with gradients of the batch before.

`plan_model` plans `model(*args)`, starting without gradients. A trainer may call the model from a function of its own,
and the gradients of the batch before may still exist while the model runs. So, during planning, the model's `forward`
is replaced by a function that creates such gradients and runs the whole step.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lowtide.plan import Plan
from lowtide.torch.model.loss import Loss
from lowtide.torch.model.planning import plan_model
from lowtide.torch.state.stand_in import StandIn, original, standing_in

Step = Callable[..., Any]


class Gradients(Enum):
    """When the gradients of the batch before are freed."""

    BEFORE_FORWARD = "before the forward"
    BEFORE_BACKWARD = "between forward and backward"
    NEVER = "never: they are added to"


def plan_step(
    model: nn.Module,
    step: Step,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    peak: int | str,
    optimizer: Optimizer | None,
    gradients: Gradients,
    loss: Loss | None = None,
) -> Plan:
    """The fastest plan with which `step(*args, **kwargs)`, which runs the model, and its backward stay within a peak.

    Args:
        model: the model whose submodules are planned; it is left as it was.
        step: returns what `loss` takes the loss from. It may call the model, or only submodules of it.
        args: the arguments of `step`.
        kwargs: its keyword arguments.
        peak: see `plan_model`.
        optimizer: see `plan_model`.
        gradients: when the gradients of the batch before are freed.
        loss: see `plan_model`.
    """
    with standing_in([_WholeStep(model, step, gradients)]):
        # As two arguments, so that no keyword of the step is taken for one of `plan_model`.
        return plan_model(model, args, kwargs, peak=peak, optimizer=optimizer, loss=loss)


def in_short(plan: Plan) -> str:
    """The plan as text, without its table of blocks."""
    return "\n".join(f"{name:<8}  {text}" for name, text in plan.lines())


class _WholeStep(StandIn):
    """Runs the whole step when the model is called, and the model itself when the step calls it."""

    def __init__(self, model: nn.Module, step: Step, gradients: Gradients) -> None:
        super().__init__(model)
        self._step = step
        self._gradients = gradients
        self._runs = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step, or the model inside it."""
        if self._runs:
            return original(self.module)(*args, **kwargs)
        self._runs = True
        try:
            for parameter in self.module.parameters():
                # Free a gradient of an earlier run. One of the batch before is made here, so that it is tracked.
                parameter.grad = None
                if parameter.requires_grad and self._gradients is not Gradients.BEFORE_FORWARD:
                    parameter.grad = torch.zeros_like(parameter)
            result = self._step(*args[0], **args[1])
            if self._gradients is Gradients.BEFORE_BACKWARD:
                for parameter in self.module.parameters():
                    parameter.grad = None
            return result
        finally:
            self._runs = False
