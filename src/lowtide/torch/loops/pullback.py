"""The backward of a loop: cotangents pulled back through one piece of tape after another.

Every sum is taken in the plain loop's order, so that gradients equal the plain loop's to the last bit. Autograd runs
nodes in descending order of their creation, and adds what arrives at a tensor in that order:

- A captured tensor's running gradient enters each piece first, as a root: roots are added before any node runs.
- An output that *is* part of a state (a GRU returning `(h, h)`, a window of the last outputs that is carried along)
  gets its cotangent from a stack, before the contributions of any later step: so it enters at the start of the last
  piece that has it in its state. `Shared` knows, for each step at which a piece starts, which outputs of which steps
  are parts of the state there; they are recognised by identity. Outputs of steps before the last one are looked for
  only if the first steps show that outputs stay in the state.
- A tensor at several positions of a state is one leaf.
- A running sum's cotangent arrives after the next step's contributions: the runner makes a `y.view_as(y)` where the sum
  is taken, and the cotangent enters there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from lowtide.torch.loops.inputs import Inputs
from lowtide.torch.loops.outputs import Outputs
from lowtide.torch.memory import recording
from lowtide.torch.state.capture import Captured, edge_of, gradients, is_cut_off


class LatestOutput(NamedTuple):
    """An output of a step that may still be part of the state: leaf `leaf` of step `step`."""

    tensor: weakref.ref[torch.Tensor]
    leaf: int
    step: int


@dataclass(slots=True)
class Piece:
    """The tape of steps [start, stop): where gradients enter its graph and where they come out.

    Pieces lie end to end and are pulled back from the last to the first: the state that one starts from, a leaf of its
    own graph, is the state at which the piece before it ends. A piece at whose end the current state is may be made
    longer.
    """

    start: int
    stop: int
    since: int  # the sequence number from which on graph nodes are the piece's own
    starts: list[GradientEdge | None]  # the state at start by position, None where no gradient flows
    ends: list[GradientEdge | None]  # the state at stop, likewise
    outputs: list[list[tuple[int, GradientEdge]]]  # for each output leaf, (step, where its cotangent enters), by steps
    xs: list[torch.Tensor]  # the differentiable inputs of each step, step after step
    exact: bool = False  # whether it is known, and not only likely, that no gradient flows where `starts` have None
    names: list[str] = field(default_factory=list)  # those of the positions of the state at stop
    latest: list[LatestOutput] = field(default_factory=list)  # those that later steps may detach in place

    def add_edge(self, k: int, y: torch.Tensor) -> None:
        """Note where the cotangent of step k's output enters, which is a single tensor."""
        if self.latest:
            self.forget_cut_off()
            self.latest.clear()
        if y.requires_grad:
            self.outputs[0].append((k, edge_of(y)))
            self.latest.append(LatestOutput(weakref.ref(y), 0, k))

    def forget_cut_off(self) -> None:
        """Let no cotangent enter at outputs that were detached in place as parts of the state, as in the plain loop."""
        for output, leaf, step in self.latest:
            if (tensor := output()) is not None and not tensor.requires_grad:
                self.outputs[leaf] = [entry for entry in self.outputs[leaf] if entry[0] != step]

    def begin(self) -> Iterator[GradientEdge]:
        """Where gradients of the state at the start arrive."""
        return (edge for edge in self.starts if edge is not None)

    def roots(self) -> list[GradientEdge]:
        """All edges at which a gradient may enter."""
        edges = [edge for edge in self.ends if edge is not None]
        return edges + [edge for column in self.outputs for _, edge in column]


@dataclass(slots=True)
class Profile:
    """What the probed steps have shown about all steps."""

    state: list[bool]  # for each position of the state after a step, whether gradients flow through it
    outputs: list[bool]  # for each output leaf, likewise


@dataclass(frozen=True, slots=True)
class SharedOutput:
    """Output leaf `leaf` of step `step` is the tensor at `position` of the state."""

    leaf: int
    step: int
    position: int


class Shared:
    """For each step, the outputs of earlier steps that are parts of the state there.

    `ran`, `moved` and `resumed` follow outputs that stay in the state for longer than one step; they need to be called
    only if `stays` says that some do.
    """

    def __init__(self) -> None:
        self.stays = True  # assumed until the first steps have shown otherwise
        self._by_step: dict[int, list[SharedOutput]] = {}
        # (output, leaf, step). The references are weak: an output that has died is in no state.
        self._recent: list[tuple[weakref.ref[torch.Tensor], int, int]] = []

    def at(self, step: int) -> list[SharedOutput]:
        """The outputs that were recorded for the state at `step`."""
        return self._by_step.get(step, [])

    def note(self, step: int, state: list[Any], outputs: list[Any]) -> None:
        """Record which outputs are parts of the state at `step`; `outputs` are those of the step before."""
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
        """Follow the outputs of a step that ran: they may stay in the state for longer."""
        self._recent = [entry for entry in self._recent if entry[0]() is not None]
        self._recent += [(weakref.ref(y), m, step) for m, y in enumerate(outputs) if isinstance(y, torch.Tensor)]

    def moved(self, old: list[Any], new: list[Any]) -> None:
        """Follow outputs through a replacement of the state's leaves: each new leaf stands for the old one."""
        now = {id(a): b for a, b in zip(old, new, strict=True) if isinstance(b, torch.Tensor)}
        alive = [(output, m, k) for ref, m, k in self._recent if (output := ref()) is not None]
        self._recent = [(weakref.ref(now.get(id(output), output)), m, k) for output, m, k in alive]

    def resumed(self, step: int, state: list[Any]) -> None:
        """Follow the outputs in the state at `step`, which is current again."""
        self._recent = [(weakref.ref(state[entry.position]), entry.leaf, entry.step) for entry in self.at(step)]

    def settle(self) -> None:
        """Decide, after the first steps, whether outputs stay in the state for longer than one step."""
        self.stays = any(e.step < step - 1 for step, entries in self._by_step.items() for e in entries)

    def forget(self, step: int) -> None:
        """Discard the record for `step`, where a piece ends that has been pulled back."""
        self._by_step.pop(step, None)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A context for runs of which nothing is to be recorded."""
        held = dict(self._by_step), self._recent
        try:
            yield
        finally:
            self._by_step, self._recent = held

    def clear(self) -> None:
        """Discard everything except for whether outputs stay."""
        self._by_step.clear()
        self._recent.clear()


@dataclass(frozen=True, slots=True)
class LoopParts:
    """The parts of a loop that its pullback needs."""

    inputs: Inputs
    outputs: Outputs
    captured: Captured
    profile: Profile
    shared: Shared


class LateGradient(Exception):  # noqa: N818  (it is one only if the backward cannot begin again)
    """Gradients flow through parts of the state that had none while the first steps ran, at these positions.

    The backward begins again, with gradients for these parts.
    """

    def __init__(self, message: str, positions: list[int], names: list[str]) -> None:
        super().__init__(message)
        self.positions = positions
        self.names = names  # of all positions of that state


class Pullback:
    """Cotangents on their way back through a loop of `length` steps.

    `grads` are the cotangents of the outputs, then of the final state by position; `xs` are the inputs whose gradients
    are wanted. Between two pieces, `state` has the cotangents of the
    state there, and `captured` the gradients of captured tensors, summed from the last step down to there.
    """

    def __init__(
        self,
        loop: LoopParts,
        length: int,
        grads: list[torch.Tensor | None],
        xs: list[torch.Tensor],
        flags: list[bool] | None = None,
    ) -> None:
        self._loop = loop
        self._length = length
        count = len(loop.profile.outputs)
        self._outputs = grads[:count]
        self.state = grads[count:]
        # By position, whether what comes after the next piece had a leaf for a gradient there: a later piece, or at
        # first the caller, whom `flags` tells.
        self._expected = [True] * len(self.state) if flags is None else flags
        self.captured: list[torch.Tensor | None] = [None] * len(loop.captured.targets)
        self._xs = xs
        self._x_grads: list[torch.Tensor | None] = [None] * len(xs)
        self._entered: set[tuple[int, int]] = set()  # outputs (leaf, step) whose cotangent has entered a later piece

    def xs(self) -> list[torch.Tensor | None]:
        """The gradients of the inputs; None for one that no gradient reached, as in the plain loop."""
        return self._x_grads

    def pull(self, piece: Piece, *, keep: bool = False) -> None:
        """Pull back through one piece and free its tape, unless it is to be kept."""
        # What arrives at one tensor from several roots is added in the order of the roots, which has to be that of the
        # plain loop. What the caller does with the final state is done after the outputs are stacked, so its cotangents
        # come first; then those of the stacks; then the sums that later steps have added to captured tensors.
        roots: list[Any] = []
        cotangents: list[torch.Tensor] = []
        self._enter_state(piece, roots, cotangents)
        self._enter_outputs(piece, roots, cotangents)
        if not keep:  # where no cotangent enters, what an output's graph has saved is of no use
            piece.outputs = []
        for arrives, total in zip(self._loop.captured.edges, self.captured, strict=True):
            if total is not None:
                roots.append(arrives)
                cotangents.append(total)
        targets = self._loop.captured.targets
        starts = dict.fromkeys(piece.begin())
        wanted = [*targets, *starts, *piece.xs]
        grads: tuple[torch.Tensor | None, ...] = (None,) * len(wanted)
        if roots and wanted:
            with self._loop.captured.without_hooks():
                grads = gradients(roots, wanted, cotangents, keep=keep)
        self.captured = list(grads[: len(targets)])
        # From now on these replace the sums so far, which the plain loop holds too. While they were computed, both were
        # alive, and that counts.
        recording.leave_out(self.captured, from_now=True)
        after = len(targets) + len(starts)
        arrived = dict(zip(starts, grads[len(targets) : after], strict=True))
        # A tensor at several positions has one gradient, which enters the next piece once: `pop` leaves None for the
        # other positions.
        self.state = [None if edge is None else arrived.pop(edge, None) for edge in piece.starts]
        self._expected = [piece.exact or edge is not None for edge in piece.starts]
        if self._xs:
            self._take_x_grads(piece, grads[after:])

    def _enter_state(self, piece: Piece, roots: list[Any], cotangents: list[torch.Tensor]) -> None:
        """Add the cotangents of the state at which the piece ends."""
        late = [k for k, edge in enumerate(piece.ends) if edge is not None and not self._expected[k]]
        if late:
            raise LateGradient(_lost(piece, late[0]), late, piece.names)
        for position, edge in enumerate(piece.ends):
            if edge is None:
                continue
            cotangent = self.state[position]
            if cotangent is not None:
                roots.append(edge)
                cotangents.append(cotangent)

    def _enter_outputs(self, piece: Piece, roots: list[Any], cotangents: list[torch.Tensor]) -> None:
        """Add the cotangents of outputs in the order of the plain loop's stacks: the last leaf's first, step by step.

        Outputs of steps before the piece that are parts of the state at its start enter here; earlier pieces leave them
        out.
        """
        loop, place = self._loop, self._loop.inputs.place
        last = place(self._length - 1)
        below = self._outputs_below(piece)
        for m in range(len(piece.outputs) - 1, -1, -1):
            grad, entries = self._outputs[m], piece.outputs[m]
            if grad is None:
                continue
            if self._entered:
                entries = [entry for entry in entries if (m, entry[0]) not in self._entered]
            entries = below.get(m, []) + entries
            if below or place(0):  # in a stack the order is that of places, which `reverse` and `below` change
                entries = sorted(entries, key=lambda entry: place(entry[0]))
            rows = loop.outputs.cotangents(grad, [place(k) for k, _ in entries], last)
            for (_, edge), cotangent in zip(entries, rows, strict=True):
                if cotangent is not None:
                    roots.append(edge)
                    cotangents.append(cotangent)

    def _outputs_below(self, piece: Piece) -> dict[int, list[tuple[int, GradientEdge]]]:
        """By leaf, outputs of earlier steps that are in the state at the piece's start and have not entered yet."""
        below: dict[int, list[tuple[int, GradientEdge]]] = {}
        if self._loop.outputs.in_step_order:  # a running sum is taken at its step, not after the loop
            return below
        for entry in self._loop.shared.at(piece.start):
            edge = piece.starts[entry.position]
            if edge is not None and (entry.leaf, entry.step) not in self._entered:
                self._entered.add((entry.leaf, entry.step))
                if not is_cut_off(edge):
                    below.setdefault(entry.leaf, []).append((entry.step, edge))
        return below

    def _take_x_grads(self, piece: Piece, grads: tuple[torch.Tensor | None, ...]) -> None:
        """Write the gradients of single steps' inputs into those of the whole inputs."""
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


def _lost(piece: Piece, position: int) -> str:
    return (
        f"{piece.names[position]} carries a gradient out of step {piece.stop - 1:,}, but not at the first steps, so "
        "it would be lost; let it depend on the same things at each step, or pass advance_with_grad=True to a scan or "
        "for loop, so that gradients are followed through every step"
    )
