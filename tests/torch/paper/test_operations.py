"""Operations and bytes counted, and what that makes on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lowtide.torch.paper.devices import Device
from lowtide.torch.paper.on_paper import PaperClock
from lowtide.torch.paper.operations import flops_of, seconds_of
from tests.torch.blocks import BLOCKS, Size, block

MOVING = Device(
    name="moves a byte in a second, computes at once",
    memory=1,
    bandwidth=1.0,
    float32=1e30,
    float16=1e30,
    float64=1e30,
    start=0.0,
    compute_share=1.0,
    bandwidth_share=1.0,
)


class Flops(TorchDispatchMode):
    """Adds up `flops_of`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.total += flops_of(func, args, kwargs or {}, result)
        return result


def moved(function: Callable[[], Any]) -> int:
    """Bytes that the operations inside are taken to move."""
    with PaperClock(MOVING) as clock:
        function()
    return int(clock.seconds)


@pytest.mark.parametrize("name", BLOCKS)
def test_operations_are_as_many_as_torch_counts(name: str) -> None:
    made = block(name, Size())
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, Flops() as flops:
        outputs = tree_leaves(made.module(*made.args, **made.kwargs))
        needing = [each for each in outputs if isinstance(each, torch.Tensor) and each.requires_grad]
        torch.stack([each.sum() for each in needing]).sum().backward()
    assert flops.total == counter.get_total_flops() > 0


def test_attention_in_one_operation_counts_as_much_as_written_out() -> None:
    query, key, value = (torch.randn(2, 3, 10, 8, requires_grad=True) for _ in range(3))
    counts = {}
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend), Flops() as flops:
            loss = functional.scaled_dot_product_attention(query, key, value, is_causal=True).sum()
            forward = flops.total
            loss.backward()
        counts[backend] = forward, flops.total - forward
    product = 2 * (2 * 3) * 10 * 10 * 8
    assert counts[SDPBackend.MATH] == (2 * product, 4 * product)
    # The scores are not kept but computed again.
    assert counts[SDPBackend.FLASH_ATTENTION] == (2 * product, 5 * product)


def test_bytes_are_those_that_are_read_and_written() -> None:
    x, y = torch.randn(5, 8), torch.randn(5, 8)
    assert moved(lambda: x + y) == 3 * 160
    assert moved(lambda: x.add_(y)) == 3 * 160
    assert moved(lambda: x.sum()) == 160 + 4
    assert moved(lambda: x.half()) == 160 + 80
    assert moved(lambda: torch.zeros(5, 8)) == 160
    assert moved(lambda: x.to_sparse().to_dense()) > 160


def test_what_is_expanded_is_read_once() -> None:
    x, row = torch.randn(5, 8), torch.randn(8)
    assert moved(lambda: x * row.expand(5, 8)) == 2 * 160 + 32


def test_a_table_is_read_where_it_is_looked_up() -> None:
    table, places = torch.randn(1000, 8), torch.tensor([3, 5])
    assert moved(lambda: functional.embedding(places, table)) == 64 + 16 + 64
    assert moved(lambda: table[places]) == 64 + 16 + 64


def test_views_and_allocations_take_no_time() -> None:
    x = torch.randn(4, 6)
    with PaperClock(Device(name="slow", memory=1, bandwidth=1, float32=1, float16=1, float64=1, start=1.0)) as clock:
        x.t().reshape(6, 4).unsqueeze(0).detach()
        torch.ops.aten._unsafe_view(x, [24])
        torch.empty(100)
        torch.empty_like(x)
        x.sum().item()
    assert clock.seconds == pytest.approx(1 + (96 + 4) / 0.8)


def test_a_matrix_product_takes_as_long_as_its_operations_where_those_are_slower() -> None:
    device = Device(name="d", memory=1, bandwidth=1e9, float32=4.0, float16=8.0, float64=2.0, start=0, compute_share=1)
    for dtype, rate in ((torch.float32, 4), (torch.bfloat16, 8), (torch.float64, 2)):
        x = torch.zeros(3, 5, dtype=dtype)
        y = x @ x.t()
        assert seconds_of(torch.ops.aten.mm.default, (x, x.t()), {}, y, device) == 2 * 3 * 3 * 5 / rate


def test_the_backward_is_timed_too() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    with PaperClock(MOVING) as clock:
        loss = x.exp().sum()
        forward = clock.seconds
        loss.backward()
    assert forward == 2 * 60 + 60 + 4
    assert clock.seconds > forward


def test_a_recurrent_layer_counts_as_much_as_written_out() -> None:
    counts = []
    for dtype in (torch.float32, torch.float64):  # which is not one operation
        x, layer = torch.randn(5, 2, 8, dtype=dtype), nn.LSTM(8, 16, dtype=dtype)
        with Flops() as flops:
            loss = layer(x)[0].sum()
            forward = flops.total
            loss.backward()
        counts.append((forward, flops.total - forward))
    assert counts[0][0] == counts[1][0] == 2 * (5 * 2) * (4 * 16) * (8 + 16)
    assert counts[0][1] == 2 * counts[0][0] >= counts[1][1]  # which leaves out what nobody asks for


def test_products_of_groups_count_as_much_as_one_by_one() -> None:
    rows, weights, ends = torch.randn(8, 16), torch.randn(2, 16, 24), torch.tensor([3, 8], dtype=torch.int32)
    each = 2 * 8 * 16 * 24
    for a, b, offsets, count in (
        (rows, weights, ends, each),
        (weights.mT, rows.t(), ends, each),
        (rows.t(), torch.randn(8, 24), ends, each),
        (weights.mT, weights, None, 2 * 2 * 24 * 16 * 24),
    ):
        with Flops() as flops:
            torch._grouped_mm(a, b, offs=offsets)
        assert flops.total == count
