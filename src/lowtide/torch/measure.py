"""How many bytes of tensors a piece of code holds at its worst moment.

    with measure.peak() as memory:
        loss = train_step()
    print(memory.peak, memory.now)

On the CPU every storage made inside is followed until it dies, through a dispatch mode that sees each operation's
results, in the backward too. Not seen are scratch space that a kernel allocates and frees inside itself, sparse
tensors, compiled code and other threads. Where there is a GPU, its allocator's own statistics are added. What
existed before does not count, nor what dies of it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowtide.torch.lifetimes import Lifetimes
from lowtide.torch.memory_curve import Curve


class Memory:
    """Bytes of storages made while it was watching: `now` alive, `peak` at the worst moment."""

    def __init__(self, curve: Curve | None = None) -> None:
        self.now = 0
        self.peak = 0
        self._curve = curve
        self._lives = Lifetimes()
        self._turn = threading.RLock()  # storages die in any thread
        self._changing = False
        self._dead: list[int] = []
        self._on_gpus = 0
        self._gpus = [_Gpu(k) for k in range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []

    def see(self, tensor: torch.Tensor) -> None:
        """Count the tensor's storage from now until it dies; once, however often it is seen."""
        storage = _storage(tensor)
        if storage is None or tensor.device.type not in ("cpu", "meta"):
            return  # another device's allocator counts for itself
        key, size = storage._cdata, storage.nbytes()
        with self._turn:
            self._changing = True
            if key not in self._lives:
                self._lives.begin(key, 0)
                weakref.finalize(storage, self._died, key).atexit = False
            self.now += self._lives.resize(key, size)  # it may have grown
            self._settle()

    def _died(self, key: int) -> None:
        self._dead.append(key)
        with self._turn:
            # A collection of garbage may come in the middle of a change, in the same thread; that settles it then.
            if not self._changing:
                self._changing = True
                self._settle()

    def _settle(self) -> None:
        """Note the level, then bury those that died meanwhile; whoever calls has the turn."""
        self._note_level()
        while self._dead:
            size, born = self._lives.end(self._dead.pop())
            self.now -= size
            if born is not None and self._curve is not None:
                self._curve.leave_out(born, size)
            self._note_level()
        self._changing = False

    def _note_level(self) -> None:
        self.peak = max(self.peak, self.now)
        self._lives.level(self.now)
        if self._curve is not None:
            self._curve.see(self.now)

    def leave_out(self, tensor: torch.Tensor, *, from_now: bool = False) -> None:
        """Do not count the tensor's storage in `beyond`, neither now nor in the past, or only from now on."""
        storage = _storage(tensor)
        if storage is not None:
            with self._turn:
                self._changing = True
                self._lives.leave_out(storage._cdata, from_now=from_now)
                self._settle()

    def beyond(self, *, living: bool = False) -> int:
        """The most bytes at once without what was left out, and without what is alive now: results, when all is done.

        On a GPU nothing is left out.

        Args:
            living: count what is alive now.
        """
        with self._turn:
            return self._lives.most(living=living) + self._on_gpus

    def curve_beyond(self, *, living: bool = False) -> tuple[int, ...]:
        """The same over time, in shares; empty without a curve."""
        with self._turn:
            if self._curve is None:
                return ()
            most = self._lives.most(living=living)  # exact, where a share of time in which something was made is not
            return tuple(min(value, most) for value in self._curve.values(self._lives.left_out(living=living)))

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage is among those counted and alive."""
        storage = _storage(tensor)
        return storage is not None and storage._cdata in self._lives

    def alive(self) -> set[int]:
        """Which storages are counted and alive."""
        return set(self._lives)

    def restart_peak(self) -> None:
        """Forget the worst moment so far."""
        self.peak = self.now
        with self._turn:
            self._lives.restart(self.now)

    def _close(self) -> None:
        self.now += sum(gpu.now() for gpu in self._gpus)
        self._on_gpus = sum(gpu.peak() for gpu in self._gpus)
        self.peak += self._on_gpus


class _Gpu:
    """The CUDA allocator's statistics since it was made. Not run in the project's own tests, which have no GPU."""

    def __init__(self, index: int) -> None:  # pragma: no cover
        self._index = index
        torch.cuda.reset_peak_memory_stats(index)
        self._before = torch.cuda.memory_allocated(index)

    def now(self) -> int:  # pragma: no cover
        return torch.cuda.memory_allocated(self._index) - self._before

    def peak(self) -> int:  # pragma: no cover
        return torch.cuda.max_memory_allocated(self._index) - self._before


class _Watching(TorchDispatchMode):
    def __init__(self, memory: Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._memory = memory

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {
            storage._cdata: storage.nbytes()
            for leaf in tree_leaves((args, kwargs or {}))
            if isinstance(leaf, torch.Tensor) and (storage := _storage(leaf)) is not None
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = _storage(leaf)
                # A view of what was given is not new, unless the operation made it larger.
                if storage is not None and given.get(storage._cdata) != storage.nbytes():
                    self._memory.see(leaf)
        return result


@contextmanager
def peak(curve: Curve | None = None) -> Iterator[Memory]:
    """Watch the code inside; the value it gives can be read at any time, and afterwards.

    Args:
        curve: is told of every change, to be drawn over time; on the CPU.
    """
    memory = Memory(curve)
    with _Watching(memory):
        yield memory
    memory._close()


@contextmanager
def watching(memory: Memory) -> Iterator[None]:
    """Let `memory` see what the code inside makes."""
    with _Watching(memory):
        yield


def storage_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the storages behind the tensors, each counted once."""
    storages = [_storage(tensor) for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages if storage is not None}.values())


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """What holds the tensor's values; None for layouts that have no single one (sparse), which are not counted."""
    return tensor.untyped_storage() if tensor.layout is torch.strided else None
