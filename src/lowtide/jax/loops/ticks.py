"""A progress bar that a compiled loop moves: once for the first run of each step."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from lowtide.interface.progress import Progress, bars


class Ticks:
    """Reports steps that have been run to a bar on the host.

    The bar is made when a run reports its first step, so a compiled loop that is run again gets a new one. The reports
    do not depend on data, so a loop under `vmap` reports each step once.
    """

    def __init__(self, pbar: Any, length: int) -> None:
        make = bars(pbar, length, with_backward=False)
        assert make is not None, "a loop without a bar has no ticks"
        self._make = make
        self._every = pbar if isinstance(pbar, int) and not isinstance(pbar, bool) else 1
        self._length = length
        self._left = 0
        self._bar: Progress | None = None

    def step(self, k: Any) -> None:
        """Report step k; the host is called as often as the user asked for."""
        # The last step reports the steps since the last report, so that the bar ends full.
        if self._every == 1:
            self.stretch(k, 1)
            return
        rest = self._length % self._every or self._every
        last, due = k == self._length - 1, (k + 1) % self._every == 0
        lax.cond(last, lambda: self.stretch(k, rest), lambda: None)
        lax.cond(due & ~last, lambda: self.stretch(k, self._every), lambda: None)

    def stretch(self, k: Any, steps: int) -> None:
        """Report several steps at once; k must differ between calls, or JAX would merge a loop's calls into one."""
        jax.debug.callback(self._move, k, steps)

    def _move(self, _: Any, steps: Any) -> None:
        if self._left <= 0 or self._bar is None:
            self._bar, self._left = self._make(), self._length
        self._left -= int(steps)
        self._bar.update(int(steps))
