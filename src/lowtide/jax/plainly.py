"""Checkpointed loops that are traced as plain ones: the other side of a comparison."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

# Part of what JAX remembers traces by, so that a function that was jitted before is traced again.
_context = jax.make_user_context(False)


def runs_plainly() -> bool:
    """Whether checkpointed loops are to be traced as plain ones."""
    return bool(_context.value)


@contextmanager
def plainly(yes: bool) -> Iterator[None]:
    """Inside, checkpointed loops are traced as plain ones, if so."""
    with _context(yes):
        yield
