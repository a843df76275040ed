# mypy: disable-error-code="no-untyped-call"
"""Lowtide for brainstate: loops over modules with States, whose gradients fit the memory you have.

import lowtide.brainstate as lt
outputs = lt.checkpointed_for_loop(net.update, xs, base=16)  # brainstate.transform.checkpointed_for_loop(...)

`scan` and `for_loop` are brainstate's own. The checkpointed ones have brainstate's signatures and Lowtide's options.
All they do is turn a stateful step into a pure one: States that it writes join the carry, States that it only reads are
closed over, so that gradients reach them; `lowtide.jax` does the rest. Afterwards States are as brainstate's own loops
leave them; if anything fails, they are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

import lowtide.jax as lt
from lowtide.checks import function
from lowtide.errors import FunctionError, InputError
from lowtide.interface.options import Reduce
from lowtide.jax.loops.step import loop_length, without_carry
from lowtide.packages import check_version, needed_for
from lowtide.plan import Plan

with needed_for("lowtide.brainstate"):
    import brainstate
    from brainstate import State, StateTraceStack
    from brainstate.transform import ProgressBar, StatefulFunction, scan

__all__ = [
    "checkpointed_for_loop",
    "checkpointed_scan",
    "for_loop",
    "plan_for_loop",
    "plan_scan",
    "scan",
]
__dir__ = sorted(__all__).copy  # what `dir` and tab completion show

check_version(brainstate)


def for_loop(
    f: Callable[..., Any],
    *xs: Any,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    pbar: ProgressBar | int | None = None,
) -> Any:
    """`brainstate.transform.for_loop`, by brainstate's own scan: `y = f(*x)` over the steps, keeping every tape.

    The arguments are those of `brainstate.transform.for_loop`; without inputs `length` suffices, which brainstate 0.5.4
    documents but does not support.
    """
    return scan(without_carry(f), None, xs, length, reverse, unroll, pbar)[1]


def checkpointed_scan(
    f: Callable[[Any, Any], Any],
    init: Any,
    xs: Any,
    length: int | None = None,
    base: int | None = None,
    pbar: Any = None,
    *,
    checkpoints: int | None = None,
    budget: int | str | None = None,
    plan: Plan | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    reduce: Reduce = None,
) -> tuple[Any, Any]:
    """`brainstate.transform.scan` in bounded memory: the same results, States and gradients.

    One option says how much memory to use: `budget`, `checkpoints`, `base`, or a `plan` made before. With none of them
    it is the least memory that runs no step more than one extra time. Every derivative is supported except for a second
    one in reverse mode (a gradient of a gradient or of a tangent), which needs `base`.

    Args:
        f: the step, `carry, y = f(carry, x)`. It may read and write any States; carry, x and y are any pytrees.
        init: the carry before the first step.
        xs: arrays or quantities with the steps along their first axis, in any pytree; None for no inputs.
        length: the number of steps, needed if `xs` has no arrays.
        base: a snapshot every `base` steps, and the tape of that many steps; at least 2.
        pbar: a `brainstate.transform.ProgressBar`, a number of steps between updates, a label, or an object with
            `update(n)`. It never moves for reruns. With `base` it moves by a stretch at a time.
        checkpoints: the most snapshots, the initial state included, beside the tape of one step.
        budget: bytes for snapshots, tape and working set: 67108864, "64MiB", or "25%" of all tapes. Under `vmap` it
            applies to each example.
        plan: what `plan_scan` returned.
        reverse: run from the last step to the first; each output stays at the index of its input.
        unroll: the number of steps in one iteration of the compiled loop.
        reduce: "mean", "sum", "last" or (init, fold): how to combine the outputs instead of stacking them.
    """
    step = _PureStep(f, init, xs, length)
    (written, carry), ys = lt.checkpointed_scan(
        step,
        (step.written, init),
        xs,
        length,
        base=base,
        checkpoints=checkpoints,
        budget=budget,
        plan=plan,
        reverse=reverse,
        unroll=unroll,
        pbar=_bar(pbar, step.length),
        reduce=reduce,
    )
    step.leave(written)
    return carry, ys


def checkpointed_for_loop(
    f: Callable[..., Any],
    *xs: Any,
    length: int | None = None,
    base: int | None = None,
    pbar: Any = None,
    checkpoints: int | None = None,
    budget: int | str | None = None,
    plan: Plan | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    reduce: Reduce = None,
) -> Any:
    """`y = f(*x)` over the steps, in bounded memory: `brainstate.transform.for_loop` with the same result.

    The arguments are those of `checkpointed_scan`.
    """
    return checkpointed_scan(
        without_carry(f),
        None,
        xs,
        length,
        base,
        pbar,
        checkpoints=checkpoints,
        budget=budget,
        plan=plan,
        reverse=reverse,
        unroll=unroll,
        reduce=reduce,
    )[1]


def plan_scan(
    f: Callable[[Any, Any], Any],
    init: Any,
    xs: Any,
    length: int | None = None,
    base: int | None = None,
    *,
    checkpoints: int | None = None,
    budget: int | str | None = None,
    reduce: Reduce = None,
    wrt: Collection[str] = ("closure",),
) -> Plan:
    """The plan that `checkpointed_scan` would follow. Nothing is run, and no State is changed.

    Args:
        f: as in `checkpointed_scan`.
        init: as in `checkpointed_scan`; leaves may be `jax.ShapeDtypeStruct`s.
        xs: as in `checkpointed_scan`; leaves may be `jax.ShapeDtypeStruct`s.
        length: as in `checkpointed_scan`.
        base: as in `checkpointed_scan`.
        checkpoints: as in `checkpointed_scan`.
        budget: as in `checkpointed_scan`.
        reduce: as in `checkpointed_scan`.
        wrt: what gradients will be taken with respect to: "closure" (States that f only reads, such as weights, and
            what it closes over), "init" (the first carry, and States that f writes), "xs". `checkpointed_scan` finds
            this out by itself.
    """
    step = _PureStep(f, init, xs, length)
    held = (step.written, init)
    return lt.plan_scan(
        step, held, xs, length, base=base, checkpoints=checkpoints, budget=budget, reduce=reduce, wrt=wrt
    )


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
    step = without_carry(f)
    return plan_scan(step, None, xs, length, base, checkpoints=checkpoints, budget=budget, reduce=reduce, wrt=wrt)


class _PureStep:
    """A stateful step as a pure one: `(written, carry), y = step((written, carry), x)`.

    `written` and `_read` have an entry for each State; at each place one of the two is None.
    """

    def __init__(self, f: Callable[[Any, Any], Any], init: Any, xs: Any, length: int | None) -> None:
        function(f, "f")
        self.length = loop_length(xs, length)
        row = jax.tree.map(_row, jax.eval_shape(lambda xs: xs, xs))
        self._f = _traced(f, init, row)
        out, after = self._f.get_out_shapes(init, row)
        if not isinstance(out, tuple | list) or len(out) != 2:
            raise FunctionError(
                f"f returned {jax.tree.structure(out)}; the step of a scan returns a pair: the carry, and an "
                "output or None"
            )
        self._trace: StateTraceStack[Any] = self._f.get_state_trace(init, row)
        # Read here, outside the loop, so that an enclosing grad, jit or vmap of brainstate sees the States being read.
        self.written = self._trace.get_write_state_values(True)
        self._read = self._trace.get_read_state_values(True)
        names = [*map(_name, self._trace.states), "the carry"]
        for name, old, new in zip(names, (*self.written, init), (*after, out[0]), strict=True):
            _refuse_change(name, old, new)

    def __call__(self, held: tuple[Sequence[Any], Any], x: Any) -> tuple[tuple[Sequence[Any], Any], Any]:
        """Run one step."""
        written, carry = held
        values = zip(self._trace.been_writen, written, self._read, strict=True)
        states = [mine if own else theirs for own, mine, theirs in values]
        # With jit disabled brainstate would run f itself, and leave the values traced here in the States.
        with jax.disable_jit(False):
            new, (carry, y) = self._f.jaxpr_call(states, carry, x)
        return (new, carry), y

    def leave(self, written: Sequence[Any]) -> None:
        """Set the States to the values that the loop ends with."""
        self._trace.assign_state_vals_v2(self._read, written)


def _traced(f: Callable[[Any, Any], Any], *types: Any) -> Any:
    """The step, traced. Every State is left as it was, also if f fails.

    brainstate restores States too, but stops at the first one whose unit f has changed.
    """
    with StateTraceStack() as seen:
        try:
            return StatefulFunction(f, name="lowtide").make_jaxpr(*types)
        except BaseException:
            for state, value in zip(seen.states, seen.original_state_values, strict=True):
                if state.value is not value:
                    state.value = value
            raise


def _row(x: Any) -> Any:
    """The type of one row of `x`."""
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, weak_type=x.weak_type)


def _name(state: State[Any]) -> str:
    return type(state).__name__ + ("" if state.name is None else f" {state.name!r}")


def _refuse_change(name: str, before: Any, after: Any) -> None:
    """Refuse a step that changes a value's type; a Python number (weakly typed) may take the type of the result."""
    (old_leaves, old_tree), (new_leaves, new_tree) = map(_types, (before, after))
    changed = (
        [(old_tree, new_tree)]
        if old_tree != new_tree
        else [
            (f"{old.dtype}{list(old.shape)}", f"{new.dtype}{list(new.shape)}")
            for old, new in zip(old_leaves, new_leaves, strict=True)
            if old.shape != new.shape or (old.dtype != new.dtype and not old.weak_type)
        ]
    )
    for old, new in changed:
        raise FunctionError(f"a step changes {name} from {old} to {new}; shape, dtype and unit stay the same in a loop")


def _types(values: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(jax.eval_shape(lambda same: same, values))


def _bar(pbar: Any, length: int) -> Any:
    """`pbar` in a form that `lowtide.jax` accepts: brainstate's bars are wrapped, anything else is unchanged."""
    if isinstance(pbar, int) and pbar is not False:
        pbar = ProgressBar(freq=pbar)
    if not isinstance(pbar, ProgressBar):
        return pbar
    return _Bar(pbar, length) if length else None


class _Bar:
    """brainstate's bar, moved from the host at the bar's own frequency; it starts again each time the loop is run."""

    def __init__(self, pbar: Any, length: int) -> None:
        self._runner = pbar.init(length)
        self._length = length
        self._done = 0
        self._tqdm: Any = None
        self._label()

    def _label(self) -> str:
        message = self._runner.message
        if isinstance(message, str):
            return message
        text, values = message
        try:
            return str(text.format(**values({"i": max(0, self._done - 1)})))
        except KeyError as missing:
            raise InputError(
                f"pbar: its desc asks for {missing}; a checkpointed loop tells it the step alone, as 'i'"
            ) from None

    def update(self, n: int) -> None:
        """Advance by n steps."""
        if self._done == 0:
            with needed_for("a progress bar (pbar=)"):
                from tqdm.auto import tqdm

            self._tqdm = tqdm(total=self._length, **self._runner.kwargs)
        self._done += n
        full = self._done >= self._length
        shown = self._length if full else self._done - self._done % self._runner.print_freq
        if shown > self._tqdm.n:
            self._tqdm.set_description(self._label(), refresh=False)
            self._tqdm.update(shown - self._tqdm.n)
        if full:
            self._tqdm.close()
            self._done = 0
