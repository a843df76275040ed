"""What every drawing of a plan shares: its colours, its ticks, and the schedule as cells of time by steps.

The text, the notebook and the figures draw from here, so that a colour means the same in all of them. The colours are
told apart by people who see few, and by their lightness in grey print.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.actions import Tier
from lowtide.plan import Plan
from lowtide.report.kinds import ModelKind, kind_of
from lowtide.report.timeline import Kind, Moment, Raster, Timeline


class Ink(NamedTuple):
    """How one thing is called and coloured."""

    name: str
    colour: str


KINDS = {
    Kind.FORWARD: Ink("forward", "#2b7bba"),
    Kind.FORWARD_TAPED: Ink("forward, taped", "#174a73"),
    Kind.RERUN: Ink("rerun", "#e08214"),
    Kind.RERUN_TAPED: Ink("rerun, taped", "#8f4f05"),
    Kind.BACKWARD: Ink("backward", "#6a51a3"),
}
TIERS = {Tier.MEMORY: Ink("snapshot in memory", "#1b9e77"), Tier.DISK: Ink("snapshot on disk", "#b15928")}
PARTS = (
    Ink("snapshots", "#1b9e77"),
    Ink("tape", "#2b7bba"),
    Ink("cotangent", "#a0608f"),
    Ink("working", "#f0b450"),
)
PARAMETERS = Ink("parameters", "#525252")
GRADIENTS = Ink("gradients", "#969696")
MODEL_PARTS = (
    PARAMETERS,
    Ink("optimizer state", "#7b8fa1"),
    Ink("inputs and buffers", "#b8c4cf"),
    Ink("tapes", "#2b7bba"),
    Ink("the rest", "#f0b450"),
)


def parts_of(moment: Moment) -> tuple[int, int, int, int]:
    """Bytes of a moment in the order of `PARTS`."""
    return moment.snapshots, moment.tape, moment.cotangent, moment.working


def layers(plan: Plan) -> tuple[Ink, ...]:
    """What memory over time is stacked of, the lowest first: what the plan's budget counts, or a model's peak."""
    return MODEL_PARTS if isinstance(kind_of(plan), ModelKind) else PARTS


def layers_of(plan: Plan, moment: Moment) -> tuple[int, ...]:
    """Bytes of a moment in the order of `layers`."""
    kind = kind_of(plan)
    return _model_parts_of(kind, moment) if isinstance(kind, ModelKind) else parts_of(moment)


def _model_parts_of(kind: ModelKind, moment: Moment) -> tuple[int, ...]:
    """Bytes of a moment in the order of `MODEL_PARTS`."""
    chain, blocks = kind.chain, set(kind.chain.blocks())
    # Steps outside of blocks hold a byte or so, which is no tape to speak of.
    tapes = max(0, moment.tape - sum(chain[k].tape for k in range(len(chain)) if k not in blocks))
    # What is held all along is there while a step is taped too, which needs to say nothing of it.
    left = max(moment.total - tapes, min(kind.held_before, kind.plan.bill.peak_memory - tapes))
    found = []
    for _, size in kind.fixed:
        found.append(min(size, left))
        left -= found[-1]
    return *found, tapes, left


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
        share: [kind, column, row], the share of the column's time that goes there.
        memory, disk: [column, row], the share of the row's states that is stored.
    """

    share: NDArray[np.float64]
    memory: NDArray[np.float64]
    disk: NDArray[np.float64]

    def image(self) -> NDArray[np.uint8]:
        """RGBA, the last steps in the first line: runs in their colour, stored states as a tint below them."""
        spent = self.share.sum(axis=0)
        fullest = np.maximum(spent.max(axis=1, keepdims=True), 1e-12)
        inks = np.array([_channels(KINDS[kind].colour) for kind in Kind])
        colour = np.tensordot(self.share, inks, axes=(0, 0)) / np.maximum(spent, 1e-12)[..., None]
        # A column that spreads over many rows spends little in each: what counts is the place, so the root lifts it.
        cover = np.sqrt(spent / fullest)
        stored = self.memory + self.disk
        tint = self.memory[..., None] * _channels(TIERS[Tier.MEMORY].colour)
        tint += self.disk[..., None] * _channels(TIERS[Tier.DISK].colour)
        tint /= np.maximum(stored, 1e-12)[..., None]
        below = np.where(stored > 0, 0.25 + 0.45 * np.minimum(np.sqrt(stored), 1.0), 0.0) * (1 - cover)
        alpha = cover + below
        mixed = (colour * cover[..., None] + tint * below[..., None]) / np.maximum(alpha, 1e-12)[..., None]
        pixels = np.concatenate([mixed, 255 * alpha[..., None]], axis=-1)
        return np.ascontiguousarray(np.rint(pixels).astype(np.uint8).transpose(1, 0, 2)[::-1])


def cells(timeline: Timeline, length: int, columns: int, rows: int) -> Cells:
    """The schedule of a chain of `length` steps in at most so many columns and rows."""
    rows = min(rows, length)
    if timeline.raster is not None:
        return _coarser(timeline.raster, columns, rows)
    share = np.zeros((len(Kind), columns, rows))
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
    """A raster in fewer columns and rows, or in its own."""
    columns, rows = min(columns, raster.columns), min(rows, raster.rows)
    lefts, widths = _spans(raster.columns, columns)
    bottoms, heights = _spans(raster.rows, rows)

    def summed(values: NDArray[np.uint8]) -> NDArray[np.float64]:
        wide = np.add.reduceat(values.astype(np.float64) / 255, lefts, axis=-2)
        return np.asarray(np.add.reduceat(wide, bottoms, axis=-1) / widths[:, None])

    return Cells(summed(raster.share), summed(raster.memory) / heights, summed(raster.disk) / heights)


def _spans(have: int, want: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each of `want` spans of `have` things begins, and how many it has."""
    edges = np.arange(want + 1) * have // want
    return edges[:-1], np.diff(edges)


def _channels(colour: str) -> NDArray[np.float64]:
    return np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)], dtype=float)
