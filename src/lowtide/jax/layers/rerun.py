"""Functions whose tape is made by a rerun in the backward, and not before it is needed.

`jax.checkpoint` uses an optimization barrier to keep XLA from merging a rerun with its first run. On the CPU that
barrier is removed before the program's operations are scheduled, and a rerun that waits for nothing is run early,
beside everything that is still stored: 40 MiB for 16 layers that take 34 without it, where 16 would do. So here a rerun
*waits*: the values that it starts from are made to depend on the cotangents that it is run for.

A loop also starts from zeros: the arrays into which it stacks its rows. They depend on nothing and so wait for nothing,
and XLA makes them early, for all reruns at once. So a rerun with a loop in it is the branch of a condition that waits,
and values that depend on nothing are made inside the branch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend import core, source_info_util
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import ad, batching, mlir

from lowtide.jax.xla.buffers import instantiated, with_zeros, zeros
from lowtide.jax.xla.jaxprs import Leaves, is_float, replaced
from lowtide.jax.xla.linear import LinearMap, apply

# `run(consts, x)` returns the results, and closes over no values of a trace.
Run = Callable[[Leaves, Leaves], Leaves]


def run_again(run: Run, consts: Leaves, x: Leaves, *, loops: bool) -> Leaves:
    """`run(consts, x)`, for whose backward only the arguments are kept; `loops` says whether it has a loop in it.

    What waits is all of `x`, and the `consts` that are not floats, above all the keys of random draws. Float consts are
    weights, which are not made to wait, because what waits is copied. That is enough, since every value of a tape
    depends on something that waits, except for values that depend on weights alone, which the plain call holds too, and
    values that depend on nothing, such as a mask, which XLA computes where they are read. With `loops`, those that it
    does not compute there wait as well.
    """

    def differentiated(primals: Any, tangents: Any) -> tuple[Leaves, Leaves]:
        leaves = [*primals[0], *primals[1]]
        directions = [*tangents[0], *tangents[1]]
        moving = tuple(k for k, tangent in enumerate(directions) if not isinstance(tangent, SymbolicZero))
        out = again(*primals)
        active = tuple(k for k, leaf in enumerate(out) if is_float(jax.typeof(leaf)))
        back = _RerunBackward(run, len(primals[0]), moving, active, loops)
        like = [out[k] for k in active]
        moved = apply(LinearMap(back.tangents, back.cotangents), leaves, [directions[k] for k in moving], like)
        return out, with_zeros(out, active, moved)

    again = jax.custom_jvp(run)
    again.defjvp(differentiated, symbolic_zeros=True)
    results: Leaves = again(consts, x)
    return results


class _RerunBackward:
    """How tangents and cotangents pass through `run`, from the arguments `moving` to the results `active` (indices)."""

    def __init__(self, run: Run, consts: int, moving: tuple[int, ...], active: tuple[int, ...], loops: bool) -> None:
        self._run, self._consts, self._loops = run, consts, loops
        self._moving, self._active = moving, active

    def tangents(self, leaves: Leaves, directions: Leaves) -> Leaves:
        out: Leaves = jax.jvp(*self._of_moving(leaves), (directions,))[1]
        return out

    def cotangents(self, leaves: Leaves, cotangents: Leaves) -> Leaves:
        there = [k for k, cotangent in enumerate(cotangents) if not isinstance(cotangent, SymbolicZero)]
        ready = [cotangents[k] for k in there]
        waiting = [k for k, leaf in enumerate(leaves) if k >= self._consts or not is_float(jax.typeof(leaf))]
        leaves = replaced(leaves, waiting, after([leaves[k] for k in waiting], ready))

        def pulled(leaves: Leaves, ready: Leaves) -> Leaves:
            run, primals = self._of_moving(leaves)
            out, pull = jax.vjp(run, *primals)
            pairs = zip(replaced(cotangents, there, ready), out, strict=True)
            (back,) = pull([instantiated(cotangent, jax.typeof(leaf)) for cotangent, leaf in pairs])
            return list(back)

        def nothing(leaves: Leaves, _: Leaves) -> Leaves:
            return [zeros(jax.typeof(leaves[k])) for k in self._moving]

        # The names of operations contain the transforms around them; in nested ranges they would double at each level.
        with source_info_util.reset_name_stack():
            if not self._loops:
                return pulled(leaves, ready)
            back: Leaves = lax.cond(_waited(ready), pulled, nothing, leaves, ready)
            return back

    def _of_moving(self, leaves: Leaves) -> tuple[Callable[[Leaves], Leaves], tuple[Leaves]]:
        def run(some: Leaves) -> Leaves:
            every = replaced(leaves, self._moving, some)
            out = self._run(every[: self._consts], every[self._consts :])
            return [out[k] for k in self._active]

        return run, ([leaves[k] for k in self._moving],)


def gate(consts: Leaves, x: Leaves) -> tuple[Leaves, Leaves]:
    """The same leaves. In the backward, cotangents of `x` pass only when those of `consts` have been computed.

    Otherwise XLA leaves gradients of weights, above all sums over a batch, for the end, and keeps what they are
    computed from until then.
    """
    leaves: Leaves = _gate_p.bind(*consts, *x, count=len(consts))
    return leaves[: len(consts)], leaves[len(consts) :]


_gate_p = core.Primitive("lowtide_gate")
_gate_p.multiple_results = True


def _gate_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, count: int) -> tuple[Leaves, Leaves]:
    moving = [k for k, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    moved = _gate_p.bind(*(tangents[k] for k in moving), count=sum(k < count for k in moving))
    return _gate_p.bind(*primals, count=count), replaced(tangents, moving, moved)


def _gate_transpose(cotangents: Sequence[Any], *_: Any, count: int) -> Leaves:
    there = [k for k, cotangent in enumerate(cotangents) if type(cotangent) is not ad.Zero]
    waiting = [k for k in there if k >= count]
    passed = after([cotangents[k] for k in waiting], [cotangents[k] for k in there if k < count])
    return replaced(cotangents, waiting, passed)


def _gate_batch(args: Sequence[Any], dims: Sequence[Any], *, count: int) -> tuple[Leaves, Leaves]:
    return _gate_p.bind(*args, count=count), list(dims)


_gate_p.def_impl(lambda *leaves, **_: list(leaves))
_gate_p.def_abstract_eval(lambda *avals, **_: list(avals))
ad.primitive_jvps[_gate_p] = _gate_jvp
ad.primitive_transposes[_gate_p] = _gate_transpose
batching.primitive_batchers[_gate_p] = _gate_batch
mlir.register_lowering(_gate_p, lambda _, *leaves, **__: list(leaves))


def after(leaves: Leaves, ready: Leaves) -> Leaves:
    """The same leaves, which a compiled program can use only when the arrays `ready` have been computed."""
    results: Leaves = _after_p.bind(*leaves, *ready, count=len(leaves))
    return results


_after_p = core.Primitive("lowtide_after")
_after_p.multiple_results = True


def _first(*leaves: Any, count: int) -> Leaves:
    return list(leaves[:count])


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, count: int) -> tuple[Leaves, Leaves]:
    return _after_p.bind(*primals, count=count), list(tangents[:count])


def _batch(args: Sequence[Any], dims: Sequence[Any], *, count: int) -> tuple[Leaves, Leaves]:
    return _after_p.bind(*args, count=count), list(dims[:count])


def _barrier(_: Any, *leaves: Any, count: int) -> Leaves:
    return list(hlo.OptimizationBarrierOp(leaves).results)[:count]


def _loop(_: Any, *leaves: Any, count: int) -> Leaves:
    """The leaves, passed through a loop that runs while a condition on `ready` holds that never does.

    A value that passes through a loop is stored as an array, as a snapshot should be.
    """
    odd = _odd(leaves[count:])
    if odd is None:
        return list(leaves[:count])
    state = [odd, *leaves[:count]]
    types = [value.type for value in state]
    loop = hlo.WhileOp(types, state)
    cond, body = (region.blocks.append(*types) for region in (loop.cond, loop.body))
    with mlir.ir.InsertionPoint(cond):
        hlo.return_([cond.arguments[0]])
    with mlir.ir.InsertionPoint(body):
        # A value that the body passes through unchanged would be removed from the loop, so the body returns zeros.
        hlo.return_([_zeros(value) for value in state])
    return list(loop.results)[1:]


def _odd(ready: Sequence[Any]) -> Any:
    """Whether the first element of one of these arrays both equals itself and does not; None if there are no elements.

    This is always false, but XLA cannot prove it for floats, so it has to compute those arrays first.
    """
    odd = None
    for array in ready:
        rank = len(array.type.shape)
        if 0 not in array.type.shape:
            one = hlo.slice(array, *map(mlir.dense_int_array, ([0] * rank, [1] * rank, [1] * rank)))
            now = hlo.and_(*(hlo.compare(one, one, hlo.ComparisonDirectionAttr.get(how)) for how in ("EQ", "NE")))
            now = hlo.reshape(mlir.ir.RankedTensorType.get([], now.type.element_type), now)
            odd = now if odd is None else hlo.or_(odd, now)
    return odd


def _zeros(like: Any) -> Any:
    scalar = mlir.ir.RankedTensorType.get([], like.type.element_type)
    zero = hlo.convert(scalar, mlir.ir_constant(np.zeros((), bool)))
    return hlo.broadcast_in_dim(like.type, zero, mlir.dense_int_array([]))


_after_p.def_impl(_first)
_after_p.def_abstract_eval(lambda *avals, count: list(avals[:count]))
ad.primitive_jvps[_after_p] = _jvp
batching.primitive_batchers[_after_p] = _batch
mlir.register_lowering(_after_p, _barrier)
mlir.register_lowering(_after_p, _loop, platform="cpu")


def _waited(ready: Leaves) -> Any:
    """True; on the CPU, a compiled program knows it only once the arrays `ready` have been computed.

    On other platforms it is a constant, and XLA removes the condition that depends on it: there, reruns wait at an
    optimization barrier.
    """
    return _waited_p.bind(*(lax.stop_gradient(leaf) for leaf in ready))


_waited_p = core.Primitive("lowtide_waited")


def _true(*_: Any) -> Any:
    return np.True_


def _not_odd(_: Any, *ready: Any) -> Leaves:
    odd = _odd(ready)
    return [mlir.ir_constant(np.True_) if odd is None else hlo.not_(odd)]


_waited_p.def_impl(_true)
_waited_p.def_abstract_eval(lambda *_: jax.typeof(np.True_))
batching.primitive_batchers[_waited_p] = lambda args, _: (_waited_p.bind(*args), None)
mlir.register_lowering(_waited_p, mlir.lower_fun(_true, multiple_results=False))
mlir.register_lowering(_waited_p, _not_odd, platform="cpu")
