"""Plans for layers as nested functions.

A part of a plan's nest that is run again is one function of the state that it starts from (`rerun.py`), and may contain
further such functions.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.chain import Chain
from lowtide.errors import InputError
from lowtide.jax.layers.rerun import Run, gate, run_again
from lowtide.jax.layers.trace import Layer
from lowtide.jax.xla.jaxprs import Leaves, has_loop
from lowtide.nest import Part, nest_of_plan
from lowtide.plan import Plan

# A range of steps, or of layers, from left to right: the index of one whose tape is kept, or a range that is run again.
Nest = tuple["int | Nest", ...]


def nest(plan: Plan) -> Nest:
    """A plan's parts as nested ranges.

    Raises:
        InputError: the plan is not persistent, stores states on disk, or has tapes in a smaller form.
    """
    return _items(nest_of_plan(plan))


def _items(parts: tuple[Part, ...]) -> Nest:
    found: list[int | Nest] = []
    for part in parts:
        if part.option:
            raise InputError(
                f"this plan tapes steps [{part.start:,}, {part.stop:,}) in a smaller form, which layers in JAX do not "
                "have; plan again with plan_sequential"
            )
        if part.inside:
            found.append(_items(part.inside))
        else:
            found.extend(range(part.start, part.stop))
    return tuple(found)


def of_layers(items: Nest, chain: Chain) -> Nest:
    """The same nest with each step replaced by the layers that it consists of."""
    made: list[int | Nest] = []
    for item in items:
        if isinstance(item, int):
            made.extend(range(*chain.layers[item]))
        else:
            made.append(of_layers(item, chain))
    return tuple(made)


def runner(layers: Sequence[Layer], items: Nest) -> Run:
    """A function of the layers' constants, in the order of the layers, and of the first layer's input."""

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
    """The layers in an item of a nest, in order."""
    return [item] if isinstance(item, int) else [k for part in item for k in _inside(part)]
