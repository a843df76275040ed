"""Planning moves a bar: for each block and each whole step, and for each size of a batch."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide import BudgetError, InputError
from tests.interface.bars import Bar, drawn


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.sin().sum()


@pytest.mark.parametrize("options", [{"peak": "1GiB"}, {"peak": "1GiB", "on_paper": True}, {"peak": 1}], ids=str)
def test_planning_moves_it_for_each_block_and_each_whole_step(options: dict[str, Any]) -> None:
    bar = Bar()
    with pytest.raises(BudgetError) if options["peak"] == 1 else nullcontext():
        lt.plan_model(Blocks(), torch.ones(4, 8), pbar=bar, **options)
    assert bar.moves == [1] * (5 + 2)


def test_planning_draws_a_bar_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    lt.auto_checkpoint(Blocks(), torch.ones(4, 8), peak="1GiB", pbar=True)
    assert drawn(capsys.readouterr().err).startswith("planning: 100%")


@pytest.mark.long
def test_there_is_a_bar_for_each_size_of_a_batch(capsys: pytest.CaptureFixture[str]) -> None:
    found = lt.largest_batch(Blocks(), lambda size: torch.ones(size, 8), "64KiB", pbar=True)
    labels = re.findall(r"(a batch of [\d,]+): 100%", capsys.readouterr().err)
    assert {"a batch of 1", f"a batch of {found.size:,}"} <= set(labels)


def test_planning_refuses_what_is_no_bar_before_anything_runs() -> None:
    model = Blocks()
    model.register_forward_pre_hook(lambda *_: pytest.fail("it ran"))
    with pytest.raises(InputError, match="pbar=0: give True"):
        lt.plan_model(model, torch.ones(4, 8), peak="1GiB", pbar=0)
    with pytest.raises(InputError, match="pbar=0: give True"):
        lt.largest_batch(model, lambda size: torch.ones(size, 8), "1GiB", pbar=0)
