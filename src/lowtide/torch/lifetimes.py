"""The most bytes at once *without* some storages, which may be named after the fact.

What a run holds anyway (its results, their gradients) is known only at its end, when the worst moment is long past. So
the time is kept as spans, from the making of each living storage to that of the next, with the most bytes in each. When
a storage dies its span joins the one before. A storage that is left out afterwards is taken off the spans of its life.
That is exact, and takes as much memory as there are living storages.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter


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


class Lifetimes:
    """Storages by their keys, in the order in which they were made."""

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
        """A storage has so many bytes now, which makes another of it; gives how many more that is."""
        span = self._spans[key]
        if size == span.size:
            return 0
        self.end(key)
        self.begin(key, size, left_out=span.left_out)
        return size - span.size

    def end(self, key: int) -> tuple[int, float | None]:
        """A storage dies; gives the bytes that it had, 0 if it is not known, and since when, if it was left out."""
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
