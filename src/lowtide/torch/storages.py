"""The storages behind tensors: when each was made and freed, and which of them a state consists of."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from itertools import count
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from lowtide.torch.measure import Memory, storage_bytes


class Log(Memory):
    """Births and deaths of storages on any device, so that a worst moment can be told without some of them."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._numbers = count(1)
        self._known: dict[int, tuple[int, int]] = {}  # of those alive: (number, bytes)
        self.events: list[tuple[int, int]] = []  # (number, bytes more or less)
        self.sizes: dict[int, int] = {}

    def see(self, tensor: torch.Tensor) -> None:
        """See `Memory`."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known[key] = (next(self._numbers), 0)
            weakref.finalize(storage, self._died, key).atexit = False
        number, before = self._known[key]
        self._known[key] = (number, size)
        self.events.append((number, size - before))
        self.sizes[number] = size

    def _died(self, key: int) -> None:
        number, size = self._known.pop(key)
        self.events.append((number, -size))

    def number(self, tensor: torch.Tensor) -> int:
        """The number of the tensor's storage; 0 for one that was not made here."""
        if tensor.layout is not torch.strided:
            return 0
        return self._known.get(key_of(tensor), (0, 0))[0]

    def bytes(self, numbers: Iterable[int]) -> int:
        """Bytes of the storages with these numbers; number 0 has none."""
        return sum(self.sizes.get(number, 0) for number in numbers)

    def alive(self) -> set[int]:
        """See `Memory`; by their numbers."""
        return {number for number, _ in self._known.values()}

    def level(self, start: int, stop: int, without: Iterable[int] = ()) -> tuple[int, int]:
        """Bytes more at event `stop` than at event `start`, and the most in between."""
        left_out = set(without)
        level = most = 0
        for number, change in self.events[start:stop]:
            if number not in left_out:
                level += change
                most = max(most, level)
        return level, most


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Its tensors; those that have no single storage (sparse) are not counted anywhere."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]


def key_of(tensor: torch.Tensor) -> int:
    """Where its storage is: its own as long as the tensor is alive."""
    place: int = tensor.untyped_storage()._cdata
    return place


def detached(tree: Any) -> Any:
    """The same values without their history; those that need a gradient are leaves that do."""
    return tree_map(
        lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf, tree
    )


def copied(tree: Any) -> Any:
    """The same with values of their own, no longer leaves of a graph, so that they can be changed in place."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, detached(tree))


class Places:
    """The storages of a state, each with a name that it keeps from layer to layer. Name 0 is the caller's."""

    def __init__(self, log: Log, tree: Any, known: dict[int, int]) -> None:
        self.tensors = tensors_of(tree)
        self.names = {key_of(tensor): known.get(key_of(tensor), log.number(tensor)) for tensor in self.tensors}

    def bytes(self) -> int:
        """Bytes of the storages that are not the caller's, each counted once."""
        return storage_bytes([tensor for tensor in self.tensors if self.names[key_of(tensor)]])
