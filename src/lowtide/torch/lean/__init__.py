"""The lean tape: drop from saved activations what is cheap to recompute from the rest.

In: a function and its arguments. Out: the same result with a smaller tape, and the frontier of possible tapes. `trace`
watches one call, `graph` turns it into a recipe, `tape` keeps and replays, `guards` decides which calls are alike.
Imports: the core, `memory`, `state` and `paper`.
"""

from lowtide.torch.lean.call import Lean, lean, lean_frontier

__all__ = ["Lean", "lean", "lean_frontier"]
__dir__ = sorted(__all__).copy  # what `dir` and tab completion show
