"""Measures a block in each of its forms: it is run by itself, with arguments like those of its one call.

Bytes are those beyond what was held before the block's forward; times are those of forward and backward together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import torch
from torch import nn
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
from lowtide.torch.memory.accelerators import cpu_seconds_now
from lowtide.torch.memory.tracker import Log, tensors_of, watching
from lowtide.torch.model.apply import run_in
from lowtide.torch.model.blocks import FoundBlock
from lowtide.torch.model.forms import run_plainly
from lowtide.torch.paper.devices import Device
from lowtide.torch.paper.on_paper import PaperClock
from lowtide.torch.paper.operations import ValueDependence
from lowtide.torch.state.capture import now, pulled, seed_of
from lowtide.torch.state.hidden import left_as_it_was


@dataclass(frozen=True, slots=True)
class CallBytes:
    """Bytes of a call.

    Attributes:
        held: held between forward and backward, without the result.
        forward, backward: the peaks of both.
        cotangent: the gradient of the result.
    """

    held: int
    forward: int
    backward: int
    cotangent: int


class BlockCall:
    """A block's call, which can be repeated in any form."""

    def __init__(self, block: FoundBlock, args: tuple[Any, ...], kwargs: dict[str, Any], on_paper: bool) -> None:
        self.block = block
        self._arguments = args, kwargs
        self._needs = block.call.needs
        self._on_paper = on_paper
        self.changes_arguments = False  # in place, which autograd forbids for leaves: it then gets copies

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments like those of the call, as leaves of a new graph, or copies of such leaves."""
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
        """The block and its arguments; inside, the block may change its state, which is restored afterwards."""
        module = self.block.call.module
        torch.clear_autocast_cache()  # weights that another form has cast must not be free for this one
        with nullcontext() if self._on_paper else left_as_it_was([module]), torch.enable_grad():
            yield module, *self.arguments()

    def watched(self, form: Form, depends: ValueDependence | None = None) -> CallBytes:
        """The bytes of forward and backward in a form; both also run under the mode `depends`."""
        log = Log()
        with self.given() as (module, args, kwargs), run_in(form, module):
            if form.is_lean:  # the first call may be traced, and then holds more
                module.forward(*args, **kwargs)
                args, kwargs = self.arguments()
            since = now()
            with watching(log), depends or nullcontext():
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
                with watching(log), depends or nullcontext():
                    _pull(seed, args, kwargs, since)
            _, most = log.level(mark, len(log.events))
        return CallBytes(max(0, held), forward, start + most, cotangent)

    def timed(self, form: Form, clock: Callable[[], float]) -> tuple[float, float]:
        """The seconds of forward and of backward in a form."""
        with self.given() as (module, args, kwargs), run_in(form, module):
            since, began = now(), clock()
            seed = seed_of(module.forward(*args, **kwargs))
            between = clock()
            if seed is not None:
                _pull(seed, args, kwargs, since)
            return between - began, clock() - between


def _pull(seed: torch.Tensor, args: Any, kwargs: Any, since: int) -> None:
    # Arguments that are not leaves, because they were copied for a block that changes them in place, are found by
    # `pulled` itself, like everything else that the graph reaches.
    pulled(seed, [t for t in tensors_of((args, kwargs)) if t.requires_grad and t.is_leaf], since)


_MOST_TIMINGS = 5  # of one form; the shortest counts
_ENOUGH_SECONDS = 0.5  # spent on timing one form, after which it is not timed again
_LEAST_GAIN = 0.02  # the share of the whole tape that a form has to save to be on the menu
# How many budgets a row of layers is planned for, evenly spaced from the least to that of keeping everything; more of
# them if the row has half of all tapes.
_BUDGETS_FOR_A_ROW, _BUDGETS_FOR_A_LARGE_ROW = 10, 24


@dataclass(frozen=True, slots=True)
class FormCost:
    """The cost of a block in one form.

    Attributes:
        form: the form itself.
        held: bytes that it holds between forward and backward, without its result.
        forward, backward: the most bytes during its forward and during its backward, beyond what was held before its
            forward; its result and that result's gradient are included.
        extra: seconds beyond those of keeping everything.
        is_settled: whether the form is on the menu in every process; other forms were found by measured seconds.
    """

    form: Form
    held: int
    forward: int
    backward: int
    extra: float
    is_settled: bool = True


@dataclass(frozen=True, slots=True)
class BlockCost:
    """The costs of a block: its forms, the first of which keeps everything; seconds; bytes of its result's gradient."""

    forms: tuple[FormCost, ...]
    forward: float
    backward: float
    cotangent: int


class Bench:
    """Measures blocks.

    Args:
        device: the device to estimate seconds for, if blocks are run on paper; None measures them here.
        timed: whether seconds matter; if not, they are 0.
    """

    def __init__(self, device: Device | None, *, timed: bool) -> None:
        self._device = device
        self._timed = timed

    def cost(self, block: FoundBlock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCost:
        """The cost of a block that is called with such arguments; the block is left as it was."""
        call = BlockCall(block, args, kwargs, self._device is not None)
        depends = ValueDependence()
        try:
            plain = call.watched(KEEP, depends)
        except RuntimeError as error:
            if "a leaf Variable" not in str(error):
                raise
            call.changes_arguments = True
            plain = call.watched(KEEP, depends)
        seconds = self._seconds(call, KEEP)
        forms = [FormCost(KEEP, plain.held, plain.forward, plain.backward, 0.0)]
        points = [] if depends.found else self._points(call)
        for form, point, extra, is_settled in self._forms(block, call, points):
            try:
                run = call.watched(form)
                if run.held > (1 - _LEAST_GAIN) * plain.held and form != RERUN:
                    continue
                if extra is None:
                    extra = self._extra(call, form, point, seconds)
            except RuntimeError:  # the form is impossible: a submodule changes its argument in place, for one
                continue
            # The first lean call of a kind is traced, and holds its whole tape while it runs.
            forward = run.forward if point is None else max(run.forward, plain.forward)
            forms.append(FormCost(form, run.held, forward, run.backward, extra, is_settled))
        return BlockCost(tuple(forms), *seconds, plain.cotangent)

    def _forms(
        self, block: FoundBlock, call: BlockCall, points: list[LeanPoint]
    ) -> Iterator[tuple[Form, LeanPoint | None, float | None, bool]]:
        """All forms but the plain one, each with its lean point, its extra seconds if known, and if it is settled."""
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
        """The seconds that a form takes beyond those of keeping everything."""
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
        """Nests of checkpoint calls for a row of layers, each with its extra seconds and whether it is settled.

        A nest is settled if it is the fastest when layers with larger tapes are assumed to take longer, which does not
        depend on measured seconds.
        """
        with call.given() as (module, args, _):
            row = measure_layers(list(module.children()), args[0], forms=self._device is None)
        chain = row.chain
        assert chain is not None  # a row is a block only if it has a tape
        timeless, timely = LayerPlans(row.untimed()), LayerPlans(row)
        try:
            timeless.plan(1)
        except BudgetError as error:
            least = error.least
        parts = _BUDGETS_FOR_A_LARGE_ROW if call.block.share >= 0.5 else _BUDGETS_FOR_A_ROW
        budgets = [least + part * max(0, chain.plain_tape - least) // parts for part in range(parts)]
        seen = set()
        for plans, budget in product((timeless, timely), budgets):
            with suppress(BudgetError):  # `least` holds for the untimed costs; with measured ones it may be higher
                plan, nest = plans.plan(budget)
                form = layer_nest(nest, chain)
                if form not in seen and any(part.inside or part.option for part in nest):
                    seen.add(form)
                    seconds = Plan.make(chain, plan.knob, plan.schedule).bill.seconds - chain.plain_seconds
                    # On paper, the measured seconds are those of fake tensors, and mean nothing: only bytes count.
                    on_paper = self._device is not None
                    yield form, None if on_paper else max(seconds, 1e-9), plans is timeless or on_paper

    def _seconds(self, call: BlockCall, form: Form) -> tuple[float, float]:
        """The seconds of forward and of backward."""
        if not self._timed:
            return 0.0, 0.0
        if self._device is not None:
            with PaperClock(self._device) as clock:
                return call.timed(form, lambda: clock.seconds)
        times: list[tuple[float, float]] = []
        while len(times) < _MOST_TIMINGS and sum(map(sum, times)) < _ENOUGH_SECONDS:
            times.append(call.timed(form, cpu_seconds_now))
        return min(times, key=sum)
