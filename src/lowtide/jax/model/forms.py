"""The forms that a block can have, and the model run with a form for each of its blocks.

"keep" keeps everything that XLA chooses to keep, "rerun" only the block's input. In between, a rerun keeps some values,
so that what leads to them need not be recomputed: those that `checkpoint_name` has named, or products of arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from lowtide.forms import KEEP, Form, Way
from lowtide.jax.layers.rerun import Run, after, gate, run_again
from lowtide.jax.layers.trace import Layer
from lowtide.jax.model.parts import Model, ModelPart
from lowtide.jax.xla.buffers import instantiated
from lowtide.jax.xla.jaxprs import PRODUCTS, Leaves, call, has_loop, is_float, replaced, variables
from lowtide.jax.xla.linear import LinearMap, apply

# Names of values in a block: up to this many, every set of them is a form; with more, each name alone and all together.
_MOST_NAMES = 3


@dataclass(frozen=True, slots=True)
class BlockForm:
    """A form of a part, and the variables that the first run keeps for the rerun; None if nothing is run again."""

    form: Form
    kept: tuple[Any, ...] | None


_KEPT = BlockForm(KEEP, None)


def forms(part: ModelPart) -> list[BlockForm]:
    """The menu of a part. A part that is not a block has only one form."""
    if not part.is_block:
        return [_KEPT]
    sets = {Way(rerun=True): frozenset[Any]()}
    sets |= {Way(rerun=True, kept=names): kept for names, kept in _named(part.layer).items()}
    sets[Way(rerun=True, products="all")] = _products(part.layer, alone=False)
    sets[Way(rerun=True, products="weights")] = _products(part.layer, alone=True)
    menu, seen = [_KEPT], set[frozenset[Any]]()
    order = [var for eqn in part.layer.jaxpr.eqns for var in eqn.outvars]
    for way, kept in sets.items():
        kept -= set(part.made)  # later parts hold these anyway
        if kept not in seen:
            seen.add(kept)
            menu.append(BlockForm(Form((("", way),)), tuple(var for var in order if var in kept)))
    return menu


def _named(layer: Layer) -> dict[tuple[str, ...], frozenset[Any]]:
    """Sets of named values, by their names."""
    named: dict[str, set[Any]] = {}
    for eqn in layer.jaxpr.eqns:
        if eqn.primitive.name == "name":
            named.setdefault(eqn.params["name"], set()).update(eqn.outvars)
    sizes = range(1, len(named) + 1) if len(named) <= _MOST_NAMES else (1, len(named))
    sets = [names for size in sizes for names in combinations(named, size)]
    return {names: frozenset().union(*(named[name] for name in names)) for names in sets}


def _products(layer: Layer, *, alone: bool) -> frozenset[Any]:
    """The products of arrays; with `alone`, only those without a batch dimension, as products with weights are.

    The latter take more operations for each byte of their result.
    """
    return frozenset(
        var
        for eqn in layer.jaxpr.eqns
        if eqn.primitive.name in PRODUCTS
        if not (alone and eqn.primitive.name == "dot_general" and eqn.params["dimension_numbers"][1][0])
        for var in eqn.outvars
    )


def model_runner(model: Model, chosen: Sequence[BlockForm]) -> Callable[[Sequence[Any]], Leaves]:
    """The model as a function of its leaves, with each part in its form; unchanged if nothing is run again."""
    runs = [_run_in(part, form, model.others) for part, form in zip(model.parts, chosen, strict=True)]
    again = any(form.kept is not None for form in chosen)

    def run(leaves: Sequence[Any]) -> Leaves:
        known = dict(zip((*model.weights, *model.others), leaves, strict=True))
        for part, run_part in zip(model.parts, runs, strict=True):
            weights, given = [known[var] for var in part.weights], [known[var] for var in part.given]
            if again:
                weights, given = gate(weights, given)
            known.update(zip(part.made, run_part(weights, given), strict=True))
        results = [known[var] if isinstance(var, core.Var) else jnp.asarray(var.val) for var in model.results]
        return _first(*results) if again else results

    return run


@jax.custom_jvp
def _first(*results: Any) -> Leaves:
    """The same results; in the backward, no cotangent passes before the results have been computed.

    A program may return the loss last. XLA would then compute it at the end, and keep what it is computed from until
    then.
    """
    return list(results)


@_first.defjvp
def _first_jvp(primals: Any, tangents: Any) -> tuple[Leaves, Leaves]:
    floats = [k for k, leaf in enumerate(primals) if is_float(jax.typeof(leaf))]
    values = [primals[k] for k in floats]
    moved = apply(LinearMap(_passed, _after), values, [tangents[k] for k in floats], values)
    return list(primals), replaced(tangents, floats, moved)


def _passed(values: Leaves, tangents: Leaves) -> Leaves:
    del values
    return tangents


def _after(values: Leaves, cotangents: Leaves) -> Leaves:
    pairs = zip(cotangents, values, strict=True)
    return after([instantiated(cotangent, jax.typeof(value)) for cotangent, value in pairs], values)


def _run_in(part: ModelPart, form: BlockForm, others: Sequence[Any]) -> Run:
    """A function that runs a part in a form."""
    layer = part.layer
    if form.kept is None:
        return layer.run
    loops = has_loop(layer.jaxpr)
    there = [k for k, var in enumerate(part.given) if var in others and is_float(var.aval)]
    if not form.kept:
        return lambda consts, x: _rerun(layer.run, there, consts, x, loops)
    swapped = (*form.kept, *layer.jaxpr.outvars)
    first = Layer(layer.jaxpr.replace(outvars=list(swapped)), layer.given, tuple(var.aval for var in swapped))
    again = _with_values(layer, swapped)

    def run(consts: Leaves, x: Leaves) -> Leaves:
        # The part's results are among the values, too: what the first run has computed is not computed a second time.
        values = first.run([lax.stop_gradient(leaf) for leaf in consts], [lax.stop_gradient(leaf) for leaf in x])
        return _rerun(again, there, consts, [*x, *values], loops)

    return run


def _rerun(run: Run, there: Sequence[int], consts: Leaves, x: Leaves, loops: bool) -> Leaves:
    """`run_again`, for an `x` of which the entries at `there` are arguments of the whole program.

    What a rerun starts from is copied in order to wait, and XLA would copy arguments at the beginning. So the rerun
    reads arguments directly, under a flag that is always true, and the flag waits.
    """
    if not there:
        return run_again(run, consts, x, loops=loops)
    count, moving = len(consts), [k for k in range(len(x)) if k not in there]

    def flagged(every: Leaves, rest: Leaves) -> Leaves:
        *rest, flag = rest
        arguments = [jnp.where(flag, leaf, jnp.zeros_like(leaf)) for leaf in every[count:]]
        return run(every[:count], replaced(replaced([None] * len(x), there, arguments), moving, rest))

    waiting = [*(x[k] for k in moving), jnp.array(True)]
    return run_again(flagged, [*consts, *(x[k] for k in there)], waiting, loops=loops)


def _with_values(layer: Layer, known: Sequence[Any]) -> Run:
    """The layer as a function of its input followed by the values of the variables `known`.

    These values replace what its equations compute. The equations still define the derivatives, and since nobody reads
    their results, XLA drops them.
    """
    jaxpr = layer.jaxpr
    steps = [
        jaxpr.replace(constvars=[], invars=variables(eqn.invars), outvars=eqn.outvars, eqns=[eqn]) for eqn in jaxpr.eqns
    ]

    def run(consts: Leaves, leaves: Leaves) -> Leaves:
        values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *leaves), strict=False))
        given = dict(zip(known, leaves[len(jaxpr.invars) :], strict=True))
        for step in steps:
            made = call(step, [], *(values[var] for var in step.invars))
            for var, value in zip(step.outvars, made, strict=True):
                values[var] = _instead(value, given[var]) if var in given else value
        return [values[var] for var in jaxpr.outvars]

    return run


@jax.custom_jvp
def _instead(made: Any, given: Any) -> Any:
    """The value of `given`, with the derivative of `made`."""
    del made
    return given


@_instead.defjvp
def _instead_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    return primals[1], tangents[0]
