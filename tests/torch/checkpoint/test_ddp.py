"""DistributedDataParallel on two processes: checkpointed gradients are the plain ones to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowtide.torch as lt
from lowtide.torch.state.bits import same_bits
from tests.torch.calls import plainly
from tests.torch.checkpoint.processes import in_processes

WORLD = 2
OPTIONS: list[dict[str, Any]] = [
    {},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"find_unused_parameters": True, "broadcast_buffers": False},
    {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
]


class _Model(nn.Module):
    """Two checkpointed blocks with a weight in common, dropout and statistics; some parameters may be left out."""

    def __init__(self, checkpoint: Callable[..., Any], *, unused: bool) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.unused = nn.Linear(3, 3) if unused else None
        self.first = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3))
        self.shared = nn.Linear(8, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.checkpoint(self.first, x)
        for _ in range(2):
            h = h + self.checkpoint(lambda h: torch.tanh(self.shared(h)), h)
        y: torch.Tensor = self.last(h)
        return y


def _train(checkpoint: Callable[..., Any], rank: int, options: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = _Model(checkpoint, unused=options.get("find_unused_parameters", False))
    parallel = DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    torch.manual_seed(10 + rank)
    found: list[torch.Tensor] = []
    for _ in range(3):
        optimizer.zero_grad()
        y = parallel(torch.randn(5, 6))
        y.square().mean().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return [*found, *(buffer.clone() for buffer in model.buffers()), torch.get_rng_state()]


def _work(rank: int) -> None:
    """What one process does."""
    for options in OPTIONS:
        expected = _train(plainly, rank, options)
        found = _train(lt.checkpoint, rank, options)
        assert len(expected) == len(found) > 20
        assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True)), options
        shared = [grad.clone() for grad in found[:5]]
        for grad in shared:
            dist.broadcast(grad, 0)
        assert all(same_bits(a, b) for a, b in zip(shared, found, strict=False)), options


@pytest.mark.long
def test_checkpointed_gradients_are_those_of_plain_data_parallel_training(tmp_path: Path) -> None:
    in_processes(WORLD, _work, tmp_path)
