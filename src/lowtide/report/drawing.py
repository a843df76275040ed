"""What every drawing of a plan shares: its colours, its ticks, and the schedule as cells of time by steps.

The terminal, the notebook and the figures use it, so that a colour means the same in all of them. The colours can
be told apart by people with colour vision deficiency and, by their lightness, in grey print.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.actions import Tier
from lowtide.report.kinds import PlanKind
from lowtide.report.moments import MemoryPart
from lowtide.report.timeline import Raster, RunKind, Timeline


class Ink(NamedTuple):
    """The name and the colour of one thing that is drawn."""

    name: str
    colour: str


RUN_INKS = {
    RunKind.FORWARD: Ink("forward", "#2b7bba"),
    RunKind.FORWARD_TAPED: Ink("forward, taped", "#174a73"),
    RunKind.RERUN: Ink("rerun", "#e08214"),
    RunKind.RERUN_TAPED: Ink("rerun, taped", "#8f4f05"),
    RunKind.BACKWARD: Ink("backward", "#6a51a3"),
}
TIER_INKS = {Tier.MEMORY: Ink("snapshot in memory", "#1b9e77"), Tier.DISK: Ink("snapshot on disk", "#b15928")}
_PART_COLOURS = {
    MemoryPart.SNAPSHOTS: "#1b9e77",
    MemoryPart.TAPE: "#2b7bba",
    MemoryPart.COTANGENT: "#a0608f",
    MemoryPart.WORKING: "#f0b450",
    MemoryPart.PARAMETERS: "#525252",
    MemoryPart.OPTIMIZER: "#7b8fa1",
    MemoryPart.INPUTS: "#b8c4cf",
    MemoryPart.TAPES: "#2b7bba",
    MemoryPart.REST: "#f0b450",
}
PART_INKS = {part: Ink(part.value, colour) for part, colour in _PART_COLOURS.items()}
PARAMETERS = PART_INKS[MemoryPart.PARAMETERS]
GRADIENTS = Ink("gradients", "#969696")


def memory_inks(kind: PlanKind) -> tuple[Ink, ...]:
    """The inks of the parts that memory over time is stacked from, in the order of `kind.parts_of`."""
    return tuple(PART_INKS[part] for part in kind.memory_parts)


def size_ticks(top: int, most: int = 5) -> list[int]:
    """At most `most` round sizes above 0 and up to `top` bytes: multiples of a power of two, as sizes are written."""
    unit = 1
    while top // unit > most:
        unit *= 2
    return list(range(unit, top + 1, unit))


@dataclass(frozen=True, slots=True)
class Cells:
    """The schedule as columns of time by rows of steps; row r covers the steps [r*T//rows, (r+1)*T//rows).

    Attributes:
        share: [kind, column, row], the share of the column's time that runs of this kind take in this row.
        memory, disk: [column, row], the share of the row's states that is stored.
    """

    share: NDArray[np.float64]
    memory: NDArray[np.float64]
    disk: NDArray[np.float64]

    def image(self) -> NDArray[np.uint8]:
        """RGBA pixels, the last steps in the first line: runs in their colour, stored states as a tint behind them."""
        spent = self.share.sum(axis=0)
        fullest = np.maximum(spent.max(axis=1, keepdims=True), 1e-12)
        inks = np.array([_channels(RUN_INKS[kind].colour) for kind in RunKind])
        colour = np.tensordot(self.share, inks, axes=(0, 0)) / np.maximum(spent, 1e-12)[..., None]
        # A column whose time is spread over many rows has little in each. The place matters more than the amount, so
        # the square root makes small shares visible.
        cover = np.sqrt(spent / fullest)
        stored = self.memory + self.disk
        tint = self.memory[..., None] * _channels(TIER_INKS[Tier.MEMORY].colour)
        tint += self.disk[..., None] * _channels(TIER_INKS[Tier.DISK].colour)
        tint /= np.maximum(stored, 1e-12)[..., None]
        below = np.where(stored > 0, 0.25 + 0.45 * np.minimum(np.sqrt(stored), 1.0), 0.0) * (1 - cover)
        alpha = cover + below
        mixed = (colour * cover[..., None] + tint * below[..., None]) / np.maximum(alpha, 1e-12)[..., None]
        pixels = np.concatenate([mixed, 255 * alpha[..., None]], axis=-1)
        return np.ascontiguousarray(np.rint(pixels).astype(np.uint8).transpose(1, 0, 2)[::-1])


def cells(timeline: Timeline, length: int, columns: int, rows: int) -> Cells:
    """The schedule of a chain of `length` steps, in at most `columns` columns and `rows` rows."""
    rows = min(rows, length)
    if timeline.raster is not None:
        return _coarser(timeline.raster, columns, rows)
    share = np.zeros((len(RunKind), columns, rows))
    stored = {tier: np.zeros((columns, rows)) for tier in Tier}
    scale = columns / timeline.seconds

    def row_of(step: int) -> int:
        return ((step + 1) * rows - 1) // length

    for run in timeline.runs or ():
        first, last = run.start * scale, run.stop * scale
        for column in range(min(int(first), columns - 1), min(int(np.ceil(last)), columns)):
            share[run.kind, column, row_of(run.step)] += max(min(last, column + 1) - max(first, column), 0.0)
    states = np.bincount([row_of(step) for step in range(length)], minlength=rows)
    for life in timeline.stored or ():
        first, last = int(life.start * scale), int(np.ceil(life.stop * scale))
        row = row_of(life.step)
        stored[life.tier][first : max(last, first + 1), row] += 1 / states[row]
    return Cells(share, *(np.minimum(stored[tier], 1.0) for tier in (Tier.MEMORY, Tier.DISK)))


def _coarser(raster: Raster, columns: int, rows: int) -> Cells:
    """The raster with at most `columns` columns and `rows` rows."""
    columns, rows = min(columns, raster.columns), min(rows, raster.rows)
    lefts, widths = _spans(raster.columns, columns)
    bottoms, heights = _spans(raster.rows, rows)

    def summed(values: NDArray[np.uint8]) -> NDArray[np.float64]:
        wide = np.add.reduceat(values.astype(np.float64) / 255, lefts, axis=-2)
        return np.asarray(np.add.reduceat(wide, bottoms, axis=-1) / widths[:, None])

    return Cells(summed(raster.share), summed(raster.memory) / heights, summed(raster.disk) / heights)


def _spans(have: int, want: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The start and the length of each span, if `have` cells are divided into `want` spans."""
    edges = np.arange(want + 1) * have // want
    return edges[:-1], np.diff(edges)


def _channels(colour: str) -> NDArray[np.float64]:
    return np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)], dtype=float)
