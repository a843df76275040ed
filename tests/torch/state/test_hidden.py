"""Hidden state: found, carried, restored for reruns, and left as the plain loop leaves it."""

from __future__ import annotations

import copy
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide import CheckpointError, InputError
from lowtide.torch.state.bits import same_bits
from tests.torch.networks import hidden_of, snn_torch, spiking_jelly
from tests.torch.state.partners import norse

KNOBS: list[dict[str, Any]] = [{"base": 4}, {"checkpoints": 2}, {}, {"budget": "500KB"}]


def _same_as_plain(make: Any, xs: torch.Tensor, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Two nets from one seed, one through the plain loop; outputs, gradients and hidden state agree bit by bit."""
    nets, outcomes = [], []
    for loop, knobs in ((None, {}), (lt.checkpointed_for_loop, options)):
        torch.manual_seed(3)
        net = make()
        ys = torch.stack([net(x) for x in xs]) if loop is None else loop(net, xs, **knobs)
        state = hidden_of(net)
        grads = torch.autograd.grad(ys.pow(2).sum(), list(net.parameters()), allow_unused=True)
        assert all(same_bits(state[name], value) for name, value in hidden_of(net).items())
        nets.append(net)
        outcomes.append((ys, state, grads))
    (ys, state, grads), (our_ys, our_state, our_grads) = outcomes
    assert same_bits(ys, our_ys)
    assert state.keys() == our_state.keys()
    assert all(same_bits(state[name], our_state[name]) for name in state)
    for a, b in zip(grads, our_grads, strict=True):
        assert (a is None and b is None) or same_bits(a, b)
    return nets[0], nets[1]


@pytest.mark.parametrize("options", KNOBS, ids=str)
def test_batch_norm_is_updated_once_for_each_step(options: dict[str, Any]) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 2))

    torch.manual_seed(0)
    xs = torch.randn(13, 4, 3)
    _, net = _same_as_plain(make, xs, **options)
    norm = net.get_submodule("1")
    assert norm.num_batches_tracked == 13


def test_buffers_stay_the_same_objects() -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    buffers = dict(net.named_buffers())
    ys = lt.checkpointed_for_loop(net, torch.randn(9, 4, 3), checkpoints=2)
    ys.sum().backward()
    assert all(buffer is buffers[name] for name, buffer in net.named_buffers())


class _InPlace(nn.Module):
    """Changes a buffer in place, with a gradient through it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))
        self.register_buffer("v", torch.zeros(3))
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        v = self.v
        assert isinstance(v, torch.Tensor)
        v.mul_(0.5).add_(x * self.w)
        return v * self.steps


class _Late(nn.Module):
    """Has no state at first; makes one at the first step, and a Python number beside it."""

    def __init__(self, late: int = 0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))
        self.late = late
        self.seen: dict[str, Any] = {"k": 0, "trace": [None]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.seen["trace"][0]
        trace = (0.0 if before is None else before) * 0.7 + x * self.w
        self.seen["trace"][0] = trace
        self.seen["k"] += 1
        self.last = trace * 2
        out: torch.Tensor = torch.tanh(trace) * self.seen["k"]
        return out


@pytest.mark.parametrize("options", KNOBS, ids=str)
@pytest.mark.parametrize("make", [_InPlace, _Late], ids=lambda make: make.__name__)
def test_state_of_every_kind(make: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    _, net = _same_as_plain(make, torch.randn(11, 3), **options)
    if isinstance(net, _InPlace):
        assert net.steps == 11
    if isinstance(net, _Late):
        assert net.seen["k"] == 11


class _Sharing(nn.Module):
    """Takes numbers by turns from two attributes that are one and the same thing."""

    def __init__(self, numbers: Any, take: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))
        self.odd = self.even = numbers
        self.take = take

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x * self.w * self.take(self.odd) + self.take(self.even)
        return result


@pytest.mark.parametrize("options", KNOBS, ids=str)
@pytest.mark.parametrize(("kind", "take"), [(iter, next), (list, list.pop)], ids=["iterator", "list"])
def test_what_two_attributes_share_they_share_in_reruns(kind: Any, take: Any, options: dict[str, Any]) -> None:
    _same_as_plain(lambda: _Sharing(kind([0.1 * k for k in range(40)]), take), torch.randn(11, 3), **options)


def test_what_nobody_can_write_to_may_be_in_a_module_that_is_measured() -> None:
    fixed = np.ones(3, dtype=np.float32)
    fixed.flags.writeable = False
    net, rows = _InPlace(), list[int]()
    vars(net).update(fixed=fixed, rows=rows)

    def step(x: torch.Tensor) -> torch.Tensor:
        vars(net)["rows"].append(1)
        result: torch.Tensor = net(x)
        return result

    lt.plan_for_loop(step, torch.randn(9, 3), checkpoints=2)
    assert vars(net)["fixed"] is fixed
    assert vars(net)["rows"] is rows == []


@pytest.mark.parametrize("make", [snn_torch, spiking_jelly], ids=["snnTorch", "SpikingJelly"])
def test_the_libraries_networks_spike(make: Any) -> None:
    torch.manual_seed(1)
    net = make(40, torch.float32)
    assert net.module is not None
    ys = lt.checkpointed_for_loop(net.module, net.xs.detach(), checkpoints=3)
    spikes = ys[0] if isinstance(ys, tuple) else ys
    assert 0.05 < spikes.mean() < 0.95


@pytest.mark.parametrize("options", KNOBS, ids=str)
def test_norse_networks_scan(options: dict[str, Any]) -> None:
    """Its sequential state is a list that the network writes into: the caller's stays as it is."""
    torch.manual_seed(0)
    net = norse.SequentialState(nn.Linear(3, 6), norse.LIFCell(), nn.Linear(6, 2), norse.LICell())
    xs = torch.rand(30, 2, 3) * 9
    _, state = net(xs[0])

    def step(carry: Any, x: torch.Tensor) -> Any:
        y, carry = net(x, carry)
        return carry, y

    spikes = []
    handle = net[1].register_forward_hook(lambda m, i, o: spikes.append(o[0].sum()))
    leaves = list(net.parameters())
    carry, rows = list(state), []
    for x in xs:
        carry, y = step(carry, x)
        rows.append(y)
    expected = torch.autograd.grad(torch.stack(rows).sum(), leaves, retain_graph=True)
    handle.remove()
    assert sum(spikes) > 10
    before = list(state)
    found, ys = lt.checkpointed_scan(step, state, xs, **options)
    assert all(a is b for a, b in zip(before, state, strict=True))
    assert same_bits(ys, torch.stack(rows))
    assert all(same_bits(a, b) for a, b in zip(found[1], carry[1], strict=True))
    grads = torch.autograd.grad(ys.sum(), leaves)
    assert all(same_bits(a, b) for a, b in zip(grads, expected, strict=True))


def test_hidden_state_is_differentiable_at_both_ends() -> None:
    """A second loop goes on where the first ended, and gradients flow from one into the other."""

    def run(loop: Any, **options: Any) -> Any:
        torch.manual_seed(2)
        net = nn.Sequential(
            nn.Linear(3, 4), lt.spiking.Expon(5.0), lt.spiking.LIF(3.0, v_threshold=0.2), nn.Linear(4, 2)
        )
        first = loop(net, torch.randn(8, 2, 3), **options)
        second = loop(net, torch.randn(9, 2, 3), **options)
        state = net[1].g
        assert isinstance(state, torch.Tensor)
        return [first, second, state, *torch.autograd.grad(second.sum() + state.pow(2).sum(), list(net.parameters()))]

    expected = run(lt.for_loop)
    for options in KNOBS:
        for a, b in zip(run(lt.checkpointed_for_loop, **options), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_state_that_first_changes_late_is_carried_from_then_on() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))
            self.k = torch.zeros(())
            self.gain = torch.ones(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.k = self.k + 1
            if self.k == 51:
                self.gain = self.gain * 2
            return x * self.w * self.gain

    net = Late()
    xs = torch.randn(80, 3)
    again = copy.deepcopy(net)
    expected = torch.stack([again(x) for x in xs])
    wanted = torch.autograd.grad(expected.sum(), again.w)[0]
    for named in ((), ("gain",)):
        for options in ({"base": 9}, {"checkpoints": 3}, {"budget": "30%"}, {}):
            net.k, net.gain = torch.zeros(()), torch.ones(3)
            ys = lt.checkpointed_for_loop(net, xs, hidden=named, **options)
            assert same_bits(ys, expected)
            assert same_bits(torch.autograd.grad(ys.sum(), net.w)[0], wanted)
            assert torch.equal(net.gain, again.gain)
            assert net.k == 80
    with pytest.raises(InputError, match="is not among what the step keeps"):
        lt.checkpointed_for_loop(Late(), xs, base=9, hidden=("nonsense",))


def test_a_step_that_raises_leaves_the_state_where_the_plain_loop_does() -> None:
    class Boom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.v = torch.zeros(3)
            self.k = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.v = self.v + x * self.w
            self.k += 1
            if self.k == 7:
                raise KeyError("boom")
            return self.v

    nets = [Boom(), Boom()]
    xs = torch.randn(10, 3)
    with pytest.raises(KeyError, match="boom"):
        torch.stack([nets[0](x) for x in xs])
    with pytest.raises(KeyError, match="boom"):
        lt.checkpointed_for_loop(nets[1], xs, base=2)
    assert same_bits(nets[0].v, nets[1].v)
    assert nets[0].k == nets[1].k == 7


def test_a_rerun_that_raises_puts_everything_back() -> None:
    class Flaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.norm = nn.BatchNorm1d(3)
            self.v = torch.zeros(2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if lt.is_recomputing():
                raise OSError("no")
            self.v = self.v + self.norm(x) * self.w
            return self.v

    net = Flaky()
    ys = lt.checkpointed_for_loop(net, torch.randn(9, 2, 3), checkpoints=2)
    before, rng = hidden_of(net), torch.get_rng_state()
    with pytest.raises(OSError, match="no"):
        ys.sum().backward()
    assert all(same_bits(value, before[name]) for name, value in hidden_of(net).items())
    assert torch.equal(rng, torch.get_rng_state())


def test_an_unused_parameter_has_no_gradient() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(3, 3)
            self.unused = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.used(x)
            return out

    net = Net()
    lt.checkpointed_for_loop(net, torch.randn(6, 2, 3), base=2).sum().backward()
    assert net.used.weight.grad is not None
    assert net.unused.weight.grad is None


def test_variables_of_a_closure_and_attributes_of_plain_objects() -> None:
    w = torch.randn(3, requires_grad=True)

    class Cell:
        def __init__(self) -> None:
            self.v: Any = 0.0
            self.calls = 0

        def step(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.v = self.v * 0.5 + x * w
            out: torch.Tensor = self.v
            return out

    def closure() -> Any:
        h = torch.zeros(3)
        box: list[Any] = [torch.zeros(3)]

        def step(x: torch.Tensor) -> torch.Tensor:
            nonlocal h
            h = h * 0.5 + x * w
            box[0] = torch.tanh(box[0] + h)
            out: torch.Tensor = h + box[0]
            return out

        return step

    xs = torch.randn(12, 3)
    loops: list[tuple[Any, dict[str, Any]]] = [(lt.for_loop, {}), (lt.checkpointed_for_loop, {"checkpoints": 2})]
    outcomes = []
    for loop, options in loops:
        ys = loop(Cell().step, xs, **options)
        outcomes.append((ys, *torch.autograd.grad(ys.pow(2).sum(), w)))
    assert all(same_bits(a, b) for a, b in zip(*outcomes, strict=True))
    cell = Cell()
    lt.checkpointed_for_loop(cell.step, xs, base=3).sum().backward()
    assert cell.calls == 12  # the object whose method is the step is as the plain loop leaves it
    with pytest.raises(CheckpointError, match="puts tensors with a gradient into box, h"):
        lt.checkpointed_for_loop(closure(), xs, base=3)
    seen = torch.zeros(3)

    def changes(x: torch.Tensor) -> torch.Tensor:
        seen.add_(x)
        return seen.clone() * w

    ys = lt.checkpointed_for_loop(changes, xs, base=3)
    with pytest.raises(CheckpointError, match="does not do what it did at first"):
        ys.sum().backward()


def test_a_module_that_is_out_of_sight_is_met_when_it_is_called() -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v = torch.zeros(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.v = torch.tanh(self.v * 0.9 + x)
            return self.v

    out_of_sight: ContextVar[Cell] = ContextVar("out_of_sight")
    found = []
    for loop in (lt.for_loop, lt.checkpointed_for_loop):
        out_of_sight.set(Cell())
        xs = torch.linspace(-1, 1, 60).view(20, 3).requires_grad_()
        ys = loop(lambda x: out_of_sight.get()(x), xs)
        ys.square().sum().backward()
        assert xs.grad is not None
        found.append((ys.detach(), xs.grad, out_of_sight.get().v.detach()))
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))
