"""Runs a module of a model in a planned way: checkpointed, with a lean tape, or as nested checkpoint calls."""

from __future__ import annotations

from typing import Any

from torch import nn

from lowtide.forms import LeanForm, Way
from lowtide.torch.checkpoint.call import checkpoint
from lowtide.torch.layers.nested import run_nest
from lowtide.torch.lean.call import lean
from lowtide.torch.lean.graph import LeanSize
from lowtide.torch.lean.on_paper import is_on_paper, lean_on_paper
from lowtide.torch.state.stand_in import original


def run_plainly(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module's own `forward`, whatever stands in for it. Lean calls are cached under this function."""
    return original(module)(*args, **kwargs)


def run_way(
    way: Way, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], check_rerun: bool | None = None
) -> Any:
    """Run a module's own `forward` in this way; see `checkpoint` for `check_rerun`."""
    if way.nest is not None:
        return run_nest(way.nest, module, *args, **kwargs, check_rerun=check_rerun)
    if way.rerun and way.lean is not None:
        return checkpoint(_leanly, module, args, kwargs, way.lean, check_rerun=check_rerun)
    if way.rerun:
        return checkpoint(run_plainly, module, args, kwargs, check_rerun=check_rerun)
    return _leanly(module, args, kwargs, way.lean)


def _leanly(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], form: LeanForm | None) -> Any:
    run = lean_on_paper if is_on_paper() else lean
    size = None if form is None else LeanSize(form.tape, form.working, strict=False)
    return run(run_plainly, module, args, kwargs, tape=size)
