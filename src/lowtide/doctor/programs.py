"""Small training steps in PyTorch, each written out plainly and with Lowtide, and what is left after them.

They use plain torch, Python's own generator, and Lowtide's public functions, nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import lowtide.torch as lt

Run = Callable[[Any, torch.Tensor], torch.Tensor]  # of a module and its input, the loss


@dataclass(frozen=True, slots=True)
class TrainingSize:
    """How large the steps are: steps of a loop or layers, numbers in a state, and examples in a batch."""

    steps: int
    layers: int
    width: int
    batch: int


QUICK, FULL = (
    TrainingSize(steps=64, layers=4, width=16, batch=4),
    TrainingSize(steps=200, layers=6, width=256, batch=32),
)


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """A training step: what makes its module and its input, and what takes its loss, plainly and with Lowtide."""

    module: Callable[[TrainingSize], nn.Module]
    shape: Callable[[TrainingSize], tuple[int, ...]]
    plain: Run
    lowtide: Run

    def made(self, size: TrainingSize, device: torch.device) -> tuple[nn.Module, torch.Tensor]:
        """The module and its input on a device, alike each time; random numbers start afresh."""
        torch.manual_seed(0)  # of every device
        random.seed(0)
        x = torch.randn(self.shape(size))
        return self.module(size).to(device), x.to(device).requires_grad_()


def results(run: Run, module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Everything that a step leaves behind, by name: loss, gradients, state of modules, random numbers to come."""
    loss = run(module, x)
    loss.backward()
    found = {"the loss": loss, "the input's gradient": x.grad}
    found |= {f"the gradient of {name}": parameter.grad for name, parameter in module.named_parameters()}
    found |= dict(module.named_buffers())
    for name, part in module.named_modules():
        found |= {f"{name}.{key}": value for key, value in vars(part).items() if isinstance(value, torch.Tensor)}
    found["the next random numbers"] = torch.rand(4)
    found["the device's next random numbers"] = torch.rand(4, device=x.device)
    found["Python's next random number"] = torch.tensor(random.random(), dtype=torch.float64)
    return {name: value.detach() for name, value in found.items() if value is not None}


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """The names of what is not the same in both, to the last bit."""
    return [name for name in one | other if name not in one or name not in other or not _same(one[name], other[name])]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = (tensor.cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*bits)


# --- the programs


class Leaky(nn.Module):
    """A leaky integrator that keeps its state to itself, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.v: torch.Tensor | None = None
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Integrate x, and a little more with each call."""
        self.calls += 1
        self.v = x if self.v is None else 0.9 * self.v.tanh() + x + 0.01 * self.calls
        return self.v


class Noise(nn.Module):
    """Scales its input by a random number of Python's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A random multiple of x."""
        return x * random.random()


def block(width: int) -> nn.Sequential:
    """A block of two layers behind a norm."""
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def rows(size: TrainingSize) -> tuple[int, ...]:
    """The shape of rows enough for activations to be larger than weights."""
    return 8 * size.batch, size.width


def sequences(size: TrainingSize) -> tuple[int, ...]:
    """The shape of a batch of sequences, time first."""
    return size.steps, size.batch, size.width


def squares(output: torch.Tensor) -> torch.Tensor:
    """The loss of what a network returns."""
    return output.square().mean()


def scanned(cell: Callable[..., torch.Tensor], xs: torch.Tensor) -> torch.Tensor:
    """The plain loop over time, of a cell with a carry."""
    h = torch.zeros_like(xs[0])
    for x in xs:
        h = cell(x, h)
    return h.sum()


def scanned_with_lowtide(cell: nn.Module, xs: torch.Tensor, budget: int | str | None = "25%") -> torch.Tensor:
    """The same loop, in a quarter of the memory."""
    h: torch.Tensor
    h, _ = lt.checkpointed_scan(lambda h, x: (cell(x, h), None), torch.zeros_like(xs[0]), xs, budget=budget)
    return h.sum()


def looped(net: nn.Module, xs: torch.Tensor) -> torch.Tensor:
    """The plain loop over time, of a network that keeps its state to itself."""
    return squares(torch.stack([net(x) for x in xs]))


def looped_with_lowtide(net: nn.Module, xs: torch.Tensor) -> torch.Tensor:
    """The same loop with three snapshots."""
    return squares(lt.checkpointed_for_loop(net, xs, checkpoints=3))


def called(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The plain call of a network."""
    return squares(net(x))


def checkpointed(net: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """The same call, each layer checkpointed."""
    for layer in net:
        x = lt.checkpoint(layer, x)
    return squares(x)


def in_half(net: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """The same call, with half of the tapes."""
    return squares(lt.sequential(net, x, budget="50%"))


def lean(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The same call with a lean tape."""
    return squares(lt.lean(net, x))


LOOP = TrainingStep(lambda size: nn.GRUCell(size.width, size.width), sequences, scanned, scanned_with_lowtide)
STATEFUL = TrainingStep(
    lambda size: nn.Sequential(nn.Linear(size.width, size.width), nn.BatchNorm1d(size.width), Leaky()),
    sequences,
    looped,
    looped_with_lowtide,
)
RANDOM = TrainingStep(
    lambda size: nn.Sequential(nn.Linear(size.width, size.width), nn.Dropout(0.3), Noise(), nn.Tanh()),
    sequences,
    looped,
    looped_with_lowtide,
)
CHECKPOINT = TrainingStep(
    lambda size: nn.Sequential(*(nn.Sequential(block(size.width), nn.Dropout(0.1)) for _ in range(size.layers))),
    rows,
    called,
    checkpointed,
)
LAYERS = TrainingStep(CHECKPOINT.module, rows, called, in_half)
LEAN = TrainingStep(lambda size: block(size.width), rows, called, lean)
