"""The backward of a loop: cotangents pulled back through one piece of tape after the other.

Every sum is made in the plain loop's order, so that gradients equal the plain loop's to the last bit. Autograd runs
nodes in descending order of their making, and adds what arrives at a tensor in that order:

- A captured tensor's running gradient enters each piece first, as a root: roots are added before any node runs.
- An output that *is* part of a state (a GRU returning `(h, h)`) gets its cotangent from a stack, before any later
  step's contributions: so it is handed in at the start of the topmost piece that has it in its state.
- A tensor that sits at several positions of a state is one leaf.
- A running sum's cotangent arrives after the next step's contributions: the engine makes a `y.view_as(y)` where the
  sum is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from lowtide.errors import CheckpointError
from lowtide.torch import recording
from lowtide.torch.capture import Captured, edge_of, gradients
from lowtide.torch.inputs import Inputs
from lowtide.torch.outputs import Outputs
from lowtide.torch.pieces import Piece, Profile
from lowtide.torch.shared import Shared


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
    are the inputs whose gradients are wanted.
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
        roots: list[Any] = []
        cotangents: list[torch.Tensor] = []
        # What the caller does with the final state comes after the stacks were made, so its cotangents come first.
        for position, edge in enumerate(piece.ends):
            if edge is None:
                continue
            if not self._expected[position]:
                raise CheckpointError(self._lost(piece, position))
            cotangent = self.state[position]
            if cotangent is not None:
                roots.append(edge)
                cotangents.append(cotangent)
        self._enter_outputs(piece, roots, cotangents)
        targets = self._loop.captured.targets
        for arrives, total in zip(self._loop.captured.edges, self.captured, strict=True):
            if total is not None:
                roots.append(arrives)
                cotangents.append(total)
        starts = {id(leaf): leaf for leaf in piece.starts if leaf is not None}
        wanted = [*targets, *starts.values(), *piece.xs]
        grads: tuple[torch.Tensor | None, ...] = (None,) * len(wanted)
        if roots and wanted:
            with self._loop.captured.without_hooks():
                grads = gradients(roots, wanted, cotangents, keep=keep)
        self.captured = list(grads[: len(targets)])
        # From here on these are the gradients that the plain loop has too; while they were made they came on top.
        recording.leave_out(self.captured, from_now=True)
        rest = iter(grads[len(targets) :])
        arrived = {key: next(rest) for key in starts}
        self.state = [None if leaf is None else arrived.pop(id(leaf), None) for leaf in piece.starts]
        self._expected = [leaf is not None for leaf in piece.starts]
        if self._xs:
            for k in range(piece.start, piece.stop):
                for q in range(len(self._xs)):
                    self._put_x_grad(q, k, next(rest))

    def _put_x_grad(self, q: int, k: int, grad: torch.Tensor | None) -> None:
        if grad is None:
            return
        buffer = self._x_grads[q]
        if buffer is None:
            buffer = torch.zeros_like(self._xs[q], memory_format=torch.contiguous_format)
            self._x_grads[q] = buffer
            recording.leave_out([buffer])
        buffer[self._loop.inputs.place(k)] = grad

    def _enter_outputs(self, piece: Piece, roots: list[Any], cotangents: list[torch.Tensor]) -> None:
        """Cotangents of outputs, in the order of the plain loop's stacks: the last leaf's first, step by step.

        Outputs of steps below the piece that are parts of the state at its start come in here; pieces below leave them
        out.
        """
        loop, last = self._loop, self._loop.inputs.place(self._length - 1)
        below: dict[int, list[tuple[int, GradientEdge]]] = {}
        for entry in [] if loop.outputs.in_step_order else loop.shared.at(piece.start):
            leaf = piece.starts[entry.position]
            if leaf is not None and (entry.leaf, entry.step) not in self._entered:
                self._entered.add((entry.leaf, entry.step))
                below.setdefault(entry.leaf, []).append((entry.step, edge_of(leaf)))
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
            if below or loop.inputs.place(0):  # a stack's order is that of places
                entries = sorted(entries, key=lambda entry: loop.inputs.place(entry[0]))
            rows = loop.outputs.cotangents(grad, [loop.inputs.place(k) for k, _ in entries], last)
            for (_, edge), cotangent in zip(entries, rows, strict=True):
                if cotangent is not None:
                    roots.append(edge)
                    cotangents.append(cotangent)

    def _lost(self, piece: Piece, position: int) -> str:
        names = self._names()
        name = names[position] if position < len(names) else f"part {position} of the state"
        return (
            f"{name} carries a gradient out of step {piece.stop - 1:,}, but did not at the first steps, so it would be "
            "lost; let it depend on the same things at each step"
        )
