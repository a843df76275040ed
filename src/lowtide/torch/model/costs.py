"""What a block costs in each of its forms: it is run by itself, with arguments like those of its one call.

Bytes are those beyond what was there before the block's forward; times are those of forward and backward together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import combinations, product
from time import perf_counter, process_time
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from lowtide.errors import BudgetError
from lowtide.forms import KEEP, RERUN, Form, LayerNest, Way, lean_form
from lowtide.plan import Plan
from lowtide.torch.layers.costs import measure_layers, worthwhile
from lowtide.torch.layers.nested import layer_nest
from lowtide.torch.layers.sequential import LayerPlans
from lowtide.torch.lean.call import can_lean, lean_menu
from lowtide.torch.lean.graph import LeanPoint
from lowtide.torch.lean.on_paper import lean_menu_on_paper
from lowtide.torch.memory.tracker import Log, tensors_of, watching
from lowtide.torch.model.apply import run_in
from lowtide.torch.model.blocks import FoundBlock
from lowtide.torch.model.forms import run_plainly
from lowtide.torch.model.untimed import untimed_layers
from lowtide.torch.paper.devices import Device
from lowtide.torch.paper.on_paper import PaperClock
from lowtide.torch.paper.operations import word_of
from lowtide.torch.state.capture import now, pulled, seed_of
from lowtide.torch.state.hidden import left_as_it_was

# Operations whose results are as large as values say.
_OF_ANY_SIZE = frozenset({"nonzero", "masked_select", "unique", "_unique2", "unique_consecutive", "bincount"})


@dataclass(frozen=True, slots=True)
class CallBytes:
    """Bytes of a call: held between forward and backward, the peaks of both, and the gradient of its result.

    What is held does not include the result.
    """

    held: int
    forward: int
    backward: int
    cotangent: int


class BlockCall:
    """A block's call, to be made again and again."""

    def __init__(self, block: FoundBlock, args: tuple[Any, ...], kwargs: dict[str, Any], on_paper: bool) -> None:
        self.block = block
        self._arguments = args, kwargs
        self._needs = block.call.needs
        self._on_paper = on_paper
        self.changes_arguments = False  # in place, which leaves of a graph do not allow

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Like those of the call, and leaves of a graph, or copies of such."""
        needs = iter(self._needs)

        def fresh(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return copy.deepcopy(leaf)
            if leaf.layout is not torch.strided:
                return leaf.detach()
            twin = leaf.detach().requires_grad_(next(needs))
            return twin.clone() if self.changes_arguments else twin

        args, kwargs = tree_map(fresh, self._arguments)
        return args, kwargs

    @contextmanager
    def given(self) -> Iterator[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
        """Inside, the block may change what it keeps; returns it, and arguments."""
        module = self.block.call.module
        torch.clear_autocast_cache()  # what another form has cast is not there for this one
        with nullcontext() if self._on_paper else left_as_it_was([module]), torch.enable_grad():
            yield module, *self.arguments()

    def watched(self, form: Form, looking: Looking | None = None) -> CallBytes:
        """Run forward and backward in a form, counting bytes; the forward is shown to `looking` too."""
        log = Log()
        with self.given() as (module, args, kwargs), run_in(form, module):
            if form.is_lean:  # the first call may be the one that is traced, which holds more
                module.forward(*args, **kwargs)
                args, kwargs = self.arguments()
            since = now()
            with watching(log), looking or nullcontext():
                result = module.forward(*args, **kwargs)
            outputs = {log.number(tensor) for tensor in tensors_of(result)} - {0}
            cotangent = sum(tensor.nbytes for tensor in tensors_of(result) if tensor.requires_grad)
            held, forward = log.level(0, len(log.events))
            held -= log.bytes(outputs)
            seed = seed_of(result)
            del result
            start, _ = log.level(0, len(log.events))
            mark = len(log.events)
            if seed is not None:
                with watching(log):
                    _pull(seed, args, kwargs, since)
            _, most = log.level(mark, len(log.events))
        return CallBytes(max(0, held), forward, start + most, cotangent)

    def timed(self, form: Form, clock: Callable[[], float]) -> tuple[float, float]:
        """Seconds of forward and backward in a form."""
        with self.given() as (module, args, kwargs), run_in(form, module):
            since, began = now(), clock()
            seed = seed_of(module.forward(*args, **kwargs))
            between = clock()
            if seed is not None:
                _pull(seed, args, kwargs, since)
            return between - began, clock() - between


class Looking(TorchDispatchMode):
    """Notes whether shapes depend on values, as where words are sent to experts: then each call has another tape."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.at_values = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.at_values |= word_of(func) in _OF_ANY_SIZE
        return func(*args, **(kwargs or {}))


def _pull(seed: torch.Tensor, args: Any, kwargs: Any, since: int) -> None:
    # Those that were changed in place are found like everything else that the block is given.
    pulled(seed, [t for t in tensors_of((args, kwargs)) if t.requires_grad and t.is_leaf], since)


def seconds_now() -> float:
    """A clock that is affected by other load as little as possible."""
    if torch.cuda.is_initialized():  # pragma: no cover
        torch.cuda.synchronize()
        return perf_counter()
    return process_time()


_MOST_TIMINGS = 5  # of a short block, of which the shortest counts
_ENOUGH_SECONDS = 0.5  # of timing a form, after which it is not timed again
_LEAST_GAIN = 0.02  # of the whole tape; a form that holds no less is left out
# Budgets for a row of layers, in equal parts of the way from the least to that of keeping everything; more of them
# where the row holds half of all tapes.
_BUDGETS_FOR_A_ROW, _BUDGETS_FOR_A_LARGE_ROW = 10, 24


@dataclass(frozen=True, slots=True)
class FormCost:
    """A form of a block.

    Attributes:
        form: the form itself.
        held: bytes that it holds between forward and backward, without its result.
        forward, backward: most bytes beyond what was there before its forward, while it runs and while it is pulled
            back; the result and the gradient of it among them.
        extra: seconds more than keeping everything takes.
        is_settled: whether it is on the menu at every time and place; others were found by measured seconds.
    """

    form: Form
    held: int
    forward: int
    backward: int
    extra: float
    is_settled: bool = True


@dataclass(frozen=True, slots=True)
class BlockCost:
    """A block: its forms, of which the first keeps everything; seconds of that; bytes of its result's gradient."""

    forms: tuple[FormCost, ...]
    forward: float
    backward: float
    cotangent: int


class Bench:
    """Measures blocks.

    Args:
        device: on which to estimate seconds, for blocks that are run on paper; None measures them.
        timed: whether seconds matter at all.
    """

    def __init__(self, device: Device | None, *, timed: bool) -> None:
        self._device = device
        self._timed = timed

    def cost(self, block: FoundBlock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCost:
        """What a block costs that is called with such arguments; it is left as it was."""
        call = BlockCall(block, args, kwargs, self._device is not None)
        looking = Looking()
        try:
            plain = call.watched(KEEP, looking)
        except RuntimeError as error:
            if "a leaf Variable" not in str(error):
                raise
            call.changes_arguments = True
            plain = call.watched(KEEP, looking)
        seconds = self._seconds(call, KEEP)
        forms = [FormCost(KEEP, plain.held, plain.forward, plain.backward, 0.0)]
        points = [] if looking.at_values else self._points(call)
        for form, point, extra, is_settled in self._forms(block, call, points):
            try:
                run = call.watched(form)
                if run.held > (1 - _LEAST_GAIN) * plain.held and form != RERUN:
                    continue
                if extra is None:
                    extra = self._extra(call, form, point, seconds)
            except RuntimeError:  # a submodule that changes its argument in place, for one, cannot be run again
                continue
            # The first call of a lean kind is traced, and holds its whole tape while it runs.
            forward = run.forward if point is None else max(run.forward, plain.forward)
            forms.append(FormCost(form, run.held, forward, run.backward, extra, is_settled))
        return BlockCost(tuple(forms), *seconds, plain.cotangent)

    def _forms(
        self, block: FoundBlock, call: BlockCall, points: list[LeanPoint]
    ) -> Iterator[tuple[Form, LeanPoint | None, float | None, bool]]:
        """All forms but the plain one.

        With the point of the lean frontier, and extra seconds, where they are known, and whether it is settled.
        """
        again = Way(rerun=True)
        for point in points:
            yield lean_form(point.tape, point.working), point, None, True
        if block.is_row:
            for nest, extra, is_settled in self._nests(call):
                yield Form((("", Way(nest=nest)),)), None, extra, is_settled
        for count in range(1, len(block.children) + 1):
            for children in combinations(block.children, count):
                yield Form(tuple((child, again) for child in children)), None, None, True
        yield RERUN, None, None, True
        if block.children:
            yield Form((("", again), *((child, again) for child in block.children))), None, None, True
        for point in points[-1:]:
            yield lean_form(point.tape, point.working, rerun=True), point, None, True

    def _extra(self, call: BlockCall, form: Form, point: LeanPoint | None, plain: tuple[float, float]) -> float:
        """Seconds that a form takes more than keeping everything."""
        if self._device is not None and point is not None:
            return point.seconds + plain[0] * form.ways[0][1].rerun
        return max(sum(self._seconds(call, form)) - sum(plain), 0.0 if point is None else point.seconds / 2, 1e-9)

    def _points(self, call: BlockCall) -> list[LeanPoint]:
        with call.given() as (module, args, kwargs):
            if self._device is not None:
                points = lean_menu_on_paper(self._device, run_plainly, module, args, kwargs)
            elif can_lean(run_plainly, module, args, kwargs):
                points = lean_menu(run_plainly, module, args, kwargs)
            else:
                points = []
        return worthwhile(points) if points else []

    def _nests(self, call: BlockCall) -> Iterator[tuple[LayerNest, float | None, bool]]:
        """Nested checkpoint calls for a row of layers; the extra seconds that they take; and whether they are settled.

        Settled are those that would be the fastest if the largest tapes took longest.
        """
        with call.given() as (module, args, _):
            row = measure_layers(list(module.children()), args[0], forms=self._device is None)
        chain = row.chain
        assert chain is not None  # a row is a block only if it has a tape
        timeless, timely = LayerPlans(untimed_layers(row)), LayerPlans(row)
        try:
            timeless.plan(1)
        except BudgetError as error:
            least = error.least
        parts = _BUDGETS_FOR_A_LARGE_ROW if call.block.share >= 0.5 else _BUDGETS_FOR_A_ROW
        budgets = [least + part * max(0, chain.plain_tape - least) // parts for part in range(parts)]
        seen = set()
        for plans, budget in product((timeless, timely), budgets):
            with suppress(BudgetError):  # the fastest may not be the smallest
                plan, nest = plans.plan(budget)
                form = layer_nest(nest, chain)
                if form not in seen and any(part.inside or part.option for part in nest):
                    seen.add(form)
                    seconds = Plan.make(chain, plan.knob, plan.schedule).bill.seconds - chain.plain_seconds
                    # On paper, layers were timed as they ran there: only their bytes count.
                    on_paper = self._device is not None
                    yield form, None if on_paper else max(seconds, 1e-9), plans is timeless or on_paper

    def _seconds(self, call: BlockCall, form: Form) -> tuple[float, float]:
        """Of forward and backward."""
        if not self._timed:
            return 0.0, 0.0
        if self._device is not None:
            with PaperClock(self._device) as clock:
                return call.timed(form, lambda: clock.seconds)
        times: list[tuple[float, float]] = []
        while len(times) < _MOST_TIMINGS and sum(map(sum, times)) < _ENOUGH_SECONDS:
            times.append(call.timed(form, seconds_now))
        return min(times, key=sum)
