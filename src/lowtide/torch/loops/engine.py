"""Plays a plan's actions on tensors, as one node of the user's graph.

The forward pass is the plan's first sweep, up to its first Backward: steps run without grad, planned snapshots are
kept, the last stretch is taped and waits. The backward plays the rest, and `pullback` takes the gradients through each
tape. No per-step graph survives, so a step costs no more than its own time. After the first sweep, changes that reruns
would not see are refused.

The engine decides what an action does to snapshots and tapes; the runner, what it does to tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch

from lowtide.actions import Action, Advance, Backward, Drop, Restore, Save, Tape
from lowtide.errors import CheckpointError
from lowtide.torch.loops.probe import Lookout, OddStep
from lowtide.torch.loops.pullback import LateGradient, Piece, Pullback
from lowtide.torch.loops.runner import Ahead, Snapshot, StepRunner
from lowtide.torch.memory import recording
from lowtide.torch.state.capture import now, spare_hooks
from lowtide.torch.state.samples import one_backward
from lowtide.torch.state.surroundings import first_look

_CHECKED_EVERY = 16  # steps of the first sweep, of which the state is looked at


class Engine:
    """A loop's snapshots and tapes, from its first step to the end of its backward.

    `ahead` are its first steps, which the runner has already run; they are played by using their states and tapes.
    Within a budget, `lookout` says what to do if steps turn out not to be alike.
    """

    def __init__(
        self,
        runner: StepRunner,
        actions: Callable[[], Iterator[Action]],
        ahead: list[Ahead],
        lookout: Lookout | None = None,
    ) -> None:
        self.runner = runner
        self.ahead = ahead
        self._actions = actions
        self._lookout = lookout
        self._pending: Iterator[Action] | None = None  # the actions that are left for the backward
        self._snapshots: dict[int, Snapshot] = {}  # by step
        self._pieces: list[Piece] = []  # tapes that wait for their backward, end to end
        self._connected = False  # whether the current state is part of the graph of the last piece
        self._pullback: Pullback | None = None
        self._final_flags: list[bool] | None = None  # through which parts of the final state gradients can come back

    def sweep(self) -> list[Any]:
        """Play up to the first Backward or Restore; the leaves of the final state."""
        with self.runner.ambient.uncached():
            while not self._swept(self._actions()):
                self._plan_again()
        waiting = [snapshot for snapshot, _ in self.ahead]
        return self.runner.end_first_runs([*self._snapshots.values(), *waiting])

    def _swept(self, actions: Iterator[Action]) -> bool:
        """Whether the actions could be played up to the first Backward or Restore: steps are as the plan takes them."""
        try:
            for action in actions:
                if isinstance(action, Backward | Restore):
                    self._pending = chain([action], actions)
                    break
                self._play(action)
        except OddStep:  # nothing is done here, because what the error refers to lives as long as it is handled
            return False
        return True

    def _plan_again(self) -> None:
        """Give up what is held, and plan the whole loop by what its steps are measured to cost."""
        assert self._lookout is not None
        self.ahead.clear()
        self._snapshots.clear()
        self._pieces.clear()
        self._connected = False
        self._actions = self._lookout.play_again(self.runner.length)
        self.runner.restart()

    def backward(self, grads: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Play the rest; the gradients of the differentiable start, then of the inputs, then of captured tensors."""
        runner = self.runner
        actions, self._pending = self._pending, None
        since, effects = now(), first_look(runner.hidden.roots, counts=False)
        with runner.rerunning():
            pullback = self._play_backward(grads, actions)
            while pullback is None:
                pullback = self._play_backward(grads, None)
        runner.refuse_collected(since)
        if effects is not None:
            effects.tell()
        runner.end_progress()
        # The first tape may have been made when part of the state was not known yet, which then has no gradient there.
        starts = [g for g, flag in zip(pullback.state, runner.given_flags, strict=False) if flag]
        return [*starts, *pullback.xs(), *pullback.captured]

    def _play_backward(self, grads: list[torch.Tensor | None], actions: Iterator[Action] | None) -> Pullback | None:
        """Play these actions, or all of them once more; what they pulled back, None if that has to begin again."""
        runner = self.runner
        self._pullback = runner.pullback(grads, runner.inputs.differentiable, runner.length, self._final_flags)
        try:
            if actions is None:
                self._resume(0, runner.begin)
                actions = self._actions()
            with one_backward(grads):
                for action in actions:
                    self._play(action)
            return self._pullback
        except LateGradient as late:
            if not runner.let_flow(late.positions, late.names):
                raise CheckpointError(str(late)) from None
            return None
        finally:
            self._snapshots.clear()
            self._pieces.clear()
            self._pullback = None

    def end_at(self, length: int, actions: Callable[[], Iterator[Action]]) -> None:
        """Set the length of a loop that turns out to end after `length` steps; `actions` play all of it once more."""
        self.runner.end_at(length)
        self._actions = actions

    def result_flags(self) -> list[bool]:
        """For each result of the outputs, then each part of the final state, whether it has a gradient."""
        outputs, self._final_flags = self._result_flags()
        return [*outputs, *self._final_flags]

    def _result_flags(self) -> tuple[list[bool], list[bool]]:
        profile, outputs = self.runner.profile, self.runner.outputs
        if not self._pieces:
            return profile.outputs, self.runner.final_flags
        last = self._pieces[-1]
        gradients = [bool(column) for column in last.outputs]
        profile.outputs[:] = [a or b for a, b in zip(profile.outputs, gradients, strict=True)]
        if outputs.only_last:
            gradients = [bool(column) and column[-1][0] == self.runner.length - 1 for column in last.outputs]
        else:
            gradients = profile.outputs
        return gradients, [edge is not None for edge in last.ends]

    # --- actions

    def _play(self, action: Action) -> None:
        match action:
            case Advance(start, stop):
                self._run(self._advance, start, stop)
            case Save(step):
                self._snapshots[step] = self._snapshot()
            case Restore(step):
                self._resume(step, self._snapshots[step])
            case Drop(step):
                del self._snapshots[step]
            case Tape(start, stop):
                self._run(self._tape, start, stop)
            case Backward(start, _):
                self._pull(start)

    def _check_state(self) -> None:
        """Within a budget, make sure that states are as large as the plan takes them to be."""
        if self._lookout is not None and self._pullback is None and not self.ahead:
            self._lookout.check_state()

    def _run(self, run: Callable[[int, int], None], start: int, stop: int) -> None:
        """Run steps; of those that run again it is said so where they fail."""
        with nullcontext() if self._pullback is None else self.runner.proof.telling(start, stop):
            if start < (middle := min(stop, self.runner.already)):
                with self.runner.repeating(), self.runner.proof.telling(start, middle):
                    run(start, middle)
                start = middle
            while start < stop:
                middle = stop if self._lookout is None or self._pullback is not None else start + _CHECKED_EVERY
                run(start, min(middle, stop))
                self._check_state()
                start = middle

    def _advance(self, start: int, stop: int) -> None:
        recording.count(plain=stop - start)
        while self.ahead and start < stop:
            self.ahead.pop(0)
            start += 1
        while start < stop and self._looks_at(start):
            self._disconnect()
            self._watched(start)
            start += 1
        self._disconnect()
        if start < stop:
            self.runner.advance(start, stop)

    def _looks_at(self, k: int) -> bool:
        return self._lookout is not None and self._lookout.looks_at(k)

    def _watched(self, k: int, onto: Piece | None = None) -> Piece:
        """The tape of step k, which is measured meanwhile."""
        assert self._lookout is not None
        piece = self._lookout.watch(k, partial(self.runner.tape, k, k + 1, put=False, onto=onto))
        self.runner.put_last(k)
        self.runner.check_tape(k + 1)
        self._connected = True
        return piece

    def _snapshot(self) -> Snapshot:
        if self.ahead:
            return self.ahead[0][0]
        self._disconnect()
        self._check_state()
        return self.runner.snapshot()

    def _disconnect(self) -> None:
        """Detach the current state from the last tape: what follows is not part of that tape's graph."""
        if self._connected:
            self.runner.detach_state()
            self._connected = False

    def _resume(self, step: int, snapshot: Snapshot) -> None:
        self.runner.resume(step, snapshot)
        self._connected = False

    def _tape(self, start: int, stop: int) -> None:
        end = self._look_first(start, stop)
        if end > start + len(self.ahead) or any(piece is None for _, piece in self.ahead[: stop - start]):
            start = self._tape_ahead_again(start, stop, end)
        while self.ahead and start < stop:
            piece = self.ahead.pop(0)[1]
            assert piece is not None
            self._pieces.append(piece)
            recording.count(taping=1)
            start += 1
        while start < stop and self._looks_at(start):
            self._pieces.append(self._watched(start, self._last_piece()))
            recording.count(taping=1)
            start += 1
        if start < stop:
            if self.runner.proof.compares_graphs:
                self._pieces += [self.runner.tape(k, k + 1) for k in range(start, stop)]
            else:
                self._pieces.append(self.runner.tape(start, stop, onto=self._last_piece()))
            recording.count(taping=stop - start)
            self.runner.check_tape(stop)
            self._connected = True

    def _last_piece(self) -> Piece | None:
        """The piece to be made longer by the next tape: one that continues another is the same piece.

        The state between them then needs no root.
        """
        apart = self.runner.proof.compares_graphs or (self._lookout is not None and self._lookout.tapes_apart)
        return self._pieces.pop() if self._connected and not apart else None

    def _look_first(self, start: int, stop: int) -> int:
        """Look at steps up to `stop` without their tapes, if there may be no room for one that is not like the others.

        Returns the first of steps [start, stop) that has not run.
        """
        end = start + len(self.ahead)
        while end < stop and self._lookout is not None and self._lookout.is_tight and self._looks_at(end):
            self._disconnect()
            self._watched(end)
            end += 1
        return end

    def _tape_ahead_again(self, start: int, stop: int, end: int) -> int:
        """Run steps [start, end), which were run ahead, once more to tape them up to `stop`; where that ends.

        Their first runs, and those that lead to them again, are counted as not part of the plan.
        """
        stop = min(stop, end)
        # Executed in all: `end` runs ahead, of which `start` were counted as plain, and `stop` runs from here.
        recording.count(probe=end, taping=stop - start)
        self.ahead.clear()
        self.runner.restart()
        with self.runner.repeating(), self.runner.proof.telling(0, stop):
            if start:
                self.runner.run_untaped(0, start)
            if self.runner.proof.compares_graphs:
                self._pieces += [self.runner.tape(k, k + 1, put=False) for k in range(start, stop)]
            else:
                self._pieces.append(self.runner.tape(start, stop, put=False))
            self.runner.check_tape(stop)
        self._connected = True
        return stop

    def _pull(self, start: int) -> None:
        assert self._pullback is not None
        self.runner.forget_carry()
        if self._lookout is not None and self._lookout.uneven:
            self.runner.forget_hidden()
        self._connected = False
        while self._pieces and self._pieces[-1].start >= start:
            piece = self._pieces.pop()
            self._pullback.pull(piece)
            self.runner.pulled(piece)


# --- the loop as a node of the user's graph


def run_loop(engine: Engine) -> tuple[Any, list[Any]]:
    """Run the engine's loop; the final carry and the results of outputs, as tensors of the user's graph."""
    runner = engine.runner
    tensors = runner.differentiated()
    box: list[Any] = []
    since, kept, token = now(), _Lasting(engine), torch.empty(0, device="cpu")
    results = _Loop.apply(kept, box, token, *tensors)  # type: ignore[no-untyped-call]  # torch's own
    saved = weakref.ref(token)
    del token
    kept.as_long_as(saved())
    # What was one tensor in several places is one tensor there again.
    made = dict(zip(_tensors_by_id(box), results, strict=True))
    merged = [made.get(id(leaf), leaf) for leaf in box]
    runner.refuse_changed()
    runner.refuse_collected(since)
    count = len(runner.profile.outputs)
    return runner.finish(merged[count:]), merged[:count]


class _Lasting:
    """The engine of a loop, until a backward frees what the loop has saved: results may live on, as losses in a list.

    A token among the saved tensors tells. Where somebody's hooks take saved tensors away it is gone at once, and tells
    nothing.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine: Engine | None = engine
        self._token: weakref.ref[torch.Tensor] | None = None

    def as_long_as(self, token: torch.Tensor | None) -> None:
        """Let the engine go as soon as the token is gone, if there still is one."""
        me = weakref.ref(self)

        def let_go(_: Any) -> None:
            if (kept := me()) is not None:
                kept.engine = None

        if token is not None:
            self._token = weakref.ref(token, let_go)


class _Loop(torch.autograd.Function):
    """The loop as an autograd Function of its differentiable start, inputs and captured tensors.

    It returns the results of outputs and the final state. `box` receives all results, because a Function cannot return
    those that are not tensors.
    """

    @staticmethod
    def forward(
        ctx: Any, kept: _Lasting, box: list[Any], token: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        engine = kept.engine
        assert engine is not None
        finals = engine.sweep()
        results = [*engine.runner.results(finals), *finals]
        flags = engine.result_flags()
        ctx.kept = kept
        ctx.tensor_places = list(_tensors_by_id(results).values())
        ctx.total = len(results)
        ctx.save_for_backward(token, *tensors)
        ctx.set_materialize_grads(False)
        plain = [leaf for leaf, flag in zip(results, flags, strict=True) if isinstance(leaf, torch.Tensor) and not flag]
        ctx.mark_non_differentiable(*plain)
        recording.leave_out(results)
        box += results
        return tuple(results[place] for place in ctx.tensor_places)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if all(grad is None for grad in grads):  # in the plain loop nothing would lead here
            return (None,) * len(ctx.needs_input_grad)
        _, *tensors = ctx.saved_tensors  # raises if one was freed or changed in place
        engine: Engine = ctx.kept.engine
        placed: list[torch.Tensor | None] = [None] * ctx.total
        for place, grad in zip(ctx.tensor_places, grads, strict=True):
            placed[place] = grad
        recording.leave_out(grads)
        if torch.is_grad_enabled():  # create_graph=True: no plan is played, and memory is that of a plain loop
            return (None, None, None, *_differentiable(engine.runner, tensors, placed))
        found = engine.backward(placed)
        for tensor, grad in zip(tensors, found, strict=True):
            if grad is None:
                spare_hooks(tensor)
        recording.leave_out(found)
        return (None, None, None, *found)


def _tensors_by_id(leaves: list[Any]) -> dict[int, int]:
    """The place of each tensor, the first one if it has several, by identity."""
    places: dict[int, int] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            places.setdefault(id(leaf), place)
    return places


def _differentiable(
    runner: StepRunner, tensors: list[torch.Tensor], grads: list[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of the plain loop, run again from `tensors`, with a graph through which they are differentiable."""
    with runner.repeating():
        captured = runner.captured
        # Views of everything that is given, so that the gradients stop there and do not go on into the graph that made
        # it. For captured tensors only if one was computed from another: replacing them means watching each function
        # call.
        given = [tensor.view_as(tensor) for tensor in tensors[: len(tensors) - len(captured.tensors)]]
        swaps = {id(tensor): tensor.view_as(tensor) for tensor in captured.tensors} if captured.dependent else {}
        wanted = [*given, *(swaps.get(id(tensor), tensor) for tensor in captured.tensors)]
        with captured.in_place_of(swaps):
            results = _plain_again(runner, given)
        pairs = [
            (result, grad)
            for result, grad in zip(results, grads, strict=True)
            if grad is not None and isinstance(result, torch.Tensor) and result.requires_grad
        ]
        with captured.without_hooks():
            return torch.autograd.grad(
                [result for result, _ in pairs],
                wanted,
                [grad for _, grad in pairs],
                create_graph=True,
                allow_unused=True,
            )


def _plain_again(runner: StepRunner, given: list[torch.Tensor]) -> list[Any]:
    """The results of the whole loop with their graph, from the differentiable start leaves and inputs in `given`."""
    rest = iter(given)
    begin, count = runner.begin.all_leaves(), len(runner.begin.leaves)
    given_first = {id(leaf): next(rest) for leaf, flag in zip(begin, runner.given_flags, strict=True) if flag}
    flags = zip(begin, runner.first_flags, strict=True)
    start = [given_first.get(id(leaf), leaf.detach().requires_grad_() if flag else leaf) for leaf, flag in flags]
    rows = runner.inputs.connected(list(rest))
    outputs, stepper = runner.outputs.fresh(), runner.stepper
    with runner.ambient.again(), runner.hidden.aside(), runner.random.aside(), torch.enable_grad():
        runner.hidden.write(runner.begin.hidden)
        runner.hidden.replace(start[count:])
        runner.random.restore(runner.begin.random)
        carry = stepper.first.form.unflatten(start[:count])
        for k, x in enumerate(rows):
            carry, y = stepper.call(k, carry, x)
            outputs.keep(k, runner.inputs.place(k), y)
            runner.proof.output(k, outputs.leaves(k, y))
        finals = [*stepper.leaves(runner.length - 1, carry), *runner.hidden.leaves()]
    recording.count(taping=runner.length, backward=runner.length)
    if runner.progress is not None:
        runner.progress.update(runner.length)
    runner.end_progress()
    return [*outputs.graphed(), *finals]
