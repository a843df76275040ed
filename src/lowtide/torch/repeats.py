"""Whether reruns repeat: checksums of states and outputs, taken in first runs and compared in reruns."""

from __future__ import annotations

from typing import Any

import torch

from lowtide.errors import CheckpointError
from lowtide.torch.bits import checksum


class Repeats:
    """Checksums by the number of steps that led to a state.

    Taken where snapshots are; with `always`, after every step.
    """

    def __init__(self, always: bool, never: bool) -> None:
        self.always = always
        self._never = never
        self._sums: dict[int, list[int]] = {}

    def note(self, step: int, leaves: list[Any], *, first: bool) -> None:
        """Take the state after `step` steps and the last one's output; compare it unless this is the first run."""
        if self._never:
            return
        sums: list[int] = []
        known: dict[tuple[int, torch.Size], int] = {}  # an output that is part of the state is summed once
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                key = (leaf.data_ptr(), leaf.shape)
                if key not in known:
                    known[key] = checksum(leaf)
                sums.append(known[key])
        if first:
            self._sums[step] = sums
        elif self._sums.get(step, sums) != sums:
            raise CheckpointError(
                f"run again, step {step - 1:,} or one before it gave other values than at first: something it uses "
                "does not repeat. Draw random numbers with torch (or name the generator: generators=(g,)), keep state "
                "in the carry or in a module, and change nothing between forward and backward; check_rerun=True "
                "finds the first such step. If it picks other kernels without grad, pass advance_with_grad=True"
            )
