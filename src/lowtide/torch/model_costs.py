"""What a block costs in each of its forms: it is run by itself, with arguments like those of its one call.

Bytes are those beyond what was there before the block's forward; times are those of forward and backward together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from lowtide.errors import BudgetError
from lowtide.plan import Plan
from lowtide.torch.devices import Device
from lowtide.torch.layer_forms import worthwhile
from lowtide.torch.layer_plans import LayerPlans
from lowtide.torch.layers import measure_layers
from lowtide.torch.lean import can_lean, lean_menu
from lowtide.torch.lean_graph import LeanPoint
from lowtide.torch.lean_paper import lean_menu_on_paper
from lowtide.torch.model_blocks import FoundBlock
from lowtide.torch.model_call import BlockCall, Looking, seconds_now
from lowtide.torch.model_forms import RERUN, Form, Way, lean_way
from lowtide.torch.nest_text import Nest
from lowtide.torch.op_seconds import PaperClock
from lowtide.torch.settled import settled_row
from lowtide.torch.stand_in import plainly

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
        is_settled: whether it is on the menu at every time and place; others were found by measured seconds.
    """

    name: str
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
        keep, rerun = Form(), Form((("", RERUN),))
        with Looking() as looking:
            try:
                plain = call.watched(keep)
            except RuntimeError as error:
                if "a leaf Variable" not in str(error):
                    raise
                call.changes_arguments = True
                plain = call.watched(keep)
        seconds = self._seconds(call, keep)
        forms = [FormCost(str(keep), plain.held, plain.forward, plain.backward, 0.0)]
        points = [] if looking.at_values else self._points(call)
        for form, point, extra, is_settled in self._forms(block, call, points):
            try:
                run = call.watched(form)
                if run.held > (1 - _LEAST_GAIN) * plain.held and form != rerun:
                    continue
                if extra is None:
                    extra = self._extra(call, form, point, seconds)
            except RuntimeError:  # a submodule that changes its argument in place, for one, cannot be run again
                continue
            # The first call of a lean kind is traced, and holds its whole tape while it runs.
            forward = run.forward if point is None else max(run.forward, plain.forward)
            forms.append(FormCost(str(form), run.held, forward, run.backward, extra, is_settled))
        return BlockCost(tuple(forms), *seconds, plain.cotangent)

    def _forms(
        self, block: FoundBlock, call: BlockCall, points: list[LeanPoint]
    ) -> Iterator[tuple[Form, LeanPoint | None, float | None, bool]]:
        """All forms but the plain one.

        With the point of the lean frontier, and extra seconds, where they are known, and whether it is settled.
        """
        for point in points:
            yield Form((("", lean_way(point)),)), point, None, True
        if block.is_row:
            for nest, extra, is_settled in self._nests(call):
                yield Form((("", Way(nest=nest)),)), None, extra, is_settled
        for count in range(1, len(block.children) + 1):
            for children in combinations(block.children, count):
                yield Form(tuple((child, RERUN) for child in children)), None, None, True
        yield Form((("", RERUN),)), None, None, True
        if block.children:
            yield Form((("", RERUN), *((child, RERUN) for child in block.children))), None, None, True
        for point in points[-1:]:
            yield Form((("", lean_way(point, rerun=True)),)), point, None, True

    def _extra(self, call: BlockCall, form: Form, point: LeanPoint | None, plain: tuple[float, float]) -> float:
        """Seconds that a form takes more than keeping everything."""
        if self._device is not None and point is not None:
            return point.seconds + plain[0] * form.ways[0][1].rerun
        return max(sum(self._seconds(call, form)) - sum(plain), 0.0 if point is None else point.seconds / 2, 1e-9)

    def _points(self, call: BlockCall) -> list[LeanPoint]:
        with call.given() as (module, args, kwargs):
            if self._device is not None:
                points = lean_menu_on_paper(self._device, plainly, module, args, kwargs)
            else:
                points = lean_menu(plainly, module, args, kwargs) if can_lean(plainly, module, args, kwargs) else []
        return worthwhile(points) if points else []

    def _nests(self, call: BlockCall) -> Iterator[tuple[Nest, float | None, bool]]:
        """Nested checkpoint calls for a row of layers; the extra seconds that they take; and whether they are settled.

        Settled are those that would be the fastest if the largest tapes took longest.
        """
        with call.given() as (module, args, _):
            row = measure_layers(list(module.children()), args[0], forms=self._device is None)
        chain = row.chain
        assert chain is not None  # a row is a block only if it has a tape
        timeless, timely = LayerPlans(settled_row(row)), LayerPlans(row)
        try:
            timeless.plan(1)
        except BudgetError as error:
            least = error.least
        parts = _MORE_BUDGETS if call.block.share >= 0.5 else _BUDGETS
        budgets = [least + part * max(0, chain.plain_tape - least) // parts for part in range(parts)]
        seen = set()
        for plans, budget in product((timeless, timely), budgets):
            with suppress(BudgetError):  # the fastest may not be the smallest
                plan, nest = plans.plan(budget)
                text = Nest.of(nest, row.bounds, chain)
                if str(text) not in seen and any(part.inside or part.option for part in nest):
                    seen.add(str(text))
                    seconds = Plan.make(chain, plan.knob, plan.schedule).bill.seconds - chain.plain_seconds
                    # On paper, layers were timed as they ran there: only their bytes count.
                    on_paper = self._device is not None
                    yield text, None if on_paper else max(seconds, 1e-9), plans is timeless or on_paper

    def _seconds(self, call: BlockCall, form: Form) -> tuple[float, float]:
        """Of forward and backward."""
        if not self._timed:
            return 0.0, 0.0
        if self._device is not None:
            with PaperClock(self._device) as clock:
                return call.timed(form, lambda: clock.seconds)
        times: list[tuple[float, float]] = []
        while len(times) < _OFTEN and sum(map(sum, times)) < _LONG:
            times.append(call.timed(form, seconds_now))
        return min(times, key=sum)
