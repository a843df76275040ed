"""Layers called one after the other, in bounded memory.

A plan for layers becomes functions in functions: a range whose first state is stored and which is run again later is
one function of that state (`rerun.py`), and inside it there may be more. Schedules of that shape are called persistent,
and every planner for memory alone makes them, so the shape is read from a plan's actions and not asked of the planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lowtide.actions import Advance, Backward, Drop, Restore, Save, Tape, Tier
from lowtide.errors import InputError
from lowtide.jax.layer_costs import Steps, cost, steps
from lowtide.jax.layers import Layer, Layers, listed, plainly_called, trace
from lowtide.jax.plainly import runs_plainly
from lowtide.jax.rerun import Run, gate, run_again
from lowtide.jax.step import Leaves
from lowtide.plan import Plan
from lowtide.planners.choose import choose
from lowtide.segments import balanced, segment_count
from lowtide.simulate import judged
from lowtide.sizes import parse_budget

# What to do with a range of steps, from left to right: keep a step's tape, or run a range of them again.
Nest = tuple["int | Nest", ...]


def sequential(layers: Iterable[Any], x: Any, *, budget: int | str | None = None, plan: Plan | None = None) -> Any:
    """The layers called one after the other, the first with `x`, within a budget of bytes for the backward.

    Gradients are those of the plain calls. Which layers are run again is planned when the call is traced, from types
    alone. All kinds of derivatives can be taken.

    Args:
        layers: a list of functions, of pairs `(function, params)`, which are called as `function(params, x)`, or of
            modules of equinox; pure functions of pytrees of arrays.
        x: what the first layer is called with.
        budget: bytes for snapshots, tapes and working set: 67108864, "64MiB", or "40%" of all tapes. Without it, the
            least memory in which no layer is run more than one extra time. Under `vmap` it is for each example.
        plan: what `plan_sequential` returned, instead of a budget.

    Raises:
        BudgetError: no plan fits the budget; `.least` is the smallest that works.
        InputError: an argument cannot be used.
    """
    rows = listed(layers, "layers")
    _check_knobs(budget, plan)
    if runs_plainly():
        return plainly_called(rows, x)
    traced = trace(rows, x)
    found = steps(traced.layers)
    if plan is None:
        plan = choose(found.chain, budget)
    elif len(plan.chain) != len(found.chain):
        count = len(found.chain)
        raise InputError(
            f"the plan is for {len(plan.chain):,} steps, these {len(rows):,} layers make {count:,}; plan again"
        )
    return _followed(traced, _of_layers(nest(plan), found))


def plan_sequential(layers: Iterable[Any], x: Any, *, budget: int | str | None = None) -> Plan:
    """The plan that `sequential` would follow. Nothing is run or allocated: types are enough.

    Its seconds are floating point operations. A layer that is pulled back without what it starts from is one step with
    the layer before it.

    Args:
        layers: as in `sequential`; arrays in them may be `jax.ShapeDtypeStruct`s.
        x: as in `sequential`; so may its leaves.
        budget: as in `sequential`.
    """
    rows = listed(layers, "layers")
    _check_knobs(budget, None)
    return choose(steps(trace(rows, x).layers).chain, budget)


def checkpoint_sequential(functions: Iterable[Any], segments: int, input: Any) -> Any:
    """The functions called one after the other, cut into segments; all but the last keep only what they start from.

    Segments are cut so that the largest tape of a segment is as small as possible. For a budget instead of a number of
    segments there is `sequential`.

    Args:
        functions: layers as in `sequential`.
        segments: how many; more than there are functions means one for each.
        input: what the first function is called with.

    Raises:
        InputError: an argument cannot be used.
    """
    rows = listed(functions, "functions")
    segment_count(segments, len(rows))
    if runs_plainly():
        return plainly_called(rows, input)
    traced = trace(rows, input, "functions")
    ranges = balanced(_tapes(traced.layers), segments)
    *first, (start, stop) = ranges
    return _followed(traced, (*(tuple(range(*part)) for part in first), *range(start, stop)))


def _tapes(layers: Sequence[Layer]) -> list[int]:
    """Bytes of each layer's tape, what it starts from included if it is needed."""
    known: dict[Any, int] = {}
    for layer in layers:
        key = str(layer.jaxpr), layer.given
        if key not in known:
            found = cost([layer])
            known[key] = found.held + found.state * found.reads_input
    return [known[str(layer.jaxpr), layer.given] for layer in layers]


def _check_knobs(budget: int | str | None, plan: Plan | None) -> None:
    """Before anything is traced."""
    if budget is not None:
        parse_budget(budget, 2**40)
    if plan is not None and not isinstance(plan, Plan):
        raise InputError(f"plan={plan!r} is a {type(plan).__name__}; give what plan_sequential returned")
    if budget is not None and plan is not None:
        raise InputError(f"budget={budget!r} and plan={plan!r} are two knobs; give one of them, or none")


def nest(plan: Plan) -> Nest:
    """A plan's actions as ranges in ranges.

    Each run from a stored state up to where the backward has come keeps tapes and stores states on its way; each
    range behind such a state is run again in the same manner, from the last one to the first.

    Raises:
        InputError: the plan is not of that shape, keeps states on disk, or asks for tapes in another form than whole.
    """
    whole: list[Any] = []
    now, pending = whole, list[tuple[int, list[Any]]]()
    for action in judged(plan):
        match action:
            case Advance(start, _):
                pending.append((start, []))
                now.append(pending[-1][1])
            case Tape(start, stop, 0):
                now.extend(range(start, stop))
            case Restore(step, Tier.MEMORY) if pending and pending[-1][0] == step:
                now = pending.pop()[1]
            case Save(_, Tier.MEMORY) | Drop() | Backward():
                pass
            case _:
                raise InputError(f"{action} cannot be followed for layers in JAX; plan with plan_sequential")
    return _frozen(whole)


def _frozen(items: list[Any]) -> Nest:
    return tuple(item if isinstance(item, int) else _frozen(item) for item in items)


def _of_layers(items: Nest, found: Steps) -> Nest:
    """The same with each step as the layers that it is made of."""
    ends = (*found.starts[1:], found.count)
    made: list[int | Nest] = []
    for item in items:
        if isinstance(item, int):
            made.extend(range(found.starts[item], ends[item]))
        else:
            made.append(_of_layers(item, found))
    return tuple(made)


def _followed(traced: Layers, items: Nest) -> Any:
    """The layers' result, with ranges of them run again as `items` says."""
    consts = [const for held in traced.consts for const in held]
    return traced.result(_runner(traced.layers, items)(consts, traced.x))


def _runner(layers: Sequence[Layer], items: Nest) -> Run:
    def run(consts: Leaves, x: Leaves) -> Leaves:
        rest = iter(consts)
        for item in items:
            mine, x = gate([next(rest) for k in _inside(item) for _ in layers[k].jaxpr.constvars], x)
            x = layers[item].run(mine, x) if isinstance(item, int) else run_again(_runner(layers, item), mine, x)
        return x

    return run


def _inside(item: int | Nest) -> list[int]:
    """The layers in it, in order."""
    return [item] if isinstance(item, int) else [k for part in item for k in _inside(part)]
