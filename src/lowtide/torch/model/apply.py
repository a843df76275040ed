"""`apply(plan, model)` changes how some submodules run their `forward`; `unapply(model)` undoes that.

A planned submodule has an instance attribute `forward`, which hides that of its class. Hooks, `state_dict`, parameters
and names are untouched, and copies and pickles of the model have the plan too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from lowtide.chain import Role
from lowtide.errors import InputError
from lowtide.forms import Form, Way
from lowtide.plan import Plan
from lowtide.planners.blocks import Blocks
from lowtide.torch.layers.nested import check_nest
from lowtide.torch.model.forms import run_way
from lowtide.torch.state.stand_in import StandIn, standing_in, stands_in

ROOT = "."  # the name of a block that is the whole model


class PlannedForward(StandIn):
    """A module's `forward`, run as planned in training, and as ever in eval mode and without grad.

    Args:
        module: the module whose `forward` it is.
        way: how to run it.
        in_eval: run it as planned in eval mode too, for a module that is in eval mode while the model is trained.
        check_rerun: see `apply`.
    """

    def __init__(self, module: nn.Module, way: Way, *, in_eval: bool, check_rerun: bool | None = None) -> None:
        super().__init__(module)
        self.way = way
        self.in_eval = in_eval
        self.check_rerun = check_rerun

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, as planned if a tape is kept."""
        module = self.module
        if not self.is_on or not torch.is_grad_enabled() or not (module.training or self.in_eval):
            return self.original(*args, **kwargs)
        return run_way(self.way, module, args, kwargs, self.check_rerun)

    def __repr__(self) -> str:
        return f"<forward of {type(self.module).__name__}: {self.way}>"


def apply(plan: Plan, model: nn.Module, *, check_rerun: bool | None = None) -> None:
    """Make a model run as planned in training, with the same results and gradients to the last bit.

    The model stays the same object, with its hooks, parameters and `state_dict`; copies and pickles of it have the plan
    too. In eval mode and without grad it runs as before. A plan that was applied earlier is removed first.

    Args:
        plan: a plan that `plan_model` or `Plan.from_json` returned.
        model: the model that was planned, or one like it.
        check_rerun: what is compared when a block is rerun, of the tensors that autograd saves in both runs: by default
            samples, small tensors whole and at least 1,024 numbers of a large one; with True every bit, with False only
            shapes. A difference is a `CheckpointError` in the backward; `.grad` is then not to be trusted.

    Raises:
        InputError: the plan is not for such a model. Nothing has changed.
    """
    check_model(model)
    ways = ways_of(plan, model)
    unapply(model)
    for module, way in ways:
        PlannedForward(module, way, in_eval=not module.training, check_rerun=check_rerun).install()


def unapply(model: nn.Module) -> None:
    """Make a model run as it did before `apply`."""
    check_model(model)
    for forward in _planned(model):
        forward.remove()


@contextmanager
def unapplied(model: nn.Module) -> Iterator[None]:
    """Inside, the model runs without its plan; afterwards the plan is applied again."""
    planned = [(forward, forward.module.__dict__.get("forward")) for forward in _planned(model) if forward.is_on]
    unapply(model)
    try:
        yield
    finally:
        for forward, outermost in planned:
            forward.install()
            forward.module.__dict__["forward"] = outermost


def run_in(form: Form, block: nn.Module) -> AbstractContextManager[None]:
    """Inside, the block runs in this form."""
    return standing_in([PlannedForward(block.get_submodule(path), way, in_eval=True) for path, way in form.ways])


def ways_of(plan: Plan, model: nn.Module) -> list[tuple[nn.Module, Way]]:
    """The modules of the model that the plan changes, and how each is to run."""
    if not isinstance(plan, Plan) or not isinstance(plan.schedule, Blocks):
        what = f"one by {plan.planner}" if isinstance(plan, Plan) else f"a {type(plan).__name__}"
        raise InputError(f"the plan is {what}, not one for a model; make one with plan_model")
    ways = []
    for k, option in enumerate(plan.schedule.options):
        if plan.chain.role(k) is Role.BLOCK:
            name, entry = plan.chain.names[k], plan.chain[k].menu[option]
            if entry.form is None:
                raise InputError(
                    f"there is no form {entry.name!r}: the plan was not made by plan_model of this version"
                )
            block = _submodule(model, "" if name == ROOT else name)
            for path, way in entry.form.ways:
                module = _submodule(block, path)
                if way.nest is not None:
                    check_nest(way.nest, module)
                ways.append((module, way))
    return ways


def check_model(model: Any) -> None:
    """Raise `InputError` if it is not an `nn.Module`."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; give an nn.Module")


def _submodule(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        inner = getattr(model, "module", None)
        hint = " (give its .module, which it wraps)" if isinstance(inner, nn.Module) else ""
        raise InputError(
            f"the plan has a block {path!r}, and this {type(model).__name__} has none{hint}; plan again with plan_model"
        ) from error


def _planned(model: nn.Module) -> list[PlannedForward]:
    forwards = map(stands_in, model.modules())
    return [forward for forward in forwards if isinstance(forward, PlannedForward)]
