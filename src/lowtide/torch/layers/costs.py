"""Measures a row of layers as a chain, one layer at a time, and leaves everything as it was.

First every layer runs by itself without a tape: that decides which layers make a step (`Groups`), and measures what
running a step without a tape takes. Then every step is run with its tape and backward, timed, and checkpointed. Short
steps are timed once more without tracking memory, and steps that are alike get the same times (`Seconds`). Memory that
the plain run holds too is not counted: the caller's input, the result and its gradient, parameters and theirs.

A chain's step is a contiguous group of layers. A layer joins the one before it if a rerun cannot start from the state
between the two, or if no tape holds that state, so that counting it would be wrong:

- the layer changes its input in place, or returns a view of it (`nn.ReLU(inplace=True)`, `nn.Flatten`);
- its input is held neither by its own tape nor by that of the layer before, and its own tape is not much larger (ReLU
  after a convolution). Where it is (attention on a copy of its input), the input is counted into the tape.

The first layers run plainly, outside the chain, as long as nothing needs a gradient. So do all layers up to the last
one that changes the caller's own input in place, because a rerun could not start from the changed input.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from lowtide.chain import Chain, StepCost, TapeOption, Working
from lowtide.forms import lean_form
from lowtide.torch.checkpoint.call import checkpoint
from lowtide.torch.layers.nested import Layer, run_lean, through
from lowtide.torch.lean.call import can_lean, lean_menu
from lowtide.torch.lean.graph import LeanPoint, LeanSize
from lowtide.torch.memory import recording
from lowtide.torch.memory.accelerators import seconds_now
from lowtide.torch.memory.tracker import (
    Dropped,
    Log,
    Places,
    copied,
    detached,
    keeping_nothing,
    key_of,
    storage_bytes,
    tensors_of,
    watching,
)
from lowtide.torch.state.ambient import aside
from lowtide.torch.state.capture import has_gradient, now, pulled, seed_of
from lowtide.torch.state.hidden import left_as_it_was
from lowtide.torch.state.notes import may_be_copied

_logger = logging.getLogger(__name__)

# A step whose forward is shorter is timed once more without tracking memory, which slows small operations down.
_SHORT_SECONDS = 0.005
# The share of the whole tape that a smaller form has to save to be on the menu.
_LEAST_SAVING = 0.05
# A layer whose input no tape holds begins a step nevertheless if its own tape is at least this many times as large.
_LEAST_TAPE_RATIO = 2
# How many of the steps that are alike are timed.
_MOST_TIMED = 3


@dataclass(frozen=True, slots=True)
class MeasuredLayers:
    """Layers as a chain, without the first ones if they run plainly; no chain if no layer has a tape.

    For each step:

    - `kept`: bytes that a checkpoint call over it keeps beside its first state: copies of buffers that layers change;
    - `copied`: bytes of its state that a checkpoint call starting at it copies until it has run, because the function
      may change them;
    - `unheld`: bytes of its state that its tape counts although they are alive only if a checkpoint call holds them;
    - `unheld_by`: the same for each smaller tape;
    - `passing`: for each smaller tape, the most bytes, its state included, while the step runs with that tape inside a
      checkpoint call, which does not keep it.

    `peak` is the most bytes that measuring took.
    """

    chain: Chain | None
    kept: tuple[int, ...]
    copied: tuple[int, ...]
    unheld: tuple[int, ...]
    unheld_by: tuple[tuple[int, ...], ...]
    passing: tuple[tuple[int, ...], ...]
    peak: int

    def untimed(self) -> MeasuredLayers:
        """The same with seconds in proportion to bytes, which are the same in every run."""
        assert self.chain is not None
        steps = [_timed_by_bytes(self.chain[k]) for k in range(len(self.chain))]
        return replace(self, chain=self.chain.with_steps(steps))


_LEAN_SECONDS = 0.1  # of recomputing a byte of tape in a lean form; rerunning a layer takes 1 for each byte


def _timed_by_bytes(step: StepCost) -> StepCost:
    options = tuple(replace(option, extra=_LEAN_SECONDS * max(0, step.tape - option.tape)) for option in step.options)
    return replace(step, forward=float(step.tape), backward=2.0 * step.tape, options=options)


def measure_layers(layers: list[Layer], x: Any, *, forms: bool) -> MeasuredLayers:
    """Measure layers by running each a few times; everything is left as it was, also after an exception.

    Args:
        layers: the layers, in the order in which they are called.
        x: the input of the first layer.
        forms: measure smaller tapes too.
    """
    with aside(layers), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a lean tape of .* was planned")  # forms are only tried here
        found = _Meter(layers, x, forms).row(x)
    _logger.debug("measured %d layers: %s", len(layers), found.chain)
    return found


def name_of(layers: list[Layer], start: int, stop: int) -> str:
    """The name of the step of these layers in reports: "3-4 Conv2d, ReLU"."""
    kinds = [_kind(layer) for layer in layers[start:stop]]
    return f"{start if stop == start + 1 else f'{start}-{stop - 1}'} {', '.join(kinds)}"


def _kind(layer: Layer) -> str:
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)


# --- which layers make a step


class _Enter(torch.autograd.Function):
    """Returns its second argument as a tensor that requires a gradient and is not a leaf, without a copy."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(*_: Any) -> Any:
        return None, None


class _Alone:
    """The measurements of one layer, run by itself without a tape."""

    def __init__(self, held: int, most: int, seconds: float, packed: set[int]) -> None:
        self.advance = held + most
        self.seconds = seconds
        self.packed = packed
        self.unheld = 0  # bytes of the layer's input that no tape holds


class Groups:
    """Runs the layers of a row one after the other, and groups them into steps.

    Attributes:
        bounds: the layers [start, stop) of each step.
        lead: how many layers run plainly before the first step.
        result: names of the storages that the last layer returned.
    """

    def __init__(self, layers: list[Layer], x: Any, log: Log) -> None:
        self._layers = layers
        self._log = log
        self._alone: list[_Alone] = []
        self._starts: list[int] = []  # the first layer of each step so far
        self._born: dict[int, int] = {}  # by name of a storage, the layer that made it
        self.lead = 0
        state = detached(x)
        names = dict.fromkeys(Places(log, state, {}).names, 0)
        for k in range(len(layers)):
            state, names = self._run_alone(k, state, names)
        self.result = set(names.values())
        self.bounds = tuple(pairwise([*self._starts, len(layers)]))

    def advance(self, start: int, stop: int) -> int:
        """The most bytes, the state included, while these layers run without a tape."""
        return max(alone.advance for alone in self._alone[start:stop])

    def seconds(self, start: int, stop: int) -> float:
        """The seconds that these layers take without a tape."""
        return sum(alone.seconds for alone in self._alone[start:stop])

    def unheld(self, start: int) -> int:
        """The bytes that no tape holds of the input of the step that begins at this layer."""
        return self._alone[start].unheld if start > self.lead else 0

    def _run_alone(self, k: int, state: Any, names: dict[int, int]) -> tuple[Any, dict[int, int]]:
        """Run layer k without a tape; returns the next state and the names of its storages."""
        # A layer that runs a backward inside its forward needs the tape: it is run again with what it saves.
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
        mark, began = len(log.events), seconds_now()
        with watching(log), log.packing(packed, aliases, drop=drop):
            result = self._layers[k](given)
        seconds = seconds_now() - began
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
        """The leaf to pass to a layer, which may change it in place: a copy if it is the caller's."""
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
        """Whether layer k belongs to the step before it: it returns a view of its input, or no tape holds that."""
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
        return self._log.bytes(own) < _LEAST_TAPE_RATIO * self._alone[k].unheld

    def _place(self, k: int, moved: set[int], joins: bool, needs_gradient: bool) -> None:
        """Let layer k begin a step, join the step before it, or run plainly before the chain.

        `moved` has the names of the storages that the layer changed in place; 0 is the caller's.
        """
        if 0 in moved or (not self._starts and not needs_gradient):
            self.lead = k + 1
            self._starts = []
            return
        if not self._starts:
            self._starts = [k]
            return
        self._starts.append(k)
        # No step may begin between the layer that makes a storage and the one that changes it in place.
        last = min((self._born.get(name, 0) for name in moved), default=k - 1 if joins else k)
        if joins:
            last = min(last, k - 1)
        while self._starts[-1] > max(last, self._starts[0]):
            self._starts.pop()


# --- how long steps take


def timed(layers: list[Layer], state: Any, cost: StepCost) -> StepCost:
    """The cost with the seconds of another run, without tracking memory, where they are fewer."""
    since, began = now(), seconds_now()
    seed = seed_of(through(layers, state))
    forward, backward = seconds_now() - began, 0.0
    if seed is not None:
        began = seconds_now()
        pulled(seed, [tensor for tensor in tensors_of(state) if tensor.requires_grad], since)
        backward = seconds_now() - began
    return replace(cost, forward=min(cost.forward, forward), backward=min(cost.backward, backward))


class AlikeSteps:
    """Keys that are equal for steps that take the same time: made of their layers' reprs and all tensors' metadata."""

    def __init__(self, layers: list[Layer], state: Any, cost: StepCost) -> None:
        tensors = tensors_of(state)
        forms = tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors)
        self.forward: Hashable = (tuple(map(_form, layers)), forms, cost.tape - cost.state)
        self.backward: Hashable = (self.forward, tuple(tensor.requires_grad for tensor in tensors))


def _form(layer: Layer) -> Hashable:
    if isinstance(layer, nn.Module):
        parameters = tuple((parameter.shape, parameter.requires_grad) for parameter in layer.parameters())
        return type(layer), repr(layer), parameters
    return id(layer)


class Seconds:
    """The seconds of all steps. Steps that are alike get the shortest time of any of them: the rest is noise."""

    def __init__(self) -> None:
        self._rows: list[tuple[AlikeSteps, StepCost]] = []
        self._least: dict[Hashable, float] = {}
        self._times: Counter[Hashable] = Counter()

    def knows(self, likeness: AlikeSteps) -> bool:
        """Whether enough steps like this one have been timed."""
        return self._times[likeness.backward] >= _MOST_TIMED

    def add(self, likeness: AlikeSteps, cost: StepCost) -> None:
        """Add the next step of the row."""
        self._times[likeness.backward] += 1
        for key, seconds in ((likeness.forward, cost.forward), (likeness.backward, cost.backward)):
            self._least[key] = min(seconds, self._least.get(key, seconds))
        self._rows.append((likeness, cost))

    def evened(self) -> list[StepCost]:
        """The costs of all steps, with the shortest seconds of those that are alike."""
        return [
            replace(cost, forward=self._least[likeness.forward], backward=self._least[likeness.backward])
            for likeness, cost in self._rows
        ]


# --- what steps hold


class _Meter:
    """Measures one row of layers."""

    def __init__(self, layers: list[Layer], x: Any, forms: bool) -> None:
        self._layers = layers
        self._forms = forms
        self._log = Log()
        self._groups = Groups(layers, x, self._log)
        # Storages that the plain run holds too, and that are not counted: gradients and the result.
        self._plain = set(self._groups.result)
        self._copies: set[int] = set()  # storages that take the place of the caller's
        self._kept: list[int] = []
        self._copied: list[int] = []
        self._given = 0  # bytes that the step measured last returned, unless it is the last of the row
        self._passing: list[tuple[int, ...]] = []
        self._unheld_by: list[tuple[int, ...]] = []
        self._seconds = Seconds()

    def row(self, x: Any) -> MeasuredLayers:
        """The measured layers, called with this input."""
        log, bounds = self._log, self._groups.bounds
        recording.count(probe=len(bounds))
        if not bounds:
            return MeasuredLayers(None, (), (), (), (), (), log.level(0, len(log.events))[1])
        costs = self._taped(x, bounds)
        recording.count(probe=len(bounds))
        parameters = [p for layer in self._layers if isinstance(layer, nn.Module) for p in layer.parameters()]
        chain = replace(
            Chain.of(costs, [name_of(self._layers, *bound) for bound in bounds]),
            parameters=storage_bytes(parameters),
            gradients=storage_bytes([p for p in parameters if p.requires_grad]),
            layers=bounds,
        )
        peak = log.level(0, len(log.events), self._plain)[1]
        unheld = tuple(self._groups.unheld(start) for start, _ in bounds)
        kept, copied_, unheld_by = tuple(self._kept), tuple(self._copied), tuple(self._unheld_by)
        return MeasuredLayers(chain, kept, copied_, unheld, unheld_by, tuple(self._passing), peak)

    def _taped(self, x: Any, bounds: tuple[tuple[int, int], ...]) -> list[StepCost]:
        log = self._log
        lead = self._layers[: self._groups.lead]
        with watching(log):
            state = copied(x) if lead else detached(x)
        self._copies = {log.number(tensor) for tensor in tensors_of(state)} | {0}
        names = dict.fromkeys(Places(log, state, {}).names, 0)
        mark, packed = len(log.events), set[int]()
        with left_as_it_was(lead), watching(log), log.packing(packed):
            state = through(lead, state)
        places = Places(log, state, names)
        base = log.bytes(packed - set(places.names.values()) - self._copies)
        lead_peak = log.level(mark, len(log.events))[1]
        first_state = places.bytes()
        state, names = detached(state), places.names
        for bound in bounds:
            state, names = self._measure(bound, state, names, base)
        costs = self._seconds.evened()
        first = costs[0].working
        tape = max(first.tape, lead_peak - costs[0].tape)
        costs[0] = replace(costs[0], working=replace(first, advance=max(first.advance, lead_peak), tape=tape))
        return costs if first_state else [_a_byte_less(cost) for cost in costs]

    def _measure(
        self, bound: tuple[int, int], state: Any, names: dict[int, int], base: int
    ) -> tuple[Any, dict[int, int]]:
        """Measure one step and add its cost; returns the state after it, and the names of its storages."""
        layers = self._layers[slice(*bound)]
        self._copied.append(sum(tensor.nbytes for tensor in tensors_of(state) if may_be_copied(tensor)))
        with left_as_it_was(layers):
            cost = self._step(bound, state, names, base)
        if self._forms:
            cost = replace(cost, options=tuple(self._options(bound, state, names, base)))
        else:
            self._passing.append(())
            self._unheld_by.append(())
        likeness = AlikeSteps(layers, state, cost)
        if cost.forward < _SHORT_SECONDS and not self._seconds.knows(likeness):
            with left_as_it_was(layers):
                cost = timed(layers, state, cost)
        self._seconds.add(likeness, cost)
        with left_as_it_was(layers):
            return self._checkpointed(layers, state, names)

    def _checkpointed(self, layers: list[Layer], state: Any, names: dict[int, int]) -> tuple[Any, dict[int, int]]:
        """Run a step in a checkpoint call, and note the bytes that the call keeps beside states.

        Returns the state after the step and the names of its storages. This comes after the step's backward was
        measured, because in a run that state is freed before the backward, unless a tape holds it.
        """
        log, mark = self._log, len(self._log.events)
        with watching(log):
            result = checkpoint(through, tuple(layers), state)
        after = Places(log, result, names)
        made = set(after.names.values()) - set(names.values())
        self._kept.append(max(0, log.level(mark, len(log.events), made)[0]))
        return detached(result), after.names

    def _options(self, bound: tuple[int, int], state: Any, names: dict[int, int], base: int) -> Iterator[TapeOption]:
        """Measure the smaller tapes of a step."""
        layers = tuple(self._layers[slice(*bound)])
        with left_as_it_was(list(layers)):
            points = lean_points(layers, state)
        recording.count(probe=2 * len(points) + bool(points))
        self._passing.append(tuple(base + self._passed(layers, state, names, point.size) for point in points))
        unheld = self._groups.unheld(bound[0])
        self._unheld_by.append(tuple(self._let_go(layers, state, point.size) if unheld else 0 for point in points))
        for point in points:
            with left_as_it_was(list(layers)):
                cost = self._step(bound, state, names, base, point.size)
            # Building the tape needs memory too, while the cotangent of the step's result is already there.
            beside = max(cost.working.backward, cost.working.tape + self._given)
            yield TapeOption(cost.tape, point.seconds, backward=beside, form=lean_form(point.tape, point.working))

    def _let_go(self, layers: tuple[Layer, ...], state: Any, lean: LeanSize) -> int:
        """The bytes of the state that a lean tape does not hold."""
        log = Log()
        with left_as_it_was(list(layers)), watching(log):
            given = copied(state)
            numbers = {log.number(tensor) for tensor in tensors_of(given)} - {0}
            result = run_lean(layers, given, lean)
            del given
        freed = log.bytes(numbers - log.alive())
        del result
        return freed

    def _passed(self, layers: tuple[Layer, ...], state: Any, names: dict[int, int], lean: LeanSize) -> int:
        """The most bytes, the state included, while layers run with a lean tape of which nothing is kept."""
        log, mark = self._log, len(self._log.events)
        try:
            with left_as_it_was(list(layers)), watching(log), keeping_nothing():
                run_lean(layers, state, lean)
        except Dropped:
            mark = len(log.events)
            with left_as_it_was(list(layers)), watching(log):
                run_lean(layers, state, lean)
        return Places(log, state, names).bytes() + log.level(mark, len(log.events))[1]

    def _step(
        self, bound: tuple[int, int], state: Any, names: dict[int, int], base: int, lean: LeanSize | None = None
    ) -> StepCost:
        """Run one step forward and backward; with `lean`, keep a lean tape of that size."""
        log, layers, last = self._log, tuple(self._layers[slice(*bound)]), bound[1] == len(self._layers)
        before = Places(log, state, names)
        held = max(1, before.bytes())  # a chain has at least a byte of state
        packed: set[int] = set()
        mark, since, began = len(log.events), now(), seconds_now()
        with watching(log), log.packing(packed):
            result = through(layers, state) if lean is None else run_lean(layers, state, lean)
        forward = seconds_now() - began
        outputs = set(Places(log, result, names).names.values()) - set(before.names.values()) - {0}
        tape = log.bytes(packed - outputs - set(before.names.values()) - self._copies)
        self._given = 0 if last else log.bytes(outputs)
        taping = log.level(mark, len(log.events), outputs if last else ())[1]
        if last:
            self._plain |= outputs
        given: list[torch.Tensor] | None = [] if last else None
        # The caller holds the last result. Any other state is freed before the backward, unless a tape holds it.
        seed, result = seed_of(result, given), (result if last else None)
        pulling, backward, cotangent = self._pull(seed, before, since, mark, outputs if last else set(), given)
        return StepCost(
            held,
            held + tape,
            min(forward, self._groups.seconds(*bound)),
            backward,
            cotangent=cotangent,
            working=Working(
                advance=base + self._groups.advance(*bound),
                tape=base + max(0, taping - tape),
                backward=base + max(0, pulling - tape),
            ),
        )

    def _pull(
        self,
        seed: torch.Tensor | None,
        state: Places,
        since: int,
        mark: int,
        aside: set[int],
        given: list[torch.Tensor] | None,
    ) -> tuple[int, float, int]:
        """Run a step's backward; returns the most bytes since event `mark`, seconds, and the bytes of its cotangent.

        The cotangent is that of the state. The storages `aside` are not counted, nor are the gradients of the result,
        which the caller holds: `given`.
        """
        log = self._log
        if seed is None:
            return 0, 0.0, 0
        level, _ = log.level(mark, len(log.events), aside)
        start, began = len(log.events), seconds_now()
        wanted = [tensor for tensor in state.tensors if tensor.requires_grad]
        ours = [tensor for tensor in wanted if state.names[key_of(tensor)]]
        with watching(log):
            found, others = pulled(seed, [*ours, *(t for t in wanted if not state.names[key_of(t)])], since)
        seconds = seconds_now() - began
        callers = {log.number(gradient) for gradient in given or ()}
        cotangents = {log.number(gradient) for gradient in found[: len(ours)] if gradient is not None} - callers
        theirs = {log.number(gradient) for gradient in (*found[len(ours) :], *others) if gradient is not None}
        theirs = theirs - cotangents | callers
        self._plain |= theirs
        _, most = log.level(start, len(log.events), aside | theirs)
        return level + most, seconds, log.bytes(cotangents)


def _a_byte_less(cost: StepCost) -> StepCost:
    """The cost without the byte that a chain counts for the first state, which is the caller's and costs nothing."""
    was = cost.working
    working = Working(max(0, was.advance - 1), max(0, was.tape - 1), max(0, was.backward - 1))
    options = tuple(replace(option, backward=max(0, (option.backward or 0) - 1)) for option in cost.options)
    return replace(cost, working=working, options=options)


def lean_points(layers: tuple[Layer, ...], state: Any) -> list[LeanPoint]:
    """A few smaller tapes for these layers (see `worthwhile`); the layers are run to find them."""
    if not can_lean(through, layers, state):
        return []
    return worthwhile(lean_menu(through, layers, state))


def worthwhile(points: list[LeanPoint]) -> list[LeanPoint]:
    """The points of a menu that are worth measuring, the largest tape first.

    They are those nearest to the tape without all that is cheap to recompute, to half that saving, and to half that
    tape; of these, the ones that save enough.
    """
    free = next(point for point in points if point.is_free)
    saved = free.plain_tape - free.tape
    sizes = (free.plain_tape - saved / 2, free.tape, free.tape / 2)
    chosen = {_nearest(points, size) for size in sizes}
    worth = [point for point in chosen if point.tape < (1 - _LEAST_SAVING) * point.plain_tape]
    return sorted(worth, key=lambda point: -point.tape)


def _nearest(points: list[LeanPoint], size: float) -> LeanPoint:
    return min(points, key=lambda point: abs(point.tape - size))
