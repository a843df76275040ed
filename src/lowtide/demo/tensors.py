"""Contestants in PyTorch: peak memory beyond what every way of running holds.

Inputs and parameters are not counted, which exist before, nor are the output and the resulting gradients, which stay.
Time is CPU seconds on one thread: the tensors are so small that more threads only wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

import lowtide.torch as lt
from lowtide.demo.contest import Contestant
from lowtide.plan import Receipt

NOTE = "Peak: most bytes of tensors beyond parameters, inputs, output and gradients. Time: CPU, one thread."
Work = Callable[[], tuple[torch.Tensor, Sequence[torch.Tensor]]]  # the output and the gradients


def peak_of(work: Work) -> int:
    """The most bytes beyond the results in one forward and backward."""
    with lt.measure.peak() as memory:
        results = work()
        beyond = memory.beyond()
    del results  # alive until here, so that they are not counted
    return beyond


def contestant(work: Work) -> Contestant:
    """The contestant that does this work."""
    return Contestant(lambda: work()[1], lambda: peak_of(work))


def receipt_of(work: Work) -> Receipt:
    """The receipt of one forward and backward."""
    with lt.record() as recording:
        results = work()
    del results  # alive until here, so that the receipt counts them as held
    return recording.receipt


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch computes on one thread, with random numbers from a fixed seed."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
