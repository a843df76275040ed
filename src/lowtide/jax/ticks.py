"""A progress bar that a compiled loop moves: once for each step that is run for the first time."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from lowtide.progress import Progress, bars


class Ticks:
    """Tells a bar on the host how many steps have been run.

    The bar is made when the first step of a run is told of, and a compiled loop that is run again gets a new one. What
    is told does not depend on data, so a loop that is mapped with `vmap` still tells it once.
    """

    def __init__(self, pbar: Any, length: int) -> None:
        self._make = bars(pbar, length, with_backward=False)
        self._every = pbar if isinstance(pbar, int) and not isinstance(pbar, bool) else 1
        self._length = length
        self._left = 0
        self._bar: Progress | None = None

    @property
    def off(self) -> bool:
        """Whether there is no bar to tell."""
        return self._make is None

    def step(self, k: Any) -> None:
        """Step k has been run; told every so many steps as the user asked for."""
        if self._make is None:
            return
        if self._every == 1:
            self.stretch(k, 1)
            return
        rest = self._length % self._every or self._every
        last, due = k == self._length - 1, (k + 1) % self._every == 0
        lax.cond(last, lambda: self.stretch(k, rest), lambda: None)
        lax.cond(due & ~last, lambda: self.stretch(k, self._every), lambda: None)

    def stretch(self, k: Any, steps: int) -> None:
        """So many steps have been run; k changes from call to call, or JAX would take the calls of a loop for one."""
        if self._make is not None:
            jax.debug.callback(self._move, k, steps)

    def _move(self, _: Any, steps: Any) -> None:
        if self._left <= 0 and self._make is not None:
            self._bar, self._left = self._make(), self._length
        self._left -= int(steps)
        if self._bar is not None:
            self._bar.update(int(steps))
