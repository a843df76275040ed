"""Lean tapes found out on paper: those of real calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.resnet.modeling_resnet import ResNetBottleNeckLayer

from lowtide.torch.devices import A100, H100
from lowtide.torch.lean import lean_menu
from lowtide.torch.lean_graph import LeanPoint
from lowtide.torch.lean_paper import lean_menu_on_paper
from lowtide.torch.paper import on_paper
from tests.torch.blocks import BLOCKS, Block, Size, block

SIZES = {"dropout": Size(), "no dropout": Size(width=64, tokens=33, dropout=0.0)}
# Every block in one of them, and the others with the whole sweeps.
CASES = [
    pytest.param(name, size, marks=() if (k + j) % 2 else pytest.mark.slow)
    for k, name in enumerate([*BLOCKS, "resnet"])
    for j, size in enumerate(SIZES)
]


def built(name: str, size: Size) -> Block:
    if name == "resnet":
        image = torch.randn(2, 16, 8, 8, requires_grad=True)
        return Block(ResNetBottleNeckLayer(16, 32, stride=2), (image,), {})
    return block(name, size)


def figures(points: list[LeanPoint]) -> list[tuple[Any, ...]]:
    """All but the seconds."""
    return [(point.size, point.plain_tape, point.again, point.is_free) for point in points]


@pytest.mark.parametrize(("name", "size"), CASES)
def test_points_on_paper_are_those_of_a_real_trace(name: str, size: str) -> None:
    made = built(name, SIZES[size])
    with on_paper(made.module, made.args, made.kwargs) as (args, kwargs):
        paper = lean_menu_on_paper(H100, made.module, *args, **kwargs)
        found = figures(paper)
    real = lean_menu(made.module, *made.args, **made.kwargs)
    assert found == figures(real)
    assert len(paper) > 1
    assert paper[0].seconds == 0
    assert all(point.seconds > 0 for point in paper[1:])


def test_seconds_are_those_of_the_device() -> None:
    with torch.device("meta"):
        module, x = nn.Sequential(nn.Linear(2**12, 2**14), nn.GELU(), nn.Tanh()), torch.empty(2**14, 2**12)
    with on_paper(module, (x,)) as (args, _):
        rows = [lean_menu_on_paper(device, module, *args) for device in (H100, A100)]
    assert figures(rows[0]) == figures(rows[1])
    # All that runs again moves bytes, or multiplies float32.
    ratios = [slow.seconds / fast.seconds for fast, slow in zip(*rows, strict=True) if fast.seconds]
    assert all(1.5 < ratio < 3.5 for ratio in ratios)
    assert ratios


def test_a_module_that_lean_leaves_alone_has_no_points() -> None:
    module, x = nn.Linear(3, 3), torch.zeros(2, 3, requires_grad=True)
    with on_paper(module, (x,)) as (args, _):
        assert lean_menu_on_paper(H100, module, *args)
    module.compile(backend="eager")
    with on_paper(module, (x,)) as (args, _):
        assert lean_menu_on_paper(H100, module, *args) == []


def test_masks_that_are_made_inside_can_be_kept_in_bits() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x * x, x).exp()

    x = torch.randn(10, 100, requires_grad=True)
    with on_paper(nn.Identity(), (x,)) as (args, _):
        paper = figures(lean_menu_on_paper(H100, function, *args))
    assert paper == figures(lean_menu(function, x))
