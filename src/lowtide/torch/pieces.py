"""What the engine holds: snapshots of states, pieces of tape, and what is known of every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch.autograd.graph import GradientEdge

from lowtide.torch.ambient import Mark
from lowtide.torch.capture import edge_of
from lowtide.torch.hidden import HiddenState


@dataclass(slots=True)
class Snapshot:
    """The state before a step: the carry's leaves, hidden state, random states."""

    leaves: list[Any]
    hidden: HiddenState
    random: Mark

    def all_leaves(self) -> list[Any]:
        """The leaves of carry and hidden state in a row; a place in it is a position."""
        return [*self.leaves, *self.hidden.leaves()]


@dataclass(slots=True)
class Piece:
    """The tape of steps [start, stop): where gradients enter its graph and where they come out."""

    start: int
    stop: int
    since: int  # where its nodes begin in the order of their making
    starts: list[torch.Tensor | None]  # the state at start, None where no gradient flows
    ends: list[GradientEdge | None]  # the state at stop
    outputs: list[list[tuple[int, GradientEdge]]]  # for each output leaf, (step, where its cotangent enters)
    xs: list[torch.Tensor]  # each step's own inputs in a row

    def roots(self) -> list[GradientEdge]:
        """Wherever a gradient may enter."""
        edges = [edge for edge in self.ends if edge is not None]
        return edges + [edge for column in self.outputs for _, edge in column]


@dataclass(slots=True)
class Profile:
    """What the probe steps taught about all steps."""

    state: list[bool]  # for each position of the state after step 0, whether gradients flow through it
    outputs: list[bool]  # for each output leaf


def has_gradient(leaf: Any) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor that needs a gradient."""
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def is_differentiable(leaf: Any) -> TypeGuard[torch.Tensor]:
    """Whether gradients can flow through it at all."""
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def edges_of(leaves: list[Any]) -> list[GradientEdge | None]:
    """Where the gradient of each leaf enters the graph that made it; None where none does."""
    return [edge_of(leaf) if has_gradient(leaf) else None for leaf in leaves]
