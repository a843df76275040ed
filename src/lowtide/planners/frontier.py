"""The memory-time frontier of a chain: plans for budgets between the least and the one that keeps everything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lowtide.chain import Chain, Disk
from lowtide.checks import whole_number
from lowtide.plan import Plan
from lowtide.planners.choose import choose, least_budget


def frontier(
    chain: Chain, points: int = 16, disk: Disk | None = None, *, rooms: bool = False, also: Iterable[int] = ()
) -> Iterator[Plan]:
    """Plans for at most `points` budgets, evenly spaced on a logarithmic scale, made one by one from the smallest on.

    Budgets in `also` are added if they lie between the least that works and the one that keeps everything.
    """
    whole_number(points, "points", least=2)
    low = least_budget(chain, disk, rooms=rooms)
    # Keeping everything means taping all steps together, so the cost of a step among several counts.
    steps = chain.steps if chain.ways is None else (chain.ways.several,)
    high = max(low, chain.plain_tape + max(step.working_set_in(0) for step in steps))
    budgets = {min(max(round(low * (high / low) ** (k / (points - 1))), low), high) for k in range(points)}
    for budget in sorted(budgets | {budget for budget in also if low <= budget <= high}):
        yield choose(chain, budget, disk=disk, rooms=rooms)
