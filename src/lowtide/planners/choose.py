"""One option and a chain in, the cheapest plan out. Which planner makes it is decided here and nowhere else.

The option has four spellings: `budget` in bytes, `checkpoints` in snapshots, `base` in steps between snapshots, or
none, which means the least memory that runs no step more than one extra time. A budget that no plan fits is refused
here, with an error that names the least budget that works (`least_budget`).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from lowtide.chain import Chain, Disk, Ways
from lowtide.checks import one_knob, whole_number
from lowtide.errors import BudgetError, InputError
from lowtide.plan import Knob, Plan, Schedule, check_plan
from lowtide.planners import unequal
from lowtide.planners.equal import Uniform, one_sweep_memory, uniform_least, uniform_within
from lowtide.planners.revolve import (
    MORE_ROOM,
    Revolve,
    least_with_slots,
    plain_runs,
    rooms_least,
    rooms_of_one_sweep,
    rooms_within,
    slots_within,
    uneven_with_slots,
)
from lowtide.planners.sweep import Base, least_sweep
from lowtide.planners.tiers import two_tiers
from lowtide.sizes import check_budget, parse_budget


def choose(
    chain: Chain,
    budget: int | str | None = None,
    *,
    checkpoints: int | None = None,
    base: int | None = None,
    disk: Disk | None = None,
    rooms: bool = False,
) -> Plan:
    """The cheapest plan for `chain` within the given option.

    Args:
        chain: the steps and their costs.
        budget: bytes for snapshots, tape and working set ("64MiB", 67108864), or a share of all tapes ("25%").
        checkpoints: at most this many snapshots, the initial state included, and the tape of one step.
        base: a snapshot every `base` steps, and the tape of `base` steps.
        disk: a second tier for snapshots; needs `budget` and equal steps, which then keep their whole tape.
        rooms: snapshots and tape each have a buffer of fixed size (a room), as in a compiled program; needs equal
            steps.

    Raises:
        InputError: two options at once, or one whose value is not a valid number.
        BudgetError: no plan fits; the error names the least budget that works.
    """
    one_knob({"budget": budget, "checkpoints": checkpoints, "base": base})
    if disk is not None and (budget is None or not chain.is_equal):
        raise InputError("disk goes with budget= and a chain of equal steps; give both, or leave disk out")
    if rooms and (disk is not None or not chain.is_equal):
        raise InputError("rooms goes with a chain of equal steps and without disk; leave one of them out")
    if budget is not None and rooms:
        bytes_ = parse_budget(budget, chain.plain_tape)
        return Plan.make(chain, Knob("budget", bytes_), rooms_within(chain, bytes_), rooms=True)
    if budget is not None:
        return _within(chain, parse_budget(budget, chain.plain_tape), disk)
    if checkpoints is not None:
        slots = whole_number(checkpoints, "checkpoints", least=1)
        return Plan.make(chain, Knob("checkpoints", slots), _with_slots(chain, slots))
    if base is not None:
        every = whole_number(base, "base", least=1)
        return Plan.make(chain, Knob("base", every), Base(every))
    return _one_extra_run(chain, rooms=rooms)


def check_layer_knobs(budget: int | str | None, plan: Plan | None) -> None:
    """Refuse what a row of layers cannot be run with, before it is measured or traced."""
    one_knob({"budget": budget, "plan": plan})
    check_plan(plan, "plan_sequential")
    if budget is not None:
        check_budget(budget)


def _with_slots(chain: Chain, slots: int) -> Schedule:
    """The fastest schedule; for unequal steps that are too many for a table, the one with the fewest plain runs."""
    if chain.is_equal or len(chain) > unequal.MOST_TABLE_STEPS:
        return Revolve(slots)
    return unequal.with_slots(chain, slots)


def _one_extra_run(chain: Chain, *, rooms: bool) -> Plan:
    """The plan with the least memory that runs no step more than one extra time."""
    if not chain.is_equal:
        return Plan.make(chain, Knob("none"), least_sweep(chain))
    if rooms:
        return Plan.make(chain, Knob("none"), rooms_of_one_sweep(chain), rooms=True)
    step, length = chain[0], len(chain)
    memories = [one_sweep_memory(step.state, entry.tape, length) for entry in step.menu]
    plans = [Plan.make(chain, Knob("none"), Uniform(memory, option)) for option, memory in enumerate(memories)]
    return min(plans, key=lambda plan: (plan.bill.peak_memory, plan.bill.seconds))


def least_budget(chain: Chain, disk: Disk | None = None, *, rooms: bool = False) -> int:
    """The smallest `budget` for which `choose` finds a plan."""
    if rooms:
        return rooms_least(chain[0], len(chain))
    if chain.ways is not None and disk is None:
        several = least_budget(replace(chain.taped(chain.ways.several), ways=None))
        return max(chain.ways.floor, min(several, least_with_slots(chain.ways.single)))
    if not chain.is_equal:
        return unequal.least(chain)
    if disk is not None:
        return chain[0].working_set_in(0) + chain[0].tape
    least = uniform_least(chain[0], len(chain))
    return min(least, unequal.least(chain)) if _is_short_and_uneven(chain) else least


QUICK = 4  # forward runs per step, on average; more are seldom worth it
_MOST_QUICK_STEPS = 10**7  # the length of a loop that may have no end is larger
_MOST_TRIED_STEPS = 256  # for which plans are cheap enough to be made one after the other


def refused(chain: Chain, budget: int, least: int) -> BudgetError:
    """The error for a budget below the least that works, which may mean thousands of runs: it names a quick one too."""
    return BudgetError(budget, least, MORE_ROOM, quick=_quick_budget(chain, least))


def _quick_budget(chain: Chain, least: int) -> int | None:
    """About the smallest budget with which steps run at most `QUICK` times; None if `least` is one or none is known."""
    length = len(chain)
    if length > _MOST_QUICK_STEPS or not (chain.is_equal or unequal.is_exact(chain)):
        return None
    high = max(least, _roomy(chain))
    if _is_quick(chain, least) or not _is_quick(chain, high):
        return None
    low = least
    while length <= _MOST_TRIED_STEPS and high - low > max(1, high // 256):
        middle = (low + high) // 2
        low, high = (low, middle) if _is_quick(chain, middle) else (middle, high)
    return high


def _is_quick(chain: Chain, budget: int) -> bool:
    return budget >= least_budget(chain) and _within(chain, budget, None).runs_per_step <= QUICK


def _roomy(chain: Chain) -> int:
    """A budget with which steps run at most `QUICK` times."""
    if not chain.is_equal:
        return chain.plain_tape + max(step.working_set for step in chain.steps)
    step, length = chain[0] if chain.ways is None else chain.ways.single, len(chain)
    slots = 1 + bisect_left(
        range(1, length), True, key=lambda count: plain_runs(length, count) < QUICK * length - length
    )
    with_slots = least_with_slots(step) + (slots - 1) * step.state
    beside = max(chain[0].working_set_in(0), step.working_set_in(0))
    return min(with_slots, one_sweep_memory(step.state, step.tape, length) + step.state + beside)


def _within(chain: Chain, budget: int, disk: Disk | None) -> Plan:
    least = least_budget(chain, disk)
    if budget < least:
        raise refused(chain, budget, least)
    knob = Knob("budget", budget)
    if chain.ways is not None and disk is None:
        return _either_way(chain, chain.ways, knob, budget)
    if not chain.is_equal:
        return _fastest_unequal(chain, knob, budget)
    if disk is not None:
        return Plan.make(chain, knob, two_tiers(chain, budget - chain[0].working_set_in(0), disk))
    plans = [Plan.make(chain, knob, schedule) for schedule in uniform_within(chain, budget)]
    if _is_short_and_uneven(chain):
        plans.append(Plan.make(chain, knob, unequal.fastest(chain, budget)))
    return min(plans, key=lambda plan: plan.bill.seconds)


def _fastest_unequal(chain: Chain, knob: Knob, budget: int) -> Plan:
    """The fastest plan found for unequal steps; where they are too many for a table, slots may serve better."""
    plan = Plan.make(chain, knob, unequal.fastest(chain, budget))
    if len(chain) <= unequal.MOST_TABLE_STEPS:
        return plan
    other = Plan.make(chain, knob, uneven_with_slots(chain, budget))
    return min((plan, other), key=lambda plan: (plan.bill.peak_memory > budget, plan.bill.seconds))


def _either_way(chain: Chain, ways: Ways, knob: Knob, budget: int) -> Plan:
    """The plan with fewer runs: one that tapes several steps together, or one step at a time and more snapshots."""
    plans = []
    several = replace(chain.taped(ways.several), ways=None)
    if budget >= least_budget(several):
        plans.append(Plan.make(chain.taped(ways.several), knob, _within(several, budget, None).schedule))
    if budget >= least_with_slots(ways.single):
        plans.append(Plan.make(chain.taped(ways.single), knob, Revolve(slots_within(ways.single, budget))))
    return min(plans, key=lambda plan: plan.bill.plain_runs)


def _is_short_and_uneven(chain: Chain) -> bool:
    """Whether the planner for unequal steps may find a faster plan for a chain of equal ones.

    It can mix forms of tape along the chain. Where it is exact, it can also use the bytes of the cotangent, which does
    not exist before the first backward.
    """
    step = chain[0]
    if step.options:
        return len(chain) <= unequal.MOST_TABLE_STEPS
    return step.cotangent > 0 and len(chain) <= unequal.EXACT_STEPS
