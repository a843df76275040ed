"""Loops over steps: plain ones that keep every tape, and checkpointed ones that keep what a plan says.

`scan` and `for_loop` are ordinary Python loops. `checkpointed_scan` and `checkpointed_for_loop` have the same results
and gradients within a budget: the first steps are probed, a plan is chosen, and the engine plays it. Without grad, a
checkpointed loop is a plain one that keeps no tapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.checks import whole_number
from lowtide.errors import InputError, LowtideError
from lowtide.interface.options import Knobs, Reduce, refuse_reducing_nothing
from lowtide.interface.progress import progress
from lowtide.plan import Plan
from lowtide.torch.loops.compiling import use_compiled
from lowtide.torch.loops.engine import Engine, run_loop
from lowtide.torch.loops.inputs import Inputs
from lowtide.torch.loops.kernels import try_without_grad
from lowtide.torch.loops.lean_step import LeanStep
from lowtide.torch.loops.outputs import Outputs
from lowtide.torch.loops.probe import Probed, probe
from lowtide.torch.loops.runner import StepRunner
from lowtide.torch.loops.step import Loop, StepFunction, Stepper, refuse_transforms
from lowtide.torch.memory import recording
from lowtide.torch.state.ambient import Ambient, gradients_aside
from lowtide.torch.state.generators import Randomness
from lowtide.torch.state.hidden import Hidden
from lowtide.torch.state.trees import form_of

Contexts = Iterable[Callable[[], AbstractContextManager[Any]]]


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
    """Run `carry, y = f(carry, x)` over the steps in a plain loop; returns the last carry and the stacked outputs.

    Args:
        f: the step. The carry and the output may be any nested value.
        init: the carry before the first step. It may have None, a number or a tensor of at most one element where the
            first step makes the state.
        xs: tensors with the steps along their first axis, in any nested value, or `Steps`; None for no inputs.
        length: the number of steps, needed if `xs` does not say.
        reverse: from the last step to the first; outputs stay where their inputs are.
        unroll: accepted so that code for `jax.lax.scan` runs; in eager PyTorch there is nothing to unroll.
        pbar: True, a number of steps between updates, a label, or an object with `update(n)`.
        reduce: "mean", "sum", "last" or (init, fold): what to make of the outputs instead of a stack.
    """
    whole_number(unroll, "unroll", least=1)
    loop = Loop(f, True, init, Inputs(xs, length, reverse), reduce)
    return _plain(loop, pbar)


def for_loop(
    f: Callable[..., Any],
    *xs: Any,
    length: int | None = None,
    reverse: bool = False,
    unroll: int = 1,
    pbar: Any = None,
    reduce: Reduce = None,
) -> Any:
    """Run `y = f(*x)` over the steps in a plain loop; returns the stacked outputs. Arguments are those of `scan`."""
    whole_number(unroll, "unroll", least=1)
    return _plain(_without_carry(f, xs, length, reverse, reduce), pbar)[1]


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
    check_rerun: bool | None = None,
    compile: bool = False,
    generators: Iterable[Any] = (),
    contexts: Contexts = (),
    captures: Iterable[torch.Tensor] = (),
    hidden: Iterable[str] = (),
    advance_with_grad: bool = False,
    lean: bool = False,
) -> tuple[Any, Any]:
    """`scan` in bounded memory: the same results and, to the last bit, the same gradients.

    One option says how much memory: `budget`, `checkpoints`, `base`, or a `plan` made before. With none of them it is
    the least memory that runs no step more than one extra time.

    Args:
        f: the step, as in `scan`. Modules it calls may keep state and draw random numbers. Its side effects on anything
            else happen again in reruns; a rerun that differs because of them is a `CheckpointError`.
        init: as in `scan`.
        xs: as in `scan`.
        length: as in `scan`.
        base: a snapshot every `base` steps, and `base` steps of tape.
        checkpoints: at most this many snapshots, the initial state among them, and one step of tape.
        budget: bytes for snapshots, tape and working set: 67108864, "64MiB", or "25%" of all tapes.
        plan: what `plan_scan` returned.
        reverse: as in `scan`.
        unroll: as in `scan`.
        pbar: as in `scan`; it moves once for each step forward and once backward, never for reruns.
        reduce: as in `scan`.
        check_rerun: what is compared of first runs and reruns: by default samples of every step's output and of states
            (small tensors whole, at least 1,024 numbers of a large one), with True every bit at every step, with False
            nothing (for kernels that do not repeat to the last bit).
        compile: run the step through `torch.compile`, in first runs and reruns alike.
        generators: random generators that the step draws from and that it does not name, close over or use at its first
            step; those of torch, Python and numpy that everybody shares, and those in modules, are found.
        contexts: functions that make context managers to be entered for reruns, such as `lambda: sdpa_kernel(...)`.
        captures: tensors that the step closes over but that the first step does not show.
        hidden: names of module attributes to carry though the first steps do not change them.
        advance_with_grad: run steps with grad even where no tape is kept, for steps that pick other kernels without
            it. It is turned on where one of the first steps, tried without grad, computes other bits, where the first
            step differentiates something or registers a hook, and for an `nn.LSTM` and, in eval mode, torch's
            transformer layers.
        lean: keep a smaller tape of each step: what is cheap to make again from the rest is not kept, as `lean` does.
    """
    whole_number(unroll, "unroll", least=1)
    knob = Knobs(base, checkpoints, budget, plan)
    loop = Loop(f, True, init, Inputs(xs, length, reverse), reduce)
    extras = _Extras(check_rerun, compile, tuple(generators), tuple(contexts), tuple(captures), tuple(hidden), lean)
    return _checkpointed(loop, knob, extras, pbar, advance_with_grad)


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
    check_rerun: bool | None = None,
    compile: bool = False,
    generators: Iterable[Any] = (),
    contexts: Contexts = (),
    captures: Iterable[torch.Tensor] = (),
    hidden: Iterable[str] = (),
    advance_with_grad: bool = False,
    lean: bool = False,
) -> Any:
    """`for_loop` in bounded memory; `f(*x)` may be a stateful module as it is.

    The arguments are those of `checkpointed_scan`.
    """
    whole_number(unroll, "unroll", least=1)
    knob = Knobs(base, checkpoints, budget, plan)
    extras = _Extras(check_rerun, compile, tuple(generators), tuple(contexts), tuple(captures), tuple(hidden), lean)
    return _checkpointed(_without_carry(f, xs, length, reverse, reduce), knob, extras, pbar, advance_with_grad)[1]


def plan_scan(
    f: StepFunction,
    init: Any,
    xs: Any = None,
    length: int | None = None,
    *,
    base: int | None = None,
    checkpoints: int | None = None,
    budget: int | str | None = None,
    reverse: bool = False,
    reduce: Reduce = None,
    hidden: Iterable[str] = (),
    lean: bool = False,
) -> Plan:
    """The plan that `checkpointed_scan` would follow. Runs the first steps to measure them and leaves no trace."""
    knob = Knobs(base, checkpoints, budget, None)
    return _plan(Loop(f, True, init, Inputs(xs, length, reverse), reduce), knob, tuple(hidden), lean)


def plan_for_loop(
    f: Callable[..., Any],
    *xs: Any,
    length: int | None = None,
    base: int | None = None,
    checkpoints: int | None = None,
    budget: int | str | None = None,
    reverse: bool = False,
    reduce: Reduce = None,
    hidden: Iterable[str] = (),
    lean: bool = False,
) -> Plan:
    """The plan that `checkpointed_for_loop` would follow. Runs the first steps to measure them and leaves no trace."""
    knob = Knobs(base, checkpoints, budget, None)
    return _plan(_without_carry(f, xs, length, reverse, reduce), knob, tuple(hidden), lean)


@dataclass(frozen=True, slots=True)
class _Extras:
    check_rerun: bool | None = None
    compile: bool = False
    generators: tuple[Any, ...] = ()
    contexts: tuple[Callable[[], AbstractContextManager[Any]], ...] = ()
    captures: tuple[torch.Tensor, ...] = ()
    hidden: tuple[str, ...] = ()
    lean: bool = False

    def __post_init__(self) -> None:
        if self.compile and self.lean:
            raise InputError(
                "compile=True and lean=True are two ways to keep less: a compiled step decides itself what it keeps; "
                "give one of them"
            )


def _without_carry(
    f: Callable[..., Any], xs: tuple[Any, ...], length: int | None, reverse: bool, reduce: Reduce
) -> Loop:
    return Loop(f, False, None, Inputs(xs, length, reverse), reduce)


def _plain(loop: Loop, pbar: Any) -> tuple[Any, Any]:
    """Every step in turn; with grad its graph is kept, without there is none."""
    outputs = loop.outputs()
    stepper = Stepper(loop.step(loop.target), loop.begin())
    bar = None if pbar is None else progress(pbar, loop.inputs.length, with_backward=False)
    if loop.inputs.length == 0:
        return loop.result(loop.begin(), _nothing(loop, stepper, outputs))
    keep, rows = torch.is_grad_enabled(), loop.inputs.connected(loop.inputs.differentiable)
    carry = stepper.begin()
    for k, x in enumerate(rows):
        with loop.explaining() if k == 0 else nullcontext():
            carry, y = stepper.call(k, carry, x)
        if keep:
            outputs.keep(k, loop.inputs.place(k), y)
        else:
            outputs.put(k, loop.inputs.place(k), outputs.leaves(k, y))
        stepper.leaves(k, carry)
        if bar is not None:
            bar.update(1)
    return loop.result(carry, outputs.finish(outputs.graphed() if keep else outputs.results()))


def _nothing(loop: Loop, stepper: Stepper, outputs: Outputs) -> Any:
    """The outputs of no steps: shapes come from running one on zeros and undoing it."""
    if loop.fold is not None:
        return None
    refuse_reducing_nothing(loop.reduce)
    hidden, random = Hidden((loop.target,)), Randomness(())
    try:
        with torch.no_grad(), hidden.meeting_modules():
            _, y = stepper.call(0, stepper.begin(), loop.inputs.blank())
        recording.count(probe=1)
    finally:
        hidden.undo()
        random.restore(random.start)
    leaves = outputs.leaves(0, y)
    empty: list[Any] = [
        (torch.zeros_like(leaf) if loop.reduce == "sum" else leaf.new_empty((0, *leaf.shape)))
        if isinstance(leaf, torch.Tensor)
        else []
        for leaf in leaves
    ]
    return form_of(y).unflatten(empty)


def _runner(loop: Loop, extras: _Extras, pbar: Any, advance_with_grad: bool) -> StepRunner:
    hidden = Hidden((loop.target, *(loop.fold or ())), extras.hidden)
    stepper = Stepper(loop.step(loop.target), loop.begin())
    if extras.lean:
        stepper.lean = LeanStep(stepper.f, hidden, loop.target)
    return StepRunner(
        stepper,
        loop.inputs,
        loop.outputs(),
        hidden,
        Randomness((*extras.generators, *hidden.generators)),
        Ambient(extras.contexts),
        progress=None if pbar is None else progress(pbar, loop.inputs.length, with_backward=True),
        check_rerun=extras.check_rerun,
        advance_with_grad=advance_with_grad,
    )


def _checkpointed(loop: Loop, knob: Knobs, extras: _Extras, pbar: Any, advance_with_grad: bool) -> tuple[Any, Any]:
    if not torch.is_grad_enabled() or loop.inputs.length == 0 or recording.runs_plainly():
        return _plain(loop, pbar)
    if knob.plan is not None and knob.plan.schedule.disk is not None:
        raise InputError("a loop keeps its snapshots in memory, and this plan has some on disk; plan without disk=")
    refuse_transforms("a checkpointed loop", "lt.scan" if loop.has_carry else "lt.for_loop")
    runner = _runner(loop, extras, pbar, advance_with_grad)
    try:
        with loop.explaining():
            engine = (_compiled if extras.compile else _planned)(runner, loop, knob, extras)
        carry, results = run_loop(engine)
    except LowtideError:
        runner.restart()
        raise
    return loop.result(carry, runner.outputs.finish(results))


def _planned(runner: StepRunner, loop: Loop, knob: Knobs, extras: _Extras) -> Engine:
    """Probe the step, and plan."""
    probed = _probe(runner, knob, extras)
    plan, goes_on = _first_plan(probed, knob, loop.inputs.length)
    if knob.plan is not None:
        _refuse_larger_state(runner, plan)
    if plan.bill.plain_runs:
        try_without_grad(runner, probed.ahead, loop.target)
    if not goes_on:
        runner.restart()
    lookout = None if knob.budget is None else probed.lookout
    return Engine(runner, plan.actions, probed.ahead if goes_on else [], lookout)


def _first_plan(probed: Probed, knob: Knobs, length: int) -> tuple[Plan, bool]:
    """The plan for what the first steps cost, and whether it can go on from them."""
    if knob.budget is None or probed.costs is None or probed.lookout is None:
        return knob.choose(probed.costs, length), True
    return probed.lookout.plan(probed.costs)


def _refuse_larger_state(runner: StepRunner, plan: Plan) -> None:
    """Refuse to keep to a budget with a plan that was made for a smaller state, as that of a smaller batch."""
    planned, now = max(step.state for step in plan.chain.steps), runner.state_bytes()
    is_measured = plan.chain.ways is not None  # else it was made by hand, of costs in any unit
    if plan.knob.name == "budget" and is_measured and now > planned:
        raise InputError(
            f"the plan keeps a budget with {planned:,} B of state at each step, and this loop's state has {now:,} B "
            "(of a larger batch?); plan again with these arguments, or pass budget= in place of plan="
        )


def _compiled(runner: StepRunner, loop: Loop, knob: Knobs, extras: _Extras) -> Engine:
    """Probe the step as it is, undo that, and let the compiled step run from the start."""
    if knob.budget is not None:
        raise InputError(
            "budget= needs the bytes of each tensor, which a compiled step does not show; plan the step as it is with "
            "plan_scan(f, ..., budget=...) and pass plan=, or turn another knob"
        )
    with recording.recomputing():  # for the user, the compiled step's is the first run
        probed = _probe(runner, knob, extras)
        plan = knob.choose(probed.costs, loop.inputs.length)
    recording.count(probe=len(probed.ahead))
    runner.forget_first_runs()
    use_compiled(runner, loop.target, loop.step)
    return Engine(runner, plan.actions, [])


def _probe(runner: StepRunner, knob: Knobs, extras: _Extras, *, measure: bool = False) -> Probed:
    """Run the first steps; with `measure`, for a plan that is to be looked at."""
    return probe(
        runner,
        captures=extras.captures,
        costs=measure or knob.needs_costs(),
        pulls=measure or knob.budget is not None,
        times=measure,
        budget=knob.budget,
        keep=knob.keeps_first_tape(runner.length),
    )


def _plan(loop: Loop, knob: Knobs, hidden: tuple[str, ...], lean: bool) -> Plan:
    """Probe the step, plan, and put everything back."""
    extras = _Extras(hidden=hidden, lean=lean)
    if loop.inputs.length == 0:
        raise InputError("a loop of no steps needs no plan")
    runner = _runner(loop, extras, None, advance_with_grad=False)
    parameters = [parameter for module in runner.hidden.modules for parameter in module.parameters(recurse=False)]
    try:
        with torch.enable_grad(), gradients_aside(parameters), recording.recomputing():
            probed = _probe(runner, knob, extras, measure=True)
            recording.count(probe=len(probed.ahead))
            return _first_plan(probed, knob, loop.inputs.length)[0]
    finally:
        runner.forget_probe()
