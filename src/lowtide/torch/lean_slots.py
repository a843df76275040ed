"""A saved tensor of a lean tape, and what is told about its storage."""

from __future__ import annotations

from typing import Any

import torch

from lowtide.torch.bits import words
from lowtide.torch.lean_bits import Bits
from lowtide.torch.lean_trace import View

_SAMPLE, _NEIGHBOURS = 64, 16  # how many places of a dropped tensor are looked at, and how many numbers at each


class Slot:
    """A saved tensor: `tensor`, or what the hooks around made of it (`outer`), or the `value` that it is made from.

    `sources` are the slots of the values that making it again starts from, where they are not this slot itself. With
    `bits`, the tensor is the value's bits.
    """

    __slots__ = ("bits", "index", "outer", "settled", "sources", "tensor", "value", "version")

    def __init__(self, index: int, tensor: torch.Tensor) -> None:
        self.index = index
        self.tensor: torch.Tensor | None = tensor.detach()
        self.version = tensor._version  # when it was saved
        self.settled = self.version  # when the call was over
        self.value: int | None = None
        self.bits: Bits | None = None
        self.outer: Any = None
        self.sources: dict[int, Slot] | None = None


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of the tensor's storage, flat."""
    tensor = tensor.detach()
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def restrided(tensor: torch.Tensor, view: View) -> torch.Tensor:
    """A copy of the tensor with the view's strides."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(view.size, view.stride, strict=True))
    return tensor.new_empty(extent).as_strided(view.size, view.stride, 0).copy_(tensor)


def sample_of(tensor: torch.Tensor) -> int | torch.Tensor:
    """What tells a few numbers of the tensor's storage from others; on a GPU, which would wait, those numbers."""
    count = int(tensor.untyped_storage().nbytes() // tensor.element_size())
    if count > _SAMPLE * _NEIGHBOURS:
        sample = tensor.as_strided((_SAMPLE, _NEIGHBOURS), (count // _SAMPLE, 1), 0)
    else:
        sample = tensor.as_strided((count,), (1,), 0)
    if tensor.device.type != "cpu":  # pragma: no cover  (needs a GPU)
        return sample.clone()
    return hash(words(sample).numpy().tobytes())
