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

    def living(self) -> list[tuple[float, int]]:
        """Since when each storage lives, by `perf_counter`, and its bytes."""
        return [(span.born, span.size) for span in self._spans.values()]

    def begin(self, key: int) -> None:
        """A storage is made."""
        # A collection of garbage, in which storages die, can only come with an allocation: before anything is linked.
        span = _Span()
        span.before, self._last.after = self._last, span
        self._last = self._spans[key] = span

    def resize(self, key: int, size: int) -> int:
        """A storage has so many bytes now; gives how many more that is."""
        span = self._spans[key]
        more = size - span.size
        span.size = size
        return more

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

    def leave_out(self, key: int) -> None:
        """Do not count this storage in `most`, not even for the time that is past."""
        if key in self._spans:
            self._spans[key].left_out = True

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

    def most(self) -> int:
        """The most bytes at once without the storages that were left out, and without those that live now."""
        most, living = self._first.most, 0
        span = self._first.after
        while span is not None:
            living += span.size
            most = max(most, span.most - living)
            span = span.after
        return most
