"""Bytes and seconds of a step while it is taped: what it leaves behind, needs on the way, and what its tape holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import Any

import torch

from lowtide.torch.lean_step import LeanStep
from lowtide.torch.measure import Memory, watching
from lowtide.torch.outputs import like_of


class Meter:
    """Bytes and seconds of the step that is being probed."""

    def __init__(self, lean: LeanStep | None) -> None:
        self.memory = Memory()
        self._lean = lean
        self.packed: set[int] = set()
        self.forward = 0.0
        self.taped = 0
        self._room = 0  # the most that a step has needed while it ran, and no longer afterwards
        self.before = self.after = 0
        self.old: set[int] = set()

    def seeing(self) -> AbstractContextManager[None]:
        """Count what is made inside."""
        return watching(self.memory)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch one step being taped."""
        self.packed.clear()
        self.before = self.memory.now
        self.old = self.memory.alive()
        worst, self.memory.peak = self.memory.peak, self.memory.now
        began = perf_counter()
        hooks = torch.autograd.graph.saved_tensors_hooks
        with hooks(self._pack, _unpack) if self._lean is None else self._lean.watched(self.packed):
            yield
        self.forward = perf_counter() - began
        self.after = self.memory.now
        self.taped = self.memory.peak - self.before
        self._room = max(self._room, self.memory.peak - self.after)
        self.memory.peak = max(self.memory.peak, worst)

    def leave_room(self, leaves: list[torch.Tensor]) -> None:
        """Let the last step have needed as much as any that made such leaves, if others may be traced yet."""
        if self._lean is not None and self._lean.varies:
            room = self._lean.room(tuple(like_of(leaf) for leaf in leaves), self._room)
            self.taped = self.after - self.before + room

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.packed.add(tensor.untyped_storage()._cdata)
        return tensor.detach()  # the tensor itself would keep the graph alive that made it

    def made(self, leaf: torch.Tensor) -> bool:
        """Whether the step made the leaf's storage."""
        return self.memory.knows(leaf) and leaf.untyped_storage()._cdata not in self.old

    def keeps(self, leaf: Any) -> bool:
        """Whether the tape holds the leaf's storage."""
        return isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata in self.packed


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
