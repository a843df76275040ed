"""Plain and lean calls side by side: what is called, and what has to be equal."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (everybody's name for it)

import lowtide.torch as lt
from tests.torch.calls import Function, plainly, same

traced: list[bool] = []  # of each call of a function that notes it


def is_traced() -> bool:
    """Whether this call is traced: operations are watched then."""
    return torch._C._len_torch_dispatch_stack() > 0


def note() -> None:
    traced.append(is_traced())


def noted(result: torch.Tensor) -> torch.Tensor:
    note()
    return result


def both(run: Callable[[Function, int], Any], calls: int = 3) -> None:
    """The run with the plain call in place of lean, and with it, from the same seed, several times."""
    for number in range(calls):
        torch.manual_seed(number)
        expected = run(plainly, number)
        torch.manual_seed(number)
        same(run(lt.lean, number), expected)


class Gate(nn.Module):
    """Much that can be dropped, and a bit of everything that a module has."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, generator=torch.Generator().manual_seed(3)))
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("shift", torch.full((width,), 0.25))
        self.register_buffer("hidden", torch.ones(width), persistent=False)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        note()
        y = F.gelu(self.norm(x) @ self.weight + self.shift)
        z: torch.Tensor = self.drop(torch.sigmoid(y * scale) * y).tanh() * self.hidden
        return z


def tape_of(call: Callable[[], torch.Tensor]) -> int:
    """Bytes that are alive because of the graph, without its output."""
    with lt.measure.peak() as memory:
        root = call().grad_fn
        found = memory.now
    del root
    return found


@contextmanager
def collecting_by_hand() -> Iterator[None]:
    """Inside, the collector runs only when it is called, and looks only at what was made inside, which is quick."""
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


def step(module: Function, x: torch.Tensor, parameters: Any) -> list[torch.Tensor]:
    torch.manual_seed(7)
    y = module(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *parameters])]
