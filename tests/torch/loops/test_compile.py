"""compile=True: the bits are those of the plain loop over the compiled step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide import InputError
from lowtide.torch.state.bits import same_bits

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


@pytest.mark.parametrize(
    "options", [pytest.param({"base": 5}, marks=pytest.mark.long), {"checkpoints": 2}, {}], ids=str
)
def test_bits_of_the_compiled_step(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    w = torch.randn(6, 6, requires_grad=True)
    xs = torch.randn(23, 3, 6)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.tanh(h @ w + x) * torch.sigmoid(x).exp()
        return h, h * 2

    compiled = torch.compile(step)
    h, rows = torch.zeros(3, 6), []
    for x in xs:
        h, y = compiled(h, x)
        rows.append(y)
    expected = torch.stack(rows)
    with lt.record(memory=False) as receipt:
        last, ys = lt.checkpointed_scan(step, torch.zeros(3, 6), xs, compile=True, **options)
        found = torch.autograd.grad(ys.square().sum(), w)[0]
    assert same_bits(ys, expected)
    assert same_bits(last, h)
    assert same_bits(found, torch.autograd.grad(expected.square().sum(), w)[0])
    assert receipt.probe_runs > 0
    assert receipt.taping_runs == 23


@pytest.mark.long
def test_a_stateful_module_compiles() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), lt.spiking.LIF(4.0, v_threshold=0.2), nn.Linear(5, 2), lt.spiking.Expon(6.0))
    xs = torch.rand(17, 2, 4) * 4
    compiled = torch.compile(net)
    expected = torch.stack([compiled(x) for x in xs])
    grads = torch.autograd.grad(expected.sum(), list(net.parameters()))
    lt.spiking.reset(net)
    ys = lt.checkpointed_for_loop(net, xs, base=4, compile=True)
    assert same_bits(ys, expected)
    found = torch.autograd.grad(ys.sum(), list(net.parameters()))
    assert all(same_bits(a, b) for a, b in zip(grads, found, strict=True))


@pytest.mark.long
def test_programs_that_differ_without_grad_are_found_out() -> None:
    """This step's program without grad differs in the last bit of some numbers; results must not."""
    w = torch.randn(6, 6, requires_grad=True)
    xs = torch.randn(9, 3, 6)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        return torch.tanh(h @ w + x) * torch.sigmoid(x).exp(), None

    h, _ = lt.checkpointed_scan(step, torch.zeros(3, 6), xs, base=3, compile=True)
    compiled, expected = torch.compile(step), torch.zeros(3, 6)
    for x in xs:
        expected, _ = compiled(expected, x)
    assert same_bits(h, expected)
    h.sum().backward()


def test_a_budget_needs_the_step_as_it_is() -> None:
    w = torch.randn(4, requires_grad=True)
    with pytest.raises(InputError, match="plan the step as it is"):
        lt.checkpointed_for_loop(lambda x: x * w, torch.ones(5, 4), budget="1MB", compile=True)
