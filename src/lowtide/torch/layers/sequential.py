"""Rows of layers in bounded memory: `sequential` by a plan, `checkpoint_sequential` in segments.

Layers are measured once for each form of input (`costs.py`), planned by the core (`LayerPlans` adds the bytes that
checkpoint calls take), and run as nested checkpoint calls on the graph that autograd builds anyway (`nested.py`). So
results and gradients are those of the plain run to the last bit, hooks fire once, weights may be shared, and gradients
of gradients work.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten

from lowtide.chain import Chain, Working
from lowtide.checks import function
from lowtide.errors import BudgetError, CheckpointError, InputError
from lowtide.interface.cache import Cache
from lowtide.nest import Part, copied_by, forms_passed, has_forms, kept_by, nest_of_plan, starts
from lowtide.plan import Knob, Plan
from lowtide.planners.choose import check_layer_knobs, choose, least_budget
from lowtide.planners.segments import balanced, segment_count
from lowtide.sizes import parse_budget
from lowtide.torch.layers.costs import MeasuredLayers, measure_layers
from lowtide.torch.layers.nested import Forms, Layer, Runner, through
from lowtide.torch.layers.outside import Outside
from lowtide.torch.memory import recording
from lowtide.torch.memory.accelerators import autocast_now

Layers = nn.Sequential | nn.ModuleList | list[Layer] | tuple[Layer, ...]
Contexts = Iterable[Callable[[], AbstractContextManager[Any]]]

_transformed = torch._C._functorch.peek_interpreter_stack
_MOST_ROWS = 64  # rows of layers whose costs are cached
_MOST_BUDGETS = 16  # budgets of one row whose plans are cached
# Checkpoint calls nested in one another. Each takes several frames of Python's stack, which has 1,000 by default.
_MOST_DEPTH = 100


def sequential(
    layers: Layers,
    x: Any,
    *,
    budget: int | str | None = None,
    plan: Plan | None = None,
    contexts: Contexts = (),
    check_rerun: bool | None = None,
) -> Any:
    """Run layers one after the other, like `nn.Sequential`, in bounded memory.

    The first call with an input of some form runs every layer a few times to measure it; later calls do not. With
    neither `budget` nor `plan`, the plan takes the least memory that runs no layer more than one extra time.

    Args:
        layers: an `nn.Sequential`, an `nn.ModuleList`, or a list of functions; each gets what the one before returned.
        x: the input of the first layer: a tensor, or any nested value.
        budget: bytes for snapshots, tape and working set: 67108864, "64MiB", or "40%" of all tapes.
        plan: a plan that `plan_sequential` returned.
        contexts: functions that make context managers, to be entered when layers are rerun.
        check_rerun: what is compared when layers are rerun, of the tensors that autograd saves in both runs: by default
            samples, small tensors whole and at least 1,024 numbers of a large one; with True every bit, with False only
            shapes.

    Raises:
        BudgetError: no plan fits; the error names the least budget that works. Nothing has changed.
        CheckpointError: in the backward, if a rerun differs from the first run; `.grad` is then not to be trusted.
        InputError: another argument that cannot be used.
    """
    return _uncompiled(_sequential)(layers, x, budget, plan, contexts, check_rerun)


def _sequential(
    layers: Layers, x: Any, budget: int | str | None, plan: Plan | None, contexts: Contexts, check_rerun: bool | None
) -> Any:
    row = _listed(layers, "layers")
    check_layer_knobs(budget, plan)
    if not row or _runs_plainly():
        return through(row, x)
    options = {"contexts": tuple(contexts), "check_rerun": check_rerun}
    if plan is not None:
        chain, parts = _chain_for(plan, len(row)), nest_of_plan(plan)
        # Measured now, which traces lean steps, so that tracing takes no memory inside the run.
        if has_forms(parts) and _wrapped(row) is None:
            _costs(row, x, None if check_rerun is False else _refuse)
        return _run(row, parts, x, options, chain)
    costs = _costs(row, x, None if check_rerun is False else _refuse)
    if costs is None or costs.row.chain is None:
        return through(row, x)
    plan, parts = costs.plan(budget)
    plan.logged("layers")
    return _run(row, parts, x, options, costs.row.chain)


def plan_sequential(layers: Layers, x: Any, *, budget: int | str | None = None) -> Plan:
    """The plan that `sequential` would run, with its predicted cost; the layers are measured and left as they were.

    Each step of its chain is a layer, or several that cannot be separated; the step's name lists them.
    """
    row = _listed(layers, "layers")
    check_layer_knobs(budget, None)
    if not row:
        raise InputError("there are 0 layers, which need no plan; give at least one")
    costs = _costs(row, x, _warn)
    if costs is None:
        raise InputError("a layer has parameters without a shape yet, so it cannot be measured; call the layers first")
    if costs.row.chain is None:
        raise InputError(
            f"none of the {len(row):,} layers makes a tape, so there is nothing to plan; let the input or a parameter "
            "require a gradient"
        )
    return costs.plan(budget)[0].logged("layers")


def checkpoint_sequential(
    functions: Layers,
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,  # noqa: ARG001  (part of torch's signature)
    preserve_rng_state: bool = True,
) -> Any:
    """`torch.utils.checkpoint.checkpoint_sequential` with segments of equal tapes instead of equal numbers of layers.

    Each segment but the last is rerun when the backward reaches it. The cut depends on bytes alone, so it is the same
    in every run and on every rank. Layers that change their input in place stay in one segment with the layer before.

    Args:
        functions: an `nn.Sequential`, an `nn.ModuleList`, or a list of functions.
        segments: the number of segments, at least 1; if there are fewer layers, each is a segment.
        input: the input of the first layer: a tensor, or any nested value; a tuple is one value.
        use_reentrant: accepted so that code for torch's function runs; it makes no difference here.
        preserve_rng_state: draw the same random numbers when a segment is rerun.
    """
    return _uncompiled(_checkpoint_sequential)(functions, segments, input, preserve_rng_state)


def _checkpoint_sequential(functions: Layers, segments: int, input: Any, preserve_rng_state: bool) -> Any:
    row = _listed(functions, "functions")
    count = segment_count(segments, len(row))
    if count == 1 or _runs_plainly():
        return through(row, input)
    costs = _costs(row, input, _refuse, forms=False)
    if costs is None or costs.row.chain is None:
        return through(row, input)
    chain = costs.row.chain
    cut = balanced([chain[k].tape for k in range(len(chain))], min(count, len(chain)))
    parts = [Part(start, stop, (Part(start, stop),)) for start, stop in cut[:-1]]
    return _run(row, (*parts, Part(*cut[-1])), input, {"preserve_rng_state": preserve_rng_state}, chain)


class Sequential(nn.Sequential):
    """An `nn.Sequential` that runs within a budget: the same submodules, the same `state_dict`, the same results.

    Args:
        model: the `nn.Sequential` whose submodules it takes, under the same names.
        budget: see `sequential`.
        plan: see `sequential`.
        check_rerun: see `sequential`.
    """

    def __init__(
        self,
        model: nn.Sequential,
        *,
        budget: int | str | None = None,
        plan: Plan | None = None,
        check_rerun: bool | None = None,
    ) -> None:
        if not isinstance(model, nn.Sequential):
            raise InputError(f"model is a {type(model).__name__}; give an nn.Sequential")
        check_layer_knobs(budget, plan)
        super().__init__()
        for name, child in model._modules.items():
            self.add_module(name, child)
        self.training = model.training
        self.budget = budget
        self.plan = plan
        self.check_rerun = check_rerun

    def forward(self, input: Any) -> Any:
        """Run the layers within the budget."""
        return sequential(self, input, budget=self.budget, plan=self.plan, check_rerun=self.check_rerun)

    def __getitem__(self, idx: int | slice) -> Any:
        if not isinstance(idx, slice):
            return super().__getitem__(idx)
        part = nn.Sequential(OrderedDict(list(self._modules.items())[idx]))
        return type(self)(part, budget=self.budget, check_rerun=self.check_rerun)

    def extra_repr(self) -> str:
        """The text that `repr` shows beside the submodules."""
        return f"budget={self.budget!r}" if self.plan is None else f"plan={self.plan!r}"


def _listed(layers: Any, name: str) -> list[Layer]:
    """The layers as a list, after checking that each is callable."""
    if not isinstance(layers, nn.Sequential | nn.ModuleList | list | tuple):
        raise InputError(
            f"{name} is a {type(layers).__name__}; give an nn.Sequential, an nn.ModuleList, or a list of functions"
        )
    row = list(layers)
    for k, layer in enumerate(row):
        function(layer, f"{name}[{k}]")
    return row


def _uncompiled(run: Callable[..., Any]) -> Callable[..., Any]:
    """The function, kept out of `torch.compile`'s graph: measuring and saved-tensor hooks cannot be traced."""
    return torch.compiler.disable(run) if torch.compiler.is_compiling() else run


def _runs_plainly() -> bool:
    """Whether to run plainly: without grad, in a comparison, in a transform such as `torch.func.grad`, or traced."""
    if not torch.is_grad_enabled() or recording.runs_plainly() or _transformed() is not None:
        return True
    return torch._C._is_tracing() or torch.compiler.is_exporting()


def _chain_for(plan: Plan, layers: int) -> Chain:
    """The plan's chain, with the layers of each step; a chain made on paper has one layer for each step."""
    chain = plan.chain
    if not chain.layers:
        if chain.names:
            raise InputError(f"the plan's steps are not layers, but {chain.name(0)!r}; plan again with plan_sequential")
        chain = replace(chain, layers=tuple((k, k + 1) for k in range(len(chain))))
    if chain.layers[-1][1] != layers:
        raise InputError(
            f"the plan is for {chain.layers[-1][1]:,} layers, and there are {layers:,}; plan again with plan_sequential"
        )
    return chain


def _run(row: list[Layer], parts: tuple[Part, ...], x: Any, options: dict[str, Any], chain: Chain) -> Any:
    """Run the layers before the chain as they are, and the chain's steps by the nest."""
    x = through(row[: chain.layers[0][0]], x)
    steps = tuple(tuple(row[start:stop]) for start, stop in chain.layers)
    return Runner(steps, options, Forms(chain, strict=_wrapped(row) is None)).run(parts, x)


# --- plans for a measured row


class LayerPlans:
    """The measured costs of a row, and the plans made for it.

    Checkpoint calls take bytes that a chain cannot express, because they depend on where the calls are, which is known
    only once there is a plan. So a plan is made first, then its bill with those bytes; if that is above the budget, the
    next plan aims lower by the excess.
    """

    def __init__(self, row: MeasuredLayers) -> None:
        self.row = row
        self._plans: Cache[tuple[Plan, tuple[Part, ...]]] = Cache(_MOST_BUDGETS)

    def plan(self, budget: int | str | None) -> tuple[Plan, tuple[Part, ...]]:
        """The fastest plan within the budget, and its nest."""
        found = self._plans.get(budget)
        if found is None:
            plan = self._choose(budget)
            found = self._plans.setdefault(budget, (plan, nest_of_plan(plan)))
        return found

    def _choose(self, budget: int | str | None) -> Plan:
        if budget is None:
            return self._billed(choose(self._chain), Knob("none"))
        asked = parse_budget(budget, self._bare.plain_tape)
        plan = self._within(asked)
        if plan is not None:
            return plan
        least = self._least_that_works()
        if least > asked:
            ways = "raise the budget, or make the layers smaller (a smaller batch)"
            raise BudgetError(asked, least, ways)
        plan = self._within(least)  # aiming lower and lower from the budget has skipped this one
        assert plan is not None
        return replace(plan, knob=Knob("budget", asked))

    @property
    def _chain(self) -> Chain:
        """The chain in which every step's tape includes its input."""
        assert self.row.chain is not None
        return self.row.chain

    @property
    def _bare(self) -> Chain:
        """The chain whose tapes do not count inputs that no tape holds."""
        return self._with_tapes(set())

    def _with_tapes(self, begun: set[int]) -> Chain:
        """The chain in which only the steps `begun` count an input in their tape that autograd does not hold.

        A checkpoint call begins at each of those steps, and holds the input.
        """
        if not any(self.row.unheld):
            return self._chain
        steps = [self._chain[k] for k in range(len(self._chain))]
        for k, unheld in enumerate(self.row.unheld):
            if k not in begun:
                # A smaller tape may hold the input although the whole one does not.
                options = tuple(
                    replace(option, tape=max(steps[k].state, option.tape - min(unheld, let_go)))
                    for option, let_go in zip(steps[k].options, self.row.unheld_by[k], strict=True)
                )
                steps[k] = replace(steps[k], tape=max(steps[k].state, steps[k].tape - unheld), options=options)
        return self._chain.with_steps(steps)

    def _within(self, asked: int) -> Plan | None:
        """The fastest plan found within that many bytes; None if there is none."""
        chains = [self._chain, self._bare] if any(self.row.unheld) else [self._chain]
        plans = [plan for chain in chains if (plan := self._within_by(chain, asked)) is not None]
        return min(plans, key=lambda plan: plan.bill.seconds, default=None)

    def _within_by(self, chain: Chain, asked: int) -> Plan | None:
        budget = asked
        while budget >= max(self.row.peak, least_budget(chain)):
            plan = choose(chain, budget)
            if max(part.depth for part in nest_of_plan(plan)) > _MOST_DEPTH:
                return None
            plan = self._billed(plan, Knob("budget", asked))
            if plan.bill.peak_memory <= asked:
                return plan
            budget -= plan.bill.peak_memory - asked
        return None

    def _billed(self, plan: Plan, knob: Knob) -> Plan:
        """The same plan, for a chain that includes the bytes of the plan's checkpoint calls."""
        nest = nest_of_plan(plan)
        chain = self._with_tapes(starts(nest))
        kept, copied, passed = kept_by(nest, self.row.kept), copied_by(nest, self.row.copied), forms_passed(nest)
        if not (kept or passed or any(copied)):
            return Plan.make(chain, knob, plan.schedule)
        steps = []
        for k, more in enumerate(copied):
            step, was = chain[k], chain[k].working
            advance = max([was.advance, *(self.row.passing[k][form - 1] for form in passed.get(k, ()))])
            working = Working(advance + kept + more, was.tape + kept, was.backward + kept)
            options = tuple(replace(option, backward=(option.backward or 0) + kept) for option in step.options)
            steps.append(replace(step, working=working, options=options))
        return Plan.make(chain.with_steps(steps), knob, plan.schedule)

    def _least_that_works(self) -> int:
        """The least budget that works: exact, unless it depends on where checkpoint calls are or how deep they nest."""
        row = self.row
        low = high = max(row.peak, least_budget(self._bare))
        while self._within(high) is None:
            low, high = high, high + 1 + high // 8
        while any((*row.kept, *row.copied, *row.unheld)) and high - low > high // 100:
            middle = (low + high) // 2
            low, high = (low, middle) if self._within(middle) else (middle, high)
        return high


# --- the cache of measured rows: one entry for the same layers and inputs of the same form


# Compared by value in a signature; anything else is compared by identity.
_BY_VALUE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def _signature(layers: list[Layer], x: Any) -> Hashable:
    """Everything that the costs of layers may depend on, except the values of tensors."""
    leaves, form = tree_flatten(x)
    return (
        tuple(_identity(layer) for layer in layers),
        tuple(_module_form(module) for layer in layers for module in _modules(layer)),
        str(form),
        tuple(_leaf_form(leaf) for leaf in leaves),
        autocast_now(),
        torch.get_default_dtype(),
    )


def _identity(layer: Layer) -> Hashable:
    """The identity of a layer; of a method, which is a new object at every lookup, that of its object and function."""
    if isinstance(layer, types.MethodType):
        return id(layer.__self__), id(layer.__func__)
    return id(layer)


def _modules(layer: Any) -> Iterator[nn.Module]:
    """The modules that a layer consists of: itself, or those that a method, partial or closure holds."""
    if isinstance(layer, nn.Module):
        yield from layer.modules()
    elif isinstance(layer, types.MethodType):
        yield from _modules(layer.__self__)
    elif isinstance(layer, functools.partial):
        for part in (layer.func, *layer.args, *layer.keywords.values()):
            yield from _modules(part)
    elif isinstance(layer, types.FunctionType):
        for cell in layer.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:  # an empty cell: its variable is not bound yet
                continue
            if isinstance(held, nn.Module):
                yield from held.modules()


def _module_form(module: nn.Module) -> Hashable:
    parameters = tuple(None if p is None else (p.requires_grad, p.dtype, p.device) for p in module._parameters.values())
    return id(module), module.training, parameters


def _leaf_form(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        strides = leaf.stride() if leaf.layout is torch.strided else ()
        return leaf.shape, strides, leaf.dtype, leaf.device, leaf.layout, leaf.requires_grad
    return leaf if isinstance(leaf, _BY_VALUE) else id(leaf)


def _anchors(layers: list[Layer]) -> list[Any]:
    """The objects whose ids are in the signature of these layers: an entry must not outlive them."""
    things: list[Any] = []
    for layer in layers:
        if isinstance(layer, types.MethodType):
            things += [layer.__self__, layer.__func__]
        elif not isinstance(layer, types.MethodDescriptorType):  # such as torch.Tensor.tanh, which is never freed
            things.append(layer)
    return things


_measured: Cache[LayerPlans] = Cache(_MOST_ROWS)


def _wrapped(row: list[Layer]) -> int | None:
    """The first layer that the older FSDP has wrapped: it allows no backward in a forward, and measuring runs some."""
    for k, layer in enumerate(row):
        kinds = {type(module).__name__ for module in layer.modules()} if isinstance(layer, nn.Module) else set()
        if "FullyShardedDataParallel" in kinds:
            return k  # pragma: no cover  (FSDP: run by tests in processes of their own)
    return None


def _refuse(difference: str) -> None:
    raise CheckpointError(
        f"{difference}: this call would not compute what it computes plainly. Make the counter, iterator or cache that "
        "the layer uses an attribute of a module; or pass check_rerun=False if such a difference does not matter"
    )


def _warn(difference: str) -> None:
    warnings.warn(f"{difference}, and stays moved; make it an attribute of a module", stacklevel=4)


def _costs(row: list[Layer], x: Any, tell: Callable[[str], None] | None, *, forms: bool = True) -> LayerPlans | None:
    """The costs and plans of the layers; None if one is lazy and the plain run has yet to make its parameters.

    If measuring them moves something outside of modules, so that a layer does something else since, `tell` is told.
    """
    key = (forms, _signature(row, x))
    plans = _measured.get(key)
    if plans is None:
        if any(is_lazy(p) for layer in row if isinstance(layer, nn.Module) for p in layer.parameters()):
            return None
        wrapped = _wrapped(row)
        if wrapped is not None:  # pragma: no cover  (FSDP: run by tests in processes of their own)
            raise InputError(
                f"layer {wrapped:,} is wrapped by FullyShardedDataParallel, so it cannot be measured; pass "
                "sequential(plan=...) what plan_sequential returned before the layers were wrapped, or shard them with "
                "torch.distributed.fsdp.fully_shard"
            )
        outside = Outside(row)
        plans = LayerPlans(measure_layers(row, x, forms=forms))
        if tell is not None and (difference := outside.difference(x)):
            tell(difference)
        _measured.put(key, plans, _anchors(row))
    return plans
