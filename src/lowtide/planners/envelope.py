"""The lower convex envelope of the fewest plain runs, level by level: proven bounds, and where to split.

Let c_0 >= c_1 >= ... be the steps of tape that fit beside 0, 1, ... snapshots, and P_i(l) the fewest plain runs for l
steps with i snapshots held below (`equal` has the recurrence). Its Lagrangian dual is

    G_i(mu) = max(c_i * mu, G_i(mu-1) + G_{i+1}(mu)),  0 for mu <= 0,    and    P_i(l) >= mu*l - G_i(mu) for every mu.

The best of these bounds over all real mu is the lower convex envelope of P_i. It is stored here as a polygon with
integer corners, and constructed without reference to mu. A split costs (1 run for each left step) + left + right, so
the envelope of "split" consists of the edges of level i, each steeper by 1, and the edges of level i+1, sorted by
slope. "Tape it whole" is the single point (c_i, 0). The envelope of both is the tangent from that point, followed by
the rest of the split edges.

The construction needs c_i - c_{i+1} <= 1, which holds because a tape holds its input (tape >= state): then the
tangent's slope is at most 2, so edges can be made window by window, for slopes in [1, 2), [2, 3), ..., each from the
window before. Corners are attained by actual schedules: each is a sum of corners, or (c_i, 0) itself.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

_Ints = NDArray[np.int64]


class Envelope:
    """The envelopes of P_0, P_1, ... for stretches of up to `length` steps."""

    __slots__ = ("_levels",)

    def __init__(self, capacities: Sequence[int], length: int) -> None:
        self._levels = [_Polygon(steps, runs) for steps, runs in _edges(capacities, length)]

    def least(self, level: int, length: int) -> int:
        """A proven lower bound on P_level(length): the envelope, rounded up."""
        return self._levels[level].rounded_up(length)

    def split(self, level: int, length: int) -> int:
        """The left part for which the sum of the bounds of both parts is least.

        Unrounded, that sum is convex in the left part, and least on the interval where the slopes of both parts cross.
        Rounding up adds nothing where a part ends in a corner, so the candidates are the interval's ends and the
        corners of either part inside it.
        """
        left_side, right_side = self._levels[level], self._levels[level + 1]
        lowest = max(1, length - right_side.longest)
        # The sum rises from j to j+1 by (slope of the left part) + 1 - (slope of the right part).
        low = _first(lowest, length - 1, lambda j: left_side.slope(j, steeper=1) >= right_side.slope(length - j - 1))
        high = low
        if low < length - 1 and left_side.slope(low, steeper=1) == right_side.slope(length - low - 1):
            # The sum is constant until one of the two edges ends; their neighbours have other slopes.
            high = min(left_side.edge(low)[1], length - right_side.edge(length - low - 1)[0], length - 1)
        candidates = {low, high, *left_side.corners(low, high)}
        candidates.update(length - corner for corner in right_side.corners(length - high, length - low))
        return min(sorted(candidates), key=lambda j: j + left_side.rounded_up(j) + right_side.rounded_up(length - j))


class _Polygon:
    """One level's envelope, as its corners, of which (0, 0) is the first."""

    __slots__ = ("_xs", "_ys", "longest")

    def __init__(self, steps: _Ints, runs: _Ints) -> None:
        self._xs: list[int] = [0, *np.cumsum(steps).tolist()]
        self._ys: list[int] = [0, *np.cumsum(runs).tolist()]
        self.longest = self._xs[-1]

    def rounded_up(self, x: int) -> int:
        k = bisect_left(self._xs, x, lo=1)
        rise, run = self._ys[k] - self._ys[k - 1], self._xs[k] - self._xs[k - 1]
        return self._ys[k - 1] - (-rise * (x - self._xs[k - 1]) // run)

    def slope(self, x: int, steeper: int = 0) -> float:
        """The slope of the edge between x and x+1, plus `steeper`."""
        # One division of integers, so one rounding: slopes that are equal as fractions compare as equal.
        k = bisect_right(self._xs, x)
        run = self._xs[k] - self._xs[k - 1]
        return (self._ys[k] - self._ys[k - 1] + steeper * run) / run

    def edge(self, x: int) -> tuple[int, int]:
        """Where the edge between x and x+1 begins and ends."""
        k = bisect_right(self._xs, x)
        return self._xs[k - 1], self._xs[k]

    def corners(self, low: int, high: int) -> list[int]:
        """At most four corners in [low, high]: the two outermost on either side."""
        inside = self._xs[bisect_left(self._xs, low, lo=1) : bisect_right(self._xs, high)]
        return inside if len(inside) <= 4 else inside[:2] + inside[-2:]


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The least j in [low, high) for which `holds` is true, and then stays true; `high` if there is none.

    It is usually near `low`, so a range around it is found by steps that double, and then bisected.
    """
    reach = 1
    while low + reach < high and not holds(low + reach):
        low += reach + 1
        reach *= 2
    high = min(high, low + reach)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _edges(capacities: Sequence[int], length: int) -> list[tuple[_Ints, _Ints]]:
    """The edges (steps, plain runs) of each level, by rising slope, until the first level reaches `length`.

    All levels go window by window and stop together: the last levels would take as many windows as the chain has steps
    to reach its length, and nobody ever asks them for slopes that the first level does not have.
    """
    zero = np.zeros(1, dtype=np.int64)
    latest = [(np.array([capacity], dtype=np.int64), zero) for capacity in capacities]  # slopes in [0, 1)
    edges = [[window] for window in latest]
    reached, window = capacities[0], 0
    # On entry of each turn: `latest[level]` has the level's edges with slopes in [window, window + 1). Made steeper by
    # 1 they fall into the next window, so each window of a level follows from its own last one and, going down from the
    # last level, from the same window of the level after it.
    while reached < length:
        window += 1
        right = (zero[:0], zero[:0])  # the last level can only tape
        for level in range(len(capacities) - 1, -1, -1):
            if level < len(capacities) - 1:
                right = _merged(latest[level], right)
                if window == 1 and capacities[level] > capacities[level + 1]:
                    right = _tangent(capacities[level], capacities[level + 1], *right)
            latest[level] = right
            edges[level].append(right)
        reached += int(latest[0][0].sum())
    return [
        (np.concatenate([steps for steps, _ in level]), np.concatenate([runs for _, runs in level])) for level in edges
    ]


def _merged(own: tuple[_Ints, _Ints], right: tuple[_Ints, _Ints]) -> tuple[_Ints, _Ints]:
    """A level's own edges, made steeper by 1, and those of the next level: by rising slope, parallel ones joined.

    Division is correctly rounded, so equal slopes are equal floats. Different slopes are different floats as long as
    the product of two edges' steps stays below 2**50, far beyond any chain that can be run.
    """
    own_steps, own_runs = own[0], own[1] + own[0]
    if len(own_steps) == 1 and len(right[0]) and own_runs[0] * right[0][0] == right[1][0] * own_steps[0]:
        # By far the most frequent case: a single edge, parallel to the first of the others.
        steps, runs = right[0].copy(), right[1].copy()
        steps[0] += own_steps[0]
        runs[0] += own_runs[0]
        return steps, runs
    steps, runs = np.concatenate([own_steps, right[0]]), np.concatenate([own_runs, right[1]])
    slopes, where = np.unique(runs / steps, return_inverse=True)
    joined_steps, joined_runs = np.zeros(len(slopes), np.int64), np.zeros(len(slopes), np.int64)
    np.add.at(joined_steps, where, steps)
    np.add.at(joined_runs, where, runs)
    return joined_steps, joined_runs


def _tangent(capacity: int, right_capacity: int, steps: _Ints, runs: _Ints) -> tuple[_Ints, _Ints]:
    """The edges after the point (capacity, 0), given the edges of "split" after the point (right_capacity, 0)."""
    xs, ys = right_capacity + np.cumsum(steps), np.cumsum(runs)
    beyond = xs > capacity
    slopes = np.where(beyond, ys / np.where(beyond, xs - capacity, 1), np.inf)
    touch = int(len(slopes) - 1 - np.argmin(slopes[::-1]))  # the last of equal slopes: one edge, not two in line
    return (
        np.concatenate([[xs[touch] - capacity], steps[touch + 1 :]]),
        np.concatenate([[ys[touch]], runs[touch + 1 :]]),
    )
