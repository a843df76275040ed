"""The loss of a training step: taken from what a model returns, and pulled back."""

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
    """The loss in what a model returned."""
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
    """`value.backward()`; leaves that are not ours, as a loss may have, are then as they were.

    Returns the gradients that they got, which a training step would hold.

    Args:
        value: a loss.
        ours: identities of the leaves whose gradients and hooks are taken care of elsewhere.
    """
    with ExitStack() as stack:
        others = _others(value, ours, stack)  # not held: a leaf of the step's own may be let go on the way
        value.backward()
        return [other.grad for reference in others if (other := reference()) is not None]


def _others(value: torch.Tensor, ours: set[int], stack: ExitStack) -> list[weakref.ref[torch.Tensor]]:
    """Leaves that are not ours, without gradients and hooks for as long as the stack lasts."""
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
    """Inside, tensors' hooks are silent: some take an optimizer's step."""
    hooked = [
        (hooks, dict(hooks))
        for tensor in tensors
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
        if (hooks := getattr(tensor, name))
    ]
    for hooks, _ in hooked:
        hooks.clear()  # the very dictionary that the engine looks into
    try:
        yield
    finally:
        for hooks, before in hooked:
            hooks.update(before)
