"""Numbers, functions and modules that change from call to call: few traces, and never an old one."""

from __future__ import annotations

import functools
import gc
import random
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lowtide.torch as lt
from lowtide import CheckpointError
from lowtide.torch.lean import call as lean_module
from lowtide.torch.lean.trace import _why_not_with
from tests.torch.calls import Function, drawn_leaf, plainly, same
from tests.torch.lean.calls import Gate, both, collecting_by_hand, note, noted, step, traced


@pytest.fixture(autouse=True)
def _afresh() -> None:
    traced.clear()


@pytest.mark.parametrize(
    "value",
    [
        lambda k: float(k),
        lambda k: k + 1,
        lambda k: np.float64(k + 0.5),
        lambda k: np.int64(k + 1),
        lambda k: np.float32(k + 0.25),
        lambda k: complex(k + 1).real,
        lambda k: torch.tensor(k + 0.5),
        lambda k: -0.0 if k % 2 else 0.0,
    ],
)
def test_numbers_that_differ_from_call_to_call(value: Callable[[int], Any]) -> None:
    x = drawn_leaf(5)

    def function(x: torch.Tensor, number: Any) -> torch.Tensor:
        note()
        return torch.exp(x.sin() * number) * x

    def run(call: Function, number: int) -> Any:
        y = call(function, x, value(number))
        return [y, *torch.autograd.grad(y.sum(), x)]

    both(run, calls=12)
    assert traced.count(True) <= 2


def test_a_zero_has_its_sign() -> None:
    x = drawn_leaf(5)

    def function(x: torch.Tensor, number: float) -> torch.Tensor:
        return torch.atan2(x.sin() * number, -x.exp()) * x

    def run(call: Function, number: int) -> Any:
        y = call(function, x, -0.0 if number % 2 else 0.0)
        return [y, *torch.autograd.grad(y.sum(), x)]

    both(run, calls=4)


def test_a_number_that_may_be_any_stays_so_when_another_one_differs_too() -> None:
    x = drawn_leaf(5)

    def function(x: torch.Tensor, a: float, b: float) -> torch.Tensor:
        note()
        return torch.exp(x.sin() * a + b) * x

    pairs = [(1.0, 1.0), (2.0, 1.0), (1.0, 2.0), (3.0, 1.0), (4.0, 3.0), (1.0, 5.0)]

    def run(call: Function, number: int) -> Any:
        y = call(function, x, *pairs[number])
        return [y, *torch.autograd.grad(y.sum(), x)]

    both(run, calls=len(pairs))
    assert traced.count(True) == 3


def test_numbers_that_agree_at_first_and_differ_later() -> None:
    x = drawn_leaf(5)

    def function(x: torch.Tensor, number: float) -> torch.Tensor:
        note()
        return torch.exp(x.sin() * max(number, 3.0)) * x

    def run(call: Function, number: int) -> Any:
        y = call(function, x, float(number))
        return [y, *torch.autograd.grad(y.sum(), x)]

    both(run, calls=8)
    assert traced.count(True) <= 2


class _Counting(nn.Module):
    """Its numbers change with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.temperature = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        note()
        self.calls += 1
        self.temperature *= 0.9
        return (x.sin() / self.temperature).exp() * x.sigmoid()


def test_a_module_whose_numbers_change_with_each_call() -> None:
    plain, lean, x = _Counting(), lt.Lean(_Counting()), drawn_leaf(5)
    for _ in range(30):
        y, z = plain(x), lean(x)
        same([y, *torch.autograd.grad(y.sum(), x)], [z, *torch.autograd.grad(z.sum(), x)])
    assert lean.calls == 30
    assert traced.count(True) <= 3


class _Stateful(nn.Module):
    """Its state is nothing at first, then a tensor: a leaky neuron."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, generator=torch.Generator().manual_seed(0)))
        self.v: Any = 0.0
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        note()
        self.v = self.v * 0.5 + x * self.weight
        spike = (self.v > 0.3).float()
        self.last = last = torch.sigmoid(self.v)
        return torch.sub(spike, last).detach() + last * x.exp()


def test_a_module_with_a_state_of_its_own() -> None:
    plain, module, x = _Stateful(), _Stateful(), drawn_leaf(6)
    y, z = torch.zeros(6), torch.zeros(6)
    for _ in range(8):
        y, z = y + plain(x), z + lt.lean(module, x)
    same([y, *torch.autograd.grad(y.sum(), [x, plain.weight])], [z, *torch.autograd.grad(z.sum(), [x, module.weight])])
    assert traced[1::2].count(True) <= 3


def test_a_state_is_not_held_on_to() -> None:
    module, x = _Stateful(), drawn_leaf(6)
    for _ in range(4):
        lt.lean(module, x)
    old = weakref.ref(module.v)
    module.v, module.last = 0.0, None
    assert old() is None


def test_functions_made_anew_for_each_call_are_traced_once() -> None:
    x, w = drawn_leaf(5), drawn_leaf(5, seed=1)
    before = len(lean_module._kinds)
    for number in range(40):
        k = number + 0.5

        def run(call: Function, k: float = k) -> Any:
            y = call(lambda x: noted((x.sin() * k).exp() * w), x)
            return [y, *torch.autograd.grad(y.sum(), [x, w])]

        same(run(lt.lean), run(plainly))
    assert traced.count(True) <= 2
    assert len(lean_module._kinds) <= before + 1


def test_numbers_in_default_arguments() -> None:
    x = drawn_leaf(5)

    def run(call: Function, number: int) -> Any:
        def function(
            x: torch.Tensor, k: float = number + 0.5, *, table: tuple[torch.Tensor, ...] = (x,)
        ) -> torch.Tensor:
            note()
            return (x.sin() * k).exp() * table[0]

        y = call(function, x)
        return [y, *torch.autograd.grad(y.sum(), x)]

    both(run, calls=5)
    assert traced.count(True) <= 2


def test_functions_that_call_each_other_and_themselves() -> None:
    x = drawn_leaf(5)

    def even(x: torch.Tensor, n: int) -> torch.Tensor:
        return (x * 2).sigmoid() * x if n == 0 else odd(x.sin(), n - 1)

    def odd(x: torch.Tensor, n: int) -> torch.Tensor:
        return even(x.exp() * x, n - 1)

    def run(call: Function, number: int) -> Any:
        y = call(even, x, 4)
        return [y, *torch.autograd.grad(y.sum(), x)]

    both(run)


class _Own:
    """An object that is no module."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.weight = drawn_leaf(5, seed=4)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ((x.sin() * self.weight) * self.scale).exp() * x

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


def test_objects_of_ones_own_are_told_apart() -> None:
    x, first, second = drawn_leaf(5), _Own(1.0), _Own(2.0)

    def run(call: Function, number: int) -> Any:
        own = first if number % 2 else second
        ways: list[Function] = [own, own.method, lambda x: own(x), functools.partial(own.method)]
        y = sum(call(way, x) for way in ways)
        return [y, *torch.autograd.grad(y.sum(), [x, own.weight])]

    both(run, calls=4)


def test_equal_code_with_other_globals() -> None:
    x, functions = drawn_leaf(5), []
    for scale in (2.0, 3.0):
        names = {"SCALE": scale}
        exec("def function(x):\n    return (x.sin() * SCALE).exp() * x\n", names)
        functions.append(names["function"])

    def run(call: Function, number: int) -> Any:
        y = call(functions[number % 2], x)
        return [y, *torch.autograd.grad(y.sum(), x)]

    both(run, calls=4)


def test_a_module_that_is_gone_leaves_nothing() -> None:
    class Bound(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.act = self.own

        def own(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).exp() * x

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(x)

    x, before = drawn_leaf(3), len(lean_module._kinds)
    references = []
    with collecting_by_hand():
        for _ in range(5):
            module = Bound()
            for _ in range(2):
                lt.lean(module, x).sum().backward()
            references.append(weakref.ref(module))
            del module
            gc.collect()
    assert [reference() for reference in references] == [None] * 5
    assert len(lean_module._kinds) <= before + 1


def test_attributes_come_and_go() -> None:
    module, x = Gate().eval(), drawn_leaf(4, 6)
    module.first = 1.0  # type: ignore[assignment]
    for change in ("", "other", "child", "none"):
        if change == "other":
            del module.first
            module.second = 2.0  # type: ignore[assignment]
        if change == "child":
            module.norm = nn.LayerNorm(6, elementwise_affine=False)
        if change == "none":
            module.drop = nn.Identity()  # type: ignore[assignment]
        for _ in range(2):
            same(step(functools.partial(lt.lean, module), x, [module.weight]), step(module, x, [module.weight]))


def test_numbers_in_a_dictionary_of_a_module_are_no_silent_error() -> None:
    class Configured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.options = {"scale": 1.0}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.sin() * self.options["scale"]).exp() * x

    module, x, errors = Configured(), drawn_leaf(5), 0
    for number in range(6):
        module.options["scale"] = number // 2 + 1.0
        y, z = lt.lean(module, x), module(x)
        try:
            same([y, *torch.autograd.grad(y.sum(), x)], [z, *torch.autograd.grad(z.sum(), x)])
        except CheckpointError as error:
            assert "Configured" in str(error)  # noqa: PT017  (either is right)
            errors += 1
    assert errors <= 1  # from then on it is known


def test_a_number_that_chooses_what_autograd_does_not_see() -> None:
    x = drawn_leaf(5)

    def function(x: torch.Tensor, turn: int) -> torch.Tensor:
        y = x.detach() + x.detach() if turn else x.detach() * x.detach()
        return (x * y).exp() * y

    def run(call: Function, number: int) -> Any:
        y = call(function, x, number % 2)
        return [y, *torch.autograd.grad(y.sum(), x)]

    both(run, calls=4)


SLOPE = [2.0]
SCALE = 0.5


class _Outside(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(torch.relu(x - 3.3) * SCALE)


@pytest.mark.parametrize("inside", [False, True])
def test_globals_that_matter_for_few_elements_are_seen(inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn_leaf(200, 500)
    module = _Outside()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return (lambda y: torch.exp(torch.relu(y - 3.3) * SLOPE[0]))(x)

    function = module if inside else outer
    for value in (2.0, 2.0, 3.0, 2.5):
        monkeypatch.setattr(sys.modules[__name__], "SCALE", value)
        SLOPE[0] = value
        outcomes = [torch.autograd.grad(call(function, x).sum(), x)[0] for call in (plainly, lt.lean)]
        assert torch.equal(*outcomes)


def test_numbers_of_pythons_and_numpys_random_generators_are_not_remembered() -> None:
    x = drawn_leaf(64, 64)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(torch.relu(x - 3.0) * random.random()) + torch.exp(x * float(np.random.rand()))  # noqa: NPY002

    for seed in range(4):
        outcomes = []
        for call in (plainly, lt.lean):
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002
            outcomes.append(torch.autograd.grad(call(function, x).sum(), x)[0])
        assert torch.equal(*outcomes)


def test_no_more_kinds_of_calls_are_remembered_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_module._kinds, "most", 3)
    for size in (2, 3, 4, 5, 6, 2):
        both(lambda call, _, size=size: [call(torch.exp, drawn_leaf(size))])  # type: ignore[misc]
        assert len(lean_module._kinds) <= 3


class _Limits:
    """What is in its containers is followed by nobody."""

    def __init__(self) -> None:
        self.highest = {"x": 9.0}


_limits = _Limits()


def test_a_bound_that_nobody_follows_and_that_matters_for_one_element_of_many() -> None:
    """No sample of a hundred thousand numbers shows the one that is beyond: so what has a bound is not run again."""
    x = torch.zeros(100_000)
    x[1] = 3.0
    x.requires_grad_()

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(torch.clamp(x, max=_limits.highest["x"])) * x.sin()

    for _limits.highest["x"] in (9.0, 9.0, 2.0, 1.0):
        outcomes = [torch.autograd.grad(call(function, x).square().sum(), x)[0] for call in (plainly, lt.lean)]
        assert torch.equal(*outcomes)


def test_sums_in_any_order_are_kept_on_a_device() -> None:
    with FakeTensorMode():
        there, here = torch.ones(3, device="cuda"), torch.ones(3)
    add = torch.ops.aten.index_add.default
    assert [_why_not_with(add, [tensor], [], False) for tensor in (there, here)] == ["adds in any order", ""]
