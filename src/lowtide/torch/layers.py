"""A row of layers measured into a chain: one layer at a time, leaving no trace.

First every layer runs by itself without a tape: that decides which layers make a step (`layer_groups.py`), and is what
running a step plainly takes. Then every step is taped and pulled back (`step_pull.py`), and then checkpointed. Not
counted is what the plain run holds too: the caller's input, the result and its gradient, parameters and theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lowtide.chain import Chain, StepCost, TapeOption, Working
from lowtide.torch import recording
from lowtide.torch.capture import now
from lowtide.torch.checkpoint import checkpoint
from lowtide.torch.layer_forms import lean_points, name_of_form, run_lean
from lowtide.torch.layer_groups import Dropped, Groups, unpack_dropped
from lowtide.torch.lean_graph import LeanSize
from lowtide.torch.measure import storage_bytes, watching
from lowtide.torch.notes import may_be_copied
from lowtide.torch.step_pull import pulled, seed_of
from lowtide.torch.step_seconds import Likeness, Seconds, through, timed
from lowtide.torch.storages import Log, Places, copied, detached, key_of, tensors_of
from lowtide.torch.traceless import Layer, aside, left_as_it_was

# A step that takes less is timed once more without being watched, which slows small operations down.
_SHORT = 0.005


@dataclass(frozen=True, slots=True)
class Row:
    """Layers as a chain. `bounds` are the layers [start, stop) of each step; those before the first run plainly.

    Without a chain nothing has a tape. For each step:

    - `kept`: bytes that a checkpoint call over it keeps beside its first state: copies of buffers that layers change;
    - `copied`: bytes of the state that a checkpoint call from it copies until it has run: the function may change them;
    - `unheld`: bytes of the state that are counted in the tape, and are there only if a checkpoint call holds them;
    - `unheld_by`: the same for each smaller tape;
    - `passing`: for each smaller tape, most bytes, the state among them, while the step runs so in a checkpoint call.

    `peak` is what measuring took.
    """

    bounds: tuple[tuple[int, int], ...]
    chain: Chain | None
    kept: tuple[int, ...]
    copied: tuple[int, ...]
    unheld: tuple[int, ...]
    unheld_by: tuple[tuple[int, ...], ...]
    passing: tuple[tuple[int, ...], ...]
    peak: int


def measure_layers(layers: list[Layer], x: Any, *, forms: bool) -> Row:
    """Run every layer a few times, and leave everything as it was, also after an exception.

    Args:
        layers: what to measure.
        x: what the first one gets.
        forms: measure smaller tapes too.
    """
    with aside(layers):
        return _Meter(layers, x, forms).row(x)


def name_of(layers: list[Layer], start: int, stop: int) -> str:
    """What reports call the step of these layers: "3-4 Conv2d, ReLU"."""
    kinds = [_kind(layer) for layer in layers[start:stop]]
    return f"{start if stop == start + 1 else f'{start}-{stop - 1}'} {', '.join(kinds)}"


def _kind(layer: Layer) -> str:
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)


class _Meter:
    """Measures one row."""

    def __init__(self, layers: list[Layer], x: Any, forms: bool) -> None:
        self._layers = layers
        self._forms = forms
        self._log = Log()
        self._groups = Groups(layers, x, self._log)
        # Storages that the plain run makes too: gradients and the result.
        self._plain = set(self._groups.result)
        self._copies: set[int] = set()  # storages that stand for the caller's
        self._kept: list[int] = []
        self._copied: list[int] = []
        self._given = 0  # bytes of what the last step gave
        self._passing: list[tuple[int, ...]] = []
        self._unheld_by: list[tuple[int, ...]] = []
        self._seconds = Seconds()

    def row(self, x: Any) -> Row:
        """Measure the layers from this input."""
        log, bounds = self._log, self._groups.bounds
        recording.count(probe=len(bounds))
        if not bounds:
            return Row((), None, (), (), (), (), (), log.level(0, len(log.events))[1])
        costs = self._taped(x, bounds)
        recording.count(probe=len(bounds))
        parameters = [p for layer in self._layers if isinstance(layer, nn.Module) for p in layer.parameters()]
        chain = replace(
            Chain.of(costs, [name_of(self._layers, *bound) for bound in bounds]),
            parameters=storage_bytes(parameters),
            gradients=storage_bytes([p for p in parameters if p.requires_grad]),
        )
        peak = log.level(0, len(log.events), self._plain)[1]
        unheld = tuple(self._groups.unheld(start) for start, _ in bounds)
        kept, copied_, unheld_by = tuple(self._kept), tuple(self._copied), tuple(self._unheld_by)
        return Row(bounds, chain, kept, copied_, unheld, unheld_by, tuple(self._passing), peak)

    def _taped(self, x: Any, bounds: tuple[tuple[int, int], ...]) -> list[StepCost]:
        log = self._log
        lead = self._layers[: self._groups.lead]
        with watching(log):
            state = copied(x) if lead else detached(x)
        self._copies = {log.number(tensor) for tensor in tensors_of(state)} | {0}
        names = dict.fromkeys(Places(log, state, {}).names, 0)
        mark, packed = len(log.events), set[int]()
        with left_as_it_was(lead), watching(log), self._packing(packed):
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
        """Add what a step costs; gives the state after it, and its names."""
        layers = self._layers[slice(*bound)]
        self._copied.append(sum(tensor.nbytes for tensor in tensors_of(state) if may_be_copied(tensor)))
        with left_as_it_was(layers):
            cost = self._step(bound, state, names, base)
        if self._forms:
            cost = replace(cost, options=tuple(self._options(bound, state, names, base)))
        else:
            self._passing.append(())
            self._unheld_by.append(())
        likeness = Likeness(layers, state, cost)
        if cost.forward < _SHORT and not self._seconds.knows(likeness):
            with left_as_it_was(layers):
                cost = timed(layers, state, cost)
        self._seconds.add(likeness, cost)
        with left_as_it_was(layers):
            return self._checkpointed(layers, state, names)

    def _checkpointed(self, layers: list[Layer], state: Any, names: dict[int, int]) -> tuple[Any, dict[int, int]]:
        """The state after a step, and its names; on the way, the bytes that a checkpoint call keeps beside states.

        It comes last, because in a run the next state, where no tape holds it, is gone by the time of the backward.
        """
        log, mark = self._log, len(self._log.events)
        with watching(log):
            result = checkpoint(through, tuple(layers), state)
        after = Places(log, result, names)
        made = set(after.names.values()) - set(names.values())
        self._kept.append(max(0, log.level(mark, len(log.events), made)[0]))
        return detached(result), after.names

    def _options(self, bound: tuple[int, int], state: Any, names: dict[int, int], base: int) -> Iterator[TapeOption]:
        """Smaller tapes for a step."""
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
            # Taping needs room too, beside the cotangent of what the step gives.
            beside = max(cost.working.backward, cost.working.tape + self._given)
            yield TapeOption(cost.tape, point.seconds, name_of_form(point), beside)

    def _let_go(self, layers: tuple[Layer, ...], state: Any, lean: LeanSize) -> int:
        """Bytes of the state that a lean tape does not hold."""
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
        """Most bytes, the state among them, while layers run with a lean tape of which nothing is kept."""
        log, mark = self._log, len(self._log.events)
        try:
            with left_as_it_was(list(layers)), watching(log), saved_tensors_hooks(lambda _: None, unpack_dropped):
                run_lean(layers, state, lean)
        except Dropped:
            mark = len(log.events)
            with left_as_it_was(list(layers)), watching(log):
                run_lean(layers, state, lean)
        return Places(log, state, names).bytes() + log.level(mark, len(log.events))[1]

    def _step(
        self, bound: tuple[int, int], state: Any, names: dict[int, int], base: int, lean: LeanSize | None = None
    ) -> StepCost:
        """Tape and pull back the layers of one step; with `lean`, keeping a tape of that size."""
        log, layers, last = self._log, tuple(self._layers[slice(*bound)]), bound[1] == len(self._layers)
        before = Places(log, state, names)
        held = max(1, before.bytes())  # a chain has at least a byte of state
        packed: set[int] = set()
        mark, since, began = len(log.events), now(), perf_counter()
        with watching(log), self._packing(packed):
            result = through(layers, state) if lean is None else run_lean(layers, state, lean)
        forward = perf_counter() - began
        outputs = set(Places(log, result, names).names.values()) - set(before.names.values()) - {0}
        tape = log.bytes(packed - outputs - set(before.names.values()) - self._copies)
        self._given = 0 if last else log.bytes(outputs)
        taping = log.level(mark, len(log.events), outputs if last else ())[1]
        if last:
            self._plain |= outputs
        given: list[torch.Tensor] | None = [] if last else None
        # The caller has the result; any other state is gone by the time of the backward, unless a tape holds it.
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
        return level + most, seconds, log.bytes(cotangents)

    @contextmanager
    def _packing(self, packed: set[int]) -> Iterator[None]:
        """Inside, note the storages that autograd saves and that were made here."""

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed.add(self._log.number(tensor))
            return tensor.detach()  # the tensor itself would keep the graph alive that made it

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield


def _a_byte_less(cost: StepCost) -> StepCost:
    """The first state is the caller's and takes nothing; the byte that a chain counts for it is there all the time."""
    was = cost.working
    working = Working(max(0, was.advance - 1), max(0, was.tape - 1), max(0, was.backward - 1))
    options = tuple(replace(option, backward=max(0, (option.backward or 0) - 1)) for option in cost.options)
    return replace(cost, working=working, options=options)
