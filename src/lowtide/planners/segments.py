"""A row of layers cut into segments whose tapes have about the same size.

Of every segment but the last only the first state is stored, and its tape is made when the backward reaches the
segment: one segment's tape is held at a time. So the peak is the stored states and the largest segment's tape, and for
a given number of segments the best cut is the one whose largest tape is smallest. It is found exactly.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from lowtide.errors import InputError

_REMEDY = "give a whole number of at least 1, such as 2"


def segment_count(segments: object, layers: int) -> int:
    """The number of segments to cut `layers` layers into: `segments`, or the number of layers if that is smaller.

    Raises:
        InputError: there are no layers, or `segments` is not a whole number of at least 1.
    """
    if layers < 1:
        raise InputError("there are 0 layers to cut into segments; give at least one")
    if isinstance(segments, bool):
        raise InputError(f"segments={segments} is a boolean, not a number of segments; {_REMEDY}")
    try:
        count = operator.index(segments)  # type: ignore[arg-type]  # what has no index is refused below
    except TypeError:
        kind = type(segments).__name__
        raise InputError(f"segments={segments!r} is a {kind}, and segments are counted; {_REMEDY}") from None
    if count == 0:
        raise InputError(f"segments=0 leaves no segment to put the {layers:,} layers in; {_REMEDY}")
    if count < 0:
        raise InputError(f"segments={count:,} is negative; {_REMEDY}")
    return min(count, layers)


def balanced(tapes: Sequence[int], segments: int) -> list[tuple[int, int]]:
    """The ranges [start, stop) of layers, one for each segment, whose largest sum of tapes is the least possible.

    Of several equally good cuts, the one with the longest last segment is taken, then with the longest one before it,
    and so on: the last segment is not run again. No segment is empty. See `segment_count` for the number of segments.
    """
    count = segment_count(segments, len(tapes))
    sizes = [operator.index(tape) for tape in tapes]
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if _cut(sizes, count, middle)[0][0] == 0:
            high = middle
        else:
            low = middle + 1
    return _cut(sizes, count, low)


def _cut(sizes: list[int], count: int, most: int) -> list[tuple[int, int]]:
    """`count` ranges of at most `most` bytes, made from the last to the first, each as long as possible.

    They reach the first layer unless there is no such cut.
    """
    ranges, stop = [], len(sizes)
    for left in reversed(range(count)):  # segments that are still to come, each of which needs a layer
        start, total = stop, 0
        while start > left and total + sizes[start - 1] <= most:
            start -= 1
            total += sizes[start]
        ranges.append((start, stop))
        stop = start
    return ranges[::-1]
