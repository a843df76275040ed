"""Tensors compared bit by bit, so that NaN equals itself and -0.0 does not equal 0.0.

And the states and outputs of a loop's reruns compared with those of first runs, of which checksums are kept.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

from lowtide.errors import CheckpointError

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


class Repeats:
    """Checksums by the number of steps that led to a state.

    Taken where snapshots are; with `always`, after every step.
    """

    def __init__(self, always: bool, never: bool) -> None:
        self.always = always
        self._never = never
        self._sums: dict[int, list[int]] = {}

    def note(self, step: int, leaves: list[Any], *, first: bool) -> None:
        """Take the state after `step` steps and the last one's output; compare it unless this is the first run."""
        if self._never:
            return
        sums: list[int] = []
        known: dict[tuple[int, torch.Size], int] = {}  # an output that is part of the state is summed once
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                key = (leaf.data_ptr(), leaf.shape)
                if key not in known:
                    known[key] = checksum(leaf)
                sums.append(known[key])
        if first:
            self._sums[step] = sums
        elif self._sums.get(step, sums) != sums:
            raise CheckpointError(
                f"run again, step {step - 1:,} or one before it gave other values than at first: something it uses "
                "does not repeat. Draw random numbers with torch (or name the generator: generators=(g,)), keep state "
                "in the carry or in a module, and change nothing between forward and backward; check_rerun=True "
                "finds the first such step. If it picks other kernels without grad, pass advance_with_grad=True"
            )
