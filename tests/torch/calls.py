"""Calls made plainly beside calls made with a verb: what they are given, and that their results are equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide.torch.state.bits import same_bits

Function = Callable[..., Any]


def drawn_leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers that need a gradient, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def plainly(function: Function, *args: Any, **kwargs: Any) -> Any:
    """The call itself."""
    return function(*args, **kwargs)


def same(left: Any, right: Any) -> None:
    """Fail unless two rows of tensors agree to the last bit; None agrees with None."""
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert (a is None and b is None) or same_bits(a, b)
