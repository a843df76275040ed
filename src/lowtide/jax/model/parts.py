"""A loss function, traced once and cut into its blocks and what is between them.

Blocks are not looked for in the program's text but in its equations. An equation that reads a block's parameters is the
block's. So are all from the first of them to the last, for a model calls its blocks one after the other. Between two
blocks the cut is where the fewest bytes are alive. Equations on parameters alone (a change of precision, a mask) are
no part of that order: they are made wherever they are read.
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
from lowtide.jax.layers.trace import Layer, trace_layer
from lowtide.jax.model.blocks import is_array, owners
from lowtide.jax.xla.jaxprs import Leaves, nbytes, variables

OUTSIDE, LOSS = "(outside)", "(loss)"


@dataclass(frozen=True, slots=True, eq=False)
class ModelPart:
    """A stretch of the loss: a block, or what is before, between or after them.

    Attributes:
        name: the block's, or one in parentheses.
        role: whether it is a block.
        layer: its equations. The parameters that it reads are its constvars.
        weights: variables of those parameters in the whole.
        given: variables of what else it reads.
        made: variables of what it makes for later parts, or as a result.
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
    """A loss function on flat leaves: parameters, other arrays among its arguments, what it closes over.

    Attributes:
        parts: in order.
        weights: variables of the parameters.
        others: variables of the other arguments, and of what it closes over.
        results: variables or literals of its results.
        leaves: what to call it with, in the order of `weights` and `others`.
        tree: the form of the results.
        unread: blocks that no equation is of alone: nothing reads them, or one loop reads several of them.
    """

    parts: tuple[ModelPart, ...]
    weights: tuple[Any, ...]
    others: tuple[Any, ...]
    results: tuple[Any, ...]
    leaves: tuple[Any, ...]
    tree: Any
    unread: tuple[str, ...]


def trace_model(loss: Any, params: Any, args: Any, kwargs: Any, names: Sequence[str]) -> Model:
    """Trace `loss(params, *args, **kwargs)` and cut it.

    Args:
        loss: a pure function.
        params: its first argument, any pytree; what is no array in it is part of the program, as in equinox.
        args: its other arguments.
        kwargs: and those by name.
        names: of its blocks.
    """
    function(loss, "loss")
    tree: Any
    paths, tree = jax.tree_util.tree_flatten_with_path((params, args, kwargs))
    places = [k for k, (_, leaf) in enumerate(paths) if is_array(leaf)]
    weights = [path[1:] for path, leaf in paths if is_array(leaf) and path[0].idx == 0]

    def run(leaves: Leaves) -> Any:
        every = [leaf for _, leaf in paths]
        for k, leaf in zip(places, leaves, strict=True):
            every[k] = leaf
        params, args, kwargs = tree.unflatten(every)
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
    """The same with calls of jitted functions replaced by what they do, so that blocks inside of them are seen."""
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
    """Whether it is the call of a jitted function that says nothing about devices."""
    if eqn.primitive.name != "jit" or eqn.params["jaxpr"].consts:
        return False
    shardings = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
    return all(type(sharding).__name__ == "UnspecifiedValue" for sharding in shardings)


@dataclass(frozen=True, slots=True, eq=False)
class _Order:
    """The equations of a jaxpr that are cut, in order, and those that are not.

    Attributes:
        jaxpr: all of them.
        weights: variables of the parameters.
        eqns: equations that read more than parameters. A place is an index into these.
        touched: for each of those the block whose parameters it reads, `_NO_BLOCK` if they are of no block or of
            several, None if it reads none.
        aside: what is made of parameters and numbers alone, each with the equation that makes it.
        last: the last place that reads a variable; results are read at the end.
    """

    jaxpr: core.Jaxpr
    weights: Container[Any]
    eqns: Sequence[Any]
    touched: Sequence[str | None]
    aside: Mapping[Any, Any]
    last: Mapping[Any, int]


_NO_BLOCK = ""


def _ordered(jaxpr: core.Jaxpr, belongs: Mapping[Any, str | None]) -> _Order:
    """A jaxpr's equations; `belongs` says of each parameter which block it is of."""
    # What is made of parameters alone belongs to whom they belong to.
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
    last: dict[Any, int] = {}
    for place, eqn in enumerate(eqns):
        last.update(dict.fromkeys(variables(eqn.invars), place))
    last.update(dict.fromkeys(variables(jaxpr.outvars), len(eqns)))
    return _Order(jaxpr, belongs, eqns, touched, aside, last)


def _single(blocks: frozenset[str]) -> str | None:
    """The one block among those touched; `_NO_BLOCK` if there is none or are several, None if nothing is touched."""
    own = blocks - {_NO_BLOCK}
    if len(own) == 1:
        return next(iter(own))
    return _NO_BLOCK if blocks else None


def _cut(order: _Order) -> list[ModelPart]:
    """The parts in order; only one, the loss, if there is no block."""
    ranges = _block_ranges(order)
    names = [OUTSIDE, *_numbered([block.name for block in ranges]), LOSS]
    roles = [Role.BETWEEN, *[Role.BLOCK] * len(ranges), Role.LOSS]
    cuts, end = _cuts(order, ranges), len(order.eqns)
    edges = zip(names, roles, [0, *cuts], [*cuts, end], strict=True)
    return [_part(order, *edge) for edge in edges if edge[3] > edge[2] or edge[1] is Role.LOSS]


@dataclass(frozen=True, slots=True)
class _BlockRange:
    """One call of a block: equations [start, stop), from the first to the last that read its parameters alone."""

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
    """Where each block begins, and where the last one ends; 0 if there is none.

    Between two blocks, the cut is where the fewest bytes are alive. Before the first and behind the last, equations
    that read parameters of no block stay outside.
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
    """A block that is called again gets the number of the call."""
    seen: dict[str, int] = {}
    numbered = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        numbered.append(name if seen[name] == 1 else f"{name} (call {seen[name]})")
    return numbered


def _alive(order: _Order) -> list[int]:
    """For each place in the order, the bytes that are made before it and read behind it."""
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
    """Where the bytes alive stop falling, from `start` on."""
    place = start
    while place < stop and alive[place + 1] < alive[place]:
        place += 1
    return place


def _part(order: _Order, name: str, role: Role, start: int, stop: int) -> ModelPart:
    """The part of the equations [start, stop), with those on parameters alone that it reads."""
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
        debug_info=order.jaxpr.debug_info.with_unknown_names(),
    )
    layer = Layer(jaxpr, tuple(var.aval for var in given), tuple(var.aval for var in out))
    return ModelPart(name, role, layer, tuple(weights), tuple(given), tuple(out))


def _results(order: _Order, start: int, stop: int) -> list[Any]:
    """What the equations [start, stop) make for those behind them, or as a result of the whole.

    Results that are made of parameters alone are made by no part, so the last one makes them.
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
    """The equations, in order, that make of parameters alone what is wanted."""
    needed: dict[int, Any] = {}
    todo = [var for var in wanted if var in order.aside]
    while todo:
        eqn = order.aside[todo.pop()]
        if id(eqn) not in needed:
            needed[id(eqn)] = eqn
            todo += [var for var in variables(eqn.invars) if var in order.aside]
    return [eqn for eqn in order.jaxpr.eqns if id(eqn) in needed]
