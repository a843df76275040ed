"""Values of small tensors on paper: what no fake tensor has gone into is computed.

Models look at masks and positions to decide what to do. Those come from whole numbers, not from activations, and are
small. So an operation whose tensors all have values, and whose result is small, runs; every other one is left to the
fake mode around, and its result has no values.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowtide.torch.fakes import MOST_KNOWN, has_values
from lowtide.torch.operations import written_by
from lowtide.torch.paper_results import result_of

_DEVICE = torch.ops.prim.device.default
_EQUAL = torch.ops.aten.equal.default
_OF_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class KnownValues(TorchDispatchMode):
    """To be entered inside a fake mode that allows other tensors.

    Args:
        device: where everything is, whatever an operation asks for; None for where it asks.
    """

    def __init__(self, device: str | None = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._device = device
        self._unknown: set[int] = set()  # storages that had values until a fake tensor was put into them

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # what a fake tensor is asked at every turn
            return func(*args)
        kwargs = dict(kwargs or {})
        asked = kwargs.get("device")
        if asked is not None and self._device is not None:
            kwargs["device"] = asked = torch.device(self._device)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        valued = [tensor for tensor in tensors if has_values(tensor)]
        if len(valued) == len(tensors) and (asked is None or asked.type == "cpu"):
            if func.is_view:
                return self._really(func, args, kwargs)
            if all(self._is_known(tensor) for tensor in tensors):
                # A change in place makes nothing; what depends on values makes no more than it is given.
                if func._schema.is_mutable or any(tag in func.tags for tag in _OF_VALUES):
                    return self._really(func, args, kwargs)
                result = result_of(func, args, kwargs)
                return self._really(func, args, kwargs) if _is_small(result) else result
        if func is _EQUAL and any(not self._is_known(tensor) for tensor in valued):
            return False  # it was written into: that is another value, as far as anybody can say
        return self._own(func, args, kwargs, result_of(func, args, kwargs))

    @staticmethod
    def _really(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is not torch.strided or tensor.untyped_storage()._cdata not in self._unknown

    def _own(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """What to give for a fake result: if it is a tensor of values that was written into, that one, now unknown."""
        written = written_by(func, args, kwargs)
        for tensor in tree_leaves(written):
            if isinstance(tensor, torch.Tensor) and has_values(tensor):
                self._forget(tensor.untyped_storage())
        returned = func._schema.returns
        if len(returned) == 1 and returned[0].alias_info is not None and len(written) == 1:
            return written[0]
        return result

    def _forget(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._unknown:
            self._unknown.add(storage._cdata)
            weakref.finalize(storage, self._unknown.discard, storage._cdata).atexit = False


def _is_small(result: Any) -> bool:
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors) <= MOST_KNOWN
