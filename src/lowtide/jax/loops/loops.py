"""Loops over steps: plain ones that keep every tape, and checkpointed ones that follow a plan.

`scan` and `for_loop` are `jax.lax.scan`. `checkpointed_scan` and `checkpointed_for_loop` have the same results and
gradients in less memory. Where nothing is differentiated, they are plain scans and keep no tapes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from lowtide.errors import InputError
from lowtide.interface.options import Knobs, Reduce
from lowtide.jax.compare import runs_plainly
from lowtide.jax.loops.lowering import Lowering
from lowtide.jax.loops.nested_scans import Nested
from lowtide.jax.loops.step import StepFunction, TracedLoop, without_carry
from lowtide.jax.loops.tape import Taping, active_leaves, costs
from lowtide.jax.loops.ticks import Ticks
from lowtide.jax.xla.jaxprs import is_float
from lowtide.plan import Plan
from lowtide.planners.sweep import Base


def scan(
    f: StepFunction,
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int = 1,
    pbar: Any = None,
    *,
    reduce: Reduce = None,
) -> tuple[Any, Any]:
    """`jax.lax.scan`: `carry, y = f(carry, x)` over the steps; returns the last carry and the stacked outputs.

    Args:
        f: the step. The carry and the output may be any pytrees.
        init: the carry before the first step.
        xs: arrays with the steps along their first axis, in any pytree; None for no inputs.
        length: the number of steps, needed if `xs` has no arrays.
        reverse: run from the last step to the first; each output stays at the index of its input.
        unroll: the number of steps in one iteration of the compiled loop.
        pbar: True, a number of steps between updates, a label, or an object with `update(n)`.
        reduce: "mean", "sum", "last" or (init, fold): how to combine the outputs instead of stacking them.
    """
    return _plain(TracedLoop(f, init, xs, length, reverse, unroll, reduce), pbar)


def for_loop(
    f: Callable[..., Any],
    *xs: Any,
    length: int | None = None,
    reverse: bool = False,
    unroll: int = 1,
    pbar: Any = None,
    reduce: Reduce = None,
) -> Any:
    """`y = f(*x)` over the steps; returns the stacked outputs. The arguments are those of `scan`."""
    return _plain(TracedLoop(without_carry(f), None, xs, length, reverse, unroll, reduce), pbar)[1]


def checkpointed_scan(
    f: StepFunction,
    init: Any,
    xs: Any = None,
    length: int | None = None,
    *,
    base: int | None = None,
    checkpoints: int | None = None,
    budget: int | str | None = None,
    plan: Plan | None = None,
    reverse: bool = False,
    unroll: int = 1,
    pbar: Any = None,
    reduce: Reduce = None,
) -> tuple[Any, Any]:
    """`scan` in bounded memory: the same results and gradients.

    One option says how much memory to use: `budget`, `checkpoints`, `base`, or a `plan` made before. With none of them
    it is the least memory that runs no step more than one extra time. Every derivative is supported except for a second
    one in reverse mode (a gradient of a gradient or of a tangent), which needs `base`.

    Args:
        f: the step, as in `scan`; a pure function.
        init: as in `scan`.
        xs: as in `scan`.
        length: as in `scan`.
        base: a snapshot every `base` steps, and the tape of that many steps; at least 2.
        checkpoints: the most snapshots, the initial state included, beside the tape of one step.
        budget: bytes for snapshots, tape and working set: 67108864, "64MiB", or "25%" of all tapes. Under `vmap` it
            applies to each example.
        plan: what `plan_scan` returned.
        reverse: as in `scan`.
        unroll: as in `scan`.
        pbar: as in `scan`; it never moves for reruns. With `base` it moves by a stretch at a time.
        reduce: as in `scan`.
    """
    knobs = Knobs(base, checkpoints, budget, plan, least_base=2)
    return _checkpointed(TracedLoop(f, init, xs, length, reverse, unroll, reduce), knobs, pbar)


def checkpointed_for_loop(
    f: Callable[..., Any],
    *xs: Any,
    length: int | None = None,
    base: int | None = None,
    checkpoints: int | None = None,
    budget: int | str | None = None,
    plan: Plan | None = None,
    reverse: bool = False,
    unroll: int = 1,
    pbar: Any = None,
    reduce: Reduce = None,
) -> Any:
    """`for_loop` in bounded memory. The arguments are those of `checkpointed_scan`."""
    knobs = Knobs(base, checkpoints, budget, plan, least_base=2)
    return _checkpointed(TracedLoop(without_carry(f), None, xs, length, reverse, unroll, reduce), knobs, pbar)[1]


def plan_scan(
    f: StepFunction,
    init: Any,
    xs: Any = None,
    length: int | None = None,
    *,
    base: int | None = None,
    checkpoints: int | None = None,
    budget: int | str | None = None,
    reduce: Reduce = None,
    wrt: Collection[str] = ("closure",),
) -> Plan:
    """The plan that `checkpointed_scan` would follow. Nothing is run or allocated: types are enough.

    Args:
        f: as in `checkpointed_scan`.
        init: as in `checkpointed_scan`; leaves may be `jax.ShapeDtypeStruct`s.
        xs: as in `checkpointed_scan`; leaves may be `jax.ShapeDtypeStruct`s.
        length: as in `checkpointed_scan`.
        base: as in `checkpointed_scan`.
        checkpoints: as in `checkpointed_scan`.
        budget: as in `checkpointed_scan`.
        reduce: as in `checkpointed_scan`.
        wrt: what gradients will be taken with respect to: "closure" (what f closes over), "init", "xs".
            `checkpointed_scan` finds this out by itself.
    """
    knobs = Knobs(base, checkpoints, budget, None, least_base=2)
    return _planned(TracedLoop(f, init, xs, length, False, 1, reduce), knobs, wrt)


def plan_for_loop(
    f: Callable[..., Any],
    *xs: Any,
    length: int | None = None,
    base: int | None = None,
    checkpoints: int | None = None,
    budget: int | str | None = None,
    reduce: Reduce = None,
    wrt: Collection[str] = ("closure",),
) -> Plan:
    """The plan that `checkpointed_for_loop` would follow. The arguments are those of `plan_scan`."""
    knobs = Knobs(base, checkpoints, budget, None, least_base=2)
    return _planned(TracedLoop(without_carry(f), None, xs, length, False, 1, reduce), knobs, wrt)


def _ticks(pbar: Any, length: int) -> Ticks | None:
    """The bar to which the loop reports its steps; None if there is none."""
    return None if pbar is None or pbar is False else Ticks(pbar, length)


def _plain(loop: TracedLoop, pbar: Any) -> tuple[Any, Any]:
    return loop.plain(_ticks(pbar, loop.length))


def _checkpointed(loop: TracedLoop, knobs: Knobs, pbar: Any) -> tuple[Any, Any]:
    length, ticks = loop.length, _ticks(pbar, loop.length)
    schedule = None if knobs.plan is None else knobs.choose(None, length).schedule
    if length == 0 or runs_plainly():
        return loop.plain(ticks)
    traced = loop.trace()
    base = schedule.base if isinstance(schedule, Base) else knobs.base
    run: Nested | Lowering
    if base is not None:
        run = Nested(traced.step, min(base, length), length, loop.reverse, loop.unroll, ticks)
    else:
        run = Lowering(traced.step, knobs, length, loop.reverse, loop.unroll, ticks)
    return loop.result(traced, *run(traced.consts, traced.init, traced.xs))


def _planned(loop: TracedLoop, knobs: Knobs, wrt: Collection[str]) -> Plan:
    if isinstance(wrt, str) or wrt is None or not set(wrt) <= {"closure", "init", "xs"}:
        raise InputError(f'wrt={wrt!r}: give a tuple of "closure", "init", "xs"')
    if loop.length == 0:
        raise InputError("a loop of no steps needs no plan")
    step = loop.trace().step
    wanted = zip(("closure", "init", "xs"), (step.consts, step.carry, step.x), strict=True)
    active = active_leaves(step, *([name in wrt and is_float(leaf) for leaf in leaves] for name, leaves in wanted))
    return knobs.choose(costs(Taping(step, active), loop.length, nested=knobs.base is not None), loop.length)
