"""Bytes over time, in a few hundred numbers however long it takes."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from time import perf_counter

SHARES = 400


class Curve:
    """The most bytes in each of at most `SHARES` equal shares of the time since it was made.

    Shares start short. When there are too many of them, neighbours are joined, so a long recording is as cheap as a
    short one.
    """

    __slots__ = ("_began", "_level", "_most", "_width")

    def __init__(self) -> None:
        self._began = perf_counter()
        self._width = 1e-5
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
        while elapsed >= self._width * SHARES:
            self._most = [max(self._most[k : k + 2]) for k in range(0, len(self._most), 2)]
            self._width *= 2
        share = int(elapsed / self._width)
        self._most += [self._level] * (share + 1 - len(self._most))
        return share
