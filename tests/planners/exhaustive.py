"""Brute force over all schedules: the oracle for the planners. It shares no code with them.

A schedule is a walk over situations (current state, states stored in memory, states stored on disk, tapes kept, how
far the backward has come). Every move that the words of the design allow is tried, one step at a time, and
Dijkstra's algorithm finds the cheapest walk. States come from snapshots only, never from the inside of a tape, and
none is in flight while a step is pulled back: the working set of a backward has no room for one.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

NO_STATE = -1


@dataclass(frozen=True)
class Step:
    """Costs of one step; `tapes` holds (bytes, extra seconds, bytes beside it in its backward) for each form."""

    state: int
    tapes: tuple[tuple[int, float, int], ...]
    forward: float = 1.0
    advance_working: int = 0
    tape_working: int = 0
    cotangent: int = 0


@dataclass(frozen=True)
class Situation:
    current: int
    memory: int  # bit k: state k is stored in memory
    disk: int
    tapes: tuple[int, ...]  # for each step the form that is kept, or -1
    front: int  # the backward has come down to this state
    retired: int = 0  # persistent schedules only: bit k: state k was dropped and may not be stored again


def cheapest(
    steps: Sequence[Step],
    budget: int,
    *,
    write: float | None = None,
    read: float = 0.0,
    persistent: bool = False,
) -> float:
    """Least seconds of all runs, extra tape costs and disk traffic; infinite if no schedule keeps the budget.

    Backward seconds are the same for every schedule and not counted. With `persistent`, what is kept stays until its
    own step is taped (snapshots) or pulled back (tapes), and no step runs while the tape of a later one is kept.
    """
    length = len(steps)
    start = Situation(0, 0, 0, (-1,) * length, length)
    best = {start: 0.0}
    queue: list[tuple[float, int, Situation]] = [(0.0, 0, start)]
    pushed = 0
    while queue:
        cost, _, here = heapq.heappop(queue)
        if cost > best[here]:
            continue
        if here.front == 0:
            return cost
        for extra, there in _moves(steps, budget, here, write, read, persistent):
            total = cost + extra
            if total < best.get(there, float("inf")):
                best[there] = total
                pushed += 1
                heapq.heappush(queue, (total, pushed, there))
    return float("inf")


def _held(steps: Sequence[Step], here: Situation) -> int:
    snapshots = sum(step.state for k, step in enumerate(steps) if here.memory >> k & 1)
    return snapshots + sum(steps[k].tapes[form][0] for k, form in enumerate(here.tapes) if form >= 0)


def _moves(
    steps: Sequence[Step], budget: int, here: Situation, write: float | None, read: float, persistent: bool
) -> Iterator[tuple[float, Situation]]:
    length, k = len(steps), here.current
    held = _held(steps, here)
    cotangent = steps[here.front].cotangent if here.front < length else 0

    def situation(
        current: int = k,
        memory: int = here.memory,
        disk: int = here.disk,
        tapes: tuple[int, ...] = here.tapes,
        front: int = here.front,
        retired: int = here.retired,
    ) -> Situation:
        below = (1 << front) - 1  # nothing at or above the front is of use any more
        return Situation(current, memory & below, disk & below, tapes, front, retired & below)

    blocked = persistent and any(form >= 0 for form in here.tapes[max(k, 0) :])
    if k != NO_STATE and k < here.front and not blocked:
        step = steps[k]
        if held + step.advance_working + cotangent <= budget:
            yield step.forward, situation(current=k + 1)
        if here.tapes[k] < 0:
            # A persistent schedule gives up a step's snapshot exactly when it tapes the step.
            memory = here.memory & ~(1 << k) if persistent else here.memory
            freed = step.state if persistent and here.memory >> k & 1 else 0
            for form, (size, extra, _) in enumerate(step.tapes):
                if held - freed + size + step.tape_working + cotangent <= budget:
                    tapes = (*here.tapes[:k], form, *here.tapes[k + 1 :])
                    retired = here.retired | 1 << k if persistent else 0
                    yield step.forward + extra, situation(current=k + 1, memory=memory, tapes=tapes, retired=retired)
        storable = not here.memory >> k & 1 and not here.retired >> k & 1
        if storable and held + step.state <= budget:
            yield 0.0, situation(memory=here.memory | 1 << k)
        if write is not None and not here.disk >> k & 1:
            yield write, situation(disk=here.disk | 1 << k)
    for other in range(here.front):
        if here.memory >> other & 1:
            if other != k:
                yield 0.0, situation(current=other)
            if not persistent:
                yield 0.0, situation(memory=here.memory & ~(1 << other))
        if here.disk >> other & 1 and other != k:
            yield read, situation(current=other)
        if here.tapes[other] >= 0 and not persistent:
            yield 0.0, situation(tapes=(*here.tapes[:other], -1, *here.tapes[other + 1 :]))
    last = here.front - 1
    if here.tapes[last] >= 0 and held + steps[last].tapes[here.tapes[last]][2] <= budget:
        tapes = (*here.tapes[:last], -1, *here.tapes[last + 1 :])
        yield 0.0, situation(current=NO_STATE, tapes=tapes, front=last)
