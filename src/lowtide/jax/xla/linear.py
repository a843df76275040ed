"""Two primitives that define how a loop is differentiated.

`apply` is a linear map with a given transpose. Forward mode runs the map; reverse mode, which transposes it, runs the
given transpose. `jax.custom_vjp` has only the transpose, and refuses forward mode.

`once` is the identity on results that have no further derivative in reverse mode; taking one is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from lowtide.errors import FunctionError
from lowtide.jax.installed import unmapped_aval
from lowtide.jax.xla.jaxprs import Leaves, batched_first, replaced


@dataclass(frozen=True, slots=True, eq=False)
class LinearMap:
    """`forward(residuals, tangents)` is linear in the tangents, `backward(residuals, cotangents)` is its transpose.

    The backward may get a `SymbolicZero` as a cotangent. Neither function closes over values of a trace.
    """

    forward: Callable[[Leaves, Leaves], Leaves]
    backward: Callable[[Leaves, Leaves], Leaves]


def apply(linear: LinearMap, residuals: Sequence[Any], tangents: Sequence[Any], like: Sequence[Any]) -> Leaves:
    """The map's results, which have the types of `like`."""
    types = tuple(jax.typeof(leaf).strip_weak_type() for leaf in like)
    results: Leaves = _apply_p.bind(*residuals, *tangents, linear=linear, count=len(residuals), types=types)
    return results


_apply_p = core.Primitive("lowtide_linear")
_apply_p.multiple_results = True


def _forward(*args: Any, linear: LinearMap, count: int, types: tuple[Any, ...]) -> Leaves:
    del types
    return linear.forward(list(args[:count]), list(args[count:]))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Leaves, Leaves]:
    """Forward mode over the map, by JAX's own: the map is linear in the tangents, but not in the residuals."""
    moving = [k for k, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

    def forward(*some: Any) -> Leaves:
        return _forward(*replaced(primals, moving, some), **params)

    _, out = jax.jvp(forward, [primals[k] for k in moving], [tangents[k] for k in moving])
    return _apply_p.bind(*primals, **params), out


def _transpose(cotangents: Sequence[Any], *args: Any, linear: LinearMap, count: int, types: tuple[Any, ...]) -> Leaves:
    """Reverse mode: the map's own backward. Residuals are no linear inputs, so they get no cotangent."""
    residuals, tangents = args[:count], args[count:]
    given = [
        SymbolicZero(type_) if type(cotangent) is ad.Zero else cotangent
        for cotangent, type_ in zip(cotangents, types, strict=True)
    ]
    back = linear.backward(list(residuals), given)
    pairs = zip(tangents, back, strict=True)
    return [None] * count + [ct if ad.is_undefined_primal(tangent) else None for tangent, ct in pairs]


def _batch(
    axis: Any, args: Sequence[Any], dims: Sequence[Any], *, linear: LinearMap, count: int, types: tuple[Any, ...]
) -> tuple[Leaves, Leaves]:
    """`vmap` of the map: another linear map, whose two directions are each mapped.

    A symbolic zero is no array that could be mapped over, so it is taken out before the mapped backward and put back
    inside, with the type that it has for one example.
    """
    residuals, tangents = list(args[:count]), batched_first(args[count:], dims[count:], axis.size)
    mapped = {"axis_size": axis.size, "axis_name": axis.name, "spmd_axis_name": axis.spmd_name}
    over = list(dims[:count])

    def backward(residuals: Leaves, cotangents: Leaves) -> Leaves:
        zero = [k for k, cotangent in enumerate(cotangents) if isinstance(cotangent, SymbolicZero)]

        def one(residuals: Leaves, some: Leaves) -> Leaves:
            rest = iter(some)
            return linear.backward(
                residuals, [SymbolicZero(types[k]) if k in zero else next(rest) for k in range(len(types))]
            )

        some = [cotangent for k, cotangent in enumerate(cotangents) if k not in zero]
        back: Leaves = jax.vmap(one, (over, 0), 0, **mapped)(residuals, some)
        return back

    forward = jax.vmap(linear.forward, (over, 0), 0, **mapped)
    wide = tuple(unmapped_aval(axis.size, 0, type_) for type_ in types)
    out = _apply_p.bind(*residuals, *tangents, linear=LinearMap(forward, backward), count=count, types=wide)
    return out, [0] * len(out)


_apply_p.def_impl(_forward)
_apply_p.def_abstract_eval(lambda *_, types, **__: list(types))
ad.primitive_jvps[_apply_p] = _jvp
ad.primitive_transposes[_apply_p] = _transpose
batching.fancy_primitive_batchers[_apply_p] = _batch
mlir.register_lowering(_apply_p, mlir.lower_fun(_forward, multiple_results=True))


def once(leaves: Leaves) -> Leaves:
    """The same leaves, through which no derivative can be taken in reverse mode."""
    return [leaf if leaf is None else _once_p.bind(leaf) for leaf in leaves]


def _refuse(*_: Any) -> Any:
    raise FunctionError(
        "a planned loop has no second derivative in reverse mode (a gradient of a gradient or of a tangent); take the "
        "outer one in forward mode (jax.hessian, jax.jacfwd of jax.grad), or give base=, which has every derivative"
    )


_once_p = core.Primitive("lowtide_once")
_once_p.def_impl(lambda leaf: leaf)
_once_p.def_abstract_eval(lambda aval: aval)
ad.deflinear2(_once_p, _refuse)
batching.defvectorized(_once_p)
mlir.register_lowering(_once_p, lambda _, leaf: [leaf])
