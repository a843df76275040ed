"""A row of layers measured into a chain: one layer at a time, leaving no trace.

A chain's step is a contiguous group of layers. A layer joins the one before it where the state between the two is no
place to start a rerun from, or one that no tape holds, so that counting it would be wrong:

- it changes its input in place, or gives a view of it (`nn.ReLU(inplace=True)`, `nn.Flatten`);
- its input is held neither by its own tape nor by that of the layer before, and its own tape is not much larger (ReLU
  after a convolution). Where it is (attention on a copy of its input), the input is counted into the tape.

The first layers run plainly, outside the chain, as long as nothing needs a gradient, and up to one that changes the
caller's own input in place: there is nothing to start again from.

First every layer runs by itself without a tape: that decides the steps, and is what running a step plainly takes. Then
every step is taped and pulled back, and then checkpointed. Not counted is what the plain run holds too: the caller's
input, the result and its gradient, parameters and their gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from lowtide.chain import Chain, StepCost, Working
from lowtide.torch import recording
from lowtide.torch.capture import now
from lowtide.torch.checkpoint import checkpoint
from lowtide.torch.measure import watching
from lowtide.torch.pieces import has_gradient
from lowtide.torch.step_pull import pulled, seed_of
from lowtide.torch.storages import Log, Places, copied, detached, key_of, tensors_of
from lowtide.torch.traceless import Layer, aside, left_as_it_was

# A step that takes less is timed once more without being watched, which slows small operations down.
_SHORT = 0.005
# A layer whose input no tape holds begins a step all the same where its own tape is so many times as large.
_MUCH = 4


@dataclass(frozen=True, slots=True)
class Row:
    """Layers as a chain. `lead` layers run plainly first; `bounds` are the layers [start, stop) of each step.

    Without a chain nothing has a tape. `kept` are the bytes that a checkpoint call keeps for each step in it beside its
    first state: copies of buffers that layers change. `peak` is what measuring took.
    """

    lead: int
    bounds: tuple[tuple[int, int], ...]
    chain: Chain | None
    kept: tuple[int, ...]
    peak: int


def measure_layers(layers: list[Layer], x: Any) -> Row:
    """Run every layer a few times, and leave everything as it was, also after an exception."""
    with aside(layers):
        return _Meter(layers).row(x)


def name_of(layers: list[Layer], start: int, stop: int) -> str:
    """What reports call the step of these layers: "3-4 Conv2d, ReLU"."""
    kinds = [_kind(layer) for layer in layers[start:stop]]
    return f"{start if stop == start + 1 else f'{start}-{stop - 1}'} {', '.join(kinds)}"


def _kind(layer: Layer) -> str:
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)


class _Dropped(Exception):  # noqa: N818  (it is no error)
    """A layer pulls something back itself, and what that needs was not kept."""


def _unpack_dropped(_: None) -> torch.Tensor:
    raise _Dropped


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


class _Meter:
    """Measures one row."""

    def __init__(self, layers: list[Layer]) -> None:
        self._layers = layers
        self._log = Log()
        self._alone: list[_Alone] = []
        self._starts: list[int] = []  # the first layer of each step so far
        self._born: dict[int, int] = {}  # which layer made a storage
        self._lead = 0
        self._plain: set[int] = set()  # storages that the plain run makes too: gradients and the result
        self._copies: set[int] = set()  # storages that stand for the caller's
        self._kept: list[int] = []

    def row(self, x: Any) -> Row:
        """Measure the layers from this input."""
        state = detached(x)
        names = dict.fromkeys(Places(self._log, state, {}).names, 0)
        for k in range(len(self._layers)):
            state, names = self._run_alone(k, state, names)
        self._plain |= set(names.values())
        del state
        recording.count(probe=len(self._starts))
        bounds = tuple(pairwise([*self._starts, len(self._layers)]))
        if not bounds:
            return Row(self._lead, (), None, (), self._log.level(0, len(self._log.events))[1])
        costs = self._taped(x, bounds)
        recording.count(probe=len(bounds))
        names_of_steps = [name_of(self._layers, *bound) for bound in bounds]
        peak = self._log.level(0, len(self._log.events), self._plain)[1]
        return Row(
            self._lead, bounds, Chain.of(_alike(costs, self._kinds(bounds)), names_of_steps), tuple(self._kept), peak
        )

    def _kinds(self, bounds: tuple[tuple[int, int], ...]) -> list[tuple[str, ...]]:
        return [tuple(_kind(layer) for layer in self._layers[start:stop]) for start, stop in bounds]

    # --- each layer by itself: where steps begin

    def _run_alone(self, k: int, state: Any, names: dict[int, int]) -> tuple[Any, dict[int, int]]:
        """Run layer k without a tape; gives the next state and the names of its storages."""
        try:
            with left_as_it_was([self._layers[k]]):
                return self._try_alone(k, state, names, drop=True)
        except _Dropped:
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
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, _unpack_dropped if drop else _same)
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
        return self._bytes(own) < _MUCH * self._bytes(names - packed - passed)

    def _bytes(self, numbers: set[int]) -> int:
        """Bytes of storages that were made here."""
        return sum(self._log.sizes.get(number, 0) for number in numbers)

    def _place(self, k: int, moved: set[int], joins: bool, needs_gradient: bool) -> None:
        """Let layer k begin a step, join those before it, or run before the chain."""
        if 0 in moved or (not self._starts and not needs_gradient):
            self._lead = k + 1
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

    # --- each step as it is taped and pulled back

    def _taped(self, x: Any, bounds: tuple[tuple[int, int], ...]) -> list[StepCost]:
        log = self._log
        with watching(log):
            state = copied(x) if self._lead else detached(x)
        self._copies = {log.number(tensor) for tensor in tensors_of(state)} | {0}
        names = dict.fromkeys(Places(log, state, {}).names, 0)
        mark, packed = len(log.events), set[int]()
        lead = self._layers[: self._lead]
        with left_as_it_was(lead), watching(log), self._packing(packed):
            state = _through(lead, state)
        places = Places(log, state, names)
        made = set(places.names.values())
        base = self._bytes(packed - made - self._copies)
        lead_peak = log.level(mark, len(log.events))[1]
        state, names = detached(state), places.names
        costs = []
        for bound in bounds:
            layers = self._layers[slice(*bound)]
            with left_as_it_was(layers):
                cost, result = self._step(bound, state, names, base)
            if cost.forward < _SHORT:
                with left_as_it_was(layers):
                    cost = _timed(layers, state, cost)
            costs.append(cost)
            del result
            with left_as_it_was(layers):
                state, names = self._checkpointed(layers, state, names)
        first = costs[0].working
        tape = max(first.tape, lead_peak - costs[0].tape)
        costs[0] = replace(costs[0], working=replace(first, advance=max(first.advance, lead_peak), tape=tape))
        return costs

    def _checkpointed(self, layers: list[Layer], state: Any, names: dict[int, int]) -> tuple[Any, dict[int, int]]:
        """The state after a step, and its names; on the way, the bytes that a checkpoint call keeps beside states.

        It comes last, because in a run the next state, where no tape holds it, is gone by the time of the backward.
        """
        log, mark = self._log, len(self._log.events)
        with watching(log):
            result = checkpoint(_through, tuple(layers), state)
        after = Places(log, result, names)
        made = set(after.names.values()) - set(names.values())
        self._kept.append(max(0, log.level(mark, len(log.events), made)[0]))
        return detached(result), after.names

    def _step(self, bound: tuple[int, int], state: Any, names: dict[int, int], base: int) -> tuple[StepCost, Any]:
        """Tape and pull back the layers of one step; gives what that cost, and the result if it is the last one."""
        log, layers, last = self._log, self._layers[slice(*bound)], bound[1] == len(self._layers)
        before = Places(log, state, names)
        held = before.bytes()
        packed: set[int] = set()
        mark, since, began = len(log.events), now(), perf_counter()
        with watching(log), self._packing(packed):
            result = _through(layers, state)
        forward = perf_counter() - began
        made = Places(log, result, names)
        outputs = set(made.names.values()) - set(before.names.values()) - {0}
        tape = self._bytes(packed - outputs - set(before.names.values()) - self._copies)
        taping = log.level(mark, len(log.events), outputs if last else ())[1] - tape
        del made
        if last:
            self._plain |= outputs
        given: list[torch.Tensor] | None = [] if last else None
        seed, result = seed_of(result, given), (result if last else None)
        pulling, backward, cotangent = self._pull(seed, before, since, mark, outputs if last else set(), given)
        cost = StepCost(
            max(1, held),
            max(1, held) + tape,
            min(forward, sum(alone.seconds for alone in self._alone[slice(*bound)])),
            backward,
            cotangent=cotangent,
            working=Working(
                advance=base + max(alone.advance for alone in self._alone[slice(*bound)]),
                tape=base + max(0, taping),
                backward=base + max(0, pulling - tape),
            ),
        )
        return cost, result

    def _pull(
        self,
        seed: torch.Tensor | None,
        state: Places,
        since: int,
        mark: int,
        aside: set[int],
        given: list[torch.Tensor] | None,
    ) -> tuple[int, float, int]:
        """Pull a step back: most bytes since event `mark`, seconds, bytes of the cotangent that comes out.

        Not counted are storages put `aside`, and the gradients of the result, which the caller has `given`.
        """
        log = self._log
        if seed is None:
            return 0, 0.0, 0
        level, _ = log.level(mark, len(log.events), aside)
        start, began = len(log.events), perf_counter()
        wanted = [tensor for tensor in state.tensors if tensor.requires_grad]
        ours = [tensor for tensor in wanted if state.names[key_of(tensor)]]
        with watching(log):
            found, others = pulled(seed, [*ours, *(t for t in wanted if not state.names[key_of(t)])], since)
        seconds = perf_counter() - began
        callers = {log.number(gradient) for gradient in given or ()}
        cotangents = {log.number(gradient) for gradient in found[: len(ours)] if gradient is not None} - callers
        theirs = {log.number(gradient) for gradient in (*found[len(ours) :], *others) if gradient is not None}
        theirs = theirs - cotangents | callers
        self._plain |= theirs
        _, most = log.level(start, len(log.events), aside | theirs)
        return level + most, seconds, self._bytes(cotangents)

    @contextmanager
    def _packing(self, packed: set[int]) -> Iterator[None]:
        """Inside, note the storages that autograd saves and that were made here."""

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed.add(self._log.number(tensor))
            return tensor.detach()  # the tensor itself would keep the graph alive that made it

        with torch.autograd.graph.saved_tensors_hooks(pack, _same):
            yield


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _through(layers: Iterable[Layer], state: Any) -> Any:
    for layer in layers:
        state = layer(state)
    return state


def _timed(layers: list[Layer], state: Any, cost: StepCost) -> StepCost:
    """The cost with the seconds of the same again, unwatched, where that is less."""
    since, began = now(), perf_counter()
    seed = seed_of(_through(layers, state))
    forward, backward = perf_counter() - began, 0.0
    if seed is not None:
        began = perf_counter()
        pulled(seed, [tensor for tensor in tensors_of(state) if tensor.requires_grad], since)
        backward = perf_counter() - began
    return replace(cost, forward=min(cost.forward, forward), backward=min(cost.backward, backward))


def _alike(costs: list[StepCost], kinds: list[tuple[str, ...]]) -> list[StepCost]:
    """Steps that are alike in everything but their seconds take the least that any of them took: the rest is noise."""
    keys = [
        (kind, replace(cost, forward=0.0, backward=0.0, state=1, tape=cost.tape - cost.state + 1))
        for kind, cost in zip(kinds, costs, strict=True)
    ]
    least: dict[Any, tuple[float, float]] = {}
    for key, cost in zip(keys, costs, strict=True):
        forward, backward = least.get(key, (cost.forward, cost.backward))
        least[key] = (min(forward, cost.forward), min(backward, cost.backward))
    return [replace(cost, forward=least[key][0], backward=least[key][1]) for key, cost in zip(keys, costs, strict=True)]
