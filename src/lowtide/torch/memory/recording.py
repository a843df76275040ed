"""The measured cost of the runs inside a `with` block, and whether a step is being run again.

with lt.record() as receipt:
    loss = step()
    loss.backward()
print(receipt)
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from lowtide.plan import Receipt
from lowtide.torch.memory import tracker
from lowtide.torch.memory.tracker import Curve


class Recording:
    """A receipt that is still being written; it has the fields of `lowtide.Receipt`, and `receipt` is such a value."""

    def __init__(self) -> None:
        self.plain_runs = 0
        self.taping_runs = 0
        self.backward_runs = 0
        self.probe_runs = 0
        self.kept_whole = 0
        self._began = perf_counter()
        self._memory: tracker.Memory | None = None
        self._ended: Receipt | None = None

    @property
    def peak_memory(self) -> int:
        """The most bytes of tensors that were made inside and alive at once; 0 with `memory=False`."""
        return 0 if self._memory is None else self._memory.peak

    @property
    def held(self) -> int:
        """The part of `peak_memory` that no budget counts: outputs of loops, gradients, what is alive at the end."""
        if self._ended is not None:
            return self._ended.held
        return 0 if self._memory is None else self._memory.peak - self._memory.beyond(living=self._has_tapes)

    @property
    def curve(self) -> tuple[int, ...]:
        """The most bytes in each of at most 400 equal parts of the time, without `held`; empty with `memory=False`."""
        if self._ended is not None:
            return self._ended.curve
        return () if self._memory is None else self._memory.curve_beyond(living=self._has_tapes)

    @property
    def _has_tapes(self) -> bool:
        """Whether steps have been taped and not pulled back, so that not only results are alive."""
        return self.backward_runs < self.taping_runs or (self.backward_runs == 0 and self.plain_runs > 0)

    @property
    def seconds(self) -> float:
        """Wall-clock seconds, so far or until the block ended."""
        return perf_counter() - self._began if self._ended is None else self._ended.seconds

    @property
    def receipt(self) -> Receipt:
        """What has been recorded so far, as a frozen value."""
        return Receipt(
            plain_runs=self.plain_runs,
            taping_runs=self.taping_runs,
            backward_runs=self.backward_runs,
            probe_runs=self.probe_runs,
            kept_whole=self.kept_whole,
            peak_memory=self.peak_memory,
            seconds=self.seconds,
            held=self.held,
            curve=self.curve,
        )

    def _end(self) -> None:
        """Fix all fields as they are now, because tensors that outlive the block continue to be followed."""
        self._ended = self.receipt

    def _repr_html_(self) -> str:
        """The HTML that notebooks show."""
        return self.receipt._repr_html_()

    def to_json(self) -> str:
        """The receipt as JSON."""
        return self.receipt.to_json()

    def __str__(self) -> str:
        return str(self.receipt)


_open: list[Recording] = []  # of all threads, because a backward may run in another thread than its forward


def is_on() -> bool:
    """Whether anybody records."""
    return bool(_open)


@contextmanager
def record(*, memory: bool = True) -> Iterator[Recording]:
    """Record the cost of the loops inside: runs, peak bytes of tensors, seconds.

    Runs of all threads are counted, because a backward may run in another thread than its forward.

    Args:
        memory: follow every tensor that this thread makes inside. This slows operations down, so do not use it for
            timing.
    """
    recording = Recording()
    _open.append(recording)
    try:
        if memory:
            with tracker.peak(Curve()) as watched:
                recording._memory = watched
                yield recording
        else:
            yield recording
    finally:
        _open.remove(recording)
        recording._end()


def count(*, plain: int = 0, taping: int = 0, backward: int = 0, probe: int = 0, kept_whole: int = 0) -> None:
    """Add runs to every open recording."""
    for recording in _open:
        recording.plain_runs += plain
        recording.taping_runs += taping
        recording.backward_runs += backward
        recording.probe_runs += probe
        recording.kept_whole += kept_whole


def leave_out(tensors: Iterable[Any], *, from_now: bool = False) -> None:
    """Leave tensors that the plain run holds too, so that no budget counts them, out of every open recording."""
    for recording in _open:
        if recording._memory is not None:
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor):
                    recording._memory.leave_out(tensor, from_now=from_now)


class _RecordingThread(threading.local):
    recomputing = False
    plainly = False

    def __init__(self) -> None:
        self.running: list[tuple[Any, bool]] = []  # checkpoint calls, outermost first; True for a rerun


this_thread = _RecordingThread()


def is_recomputing() -> bool:
    """Whether the calling step is being run again for the backward. Use it to log or count only first runs."""
    return this_thread.recomputing


class recomputing:  # noqa: N801  (used like a function)
    """A context in which `is_recomputing()` is True."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = this_thread.recomputing
        this_thread.recomputing = True

    def __exit__(self, *_: object) -> None:
        this_thread.recomputing = self._before


def remember(decision: Any) -> None:
    """Remember, for reruns, what was decided in the first run of the innermost checkpoint call, if one is running."""
    if this_thread.running:
        call, is_rerun = this_thread.running[-1]
        if not is_rerun:
            call.decisions = [*(call.decisions or ()), decision]


def remembered() -> Any:
    """In a rerun, what was remembered next in the first run; None elsewhere, and if there is no more.

    For what depends on calls made before, such as which tape a lean call keeps: a rerun has to go the same way.
    """
    if not this_thread.running or not this_thread.running[-1][1]:
        return None
    call = this_thread.running[-1][0]
    call.reached += 1
    return call.decisions[call.reached - 1] if call.decisions and call.reached <= len(call.decisions) else None


def runs_plainly() -> bool:
    """Whether checkpointed loops are to run as plain loops."""
    return this_thread.plainly


@contextmanager
def plainly(yes: bool = True) -> Iterator[None]:
    """A context in which checkpointed loops run as plain loops (unless `yes` is False), to compare them with."""
    before = this_thread.plainly
    this_thread.plainly = yes
    try:
        yield
    finally:
        this_thread.plainly = before
