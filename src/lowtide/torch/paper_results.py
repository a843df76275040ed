"""What some operations give on paper, where torch's own answer for tensors without values is wrong, or an error.

The reserve of an LSTM layer is as large as in oneDNN, which runs it on a CPU; torch says that there is none. What
libraries on cards reserve is about as much, or less.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_aten = torch.ops.aten
_PAGE = 4096
_LINE = 64  # bytes


def result_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operation gives, inside a fake mode."""
    make = _OWN.get(func)
    return func(*args, **kwargs) if make is None else make(func, *args, **kwargs)


def _grouped_product(
    func: Any, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor | None = None, *more: Any, **kwargs: Any
) -> Any:
    """Matrix products of groups of rows, as for experts; torch knows shapes for bfloat16 only."""
    if a.dtype is torch.bfloat16 or (a.dim() != b.dim() and a.shape[-1] != b.shape[-2]):
        return func(a, b, offsets, *more, **kwargs)
    offsets = kwargs.get("offs", offsets)
    groups = () if a.dim() != b.dim() else (len(a) if offsets is None or a.dim() > 2 else len(offsets),)
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]), dtype=kwargs.get("out_dtype"))


def _counts(func: Any, numbers: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> Any:
    """How often each number is there: those that are asked for, and no others."""
    if not minlength:
        return func(numbers, weights)
    dtype = torch.long if weights is None else weights.dtype if weights.dtype is torch.float else torch.double
    return numbers.new_empty(minlength, dtype=dtype)


def _recurrent_layer(func: Any, *args: Any, **kwargs: Any) -> Any:
    """A layer of an LSTM, with its reserve."""
    *results, reserve = func(*args, **kwargs)
    (steps, batch, inputs), hidden, train = args[0].shape, args[10], args[15]
    if train:
        reserve = reserve.new_empty(lstm_reserve(steps, batch, inputs, hidden, args[0].itemsize))
    return (*results, reserve)


def lstm_reserve(steps: int, batch: int, inputs: int, hidden: int, itemsize: int) -> int:
    """Bytes that a layer keeps for its backward, beside its results."""
    widest, twice = max(inputs, hidden), 2 * (steps + 1) * batch
    return sum(
        times * (-(-size // _PAGE) * _PAGE)
        for times, size in (
            (1, steps * batch * _row(4 * hidden, itemsize)),  # gates
            (1, steps * batch * _row(hidden, itemsize)),
            (2, twice * _row(widest, itemsize)),  # states of layers and of steps
            (1, twice * _row(widest, 4)),  # gradients of them
            (2, twice * hidden * 4),  # cells, and gradients of them
        )
    )


def _row(length: int, itemsize: int) -> int:
    """Bytes of a row of numbers, in whole lines; one more where rows would all begin at the same place of a cache."""
    row = -(-length * itemsize // _LINE) * _LINE
    return row if row // itemsize % 256 else row + _LINE


_OWN: dict[Any, Callable[..., Any]] = {
    _aten._grouped_mm.default: _grouped_product,
    _aten.bincount.default: _counts,
    _aten.mkldnn_rnn_layer.default: _recurrent_layer,
}
