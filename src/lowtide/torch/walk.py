"""Walks the graphs of taped steps, to see that they reach nothing but what is captured and what they were given."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import Node

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
        self._every = 1 if always else self.EVERY
        self._turn = next(_calls) % self._every
        self.node_counts: set[int] = set()

    def due(self, k: int, last: int) -> bool:
        """Whether it is step k's turn; the last one's always is."""
        return k % self._every == self._turn or k < 2 or k == last

    def ends(self, engine: Engine, k: int, carry: Any, xs: list[torch.Tensor]) -> set[Node]:
        """Where the graph of step k, which is about to run from `carry`, may end."""
        given = xs[len(xs) - len(engine.inputs.differentiable) :]
        leaves = engine.stepper.leaves(k - 1, carry)
        return nodes_of([*leaves, *engine.hidden.leaves(), *given])

    def check(self, engine: Engine, k: int, carry: Any, outputs: list[Any], ends: set[Node], since: int) -> None:
        """Refuse step k, which ran, if its graph since `since` reaches anything but `ends` and what is captured."""
        roots = nodes_of([*engine.stepper.leaves(k, carry), *engine.hidden.leaves(), *outputs])
        for node in strangers(roots, ends | engine.captured.nodes, since):
            variable = getattr(node, "variable", None)
            what = "computed before the loop" if variable is None else f"of shape {tuple(variable.shape)}"
            raise CheckpointError(
                f"step {k:,} uses a tensor {what} ({node.name()}) that the first step did not touch, so its gradient "
                "would be lost; use it in the first step too, or name it: captures=(tensor,)"
            )


def nodes_of(leaves: list[Any]) -> set[Node]:
    """The nodes at which the leaves' gradients arrive."""
    return {edge_of(leaf).node for leaf in leaves if has_gradient(leaf)}
