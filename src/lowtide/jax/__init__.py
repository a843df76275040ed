"""Lowtide for JAX: loops whose gradients fit the memory you have.

import lowtide.jax as lt
carry, ys = lt.checkpointed_scan(step, init, xs, budget="64MiB")
"""

from lowtide.errors import BudgetError, CheckpointError
from lowtide.interface.comparison import Comparison
from lowtide.jax import installed  # noqa: F401  (it comes first of all)
from lowtide.jax.compare import compare_gradients
from lowtide.jax.layers.checkpoint import checkpoint
from lowtide.jax.layers.sequential import checkpoint_sequential, plan_sequential, sequential
from lowtide.jax.loops.loops import checkpointed_for_loop, checkpointed_scan, for_loop, plan_for_loop, plan_scan, scan
from lowtide.jax.loops.while_loop import checkpointed_while_loop
from lowtide.jax.model.planning import apply, plan_model

__all__ = [
    "BudgetError",
    "CheckpointError",
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
__dir__ = sorted(__all__).copy  # what `dir` and tab completion show
