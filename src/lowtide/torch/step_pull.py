"""A step pulled back by itself, from zeros, for what it takes: nobody's gradients or hooks are touched."""

from __future__ import annotations

from typing import Any

import torch

from lowtide.torch.capture import Captured, edge_of, gradients, strangers
from lowtide.torch.storages import tensors_of

_ONE = torch.ones(())


class _Seed(torch.autograd.Function):
    """Pulls zeros into its arguments; those that are not handed to a list as well are held by nobody else."""

    @staticmethod
    def forward(ctx: Any, held: list[torch.Tensor] | None, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.held = held
        ctx.forms = [(output.shape, output.stride(), output.dtype, output.device) for output in outputs]
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        made = [_zeros(*form) for form in ctx.forms]
        if ctx.held is not None:
            ctx.held.extend(made)
        return None, *made


def _zeros(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if 0 in strides:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()


def seed_of(result: Any, held: list[torch.Tensor] | None = None) -> torch.Tensor | None:
    """A root from which to pull the result back, which does not hold it; None if nothing in it has a gradient.

    Args:
        result: what is pulled back.
        held: where its gradients are put, as those of a caller who keeps them.
    """
    roots = [tensor for tensor in tensors_of(result) if tensor.requires_grad]
    return _Seed.apply(held, *roots) if roots else None  # type: ignore[no-untyped-call]  # torch's own


def pulled(
    seed: torch.Tensor, wanted: list[torch.Tensor], since: int
) -> tuple[tuple[torch.Tensor | None, ...], tuple[torch.Tensor | None, ...]]:
    """Gradients of what is wanted, and of everything else that the graph made since then comes from."""
    others = strangers([edge_of(seed)], {edge_of(tensor) for tensor in wanted}, since)
    captured = Captured()
    captured.targets = [edge.node.variable for edge in others if hasattr(edge.node, "variable")]
    with captured.without_hooks():
        results = gradients([seed], [*wanted, *others], [_ONE], keep=False)  # type: ignore[list-item]
    return results[: len(wanted)], results[len(wanted) :]
