"""The first steps of a loop, run with open eyes: what a step closes over, keeps hidden, draws, and costs.

They are the plan's own first runs: their outputs and states are used, and where the plan begins by taping, their tapes
are. Steps are probed until it is settled through which parts of the state gradients flow; two are enough for most.

Costs are measured on the last one probed, because the first is often not typical (no state yet, no gradient).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any, ClassVar

import torch

from lowtide.chain import Chain, StepCost, Ways, Working
from lowtide.errors import BudgetError, InputError
from lowtide.plan import Plan
from lowtide.planners.choose import choose, least_budget
from lowtide.planners.revolve import slots_within
from lowtide.sizes import parse_budget
from lowtide.torch import recording
from lowtide.torch.ambient import mark_bytes
from lowtide.torch.bits import checksum_bytes
from lowtide.torch.capture import Watch, edge_of, now
from lowtide.torch.engine import Engine
from lowtide.torch.measure import storage_bytes, watching
from lowtide.torch.meter import Meter
from lowtide.torch.pieces import Piece, Snapshot, edges_of, has_gradient
from lowtide.torch.walk import edge_set

# Gradients may need a few steps to reach every part of the state; a longer delay is found out later, and refused.
_MOST_STEPS = 16


@dataclass(frozen=True, slots=True)
class Costs:
    """What the probes measured: the chain, whose two ways of taping differ.

    A stretch of several steps needs a little more beside its tape than one step does: its start and its current state,
    and one more sum of gradients. And measuring takes memory of its own, which a budget has to have room for.
    """

    chain: Chain
    ways: Ways
    rooms: ClassVar[bool] = False  # tensors come and go: what one frees another may use

    def within(self, budget: int) -> Plan:
        """The plan with the fewest reruns that keeps the budget."""
        return choose(self.chain, budget)

    def slots_within(self, budget: int) -> int:
        """The most snapshots that the budget has room for, taping one step at a time."""
        least = least_budget(self.chain)
        if budget < least:
            remedy = "raise the budget, or make the steps smaller (a smaller batch, a cheaper step)"
            raise BudgetError(budget, least, remedy)
        return slots_within(self.ways.single, budget)


def probe(
    engine: Engine,
    *,
    captures: tuple[torch.Tensor, ...],
    costs: bool,
    pulls: bool,
    times: bool = False,
    budget: int | str | None,
    keep: bool,
    goes_on: Callable[[int], bool] | None = None,
) -> Costs | None:
    """Run the first steps.

    Args:
        engine: at its beginning; afterwards these steps are `engine.ahead` of the plan.
        captures: tensors that the step is said to close over.
        costs: measure bytes and seconds.
        pulls: also measure the backward of a step.
        times: put the measured seconds into the chain. They differ from call to call, and plans are found again only
            for equal chains, so a loop that runs its plan at once does without.
        budget: drop the first step's tape early unless all tapes are likely to fit in this.
        keep: keep the first step's tape in any case.
        goes_on: whether there is a step k; by default, if it is one of the loop's length.
    """
    goes_on = goes_on or (lambda k: k < engine.length)
    meter = Meter(engine.stepper.lean) if costs else None
    with engine.ambient.uncached():
        with meter.seeing() if meter else nullcontext():
            piece = _first(engine, captures, meter)
        engine.put(0, engine.last_output)
        if budget is not None and meter is not None:
            # Everything must fit with room to spare, because a tape that is kept makes the step look more costly.
            room = 8 * (meter.memory.now + mark_bytes(engine.random.mark(), engine.random.start))
            tapes = engine.length * meter.memory.now
            keep = tapes + room <= parse_budget(budget, max(1, tapes))
        engine.ahead.append((engine.begin, piece if keep else None))
        before = engine.begin.all_leaves()
        k, settled = 1, False
        while not settled and k < _MOST_STEPS and goes_on(k):
            engine.detach_state()
            engine.last_output = []
            piece = None
            with meter.seeing() if meter else nullcontext():
                snapshot = Snapshot(engine.leaves, engine.hidden.read(copy=True), engine.random.mark())
                before = engine.state()  # not the snapshot's: that has copies, which no tape holds
                piece, settled = _next(engine, k, snapshot, meter)
            engine.put(k, engine.last_output)
            k += 1
        measured = None
        if engine.stepper.lean is not None and (meter is not None or keep):
            piece = None
            with meter.seeing() if meter else nullcontext():
                piece, before = _rehearse(engine, meter, keep=keep)
        if meter is not None:
            measured = _costs(engine, meter, piece, before, pulls=pulls, keep=keep, times=times)
            if pulls and not keep:  # that pull has used up the last step's tape
                engine.ahead[-1] = (engine.ahead[-1][0], None)
    engine.last_output = []
    engine.detach_state()
    engine.hidden.settle()
    engine.shared.settle()
    engine.probing = False
    return measured


def _first(engine: Engine, captures: tuple[torch.Tensor, ...], meter: Meter | None) -> Piece | None:
    """Step 0: find captured tensors, hidden state and generators. Its tape, if it can serve as one."""
    engine.first_flags = [has_gradient(leaf) for leaf in engine.stepper.init]
    watch, since = Watch(), now()
    with engine.hidden.meeting_modules(), meter.on() if meter else nullcontext(), watch, engine.stepper.without_lean():
        piece = engine.tape(0, 1, put=False)
    hidden = engine.hidden
    hidden.probe([engine.begin.hidden])
    for generator, state in watch.generators.values():
        engine.random.add(generator, state)
    engine.begin.random = engine.random.start
    engine.advance_with_grad |= watch.needs_grad

    origins = hidden.origins()
    engine.first_flags += [origin is not None for origin in origins]
    piece.starts += [None] * len(origins)
    piece.ends = edges_of(engine.state())

    captured = engine.captured
    for tensor in captures:
        if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
            raise InputError("captures= is for tensors that need a gradient and that the step closes over")
        captured.add(tensor, "a tensor named in captures=")
    for module in hidden.modules:
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                captured.add(parameter, hidden.parameters[id(parameter)])
    given = edge_set([*piece.starts, *piece.xs])
    given.update(origin[0] for origin in origins if origin is not None)
    captured.learn(piece.roots(), given, since, watch)
    captured.settle()
    if any(edge_of(tensor) not in captured.edges for tensor in hidden.tensors if tensor.requires_grad):
        engine.walk.always()  # the step refers to a tensor that it may use later, and then its gradient would be lost

    _learn(engine, piece)
    # A graph that runs on into what was there before cannot serve as a tape.
    return None if captured.dependent or any(origins) else piece


def _next(engine: Engine, k: int, snapshot: Snapshot, meter: Meter | None) -> tuple[Piece, bool]:
    """Step k: which parts of the state have a gradient now, and whether that is as before."""
    with meter.on() if meter else nullcontext():
        piece = engine.tape(k, k + 1, put=False)
    earlier = [ahead.hidden for ahead, _ in engine.ahead]
    engine.hidden.probe([*earlier, snapshot.hidden])
    piece.starts += [None] * (len(snapshot.all_leaves()) - len(piece.starts))
    piece.ends = edges_of(engine.state())
    before = engine.profile.state
    _learn(engine, piece)
    engine.ahead.append((snapshot, piece))
    return piece, engine.profile.state == before


def _rehearse(engine: Engine, meter: Meter | None, *, keep: bool) -> tuple[Piece | None, list[Any]]:
    """The same steps once more, with lean tapes, now that it is known what a step depends on.

    In doing so the first ones are traced, and by now the last one has been: what is measured of it is what later ones
    take too. Gives the last one's tape and the state that it began with.
    """
    piece, before, count = None, engine.begin.all_leaves(), len(engine.ahead)
    engine.ahead[:] = [(snapshot, None) for snapshot, _ in engine.ahead]
    engine.restart()
    with recording.recomputing():
        for k in range(count):
            if k:
                engine.detach_state()
            engine.last_output = []
            piece, before = None, engine.state()
            with meter.on() if meter else nullcontext():
                piece = engine.tape(k, k + 1, put=False)
            if keep or k == count - 1:
                engine.ahead[k] = (engine.ahead[k][0], piece)
    recording.count(probe=count)
    return piece, before


def _learn(engine: Engine, piece: Piece) -> None:
    """Add what this step shows to the profile of all steps."""
    profile = engine.profile
    flags = [edge is not None for edge in piece.ends]
    if len(flags) == len(profile.state):
        flags = [new or old for new, old in zip(flags, profile.state, strict=True)]
    profile.state = flags
    gradients = [bool(column) for column in piece.outputs]
    profile.outputs[:] = [new or old for new, old in zip(gradients, profile.outputs or gradients, strict=True)]
    engine.shared.note(piece.stop, engine.state(), engine.last_output)


def _costs(
    engine: Engine,
    meter: Meter,
    piece: Piece | None,
    before: list[Any],
    *,
    pulls: bool,
    keep: bool,
    times: bool,
) -> Costs:
    """The chain of steps that cost what this one did; `before` and the engine's own state are its two ends."""
    after = engine.state()
    new = [leaf for leaf in after if isinstance(leaf, torch.Tensor)]
    state = storage_bytes(new) + mark_bytes(engine.random.mark(), engine.random.start)
    outputs = [leaf for leaf in engine.last_output if isinstance(leaf, torch.Tensor)]
    meter.leave_room([*new, *outputs])
    passing = storage_bytes([t for t in (*new, *outputs) if meter.made(t) and not meter.keeps(t)])
    kept_after = storage_bytes([t for t in new if meter.made(t) and meter.keeps(t)])
    # Of the state, the tape holds what came in or what goes out; along a stretch that is the same tensor.
    kept = [new if meter.keeps(old) or meter.keeps(new) else None for old, new in _pairs(before, after)]
    kept_state = storage_bytes([leaf for leaf in kept if leaf is not None])
    twice = storage_bytes([new for old, new in _pairs(before, after) if meter.keeps(old) and meter.keeps(new)])
    saved = max(0, meter.after - meter.before - passing - kept_after)
    gradients = sum(x.nbytes for x in (piece.xs if piece is not None else []))
    tape = max(saved + kept_state, state, gradients, 1)
    loose = state - kept_state  # the part of a state that no tape holds
    cotangent = storage_bytes([leaf for leaf, flag in zip(after, engine.profile.state, strict=False) if flag])
    start = storage_bytes([t for t in engine.begin.hidden.leaves() if isinstance(t, torch.Tensor)])
    # A checksum is made when a step has run, beside its state but not beside what it needed while it ran.
    checking = max((checksum_bytes(t) for t in (*new, *outputs)), default=0)
    slack = tape - saved - kept_state
    largest = max((t.nbytes for t in engine.captured.targets), default=0)
    pulled, backward = 0, 2 * meter.forward
    if pulls and piece is not None:
        pulled, backward = _pulled(engine, meter, piece, after, keep=keep)
    seconds = (meter.forward, backward) if times else (1.0, 2.0)

    def cost(several: bool) -> StepCost:
        # Several steps: a start, the current state, and the start of a probe's tape if that is kept.
        taping = (1 + 2 * several) * loose + meter.taped - saved - slack
        # Sums are added to out of place: the sum so far, what is added, and the new sum are there at once.
        pulling = pulled + (1 + several) * largest + loose + twice - slack if pulled else 0
        working = Working(
            advance=state + max(meter.taped, checking) + start,
            tape=max(0, taping, checking + loose) + start,
            backward=max(0, pulling) + start,
        )
        return StepCost(max(state, 1), tape, *seconds, cotangent=cotangent, working=working)

    ways = Ways(cost(several=True), cost(several=False), meter.memory.peak + start)
    captured = storage_bytes(engine.captured.targets)
    chain = Chain((ways.several,), engine.length, parameters=captured, gradients=captured, ways=ways)
    return Costs(chain, ways)


def _pairs(before: list[Any], after: list[Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    if len(before) != len(after):
        before = [None] * len(after)
    for old, new in zip(before, after, strict=True):
        if isinstance(new, torch.Tensor):
            yield old, new


def _pulled(engine: Engine, meter: Meter, piece: Piece, after: list[Any], *, keep: bool) -> tuple[int, float]:
    """Bytes, cotangents included, and seconds of pulling a step back; with zeros, which are as large as any."""
    before, worst = meter.memory.now, meter.memory.peak
    meter.memory.restart_peak()
    began = perf_counter()
    with watching(meter.memory):
        grads = [_zeros_for(leaf, engine.outputs.result_shape) for leaf in engine.last_output]
        grads += [_zeros_for(leaf, None) for leaf in after]
        pullback = engine.pullback(grads, [], piece.stop)
        del grads
        pullback.pull(piece, keep=keep)
        peak = meter.memory.peak - before
    meter.memory.peak = max(meter.memory.peak, worst)  # what finding out took includes what came before
    return peak, perf_counter() - began


def _zeros_for(leaf: Any, shape: Callable[[torch.Tensor], tuple[int, ...]] | None) -> torch.Tensor | None:
    """A cotangent for the leaf; where a shape is asked for, one that takes no room, as its owner is the caller."""
    if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
        return None
    return torch.zeros_like(leaf) if shape is None else leaf.new_zeros(()).expand(shape(leaf))
