"""Bytes of tensors, followed from their making to their end."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.torch import measure

KB = 1024


def block(kilobytes: int = 1) -> torch.Tensor:
    return torch.empty(kilobytes * KB, dtype=torch.uint8)


def test_what_is_made_counts_until_it_dies() -> None:
    with measure.peak() as memory:
        a = block(2)
        assert (memory.now, memory.peak) == (2 * KB, 2 * KB)
        b = block(3)
        assert (memory.now, memory.peak) == (5 * KB, 5 * KB)
        del a
        assert (memory.now, memory.peak) == (3 * KB, 5 * KB)
        c = block(1)
        assert (memory.now, memory.peak) == (4 * KB, 5 * KB)
        del b, c
        assert (memory.now, memory.peak) == (0, 5 * KB)
    assert (memory.now, memory.peak) == (0, 5 * KB)


def test_a_block_of_nothing_costs_nothing() -> None:
    with measure.peak() as memory:
        pass
    assert (memory.now, memory.peak) == (0, 0)


def test_what_existed_before_does_not_count_nor_what_dies_of_it() -> None:
    a, b = block(4), block(4)
    with measure.peak() as memory:
        a.add_(1)
        view = b[:100].view(10, 10)
        assert (memory.now, memory.peak) == (0, 0)
        del a, b, view
    assert (memory.now, memory.peak) == (0, 0)


def test_views_and_changes_in_place_are_not_counted_twice() -> None:
    with measure.peak() as memory:
        a = torch.zeros(16, 16)
        views = [a.view(-1), a.t(), a[3], a.detach(), a.view_as(a), *a.unbind(0), a.expand(5, 16, 16)]
        a.add_(1).mul_(2)
        a[0] = 7.0
        torch.relu_(a)
        assert memory.now == a.nbytes
        del a
        assert memory.now == views[0].nbytes
        del views
        assert memory.now == 0


def test_a_view_keeps_its_whole_storage() -> None:
    with measure.peak() as memory:
        row = torch.zeros(64, 64)[0]
        assert memory.now == 64 * row.nbytes


def test_several_results_of_one_operation_all_count() -> None:
    with measure.peak() as memory:
        values, indices = torch.arange(8.0).max(0, keepdim=True)
        kept = torch.arange(8.0)
        assert memory.now == values.nbytes + indices.nbytes + kept.nbytes


def test_intermediate_results_are_seen_and_freed() -> None:
    a = torch.ones(256)
    with measure.peak() as memory:
        c = (a + 1) * 2
    assert (memory.now, memory.peak) == (c.nbytes, 2 * c.nbytes)


def test_results_that_are_kept_can_die_after_the_block() -> None:
    with measure.peak() as memory:
        a = block(3)
    assert memory.now == 3 * KB
    del a
    assert (memory.now, memory.peak) == (0, 3 * KB)


def test_what_autograd_saves_lives_until_the_backward() -> None:
    w = torch.ones(256, requires_grad=True)
    with measure.peak() as memory:
        y: Any = (w * 2).exp().sum()
        saved = memory.now - y.untyped_storage().nbytes()
        y.backward()
        del y
        assert w.grad is not None
        assert memory.now == w.grad.nbytes
    assert saved == w.nbytes


def test_the_backward_is_seen() -> None:
    w = torch.ones(256, requires_grad=True)
    y = (w * w).sum()
    with measure.peak() as memory:
        (grad,) = torch.autograd.grad(y, w)
    assert memory.now == grad.nbytes
    assert memory.peak >= 2 * grad.nbytes


def test_the_tape_of_a_plain_loop_grows_by_the_same_bytes_each_step() -> None:
    def held(steps: int) -> int:
        w = torch.ones(64, requires_grad=True)
        with measure.peak() as memory:
            h = w
            for _ in range(steps):
                h = torch.tanh(h)
            return memory.now

    assert [held(steps) for steps in (1, 5, 9)] == [256, 5 * 256, 9 * 256]


@pytest.mark.long
def test_memory_held_by_cycles_counts_until_it_is_collected() -> None:
    gc.collect()
    with measure.peak() as memory:
        cycle: list[Any] = [block()]
        cycle.append(cycle)
        del cycle
        assert memory.now == KB
        gc.collect()
        assert memory.now == 0


def test_restart_peak_forgets_the_worst_moment() -> None:
    with measure.peak() as memory:
        a = block(5)
        b = block(1)
        del a
        assert memory.peak == 6 * KB
        memory.restart_peak()
        assert (memory.now, memory.peak) == (KB, KB)
        c = block(2)
        assert memory.peak == 3 * KB
        del b, c


def test_blocks_inside_one_another_each_count_their_own() -> None:
    with measure.peak() as outer:
        a = block(1)
        with measure.peak() as inner:
            b = block(2)
            assert (outer.now, inner.now) == (3 * KB, 2 * KB)
            del a
            assert (outer.now, inner.now) == (2 * KB, 2 * KB)
        c = block(4)
        assert (outer.peak, inner.peak) == (6 * KB, 2 * KB)
        del b, c
    assert (outer.now, inner.now) == (0, 0)


def test_a_block_that_fails_stops_watching() -> None:
    kept: list[torch.Tensor] = []
    memories: list[measure.Memory] = []

    def fails() -> None:
        with measure.peak() as memory:
            memories.append(memory)
            kept.append(block())
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fails()
    kept.append(block(7))
    assert (memories[0].now, memories[0].peak) == (KB, KB)
    kept.clear()
    assert memories[0].now == 0


def test_it_knows_which_storages_it_counts() -> None:
    before = block()
    with measure.peak() as memory:
        a = block()
        assert memory.knows(a)
        assert memory.knows(a[5:])
        assert not memory.knows(before)
        assert memory.alive() == {a.untyped_storage()._cdata}
    after = block()
    assert not memory.knows(after)
    del a
    assert memory.alive() == set()


def test_a_storage_is_seen_once_however_often_it_is_shown() -> None:
    memory = measure.Memory()
    a = block(2)
    for tensor in (a, a, a[1:], a.view(torch.int32)):
        memory.see(tensor)
    assert (memory.now, memory.peak) == (2 * KB, 2 * KB)
    del a, tensor
    assert memory.now == 0


def test_watching_goes_on_with_the_same_memory() -> None:
    memory = measure.Memory()
    with measure.watching(memory):
        a = block(1)
    b = block(10)
    with measure.watching(memory):
        c = block(2)
    assert (memory.now, memory.peak) == (3 * KB, 3 * KB)
    del a, b, c
    assert memory.now == 0


def test_each_device_counts_for_itself_and_accelerators_are_what_counts_if_there_are_any() -> None:
    memory = measure.Memory()
    here = block(1)
    memory.see(here)
    assert (memory.now, memory.peak) == (KB, KB)
    with FakeTensorMode():
        there, elsewhere = torch.empty(100, device="cuda:0"), torch.empty(50, device="cuda:1")
    memory.see(there)
    assert (memory.now, memory.peak, memory.alive()) == (400, 400, {there.untyped_storage()._cdata})
    memory.see(elsewhere)
    memory.see(torch.empty(300, device="meta"))
    assert not memory.knows(here)
    memory.leave_out(there)
    assert (memory.now, memory.peak, memory.beyond(living=True)) == (600, 600, 200)
    del there, elsewhere
    assert (memory.now, memory.peak) == (0, 600)
    assert memory.peaks == {"cpu": KB, "cuda:0": 400, "cuda:1": 200, "meta": 1200}


def test_operations_without_tensors_as_results_pass_through() -> None:
    a = torch.arange(4.0)
    with measure.peak() as memory:
        assert a.sum().item() == 6.0
        assert torch.equal(a, a)
    assert memory.now == 0


def test_storage_bytes_count_each_storage_once() -> None:
    a, b = torch.zeros(10, 10), torch.zeros(3, dtype=torch.float64)
    assert measure.storage_bytes([]) == 0
    assert measure.storage_bytes([a, a, a[0], a.t()]) == 400
    assert measure.storage_bytes([a[0], b, b.detach()]) == 424


def test_a_module_and_its_gradients() -> None:
    with measure.peak() as memory:
        net = nn.Linear(32, 16)
        assert memory.now == measure.storage_bytes(list(net.parameters())) == 4 * (32 * 16 + 16)
        net(torch.ones(4, 32)).sum().backward()
        assert memory.now == 2 * 4 * (32 * 16 + 16)


def test_there_is_a_line_for_each_device() -> None:
    with measure.peak() as memory:
        kept = torch.ones(100)
    assert memory.peaks == {"cpu": kept.nbytes}
