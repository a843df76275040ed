"""How long an operation would take on a device: by its floating-point operations and the bytes that it moves.

Floating-point operations are those that torch's own counter knows, matrix products, convolutions, attention and their
backwards, and a few more. Everything else is taken to be as fast as its bytes can be moved. Not seen is what kernels do
inside: scratch space, and rereading what does not fit into a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from lowtide.torch.devices import Device
from lowtide.torch.operations import word_of

_aten = torch.ops.aten
# Operations that read of their first tensor no more than they give.
_GATHERING = frozenset({"embedding", "index_select", "gather", "index", "take"})
_ALLOCATING = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})


def seconds_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: Device) -> float:
    """Seconds of an operation on a device. Views, allocations and what gives no tensor take none."""
    given = _tensors((args, kwargs))
    made = _tensors(result)
    if not made or word_of(func) in _ALLOCATING or _is_view(func, given, made):
        return 0.0
    sizes = [_bytes(tensor) for tensor in given]
    written = sum(map(_bytes, made))
    if word_of(func) in _GATHERING:
        sizes[0] = min(sizes[0], written)
    return device.seconds(flops_of(func, args, kwargs, result), sum(sizes) + written, _dtype(given or made))


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Floating-point operations, a multiplication and an addition being two; 0 for what is not counted."""
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
    """Matrix products of groups of rows."""
    groups = len(a) if a.dim() == b.dim() == 3 else 1
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _of_recurrent_layer(x: torch.Tensor, ours: torch.Tensor, own: torch.Tensor, *_: Any) -> int:
    """A layer whose weights are those for what it is given, and those for its own state."""
    return 2 * (x.numel() // x.shape[-1]) * (ours.numel() + own.numel())


# What torch does not count: kernels that are taken on the CPU, and experts.
_COUNTS: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _of_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _of_attention_backward,
    _aten._grouped_mm: _of_groups,
    _aten.mkldnn_rnn_layer: _of_recurrent_layer,
    _aten.mkldnn_rnn_layer_backward: lambda *args: 2 * _of_recurrent_layer(*args),
}


class PaperClock(TorchDispatchMode):
    """Adds up what the operations inside would take on a device, the backward's too: `seconds`.

    with PaperClock(devices.H100) as clock:
        loss = model(x).sum()
    print(clock.seconds)
    """

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.device = device
        self.seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.seconds += seconds_of(func, args, kwargs, result, self.device)
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _bytes(tensor: torch.Tensor) -> int:
    """Of its numbers; one that is expanded has fewer than it shows."""
    shown = tensor.numel() * tensor.itemsize
    return min(shown, tensor.untyped_storage().nbytes()) if tensor.layout is torch.strided else shown


def _is_view(func: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
    """Whether all that it gives lies in what it was given, and it has changed nothing there."""
    if func.is_view:
        return True
    if func._schema.is_mutable or any(tensor.layout is not torch.strided for tensor in (*given, *made)):
        return False
    places = {tensor.untyped_storage()._cdata for tensor in given}
    return all(tensor.untyped_storage()._cdata in places for tensor in made)


def _dtype(tensors: list[torch.Tensor]) -> torch.dtype:
    """What it computes in: the first of them that is no whole number."""
    return next((tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point), tensors[0].dtype)
