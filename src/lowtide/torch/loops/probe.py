"""The first steps of a loop, run with open eyes: what a step closes over, keeps hidden, draws, and costs.

They are the plan's own first runs: their outputs and states are used, and where the plan begins by taping, their tapes
are. Steps are probed until it is settled through which parts of the state gradients flow; two are enough for most. The
runner runs them and learns from them; here is decided which are run, and what of their bytes and seconds a plan has to
know.

Costs are measured on the last one probed, because the first is often not typical (no state yet, no gradient).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any, ClassVar

import torch

from lowtide.chain import Chain, StepCost, Ways, Working
from lowtide.errors import BudgetError
from lowtide.plan import Plan
from lowtide.planners.choose import choose, least_budget
from lowtide.planners.revolve import MORE_ROOM, slots_within
from lowtide.sizes import parse_budget
from lowtide.torch.loops.lean_step import LeanStep
from lowtide.torch.loops.outputs import like_of
from lowtide.torch.loops.pullback import Piece
from lowtide.torch.loops.runner import Ahead, StepRunner
from lowtide.torch.memory import recording
from lowtide.torch.memory.tracker import Memory, storage_bytes, storage_of, watching
from lowtide.torch.state.capture import as_it_was_packed
from lowtide.torch.state.generators import mark_bytes

# Gradients may need a few steps to reach every part of the state; where they need more, all steps are taped at first.
_MOST_PROBED_STEPS = 16


@dataclass(frozen=True, slots=True)
class ProbedCosts:
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
            raise BudgetError(budget, least, MORE_ROOM)
        return slots_within(self.ways.single, budget)


@dataclass(frozen=True, slots=True)
class Probed:
    """What the first steps left: what they cost, if that was measured, and what a plan can use of their runs."""

    costs: ProbedCosts | None
    ahead: list[Ahead]


def probe(
    runner: StepRunner,
    *,
    captures: tuple[torch.Tensor, ...],
    costs: bool,
    pulls: bool,
    times: bool = False,
    budget: int | str | None,
    keep: bool,
    goes_on: Callable[[int], bool] | None = None,
) -> Probed:
    """Run the first steps.

    Args:
        runner: at its beginning; afterwards it is these steps further on, and knows what belongs to the state.
        captures: tensors that the step is said to close over.
        costs: measure bytes and seconds.
        pulls: also measure the backward of a step.
        times: put the measured seconds into the chain. They differ from call to call, and plans are found again only
            for equal chains, so a loop that runs its plan at once does without.
        budget: drop the first step's tape early unless all tapes are likely to fit in this.
        keep: keep the first step's tape in any case.
        goes_on: whether there is a step k; by default, if it is one of the loop's length.
    """
    goes_on = goes_on or (lambda k: k < runner.length)
    meter = Meter(runner.stepper.lean) if costs else None
    with runner.ambient.uncached():
        piece, meter = _first(runner, captures, meter)
        if budget is not None and meter is not None:
            keep = _all_tapes_fit(runner, meter, budget)
        ahead: list[Ahead] = [(runner.begin, piece if keep else None)]
        before = runner.begin.all_leaves()
        settled = False
        while not settled and len(ahead) < _MOST_PROBED_STEPS and goes_on(len(ahead)):
            piece = None  # one tape at a time, but for those ahead: the next one is measured
            before = runner.let_go()
            piece, settled = _next(runner, ahead, meter)
        if runner.stepper.lean is not None and (meter is not None or keep):
            piece = None
            piece, before = _rehearse(runner, ahead, meter, keep=keep)
        measured = None
        if meter is not None:
            measured = _costs(runner, meter, piece, before, pulls=pulls, keep=keep, times=times)
            if pulls and not keep:  # that pull has used up the last step's tape
                ahead[-1] = (ahead[-1][0], None)
    runner.end_learning(settled=settled)
    return Probed(measured, ahead)


def _first(
    runner: StepRunner, captures: tuple[torch.Tensor, ...], meter: Meter | None
) -> tuple[Piece | None, Meter | None]:
    """Step 0; returns its tape, if it can serve as one, and the meter, which may be a simpler one."""
    with _seeing(meter):
        try:
            with _around(meter):
                piece, watch = runner.tape_first()
        except RuntimeError as error:
            if meter is None or not meter.hooked or "saved tensor" not in str(error):
                raise
            # The transforms of `torch.func` allow no hooks around them.
            runner.forget_probe()
            return _first(runner, captures, Meter(hooked=False))
        serves = runner.learn_first(piece, watch, captures)
    runner.put_last(0)
    return piece if serves else None, meter


def _next(runner: StepRunner, ahead: list[Ahead], meter: Meter | None) -> tuple[Piece, bool]:
    """The step after those ahead, which it joins; returns its tape, and whether what it shows was known before."""
    k = len(ahead)
    with _seeing(meter):
        snapshot = runner.snapshot_copied()
        with _around(meter):
            piece = runner.tape(k, k + 1, put=False)
        settled = runner.learn(piece, [*(earlier for earlier, _ in ahead), snapshot])
    ahead.append((snapshot, piece))
    runner.put_last(k)
    return piece, settled


def _rehearse(
    runner: StepRunner, ahead: list[Ahead], meter: Meter | None, *, keep: bool
) -> tuple[Piece | None, list[Any]]:
    """The same steps once more, with lean tapes, now that it is known what a step depends on.

    In doing so the first ones are traced, and by now the last one has been: what is measured of it is what later ones
    take too. Returns the last one's tape and the state that it began with.
    """
    ahead[:] = [(snapshot, None) for snapshot, _ in ahead]
    last = len(ahead) - 1
    runner.find_moving()
    piece: Piece | None = None
    with _seeing(meter), runner.repeating(), runner.proof.telling(0, len(ahead)):
        runner.restart()
        before = runner.state()
        for k, (snapshot, _) in enumerate(ahead):
            if k:
                piece = None
                before = runner.let_go()
            with _around(meter):
                piece = runner.tape(k, k + 1, put=False)
            if keep or k == last:
                ahead[k] = (snapshot, piece)
    recording.count(probe=len(ahead))
    return piece, before


def _all_tapes_fit(runner: StepRunner, meter: Meter, budget: int | str) -> bool:
    """Whether all tapes are likely to fit, after the first step.

    With room to spare, because a tape that is kept makes the next step look more costly.
    """
    room = 8 * (meter.memory.now + mark_bytes(runner.random.mark(), runner.random.start))
    tapes = runner.length * meter.memory.now
    return tapes + room <= parse_budget(budget, max(1, tapes))


# --- what a step costs


class Meter:
    """Bytes and seconds of the step that is being probed.

    Hooks tell which tensors the tape holds. Without them, as `torch.func` wants it, that is taken to be all of them.
    """

    def __init__(self, lean: LeanStep | None = None, *, hooked: bool = True) -> None:
        self.hooked = hooked and lean is None
        self.memory = Memory()
        self._lean = lean
        self.packed: set[int] = set()  # storages that the tape holds
        self.forward = 0.0  # seconds
        self.taped = 0  # most bytes more than before, while the step was taped
        self._room = 0  # the most that a step has needed while it ran, and no longer afterwards
        self.before = self.after = 0  # bytes alive
        self._old: set[int] = set()  # storages alive before it

    def seeing(self) -> AbstractContextManager[None]:
        """Count what is made inside."""
        return watching(self.memory)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch one step being taped."""
        self.packed.clear()
        self.before = self.memory.now
        self._old = self.memory.alive()
        worst, self.memory.peak = self.memory.peak, self.memory.now
        began = perf_counter()
        with self._seeing_tape():
            yield
        self.forward = perf_counter() - began
        self.after = self.memory.now
        self.taped = self.memory.peak - self.before
        self._room = max(self._room, self.memory.peak - self.after)
        self.memory.peak = max(self.memory.peak, worst)

    def _seeing_tape(self) -> AbstractContextManager[None]:
        if self._lean is not None:
            return self._lean.watched(self.packed)
        return torch.autograd.graph.saved_tensors_hooks(self._pack, as_it_was_packed) if self.hooked else nullcontext()

    def leave_room(self, leaves: list[torch.Tensor]) -> None:
        """Raise what the last step needed to the most that any with such leaves needed, if later ones may be traced."""
        if self._lean is not None and self._lean.varies:
            room = self._lean.most_needed(tuple(like_of(leaf) for leaf in leaves), self._room)
            self.taped = self.after - self.before + room

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if (storage := storage_of(tensor)) is not None:
            self.packed.add(storage._cdata)
        return tensor.detach()  # the tensor itself would keep the graph alive that made it

    def saved(self, state: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
        """Bytes that the tape holds beside the state after the step.

        That is what the step made and is alive, but for what is only handed on, and for the state.
        """
        passing = storage_bytes([t for t in (*state, *outputs) if self._made(t) and not self.keeps(t)])
        kept_state = storage_bytes([t for t in state if self._made(t) and self.keeps(t)])
        return max(0, self.after - self.before - passing - kept_state)

    def _made(self, leaf: torch.Tensor) -> bool:
        """Whether the step made the leaf's storage."""
        storage = storage_of(leaf)
        return storage is not None and self.memory.knows(leaf) and storage._cdata not in self._old

    def keeps(self, leaf: Any) -> bool:
        """Whether the tape holds the leaf's storage."""
        storage = storage_of(leaf) if isinstance(leaf, torch.Tensor) else None
        return storage is not None and (not (self.hooked or self._lean) or storage._cdata in self.packed)


def _seeing(meter: Meter | None) -> AbstractContextManager[None]:
    return nullcontext() if meter is None else meter.seeing()


def _around(meter: Meter | None) -> AbstractContextManager[None]:
    if meter is not None:
        return meter.on()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        return nullcontext()
    # A tape that nobody pulls back would never be freed if hooks such as those of `save_on_cpu` kept its own tensors.
    pack, unpack = hooks
    return torch.autograd.graph.saved_tensors_hooks(lambda t: pack(t.detach().requires_grad_(t.requires_grad)), unpack)


@dataclass(frozen=True, slots=True)
class _StepBytes:
    """Bytes of the step that was measured."""

    state: int  # of the state after it, random states included
    kept_state: int  # of that, what the tape holds
    kept_twice: int  # of that, what it holds as it came in and as it goes out
    saved: int  # what the tape holds beside
    x_grads: int  # gradients of the step's own inputs
    taped: int  # most at once while it was taped
    start: int  # hidden state before the first step, which is held throughout

    @property
    def tape(self) -> int:
        """What a planner takes a tape to hold: at least its step's input, and room for what is made of it."""
        return max(self.saved + self.kept_state, self.state, self.x_grads, 1)

    def working(self, pulled: int, sum_: int, *, several: bool) -> Working:
        """Beside snapshots and tape, in stretches of several steps or one by one.

        `pulled` is what pulling the step back took in all, 0 if that was not tried; `sum_` the largest gradient that
        is summed over steps.
        """
        loose = self.state - self.kept_state  # the part of a state that no tape holds
        slack = self.tape - self.saved - self.kept_state  # what the planner already has room for
        # Several steps: a start, the current state, and the start of a probe's tape if that is kept.
        taping = (1 + 2 * several) * loose + self.taped - self.saved - slack
        # Sums are added to out of place: the sum so far, what is added, and the new sum are there at once.
        pulling = pulled + (1 + several) * sum_ + loose + self.kept_twice - slack if pulled else 0
        return Working(
            advance=self.state + self.taped + self.start,
            tape=max(0, taping, loose) + self.start,
            backward=max(0, pulling) + self.start,
        )


def _costs(
    runner: StepRunner,
    meter: Meter,
    piece: Piece | None,
    before: list[Any],
    *,
    pulls: bool,
    keep: bool,
    times: bool,
) -> ProbedCosts:
    """The chain of steps that cost what this one did; `before` and the runner's own state are its two ends."""
    after = runner.state()
    measured = _step_bytes(runner, meter, piece, before, after)
    cotangent = storage_bytes([leaf for leaf, flag in zip(after, runner.profile.state, strict=False) if flag])
    largest = max((storage_bytes([target]) for target in runner.captured.targets), default=0)
    pulled, backward = 0, 2 * meter.forward
    if pulls and piece is not None:
        pulled, backward = _pulled(runner, meter, piece, after, keep=keep)
    seconds = (meter.forward, backward) if times else (1.0, 2.0)
    several, single = (
        StepCost(
            max(measured.state, 1),
            measured.tape,
            *seconds,
            cotangent=cotangent,
            working=measured.working(pulled, largest, several=several),
        )
        for several in (True, False)
    )
    ways = Ways(several, single, meter.memory.peak + measured.start)
    captured = storage_bytes(runner.captured.targets)
    chain = Chain((several,), runner.length, parameters=captured, gradients=captured, ways=ways)
    return ProbedCosts(chain, ways)


def _step_bytes(
    runner: StepRunner, meter: Meter, piece: Piece | None, before: list[Any], after: list[Any]
) -> _StepBytes:
    """What the step whose state was `before`, and is `after` now, was measured to hold."""
    new, outputs = _tensors(after), _tensors(runner.last_output)
    meter.leave_room([*new, *outputs])
    # Of the state, the tape holds what came in or what goes out; along a stretch that is the same tensor.
    pairs = [(meter.keeps(old), meter.keeps(new), new) for old, new in _pairs(before, after)]
    return _StepBytes(
        state=storage_bytes(new) + mark_bytes(runner.random.mark(), runner.random.start),
        kept_state=storage_bytes([leaf for came_in, goes_out, leaf in pairs if came_in or goes_out]),
        kept_twice=storage_bytes([leaf for came_in, goes_out, leaf in pairs if came_in and goes_out]),
        saved=meter.saved(new, outputs),
        x_grads=sum(x.nbytes for x in (piece.xs if piece is not None else [])),
        taped=meter.taped,
        start=storage_bytes(_tensors(runner.begin.hidden.leaves())) + runner.hidden.copied_bytes(),
    )


def _tensors(leaves: list[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _pairs(before: list[Any], after: list[Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Each tensor of the state with what was at its position; None where the state had another form."""
    if len(before) != len(after):
        before = [None] * len(after)
    for old, new in zip(before, after, strict=True):
        if isinstance(new, torch.Tensor):
            yield old, new


def _pulled(runner: StepRunner, meter: Meter, piece: Piece, after: list[Any], *, keep: bool) -> tuple[int, float]:
    """Bytes, cotangents included, and seconds of pulling a step back; with zeros, which are as large as any."""
    before, worst = meter.memory.now, meter.memory.peak
    meter.memory.restart_peak()
    began = perf_counter()
    with watching(meter.memory):
        grads = [_zeros_for(leaf, runner.outputs.result_shape) for leaf in runner.last_output]
        grads += [_zeros_for(leaf, None) for leaf in after]
        pullback = runner.pullback(grads, [], piece.stop)
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
