"""Arguments of every kind: equal ones share a trace, others are told apart."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
import torch
from torch import nn

import lowtide.torch as lt
from tests.torch.calls import Function, drawn_leaf, same
from tests.torch.lean.calls import both, note, traced


@pytest.fixture(autouse=True)
def _afresh() -> None:
    traced.clear()


class _Mode(Enum):
    SINE = 1
    COSINE = 2


@dataclass
class _Config:
    scale: float
    table: torch.Tensor


def test_arguments_of_every_kind() -> None:
    x, w = drawn_leaf(4, 4), drawn_leaf(4, 4, seed=1)

    def function(pair: tuple[Any, ...], *more: Any, table: dict[str, Any], part: slice, flag: bool = True) -> Any:
        x, (w, name) = pair
        y = (x @ w).sigmoid() * table["x"] * more[0]
        y = y[part].exp() * x[part]
        return {"y": y if flag else -y, "name": name, "pair": (y.sin(), None)}

    def run(call: Function, number: int) -> Any:
        result = call(
            function,
            (x, [w, "name"]),
            2.0,
            [None],
            table={"x": x, 1: object},
            part=slice(0, 2 + number % 2),
            flag=number > 1,
        )
        assert result["name"] == "name"
        return [result["y"], *torch.autograd.grad(result["pair"][0].sum() + result["y"].sum(), [x, w])]

    both(run, calls=5)


def test_things_that_are_told_apart() -> None:
    x, table = drawn_leaf(5), torch.ones(5)
    values = [
        _Mode.SINE,
        _Mode.COSINE,
        _Config(2.0, table),
        _Config(3.0, table),
        "word",
        "other",
        None,
        torch.sin,
        torch.cos,
    ]

    def function(x: torch.Tensor, thing: Any) -> torch.Tensor:
        note()
        y = x.tanh()
        if isinstance(thing, _Mode):
            y = y.sin() if thing is _Mode.SINE else y.cos()
        elif isinstance(thing, _Config):
            y = y * thing.scale * thing.table
        elif callable(thing):
            y = thing(y)
        elif thing == "word":
            y = y.exp()
        return y.sigmoid() * y

    for thing in values * 3:
        y, z = function(x, thing), lt.lean(function, x, thing)
        same([y, *torch.autograd.grad(y.sum(), x)], [z, *torch.autograd.grad(z.sum(), x)])


def test_arguments_that_share_memory_or_do_not() -> None:
    rows, other = drawn_leaf(5, 40), drawn_leaf(40, seed=1)

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        note()
        return (a.sin() * b).exp() * b

    pairs = [(0, 0), (0, 1), (0, None), (1, 2), (3, 1), (2, 2), (None, None), (None, 3), (4, 4)]

    def run(call: Function, number: int) -> Any:
        a, b = (other if k is None else rows[k] for k in pairs[number])
        y = call(function, a, b) + 0 * (rows.sum() + other.sum())
        return [y, *torch.autograd.grad(y.sum(), [rows, other])]

    both(run, calls=len(pairs))


def test_arguments_that_share_memory_are_traced_once_as_are_those_that_do_not() -> None:
    rows, other = drawn_leaf(5, 40), drawn_leaf(40, seed=1)

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        note()
        return (a.sin() * b).exp() * b

    traced.clear()
    with lt.record(memory=False) as receipt:
        for k in range(8):
            lt.lean(function, rows[0], rows[0] if k % 2 else other).sum().backward()
    assert traced.count(True) == 2
    assert receipt.kept_whole == 0


@pytest.mark.filterwarnings("ignore:Scaled did not save what it saved")  # until it is traced anew
def test_an_argument_that_is_a_parameter_or_is_not() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(drawn_leaf(40).detach())
            self.other = self.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight.sin() * x).exp() * self.other

    module, x = Scaled(), drawn_leaf(40, seed=1)

    def run(call: Function, number: int) -> Any:
        if number == 4:
            module.other = nn.Parameter(drawn_leaf(40, seed=2).detach())
        y = call(module, module.weight if number in (0, 3) else x) + 0 * x
        return [y, *torch.autograd.grad(y.sum(), [module.weight, x])]

    both(run, calls=6)


def test_a_global_tensor_in_another_layout() -> None:
    x = drawn_leaf(8, 8)

    def run(call: Function, number: int) -> Any:
        _globals["weight"] = torch.randn(8, 8) if number != 1 else torch.randn(8, 8).t()
        y = call(_reads_a_global, x)
        return [y, *torch.autograd.grad(y.sum(), x)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may say that it keeps everything
        both(run)


_globals: dict[str, torch.Tensor] = {}


def _reads_a_global(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * _globals["weight"]).exp() * _globals["weight"] * x


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nested_tensors_are_left_alone() -> None:
    x = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], requires_grad=True)
    for _ in range(2):
        assert lt.lean(lambda x: x.sin() * x, x).is_nested


@pytest.mark.parametrize("wants", [True, False])
def test_rows_of_one_tensor_share_a_trace(wants: bool) -> None:
    rows, w = drawn_leaf(6, 40).requires_grad_(wants), drawn_leaf(40, seed=1)

    def function(x: torch.Tensor) -> torch.Tensor:
        note()
        return (x * w * x.sin()).exp() * x

    def run(call: Function, number: int) -> Any:
        y = call(function, rows[number])
        return [y, *torch.autograd.grad(y.sum(), [rows, w] if wants else [w])]

    both(run, calls=6)
    assert traced.count(True) == 1


def test_a_list_that_contains_itself() -> None:
    x = drawn_leaf(5)
    things: list[Any] = [x, 2.0]
    things.append(things)
    table: dict[str, Any] = {"things": things}
    table["table"] = table

    def run(call: Function, number: int) -> Any:
        y = call(lambda things, table: (things[0].sin() * things[2][1]).exp() * table["things"][0], things, table)
        return [y, *torch.autograd.grad(y.sum(), x)]

    both(run)


class _Labelled(torch.Tensor):
    """A subclass that changes nothing."""


def test_tensors_of_other_kinds() -> None:
    x = drawn_leaf(5)
    with torch.inference_mode():
        fixed = torch.ones(5)
    labelled = torch.ones(5).as_subclass(_Labelled)

    def run(call: Function, number: int) -> Any:
        y = call(lambda x, w: (x.sin() * w).exp() * x, x, labelled)
        with torch.no_grad():
            call(torch.add, x, fixed)
        z = call(lambda x, w: (x.sin() + w).exp() * x, x, fixed)
        own = call(x.mul, labelled)
        return [t.as_subclass(torch.Tensor) for t in (y, z, own, *torch.autograd.grad((y + z + own).sum(), x))]

    both(run)


def test_a_variable_that_is_not_bound_yet() -> None:
    x = drawn_leaf(5)

    def function(x: torch.Tensor, number: int) -> torch.Tensor:
        return (x.sin() * (later if number > 1 else 2.0)).exp() * x

    def run(call: Function, number: int) -> Any:
        y = call(function, x, number)
        return [y, *torch.autograd.grad(y.sum(), x)]

    both(run, calls=2)
    later = 3.0
    both(run, calls=4)


class _Holder:
    """An object that is no module, and has itself inside."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.own = self


def test_an_object_that_is_given_twice() -> None:
    x, holder = drawn_leaf(5), _Holder(drawn_leaf(5, seed=1))

    def run(call: Function, number: int) -> Any:
        y = call(lambda x, a, b: (x.sin() * a.weight).exp() * b.own.weight, x, holder, holder)
        return [y, *torch.autograd.grad(y.sum(), [x, holder.weight])]

    both(run)


def test_operations_on_sparse_tensors_are_left_alone() -> None:
    x, matrix = drawn_leaf(4, 4), torch.eye(4).to_sparse()

    def function(x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.sparse.mm(matrix, x)
        return product.exp().sin() * x

    expected = torch.autograd.grad(function(x).sum(), x)[0]
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(lt.lean(function, x).sum(), x)[0], expected)
