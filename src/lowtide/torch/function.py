"""The autograd Function that spans a loop, and its differentiable backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from lowtide.actions import Action
from lowtide.torch import recording
from lowtide.torch.engine import Engine


def run(engine: Engine, actions: Callable[[], Iterator[Action]]) -> tuple[list[Any], list[Any]]:
    """Run the engine's loop by the plan whose actions these are; gives results of outputs and the final state."""
    engine.plan_actions = actions
    tensors = [*engine.start_tensors(), *engine.inputs.differentiable, *engine.captured.tensors]
    box: list[Any] = []
    results = iter(_Loop.apply(engine, box, *tensors))  # type: ignore[no-untyped-call]  # torch's own
    merged = [next(results) if isinstance(leaf, torch.Tensor) else leaf for leaf in box]
    count = len(engine.profile.outputs)
    return merged[:count], merged[count:]


class _Loop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, engine: Engine, box: list[Any], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        finals = engine.sweep(engine.plan_actions())
        results = [*engine.outputs.results(), *finals]
        flags = engine.result_flags()
        ctx.engine = engine
        ctx.tensor_places = [k for k, leaf in enumerate(results) if isinstance(leaf, torch.Tensor)]
        ctx.total = len(results)
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        plain = [leaf for leaf, flag in zip(results, flags, strict=True) if isinstance(leaf, torch.Tensor) and not flag]
        ctx.mark_non_differentiable(*plain)
        recording.leave_out(results)
        box += results
        return tuple(leaf for leaf in results if isinstance(leaf, torch.Tensor))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        tensors: tuple[torch.Tensor, ...] = ctx.saved_tensors  # torch refuses here what was freed or changed in place
        placed: list[torch.Tensor | None] = [None] * ctx.total
        for place, grad in zip(ctx.tensor_places, grads, strict=True):
            placed[place] = grad
        recording.leave_out(grads)
        if torch.is_grad_enabled():
            return (None, None, *_differentiable(ctx.engine, tensors, placed))
        found = ctx.engine.backward(placed)
        recording.leave_out(found)
        return (None, None, *found)


def _differentiable(
    engine: Engine, tensors: tuple[torch.Tensor, ...], grads: list[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...]:
    """The plain loop run again from `tensors`, with a graph through which gradients can be differentiated."""
    with recording.recomputing():
        captured = engine.captured
        # Fresh nodes for everything that is given, so that nothing runs on into how it was made; for what is captured
        # only where one tensor was made from another, because then each function call has to be watched.
        given = [tensor.view_as(tensor) for tensor in tensors[: len(tensors) - len(captured.tensors)]]
        swaps = {id(tensor): tensor.view_as(tensor) for tensor in captured.tensors} if captured.dependent else {}
        wanted = [*given, *(swaps.get(id(tensor), tensor) for tensor in captured.tensors)]
        with captured.in_place_of(swaps):
            results = _plain_again(engine, given)
        pairs = [
            (result, grad)
            for result, grad in zip(results, grads, strict=True)
            if grad is not None and isinstance(result, torch.Tensor) and result.requires_grad
        ]
        with captured.without_hooks():
            return torch.autograd.grad(
                [result for result, _ in pairs],
                wanted,
                [grad for _, grad in pairs],
                create_graph=True,
                allow_unused=True,
            )


def _plain_again(engine: Engine, given: list[torch.Tensor]) -> list[Any]:
    """The whole loop with its graph, from the differentiable start leaves and inputs in `given`."""
    rest = iter(given)
    begin, count = engine.begin.all_leaves(), len(engine.begin.leaves)
    start = [next(rest) if flag else leaf for leaf, flag in zip(begin, engine.first_flags, strict=True)]
    rows = engine.inputs.connected(list(rest))
    outputs, stepper = engine.outputs.fresh(), engine.stepper
    with engine.ambient.again(), engine.hidden.aside(), engine.random.aside(), torch.enable_grad():
        engine.hidden.write(engine.begin.hidden)
        engine.hidden.replace(start[count:])
        engine.random.restore(engine.begin.random)
        carry = stepper.form.unflatten(start[:count])
        for k, x in enumerate(rows):
            carry, y = stepper.call(k, carry, x)
            outputs.keep(k, engine.inputs.place(k), y)
        finals = [*stepper.leaves(engine.length - 1, carry), *engine.hidden.leaves()]
    recording.count(taping=engine.length, backward=engine.length)
    if engine.progress is not None:
        engine.progress.update(engine.length)
        engine.progress = None
    return [*outputs.graphed(), *finals]
