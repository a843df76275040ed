"""Loops on any device: the plain loop's bits, its hidden state and its random numbers; budgets by the allocator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lowtide.torch as lt
from tests.device import programs, tide

OPTIONS: tuple[dict[str, Any], ...] = (
    {"base": 3},
    {"checkpoints": 2},
    {"budget": "least"},
    {"check_rerun": True, "base": 2},
)


def _with_budget(options: dict[str, Any], cell: programs.Cell, xs: torch.Tensor) -> dict[str, Any]:
    """The options, with a budget a little above the least."""
    if "budget" not in options:
        return options
    with pytest.raises(lt.BudgetError) as found:
        lt.plan_scan(cell, cell.start(), xs, budget=1)
    return {"budget": int(1.2 * found.value.least)}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", programs.KINDS)
def test_the_bits_of_the_plain_loop(device: torch.device, kind: str, options: dict[str, Any]) -> None:
    cell = programs.Cell(kind, device)
    xs = torch.randn(16, 4, 8, device=device).requires_grad_()
    start = cell.start()
    options = _with_budget(options, cell, xs)
    plain = programs.run(device, cell, lambda: programs.plain_scan(cell, start, xs), xs)
    ours = programs.run(device, cell, lambda: lt.checkpointed_scan(cell, start, xs, **options), xs)
    programs.assert_same(plain, ours)


@pytest.mark.parametrize("kind", programs.KINDS)
def test_a_step_waits_once_and_leaves_nothing(device: torch.device, kind: str) -> None:
    cell = programs.Cell(kind, device)
    xs, start = torch.randn(16, 4, 8, device=device), cell.start()

    def step(call: Any) -> int:
        cell.reset()
        with tide.Watch() if programs.counts_waits(device) else tide.Watch.nothing() as watch:
            _, ys = call()
            ys.sum().backward()
            del ys
        cell.zero_grad()
        return watch.waits

    for options in OPTIONS[:3]:
        options = _with_budget(options, cell, xs)
        step(lambda: programs.plain_scan(cell, start, xs))
        step(lambda options=options: lt.checkpointed_scan(cell, start, xs, **options))
        with programs.nothing_leaked(device):
            plain = step(lambda: programs.plain_scan(cell, start, xs))
            waits = step(lambda options=options: lt.checkpointed_scan(cell, start, xs, **options))
        assert waits <= plain + 1
