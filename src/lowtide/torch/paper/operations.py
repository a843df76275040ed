"""The arguments that a torch operation changes, whether its shapes depend on values, and its time on a device.

Its schema says which arguments it writes; where the schema is incomplete, a rule here adds to it. Its time follows from
its floating-point operations and the bytes that it moves. Floating-point operations are counted by torch's own counter
(matrix products, convolutions, attention and their backwards), with a few additions. All other operations are assumed
to be as fast as their bytes can be moved. What kernels do inside is not seen: scratch space, and reading again what
does not fit into a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from lowtide.torch.paper.devices import Device

# Operations that read no more of their first tensor than they return.
_GATHERING = frozenset({"embedding", "index_select", "gather", "index", "take"})
# Operations that only allocate: the values of their results are undefined.
ALLOCATING = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})
# Operations whose result's shape depends on values.
_OF_ANY_SIZE = frozenset({"nonzero", "masked_select", "unique", "_unique2", "unique_consecutive", "bincount"})


def word_of(func: Any) -> str:
    """The operation's name without namespace and overload: "mul"."""
    name: str = func._schema.name
    return name.split("::")[-1]


class ValueDependence(TorchDispatchMode):
    """Notes whether shapes depend on values, as in a mixture of experts: then the tape differs from call to call."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.found = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.found |= word_of(func) in _OF_ANY_SIZE
        return func(*args, **(kwargs or {}))


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that the operation changes in place: tensors, or lists of them.

    Batch norms change running statistics in training, and some of them without their schema saying so.
    """
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    word = word_of(func)
    silently = "batch_norm" in word and "backward" not in word and bool(given.get("training", True))
    return [
        given[argument.name]
        for argument in func._schema.arguments
        if given.get(argument.name) is not None
        and (
            (argument.alias_info is not None and argument.alias_info.is_write)
            or (silently and argument.name in ("running_mean", "running_var"))
        )
    ]


def seconds_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: Device) -> float:
    """The seconds of an operation on a device; 0 for views, allocations and operations that return no tensor."""
    given = _tensors((args, kwargs))
    made = _tensors(result)
    if not made or word_of(func) in ALLOCATING or _is_view(func, given, made):
        return 0.0
    sizes = [_bytes(tensor) for tensor in given]
    written = sum(map(_bytes, made))
    if word_of(func) in _GATHERING:
        sizes[0] = min(sizes[0], written)
    return device.seconds(flops_of(func, args, kwargs, result), sum(sizes) + written, _dtype(given or made))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's numbers; an expanded tensor has fewer than its shape shows."""
    shown = tensor.numel() * tensor.itemsize
    return min(shown, tensor.untyped_storage().nbytes()) if tensor.layout is torch.strided else shown


def _is_view(func: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
    """Whether all results share storages with the arguments, and nothing is changed there."""
    if func.is_view:
        return True
    if func._schema.is_mutable or any(tensor.layout is not torch.strided for tensor in (*given, *made)):
        return False
    places = {tensor.untyped_storage()._cdata for tensor in given}
    return all(tensor.untyped_storage()._cdata in places for tensor in made)


def _dtype(tensors: list[torch.Tensor]) -> torch.dtype:
    """The dtype that an operation computes in: the first floating-point one."""
    return next((tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point), tensors[0].dtype)


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Floating-point operations (a multiplication and an addition are two); 0 for operations that are not counted."""
    count = _COUNTS.get(func.overloadpacket)
    if count is not None:
        return int(count(*args))
    count = flop_registry.get(func.overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


def _of_attention(*args: Any) -> int:
    return int(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))


def _of_attention_backward(*args: Any) -> int:
    return int(sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))


def _of_groups(a: torch.Tensor, b: torch.Tensor, *_: Any) -> int:
    """The floating-point operations of matrix products of groups of rows."""
    groups = len(a) if a.dim() == b.dim() == 3 else 1
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _of_recurrent_layer(x: torch.Tensor, ours: torch.Tensor, own: torch.Tensor, *_: Any) -> int:
    """The floating-point operations of a recurrent layer, whose weights apply to its input (ours) and state (own)."""
    return 2 * (x.numel() // x.shape[-1]) * (ours.numel() + own.numel())


_aten = torch.ops.aten
# Operations that torch's counter leaves out: kernels that are chosen on the CPU, and experts.
_COUNTS: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _of_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _of_attention_backward,
    _aten._grouped_mm: _of_groups,
    _aten.mkldnn_rnn_layer: _of_recurrent_layer,
    _aten.mkldnn_rnn_layer_backward: lambda *args: 2 * _of_recurrent_layer(*args),
}
