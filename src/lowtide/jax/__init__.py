"""Lowtide for JAX: loops whose gradients fit the memory you have.

import lowtide.jax as lt
carry, ys = lt.checkpointed_scan(step, init, xs, budget="64MiB")
"""

from lowtide.jax.loops import (
    checkpointed_for_loop,
    checkpointed_scan,
    for_loop,
    plan_for_loop,
    plan_scan,
    scan,
)

__all__ = [
    "checkpointed_for_loop",
    "checkpointed_scan",
    "for_loop",
    "plan_for_loop",
    "plan_scan",
    "scan",
]
