"""A budget is a promise: what the call holds beyond what the plain call holds too, measured, is at most the budget."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide import BudgetError
from lowtide.torch import measure, spiking


def _gru(width: int, batch: int) -> tuple[Any, Any, list[torch.Tensor]]:
    cell = nn.GRUCell(6, width)
    return lambda h, x: (cell(x, h), h.sum(1)), torch.zeros(batch, width), list(cell.parameters())


def _lif(width: int, batch: int) -> tuple[Any, Any, list[torch.Tensor]]:
    w1, w2 = torch.randn(6, width, requires_grad=True), torch.randn(width, 2, requires_grad=True)
    spike = spiking.ReluGrad()

    def step(carry: Any, x: torch.Tensor) -> Any:
        g, v = carry
        g = spiking.expon_step(g, x @ w1, 0.8)
        v, z = spiking.lif_step(v, g, spike=spike, leak=0.3)
        return (g, v), z @ w2

    return step, (torch.zeros(batch, width), torch.zeros(batch, width)), [w1, w2]


def _tanh(width: int, batch: int) -> tuple[Any, Any, list[torch.Tensor]]:
    w, v = torch.randn(width, width, requires_grad=True), torch.randn(6, width, requires_grad=True)
    return lambda h, x: (torch.tanh(h @ w + x @ v), None), torch.zeros(batch, width), [w, v]


def _deep(width: int, batch: int) -> tuple[Any, Any, list[torch.Tensor]]:
    """A tape many times its state."""
    net = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(width, width), nn.GELU())])
    return lambda h, x: (h + 0.1 * net(h), h.mean()), torch.zeros(batch, width), list(net.parameters())


def _dropped(width: int, batch: int) -> tuple[Any, Any, list[torch.Tensor]]:
    """Snapshots hold the random generator's state too, and two more are held beside them: 5 KB each.

    The state is not so small that it is all there is.
    """
    width, batch = width + 80, batch + 40
    w = torch.randn(width, width, requires_grad=True)
    drop = nn.Dropout(0.5)
    return lambda h, x: (torch.tanh(drop(h) @ w), h[:, :1]), torch.zeros(batch, width), [w]


def _module(width: int, batch: int) -> tuple[Any, Any, list[torch.Tensor]]:
    """Hidden state."""
    net = nn.Sequential(nn.Linear(6, width), spiking.Expon(4.0), spiking.LIF(5.0), nn.Linear(width, 2))
    return lambda _, x: (None, net(x)), None, list(net.parameters())


def _tutorial(width: int, batch: int) -> tuple[Any, Any, list[torch.Tensor]]:
    """Three layers with state of their own."""
    net = nn.Sequential(
        nn.Linear(6, width), spiking.Expon(5.0), spiking.LIF(20.0), nn.Linear(width, 2), spiking.Expon(10.0)
    )
    return lambda _, x: (None, net(x)), None, list(net.parameters())


class _Decaying(nn.Module):
    """Of its state, autograd saves what a step gets, not what it leaves."""

    def __init__(self, width: int, batch: int) -> None:
        super().__init__()
        self.current = nn.Linear(6, width)
        self.decay = nn.Parameter(torch.full((), 0.9))
        self.v = torch.zeros(batch, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.v = self.v * self.decay + self.current(x).tanh().exp()
        return self.v.sum(1)


def _decaying(width: int, batch: int) -> tuple[Any, Any, list[torch.Tensor]]:
    net = _Decaying(width, batch)
    return lambda _, x: (None, net(x)), None, list(net.parameters())


MODELS: dict[str, Callable[[int, int], tuple[Any, Any, list[torch.Tensor]]]] = {
    "gru": _gru,
    "lif": _lif,
    "tanh": _tanh,
    "deep": _deep,
    "dropout": _dropped,
    "module": _module,
    "tutorial": _tutorial,
    "decaying": _decaying,
}


def _left_in_modules(step: Any) -> list[torch.Tensor]:
    """The last state of modules that the step closes over: a result like any other."""
    modules = [cell.cell_contents for cell in step.__closure__ if isinstance(cell.cell_contents, nn.Module)]
    values = [value for module in modules for child in module.modules() for value in vars(child).values()]
    return [value for value in values if isinstance(value, torch.Tensor)]


def measured(
    name: str, width: int, batch: int, length: int, budget: int | str, *, x_grads: bool, lean: bool = False
) -> int:
    """`peak_of` a model that is made for it."""
    torch.manual_seed(0)
    model = MODELS[name](width, batch)
    return peak_of(model, torch.randn(length, batch, 6, requires_grad=x_grads), budget, lean=lean)


def peak_of(
    model: tuple[Any, Any, list[torch.Tensor]], xs: Any, budget: int | str, *, lean: bool = False, reduce: Any = None
) -> int:
    """Most bytes held at once beyond inputs, outputs, parameters and gradients, in the forward and in the backward."""
    step, init, leaves = model
    wanted = [*leaves, *([xs] if isinstance(xs, torch.Tensor) and xs.requires_grad else [])]
    with measure.peak() as memory:
        carry, ys = lt.checkpointed_scan(step, init, xs, budget=budget, lean=lean, reduce=reduce)
        tensors = [t for t in torch.utils._pytree.tree_leaves((carry, ys)) if isinstance(t, torch.Tensor)]
        outputs = measure.storage_bytes([*tensors, *_left_in_modules(step)])
        forward, before = memory.peak - outputs, memory.now
        loss = sum(t.sum() for t in tensors if t.requires_grad)
        assert isinstance(loss, torch.Tensor)
        cotangent = torch.ones_like(loss)
        outputs += memory.now - before  # the loss is not the loop's
        memory.restart_peak()
        grads = torch.autograd.grad(loss, wanted, cotangent, allow_unused=True)
        backward = memory.peak - outputs - measure.storage_bytes([g for g in grads if g is not None])
    return max(forward, backward)


def least(name: str, width: int, batch: int, length: int, *, x_grads: bool, lean: bool = False) -> int:
    with pytest.raises(BudgetError) as caught:
        measured(name, width, batch, length, 1, x_grads=x_grads, lean=lean)
    return caught.value.least


QUICK_SEEDS = 3
# The least budget, a share of 0, has room for one snapshot: its loops are short, as their runs grow with the square.
CASES = [
    pytest.param(
        (name, width, batch, length if share else min(length, 50), share, x_grads),
        marks=() if seed < QUICK_SEEDS else pytest.mark.slow,
    )
    for seed in range(9)
    for name in MODELS
    for rng in [random.Random(f"{seed} {name}")]
    for width, batch, length in [(rng.randint(2, 70), rng.randint(1, 40), rng.randint(2, 300))]
    for share, x_grads in [(rng.choice([0.0, 0.02, 0.1, 0.3, 0.8]), rng.random() < 0.4)]
]


@pytest.mark.untraced
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_the_measured_peak_is_within_the_budget(case: Any, record_property: Callable[[str, object], None]) -> None:
    name, width, batch, length, share, x_grads = case
    low = least(name, width, batch, length, x_grads=x_grads)
    torch.manual_seed(0)
    step, init, _ = MODELS[name](width, batch)
    chain = lt.plan_scan(step, init, torch.randn(length, batch, 6, requires_grad=x_grads), base=1).chain
    budget = int(low + share * max(0, chain.plain_tape - low))
    plan = lt.plan_scan(step, init, torch.randn(length, batch, 6, requires_grad=x_grads), budget=budget)
    peak = measured(name, width, batch, length, budget, x_grads=x_grads)
    used = peak / budget
    record_property(
        "figure", f"budget {budget:,} B for {name} T={length}: {used:.0%} used, {plan.runs_per_step:.2f} runs"
    )
    assert peak <= budget
    if plan.bill.plain_runs:
        assert used >= 0.7


@pytest.mark.untraced
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("share", [15, 40, 90])
def test_a_share_of_all_tapes_is_a_budget_too(name: str, share: int) -> None:
    torch.manual_seed(0)
    step, init, _ = MODELS[name](24, 16)
    chain = lt.plan_scan(step, init, torch.randn(120, 16, 6), base=1).chain
    assert measured(name, 24, 16, 120, f"{share}%", x_grads=False) <= chain.plain_tape * share // 100
