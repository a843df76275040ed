"""The results of operations on paper: values where they can be known, and shapes where torch's own are wrong.

Models look at masks and positions to decide what to do. Those depend on whole numbers, not on activations, and are
small. So an operation runs if all its tensors have values and its result is small; every other operation is left to the
enclosing fake mode, and its result has no values.

For some operations torch's result for tensors without values is wrong, or an error. The reserve of an LSTM layer, which
torch leaves out, is as large as in oneDNN, which runs such layers on a CPU. Libraries on GPUs reserve about as much, or
less.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowtide.torch.paper.fakes import MOST_KNOWN_BYTES, has_values
from lowtide.torch.paper.operations import written_by

_DEVICE = torch.ops.prim.device.default
_EQUAL = torch.ops.aten.equal.default
_VALUE_DEPENDENT_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class KnownValues(TorchDispatchMode):
    """Runs operations on tensors with values, and leaves all others to the fake mode in which it is entered.

    The fake mode has to allow tensors that are not fake.

    Args:
        device: the device of all results, whatever an operation asks for; None for the one that it asks for.
    """

    def __init__(self, device: str | None = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._device = device
        self._unknown: set[int] = set()  # storages that had values until a fake tensor was written into them

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # asked of a fake tensor very often, so it is answered first
            return func(*args)
        kwargs = self._placed(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        valued = [tensor for tensor in tensors if has_values(tensor)]
        known = all(map(self._is_known, valued))
        if len(valued) == len(tensors) and _is_for_cpu(kwargs):
            if func.is_view:
                return _really(func, args, kwargs)
            if known:
                return _computed(func, args, kwargs)
        if func is _EQUAL and not known:
            return False  # a fake tensor was written into one of them, so its values are taken to have changed
        return self._own(func, args, kwargs, result_of(func, args, kwargs))

    def _placed(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        if kwargs.get("device") is None or self._device is None:
            return kwargs
        return {**kwargs, "device": torch.device(self._device)}

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is not torch.strided or tensor.untyped_storage()._cdata not in self._unknown

    def _own(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """The result to return for a fake one: a tensor that was written in place itself, with unknown values now."""
        written = written_by(func, args, kwargs)
        for tensor in tree_leaves(written):
            if isinstance(tensor, torch.Tensor) and has_values(tensor):
                self._forget(tensor.untyped_storage())
        returned = func._schema.returns
        if len(returned) == 1 and returned[0].alias_info is not None and len(written) == 1:
            return written[0]
        return result

    def _forget(self, storage: torch.UntypedStorage) -> None:
        # Only until the storage dies: another one may then get the same address.
        if storage._cdata not in self._unknown:
            self._unknown.add(storage._cdata)
            weakref.finalize(storage, self._unknown.discard, storage._cdata).atexit = False


def _is_for_cpu(kwargs: dict[str, Any]) -> bool:
    """Whether an operation asks for the CPU or for no device."""
    asked = kwargs.get("device")
    return asked is None or asked.type == "cpu"


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operation on tensors that all have values: with values if it is small."""
    # A change in place allocates nothing, and an operation whose output depends on values returns no more than it gets.
    if func._schema.is_mutable or any(tag in func.tags for tag in _VALUE_DEPENDENT_TAGS):
        return _really(func, args, kwargs)
    result = result_of(func, args, kwargs)  # a fake result, which shows how large the real one would be
    return _really(func, args, kwargs) if _is_small(result) else result


def _really(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with unset_fake_temporarily():
        return func(*args, **kwargs)


def _is_small(result: Any) -> bool:
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors) <= MOST_KNOWN_BYTES


def result_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operation, inside a fake mode."""
    make = _OWN_RESULTS.get(func)
    return func(*args, **kwargs) if make is None else make(func, *args, **kwargs)


def _grouped_product(
    func: Any, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor | None = None, *more: Any, **kwargs: Any
) -> Any:
    """The result of matrix products of groups of rows, as for experts; torch knows its shape for bfloat16 only."""
    if a.dtype is torch.bfloat16 or (a.dim() != b.dim() and a.shape[-1] != b.shape[-2]):
        return func(a, b, offsets, *more, **kwargs)
    offsets = kwargs.get("offs", offsets)
    groups = () if a.dim() != b.dim() else (len(a) if offsets is None or a.dim() > 2 else len(offsets),)
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]), dtype=kwargs.get("out_dtype"))


def _counts(func: Any, numbers: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> Any:
    """The result of `bincount` with as many entries as `minlength` asks for: the real number depends on values."""
    if not minlength:
        return func(numbers, weights)
    dtype = torch.long if weights is None else weights.dtype if weights.dtype is torch.float else torch.double
    return numbers.new_empty(minlength, dtype=dtype)


def _recurrent_layer(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The results of an LSTM layer, with its reserve."""
    *results, reserve = func(*args, **kwargs)
    (steps, batch, inputs), hidden, train = args[0].shape, args[10], args[15]
    if train:
        reserve = reserve.new_empty(_lstm_reserve(steps, batch, inputs, hidden, args[0].itemsize))
    return (*results, reserve)


_PAGE_BYTES = 4096
_CACHE_LINE_BYTES = 64


def _lstm_reserve(steps: int, batch: int, inputs: int, hidden: int, itemsize: int) -> int:
    """The bytes that an LSTM layer of oneDNN keeps for its backward, beside its results."""
    widest, twice = max(inputs, hidden), 2 * (steps + 1) * batch
    return sum(
        times * (-(-size // _PAGE_BYTES) * _PAGE_BYTES)
        for times, size in (
            (1, steps * batch * _row(4 * hidden, itemsize)),  # gates
            (1, steps * batch * _row(hidden, itemsize)),
            (2, twice * _row(widest, itemsize)),  # states of layers and of steps
            (1, twice * _row(widest, 4)),  # gradients of them
            (2, twice * hidden * 4),  # cells, and gradients of them
        )
    )


def _row(length: int, itemsize: int) -> int:
    """Bytes of a row of numbers, in whole cache lines; one line more where rows would all map to the same cache set."""
    row = -(-length * itemsize // _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES
    return row if row // itemsize % 256 else row + _CACHE_LINE_BYTES


_aten = torch.ops.aten
_OWN_RESULTS: dict[Any, Callable[..., Any]] = {
    _aten._grouped_mm.default: _grouped_product,
    _aten.bincount.default: _counts,
    _aten.mkldnn_rnn_layer.default: _recurrent_layer,
}
