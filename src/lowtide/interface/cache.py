"""The one cache of both front ends: values by key, for as long as the objects that a key identifies are alive.

Owner: each `Cache` is a constant of the module, or a field of the object, that fills it. Nobody else writes to it, and
`clear()` is always safe, because a value that is not found is computed again. (Planners, which are pure functions of
numbers, use `functools.lru_cache`.)

What it keeps alive: keys and values, and nothing else. An object that a key identifies is an *anchor*, held by a weak
reference. So a key contains its `id` instead of the object, and a value must not refer to it: either would keep it
alive for good.

When it forgets: an entry is removed when one of its anchors dies; and when there would be more than `most` entries, the
least recently used ones are removed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Iterable
from itertools import count
from typing import Any, Generic, TypeVar

V = TypeVar("V")

# A full cache drops one entry in this many at once: finding the least recently used ones means looking at all entries.
_ENTRIES_PER_EVICTION = 10


class _Entry(Generic[V]):
    __slots__ = ("references", "used", "value")

    def __init__(self, value: V, references: list[weakref.ref[Any]], used: int) -> None:
        self.value = value
        self.references = references  # a weak reference calls back only while it is itself alive
        self.used = used


class Cache(Generic[V]):
    """Values by key; no value may be None. Safe to use from several threads.

    Args:
        most: the most entries that are kept, at least 1.
    """

    # Identities are safe as keys because an entry is removed *when* an anchor dies, not only found dead later: CPython
    # runs a weak reference's callback before it frees the object, so no other object can get that `id` before the entry
    # is gone. A weak reference that was dropped with its entry has no callback any more, so an entry that was put again
    # under the same key is safe from the death of the old entry's anchors.
    #
    # Neither `get` nor a callback takes the lock: `get` is frequent, and a callback runs in any thread at any point,
    # also in the middle of a change here, and must not wait for a thread that may be waiting for the callback's own.
    # Both are a single operation on the dict, and code under the lock expects entries to disappear between operations.

    __slots__ = ("_entries", "_lock", "_next", "most")

    def __init__(self, most: int) -> None:
        self.most = most
        self._entries: dict[Hashable, _Entry[V]] = {}
        self._next = count().__next__
        self._lock = threading.RLock()  # reentrant: an entry's value may run code, when it is freed, that calls `put`

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> V | None:
        """The value stored under this key; None if there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.used = self._next()
        return entry.value

    def put(self, key: Hashable, value: V, anchors: Iterable[Any] = ()) -> None:
        """Store a value until one of the anchors dies; not at all if an anchor does not support weak references."""
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
        """The value stored under this key; if there is none, `value`, which is then stored."""
        with self._lock:
            found = self.get(key)
            if found is None:
                self.put(key, value, anchors)
                return value
            return found

    def clear(self) -> None:
        """Remove all entries."""
        with self._lock:
            self._entries.clear()

    def _drop_oldest(self) -> None:
        surplus = len(self._entries) - self.most + self.most // _ENTRIES_PER_EVICTION
        entries = self._entries.copy()  # a single operation, during which no callback can run
        for key in sorted(entries, key=lambda key: entries[key].used)[:surplus]:
            self._entries.pop(key, None)
