"""Plans for layers as functions in functions.

A range of steps whose first state is stored and which is run again later is one function of that state (`rerun.py`),
and inside it there may be more. Schedules of that shape are called persistent, and every planner for memory alone
makes them, so the shape is read from a plan's actions and not asked of the planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowtide.actions import Advance, Backward, Drop, Restore, Save, Tape, Tier
from lowtide.errors import InputError
from lowtide.jax.jaxprs import has_loop
from lowtide.jax.layer_costs import Steps
from lowtide.jax.layers import Layer
from lowtide.jax.rerun import Run, gate, run_again
from lowtide.jax.step import Leaves
from lowtide.plan import Plan
from lowtide.simulate import judged

# What to do with a range of steps, or of layers, from left to right: keep the tape of one, or run a range again.
Nest = tuple["int | Nest", ...]


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


def of_layers(items: Nest, found: Steps) -> Nest:
    """The same with each step as the layers that it is made of."""
    ends = (*found.starts[1:], found.count)
    made: list[int | Nest] = []
    for item in items:
        if isinstance(item, int):
            made.extend(range(found.starts[item], ends[item]))
        else:
            made.append(of_layers(item, found))
    return tuple(made)


def runner(layers: Sequence[Layer], items: Nest) -> Run:
    """A function of what the layers close over, in their order, and of what the first is called with."""

    def run(consts: Leaves, x: Leaves) -> Leaves:
        rest = iter(consts)
        for item in items:
            mine, x = gate([next(rest) for k in _inside(item) for _ in layers[k].jaxpr.constvars], x)
            if isinstance(item, int):
                x = layers[item].run(mine, x)
            else:
                loops = any(has_loop(layers[k].jaxpr) for k in _inside(item))
                x = run_again(runner(layers, item), mine, x, loops=loops)
        return x

    return run


def _inside(item: int | Nest) -> list[int]:
    """The layers in it, in order."""
    return [item] if isinstance(item, int) else [k for part in item for k in _inside(part)]
