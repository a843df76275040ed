"""Compares gradients with the plain ones: how many numbers differ in any bit, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

SAME = "same bits"


def equality(found: Sequence[Any], expected: Sequence[Any], *, exact: bool) -> str:
    """The comparison in words: how many numbers differ if they should be `exact`, else the largest difference.

    The difference is relative to the largest entry of the same gradient.
    """
    pairs = [(np.asarray(one), np.asarray(other)) for one, other in zip(found, expected, strict=True)]
    differing = sum(int(np.count_nonzero(_words(one) != _words(other))) for one, other in pairs)
    if not differing:
        return SAME
    if exact:
        return f"{differing:,} of {sum(one.size for one, _ in pairs):,} differ"
    return f"{max(_relative(one, other) for one, other in pairs):.0e} off"


def _words(array: Any) -> Any:
    """The bits as whole numbers, so that NaN equals itself and -0.0 does not equal 0.0."""
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


def _relative(found: Any, expected: Any) -> float:
    largest = float(np.max(np.abs(expected)))
    return float(np.max(np.abs(found - expected))) / largest if largest else float("inf")
