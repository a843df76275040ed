"""Plans that stay within their budget in the compiled program.

What XLA stores is only estimated (`xla/memory.py`), but a budget is a promise. So the gradient of the layers under a
plan is compiled, which runs and allocates nothing. If it takes more than the budget, or much less, the bytes of all
steps are scaled by compiled / estimated, and planned again.
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

_MOST_COMPILED = 4  # plans that are compiled in search of one that nearly fills the budget
_NEAR_ENOUGH = 0.9  # share of the budget that a plan has to fill for the search to end
# The schedule with the least estimate is not always the least when compiled, so schedules for these multiples of the
# least estimate are compiled before giving up.
_MULTIPLES_OF_LEAST = (1.0, 1.15, 1.4)


def plan_within(layers: Sequence[Layer], chain: Chain, budget: int | str) -> Plan:
    """Of the plans found whose compiled program is within the budget, the one with the fewest operations.

    Its bill has the bytes of the compiled program. Layers that communicate with other devices or examples cannot be
    compiled alone; for them the estimate is used.

    Raises:
        BudgetError: no plan is within the budget; `.least` is the smallest number of bytes that was compiled.
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
    # All bytes are scaled alike, so that the peak in the bill is the one of the compiled program, to within rounding.
    share = programs.bytes(best) / best.bill(chain).peak_memory
    return Plan.make(_scaled(chain, share), Knob("budget", limit), best)


def _near(chain: Chain, limit: int, programs: _Programs) -> unequal.Hetero | None:
    """The fastest schedule within the limit that is seen in the search for one that nearly fills it; else None."""
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
    """Small schedules that do not depend on the budget, so that the least of them works when it is asked for.

    Keeping every tape is one of them: where gradients of weights are larger than tapes, tapes use their memory until
    the gradients are computed.
    """
    least = unequal.least(chain)
    small = [unequal.fastest(chain, int(least * share)) for share in _MULTIPLES_OF_LEAST]
    return [*small, unequal.Hetero((0,) * len(chain))]


def _scaled(chain: Chain, by: float) -> Chain:
    """The chain with all bytes multiplied by a factor."""
    steps = [_scaled_step(step, by) for step in chain.steps]
    return replace(chain, steps=tuple(steps))


def _scaled_step(step: StepCost, by: float) -> StepCost:
    working = Working(
        *(int(by * bytes_) for bytes_ in (step.working.advance, step.working.tape, step.working.backward))
    )
    state, tape, cotangent = (int(by * bytes_) for bytes_ in (step.state, step.tape, step.cotangent))
    return replace(step, state=max(state, 1), tape=max(tape, 1), cotangent=cotangent, working=working)


class _Programs:
    """The bytes of the compiled gradients of layers, for any schedule."""

    def __init__(self, layers: Sequence[Layer], chain: Chain) -> None:
        self._layers, self._chain = layers, chain
        # The costs are in it because they distinguish layers that differ only in their rules of differentiation.
        self._signature = digest(
            jax.default_backend(), repr(chain), *(f"{layer.jaxpr} {layer.given}" for layer in layers)
        )

    def bytes(self, schedule: unequal.Hetero, limit: float = math.inf) -> int:
        """The bytes that the schedule takes; if they are above the limit, any number above it.

        It is not known whether the gradient of the first layer's input will be taken, and either program can be the
        larger: that gradient has to be computed, but as a result of the program its memory serves others until then.
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
    """The bytes of temporaries that XLA allocates for the gradients of all floats that layers close over.

    Args:
        layers: called one after another.
        items: the ranges of them that are run again.
        of_x: whether to take the gradient of the first layer's input, too.
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
    """Whether layers can be compiled alone: on one device, and without communication between examples of a `vmap`."""
    avals: list[Any] = [var.aval for layer in layers for var in (*layer.jaxpr.constvars, *layer.jaxpr.invars)]
    return all({*aval.sharding.mesh.axis_types} <= {AxisType.Auto} for aval in avals) and not any(
        type(effect).__name__ == "NamedAxisEffect" for layer in layers for effect in layer.jaxpr.effects
    )
