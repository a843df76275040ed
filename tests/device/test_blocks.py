"""Checkpoint calls, lean calls, rows of layers and models on any device: the plain bits, and what they wait for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide.torch as lt
from tests.device import programs, tide

CALLS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "checkpoint": lt.checkpoint,
    "checkpoint, every bit": lambda block, x: lt.checkpoint(block, x, check_rerun=True),
    "checkpoint, nothing compared": lambda block, x: lt.checkpoint(block, x, check_rerun=False),
    "checkpoint in a checkpoint": lambda block, x: lt.checkpoint(lambda y: lt.checkpoint(block, y), x),
    "lean": lt.lean,
    "lean in a checkpoint": lambda block, x: lt.checkpoint(lambda y: lt.lean(block, y), x),
}
FEW_BLOCKS = [pytest.param(kind, marks=[pytest.mark.slow] if k > 2 else []) for k, kind in enumerate(programs.BLOCKS)]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", programs.BLOCKS)
def test_calls_have_the_bits_of_plain_ones(device: torch.device, kind: str, call: str) -> None:
    block = programs.Block(kind).to(device)
    x = torch.randn(6, 16, device=device)
    for inputs in ((), (x.clone().requires_grad_(),)):
        given = inputs[0] if inputs else x
        plain = programs.run(device, block, partial(block, given), *inputs)
        programs.assert_same(plain, programs.run(device, block, partial(CALLS[call], block, given), *inputs))
        with programs.nothing_leaked(device):  # from the second call on; a second lean call is not traced either
            again = programs.run(device, block, partial(CALLS[call], block, given), *inputs)
            programs.assert_same(plain, again)
            del again


@pytest.mark.parametrize("call", [name for name in CALLS if "every bit" not in name])
@pytest.mark.parametrize("kind", programs.BLOCKS)
def test_calls_wait_once(device: torch.device, kind: str, call: str) -> None:
    if not programs.counts_waits(device):
        pytest.skip("nobody counts")
    blocks = nn.Sequential(*(programs.Block(kind) for _ in range(3))).to(device)
    x = torch.randn(6, 16, device=device)

    def train() -> None:
        y = x
        for block in blocks:
            y = CALLS[call](block, y)
        y.sum().backward()

    for _ in range(2):
        train()
    with tide.Watch() as watch:
        train()
    assert watch.waits <= 1
    assert watch.counts["from_host"] == 0


@pytest.mark.parametrize("room", [1.0, 1.5])
@pytest.mark.parametrize("kind", FEW_BLOCKS)
def test_rows_of_layers(device: torch.device, kind: str, room: float) -> None:
    row = nn.Sequential(*(programs.Block(kind) for _ in range(4))).to(device)
    x = torch.randn(32, 16, device=device)
    with pytest.raises(lt.BudgetError) as found:
        lt.plan_sequential(row, x, budget=1)
    plan = lt.plan_sequential(row, x, budget=int(room * found.value.least))
    plain = programs.run(device, row, lambda: row(x))
    programs.assert_same(plain, programs.run(device, row, lambda: lt.sequential(row, x, plan=plan)))
    if programs.counts_waits(device):
        with tide.Watch() as watch:
            lt.sequential(row, x, plan=plan).sum().backward()
        assert watch.waits <= 1


@pytest.mark.parametrize("kind", FEW_BLOCKS)
def test_models(device: torch.device, kind: str) -> None:
    model = programs.Model(kind, *[device] * 3)
    x = torch.randn(32, 16, device=device)
    ours = copy.deepcopy(model)
    least = _least(ours, x)
    lt.auto_checkpoint(ours, x, peak=int(1.05 * least))
    programs.assert_same(programs.run(device, model, lambda: model(x)), programs.run(device, ours, lambda: ours(x)))
    if programs.counts_waits(device):
        with tide.Watch() as watch:
            ours(x).backward()
        assert watch.waits <= 1


def _least(model: nn.Module, x: Tensor) -> int:
    with pytest.raises(lt.BudgetError) as found:
        lt.plan_model(model, x, peak=1)
    return found.value.least


def test_a_lean_tape_packs_masks_on_any_device(device: torch.device) -> None:
    def gated(x: Tensor) -> Tensor:
        return torch.where(x > 0.2, (x * 1.5).exp(), x.sin()) * (x * 2).tanh()

    x = torch.randn(100, 37, device=device)
    found: list[Any] = []
    calls: tuple[Callable[[Tensor], Any], ...] = (gated, partial(lt.lean, gated), partial(lt.lean, gated, tape="30%"))
    for call in calls:
        leaf = x.clone().requires_grad_()
        call(leaf).square().sum().backward()
        found.append(leaf.grad)
    assert all(torch.equal(found[0], other) for other in found[1:])
