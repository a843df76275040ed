"""The loss of a training step: how it is taken from a model's output, and its backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lowtide.errors import InputError
from lowtide.torch.state.capture import edge_of, strangers

Loss = Callable[[Any], torch.Tensor]


def loss_of(output: Any, loss: Loss | None) -> torch.Tensor:
    """The loss in a model's output.

    Raises:
        InputError: there is no loss of one number, or it requires no gradient.
    """
    value: Any
    if loss is not None:
        value = loss(output)
    elif isinstance(output, torch.Tensor):
        value = output
    elif isinstance(output, dict) and "loss" in output:
        value = output["loss"]
    else:
        value = getattr(output, "loss", None)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        what = (
            f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(type(value).__name__)
        )
        raise InputError(
            f"the model's {type(output).__name__} has no loss of one number, but {what}; give loss=, a function that "
            "takes the loss from what the model returns"
        )
    if not value.requires_grad:
        raise InputError("the loss needs no gradient, so there is nothing to plan; let a parameter require one")
    return value


def pull_back(value: torch.Tensor, ours: set[int]) -> list[torch.Tensor | None]:
    """Call `value.backward()` and restore the leaves that are not ours, such as parameters of the loss function.

    Returns the gradients that those leaves got, which a training step would hold.

    Args:
        value: a loss.
        ours: ids of the leaves whose gradients and hooks the caller restores.
    """
    with ExitStack() as stack:
        others = _others(value, ours, stack)  # weak references: the backward may free a leaf that the step made itself
        value.backward()
        return [other.grad for reference in others if (other := reference()) is not None]


def _others(value: torch.Tensor, ours: set[int], stack: ExitStack) -> list[weakref.ref[torch.Tensor]]:
    """The leaves that are not ours; they have no gradients and no hooks until the stack is closed."""
    leaves = [edge.node.variable for edge in strangers([edge_of(value)], set(), 0) if hasattr(edge.node, "variable")]
    others = {id(leaf): leaf for leaf in leaves if id(leaf) not in ours}
    stack.enter_context(hooks_aside(others.values()))
    references = []
    for other in others.values():
        references.append(weakref.ref(other))
        stack.callback(_give_back, references[-1], other.grad)
        other.grad = None
    return references


def _give_back(reference: weakref.ref[torch.Tensor], gradient: torch.Tensor | None) -> None:
    tensor = reference()
    if tensor is not None:
        tensor.grad = gradient


@contextmanager
def hooks_aside(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, hooks of these tensors do not run: some would take an optimizer step."""
    hooked = [
        (hooks, dict(hooks))
        for tensor in tensors
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
        if (hooks := getattr(tensor, name))
    ]
    for hooks, _ in hooked:
        hooks.clear()  # in place: the engine reads this very dictionary
    try:
        yield
    finally:
        for hooks, before in hooked:
            hooks.update(before)
