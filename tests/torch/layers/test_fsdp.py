"""Blocks that FSDP shards, called by `lean` and as layers of a row: trained as without, or refused in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import lowtide.torch as lt
from lowtide import InputError
from lowtide.torch.state.bits import same_bits
from tests.torch.calls import plainly
from tests.torch.checkpoint.processes import in_processes, local

WIDTH = 8


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return y


Way = Callable[[nn.ModuleList, torch.Tensor], Any]


class _Model(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.way = way

    def forward(self, x: torch.Tensor) -> Any:
        return self.way(self.blocks, x)


def _each(call: Callable[..., Any], blocks: Iterable[nn.Module], x: torch.Tensor) -> Any:
    for block in blocks:
        x = call(block, x)
    return x


def _leanly_again(block: nn.Module, x: torch.Tensor) -> Any:
    return lt.checkpoint(lambda x: lt.lean(block, x), x)


_PLAIN: Way = partial(_each, plainly)
_LEAN: list[Way] = [
    partial(_each, lt.lean),
    partial(_each, partial(lt.lean, tape="100%")),
    partial(_each, lambda block, x: lt.lean(lambda x: block(x), x)),
    partial(_each, _leanly_again),
    lambda blocks, x: lt.lean(_PLAIN, blocks, x),
]
_ROWS: list[Way] = [
    lambda blocks, x: lt.sequential(blocks, x),
    lambda blocks, x: lt.checkpoint_sequential(blocks, 3, x),
]


def _sharded(model: _Model) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def _older(model: _Model, *, original: bool) -> nn.Module:
    options: Any = {"use_orig_params": original, "device_id": torch.device("cpu")}
    for number in range(3):
        model.blocks[number] = FullyShardedDataParallel(model.blocks[number], **options)
    return FullyShardedDataParallel(model, **options)


def _train(way: Way, shard: Callable[[_Model], nn.Module]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = shard(_Model(way))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[torch.Tensor] = []
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, WIDTH)).square().mean().backward()
        found += [local(p.grad) for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return found


def _check(_: int) -> None:
    # Planned before the blocks are wrapped, with reruns and without smaller tapes, or with them.
    row, x = nn.Sequential(*(_Block() for _ in range(3))), torch.randn(5, WIDTH)
    plans = [lt.plan_sequential(row, x), lt.plan_sequential(row, x, budget="70%")]
    planned: list[Way] = [lambda blocks, x, plan=plan: lt.sequential(blocks, x, plan=plan) for plan in plans]  # type: ignore[misc]  # mypy does not infer the default's type
    newer, older = [*_LEAN, *_ROWS, *planned], [*_LEAN, *planned]
    for shard, ways in (
        (_sharded, newer),
        (partial(_older, original=False), older),
        (partial(_older, original=True), older),
    ):
        expected = _train(_PLAIN, shard)
        for number, way in enumerate(ways):
            found = _train(way, shard)
            assert len(expected) == len(found) >= 3
            assert all(map(same_bits, expected, found)), (shard, number)
        if shard is not _sharded:
            for way in _ROWS:
                with pytest.raises(InputError, match="layer 0 is wrapped by FullyShardedDataParallel"):
                    _train(way, shard)


@pytest.mark.long
def test_sharded_blocks_are_trained_as_without_or_refused(tmp_path: Path) -> None:
    in_processes(1, _check, tmp_path)
