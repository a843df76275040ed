"""Cutting a row of layers into segments, against every cut there is."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import InputError
from lowtide.planners.segments import balanced, segment_count

TAPES = st.lists(st.integers(0, 30), min_size=1, max_size=9)


def every_cut(layers: int, segments: int) -> list[list[tuple[int, int]]]:
    return [list(pairwise((0, *cuts, layers))) for cuts in combinations(range(1, layers), segments - 1)]


def largest(tapes: list[int], ranges: list[tuple[int, int]]) -> int:
    return max(sum(tapes[start:stop]) for start, stop in ranges)


@given(TAPES, st.integers(1, 12))
def test_the_largest_tape_is_the_least_of_all_cuts_and_the_last_segments_the_longest(
    tapes: list[int], segments: int
) -> None:
    cuts = every_cut(len(tapes), min(segments, len(tapes)))
    # Longest last segments: starts as early as possible, the last one's first.
    best = min(cuts, key=lambda ranges: (largest(tapes, ranges), [start for start, _ in reversed(ranges)]))
    assert balanced(tapes, segments) == best


@given(st.lists(st.integers(0, 2**48), min_size=1, max_size=60), st.integers(1, 80))
def test_ranges_follow_one_another_and_none_is_empty(tapes: list[int], segments: int) -> None:
    ranges = balanced(tapes, segments)
    assert len(ranges) == min(segments, len(tapes))
    assert (ranges[0][0], ranges[-1][1]) == (0, len(tapes))
    assert all(start < stop for start, stop in ranges)
    assert all(left[1] == right[0] for left, right in pairwise(ranges))


def test_nine_equal_layers_in_five_segments() -> None:
    """By count alone, rounding down, they would be 1, 1, 1, 1 and 5."""
    assert balanced([7] * 9, 5) == [(0, 1), (1, 3), (3, 5), (5, 7), (7, 9)]


def test_layers_are_weighed_not_counted() -> None:
    assert balanced([64, 16, 4, 1, 1, 1, 1], 2) == [(0, 1), (1, 7)]
    assert balanced([1, 1, 1, 1, 4, 16, 64], 2) == [(0, 6), (6, 7)]


def test_one_layer_and_one_segment() -> None:
    assert balanced([5], 1) == [(0, 1)]
    assert balanced([5, 6, 7], 1) == [(0, 3)]
    assert balanced([0, 0, 0], 2) == [(0, 1), (1, 3)]


def test_more_segments_than_layers_is_one_layer_for_each() -> None:
    assert balanced([1, 2, 3], 99) == [(0, 1), (1, 2), (2, 3)]
    assert segment_count(99, 3) == 3


def test_whole_numbers_of_any_library_count() -> None:
    assert segment_count(np.int64(2), 3) == 2
    assert balanced([np.int64(1), np.int64(2)], 2) == [(0, 1), (1, 2)]  # type: ignore[list-item]  # that is the point


def test_a_thousand_layers_take_no_time() -> None:
    ranges = balanced([k * 2**30 for k in range(1000)], 31)
    assert len(ranges) == 31


@pytest.mark.parametrize(
    ("segments", "layers", "words"),
    [
        (0, 5, "segments=0 leaves no segment to put the 5 layers in; give a whole number of at least 1"),
        (-2, 5, "segments=-2 is negative; give a whole number of at least 1"),
        (True, 5, "segments=True is a boolean, not a number of segments; give a whole number of at least 1"),
        (2.0, 5, "segments=2.0 is a float, and segments are counted; give a whole number of at least 1"),
        ("2", 5, "segments='2' is a str, and segments are counted; give a whole number of at least 1"),
        (None, 5, "segments=None is a NoneType, and segments are counted"),
        (2, 0, "there are 0 layers to cut into segments; give at least one"),
    ],
    ids=repr,
)
def test_what_cannot_be_a_number_of_segments_says_why(segments: Any, layers: int, words: str) -> None:
    with pytest.raises(InputError, match=words.replace("(", r"\(")):
        segment_count(segments, layers)
    with pytest.raises(ValueError, match=words):
        balanced([1] * layers, segments)
