"""Programs for any device, and the plain runs that everything is compared with, to the last bit."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import sleep
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.device import tide

Step = Callable[[Any, Tensor], tuple[Any, Any]]


class Run(NamedTuple):
    """What a run leaves: results, gradients, buffers, and where the device's generator and the CPU's are."""

    results: list[Tensor]
    gradients: list[Tensor | None]
    buffers: list[Tensor]
    drawn: list[Tensor]


def run(device: torch.device, module: nn.Module, call: Callable[[], Any], *inputs: Tensor, seed: int = 1) -> Run:
    """A call and its backward, with fresh gradients and seeded generators."""
    torch.manual_seed(seed)
    if isinstance(module, Cell):
        module.reset()
    leaves = [*module.parameters(), *inputs]
    for leaf in leaves:
        leaf.grad = None
    buffers = [buffer.detach().clone() for buffer in module.buffers()]
    result = call()
    results = [each for each in torch.utils._pytree.tree_leaves(result) if isinstance(each, Tensor)]
    total = torch.stack([each.double().square().sum().to(device) for each in results if each.requires_grad]).sum()
    total.backward()
    left = [buffer.detach().clone() for buffer in module.buffers()]
    for buffer, before in zip(module.buffers(), buffers, strict=True):
        buffer.detach().copy_(before)
    found = [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return Run([each.detach() for each in results], found, left, states)


def assert_same(one: Run, other: Run) -> None:
    pairs: list[tuple[list[Any], list[Any]]] = list(zip(one, other, strict=True))
    for ours, theirs in pairs:
        assert len(ours) == len(theirs)
        for left, right in zip(ours, theirs, strict=True):
            assert (left is None) == (right is None)
            assert left is None or right is None or torch.equal(left, right)


@contextmanager
def nothing_leaked(device: torch.device) -> Iterator[None]:
    """What the block allocates on the device it frees, at the latest with its cycles."""
    gc.collect()
    before = _allocated(device)
    yield
    for _ in range(50):  # threads of backwards let go a moment after the backward
        gc.collect()
        if _allocated(device) == before:
            return
        sleep(0.01)
    assert _allocated(device) == before


def _allocated(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.accelerator.memory_allocated(device)


def counts_waits(device: torch.device) -> bool:
    """Whether the device counts what the host waits for."""
    return device.type == tide.NAME


# --- steps of loops


class Cell(nn.Module):
    """A cell of 8 numbers for each of 4 rows; what a step draws, keeps and returns differs by kind."""

    def __init__(self, kind: str, device: torch.device) -> None:
        super().__init__()
        self.kind = kind
        self.given = nn.Linear(8, 8)
        self.kept = nn.Linear(8, 8, bias=False)
        self.norm = nn.BatchNorm1d(8) if kind == "norm" else nn.Identity()
        self.gru = nn.GRUCell(8, 8) if kind == "gru" else None
        self.lstm = nn.LSTMCell(8, 8) if kind == "lstm" else None
        if kind == "hidden":
            self.register_buffer("voltage", torch.zeros(4, 8))
        self.to(device)
        self.generator = torch.Generator(device) if kind == "generator" else None

    def reset(self) -> None:
        if self.kind == "hidden":
            self.voltage = torch.zeros(4, 8, device=self.given.weight.device)
        if self.generator is not None:
            self.generator.manual_seed(5)

    def start(self) -> Any:
        zeros = torch.zeros(4, 8, device=self.given.weight.device)
        return (zeros, zeros.clone()) if self.kind == "lstm" else zeros

    def forward(self, h: Any, x: Tensor) -> tuple[Any, Tensor]:
        if self.gru is not None:
            h = self.gru(x, h)
            return h, h
        if self.lstm is not None:
            h = self.lstm(x, h)
            return h, h[0].mean(0)
        h = torch.tanh(self.norm(self.given(x)) + self.kept(h))
        if self.kind == "dropout":
            h = nn.functional.dropout(h, 0.3)
        elif self.kind == "noise":
            h = h + torch.randn_like(h) + torch.rand(4, 8).to(h.device)
        elif self.kind == "generator":
            h = h + torch.randn(4, 8, generator=self.generator, device=h.device)
        elif self.kind == "hidden":
            self.voltage = 0.9 * self.voltage + h
            h = torch.sigmoid(self.voltage)
        elif self.kind == "in place":
            h = h.mul(2).add_(1)
            h[:, 0].mul_(0.5)
        elif self.kind == "detached":
            h = h + (h.detach() > 0).to(h.dtype)
        return h, h.sum(1)


KINDS = (*("plain", "gru", "lstm", "dropout", "noise", "generator", "hidden", "norm", "in place", "detached"),)


def plain_scan(f: Step, start: Any, xs: Tensor) -> tuple[Any, Tensor]:
    state, outputs = start, []
    for x in xs:
        state, output = f(state, x)
        outputs.append(output)
    return state, torch.stack(outputs)


# --- blocks and models


class Block(nn.Module):
    """A residual block: attention or a convolution in some, and dropout or BatchNorm."""

    def __init__(self, kind: str, width: int = 16) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.BatchNorm1d(width) if kind == "norm" else nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True) if kind == "attention" else None
        self.filters = nn.Conv1d(1, 1, 3, padding=1) if kind == "convolution" else None
        self.register_buffer("mask", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.attention is not None:
            y = self.attention(y[None], y[None], y[None], need_weights=False)[0][0]
        if self.filters is not None:
            y = self.filters(y[:, None])[:, 0]
        y = nn.functional.gelu(self.wide(y)) * 1.5
        if self.kind == "dropout":
            y = nn.functional.dropout(y, 0.2)
        if self.kind == "relu":
            y = nn.functional.relu(y) + y.sigmoid()
        result: Tensor = x + self.narrow(y) * self.mask
        return result


BLOCKS = ("plain", "dropout", "norm", "attention", "convolution", "relu")


class Model(nn.Module):
    """Blocks in a row and a loss, each block where it is told to be."""

    def __init__(self, kind: str, *devices: torch.device) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind).to(device) for device in devices)
        self.head = nn.Linear(16, 4).to(devices[-1])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x.to(next(block.parameters()).device))
        loss: Tensor = self.head(x).square().mean()
        return loss
