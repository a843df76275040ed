"""The most bytes without what turns out to be a result, against a list of every moment."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lowtide.torch as lt
from lowtide.torch.lifetimes import Lifetimes


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_it_is_what_looking_at_every_moment_gives(data: st.DataObject) -> None:
    lives = Lifetimes()
    sizes: dict[int, int] = {}
    moments: list[dict[int, int]] = [{}]
    left_out: set[int] = set()
    for key in range(data.draw(st.integers(0, 15))):
        sizes[key] = data.draw(st.integers(0, 20))
        lives.begin(key)
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
    assert lives.most() == expected


def test_what_is_not_known_has_no_bytes() -> None:
    lives = Lifetimes()
    lives.leave_out(7)
    assert lives.end(7) == (0, None)
    assert lives.most() == 0


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
