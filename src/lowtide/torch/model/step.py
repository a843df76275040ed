"""A whole training step as a chain: its blocks with their forms, and beside them everything else that is alive.

One step is run with every block in its smallest form. Every storage is tracked, and the moments at which a block begins
and ends are marked, in the forward and in the backward. So the bytes outside blocks are known at each of these moments;
what blocks hold and need in other forms was measured block by block (`costs.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lowtide.chain import Chain, Role, StepCost, TapeOption, Working
from lowtide.torch.memory.tracker import Log, storage_bytes, tensors_of, watching
from lowtide.torch.model.apply import run_in
from lowtide.torch.model.blocks import FoundBlock
from lowtide.torch.model.costs import BlockCost, FormCost
from lowtide.torch.model.optimizer import OptimizerCost
from lowtide.torch.state.stand_in import StandIn, original, standing_in

_DISORDER = "is not pulled back in the reverse of the order in which blocks are called"


@dataclass(eq=False, slots=True)
class Marks:
    """Where a block begins and ends in a log, as indices of events; -1 if that never happens.

    Attributes:
        entered, left: the beginning and the end of its forward.
        reached, passed: the beginning and the end of its backward.
    """

    entered: int = -1
    left: int = -1
    reached: int = -1
    passed: int = -1


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes that are held before a step and throughout it.

    Attributes:
        parameters: the model's parameters.
        gradients: the gradients of all parameters; of these, only the ones in `inputs` are held before the step.
        optimizer: the optimizer's state.
        stepping: the most bytes of temporary tensors while the optimizer takes its step.
        inputs: arguments, buffers, and gradients that exist already.
    """

    parameters: int
    gradients: int
    optimizer: int
    stepping: int
    inputs: int

    @property
    def before(self) -> int:
        """The bytes that are held before the step."""
        return self.parameters + self.optimizer + self.inputs

    @classmethod
    def of(cls, model: nn.Module, arguments: Any, optimizer: OptimizerCost, gradients: int) -> Resident:
        """The resident bytes of a model, its arguments, an optimizer, and `gradients` bytes of existing gradients."""
        parameters = list(model.parameters())
        theirs = storage_bytes(parameters)
        everything = [*parameters, *model.buffers(), *tensors_of(arguments)]
        strided = [tensor for tensor in everything if tensor.layout is torch.strided]
        return cls(
            theirs,
            storage_bytes([parameter for parameter in parameters if parameter.requires_grad]),
            optimizer.state,
            optimizer.transient,
            storage_bytes(strided) - theirs + gradients,
        )


@dataclass(eq=False, slots=True)
class BaseRun:
    """A training step with every block in its smallest form.

    Attributes:
        blocks: the blocks that can be planned, with their costs.
        notes: reasons why others cannot be planned.
    """

    blocks: list[tuple[FoundBlock, BlockCost]]
    notes: list[str]
    _log: Log = field(default_factory=Log)
    _marks: list[Marks] = field(default_factory=list)
    _forms: list[FormCost] = field(default_factory=list)
    _end: int = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, the caller runs one step: the model, the loss and its backward."""
        log = self._log = Log()
        self._forms = [self._smallest(cost) for _, cost in self.blocks]
        with ExitStack() as stack:
            row = []
            for (block, _), form in zip(self.blocks, self._forms, strict=True):
                stack.enter_context(run_in(form.form, block.call.module))
                row.append(_Marked(block.call.module, log))
            stack.enter_context(standing_in(row))
            with watching(log):
                yield
        self._end = len(log.events)
        self._marks = [one.marks for one in row]

    def _smallest(self, cost: BlockCost) -> FormCost:
        """The settled form that needs the fewest bytes in its backward."""
        forms = [form for form in cost.forms if form.is_settled]
        return min(forms, key=lambda form: (form.backward, form.held))

    def is_in_order(self) -> bool:
        """Whether the backward reached the blocks in the reverse of the order in which they were called.

        Blocks for which that is not so cannot be planned. They are left out, and the step has to be run again.
        """
        kept, before = [], 0  # `before` is where the backward of the block called next, which comes first, begins
        for pair, marks in zip(reversed(self.blocks), reversed(self._marks), strict=True):
            if marks.left <= marks.reached and before <= marks.reached:
                kept.append(pair)
                before = marks.reached
                marks.passed = max(marks.passed, marks.reached)
            else:
                why = "returns nothing that a gradient is seen to reach" if marks.reached < 0 else _DISORDER
                self.notes.append(f"{pair[0].name} {why}, and is left as it is")
        is_in_order = len(kept) == len(self.blocks)
        self.blocks = kept[::-1]
        return is_in_order

    def chain(self, resident: Resident) -> Chain:
        """The step as a chain, whose numbers mean what `Blocks` says."""
        before, levels, end = resident.before, _Levels(self._log, self._end), self._end
        rows: list[tuple[str, Role, StepCost]] = []
        if resident.optimizer or resident.stepping:
            rows.append(("(optimizer step)", Role.OPTIMIZER, _outside(before + levels.at(end) + resident.stepping)))
        before -= len(rows)  # every step of a chain counts at least one byte, which is taken off here
        held = 0  # bytes that the blocks so far hold, in the forms of this run
        left, reached = 0, end  # where the forward of the block before ends, and where its backward begins
        for (block, cost), form, marks in zip(self.blocks, self._forms, self._marks, strict=True):
            between = max(levels.most(left, marks.entered), levels.most(marks.passed, reached))
            entered = before + levels.at(marks.entered) - held
            pulled = before + levels.at(marks.reached) - held - form.held - cost.cotangent
            step = _step(cost, entered, pulled)
            outside = _outside(before + between - held)
            if outside.working.backward > min(map(sum, zip((o.tape for o in step.menu), step.pulling, strict=True))):
                rows.append(("(outside)", Role.BETWEEN, outside))
                before -= 1
            rows.append((block.name, Role.BLOCK, step))
            held += form.held
            left, reached = marks.left, marks.reached
        rows.append(("(loss)", Role.LOSS, _outside(before + levels.most(left, reached) - held)))
        names, roles, steps = zip(*rows, strict=True)
        chain = Chain.of(steps, names, roles)
        return replace(chain, parameters=resident.parameters, gradients=resident.gradients)


class _Marked(StandIn):
    """Runs a block, and marks where its forward and its backward begin and end."""

    def __init__(self, module: nn.Module, log: Log) -> None:
        super().__init__(module)
        self._log = log
        self.marks = Marks()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block, and register hooks that mark its backward."""
        marks, events = self.marks, self._log.events
        marks.entered = len(events)
        result = (self.was or original(self.module))(*args, **kwargs)
        marks.left = len(events)

        def reach(_: torch.Tensor) -> None:
            if marks.reached < 0:
                marks.reached = len(events)

        def passes(_: torch.Tensor) -> None:
            if marks.passed < 0 <= marks.reached:
                marks.passed = len(events)

        for tensor in tensors_of(result):
            if tensor.requires_grad:
                tensor.register_hook(reach)
        for tensor in tensors_of((args, kwargs)):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(passes)
        return result


class _Levels:
    """The bytes alive at each event of a log."""

    def __init__(self, log: Log, end: int) -> None:
        level, self._levels = 0, [0]
        for change in log.changes(0, end):
            level += change
            self._levels.append(level)

    def at(self, event: int) -> int:
        """The bytes alive before this event."""
        return self._levels[event]

    def most(self, start: int, stop: int) -> int:
        """The most bytes alive from before event `start` to before event `stop`."""
        return max(self._levels[start : stop + 1], default=0)


def _outside(need: int) -> StepCost:
    """A step outside blocks: it holds nothing that could be dropped, but counts one byte, as a chain's step must."""
    need = max(0, need - 1)
    return StepCost(1, 1, 0.0, 0.0, working=Working(0, need, need))


def _step(cost: BlockCost, entered: int, reached: int) -> StepCost:
    """The step of a block; `entered` and `reached` are the bytes outside blocks when its forward and backward begin."""

    def need(form: FormCost) -> int:
        return max(0, max(entered + form.forward, reached + form.backward) - max(1, form.held))

    keep, *others = cost.forms
    least = min(max(0, entered + form.forward - max(1, form.held)) for form in cost.forms)
    return StepCost(
        1,
        max(1, keep.held),
        cost.forward,
        cost.backward,
        working=Working(0, min(least, *(need(form) for form in cost.forms)), need(keep)),
        options=tuple(
            TapeOption(max(1, form.held), form.extra, backward=need(form), form=form.form) for form in others
        ),
    )
