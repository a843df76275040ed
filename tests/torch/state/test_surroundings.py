"""What a rerun does once more to the user's: told once, by name; nothing is said of what is guarded or repeated."""

from __future__ import annotations

import functools
import re
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide.torch.state import surroundings
from lowtide.torch.state.surroundings import SideEffects

ROWS: list[Any] = []
CASES: dict[str, Callable[[], tuple[Any, str]]] = {}


def case(make: Callable[[], tuple[Any, str]]) -> Callable[[], tuple[Any, str]]:
    CASES[make.__name__] = make
    return make


@case
def a_list_closed_over() -> tuple[Any, str]:
    rec: list[Any] = []

    def function(x: torch.Tensor) -> Any:
        rec.append(x.detach())
        return x.sin()

    return function, "rec"


@case
def a_method_of_a_list_closed_over() -> tuple[Any, str]:
    rec: list[Any] = []
    note = rec.append

    def function(x: torch.Tensor) -> Any:
        note(x.detach())
        return x.sin()

    return function, "note"


@case
def a_global() -> tuple[Any, str]:
    def function(x: torch.Tensor) -> Any:
        ROWS.append(x.detach())
        return x.sin()

    return function, "ROWS"


@case
def a_dict_and_a_set_and_a_deque() -> tuple[Any, str]:
    table: dict[int, Any] = {}
    kinds: set[int] = set()
    queue: deque[Any] = deque()

    def function(x: torch.Tensor) -> Any:
        table[len(table)] = len(kinds)
        kinds.add(len(kinds))
        queue.append(x.detach())
        return x.sin()

    return function, "kinds queue table"


@case
def an_attribute_of_an_object() -> tuple[Any, str]:
    tracker = SimpleNamespace(rows=[], name="tracker")

    def function(x: torch.Tensor) -> Any:
        tracker.rows.append(x.detach())
        return x.sin()

    return function, "tracker.rows"


class _Trainer:
    def __init__(self) -> None:
        self.history: list[Any] = []

    def step(self, x: torch.Tensor) -> Any:
        self.history.append(x.detach())
        return x.sin()


@case
def an_attribute_of_the_object_whose_method_it_is() -> tuple[Any, str]:
    return _Trainer().step, "self.history"


@case
def a_list_in_a_partial() -> tuple[Any, str]:
    def function(x: torch.Tensor, rows: list[Any]) -> Any:
        rows.append(x.detach())
        return x.sin()

    return functools.partial(function, rows=[]), "rows"


@case
def a_list_in_a_function_that_it_calls() -> tuple[Any, str]:
    rows: list[Any] = []

    def note(value: Any) -> None:
        rows.append(value)

    def function(x: torch.Tensor) -> Any:
        note(x.detach())
        return x.sin()

    return function, "rows"


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        ROWS.append(x.detach())
        return self.layer(x).sin()


@case
def a_global_of_a_module() -> tuple[Any, str]:
    return nn.Sequential(_Net()), "ROWS"


@case
def a_list_of_a_forward_hook() -> tuple[Any, str]:
    seen: list[Any] = []
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    net[0].register_forward_hook(lambda module, args, result: seen.append(result.detach()))
    return net.forward, "seen"


def _run(function: Callable[..., Any], times: int = 1) -> None:
    for _ in range(times):
        lt.checkpoint(function, torch.linspace(0.1, 0.9, 3).requires_grad_()).sum().backward()


@case
def a_meter() -> tuple[Any, str]:
    class Meter:
        def __init__(self) -> None:
            self.count, self.total = 0, 0.0

        def update(self, value: float) -> None:
            self.count += 1
            self.total += value

    meter = Meter()

    def function(x: torch.Tensor) -> Any:
        meter.update(float(x.detach().sum()))
        return x.sin()

    return function, "meter.count"


@case
def a_counter_in_a_dictionary() -> tuple[Any, str]:
    state = {"calls": 0, "latest": 0.0}

    def function(x: torch.Tensor) -> Any:
        state["calls"] += 1
        state["latest"] = float(x.detach().sum())
        return x.sin()

    return function, "state['calls']"


@case
def a_slope_that_is_annealed() -> tuple[Any, str]:
    surrogate = SimpleNamespace(slope=1.0)

    def function(x: torch.Tensor) -> Any:
        surrogate.slope *= 1.01
        return x.sin()

    return function, "surrogate.slope"


@case
def a_counter_closed_over() -> tuple[Any, str]:
    calls = 0

    def function(x: torch.Tensor) -> Any:
        nonlocal calls
        calls += 1
        return x.sin()

    return function, "calls"


@pytest.fixture(autouse=True)
def _nothing_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings, "_told", set())
    monkeypatch.setattr(surroundings, "_looked", {})


@pytest.mark.parametrize("name", CASES)
def test_it_is_told_once_by_name_with_both_remedies(name: str) -> None:
    function, container = CASES[name]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _run(function, 2)  # in the second rerun, if a thread is left of another test
    texts = [str(warning.message) for warning in caught]
    assert all(warning.category is UserWarning for warning in caught)
    assert sorted(text.split("`")[1] for text in texts) == container.split(" ")
    instead = "return what is collected as an output|make the counter an attribute of a module"
    assert all(re.search(f"`if not lt.is_recomputing\\(\\):`, or ({instead})", text) for text in texts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _run(function, 3)


def _guarded() -> Any:
    rec: list[Any] = []

    def function(x: torch.Tensor) -> Any:
        if not lt.is_recomputing():
            rec.append(x.detach())
        return x.sin()

    return function


def _guarded_counter() -> Any:
    calls = 0

    def function(x: torch.Tensor) -> Any:
        nonlocal calls
        calls += not lt.is_recomputing()
        return x.sin()

    return function


def _counting_in_itself() -> Any:
    class Net(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> Any:
            self.calls += 1
            return x.sin()

    return Net()


def _collecting_in_itself() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows: list[Any] = []

        def forward(self, x: torch.Tensor) -> Any:
            self.rows.append(x.detach())
            return x.sin()

    return Net()


def _with_a_name_that_is_not_bound() -> Any:
    def function(x: torch.Tensor) -> Any:
        return x.sin() if x.dim() else later

    if torch.ones(1).dim():
        return function
    later = 0
    return later


@pytest.mark.parametrize(
    "function",
    [
        *(_guarded(), _guarded_counter(), _collecting_in_itself(), _counting_in_itself()),
        *(_with_a_name_that_is_not_bound(), torch.sin, nn.Tanh()),
    ],
)
def test_nothing_is_said_of_what_stays_as_it_is(function: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _run(function, 3)


def test_side_effects_are_looked_for_in_the_first_rerun_only(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []

    class Noting(SideEffects):
        def __init__(self, *things: Any, counts: bool) -> None:
            looked.append(things)
            super().__init__(*things, counts=counts)

    monkeypatch.setattr(surroundings, "SideEffects", Noting)
    for _ in range(3):
        _run(lambda x: x.sin())  # another closure each time, of one code
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    _run(net, 3)
    assert len(looked) == 2
    known = len(surroundings._looked)
    looked.clear()
    del net
    assert len(surroundings._looked) == known - 1


@pytest.mark.parametrize("is_called", [False, True])
def test_files_are_taken_to_move_if_a_method_that_is_named_opens_one(is_called: bool) -> None:
    """Classes of Hugging Face have dozens of methods that save and load."""

    class Saved(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return x * self._factor()

        def _factor(self) -> float:
            return float(Path("factor.txt").read_text())

    class Calling(Saved):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scaled(x)

    net = Calling() if is_called else Saved()
    finds = surroundings.Finds([net])
    look = surroundings.Things(finds, [net]).look()
    assert bool(surroundings.moved(look, look)) == is_called
