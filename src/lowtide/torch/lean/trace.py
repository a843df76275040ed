"""The trace of one run of a function: every operation with the storages it reads and makes, and what autograd saves.

A `Tracer` records a run; a `Trace` is its record. Values are storages. A view is not a value but a place in one, and is
recreated with `as_strided`. An operation is not run again if that could return something else: because it draws random
numbers, changes something in place, reads what is changed later, or is not one of torch's own (`_why_never`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lowtide.torch.memory.accelerators import is_of_host, seconds_now
from lowtide.torch.memory.tracker import Log
from lowtide.torch.paper.devices import Device
from lowtide.torch.paper.operations import ALLOCATING, seconds_of, word_of, written_by

_SHORT_SECONDS = 0.02  # an operation that takes less is timed again, because its first run often takes longer
_TIMINGS_OF_A_SHORT_OPERATION = 2  # beside that of its first run; the least counts


class StorageView(NamedTuple):
    """A tensor as a place in a value: its size, strides and offset in the storage."""

    value: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class TracedValue:
    """A storage.

    Attributes:
        bytes: its size.
        dtype, device: those of the first tensor in which it was seen.
        maker: the operation that made it; None if it existed before the run.
        changed: when it was last changed in place, or -1. Times are counts of operations of all kinds.
        odd: whether it has a view that `as_strided` cannot make: of another dtype, or conjugated.
        two: whether it is known from its making to have only two different numbers, one of them 0.
    """

    bytes: int
    dtype: torch.dtype
    device: torch.device
    maker: int | None
    changed: int = -1
    odd: bool = False
    two: bool = False


@dataclass(frozen=True, slots=True)
class Op:
    """An operation of the run.

    Attributes:
        func: the operation, as torch dispatches it.
        args, kwargs: its arguments, with views in place of tensors.
        inputs: the values that it reads.
        outputs: the views that it returns, by position; None for a result that is not a tensor.
        seconds: the time of running it.
        never: why it cannot be run again; empty if it can.
        time: the number of operations up to it, of all kinds.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[StorageView | None, ...]
    seconds: float
    never: str
    time: int

    @property
    def name(self) -> str:
        """Torch's name of the operation: "aten.mul.Tensor"."""
        return str(self.func)

    def views(self) -> list[StorageView]:
        """The views among its arguments."""
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


@dataclass(frozen=True, slots=True)
class Pack:
    """A tensor that autograd saved, and when.

    Attributes:
        view: the tensor as a view; None for layouts without a single storage.
        shape, dtype: those of the tensor.
        node: the type of the graph node that made it; None for a leaf, and for a reshape.
        time: the number of operations before it.
    """

    view: StorageView | None
    shape: torch.Size
    dtype: torch.dtype
    node: type | None
    time: int


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value is found in the backward: in a pack, or among the tensors given to the call.

    Attributes:
        pack: the index of the pack; -1 if it is a given tensor.
        given: the index of the given tensor; -1 if it is a pack.
        base: the view that is found there; None for a value that was made in the call, whose whole storage is kept.
    """

    pack: int
    given: int
    base: StorageView | None


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """The record of a run, and which of its values can be found in the backward.

    Attributes:
        device: the device that seconds are for, if the run was on paper.
        values: the values by number.
        ops, packs: operations and saved tensors, in order.
        given: for each value that the call's arguments or modules hold: the index of that tensor, and its view.
        ties: for such an index, the indices of other given tensors that are the same view.
        arguments: the number of given tensors that are arguments; the others exist with or without a tape.
        first: for each value, its first pack since it was last changed in place.
    """

    device: Device | None
    values: dict[int, TracedValue]
    ops: list[Op]
    packs: list[Pack]
    given: dict[int, tuple[int, StorageView]]
    ties: dict[int, list[int]]
    arguments: int
    first: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for index, pack in enumerate(self.packs):
            if pack.view is not None and not self.is_stale(index):
                self.first.setdefault(pack.view.value, index)

    def is_stale(self, index: int) -> bool:
        """Whether the value of a pack was changed in place after it."""
        pack = self.packs[index]
        return pack.view is not None and pack.time < self.values[pack.view.value].changed

    def makes(self, index: int, view: StorageView | None) -> bool:
        """Whether a view that an operation returned is of a value that it made, not of an existing one."""
        return view is not None and self.values[view.value].maker == index

    def is_at_hand(self, number: int, op: Op) -> bool:
        """Whether something holds what the operation reads of a value that cannot be recomputed.

        A value that existed before the call is found as the view that was given or packed; other parts of its storage
        may have changed by then. Of a value that was made in the call, the whole storage is kept.
        """
        if number in self.given and self.values[number].changed < 0:
            return True
        if number not in self.first:
            return False
        view = self.packs[self.first[number]].view
        whole = self.values[number].maker is not None
        return whole or all(other == view for other in op.views() if other.value == number)

    def source(self, number: int) -> Source:
        """Where a kept value is found in the backward."""
        if number in self.given and self.values[number].changed < 0:
            return Source(-1, *self.given[number])
        first = self.first[number]
        return Source(first, -1, self.packs[first].view if self.values[number].maker is None else None)


class Tracer:
    """Records a run, through `tracing` and through its pack hook.

    With a `device` the run is on paper: operations take as long as they would on that device, and none is timed.
    """

    def __init__(self, device: Device | None = None) -> None:
        self.device = device
        self.values: dict[int, TracedValue] = {}
        self.ops: list[Op] = []
        self.reads_numbers = False  # whether a tensor's value has been read as a Python number
        self.time = 0  # operations so far, of all kinds
        self._packs: list[Pack] = []
        self._log = Log()  # distinguishes storages, also a new one from a freed one that had the same address

    def number(self, tensor: torch.Tensor) -> int:
        """The number of the value that the tensor is a view of, which is recorded if it is new."""
        number = self._log.number(tensor)
        if not number:
            self._log.see(tensor)
            number = self._log.number(tensor)
            self.values[number] = TracedValue(
                tensor.untyped_storage().nbytes(), tensor.dtype, tensor.device, None, odd=_is_odd(tensor)
            )
        return number

    def is_new(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage was not seen before."""
        return not self._log.number(tensor)

    def view(self, tensor: torch.Tensor) -> StorageView:
        """The tensor as a view."""
        number = self.number(tensor)
        value = self.values[number]
        value.odd |= tensor.dtype is not value.dtype or _is_odd(tensor)
        return StorageView(number, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def packing(self, keep: Callable[[torch.Tensor, int], Any]) -> Callable[[torch.Tensor], Any]:
        """The pack hook of a traced run: it records what autograd saves.

        What autograd keeps is the result of `keep`, called with the tensor, detached from its graph, and its version.
        """

        def pack(tensor: torch.Tensor) -> Any:
            self._note_pack(tensor)
            return keep(tensor.detach(), tensor._version)

        return pack

    def _note_pack(self, tensor: torch.Tensor) -> None:
        view = self.view(tensor) if tensor.layout is torch.strided else None
        if view is not None and self.reads_numbers:
            self.values[view.value].odd = True  # its size or offset may depend on such a number
        node = None if tensor.grad_fn is None or tensor.grad_fn.name() in _RESHAPE_NODES else type(tensor.grad_fn)
        self._packs.append(Pack(view, tensor.shape, tensor.dtype, node, self.time))

    def trace(self, tensors: Iterable[Any], arguments: int) -> Trace:
        """The trace of a call that was given these tensors: `arguments` tensors of arguments, then those of modules."""
        given, ties = self._given(tensors)
        return Trace(self.device, self.values, self.ops, self._packs, given, ties, arguments)

    def _given(self, tensors: Iterable[Any]) -> tuple[dict[int, tuple[int, StorageView]], dict[int, list[int]]]:
        """For each value in one of the tensors, that tensor's index and view; and by index, others with the same view.

        A value of which two tensors are different views is left out.
        """
        found: dict[int, tuple[int, StorageView]] = {}
        ties: dict[int, list[int]] = {}
        parted: set[int] = set()
        for place, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or self.is_new(tensor):
                continue
            view = self.view(tensor)
            first, other = found.setdefault(view.value, (place, view))
            if other != view:
                parted.add(view.value)
            elif first != place:
                ties.setdefault(first, []).append(place)
        return {number: row for number, row in found.items() if number not in parted}, ties


@contextmanager
def tracing(tracer: Tracer) -> Iterator[None]:
    """Record the operations inside with a tracer."""
    before = _other_randomness()
    with _WatchingReads(tracer), _WatchingOperations(tracer):
        yield
    # The next call will draw other numbers, and any number that an operation got may depend on those drawn here.
    if _other_randomness() != before:
        never = "may depend on a random number of Python's or numpy's"
        tracer.ops = [replace(op, never=op.never or never) if op.has_numbers else op for op in tracer.ops]


def _other_randomness() -> tuple[Any, ...]:
    return random.getstate(), str(np.random.get_state(legacy=False))  # noqa: NPY002  (what functions use)


# The graph nodes of a reshape without a copy: under a dispatch mode it is one of these, without a mode another.
_RESHAPE_NODES = frozenset({"ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0"})
# Methods that hand a tensor's values to Python or other libraries without being a dispatched operation.
_READING_METHODS = frozenset({"tolist", "numpy", "__array__", "data_ptr", "__dlpack__"})


class _WatchingReads(TorchFunctionMode):
    """Records that values are read by something other than operations."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        self._tracer.reads_numbers |= getattr(func, "__name__", "") in _READING_METHODS
        return func(*args, **(kwargs or {}))


class _WatchingOperations(TorchDispatchMode):
    """Records each operation: what it reads, makes and changes, and how long it takes."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._tracer = tracer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tracer = self._tracer
        tracer.time += 1
        arguments = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in arguments if isinstance(leaf, torch.Tensor)]
        if any(tensor.layout is not torch.strided for tensor in tensors):
            # Not recorded but for what it changes: its results count as values that existed before the run.
            result = func(*args, **kwargs)
            self._note_changes(func, args, kwargs)
            return result
        # Views are taken before it runs: afterwards an argument may have another shape or storage.
        viewed_args, viewed_kwargs = tree_map(
            lambda leaf: tracer.view(leaf) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
        )
        inputs = tuple(dict.fromkeys(tracer.number(tensor) for tensor in tensors))
        began = seconds_now()
        result = func(*args, **kwargs)
        seconds = seconds_now() - began
        changes = self._note_changes(func, args, kwargs)
        outputs, made = self._outputs(result, _has_two(func, args, tracer))
        if torch.Tag.data_dependent_output in func.tags:
            tracer.reads_numbers = True
        if not made:
            return result  # a view, a change in place, or a number
        never = "changes something in place" if changes else _why_never(func, tensors, arguments, tracer.reads_numbers)
        if tracer.device is not None:
            seconds = seconds_of(func, args, kwargs, result, tracer.device)
        elif not never and seconds < _SHORT_SECONDS:
            seconds = min(seconds, _seconds_again(func, args, kwargs))
        tracer.ops.append(Op(func, viewed_args, viewed_kwargs, inputs, outputs, seconds, never, tracer.time))
        return result

    def _note_changes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Record which values an operation changes in place; whether it changes any."""
        tracer, written = self._tracer, written_by(func, args, kwargs)
        for tensor in tree_leaves(written):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                value = tracer.values[tracer.number(tensor)]
                value.changed = tracer.time
                value.two = _has_two(func, args, tracer)
        return func._schema.is_mutable or bool(written)

    def _outputs(self, result: Any, two: bool) -> tuple[tuple[StorageView | None, ...], bool]:
        """The views that an operation returns, and whether one of them is of a new value, which gets this `two`."""
        tracer, views, made = self._tracer, list[StorageView | None](), False
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
                views.append(None)
                continue
            if tracer.is_new(tensor):
                made = True
                value = tracer.values[tracer.number(tensor)]
                value.maker = len(tracer.ops)
                value.two = two
            views.append(tracer.view(tensor))
        return tuple(views), made


def _seconds_again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The least seconds of running an operation again, which is allowed, because it changes and draws nothing."""
    times = []
    for _ in range(_TIMINGS_OF_A_SHORT_OPERATION):
        began = seconds_now()
        func(*args, **kwargs)
        times.append(seconds_now() - began)
    return min(times)


# Operations after which two different numbers are still two.
_SCALING = frozenset({"mul", "div", "mul_", "div_"})


def _has_two(func: Any, args: tuple[Any, ...], tracer: Tracer) -> bool:
    """Whether the operation's result is known to have only two different numbers, one of them 0."""
    word = word_of(func)
    if word in ("bernoulli", "bernoulli_"):
        return True
    if not args or not isinstance(args[0], torch.Tensor) or args[0].layout is not torch.strided:
        return False
    first = tracer.values[tracer.number(args[0])]
    if word in ("_to_copy", "clone"):
        return first.two or first.dtype is torch.bool
    if word in _SCALING:
        by = args[1]
        return first.two and (not isinstance(by, torch.Tensor) or by.dim() == 0)
    return False


# On an accelerator these may add in an order that differs from run to run.
_UNORDERED = frozenset({"index_add", "scatter_add", "scatter_reduce", "index_put", "bincount", "histc", "cumsum"})
# Operations that take much longer than reading their arguments: names, or longer parts of names.
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
# Operations whose numbers, if they have any, are shapes and dimensions, or affect nearly every element: if one changes
# unnoticed, a sample of elements shows it. In others, such as a bound or a threshold, a number may affect one element
# in a million.
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


def _why_never(func: Any, tensors: list[torch.Tensor], arguments: list[Any], reads_numbers: bool) -> str:
    """Why an operation that changes nothing cannot be run again; empty if it can.

    It can if the same kernel, run later on the same values, writes the same bits. That holds for torch's own operations
    except for those below. Moreover its numbers have to be the same in later calls, which only guards and samples can
    verify: guards do not see a number that was read from a tensor, and no sample shows one that affects few elements.
    """
    return _why_never_at_all(func) or _why_not_with(func, tensors, arguments, reads_numbers)


def _why_never_at_all(func: Any) -> str:
    name = word_of(func)
    if func.namespace != "aten":
        return "is not torch's own"
    if torch.Tag.nondeterministic_seeded in func.tags:
        return "draws random numbers"
    if torch.Tag.dynamic_output_shape in func.tags:
        return "has a result of any shape"
    if any(word in name for word in ("rnn", "lstm", "gru")):
        return "keeps a reserve that it makes in training only"
    if name in ALLOCATING:
        return "fills nothing in"
    return ""


def _why_not_with(func: Any, tensors: list[torch.Tensor], arguments: list[Any], reads_numbers: bool) -> str:
    name = word_of(func)
    if name in _UNORDERED and not all(is_of_host(tensor.device) for tensor in tensors):
        return "adds in any order"
    if any(_is_odd(tensor) for tensor in tensors):
        return "reads a view that is conjugated"
    if reads_numbers:
        return "may depend on a number that was read from a tensor"
    if name not in _DENSE and _has_numbers(arguments):
        return "has a number that may matter for few elements"
    return ""


def _has_numbers(leaves: list[Any]) -> bool:
    return any(type(leaf) is int or type(leaf) is float for leaf in leaves)


def _is_view(thing: Any) -> bool:
    return type(thing) is StorageView


def _is_odd(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()
