"""Walks the graphs of taped steps, to see that they reach nothing but what is captured and what they were given."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge

from lowtide.errors import CheckpointError
from lowtide.torch.capture import edge_of, strangers
from lowtide.torch.pieces import has_gradient

if TYPE_CHECKING:
    from lowtide.torch.engine import Engine

_calls = count()


class Walk:
    """The walks of one loop.

    A walk takes about as long as a small step, so it is done where a step made another number of nodes than those seen
    so far, and else at one step in `EVERY`, others at each call of a loop; with `always`, at every step.
    """

    EVERY = 64

    def __init__(self, always: bool) -> None:
        self._turn = next(_calls)
        self._every = 1 if always else self.EVERY
        self.node_counts: set[int] = set()

    def always(self) -> None:
        """Walk every step from here on."""
        self._every = 1

    def due(self, k: int, last: int) -> bool:
        """Whether it is step k's turn; the last one's always is."""
        return (k + self._turn) % self._every == 0 or k < 2 or k == last

    def ends(self, engine: Engine, k: int, carry: Any, xs: list[torch.Tensor]) -> set[GradientEdge]:
        """Where the graph of step k, which is about to run from `carry`, may end."""
        given = xs[len(xs) - len(engine.inputs.differentiable) :]
        leaves = engine.stepper.leaves(k - 1, carry)
        return edge_set([*leaves, *engine.hidden.leaves(), *given])

    def check(
        self, engine: Engine, k: int, carry: Any, outputs: list[Any], ends: set[GradientEdge], since: int
    ) -> None:
        """Refuse step k, which ran, if its graph since `since` reaches anything but `ends` and what is captured."""
        roots = edge_set([*engine.stepper.leaves(k, carry), *engine.hidden.leaves(), *outputs])
        for edge in strangers(roots, ends.union(engine.captured.edges), since):
            node = edge.node
            variable = getattr(node, "variable", None)
            what = "computed before the loop" if variable is None else f"of shape {tuple(variable.shape)}"
            raise CheckpointError(
                f"step {k:,} uses a tensor {what} ({node.name()}) that the first step did not touch, so its gradient "
                "would be lost; use it in the first step too, or name it: captures=(tensor,)"
            )


def edge_set(leaves: list[Any]) -> set[GradientEdge]:
    """Where the leaves' gradients arrive."""
    return {edge_of(leaf) for leaf in leaves if has_gradient(leaf)}
