"""Lowtide for PyTorch: activation checkpointing of functions, loops, layers and models, within a memory budget.

import lowtide.torch as lt
ys = lt.checkpointed_for_loop(net, xs, budget="64MiB")
"""

from lowtide.errors import BudgetError, CheckpointError
from lowtide.interface.comparison import Comparison
from lowtide.torch import installed, measure, spiking  # noqa: F401  (`installed` comes first of all)
from lowtide.torch.checkpoint.call import checkpoint
from lowtide.torch.compare import compare_gradients
from lowtide.torch.layers.sequential import Sequential, checkpoint_sequential, plan_sequential, sequential
from lowtide.torch.lean.call import Lean, lean, lean_frontier
from lowtide.torch.lean.graph import LeanPoint
from lowtide.torch.loops.inputs import Steps
from lowtide.torch.loops.loops import checkpointed_for_loop, checkpointed_scan, for_loop, plan_for_loop, plan_scan, scan
from lowtide.torch.loops.while_loop import checkpointed_while_loop
from lowtide.torch.memory.recording import Recording, is_recomputing, record
from lowtide.torch.model.apply import apply, unapply
from lowtide.torch.model.batches import Batch, largest_batch
from lowtide.torch.model.planning import auto_checkpoint, plan_model
from lowtide.torch.paper.devices import A100, H100, RTX4090, Device

__all__ = [
    "A100",
    "H100",
    "RTX4090",
    "Batch",
    "BudgetError",
    "CheckpointError",
    "Comparison",
    "Device",
    "Lean",
    "LeanPoint",
    "Recording",
    "Sequential",
    "Steps",
    "apply",
    "auto_checkpoint",
    "checkpoint",
    "checkpoint_sequential",
    "checkpointed_for_loop",
    "checkpointed_scan",
    "checkpointed_while_loop",
    "compare_gradients",
    "for_loop",
    "is_recomputing",
    "largest_batch",
    "lean",
    "lean_frontier",
    "measure",
    "plan_for_loop",
    "plan_model",
    "plan_scan",
    "plan_sequential",
    "record",
    "scan",
    "sequential",
    "spiking",
    "unapply",
]
__dir__ = sorted(__all__).copy  # what `dir` and tab completion show
