"""Layers in nested checkpoint calls, as a form: they run as it says."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from lowtide import InputError
from lowtide.forms import LayerNest, nest_written
from lowtide.torch.layers.nested import run_nest
from tests.torch.planned import products


def row(count: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.GELU()) for _ in range(count)))


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("0-4", [1, 1, 1, 1, 1]),
        ("0 (1) 2-4", [1, 2, 1, 1, 1]),
        ("(0-1 (2) 3) 4", [2, 2, 3, 2, 1]),
        ("0 1~0+0 2-4", None),
    ],
)
@pytest.mark.filterwarnings("ignore:a lean tape of .* was planned, and this call allows none:UserWarning")
def test_it_runs_the_layers_with_the_plain_bits(text: str, runs: list[int] | None) -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    layers = row()

    def step(nest: LayerNest | None) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(1)
        y = layers(x) if nest is None else run_nest(nest, layers, x)
        return (y, *torch.autograd.grad(y.square().sum(), [x, *layers.parameters()]))

    expected, nest = step(None), nest_written(text)
    for _ in range(2):
        assert all(map(torch.equal, step(nest), expected))
    if runs is not None:
        assert products(lambda: step(nest)) - products(lambda: step(None)) == sum(runs) - len(runs)


@pytest.mark.parametrize("count", [4, 6])
def test_for_another_number_of_layers(count: int) -> None:
    said = f"the plan is for 5 layers, and this Sequential has {count}; plan again with plan_model"
    with pytest.raises(InputError, match=re.escape(said)):
        run_nest(nest_written("0 (1-3) 4"), row(count), torch.randn(2, 8))
