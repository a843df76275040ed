"""Steps are run as often as the plan's bill says, counted inside the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lowtide.torch as lt
from lowtide.planners.revolve import plain_runs
from lowtide.torch.state.capture import Walk


def counting(runs: list[int]) -> Callable[[Any, torch.Tensor], Any]:
    w = torch.randn(3, 3, requires_grad=True)

    def step(carry: Any, k: torch.Tensor) -> Any:
        runs[int(k)] += 1
        return torch.tanh(carry @ w), carry.sum()

    return step


def counted(length: int, **options: Any) -> tuple[list[int], lt.Recording]:
    runs = [0] * length
    with lt.record(memory=False) as receipt:
        carry, ys = lt.checkpointed_scan(counting(runs), torch.ones(2, 3), torch.arange(length), **options)
        (carry.sum() + ys.sum()).backward()
    return runs, receipt


@pytest.mark.parametrize("length", [1, 2, 3, 13, 50, 97])
@pytest.mark.parametrize("slots", [1, 2, 3, 5, 10])
def test_a_number_of_snapshots_costs_the_binomial_optimum(length: int, slots: int) -> None:
    runs, receipt = counted(length, checkpoints=slots)
    assert sum(runs) == plain_runs(length, slots) + length
    assert (receipt.plain_runs, receipt.taping_runs, receipt.backward_runs) == (
        plain_runs(length, slots),
        length,
        length,
    )
    assert receipt.probe_runs == 0


@pytest.mark.parametrize("length", [1, 2, 7, 31, 64])
@pytest.mark.parametrize("options", [{"base": 1}, {"base": 4}, {"base": 100}, {}], ids=str)
def test_other_knobs_cost_their_bill(length: int, options: dict[str, Any]) -> None:
    w = torch.randn(3, 3, requires_grad=True)
    plan = lt.plan_scan(lambda h, k: (torch.tanh(h @ w), h.sum()), torch.ones(2, 3), torch.arange(length), **options)
    runs, receipt = counted(length, **options)
    assert sum(runs) == plan.bill.plain_runs + plan.bill.taping_runs
    assert receipt.probe_runs == 0
    assert max(runs) <= 2


@pytest.mark.parametrize("budget", [1_200, 1_500, 2_000, 10_000, "100%"])
def test_a_budget_costs_its_bill(budget: int | str) -> None:
    budget = 40_000 if budget == "100%" else budget
    with pytest.warns(UserWarning, match="moved runs"):
        plan = lt.plan_scan(counting([0] * 120), torch.ones(2, 3), torch.arange(120), budget=budget)
    runs, receipt = counted(120, budget=budget)
    assert sum(runs) == plan.bill.plain_runs + plan.bill.taping_runs + receipt.probe_runs
    assert receipt.probe_runs == 0
    assert receipt.plain_runs == plan.bill.plain_runs


def test_a_budget_that_holds_every_tape_costs_nothing_extra() -> None:
    runs, receipt = counted(60, budget="1MB")
    assert runs == [1] * 60
    assert (receipt.plain_runs, receipt.probe_runs) == (0, 0)


def test_a_plan_made_before_is_followed() -> None:
    w = torch.randn(3, 3, requires_grad=True)
    plan = lt.plan_scan(lambda h, k: (torch.tanh(h @ w), h.sum()), torch.ones(2, 3), torch.arange(50), checkpoints=4)
    runs, receipt = counted(50, plan=type(plan).from_json(plan.to_json()))
    assert sum(runs) == plan.bill.plain_runs + 50
    assert receipt.plain_runs == plan.bill.plain_runs


@pytest.mark.parametrize("length", [1, 2, 3, 10, 60])
@pytest.mark.parametrize("slots", [1, 2, 4, 50])
def test_a_while_loop_costs_what_the_online_plan_does(length: int, slots: int) -> None:
    from lowtide import Chain, StepCost
    from lowtide.planners.online import Online

    w = torch.randn(3, 3, requires_grad=True)
    runs = [0]

    def body(carry: Any) -> Any:
        runs[0] += 1
        return torch.tanh(carry[0] @ w), carry[1] + 1

    with lt.record(memory=False) as receipt:
        carry = lt.checkpointed_while_loop(lambda c: c[1] < length, body, (torch.ones(2, 3), 0), checkpoints=slots)
        assert carry[1] == length
        carry[0].sum().backward()
    bill = Online(slots).bill(Chain.equal(StepCost(1, 1), length))
    assert runs[0] == bill.plain_runs + bill.taping_runs
    assert (receipt.plain_runs, receipt.taping_runs, receipt.probe_runs) == (bill.plain_runs, length, 0)


def with_twenty_snapshots(steps: int) -> None:
    w = torch.tensor(0.5, requires_grad=True)

    def step(h: torch.Tensor, k: Any) -> Any:
        return torch.sin(h * w + 0.1), None

    carry, _ = lt.checkpointed_scan(step, torch.zeros(4), lt.Steps(lambda k: k, steps), checkpoints=20)
    carry.sum().backward()


@pytest.mark.long
def test_memory_does_not_grow_with_the_length(record_property: Any) -> None:
    """With 20 snapshots, 2,000 tiny steps hold what 500 do."""

    def peak(steps: int) -> int:
        with lt.measure.peak() as memory:
            with_twenty_snapshots(steps)
        return memory.peak

    short, long = peak(500), peak(2_000)
    record_property("figure", f"20 snapshots: {short:,} B at 500 steps, {long:,} B at 2,000")
    assert long == short


@pytest.mark.long
@pytest.mark.parametrize("steps", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_very_long_loops_cost_the_binomial_optimum_too(steps: int) -> None:
    """A benchmark has a million steps."""
    with lt.record(memory=False) as receipt:
        with_twenty_snapshots(steps)
    assert (receipt.plain_runs, receipt.taping_runs) == (plain_runs(steps, 20), steps)


def test_graphs_are_walked_once_for_each_number_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at every step of a stretch in which steps make more nodes than those before."""
    walked: list[int] = []
    really = Walk.check

    def check(k: int, *rest: Any) -> None:
        walked.append(k)
        really(k, *rest)

    monkeypatch.setattr(Walk, "check", staticmethod(check))
    w = torch.randn(3, 3, requires_grad=True)

    def step(carry: Any, k: torch.Tensor) -> Any:
        carry = torch.tanh(carry @ w)
        return (carry.sin().cos().sin().cos() if int(k) >= 10 else carry), carry.sum()

    carry, _ = lt.checkpointed_scan(step, torch.ones(2, 3), torch.arange(60), base=60)
    carry.sum().backward()
    assert len(set(walked)) <= 6
