"""Tensors compared bit by bit, so that NaN equals itself and -0.0 does not equal 0.0."""

from __future__ import annotations

import zlib
from typing import Any

import torch

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WIDE = frozenset({torch.float64, torch.complex128})
_USUAL = {torch.float32: torch.int32, torch.float64: torch.int64}


def words(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as whole numbers, apart from every graph."""
    plain = tensor.detach()
    word = _USUAL.get(plain.dtype)
    if word is not None and not plain.is_neg():
        return plain.view(word)
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    if plain.is_floating_point():
        return plain.resolve_neg().view(_WORDS[plain.element_size()])
    return plain


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors agree in shape, dtype, device and every bit; on the meta device there are none."""
    if left.shape != right.shape or left.dtype != right.dtype or left.device != right.device:
        return False
    return left.is_meta or torch.equal(words(left), words(right))


def checksum(tensor: torch.Tensor) -> int:
    """Eight bytes that differ when a value does, or when values change places, but for a rare coincidence.

    Rows and columns of words are summed and the sums weighted by their place. Beside those sums it takes no room.
    """
    rows = words(tensor)
    if tensor.dtype in _WIDE:
        # Two sign bits would cancel in a sum of 64 bits; in 32-bit words they do not.
        rows = rows.contiguous().view(torch.int32) if rows.dim() else rows.reshape(1).view(torch.int32)
    if rows.dim() == 0:
        return int(rows)
    if rows.dim() == 1:
        return 3 * int(rows[::2].sum()) + int(rows[1::2].sum())
    rows = rows.flatten(1)
    return _weighted(rows.sum(1)) + 7 * _weighted(rows.sum(0))


def _weighted(sums: torch.Tensor) -> int:
    return int((sums * torch.arange(1, 2 * len(sums), 2, device=sums.device)).sum())


def checksum_bytes(tensor: torch.Tensor) -> int:
    """Room that `checksum` takes while it works: three numbers for each row or column."""
    return 24 * max(len(tensor), tensor.numel() // max(1, len(tensor))) + 32 if tensor.dim() > 1 else 24


def fingerprint(tensor: torch.Tensor) -> int:
    """A number that differs when any bit or place does, masks of zeros and ones included; slower than `checksum`."""
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    array: Any = words(plain.cpu()).contiguous().numpy()
    return zlib.crc32(array) << 32 | zlib.adler32(array)
