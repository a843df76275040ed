"""Outputs that *are* parts of a state: a GRU that returns `(h, h)`, a window of the last outputs that is carried along.

In the plain loop such an output's cotangent comes from a stack, before what any later step contributes to the same
tensor. So the pullback has to know, for each place where a piece of tape starts, which outputs of which steps are parts
of the state there; they are told by identity. Outputs of steps further back than the last are looked for only if the
first steps show that they stay in the state.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class SharedOutput:
    """Output leaf `leaf` of step `step` is what sits at `position` of the state."""

    leaf: int
    step: int
    position: int


class Shared:
    """By step, the outputs of steps before it that are parts of the state there."""

    def __init__(self) -> None:
        self.stays = True  # until the first steps have shown otherwise
        self._by_step: dict[int, list[SharedOutput]] = {}
        self._recent: list[tuple[weakref.ref[torch.Tensor], int, int]] = []  # (output, leaf, step)

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
        """A step ran; its outputs may stay in the state for longer. To be called only if they do."""
        self._recent = [entry for entry in self._recent if entry[0]() is not None]
        self._recent += [(weakref.ref(y), m, step) for m, y in enumerate(outputs) if isinstance(y, torch.Tensor)]

    def moved(self, old: list[Any], new: list[Any]) -> None:
        """Parts of the state were replaced by others that stand for them."""
        if self.stays:
            now = {id(a): b for a, b in zip(old, new, strict=True) if isinstance(b, torch.Tensor)}
            alive = [(output, m, k) for ref, m, k in self._recent if (output := ref()) is not None]
            self._recent = [(weakref.ref(now.get(id(output), output)), m, k) for output, m, k in alive]

    def resumed(self, step: int, state: list[Any]) -> None:
        """The state at `step` is current again."""
        if self.stays:
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
