"""The first steps of a loop, run with open eyes: what a step closes over, keeps hidden, draws, and costs.

They are the plan's own first runs: their outputs and states are used, and where the plan begins by taping, their tapes
are. Steps are probed until it is settled through which parts of the state gradients flow; two are enough for most. The
runner runs them and learns from them; here is decided which are run, and what of their bytes and seconds a plan has to
know.

A plan takes all steps to cost what the last one probed does, because the first is often not typical (no state yet, no
gradient). A few more are measured while the plan's first sweep runs them (`Lookout`). If one of them keeps or needs
other amounts, as with a cache that grows, the whole loop is run once to measure every step, and planned again as a
chain of unequal ones. Within a budget it is also measured again, without keeping a tape meanwhile, before the budget is
refused: so the least budget that the error names is what the plan for it takes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise, repeat
from typing import Any, ClassVar, cast

import torch

from lowtide.actions import Action
from lowtide.chain import Chain, StepCost, Ways, Working
from lowtide.errors import BudgetError, InputError
from lowtide.plan import Plan
from lowtide.planners.choose import choose, least_budget, refused
from lowtide.planners.revolve import slots_within
from lowtide.sizes import parse_budget
from lowtide.torch.loops.lean_step import LeanStep
from lowtide.torch.loops.outputs import like_of
from lowtide.torch.loops.pullback import Piece
from lowtide.torch.loops.runner import Ahead, StepRunner
from lowtide.torch.memory import recording
from lowtide.torch.memory.accelerators import seconds_now
from lowtide.torch.memory.tracker import Moment, Moments, storage_bytes, storage_of, storage_sizes, tensors_of, watching
from lowtide.torch.state.capture import as_it_was_packed
from lowtide.torch.state.generators import mark_bytes

# Gradients may need a few steps to reach every part of the state; where they need more, all steps are taped at first.
_MOST_PROBED_STEPS = 16
# So many of the first steps are measured one by one, to find out whether they are alike. A pattern that repeats every
# five steps is met twice.
LOOKED_AT = 8
_TIMES_AS_MUCH = 8  # as others, a step may keep and need that is met while tapes are kept


@dataclass(frozen=True, slots=True)
class ProbedCosts:
    """What was measured: the chain, and the bytes that measuring took, which a budget has to have room for.

    Attributes:
        chain: the steps; those of equal ones have two ways of taping. A stretch of several steps needs a little more
            beside its tape than one step does: its start and its current state, and one more sum of gradients.
        floor: the most bytes that measuring held.
        keeps_from: the least budget with which the probe keeps the tapes of the steps that it runs.
        spare: the bytes of those tapes, if this probe did not keep them.
    """

    chain: Chain
    floor: int
    keeps_from: int
    spare: int
    rooms: ClassVar[bool] = False  # tensors come and go: what one frees another may use

    def within(self, budget: int) -> Plan:
        """The plan with the fewest reruns that keeps the budget."""
        self.check(budget)
        return choose(self.chain, budget)

    def slots_within(self, budget: int) -> int:
        """The most snapshots that the budget has room for, taping one step at a time."""
        self.check(budget)
        assert self.chain.ways is not None  # steps of a loop without end are taken to be alike
        return slots_within(self.chain.ways.single, budget)

    def check(self, budget: int) -> None:
        """Refuse a budget that no plan fits, or that measuring has exceeded."""
        least = max(self.floor, least_budget(self.chain))
        if budget < least:
            # With a budget so large that tapes are kept while others are measured, measuring takes that much more.
            raise refused(self.chain, budget, least + (self.spare if least >= self.keeps_from else 0))


@dataclass(frozen=True, slots=True)
class Probed:
    """What the first steps left: what they cost, if that was measured, and what a plan can use of their runs."""

    costs: ProbedCosts | None
    ahead: list[Ahead]
    lookout: Lookout | None = None


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
    goes_on = goes_on or runner.has_step
    meter = Meter(runner.stepper.lean, timed=times) if costs else None
    with runner.ambient.uncached():
        piece, meter = _first(runner, captures, meter)
        keep, keeps_from = _keeping(runner, meter, budget, keep=keep)
        ahead: list[Ahead] = [(runner.begin, piece if keep else None)]
        before = runner.begin.all_leaves()
        seen = [] if meter is None else [_step_bytes(runner, meter, piece, before, like=_NOTHING)]
        settled = False
        if goes_on(1):
            piece = None
            piece, settled = _until_settled(runner, ahead, meter, seen, goes_on, like=_NOTHING if keep else None)
        if runner.stepper.lean is not None and (meter is not None or keep):
            piece = None
            piece, seen = _rehearse(runner, ahead, meter, keep=keep)
        measured, lookout = None, None
        spare = 0 if keep else sum(step.tape for step in seen)
        if meter is not None:
            if pulls:
                _pull_last(runner, meter, piece, ahead, seen, keep=keep)
            makes_leaves = runner.has_made_leaves(piece)
            del piece
            keeping = (keeps_from, spare)
            lookout = Lookout(runner, meter, seen, budget, times=times, keeping=keeping, makes_leaves=makes_leaves)
    runner.end_learning(settled=settled)
    if lookout is not None:
        measured = lookout.equal(_typical(seen), runner.length)
    return Probed(measured, ahead, lookout)


def _keeping(runner: StepRunner, meter: Meter | None, budget: int | str | None, *, keep: bool) -> tuple[bool, int]:
    """Whether the tapes of the steps that are probed are kept, after the first; and from which budget on they are."""
    if budget is None or meter is None:
        return keep, 0
    keeps_from = _room_to_keep(runner, meter)
    return parse_budget(budget, max(1, runner.length * meter.memory.now)) >= keeps_from, keeps_from


def _pull_last(
    runner: StepRunner, meter: Meter, piece: Piece | None, ahead: list[Ahead], seen: list[_StepBytes], *, keep: bool
) -> None:
    """Find out what it takes to pull the last step back; that uses up its tape, unless it is kept."""
    if piece is not None:
        seen[-1] = _pulled(runner, meter, piece, seen[-1], _output_cotangents(runner), keep=keep)
        if not keep:
            ahead[-1] = (ahead[-1][0], None)


def _until_settled(
    runner: StepRunner,
    ahead: list[Ahead],
    meter: Meter | None,
    seen: list[_StepBytes],
    goes_on: Callable[[int], bool],
    *,
    like: _StepBytes | None,
) -> tuple[Piece | None, bool]:
    """Run steps until one shows nothing new; returns the last one's tape, and whether there was such a step."""
    piece, settled = None, False
    while not settled and len(ahead) < _MOST_PROBED_STEPS and goes_on(len(ahead)):
        piece = None  # one tape at a time, but for those ahead: the next one is measured
        before = runner.let_go()
        piece, settled = _next(runner, ahead, meter)
        if meter is not None:
            seen.append(_step_bytes(runner, meter, piece, before, like=like))
    return piece, settled


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
            return _first(runner, captures, Meter(hooked=False, timed=meter.timed))
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
) -> tuple[Piece | None, list[_StepBytes]]:
    """The same steps once more, with lean tapes, now that it is known what a step depends on.

    In doing so the first ones are traced, and by now the last one has been: what is measured of it is what later ones
    take too. Returns the last one's tape and what the steps were measured to hold.
    """
    ahead[:] = [(snapshot, None) for snapshot, _ in ahead]
    last = len(ahead) - 1
    runner.find_moving()
    piece: Piece | None = None
    seen = []
    with _seeing(meter), runner.repeating(), runner.proof.telling(0, len(ahead)):
        runner.restart()
        before = runner.state()
        for k, (snapshot, _) in enumerate(ahead):
            if k:
                piece = None
                before = runner.let_go()
            with _around(meter):
                piece = runner.tape(k, k + 1, put=False)
            if meter is not None:
                seen.append(_step_bytes(runner, meter, piece, before, like=_NOTHING if keep else None))
            if keep or k == last:
                ahead[k] = (snapshot, piece)
    recording.count(probe=len(ahead))
    return piece, seen


def _room_to_keep(runner: StepRunner, meter: Meter) -> int:
    """The least budget with which tapes are kept: all of them are likely to fit, going by the first step.

    With room to spare, because a tape that is kept makes the next step look more costly.
    """
    one = meter.memory.now + _random_bytes(runner, meter)
    return runner.length * meter.memory.now + _TIMES_AS_MUCH * one


# --- what a step costs


class Meter:
    """Bytes and seconds of the step that is being probed.

    Hooks tell which tensors the tape holds. Without them, as `torch.func` wants it, that is taken to be all of them.
    """

    def __init__(self, lean: LeanStep | None = None, *, hooked: bool = True, timed: bool = True) -> None:
        self.timed = timed
        self.hooked = hooked and lean is None
        self.memory = Moments()
        self._lean = lean
        self.packed: set[int] = set()  # storages that the tape holds
        self._packed_alive: list[weakref.ref[torch.UntypedStorage]] = []  # each forgets its key when it is gone
        self.forward = 0.0  # seconds
        self.made = 0  # bytes that the step made and that are alive after it
        self.taped = 0  # most bytes at once, while the step was taped, of what it made
        self.older = 0  # bytes of what was alive before it and still is
        self._room = 0  # the most that a step has needed while it ran, and no longer afterwards
        self._old: set[int] = set()  # storages alive before it
        self._new: set[int] = set()  # storages that it made
        # Bytes that the step before made and that its tape did not hold, but that lived until this one, as where a hook
        # keeps the last activations.
        self.unpacked = 0

    def seconds_now(self) -> float:
        """The time; where nobody asks for seconds it stands still, because to read it would wait for accelerators."""
        return seconds_now() if self.timed else 0.0

    def seeing(self) -> AbstractContextManager[None]:
        """Count what is made inside."""
        return watching(self.memory)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch one step being taped."""
        memory = self.memory
        memory.let_threads_finish()
        self._old = memory.alive()
        earlier = {key: memory.bytes_of([key]) for key in self._new & self._old}
        packed = set(self.packed)
        self.packed.clear()
        self._packed_alive.clear()
        worst, memory.peak = memory.peak, memory.now
        began = self.seconds_now()
        with self._seeing_tape():
            yield
        self.forward = self.seconds_now() - began
        alive = memory.alive()
        self._new = alive - self._old
        self.made = memory.bytes_of(self._new)
        self.unpacked = sum(earlier[key] for key in earlier.keys() - alive - packed)
        # A hook that keeps the last activations lets go of older ones meanwhile. In a stretch their tape holds them.
        self.older = memory.bytes_of(self._old & alive)
        self.taped = memory.peak - self.older
        self._room = max(self._room, memory.peak - memory.now)
        memory.peak = max(memory.peak, worst)

    def _seeing_tape(self) -> AbstractContextManager[None]:
        if self._lean is not None:
            return self._lean.watched(self.packed)
        if not self.hooked:
            return nullcontext()
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is None:
            return torch.autograd.graph.saved_tensors_hooks(self._pack, as_it_was_packed)
        pack, unpack = hooks

        def packed(tensor: torch.Tensor) -> Any:
            kept = pack(_without_graph(tensor))
            for part in tensors_of(kept):
                self._note_packed(part)
            return kept

        return torch.autograd.graph.saved_tensors_hooks(packed, unpack)

    def _note_packed(self, tensor: torch.Tensor) -> None:
        """The tape holds the tensor's storage, as long as this lives: another one may get its key after that."""
        storage, packed = storage_of(tensor), self.packed
        if storage is not None and (key := storage._cdata) not in packed:
            packed.add(key)
            self._packed_alive.append(weakref.ref(storage, lambda _: packed.discard(key)))

    def packed_anew(self, tensors: list[torch.Tensor]) -> int:
        """The bytes that hooks around the loop make of tensors that the loop itself saves."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is None:
            return 0
        before = self.memory.now
        with self.seeing():
            held = [hooks[0](_without_graph(tensor)) for tensor in tensors]
        made = self.memory.now - before
        del held
        return made

    def leave_room(self, leaves: list[torch.Tensor]) -> None:
        """Raise what the last step needed to the most that any with such leaves needed, if later ones may be traced."""
        if self._lean is not None and self._lean.varies:
            room = self._lean.most_needed(tuple(like_of(leaf) for leaf in leaves), self._room)
            self.taped = self.made + room

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self._note_packed(tensor)
        return tensor.detach()  # the tensor itself would keep the graph alive that made it

    def saved(self, state: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
        """Bytes that the tape holds beside the state after the step.

        That is what the step made and is alive, but for what is only handed on, and for the state.
        """
        passing = storage_bytes([t for t in (*state, *outputs) if self._made(t) and not self.keeps(t)])
        kept_state = storage_bytes([t for t in state if self._made(t) and self.keeps(t)])
        return max(0, self.made - passing - kept_state)

    def _made(self, leaf: torch.Tensor) -> bool:
        """Whether the step made the leaf's storage."""
        storage = storage_of(leaf)
        return storage is not None and self.memory.knows(leaf) and storage._cdata in self._new

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
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: pack(_without_graph(tensor)), unpack)


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


@dataclass(frozen=True, slots=True)
class _StepBytes:
    """Bytes of a step that was measured."""

    before: int  # of the state before it
    state: int  # of the state after it, random states included
    kept_state: int  # of that, what the tape holds
    kept_twice: int  # of that, what it holds as it came in and as it goes out
    kept_after: int  # of that, what it holds only as it goes out
    saved: int  # what the tape holds beside
    x_grads: int  # gradients of the step's own inputs
    drawn: int  # random states, which no tape holds
    cotangent: int  # gradients of the state after it
    taped: int  # most at once while it was taped
    start: int  # what is held throughout: hidden state before the first step, random states
    unpacked: int  # what is left behind beside the state and held by no tape, which the plain loop holds too
    seconds: float  # of its forward
    held: int = 0  # most bytes at once while it was measured, if that was looked at
    pulled: int = 0  # what pulling it back took in all, 0 if that was not tried
    pulled_beside: int = 0  # most at once without the sums of gradients that it makes
    backward: float = 0.0  # seconds of that
    # What makes up `taped`, `pulled` and `held`, the most of each: by its name, the bytes at each moment.
    moments: Mapping[str, dict[Moment, int]] = field(default_factory=dict)

    @property
    def tape(self) -> int:
        """What a planner takes a tape to hold: at least its step's input, and room for what is made of it."""
        return max(self.saved + self.kept_state, max(self.state, self.before) - self.drawn, self.x_grads, 1)

    def is_beyond(self, other: _StepBytes, more: int = 0) -> bool:
        """Whether the step keeps or needs more than another one, and `more` bytes besides."""
        mine = (self.state, self.saved + self.kept_state, self.taped, self.cotangent)
        return any(
            a > b + more for a, b in zip(mine, (other.state, other.tape, other.taped, other.cotangent), strict=True)
        )

    def is_far_below(self, other: _StepBytes) -> bool:
        """Whether a plan that takes the step to cost what another one does would use much less than it might."""
        return 10 * self.tape < 9 * other.tape or 10 * self.state < 9 * other.state

    def working(self, sums: list[int], freed: int, *, several: bool) -> Working:
        """Beside snapshots and tape, in stretches of several steps or one by one.

        `sums` are the bytes of gradients that are summed over steps. Of the tape of any step, at least `freed` is free
        once it has been pulled back.
        """
        # A current state has no random states of its own: the generators are in them. Those that are held beside
        # snapshots, the latest that were read and those of before the backward, are part of `start`.
        current = self.state - self.drawn
        loose = current - self.kept_state  # the part of a state that no tape holds
        slack = self.tape - self.saved - self.kept_state  # what the planner already has room for
        # Several steps: a start, the current state, and the start of a probe's tape if that is kept.
        taping = (1 + 2 * several) * loose + self.taped - self.saved - slack
        # While a stretch is pulled back, the sums of its later steps are there beside those of later stretches. All but
        # the first step to be pulled back find them complete, and the tape of a later step free. They are added to out
        # of place: what is added, and the new sum, are there at once with the one so far.
        all_, largest = sum(sums), max(sums, default=0)
        complete = min(self.pulled, self.pulled_beside + 2 * largest) + all_ - freed if several else 0
        pulling = max(self.pulled, complete) + loose + self.kept_twice - slack if self.pulled else 0
        return Working(
            advance=current + self.taped + self.start,
            tape=max(0, taping, loose) + self.start,
            backward=max(0, pulling) + self.start,
        )


def _step_bytes(
    runner: StepRunner, meter: Meter, piece: Piece | None, before: list[Any], *, like: _StepBytes | None = None
) -> _StepBytes:
    """What the step that ran last, from a state with the leaves `before`, was measured to hold.

    What steps leave behind is taken from `like` where tapes are kept, so that nobody can tell what else outlives them.
    """
    after = runner.state()
    new, outputs = _tensors(after), _tensors(runner.last_output)
    meter.leave_room([*new, *outputs])
    saved = meter.saved(new, outputs)
    unpacked = meter.unpacked if like is None else like.unpacked
    drawn = _random_bytes(runner, meter)
    # A running sum is added to out of place, while the output is there.
    adding = storage_bytes(outputs) if runner.outputs.in_step_order else 0
    flows = runner.profile.state
    if len(flows) != len(after):  # a state that grows: what was learned is of another one
        flows = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in after]
    return _StepBytes(
        before=storage_bytes(_tensors(before)) + drawn,
        state=storage_bytes(new) + drawn,
        kept_state=_kept(meter, before, after, {(True, False), (False, True), (True, True)}),
        kept_twice=_kept(meter, before, after, {(True, True)}),
        kept_after=_kept(meter, before, after, {(False, True)}),
        saved=max(0, saved - unpacked),
        x_grads=sum(x.nbytes for x in _own_inputs(runner, piece)),
        drawn=drawn,
        cotangent=storage_bytes([leaf for leaf, flag in zip(after, flows, strict=True) if flag]),
        taped=max(meter.taped, meter.made + adding),
        # Of the generators, the latest states and those of before the backward; those at the start are a snapshot's.
        start=storage_bytes(_tensors(runner.begin.hidden.leaves())) + runner.hidden.copied_bytes() + 2 * drawn,
        unpacked=unpacked,
        seconds=meter.forward,
        backward=2 * meter.forward,
    )


def _kept(meter: Meter, before: list[Any], after: list[Any], how: set[tuple[bool, bool]]) -> int:
    """Bytes of the state that the tape holds in one of these ways: as it came in, as it goes out.

    Along a stretch, what goes out of a step and comes into the next one is the same tensor.
    """
    pairs = _pairs(before, after)
    return storage_bytes([new for old, new in pairs if (meter.keeps(old), meter.keeps(new)) in how])


def _random_bytes(runner: StepRunner, meter: Meter) -> int:
    """Bytes of the present states that are not those of the start; they are kept in the host's memory."""
    if not meter.memory.is_of_host:
        return 0
    return mark_bytes(runner.random.mark(), runner.random.start)


def _own_inputs(runner: StepRunner, piece: Piece | None) -> list[torch.Tensor]:
    """The differentiable inputs of the last step of a piece."""
    count = len(runner.inputs.differentiable)
    return [] if piece is None or not count else piece.xs[-count:]


def _tensors(leaves: list[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _pairs(before: list[Any], after: list[Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Each tensor of the state with what was at its position; None where the state had another form."""
    if len(before) != len(after):
        before = [None] * len(after)
    for old, new in zip(before, after, strict=True):
        if isinstance(new, torch.Tensor):
            yield old, new


def _output_cotangents(runner: StepRunner) -> list[torch.Tensor | None]:
    """Zeros for the last step's outputs, which are let go, as in a plan before it pulls back."""
    grads = [_zeros_for(leaf, runner.outputs.result_shape) for leaf in runner.last_output]
    runner.last_output = []
    return grads


def _pulled(
    runner: StepRunner,
    meter: Meter,
    piece: Piece,
    step: _StepBytes,
    grads: list[torch.Tensor | None],
    *,
    keep: bool,
) -> _StepBytes:
    """The step with what pulling it back takes, cotangents included; with zeros, which are as large as any.

    `grads` are those of its outputs.
    """
    before, worst = meter.memory.now, meter.memory.peak
    meter.memory.restart_peak()
    began = meter.seconds_now()
    # They come in, not watched, as where later steps were pulled back before, because sums are added to out of place.
    sums = [_sum_so_far(target) for target in runner.captured.targets]
    with watching(meter.memory):
        pullback = runner.pullback([*grads, *(_zeros_for(leaf, None) for leaf in runner.state())], [], piece.stop)
        pullback.captured = sums
        del sums
        pullback.pull(piece, keep=keep)
        peak = meter.memory.peak - before
        for total in pullback.captured:
            if total is not None:
                meter.memory.leave_out(total)
        beside = meter.memory.beyond(living=True) - before
    meter.memory.peak = max(meter.memory.peak, worst)  # what finding out took includes what came before
    return replace(step, pulled=peak, pulled_beside=beside, backward=meter.seconds_now() - began)


def _zeros_for(leaf: Any, shape: Callable[[torch.Tensor], tuple[int, ...]] | None) -> torch.Tensor | None:
    """A cotangent for the leaf; where a shape is asked for, one that takes no room, as its owner is the caller."""
    if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
        return None
    return torch.zeros_like(leaf) if shape is None else leaf.new_zeros(()).expand(shape(leaf))


def _sum_so_far(target: torch.Tensor) -> torch.Tensor | None:
    """A sum of gradients that takes no room; None for layouts of which no bytes are counted."""
    return None if storage_of(target) is None else target.detach().new_zeros(()).expand(target.shape)


# --- steps that are not alike


_MOST_TIMES_ODD = 3  # so often a loop of unknown length begins again
_ENDLESS = (
    "the steps of this loop keep more and more, and a loop of unknown length cannot be planned for that: pass "
    "checkpoints= in place of budget=, or use a loop whose length is known"
)
_NOTHING = _StepBytes(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0)
_BYTES = tuple(each.name for each in fields(_StepBytes) if each.name not in ("seconds", "backward", "moments"))


_LITTLE_MORE = 1.25  # times what others take while they run


def _typical(seen: list[_StepBytes]) -> _StepBytes:
    """What all steps are taken to cost: the last one that was seen, with room for one that takes a little more to run.

    The first one may, where it makes the state of numbers.
    """
    last, most = seen[-1], max(step.taped for step in seen)
    return replace(last, taped=most) if most <= _LITTLE_MORE * last.taped else last


def _most(one: _StepBytes, other: _StepBytes) -> _StepBytes:
    return replace(one, **{name: max(getattr(one, name), getattr(other, name)) for name in _BYTES})


class OddStep(Exception):  # noqa: N818  (it is no error)
    """A step keeps or needs other amounts than the plan takes it to."""


class Lookout:
    """Measures steps beyond the probed ones, and plans again if they are not alike.

    `seen` is what the steps that have been probed keep and need. The plan takes all others to be like the last of them.
    `keeping` has `keeps_from` and `spare` of `ProbedCosts`; `makes_leaves`: they make leaves of their own graphs.
    """

    def __init__(
        self,
        runner: StepRunner,
        meter: Meter,
        seen: list[_StepBytes],
        budget: int | str | None,
        *,
        times: bool,
        keeping: tuple[int, int],
        makes_leaves: bool,
    ) -> None:
        self._runner = runner
        self._meter = meter
        # For a loop of which nobody knows how many steps there will be: what to play with so many slots.
        self.with_slots: Callable[[int], Callable[[], Iterator[Action]]] | None = None
        self._times_odd = 0
        self._states = [step.state for step in seen]  # bytes of the state after each step that was looked at
        self._step = _typical(seen)
        # A tape that is made longer must not begin with leaves that its steps have made themselves.
        self._next = LOOKED_AT if makes_leaves else len(seen)
        self._odd = any(map(self._differs, seen[1:])) or seen[0].is_beyond(self._step, seen[0].start)
        self._budget = budget
        self._times = times
        self._keeping = keeping
        self._packed = meter.packed_anew(runner.differentiated())  # held from the end of the first sweep on
        self.uneven = False  # whether steps were found not to be alike, and are planned so

    @property
    def tapes_apart(self) -> bool:
        """Whether steps are taped one by one: where they differ, all gradients of a stretch's inputs are in the way."""
        return self.uneven and bool(self._runner.inputs.differentiable)

    # --- while the first sweep runs

    @property
    def is_tight(self) -> bool:
        """Whether a step that is not like the others may not find room beside tapes that are kept."""
        if self._budget is None or self.with_slots is not None:
            return False
        one = self._step.tape + self._step.state
        allowed = parse_budget(self._budget, max(1, self._runner.length * self._step.tape))
        return allowed < (self._looked_at() + _TIMES_AS_MUCH) * one

    def looks_at(self, k: int) -> bool:
        """Whether step k is one to be measured."""
        return self._next == k < LOOKED_AT

    def watch(self, k: int, tape: Callable[[], Piece]) -> Piece:
        """Tape step k by a call of `tape`; raises `OddStep` if it is not like the others."""
        runner, meter = self._runner, self._meter
        self._next = k + 1
        before = runner.state()
        with meter.seeing(), meter.on():
            piece = tape()
        step = _step_bytes(runner, meter, piece, before, like=self._step)
        self._states.append(step.state)
        if self._differs(step):
            self._step = step if self.with_slots is None else _most(step, self._step)
            raise OddStep
        return piece

    def check_state(self) -> None:
        """Raise `OddStep` if the current state is larger than the plan takes states to be."""
        grown = storage_bytes(_tensors(self._runner.state())) + self._step.drawn - self._step.state
        if grown > 0 and not self.uneven:
            step = self._step
            self._step = replace(step, state=step.state + grown, kept_state=step.kept_state + grown)
            raise OddStep

    def _differs(self, step: _StepBytes) -> bool:
        return step.is_beyond(self._step) or (self.with_slots is None and step.is_far_below(self._step))

    # --- plans

    def plan(self, probed: ProbedCosts) -> tuple[Plan, bool]:
        """The first plan, and whether it can go on from the probed steps."""
        odd = self._odd
        if not odd:
            with suppress(BudgetError):
                return self._chosen(probed), True
        return self._planned_again(self._runner.length, odd=odd), False

    def play_again(self, stop: int) -> Callable[[], Iterator[Action]]:
        """What to play instead for steps [0, stop), nothing of which is held but the state before them."""
        self._meter.memory.restart_peak()
        if self.with_slots is None:
            return self._planned_again(stop, odd=True).actions
        self._times_odd += 1
        if self._times_odd > _MOST_TIMES_ODD:
            raise InputError(_ENDLESS)
        costs = self.equal(self._step, stop)
        try:
            return self.with_slots(costs.slots_within(self._allowed(costs)))
        except BudgetError:
            if _rises(self._states):  # then the least that the error names would not do either
                raise InputError(_ENDLESS) from None
            raise

    def _planned_again(self, stop: int, *, odd: bool) -> Plan:
        """A plan by what each step costs; the budget is refused as soon as they are seen to need more.

        Unless steps are known to be `odd`, they are all taken to be alike if the first ones are.
        """
        runner, steps = self._runner, list[_StepBytes]()
        self._next, look_again = LOOKED_AT, self._looked_at()
        limit = self._allowed(self.equal(self._step, stop))
        runner.restart()
        since = dict.fromkeys(runner.uncopied(), 0)  # by storage: from which state on it has been part of all
        for k in range(stop):
            with runner.again(k), runner.proof.telling(k, k + 1) if k < runner.already else nullcontext():
                steps.append(self._measure(k))
            since = {key: since.get(key, k + 1) for key in runner.uncopied()}
            if len(steps) == min(look_again, stop) or (k >= LOOKED_AT and steps[-1].held > limit):
                alike = self._are_alike(steps)
                costs = self.equal(steps[-1], stop)
                if alike and (len(steps) == stop or (len(steps) == self._looked_at() and not odd)):
                    return self._chosen(costs)
                if alike:
                    costs.check(self._allowed(costs))  # one may have looked odd only beside tapes that were kept
                else:
                    self._check_foretold(steps, stop)
                look_again *= 2
        lasting = runner.uncopied()
        shared = [sum(size for key, size in lasting.items() if since[key] <= k) for k in range(stop + 1)]
        return self._chosen(self._unequal(steps, shared))

    def _check_foretold(self, steps: list[_StepBytes], stop: int) -> None:
        """Refuse a budget that steps up to `stop` will exceed if they go on as these do.

        The least that the error then names has room for growth that gets a little steeper.
        """
        foretold, larger = (self._unequal([*steps, *_foretold(steps, stop, steeper)]) for steeper in (0, 8))
        with suppress(BudgetError):
            foretold.check(self._allowed(foretold))
            return
        try:
            larger.check(self._allowed(larger))  # it needs as much at least, so this raises
        except BudgetError as error:
            if len(steps) > LOOKED_AT:  # by the growth of the first ones the budget had been thought to do
                steeper = f"from step {LOOKED_AT} on, steps grow more than the ones before let expect"
                raise BudgetError(error.budget, error.least, f"{steeper}; {error.remedy}", quick=error.quick) from None
            raise

    def _looked_at(self) -> int:
        return min(LOOKED_AT, self._runner.length)

    def _chosen(self, costs: ProbedCosts) -> Plan:
        return costs.within(self._allowed(costs)).logged("a loop")

    def _allowed(self, costs: ProbedCosts) -> int:
        """The bytes of the budget, which may be a share of all tapes."""
        assert self._budget is not None
        return parse_budget(self._budget, costs.chain.plain_tape)

    def _measure(self, k: int) -> _StepBytes:
        """Run step k, the next one, to find out what it costs."""
        runner, memory, worst = self._runner, self._meter.memory, self._meter.memory.peak
        before = runner.let_go()
        memory.restart_peak()
        with self._meter.seeing(), self._meter.on(), memory.noting("taping") as taping:
            piece = runner.tape(k, k + 1, put=False)
        step = _step_bytes(runner, self._meter, piece, before)
        runner.put_last(k)
        recording.count(probe=1)
        grads = _output_cotangents(runner)
        begun = memory.now
        with memory.noting("pulling") as pulling:
            step = _pulled(runner, self._meter, piece, step, grads, keep=False)
        held, memory.peak = memory.peak, max(memory.peak, worst)
        moments = {
            "taped": {moment: size - self._meter.older for moment, size in taping.items()},
            "pulled": {moment: size - begun for moment, size in pulling.items()},
            "held": taping | pulling,
        }
        return replace(step, held=held, moments=moments)

    @staticmethod
    def _are_alike(steps: list[_StepBytes]) -> bool:
        """Whether none costs more than the last one; the first may cost less."""
        last = steps[-1]
        return not any(step.is_beyond(last) for step in steps) and not any(
            step.is_far_below(last) for step in steps[1:]
        )

    # --- costs

    def equal(self, step: _StepBytes, length: int) -> ProbedCosts:
        """Costs of a loop of such steps."""
        several, single = (self._cost(step, step.state, step, step.saved, several=several) for several in (True, False))
        ways = Ways(several, single, self._floor([step]))
        return self._costs(Chain((several,), length, ways=ways), [step])

    def _unequal(self, steps: list[_StepBytes], shared: Iterable[int] = repeat(0)) -> ProbedCosts:
        """Costs of a loop of these steps.

        Of each state, `shared` bytes are in storages that all later states have too, as those of a list that grows. The
        state that is current while a later step runs has them, so beside it a snapshot or a tape's start does not count
        them.
        """
        self.uneven = True
        before = [steps[0], *steps]  # the state before a step has the gradient of that after the one before
        freed = min(step.saved for step in steps)
        costs = [
            self._cost(step, step.before - mine, old, freed, several=True, shared=after)
            for step, old, (mine, after) in zip(steps, before, pairwise(shared), strict=False)
        ]
        return self._costs(Chain.of(costs), steps)

    def _costs(self, chain: Chain, steps: list[_StepBytes]) -> ProbedCosts:
        captured = storage_bytes(self._runner.captured.targets)
        return ProbedCosts(replace(chain, parameters=captured, gradients=captured), self._floor(steps), *self._keeping)

    def _floor(self, steps: list[_StepBytes]) -> int:
        """The most bytes that measuring has held, or is foretold to hold."""
        held = max(self._meter.memory.peak, *(step.held for step in steps))
        return held + max(step.start for step in steps) + self._ends()

    def _ends(self) -> int:
        """Where states differ in size, what the state at which a tape ends may take beside the one that is current."""
        return storage_bytes(_tensors(self._runner.begin.leaves)) if self.uneven else 0

    def _cost(
        self, step: _StepBytes, state: int, earlier: _StepBytes, freed: int, *, several: bool, shared: int = 0
    ) -> StepCost:
        """What a planner has to know of a step that starts from a state of so many bytes.

        For `freed` see `working`, for what the state after it has `shared` see `_unequal`.
        """
        sums = list(storage_sizes(self._runner.captured.targets).values())
        apart = self.tapes_apart or self._runner.proof.compares_graphs
        if apart:  # each tape has a start of its own
            step = replace(step, kept_state=step.state - step.drawn - shared)
        several = several and not apart  # else each is pulled back alone
        step = replace(step, start=step.start + self._packed + self._ends())
        if self.uneven:  # the state that a tape starts from, which it does not hold, may be larger than what is freed
            step = replace(step, kept_twice=step.kept_twice + step.kept_after)
        return StepCost(
            max(state, 1),
            step.tape,
            *((step.seconds, step.backward) if self._times else (1.0, 2.0)),
            cotangent=earlier.cotangent,
            drawn=step.drawn,
            working=step.working(sums, freed, several=several),
        )


def _rises(sizes: list[int]) -> bool:
    """Whether each of the last three is larger than the one before: no end of it is to be seen."""
    return len(sizes) > 2 and sizes[-3] < sizes[-2] < sizes[-1]


def _foretold(steps: list[_StepBytes], stop: int, steeper: int) -> list[_StepBytes]:
    """The rest of the steps up to `stop`: what has grown steadily goes on doing so, of all else there is the most.

    It grows by one part in `steeper` more than it has, if that is not 0. Of what is the most of several moments, every
    moment is foretold: the one that grows the most may still be below another one.
    """
    lines = {name: [_line([getattr(step, name) for step in steps], steeper)] for name in _BYTES}
    for name in steps[-1].moments:
        seen = [step.moments[name] for step in steps]
        common = set(seen[-1]).intersection(*seen[1:])  # another moment of the first step would seem to have grown
        lines[name] += [_line([moments.get(moment, 0) for moments in seen], steeper) for moment in common]
    rest = range(1, stop - len(steps) + 1)
    most_at = [{name: max(most + k * slope for most, slope in found) for name, found in lines.items()} for k in rest]
    return [replace(steps[-1], **cast("dict[str, Any]", most)) for most in most_at]


def _line(seen: list[int], steeper: int) -> tuple[int, int]:
    """The most of these numbers of bytes, and by how much each step adds to it; for `steeper` see `_foretold`."""
    rises = [new - old for old, new in pairwise(seen[1:])]
    grows = 2 * sum(rise > 0 for rise in rises) > len(rises) or (steeper and _rises(seen))  # or it may have begun to
    slope = max(rises) if grows else 0
    return max(seen), slope + (slope // steeper if steeper else 0)
