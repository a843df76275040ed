"""Samples: what they tell apart, and how those on a device are compared together, here with tensors of the CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from lowtide.errors import CheckpointError
from lowtide.torch.loops.proof import Proof
from lowtide.torch.state import samples
from lowtide.torch.state.samples import compare_later, compare_pending, sample_of, whole_sample_of

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (60, 70), (3, 4, 500)], ids=str)
def test_a_sample_changes_with_the_numbers(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.randn(shape).to(dtype)
    for sample in (sample_of, whole_sample_of):
        assert sample(value) == sample(value.clone())
        assert sample(value) != sample(value + 1)
    assert whole_sample_of(value) != whole_sample_of(value.neg())


@pytest.mark.parametrize("size", [1_025, 5_000, 100_003])
def test_of_a_large_tensor_a_thousand_numbers_and_more_are_read(size: int) -> None:
    """A stretch of one number in a thousand cannot be changed unseen, wherever it is."""
    value = torch.randn(size)
    before = sample_of(value)
    stretch = size // 1024 + 1
    for start in range(0, size - stretch, size // 40):
        other = value.clone()
        other[start : start + stretch] += 1
        assert sample_of(other) != before


def test_layouts_and_what_has_no_numbers() -> None:
    value = torch.randn(60, 70)
    assert sample_of(value.t()) == sample_of(value.t().clone(memory_format=torch.preserve_format))
    assert sample_of(value[:, ::2]) == sample_of(value[:, ::2])
    assert sample_of(value[:1].expand(50, 70)) == sample_of(value[:1].expand(50, 70))
    assert sample_of(torch.empty(3, device="meta")) == whole_sample_of(torch.empty(3, device="meta")) == 0
    sparse = value.relu().to_sparse()
    assert sample_of(sparse) == sample_of(sparse.clone())
    assert whole_sample_of(sparse) != whole_sample_of(2 * sparse)
    zeros = torch._efficientzerotensor(60, 70)  # of forward mode; it has no memory
    assert sample_of(zeros) == whole_sample_of(zeros) == 0


class _Image(torch.Tensor):
    """A class of the user's whose results are of that class."""


def test_of_a_class_of_the_users_the_numbers_are_read() -> None:
    value = torch.randn(60, 70)
    for sample in (sample_of, whole_sample_of):
        assert sample(value.as_subclass(_Image)) == sample(value)


def _refused() -> Exception:
    return CheckpointError("they differ")


def test_samples_on_a_device_are_compared_when_the_backward_ends() -> None:
    one = torch.tensor(4)
    compare_later(one, one.clone(), _refused)
    with pytest.raises(CheckpointError, match="they differ"):
        compare_later(one, one + 1, _refused)
    compare_later(one, one + 1, lambda: None)  # whoever is asked finds nothing wrong

    x = torch.ones(3, requires_grad=True)
    y = x * 2

    def compare_twice(_: torch.Tensor) -> None:
        compare_later(one, one + 1, _refused)
        compare_later(one, one, _refused)

    y.register_hook(compare_twice)
    with pytest.raises(CheckpointError, match="they differ"):
        y.sum().backward()
    gc.collect()  # the error has the frames of the backward
    assert len(samples._waiting) == 0
    compare_pending()


def test_a_backward_that_fails_takes_its_comparisons_along() -> None:
    one, x = torch.tensor(4), torch.ones(3, requires_grad=True)

    def fail(_: torch.Tensor) -> None:
        compare_later(one, one + 1, _refused)
        raise ValueError("stop")

    for failing, error in ((True, ValueError), (False, CheckpointError)):
        y = x * 2
        y.register_hook(fail if failing else lambda _: compare_later(one, one + 1, _refused))
        with pytest.raises(error):
            y.sum().backward()
        gc.collect()
        assert len(samples._waiting) == 0


def test_an_optimizer_inside_the_backward_waits_for_the_comparison() -> None:
    one, x = torch.tensor(4), torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=1.0)
    compare_later(one, one, _refused)

    def step(_: torch.Tensor) -> None:
        optimizer.step()

    y = x * 2
    y.register_hook(lambda _: compare_later(one, one + 1, _refused))
    x.register_post_accumulate_grad_hook(step)
    with pytest.raises(CheckpointError, match="they differ"):
        y.sum().backward()
    assert torch.equal(x, torch.ones(3))


def test_loops_compare_what_is_on_a_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.torch.loops.proof.sample_of", lambda tensor: tensor.sum())
    proof, value = Proof(None), torch.randn(3)
    for step in (0, 1):
        proof.output(step, [value, 2.0, object()])
        proof.state(step + 1, [value, value])
    proof.output(1, [value, 2.0, object()])
    _in_a_backward(lambda: proof.state(2, [value, value]))
    with pytest.raises(CheckpointError, match=r"step 1, run again, .* its output is another"):
        _in_a_backward(lambda: proof.output(1, [value + 1, 2.0, object()]))
    proof.state(2, [value, value + 1])  # of what the forward runs again too, the backward tells
    with pytest.raises(CheckpointError, match="the state after it is another"):
        _in_a_backward(lambda: proof.state(2, [value, value]))


def _in_a_backward(act: Callable[[], None]) -> None:
    y = torch.ones(1, requires_grad=True) * 2
    y.register_hook(lambda _: act())
    y.sum().backward()


def test_graphs_that_differ_in_their_number_of_nodes() -> None:
    proof = Proof(None)
    proof.graph(0, ((0, ("AddBackward0", (), (-1,))), (1,)))
    with pytest.raises(CheckpointError, match="2 nodes and results at first, 3 now"):
        proof.graph(0, ((0, ("AddBackward0", (), (-1,)), ("MulBackward0", (), (-1,))), ()))
    with pytest.raises(CheckpointError, match="a gradient at first, no gradient now"):
        proof.graph(0, ((None, ("AddBackward0", (), (-1,))), ()))
    with pytest.raises(CheckpointError, match="the operations are the same, but not the tensors"):
        proof.graph(0, ((0, ("AddBackward0", (), (-1,))), (2,)))
