"""A plan's nest as nested checkpoint calls, on the graph that autograd makes anyway.

Parts that are run again together are checkpoint calls inside one another. Steps that are taped whole are called as they
are; those that are taped in a smaller form are left to a function that knows how. A row of layers inside a model has
its nest as a form (`LayerNest`), and is run by the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from lowtide.chain import Chain
from lowtide.errors import InputError
from lowtide.forms import LayerNest, LayerRange
from lowtide.nest import Part, nest_of
from lowtide.plan import Plan
from lowtide.simulate import judged
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
    """Run layers with a lean tape of at most that size."""
    return lean(through, layers, state, tape=size)


class Forms:
    """Runs the steps of a chain in the forms of its menus."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain

    def __call__(self, layers: tuple[Layer, ...], step: int, option: int, state: Any) -> Any:
        """Run a step in one form."""
        entry = self._chain[step].menu[option]
        lean = None if entry.form is None else entry.form.whole_lean
        if lean is None:
            raise InputError(
                f"the plan tapes step {step:,} in a form called {entry.name!r}, which layers do not have; plan again "
                "with plan_sequential"
            )
        if not torch.is_grad_enabled():
            return through(layers, state)
        return run_lean(layers, state, LeanSize(lean.tape, lean.working))


# Runs the layers of a step, whose number it gets, in entry 1 or more of the step's menu, from a state.
RunForm = Callable[[tuple[Layer, ...], int, int, Any], Any]


@lru_cache(maxsize=64)
def nest_of_plan(plan: Plan) -> tuple[Part, ...]:
    """The plan's nest.

    Raises:
        InputError: it drops something early and makes it again later, or uses a disk.
        PlanError: it is not legal.
    """
    return nest_of(judged(plan), len(plan.chain), plan.planner)


def kept_by(parts: tuple[Part, ...], kept: tuple[int, ...]) -> int:
    """Most bytes that checkpoint calls keep at once; `kept` is what a call keeps for each step in it.

    Those side by side are there together, and the calls inside one of them at a time; while one is run again, what it
    finds is put aside.
    """
    own = {part: sum(kept[part.start : part.stop]) for part in parts if part.inside}
    return sum(own.values()) + max((own.get(part, 0) + kept_by(part.inside, kept) for part in parts), default=0)


def copied_by(parts: tuple[Part, ...], copied: tuple[int, ...]) -> list[int]:
    """For each step, bytes of copies while it runs without a tape; `copied` is what a call from there copies."""
    found = [0] * len(copied)
    for part in parts:
        if part.inside:
            inner = copied_by(part.inside, copied)
            for k in range(part.start, part.stop):
                found[k] = copied[part.start] + inner[k]
    return found


def has_forms(parts: tuple[Part, ...]) -> bool:
    """Whether a step is taped in a smaller form."""
    return any(part.option or has_forms(part.inside) for part in parts)


def forms_passed(parts: tuple[Part, ...], inside: bool = False) -> dict[int, set[int]]:
    """For steps that run in smaller forms inside a checkpoint call, where their tape is not kept at first: which."""
    found: dict[int, set[int]] = {}
    for part in parts:
        if inside and part.option:
            for k in range(part.start, part.stop):
                found.setdefault(k, set()).add(part.option)
        for k, forms in forms_passed(part.inside, inside=True).items():
            found.setdefault(k, set()).update(forms)
    return found


def starts(parts: tuple[Part, ...]) -> set[int]:
    """Steps that are taped from the state that a checkpoint call around them holds."""
    firsts = {part.inside[0].start for part in parts if part.inside and not part.inside[0].inside}
    return firsts.union(*(starts(part.inside) for part in parts))


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs the steps of one call.

    Attributes:
        steps: the layers of each.
        options: for `checkpoint`.
        lean: calls a step that is taped in a smaller form. Where a checkpoint call is around it, it is called in every
            run of that, so that all of them save the same row of tensors.
    """

    steps: tuple[tuple[Layer, ...], ...]
    options: dict[str, Any]
    lean: RunForm

    def run(self, parts: tuple[Part, ...], x: Any, *, taping: bool = True, first: bool = True) -> Any:
        """Run the parts one after the other.

        Args:
            parts: a nest, or the inside of a part.
            x: the state that it starts from.
            taping: whether the tapes of steps that are called will be kept.
            first: whether gradients will flow through this very run, rather than one before it.
        """
        for part in parts:
            if part.inside:
                x = self._checkpointed(part, x, first)
                continue
            for k in range(part.start, part.stop):
                if recording._open:
                    recording.count(plain=not taping, taping=taping)
                if part.option:
                    x = self.lean(self.steps[k], k, part.option, x)
                else:
                    for layer in self.steps[k]:
                        x = layer(x)
                if first and recording._open:
                    _count_backward(x)
        return x

    def _checkpointed(self, part: Part, x: Any, first: bool) -> Any:
        inside = _Inside(self, part.inside, first)
        return checkpoint(partial(inside, self.steps[part.start : part.stop]), x, **self.options)


class _Inside:
    """The inside of a checkpointed part, which knows whether it is being run again."""

    __slots__ = ("_first", "_parts", "_ran", "_runner")

    def __init__(self, runner: Runner, parts: tuple[Part, ...], first: bool) -> None:
        self._runner = runner
        self._parts = parts
        self._first = first
        self._ran = False

    def __call__(self, _: tuple[tuple[Layer, ...], ...], x: Any) -> Any:
        """Run it. The layers are given so that `checkpoint`, which looks for hidden state, finds them."""
        again, self._ran = self._ran, True
        return self._runner.run(self._parts, x, taping=again, first=self._first and not again)


def _count_backward(state: Any) -> None:
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if tensors:
        register_multi_grad_hook(tensors, lambda _: recording.count(backward=1), mode="any")


def layer_nest(parts: tuple[Part, ...], chain: Chain) -> LayerNest:
    """The nest of a plan for a chain of layers, as a form: layers in the place of steps."""
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
    """Say why a module cannot be run as the nest says."""
    layers, most = len(list(row.children())), max(part.stop for part in nest.ranges())
    if not isinstance(row, nn.Sequential) or type(row).forward is not nn.Sequential.forward:
        raise InputError(
            f"the plan is for an nn.Sequential, and this {type(row).__name__} is none; plan again with plan_model"
        )
    if most != layers:
        raise InputError(
            f"the plan is for {most:,} layers, and this {type(row).__name__} has {layers:,}; plan again with plan_model"
        )


def run_nest(nest: LayerNest, row: nn.Module, x: Any) -> Any:
    """Run the layers of an `nn.Sequential` as the nest says."""
    check_nest(nest, row)
    layers, ranges = list(row.children()), list(nest.ranges())
    steps = tuple(tuple(layers[part.start : part.stop]) for part in ranges)

    def leanly(step: tuple[Layer, ...], k: int, _: int, state: Any) -> Any:
        lean = ranges[k].lean
        assert lean is not None
        return run_lean(step, state, LeanSize(lean.tape, lean.working, strict=False))

    return Runner(steps, {}, leanly).run(_parts(nest, 0)[0], x)


def _parts(nest: LayerNest, first: int) -> tuple[tuple[Part, ...], int]:
    """As parts of a row whose steps are the ranges, from number `first` on; and the number after the last."""
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
