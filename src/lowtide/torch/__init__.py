"""Lowtide for PyTorch: loops whose backward fits the memory you have.

import lowtide.torch as lt
ys = lt.checkpointed_for_loop(net, xs, budget="64MiB")
"""

from lowtide.torch import measure, spiking
from lowtide.torch.batches import Batch, largest_batch
from lowtide.torch.checkpoint import checkpoint
from lowtide.torch.compare import Comparison, compare_gradients
from lowtide.torch.devices import A100, H100, RTX4090, Device
from lowtide.torch.inputs import Steps
from lowtide.torch.lean import Lean, lean, lean_frontier
from lowtide.torch.lean_graph import LeanPoint
from lowtide.torch.loops import (
    checkpointed_for_loop,
    checkpointed_scan,
    for_loop,
    plan_for_loop,
    plan_scan,
    scan,
)
from lowtide.torch.model import auto_checkpoint, plan_model
from lowtide.torch.model_apply import apply, unapply
from lowtide.torch.recording import Recording, is_recomputing, record
from lowtide.torch.sequential import Sequential, checkpoint_sequential, plan_sequential, sequential
from lowtide.torch.while_loop import checkpointed_while_loop

__all__ = [
    "A100",
    "H100",
    "RTX4090",
    "Batch",
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
