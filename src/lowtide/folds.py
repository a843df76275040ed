"""What to make of a loop's outputs instead of a stack: the user's word or fold, checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowtide.errors import InputError

Fold = tuple[Any, Callable[[Any, Any], Any]]
Reduce = str | Fold | None


def fold_of(reduce: Reduce) -> Fold | None:
    """The initial value and the function of a fold of the user's own; None for a word or nothing."""
    if reduce is None or isinstance(reduce, str):
        if reduce not in (None, "mean", "sum", "last"):
            raise InputError(f'reduce={reduce!r} is not known; give "mean", "sum", "last", or (init, fold)')
        return None
    if not isinstance(reduce, tuple | list) or len(reduce) != 2 or not callable(reduce[1]):
        raise InputError(
            f'reduce={reduce!r}: give "mean", "sum", "last", or (init, fold) with a function fold(acc, y) -> acc'
        )
    return reduce[0], reduce[1]


def refuse_reducing_nothing(reduce: Reduce) -> None:
    """No steps have a sum, but neither a mean nor a last output."""
    if reduce in ("mean", "last"):
        raise InputError(f'reduce="{reduce}" of no steps has no value; give at least one step')
