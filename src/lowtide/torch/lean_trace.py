"""One run of a function, watched: every operation by the storages it reads and makes, and what autograd saves.

Values are storages. A view is not a value: it is a place in one, and is made again with `as_strided`. An operation is
never run again where that could give something else: it draws random numbers, changes something in place, reads what is
changed later, or is not one of torch's own.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lowtide.torch.devices import Device
from lowtide.torch.op_seconds import seconds_of
from lowtide.torch.operations import word_of, written_by
from lowtide.torch.storages import Log

# Operations that do nothing but allocate: what is in it is not repeated.
_UNFILLED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})
# On a GPU these add in any order.
_UNORDERED = frozenset({"index_add", "scatter_add", "scatter_reduce", "index_put", "bincount", "histc", "cumsum"})
# Operations that take much longer than reading their arguments.
_HEAVY = (
    "mm",
    "grouped_mm",
    "addmm",
    "bmm",
    "baddbmm",
    "addbmm",
    "addmv",
    "mv",
    "dot",
    "convolution",
    "linear",
    "attention",
    "rnn",
    "lstm",
    "gru",
    "linalg",
    "fft",
    "sort",
    "topk",
    "cdist",
    "embedding_bag",
    "einsum",
    "matmul",
)
# What a reshape without a copy leaves: one of these while tracing, another afterwards.
_RESHAPED = frozenset({"ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0"})
# What gives numbers to Python and others without being an operation.
_READING = frozenset({"tolist", "numpy", "__array__", "data_ptr", "__dlpack__"})
# Operations whose numbers, if they have any, are shapes and dimensions, or matter for nearly every element: should one
# change unseen, a few elements tell. Others, such as a bound or a threshold, may matter for one element in a million.
_DENSE = frozenset(
    {
        "add",
        "sub",
        "rsub",
        "mul",
        "div",
        "pow",
        "native_layer_norm",
        "native_group_norm",
        "native_batch_norm",
        "_native_batch_norm_legit_no_training",
        "_softmax",
        "_log_softmax",
        "mean",
        "sum",
        "prod",
        "var",
        "var_mean",
        "std",
        "amax",
        "amin",
        "max",
        "min",
        "logsumexp",
        "cumsum",
        "cumprod",
        "cat",
        "stack",
        "gelu",
        "silu",
        "elu",
        "leaky_relu",
        "glu",
        "clone",
        "_to_copy",
        "index_select",
        "gather",
        "embedding",
        "repeat",
        "flip",
        "addcmul",
        "addcdiv",
        "lerp",
        "linalg_vector_norm",
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addmv",
        "convolution",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "avg_pool2d",
        "max_pool2d_with_indices",
        "_adaptive_avg_pool2d",
        "upsample_nearest2d",
        "upsample_bilinear2d",
        "arange",
        "full",
        "zeros",
        "ones",
        "scalar_tensor",
        "zeros_like",
        "ones_like",
        "full_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "_fused_rms_norm",
        "rms_norm",
    }
)
# Two values stay two values.
_SCALING = frozenset({"mul", "div", "mul_", "div_"})
_SHORT = 0.02  # seconds; what takes less is timed again, because the first time often takes longer
_TIMES = 2


class View(NamedTuple):
    """A tensor as a place in a value."""

    value: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, base: torch.Tensor, shift: int = 0) -> torch.Tensor:
        """The view of a tensor that has the value's storage, perhaps further on in it than when it was traced."""
        offset = self.offset + shift
        if base.size() == self.size and base.stride() == self.stride and base.storage_offset() == offset:
            return base
        return base.as_strided(self.size, self.stride, offset)


@dataclass(slots=True)
class Value:
    """A storage.

    Attributes:
        bytes, dtype: its size, and what it is read as.
        maker: the operation that made it; None for what was there before.
        changed: when it was last changed in place, or -1. Times are counts of operations of all kinds.
        odd: whether some view of it is not one that `as_strided` can make: of another dtype, conjugated.
        two: whether it has two different numbers only, one of them 0, because of how it was made.
    """

    bytes: int
    dtype: torch.dtype
    device: torch.device
    maker: int | None
    changed: int = -1
    odd: bool = False
    two: bool = False


@dataclass(slots=True)
class Op:
    """An operation. In `args` and `kwargs`, tensors are views.

    Attributes:
        inputs, outputs: the values it reads, and the views that it gives, by position; None for one that is no tensor.
        seconds: of running it.
        never: why it cannot be run again; empty if it can.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[View | None, ...]
    seconds: float
    never: str
    time: int

    @property
    def name(self) -> str:
        """As torch calls it: "aten.mul.Tensor"."""
        return str(self.func)

    def views(self) -> list[View]:
        """What it reads."""
        return [part for part in tree_leaves((self.args, self.kwargs), is_leaf=_is_view) if _is_view(part)]

    @property
    def has_numbers(self) -> bool:
        """Whether one of its arguments is a number."""
        return _has_numbers(tree_leaves((self.args, self.kwargs), is_leaf=_is_view))

    @property
    def is_heavy(self) -> bool:
        """Whether it is a matrix product, a convolution, attention or the like."""
        word = word_of(self.func).strip("_")
        return any(word == heavy or (len(heavy) > 3 and heavy in word) for heavy in _HEAVY)


@dataclass(slots=True)
class Pack:
    """A tensor that autograd saved, and when; `view` is None for layouts that have no single storage."""

    view: View | None
    like: tuple[torch.Size, torch.dtype]
    node: type | None
    time: int


@dataclass(slots=True)
class Trace:
    """What a run did.

    With a `device` the run is one on paper: operations take as long as they would there, and none runs twice.
    """

    device: Device | None = None
    values: dict[int, Value] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    packs: list[Pack] = field(default_factory=list)
    log: Log = field(default_factory=Log)
    reads_numbers: bool = False  # whether a value has become a number of Python's
    time: int = 0

    def number(self, tensor: torch.Tensor) -> int:
        """The value that the tensor is a view of; it is there from now on."""
        number = self.log.number(tensor)
        if not number:
            self.log.see(tensor)
            number = self.log.number(tensor)
            self.values[number] = Value(
                tensor.untyped_storage().nbytes(), tensor.dtype, tensor.device, None, odd=_is_odd(tensor)
            )
        return number

    def view(self, tensor: torch.Tensor) -> View:
        """The tensor as a view."""
        number = self.number(tensor)
        value = self.values[number]
        value.odd |= tensor.dtype is not value.dtype or _is_odd(tensor)
        return View(number, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def pack(self, tensor: torch.Tensor) -> None:
        """Autograd saves a tensor."""
        view = self.view(tensor) if tensor.layout is torch.strided else None
        if view is not None and self.reads_numbers:
            self.values[view.value].odd = True  # its place may depend on one
        node = None if tensor.grad_fn is None or tensor.grad_fn.name() in _RESHAPED else type(tensor.grad_fn)
        self.packs.append(Pack(view, (tensor.shape, tensor.dtype), node, self.time))

    def given(self, tensors: Iterable[Any]) -> tuple[dict[int, tuple[int, View]], dict[int, list[int]]]:
        """For each value that one of the tensors has: which tensor, and what view that is; for those, others like it.

        Not for a value that two of them have different parts of.
        """
        found: dict[int, tuple[int, View]] = {}
        ties: dict[int, list[int]] = {}
        parted: set[int] = {0}
        for place, tensor in enumerate(tensors):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                number = self.log.number(tensor)
                if number:
                    row = found.setdefault(number, (place, self.view(tensor)))
                    if row[1] != self.view(tensor):
                        parted.add(number)
                    elif row[0] != place:
                        ties.setdefault(row[0], []).append(place)
        return {number: row for number, row in found.items() if number not in parted}, ties


def _has_numbers(leaves: list[Any]) -> bool:
    return any(type(leaf) is int or type(leaf) is float for leaf in leaves)


def _is_view(thing: Any) -> bool:
    return type(thing) is View


def _is_odd(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


@contextmanager
def tracing(trace: Trace) -> Iterator[None]:
    """Watch the operations inside."""
    before = _other_randomness()
    with _Reading(trace), _Tracing(trace):
        yield
    if _other_randomness() != before:  # other numbers were drawn than torch's, and will be others in the next call
        for op in trace.ops:
            if op.has_numbers:
                op.never = op.never or "may depend on a random number of Python's or numpy's"


def _other_randomness() -> tuple[Any, ...]:
    return random.getstate(), str(np.random.get_state(legacy=False))  # noqa: NPY002  (what functions use)


class _Reading(TorchFunctionMode):
    """Notes that values are read by something else than operations."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        self._trace.reads_numbers |= getattr(func, "__name__", "") in _READING
        return func(*args, **(kwargs or {}))


class _Tracing(TorchDispatchMode):
    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._trace = trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        trace = self._trace
        trace.time += 1
        arguments = tree_leaves((args, kwargs))
        leaves = [leaf for leaf in arguments if isinstance(leaf, torch.Tensor)]
        if any(leaf.layout is not torch.strided for leaf in leaves):
            return func(*args, **kwargs)  # what it makes comes from nowhere, as far as the trace goes
        viewed_args, viewed_kwargs = tree_map(
            lambda leaf: trace.view(leaf) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
        )
        inputs = tuple(dict.fromkeys(trace.number(leaf) for leaf in leaves))
        began = _now(leaves)
        result = func(*args, **kwargs)
        seconds = _now(leaves) - began
        changes = self._note_changes(func, args, kwargs)
        outputs, made = self._outputs(result, _has_two(func, args, trace))
        if torch.Tag.data_dependent_output in func.tags:
            trace.reads_numbers = True
        if not made:
            return result  # a view, a change in place, or a number
        never = "changes something in place" if changes else self._why_never(func, leaves, arguments)
        if trace.device is not None:
            seconds = seconds_of(func, args, kwargs, result, trace.device)
        else:
            for _ in range(_TIMES if not never and seconds < _SHORT else 0):
                began = _now(leaves)
                func(*args, **kwargs)
                seconds = min(seconds, _now(leaves) - began)
        trace.ops.append(Op(func, viewed_args, viewed_kwargs, inputs, outputs, seconds, never, trace.time))
        return result

    def _outputs(self, result: Any, two: bool) -> tuple[tuple[View | None, ...], bool]:
        """The views that an operation gives, and whether one of them is of a new value; `two`: see `Value`."""
        trace, views, made = self._trace, list[View | None](), False
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
                views.append(None)
                continue
            if not trace.log.number(tensor):
                made = True
                value = trace.values[trace.number(tensor)]
                value.maker = len(trace.ops)
                value.two = two
            views.append(trace.view(tensor))
        return tuple(views), made

    def _note_changes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Note which values an operation changes in place; gives whether it does."""
        trace, written = self._trace, written_by(func, args, kwargs)
        for tensor in tree_leaves(written):
            if isinstance(tensor, torch.Tensor):
                value = trace.values[trace.number(tensor)]
                value.changed = trace.time
                value.two = _has_two(func, args, trace)
        return func._schema.is_mutable or bool(written)

    def _why_never(self, func: Any, leaves: list[torch.Tensor], arguments: list[Any]) -> str:
        name = word_of(func)
        if func.namespace != "aten":
            return "is not torch's own"
        if torch.Tag.nondeterministic_seeded in func.tags:
            return "draws random numbers"
        if torch.Tag.dynamic_output_shape in func.tags:
            return "has a result of any shape"
        if any(word in name for word in ("rnn", "lstm", "gru")):
            return "keeps a reserve that it makes in training only"
        if name in _UNFILLED:
            return "fills nothing in"
        if any(leaf.is_cuda for leaf in leaves) and name in _UNORDERED:  # pragma: no cover  (needs a GPU)
            return "adds in any order"
        if any(_is_odd(leaf) for leaf in leaves):
            return "reads a view that is conjugated"
        if self._trace.reads_numbers:
            return "may depend on a number that was read from a tensor"
        if name not in _DENSE and _has_numbers(arguments):
            return "has a number that may matter for few elements"
        return ""


def _has_two(func: Any, args: tuple[Any, ...], trace: Trace) -> bool:
    """Whether the operation's result has two different numbers only, one of them 0."""
    word = word_of(func)
    if word in ("bernoulli", "bernoulli_"):
        return True
    if not args or not isinstance(args[0], torch.Tensor):
        return False
    first = trace.values[trace.number(args[0])]
    if word in ("_to_copy", "clone"):
        return first.two or first.dtype is torch.bool
    if word in _SCALING:
        by = args[1]
        return first.two and (not isinstance(by, torch.Tensor) or by.dim() == 0)
    return False


def _now(tensors: list[torch.Tensor]) -> float:
    for tensor in tensors:
        if tensor.is_cuda:  # pragma: no cover  (needs a GPU)
            torch.cuda.synchronize(tensor.device)
            break
    return perf_counter()
