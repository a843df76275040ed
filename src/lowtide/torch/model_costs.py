"""What a block costs in each of its forms: it is run by itself, with arguments like those of its one call.

Bytes are those beyond what was there before the block's forward; times are those of forward and backward together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import combinations
from time import perf_counter, process_time
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from lowtide.errors import BudgetError
from lowtide.torch.capture import now
from lowtide.torch.devices import Device
from lowtide.torch.layer_forms import worthwhile
from lowtide.torch.layer_plans import LayerPlans
from lowtide.torch.layers import measure_layers
from lowtide.torch.lean import can_lean, lean_menu
from lowtide.torch.lean_graph import LeanPoint
from lowtide.torch.lean_paper import lean_menu_on_paper
from lowtide.torch.measure import watching
from lowtide.torch.model_apply import run_in
from lowtide.torch.model_blocks import FoundBlock
from lowtide.torch.model_forms import RERUN, Form, Way, lean_way
from lowtide.torch.nest_text import Nest
from lowtide.torch.op_seconds import PaperClock
from lowtide.torch.operations import word_of
from lowtide.torch.stand_in import plainly
from lowtide.torch.step_pull import pulled, seed_of
from lowtide.torch.storages import Log, tensors_of
from lowtide.torch.traceless import left_as_it_was

# Operations whose results are as large as values say.
_OF_ANY_SIZE = frozenset({"nonzero", "masked_select", "unique", "_unique2", "unique_consecutive", "bincount"})
_OFTEN = 5  # runs of a short block that are timed, of which the shortest counts
_LONG = 0.5  # seconds of timing a form after which it is not timed again
_LEAST_GAIN = 0.02  # of the whole tape; a form that holds no less is left out
# Budgets for a row of layers, in equal parts of the way from the least to that of keeping everything; more of them
# where the row holds half of all tapes.
_BUDGETS, _MORE_BUDGETS = 10, 24


@dataclass(frozen=True, slots=True)
class FormCost:
    """A form of a block.

    Attributes:
        name: of the form.
        held: bytes that it holds between forward and backward, without its result.
        forward, backward: most bytes beyond what was there before its forward, while it runs and while it is pulled
            back; the result and the gradient of it among them.
        extra: seconds more than keeping everything takes.
    """

    name: str
    held: int
    forward: int
    backward: int
    extra: float


@dataclass(frozen=True, slots=True)
class BlockCost:
    """A block: its forms, of which the first keeps everything; seconds of that; bytes of its result's gradient."""

    forms: tuple[FormCost, ...]
    forward: float
    backward: float
    cotangent: int

    def form(self, name: str) -> FormCost:
        """The form of that name."""
        return next(form for form in self.forms if form.name == name)


@dataclass(frozen=True, slots=True)
class _Run:
    held: int
    forward: int
    backward: int
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
        call = _Call(block, args, kwargs, self._device is not None)
        keep, rerun = Form(), Form((("", RERUN),))
        with _Looking() as looking:
            try:
                plain = again = call.watched(keep)
            except RuntimeError as error:
                if "a leaf Variable" not in str(error):
                    raise
                call.changes_arguments = True
                plain = again = call.watched(keep)
        seconds = self._seconds(call, keep)
        forms = [FormCost(str(keep), plain.held, plain.forward, plain.backward, 0.0)]
        points = [] if looking.at_values else self._points(call)
        for form, point, extra in self._forms(block, call, points):
            try:
                run = self._run(call, form, point, again if form.ways[0][1].rerun else plain)
                if run.held > (1 - _LEAST_GAIN) * plain.held and form != rerun:
                    continue
                if extra is None:
                    extra = self._extra(call, form, point, seconds)
            except RuntimeError:  # a submodule that changes its argument in place, for one, cannot be run again
                continue
            if form == rerun:
                again = run
            # The first call of a lean kind is traced, and holds its whole tape while it runs.
            forward = run.forward if point is None else max(run.forward, plain.forward)
            forms.append(FormCost(str(form), run.held, forward, run.backward, extra))
        return BlockCost(tuple(forms), *seconds, plain.cotangent)

    def _run(self, call: _Call, form: Form, point: LeanPoint | None, whole: _Run) -> _Run:
        """Run a block in a form; on paper, a lean one is as its recipe has it: there are no values to make again."""
        if self._device is None or point is None:
            return call.watched(form)
        less = point.plain_tape - point.tape
        held = whole.held if form.ways[0][1].rerun else max(0, whole.held - less)
        return _Run(held, whole.forward, whole.backward - less + point.working, whole.cotangent)

    def _forms(
        self, block: FoundBlock, call: _Call, points: list[LeanPoint]
    ) -> Iterator[tuple[Form, LeanPoint | None, float | None]]:
        """All forms but the plain one; with the point of the lean frontier, and extra seconds, where they are known."""
        for point in points:
            yield Form((("", lean_way(point)),)), point, None
        if block.is_row:
            for nest, extra in self._nests(call):
                yield Form((("", Way(nest=nest)),)), None, extra
        for count in range(1, len(block.children) + 1):
            for children in combinations(block.children, count):
                yield Form(tuple((child, RERUN) for child in children)), None, None
        yield Form((("", RERUN),)), None, None
        if block.children:
            yield Form((("", RERUN), *((child, RERUN) for child in block.children))), None, None
        for point in points[-1:]:
            yield Form((("", lean_way(point, rerun=True)),)), point, None

    def _extra(self, call: _Call, form: Form, point: LeanPoint | None, plain: tuple[float, float]) -> float:
        """Seconds that a form takes more than keeping everything."""
        if self._device is not None and point is not None:
            return point.seconds + plain[0] * form.ways[0][1].rerun
        return max(sum(self._seconds(call, form)) - sum(plain), 0.0 if point is None else point.seconds / 2, 1e-9)

    def _points(self, call: _Call) -> list[LeanPoint]:
        with call.given() as (module, args, kwargs):
            if self._device is not None:
                points = lean_menu_on_paper(self._device, plainly, module, args, kwargs)
            else:
                points = lean_menu(plainly, module, args, kwargs) if can_lean(plainly, module, args, kwargs) else []
        return worthwhile(points) if points else []

    def _nests(self, call: _Call) -> Iterator[tuple[Nest, float]]:
        """Nested checkpoint calls for a row of layers, from the smallest on, and the extra seconds that they take."""
        with call.given() as (module, args, _):
            row = measure_layers(list(module.children()), args[0], forms=self._device is None)
        if row.chain is None:
            return
        plans = LayerPlans(row)
        try:
            plans.plan(1)
        except BudgetError as error:
            least = error.least
        parts = _MORE_BUDGETS if call.block.share >= 0.5 else _BUDGETS
        seen = set()
        for part in range(parts):
            plan, nest = plans.plan(least + part * max(0, row.chain.plain_tape - least) // parts)
            text = Nest.of(nest, row.bounds, row.chain)
            if str(text) not in seen and any(part.inside or part.option for part in nest):
                seen.add(str(text))
                yield text, max(plan.bill.seconds - row.chain.plain_seconds, 1e-9)

    def _seconds(self, call: _Call, form: Form) -> tuple[float, float]:
        """Of forward and backward."""
        if not self._timed:
            return 0.0, 0.0
        if self._device is not None:
            with PaperClock(self._device) as clock:
                return call.timed(form, lambda: clock.seconds)
        times = []
        while len(times) < _OFTEN and sum(map(sum, times)) < _LONG:
            times.append(call.timed(form, _clock))
        return min(times, key=sum)


class _Call:
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
        """Inside, the block may change what it keeps; gives it, and arguments."""
        module = self.block.call.module
        with nullcontext() if self._on_paper else left_as_it_was([module]), torch.enable_grad():
            yield module, *self.arguments()

    def watched(self, form: Form) -> _Run:
        """Run forward and backward in a form, counting bytes."""
        log = Log()
        with self.given() as (module, args, kwargs), run_in(form, module):
            if "lean" in str(form):  # where each call has another number, the second one is less lean than the first
                module.forward(*args, **kwargs)
                args, kwargs = self.arguments()
            since = now()
            with watching(log):
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
        return _Run(max(0, held), forward, start + most, cotangent)

    def timed(self, form: Form, clock: Callable[[], float]) -> tuple[float, float]:
        """Seconds of forward and backward in a form."""
        with self.given() as (module, args, kwargs), run_in(form, module):
            since, began = now(), clock()
            seed = seed_of(module.forward(*args, **kwargs))
            between = clock()
            if seed is not None:
                _pull(seed, args, kwargs, since)
            return between - began, clock() - between


class _Looking(TorchDispatchMode):
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


def _clock() -> float:
    """Seconds, in which a busy machine counts as little as possible."""
    if torch.cuda.is_initialized():  # pragma: no cover
        torch.cuda.synchronize()
        return perf_counter()
    return process_time()
