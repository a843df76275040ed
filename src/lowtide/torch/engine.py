"""Plays a plan's actions on tensors.

The forward pass is the plan's first sweep, up to its first Backward: steps run without grad, planned snapshots are
kept, the last stretch is taped and waits. The backward plays the rest, and `pullback` takes the gradients through
each tape. No per-step graph survives, so a step costs its own time. `function` makes it one node of the user's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from lowtide.actions import Action, Advance, Backward, Drop, Restore, Save, Tape
from lowtide.progress import Progress
from lowtide.torch import recording
from lowtide.torch.ambient import Ambient, Randomness
from lowtide.torch.capture import Captured, edge_of, now
from lowtide.torch.hidden import Hidden, HiddenState
from lowtide.torch.inputs import Inputs
from lowtide.torch.outputs import Outputs
from lowtide.torch.pieces import Piece, Profile, Snapshot, edges_of, has_gradient, is_differentiable
from lowtide.torch.pullback import LoopParts, Pullback
from lowtide.torch.repeats import Repeats
from lowtide.torch.shared import Shared
from lowtide.torch.stepping import Stepper
from lowtide.torch.walk import Walk, edge_set


class Engine:
    """One loop's run: its current state, its snapshots and tapes."""

    def __init__(
        self,
        stepper: Stepper,
        inputs: Inputs,
        outputs: Outputs,
        hidden: Hidden,
        randomness: Randomness,
        ambient: Ambient,
        *,
        progress: Progress | None = None,
        check_rerun: bool | None = False,
        advance_with_grad: bool = False,
    ) -> None:
        self.stepper = stepper
        self.inputs = inputs
        self.outputs = outputs
        self.hidden = hidden
        self.random = randomness
        self.ambient = ambient
        self.captured = Captured()
        self.length = inputs.length
        self.progress = progress
        self.advance_with_grad = advance_with_grad
        self.profile = Profile([], [])
        self.first_flags: list[bool] = []  # which positions of the state before step 0 have a gradient
        self.plan_actions: Callable[[], Iterator[Action]] = lambda: iter(())
        self._repeats = Repeats(always=check_rerun is True, never=check_rerun is None)
        self.walk = Walk(always=check_rerun is True)
        self.shared = Shared()
        self._loop = LoopParts(inputs, outputs, self.captured, self.profile, self.shared)

        # The current state; a part of it is in the modules themselves.
        self.leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in stepper.init]
        self.carry = stepper.form.unflatten(self.leaves)
        self._connected = False  # whether it belongs to the graph of the last piece
        self.begin = Snapshot(self.leaves, HiddenState(), randomness.start)
        self.ahead: list[tuple[Snapshot, Piece | None]] = []  # steps that the probes ran before the plan was known
        self.last_output: list[Any] = []

        self._snapshots: dict[int, Snapshot] = {}
        self._pieces: list[Piece] = []
        self.probing = True  # until it is known what belongs to the state
        self._put_already = 0
        self._sweeping = True
        self._draws = False
        self._pending: Iterator[Action] | None = None
        self._pullback: Pullback | None = None

    # --- playing

    def sweep(self, actions: Iterator[Action]) -> list[Any]:
        """Play up to the first Backward, or the first return to a snapshot; gives the leaves of the final state."""
        with self.ambient.uncached():
            for action in actions:
                if isinstance(action, Backward | Restore):
                    self._pending = chain([action], actions)
                    break
                self._play(action)
        self._draws = self.random.mark() is not self.random.start
        self._sweeping = False
        finals = self.state()
        self.leaves, self.carry = [], None
        return [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in finals]

    def backward(self, grads: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Play the rest; gives the gradients of the differentiable start, the inputs and what is captured, in a row."""
        actions, self._pending = self._pending, None
        self._pullback = pullback = self.pullback(grads, self.inputs.differentiable, self.length)
        aside = self.random.aside() if self._draws else nullcontext()
        with self.ambient.again(), self.hidden.aside(), aside, recording.recomputing():
            try:
                if actions is None:  # a second backward through a retained graph: everything again
                    self._resume(0, self.begin)
                    actions = self.plan_actions()
                for action in actions:
                    self._play(action)
            finally:
                self._snapshots.clear()
                self._pieces.clear()
                self._pullback = None
        self.progress = None  # a second backward is not progress
        starts = [g for g, flag in zip(pullback.state, self.first_flags, strict=True) if flag]
        return [*starts, *pullback.xs(), *pullback.captured]

    def _play(self, action: Action) -> None:
        match action:
            case Advance(start, stop):
                self._advance(start, stop)
            case Save(step):
                self._snapshots[step] = self._snapshot()
            case Restore(step):
                self._resume(step, self._snapshots[step])
            case Drop(step):
                del self._snapshots[step]
            case Tape(start, stop):
                self._tape(start, stop)
            case Backward(start, _):
                self._pull(start)

    def pullback(self, grads: list[torch.Tensor | None], xs: list[torch.Tensor], length: int) -> Pullback:
        """A backward that begins with these cotangents of outputs and state after `length` steps, for these inputs."""
        return Pullback(self._loop, length, self._position_names, grads, xs)

    def _pull(self, start: int) -> None:
        assert self._pullback is not None
        self.leaves, self.carry, self._connected = [], None, False
        while self._pieces and self._pieces[-1].start >= start:
            piece = self._pieces.pop()
            self._pullback.pull(piece)
            self.shared.forget(piece.stop)
            count = piece.stop - piece.start
            recording.count(backward=count)
            if self.progress is not None:
                self.progress.update(count)

    # --- states

    def state(self) -> list[Any]:
        """The leaves of the current state, by position."""
        return [*self.leaves, *self.hidden.leaves()]

    def _position_names(self) -> list[str]:
        return [*self.stepper.names, *self.hidden.names()]

    def _snapshot(self) -> Snapshot:
        if self.ahead:
            return self.ahead[0][0]
        self._disconnect()
        mark = self.random.mark() if self._sweeping or self._draws else self.random.start
        return Snapshot(self.leaves, self.hidden.read(), mark)

    def _resume(self, step: int, snapshot: Snapshot) -> None:
        self._set_carry(snapshot.leaves)
        self.hidden.write(snapshot.hidden)
        self._connected = False
        if step:
            self.shared.resumed(step, self.state())
        if self._draws:
            self.random.restore(snapshot.random)

    def restart(self) -> None:
        """Put everything back to where the loop began."""
        self.hidden.undo()
        self.random.restore(self.random.start)
        self._set_carry(self.begin.leaves)
        self._connected = False

    def forget_probes(self) -> None:
        """Go back to the beginning as if no step had run yet; what was learned stays."""
        self.ahead.clear()
        self.shared.clear()
        self._put_already = 0
        self.restart()

    def _set_carry(self, leaves: list[Any]) -> None:
        self.leaves = leaves
        self.carry = self.stepper.form.unflatten(leaves)

    def _disconnect(self) -> None:
        """After a tape that stays: what follows it does not belong to its graph."""
        if self._connected:
            self.detach_state()
            self._connected = False

    def detach_state(self) -> None:
        """Cut the current state off the graph that made it."""
        before = self.state()
        # A tensor that sits in several places stays one tensor.
        detached = {id(leaf): leaf.detach() for leaf in self.leaves if isinstance(leaf, torch.Tensor)}
        self._set_carry([detached.get(id(leaf), leaf) for leaf in self.leaves])
        self.hidden.replace([leaf.detach() if has_gradient(leaf) else leaf for leaf in self.hidden.leaves()])
        self.shared.moved(before, self.state())

    def root_state(self, k: int) -> list[torch.Tensor | None]:
        """Make the current state, that of step k, the root of a graph to come; gives its leaves by position."""
        before, hidden = self.state(), self.hidden.leaves()
        flags = self.first_flags if k == 0 else self.profile.state
        if len(flags) != len(self.leaves) + len(hidden):  # hidden state of another form than usual
            flags = [True] * len(self.leaves) + [not changed for changed in self.hidden.in_place()]
        starts: list[torch.Tensor | None] = []
        roots: dict[int, torch.Tensor] = {}
        for leaf, flag in zip((*self.leaves, *hidden), flags, strict=True):
            if flag and is_differentiable(leaf) and id(leaf) not in roots:
                roots[id(leaf)] = leaf.detach().requires_grad_()
            starts.append(roots.get(id(leaf)))
        count = len(self.leaves)
        self._set_carry([old if new is None else new for old, new in zip(self.leaves, starts[:count], strict=True)])
        if any(start is not None for start in starts[count:]):
            # What a step changes in place must not be a leaf.
            rows = zip(hidden, starts[count:], self.hidden.in_place(), strict=True)
            self.hidden.replace([old if new is None else new.clone() if p else new for old, new, p in rows])
        self.shared.moved(before, self.state())
        return starts

    # --- running steps

    def _advance(self, start: int, stop: int) -> None:
        recording.count(plain=stop - start)
        while self.ahead and start < stop:
            self.ahead.pop(0)
            start += 1
        if start == stop:
            return
        self._disconnect()
        run = self._advance_with_grad if self.advance_with_grad else self.advance_without
        with torch.no_grad():
            outputs = run(start, stop)
        if not self._repeats.always:
            self._note_repeat(stop, outputs)

    def advance_without(self, start: int, stop: int) -> list[Any]:
        """Run steps [start, stop) without grad; gives the leaves of the last one's output."""
        f, carry, always, stays = self.stepper.f, self.carry, self._repeats.always, self.shared.stays
        watch = self.stepper.watching(self.leaves) if self._sweeping else None
        k, take = start, self._take if self._sweeping else None
        try:
            for x in self.inputs.rows(start, stop):
                carry, y = f(carry, x)
                if watch is not None:
                    watch(k, carry)
                if take is not None:
                    take(k, y)
                if stays:
                    self.shared.ran(k, self.outputs.leaves(k, y))
                if always:
                    self.leaves = self.stepper.leaves(k, carry)
                    self._note_repeat(k + 1, self.outputs.leaves(k, y))
                k += 1
        except Exception:
            self._find_bad_carry(carry)  # was it because of what the step before returned?
            raise
        self._find_bad_carry(carry)
        self.carry, self.leaves = carry, self.stepper.leaves(stop - 1, carry)
        outputs = self.outputs.leaves(stop - 1, y)
        self.shared.note(stop, self.state(), outputs)
        return outputs

    def _find_bad_carry(self, carry: Any) -> None:
        """Say at which step the carry got another form, if it has one.

        To look at every step would take longer than many a step does, so only the last carry of a run is looked at; if
        it is wrong, the loop is run once more, with care.
        """
        if self._sweeping and not self.stepper.fits(carry):
            self.restart()
            self.first_step_where(lambda: False)

    def _advance_with_grad(self, start: int, stop: int) -> list[Any]:
        """Steps with their tapes, which are dropped at once; for steps that pick other kernels without grad."""
        f = self.stepper.taping
        with torch.enable_grad():
            for k, x in enumerate(self.inputs.rows(start, stop, []), start):
                self.root_state(k)
                self.carry, y = f(self.carry, x)
                self.leaves = self.stepper.leaves(k, self.carry)
                outputs = self.outputs.leaves(k, y)
                if self.shared.stays:
                    self.shared.ran(k, outputs)
                if self._sweeping:
                    self.put(k, outputs)
                if self._repeats.always:
                    self._note_repeat(k + 1, outputs)
        self.shared.note(stop, self.state(), outputs)
        self.detach_state()
        return outputs

    def first_step_where(self, happened: Callable[[], bool]) -> int:
        """Run from the start with care, keeping nothing, until `happened()`."""
        with torch.no_grad():
            for k, x in enumerate(self.inputs.rows(0, self.length)):
                self.carry, self.leaves, _ = self.stepper.run(k, self.carry, self.leaves, x)
                recording.count(probe=1)
                if happened():
                    return k
        return self.length - 1

    def _note_repeat(self, step: int, outputs: list[Any]) -> None:
        self._repeats.note(step, [*self.state(), *outputs], first=self._sweeping)

    def put(self, k: int, outputs: list[Any]) -> None:
        """Hand over the output of step k's first run; one that was handed over before is let go."""
        if k >= self._put_already:
            self._put_already = k + 1
            self.outputs.put(k, self.inputs.place(k), outputs)
            if self.progress is not None:
                self.progress.update(1)

    def _take(self, k: int, y: Any) -> None:
        """`put` for the output of a step that ran without grad."""
        if k >= self._put_already:
            self._put_already = k + 1
            self.outputs.take(k, self.inputs.place(k), y)
            if self.progress is not None:
                self.progress.update(1)

    # --- taping

    def _tape(self, start: int, stop: int) -> None:
        if any(piece is None for _, piece in self.ahead[: stop - start]):
            start = self._tape_probed_again(start, stop)
        while self.ahead and start < stop:
            piece = self.ahead.pop(0)[1]
            assert piece is not None
            self._pieces.append(piece)
            recording.count(taping=1)
            start += 1
        if start < stop:
            # Where a tape goes on from another it is one piece: the state between needs no root of its own.
            onto = self._pieces.pop() if self._connected else None
            self._pieces.append(self.tape(start, stop, put=self._sweeping, onto=onto))
            recording.count(taping=stop - start)
            self._note_repeat(stop, self.last_output)
            self.last_output = []
            self._connected = True

    def _tape_probed_again(self, start: int, stop: int) -> int:
        """The probes ran steps ahead, but not all of their tapes could be kept: run those once more."""
        ahead = start + len(self.ahead)
        stop = min(stop, ahead)
        recording.count(probe=ahead, taping=stop - start)
        self.ahead.clear()
        self.restart()
        with recording.recomputing():
            if start:
                with torch.no_grad():
                    self.advance_without(0, start)
            self._pieces.append(self.tape(start, stop, put=False))
        self._connected = True
        return stop

    def tape(self, start: int, stop: int, *, put: bool, onto: Piece | None = None) -> Piece:
        """Run steps [start, stop) from the current state under grad; `last_output` is left with the last one's.

        With `onto`, the piece that ends here, the result is that piece made longer.
        """
        outputs: list[list[tuple[int, GradientEdge]]] = onto.outputs if onto is not None else []
        xs: list[torch.Tensor] = onto.xs if onto is not None else []
        in_order, always = self.outputs.in_step_order, self._repeats.always
        careful = not self.captured.settled  # the very first step
        # A rerun with one tensor for an output, which is most of all runs, is kept short.
        stays = self.shared.stays
        short = self.outputs.is_tensor and not (self._sweeping or always or in_order or careful or stays)
        with torch.enable_grad(), self.captured.in_place_of():
            since = now() if onto is None else onto.since
            starts = self.root_state(start) if onto is None else onto.starts
            watch = self.stepper.watching(self.leaves) if put and not careful else None
            walk, f, k, carry, last = self.walk, self.stepper.taping, start, self.carry, self.length - 1
            mark = now()
            for x in self.inputs.rows(start, stop, xs):
                ends = walk.ends(self, k, carry, xs) if walk.due(k, last) and not careful else None
                if careful:
                    carry, self.leaves, y = self.stepper.run(k, carry, self.leaves, x)
                else:
                    carry, y = f(carry, x)
                    if watch is not None:
                        watch(k, carry)
                if short and outputs:
                    if y.requires_grad:
                        outputs[0].append((k, edge_of(y)))
                else:
                    leaves = self.outputs.leaves(k, y)
                    if stays:
                        self.shared.ran(k, leaves)
                    if put:
                        self.put(k, leaves)
                    if always and not self.probing:
                        self.leaves = self.stepper.leaves(k, carry)
                        self._note_repeat(k + 1, leaves)
                    if not outputs:
                        outputs = [[] for _ in leaves]
                    for leaf, column in zip(leaves, outputs, strict=True):
                        if has_gradient(leaf):
                            column.append((k, edge_of(leaf.view_as(leaf) if in_order else leaf)))
                began, mark = mark, now()
                if (ends is not None or mark - began not in walk.node_counts) and not careful:
                    if ends is None:  # not foreseen: all the way back to where the piece began
                        ends, began = edge_set([*starts, *xs]), since
                    walk.check(self, k, carry, self.outputs.leaves(k, y), ends, began)
                    walk.node_counts.add(mark - began)
                k += 1
            self.carry, self.leaves = carry, self.stepper.leaves(stop - 1, carry)
        self.last_output = self.outputs.leaves(stop - 1, y)
        self.shared.note(stop, self.state(), self.last_output)
        first = start if onto is None else onto.start
        return Piece(first, stop, since, starts, edges_of(self.state()), outputs, xs)

    # --- what the Function asks

    def start_tensors(self) -> list[torch.Tensor]:
        """The tensors with a gradient in the state before the first step."""
        carry = [leaf for leaf in self.stepper.init if has_gradient(leaf)]
        return carry + [origin[1] for origin in self.hidden.origins() if origin is not None]

    def result_flags(self) -> list[bool]:
        """For each result of the outputs and each part of the final state, whether it has a gradient."""
        if not self._pieces:
            return [*self.profile.outputs, *self.profile.state]
        last = self._pieces[-1]
        gradients = [bool(column) for column in last.outputs]
        self.profile.outputs[:] = [a or b for a, b in zip(self.profile.outputs, gradients, strict=True)]
        if self.outputs.only_last:
            gradients = [bool(column) and column[-1][0] == self.length - 1 for column in last.outputs]
        else:
            gradients = self.profile.outputs
        return [*gradients, *(edge is not None for edge in last.ends)]
