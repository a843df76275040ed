"""Lean tapes on paper: those of real calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.resnet.modeling_resnet import ResNetBottleNeckLayer

from lowtide.torch.checkpoint.call import checkpoint
from lowtide.torch.lean.call import lean, lean_menu
from lowtide.torch.lean.graph import LeanPoint
from lowtide.torch.lean.on_paper import is_on_paper, lean_menu_on_paper, lean_on_paper
from lowtide.torch.memory.tracker import Log, tensors_of, watching
from lowtide.torch.paper.devices import A100, H100
from lowtide.torch.paper.on_paper import on_paper
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


# --- calls


def held(function: Callable[[], Any]) -> tuple[int, int, int]:
    """Bytes that a call holds until its backward, and at the worst moment of its forward, and of both."""
    log = Log()
    with watching(log):
        results = [each for each in tensors_of(function()) if each.requires_grad]
        kept, forward = log.level(0, len(log.events))
        torch.stack([each.sum() for each in results]).sum().backward()
    return kept, forward, log.level(0, len(log.events))[1]


@pytest.mark.parametrize("place", [1, -1], ids=["a little", "all"])
@pytest.mark.parametrize(("name", "size"), CASES)
def test_calls_on_paper_hold_what_real_ones_hold(name: str, size: str, place: int) -> None:
    made = built(name, SIZES[size])
    point = lean_menu(made.module, *made.args, **made.kwargs)[place]
    with on_paper(made.module, made.args, made.kwargs) as (args, kwargs):
        lean_menu_on_paper(A100, made.module, *args, **kwargs)
        paper = held(lambda: lean_on_paper(made.module, *args, tape=point.size, **kwargs))
    made.module.zero_grad()
    real = held(lambda: lean(made.module, *made.args, tape=point.size, **made.kwargs))
    assert paper == pytest.approx(real, rel=0.01)


def test_the_first_call_of_a_module_holds_everything_while_it_runs() -> None:
    model = nn.ModuleList(nn.Sequential(nn.Linear(50, 300), nn.GELU(), nn.Linear(300, 50)) for _ in range(2))
    x, gelu = torch.randn(40, 50, requires_grad=True), 40 * 300 * 4
    with on_paper(model, (x,)) as (args, _):
        plain, _, _ = held(lambda: model[0](*args))
        rows = []
        for module in (model[0], model[1], model[1]):
            model.zero_grad()
            rows.append(held(partial(lean_on_paper, module, *args, tape=None)))
    assert [kept for kept, _, _ in rows] == [plain - gelu] * 3
    assert rows[0] == rows[1]  # though the trace is that of the first
    assert rows[1][1] > rows[2][1]


def test_masks_on_paper_are_kept_in_bits() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        mask = x > 0
        return torch.where(mask, torch.where(mask, x * x, x).exp(), x)

    x = torch.randn(40, 100, requires_grad=True)
    tape = lean_menu(function, x)[-1].size
    with on_paper(nn.Identity(), (x,)) as (args, _):
        rows = [held(lambda: lean_on_paper(function, *args, tape=tape)) for _ in range(2)]
        inside = held(lambda: checkpoint(partial(lean_on_paper, tape=tape), function, *args))
    real = [held(lambda: lean(function, x, tape=tape)) for _ in range(2)]
    assert rows[1] == pytest.approx(real[1], rel=0.05)
    assert inside[0] <= rows[1][0]


def test_calls_that_lean_leaves_alone_keep_everything() -> None:
    module, x = nn.Sequential(nn.Linear(3, 30), nn.GELU(), nn.Tanh()), torch.zeros(2, 3, requires_grad=True)
    assert not is_on_paper()
    with on_paper(module, (x,)) as (args, _):
        assert is_on_paper()
        plain = held(lambda: module(*args))
        with torch.no_grad():
            assert not lean_on_paper(module, *args, tape=None).requires_grad
        module.compile(backend="eager")
        assert held(lambda: lean_on_paper(module.forward, *args, tape=None))[0] == plain[0]
