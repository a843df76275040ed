"""A loss function, traced once and cut into parts: its blocks and what lies between them.

Blocks are found in the program's equations, not in its text. An equation that reads a block's parameters belongs to the
block, and so do all equations between the first of them and the last, because a model calls its blocks one after
another. Between two blocks the cut is where the fewest bytes are alive. Equations on parameters alone (a change of
precision, a mask) have no place in that order: they are computed in every part that reads their results.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any

import jax
from jax.extend import core

from lowtide.chain import Role
from lowtide.checks import function
from lowtide.jax.installed import unnamed
from lowtide.jax.layers.trace import Layer, trace_layer
from lowtide.jax.model.blocks import is_array, owners
from lowtide.jax.xla.jaxprs import Leaves, last_reads, nbytes, replaced, variables

OUTSIDE, LOSS = "(outside)", "(loss)"


@dataclass(frozen=True, slots=True, eq=False)
class ModelPart:
    """A part of the loss: a block, or what lies before, between or after blocks.

    Attributes:
        name: the block's name, or one in parentheses.
        role: a block, or not.
        layer: its equations. The parameters that it reads are its constvars.
        weights: the variables of those parameters in the whole model.
        given: the variables of everything else that it reads.
        made: the variables that it computes for later parts, or as a result of the model.
    """

    name: str
    role: Role
    layer: Layer
    weights: tuple[Any, ...]
    given: tuple[Any, ...]
    made: tuple[Any, ...]

    @property
    def is_block(self) -> bool:
        """Whether it can be run again."""
        return self.role is Role.BLOCK


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A loss function on flat leaves: parameters, other array arguments, and constants that it closes over.

    Attributes:
        parts: its parts, in order.
        weights: the variables of the parameters.
        others: the variables of the other arguments and of the constants.
        results: the variables or literals of its results.
        leaves: the values of `weights` and `others`, in this order.
        tree: the structure of the results.
        unread: blocks without an equation of their own: nothing reads their parameters, or one loop reads those of
            several blocks.
    """

    parts: tuple[ModelPart, ...]
    weights: tuple[Any, ...]
    others: tuple[Any, ...]
    results: tuple[Any, ...]
    leaves: tuple[Any, ...]
    tree: Any
    unread: tuple[str, ...]


def trace_model(loss: Any, params: Any, args: Any, kwargs: Any, names: Sequence[str]) -> Model:
    """Trace `loss(params, *args, **kwargs)` and cut it into parts.

    Args:
        loss: a pure function.
        params: its first argument, any pytree; leaves that are not arrays are part of the program, as in equinox.
        args: its other positional arguments.
        kwargs: its keyword arguments.
        names: the names of its blocks.
    """
    function(loss, "loss")
    tree: Any
    paths, tree = jax.tree_util.tree_flatten_with_path((params, args, kwargs))
    places = [k for k, (_, leaf) in enumerate(paths) if is_array(leaf)]
    weights = [path[1:] for path, leaf in paths if is_array(leaf) and path[0].idx == 0]

    def run(leaves: Leaves) -> Any:
        params, args, kwargs = tree.unflatten(replaced([leaf for _, leaf in paths], places, leaves))
        return loss(params, *args, **kwargs)

    leaves = [paths[k][1] for k in places]
    layer, consts, form = trace_layer(run, leaves, jax.tree.structure(leaves), "loss")
    jaxpr = opened(layer.jaxpr)
    count = len(weights)
    belongs = dict(zip(jaxpr.invars[:count], owners(weights, names), strict=True))
    order = _ordered(jaxpr, belongs)
    return Model(
        parts=tuple(_cut(order)),
        weights=tuple(jaxpr.invars[:count]),
        others=(*jaxpr.invars[count:], *jaxpr.constvars),
        results=tuple(jaxpr.outvars),
        leaves=(*leaves, *consts),
        tree=form,
        unread=tuple(name for name in names if name not in order.touched),
    )


def opened(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The jaxpr with calls of jitted functions inlined, so that blocks inside them are found."""
    eqns: list[Any] = []

    def add(inner: core.Jaxpr, known: dict[Any, Any]) -> list[Any]:
        for eqn in inner.eqns:
            given = [known.get(var, var) if isinstance(var, core.Var) else var for var in eqn.invars]
            if _opens(eqn):
                sub = eqn.params["jaxpr"].jaxpr
                known.update(zip(eqn.outvars, add(sub, dict(zip(sub.invars, given, strict=True))), strict=True))
            else:
                fresh = [core.Var(var.aval) for var in eqn.outvars]
                known.update(zip(eqn.outvars, fresh, strict=True))
                eqns.append(eqn.replace(invars=given, outvars=fresh))
        return [known.get(var, var) if isinstance(var, core.Var) else var for var in inner.outvars]

    flat: core.Jaxpr = jaxpr.replace(outvars=add(jaxpr, {}), eqns=eqns)
    return flat


def _opens(eqn: Any) -> bool:
    """Whether an equation is the call of a jitted function that specifies no sharding."""
    if eqn.primitive.name != "jit" or eqn.params["jaxpr"].consts:
        return False
    shardings = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
    return all(type(sharding).__name__ == "UnspecifiedValue" for sharding in shardings)


@dataclass(frozen=True, slots=True, eq=False)
class _Order:
    """The equations of a jaxpr that are cut into parts, in order, and those that are set aside.

    Attributes:
        jaxpr: all equations.
        weights: the variables of the parameters.
        eqns: the equations that depend on more than parameters. A place is an index into these.
        touched: for each of those the block whose parameters it reads; `_NO_BLOCK` if these belong to no block or to
            several, None if it reads no parameters.
        aside: the variables that depend on parameters and constants alone, each with the equation that computes it.
        last: for each variable the last place that reads it; results are read at the end.
    """

    jaxpr: core.Jaxpr
    weights: Container[Any]
    eqns: Sequence[Any]
    touched: Sequence[str | None]
    aside: Mapping[Any, Any]
    last: Mapping[Any, int]


_NO_BLOCK = ""


def _ordered(jaxpr: core.Jaxpr, belongs: Mapping[Any, str | None]) -> _Order:
    """A jaxpr's equations, in order; `belongs` has the block of each parameter."""
    # A value that depends on parameters alone has the blocks of all of these.
    labels = {var: frozenset([name or _NO_BLOCK]) for var, name in belongs.items()}
    eqns: list[Any] = []
    touched: list[str | None] = []
    aside: dict[Any, Any] = {}
    for eqn in jaxpr.eqns:
        reads = variables(eqn.invars)
        still = [labels[var] for var in reads if var in labels]
        blocks = frozenset[str]().union(*still)
        if len(still) == len(reads) and not eqn.effects:
            aside.update(dict.fromkeys(eqn.outvars, eqn))
            labels.update(dict.fromkeys(eqn.outvars, blocks))
        else:
            eqns.append(eqn)
            touched.append(_single(blocks))
    return _Order(jaxpr, belongs, eqns, touched, aside, last_reads(eqns, jaxpr.outvars))


def _single(blocks: frozenset[str]) -> str | None:
    """The only block in `blocks`; `_NO_BLOCK` if there is none or more than one, None if no parameter was read."""
    own = blocks - {_NO_BLOCK}
    if len(own) == 1:
        return next(iter(own))
    return _NO_BLOCK if blocks else None


def _cut(order: _Order) -> list[ModelPart]:
    """The parts, in order; only the loss if there are no blocks."""
    ranges = _block_ranges(order)
    names = [OUTSIDE, *_numbered([block.name for block in ranges]), LOSS]
    roles = [Role.BETWEEN, *[Role.BLOCK] * len(ranges), Role.LOSS]
    cuts, end = _cuts(order, ranges), len(order.eqns)
    edges = zip(names, roles, [0, *cuts], [*cuts, end], strict=True)
    return [_part(order, *edge) for edge in edges if edge[3] > edge[2] or edge[1] is Role.LOSS]


@dataclass(frozen=True, slots=True)
class _BlockRange:
    """One call of a block: equations [start, stop), from the first to the last that read parameters of this block."""

    name: str
    start: int
    stop: int


def _block_ranges(order: _Order) -> list[_BlockRange]:
    anchors = [(name, place) for place, name in enumerate(order.touched) if name]
    found = []
    for name, some in groupby(anchors, key=itemgetter(0)):
        places = [place for _, place in some]
        found.append(_BlockRange(name, places[0], places[-1] + 1))
    return found


def _cuts(order: _Order, blocks: Sequence[_BlockRange]) -> list[int]:
    """The places where blocks begin, and where the last one ends; [0] if there are no blocks.

    Between two blocks, the cut is where the fewest bytes are alive. Before the first and after the last block,
    equations that read parameters of no block stay outside.
    """
    if not blocks:
        return [0]
    alive = _alive(order)
    outside = [place for place, name in enumerate(order.touched) if name == _NO_BLOCK]
    cuts: list[int] = []
    before = max((place + 1 for place in outside if place < blocks[0].start), default=0)
    for block in blocks:
        cuts.append(_lowest(alive, before, block.start))
        before = block.stop
    after = min((place for place in outside if place >= before), default=len(order.eqns))
    return [*cuts, _first_low(alive, before, after)]


def _numbered(names: Sequence[str]) -> list[str]:
    """The names of blocks in order of their calls; from its second call on, a block gets the number of the call."""
    seen: dict[str, int] = {}
    numbered = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        numbered.append(name if seen[name] == 1 else f"{name} (call {seen[name]})")
    return numbered


def _alive(order: _Order) -> list[int]:
    """For each place, the bytes that are computed before it and read at it or later."""
    change = [0] * (len(order.eqns) + 2)
    for place, eqn in enumerate(order.eqns):
        for var in eqn.outvars:
            if order.last.get(var, place) > place:
                change[place + 1] += nbytes([var.aval])
                change[order.last[var] + 1] -= nbytes([var.aval])
    return list(accumulate(change[1:-1], initial=0))


def _lowest(alive: Sequence[int], start: int, stop: int) -> int:
    """The last place in [start, stop] with the fewest bytes alive."""
    return min(range(start, stop + 1), key=lambda place: (alive[place], -place))


def _first_low(alive: Sequence[int], start: int, stop: int) -> int:
    """The place, from `start` on, at which the bytes alive stop falling."""
    place = start
    while place < stop and alive[place + 1] < alive[place]:
        place += 1
    return place


def _part(order: _Order, name: str, role: Role, start: int, stop: int) -> ModelPart:
    """The part of equations [start, stop), with the equations on parameters alone whose results it reads."""
    mine, out = order.eqns[start:stop], _results(order, start, stop)
    eqns = [*_prepared(order, [*_read(mine), *out]), *mine]
    inside = {*_made(eqns)}
    reads = dict.fromkeys(_read(eqns))
    weights = [var for var in reads if var in order.weights]
    given = [var for var in reads if var not in order.weights and var not in inside]
    jaxpr = order.jaxpr.replace(
        constvars=weights,
        invars=given,
        outvars=out,
        eqns=eqns,
        effects=frozenset().union(*(eqn.effects for eqn in eqns)),
        debug_info=unnamed(order.jaxpr.debug_info, len(given), len(out)),
    )
    layer = Layer(jaxpr, tuple(var.aval for var in given), tuple(var.aval for var in out))
    return ModelPart(name, role, layer, tuple(weights), tuple(given), tuple(out))


def _results(order: _Order, start: int, stop: int) -> list[Any]:
    """The variables that equations [start, stop) compute for later ones, or as results of the model.

    Results that depend on parameters alone belong to no part, so the last part computes them.
    """
    out = [var for var in _made(order.eqns[start:stop]) if order.last.get(var, 0) >= stop]
    if stop == len(order.eqns):
        out += [var for var in dict.fromkeys(variables(order.jaxpr.outvars)) if var in order.aside]
    return out


def _read(eqns: Iterable[Any]) -> list[Any]:
    return [var for eqn in eqns for var in variables(eqn.invars)]


def _made(eqns: Iterable[Any]) -> list[Any]:
    return [var for eqn in eqns for var in eqn.outvars]


def _prepared(order: _Order, wanted: Iterable[Any]) -> list[Any]:
    """The equations on parameters alone, in order, that are needed to compute `wanted`."""
    needed: dict[int, Any] = {}
    todo = [var for var in wanted if var in order.aside]
    while todo:
        eqn = order.aside[todo.pop()]
        if id(eqn) not in needed:
            needed[id(eqn)] = eqn
            todo += [var for var in variables(eqn.invars) if var in order.aside]
    return [eqn for eqn in order.jaxpr.eqns if id(eqn) in needed]
