"""How long planning takes, and what the plans cost, beside checkpoint-schedules and pyrevolve.

    python benchmarks/planners.py [--quick]

Times are process CPU seconds, best of a few, all in one process; ratios are what counts.
"""

from __future__ import annotations

import argparse
import random
import tracemalloc
import warnings
from collections.abc import Callable
from functools import partial
from time import process_time
from typing import Any

from ratios import Ratio, command, heading

from lowtide.chain import Chain, StepCost, Working
from lowtide.plan import Knob, Plan
from lowtide.planners import unequal
from lowtide.planners.choose import choose
from lowtide.planners.equal import solver
from lowtide.planners.online import Online
from lowtide.planners.revolve import Revolve, plain_runs
from lowtide.planners.unequal import fronts
from lowtide.simulate import simulate


def timed(work: Callable[[], Any], repeats: int = 1) -> tuple[float, Any]:
    """Least CPU seconds of a few runs, and the last result."""
    best, result = float("inf"), None
    for _ in range(repeats):
        began = process_time()
        result = work()
        best = min(best, process_time() - began)
    return best, result


def long_rollouts(length: int) -> list[Ratio]:
    heading(f"{length:,} equal steps: plan, bound, actions")
    ratios = []
    for memory, state, tape in [
        (60, 1, 5),
        (1000, 1, 10),
        (50, 1, 1),
        (64 * 2**20, 2**16, 320 * 2**10),
        (160 * 2**20, 2**12, 2**22),
    ]:
        chain = Chain.equal(StepCost(state, tape), length)
        solver.cache_clear()
        seconds, plan = timed(partial(choose, chain, memory))
        played, bill = timed(partial(simulate, plan))
        assert bill == plan.bill
        plain = plan.bill.plain_runs
        print(
            f"M={memory:<9,} a={state:<6,} w={tape:<7,}: {plain:>9,} plain runs ({plain / length:.3f} per step), "
            f"{plain - plan.bound.runs} above the bound; "
            f"planned in {seconds:.2f} s, played in {played:.1f} s"
        )
        what = f"runs of the proven least, M={memory:,} a={state:,} w={tape:,}"
        ratios.append(Ratio(what, (plain + length) / (plan.bound.runs + length)))
    revolve = Plan.make(Chain.equal(StepCost(1, 1), length), Knob("checkpoints", 20), Revolve(20))
    played, bill = timed(partial(simulate, revolve))
    assert bill == revolve.bill
    print(f"checkpoints=20: {bill.plain_runs:,} plain runs; played in {played:.1f} s")
    plan = choose(Chain.equal(StepCost(1, 1), length), 50)
    tracemalloc.start()
    solver.cache_clear()
    for _ in plan.actions():
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"memory while making all actions of M=50, a=w=1: {peak / 2**20:.1f} MiB at most")
    return ratios


def network(length: int, seed: int = 0) -> Chain:
    rng = random.Random(seed)
    states = [rng.randint(1_000, 100_000) for _ in range(length)]
    return Chain.of(
        StepCost(a, a + rng.randint(1_000, 500_000), rng.random(), 2 * rng.random(), a, Working(a, a, 2 * a))
        for a in states
    )


def unequal_chains(lengths: list[int]) -> None:
    heading(f"Unequal steps: exact up to {unequal.EXACT_STEPS}, then {unequal.BUDGET_LEVELS} memory levels")
    for length in lengths:
        chain = network(length)
        least = unequal.least(chain)
        fronts.cache_clear()  # so that the first budget of a short chain pays for all of them
        for share in (0.02, 0.1, 0.4):
            budget = least + int(share * (chain.plain_tape - least))
            seconds, plan = timed(partial(choose, chain, budget))
            print(
                f"{length:>3} steps, {budget / chain.plain_tape:5.1%} of plain: {plan.time_factor:.3f}x the time, "
                f"{plan.bill.peak_memory / budget:.1%} of the budget used; planned in {seconds:.2f} s"
            )


def online_lengths() -> list[Ratio]:
    heading("Unknown length against known length, plain runs")
    found = []
    for slots in (5, 10, 20, 50):
        ratios = {}
        for length in (20, 100, 500, 1000, 5000):
            runs = Online(slots).bill(Chain.equal(StepCost(1, 1), length)).plain_runs
            ratios[length] = runs / plain_runs(length, slots)
        print(f"{slots:>2} slots: {', '.join(f'{length}: {ratio:.3f}x' for length, ratio in ratios.items())}")
        found.append(Ratio(f"plain runs of unknown length by known, {slots} slots, at worst", max(ratios.values())))
    return found


def peer_runs(peer: Any, make: Callable[[int, int], Any], length: int, slots: int) -> int:
    """Forward runs of one of checkpoint-schedules' schedules."""
    runs = 0
    for action in make(length, slots):
        if isinstance(action, peer.Forward):
            runs += action.n1 - action.n0
        if isinstance(action, peer.EndReverse):
            break
    return runs


def ours(length: int, slots: int, *, mixed: bool) -> tuple[float, int]:
    """CPU seconds and plain runs of planning and making every action."""
    chain = Chain.equal(StepCost(1, 1), length)

    def work() -> int:
        solver.cache_clear()
        plan = choose(chain, slots + 1) if mixed else choose(chain, checkpoints=slots)
        for _ in plan.actions():
            pass
        return plan.bill.plain_runs

    return timed(work, repeats=3)


def checkpoint_schedules(quick: bool) -> list[Ratio]:
    heading("Beside checkpoint-schedules: planning and making every action")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import checkpoint_schedules as peer
    except ImportError:
        why = "not installed here: pip install checkpoint-schedules"
        print(why)
        return [Ratio("time of checkpoint-schedules'", None, why=why)]
    cases: list[tuple[str, int, int, bool, Callable[[int, int], Any]]] = [
        ("Multistage", 10_000, 10, False, lambda n, s: peer.MultistageCheckpointSchedule(n, s, 0)),
        ("Revolve", 300, 20, False, peer.Revolve),
        ("Revolve", 1000, 50, False, peer.Revolve),
        ("Mixed", 1000, 10, True, peer.MixedCheckpointSchedule),
        ("Mixed", 1000, 50, True, peer.MixedCheckpointSchedule),
    ]
    ratios = []
    for name, length, slots, mixed, make in cases[1:2] if quick else cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs, runs = timed(partial(peer_runs, peer, make, length, slots))
        seconds, plain = ours(length, slots, mixed=mixed)
        print(
            f"{name} n={length:,} s={slots}: theirs {runs - length:,} plain runs in {theirs:.3f} s, "
            f"ours {plain:,} in {seconds:.3f} s: {theirs / seconds:,.1f}x faster"
        )
        what = f"time of checkpoint-schedules', {name} n={length:,} s={slots}"
        ratios.append(Ratio(what, seconds / theirs))
    return ratios


def pyrevolve(quick: bool) -> list[Ratio]:
    heading("Beside pyrevolve (C++): planning and making every action")
    try:
        from pyrevolve.schedulers import Action, CRevolve
    except ImportError:
        why = "not installed here: `make bench` installs it where there is a C++ compiler"
        print(why)
        return [Ratio("time of pyrevolve's", None, why=why)]

    def work(length: int, slots: int) -> int:
        operations = CRevolve(slots, length).oplist
        return sum(action.capo - action.old_capo for action in operations if action.type == Action.ADVANCE)

    ratios = []
    for length, slots in [(1000, 10)] if quick else [(1000, 10), (10_000, 10), (100_000, 20)]:
        theirs, runs = timed(partial(work, length, slots), repeats=3)
        seconds, plain = ours(length, slots, mixed=False)
        print(
            f"n={length:,} s={slots}: theirs {runs:,} plain runs in {theirs:.3f} s, "
            f"ours {plain:,} in {seconds:.3f} s: {seconds / theirs:.2f}x their time"
        )
        ratios.append(Ratio(f"time of pyrevolve's, n={length:,} s={slots}", seconds / theirs))
    return ratios


def main(arguments: list[str]) -> list[Ratio]:
    parser = argparse.ArgumentParser(description="How long planning takes, and what the plans cost.")
    parser.add_argument("--quick", action="store_true", help="20,000 steps, short chains, one case of each peer")
    quick = parser.parse_args(arguments).quick
    ratios = long_rollouts(20_000 if quick else 10**6)
    unequal_chains([20] if quick else [20, 48, 100, 200])
    return [*ratios, *online_lengths(), *checkpoint_schedules(quick), *pyrevolve(quick)]


if __name__ == "__main__":
    command(main)
