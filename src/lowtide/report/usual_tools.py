"""What the usual tools would do with the same chain, on paper: points to compare a plan with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isqrt

from lowtide.chain import Chain
from lowtide.checks import keep_seconds, keep_whole
from lowtide.errors import InputError
from lowtide.forms import RERUN
from lowtide.plan import Knob, Plan, Schedule
from lowtide.planners.blocks import Blocks
from lowtide.planners.revolve import Revolve
from lowtide.planners.sweep import Base, Sweep

PEER_SNAPSHOTS = 10  # snapshots of the binomial schedule that is drawn


@dataclass(frozen=True, slots=True)
class Mark:
    """A point beside the frontier: peak memory in bytes, and time as a multiple of the plain run's.

    If no time is known, `is_timed` is False: the point is drawn at `time_factor`, but no time is written.
    """

    name: str
    peak: int
    time_factor: float
    note: str = ""
    is_timed: bool = True

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and isinstance(self.note, str)):
            raise InputError(f"a mark has a name and a note, each a str; got {self.name!r} and {self.note!r}")
        keep_whole(self, "peak", least=0, label="mark.peak")
        keep_seconds(self, "time_factor", label="mark.time_factor")


def peers(chain: Chain) -> tuple[Mark, ...]:
    """Points for a loop or layers: the plain run first, then what people do without a planner."""
    if chain.ways is not None:
        chain = chain.taped(chain.ways.several)
    marks: dict[tuple[int, float], Mark] = {}
    for mark in _choices(chain):
        marks.setdefault((mark.peak, mark.time_factor), mark)  # on short chains, several tools do the same
    return tuple(marks.values())


def block_peers(chain: Chain) -> tuple[Mark, ...]:
    """Points for a whole model: all blocks kept, and every block rerun that can be."""
    blocks = set(chain.blocks())
    forms = [[entry.form for entry in chain[k].menu] if k in blocks else [] for k in range(len(chain))]
    again = tuple(menu.index(RERUN) if RERUN in menu else 0 for menu in forms)
    yes = "torch.utils.checkpoint around each block: what gradient_checkpointing does"
    marks = [_mark(chain, "all kept", Blocks((0,) * len(chain)), "keeps every tape and runs nothing again")]
    return (*marks, _mark(chain, "every block rerun", Blocks(again), yes)) if any(again) else tuple(marks)


def _mark(chain: Chain, name: str, schedule: Schedule, note: str) -> Mark:
    plan = Plan.make(chain, Knob("none"), schedule)
    return Mark(name, plan.bill.peak_memory, plan.time_factor, note)


def _all_again(chain: Chain, name: str, schedule: Base | Sweep, last: int, note: str) -> Mark:
    """The mark of a tool that reruns even the last segment, of `last` steps, where a plan keeps its tape at once."""
    mark, whole = _mark(chain, name, schedule, note), chain.plain_seconds
    again = chain.forward_seconds(len(chain) - last, len(chain))
    return replace(mark, time_factor=mark.time_factor + (again / whole if whole else 0.0))


def _choices(chain: Chain) -> Iterator[Mark]:
    length = len(chain)
    root = max(1, isqrt(length))
    yield _mark(chain, "plain", Base(length), "keeps every tape and runs nothing again")
    if chain.is_equal:
        note = "torch.utils.checkpoint or jax.checkpoint around the step"
        yield _all_again(chain, "checkpoint on every step", Base(1), 1, note)
        last = length - root * ((length - 1) // root)
        note = "checkpointed segments of √T steps: nested scans"
        yield _all_again(chain, f"segments of {root:,} steps", Base(root), last, note)
        if length > PEER_SNAPSHOTS:
            note = "the binomial schedule of Revolve and its heirs"
            yield _mark(chain, f"{PEER_SNAPSHOTS} snapshots", Revolve(PEER_SNAPSHOTS), note)
        return
    note = "torch.utils.checkpoint around each layer"
    yield _all_again(chain, "checkpoint on every layer", Sweep((1,) * length), 1, note)
    counts = range(2, length, max(1, length // 50))  # about 50 different counts
    cuts = {segments: equal_count(length, segments) for segments in {*counts, root} if segments < length}
    note = "torch.utils.checkpoint.checkpoint_sequential"
    cut = {segments: _mark(chain, f"{segments} segments by count", cuts[segments], note) for segments in cuts}
    lowest = min(cut, key=lambda segments: cut[segments].peak, default=0)
    yield from (cut[segments] for segments in sorted({2, root, lowest} & cut.keys()))


def equal_count(layers: int, segments: int) -> Sweep:
    """Segments with equal numbers of layers, the rest in the last one, as torch's checkpoint_sequential cuts them."""
    size = layers // segments
    return Sweep((size,) * (segments - 1) + (layers - size * (segments - 1),))
