"""Samples: what is noted of a tensor in a first run, to prove that a rerun has the same numbers.

A small tensor is read whole, of a large one at least 1,024 numbers that are spread over it. That finds what changes
many numbers; what changes one row of thousands it may miss. On the CPU a sample is a checksum of raw memory, read by
its address: a numpy view of a tensor would make its storage unresizable, on which FSDP relies. On a device it is a
checksum that stays there, a tensor of 8 bytes, since to read it would wait; such samples are compared together, once,
at the end of the backward, and before an optimizer steps inside it.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.torch.state.bits import words

Sample = int | torch.Tensor

_ORDINARY = frozenset({torch.Tensor, nn.Parameter, nn.Buffer})
_STRIDED = torch.strided
PLAIN_DISPATCH = torch._C._disabled_torch_dispatch_impl  # of classes of tensors that have their numbers in memory
_WORKSPACE = torch.uint8  # what kernels save for themselves, parts of which they never fill
WHOLE = 4096  # bytes up to which memory is read whole
_NUMBERS = 1024  # read of anything larger, at least
_MOST_NUMBERS = 8 * _NUMBERS  # real and imaginary parts of numbers that are spread as unevenly as possible
checksum = zlib.crc32


class _Windows(dict[int, Callable[[int], Any]]):
    """By their number, what makes a buffer of the bytes at an address, which are not copied.

    Each number has a class of ctypes behind it. These are kept: to make one takes long, and leaves a cycle behind.
    """

    def __missing__(self, size: int) -> Callable[[int], Any]:
        window = self[size] = (ctypes.c_char * size).from_address
        return window


memory_of = _Windows()  # asked for at most `WHOLE` bytes
# Like `ctypes.string_at`, without its detour by Python.
read = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
# Memory at an address. An array type of ctypes would do, too, but makes a class for each size, which is a cycle.
_memory_at: Any = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.restype, _memory_at.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_READ_ONLY = 0x100  # PyBUF_READ


def sample_of(tensor: torch.Tensor) -> Sample:
    """A sample of a tensor's numbers; 0 for one that has no memory, such as a fake one, or zeros of forward mode.

    Of a contiguous tensor on the CPU of at most `WHOLE` bytes it is the `checksum` of its memory.
    """
    if type(tensor) not in _ORDINARY or tensor.layout is not _STRIDED:
        plain = _plain_part(tensor)
        return 0 if plain is None else sample_of(plain)
    if tensor.is_meta or tensor.dtype is _WORKSPACE or tensor._is_zerotensor():
        return 0
    if not tensor.is_cpu:
        return _checksum_there(tensor.detach())
    size = tensor.nbytes
    if size <= WHOLE and tensor.is_contiguous():  # the usual case: this takes less than a microsecond
        return checksum(memory_of[size](tensor.data_ptr()))
    return _sample_of_memory(tensor, size)


def _sample_of_memory(tensor: torch.Tensor, size: int) -> int:
    """The sample of a tensor on the CPU that is large, or not contiguous."""
    if not tensor.is_contiguous() and not _is_dense(tensor.shape, tensor.stride()):
        gathered = words(_spread(tensor.detach())).clone(memory_format=torch.contiguous_format)
        return checksum(read(gathered.data_ptr(), gathered.nbytes))
    if size <= WHOLE:
        return checksum(memory_of[size](tensor.data_ptr()))
    count = size // 4
    memory = np.frombuffer(_memory_at(tensor.data_ptr(), 4 * count, _READ_ONLY), dtype=np.uint32)
    # An odd stride, so that it is no multiple of the length of a row.
    return checksum(memory[:: (count // _NUMBERS) | 1].tobytes())


def may_be_unfilled(tensor: torch.Tensor) -> bool:
    """Whether a tensor that is saved may be scratch space which its operation has yet to fill, like rrelu's noise."""
    is_constant = type(tensor) is torch.Tensor and not tensor.requires_grad
    return is_constant and tensor._version == 0 and tensor.is_floating_point()


def is_gone(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory was freed since it was saved, as FSDP does it with gathered parameters."""
    return tensor.layout is _STRIDED and tensor.untyped_storage().nbytes() < tensor.nbytes


def whole_sample_of(tensor: torch.Tensor) -> Sample:
    """A checksum of all numbers of a tensor, which takes as long as to copy it."""
    if type(tensor) not in _ORDINARY or tensor.layout is not torch.strided:
        plain = _plain_part(tensor)
        return 0 if plain is None else whole_sample_of(plain)
    if tensor.is_meta or tensor.dtype is _WORKSPACE or tensor._is_zerotensor():
        return 0
    here = words(tensor.detach().cpu()).contiguous()
    memory = _memory_at(here.data_ptr(), here.nbytes, _READ_ONLY)
    return zlib.crc32(memory) << 32 | zlib.adler32(memory)


def _plain_part(tensor: torch.Tensor) -> torch.Tensor | None:
    """An ordinary tensor with the numbers of one that is not: a shard, values of a sparse one, the user's own class."""
    local = getattr(tensor, "_local_tensor", None)
    if isinstance(local, torch.Tensor):
        return local  # pragma: no cover  (FSDP: run by tests in processes of their own)
    if type(tensor).__torch_dispatch__ is PLAIN_DISPATCH and type(tensor) not in _ORDINARY:
        with torch._C.DisableTorchFunctionSubclass():  # or it would be of its class again
            return tensor.as_subclass(torch.Tensor)
    if type(tensor) in _ORDINARY and tensor.layout in _SPARSE:
        return _SPARSE[tensor.layout](tensor.detach())
    return None


_SPARSE: dict[torch.layout, Callable[[torch.Tensor], torch.Tensor]] = {
    torch.sparse_coo: torch.Tensor._values,
    **dict.fromkeys((torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc), torch.Tensor.values),
}


@functools.lru_cache(maxsize=4096)
def _is_dense(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Whether such a tensor has its memory to itself, without gaps: a transposed one has."""
    span = 1
    for length, stride in zip(shape, strides, strict=True):
        span += (length - 1) * stride
    return span == shape.numel()


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """A view of at most `_MOST_NUMBERS` numbers that are spread over a tensor."""
    for dim in sorted(range(tensor.dim()), key=tensor.stride, reverse=True):
        if tensor.stride(dim) == 0:
            tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
    count = tensor.numel()
    for dim in range(tensor.dim()):
        if count > 2 * _NUMBERS:
            step = min(tensor.shape[dim], -(-count // (2 * _NUMBERS)))
            tensor = tensor[(slice(None),) * dim + (slice(None, None, step),)]
            count = tensor.numel()
    return tensor


def _checksum_there(tensor: torch.Tensor) -> torch.Tensor:
    """A checksum of numbers that are spread over a tensor, as a tensor of 8 bytes where that tensor is.

    Each word has a factor of its own, so numbers that change places change the sum. Whole numbers are added, so the
    order in which that is done does not matter.
    """
    numbers = words(_spread(tensor))
    factors = _factors(numbers.device)[: numbers.numel()]
    return torch.mul(numbers, factors.view(numbers.shape)).sum(dtype=torch.int64)


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False), _disable_current_modes():
        odd = torch.arange(_MOST_NUMBERS) * 2_654_435_761 | 1  # multiples of 2**32 over the golden ratio
        return odd.to(torch.int32).to(device)


# --- samples on a device: compared together, when the backward ends


class _Comparisons:
    """Those that wait for the end of one backward. It owns them: a backward that fails takes them along."""

    __slots__ = ("__weakref__", "_pairs")

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor, Callable[[], Exception | None]]] = []

    def add(self, first: torch.Tensor, again: torch.Tensor, error: Callable[[], Exception | None]) -> None:
        self._pairs.append((first, again, error))

    def __call__(self) -> None:
        """Read all of them, in one go."""
        pairs, self._pairs = self._pairs, []
        if not pairs:
            return
        device = pairs[0][0].device
        firsts = torch.stack([first.to(device) for first, _, _ in pairs])
        agains = torch.stack([again.to(device) for _, again, _ in pairs])
        for is_other, (_, _, error) in zip(torch.ne(firsts, agains).tolist(), pairs, strict=True):
            if is_other and (made := error()) is not None:
                raise made


# By the number of the backward, since it may run in several threads, one for each device.
_waiting: weakref.WeakValueDictionary[int, _Comparisons] = weakref.WeakValueDictionary()
_at_the_end: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
_NO_BACKWARD = -1


class _Outermost(threading.local):
    waiting: _Comparisons | None = None


_outermost = _Outermost()


@contextmanager
def one_backward(gradients: Iterable[torch.Tensor | None]) -> Iterator[None]:
    """Inside, backwards are parts of the one that is running: what they compare is read at the end of that one.

    Only if it has gradients on a device: on the CPU everything is compared at once.
    """
    before = _outermost.waiting
    there = any(gradient is not None and not gradient.is_cpu for gradient in gradients)
    if before is None and there and is_in_backward():
        _outermost.waiting = _of_this_backward()  # pragma: no cover  (in a thread of the device's, which is not traced)
    try:
        yield
    finally:
        _outermost.waiting = before


def _of_this_backward() -> _Comparisons:
    backward = torch._C._current_graph_task_id()
    waiting = _waiting.get(backward)
    if waiting is None:
        _waiting[backward] = waiting = _Comparisons()
        _compare_before_optimizers()
        _at_the_end(waiting)
    return waiting


def is_in_backward() -> bool:
    """Whether this thread is running a backward."""
    return torch._C._current_graph_task_id() != _NO_BACKWARD


def compare_later(first: torch.Tensor, again: torch.Tensor, error: Callable[[], Exception | None]) -> None:
    """Compare two samples on a device when the backward ends, or now if none is running; `error` makes the error."""
    waiting = _outermost.waiting
    if waiting is None:
        waiting = _of_this_backward() if is_in_backward() else _Comparisons()
    waiting.add(first, again, error)
    if not is_in_backward():
        waiting()


def compare_now(rows: Iterable[tuple[torch.Tensor, torch.Tensor, Callable[[], Exception | None]]]) -> None:
    """Compare such samples, and wait for them."""
    comparisons = _Comparisons()
    for row in rows:
        comparisons.add(*row)
    comparisons()


def compare_pending() -> None:
    """Read all comparisons that wait for the end of the backward that is running, if one is."""
    waiting = _outermost.waiting or _waiting.get(torch._C._current_graph_task_id())
    if waiting is not None:
        waiting()


@functools.cache
def _compare_before_optimizers() -> None:
    """From now on, an optimizer that steps inside a backward does so after what was computed so far is compared."""
    register_optimizer_step_pre_hook(lambda *_: compare_pending())
