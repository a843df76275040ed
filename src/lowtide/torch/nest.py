"""A plan as nested checkpoint calls, on the graph that autograd makes anyway.

A plan in which every snapshot and tape stays until its own backward is a nest: the steps that it advances over are a
checkpointed part, and what it does after restoring that part's start is what is inside. Steps that it tapes whole are
called as they are; those that it tapes in a smaller form are left to a function that knows how.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from lowtide.actions import Advance, Backward, Drop, Restore, Save, Tape, Tier
from lowtide.errors import InputError
from lowtide.plan import Plan
from lowtide.simulate import judged
from lowtide.torch import recording
from lowtide.torch.checkpoint import checkpoint

Layer = Callable[[Any], Any]
# Calls the layers of step number so and so in this form of its menu, 1 or more, from a state.
Lean = Callable[[tuple[Layer, ...], int, int, Any], Any]


@dataclass(frozen=True, slots=True)
class Part:
    """Steps [start, stop): called, or checkpointed, with parts of their own inside.

    `option` is the entry of their menus that steps which are called are taped in: 0 for as they are. `depth` is how
    many checkpoint calls are inside one another.
    """

    start: int
    stop: int
    inside: tuple[Part, ...] = ()
    option: int = 0
    depth: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "depth", 1 + max(part.depth for part in self.inside) if self.inside else 0)


@lru_cache(maxsize=64)
def nest_of(plan: Plan) -> tuple[Part, ...]:
    """The plan's nest.

    Raises:
        InputError: it drops something early and makes it again later, or uses a disk.
        PlanError: it is not legal.
    """
    whole = (0, len(plan.chain))
    # For the whole and for each part that is advanced over: what is called and what is advanced over inside, and the
    # form in which what is called is taped.
    sweeps: dict[tuple[int, int], list[tuple[int, int, int]]] = {whole: []}
    sweep, front = sweeps[whole], len(plan.chain)
    advanced: set[tuple[int, int]] = set()
    stored: set[int] = set()
    for action in judged(plan):
        match action:
            case Advance(start, stop):
                if sweep and sweep[-1][:2] in advanced and start not in stored:  # it goes on from where it was
                    start = sweep.pop()[0]
                sweep.append((start, stop, 0))
                advanced.add((start, stop))
            case Tape(start, stop, option):
                sweep.append((start, stop, option))
            case Backward(start):
                front = start
            case Restore(start) if (start, front) in advanced:
                sweep = sweeps[start, front] = []
            case Save(step, Tier.MEMORY):
                stored.add(step)
            case Drop(step, Tier.MEMORY):
                stored.discard(step)
            case _:
                raise InputError(
                    f"this plan (by {plan.planner}) is not one for layers: {action} cannot be done by running a part "
                    "again from its start; plan again with plan_sequential"
                )
    # Inner parts come later: they are put together first.
    parts: dict[tuple[int, int], tuple[Part, ...]] = {}
    for bounds in reversed(sweeps):
        parts[bounds] = tuple(
            Part(start, stop, parts.get((start, stop), ()), option) for start, stop, option in sweeps[bounds]
        )
    return parts[whole]


def kept_by(parts: tuple[Part, ...], kept: tuple[int, ...]) -> int:
    """Most bytes that checkpoint calls keep at once, where each keeps so many for every step in it.

    Those side by side are there together, and the calls inside one of them at a time; while one is run again, what it
    finds is put aside.
    """
    own = {part: sum(kept[part.start : part.stop]) for part in parts if part.inside}
    return sum(own.values()) + max((own.get(part, 0) + kept_by(part.inside, kept) for part in parts), default=0)


def copied_by(parts: tuple[Part, ...], copied: tuple[int, ...]) -> list[int]:
    """For each step, bytes of copies while it runs without a tape, where a call copies so many of its first state."""
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
    lean: Lean

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
