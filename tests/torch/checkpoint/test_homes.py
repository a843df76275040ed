"""Where a function may keep a counter: its gradient is the plain call's, or the backward says that it cannot be.

The counter scales what the function computes, so that a rerun with another count has other gradients. Homes inside
modules and arguments are repeated; of all others the values are compared, and a difference is an error.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import weakref
from array import array
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide import CheckpointError
from tests.torch.calls import Function, plainly

# Returns a function of x, and what it counts in, to be read afterwards.
Home = Callable[[], tuple[Callable[[torch.Tensor], Any], Callable[[], Any]]]
OUTSIDE: dict[str, Home] = {}
INSIDE: dict[str, Callable[[], Counting]] = {}
STEPS = 0


def outside(home: Home) -> Home:
    OUTSIDE[home.__name__] = home
    return home


@outside
def class_attribute() -> Any:
    class Steps:
        n = 0

    def function(x: torch.Tensor) -> Any:
        Steps.n += 1
        return (x * Steps.n).sin()

    return function, lambda: Steps.n


@outside
def class_attribute_of_a_module() -> Any:
    class Net(nn.Module):
        n = 0

        def forward(self, x: torch.Tensor) -> Any:
            type(self).n += 1
            return (x * self.n).sin()

    return Net(), lambda: Net.n


@outside
def function_attribute() -> Any:
    def function(x: torch.Tensor) -> Any:
        function.n = getattr(function, "n", 0) + 1  # type: ignore[attr-defined]
        return (x * function.n).sin()  # type: ignore[attr-defined]

    return function, lambda: function.n  # type: ignore[attr-defined]


@outside
def iterator() -> Any:
    steps = itertools.count(1)
    return (lambda x: (x * next(steps)).sin()), lambda: next(steps)


@outside
def iterator_over_a_list() -> Any:
    steps = iter([1.0, 2.0, 4.0, 8.0])
    return (lambda x: (x * next(steps)).sin()), lambda: next(steps)


@outside
def generator() -> Any:
    def counting() -> Iterator[int]:
        yield from range(1, 9)

    steps = counting()
    return (lambda x: (x * next(steps)).sin()), lambda: next(steps)


@outside
def context_variable() -> Any:
    steps: contextvars.ContextVar[int] = contextvars.ContextVar("steps", default=0)

    def function(x: torch.Tensor) -> Any:
        steps.set(steps.get() + 1)
        return (x * steps.get()).sin()

    return function, steps.get


def _in_a_row(steps: Any) -> Any:
    def function(x: torch.Tensor) -> Any:
        steps[0] += 1
        return (x * steps[0]).sin()

    return function, lambda: steps[0]


ROWS: dict[str, Callable[[], Any]] = {
    "array_of_python": lambda: array("q", [0]),
    "array_of_numpy": lambda: np.zeros(1, dtype=np.int64),
    "bytearray": lambda: bytearray(1),
    "list": lambda: [0],
    "deque": lambda: deque([0]),
    "dict": lambda: {0: 0},
    "Counter": Counter,
    "defaultdict": lambda: defaultdict(int),
    "OrderedDict": lambda: OrderedDict({0: 0}),
    "UserDict": lambda: UserDict({0: 0}),
    "UserList": lambda: UserList([0]),
    "tensor": lambda: torch.zeros(1),
    "list_of_2000": lambda: [0] * 2000,
    "list_of_9999": lambda: [0] * 9999,
    "dict_of_9999": lambda: dict.fromkeys(range(9999), 0),
}
for _name, _make in ROWS.items():
    OUTSIDE[_name] = functools.partial(lambda make: _in_a_row(make()), _make)


@outside
def weak_dictionary() -> Any:
    class Key:
        pass

    key, steps = Key(), weakref.WeakKeyDictionary[Any, int]()

    def function(x: torch.Tensor) -> Any:
        steps[key] = steps.get(key, 0) + 1
        return (x * steps[key]).sin()

    return function, lambda: steps[key]


@outside
def closure() -> Any:
    n = 0

    def function(x: torch.Tensor) -> Any:
        nonlocal n
        n += 1
        return (x * n).sin()

    return function, lambda: n


@outside
def global_number() -> Any:
    global STEPS
    STEPS = 0

    def function(x: torch.Tensor) -> Any:
        global STEPS
        STEPS += 1
        return (x * STEPS).sin()

    return function, lambda: STEPS


@outside
def plain_object() -> Any:
    steps = SimpleNamespace(n=0)

    def function(x: torch.Tensor) -> Any:
        steps.n += 1
        return (x * steps.n).sin()

    return function, lambda: steps.n


@outside
def cache_of_a_decorator() -> Any:
    seen: dict[str, float] = {}

    def function(x: torch.Tensor) -> Any:
        if "scale" not in seen:
            seen["scale"] = 2.0
            return (x * 1.0).sin()
        return (x * seen["scale"]).sin()

    return function, lambda: seen["scale"]


@dataclass
class Settings:
    n: float = 0.0


class Node:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0.0


class Counting(nn.Module):
    """Counts in an attribute that `make` makes."""

    def __init__(self, make: Callable[[], Any], *, by_name: bool) -> None:
        super().__init__()
        self.state, self.by_name = make(), by_name

    def forward(self, x: torch.Tensor) -> Any:
        if self.by_name:
            self.state.n += 1
            return (x * self.state.n).sin()
        self.state[0] += 1
        n = self.state[0]
        return (x * (n.clone() if isinstance(n, torch.Tensor) else n)).sin()

    def read(self) -> float:
        return float(self.state.n if self.by_name else self.state[0])


for _name, _make in ROWS.items():
    INSIDE[_name] = functools.partial(Counting, _make, by_name=False)
BY_NAME: dict[str, Callable[[], Any]] = {
    "namespace": lambda: SimpleNamespace(n=0),
    "dataclass": Settings,
    "slots": Node,
}
for _name, _make in BY_NAME.items():
    INSIDE[_name] = functools.partial(Counting, _make, by_name=True)


@pytest.mark.parametrize("home", INSIDE)
@pytest.mark.parametrize("way", ["called", "closed over", "method", "held", "in a list given"])
def test_a_counter_in_a_module_is_right(home: str, way: str) -> None:
    def run(call: Function) -> Any:
        net, x = INSIDE[home](), torch.tensor([0.3, -0.7, 1.1], requires_grad=True)
        holder = SimpleNamespace(net=net)
        y: torch.Tensor = x
        for _ in range(2):
            if way == "called":
                y = call(net, y)
            elif way == "closed over":
                y = call(lambda x: net(x), y)
            elif way == "method":
                y = call(net.forward, y)
            elif way == "held":
                y = call(lambda x: holder.net(x), y)
            else:
                y = call(lambda row, x: row[0](x), [net], y)
        y.sum().backward()
        return x.grad, net.read()

    (expected, count), (grad, counted) = run(plainly), run(lt.checkpoint)
    assert counted == count
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("home", ROWS)
def test_a_counter_in_an_argument_is_right(home: str) -> None:
    def function(x: torch.Tensor, state: Any) -> Any:
        state[0] += 1
        n = state[0]
        return (x * (n.clone() if isinstance(n, torch.Tensor) else n)).sin()

    def run(call: Function) -> Any:
        state, x = ROWS[home](), torch.tensor([0.3, -0.7, 1.1], requires_grad=True)
        call(function, call(function, x, state), state).sum().backward()
        return x.grad, float(state[0])

    (expected, count), (grad, counted) = run(plainly), run(lt.checkpoint)
    assert counted == count
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("home", OUTSIDE)
@pytest.mark.filterwarnings("ignore:.*is_recomputing")
def test_a_counter_elsewhere_is_refused(home: str) -> None:
    function = OUTSIDE[home]()[0]
    x = torch.tensor([0.3, -0.7, 1.1], requires_grad=True)
    y = lt.checkpoint(function, x)
    with pytest.raises(CheckpointError, match=r"values are not those of the first run.*`\.grad` is not to be trusted"):
        y.sum().backward()


@pytest.mark.parametrize("home", OUTSIDE)
@pytest.mark.filterwarnings("ignore:.*is_recomputing")
def test_what_counts_elsewhere_is_not_put_back(home: str) -> None:
    """With `check_rerun=False` nothing is refused: the rerun counts on, and it is the user's to guard that."""
    (function, read), (twin, read_twin) = OUTSIDE[home](), OUTSIDE[home]()
    x = torch.tensor([0.3, -0.7, 1.1], requires_grad=True)
    lt.checkpoint(function, x, check_rerun=False).sum().backward()
    for _ in range(2):
        twin(x)
    assert read() == read_twin()
