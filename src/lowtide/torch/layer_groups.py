"""Which layers make a step: each one runs by itself, without a tape, and shows what it does with its input.

A chain's step is a contiguous group of layers. A layer joins the one before it where the state between the two is no
place to start a rerun from, or one that no tape holds, so that counting it would be wrong:

- it changes its input in place, or gives a view of it (`nn.ReLU(inplace=True)`, `nn.Flatten`);
- its input is held neither by its own tape nor by that of the layer before, and its own tape is not much larger (ReLU
  after a convolution). Where it is (attention on a copy of its input), the input is counted into the tape.

The first layers run plainly, outside the chain, as long as nothing needs a gradient, and up to one that changes the
caller's own input in place: there is nothing to start again from.
"""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch.utils._pytree import tree_map

from lowtide.torch.measure import watching
from lowtide.torch.pieces import has_gradient
from lowtide.torch.storages import Log, Places, copied, detached, key_of, tensors_of
from lowtide.torch.traceless import Layer, left_as_it_was

# A layer whose input no tape holds begins a step all the same where its own tape is so many times as large.
_MUCH = 2


class Dropped(Exception):  # noqa: N818  (it is no error)
    """A layer pulls something back itself, and what that needs was not kept."""


def unpack_dropped(_: None) -> torch.Tensor:
    """The unpack hook of a run that keeps nothing."""
    raise Dropped


class _Enter(torch.autograd.Function):
    """Makes its second argument need a gradient without being a leaf, and without a copy."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(*_: Any) -> Any:
        return None, None


class _Alone:
    """What running one layer by itself showed."""

    def __init__(self, held: int, most: int, seconds: float, packed: set[int]) -> None:
        self.advance = held + most
        self.seconds = seconds
        self.packed = packed
        self.unheld = 0  # bytes of its input that no tape holds


class Groups:
    """The layers of one row, run one after the other.

    Attributes:
        bounds: the layers [start, stop) of each step.
        lead: how many layers run plainly before them.
        result: names of the storages that the last layer gave.
    """

    def __init__(self, layers: list[Layer], x: Any, log: Log) -> None:
        self._layers = layers
        self._log = log
        self._alone: list[_Alone] = []
        self._starts: list[int] = []  # the first layer of each step so far
        self._born: dict[int, int] = {}  # which layer made a storage
        self.lead = 0
        state = detached(x)
        names = dict.fromkeys(Places(log, state, {}).names, 0)
        for k in range(len(layers)):
            state, names = self._run_alone(k, state, names)
        self.result = set(names.values())
        self.bounds = tuple(pairwise([*self._starts, len(layers)]))

    def advance(self, start: int, stop: int) -> int:
        """Most bytes, the state among them, while these layers run without a tape."""
        return max(alone.advance for alone in self._alone[start:stop])

    def seconds(self, start: int, stop: int) -> float:
        """Seconds of running these layers without a tape."""
        return sum(alone.seconds for alone in self._alone[start:stop])

    def unheld(self, start: int) -> int:
        """Bytes of the input of the step from this layer that no tape holds."""
        return self._alone[start].unheld if start > self.lead else 0

    def _run_alone(self, k: int, state: Any, names: dict[int, int]) -> tuple[Any, dict[int, int]]:
        """Run layer k without a tape; gives the next state and the names of its storages."""
        try:
            with left_as_it_was([self._layers[k]]):
                return self._try_alone(k, state, names, drop=True)
        except Dropped:
            with left_as_it_was([self._layers[k]]):
                return self._try_alone(k, state, names, drop=False)

    def _try_alone(self, k: int, state: Any, names: dict[int, int], *, drop: bool) -> tuple[Any, dict[int, int]]:
        log = self._log
        before = Places(log, state, names)
        with watching(log):
            given = tree_map(lambda leaf: self._given(leaf, before), state)
        copies = tensors_of(given)
        aliases = {key_of(copy): before.names[key_of(old)] for copy, old in zip(copies, before.tensors, strict=True)}
        versions = [copy._version for copy in copies]
        packed: set[int] = set()

        def pack(tensor: torch.Tensor) -> torch.Tensor | None:
            if tensor.layout is torch.strided:
                packed.add(aliases.get(key_of(tensor), log.number(tensor)))
            return None if drop else tensor.detach()

        mark, began = len(log.events), perf_counter()
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack_dropped if drop else lambda tensor: tensor)
        with watching(log), hooks:
            result = self._layers[k](given)
        seconds = perf_counter() - began
        _, most = log.level(mark, len(log.events))
        after = Places(log, result, aliases)
        self._alone.append(_Alone(before.bytes(), most, seconds, packed))
        for name in set(after.names.values()) - set(before.names.values()):
            self._born[name] = k
        rows = zip(copies, versions, strict=True)
        moved = {aliases[key_of(copy)] for copy, version in rows if copy._version != version}
        self._place(k, moved, self._joins(k, before, aliases, copies, after), any(map(has_gradient, after.tensors)))
        return detached(result), after.names

    def _given(self, leaf: Any, places: Places) -> Any:
        """What a layer gets for a leaf of its input, and may change at will; of the caller's tensors a copy."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.layout is not torch.strided or not places.names[key_of(leaf)]:
            return copied(leaf)
        if not leaf.requires_grad:
            return leaf.detach()
        return _Enter.apply(torch.empty(0, requires_grad=True), leaf.detach())  # type: ignore[no-untyped-call]  # torch's

    def _joins(
        self, k: int, before: Places, aliases: dict[int, int], copies: list[torch.Tensor], after: Places
    ) -> bool:
        """Whether the state before layer k is a view's, or held by no tape."""
        unchanged = {id(copy) for copy in copies}
        passed = {after.names[key_of(t)] for t in after.tensors if id(t) in unchanged}
        views = {aliases[key_of(t)] for t in after.tensors if id(t) not in unchanged and key_of(t) in aliases}
        names = set(before.names.values()) - {0}
        if views & names or (names and names <= passed):
            return True
        start = self._starts[-1] if self._starts else k
        packed = set[int]().union(*(alone.packed for alone in self._alone[start : k + 1]))
        own = self._alone[k].packed - names - set(after.names.values())
        self._alone[k].unheld = self._log.bytes(names - packed - passed)
        return self._log.bytes(own) < _MUCH * self._alone[k].unheld

    def _place(self, k: int, moved: set[int], joins: bool, needs_gradient: bool) -> None:
        """Let layer k begin a step, join those before it, or run before the chain."""
        if 0 in moved or (not self._starts and not needs_gradient):
            self.lead = k + 1
            self._starts = []
            return
        if not self._starts:
            self._starts = [k]
            return
        self._starts.append(k)
        # Nothing may begin between the making of a storage and its change.
        last = min((self._born.get(name, 0) for name in moved), default=k - 1 if joins else k)
        if joins:
            last = min(last, k - 1)
        while self._starts[-1] > max(last, self._starts[0]):
            self._starts.pop()
