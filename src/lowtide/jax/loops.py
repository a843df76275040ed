"""Loops over steps: plain ones that keep every tape, and checkpointed ones that keep what a plan says.

`scan` and `for_loop` are `jax.lax.scan`. `checkpointed_scan` and `checkpointed_for_loop` give the same results and
gradients in less memory. Where nothing is differentiated, they are plain scans that keep no tapes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from lowtide.errors import InputError
from lowtide.folds import Reduce
from lowtide.jax.jaxprs import is_float
from lowtide.jax.loop import Loop, without_carry
from lowtide.jax.lowering import Lowering
from lowtide.jax.measure import costs
from lowtide.jax.nested import Nested
from lowtide.jax.plainly import runs_plainly
from lowtide.jax.step import StepFunction
from lowtide.jax.tables import Tables, tables
from lowtide.jax.taping import Taping, active_leaves
from lowtide.jax.ticks import Ticks
from lowtide.knobs import Knobs
from lowtide.plan import Plan
from lowtide.planners.sweep import Base
from lowtide.simulate import judged


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
    """`jax.lax.scan`: `carry, y = f(carry, x)` over the steps; gives the last carry and the stacked outputs.

    Args:
        f: the step. The carry and the output may be any pytrees.
        init: the carry before the first step.
        xs: arrays with the steps along their first axis, in any pytree; None for no inputs.
        length: the number of steps, needed if `xs` does not say.
        reverse: from the last step to the first; outputs stay where their inputs are.
        unroll: so many steps in one iteration of the compiled loop.
        pbar: True, a number of steps between updates, a label, or an object with `update(n)`.
        reduce: "mean", "sum", "last" or (init, fold): what to make of the outputs instead of a stack.
    """
    return _plain(Loop(f, init, xs, length, reverse, unroll, reduce), pbar)


def for_loop(
    f: Callable[..., Any],
    *xs: Any,
    length: int | None = None,
    reverse: bool = False,
    unroll: int = 1,
    pbar: Any = None,
    reduce: Reduce = None,
) -> Any:
    """`y = f(*x)` over the steps; gives the stacked outputs. The arguments are those of `scan`."""
    return _plain(Loop(without_carry(f), None, xs, length, reverse, unroll, reduce), pbar)[1]


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

    One knob says how much memory: `budget`, `checkpoints`, `base`, or a `plan` made before. With none of them it is the
    least memory that runs no step more than one extra time. Every derivative can be taken but a second one in reverse
    mode, a gradient of a gradient or of a tangent: that needs `base`.

    Args:
        f: the step, as in `scan`; a pure function.
        init: as in `scan`.
        xs: as in `scan`.
        length: as in `scan`.
        base: a snapshot every so many steps, and so many steps of tape; at least 2.
        checkpoints: at most so many snapshots, the initial state among them, and one step of tape.
        budget: bytes for snapshots, tape and working set: 67108864, "64MiB", or "25%" of all tapes. Under `vmap` it is
            for each example.
        plan: what `plan_scan` returned.
        reverse: as in `scan`.
        unroll: as in `scan`.
        pbar: as in `scan`; it never moves for reruns. With `base` it moves by a stretch at a time.
        reduce: as in `scan`.
    """
    knobs = Knobs(base, checkpoints, budget, plan, least_base=2)
    return _checkpointed(Loop(f, init, xs, length, reverse, unroll, reduce), knobs, pbar)


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
    return _checkpointed(Loop(without_carry(f), None, xs, length, reverse, unroll, reduce), knobs, pbar)[1]


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
        f: as in `checkpointed_scan`, and so are the rest; leaves may be `jax.ShapeDtypeStruct`s.
        init: see there.
        xs: see there.
        length: see there.
        base: see there.
        checkpoints: see there.
        budget: see there.
        reduce: see there.
        wrt: what gradients will be taken of: "closure" (what f closes over), "init", "xs". A loop finds out by itself.
    """
    knobs = Knobs(base, checkpoints, budget, None, least_base=2)
    return _planned(Loop(f, init, xs, length, False, 1, reduce), knobs, wrt)


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
    return _planned(Loop(without_carry(f), None, xs, length, False, 1, reduce), knobs, wrt)


def _plain(loop: Loop, pbar: Any) -> tuple[Any, Any]:
    return loop.plain(Ticks(pbar, loop.length))


def _checkpointed(loop: Loop, knobs: Knobs, pbar: Any) -> tuple[Any, Any]:
    length, ticks = loop.length, Ticks(pbar, loop.length)
    schedule = None if knobs.plan is None else knobs.choose(None, length).schedule
    if length == 0 or runs_plainly():
        return loop.plain(ticks)
    traced = loop.trace()
    base = schedule.base if isinstance(schedule, Base) else knobs.base
    if base is not None:
        nested = Nested(traced.step, min(base, length), length, loop.reverse, loop.unroll, ticks)
        return loop.result(traced, *nested(traced.consts, traced.init, traced.xs))

    def follow(taping: Taping) -> Tables:  # JAX remembers it, so it holds no arrays
        return tables(judged(knobs.choose(costs(taping, length), length)))

    lowering = Lowering(traced.step, follow, length, loop.reverse, loop.unroll, ticks)
    return loop.result(traced, *lowering(traced.consts, traced.init, traced.xs))


def _planned(loop: Loop, knobs: Knobs, wrt: Collection[str]) -> Plan:
    if isinstance(wrt, str) or wrt is None or not set(wrt) <= {"closure", "init", "xs"}:
        raise InputError(f'wrt={wrt!r}: give a tuple of "closure", "init", "xs"')
    if loop.length == 0:
        raise InputError("a loop of no steps needs no plan")
    step = loop.trace().step
    wanted = zip(("closure", "init", "xs"), (step.consts, step.carry, step.x), strict=True)
    active = active_leaves(step, *([name in wrt and is_float(leaf) for leaf in leaves] for name, leaves in wanted))
    return knobs.choose(costs(Taping(step, active), loop.length, nested=knobs.base is not None), loop.length)
