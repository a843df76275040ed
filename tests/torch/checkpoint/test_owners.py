"""Modules and objects in unusual places, as a rerun finds and leaves them."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide.torch.state.bits import same_bits
from tests.torch.calls import plainly


def _leaf() -> torch.Tensor:
    return torch.linspace(-1, 1, 4).requires_grad_()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0
        self.rows = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        self.rows.append(self.n)
        return (x * self.n).sin() * len(self.rows)


def test_a_number_that_was_set_back_is_left_as_it_was_set() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.n += 1
            return (x * self.n).sin()

    net, x = Plain(), _leaf()
    y = lt.checkpoint(net, x)
    net.n = 0
    y.sum().backward()
    assert net.n == 0


_scale: Counting | None = None


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return (x * (2 if _scale is None else _scale.n)).sin()


def test_a_module_is_repeated_from_the_call_on_before_which_a_global_was_given_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, net = _leaf(), Counting()

    def gradient(y: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(y.sum(), x)[0]

    assert same_bits(gradient(lt.checkpoint(_scaled, x)), gradient((x * 2).sin()))  # nothing has to be noted yet
    monkeypatch.setitem(globals(), "_scale", net)
    net.n = 3
    y = lt.checkpoint(_scaled, x)
    net.n = 7
    assert same_bits(gradient(y), gradient((x * 3).sin()))
    assert net.n == 7


def test_an_attribute_that_is_gone_by_the_backward_stays_gone() -> None:
    net, x = Counting(), _leaf()
    y = lt.checkpoint(net, x)
    del net.rows
    y.sum().backward()
    assert not hasattr(net, "rows")
    assert x.grad is not None
    assert same_bits(x.grad, torch.autograd.grad(((z := _leaf()).sin() * 2).sum(), z)[0])


def test_a_module_that_is_no_child_and_one_that_is_there_twice() -> None:
    net, inner = nn.Sequential(nn.Tanh()), Counting()
    net.append(inner)
    net.append(inner)
    net.register_forward_hook(lambda *_: None)
    net.__dict__["beside"] = beside = Counting()
    x = _leaf()
    lt.checkpoint(lambda x: net(x) + net.__dict__["beside"](x), x).sum().backward()
    assert (inner.n, beside.n, len(inner.rows)) == (2, 1, 3)


def test_two_methods_of_one_object() -> None:
    class Sim:
        def __init__(self) -> None:
            self.n = 0

        def step(self, x: torch.Tensor) -> torch.Tensor:
            self.n += 1
            return (x * self.n).sin()

        def other(self, x: torch.Tensor) -> torch.Tensor:
            return self.step(x) + self.n

    sim = Sim()
    step, other = sim.step, sim.other
    lt.checkpoint(lambda x: step(x) + other(x), _leaf()).sum().backward()
    assert sim.n == 2


def test_a_module_made_by_the_function_is_named_by_its_class() -> None:
    calls = iter(range(10))

    class Made(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + next(calls)).sin()

    with pytest.raises(lt.CheckpointError, match="in Made"):
        lt.checkpoint(lambda x: Made()(x), _leaf()).sum().backward()


def test_proxies_and_numbers_of_numpy_are_looked_at_with_care() -> None:
    class Owner:
        pass

    owner: Any = Owner()
    proxy, scale = weakref.proxy(owner), np.float32(2.0)
    del owner

    def step(x: torch.Tensor) -> torch.Tensor:
        assert proxy is not None
        return (x * float(scale)).sin()

    ys = lt.checkpointed_for_loop(step, torch.randn(6, 3, requires_grad=True), base=2)
    ys.sum().backward()


class Buffered(nn.Module):
    """Two tensors that are not copied just in case; one of them is changed late."""

    large: torch.Tensor
    h: torch.Tensor

    def __init__(self, late: str) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.register_buffer("large", torch.zeros(200, 200))
        self.h = (torch.ones(3, requires_grad=True) * 2) if late == "history" else torch.ones(3)
        self.late = late
        self.t = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.t += 1
        if self.t == 6 and self.late == "large":
            self.large += 1
        if self.t == 6 and self.late == "history":
            self.h = self.h.detach() + 1
        return x * self.w + self.h + self.large[0, 0]


@pytest.mark.parametrize("late", ["large", "history"])
def test_state_that_begins_late_and_cannot_be_carried_is_refused_by_name(late: str) -> None:
    net = Buffered(late)
    name = "large" if late == "large" else "h"
    with pytest.raises(lt.CheckpointError, match=rf"Buffered\.{name}.*hidden="):
        lt.checkpointed_for_loop(net, torch.randn(12, 3), base=3)
    lt.checkpointed_for_loop(Buffered(""), torch.randn(12, 3), base=3).sum().backward()


class _Metric(nn.Module):
    """Like those of torchmetrics: a comparison makes another metric, and the sums are attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __eq__(self, other: object) -> Any:
        return _Metric()

    def __hash__(self) -> int:
        return hash(("metric", self.calls))

    def update(self, x: torch.Tensor) -> None:
        self.calls += 1
        self.total = getattr(self, "total", 0) + x.detach().sum()


@pytest.mark.parametrize("nested", [False, True])
def test_a_metric_in_a_module_counts_once(nested: bool) -> None:
    class Measured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.metric = nn.Linear(4, 4), _Metric()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            self.metric.update(y)
            found: torch.Tensor = y.sin().cos()
            return found

    net, x = Measured(), _leaf()
    y = lt.checkpoint(lambda x: lt.checkpoint(net, x), x) if nested else lt.checkpoint(net, x)
    y.sum().backward()
    assert net.metric.calls == 1
    assert torch.equal(net.metric.total, net.layer(x).sum())


def test_tuples_that_have_classes_of_their_own_are_arguments() -> None:
    layer = nn.GRU(4, 4, batch_first=True)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(2, 3, 4), torch.tensor([3, 2]), batch_first=True)

    def run(call: Any) -> Any:
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        y = call(lambda packed: layer(packed)[0].data, packed)
        z = call(lambda most: most.values * x[:, 0] * most[1], x.max(1))
        return torch.autograd.grad(y.square().sum() + z.square().sum(), [x, *layer.parameters()])

    for found, expected in zip(run(lt.checkpoint), run(lambda function, *args: function(*args)), strict=True):
        assert same_bits(found, expected)


class Held(nn.Module):
    """A tensor that is changed in place, and moves from one attribute or container to another."""

    b: torch.Tensor

    def __init__(self, way: str, count: int) -> None:
        super().__init__()
        self.v: Any = torch.zeros(count)
        self.register_buffer("b", torch.ones(count))
        self.rows = [torch.zeros(count), torch.ones(count)]
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "replaced":
            self.v.add_(1)
            self.v = self.v * 2
        elif self.way == "swapped":
            self.v, self.b = self.b, self.v
            self.b.add_(1)
        else:
            self.rows.append(self.rows.pop(0).add_(1))
        return (x * float(self.v[0] + 2 * self.b[0] + 3 * self.rows[0][0])).sin()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("way", "count"), [("replaced", 4), ("replaced", 100_000), ("swapped", 4), ("rotated", 4)])
def test_a_tensor_that_is_changed_in_place_and_taken_from_its_place(way: str, count: int, nested: bool) -> None:
    outcomes = []
    for checkpoint in (plainly, lt.checkpoint):
        net, x = Held(way, count), _leaf()
        y: Any = x
        for _ in range(3):
            if nested:
                y = checkpoint(lambda x, net=net, call=checkpoint: call(net, x * 2).exp(), y)
            else:
                y = checkpoint(net, y)
        outcomes.append([y, *torch.autograd.grad(y.sum(), x), net.v, net.b, *net.rows])
    assert all(map(same_bits, *outcomes))


class Seconds(float):
    """A number with an attribute."""

    unit: str


def test_numbers_of_the_users_own_kind_are_what_they_are() -> None:
    class Timed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.spent = Seconds(1.5)
            self.spent.unit = "s"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = (x * self.spent).sin()
            self.spent = Seconds(self.spent + 1)
            return y

    net, x = Timed(), _leaf()
    y = lt.checkpoint(net, x)
    assert same_bits(torch.autograd.grad(y.sum(), x)[0], (x * 1.5).cos() * 1.5)
    assert net.spent == 2.5
    lt.checkpointed_for_loop(net, torch.randn(8, 4, requires_grad=True), checkpoints=1).sum().backward()
    assert net.spent == 10.5
