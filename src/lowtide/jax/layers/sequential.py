"""Layers called one after another, in bounded memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from lowtide.chain import Chain
from lowtide.errors import InputError
from lowtide.jax.compare import runs_plainly
from lowtide.jax.layers.costs import measure_layers, tape_bytes
from lowtide.jax.layers.nested import Nest, nest, of_layers, runner
from lowtide.jax.layers.plans import plan_within
from lowtide.jax.layers.trace import Layer, TracedLayers, called_plainly, listed, trace_layers
from lowtide.plan import Plan
from lowtide.planners.choose import check_layer_knobs, choose
from lowtide.planners.segments import balanced, segment_count

_logger = logging.getLogger(__name__)


def sequential(layers: Iterable[Any], x: Any, *, budget: int | str | None = None, plan: Plan | None = None) -> Any:
    """Call the layers one after another, the first with `x`, within a budget of bytes for the backward.

    Gradients are those of the plain calls. Which layers are run again is planned when the call is traced, from types
    alone. All kinds of derivatives are supported.

    A budget costs compile time: to meet it in the compiled program, the gradients of the layers are compiled for one
    plan after another until one fits, usually two to five programs and at most sixteen. That is done once for layers
    with the same equations and types. The bytes are those of this platform's compiler, for the gradients of everything
    that the layers close over, with or without that of `x`, on one device and for one example of a `vmap`. Layers that
    communicate with other devices or examples (`psum`) cannot be compiled alone. For them, and without a budget, the
    plan's bytes are an estimate, which can be off by half.

    Args:
        layers: a list of functions, of pairs `(function, params)`, which are called as `function(params, x)`, or of
            equinox modules; pure functions of pytrees of arrays.
        x: the input of the first layer.
        budget: bytes for snapshots, tapes and working set: 67108864, "64MiB", or "40%" of all tapes. Without it, the
            least estimated memory in which no layer is run more than one extra time.
        plan: what `plan_sequential` returned, instead of a budget; it is followed as it is.

    Raises:
        BudgetError: no plan fits the budget; `.least` is the smallest that was compiled, and works.
        InputError: an argument cannot be used.
    """
    rows = listed(layers, "layers")
    check_layer_knobs(budget, plan)
    if runs_plainly():
        return called_plainly(rows, x)
    traced = trace_layers(rows, x)
    chain = measure_layers(traced.layers)
    if plan is None:
        plan = _planned(traced.layers, chain, budget)
    elif len(plan.chain) != len(chain):
        raise InputError(
            f"the plan is for {len(plan.chain):,} steps, these {len(rows):,} layers make {len(chain):,}; plan again"
        )
    return _followed(traced, of_layers(nest(plan), chain))


def plan_sequential(layers: Iterable[Any], x: Any, *, budget: int | str | None = None) -> Plan:
    """The plan that `sequential` would follow. Nothing is run or allocated: types are enough.

    With a budget, its bytes are those of the compiled program. Its seconds are floating point operations. A layer whose
    backward does not need its input forms one step with the layer before it.

    Args:
        layers: as in `sequential`; arrays in them may be `jax.ShapeDtypeStruct`s.
        x: as in `sequential`; leaves may be `jax.ShapeDtypeStruct`s.
        budget: as in `sequential`.
    """
    rows = listed(layers, "layers")
    check_layer_knobs(budget, None)
    traced = trace_layers(rows, x).layers
    return _planned(traced, measure_layers(traced), budget)


def _planned(layers: Sequence[Layer], chain: Chain, budget: int | str | None) -> Plan:
    _logger.debug("measured %d layers: %s", len(layers), chain)
    return (choose(chain) if budget is None else plan_within(layers, chain, budget)).logged("layers")


def checkpoint_sequential(functions: Iterable[Any], segments: int, input: Any) -> Any:
    """Call the functions one after another in segments, of which all but the last keep only their input.

    Segments are cut so that the largest tape of a segment is as small as possible. To give a budget instead of a number
    of segments, use `sequential`.

    Args:
        functions: layers as in `sequential`.
        segments: the number of segments; if there are fewer functions, each is a segment.
        input: the input of the first function.

    Raises:
        InputError: an argument cannot be used.
    """
    rows = listed(functions, "functions")
    segment_count(segments, len(rows))
    if runs_plainly():
        return called_plainly(rows, input)
    traced = trace_layers(rows, input, "functions")
    ranges = balanced(tape_bytes(traced.layers), segments)
    *first, (start, stop) = ranges
    return _followed(traced, (*(tuple(range(*part)) for part in first), *range(start, stop)))


def _followed(traced: TracedLayers, items: Nest) -> Any:
    """The layers' result, with the ranges in `items` run again in the backward."""
    consts = [const for held in traced.consts for const in held]
    return traced.result(runner(traced.layers, items)(consts, traced.x))
