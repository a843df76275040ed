"""Fake tensors, without values, in place of real ones: same shapes, same shared storages, no memory.

Tensors of whole numbers and booleans, and other small ones, keep their values, so that a model finds its masks and
positions (`results.py`). Parameters and tensors that require a gradient never do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from lowtide.errors import InputError
from lowtide.torch.state.notes import SMALL

MOST_KNOWN_BYTES = 16 * 2**20  # of a tensor that keeps its values; larger ones have none on paper
# The same for floating-point tensors: those that calls of `checkpoint` make copies of.
_MOST_KNOWN_BYTES_OF_FRACTIONS = SMALL
_PLAIN_DISPATCH = torch._C._disabled_torch_dispatch_impl


class Fakes:
    """A fake tensor for each tensor, always the same one.

    Args:
        mode: the mode that they belong to.
        device: the device that they claim to be on; None for that of the original, or the CPU if it is a meta tensor.
        keeps_values: decides which tensors keep their values.

    Sharing is preserved: one tensor in two places, and two tensors with one storage.
    """

    def __init__(
        self,
        mode: FakeTensorMode,
        device: str | None = "cpu",
        keeps_values: Callable[[torch.Tensor], bool] | None = None,
    ) -> None:
        self._mode = mode
        self._keeps_values = keeps_values or _is_small
        self._device = device
        self._made: dict[int, torch.Tensor] = {}
        self._bases: dict[int, torch.Tensor] = {}
        self._held: list[torch.Tensor] = []  # keeps alive the tensors whose `id` the dicts have as keys

    def of_tree(self, tree: Any) -> Any:
        """The tree with fake tensors; the same object if it has no tensors."""
        if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(tree)):
            return tree
        return tree_map(lambda leaf: self.of(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake tensor for this one."""
        if id(tensor) not in self._made:
            _check(tensor)
            made = self._made_for(tensor)
            self._made[id(tensor)] = self._made[id(made)] = made
            self._held += (tensor, made)
        return self._made[id(tensor)]

    def _made_for(self, tensor: torch.Tensor) -> torch.Tensor:
        plain = not isinstance(tensor, nn.Parameter) and not tensor.requires_grad and has_values(tensor)
        known = plain and self._keeps_values(tensor)
        with unset_fake_temporarily() if known else self._mode:
            base = self._base(tensor, known)
            base = base.narrow(0, 0, base.numel() // tensor.itemsize * tensor.itemsize).view(tensor.dtype)
            made = base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).detach()
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(made, tensor.requires_grad)
            return made.requires_grad_(tensor.requires_grad)

    def _base(self, tensor: torch.Tensor, known: bool) -> torch.Tensor:
        """The tensor's whole storage, as a tensor of bytes."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._bases:
            if known:
                base = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
                base.untyped_storage().copy_(storage)
            else:
                device = self._device or tensor.device
                if torch.device(device).type == "meta":
                    device = "cpu"
                base = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
            self._bases[storage._cdata] = base
        return self._bases[storage._cdata]


def has_values(tensor: torch.Tensor) -> bool:
    """Whether the tensor has values, which neither a fake nor a meta tensor has."""
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


def _is_small(tensor: torch.Tensor) -> bool:
    fractions = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return tensor.untyped_storage().nbytes() <= (_MOST_KNOWN_BYTES_OF_FRACTIONS if fractions else MOST_KNOWN_BYTES)


def _check(tensor: torch.Tensor) -> None:
    way_out = "plan it without on_paper"
    if is_lazy(tensor):
        raise InputError("a parameter has no shape yet: call the model once, or build it with all sizes given")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise InputError(f"a tensor of layout {tensor.layout} and {tensor.dtype} cannot be had on paper; {way_out}")
    if type(tensor).__torch_dispatch__ is not _PLAIN_DISPATCH and not isinstance(tensor, FakeTensor):
        raise InputError(f"a {type(tensor).__name__} is no plain tensor, and cannot be had on paper; {way_out}")
