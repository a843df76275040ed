"""A loss function, traced once and cut into its blocks and what is between them.

Blocks are not looked for in the program's text but in its equations. An equation that reads a block's parameters is the
block's. So are all from the first of them to the last, for a model calls its blocks one after the other. Between two
blocks the cut is where the fewest bytes are alive. Equations on parameters alone (a change of precision, a mask) are
no part of that order: they are made wherever they are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax
from jax.extend import core

from lowtide.checks import function
from lowtide.jax.jaxprs import nbytes
from lowtide.jax.layers import Layer, trace_layer
from lowtide.jax.model_blocks import is_array, owners
from lowtide.jax.step import Leaves

OUTSIDE, LOSS = "(outside)", "(loss)"


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A stretch of the loss: a block, or what is before, between or after them.

    Attributes:
        name: the block's, or one in parentheses.
        layer: its equations. The parameters that it reads are its constvars.
        weights: variables of those parameters in the whole.
        given: variables of what else it reads.
        made: variables of what it makes for later parts, or as a result.
    """

    name: str
    layer: Layer
    weights: tuple[Any, ...]
    given: tuple[Any, ...]
    made: tuple[Any, ...]

    @property
    def is_block(self) -> bool:
        """Whether it can be run again."""
        return not self.name.startswith("(")


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

    parts: tuple[Part, ...]
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
    parts = _Cutter(jaxpr, belongs).parts()
    return Model(
        parts=tuple(parts),
        weights=tuple(jaxpr.invars[:count]),
        others=(*jaxpr.invars[count:], *jaxpr.constvars),
        results=tuple(jaxpr.outvars),
        leaves=(*leaves, *consts),
        tree=form,
        unread=tuple(name for name in names if name not in {base_name(part.name) for part in parts}),
    )


def base_name(name: str) -> str:
    """The block of a part: a block that is called twice has two parts."""
    return name.partition(" (call ")[0]


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


class _Cutter:
    """Cuts a jaxpr's equations; `belongs` says of each parameter whose it is."""

    def __init__(self, jaxpr: core.Jaxpr, belongs: Mapping[Any, str | None]) -> None:
        self._jaxpr, self._weights = jaxpr, belongs
        self._maker = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self._order: list[Any] = []  # equations that read more than parameters
        self._touched: list[str | None] = []  # for each of those the block whose parameters it reads, "" for outside
        labels: dict[Any, frozenset[str]] = {var: frozenset([name or ""]) for var, name in belongs.items()}
        self._aside: set[Any] = set()  # what is made of parameters and numbers alone
        for eqn in jaxpr.eqns:
            reads = variables(eqn.invars)
            still = [var for var in reads if var in self._weights or var in self._aside]
            touched = frozenset[str]().union(*(labels[var] for var in still))
            if len(still) == len(reads) and not eqn.effects:
                self._aside.update(eqn.outvars)
                labels.update(dict.fromkeys(eqn.outvars, touched))
            else:
                self._order.append(eqn)
                mine = touched - {""}
                self._touched.append(next(iter(mine)) if len(mine) == 1 else "" if touched else None)
        self._last: dict[Any, int] = {}  # the last place that reads a variable; results are read at the end
        for k, eqn in enumerate(self._order):
            self._last.update(dict.fromkeys(variables(eqn.invars), k))
        self._last.update(dict.fromkeys(variables(jaxpr.outvars), len(self._order)))

    def parts(self) -> list[Part]:
        """The parts in order; only one, the loss, if there is no block."""
        calls = [(name, [k for k, _ in some]) for name, some in groupby(self._anchors(), key=lambda pair: pair[1])]
        alive = self._alive()
        outside = [k for k, name in enumerate(self._touched) if name == ""]
        cuts: list[int] = []
        before = max((k + 1 for k in outside if calls and k < calls[0][1][0]), default=0)
        for _, places in calls:
            cuts.append(_lowest(alive, before, places[0]))
            before = places[-1] + 1
        after = min((k for k in outside if k >= before), default=len(self._order))
        cuts.append(_first_low(alive, before, after) if calls else 0)
        names = [OUTSIDE, *self._numbered([name for name, _ in calls]), LOSS]
        edges = zip(names, [0, *cuts], [*cuts, len(self._order)], strict=True)
        return [self._part(name, start, stop) for name, start, stop in edges if stop > start or name == LOSS]

    def _anchors(self) -> list[tuple[int, str]]:
        return [(k, name) for k, name in enumerate(self._touched) if name]

    def _numbered(self, names: Sequence[str]) -> list[str]:
        seen: dict[str, int] = {}
        numbered = []
        for name in names:
            seen[name] = seen.get(name, 0) + 1
            numbered.append(name if seen[name] == 1 else f"{name} (call {seen[name]})")
        return numbered

    def _alive(self) -> list[int]:
        """For each place in the order, the bytes that are made before it and read behind it."""
        change = [0] * (len(self._order) + 2)
        for k, eqn in enumerate(self._order):
            for var in eqn.outvars:
                if self._last.get(var, k) > k:
                    change[k + 1] += nbytes([var.aval])
                    change[self._last[var] + 1] -= nbytes([var.aval])
        alive = [0]
        for more in change[1:-1]:
            alive.append(alive[-1] + more)
        return alive

    def _part(self, name: str, start: int, stop: int) -> Part:
        mine = self._order[start:stop]
        made = {var for eqn in mine for var in eqn.outvars}
        results = variables(self._jaxpr.outvars)
        out = [var for eqn in mine for var in eqn.outvars if self._last.get(var, 0) >= stop]
        wanted = [var for eqn in mine for var in variables(eqn.invars)]
        if stop == len(self._order):  # results that are made of parameters alone, too
            out += [var for var in dict.fromkeys(results) if var in self._aside]
            wanted += out
        aside = self._prepared(wanted)
        reads = dict.fromkeys(var for eqn in (*aside, *mine) for var in variables(eqn.invars))
        inside = made.union(*(eqn.outvars for eqn in aside))
        weights = [var for var in reads if var in self._weights]
        given = [var for var in reads if var not in self._weights and var not in inside]
        eqns = [*aside, *mine]
        jaxpr = self._jaxpr.replace(
            constvars=weights,
            invars=given,
            outvars=out,
            eqns=eqns,
            effects=frozenset().union(*(eqn.effects for eqn in eqns)),
            debug_info=self._jaxpr.debug_info.with_unknown_names(),
        )
        layer = Layer(jaxpr, tuple(var.aval for var in given), tuple(var.aval for var in out))
        return Part(name, layer, tuple(weights), tuple(given), tuple(out))

    def _prepared(self, wanted: Iterable[Any]) -> list[Any]:
        """The equations, in order, that make of parameters alone what is wanted."""
        needed: dict[int, Any] = {}
        todo = [var for var in wanted if var in self._aside]
        while todo:
            eqn = self._maker[todo.pop()]
            if id(eqn) not in needed:
                needed[id(eqn)] = eqn
                todo += [var for var in variables(eqn.invars) if var in self._aside]
        return [eqn for eqn in self._jaxpr.eqns if id(eqn) in needed]


def variables(vars_: Iterable[Any]) -> list[Any]:
    """Those that are no literals."""
    return [var for var in vars_ if isinstance(var, core.Var)]


def _lowest(alive: Sequence[int], start: int, stop: int) -> int:
    """The last place in [start, stop] with the fewest bytes alive."""
    return min(range(start, stop + 1), key=lambda k: (alive[k], -k))


def _first_low(alive: Sequence[int], start: int, stop: int) -> int:
    """Where the bytes alive stop falling, from `start` on."""
    place = start
    while place < stop and alive[place + 1] < alive[place]:
        place += 1
    return place
