"""A row of layers, traced once: each layer's input, results and constants. Nothing is run or allocated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from lowtide.checks import function
from lowtide.errors import FunctionError, InputError
from lowtide.jax.xla.jaxprs import Leaves, call, replaced


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A function of flat leaves, and the types of its input and results."""

    jaxpr: core.Jaxpr  # its constvars are what the layer closes over, parameters included
    given: tuple[Any, ...]
    made: tuple[Any, ...]

    def run(self, consts: Sequence[Any], x: Sequence[Any]) -> Leaves:
        """The layer's results."""
        return call(self.jaxpr, consts, *x)


@dataclass(frozen=True, slots=True, eq=False)
class TracedLayers:
    """Layers that are called one after another, with each layer's constants and the input of the first."""

    layers: tuple[Layer, ...]
    consts: tuple[Leaves, ...]
    x: Leaves
    tree: Any  # the structure of the last layer's results

    def result(self, leaves: Leaves) -> Any:
        """The last layer's results in the user's own structure."""
        return self.tree.unflatten(leaves)


def trace_layers(layers: Iterable[Any], x: Any, name: str = "layers") -> TracedLayers:
    """Trace layers that are called one after another, the first with `x`.

    Raises:
        InputError: there are no layers, or `x` is not a pytree of arrays.
        FunctionError: a layer cannot be called, or does not return a pytree of arrays.
    """
    rows = listed(layers, name)
    leaves, tree = arrays(x, "x")
    given = leaves
    traced: list[Layer] = []
    consts: list[Leaves] = []
    for place, row in enumerate(rows):
        layer, held, tree = trace_layer(row, given, tree, f"{name}[{place}]")
        traced.append(layer)
        consts.append(held)
        given = list(layer.made)
    return TracedLayers(tuple(traced), tuple(consts), leaves, tree)


def listed(layers: Iterable[Any], name: str) -> list[Any]:
    """The layers as a list; refused if it is empty or one of them cannot be called."""
    try:
        rows = list(layers)
    except TypeError:
        raise FunctionError(
            f"{name} is a {type(layers).__name__}, not a row of layers; give a list, [{name}] for a single one"
        ) from None
    if not rows:
        raise InputError(f"{name} is empty; give at least one layer")
    for place, row in enumerate(rows):
        function(row[0] if _is_pair(row) else row, f"{name}[{place}]")
    return rows


def _is_pair(row: Any) -> bool:
    """Whether a layer is a pair of a function and its parameters, rather than something that can be called itself."""
    return not callable(row) and isinstance(row, tuple | list) and len(row) == 2


def called_plainly(rows: Iterable[Any], x: Any) -> Any:
    """The result of calling the layers one after another, without any plan."""
    for row in rows:
        x = row[0](row[1], x) if _is_pair(row) else row(x)
    return x


def trace_layer(row: Any, given: Leaves, given_tree: Any, name: str) -> tuple[Layer, Leaves, Any]:
    """The layer for an input of these leaves and this structure, its constants, and the structure of its results."""
    row_tree: Any
    parts, row_tree = jax.tree.flatten(row)  # modules of equinox are pytrees; a function is a single leaf
    places = [k for k, part in enumerate(parts) if isinstance(part, jax.Array | np.ndarray | jax.ShapeDtypeStruct)]
    trees: list[Any] = []

    def flat(params: Leaves, leaves: Leaves) -> Leaves:
        out = called_plainly([row_tree.unflatten(replaced(parts, places, params))], given_tree.unflatten(leaves))
        made, tree = jax.tree.flatten(out)
        for leaf in made:
            if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
                raise FunctionError(
                    f"{name} returns a {type(leaf).__name__}; make it return arrays, or pytrees of them"
                )
        trees[:] = [tree]
        return made

    params = [parts[k] for k in places]
    closed = jax.make_jaxpr(flat)(params, given)
    invars = closed.jaxpr.invars
    jaxpr = closed.jaxpr.replace(
        constvars=[*closed.jaxpr.constvars, *invars[: len(params)]], invars=invars[len(params) :]
    )
    layer = Layer(jaxpr, tuple(closed.in_avals[len(params) :]), tuple(closed.out_avals))
    return layer, [*closed.consts, *params], trees[0]


def arrays(x: Any, name: str) -> tuple[Leaves, Any]:
    """The leaves of `x` as arrays, `ShapeDtypeStruct`s as they are, and the structure of `x`."""
    paths, tree = jax.tree_util.tree_flatten_with_path(x)
    return [_array(leaf, f"{name}{jax.tree_util.keystr(path)}") for path, leaf in paths], tree


def _array(leaf: Any, name: str) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    try:
        return jnp.asarray(leaf)
    except (TypeError, ValueError):
        raise InputError(f"{name} is a {type(leaf).__name__}; give arrays, or pytrees of them") from None
