"""Lowtide for JAX: loops whose gradients fit the memory you have.

import lowtide.jax as lt
carry, ys = lt.checkpointed_scan(step, init, xs, budget="64MiB")
"""

from lowtide.jax.checkpoint import checkpoint
from lowtide.jax.compare import Comparison, compare_gradients
from lowtide.jax.loops import (
    checkpointed_for_loop,
    checkpointed_scan,
    for_loop,
    plan_for_loop,
    plan_scan,
    scan,
)
from lowtide.jax.model import apply, plan_model
from lowtide.jax.sequential import checkpoint_sequential, plan_sequential, sequential
from lowtide.jax.while_loop import checkpointed_while_loop

__all__ = [
    "Comparison",
    "apply",
    "checkpoint",
    "checkpoint_sequential",
    "checkpointed_for_loop",
    "checkpointed_scan",
    "checkpointed_while_loop",
    "compare_gradients",
    "for_loop",
    "plan_for_loop",
    "plan_model",
    "plan_scan",
    "plan_sequential",
    "scan",
    "sequential",
]
