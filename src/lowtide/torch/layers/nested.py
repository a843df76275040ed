"""Runs a plan's nest as nested checkpoint calls, on the graph that autograd builds anyway.

A part that is run again is a checkpoint call, and the parts inside it are calls inside that call. Steps that keep their
whole tape are called as they are; steps with a smaller tape are run by a function that the caller passes. A row of
layers inside a model has its nest as a form (`LayerNest`), which the same code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from lowtide.chain import Chain
from lowtide.errors import InputError
from lowtide.forms import LayerNest, LayerRange
from lowtide.nest import Part
from lowtide.torch.checkpoint.call import checkpoint
from lowtide.torch.lean.call import lean
from lowtide.torch.lean.graph import LeanSize
from lowtide.torch.memory import recording

Layer = Callable[[Any], Any]


def through(layers: Iterable[Layer], state: Any) -> Any:
    """Run layers one after the other."""
    for layer in layers:
        state = layer(state)
    return state


def run_lean(layers: tuple[Layer, ...], state: Any, size: LeanSize) -> Any:
    """Run layers one after the other, with a lean tape of at most that size."""
    return lean(through, layers, state, tape=size)


class Forms:
    """Runs the steps of a chain with the smaller tapes of its menus; if not `strict`, with others if it has to.

    Parameters that the older FSDP has gathered are views of one large tensor, of which other tapes can be made.
    """

    def __init__(self, chain: Chain, *, strict: bool = True) -> None:
        self._chain = chain
        self._strict = strict

    def __call__(self, layers: tuple[Layer, ...], step: int, option: int, state: Any) -> Any:
        """Run a step from `state` with entry `option` of its menu."""
        entry = self._chain[step].options[option - 1]  # the first of a menu keeps the whole tape
        lean = None if entry.form is None else entry.form.whole_lean
        if lean is None:
            raise InputError(
                f"the plan tapes step {step:,} in a form called {entry.name!r}, which layers do not have; plan again "
                "with plan_sequential"
            )
        if not torch.is_grad_enabled():
            return through(layers, state)
        return run_lean(layers, state, LeanSize(lean.tape, lean.working, self._strict))


# (layers of the step, its number, entry of its menu from 1 on, state) -> the next state
RunForm = Callable[[tuple[Layer, ...], int, int, Any], Any]


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs the steps of one call of `sequential`.

    Attributes:
        steps: the layers of each step.
        options: keyword arguments for `checkpoint`.
        lean: runs a step with a smaller tape. Inside a checkpoint call it is used in the first run too, although no
            tape is kept there: the first run and the rerun have to save the same tensors.
    """

    steps: tuple[tuple[Layer, ...], ...]
    options: dict[str, Any]
    lean: RunForm

    def run(self, parts: tuple[Part, ...], x: Any, *, taping: bool = True, first: bool = True) -> Any:
        """Run the parts one after the other.

        Args:
            parts: a nest, or the inside of a part.
            x: the state that the first part starts from.
            taping: whether the tapes of the steps called here will be kept.
            first: whether the results of this run are those that gradients flow through; not so in a rerun.
        """
        for part in parts:
            if part.inside:
                x = self._checkpointed(part, x, first)
                continue
            for k in range(part.start, part.stop):
                if recording.is_on():
                    recording.count(plain=not taping, taping=taping)
                if part.option:
                    x = self.lean(self.steps[k], k, part.option, x)
                else:
                    for layer in self.steps[k]:
                        x = layer(x)
                if first and recording.is_on():
                    _count_backward(x)
        return x

    def _checkpointed(self, part: Part, x: Any, first: bool) -> Any:
        inside = _Inside(self, part.inside, first)
        layers = [layer for step in self.steps[part.start : part.stop] for layer in step]
        return checkpoint(partial(inside, *layers), x, **self.options)


class _Inside:
    """The function that a checkpoint call runs: the inside of a part. It knows whether it is being rerun."""

    __slots__ = ("_first", "_parts", "_ran", "_runner")

    def __init__(self, runner: Runner, parts: tuple[Part, ...], first: bool) -> None:
        self._runner = runner
        self._parts = parts
        self._first = first
        self._ran = False

    def __call__(self, *layers_and_x: Any) -> Any:
        """Run the inside. The layers are arguments so that `checkpoint` finds them, which repeats what they keep."""
        again, self._ran = self._ran, True
        return self._runner.run(self._parts, layers_and_x[-1], taping=again, first=self._first and not again)


def _count_backward(state: Any) -> None:
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if tensors:
        register_multi_grad_hook(tensors, lambda _: recording.count(backward=1), mode="any")


def layer_nest(parts: tuple[Part, ...], chain: Chain) -> LayerNest:
    """The nest of a plan for a chain of layers, as a form: with ranges of layers in place of steps."""
    bounds = chain.layers

    def within(parts: tuple[Part, ...]) -> Iterator[LayerRange | LayerNest]:
        for part in parts:
            if part.inside:
                yield LayerNest(tuple(within(part.inside)))
            elif part.option:
                for k in range(part.start, part.stop):
                    form = chain[k].menu[part.option].form
                    yield LayerRange(*bounds[k], None if form is None else form.whole_lean)
            else:
                yield LayerRange(bounds[part.start][0], bounds[part.stop - 1][1])

    lead = (LayerRange(0, bounds[0][0]),) if bounds[0][0] else ()
    return LayerNest((*lead, *within(parts)))


def check_nest(nest: LayerNest, row: nn.Module) -> None:
    """Raise `InputError` if the module is not an `nn.Sequential` of as many layers as the nest has."""
    layers, most = len(list(row.children())), max(part.stop for part in nest.ranges())
    if not isinstance(row, nn.Sequential) or type(row).forward is not nn.Sequential.forward:
        raise InputError(
            f"the plan is for an nn.Sequential, and this {type(row).__name__} is none; plan again with plan_model"
        )
    if most != layers:
        raise InputError(
            f"the plan is for {most:,} layers, and this {type(row).__name__} has {layers:,}; plan again with plan_model"
        )


def run_nest(nest: LayerNest, row: nn.Module, x: Any, *, check_rerun: bool | None = None) -> Any:
    """Run the layers of an `nn.Sequential` by the nest; see `checkpoint` for `check_rerun`."""
    check_nest(nest, row)
    layers, ranges = list(row.children()), list(nest.ranges())
    steps = tuple(tuple(layers[part.start : part.stop]) for part in ranges)

    def leanly(step: tuple[Layer, ...], k: int, _: int, state: Any) -> Any:
        lean = ranges[k].lean
        assert lean is not None
        return run_lean(step, state, LeanSize(lean.tape, lean.working, strict=False))

    return Runner(steps, {"check_rerun": check_rerun}, leanly).run(_parts(nest, 0)[0], x)


def _parts(nest: LayerNest, first: int) -> tuple[tuple[Part, ...], int]:
    """The nest as parts whose steps are its ranges, numbered from `first` on; and the number after the last one."""
    found = []
    for part in nest.parts:
        if isinstance(part, LayerNest):
            inside, after = _parts(part, first)
            found.append(Part(first, after, inside))
        else:
            after = first + 1
            found.append(Part(first, after, (), int(part.lean is not None)))
        first = after
    return tuple(found), first
