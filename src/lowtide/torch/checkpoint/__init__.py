"""Checkpoint: one call of a function, recomputed for the backward.

In: a function and its arguments. Out: its results, on the graph that the plain call builds, without the saved
activations. Imports: the core, `memory` and `state`.
"""

from lowtide.torch.checkpoint.call import checkpoint

__all__ = ["checkpoint"]
__dir__ = sorted(__all__).copy  # what `dir` and tab completion show
