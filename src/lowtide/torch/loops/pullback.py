"""The backward of a loop: cotangents pulled back through one piece of tape after the other.

Every sum is made in the plain loop's order, so that gradients equal the plain loop's to the last bit. Autograd runs
nodes in descending order of their making, and adds what arrives at a tensor in that order:

- A captured tensor's running gradient enters each piece first, as a root: roots are added before any node runs.
- An output that *is* part of a state (a GRU returning `(h, h)`, a window of the last outputs that is carried along)
  gets its cotangent from a stack, before any later step's contributions: so it is handed in at the start of the topmost
  piece that has it in its state. `Shared` knows, for each place where a piece starts, which outputs of which steps are
  parts of the state there; they are told by identity. Outputs of steps further back than the last are looked for only
  if the first steps show that they stay in the state.
- A tensor that sits at several positions of a state is one leaf.
- A running sum's cotangent arrives after the next step's contributions: the engine makes a `y.view_as(y)` where the
  sum is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from lowtide.errors import CheckpointError
from lowtide.torch.loops.inputs import Inputs
from lowtide.torch.loops.outputs import Outputs
from lowtide.torch.memory import recording
from lowtide.torch.state.capture import Captured, edge_of, gradients


@dataclass(slots=True)
class Piece:
    """The tape of steps [start, stop): where gradients enter its graph and where they come out.

    Pieces lie end to end and are pulled from the last to the first: the state that one starts from, a leaf of its own
    graph, is the state at which the one below it ends. A piece whose last step is current may be made longer.
    """

    start: int
    stop: int
    since: int  # where its nodes begin in the order of their making
    starts: list[torch.Tensor | None]  # the state at start, None where no gradient flows
    ends: list[GradientEdge | None]  # the state at stop
    outputs: list[list[tuple[int, GradientEdge]]]  # for each output leaf, (step, where its cotangent enters), by steps
    xs: list[torch.Tensor]  # each step's own inputs in a row

    def roots(self) -> list[GradientEdge]:
        """Wherever a gradient may enter."""
        edges = [edge for edge in self.ends if edge is not None]
        return edges + [edge for column in self.outputs for _, edge in column]


@dataclass(slots=True)
class Profile:
    """What the probe steps taught about all steps."""

    state: list[bool]  # for each position of the state after step 0, whether gradients flow through it
    outputs: list[bool]  # for each output leaf


@dataclass(frozen=True, slots=True)
class SharedOutput:
    """Output leaf `leaf` of step `step` is what sits at `position` of the state."""

    leaf: int
    step: int
    position: int


class Shared:
    """By step, the outputs of steps before it that are parts of the state there.

    `ran`, `moved` and `resumed` follow outputs that stay in the state for longer than one step; to be called only
    where `stays` says that some do.
    """

    def __init__(self) -> None:
        self.stays = True  # until the first steps have shown otherwise
        self._by_step: dict[int, list[SharedOutput]] = {}
        # (output, leaf, step), weakly: an output that nobody has any more is in no state.
        self._recent: list[tuple[weakref.ref[torch.Tensor], int, int]] = []

    def at(self, step: int) -> list[SharedOutput]:
        """What was noted for the state at `step`."""
        return self._by_step.get(step, [])

    def note(self, step: int, state: list[Any], outputs: list[Any]) -> None:
        """The state at `step` is reached, and `outputs` are those of the step before."""
        if not outputs:
            return
        known = [(output, m, step - 1) for m, output in enumerate(outputs)]
        if self.stays:
            known += [(output, m, k) for ref, m, k in self._recent if k < step - 1 and (output := ref()) is not None]
        self._by_step[step] = [
            SharedOutput(m, k, position)
            for position, leaf in enumerate(state)
            if isinstance(leaf, torch.Tensor)
            for output, m, k in known
            if output is leaf
        ]

    def ran(self, step: int, outputs: list[Any]) -> None:
        """A step ran; its outputs may stay in the state for longer."""
        self._recent = [entry for entry in self._recent if entry[0]() is not None]
        self._recent += [(weakref.ref(y), m, step) for m, y in enumerate(outputs) if isinstance(y, torch.Tensor)]

    def moved(self, old: list[Any], new: list[Any]) -> None:
        """Parts of the state were replaced by others that stand for them."""
        now = {id(a): b for a, b in zip(old, new, strict=True) if isinstance(b, torch.Tensor)}
        alive = [(output, m, k) for ref, m, k in self._recent if (output := ref()) is not None]
        self._recent = [(weakref.ref(now.get(id(output), output)), m, k) for output, m, k in alive]

    def resumed(self, step: int, state: list[Any]) -> None:
        """The state at `step` is current again."""
        self._recent = [(weakref.ref(state[entry.position]), entry.leaf, entry.step) for entry in self.at(step)]

    def settle(self) -> None:
        """The first steps are over: do outputs stay in the state for longer than one step."""
        self.stays = any(e.step < step - 1 for step, entries in self._by_step.items() for e in entries)

    def forget(self, step: int) -> None:
        """The piece that ends at `step` is done with."""
        self._by_step.pop(step, None)

    def clear(self) -> None:
        """Forget everything but whether outputs stay."""
        self._by_step.clear()
        self._recent.clear()


@dataclass(frozen=True, slots=True)
class LoopParts:
    """What a pullback has to know of its loop."""

    inputs: Inputs
    outputs: Outputs
    captured: Captured
    profile: Profile
    shared: Shared


class Pullback:
    """Cotangents on their way back through a loop of `length` steps.

    `grads` are those of the outputs and of the final state, by position; `names` tells what positions are called; `xs`
    are the inputs whose gradients are wanted. Between two pieces, `state` has the cotangents of the state there, and
    `captured` the gradients of what is captured, summed from the last step down to there.
    """

    def __init__(
        self,
        loop: LoopParts,
        length: int,
        names: Callable[[], list[str]],
        grads: list[torch.Tensor | None],
        xs: list[torch.Tensor],
    ) -> None:
        self._loop = loop
        self._length = length
        self._names = names
        count = len(loop.profile.outputs)
        self._outputs = grads[:count]
        self.state = grads[count:]
        self._expected = [True] * len(self.state)  # whether the piece above took in a gradient for this position
        self.captured: list[torch.Tensor | None] = [None] * len(loop.captured.targets)
        self._xs = xs
        self._x_grads: list[torch.Tensor | None] = [None] * len(xs)
        self._entered: set[tuple[int, int]] = set()  # outputs (leaf, step) whose cotangent is in already

    def xs(self) -> list[torch.Tensor | None]:
        """Gradients of the inputs; None for one that no gradient reached, as in the plain loop."""
        return self._x_grads

    def pull(self, piece: Piece, *, keep: bool = False) -> None:
        """Go back through one piece and free its tape, unless it is to be kept."""
        # What arrives at one tensor from several roots is added in the order of the roots. That of the plain loop: what
        # the caller does with the final state comes after the stacks were made, so its cotangents come first; then
        # those of the stacks; then what all later steps have added to a captured tensor.
        roots: list[Any] = []
        cotangents: list[torch.Tensor] = []
        self._enter_state(piece, roots, cotangents)
        self._enter_outputs(piece, roots, cotangents)
        for arrives, total in zip(self._loop.captured.edges, self.captured, strict=True):
            if total is not None:
                roots.append(arrives)
                cotangents.append(total)
        targets = self._loop.captured.targets
        starts = {id(leaf): leaf for leaf in piece.starts if leaf is not None}
        wanted = [*targets, *starts.values(), *piece.xs]
        grads: tuple[torch.Tensor | None, ...] = (None,) * len(wanted)
        if roots and wanted:
            with self._loop.captured.without_hooks():
                grads = gradients(roots, wanted, cotangents, keep=keep)
        self.captured = list(grads[: len(targets)])
        # From here on these are the gradients that the plain loop has too; while they were made they came on top.
        recording.leave_out(self.captured, from_now=True)
        after = len(targets) + len(starts)
        arrived = dict(zip(starts, grads[len(targets) : after], strict=True))
        # A tensor at several positions has one gradient, which enters the piece below once.
        self.state = [None if leaf is None else arrived.pop(id(leaf), None) for leaf in piece.starts]
        self._expected = [leaf is not None for leaf in piece.starts]
        if self._xs:
            self._take_x_grads(piece, grads[after:])

    def _enter_state(self, piece: Piece, roots: list[Any], cotangents: list[torch.Tensor]) -> None:
        """Cotangents of the state at which the piece ends."""
        for position, edge in enumerate(piece.ends):
            if edge is None:
                continue
            if not self._expected[position]:
                raise CheckpointError(self._lost(piece, position))
            cotangent = self.state[position]
            if cotangent is not None:
                roots.append(edge)
                cotangents.append(cotangent)

    def _enter_outputs(self, piece: Piece, roots: list[Any], cotangents: list[torch.Tensor]) -> None:
        """Cotangents of outputs, in the order of the plain loop's stacks: the last leaf's first, step by step.

        Outputs of steps below the piece that are parts of the state at its start come in here; pieces below leave them
        out.
        """
        loop, place = self._loop, self._loop.inputs.place
        last = place(self._length - 1)
        below = self._outputs_below(piece)
        for m in range(len(piece.outputs) - 1, -1, -1):
            grad, entries = self._outputs[m], piece.outputs[m]
            if entries and not loop.profile.outputs[m]:
                raise CheckpointError(
                    f"the output {loop.outputs.names[m]} has a gradient at step {entries[0][0]:,}, but at the first "
                    "and last steps it had none; make it the same at each step"
                )
            if grad is None:
                continue
            if self._entered:
                entries = [entry for entry in entries if (m, entry[0]) not in self._entered]
            entries = below.get(m, []) + entries
            if below or place(0):  # a stack's order is that of places
                entries = sorted(entries, key=lambda entry: place(entry[0]))
            rows = loop.outputs.cotangents(grad, [place(k) for k, _ in entries], last)
            for (_, edge), cotangent in zip(entries, rows, strict=True):
                if cotangent is not None:
                    roots.append(edge)
                    cotangents.append(cotangent)

    def _outputs_below(self, piece: Piece) -> dict[int, list[tuple[int, GradientEdge]]]:
        """By leaf, the outputs of steps below the piece that are in the state at its start, and not entered yet."""
        below: dict[int, list[tuple[int, GradientEdge]]] = {}
        if self._loop.outputs.in_step_order:  # a sum is made where its step is, and not after the loop
            return below
        for entry in self._loop.shared.at(piece.start):
            leaf = piece.starts[entry.position]
            if leaf is not None and (entry.leaf, entry.step) not in self._entered:
                self._entered.add((entry.leaf, entry.step))
                below.setdefault(entry.leaf, []).append((entry.step, edge_of(leaf)))
        return below

    def _take_x_grads(self, piece: Piece, grads: tuple[torch.Tensor | None, ...]) -> None:
        """Put the gradients of the steps' own inputs where they belong in those of the whole ones."""
        rest = iter(grads)
        for k in range(piece.start, piece.stop):
            place = self._loop.inputs.place(k)
            for q, xs in enumerate(self._xs):
                grad, buffer = next(rest), self._x_grads[q]
                if grad is None:
                    continue
                if buffer is None:
                    buffer = torch.zeros_like(xs, memory_format=torch.contiguous_format)
                    self._x_grads[q] = buffer
                    recording.leave_out([buffer])
                buffer[place] = grad

    def _lost(self, piece: Piece, position: int) -> str:
        names = self._names()
        name = names[position] if position < len(names) else f"part {position} of the state"
        return (
            f"{name} carries a gradient out of step {piece.stop - 1:,}, but did not at the first steps, so it would be "
            "lost; let it depend on the same things at each step"
        )
