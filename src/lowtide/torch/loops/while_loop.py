"""A loop that ends when a condition says so, in bounded memory: snapshots are kept as steps go by.

Which ones stay is decided online (`planners/online.py`). The condition is asked once for each state of the first sweep.
From its last answer on the length is known, and the backward is that of a loop of that length.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from lowtide.actions import Action, Advance
from lowtide.chain import Chain, StepCost
from lowtide.errors import LowtideError
from lowtide.interface.options import WhileKnobs
from lowtide.planners.online import Online, online
from lowtide.torch.loops.engine import Engine, run_loop
from lowtide.torch.loops.inputs import Inputs
from lowtide.torch.loops.lean_step import LeanStep
from lowtide.torch.loops.outputs import Outputs
from lowtide.torch.loops.probe import probe
from lowtide.torch.loops.runner import StepRunner
from lowtide.torch.loops.step import Stepper, Turn, refuse_transforms
from lowtide.torch.memory import recording
from lowtide.torch.state.ambient import Ambient
from lowtide.torch.state.generators import Randomness
from lowtide.torch.state.hidden import Hidden
from lowtide.torch.state.surroundings import Finds

_NO_END = 2**40  # the length of a loop as long as it is not known


def checkpointed_while_loop(
    cond: Callable[[Any], Any],
    body: Callable[[Any], Any],
    init: Any,
    *,
    checkpoints: int | None = None,
    budget: int | str | None = None,
    max_steps: int | None = None,
    check_rerun: bool | None = None,
    generators: Iterable[Any] = (),
    captures: Iterable[torch.Tensor] = (),
    hidden: Iterable[str] = (),
    lean: bool = False,
) -> Any:
    """Run `carry = body(carry)` while `cond(carry)`; returns the last carry, differentiable in bounded memory.

    Args:
        cond: whether to run another step; asked once for each state, without grad. One that draws random numbers is
            asked again where steps are run again, so that they find the same numbers.
        body: the step.
        init: the carry before the first step.
        checkpoints: at most this many snapshots; 50 if neither this nor a budget is given.
        budget: bytes for snapshots, one step of tape and the working set: 67108864 or "64MiB".
        max_steps: stop after this many steps even if `cond` still holds.
        check_rerun: as in `checkpointed_scan`.
        generators: as in `checkpointed_scan`.
        captures: as in `checkpointed_scan`.
        hidden: as in `checkpointed_scan`.
        lean: as in `checkpointed_scan`.
    """
    knobs = WhileKnobs.of(cond, body, checkpoints, budget, max_steps, _NO_END)
    slots, bytes_ = knobs.slots, knobs.budget
    condition = _Condition(cond, knobs.most)
    stepper = Stepper(lambda carry, _: (body(carry), None), init)
    checkpoints_steps = torch.is_grad_enabled() and not recording.runs_plainly()
    if checkpoints_steps:
        refuse_transforms("checkpointed_while_loop", "a plain `while`")
        found = Hidden((body,), hidden)
        random = (*generators, *found.generators, *Finds((cond,)).generators)
        condition.watch(random)
    if not condition(0, init):
        return init
    if not checkpoints_steps:
        return _plain(stepper, condition)
    step, before = stepper.f, partial(condition.repeated, turn=stepper.turn)
    stepper.f = lambda carry, x: step(before(carry), x)
    if lean:
        stepper.lean = LeanStep(step, found, body, before)
    runner = StepRunner(
        stepper,
        Inputs(None, _NO_END, reverse=False),
        Outputs(_NO_END),
        found,
        Randomness(random),
        Ambient(),
        check_rerun=check_rerun,
    )
    try:
        probed = probe(
            runner,
            captures=tuple(captures),
            costs=bytes_ is not None,
            pulls=bytes_ is not None,
            budget=bytes_,
            keep=False,
            goes_on=lambda k: condition(k, runner.carry),
        )
        if bytes_ is not None and probed.costs is not None and probed.lookout is not None:
            slots = probed.costs.slots_within(bytes_)
            probed.lookout.with_slots = lambda slots: lambda: _actions(engine, condition, slots)
        lookout = None if bytes_ is None else probed.lookout
        engine: Engine = Engine(runner, lambda: _actions(engine, condition, slots), probed.ahead, lookout)
        return run_loop(engine)[0]
    except LowtideError:
        runner.restart()
        raise


class _Condition:
    """Asks `cond` once for each state, in order; one that draws random numbers is asked again where steps run again."""

    def __init__(self, cond: Callable[[Any], Any], most: int) -> None:
        self._cond = cond
        self._most = most
        self._asked = -1
        self._answer = False
        self._generators: tuple[Any, ...] | None = None  # None if nobody asks whether it draws from them
        self._draws = False

    def watch(self, generators: tuple[Any, ...]) -> None:
        """From here on, find out whether it draws from these or from those that everybody shares."""
        self._generators = generators

    def __call__(self, step: int, carry: Any) -> bool:
        if step > self._asked:
            self._asked = step
            # Whoever draws does so from the beginning: at the first two states it is found out.
            random = Randomness(self._generators) if step < 2 and self._generators is not None else None
            with torch.no_grad():
                self._answer = step < self._most and bool(self._cond(carry))
            self._draws |= random is not None and random.mark() is not random.start
        return self._answer or step < self._asked

    def repeated(self, carry: Any, turn: Turn) -> Any:
        """The carry, for which `cond` draws its random numbers again if it did so between two steps."""
        if self._draws and turn.again and not turn.resumed:
            with torch.no_grad():
                self._cond(carry)
        turn.resumed = False
        return carry


def _plain(stepper: Stepper, condition: _Condition) -> Any:
    carry = stepper.begin()
    k = 0
    while condition(k, carry):
        carry, _ = stepper.call(k, carry, None)
        stepper.leaves(k, carry)
        k += 1
    return carry


def _actions(engine: Engine, condition: _Condition, slots: int) -> Iterator[Action]:
    """The online schedule, told after each step whether the loop goes on."""
    running = weakref.ref(engine)  # the engine holds on to these actions, so they must not hold on to it
    del engine
    generator = online(slots)
    action = next(generator)
    ended = False
    while True:
        yield action
        goes_on = False
        if isinstance(action, Advance) and not ended:
            goes_on = _goes_on(running, condition, action.stop)
            if not goes_on:
                ended = True
                _end(running, slots, action.stop)
        try:
            action = generator.send(goes_on)
        except StopIteration:
            return


def _goes_on(running: weakref.ref[Engine], condition: _Condition, step: int) -> bool:
    engine = running()
    return engine is not None and (bool(engine.ahead) or condition(step, engine.runner.carry))


def _end(running: weakref.ref[Engine], slots: int, length: int) -> None:
    """Now the length is known, for the backward and for playing everything once more."""
    engine = running()
    if engine is not None:
        engine.end_at(length, partial(Online(slots).actions, Chain.equal(StepCost(1, 1), length)))
