"""Rows of arrays that a loop writes and reads in place, one list entry for each leaf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.sharding import AxisType, PartitionSpec

from lowtide.jax.xla.jaxprs import Leaves, replaced


def zeros(aval: Any, *rows: int) -> Any:
    """Zeros of a type, with leading axes for rows; spread over devices and mapped axes as the type says."""
    shape = (*rows, *aval.shape)
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        # Random keys: there is no zero, so an arbitrary key stands in.
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, aval.dtype))
        blank = jax.random.wrap_key_data(jnp.zeros(data.shape, data.dtype), impl=aval.dtype._impl)
    else:
        blank = jnp.zeros(shape, aval.dtype, out_sharding=_spread(aval, len(rows)))
    varying = tuple(aval.manual_axis_type.varying)
    return lax.pcast(blank, varying, to="varying") if varying else blank


def _spread(aval: Any, rows: int) -> Any:
    """How rows of a type are spread over devices, where the type says so."""
    sharding = aval.sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return sharding.update(spec=PartitionSpec(*[None] * rows, *sharding.spec))


def buffers(avals: Sequence[Any], rows: int) -> Leaves:
    """Room for a number of rows of each type."""
    return [zeros(aval, rows) for aval in avals]


def read(leaves: Sequence[Any], row: Any) -> Leaves:
    """One row of each."""
    return [lax.dynamic_index_in_dim(leaf, row, keepdims=False) for leaf in leaves]


def write(leaves: Sequence[Any], row: Any, values: Sequence[Any]) -> Leaves:
    """The same with one row replaced."""
    pairs = zip(leaves, values, strict=True)
    return [lax.dynamic_update_index_in_dim(leaf, value, row, 0) for leaf, value in pairs]


def instantiated(cotangent: Any, aval: Any) -> Any:
    """A cotangent as an array, where it may be known to be zero."""
    return zeros(aval) if isinstance(cotangent, SymbolicZero) else cotangent


def added(one: Leaves, other: Leaves) -> Leaves:
    """Leaf by leaf."""
    return [a + b for a, b in zip(one, other, strict=True)]


def with_zeros(leaves: Leaves, places: tuple[int, ...], tangents: Leaves) -> Leaves:
    """Tangents for all leaves, zero but for those at `places`."""
    return replaced([zero_from_primal(leaf, symbolic_zeros=True) for leaf in leaves], places, tangents)
