"""What is alive and since when: the most bytes without what turns out to be a result, against every moment."""

from __future__ import annotations

import sys
import threading
from time import sleep

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lowtide.torch as lt
from lowtide.torch.memory.tracker import Curve, Lifetimes, Memory


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_it_is_what_looking_at_every_moment_gives(data: st.DataObject) -> None:
    lives = Lifetimes()
    sizes: dict[int, int] = {}
    moments: list[dict[int, int]] = [{}]
    left_out: set[int] = set()
    for key in range(data.draw(st.integers(0, 15))):
        sizes[key] = data.draw(st.integers(0, 20))
        lives.begin(key, 0)
        assert lives.resize(key, sizes[key]) == sizes[key]
        lives.level(sum(sizes.values()))
        moments.append(dict(sizes))
        for other in data.draw(st.lists(st.sampled_from(sorted(sizes)), unique=True)) if sizes else ():
            if data.draw(st.booleans()):
                left_out.add(other)
                lives.leave_out(other)
            else:
                size, born = lives.end(other)
                assert size == sizes.pop(other)
                assert (born is not None) == (other in left_out)
                lives.level(sum(sizes.values()))
                moments.append(dict(sizes))
    assert set(lives) == set(sizes)
    results = left_out | set(sizes)
    expected = max(sum(size for key, size in moment.items() if key not in results) for moment in moments)
    assert lives.most(living=False) == expected
    left = max(sum(size for key, size in moment.items() if key not in left_out) for moment in moments)
    assert lives.most(living=True) == left


def test_what_is_not_known_has_no_bytes() -> None:
    lives = Lifetimes()
    lives.leave_out(7)
    assert lives.end(7) == (0, None)
    assert lives.most(living=False) == 0


def test_moments_are_forgotten() -> None:
    with lt.measure.peak() as memory:
        first = torch.ones(1000)
        del first
        second = torch.ones(10)
        memory.restart_peak()
        third = torch.ones(100)
        del third
        assert memory.beyond() == 400
    assert second.numel() == 10


def test_results_and_what_comes_back_from_the_loss_are_no_part_of_a_loops_memory() -> None:
    """The stacked outputs and their cotangent are as large as the rest; the plain loop has them too."""
    weight = torch.full((8,), 0.5, requires_grad=True)
    xs = torch.ones(64, 8)
    plan = lt.plan_scan(lambda h, x: (torch.tanh(h * weight + x), h), torch.zeros(8), xs, budget="2KiB")
    with lt.record() as receipt:
        _, ys = lt.checkpointed_scan(lambda h, x: (torch.tanh(h * weight + x), h), torch.zeros(8), xs, plan=plan)
        ys.backward(torch.ones_like(ys))
        del ys
    assert receipt.held >= xs.nbytes
    assert receipt.peak_memory > 2048
    assert receipt.peak_memory - receipt.held <= plan.bill.peak_memory <= 2048


def test_what_grows_was_small_before() -> None:
    with lt.measure.peak() as memory:
        small = torch.empty(0)
        big = torch.empty(1000)
        del big
        small.resize_(1000)
        assert memory.beyond() == 4000  # the big one; the other is alive, and was nothing then
    assert small.numel() == 1000


def test_left_out_from_now_on() -> None:
    lives = Lifetimes()
    lives.begin(1, 100)
    lives.level(100)
    lives.leave_out(1, from_now=True)
    lives.leave_out(1, from_now=True)
    lives.begin(2, 50)
    lives.level(150)
    assert lives.end(2) == (50, None)
    assert lives.most(living=True) == 100
    size, born = lives.end(1)
    assert size == 100
    assert born is not None
    assert lives.most(living=True) == 100


@pytest.mark.parametrize("batch", [2, 16, 128])
def test_running_sums_of_gradients_are_the_gradients_of_the_plain_loop(batch: int) -> None:
    """Large weights beside a small batch: the sums are as large as everything else."""
    torch.manual_seed(0)
    cell = nn.GRUCell(16, 32)

    def step(h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = cell(x, h)
        return h, h.mean()

    start, xs = torch.zeros(batch, 32), torch.randn(60, batch, 16)
    plan = lt.plan_scan(step, start, xs, budget="60%", reduce="mean")
    with lt.record() as receipt:
        lt.checkpointed_scan(step, start, xs, plan=plan, reduce="mean")[1].backward()
    measured = receipt.peak_memory - receipt.held
    assert 0.6 * plan.bill.peak_memory <= measured <= plan.bill.peak_memory


def test_tapes_that_are_alive_are_no_results() -> None:
    weight = torch.full((64,), 0.5, requires_grad=True)
    xs = torch.ones(50, 64)
    with lt.record() as receipt:
        loss = lt.checkpointed_for_loop(lambda x: torch.tanh(x * weight).sum(), xs, base=50).sum()
        assert receipt.peak_memory - receipt.held > 50 * 64 * 4
    assert receipt.peak_memory - receipt.held > 50 * 64 * 4
    assert max(receipt.curve) > 50 * 64 * 4
    loss.backward()


def test_gradients_of_inputs_are_results() -> None:
    xs = torch.ones(50, 64, requires_grad=True)
    with lt.record() as receipt:
        lt.checkpointed_for_loop(lambda x: x.sin().sum(), xs, base=5).sum().backward()
    assert receipt.held >= xs.nbytes


def test_tensors_may_die_in_any_thread() -> None:
    """Nothing is raised into the user's operations, and nothing is lost, however threads take turns."""
    boxes: list[list[torch.Tensor]] = [[] for _ in range(3)]
    stop = threading.Event()

    def drop(box: list[torch.Tensor]) -> None:
        while not stop.is_set():
            if box:
                box.pop()

    threads = [threading.Thread(target=drop, args=(box,)) for box in boxes]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        with lt.record() as receipt:
            for k in range(2_000):
                boxes[k % 3].append(torch.ones(10))
            while any(boxes):
                sleep(0.001)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert receipt.peak_memory <= 2_000 * 40
    assert receipt.held == 0


def test_without_a_curve_there_is_none() -> None:
    with lt.measure.peak() as memory:
        torch.ones(3)
    assert memory.curve_beyond() == ()


def test_what_is_left_out_is_so_after_it_has_grown() -> None:
    with lt.measure.peak() as memory:
        result = torch.empty(100)
        memory.leave_out(result)
        result.resize_(1000)
        other = torch.empty(10)
        assert memory.beyond(living=True) == 40
    assert result.numel() + other.numel() == 1010


def test_a_curve_is_that_of_the_memory_that_counts() -> None:
    memory = Memory(Curve())
    memory.see(torch.empty(1000))
    with FakeTensorMode():
        memory.see(torch.empty(10, device="cuda"))
    assert max(memory.curve_beyond(living=True)) == 40


def test_a_sparse_tensor_has_no_storage_to_follow() -> None:
    memory = Memory()
    memory.see(torch.ones(4).to_sparse())
    assert (memory.now, memory.peaks) == (0, {})
