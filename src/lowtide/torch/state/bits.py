"""Tensors compared bit by bit, so that NaN equals itself and -0.0 does not equal 0.0."""

from __future__ import annotations

import torch

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
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
