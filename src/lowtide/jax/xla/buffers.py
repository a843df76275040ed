"""Buffers whose rows a loop writes and reads in place: lists of arrays, one for each leaf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.sharding import AxisType, PartitionSpec

from lowtide.jax.installed import varying, varying_axes
from lowtide.jax.xla.jaxprs import Leaves, replaced


def zeros(aval: Any, *rows: int) -> Any:
    """Zeros of a type, with leading axes for rows; sharded, and varying over manual axes, as the type says."""
    shape = (*rows, *aval.shape)
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        # Random keys have no zero, so an arbitrary key takes its place.
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, aval.dtype))
        blank = jax.random.wrap_key_data(jnp.zeros(data.shape, data.dtype), impl=aval.dtype._impl)
    else:
        blank = jnp.zeros(shape, aval.dtype, out_sharding=_spread(aval, len(rows)))
    return varying(blank, varying_axes(aval))


def _spread(aval: Any, rows: int) -> Any:
    """The sharding of rows of a type over devices, where the type has an explicit one."""
    sharding = aval.sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return sharding.update(spec=PartitionSpec(*[None] * rows, *sharding.spec))


def buffers(avals: Sequence[Any], rows: int) -> Leaves:
    """A buffer of `rows` rows for each type."""
    return [zeros(aval, rows) for aval in avals]


def read(leaves: Sequence[Any], row: Any) -> Leaves:
    """One row of each buffer."""
    return [lax.dynamic_index_in_dim(leaf, row, keepdims=False) for leaf in leaves]


def write(leaves: Sequence[Any], row: Any, values: Sequence[Any]) -> Leaves:
    """The buffers with one row replaced."""
    pairs = zip(leaves, values, strict=True)
    return [lax.dynamic_update_index_in_dim(leaf, value, row, 0) for leaf, value in pairs]


def instantiated(cotangent: Any, aval: Any) -> Any:
    """A cotangent as an array, also if it is a symbolic zero."""
    return zeros(aval) if isinstance(cotangent, SymbolicZero) else cotangent


def added(one: Leaves, other: Leaves) -> Leaves:
    """The sums, leaf by leaf."""
    return [a + b for a, b in zip(one, other, strict=True)]


def with_zeros(leaves: Leaves, places: tuple[int, ...], tangents: Leaves) -> Leaves:
    """Tangents for all leaves: the given ones at `places`, symbolic zeros elsewhere."""
    return replaced([zero_from_primal(leaf, symbolic_zeros=True) for leaf in leaves], places, tangents)
