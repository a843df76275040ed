"""Dependencies between the variables of a jaxpr, and the bytes that it holds while it runs.

Equations are not looked into: each result depends on everything that its equation reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from lowtide.jax.installed import jaxprs_in_params

Leaves = list[Any]


def names(text: str) -> frozenset[str]:
    """The names of primitives, written as one text."""
    return frozenset(text.split())


PRODUCTS = names("dot_general ragged_dot_general conv_general_dilated")  # of whole arrays
# Operations whose results are stored; the results of all others are computed on the fly where they are read.
_STORED = PRODUCTS | names(
    "scatter scatter-add gather sort cumsum cumprod cummax cummin cumlogsumexp reduce_sum reduce_max reduce_min "
    "reduce_prod argmax argmin reduce_and reduce_or reduce_precision scan while cond dynamic_update_slice concatenate "
    "fft cholesky lu qr eigh svd triangular_solve custom_call pure_callback io_callback threefry2x32 random_bits "
    "random_gamma all_gather psum psum_invariant all_to_all select_and_scatter_add reduce_window top_k"
)


def nbytes(avals: Iterable[Any]) -> int:
    """Bytes of arrays of these types."""
    return sum(int(aval.size) * aval.dtype.itemsize for aval in avals)


def variables(vars_: Iterable[Any]) -> list[Any]:
    """The variables among these, without literals."""
    return [var for var in vars_ if isinstance(var, core.Var)]


def invariant(jaxpr: core.Jaxpr, given: Iterable[Any]) -> set[Any]:
    """The variables that depend on `given` and constants alone, and on no equation with a side effect."""
    known = {*given, *jaxpr.constvars}
    for eqn in jaxpr.eqns:
        if not eqn.effects and known.issuperset(variables(eqn.invars)):
            known.update(eqn.outvars)
    return known


def needed_for(jaxpr: core.Jaxpr, wanted: Iterable[Any]) -> list[Any]:
    """The equations that are needed to compute `wanted`, in order."""
    missing = set(variables(wanted))
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if missing.intersection(eqn.outvars):
            eqns.append(eqn)
            missing.update(variables(eqn.invars))
    return eqns[::-1]


def is_float(aval: Any) -> bool:
    """Whether a gradient can flow through an array of this type."""
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def depends(jaxpr: core.Jaxpr, given: Iterable[Any]) -> list[bool]:
    """For each result, whether a gradient may flow to it from any of `given`."""
    moving = set(given)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "stop_gradient" and moving.intersection(variables(eqn.invars)):
            moving.update(var for var in eqn.outvars if is_float(var.aval))
    return [var in moving for var in jaxpr.outvars]


def holds_complex(jaxpr: core.Jaxpr) -> bool:
    """Whether the jaxpr has complex numbers anywhere in it."""
    made: list[Any] = [var.aval for eqn in jaxpr.eqns for var in eqn.outvars]
    given: list[Any] = [var.aval for var in (*jaxpr.constvars, *jaxpr.invars)]
    return any(jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in (*given, *made)) or any(
        holds_complex(sub) for eqn in jaxpr.eqns for sub in jaxprs_in_params(eqn.params)
    )


def has_loop(jaxpr: core.Jaxpr) -> bool:
    """Whether the jaxpr has a loop anywhere in it."""
    return any(
        eqn.primitive.name in ("scan", "while") or any(map(has_loop, jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )


def transient(jaxpr: core.Jaxpr) -> int:
    """An estimate of the most bytes of results that are stored at once while the equations run in order.

    XLA fuses cheap operations into one pass over memory, so only results of the others count, as long as they are
    needed.
    """
    return _transient(jaxpr)[0]


def _transient(jaxpr: core.Jaxpr) -> tuple[int, list[bool]]:
    """The bytes of `transient`, and for each of the jaxpr's results whether it is stored."""
    last, read_whole = last_reads(jaxpr.eqns, jaxpr.outvars), _read_by_products(jaxpr)
    stored: dict[Any, int] = {}
    peak = 0
    for place, eqn in enumerate(jaxpr.eqns):
        inner = [_transient(sub) for sub in jaxprs_in_params(eqn.params)]
        pairs = zip(eqn.outvars, _stored_results(eqn, inner), strict=True)
        stored.update((var, nbytes([var.aval])) for var, yes in pairs if yes or var in read_whole)
        inside = max((bytes_ for bytes_, _ in inner), default=0)
        peak = max(peak, sum(stored.values()) + inside)
        stored = {var: bytes_ for var, bytes_ in stored.items() if last.get(var, place) > place}
    return peak, [isinstance(var, core.Var) and var in stored for var in jaxpr.outvars]


def last_reads(eqns: Sequence[Any], results: Iterable[Any]) -> dict[Any, int]:
    """For each variable the index of the last equation that reads it; results are read at the end."""
    last = {var: place for place, eqn in enumerate(eqns) for var in variables(eqn.invars)}
    last.update(dict.fromkeys(variables(results), len(eqns)))
    return last


def _read_by_products(jaxpr: core.Jaxpr) -> set[Any]:
    """The inputs of products: a product reads them many times, so they are stored, whatever makes them."""
    return {var for eqn in jaxpr.eqns if eqn.primitive.name in PRODUCTS for var in variables(eqn.invars)}


def _stored_results(eqn: Any, inner: Sequence[tuple[int, list[bool]]]) -> list[bool]:
    """For each result of an equation, whether it is stored; the results of a call are those of its jaxpr."""
    count = len(eqn.outvars)
    if eqn.primitive.name in _STORED:
        return [True] * count
    return inner[0][1] if inner and len(inner[0][1]) == count else [False] * count


def call(jaxpr: core.Jaxpr, consts: Sequence[Any], *args: Any) -> Leaves:
    """Run a jaxpr with the values of its constants and arguments."""
    results: Leaves = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, list(consts)))(*args)
    return results


def batched_first(leaves: Sequence[Any], dims: Sequence[int | None], size: int) -> Leaves:
    """The leaves of a batch of this size with its axis in front; those that all examples share are repeated."""
    return [
        jnp.broadcast_to(leaf, (size, *leaf.shape)) if dim is None else jnp.moveaxis(leaf, dim, 0)
        for leaf, dim in zip(leaves, dims, strict=True)
    ]


def replaced(leaves: Sequence[Any], places: Sequence[int], new: Sequence[Any]) -> Leaves:
    """The leaves with new ones at `places`."""
    found = dict(zip(places, new, strict=True))
    return [found.get(k, leaf) for k, leaf in enumerate(leaves)]
