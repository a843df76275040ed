"""Runs a loop's steps from its current state: plainly, or under grad with their tape. It knows no plan.

The current state is a carry, hidden state in the modules themselves, and random generators. Every step has one first
run, whose output is handed over and whose carry is checked; all others are reruns, compared with it. What belongs to
the state, and what steps close over, is learned from the first steps, which `probe` runs before there is a plan.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from lowtide.errors import CheckpointError, InputError
from lowtide.interface.progress import Progress
from lowtide.torch.loops.inputs import Inputs
from lowtide.torch.loops.outputs import Outputs
from lowtide.torch.loops.proof import Proof
from lowtide.torch.loops.pullback import LatestOutput, LoopParts, Piece, Profile, Pullback, Shared
from lowtide.torch.loops.step import StepFunction, Stepper
from lowtide.torch.memory import recording
from lowtide.torch.memory.tracker import storage_bytes, storage_sizes, tensors_of
from lowtide.torch.state.ambient import Ambient, gradients_aside
from lowtide.torch.state.capture import (
    Captured,
    Walk,
    Watch,
    edge_of,
    edge_set,
    edges_of,
    graph_of,
    has_gradient,
    is_differentiable,
    now,
    strangers,
)
from lowtide.torch.state.generators import Mark, Randomness, mark_bytes
from lowtide.torch.state.hidden import Hidden, HiddenState
from lowtide.torch.state.surroundings import Look, Things, collected, moved, warn_of_moved
from lowtide.torch.state.trees import TreeForm, leaves_of


@dataclass(slots=True)
class Snapshot:
    """The state before a step: the carry's leaves, hidden state, random states."""

    leaves: list[Any]
    hidden: HiddenState
    random: Mark
    flags: list[bool] | None = None  # through which positions gradients flow, if that is known exactly
    ready: bool = True  # whether only the step comes next, and not the condition of a loop, which may draw too

    def all_leaves(self) -> list[Any]:
        """The leaves of carry and hidden state in a row; a place in it is a position."""
        return [*self.leaves, *self.hidden.leaves()]


# A step that was run before there was a plan: the state before it, and its tape if that was kept.
Ahead = tuple[Snapshot, Piece | None]


class StepRunner:
    """The steps of one loop, and its current state."""

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
        check_rerun: bool | None = None,
        advance_with_grad: bool = False,
    ) -> None:
        self.stepper = stepper
        self.inputs = inputs
        self.outputs = outputs
        self.hidden = hidden
        self.random = randomness
        self.ambient = ambient
        self.length = inputs.length
        self.progress = progress
        self._tapes_always = advance_with_grad  # run steps with grad even where no tape is kept
        self.proof = Proof(check_rerun)
        self._walk = Walk(always=check_rerun is True)

        # What the first steps teach.
        self.captured = Captured()
        self.profile = Profile([], [])
        self._flows_by_name: dict[str, bool] = {}  # by the names of positions, as in `profile`
        self._usual_names: list[str] = []  # those of the positions
        self._form_varies = False  # whether hidden state had different numbers of tensors
        # While steps are taped one after another: through which positions of the current state gradients do flow.
        self._flags_now: list[bool] | None = None
        self._flags_are_exact = True  # whether those of `_flags_now` are, and no guess
        self.final_flags: list[bool] = []  # of the final state, as far as steps before the last tape tell
        self._follows_flow = False  # whether that is wanted of all first runs, and not of the first steps alone
        self.first_flags: list[bool] = []  # which positions of the state before step 0 have a gradient
        self.given_flags: list[bool] = []  # and through which of them it flows on
        self.shared = Shared()
        self._parts = LoopParts(inputs, outputs, self.captured, self.profile, self.shared)
        self._learning = True
        self._things = Things(hidden.finds, hidden.modules)
        self._look: Look = {}  # before the first step
        self._graded: list[
            torch.Tensor
        ] = []  # leaves whose gradients the step itself adds to, by a backward of its own

        # The current state; a part of it is in the modules themselves.
        self.leaves = _detached(stepper.init)
        self._form = stepper.first.form  # of the current carry
        self.carry = self._form.unflatten(self.leaves)
        self.last_output: list[Any] = []  # of the step that was taped last
        self.begin = Snapshot(self.leaves, HiddenState(), randomness.start)

        self._since = now()  # nodes of graphs from here on are the steps' own
        self._first_runs = True  # until the first sweep is over
        self._put_already = 0  # outputs of steps below this have been handed over
        self._lowest_pulled = self.length  # steps from here on have been pulled back
        self._draws = False  # whether first runs drew random numbers

    # --- the current state

    def state(self) -> list[Any]:
        """The leaves of the current state, by position."""
        return [*self.leaves, *self.hidden.leaves()]

    def has_step(self, k: int) -> bool:
        """Whether step k is one of the loop's."""
        return k < self.length

    def state_bytes(self) -> int:
        """Bytes of the current state, random states included."""
        return storage_bytes(tensors_of(self.state())) + mark_bytes(self.random.mark(), self.random.start)

    def uncopied(self) -> dict[int, int]:
        """The bytes of the current state's storages that a snapshot holds themselves, and not copies of, by address."""
        rows = zip(self.hidden.leaves(), self.hidden.in_place(), strict=True)
        copied = storage_sizes([leaf for leaf, in_place in rows if in_place])
        sizes = storage_sizes(tensors_of(self.state()))
        return {key: size for key, size in sizes.items() if key not in copied}

    def _position_names(self) -> list[str]:
        return [*self.stepper.names, *self.hidden.names()]

    def snapshot(self) -> Snapshot:
        """The current state, to come back to."""
        if self._first_runs:
            self.hidden.look()
        mark = self.random.mark() if self._first_runs or self._draws else self.random.start
        turn = self.stepper.turn
        return Snapshot(
            self.leaves, self.hidden.read(self.leaves), mark, self._flags_now, turn.resumed or not turn.again
        )

    def resume(self, step: int, snapshot: Snapshot) -> None:
        """Make the state at `step` the current one."""
        self._set_carry(snapshot.leaves, self.stepper.before(step).form)
        self._flags_now, self.stepper.turn.resumed = snapshot.flags, snapshot.ready
        self.hidden.write(snapshot.hidden, snapshot.leaves)
        if step and self.shared.stays:
            self.shared.resumed(step, self.state())
        if self._draws:
            self.random.restore(snapshot.random)

    def restart(self) -> None:
        """Put everything back to where the loop began."""
        self.hidden.undo()
        self.random.restore(self.random.start)
        self._set_carry(self.begin.leaves, self.stepper.first.form)
        self.last_output = []

    def forget_carry(self) -> None:
        """There is no current state: the next is one that is resumed."""
        self.leaves, self.carry = [], None

    def forget_hidden(self) -> None:
        """Let modules hold the state of the beginning, so that another, which may be larger, can be freed."""
        self.hidden.write(self.begin.hidden)

    def _set_carry(self, leaves: list[Any], form: TreeForm | None = None) -> None:
        """Replace the current carry; by default by one of the same form."""
        self.leaves = leaves
        if form is not None:
            self._form, self.stepper.turn.resumed = form, True
            self._flags_now = None
        self.carry = self._form.unflatten(leaves)

    def _arrive(self, k: int, carry: Any) -> None:
        """Step k has returned a carry, which is the current one now."""
        self.carry, self.leaves = carry, self.stepper.leaves(k, carry)
        self._form = self.stepper.later.form

    def detach_state(self) -> None:
        """Cut the current state off the graph that made it."""
        before = self.state() if self.shared.stays else []
        # A tensor that sits in several places stays one tensor.
        detached = {id(leaf): leaf.detach() for leaf in self.leaves if isinstance(leaf, torch.Tensor)}
        hidden = self.hidden.leaves()
        detached |= {id(leaf): leaf.detach() for leaf in hidden if has_gradient(leaf) and id(leaf) not in detached}
        self._set_carry([detached.get(id(leaf), leaf) for leaf in self.leaves])
        self.hidden.replace([detached.get(id(leaf), leaf) for leaf in hidden])
        if self.shared.stays:
            self.shared.moved(before, self.state())

    def root_state(self, k: int) -> list[GradientEdge | None]:
        """Make the current state, that of step k, the root of a graph to come; returns where its gradients arrive."""
        before, count = self.state(), len(self.leaves)
        # A tensor that sits at several positions is one leaf, so that all it receives is added in one place.
        roots: dict[int, torch.Tensor] = {}
        for leaf, flag in zip(before, self._root_flags(k, len(before)), strict=True):
            if flag and is_differentiable(leaf) and id(leaf) not in roots:
                roots[id(leaf)] = leaf.detach().requires_grad_()
        # Their edges are asked for at once: a step that has used a leaf may detach it in place.
        edges = {key: edge_of(root) for key, root in roots.items()}
        self._set_carry([roots.get(id(leaf), leaf) for leaf in self.leaves])
        if not roots.keys().isdisjoint(map(id, before[count:])):
            # What a step changes in place must not be a leaf; what the carry has it does not change.
            rows = zip(before[count:], self.hidden.in_place(), strict=True)
            changed = {id(leaf) for leaf, in_place in rows if in_place}.difference(map(id, before[:count]))
            hidden = {key: root.clone() if key in changed else root for key, root in roots.items()}
            self.hidden.replace([hidden.get(id(leaf), leaf) for leaf in before[count:]])
        if self.shared.stays:
            self.shared.moved(before, self.state())
        return [edges.get(id(leaf)) for leaf in before]

    def _root_flags(self, k: int, positions: int) -> list[bool]:
        """For each position of the state before step k, whether gradients may flow through it."""
        flags = self.first_flags if k == 0 else self.profile.state
        if self._flags_now is not None and len(self._flags_now) == positions:
            return self._flags_now
        if len(flags) == positions and not (k and self._form_varies):
            return flags
        # Hidden state of another form than usual: what one tensor in a slot was seen to have, all have.
        return flags[: len(self.leaves)] + self._hidden_flags()

    def _hidden_flags(self) -> list[bool]:
        """By what is known of each slot, whether gradients may flow through each tensor in it."""
        rows = zip(self.hidden.names(), self.hidden.in_place(), strict=True)
        return [self._flows_by_name.get(name, not in_place) for name, in_place in rows]

    # --- running steps without tape

    def advance(self, start: int, stop: int) -> None:
        """Run steps [start, stop), keeping nothing but the state."""
        self.run_untaped(start, stop)
        if not self.proof.always:  # else that was done at every step
            self._note_state(stop)

    def run_untaped(self, start: int, stop: int) -> list[Any]:
        """Run steps [start, stop) in the way in which first runs without a tape are run; returns the last output."""
        with_grad = self._tapes_always or (self._first_runs and self.proof.compares_graphs)
        self._flags_now = self._flags_now if with_grad else None
        return (self._run_dropping_tapes if with_grad else self.run_plainly)(start, stop)

    def run_plainly(self, start: int, stop: int) -> list[Any]:
        """Run steps [start, stop) without grad; returns the leaves of the last one's output."""
        f, carry, always, stays = self.stepper.f, self.carry, self.proof.always, self.shared.stays
        watch = self.stepper.watching(start, self.leaves) if self._first_runs else None
        k, take, ran = start, self._take if self._first_runs else None, 0
        try:
            with torch.no_grad():
                for x in self.inputs.rows(start, stop):
                    y = None  # the output of the step before is not held while this one runs
                    carry, y = f(carry, x)
                    if watch is not None:
                        watch(k, carry)
                    if take is not None:
                        take(k, y)
                    if stays:
                        self.shared.ran(k, self.outputs.leaves(k, y))
                    if always:
                        self.leaves = self.stepper.leaves(k, carry)
                        self._note_state(k + 1)
                    k, ran = k + 1, ran + 1
                    # Now and then, for a look takes about as long as a small step.
                    if take is not None and not ran & (ran - 1) and self._has_graph(k - 1, carry):
                        break
        except Exception:
            self._find_bad_carry(carry)  # was it because of what the step before returned?
            raise
        self._find_bad_carry(carry)
        self._arrive(k - 1, carry)
        outputs = self.outputs.leaves(k - 1, y)
        self.shared.note(k, self.state(), outputs)
        if self._first_runs and self._has_graph(k - 1, carry):  # the step turns grad on by itself
            self._turn_grad_on()
        return outputs if k == stop else self._run_dropping_tapes(k, stop)

    def _turn_grad_on(self) -> None:
        """Run steps with grad from here on, and follow through which parts of the state gradients flow."""
        self.follow_flow()
        # Which of those that have none now would have one with grad is not seen, so all of them may.
        may_flow = [True] * len(self.leaves) + self._hidden_flags()
        self._flags_now = [may and is_differentiable(leaf) for may, leaf in zip(may_flow, self.state(), strict=True)]
        self._flags_are_exact = False
        self.detach_state()

    def _has_graph(self, k: int, carry: Any) -> bool:
        """Whether the state after step k, which ran without grad, has a graph nevertheless."""
        return any(map(has_gradient, (*self.stepper.leaves(k, carry), *self.hidden.leaves())))

    def _run_dropping_tapes(self, start: int, stop: int) -> list[Any]:
        """The same for steps that need grad, or whose graphs are compared: with tapes, which are dropped at once."""
        outputs: list[Any] = []
        for k in range(start, stop):
            self.tape(k, k + 1)
            outputs = self.last_output
            self.last_output = []
            self.detach_state()
        return outputs

    def run_carefully(self, k: int, x: Any) -> Any:
        """Run step k with every check, in the grad mode that is on; returns its output."""
        self.carry, self.leaves, y = self.stepper.run(k, self.carry, self.leaves, x)
        self._form = self.stepper.later.form
        return y

    def _find_bad_carry(self, carry: Any) -> None:
        """Say at which step the carry got another form, if it has one.

        To look at every step would take longer than many a step does, so only the last carry of a run is looked at; if
        it is wrong, the loop is run once more, with care.
        """
        if self._first_runs and not self.stepper.fits(carry):
            self.restart()
            self._run_again_carefully()

    def _run_again_carefully(self) -> None:
        """Run from the start with care, keeping nothing: the step that is at fault raises its error."""
        with torch.no_grad():
            for k, x in enumerate(self.inputs.rows(0, self.length)):
                recording.count(probe=1)
                self.run_carefully(k, x)

    # --- running steps with their tape

    def tape(self, start: int, stop: int, *, put: bool = True, onto: Piece | None = None) -> Piece:
        """Run steps [start, stop) from the current state under grad; `last_output` is left with the last one's.

        The outputs of first runs are handed over, unless `put` says that somebody else does it. With `onto`, the piece
        that ends here, the result is that piece made longer.
        """
        put = put and self._first_runs
        with torch.enable_grad(), self.captured.in_place_of():
            piece = self._begun(start) if onto is None else onto
            # Most of all runs are reruns with one tensor for an output. Of those only the edge is noted, once the first
            # output of the piece was seen to have that form.
            note = self._noting(piece, put=put) if self._first_runs or not self._wants_only_edges() else None
            only_edges = note is None and bool(piece.outputs)
            prove = self.proof.output
            f, walk, counts, xs = self.stepper.taping, self._walk, self._walk.node_counts, piece.xs
            k, carry, last = start, self.carry, self.length - 1
            due, mark = walk.next_due(k, last), now()
            for x in self.inputs.rows(start, stop, xs):
                ends = None
                if k == due:
                    ends, due = self._graph_ends(k, carry, xs), walk.next_due(k + 1, last)
                y = None  # the output of the step before is not held while this one runs
                before = carry
                carry, y = f(before, x)
                if only_edges:
                    prove(k, [y])
                    piece.add_edge(k, y)
                elif note is not None:
                    note(k, carry, y)
                else:
                    only_edges = self._first_edge(piece, k, y)
                began, mark = mark, now()
                if ends is not None or mark - began not in counts:
                    self._check_graph(piece, k, before, carry, y, ends, began)
                    counts.add(mark - began)
                k += 1
            self._arrive(stop - 1, carry)
        self._end_piece(piece, stop, y)
        return piece

    def _begun(self, start: int) -> Piece:
        """A piece of no steps yet, from the current state, which becomes its root."""
        if self._first_runs and not self._learning:
            self.hidden.look()
        since = now()  # before the root is made: nodes that this takes are the piece's own
        starts = self.root_state(start)
        exact = self._flags_are_exact and self._flags_now is not None and len(self._flags_now) == len(starts)
        return Piece(start, start, since, starts, [], [], [], exact=exact)

    def _end_piece(self, piece: Piece, stop: int, y: Any) -> None:
        """The piece ends at `stop`, whose state is current; `y` is the output of its last step."""
        self.last_output = self.outputs.leaves(stop - 1, y)
        if self._first_runs and not self._learning:
            self.hidden.look()
        state = self.state()
        self.shared.note(stop, state, self.last_output)
        piece.stop, piece.ends = stop, edges_of(state)
        usual = self._usual_names
        piece.names = usual if len(usual) == len(state) else self._position_names()
        if self._first_runs and not self._learning:
            self._note_outputs(piece)
        if self._flags_now is not None or not piece.start:
            self._follow(piece.ends)
        if self.proof.compares_graphs:
            self._note_graph(piece)

    def _follow(self, ends: list[GradientEdge | None]) -> None:
        """Take note through which positions of the current state gradients flow."""
        self._flags_now = flags = [edge is not None for edge in ends]
        if self._follows_flow:
            self._flows(flags)

    def _note_graph(self, piece: Piece) -> None:
        """Compare the graph of a piece of one step with that of its first run, or take note of it."""
        ends = edge_set([*piece.xs, *self.captured.tensors]).union(self.captured.edges, piece.begin())
        ends.update(origin[0] for origin in self.hidden.origins() if origin is not None)
        outputs = [column[-1][1] if column and column[-1][0] == piece.stop - 1 else None for column in piece.outputs]
        carry, hidden = piece.ends[: len(self.leaves)], piece.ends[len(self.leaves) :]
        # Hidden state that begins to change later is not among the state of earlier steps.
        changed = [edge for edge in hidden if edge is not None and edge not in ends]
        graph = graph_of([*outputs, *carry, *changed], ends, piece.since, self.proof.sample)
        self.proof.graph(piece.stop - 1, graph)

    def _wants_only_edges(self) -> bool:
        """Whether nothing has to be known of a rerun's output but where its cotangent enters."""
        outputs = self.outputs
        return outputs.is_tensor and not (self.proof.always or outputs.in_step_order or self.shared.stays)

    def _first_edge(self, piece: Piece, k: int, y: Any) -> bool:
        """Note the edge of the first output of a piece, a single tensor, as those of the others are noted then."""
        [leaf] = self.outputs.leaves(k, y)
        self.proof.output(k, [leaf])
        piece.outputs = [[]]
        piece.add_edge(k, leaf)
        return True

    def _noting(self, piece: Piece, *, put: bool) -> Callable[[int, Any, Any], None]:
        """What is done with the carry and the output of each step of a piece, where more is wanted than edges."""
        outputs, in_order, stays = self.outputs, self.outputs.in_step_order, self.shared.stays
        checks = self.proof.always and not self._learning  # not before it is known what the state consists of
        watch = self.stepper.watching(piece.stop, self.leaves) if put else None

        def note(k: int, carry: Any, y: Any) -> None:
            if watch is not None:
                watch(k, carry)
            leaves = outputs.leaves(k, y)
            if not in_order:  # else each was added up before it could be detached
                piece.forget_cut_off()
                piece.latest = [entry for entry in piece.latest if stays and entry.tensor() is not None]
                rows = enumerate(leaves)
                piece.latest += [LatestOutput(weakref.ref(leaf), m, k) for m, leaf in rows if has_gradient(leaf)]
            if stays:
                self.shared.ran(k, leaves)
            if put:
                self._put(k, leaves)
            else:
                self.proof.output(k, leaves)
            if checks:
                self.leaves = self.stepper.leaves(k, carry)
                self._note_state(k + 1)
            if not piece.outputs:
                piece.outputs = [[] for _ in leaves]
            for leaf, column in zip(leaves, piece.outputs, strict=True):
                if has_gradient(leaf):
                    # A running sum adds an output as soon as its step is over. A view made here, the last node of the
                    # step, is pulled back when that addition would be: after all that later steps add to the output.
                    # At the bare output, the cotangent would be there before any of that.
                    column.append((k, edge_of(leaf.view_as(leaf) if in_order else leaf)))

        return note

    def _graph_ends(self, k: int, carry: Any, xs: list[torch.Tensor]) -> set[GradientEdge]:
        """Where the graph of step k, which is about to run from `carry`, may end."""
        given = xs[len(xs) - len(self.inputs.differentiable) :]
        return edge_set([*self.stepper.leaves(k - 1, carry), *self.hidden.leaves(), *given])

    def _check_graph(
        self, piece: Piece, k: int, before: Any, carry: Any, y: Any, ends: set[GradientEdge] | None, began: int
    ) -> None:
        """Refuse step k, which has just run, if its graph reaches what is neither given nor captured."""
        results = [*self.stepper.leaves(k, carry), *self.hidden.leaves(), *self.outputs.leaves(k, y)]
        if ends is not None and not strangers(edge_set(results), ends.union(self.captured.edges), began):
            return
        # Not foreseen, or state that began to change inside this piece: all the way back to where the piece began.
        made = self._made_inside([*self.stepper.leaves(k - 1, before), *results])
        ends = edge_set([*piece.xs, *self.captured.targets, *made])
        self._walk.check(k, results, ends.union(self.captured.edges, piece.begin()), piece.since, self._since)

    def _made_inside(self, results: list[Any]) -> list[torch.Tensor]:
        """Leaves among what a step was given and returned that steps have made (`x.detach().requires_grad_()`)."""
        leaves = [
            leaf for leaf in results if has_gradient(leaf) and leaf.is_leaf and not isinstance(leaf, nn.Parameter)
        ]
        outside = {id(tensor) for _, tensor in self._things.tensors()} if leaves else set()
        return [leaf for leaf in leaves if id(leaf) not in outside]

    def has_made_leaves(self, piece: Piece | None) -> bool:
        """Whether there are leaves in the current state that the piece ending there has made, not handed on."""
        starts = [] if piece is None else piece.starts
        return any(leaf.is_leaf and edge_of(leaf) not in starts for leaf in filter(has_gradient, self.state()))

    def check_tape(self, stop: int) -> None:
        """Compare the end of a tape with first runs, or take note of it; the last output is let go."""
        self._note_state(stop)
        self.last_output = []

    # --- first runs and reruns

    def _put(self, k: int, outputs: list[Any]) -> None:
        """Hand over the output of step k's first run; one that was handed over before is let go."""
        self.proof.output(k, outputs)
        if k >= self._put_already:
            self._put_already = k + 1
            self.outputs.put(k, self.inputs.place(k), outputs)
            if self.progress is not None:
                self.progress.update(1)

    def _take(self, k: int, y: Any) -> None:
        """`_put` for the output of a step that ran without grad."""
        self.proof.output(k, [y] if self.outputs.is_tensor else self.outputs.leaves(k, y))
        if k >= self._put_already:
            self._put_already = k + 1
            self.outputs.take(k, self.inputs.place(k), y)
            if self.progress is not None:
                self.progress.update(1)

    def _note_state(self, step: int) -> None:
        self.proof.state(step, self.state())

    def end_first_runs(self, snapshots: Iterable[Snapshot]) -> list[Any]:
        """From here on every run is a rerun, from one of these snapshots; returns the leaves of the final state."""
        self.hidden.look()
        for snapshot in (self.begin, *snapshots):
            self.hidden.complete(snapshot.hidden)
        for flags in (self.first_flags, self.given_flags):
            flags += [False] * (len(self.begin.all_leaves()) - len(flags))
        states = zip(self.random.mark(), self.random.start, strict=True)
        self._draws = any(state is not first for state, first in states)
        self._first_runs = False
        self._look = {}
        finals = self.state()
        self.final_flags = self._root_flags(self.length, len(finals))
        self.forget_carry()
        return _detached(finals)

    def results(self, finals: list[Any]) -> list[Any]:
        """The results of outputs; where the last output is all that counts and part of the final state, it is that."""
        results = self.outputs.results()
        if self.outputs.only_last:
            for entry in reversed(self.shared.at(self.length)):
                if entry.step == self.length - 1:
                    results[entry.leaf] = finals[entry.position]
        return results

    @contextmanager
    def rerunning(self) -> Iterator[None]:
        """Inside, steps find what first runs found; afterwards modules and generators are as they were before."""
        aside = self.random.aside() if self._draws else nullcontext()
        with self.ambient.again(), self.hidden.aside(), aside, self.repeating():
            yield

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Inside, steps know that they are run again, and gradients that they add by themselves do not count twice."""
        turn = self.stepper.turn
        before, turn.again = turn.again, True
        try:
            with gradients_aside(self._graded), recording.recomputing():
                yield
        finally:
            turn.again = before

    @property
    def already(self) -> int:
        """How many steps have run although the first sweep is not over; those that it runs after a change of plan."""
        return self._put_already if self._first_runs else 0

    def again(self, k: int) -> AbstractContextManager[None]:
        """A context for step k, which knows that it is run again if it is."""
        return self.repeating() if k < self.already else nullcontext()

    def refuse_changed(self) -> None:
        """Refuse a loop in which a captured tensor was changed."""
        if changed := self.captured.changed():
            raise CheckpointError(
                f"the steps change {', '.join(changed)} in place, so reruns would not repeat; change it after the "
                "backward"
            )

    def refuse_collected(self, since: int) -> None:
        """Refuse steps that have put tensors of their graphs outside, where gradients through them would be lost."""
        if not self.proof.never and (names := collected(self._things, since)):
            raise CheckpointError(
                f"the step puts tensors with a gradient into {', '.join(names)}, through which it would be lost; "
                "return them as outputs instead, or put them there detached; if a later step reads them, make them "
                "part of the carry, or attributes of a module"
            )

    # --- what the backward asks

    def start_tensors(self) -> list[torch.Tensor]:
        """The tensors in the state before the first step to which gradients flow."""
        origins = [None if origin is None else origin[1] for origin in self.hidden.origins()]
        rows = zip((*self.stepper.init, *origins), self.given_flags, strict=False)
        return [tensor for tensor, flag in rows if flag]

    def differentiated(self) -> list[torch.Tensor]:
        """The tensors to which gradients flow: of the state before the first step, inputs, and captured ones."""
        return [*self.start_tensors(), *self.inputs.differentiable, *self.captured.tensors]

    def pullback(
        self, grads: list[torch.Tensor | None], xs: list[torch.Tensor], length: int, flags: list[bool] | None = None
    ) -> Pullback:
        """A backward that begins with these cotangents of outputs and state after `length` steps, for these inputs.

        `flags` tell through which positions of that state gradients can come back; by default through all.
        """
        return Pullback(self._parts, length, grads, xs, flags)

    def pulled(self, piece: Piece) -> None:
        """A piece was pulled back."""
        self.shared.forget(piece.stop)
        count = piece.stop - piece.start
        recording.count(backward=count)
        if self.progress is not None and piece.start < self._lowest_pulled:  # a backward may begin again
            self.progress.update(self._lowest_pulled - piece.start)
            self._lowest_pulled = piece.start

    # --- learning from the first steps

    def tape_first(self) -> tuple[Piece, Watch]:
        """Run step 0 under grad, with every check; returns its tape, and what it was seen to use.

        Its graph is not walked: what the step closes over is about to be learned from it.
        """
        self.first_flags = [has_gradient(leaf) for leaf in self.stepper.init]
        self._look = self._things.look()
        watch = Watch()
        with self.hidden.meeting_modules(), watch, self.stepper.without_lean(), torch.enable_grad():
            piece = self._begun(0)
            y = self.run_carefully(0, next(self.inputs.rows(0, 1, piece.xs)))
        with torch.enable_grad():
            self._noting(piece, put=False)(0, self.carry, y)
        self._end_piece(piece, 1, y)
        return piece, watch

    def learn_first(self, piece: Piece, watch: Watch, captures: tuple[torch.Tensor, ...]) -> bool:
        """Learn what step 0 closes over, keeps hidden and draws; returns whether its tape can serve as one.

        `captures` are tensors that it is said to close over.
        """
        self.hidden.look()
        self.hidden.complete(self.begin.hidden)
        self.random.meet_devices()
        for generator, state in watch.generators.values():
            self.random.add(generator, state)
        self.begin.random = self.random.start
        self._tapes_always |= watch.needs_grad or any(map(_picks_kernels_by_grad, self.hidden.modules))
        self._graded = list(watch.graded.values())
        origins = self.hidden.origins()
        self.first_flags += [origin is not None for origin in origins]
        self._learn_flow(piece, self.begin)
        given = edge_set([*piece.xs, *self._made_inside([*self.state(), *self.last_output])]).union(piece.begin())
        given.update(origin[0] for origin in origins if origin is not None)
        self._capture(piece, given, watch, captures)
        self._find_given(piece, origins)
        _refuse_objects(self.carry)
        self.refuse_collected(piece.since)
        self._note_first_graph(piece)
        # A graph that runs on into what was there before cannot serve as a tape.
        return not self.captured.dependent and not any(origins)

    def _find_given(self, piece: Piece, origins: list[tuple[GradientEdge, torch.Tensor] | None]) -> None:
        """Take no gradient to what was there before step 0 if none flows from that step's results.

        The graph that made it may have been freed by a backward, and would be kept alive by this loop's.
        """
        carry = piece.starts[: len(self.stepper.init)]
        reached = strangers(piece.roots(), set(self.captured.edges), piece.since)
        # One that sits in several places is given once: its gradient comes back at the first.
        firsts = [edge if carry.index(edge) == k else None for k, edge in enumerate(carry)]
        self.given_flags = [edge in reached for edge in (*firsts, *(origin and origin[0] for origin in origins))]

    def learn(self, piece: Piece, snapshots: list[Snapshot]) -> bool:
        """Learn from a later step; returns whether gradients flow through the same parts of the state as before it.

        `snapshots` are those of all steps so far: they get the values that newly found hidden state had until now. The
        last is that of the state from which the piece was taped.
        """
        self.hidden.look()
        for snapshot in snapshots:
            self.hidden.complete(snapshot.hidden)
        before, by_name = self.profile.state, dict(self._flows_by_name)
        self._learn_flow(piece, snapshots[-1])
        self.refuse_collected(piece.since)
        self._note_first_graph(piece)
        return self.profile.state == before or (self._flows_by_name == by_name and self._goes_by_name())

    def _goes_by_name(self) -> bool:
        """Whether there are other positions at every step, as where a list grows, and those of one name are alike."""
        flags = set(zip(self._position_names(), self.profile.state, strict=True))
        return self._form_varies and len(flags) == len(self._flows_by_name)

    def _note_first_graph(self, piece: Piece) -> None:
        """Take note of the graph and the state of one of the first steps, as long as it is not known what moves."""
        if not self.proof.never:
            self._note_graph(piece)
            self._note_state(piece.stop)

    def _learn_flow(self, piece: Piece, snapshot: Snapshot) -> None:
        """Add to the profile through which parts of state and output gradients flow at this step."""
        # What was found hidden only now was no root of this piece, and is part of the state at its end.
        piece.starts += [None] * (len(snapshot.all_leaves()) - len(piece.starts))
        state = self.state()
        piece.ends = edges_of(state)
        self._flags_now = [edge is not None for edge in piece.ends]
        self._flows(self._flags_now)
        self._note_outputs(piece)
        self.shared.note(piece.stop, state, self.last_output)

    def _note_outputs(self, piece: Piece) -> None:
        """Add to the profile which outputs of these steps have gradients."""
        known, gradients = self.profile.outputs, [bool(column) for column in piece.outputs]
        known[:] = [new or old for new, old in zip(gradients, known or gradients, strict=True)]

    def _flows(self, flags: list[bool]) -> None:
        """Add to the profile through which positions of the state gradients flow at a step."""
        profile = self.profile
        for name, flag in zip(self._position_names(), flags, strict=True):
            self._flows_by_name[name] = flag or self._flows_by_name.get(name, False)
        if len(flags) == len(profile.state):
            flags = [new or old for new, old in zip(flags, profile.state, strict=True)]
        else:
            self._form_varies |= bool(profile.state)
        profile.state = flags

    def _capture(
        self, piece: Piece, given: set[GradientEdge], watch: Watch, captures: tuple[torch.Tensor, ...]
    ) -> None:
        """Capture what step 0 closes over: what is named, parameters of its modules, and what its graph reaches."""
        captured, hidden = self.captured, self.hidden
        for tensor in captures:
            if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
                raise InputError("captures= is for tensors that need a gradient and that the step closes over")
            captured.add(tensor, "a tensor named in captures=")
        for module in hidden.modules:
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad:
                    captured.add(parameter, hidden.parameters[id(parameter)])
        captured.learn(piece.roots(), given, watch, hidden.finds.labels)
        hidden.captured = edge_set(captured.tensors)
        captured.settle()
        named = (tensor for _, tensor in self._things.tensors() if tensor.requires_grad)
        if any(edge_of(tensor) not in captured.edges for tensor in named):
            # The step refers to a tensor that it may use later, and then its gradient would be lost.
            self._walk.always()

    def snapshot_copied(self) -> Snapshot:
        """The current state, copied, as long as it is not known what steps change in place."""
        return Snapshot(self.leaves, self.hidden.read(self.leaves, copy=True), self.random.mark(), self._flags_now)

    def put_last(self, k: int) -> None:
        """Hand over the output of step k, which was taped last."""
        self._put(k, self.last_output)

    def let_go(self) -> list[Any]:
        """Let go of the last tape: cut the state off it, forget the output; returns the leaves of the state."""
        self.detach_state()
        self.last_output = []
        return self.state()

    def end_learning(self, *, settled: bool) -> None:
        """It is known what belongs to the state; what changes beside it from here on is refused.

        Where it is not settled through which parts of it gradients flow, that is followed at every step.
        """
        if not settled or self._may_begin():
            self.follow_flow()
        self.let_go()
        self.hidden.settle()
        self._usual_names = self._position_names()
        if not self.hidden.may_collect():  # else outputs may come to stay in the state later
            self.shared.settle()
        self._learning = False
        self.find_moving()

    def _may_begin(self) -> bool:
        """Whether there are outputs that had no gradient so far and may have one later, as after a burn-in.

        Whether the result has one has to be known before the backward, and only steps that run with grad tell.
        """
        if self.outputs.only_last or not self.differentiated():
            return False
        rows = zip(self.last_output, self.profile.outputs, strict=False)
        return any(is_differentiable(leaf) and not flag for leaf, flag in rows)

    def find_moving(self) -> None:
        """Find out what outside has moved while steps ran so far; from here on graphs are compared if anything has."""
        self.proof.moving = moved(self._look, self._things.look())

    def is_same_without_grad(self, snapshot: Snapshot, k: int) -> bool:
        """Whether step k, the last one that ran, computes the same without grad; `snapshot` is the state before it."""
        leaves, form = self.leaves, self._form
        with self.hidden.aside(), self.random.aside(), self.shared.aside(), self.repeating():
            self.resume(k, snapshot)
            self.random.restore(snapshot.random)
            try:
                with self.proof.at_once():
                    self.proof.output(k, self.run_plainly(k, k + 1))
                    self._note_state(k + 1)
            except CheckpointError:
                return False
            finally:
                self._set_carry(leaves, form)
        return True

    @property
    def may_differ_without_grad(self) -> bool:
        """Whether steps are run without grad, and it would be seen and not disturb anybody to try whether they may."""
        return not (self._tapes_always or self.proof.never or self.proof.moving)

    def forget_probe(self) -> None:
        """Put everything back after steps that were run to be measured, and warn of what cannot be put back."""
        self.restart()
        warn_of_moved(self._things, self._look)

    # --- what turns out later

    def forget_first_runs(self) -> None:
        """Go back to the beginning as if no step had run yet; what was learned stays."""
        self.shared.clear()
        self.proof.forget()
        self._put_already = 0
        self.restart()

    def use_step(self, f: StepFunction) -> None:
        """Run another function, one that does the same, from here on."""
        self.stepper.f = f

    def tape_always(self) -> None:
        """Run steps with grad from here on, even where no tape is kept."""
        self._tapes_always = True

    def follow_flow(self) -> None:
        """It is not settled through which parts of the state gradients flow: find out at every step, with its tape."""
        self._follows_flow = self._tapes_always = True

    def let_flow(self, positions: list[int], names: list[str]) -> bool:
        """Gradients flow through positions of the state where none were seen to; False if that was known.

        `names` are those of all positions of that state, which may have another form than it has now.
        """
        flags, by_name = self.profile.state, self._flows_by_name
        by_position = len(flags) == len(names) and not self._form_varies
        known = all(flags[k] if by_position else by_name.get(names[k], False) for k in positions)
        for k in positions:
            by_name[names[k]] = True
            if k < len(flags):
                flags[k] = True
        return not known

    def end_at(self, length: int) -> None:
        """The loop turns out to end after `length` steps."""
        self.length = length

    def end_progress(self) -> None:
        """A second backward is not progress."""
        self.progress = None

    def finish(self, finals: list[Any]) -> Any:
        """Leave the final hidden state in the modules, and forget how the loop began; returns the final carry."""
        form = self.stepper.later.form
        self.hidden.forget_start()
        self.hidden.finish(finals[form.size :])
        return form.unflatten(finals[: form.size])


def _detached(leaves: list[Any]) -> list[Any]:
    """The leaves without their graph; a tensor that sits in several places stays one tensor."""
    detached = {id(leaf): leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return [detached.get(id(leaf), leaf) for leaf in leaves]


def _refuse_objects(carry: Any) -> None:
    """Refuse a carry with objects that have tensors with a gradient, of which the loop would see nothing."""
    for leaf in leaves_of(carry):
        parts = [] if isinstance(leaf, torch.Tensor | nn.Module) else list(getattr(leaf, "__dict__", {}).values())
        if isinstance(leaf, dict | list | tuple | deque):  # of a class of the user's
            parts += leaf.values() if isinstance(leaf, dict) else leaf
        if any(tensor.requires_grad for tensor in tensors_of(parts)):
            kind = type(leaf).__name__
            raise CheckpointError(
                f"the carry has a {kind}, whose tensors the loop does not see, so their gradient would be lost; make "
                f"{kind} a dataclass with nothing but its fields, return its tensors in a tuple or a dict, or keep the "
                "object as an attribute of a module"
            )


def _picks_kernels_by_grad(module: nn.Module) -> bool:
    """Whether torch runs the module by other kernels where no gradient is wanted, which round differently."""
    by_mode = isinstance(module, nn.TransformerEncoderLayer | nn.MultiheadAttention) and not module.training
    return by_mode or isinstance(module, nn.LSTM)
