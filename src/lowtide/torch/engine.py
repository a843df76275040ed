"""Plays a plan's actions on tensors: one `torch.autograd.Function` spans the whole loop.

The forward pass is the plan's first sweep, up to its first Backward: steps run without grad, planned snapshots are kept,
the last stretch is taped and waits. The backward plays the rest. No per-step graph survives, so a step costs its own time.

Gradients equal the plain loop's to the last bit, because every sum is made in the plain loop's order. Autograd runs nodes
in descending order of their making, and adds what arrives at a tensor in that order:

- A captured tensor's running gradient enters each stretch first, as the gradient of `p.view_as(p)`, made last.
- An output that *is* the state (a GRU returning `(h, h)`) gets its cotangent from a stack, before the next step's
  contributions: so it is handed in with the stretch that starts there, through `c0.view_as(c0)`, made last.
- A running sum's cotangent arrives after the next step's contributions: through `y.view_as(y)`, made where the sum is.

With `create_graph=True` the backward is the plain loop's, differentiable, at the plain loop's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from lowtide.actions import Action, Advance, Backward, Drop, Restore, Save, Tape
from lowtide.errors import CheckpointError
from lowtide.torch import recording
from lowtide.torch.ambient import Ambient, Mark, Randomness
from lowtide.torch.bits import checksum
from lowtide.torch.capture import Captured, edge_of, gradients, now, strangers
from lowtide.torch.hidden import Hidden, HiddenState
from lowtide.torch.inputs import Inputs
from lowtide.torch.outputs import Outputs
from lowtide.torch.progress import Progress
from lowtide.torch.stepping import Stepper


@dataclass(slots=True)
class Snapshot:
    """The state before a step: the carry's leaves, hidden state, random states."""

    leaves: list[Any]
    hidden: HiddenState
    random: Mark


@dataclass(slots=True)
class Piece:
    """The tape of steps [start, stop): where gradients enter its graph and where they come out."""

    start: int
    stop: int
    since: int  # where its nodes begin in the order of their making
    starts: list[torch.Tensor | None]  # the state at start, None where no gradient flows
    ends: list[GradientEdge | None]  # the state at stop
    outputs: list[list[tuple[int, GradientEdge]]]  # for each output leaf, (step, where its cotangent enters)
    xs: list[torch.Tensor]  # each step's own inputs in a row

    def roots(self) -> list[Node]:
        """Every node where a gradient may enter."""
        edges = [edge for edge in self.ends if edge is not None]
        return [edge.node for edge in edges] + [edge.node for column in self.outputs for _, edge in column]


@dataclass(slots=True)
class Profile:
    """What the probe steps taught about all steps."""

    state: list[bool]  # for each position of the state after step 0, whether gradients flow through it
    outputs: list[bool]  # for each output leaf


class Engine:
    """One loop's run: its current state, its snapshots and tapes. `actions` is None until a plan is known."""

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
        self.check_rerun = check_rerun
        self.advance_with_grad = advance_with_grad
        self.profile = Profile([], [])
        self.first_flags: list[bool] = []
        self.plan_actions: Callable[[], Iterator[Action]] = _no_plan

        self.leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in stepper.init]
        self.carry = stepper.form.unflatten(self.leaves)
        self.begin = Snapshot(self.leaves, HiddenState(), randomness.start)
        self.ahead: list[tuple[Snapshot, Piece | None]] = []  # steps that the probes ran before the plan was known
        self._snapshots: dict[int, Snapshot] = {}
        self._pieces: list[Piece] = []
        self._sums: dict[int, list[int]] = {}  # checksums of states, by the number of steps that led there
        # By step, the outputs of the step before that *are* parts of the state there: (output leaf, position).
        self._shared: dict[int, list[tuple[int, int]]] = {}
        self._put_already = 0
        self._node_counts: set[int] = set()
        self.turn = next(_Walk._calls)
        self._connected = False  # whether the current state belongs to the graph of the last piece
        self._sweeping = True
        self._pending: Iterator[Action] | None = None
        self._draws = False
        self.last_output: list[Any] = []

    # --- the forward pass

    def sweep(self, actions: Iterator[Action]) -> list[Any]:
        """Play up to the first Backward, or the first return to a snapshot; gives the leaves of the final state."""
        with self.ambient.uncached():
            for action in actions:
                if isinstance(action, Backward | Restore):
                    self._pending = _chained(action, actions)
                    break
                self._play(action)
        self._draws = self.random.mark() is not self.random.start
        self._sweeping = False
        finals = self.leaves + self.hidden.leaves()
        self.leaves, self.carry = [], None
        return [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in finals]

    def _play(self, action: Action) -> None:
        match action:
            case Advance(start, stop):
                self._advance(start, stop)
            case Save(step):
                self._snapshots[step] = self._snapshot()
            case Restore(step):
                self._resume(self._snapshots[step])
            case Drop(step):
                del self._snapshots[step]
            case Tape(start, stop):
                self._tape(start, stop)
            case Backward(start, _):
                self._pull(start)

    # --- states

    def _snapshot(self) -> Snapshot:
        if self.ahead:
            return self.ahead[0][0]
        self._disconnect()
        mark = self.random.mark() if self._sweeping or self._draws else self.random.start
        return Snapshot(self.leaves, self.hidden.read(), mark)

    def _resume(self, snapshot: Snapshot) -> None:
        self.leaves = snapshot.leaves
        self.carry = self.stepper.form.unflatten(snapshot.leaves)
        self.hidden.write(snapshot.hidden)
        self._connected = False
        if self._draws:
            self.random.restore(snapshot.random)

    def _verify(self, step: int, y: list[Any]) -> None:
        """Remember the state reached after `step` steps, or compare it with what was reached the first time."""
        if self.check_rerun is None:
            return
        sums: list[int] = []
        known: dict[tuple[int, torch.Size], int] = {}  # an output that is part of the state is summed once
        for leaf in (*self.leaves, *self.hidden.leaves(), *y):
            if isinstance(leaf, torch.Tensor):
                key = (leaf.data_ptr(), leaf.shape)
                if key not in known:
                    known[key] = checksum(leaf)
                sums.append(known[key])
        if self._sweeping:
            self._sums[step] = sums
        elif self._sums.get(step, sums) != sums:
            raise CheckpointError(
                f"run again, step {step - 1:,} or one before it gave other values than at first: something it uses "
                "does not repeat. Draw random numbers with torch (or name the generator: generators=(g,)), keep state "
                "in the carry or in a module, and change nothing between forward and backward; check_rerun=True "
                "finds the first such step. If it picks other kernels without grad, pass advance_with_grad=True"
            )

    # --- running steps

    def _advance(self, start: int, stop: int) -> None:
        k = start
        while self.ahead and k < stop:
            self.ahead.pop(0)
            k += 1
        recording.count(plain=stop - start)
        if k == stop:
            return
        self._disconnect()
        with torch.no_grad():
            if self.advance_with_grad:
                leaves = self._advance_with_grad(k, stop)
            else:
                leaves = self.outputs.leaves(stop - 1, self._advance_without(k, stop))
                self.note_shared(stop, leaves)
        if not self.check_rerun:
            self._verify(stop, leaves)

    def _advance_without(self, start: int, stop: int) -> Any:
        f, carry, first, check = self.stepper.f, self.carry, self._sweeping, self.check_rerun
        versions = self.stepper.versions(self.leaves)
        k, take = start, self._take if first else None
        try:
            for x in self.inputs.rows(start, stop):
                carry, y = f(carry, x)
                if take is not None:
                    take(k, y)
                if check:
                    self.leaves = self.stepper.leaves(k, carry)
                    self._verify(k + 1, self.outputs.leaves(k, y))
                k += 1
        except Exception:
            self._find_bad_carry(carry)  # was it because of what the step before returned?
            raise
        self.stepper.check_versions(start, self.leaves, versions)
        self._find_bad_carry(carry)
        self.carry, self.leaves = carry, self.stepper.leaves(stop - 1, carry)
        return y

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
        for k, x in enumerate(self.inputs.rows(start, stop, []), start):
            with torch.enable_grad():
                self._root_state(k)
                self.carry, self.leaves, y = self.stepper.run(k, self.carry, self.leaves, x)
            leaves = self.outputs.leaves(k, y)
            if k == stop - 1:
                self.note_shared(stop, leaves)
            self.detach_state()
            if self._sweeping:
                self.put(k, leaves)
            if self.check_rerun:
                self._verify(k + 1, leaves)
        return leaves

    def note_shared(self, step: int, outputs: list[Any]) -> None:
        """Remember which of these outputs, of the step before, are parts of the state at `step`, the current one."""
        if not outputs:
            return
        state = [*self.leaves, *self.hidden.leaves()]
        self._shared[step] = [
            (m, position)
            for m, output in enumerate(outputs)
            for position, leaf in enumerate(state)
            if output is leaf and isinstance(leaf, torch.Tensor)
        ]

    def put(self, k: int, leaves: list[Any]) -> None:
        """Hand over the output of step k's first run; one that was handed over before is let go."""
        if k < self._put_already:
            return
        self._put_already = k + 1
        self.outputs.put(k, self.inputs.place(k), leaves)
        if self.progress is not None:
            self.progress.update(1)

    def _take(self, k: int, y: Any) -> None:
        """`put` for the output of a step that ran without grad."""
        if k >= self._put_already:
            self._put_already = k + 1
            self.outputs.take(k, self.inputs.place(k), y)
            if self.progress is not None:
                self.progress.update(1)

    def _disconnect(self) -> None:
        """After a tape that stays: what follows it does not belong to its graph."""
        if self._connected:
            self.detach_state()
            self._connected = False

    def detach_state(self) -> None:
        """Cut the current state off the graph that made it."""
        self.leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        self.carry = self.stepper.form.unflatten(self.leaves)
        self.hidden.replace(
            [
                leaf.detach() if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf
                for leaf in self.hidden.leaves()
            ]
        )

    def _root_state(self, k: int) -> list[torch.Tensor | None]:
        """Make the current state, that of step k, the root of a graph to come; gives its leaves by position."""
        hidden = self.hidden.leaves()
        flags = self.first_flags if k == 0 else self.profile.state
        if len(flags) != len(self.leaves) + len(hidden):  # hidden state of another form than usual
            flags = [isinstance(leaf, torch.Tensor) for leaf in self.leaves] + [not p for p in self.hidden.in_place()]
        starts: list[torch.Tensor | None] = []
        for leaf, flag in zip((*self.leaves, *hidden), flags, strict=True):
            starts.append(leaf.detach().requires_grad_() if flag and is_differentiable(leaf) else None)
        count = len(self.leaves)
        self.leaves = [old if new is None else new for old, new in zip(self.leaves, starts[:count], strict=True)]
        self.carry = self.stepper.form.unflatten(self.leaves)
        if any(start is not None for start in starts[count:]):
            # What a step changes in place must not be a leaf.
            rows = zip(hidden, starts[count:], self.hidden.in_place(), strict=True)
            self.hidden.replace([old if new is None else new.clone() if p else new for old, new, p in rows])
        return starts

    def _tape(self, start: int, stop: int) -> None:
        if any(piece is None for _, piece in self.ahead):
            # Not all of the probes' tapes could be kept: run those steps once more.
            again = len(self.ahead)
            recording.count(probe=again + start)
            self.ahead.clear()
            self.restart()
            with recording.recomputing():
                if start:
                    with torch.no_grad():
                        self._advance_without(0, start)
                self._pieces.append(self.tape(start, start + again, put=False))
            recording.count(taping=again)
            start, self._connected = start + again, True
        while self.ahead:
            piece = self.ahead.pop(0)[1]
            assert piece is not None
            self._pieces.append(piece)
            start += 1
            recording.count(taping=1)
        if start < stop:
            # Where a tape goes on from another it is one piece: the state between needs no root of its own.
            onto = self._pieces.pop() if self._connected else None
            self._pieces.append(self.tape(start, stop, put=self._sweeping, onto=onto))
            recording.count(taping=stop - start)
            self._verify(stop, self.last_output)
            self.last_output = []
            self._connected = True

    def restart(self) -> None:
        """Put everything back to where the loop began."""
        self.hidden.undo()
        self.random.restore(self.random.start)
        self.leaves = self.begin.leaves
        self.carry = self.stepper.form.unflatten(self.leaves)

    def tape(self, start: int, stop: int, *, put: bool, onto: Piece | None = None) -> Piece:
        """Run steps [start, stop) from the current state under grad; `last_output` is left with the last one's.

        With `onto`, the piece that ends here, the result is that piece made longer.
        """
        outputs: list[list[tuple[int, GradientEdge]]] = onto.outputs if onto is not None else []
        xs: list[torch.Tensor] = onto.xs if onto is not None else []
        in_order, check = self.outputs.in_step_order, self.check_rerun
        careful = not self.captured.targets and not self._node_counts  # the very first step
        with torch.enable_grad(), self.captured.in_place_of():
            since = now() if onto is None else onto.since
            starts = self._root_state(start) if onto is None else onto.starts
            walk = _Walk(self, since, starts) if self.captured.targets else None
            f, k, counts, carry = self.stepper.f, start, self._node_counts, self.carry
            # A rerun with one tensor for an output, which is most of all runs, is kept short.
            short = not (self._sweeping or check or in_order or careful) and self.outputs.is_tensor
            mark = now()
            for x in self.inputs.rows(start, stop, xs):
                before = walk.before(k, carry, xs) if walk is not None and walk.due(k) else None
                if careful:
                    carry, self.leaves, y = self.stepper.run(k, carry, self.leaves, x)
                else:
                    carry, y = f(carry, x)
                if short and outputs:
                    if y.requires_grad:
                        outputs[0].append((k, edge_of(y)))
                else:
                    leaves = self.outputs.leaves(k, y)
                    if put:
                        self.put(k, leaves)
                    if check:
                        self.leaves = self.stepper.leaves(k, carry)
                        self._verify(k + 1, leaves)
                    if not outputs:
                        outputs = [[] for _ in leaves]
                    for leaf, column in zip(leaves, outputs, strict=True):
                        if _has_gradient(leaf):
                            column.append((k, edge_of(leaf.view_as(leaf) if in_order else leaf)))
                began, mark = mark, now()
                if before is not None or (mark - began not in counts and walk is not None):
                    self.leaves = self.stepper.leaves(k, carry)
                    walk.after(k, before, began, self.outputs.leaves(k, y), xs)
                    counts.add(mark - began)
                k += 1
            self.carry, leaves = carry, self.outputs.leaves(stop - 1, y)
            self.leaves = self.stepper.leaves(stop - 1, self.carry)
        self.last_output = leaves
        self.note_shared(stop, leaves)
        ends = edges_of([*self.leaves, *self.hidden.leaves()])
        return Piece(start if onto is None else onto.start, stop, since, starts, ends, outputs, xs)

    # --- the backward pass

    def backward(self, grads: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Play the rest of the plan; `grads` are the cotangents of outputs and final state, by position."""
        actions, self._pending = self._pending, None
        self.take_cotangents(grads)
        self._x_grads = [
            torch.zeros_like(x, memory_format=torch.contiguous_format) for x in self.inputs.differentiable
        ]
        aside = self.random.aside() if self._draws else nullcontext()
        with self.ambient.again(), self.hidden.aside(), aside, recording.recomputing():
            if actions is None:  # a second backward through a retained graph: everything again
                self._snapshots.clear()
                self._pieces.clear()
                self._resume(self.begin)
                actions = self.plan_actions()
            try:
                for action in actions:
                    self._play(action)
            finally:
                self._snapshots.clear()
                self._pieces.clear()
        self.progress = None  # a second backward is not progress
        starts = [g for g, flag in zip(self._cotangents, self.first_flags, strict=True) if flag]
        return [*starts, *self._x_grads, *self._totals]

    def take_cotangents(self, grads: list[torch.Tensor | None]) -> None:
        """Begin a backward with the cotangents of outputs and final state."""
        count = len(self.profile.outputs)
        self._grads = grads[:count]
        self._cotangents = grads[count:]
        self._open = [True] * len(self._cotangents)
        self._totals: list[torch.Tensor | None] = [None] * len(self.captured.targets)
        self._x_grads: list[torch.Tensor] = []

    def _pull(self, start: int) -> None:
        self.leaves, self.carry, self._connected = [], None, False
        while self._pieces and self._pieces[-1].start >= start:
            piece = self._pieces.pop()
            self.pull(piece)
            self._shared.pop(piece.stop, None)
            count = piece.stop - piece.start
            recording.count(backward=count)
            if self.progress is not None:
                self.progress.update(count)

    def pull(self, piece: Piece, *, keep: bool = False) -> None:
        """Pull the cotangents back through one piece and free its tape, unless it is to be kept."""
        roots: list[Any] = []
        cotangents: list[torch.Tensor] = []
        self._seed_outputs(piece, roots, cotangents)
        for position, edge in enumerate(piece.ends):
            grad = self._cotangents[position]
            if edge is not None and not self._open[position]:
                raise CheckpointError(self._lost(piece, position))
            if edge is not None and grad is not None:
                roots.append(edge)
                cotangents.append(grad)
        targets = self.captured.targets
        starts = [leaf for leaf in piece.starts if leaf is not None]
        with torch.enable_grad():
            for target, total in zip(targets, self._totals, strict=True):
                if total is not None:
                    roots.append(target.view_as(target))
                    cotangents.append(total)
            self._seed_state(piece, roots, cotangents)
        count = len(targets)
        wanted = [*targets, *starts, *piece.xs]
        grads: tuple[torch.Tensor | None, ...] = (None,) * len(wanted)
        if roots and wanted:
            with self.captured.without_hooks():
                grads = gradients(roots, wanted, cotangents, keep=keep)
        self._totals = list(grads[:count])
        rest = iter(grads[count:])
        self._cotangents = [None if leaf is None else next(rest) for leaf in piece.starts]
        self._open = [leaf is not None for leaf in piece.starts]
        if self._x_grads:
            for k in range(piece.start, piece.stop):
                place = self.inputs.place(k)
                for buffer in self._x_grads:
                    grad = next(rest)
                    if grad is not None:
                        buffer[place] = grad

    def _seed_outputs(self, piece: Piece, roots: list[Any], cotangents: list[torch.Tensor]) -> None:
        """Cotangents of the piece's outputs; the last leaf first, as its stack was made last."""
        later = {m for m, _ in self._shared.get(piece.stop, ())} if self._defers(piece.stop) else set()
        for m in range(len(piece.outputs) - 1, -1, -1):
            grad = self._grads[m]
            if piece.outputs[m] and not self.profile.outputs[m]:
                raise CheckpointError(
                    f"the output {self.outputs.names[m]} has a gradient at step {piece.outputs[m][0][0]:,}, but at the "
                    "first and last steps it had none; make it the same at each step"
                )
            if grad is None:
                continue
            entries = piece.outputs[m]
            if entries and entries[-1][0] == piece.stop - 1 and m in later:
                entries = entries[:-1]
            places = [self.inputs.place(k) for k, _ in entries]
            rows = self.outputs.cotangents(grad, places, self.inputs.place(self.length - 1))
            for (_, edge), cotangent in zip(entries, rows, strict=True):
                if cotangent is not None:
                    roots.append(edge)
                    cotangents.append(cotangent)

    def _seed_state(self, piece: Piece, roots: list[Any], cotangents: list[torch.Tensor]) -> None:
        """Cotangents of outputs that are the state at the piece's start, which the piece below leaves to this one."""
        if not self._defers(piece.start):
            return
        place = self.inputs.place(piece.start - 1)
        for m, position in self._shared.get(piece.start, ()):
            grad, leaf = self._grads[m], piece.starts[position]
            if grad is None or leaf is None:
                continue
            cotangent = self.outputs.cotangent(grad, place, is_last=False)
            if cotangent is not None:
                roots.append(leaf.view_as(leaf))
                cotangents.append(cotangent)

    def _defers(self, step: int) -> bool:
        """Whether outputs that are the state at `step` get their cotangent from the piece above."""
        return 0 < step < self.length and not self.outputs.in_step_order

    def _lost(self, piece: Piece, position: int) -> str:
        names = [*self.stepper.names, *self.hidden.names()]
        name = names[position] if position < len(names) else f"part {position} of the state"
        return (
            f"{name} carries a gradient out of step {piece.stop - 1:,}, but did not at the first steps, so it would be "
            "lost; let it depend on the same things at each step"
        )

    def refuse_strays(self) -> None:
        """After the first sweep: refuse a loop in which something changed that is not carried; say at which step."""
        if changed := self.captured.changed():
            raise CheckpointError(
                f"the steps change {', '.join(changed)} in place, so reruns would not repeat; change it after the backward"
            )
        strays = self.hidden.strays()
        if not strays:
            return
        self.restart()
        step = self.first_step_where(lambda: bool(self.hidden.strays()))
        raise CheckpointError(
            f"step {step:,} is the first to change {', '.join(strays)}, and reruns would not see it; what steps change is "
            f"learned from the first ones, so name it: hidden=({strays[0]!r},)"
        )

    def outcome(self, stop: int) -> list[Any]:
        """Run the first `stop` steps, keeping nothing; gives the leaves of the state there and of the last output."""
        leaves: list[Any] = []
        with torch.no_grad(), self.ambient.uncached():
            for k, x in enumerate(self.inputs.rows(0, stop, [])):
                with torch.set_grad_enabled(self.advance_with_grad):
                    if self.advance_with_grad:
                        self._root_state(k)
                    self.carry, self.leaves, y = self.stepper.run(k, self.carry, self.leaves, x)
                leaves = self.outputs.leaves(k, y)
                self.detach_state()
        return [*self.leaves, *self.hidden.leaves(), *leaves]

    def first_step_where(self, happened: Callable[[], bool]) -> int:
        """Run from the start, keeping nothing, until `happened()`."""
        with torch.no_grad():
            for k, x in enumerate(self.inputs.rows(0, self.length)):
                self.carry, self.leaves, _ = self.stepper.run(k, self.carry, self.leaves, x)
                recording.count(probe=1)
                if happened():
                    return k
        return self.length - 1

    # --- what the Function asks

    def start_tensors(self) -> list[torch.Tensor]:
        """The tensors with a gradient in the state before the first step."""
        carry = [leaf for leaf, flag in zip(self.stepper.init, self.first_flags, strict=False) if flag]
        return carry + [origin[1] for origin in self.hidden.origins() if origin is not None]

    def final_flags(self) -> list[bool]:
        """For each part of the final state, whether it has a gradient."""
        if not self._pieces:
            return self.profile.state
        last = self._pieces[-1]
        gradients = [bool(column) for column in last.outputs]
        self.profile.outputs = [a or b for a, b in zip(self.profile.outputs, gradients, strict=True)]
        return [edge is not None for edge in last.ends]

    def plain_again(self, given: list[torch.Tensor]) -> list[Any]:
        """The whole loop with its graph, from the differentiable start leaves and inputs in `given`."""
        rest = iter(given)
        begin = [*self.begin.leaves, *self.begin.hidden.leaves()]
        start = [next(rest) if flag else leaf for leaf, flag in zip(begin, self.first_flags, strict=True)]
        count = len(self.begin.leaves)
        rows = self.inputs.connected(list(rest))
        outputs = self.outputs.fresh()
        with self.ambient.again(), self.hidden.aside(), self.random.aside(), torch.enable_grad():
            self.hidden.write(self.begin.hidden)
            self.hidden.replace(start[count:])
            self.random.restore(self.begin.random)
            carry = self.stepper.form.unflatten(start[:count])
            for k, x in enumerate(rows):
                carry, y = self.stepper.call(k, carry, x)
                outputs.keep(k, self.inputs.place(k), y)
            finals = [*self.stepper.leaves(self.length - 1, carry), *self.hidden.leaves()]
        recording.count(taping=self.length, backward=self.length)
        if self.progress is not None:
            self.progress.update(self.length)
            self.progress = None
        return [*outputs.graphed(), *finals]


class _Walk:
    """Walks the graphs of taped steps to see that they reach nothing but what is captured and what they were given.

    It takes about as long as a small step, so it is done where a step made another number of nodes than those seen so
    far, and else at one step in `EVERY`, others at each call of the loop; with `check_rerun=True` at every step.
    """

    EVERY = 64
    _calls = count()

    def __init__(self, engine: Engine, since: int, starts: list[torch.Tensor | None]) -> None:
        self._engine = engine
        self._since = since
        self._starts = [leaf for leaf in starts if leaf is not None]
        self._every = 1 if engine.check_rerun else self.EVERY
        self._turn = engine.turn % self._every
        self._last = engine.length - 1

    def due(self, k: int) -> bool:
        """Whether it is step k's turn."""
        return k % self._every == self._turn or k < 2 or k == self._last

    def before(self, k: int, carry: Any, xs: list[torch.Tensor]) -> set[Node]:
        """Where the graph of step k, which is about to run from `carry`, may end."""
        engine = self._engine
        given = xs[len(xs) - len(engine.inputs.differentiable) :]
        leaves = engine.stepper.leaves(k - 1, carry)
        return {edge_of(leaf).node for leaf in (*leaves, *engine.hidden.leaves(), *given) if _has_gradient(leaf)}

    def after(self, k: int, known: set[Node] | None, began: int, outputs: list[Any], xs: list[torch.Tensor]) -> None:
        """Refuse a step that reaches anything else."""
        engine = self._engine
        if known is None:  # not foreseen: all the way back to where the stretch began
            known, began = {edge_of(leaf).node for leaf in (*self._starts, *xs)}, self._since
        state = (*engine.leaves, *engine.hidden.leaves(), *outputs)
        roots = [edge_of(leaf).node for leaf in state if _has_gradient(leaf)]
        for node in strangers(roots, known | engine.captured.nodes, began):
            variable = getattr(node, "variable", None)
            what = "computed before the loop" if variable is None else f"of shape {tuple(variable.shape)}"
            raise CheckpointError(
                f"step {k:,} uses a tensor {what} ({node.name()}) that the first step did not touch, so its gradient would "
                "be lost; use it in the first step too, or name it: captures=(tensor,)"
            )


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def is_differentiable(leaf: Any) -> bool:
    """Whether gradients can flow through it at all."""
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def edges_of(leaves: list[Any]) -> list[GradientEdge | None]:
    """Where the gradient of each leaf enters the graph that made it; None where none does."""
    return [edge_of(leaf) if _has_gradient(leaf) else None for leaf in leaves]


def _no_plan() -> Iterator[Action]:
    raise NotImplementedError("a loop has to be given its plan before it runs")


def _chained(first: Action, rest: Iterator[Action]) -> Iterator[Action]:
    yield first
    yield from rest
