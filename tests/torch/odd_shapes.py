"""Models of other shapes than a list of blocks, one after the other."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.torch.odd_blocks import WIDTH, Mlp


class Unlike(nn.Module):
    """Three submodules, no two alike, none in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh())
        self.second = Mlp(64)
        self.third = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        out: torch.Tensor = self.third(torch.sin(self.second(self.first(x))))
        return out


class Bare(nn.Module):
    """No submodule at all."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loop of its own."""
        for _ in range(4):
            x = torch.tanh(x @ self.w)
        return x


class Dictionary(nn.Module):
    """Its blocks are in an `nn.ModuleDict`, and called in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"last": Mlp(), "first": Mlp(), "a b": Mlp()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The first first."""
        for name in ("first", "a b", "last"):
            x = self.parts[name](x)
        return x


class UNet(nn.Module):
    """Down and up, with skip connections."""

    def __init__(self) -> None:
        super().__init__()
        widths = [(4, 8), (8, 16), (16, 32)]
        self.down = nn.ModuleList(self._block(a, b) for a, b in widths)
        self.up = nn.ModuleList(self._block(a + b, a) for a, b in reversed(widths))

    @staticmethod
    def _block(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.SiLU(), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the way down gave comes again on the way up."""
        skipped = []
        for block in self.down:
            skipped.append(x)
            x = functional.avg_pool2d(block(x), 2)
        for block in self.up:
            x = block(torch.cat([functional.interpolate(x, scale_factor=2), skipped.pop()], 1))
        return x


class Towers(nn.Module):
    """Two rows side by side, run in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(Mlp() for _ in range(3))
        self.right = nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """They meet at the end."""
        a, b = x, x.flip(0)
        for left, right in zip(self.left, self.right, strict=True):
            a, b = left(a), right(b)
        return a * b


class Recurrent(nn.Module):
    """Torch's own recurrent network, and a loop over a cell."""

    def __init__(self, *, cell: bool) -> None:
        super().__init__()
        self.net = nn.LSTMCell(WIDTH, WIDTH) if cell else nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.1)
        self.out = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Over the first dimension."""
        if isinstance(self.net, nn.LSTM):
            hidden = self.net(x)[0]
        else:
            h = c = x.new_zeros(x.shape[1], WIDTH)
            row = []
            for step in x:
                h, c = self.net(step, (h, c))
                row.append(h)
            hidden = torch.stack(row)
        out: torch.Tensor = self.out(hidden)
        return out


class Tied(nn.Module):
    """The first weight is the last one too, and two blocks share another."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Mlp() for _ in range(3))
        self.blocks[2].up.weight = self.blocks[0].up.weight  # type: ignore[union-attr]
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """The loss of the next word."""
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


class SparseWords(nn.Module):
    """Gradients of words that are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, WIDTH, sparse=True)
        self.blocks = nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Of all blocks."""
        x: torch.Tensor = self.words(words)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()
