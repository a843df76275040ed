"""Training leaves nothing behind, and the promise of `base` holds as a curve."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide.torch import measure


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), lt.spiking.LIF(5.0), nn.Linear(6, 2))


def _train(net: nn.Module, optimizer: torch.optim.Optimizer, xs: torch.Tensor, options: dict[str, Any]) -> None:
    lt.spiking.reset(net)
    loss = lt.checkpointed_for_loop(net, xs, **options).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _counts() -> tuple[int, int, int]:
    gc.collect()
    objects = gc.get_objects()
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in objects)
    handles = len(list(Path("/proc/self/fd").iterdir()))
    return tensors, len(objects), handles


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [pytest.param({"base": 4}, marks=pytest.mark.slow), {"checkpoints": 3}, {"budget": "100KB"}], ids=str
)
@pytest.mark.parametrize("steps", [15, pytest.param(200, marks=pytest.mark.slow)])
def test_training_leaves_no_growth(steps: int, options: dict[str, Any]) -> None:
    net = _net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    xs = torch.randn(20, 3, 4)
    for _ in range(steps // 2):  # caches fill up
        _train(net, optimizer, xs, options)
    tensors, objects, handles = _counts()
    for _ in range(steps):
        _train(net, optimizer, xs, options)
    later = _counts()
    assert later[0] == tensors
    assert later[2] == handles
    assert later[1] - objects < steps  # of some hundred thousand; a leak would be dozens for each step


@pytest.mark.long
def test_a_graph_that_is_let_go_is_freed_without_the_garbage_collector() -> None:
    w = torch.randn(4, 4, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        with measure.peak() as memory:
            carry, ys = lt.checkpointed_scan(
                lambda h, x: (torch.tanh(h @ w + x), h), torch.zeros(2, 4), torch.randn(30, 2, 4), base=5
            )
            assert memory.now > 0
            del carry, ys
            assert memory.now == 0
            carry, ys = lt.checkpointed_scan(
                lambda h, x: (torch.tanh(h @ w + x), h), torch.zeros(2, 4), torch.randn(30, 2, 4), base=5
            )
            ys.sum().backward()
            del carry, ys
            assert w.grad is not None
            assert memory.now == w.grad.nbytes
    finally:
        gc.enable()


@pytest.mark.long
def test_a_module_that_keeps_the_loops_state_can_be_collected() -> None:
    net = nn.Sequential(nn.Linear(4, 6), lt.spiking.LIF(5.0))
    lt.checkpointed_for_loop(net, torch.randn(9, 2, 4), base=3)
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None


@pytest.mark.long
def test_memory_over_base_is_tapes_plus_states(record_property: Any) -> None:
    """base tapes + T/base states, lowest near sqrt(T*a/w)."""
    length, width = 200, 16
    net = nn.GRUCell(3, width)
    xs = torch.randn(length, 8, 3)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        return net(x, h), None

    def peak(base: int) -> int:
        with measure.peak() as memory:
            h, _ = lt.checkpointed_scan(step, torch.zeros(8, width), xs, base=base)
            grads = torch.autograd.grad(h.sum(), list(net.parameters()))
            return memory.peak - sum(g.nbytes for g in grads)

    cost = lt.plan_scan(step, torch.zeros(8, width), xs, base=20).chain[0]
    best = (length * cost.state / cost.tape) ** 0.5
    bases = [1, 2, 4, 6, 8, 12, 20, 40, 80, 200]
    peaks = {base: peak(base) for base in bases}
    for base, found in peaks.items():
        promised = min(base, length) * cost.tape + (length // base) * cost.state
        assert 0.9 * promised <= found <= promised + 2 * cost.working_set + 3 * cost.tape, base
    lowest = min(peaks, key=lambda base: peaks[base])
    record_property("figure", f"memory over base: lowest at {lowest}, sqrt(T*a/w) is {best:.1f}; {peaks}")
    assert best / 2 <= lowest <= best * 2
    low = bases.index(lowest)
    assert all(peaks[a] > peaks[b] for a, b in pairwise(bases[: low + 1]))
    assert all(peaks[a] < peaks[b] for a, b in pairwise(bases[low:]))
