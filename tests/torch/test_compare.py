"""Comparing both ways finds no difference where there is none, finds those that there are, and leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide import InputError
from lowtide.torch.memory import recording
from lowtide.torch.state.bits import same_bits
from tests.torch.networks import NETWORKS, hidden_of

LENGTH = 24


def spiking_network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(4, 6),
        nn.BatchNorm1d(6),
        nn.Dropout(0.3),
        lt.spiking.Expon(5.0),
        lt.spiking.LIF(3.0, v_threshold=0.2),
        nn.Linear(6, 2),
        lt.spiking.Expon(9.0),
    )


@pytest.mark.untraced
@pytest.mark.parametrize("name", ["snn_torch", "spiking_jelly", "lif_modules", "batch_norm", "dropout"])
def test_networks_of_other_packages_agree_too(name: str) -> None:
    torch.manual_seed(1)
    net = NETWORKS[name](LENGTH, torch.float32)
    step = net.module if name != "dropout" else nn.Dropout(0.5)
    assert step is not None
    found = lt.compare_gradients(lambda: lt.checkpointed_for_loop(step, net.xs, checkpoints=3))
    assert found.same
    assert len(found.rows) >= 2


@pytest.mark.parametrize("knob", [{"base": 5}, {"checkpoints": 2}, {"budget": "1MB"}, {}], ids=str)
def test_a_spiking_network_with_dropout_agrees_to_the_last_bit(knob: dict[str, Any]) -> None:
    net = spiking_network()
    xs = torch.randn(LENGTH, 3, 4, requires_grad=True)
    found = lt.compare_gradients(lambda xs: lt.checkpointed_for_loop(net, xs, **knob).pow(2).sum(), xs)
    assert found.same
    assert {row.difference for row in found.rows} == {0.0}
    assert found.rows[0].name == "the result"
    names = [row.name for row in found.rows[1:]]
    assert "gradient of argument 0" in names
    for path in ("0.weight", "0.bias", "1.weight", "1.bias", "5.weight", "5.bias"):
        assert len([name for name in names if name.endswith(f".{path}")]) == 1
    assert len(names) == 7


def test_both_receipts_are_given() -> None:
    w = torch.full((64,), 0.9, requires_grad=True)

    def loss() -> Any:
        return lt.checkpointed_scan(lambda h, _: (torch.sin(h * w), None), torch.ones(64), length=LENGTH, base=4)[
            0
        ].sum()

    found = lt.compare_gradients(loss)
    assert (found.plain.plain_runs, found.plain.taping_runs, found.plain.backward_runs) == (0, 0, 0)
    assert (found.lowtide.taping_runs, found.lowtide.backward_runs) == (LENGTH, LENGTH)
    assert found.lowtide.plain_runs == LENGTH - 4
    assert 0 < found.lowtide.peak_memory < found.plain.peak_memory
    # One more finds out whether steps need grad.
    runs = found.lowtide.plain_runs + found.lowtide.probe_runs + LENGTH
    assert str(found).splitlines()[-1].startswith(f"{runs} runs of a step with Lowtide, at most ")
    assert str(found).endswith(" without")


def test_generators_and_modules_are_put_back() -> None:
    net = spiking_network()
    xs = torch.randn(LENGTH, 3, 4)
    with torch.no_grad():
        net(xs[0])
    before, random, grads = hidden_of(net), torch.get_rng_state(), [p.grad for p in net.parameters()]
    assert lt.compare_gradients(lambda: lt.checkpointed_for_loop(net, xs, checkpoints=3)).same
    after = hidden_of(net)
    assert before.keys() == after.keys()
    assert [name for name in before if not same_bits(before[name], after[name])] == []
    assert torch.equal(torch.get_rng_state(), random)
    assert [p.grad for p in net.parameters()] == grads == [None] * len(grads)


def test_they_are_put_back_when_the_function_fails() -> None:
    net = spiking_network()
    xs = torch.randn(LENGTH, 3, 4)
    with torch.no_grad():
        net(xs[0])
    before, random = hidden_of(net), torch.get_rng_state()

    def fails() -> None:
        lt.checkpointed_for_loop(net, xs, checkpoints=3)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        lt.compare_gradients(fails)
    after = hidden_of(net)
    assert [name for name in before if not same_bits(before[name], after[name])] == []
    assert torch.equal(torch.get_rng_state(), random)
    assert not recording.runs_plainly()
    assert recording._open == []


def test_the_function_runs_once_plainly_and_once_as_it_is() -> None:
    w = torch.ones(2, requires_grad=True)
    calls: list[bool] = []

    def loss(scale: float, *, shift: float) -> torch.Tensor:
        calls.append(recording.runs_plainly())
        return (w * scale + shift).sum()

    assert lt.compare_gradients(loss, 2.0, shift=1.0).same
    assert calls == [True, False]


def test_a_step_that_does_not_repeat_is_found_out() -> None:
    w = torch.ones(2, requires_grad=True)

    def step(h: torch.Tensor, _: Any) -> Any:
        return h * w * (2.0 if lt.is_recomputing() else 1.0), None

    found = lt.compare_gradients(
        lambda h: lt.checkpointed_scan(step, h * w, length=6, base=2, check_rerun=False)[0].sum(), torch.ones(2)
    )
    result, gradient = found.rows
    assert not found.same
    assert (result.same, result.difference) == (True, 0.0)
    assert not gradient.same
    assert gradient.difference > 0
    lines = str(found).splitlines()
    assert lines[0] == f"{'the result':<40} same bits"
    assert lines[1] == f"{'gradient of tensor 0 of shape (2,)':<40} differs by up to {gradient.difference:.3g}"


def test_another_result_is_found_out_with_its_largest_difference() -> None:
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    found = lt.compare_gradients(lambda w: w.sum() * (1.0 if recording.runs_plainly() else 3.5), w)
    assert [(row.same, row.difference) for row in found.rows] == [(False, 7.5), (False, 2.5)]
    assert "differs by up to 7.5" in str(found)
    assert [row.relative for row in found.rows] == [7.5 / 3, 2.5]
    assert found.relative == 2.5


@pytest.mark.parametrize(
    ("plain", "other", "difference"),
    [
        ([1.0, float("nan")], [1.0, 2.0], float("inf")),
        ([1.0, float("inf")], [1.0, -float("inf")], float("inf")),
        ([1.0, float("nan")], [1.5, float("nan")], 0.5),
        ([0.0, 0.0], [0.0, -0.0], 0.0),
    ],
    ids=["no number", "other sign", "no number in both", "zeros"],
)
def test_what_is_no_number_differs_from_what_is_one(plain: list[float], other: list[float], difference: float) -> None:
    w = torch.ones(2, requires_grad=True)
    found = lt.compare_gradients(lambda w: (w * torch.tensor(plain if recording.runs_plainly() else other)).sum(), w)
    assert (found.rows[1].same, found.rows[1].difference) == (False, difference)
    assert found.rows[1].relative == difference


def test_the_last_bit_is_enough_to_differ() -> None:
    w = torch.ones(1, requires_grad=True)
    found = lt.compare_gradients(lambda: w * (1.0 if recording.runs_plainly() else 1.0 + 2**-23))
    assert not found.same
    assert {row.difference for row in found.rows} == {2.0**-23}


def test_nan_agrees_with_itself() -> None:
    w = torch.tensor([float("nan"), 1.0], requires_grad=True)
    assert lt.compare_gradients(lambda: w * w).same


@pytest.mark.parametrize("factor", [0.0, 2.0])
def test_no_gradient_is_the_same_as_one_of_zeros_and_as_no_other(factor: float) -> None:
    w, v = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)

    def loss(w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return w.sum() if recording.runs_plainly() else w.sum() + (v * factor).sum()

    rows = lt.compare_gradients(loss, w, v).rows
    by_name = {row.name: row for row in rows}
    assert by_name["gradient of argument 0"].same
    assert by_name["gradient of argument 1"].same is (factor == 0)
    assert by_name["gradient of argument 1"].difference == factor


def test_a_tensor_that_no_gradient_reaches_agrees() -> None:
    class Blocks(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return w + v

        @staticmethod
        def backward(_: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            return grad, None

    w, v = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    found = lt.compare_gradients(Blocks.apply, w, v)
    assert found.same
    assert len(found.rows) == 3


def test_everything_with_a_gradient_in_a_nested_result_is_summed() -> None:
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    c = torch.tensor([3 + 4j], requires_grad=True)
    results: list[Any] = []

    def nested() -> Any:
        results.append({"a": (w * 2, None), "b": [c * 1, "text", torch.ones(5)]})
        return results[-1]

    found = lt.compare_gradients(nested)
    assert found.same
    shapes = [row.name.rpartition(" of shape ")[2] for row in found.rows[1:]]
    assert sorted(shapes) == ["(1,)", "(2,)"]
    assert len(results) == 2


def test_modules_among_the_arguments_are_put_back_and_named() -> None:
    net = spiking_network()
    xs = torch.randn(LENGTH, 3, 4)
    with torch.no_grad():
        net(xs[0])
    before = hidden_of(net)
    found = lt.compare_gradients(lambda net, xs: lt.checkpointed_for_loop(net, xs, base=4), net, xs=xs)
    assert found.same
    assert any(row.name.endswith(".0.weight") for row in found.rows)
    after = hidden_of(net)
    assert [name for name in before if not same_bits(before[name], after[name])] == []


@pytest.mark.parametrize(
    "result", [None, 1.0, torch.ones(3), {"a": [torch.ones(2)]}], ids=["None", "float", "tensor", "dict"]
)
def test_nothing_to_differentiate_is_refused(result: Any) -> None:
    with pytest.raises(
        InputError,
        match=r"^fn returned nothing that needs a gradient; return the loss, or tensors that depend on parameters$",
    ):
        lt.compare_gradients(lambda: result)
