"""Values from one place, tangents from another: two primitives.

JAX forgets the rule of a `jax.custom_jvp` function once a scan around it has been differentiated, because a first
derivative needs it no more; second derivatives do. A primitive's rule stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir


def shadow(x: Any) -> Any:
    """Zeros with the tangent of `x`."""
    return _shadow_p.bind(x)


def with_tangent_of(shadow: Any, value: Any) -> Any:
    """The value, with the tangent of `shadow`, which is of the same type; the value's own is dropped."""
    return _joined_p.bind(value, shadow)


def _shadow_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return _shadow_p.bind(*primals), tangents[0]


_shadow_p = core.Primitive("lowtide_shadow")
_shadow_p.def_impl(jnp.zeros_like)
_shadow_p.def_abstract_eval(lambda aval: aval)
ad.primitive_jvps[_shadow_p] = _shadow_jvp
batching.defvectorized(_shadow_p)
mlir.register_lowering(_shadow_p, mlir.lower_fun(jnp.zeros_like, multiple_results=False))


def _joined_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return _joined_p.bind(*primals), tangents[1]


def _joined_batch(args: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, int]:
    size = next(arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None)
    rows = [
        jnp.broadcast_to(arg, (size, *arg.shape)) if dim is None else jnp.moveaxis(arg, dim, 0)
        for arg, dim in zip(args, dims, strict=True)
    ]
    return _joined_p.bind(*rows), 0


JOINED = "lowtide_with_tangent_of"
_joined_p = core.Primitive(JOINED)
_joined_p.def_impl(lambda value, _: value)
_joined_p.def_abstract_eval(lambda _, shadow: shadow)  # whose type may be a weak one
ad.primitive_jvps[_joined_p] = _joined_jvp
batching.primitive_batchers[_joined_p] = _joined_batch
mlir.register_lowering(_joined_p, lambda _, value, __: [value])
