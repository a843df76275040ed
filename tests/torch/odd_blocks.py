"""Blocks of models that are hard to run again: they change, keep, read, or pass on what others do not expect."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import register_dataclass

WIDTH = 16


class Mlp(nn.Module):
    """A block with a tape of several values."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """With a residual path."""
        out: torch.Tensor = x + self.drop(self.down(functional.gelu(self.up(self.norm(x)))))
        return out


class Scales(Mlp):
    """Reads a number from its values, and does as many steps as it says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Control flow inside a block."""
        x = x / x.detach().abs().max().item()
        for _ in range(1 + int(x.detach().abs().sum().item()) % 2):
            x = super().forward(x)
        return x if x.sum() > 0 else -x


class ReluFirst(Mlp):
    """Writes over its argument."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The argument is somebody else's tape."""
        return super().forward(x.relu_())


class AddsInPlace(Mlp):
    """Adds to its argument, and gives that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The residual path in place."""
        return x.add_(self.drop(self.down(functional.gelu(self.up(self.norm(x.clone()))))))


class Pairs(Mlp):
    """Takes and gives a tuple."""

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Both are changed."""
        a, b = pair
        return super().forward(a), b * a.tanh()


class Dicts(Mlp):
    """Takes and gives a dict."""

    def forward(self, states: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        """One entry is a number."""
        return {"x": super().forward(states["x"]), "depth": states["depth"] + 1}


@dataclass
class States:
    """What blocks with dataclasses take and give."""

    x: torch.Tensor
    depth: int = 0


@dataclass
class KnownStates:
    """One that torch's trees know."""

    x: torch.Tensor
    depth: int = 0


register_dataclass(KnownStates, field_names=["x", "depth"])


class Dataclasses(Mlp):
    """Takes and gives a dataclass."""

    def forward(self, states: Any) -> Any:
        """Which stays the same but for two fields."""
        return replace(states, x=super().forward(states.x), depth=states.depth + 1)


class Keywords(Mlp):
    """Takes keywords: a tensor, a flag, None."""

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor, flip: bool = False, mask: Any = None) -> torch.Tensor:  # type: ignore[override]
        """All are used."""
        y = super().forward(x * scale)
        y = y if mask is None else y.masked_fill(mask, 0.0)
        return -y if flip else y


class Neighbours(Mlp):
    """Takes a sparse matrix."""

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """As networks on graphs do."""
        return super().forward(torch.sparse.mm(edges, x))


class Counts(Mlp):
    """Counts its calls in a buffer and in an attribute, and averages what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Buffer(torch.zeros((), dtype=torch.long))
        self.seen = nn.Buffer(torch.zeros(WIDTH))
        self.python_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Each once."""
        self.python_calls += 1
        self.calls.add_(1)
        self.seen.mul_(0.9).add_(x.detach().mean(0))
        return super().forward(x) + self.seen.detach() * self.python_calls


class Routed(Mlp):
    """Leaves a second loss in an attribute."""

    extra: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As mixtures of experts do."""
        gates = self.norm(x).softmax(-1)
        self.extra = gates.square().mean()
        out: torch.Tensor = super().forward(x) * gates
        return out


class Loud(nn.Module):
    """A module whose object has a `forward` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()
        self.forward = self._other

    def _other(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = 2 * self.inner(x).sigmoid()
        return out
