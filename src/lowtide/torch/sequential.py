"""Rows of layers in bounded memory: `sequential` by a plan, `checkpoint_sequential` in segments.

Layers are measured once for each form of input (`layers.py`), planned by the core, and run as nested checkpoint calls
on the graph that autograd makes anyway (`nest.py`). So results and gradients are those of the plain run to the last
bit, hooks fire once, weights may be shared, and gradients of gradients work.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lowtide.chain import Chain
from lowtide.checks import function
from lowtide.errors import InputError
from lowtide.plan import Plan
from lowtide.segments import balanced, segment_count
from lowtide.sizes import parse_budget
from lowtide.torch import recording
from lowtide.torch.layer_forms import Forms
from lowtide.torch.layer_plans import LayerPlans
from lowtide.torch.layers import measure_layers
from lowtide.torch.nest import Part, Runner, has_forms, nest_of
from lowtide.torch.signature import Known
from lowtide.torch.traceless import Layer

Layers = nn.Sequential | nn.ModuleList | list[Layer] | tuple[Layer, ...]
Contexts = Iterable[Callable[[], AbstractContextManager[Any]]]

_transformed = torch._C._functorch.peek_interpreter_stack
_STEP_NAME = re.compile(r"([0-9]+)(?:-([0-9]+))? ")


_known: Known[LayerPlans] = Known(64)
_known_whole: Known[LayerPlans] = Known(64)  # with whole tapes only


def sequential(
    layers: Layers,
    x: Any,
    *,
    budget: int | str | None = None,
    plan: Plan | None = None,
    contexts: Contexts = (),
    check_rerun: bool = False,
) -> Any:
    """Run layers one after the other, like `nn.Sequential`, in bounded memory.

    The first call with an input of some form runs every layer a few times to measure it; later ones do not. With
    neither knob it is the least memory that runs no layer more than one extra time.

    Args:
        layers: an `nn.Sequential`, an `nn.ModuleList`, or a list of functions; each gets what the one before returned.
        x: what the first layer gets: a tensor, or any nested value.
        budget: bytes for snapshots, tape and working set: 67108864, "64MiB", or "40%" of all tapes.
        plan: what `plan_sequential` returned.
        contexts: context managers, as functions that make them, that layers need around them when they run again.
        check_rerun: compare everything that layers compute when they run again with what they computed first.

    Raises:
        BudgetError: no plan fits; it names the least budget that works. Nothing has changed.
        InputError: another argument that cannot be used.
    """
    return _uncompiled(_sequential)(layers, x, budget, plan, contexts, check_rerun)


def _sequential(
    layers: Layers, x: Any, budget: int | str | None, plan: Plan | None, contexts: Contexts, check_rerun: bool
) -> Any:
    row = _listed(layers, "layers")
    _check_knobs(budget, plan)
    if not row or _runs_plainly():
        return _plainly(row, x)
    options = {"contexts": tuple(contexts), "check_rerun": check_rerun}
    if plan is not None:
        bounds, parts = _bounds(plan, len(row)), nest_of(plan)
        if has_forms(parts):  # which are traced beside the run, not in its memory
            _costs(row, x)
        return _run(row, bounds, parts, x, options, plan.chain)
    costs = _costs(row, x)
    if costs is None or costs.row.chain is None:
        return _plainly(row, x)
    return _run(row, costs.row.bounds, costs.plan(budget)[1], x, options, costs.row.chain)


def plan_sequential(layers: Layers, x: Any, *, budget: int | str | None = None) -> Plan:
    """The plan that `sequential` would run, with its bill; the layers are measured and left as they were.

    Each step of its chain is a layer, or several that cannot be parted: its name says which.
    """
    row = _listed(layers, "layers")
    _check_knobs(budget, None)
    if not row:
        raise InputError("there are 0 layers, which need no plan; give at least one")
    costs = _costs(row, x)
    if costs is None:
        raise InputError("a layer has parameters without a shape yet, so it cannot be measured; call the layers first")
    if costs.row.chain is None:
        raise InputError(
            f"none of the {len(row):,} layers makes a tape, so there is nothing to plan; let the input or a parameter "
            "require a gradient"
        )
    return costs.plan(budget)[0]


def checkpoint_sequential(
    functions: Layers,
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,  # noqa: ARG001  (torch's word)
    preserve_rng_state: bool = True,
) -> Any:
    """`torch.utils.checkpoint.checkpoint_sequential` with segments of equal tapes instead of equal numbers of layers.

    Each segment but the last is run again when the backward gets there. The cut depends on bytes alone: it is the same
    on every run and every rank. Layers that change their input in place stay in one segment with the layer before.

    Args:
        functions: an `nn.Sequential`, an `nn.ModuleList`, or a list of functions.
        segments: how many, at least 1; of more than there are layers, one for each.
        input: what the first layer gets: a tensor, or any nested value; a tuple is one value.
        use_reentrant: accepted, and makes no difference.
        preserve_rng_state: let a segment that is run again draw the same random numbers.
    """
    return _uncompiled(_checkpoint_sequential)(functions, segments, input, preserve_rng_state)


def _checkpoint_sequential(functions: Layers, segments: int, input: Any, preserve_rng_state: bool) -> Any:
    row = _listed(functions, "functions")
    count = segment_count(segments, len(row))
    if count == 1 or _runs_plainly():
        return _plainly(row, input)
    costs = _costs(row, input, forms=False)
    if costs is None or costs.row.chain is None:
        return _plainly(row, input)
    chain, bounds = costs.row.chain, costs.row.bounds
    cut = balanced([chain[k].tape for k in range(len(chain))], min(count, len(chain)))
    parts = [Part(start, stop, (Part(start, stop),)) for start, stop in cut[:-1]]
    return _run(row, bounds, (*parts, Part(*cut[-1])), input, {"preserve_rng_state": preserve_rng_state}, chain)


class Sequential(nn.Sequential):
    """An `nn.Sequential` that runs within a budget: the same submodules, the same `state_dict`, the same results.

    Args:
        model: the `nn.Sequential` whose submodules it takes, under the same names.
        budget: see `sequential`.
        plan: see `sequential`.
    """

    def __init__(self, model: nn.Sequential, *, budget: int | str | None = None, plan: Plan | None = None) -> None:
        if not isinstance(model, nn.Sequential):
            raise InputError(f"model is a {type(model).__name__}; give an nn.Sequential")
        _check_knobs(budget, plan)
        super().__init__()
        for name, child in model._modules.items():
            self.add_module(name, child)
        self.training = model.training
        self.budget = budget
        self.plan = plan

    def forward(self, input: Any) -> Any:
        """See `sequential`."""
        return sequential(self, input, budget=self.budget, plan=self.plan)

    def __getitem__(self, idx: int | slice) -> Any:
        if not isinstance(idx, slice):
            return super().__getitem__(idx)
        part = nn.Sequential(OrderedDict(list(self._modules.items())[idx]))
        return type(self)(part, budget=self.budget)

    def extra_repr(self) -> str:
        """What `repr` shows beside the submodules."""
        return f"budget={self.budget!r}" if self.plan is None else f"plan={self.plan!r}"


def _listed(layers: Any, name: str) -> list[Layer]:
    """The layers in a list, each one callable."""
    if not isinstance(layers, nn.Sequential | nn.ModuleList | list | tuple):
        raise InputError(
            f"{name} is a {type(layers).__name__}; give an nn.Sequential, an nn.ModuleList, or a list of functions"
        )
    row = list(layers)
    for k, layer in enumerate(row):
        function(layer, f"{name}[{k}]")
    return row


def _check_knobs(budget: int | str | None, plan: Plan | None) -> None:
    if budget is not None and plan is not None:
        raise InputError(f"budget={budget!r} and plan={plan!r} are two knobs; give one of budget and plan, or none")
    if plan is not None and not isinstance(plan, Plan):
        raise InputError(f"plan={plan!r} is a {type(plan).__name__}; give what plan_sequential returned")
    if budget is not None:
        parse_budget(budget, 2**40)


def _uncompiled(run: Callable[..., Any]) -> Callable[..., Any]:
    """In code that is being compiled, the same but run as it is: measuring and saved-tensor hooks cannot be traced."""
    return torch._dynamo.disable(run) if torch.compiler.is_compiling() else run


def _runs_plainly() -> bool:
    """Without grad, in a comparison, or in a transform such as `torch.func.grad`, which keeps no tape of this kind."""
    return not torch.is_grad_enabled() or recording.runs_plainly() or _transformed() is not None


def _plainly(row: list[Layer], x: Any) -> Any:
    for layer in row:
        x = layer(x)
    return x


def _costs(row: list[Layer], x: Any, *, forms: bool = True) -> LayerPlans | None:
    """What the layers cost; None as long as one has parameters without a shape, which the plain run would make."""

    def measured() -> LayerPlans:
        if any(is_lazy(p) for layer in row if isinstance(layer, nn.Module) for p in layer.parameters()):
            raise _Shapeless
        return LayerPlans(measure_layers(row, x, forms=forms))

    try:
        return (_known if forms else _known_whole).get(row, x, measured)
    except _Shapeless:
        return None


class _Shapeless(Exception):  # noqa: N818  (it is no error)
    """A layer cannot be measured yet."""


def _bounds(plan: Plan, layers: int) -> tuple[tuple[int, int], ...]:
    """The layers [start, stop) of each step of a plan: those that its name says, or one for each."""
    bounds: list[tuple[int, int]] = []
    for k in range(len(plan.chain)):
        match = _STEP_NAME.match(plan.chain.names[k] if plan.chain.names else f"{k} ")
        start = -1 if match is None else int(match[1])
        if match is None or (bounds and bounds[-1][1] != start):
            name = plan.chain.name(k)
            raise InputError(f"the plan's steps are not named after layers: {name!r}; plan again with plan_sequential")
        bounds.append((start, int(match[2] or start) + 1))
    if bounds[-1][1] != layers:
        raise InputError(
            f"the plan is for {bounds[-1][1]:,} layers, and there are {layers:,}; plan again with plan_sequential"
        )
    return tuple(bounds)


def _run(
    row: list[Layer],
    bounds: tuple[tuple[int, int], ...],
    parts: tuple[Part, ...],
    x: Any,
    options: dict[str, Any],
    chain: Chain,
) -> Any:
    """Run the layers before the chain as they are, and its steps as the nest says."""
    x = _plainly(row[: bounds[0][0]], x)
    steps = tuple(tuple(row[start:stop]) for start, stop in bounds)
    return Runner(steps, options, Forms(chain)).run(parts, x)
