"""One knob and a chain in, the cheapest plan out. Which planner that takes is decided here and nowhere else.

The knob has four spellings: `budget` in bytes, `checkpoints` in snapshots, `base` in steps between snapshots,
or none, which asks for the least memory that runs no step more than one extra time.
"""

from __future__ import annotations

from lowtide.chain import Chain, Disk
from lowtide.checks import whole_number
from lowtide.errors import BudgetError, InputError
from lowtide.plan import Knob, Plan
from lowtide.planners import hetero
from lowtide.planners.revolve import Revolve
from lowtide.planners.sweep import Base, least_sweep
from lowtide.planners.tiers import two_tiers
from lowtide.planners.uniform import Uniform, least_memory, one_sweep_memory, working_set
from lowtide.sizes import parse_budget


def choose(
    chain: Chain,
    budget: int | str | None = None,
    *,
    checkpoints: int | None = None,
    base: int | None = None,
    disk: Disk | None = None,
) -> Plan:
    """The cheapest plan for `chain` that keeps the knob.

    Args:
        chain: what the steps cost.
        budget: bytes for snapshots, tape and working set ("64MiB", 67108864), or a share of all tapes ("25%").
        checkpoints: at most so many snapshots, the initial state among them, and one step of tape.
        base: a snapshot every so many steps, and so many steps of tape.
        disk: a second tier for snapshots; goes with `budget` and equal steps.

    Raises:
        InputError: two knobs at once, or one that is not a number of its kind.
        BudgetError: no plan fits; it names the least budget that works.
    """
    given = {"budget": budget, "checkpoints": checkpoints, "base": base}
    turned = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    if len(turned) > 1:
        raise InputError(f"{' and '.join(turned)} are two knobs; give one of budget, checkpoints and base, or none")
    if disk is not None and (budget is None or not chain.is_equal):
        raise InputError("disk goes with budget= and a chain of equal steps; give both, or leave disk out")
    if budget is not None:
        return _within(chain, parse_budget(budget, chain.plain_tape), disk)
    if checkpoints is not None:
        slots = whole_number(checkpoints, "checkpoints", least=1)
        schedule = Revolve(slots) if chain.is_equal else hetero.with_slots(chain, slots)
        return Plan.make(chain, Knob("checkpoints", slots), schedule)
    if base is not None:
        every = whole_number(base, "base", least=1)
        return Plan.make(chain, Knob("base", every), Base(every))
    if not chain.is_equal:
        return Plan.make(chain, Knob("none"), least_sweep(chain))
    step = chain[0]
    return Plan.make(chain, Knob("none"), Uniform(one_sweep_memory(step.state, step.tape, len(chain))))


def least_budget(chain: Chain, disk: Disk | None = None) -> int:
    """The smallest `budget` for which `choose` finds a plan."""
    if not chain.is_equal:
        return hetero.least(chain)
    step = chain[0]
    smallest = min(option.tape for option in step.menu)
    return working_set(step) + (least_memory(step.state, smallest, len(chain)) if disk is None else smallest)


def _within(chain: Chain, budget: int, disk: Disk | None) -> Plan:
    least = least_budget(chain, disk)
    if budget < least:
        ways = "raise the budget, or make the steps smaller (a smaller batch, a cheaper step)"
        raise BudgetError(budget, least, ways)
    knob = Knob("budget", budget)
    if not chain.is_equal:
        return Plan.make(chain, knob, hetero.fastest(chain, budget))
    step, length = chain[0], len(chain)
    memory = budget - working_set(step)
    if disk is not None:
        return Plan.make(chain, knob, two_tiers(chain, memory, disk))
    plans = [
        Plan.make(chain, knob, Uniform(memory, option))
        for option, entry in enumerate(step.menu)
        if memory >= least_memory(step.state, entry.tape, length)
    ]
    return min(plans, key=lambda plan: plan.bill.seconds)
