"""Masks and spikes as bits: a tensor of two different numbers, one of them 0, takes one bit for each element.

On a device only masks do: which number spikes have, and that there is no other, could not be told without waiting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.torch.memory.accelerators import is_of_host

_BIT_WEIGHTS = (1, 2, 4, 8, 16, 32, 64, 128)  # little-endian, as numpy packs here


@dataclass(frozen=True, slots=True)
class Bits:
    """How a tensor is packed into bits, in the order of its storage.

    Attributes:
        count: the number of elements.
        dtype: the tensor's dtype.
        number: the number that the tensor has where it is not 0.
    """

    count: int
    dtype: torch.dtype
    number: float

    def tensor(self, bits: torch.Tensor) -> torch.Tensor:
        """The tensor, flat, recovered from its bits."""
        if bits.device.type == "cpu":
            ones = torch.from_numpy(np.unpackbits(bits.numpy(), count=self.count, bitorder="little"))
        else:
            ones = (bits[:, None] & _bit_weights(bits.device)).ne(0).view(-1)[: self.count]
        if self.dtype is torch.bool:
            return ones.to(torch.bool)
        return ones.to(self.dtype).mul_(self.number)


def bits_of(tensor: torch.Tensor) -> tuple[Bits, torch.Tensor] | None:
    """The packing of the tensor and its bits; None if it has other numbers than 0 and one above, or gaps."""
    tensor, count = tensor.detach(), tensor.numel()
    if bytes_in_bits(tensor) is None:
        return None
    flat = tensor.as_strided((count,), (1,), 0)
    if tensor.dtype is torch.bool:
        return Bits(count, tensor.dtype, 1.0), _packed(flat)
    number = float(flat.amax())
    ones = flat == number if number > 0 else flat != 0
    if (
        not math.isfinite(number)
        or int(ones.count_nonzero()) != int(flat.count_nonzero())
        or (number <= 0 and bool(ones.any()))
    ):
        return None
    return Bits(count, tensor.dtype, number), _packed(ones)


def bytes_in_bits(tensor: torch.Tensor) -> int | None:
    """The bytes that the tensor takes in bits, if it has only 0 and one number above; None if it has gaps."""
    count = tensor.numel()
    if not count or count * tensor.element_size() != tensor.untyped_storage().nbytes():
        return None
    if tensor.dtype is torch.bool or (tensor.dtype.is_floating_point and is_of_host(tensor.device)):
        return -(-count // 8)
    return None


@cache
def _bit_weights(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False), _disable_current_modes():
        return torch.tensor(_BIT_WEIGHTS, dtype=torch.uint8, device=device)


def _packed(ones: torch.Tensor) -> torch.Tensor:
    if ones.device.type == "cpu":
        # Cloned so that `measure` counts it: it does not see memory that numpy allocates.
        return torch.from_numpy(np.packbits(ones.numpy(), bitorder="little")).clone()
    padded = torch.zeros(-(-len(ones) // 8) * 8, dtype=torch.uint8, device=ones.device)
    padded[: len(ones)] = ones
    return (padded.view(-1, 8) * _bit_weights(ones.device)).sum(1, dtype=torch.uint8)
