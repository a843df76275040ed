"""Compares gradients with and without Lowtide: whether they are the same, and what both runs cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from lowtide.errors import InputError
from lowtide.interface.comparison import Compared, Comparison, share_of
from lowtide.torch.memory.recording import plainly, record
from lowtide.torch.state.bits import same_bits
from lowtide.torch.state.capture import Watch, edge_of
from lowtide.torch.state.generators import Randomness
from lowtide.torch.state.hidden import Hidden
from lowtide.torch.state.trees import leaves_of


def compare_gradients(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Comparison:
    """Run `fn(*args, **kwargs)` and its backward twice, first with Lowtide's functions run plainly, and compare.

    `fn` returns a loss, or anything that contains tensors, which are summed. Gradients are compared for every tensor
    that requires one and that the result depends on. Random generators and the state of modules are restored after each
    run.
    """
    modules = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, nn.Module)]
    hidden, random = Hidden((fn, *modules)), Randomness(())
    outcomes = []
    for without in (True, False):
        watch = Watch()
        try:
            with hidden.meeting_modules(), watch, record() as recording, plainly(without):
                loss = _loss(fn(*args, **kwargs))
                leaves = _leaves(loss)
                gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
            outcomes.append((loss, leaves, gradients, recording.receipt))
        finally:
            hidden.undo()
            for generator, state in watch.generators.values():
                random.add(generator, state)
            random.restore(random.start)
    (loss, leaves, gradients, plain), (other_loss, other_leaves, other_gradients, ours) = outcomes
    names = {id(leaf): f"argument {k}" for k, leaf in enumerate(leaves_of((args, kwargs)))} | hidden.parameters
    rows = [_compared("the result", loss, other_loss)]
    for k, (one, other) in enumerate(_matched(leaves, other_leaves)):
        leaf = leaves[one] if one is not None else other_leaves[other or 0]
        name = names.get(id(leaf), f"tensor {k} of shape {tuple(leaf.shape)}")
        first = None if one is None else gradients[one]
        second = None if other is None else other_gradients[other]
        rows.append(_compared(f"gradient of {name}", first, second))
    return Comparison(tuple(rows), plain, ours)


def _matched(one: list[torch.Tensor], other: list[torch.Tensor]) -> list[tuple[int | None, int | None]]:
    """Pairs of indices of the same tensor in both lists; tensors that each run makes itself are matched in order."""
    places = {id(leaf): k for k, leaf in enumerate(other)}
    pairs: list[tuple[int | None, int | None]] = [(k, places.get(id(leaf))) for k, leaf in enumerate(one)]
    taken = {place for _, place in pairs}
    rest = iter([k for k in range(len(other)) if k not in taken])
    matched = [(k, place if place is not None else next(rest, None)) for k, place in pairs]
    return matched + [(None, k) for k in rest]


def _loss(result: Any) -> torch.Tensor:
    tensors = [t for t in leaves_of(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not tensors:
        raise InputError(
            "fn returned nothing that needs a gradient; return the loss, or tensors that depend on parameters"
        )
    if len(tensors) == 1 and tensors[0].numel() == 1 and not tensors[0].is_complex():
        return tensors[0]
    total = sum((t.abs() if t.is_complex() else t).sum() for t in tensors)
    assert isinstance(total, torch.Tensor)
    return total


def _leaves(loss: torch.Tensor) -> list[torch.Tensor]:
    """The leaves of the graph that the loss depends on."""
    seen: set[Node] = set()
    stack: list[Node | None] = [edge_of(loss).node]
    leaves: dict[int, torch.Tensor] = {}
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            leaves[id(variable)] = variable
        stack += [below for below, _ in node.next_functions]
    return list(leaves.values())


def _compared(name: str, one: torch.Tensor | None, other: torch.Tensor | None) -> Compared:
    if one is None or other is None:
        # No gradient and a gradient of zeros count as the same.
        present = one if one is not None else other
        difference = 0.0 if present is None else float(present.detach().abs().max())
        return Compared(name, difference == 0.0, difference, share_of(difference, 0.0))
    if same_bits(one, other):
        return Compared(name, True, 0.0)
    one, other = one.detach(), other.detach()
    finite = one.isfinite()
    odd_agree = torch.equal(finite, other.isfinite()) and one[~finite].allclose(other[~finite], equal_nan=True)
    if not odd_agree:  # infinities and NaNs differ
        return Compared(name, False, math.inf, math.inf)
    difference = _largest((one - other)[finite])
    return Compared(name, False, difference, share_of(difference, _largest(one[finite])))


def _largest(numbers: torch.Tensor) -> float:
    return float(numbers.abs().max()) if numbers.numel() else 0.0
