"""What the usual tools would do with the same chain, on paper: points to compare a plan with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt

from lowtide.chain import Chain
from lowtide.plan import Knob, Plan, Schedule
from lowtide.planners.revolve import Revolve
from lowtide.planners.sweep import Base, Sweep

SNAPSHOTS = 10  # of the binomial schedule that is drawn


@dataclass(frozen=True, slots=True)
class Mark:
    """A point beside the frontier: bytes at the worst moment, and time as a multiple of the plain run's."""

    name: str
    peak: int
    time_factor: float
    note: str = ""


def peers(chain: Chain) -> tuple[Mark, ...]:
    """The plain run first, then what people do without a planner."""
    if chain.ways is not None:
        chain = chain.taped(chain.ways.several)
    marks: dict[tuple[int, float], Mark] = {}
    for name, schedule, note in _choices(chain):
        cost = _cost(chain, schedule)
        marks.setdefault(cost, Mark(name, *cost, note))  # on short chains several come to the same
    return tuple(marks.values())


def _cost(chain: Chain, schedule: Schedule) -> tuple[int, float]:
    plan = Plan.make(chain, Knob("none"), schedule)
    return plan.bill.peak_memory, plan.time_factor


def _choices(chain: Chain) -> Iterator[tuple[str, Schedule, str]]:
    length = len(chain)
    root = max(1, isqrt(length))
    yield "plain", Base(length), "keeps every tape and runs nothing again"
    if chain.is_equal:
        yield "checkpoint on every step", Base(1), "torch.utils.checkpoint or jax.checkpoint around the step"
        yield f"segments of {root:,} steps", Base(root), "checkpointed segments of √T steps: nested scans"
        if length > SNAPSHOTS:
            yield f"{SNAPSHOTS} snapshots", Revolve(SNAPSHOTS), "the binomial schedule of Revolve and its heirs"
        return
    yield "checkpoint on every layer", Sweep((1,) * length), "torch.utils.checkpoint around each layer"
    counts = range(2, length, max(1, length // 50))  # of very many, some
    cuts = {segments: equal_count(length, segments) for segments in {*counts, root} if segments < length}
    lowest = min(cuts, key=lambda segments: _cost(chain, cuts[segments])[0], default=0)
    for segments in sorted({2, root, lowest} & cuts.keys()):
        yield f"{segments} segments by count", cuts[segments], "torch.utils.checkpoint.checkpoint_sequential"


def equal_count(layers: int, segments: int) -> Sweep:
    """Segments cut by number of layers, the last taking what is left over, as checkpoint_sequential cuts them."""
    size = layers // segments
    return Sweep((size,) * (segments - 1) + (layers - size * (segments - 1),))
