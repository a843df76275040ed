"""A progress bar that moves once for each step forward and once backward, never for reruns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from lowtide.checks import whole_number
from lowtide.errors import InputError


class Progress(Protocol):
    """Anything with `update(n)`, such as a tqdm bar."""

    def update(self, n: int) -> Any:
        """Move on by n."""


class _Tqdm:
    """A tqdm bar of its own, closed when it is full."""

    def __init__(self, total: int, every: int, label: str) -> None:
        from tqdm.auto import tqdm

        self._bar = tqdm(total=total, desc=label, miniters=every, unit="step")
        self._left = total

    def update(self, n: int) -> None:
        self._bar.update(n)
        self._left -= n
        if self._left <= 0:
            self._bar.close()


def progress(pbar: Any, length: int, *, with_backward: bool) -> Progress | None:
    """The bar that `pbar` asks for.

    None or False for none, True for a tqdm bar, a whole number for one that is drawn every so many steps, a string for
    one with that label, or an object with `update(n)`, which is used as it is.
    """
    if pbar is None or pbar is False:
        return None
    if callable(getattr(pbar, "update", None)) and not isinstance(pbar, Mapping):
        return pbar  # type: ignore[no-any-return]  # whatever has update(n) is a Progress
    total = length * (2 if with_backward else 1)
    if pbar is True:
        return _Tqdm(total, 1, "steps")
    if isinstance(pbar, str):
        return _Tqdm(total, 1, pbar)
    try:
        return _Tqdm(total, whole_number(pbar, "pbar", least=1), "steps")
    except InputError:
        raise InputError(
            f"pbar={pbar!r}: give True, a whole number of steps, a label, or an object with update(n)"
        ) from None
