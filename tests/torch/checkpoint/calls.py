"""Calls made plainly and with checkpoint, from the same seed, compared to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

import lowtide.torch as lt
from tests.torch.calls import Function, plainly, same


class Log:
    """Notes that outlive reruns: changes of lists and attributes are put back, those of a queue are not."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()

    def append(self, item: Any) -> None:
        self._queue.put(item)

    def items(self) -> list[Any]:
        found = [self._queue.get() for _ in range(self._queue.qsize())]
        for item in found:
            self._queue.put(item)
        return found


def both(run: Callable[[Function], Any]) -> None:
    """The run with the plain call in place of checkpoint, and with it, from the same seed: the same tensors."""
    torch.manual_seed(1)
    expected = run(plainly)
    torch.manual_seed(1)
    same(run(lt.checkpoint), expected)
