"""The one cache of both front ends: values by key, for as long as the objects that a key names are alive.

Owner: each `Cache` is a constant of the module, or a field of the object, that fills it; nobody else writes to it, and
`clear()` is always right, because whatever is not found is made again. (Planners, which are pure functions of numbers,
use `functools.lru_cache`.)

What it keeps alive: keys and values, and nothing else. An object that a key knows by identity is an *anchor*, held by a
weak reference. So a key has its `id`, and a value must not hold on to it: either would keep it alive for good.

When it forgets: an entry goes when one of its anchors dies; and where there would be more than `most` entries, those
that were used least recently go.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Iterable
from itertools import count
from typing import Any, Generic, TypeVar

V = TypeVar("V")

_ENTRIES_PER_EVICTION = 10  # a full cache drops one entry in ten at once: finding the oldest means looking at all


class _Entry(Generic[V]):
    __slots__ = ("references", "used", "value")

    def __init__(self, value: V, references: list[weakref.ref[Any]], used: int) -> None:
        self.value = value
        self.references = references  # which call back only as long as they are held
        self.used = used


class Cache(Generic[V]):
    """Values, none of which is None, by key. All threads may use it.

    Args:
        most: entries that are kept, at least 1.
    """

    # That an entry goes *when* an anchor dies, and is not only found dead later, is what makes identities safe as keys:
    # CPython calls back on weak references before it frees the object, so no other object can have that `id` before
    # the entry is gone. A reference that is dropped with its entry calls nobody, so an entry that was put again under
    # the same key is safe from the death of what the old one was for.
    #
    # Neither a look nor a death takes the lock: looks are frequent, and a death comes in any thread and at any point,
    # also in the midst of a change here, and must not wait for a thread that may wait for the dying one. Both are a
    # single step on the dict, and what is done under the lock expects that entries may be gone from step to step.

    __slots__ = ("_entries", "_lock", "_next", "most")

    def __init__(self, most: int) -> None:
        self.most = most
        self._entries: dict[Hashable, _Entry[V]] = {}
        self._next = count().__next__
        self._lock = threading.RLock()  # what is dropped may run code that puts something in

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> V | None:
        """The value with this key; None if there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.used = self._next()
        return entry.value

    def put(self, key: Hashable, value: V, anchors: Iterable[Any] = ()) -> None:
        """Remember a value until one of the anchors dies; not at all if one allows no weak reference."""
        entries = self._entries

        def forget(_: object) -> None:
            entries.pop(key, None)

        try:
            references = [weakref.ref(anchor, forget) for anchor in anchors]
        except TypeError:
            return
        with self._lock:
            entries[key] = _Entry(value, references, self._next())
            if len(entries) > self.most:
                self._drop_oldest()

    def setdefault(self, key: Hashable, value: V, anchors: Iterable[Any] = ()) -> V:
        """The value with this key, which is this one from now on if there was none."""
        with self._lock:
            found = self.get(key)
            if found is None:
                self.put(key, value, anchors)
                return value
            return found

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()

    def _drop_oldest(self) -> None:
        surplus = len(self._entries) - self.most + self.most // _ENTRIES_PER_EVICTION
        entries = self._entries.copy()  # in one step, so that no death comes in between
        for key in sorted(entries, key=lambda key: entries[key].used)[:surplus]:
            self._entries.pop(key, None)
