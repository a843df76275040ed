"""The backward of a loop: cotangents pulled back through one piece of tape after the other.

Every sum is made in the plain loop's order, so that gradients equal the plain loop's to the last bit. Autograd runs
nodes in descending order of their making, and adds what arrives at a tensor in that order:

- A captured tensor's running gradient enters each piece first, as the gradient of `p.view_as(p)`, made last.
- An output that *is* the state (a GRU returning `(h, h)`) gets its cotangent from a stack, before the next step's
  contributions: so it is handed in with the piece that starts there, through `c0.view_as(c0)`, made last.
- A running sum's cotangent arrives after the next step's contributions: the engine makes a `y.view_as(y)` where the
  sum is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.errors import CheckpointError
from lowtide.torch.capture import Captured, gradients
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

    `grads` are those of the outputs and of the final state, by position; `names` tells what positions are called.
    """

    def __init__(
        self,
        loop: LoopParts,
        length: int,
        names: Callable[[], list[str]],
        grads: list[torch.Tensor | None],
        x_grads: list[torch.Tensor],
    ) -> None:
        self._loop = loop
        self._length = length
        self._names = names
        count = len(loop.profile.outputs)
        self._outputs = grads[:count]
        self.state = grads[count:]
        self._expected = [True] * len(self.state)  # whether the piece above took in a gradient for this position
        self.captured: list[torch.Tensor | None] = [None] * len(loop.captured.targets)
        self.xs = x_grads
        self._entered: set[tuple[int, int]] = set()  # outputs (leaf, step) whose cotangent is in already

    def pull(self, piece: Piece, *, keep: bool = False) -> None:
        """Go back through one piece and free its tape, unless it is to be kept."""
        roots: list[Any] = []
        cotangents: list[torch.Tensor] = []
        self._enter_outputs(piece, roots, cotangents)
        for position, edge in enumerate(piece.ends):
            if edge is None:
                continue
            if not self._expected[position]:
                raise CheckpointError(self._lost(piece, position))
            cotangent = self.state[position]
            if cotangent is not None:
                roots.append(edge)
                cotangents.append(cotangent)
        targets = self._loop.captured.targets
        with torch.enable_grad():
            for target, total in zip(targets, self.captured, strict=True):
                if total is not None:
                    roots.append(target.view_as(target))
                    cotangents.append(total)
            self._enter_shared(piece, roots, cotangents)
        wanted = [*targets, *(leaf for leaf in piece.starts if leaf is not None), *piece.xs]
        grads: tuple[torch.Tensor | None, ...] = (None,) * len(wanted)
        if roots and wanted:
            with self._loop.captured.without_hooks():
                grads = gradients(roots, wanted, cotangents, keep=keep)
        self.captured = list(grads[: len(targets)])
        rest = iter(grads[len(targets) :])
        self.state = [None if leaf is None else next(rest) for leaf in piece.starts]
        self._expected = [leaf is not None for leaf in piece.starts]
        if self.xs:
            for k in range(piece.start, piece.stop):
                place = self._loop.inputs.place(k)
                for buffer in self.xs:
                    grad = next(rest)
                    if grad is not None:
                        buffer[place] = grad

    def _enter_outputs(self, piece: Piece, roots: list[Any], cotangents: list[torch.Tensor]) -> None:
        """Cotangents of the piece's outputs; the last leaf first, as its stack was made last."""
        loop = self._loop
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
            places = [loop.inputs.place(k) for k, _ in entries]
            rows = loop.outputs.cotangents(grad, places, loop.inputs.place(self._length - 1))
            for (_, edge), cotangent in zip(entries, rows, strict=True):
                if cotangent is not None:
                    roots.append(edge)
                    cotangents.append(cotangent)

    def _enter_shared(self, piece: Piece, roots: list[Any], cotangents: list[torch.Tensor]) -> None:
        """Cotangents of outputs that are parts of the state at the piece's start; pieces below leave them out."""
        loop = self._loop
        if loop.outputs.in_step_order:
            return
        for entry in loop.shared.at(piece.start):
            grad, leaf = self._outputs[entry.leaf], piece.starts[entry.position]
            if grad is None or leaf is None or (entry.leaf, entry.step) in self._entered:
                continue
            self._entered.add((entry.leaf, entry.step))
            place, last = loop.inputs.place(entry.step), loop.inputs.place(self._length - 1)
            for cotangent in loop.outputs.cotangents(grad, [place], last):
                if cotangent is not None:
                    roots.append(leaf.view_as(leaf))
                    cotangents.append(cotangent)

    def _lost(self, piece: Piece, position: int) -> str:
        names = self._names()
        name = names[position] if position < len(names) else f"part {position} of the state"
        return (
            f"{name} carries a gradient out of step {piece.stop - 1:,}, but did not at the first steps, so it would be "
            "lost; let it depend on the same things at each step"
        )
