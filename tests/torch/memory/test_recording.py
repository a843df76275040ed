"""Receipts of what runs inside a block, and whether a step is being run again."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from time import sleep
from typing import Any

import pytest
import torch

import lowtide.torch as lt
from lowtide import Receipt
from lowtide.planners.revolve import plain_runs
from lowtide.sizes import format_size
from lowtide.torch import measure
from lowtide.torch.memory import recording, tracker

LENGTH = 20
KNOBS: dict[str, dict[str, Any]] = {
    "none": {},
    "base": {"base": 3},
    "every tape": {"base": 100},
    "one snapshot": {"checkpoints": 1},
    "checkpoints": {"checkpoints": 3},
    "budget": {"budget": "1MB"},
    "small budget": {"budget": 500},
    "with grad": {"checkpoints": 2, "advance_with_grad": True},
}


class Asking:
    """A step that notes, for each of its runs, whether it is told to be run again."""

    def __init__(self) -> None:
        self.w = torch.full((3,), 0.9, requires_grad=True)
        self.answers: list[list[bool]] = [[] for _ in range(LENGTH)]

    def step(self, h: torch.Tensor, k: torch.Tensor) -> Any:
        self.answers[int(k)].append(lt.is_recomputing())
        return torch.sin(h * self.w), h.sum()

    def forward(self, **options: Any) -> Any:
        h, ys = lt.checkpointed_scan(self.step, torch.ones(3), torch.arange(LENGTH), **options)
        return h.sum() + ys.sum()

    def run_again(self) -> int:
        """How many runs were reruns; every step must have had one run first that was none."""
        assert [answers[0] for answers in self.answers] == [False] * LENGTH
        assert [sum(not again for again in answers) for answers in self.answers] == [1] * LENGTH
        return sum(map(sum, self.answers))


@pytest.mark.parametrize("knob", KNOBS)
def test_only_reruns_are_told_that_they_are(knob: str) -> None:
    asking = Asking()
    with lt.record(memory=False) as receipt:
        loss = asking.forward(**KNOBS[knob])
        # Within a budget that a heavier step might not fit, some steps are measured before they run for the plan.
        assert asking.run_again() == receipt.probe_runs == (8 if knob == "small budget" else 0)
        assert not lt.is_recomputing()
        loss.backward()
    assert not lt.is_recomputing()
    assert asking.run_again() == receipt.probe_runs + receipt.plain_runs + receipt.taping_runs - LENGTH


def test_nothing_is_a_rerun_without_grad_or_in_plain_loops() -> None:
    asking = Asking()
    with torch.no_grad():
        asking.forward(base=2)
    assert asking.run_again() == 0
    asking = Asking()
    h, ys = lt.scan(asking.step, torch.ones(3), torch.arange(LENGTH))
    (h.sum() + ys.sum()).backward()
    assert asking.run_again() == 0


def test_a_second_backward_runs_everything_again() -> None:
    asking = Asking()
    loss = asking.forward(base=LENGTH)
    loss.backward(retain_graph=True)
    assert asking.run_again() == 0
    loss.backward()
    assert asking.run_again() == LENGTH


def test_a_backward_that_can_be_differentiated_is_a_rerun() -> None:
    asking = Asking()
    loss = asking.forward(base=LENGTH)
    with lt.record(memory=False) as receipt:
        (grad,) = torch.autograd.grad(loss, asking.w, create_graph=True)
        assert asking.run_again() == receipt.taping_runs == LENGTH
        torch.autograd.grad(grad.sum(), asking.w)
        assert asking.run_again() == LENGTH


def test_while_loops_tell_their_reruns() -> None:
    w = torch.full((3,), 0.9, requires_grad=True)
    answers: list[bool] = []

    def body(carry: Any) -> Any:
        answers.append(lt.is_recomputing())
        return carry[0] * w, carry[1] + 1

    h, _ = lt.checkpointed_while_loop(lambda c: c[1] < LENGTH, body, (torch.ones(3), 0), checkpoints=3)
    assert answers == [False] * LENGTH
    h.sum().backward()
    assert len(answers) > LENGTH
    assert all(answers[LENGTH:])


def test_a_loop_in_a_step_is_run_again_with_it() -> None:
    w = torch.full((2,), 0.9, requires_grad=True)
    answers: list[bool] = []

    def inner(h: torch.Tensor, _: Any) -> Any:
        answers.append(lt.is_recomputing())
        return torch.sin(h * w), None

    def outer(h: torch.Tensor, _: Any) -> Any:
        return lt.checkpointed_scan(inner, h, length=4, base=2)

    h, _ = lt.checkpointed_scan(outer, torch.ones(2), length=5, base=2)
    assert answers == [False] * 20
    h.sum().backward()
    assert len(answers) > 20
    assert all(answers[20:])


def test_threads_are_told_for_themselves() -> None:
    """While one thread reruns, another one's first runs are first runs."""
    rerunning, done = threading.Event(), threading.Event()
    here: list[bool] = []
    asking = Asking()

    def waiting(h: torch.Tensor, _: Any) -> Any:
        here.append(lt.is_recomputing())
        if lt.is_recomputing() and not rerunning.is_set():
            rerunning.set()
            assert done.wait(60)
        return h * asking.w, None

    def backward() -> None:
        h, _ = lt.checkpointed_scan(waiting, torch.ones(3), length=6, base=2)
        h.sum().backward()

    thread = threading.Thread(target=backward)
    thread.start()
    assert rerunning.wait(60)
    assert not lt.is_recomputing()
    loss = asking.forward(base=3)
    assert asking.run_again() == 0
    loss.backward()
    assert asking.run_again() > 0
    done.set()
    thread.join()
    assert here[:6] == [False] * 6
    assert len(here) > 6
    assert all(here[6:])


def test_a_backward_in_another_thread_is_a_rerun_there() -> None:
    asking = Asking()
    with lt.record(memory=False) as receipt:
        loss = asking.forward(checkpoints=2)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert asking.run_again() == receipt.plain_runs == plain_runs(LENGTH, 2)
    assert receipt.backward_runs == LENGTH


def test_a_step_that_fails_in_a_rerun_leaves_no_trace() -> None:
    w = torch.ones(2, requires_grad=True)

    def step(h: torch.Tensor, _: Any) -> Any:
        if lt.is_recomputing():
            raise RuntimeError("only once")
        return h * w, None

    h, _ = lt.checkpointed_scan(step, torch.ones(2), length=6, base=2)
    with pytest.raises(RuntimeError, match="only once"):
        h.sum().backward()
    assert not lt.is_recomputing()


def test_recomputing_and_plainly_nest() -> None:
    states: list[tuple[bool, bool]] = []

    def note() -> None:
        states.append((recording.is_recomputing(), recording.runs_plainly()))

    note()
    with recording.recomputing():
        with recording.recomputing(), recording.plainly(), recording.plainly():
            note()
        note()
    note()
    assert states == [(False, False), (True, True), (True, False), (False, False)]


def test_inside_plainly_checkpointed_loops_are_plain_ones() -> None:
    w = torch.full((3,), 0.9, requires_grad=True)
    with lt.record(memory=False) as receipt, recording.plainly():
        h, _ = lt.checkpointed_scan(lambda h, _: (h * w, None), torch.ones(3), length=5, base=2)
        other = lt.checkpointed_while_loop(lambda h: bool(h[0] > 0.7), lambda h: h * w, torch.ones(3))
        (h.sum() + other.sum()).backward()
    assert receipt.receipt == Receipt(seconds=receipt.seconds)


@pytest.mark.parametrize("memory", [True, False])
def test_a_receipt_counts_runs(memory: bool) -> None:
    with lt.record(memory=memory) as receipt:
        Asking().forward(checkpoints=3).backward()
    assert receipt.plain_runs == plain_runs(LENGTH, 3)
    assert (receipt.taping_runs, receipt.backward_runs, receipt.probe_runs) == (LENGTH, LENGTH, 0)
    assert (receipt.peak_memory > 0) is memory


def test_planning_is_written_down_as_runs_that_measure() -> None:
    asking = Asking()
    with lt.record(memory=False) as receipt, pytest.warns(UserWarning, match=r"self\.answers"):
        lt.plan_scan(asking.step, torch.ones(3), torch.arange(LENGTH), budget="1MB")
    assert receipt.probe_runs == sum(map(len, asking.answers)) == 2
    assert (receipt.plain_runs, receipt.taping_runs, receipt.backward_runs) == (0, 0, 0)


def test_peak_memory_is_what_measure_sees() -> None:
    with lt.record() as receipt, measure.peak() as memory:
        kept = torch.ones(100) + torch.ones(100)
        assert receipt.peak_memory == memory.peak
    assert receipt.peak_memory == memory.peak == 3 * kept.nbytes


def test_the_receipt_is_a_value_of_what_was_recorded_so_far() -> None:
    with lt.record() as growing:
        empty = growing.receipt
        Asking().forward(base=4).backward()
        full = growing.receipt
    assert (empty.plain_runs, empty.taping_runs, empty.peak_memory) == (0, 0, 0)
    assert isinstance(full, Receipt)
    assert growing.receipt == Receipt(
        plain_runs=full.plain_runs,
        taping_runs=LENGTH,
        backward_runs=LENGTH,
        probe_runs=0,
        peak_memory=growing.peak_memory,
        peak_disk=0,
        seconds=growing.seconds,
        held=growing.held,
        curve=growing.curve,
    )


def test_the_curve_and_what_is_held_end_with_the_block() -> None:
    with lt.record() as receipt:
        start = torch.ones(1000, requires_grad=True)
        assert receipt.held == 4000
        middle = start.exp()
        sleep(0.001)  # for longer than a share of time
        del middle
        assert receipt.held == 4000
        sleep(0.001)
    curve, held = receipt.curve, receipt.held
    del start
    assert (receipt.curve, receipt.held) == (curve, held) == (receipt.receipt.curve, 4000)
    assert receipt.peak_memory == 8000
    assert 4000 in curve  # the middle, beside what is left out
    assert curve[-1] == 0
    assert 1 <= len(curve) <= 400


def test_without_memory_there_is_no_curve() -> None:
    with lt.record(memory=False) as receipt:
        torch.ones(10)
    assert (receipt.curve, receipt.held, receipt.peak_memory) == ((), 0, 0)


def test_a_curve_of_any_length_has_a_few_hundred_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(tracker, "perf_counter", lambda: clock[0])
    curve = tracker.Curve()
    for second in range(1000):
        clock[0] = float(second)
        curve.see(second if second != 500 else 5000)
    clock[0] = 1200.0
    values = curve.values()
    assert 200 <= len(values) <= 400
    assert max(values) == 5000
    assert values[-1] == 999
    assert values[0] < values[len(values) // 3] < values[len(values) // 2]
    curve.leave_out(100.0, 50)
    without = curve.values([(600.0, 30)])
    assert without[0] == values[0]
    assert without[len(values) // 3] == values[len(values) // 3] - 50
    assert without[-2] == values[-2] - 80


def test_seconds_stop_when_the_block_ends() -> None:
    with lt.record(memory=False) as receipt:
        before = receipt.seconds
        assert receipt.seconds >= before >= 0
    assert receipt.seconds == receipt.seconds >= before


def test_json_and_text_are_those_of_the_receipt() -> None:
    with lt.record() as receipt:
        Asking().forward(checkpoints=2).backward()
    assert Receipt.from_json(receipt.to_json()) == receipt.receipt
    assert json.loads(receipt.to_json())["receipt"]["plain_runs"] == plain_runs(LENGTH, 2)
    first, second, third = str(receipt).splitlines()
    assert first == f"runs    {plain_runs(LENGTH, 2)} plain, 20 taping, 20 backward, 0 to measure"
    assert second.startswith("peak    ")
    assert second.endswith(f" of memory ({format_size(receipt.held)} of it results and gradients), 0 B of disk")
    assert third.startswith("time    ")


def test_recordings_inside_one_another_each_count() -> None:
    with lt.record(memory=False) as outer:
        Asking().forward(base=LENGTH).backward()
        with lt.record(memory=False) as inner:
            Asking().forward(base=LENGTH).backward()
        after = inner.receipt
        Asking().forward(base=LENGTH).backward()
    assert (outer.taping_runs, outer.backward_runs) == (3 * LENGTH, 3 * LENGTH)
    assert (inner.taping_runs, inner.backward_runs) == (LENGTH, LENGTH)
    assert inner.receipt == after


@pytest.mark.parametrize("memory", [True, False])
def test_a_recording_ends_when_its_block_fails(memory: bool) -> None:
    recordings: list[lt.Recording] = []

    def fails() -> None:
        with lt.record(memory=memory) as receipt:
            recordings.append(receipt)
            Asking().forward(base=LENGTH)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fails()
    (receipt,) = recordings
    ended = receipt.receipt
    Asking().forward(base=LENGTH).backward()
    assert receipt.receipt == ended
    assert receipt.taping_runs == LENGTH
    assert recording._open == []


@pytest.mark.parametrize(
    "work", [lambda: None, lambda: torch.ones(3).sum(), lambda: lt.scan(lambda h, x: (h, x), 0, torch.ones(3))]
)
def test_what_is_no_checkpointed_loop_has_no_runs(work: Callable[[], Any]) -> None:
    with lt.record() as receipt:
        work()
    assert receipt.plain_runs + receipt.taping_runs + receipt.backward_runs + receipt.probe_runs == 0
