"""The memory-time frontier of a chain: what every budget between the least and "keep everything" costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lowtide.chain import Chain, Disk
from lowtide.checks import whole_number
from lowtide.plan import Plan
from lowtide.planners.choose import choose, least_budget


def frontier(
    chain: Chain, points: int = 16, disk: Disk | None = None, *, rooms: bool = False, also: Iterable[int] = ()
) -> Iterator[Plan]:
    """Plans for at most `points` budgets, spaced evenly in their logarithm, the smallest first, one by one.

    Budgets in `also` are among them if they lie between the least that works and the one that keeps everything.
    """
    whole_number(points, "points", least=2)
    low = least_budget(chain, disk, rooms=rooms)
    steps = chain.steps if chain.ways is None else (chain.ways.several,)  # what keeps everything keeps several
    high = max(low, chain.plain_tape + max(step.working_set_in(0) for step in steps))
    budgets = {min(max(round(low * (high / low) ** (k / (points - 1))), low), high) for k in range(points)}
    for budget in sorted(budgets | {budget for budget in also if low <= budget <= high}):
        yield choose(chain, budget, disk=disk, rooms=rooms)
