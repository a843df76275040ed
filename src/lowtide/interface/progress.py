"""Progress bars: one for loops, and one for planning.

A loop's bar moves once for each step, and once more for its backward where that can be observed, never for reruns. The
bar for planning moves once for each stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from lowtide.checks import whole_number
from lowtide.errors import InputError
from lowtide.packages import needed_for


class Progress(Protocol):
    """Anything with `update(n)`, such as a tqdm bar."""

    def update(self, n: int) -> Any:
        """Advance by n."""


class _Tqdm:
    """A tqdm bar of its own, closed when it is full."""

    def __init__(self, total: int, every: int, label: str) -> None:
        with needed_for("a progress bar (pbar=)", "; or give an object with update(n)"):
            from tqdm.auto import tqdm

        self._bar = tqdm(total=total, desc=label, miniters=every, unit="step")
        self._left = total

    def update(self, n: int) -> None:
        self._bar.update(n)
        self._left -= n
        if self._left <= 0:
            self._bar.close()


def progress(pbar: Any, length: int, *, with_backward: bool, label: str = "steps") -> Progress | None:
    """The bar that `pbar` asks for, in the spellings that `bars` lists."""
    make = bars(pbar, length, with_backward=with_backward, label=label)
    return None if make is None else make()


def bars(pbar: Any, length: int, *, with_backward: bool, label: str = "steps") -> Callable[[], Progress] | None:
    """A function that makes the bar that `pbar` asks for, to be called each time that the loop is run.

    `pbar` is None or False for no bar, True for a tqdm bar, a whole number n for one that is redrawn every n steps, a
    string for one with that label, or an object with `update(n)`, which is used as it is.
    """
    if pbar is None or pbar is False:
        return None
    if callable(getattr(pbar, "update", None)) and not isinstance(pbar, Mapping):
        return lambda: pbar  # anything with update(n) is a Progress
    total = length * (2 if with_backward else 1)
    if pbar is True:
        return partial(_Tqdm, total, 1, label)
    if isinstance(pbar, str):
        return partial(_Tqdm, total, 1, pbar)
    try:
        return partial(_Tqdm, total, whole_number(pbar, "pbar", least=1), label)
    except InputError:
        raise InputError(
            f"pbar={pbar!r}: give True, a whole number of steps, a label, or an object with update(n)"
        ) from None


class Stages:
    """A bar for work whose number of stages is not known until it has begun."""

    def __init__(self, pbar: Any, label: str) -> None:
        bars(pbar, 1, with_backward=False)  # refuses a `pbar` that cannot be used, before anything runs
        self._pbar = pbar
        self._label = label
        self._bar: Progress | None = None
        self._left = 0

    def begin(self, length: int) -> None:
        """Start the bar, for `length` stages."""
        self._bar = progress(self._pbar, length, with_backward=False, label=self._label)
        self._left = length

    def move(self) -> None:
        """Count one stage as done."""
        self.reach(self._left - 1)

    def reach(self, left: int) -> None:
        """Count all but `left` stages as done; the bar never moves backwards."""
        if self._bar is not None and 0 <= left < self._left:
            self._bar.update(self._left - left)
        self._left = min(left, self._left)
