"""Plans that keep their budget in the compiled program.

What XLA stores is estimated on paper (`xla/memory.py`), and a budget is a promise. So the gradient of what a plan makes
of the layers is compiled, which runs and allocates nothing, and where it takes more than the budget, or much less, the
plan is made again for steps whose bytes are scaled by what was found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from lowtide.chain import Chain, StepCost, Working
from lowtide.errors import BudgetError
from lowtide.jax.layers.nested import Nest, nest, of_layers, runner
from lowtide.jax.layers.trace import Layer
from lowtide.jax.xla.compiled import digest, memory_of, program_bytes
from lowtide.jax.xla.jaxprs import Leaves, is_float, replaced
from lowtide.plan import Knob, Plan
from lowtide.planners import unequal
from lowtide.planners.choose import choose
from lowtide.sizes import parse_budget

_MOST_COMPILED = 4  # plans that are compiled to come near the budget
_NEAR_ENOUGH = 0.9  # of the budget
# What is least on paper is not always least when compiled, so these multiples of it are compiled before giving up.
_MULTIPLES_OF_LEAST = (1.0, 1.15, 1.4)


def plan_within(layers: Sequence[Layer], chain: Chain, budget: int | str) -> Plan:
    """The plan with the fewest operations found whose compiled program keeps the budget; its bill says what it takes.

    Where layers cannot be compiled alone, because they talk to other devices or examples, the estimate has to do.

    Raises:
        BudgetError: none does; `.least` is the smallest that was compiled.
    """
    limit = parse_budget(budget, chain.plain_tape)
    if not _stand_alone(layers):
        return choose(chain, limit)
    programs = _Programs(layers, chain)
    best = _near(chain, limit, programs)
    if best is None:
        small = {schedule: programs.bytes(schedule) for schedule in _small(chain)}
        fits = [schedule for schedule, bytes_ in small.items() if bytes_ <= limit]
        if not fits:
            ways = "raise the budget, or make the layers smaller (a smaller batch, a layer cut in two)"
            raise BudgetError(limit, min(small.values()), ways)
        best = min(fits, key=lambda schedule: schedule.bill(chain).seconds)
    # The bill is that of the program, as far as it can be spread over the steps.
    share = programs.bytes(best) / best.bill(chain).peak_memory
    return Plan.make(_scaled(chain, share), Knob("budget", limit), best)


def _near(chain: Chain, limit: int, programs: _Programs) -> unequal.Hetero | None:
    """The fastest schedule seen that keeps the limit, on the way to one that nearly fills it."""
    best: unequal.Hetero | None = None
    scale = 1.0
    for _ in range(_MOST_COMPILED):
        scaled = _scaled(chain, scale)
        least = unequal.least(scaled)
        schedule = unequal.fastest(scaled, max(limit, least))
        if schedule == best:
            break
        taken, bill = programs.bytes(schedule, limit), schedule.bill(scaled)
        if taken > limit and least > limit:
            break
        if taken <= limit and (best is None or bill.seconds < best.bill(scaled).seconds):
            best = schedule
            if taken >= _NEAR_ENOUGH * limit or not bill.plain_runs:
                break
        scale *= taken / bill.peak_memory
    return best


def _small(chain: Chain) -> list[unequal.Hetero]:
    """The same schedules whatever the budget, so that the least of them works when it is asked for.

    Keeping every tape is among them: where gradients of weights are larger than tapes, they lend their room to these.
    """
    least = unequal.least(chain)
    small = [unequal.fastest(chain, int(least * share)) for share in _MULTIPLES_OF_LEAST]
    return [*small, unequal.Hetero((0,) * len(chain))]


def _scaled(chain: Chain, by: float) -> Chain:
    """The chain with all bytes multiplied."""
    steps = [_scaled_step(step, by) for step in chain.steps]
    return replace(chain, steps=tuple(steps))


def _scaled_step(step: StepCost, by: float) -> StepCost:
    working = Working(
        *(int(by * bytes_) for bytes_ in (step.working.advance, step.working.tape, step.working.backward))
    )
    state, tape, cotangent = (int(by * bytes_) for bytes_ in (step.state, step.tape, step.cotangent))
    return replace(step, state=max(state, 1), tape=max(tape, 1), cotangent=cotangent, working=working)


class _Programs:
    """The compiled gradients of layers, for one schedule or another."""

    def __init__(self, layers: Sequence[Layer], chain: Chain) -> None:
        self._layers, self._chain = layers, chain
        # The costs tell apart layers that differ in their rules of differentiation alone.
        self._signature = digest(
            jax.default_backend(), repr(chain), *(f"{layer.jaxpr} {layer.given}" for layer in layers)
        )

    def bytes(self, schedule: unequal.Hetero, limit: float = math.inf) -> int:
        """What the schedule takes; where that is above the limit, any number above it.

        Nobody knows whether the gradient of what the first layer starts from will be asked for, and either can take
        more: it has to be made, and as a result of the program it lends its room to others until then.
        """
        most = 0
        for of_x in (False, True):
            if most <= limit:
                key = self._signature, schedule, of_x
                most = max(most, program_bytes(key, partial(self._compiled, schedule, of_x)))
        return most

    def _compiled(self, schedule: unequal.Hetero, of_x: bool) -> int:
        items = nest(Plan.make(self._chain, Knob("none"), schedule))
        return compiled_bytes(self._layers, of_layers(items, self._chain), of_x=of_x)


def compiled_bytes(layers: Sequence[Layer], items: Nest, *, of_x: bool) -> int:
    """Bytes that XLA allocates, besides arguments and results, for the gradients of all floats that layers close over.

    Args:
        layers: one after the other.
        items: which ranges of them are run again.
        of_x: take also those of what the first one is called with.
    """
    consts = [var.aval for layer in layers for var in layer.jaxpr.constvars]
    avals = [*consts, *layers[0].given]
    moving = [k for k, aval in enumerate(avals) if is_float(aval) and (of_x or k < len(consts))]
    run = runner(layers, items)

    def loss(some: Leaves, leaves: Leaves) -> Any:
        every = replaced(leaves, moving, some)
        out = run(every[: len(consts)], every[len(consts) :])
        floats = [leaf for leaf in out if is_float(jax.typeof(leaf))]
        return sum((jnp.sum(jnp.square(leaf)).real for leaf in floats), jnp.zeros(()))

    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals]
    return int(memory_of(jax.jit(jax.grad(loss)).lower([types[k] for k in moving], types)).temp_size_in_bytes)


def _stand_alone(layers: Sequence[Layer]) -> bool:
    """Whether they can be compiled by themselves: on one device, and without talk to other examples of a `vmap`."""
    avals: list[Any] = [var.aval for layer in layers for var in (*layer.jaxpr.constvars, *layer.jaxpr.invars)]
    return all({*aval.sharding.mesh.axis_types} <= {AxisType.Auto} for aval in avals) and not any(
        type(effect).__name__ == "NamedAxisEffect" for layer in layers for effect in layer.jaxpr.effects
    )
