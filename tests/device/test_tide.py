"""The device that is made for tests behaves like an accelerator."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.device import tide

pytestmark = pytest.mark.usefixtures("the_tide")


def test_torch_takes_it_for_an_accelerator() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("tide")
    assert torch.accelerator.device_count() == 2


def test_its_numbers_are_those_of_the_cpu() -> None:
    x = torch.randn(8, 3, 9, 9)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.Linear(196, 5))
    found = []
    for device in ("cpu", "tide:1"):
        net = net.to(device)
        net.zero_grad()
        net(x.to(device)).square().sum().backward()
        found.append([parameter.grad.cpu() for parameter in net.parameters()])  # type: ignore[union-attr]
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
def test_recurrent_cells_are_those_of_the_cpu(cell: Callable[..., nn.Module]) -> None:
    net, x = cell(3, 5).double(), torch.randn(2, 3, dtype=torch.float64)
    found = []
    for device in ("cpu", "tide"):
        net = net.to(device)
        net.zero_grad()
        result = net(x.to(device))
        sum(each.square().sum() for each in (result if isinstance(result, tuple) else (result,))).backward()
        found.append([parameter.grad.cpu() for parameter in net.parameters()])  # type: ignore[union-attr]
    torch.testing.assert_close(*found)


def test_a_backward_runs_in_a_thread_of_the_device() -> None:
    x, threads = torch.ones(3, device="tide", requires_grad=True), list[threading.Thread]()
    y = x * 2
    y.register_hook(lambda _: threads.append(threading.current_thread()))
    y.sum().backward()
    assert threads != [threading.current_thread()]


def test_bytes_are_counted_for_each_device() -> None:
    before = tide.allocated(0), tide.allocated(1)
    x = torch.empty(100, device="tide:1")
    y = x[10:].view(9, 10)
    assert (tide.allocated(0), tide.allocated(1)) == (before[0], before[1] + 400)
    del x, y
    assert tide.allocated(1) == before[1]


def test_more_than_the_limit_is_refused() -> None:
    with tide.limited(1000):
        kept = torch.empty(200, device="tide")
        with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 400 bytes"):
            torch.empty(100, device="tide")
        del kept
        torch.empty(250, device="tide")


@pytest.mark.parametrize(
    ("waits", "what"),
    [
        (lambda x: x.sum().item(), "reads"),
        (lambda x: bool((x > 1).any()), "reads"),
        (lambda x: x[x > 1], "reads"),
        (torch.nonzero, "reads"),
        (lambda x: torch.equal(x, x), "reads"),
        (torch.Tensor.cpu, "to_host"),
        (torch.Tensor.tolist, "to_host"),
        (lambda _: torch.accelerator.synchronize(), "syncs"),
        (lambda _: torch.ones(3).to("tide"), "from_host"),
    ],
)
def test_what_makes_the_host_wait_is_counted(waits: Callable[[torch.Tensor], object], what: str) -> None:
    x = torch.ones(4, 4, device="tide")
    with tide.Watch() as watch:
        waits(x)
    assert watch.counts[what] == 1


def test_computing_makes_nobody_wait() -> None:
    x = torch.randn(4, 4, device="tide", requires_grad=True)
    with tide.Watch() as watch:
        y = (x @ x).reshape(2, 8).t().contiguous() + 1
        y[1:].mul_(2)
        y = torch.softmax(y, 0)
        y.sum().backward()
    assert watch.waits == 0


def test_devices_are_not_mixed() -> None:
    x, y = torch.ones(2, device="tide:0"), torch.ones(2, device="tide:1")
    for other in (y, torch.ones(2)):
        with pytest.raises(RuntimeError, match="same device"):
            x + other
    assert (y.to("tide:0") + x + torch.tensor(1.0)).device == torch.device("tide:0")


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(5, device="tide:1"),
        lambda: nn.functional.dropout(torch.ones(50, device="tide:1")),
        lambda: torch.randperm(20, device="tide:1"),
        lambda: torch.rand_like(torch.ones(5, device="tide:1")),
    ],
)
def test_each_device_draws_from_its_own_generator(draw: Callable[[], torch.Tensor]) -> None:
    device = torch.get_device_module("tide")
    states = torch.get_rng_state(), device.get_rng_state("tide:0")
    start = device.get_rng_state("tide:1")
    first = draw()
    assert not torch.equal(device.get_rng_state("tide:1"), start)
    assert all(map(torch.equal, states, (torch.get_rng_state(), device.get_rng_state("tide:0"))))
    device.set_rng_state(start, "tide:1")
    assert torch.equal(draw(), first)


def test_a_generator_of_the_users() -> None:
    generator = torch.Generator("tide").manual_seed(3)
    first = torch.randn(3, device="tide", generator=generator)
    assert torch.equal(torch.randn(3, device="tide", generator=generator.manual_seed(3)), first)


def test_autocast() -> None:
    x = torch.randn(3, 3, device="tide")
    with torch.autocast("tide", torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        assert (x + x).dtype is torch.float32


def test_the_clock_of_the_host_stands_still_until_it_waits() -> None:
    x, clock = torch.randn(1000, 1000, device="tide"), tide.extension().host_seconds
    torch.accelerator.synchronize()
    began = clock()
    x @ x
    assert clock() == began
    torch.accelerator.synchronize()
    assert 0.03 < clock() - began < 0.04  # 2e9 FLOPs at 1e11 a second, and 12 MB at 1e9


def _stream() -> torch.Stream:
    return torch.Stream(device="tide")


def test_copies_that_need_not_block_arrive_when_they_are_waited_for() -> None:
    here = torch.ones(4).pin_memory()
    assert here.is_pinned()
    there = torch.zeros(4, device="tide")
    torch.accelerator.synchronize()
    stream = _stream()
    with tide.Watch() as watch, stream:
        there.copy_(here, non_blocking=True)
    assert (there + 0).tolist() == [0.0] * 4  # nobody has waited
    assert watch.waits == watch.counts["from_host"] == 0
    torch.accelerator.current_stream().wait_stream(stream)
    assert (there + 0).tolist() == [1.0] * 4
    back = torch.zeros(4).pin_memory()
    with stream:
        back.copy_(there, non_blocking=True)
    assert back.tolist() == [0.0] * 4
    stream.synchronize()
    assert back.tolist() == [1.0] * 4


def test_a_stream_comes_after_what_waits_in_it() -> None:
    there = torch.zeros(4, device="tide")
    there.copy_(torch.ones(4).pin_memory(), non_blocking=True)
    assert (there + 1).tolist() == [2.0] * 4


def test_an_event_is_waited_for() -> None:
    there, stream = torch.zeros(4, device="tide"), _stream()
    with stream:
        there.copy_(torch.ones(4).pin_memory(), non_blocking=True)
        event = stream.record_event()
    assert not event.query()
    torch.accelerator.current_stream().wait_event(event)
    assert (there + 0).tolist() == [1.0] * 4
    assert event.query()


def test_memory_that_is_freed_before_a_stream_has_used_it() -> None:
    stream, before = _stream(), tide.allocated()
    for recorded in (False, True):
        there, back = torch.ones(4, device="tide"), torch.zeros(4).pin_memory()
        with tide.Watch() as watch:
            with stream:
                back.copy_(there, non_blocking=True)
            if recorded:
                there.record_stream(stream)
            del there
        assert watch.counts["hazards"] == (not recorded)
        assert tide.allocated() == before + 16 * recorded
        stream.synchronize()
        assert (back.tolist() == [1.0] * 4) == recorded
        assert tide.allocated() == before


def test_copies_in_a_stream_take_their_time_beside_computing() -> None:
    clock, stream = tide.extension().host_seconds, _stream()
    x, there, here = torch.randn(1000, 1000, device="tide"), torch.empty(250_000, device="tide"), torch.empty(250_000)
    here = here.pin_memory()
    torch.accelerator.synchronize()
    began = clock()
    x @ x  # 0.032 seconds
    with stream:
        there.copy_(here, non_blocking=True)  # 0.010
    torch.accelerator.synchronize()
    assert 0.03 < clock() - began < 0.04


def test_pinned_bytes_are_counted() -> None:
    before = tide.extension().pinned_bytes()[0]
    here = torch.empty(100, pin_memory=True)
    assert tide.extension().pinned_bytes()[0] == before + 400
    del here
    assert tide.extension().pinned_bytes()[0] == before
