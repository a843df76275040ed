"""Checkpointed loops that run as plain ones: the other side of a comparison."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Thread(threading.local):
    plainly = False


_thread = _Thread()


def runs_plainly() -> bool:
    """Whether checkpointed loops are to run as plain ones."""
    return _thread.plainly


@contextmanager
def plainly(yes: bool = True) -> Iterator[None]:
    """Inside, checkpointed loops are traced as plain ones, if so: the other side of a comparison."""
    before = _thread.plainly
    _thread.plainly = yes
    try:
        yield
    finally:
        _thread.plainly = before
