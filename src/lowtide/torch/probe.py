"""The first steps of a loop, run with open eyes: what a step closes over, keeps hidden, draws, and costs.

They are the plan's own first runs: their outputs and states are used, and where the plan begins by taping, their tapes
are. Steps are probed until it is settled through which parts of the state gradients flow; two are enough for most.

Costs are measured on the last one probed, because the first is often not typical (no state yet, no gradient).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from lowtide.chain import Chain, StepCost, Working
from lowtide.errors import InputError
from lowtide.torch.ambient import mark_bytes
from lowtide.torch.capture import Watch, now
from lowtide.torch.engine import Engine, Piece, Snapshot, edges_of
from lowtide.torch.measure import Memory, storage_bytes, watching

# Gradients may need a few steps to reach every part of the state; a longer delay is found out later, and refused.
_MOST_STEPS = 16


@dataclass(frozen=True, slots=True)
class Probed:
    """What the probes found: the chain, if costs were asked for, and the bytes that finding it out took."""

    chain: Chain | None
    peak: int


class _Meter:
    """Bytes and seconds of the step that is being probed."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.packed: set[int] = set()
        self.forward = 0.0
        self.before = 0

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch one step being taped."""
        self.packed.clear()
        self.before = self.memory.now
        worst, self.memory.peak = self.memory.peak, self.memory.now
        began = perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack), watching(self.memory):
            yield
        self.forward = perf_counter() - began
        self.taped = self.memory.peak - self.before
        self.memory.peak = max(self.memory.peak, worst)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.packed.add(tensor.untyped_storage()._cdata)
        return tensor.detach()  # the tensor itself would keep the graph alive that made it

    def keeps(self, leaf: Any) -> bool:
        """Whether the tape holds the leaf's storage."""
        return isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata in self.packed


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def probe(
    engine: Engine,
    *,
    captures: tuple[torch.Tensor, ...],
    costs: bool,
    pulls: bool,
    budget: int | None,
    keep: bool,
    goes_on: Callable[[int], bool] | None = None,
) -> Probed:
    """Run the first steps.

    Args:
        engine: at its beginning; afterwards these steps are `engine.ahead` of the plan.
        captures: tensors that the step is said to close over.
        costs: measure bytes and seconds.
        pulls: also measure the backward of a step.
        budget: drop the first step's tape early unless all tapes are likely to fit in this.
        keep: keep the first step's tape in any case.
        goes_on: whether there is a step k; by default, if it is one of the loop's length.
    """
    goes_on = goes_on or (lambda k: k < engine.length)
    meter = _Meter() if costs else None
    with engine.ambient.uncached():
        piece = _first(engine, captures, meter)
        if budget is not None and meter is not None:
            keep = engine.length * meter.memory.now <= budget
        engine.ahead.append((engine.begin, piece if keep else None))
        begin: list[Any] = engine.begin.leaves + engine.begin.hidden.leaves()
        k, settled = 1, False
        while not settled and k < _MOST_STEPS and goes_on(k):
            engine.detach_state()
            snapshot = Snapshot(engine.leaves, engine.hidden.read(copy=True), engine.random.mark())
            begin = snapshot.leaves + snapshot.hidden.leaves()
            piece = None
            piece, settled = _next(engine, k, snapshot, meter)
            k += 1
    chain = None if meter is None else _chain(engine, meter, piece, begin, pulls)
    engine.last_output = []
    engine.detach_state()
    engine.hidden.settle()
    return Probed(chain, 0 if meter is None else meter.memory.peak)


def _first(engine: Engine, captures: tuple[torch.Tensor, ...], meter: _Meter | None) -> Piece | None:
    """Step 0: find captured tensors, hidden state and generators. Its tape, if it can serve as one."""
    engine.first_flags = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in engine.stepper.init]
    watch, since = Watch(), now()
    with engine.hidden.meeting_modules(), meter.on() if meter else nullcontext(), watch:
        piece = engine.tape(0, 1, put=False)
    hidden = engine.hidden
    hidden.probe([engine.begin.hidden])
    for generator, state in watch.generators.values():
        engine.random.add(generator, state)
    engine.begin.random = engine.random.start

    starts = hidden.start_leaves()
    flags = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in starts]
    engine.first_flags += flags
    piece.starts += [None] * len(flags)
    state = [*engine.leaves, *hidden.leaves()]
    piece.ends = edges_of(state)

    captured = engine.captured
    for tensor in captures:
        if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
            raise InputError("captures= is for tensors that need a gradient and that the step closes over")
        captured.add(tensor, "a tensor named in captures=")
    for module in hidden.modules:
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                captured.add(parameter, hidden.parameters[id(parameter)])
    ours = [leaf for leaf in (*piece.starts, *piece.xs) if leaf is not None]
    ours += [leaf for leaf, flag in zip(starts, flags, strict=True) if flag]
    captured.learn(piece.roots(), ours, since, watch)
    dependent = captured.settle()

    _learn(engine, piece, state)
    engine.put(0, engine.last_output)
    return None if dependent or any(flags) else piece


def _next(engine: Engine, k: int, snapshot: Snapshot, meter: _Meter | None) -> tuple[Piece, bool]:
    """Step k: which parts of the state have a gradient now, and whether that is as before."""
    with meter.on() if meter else nullcontext():
        piece = engine.tape(k, k + 1, put=False)
    earlier = [ahead.hidden for ahead, _ in engine.ahead]
    engine.hidden.probe([*earlier, snapshot.hidden])
    state = [*engine.leaves, *engine.hidden.leaves()]
    piece.starts += [None] * (len(snapshot.leaves) + len(snapshot.hidden.leaves()) - len(piece.starts))
    piece.ends = edges_of(state)
    before = engine.profile.state
    _learn(engine, piece, state)
    engine.put(k, engine.last_output)
    engine.ahead.append((snapshot, piece))
    return piece, engine.profile.state == before


def _learn(engine: Engine, piece: Piece, state: list[Any]) -> None:
    """Add what this step shows to the profile of all steps."""
    profile, outputs = engine.profile, engine.last_output
    flags = [edge is not None for edge in piece.ends]
    if len(flags) == len(profile.state):
        flags = [new or old for new, old in zip(flags, profile.state, strict=True)]
    profile.state = flags
    gradients = [bool(column) for column in piece.outputs]
    profile.outputs = [new or old for new, old in zip(gradients, profile.outputs or gradients, strict=True)]
    same = [
        (m, position)
        for m, output in enumerate(outputs)
        for position, leaf in enumerate(state)
        if output is leaf and isinstance(leaf, torch.Tensor)
    ]
    profile.same = same if piece.start == 0 else [pair for pair in profile.same if pair in same]


def _chain(engine: Engine, meter: _Meter, piece: Piece | None, before: list[Any], pulls: bool) -> Chain:
    """The chain of steps that cost what this one did; `before` and the engine's own state are its two ends."""
    after = [*engine.leaves, *engine.hidden.leaves()]
    new = [leaf for leaf in after if isinstance(leaf, torch.Tensor)]
    state = storage_bytes(new) + mark_bytes(engine.random.mark(), engine.random.start)
    outputs = [leaf for leaf in engine.last_output if isinstance(leaf, torch.Tensor)]
    passing = storage_bytes([t for t in (*new, *outputs) if meter.memory.knows(t) and not meter.keeps(t)])
    kept_after = storage_bytes([t for t in new if meter.keeps(t)])
    # Of the state, the tape holds what came in or what goes out; along a stretch that is the same tensor.
    kept = [new if meter.keeps(old) or meter.keeps(new) else None for old, new in _pairs(before, after)]
    kept_state = storage_bytes([leaf for leaf in kept if leaf is not None])
    saved = max(0, meter.memory.now - meter.before - passing - kept_after)
    gradients = sum(x.nbytes for x in (piece.xs if piece is not None else []))
    tape = max(saved + kept_state, state, gradients, 1)
    loose = state - kept_state  # the part of a state that no tape holds
    cotangent = storage_bytes([leaf for leaf, flag in zip(after, engine.profile.state, strict=False) if flag])
    start = storage_bytes([t for t in engine.begin.hidden.leaves() if isinstance(t, torch.Tensor)])
    slack = tape - saved - kept_state
    taping = max(0, 2 * loose + meter.taped - saved - slack) + start
    pulling, seconds = 0, 2 * meter.forward
    if pulls and piece is not None:
        peak, seconds = _pulled(engine, meter, piece, after)
        largest = max((t.nbytes for t in engine.captured.targets), default=0)
        pulling = max(0, peak + largest + loose + state - slack) + start
    working = Working(advance=state + meter.taped + start, tape=taping, backward=pulling)
    cost = StepCost(max(state, 1), tape, meter.forward, seconds, cotangent=cotangent, working=working)
    return Chain.equal(cost, engine.length)


def _pairs(before: list[Any], after: list[Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    if len(before) != len(after):
        before = [None] * len(after)
    for old, new in zip(before, after, strict=True):
        if isinstance(new, torch.Tensor):
            yield old, new


def _pulled(engine: Engine, meter: _Meter, piece: Piece, after: list[Any]) -> tuple[int, float]:
    """Bytes, cotangents included, and seconds of pulling a step back; with zeros, which are as large as any."""
    before = meter.memory.now
    meter.memory.restart_peak()
    began = perf_counter()
    with watching(meter.memory):
        grads = [_zeros_for(leaf, engine.outputs.result_shape) for leaf in engine.last_output]
        grads += [_zeros_for(leaf, None) for leaf in after]
        engine.take_cotangents(grads)
        del grads
        engine.pull(piece, keep=True)
        peak = meter.memory.peak - before
        engine.take_cotangents([])
    return peak, perf_counter() - began


def _zeros_for(leaf: Any, shape: Callable[[torch.Tensor], tuple[int, ...]] | None) -> torch.Tensor | None:
    """A cotangent for the leaf; where a shape is asked for, one that takes no room, as its owner is the caller."""
    if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
        return None
    return torch.zeros_like(leaf) if shape is None else leaf.new_zeros(()).expand(shape(leaf))
