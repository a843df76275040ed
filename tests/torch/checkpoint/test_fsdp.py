"""Blocks that FSDP shards, of both kinds: FSDP gathers and frees parameters around a rerun as around the first run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import lowtide.torch as lt
from lowtide.torch.state.bits import same_bits
from tests.torch.calls import plainly
from tests.torch.checkpoint.processes import in_processes, local

BLOCKS = 3


class _Block(nn.Module):
    """Counts its calls, has statistics and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.norm, self.statistics, self.drop = nn.LayerNorm(width), nn.BatchNorm1d(width), nn.Dropout(0.2)
        self.calls = 0
        self.trace = torch.zeros(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.trace = self.trace * 0.5 + x.detach().mean(0)
        y: torch.Tensor = self.drop(self.down(torch.tanh(self.statistics(self.norm(self.up(x))))))
        return x + y * self.calls + self.trace


class _Model(nn.Module):
    def __init__(self, checkpoint: Callable[..., Any], *, called: bool) -> None:
        super().__init__()
        self.checkpoint, self.called = checkpoint, called
        self.blocks = nn.ModuleList([_Block(8) for _ in range(BLOCKS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            # Called by `checkpoint`, or by a function that it calls.
            x = self.checkpoint(block, x) if self.called else self.checkpoint(lambda x, block=block: block(x), x)
        return x


def _sharded(model: _Model, *, blocks: bool) -> nn.Module:
    for block in model.blocks if blocks else ():
        fully_shard(block)
    fully_shard(model)
    return model


def _sharded_and_kept(model: _Model, *, blocks: bool) -> nn.Module:
    for block in model.blocks if blocks else ():
        fully_shard(block, reshard_after_forward=False)
    fully_shard(model)
    return model


def _sharded_and_frozen_in_part(model: _Model, *, blocks: bool) -> nn.Module:
    """What is saved last of a block is a weight that FSDP frees as soon as the block has run."""
    for block in model.modules():
        if isinstance(block, _Block):
            block.drop.p = 0.0
            block.down.requires_grad_(False)
    return _sharded(model, blocks=blocks)


def _older(model: _Model, *, blocks: bool, original: bool = False) -> nn.Module:
    options: Any = {"use_orig_params": original, "device_id": torch.device("cpu")}
    for number in range(BLOCKS) if blocks else ():
        model.blocks[number] = FullyShardedDataParallel(model.blocks[number], **options)
    return FullyShardedDataParallel(model, **options)


def _older_with_its_parameters(model: _Model, *, blocks: bool) -> nn.Module:
    return _older(model, blocks=blocks, original=True)


WAYS = (_sharded, _sharded_and_kept, _sharded_and_frozen_in_part, _older, _older_with_its_parameters)


def _train(model: _Model, sharded: nn.Module, rank: int) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.01)
    torch.manual_seed(10 + rank)
    found: list[torch.Tensor] = []
    for _ in range(3):
        optimizer.zero_grad()
        sharded(torch.randn(5, 8)).square().mean().backward()
        found += [local(p.grad) for p in sharded.parameters() if p.grad is not None]
        optimizer.step()
    blocks = [block for block in model.modules() if isinstance(block, _Block)]
    state = [value for block in blocks for value in (*block.buffers(), block.trace, torch.tensor(block.calls))]
    return [*found, *(value.clone() for value in state), torch.get_rng_state()]


def _check(rank: int) -> None:
    for way in WAYS:
        for blocks in (True, False):
            for called in (True, False):
                outcomes = []
                for checkpoint in (plainly, lt.checkpoint):
                    torch.manual_seed(0)
                    model = _Model(checkpoint, called=called)
                    outcomes.append(_train(model, way(model, blocks=blocks), rank))
                expected, found = outcomes
                assert len(expected) == len(found) > BLOCKS * 5
                assert all(map(same_bits, expected, found)), (way.__name__, blocks, called)


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_blocks_that_are_sharded_are_trained_as_without_checkpoint(processes: int, tmp_path: Path) -> None:
    in_processes(processes, _check, tmp_path)


def _check_hugging_face(rank: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, use_cache=False
    )
    outcomes = []
    for checkpoint in (None, lt.checkpoint):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).train()
        if checkpoint is not None:
            model._set_gradient_checkpointing(True, checkpoint)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        tokens = torch.randint(32, (2, 6), generator=torch.Generator().manual_seed(rank))
        model(tokens, labels=tokens).loss.backward()
        outcomes.append([local(p.grad) for p in model.parameters() if p.grad is not None])
    expected, found = outcomes
    assert len(expected) == len(found) > 10
    assert all(map(same_bits, expected, found))


@pytest.mark.long
def test_a_sharded_model_of_hugging_faces_with_its_gradient_checkpointing(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    in_processes(1, _check_hugging_face, tmp_path)
