"""The storages that are alive, since when, and their bytes; `lowtide.torch.measure` is the public interface.

Every storage that the watched code makes, on any device, is followed until it dies, through a dispatch mode that sees
each operation's results, also in the backward. Scratch space that a kernel allocates and frees inside itself, sparse
tensors, compiled code and other threads are not seen. Storages that existed before are not counted, neither while they
live nor when they die. Statistics of a device's allocator are neither read nor reset: they are the user's.

The module begins with storages (`storage_of`, `tensors_of` and their bytes), followed by the classes that watch them:
`Memory` counts bytes, `Log` records the order in which storages are made and freed. What a run holds anyway (its
results, their gradients) is known only at its end, when the worst moment is long past: `Lifetimes` makes it possible to
leave such storages out of the past, exactly, and `Curve` holds bytes over time in a few hundred numbers.
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

from lowtide.torch.memory.accelerators import is_of_host

_MOST_SHARES = 400  # equal parts of the time, in a curve
_FIRST_SHARE_SECONDS = 1e-5  # length of such a part when a curve begins

# --- storages, and trees of tensors


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of the tensor's values; None for layouts without a single one (sparse), which are not counted."""
    return tensor.untyped_storage() if tensor.layout is torch.strided else None


def key_of(tensor: torch.Tensor) -> int:
    """The address of the tensor's storage, which no other storage has while the tensor is alive."""
    place: int = tensor.untyped_storage()._cdata
    return place


def storage_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the storages behind the tensors, each counted once; if any is on an accelerator, of those there."""
    return sum(storage_sizes(tensors).values())


def storage_sizes(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """The bytes of each of these storages, by its address."""
    there = [tensor for tensor in tensors if not is_of_host(tensor.device)]
    storages = [storage_of(tensor) for tensor in there or tensors]
    return {storage._cdata: storage.nbytes() for storage in storages if storage is not None}


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree, without those that have no single storage (sparse), which are not counted anywhere."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]


def detached(tree: Any) -> Any:
    """The tree with its tensors detached from their graph; those that require a gradient are leaves that do."""
    return tree_map(
        lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf, tree
    )


def copied(tree: Any) -> Any:
    """The tree with copies of its tensors, which are not leaves of a graph and so can be changed in place."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, detached(tree))


# --- watching what some code makes


@contextmanager
def peak(curve: Curve | None = None) -> Iterator[Memory]:
    """Watch the code inside; the `Memory` that it yields can be read at any time, also afterwards.

    Args:
        curve: records every change over time.
    """
    memory = Memory(curve)
    with _Watching(memory):
        yield memory


class StorageWatcher(Protocol):
    """An observer of the storages that some code makes: a `Memory`, which counts, or a `Log`, which has the order."""

    def see(self, tensor: torch.Tensor) -> None:
        """Take note of the tensor's storage, which is new or has another size than before."""


@contextmanager
def watching(memory: StorageWatcher) -> Iterator[None]:
    """Show `memory` the storages that the code inside makes."""
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
                # A view of an argument is not a new storage, unless the operation has resized it.
                if storage is not None and given.get(storage._cdata) != storage.nbytes():
                    self._memory.see(leaf)
        return result


class Memory:
    """The bytes of storages made while it was watching: `now` those alive, `peak` those at the worst moment.

    These are bytes of one kind of memory: of accelerators, all of them together, once a storage has been made on one;
    before that, of the host. `peaks` has a line for each device.
    """

    def __init__(self, curve: Curve | None = None) -> None:
        self._host, self._accelerators = _Level(), _Level()
        self._level = self._host  # the kind that counts
        self._devices: dict[torch.device, _Level] = {}
        self._curve = curve
        # Storages die in any thread, and a garbage collection can free one in the middle of a change here, in the same
        # thread. So a death only adds its key to `_dead`, and whoever is changing something handles it at the end.
        self._turn = threading.RLock()
        self._changing = False
        self._dead: list[tuple[int, torch.device]] = []

    @property
    def now(self) -> int:
        """Bytes alive."""
        return self._level.now

    @property
    def peak(self) -> int:
        """Bytes alive at the worst moment."""
        return self._level.peak

    @peak.setter
    def peak(self, value: int) -> None:
        self._level.peak = value

    @property
    def is_of_host(self) -> bool:
        """Whether what counts is the memory of the host."""
        return self._level is self._host

    @property
    def peaks(self) -> dict[str, int]:
        """The most bytes that were alive at once on each device, by its name."""
        return {str(device): level.peak for device, level in self._devices.items()}

    def see(self, tensor: torch.Tensor) -> None:
        """Count the tensor's storage from now until it dies; once, however often it is seen."""
        storage = storage_of(tensor)
        if storage is None:
            return
        key, size, device = storage._cdata, storage.nbytes(), tensor.device
        with self._turn:
            self._changing = True
            level = self._level_of(device)
            if key not in level.lives:
                level.lives.begin(key, 0)
                weakref.finalize(storage, self._died, key, device).atexit = False
            self._grow(level, device, level.lives.resize(key, size))  # also one that has grown since it was last seen
            self._settle()

    def _level_of(self, device: torch.device) -> _Level:
        """The bytes of this kind of memory; from its first storage on, those of accelerators are what counts."""
        if is_of_host(device):
            return self._host
        if self._level is self._host:
            self._level = self._accelerators
            if self._curve is not None:
                self._curve.clear()
        return self._accelerators

    def _grow(self, level: _Level, device: torch.device, change: int) -> None:
        level.grow(change)
        self._devices.setdefault(device, _Level()).grow(change)
        if level is self._level and self._curve is not None:
            self._curve.see(level.now)

    def _died(self, key: int, device: torch.device) -> None:
        self._dead.append((key, device))
        with self._turn:
            if not self._changing:
                self._changing = True
                self._settle()

    def _settle(self) -> None:
        """Remove the storages that have died in the meantime; the caller holds the lock."""
        while self._dead:
            key, device = self._dead.pop()
            level = self._level_of(device)
            size, born = level.lives.end(key)
            if born is not None and level is self._level and self._curve is not None:
                self._curve.leave_out(born, size)
            self._grow(level, device, -size)
        self._changing = False

    def leave_out(self, tensor: torch.Tensor, *, from_now: bool = False) -> None:
        """Do not count the tensor's storage in `beyond`, neither in the past nor from now on, or only from now on."""
        storage = storage_of(tensor)
        if storage is not None:
            with self._turn:
                self._changing = True
                level = self._host if is_of_host(tensor.device) else self._accelerators
                level.lives.leave_out(storage._cdata, from_now=from_now)
                self._settle()

    def beyond(self, *, living: bool = False) -> int:
        """The most bytes at once, without storages that were left out and without those alive now.

        At the end of a run the latter are its results.

        Args:
            living: count the storages that are alive now, too.
        """
        with self._turn:
            return self._level.lives.most(living=living)

    def curve_beyond(self, *, living: bool = False) -> tuple[int, ...]:
        """The bytes that `beyond` counts, over time, in equal parts of the time; empty without a curve."""
        with self._turn:
            if self._curve is None:
                return ()
            # The curve is too high in the part of time in which a storage that is left out was made; `most` is exact.
            lives = self._level.lives
            most = lives.most(living=living)
            return tuple(min(value, most) for value in self._curve.values(lives.left_out(living=living)))

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage is counted and alive."""
        storage = storage_of(tensor)
        return storage is not None and storage._cdata in self._level.lives

    def alive(self) -> set[int]:
        """The keys of the storages that are counted and alive."""
        return set(self._level.lives)

    def bytes_of(self, keys: Iterable[int]) -> int:
        """The bytes of the storages with these keys, as far as they are counted and alive."""
        return sum(map(self._level.lives.size, keys))

    def let_threads_finish(self) -> None:
        """Wait until earlier backwards on devices have let go of what they used, which is a moment after their end.

        They run in one thread for each device, which takes up the next backward when it has cleared away the last one.
        """
        for device in list(self._devices):
            if not is_of_host(device):
                with torch.enable_grad():
                    nothing = torch.empty(0, device=device, requires_grad=True)
                    torch.autograd.grad(nothing.view_as(nothing), nothing, nothing.detach())

    def restart_peak(self) -> None:
        """Discard the worst moment so far."""
        self.let_threads_finish()
        with self._turn:
            for level in (self._host, self._accelerators, *self._devices.values()):
                level.peak = level.now
                level.lives.restart(level.now)


_Kind = tuple[str, int]  # the node of autograd, or the phase outside of nodes, and the number of dimensions
Moment = tuple[str, int, int]  # and the number of the run of neighbours


class Moments(Memory):
    """Notes how much was alive at each kind of moment, not only at the worst one.

    Along the loop, another moment may become the worst: that of the one whose bytes grow the most, which is known only
    if all of them were noted. A moment is told by its node of autograd and the number of dimensions of what is made;
    neighbours of one kind are a single moment, so that the moments of a step over a longer list are the same ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self._noted: dict[Moment, int] | None = None
        self._runs: dict[_Kind, int] = {}  # the neighbours of each kind so far
        self._kind: _Kind | None = None  # the latest
        self._phase = ""  # what moments outside of autograd's nodes belong to

    @contextmanager
    def noting(self, phase: str) -> Iterator[dict[Moment, int]]:
        """Note the most bytes alive at each moment inside."""
        moments: dict[Moment, int] = {}
        self._noted, self._runs, self._kind, self._phase = moments, {}, None, phase
        try:
            yield moments
        finally:
            self._noted = None

    def see(self, tensor: torch.Tensor) -> None:
        """Count the tensor's storage, as a `Memory` does, and note the moment."""
        super().see(tensor)
        if self._noted is None:
            return
        node = torch._C._current_autograd_node()
        kind = (self._phase if node is None else node.name(), tensor.ndim)
        if kind != self._kind:
            self._runs[kind] = self._runs.get(kind, 0) + 1
            self._kind = kind
        moment = (*kind, self._runs[kind])
        self._noted[moment] = max(self._noted.get(moment, 0), self.now)


class _Level:
    """The bytes of some storages that are alive, the most that there were, and for how long there have been any."""

    __slots__ = ("lives", "now", "peak")

    def __init__(self) -> None:
        self.now = self.peak = 0
        self.lives = Lifetimes()

    def grow(self, change: int) -> None:
        self.now += change
        self.peak = max(self.peak, self.now)
        self.lives.level(self.now)


class Log:
    """Births and deaths of storages, in order, from which a worst moment without some of them follows.

    Each storage has a number that no other one ever gets; 0 stands for all storages that were not made here. Use it
    with `watching`. As in a `Memory`, bytes are those of accelerators once a storage was made on one.
    """

    def __init__(self) -> None:
        self._numbers = count(1)
        self._known: dict[int, tuple[int, int]] = {}  # storages that are alive, by key: (number, bytes)
        # Not `weakref.finalize`, with which every storage that is alive, parameters too, would keep this log alive.
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.events: list[tuple[int, int]] = []  # (number, change in bytes)
        self.sizes: dict[int, int] = {}
        self._of_host: set[int] = set()  # numbers of storages in the host's memory
        self._counts_host = True

    def see(self, tensor: torch.Tensor) -> None:
        """Record the tensor's storage, if it is new, and its bytes, from now until it dies."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known[key] = (next(self._numbers), 0)
            if is_of_host(tensor.device):
                self._of_host.add(self._known[key][0])
            else:
                self._counts_host = False
            self._references[key] = weakref.ref(storage, lambda _: self._died(key))
        number, before = self._known[key]
        self._known[key] = (number, size)
        self.events.append((number, size - before))
        self.sizes[number] = size

    def _died(self, key: int) -> None:
        del self._references[key]
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
        """Hooks that add the numbers of the storages that autograd saves to `packed`.

        Args:
            packed: the set that the numbers are added to.
            names: names to use instead of numbers, by the keys of storages.
            drop: do not keep what is saved.
        """
        others = names or {}

        def pack(tensor: torch.Tensor) -> torch.Tensor | None:
            if tensor.layout is torch.strided:
                packed.add(others.get(key_of(tensor), self.number(tensor)))
            return None if drop else tensor.detach()  # the tensor itself would keep the graph that made it alive

        return saved_tensors_hooks(pack, unpack_dropped if drop else lambda tensor: tensor)

    def bytes(self, numbers: Iterable[int]) -> int:
        """The bytes of the storages with these numbers; number 0 counts nothing."""
        uncounted = self._uncounted
        return sum(self.sizes.get(number, 0) for number in numbers if number not in uncounted)

    @property
    def _uncounted(self) -> set[int]:
        return set() if self._counts_host else self._of_host

    def level(self, start: int, stop: int, without: Iterable[int] = ()) -> tuple[int, int]:
        """The change in bytes from event `start` to event `stop`, and the largest change in between."""
        level = most = 0
        for change in self.changes(start, stop, without):
            level += change
            most = max(most, level)
        return level, most

    def changes(self, start: int, stop: int, without: Iterable[int] = ()) -> Iterator[int]:
        """The change in bytes with each event from `start` to `stop`."""
        left_out = self._uncounted.union(without)
        for number, change in self.events[start:stop]:
            yield 0 if number in left_out else change


class Places:
    """The storages of a state, each with a name that it keeps from layer to layer. Those of the caller have name 0."""

    def __init__(self, log: Log, tree: Any, known: dict[int, int]) -> None:
        self.tensors = tensors_of(tree)
        self.names = {key_of(tensor): known.get(key_of(tensor), log.number(tensor)) for tensor in self.tensors}

    def bytes(self) -> int:
        """Bytes of the storages that are not the caller's, each counted once."""
        return storage_bytes([tensor for tensor in self.tensors if self.names[key_of(tensor)]])


class Dropped(Exception):  # noqa: N818  (it is no error)
    """A backward needed a saved tensor in a run that keeps none."""


def unpack_dropped(_: None) -> torch.Tensor:
    """The unpack hook of a run that keeps no saved tensors."""
    raise Dropped


def keeping_nothing() -> saved_tensors_hooks:
    """Hooks with which autograd keeps none of the tensors it saves; a backward raises `Dropped`."""
    return saved_tensors_hooks(lambda _: None, unpack_dropped)


class Lifetimes:
    """Living storages by key, in the order in which they were made, and the most bytes that there were since each.

    Time is divided into spans, from the making of each living storage to that of the next, with the most bytes in each.
    When a storage dies, its span is joined with the one before, so there are as many spans as living storages. The
    bytes of a storage that is left out are subtracted from all spans from its own on. That is exact: the storage was
    made at the beginning of its span and is still alive, so it has existed throughout all of them.
    """

    __slots__ = ("_first", "_last", "_spans")

    def __init__(self) -> None:
        self._first = self._last = _Span()
        self._spans: dict[int, _Span] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._spans

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._spans))

    def size(self, key: int) -> int:
        """The bytes of a living storage, 0 if it is not known."""
        span = self._spans.get(key)
        return 0 if span is None else span.size

    def begin(self, key: int, size: int, *, left_out: bool = False) -> None:
        """Record that a storage is made."""
        span = _Span()
        span.size, span.left_out = size, left_out
        span.before, self._last.after = self._last, span
        self._last = self._spans[key] = span

    def resize(self, key: int, size: int) -> int:
        """Record a storage's new size, which ends its span and begins another; the change in bytes."""
        span = self._spans[key]
        if size == span.size:
            return 0
        self.end(key)
        self.begin(key, size, left_out=span.left_out)
        return size - span.size

    def end(self, key: int) -> tuple[int, float | None]:
        """Record that a storage dies; its bytes, 0 if it is not known, and when it was made if it was left out."""
        span = self._spans.pop(key, None)
        if span is None:
            return 0, None
        if span.left_out:
            later: _Span | None = span
            while later is not None:
                later.most -= span.size
                later = later.after
        before = span.before
        assert before is not None  # only the first span has none before it, and that belongs to no storage
        before.most = max(before.most, span.most)
        before.after = span.after
        if span.after is None:
            self._last = before
        else:
            span.after.before = before
        return span.size, span.born if span.left_out else None

    def leave_out(self, key: int, *, from_now: bool = False) -> None:
        """Do not count this storage in `most`, neither in the past nor from now on, or only from now on."""
        span = self._spans.get(key)
        if span is None:
            return
        if from_now and not span.left_out:
            self.end(key)
            self.begin(key, span.size)
            span = self._spans[key]
        span.left_out = True

    def level(self, now: int) -> None:
        """Record the number of bytes at this moment, those left out included."""
        self._last.most = max(self._last.most, now)

    def restart(self, now: int) -> None:
        """Discard all moments so far."""
        span: _Span | None = self._first
        while span is not None:
            span.most = 0
            span = span.after
        self._last.most = now

    def most(self, *, living: bool) -> int:
        """The most bytes at once without the storages that were left out; those alive now count only if `living`."""
        # `less` has the bytes of all storages to leave out that were made at or before the beginning of the span.
        most, less = self._first.most, 0
        span = self._first.after
        while span is not None:
            if span.left_out or not living:
                less += span.size
            most = max(most, span.most - less)
            span = span.after
        return most

    def left_out(self, *, living: bool) -> list[tuple[float, int]]:
        """For each living storage that `most` does not count: when it was made, by `perf_counter`, and its bytes."""
        return [(span.born, span.size) for span in self._spans.values() if span.left_out or not living]


class _Span:
    """The time from the making of a storage to that of the next one that is still alive."""

    __slots__ = ("after", "before", "born", "left_out", "most", "size")

    def __init__(self) -> None:
        self.born = perf_counter()
        self.before: _Span | None = None
        self.after: _Span | None = None
        self.size = 0
        self.most = 0
        self.left_out = False


class Curve:
    """The most bytes in each of at most 400 equal parts (shares) of the time since the curve was made.

    Shares start short. When there are too many of them, neighbours are joined, so a long recording takes no more than a
    short one.
    """

    __slots__ = ("_began", "_level", "_most", "_width")

    def __init__(self) -> None:
        self._began = perf_counter()
        self._width = _FIRST_SHARE_SECONDS
        self._most: list[int] = []
        self._level = 0

    def clear(self) -> None:
        """Forget what was recorded so far, as if there had been nothing."""
        self._most = []
        self._level = 0

    def see(self, level: int) -> None:
        """Record that from now on there are `level` bytes."""
        share = self._share()
        self._most[share] = max(self._most[share], level)
        self._level = level

    def leave_out(self, born: float, size: int) -> None:
        """Subtract `size` bytes from the time between `born`, a reading of `perf_counter`, and now.

        That is exact for shares of time throughout which these bytes existed.
        """
        for share in range(self._whole_shares_since(born), self._share()):
            self._most[share] -= size

    def values(self, left_out: Iterable[tuple[float, int]] = ()) -> tuple[int, ...]:
        """The shares until now, without further bytes to leave out: pairs of when they were made, and how many."""
        self._share()
        values = list(self._most)
        for born, size in left_out:
            for share in range(self._whole_shares_since(born), len(values)):
                values[share] -= size
        return tuple(max(0, value) for value in values)

    def _whole_shares_since(self, born: float) -> int:
        return max(0, ceil((born - self._began) / self._width))

    def _share(self) -> int:
        """The index of the present share of time; shares since the last change get the level of that change."""
        elapsed = perf_counter() - self._began
        while elapsed >= self._width * _MOST_SHARES:
            self._most = [max(self._most[k : k + 2]) for k in range(0, len(self._most), 2)]
            self._width *= 2
        share = int(elapsed / self._width)
        self._most += [self._level] * (share + 1 - len(self._most))
        return share
