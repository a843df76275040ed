"""Which storages are alive, since when, and how many bytes that makes; `lowtide.torch.measure` is its public face.

On the CPU every storage made inside is followed until it dies, through a dispatch mode that sees each operation's
results, in the backward too. Not seen are scratch space that a kernel allocates and frees inside itself, sparse
tensors, compiled code and other threads. Where there is a GPU, its allocator's own statistics are added. What
existed before does not count, nor what dies of it.

Storages come first here (`storage_of`, `tensors_of` and their bytes), then those who are shown them: `Memory` counts,
`Log` remembers in which order they came and went. What a run holds anyway (its results, their gradients) is known only
at its end, when the worst moment is long past: `Lifetimes` is what lets it be left out of the past, exactly, and
`Curve` what draws bytes over time in a few hundred numbers.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from math import ceil
from time import perf_counter
from typing import Any, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_MOST_SHARES = 400  # of time, in a curve
_FIRST_SHARE = 1e-5  # seconds

# --- storages, and trees of tensors


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """What holds the tensor's values; None for layouts that have no single one (sparse), which are not counted."""
    return tensor.untyped_storage() if tensor.layout is torch.strided else None


def key_of(tensor: torch.Tensor) -> int:
    """Where the tensor's storage is: no other one has that place as long as the tensor is alive."""
    place: int = tensor.untyped_storage()._cdata
    return place


def storage_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the storages behind the tensors, each counted once."""
    storages = [storage_of(tensor) for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages if storage is not None}.values())


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree; those that have no single storage (sparse) are not counted anywhere."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]


def detached(tree: Any) -> Any:
    """The same values without their history; those that need a gradient are leaves that do."""
    return tree_map(
        lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf, tree
    )


def copied(tree: Any) -> Any:
    """The same with values of their own, no longer leaves of a graph, so that they can be changed in place."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, detached(tree))


# --- watching what some code makes


@contextmanager
def peak(curve: Curve | None = None) -> Iterator[Memory]:
    """Watch the code inside; what it yields can be read at any time, and afterwards.

    Args:
        curve: is told of every change, to be drawn over time; on the CPU.
    """
    memory = Memory(curve)
    with _Watching(memory):
        yield memory
    memory._close()


class StorageWatcher(Protocol):
    """Whoever is shown what some code makes: a `Memory`, which counts, or a `Log`, which remembers the order."""

    def see(self, tensor: torch.Tensor) -> None:
        """The tensor's storage is new, or has another size than before."""


@contextmanager
def watching(memory: StorageWatcher) -> Iterator[None]:
    """Let `memory` see what the code inside makes."""
    with _Watching(memory):
        yield


class _Watching(TorchDispatchMode):
    """Shows a watcher each storage that an operation makes or resizes."""

    def __init__(self, memory: StorageWatcher) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._memory = memory

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {
            storage._cdata: storage.nbytes()
            for leaf in tree_leaves((args, kwargs or {}))
            if isinstance(leaf, torch.Tensor) and (storage := storage_of(leaf)) is not None
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = storage_of(leaf)
                # A view of what was given is not new, unless the operation made it larger.
                if storage is not None and given.get(storage._cdata) != storage.nbytes():
                    self._memory.see(leaf)
        return result


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
        storage = storage_of(tensor)
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
        storage = storage_of(tensor)
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
        storage = storage_of(tensor)
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


class Log:
    """Births and deaths of storages on any device, in order, so that a worst moment can be told without some of them.

    Each storage has a number, which no other one ever gets; 0 is for all that was not made here. `watching` shows it
    what some code makes.
    """

    def __init__(self) -> None:
        self._numbers = count(1)
        self._known: dict[int, tuple[int, int]] = {}  # of those alive, by key: (number, bytes)
        self.events: list[tuple[int, int]] = []  # (number, bytes more or less)
        self.sizes: dict[int, int] = {}

    def see(self, tensor: torch.Tensor) -> None:
        """Note the tensor's storage, if it is new, and its bytes, from now until it dies."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known[key] = (next(self._numbers), 0)
            weakref.finalize(storage, self._died, key).atexit = False
        number, before = self._known[key]
        self._known[key] = (number, size)
        self.events.append((number, size - before))
        self.sizes[number] = size

    def _died(self, key: int) -> None:
        number, size = self._known.pop(key)
        self.events.append((number, -size))

    def number(self, tensor: torch.Tensor) -> int:
        """The number of the tensor's storage; 0 for one that was not made here."""
        if tensor.layout is not torch.strided:
            return 0
        return self._known.get(key_of(tensor), (0, 0))[0]

    def alive(self) -> set[int]:
        """The numbers of the storages that are alive."""
        return {number for number, _ in self._known.values()}

    def packing(
        self, packed: set[int], names: Mapping[int, int] | None = None, *, drop: bool = False
    ) -> saved_tensors_hooks:
        """Inside, put into `packed` the numbers of the storages that autograd saves.

        Args:
            packed: where the numbers go.
            names: other names in place of numbers, by the keys of storages.
            drop: keep nothing of what is saved.
        """
        others = names or {}

        def pack(tensor: torch.Tensor) -> torch.Tensor | None:
            if tensor.layout is torch.strided:
                packed.add(others.get(key_of(tensor), self.number(tensor)))
            return None if drop else tensor.detach()  # the tensor itself would keep the graph alive that made it

        return saved_tensors_hooks(pack, unpack_dropped if drop else lambda tensor: tensor)

    def bytes(self, numbers: Iterable[int]) -> int:
        """Bytes of the storages with these numbers; number 0 has none."""
        return sum(self.sizes.get(number, 0) for number in numbers)

    def level(self, start: int, stop: int, without: Iterable[int] = ()) -> tuple[int, int]:
        """Bytes more at event `stop` than at event `start`, and the most in between."""
        left_out = set(without)
        level = most = 0
        for number, change in self.events[start:stop]:
            if number not in left_out:
                level += change
                most = max(most, level)
        return level, most


class Places:
    """The storages of a state, each with a name that it keeps from layer to layer. Name 0 is the caller's."""

    def __init__(self, log: Log, tree: Any, known: dict[int, int]) -> None:
        self.tensors = tensors_of(tree)
        self.names = {key_of(tensor): known.get(key_of(tensor), log.number(tensor)) for tensor in self.tensors}

    def bytes(self) -> int:
        """Bytes of the storages that are not the caller's, each counted once."""
        return storage_bytes([tensor for tensor in self.tensors if self.names[key_of(tensor)]])


class Dropped(Exception):  # noqa: N818  (it is no error)
    """What autograd saved was asked for, and nothing of it was kept."""


def unpack_dropped(_: None) -> torch.Tensor:
    """The unpack hook of a run that keeps nothing."""
    raise Dropped


def keeping_nothing() -> saved_tensors_hooks:
    """Inside, autograd keeps nothing of what it saves; a backward raises `Dropped`."""
    return saved_tensors_hooks(lambda _: None, unpack_dropped)


class Lifetimes:
    """Storages by their keys, in the order in which they were made, and the most bytes that there were since each.

    The time is a row of spans, from the making of each living storage to that of the next, with the most bytes in each.
    When a storage dies its span joins the one before, so there are as many spans as living storages. One that is left
    out is taken off all spans from its own on: it has lived through them, because a span begins when a storage is made
    and it is still alive at the end of the last. So that is exact.
    """

    __slots__ = ("_first", "_last", "_spans")

    def __init__(self) -> None:
        self._first = self._last = _Span()
        self._spans: dict[int, _Span] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._spans

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._spans))

    def begin(self, key: int, size: int, *, left_out: bool = False) -> None:
        """A storage is made."""
        span = _Span()
        span.size, span.left_out = size, left_out
        span.before, self._last.after = self._last, span
        self._last = self._spans[key] = span

    def resize(self, key: int, size: int) -> int:
        """A storage changes its size, which ends its span and begins another; returns the change in bytes."""
        span = self._spans[key]
        if size == span.size:
            return 0
        self.end(key)
        self.begin(key, size, left_out=span.left_out)
        return size - span.size

    def end(self, key: int) -> tuple[int, float | None]:
        """A storage dies; returns the bytes that it had, 0 if it is not known, and since when, if it was left out."""
        span = self._spans.pop(key, None)
        if span is None:
            return 0, None
        if span.left_out:
            later: _Span | None = span
            while later is not None:
                later.most -= span.size
                later = later.after
        before = span.before
        assert before is not None  # only the first has none, and it is no storage's
        before.most = max(before.most, span.most)
        before.after = span.after
        if span.after is None:
            self._last = before
        else:
            span.after.before = before
        return span.size, span.born if span.left_out else None

    def leave_out(self, key: int, *, from_now: bool = False) -> None:
        """Do not count this storage in `most`, not even for the time that is past, or only from now on."""
        span = self._spans.get(key)
        if span is None:
            return
        if from_now and not span.left_out:
            self.end(key)
            self.begin(key, span.size)
            span = self._spans[key]
        span.left_out = True

    def level(self, now: int) -> None:
        """There are so many bytes at this moment, those left out among them."""
        self._last.most = max(self._last.most, now)

    def restart(self, now: int) -> None:
        """Forget all moments so far."""
        span: _Span | None = self._first
        while span is not None:
            span.most = 0
            span = span.after
        self._last.most = now

    def most(self, *, living: bool) -> int:
        """The most bytes at once without the storages that were left out; those that live now count if `living`."""
        most, less = self._first.most, 0
        span = self._first.after
        while span is not None:
            if span.left_out or not living:
                less += span.size
            most = max(most, span.most - less)
            span = span.after
        return most

    def left_out(self, *, living: bool) -> list[tuple[float, int]]:
        """Of the living storages that `most` does not count: since when, by `perf_counter`, and how many bytes."""
        return [(span.born, span.size) for span in self._spans.values() if span.left_out or not living]


class _Span:
    """From the making of a storage to that of the next one that still lives."""

    __slots__ = ("after", "before", "born", "left_out", "most", "size")

    def __init__(self) -> None:
        self.born = perf_counter()
        self.before: _Span | None = None
        self.after: _Span | None = None
        self.size = 0
        self.most = 0
        self.left_out = False


class Curve:
    """The most bytes in each of at most 400 equal shares of the time since it was made.

    Shares start short. When there are too many of them, neighbours are joined, so a long recording is as cheap as a
    short one.
    """

    __slots__ = ("_began", "_level", "_most", "_width")

    def __init__(self) -> None:
        self._began = perf_counter()
        self._width = _FIRST_SHARE
        self._most: list[int] = []
        self._level = 0

    def see(self, level: int) -> None:
        """From now on there are `level` bytes."""
        share = self._share()
        self._most[share] = max(self._most[share], level)
        self._level = level

    def leave_out(self, born: float, size: int) -> None:
        """So many bytes, from a reading of `perf_counter` until now, are not to be in it.

        That is exact for shares of time in which they were there all along.
        """
        for share in range(self._whole_shares_since(born), self._share()):
            self._most[share] -= size

    def values(self, left_out: Iterable[tuple[float, int]] = ()) -> tuple[int, ...]:
        """The shares until now, without bytes that are to be left out too: each since when, and how many."""
        self._share()
        values = list(self._most)
        for born, size in left_out:
            for share in range(self._whole_shares_since(born), len(values)):
                values[share] -= size
        return tuple(max(0, value) for value in values)

    def _whole_shares_since(self, born: float) -> int:
        return max(0, ceil((born - self._began) / self._width))

    def _share(self) -> int:
        """The share of time that it is now; those since the last one held what was held then."""
        elapsed = perf_counter() - self._began
        while elapsed >= self._width * _MOST_SHARES:
            self._most = [max(self._most[k : k + 2]) for k in range(0, len(self._most), 2)]
            self._width *= 2
        share = int(elapsed / self._width)
        self._most += [self._level] * (share + 1 - len(self._most))
        return share


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
