"""Samples of what a lean tape drops: they read what operations have filled, and find what was recomputed otherwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812  (everybody's name for it)

import lowtide.torch as lt
from lowtide import CheckpointError
from tests.torch.calls import Function, drawn_leaf, same
from tests.torch.lean.calls import both


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss])
@pytest.mark.parametrize("size", [4, 64])
@pytest.mark.parametrize(
    "target",
    [
        lambda x: x.flip(0),
        lambda x: x.flip(0)[:, ::2].repeat_interleave(2, 1),
        lambda x: x[:1].sin().expand_as(x),
        lambda x: x.flatten().cos()[: 2 * len(x) - 1].as_strided(x.shape, (1, 1)),
    ],
    ids=["whole", "sliced", "expanded", "overlapping"],
)
def test_a_loss_whose_storage_is_larger_than_its_one_number(
    loss: Function, size: int, target: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """`mse_loss` allocates as much as its arguments have, returns a number, and never fills the rest."""

    def rooted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        distance: torch.Tensor = loss(x.tanh(), target(y))
        return distance.exp() * distance.sin()

    def run(call: Function, number: int) -> Any:
        x, y = drawn_leaf(size, size, seed=number), drawn_leaf(size, size, seed=number + 10)
        z = call(rooted, x, y)
        return [z, *torch.autograd.grad(z, [x, y])]

    both(run)


def test_a_pack_whose_storage_has_another_size_than_in_the_trace() -> None:
    """The same rows, first of a larger tensor: such a call keeps everything, and says so."""
    rows = iter((12, 12, 4, 12))

    def function(x: torch.Tensor) -> torch.Tensor:
        wide = x.detach()[: next(rows)].exp()
        return (x[:4] * wide[:4]).sin()

    x = drawn_leaf(12, 6)
    expected = torch.autograd.grad((x[:4] * x.detach()[:4].exp()).sin().sum(), x)
    for _ in range(2):
        same(torch.autograd.grad(lt.lean(function, x).sum(), x), expected)
    with pytest.warns(UserWarning, match="keep their whole tape"):
        same(torch.autograd.grad(lt.lean(function, x).sum(), x), expected)
    same(torch.autograd.grad(lt.lean(function, x).sum(), x), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64, torch.bool, torch.bfloat16, torch.float64])
def test_values_of_every_dtype_are_compared(dtype: torch.dtype) -> None:
    thresholds = count(1)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.exp() * x.detach().sub(float(next(thresholds)) / 2).sign().add(1).to(dtype)

    x = drawn_leaf(40, 60)
    lt.lean(function, x).sum().backward()
    y = lt.lean(function, x)
    with pytest.raises(CheckpointError, match=r"aten\.(_to_copy|add|sub|sign).*function.*`.grad` is not to be trusted"):
        y.sum().backward()


def test_a_tensor_that_is_saved_in_vain_and_then_changed_inside_a_checkpoint() -> None:
    """A traced call hands it over at its end, a later one when it is saved: the two would differ in its values."""
    with torch.sparse.check_sparse_tensor_invariants():
        one = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1), (4,))

    def function(x: torch.Tensor, *, sparse: bool) -> torch.Tensor:
        y = x * 1.5
        _ = y.exp() * y.sin()
        y.add_(one if sparse else 1.0)
        return y.tanh() * y

    for sparse in (False, True):

        def run(call: Function, number: int, sparse: bool = sparse) -> Any:
            x = drawn_leaf(4, seed=number)
            y = lt.checkpoint(partial(call, partial(function, sparse=sparse)), x)
            return [y, *torch.autograd.grad(y.sum(), x)]

        both(run)
