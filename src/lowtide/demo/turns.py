"""Measures a contest: gradients, bytes, then time, the contestants taking turns so that noise affects all alike."""

from __future__ import annotations

import math
from collections.abc import Callable

from lowtide.demo.contest import Contest, ResultRow
from lowtide.demo.equality import equality


def pieces(contest: Contest) -> int:
    """How often `measure` calls `say`: once for each piece of work."""
    return len(contest.contestants) * (3 + contest.repeats)


def measure(example: str, contest: Contest, say: Callable[[str], None]) -> list[ResultRow]:
    """A row for each contestant; `say` is called with a description before each piece of work."""
    ready, gradients, peaks = {}, {}, {}
    for tool, make in contest.contestants.items():
        say(f"{tool}: getting ready")
        ready[tool] = make()
        say(f"{tool}: gradients")
        gradients[tool] = ready[tool].run()
        say(f"{tool}: memory")
        peaks[tool] = ready[tool].peak()
    seconds = dict.fromkeys(ready, math.inf)
    for turn in range(1, contest.repeats + 1):
        for tool, contestant in ready.items():
            say(f"{tool}: time, turn {turn} of {contest.repeats}")
            began = contest.clock()
            contestant.run()
            seconds[tool] = min(seconds[tool], contest.clock() - began)
    plain = next(iter(ready))
    return [
        ResultRow(
            example,
            tool.name,
            peaks[tool],
            peaks[plain],
            seconds[tool],
            seconds[tool] / seconds[plain],
            "" if tool == plain else equality(gradients[tool], gradients[plain], exact=contest.exact),
            tool.kind,
        )
        for tool in ready
    ]
