"""What steps see outside their arguments: repeated where it is in modules, proved equal or refused elsewhere."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide.torch.state.bits import same_bits

OPTIONS: list[dict[str, Any]] = [{}, {"base": 2}, {"base": 5}, {"checkpoints": 2}, {"budget": 20_000}, {"lean": True}]


class Surrogate(torch.autograd.Function):
    """A spike whose gradient has a slope that is a number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slope: float) -> torch.Tensor:
        ctx.slope = slope
        ctx.save_for_backward(x)
        return (x >= 0).to(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * ctx.slope * (1 - x.abs()).clamp(min=0), None


def outcome(loop: Callable[..., Any], make: Callable[[], tuple[Any, list[torch.Tensor]]], length: int) -> list[Any]:
    """Outputs and gradients of a for loop over a step that is made anew."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    step, wanted = make()
    ys = loop(step, torch.randn(length, 3, 4, generator=torch.Generator().manual_seed(1)))
    return [ys, *torch.autograd.grad(ys.pow(2).sum(), wanted)]


def is_right(make: Callable[[], tuple[Any, list[torch.Tensor]]], length: int = 12, **options: Any) -> bool:
    """Whether a loop has the plain loop's outputs and gradients; False if it is refused, an error if it is neither."""
    plain = outcome(lt.for_loop, make, length)
    try:
        ours = outcome(partial(lt.checkpointed_for_loop, **options), make, length)
    except lt.CheckpointError:
        return False
    assert all(map(same_bits, plain, ours))
    return True


class Cell(nn.Module):
    """A recurrent cell that detaches, or weighs its output, as something says that is asked at every step."""

    def __init__(self, ask: Callable[[], int], steers: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.h: torch.Tensor | None = None
        self.ask = ask
        self.steers = steers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        t = self.ask()
        h = torch.zeros_like(x) if self.h is None else self.h
        if self.steers == "detach" and t % 3 == 0:
            h = h.detach()
        h = torch.tanh(self.layer(x) + h)
        if self.steers == "slope":
            h = h + Surrogate.apply(h, 1 / (1 + t))  # type: ignore[no-untyped-call]
        self.h = h
        return h * float(t % 3 == 0) if self.steers == "value" else h


def _closure() -> Callable[[], int]:
    count = -1

    def ask() -> int:
        nonlocal count
        count += 1
        return count

    return ask


def _object() -> Callable[[], int]:
    held = SimpleNamespace(count=-1)

    def ask() -> int:
        held.count += 1
        return int(held.count)

    return ask


def _iterator() -> Callable[[], int]:
    return itertools.count().__next__


def _draw() -> Callable[[], int]:
    return lambda: random.randrange(10)


def _numpy_draw() -> Callable[[], int]:
    return lambda: int(np.random.randint(10))  # noqa: NPY002


ASKED = {
    "closure": _closure,
    "object": _object,
    "iterator": _iterator,
    "draw": _draw,
    "numpy_draw": _numpy_draw,
}


@pytest.mark.parametrize("steers", ["value", "detach", "slope"])
@pytest.mark.parametrize("home", ASKED)
def test_what_a_step_asks_outside_is_right_or_refused(home: str, steers: str) -> None:
    def make() -> tuple[Any, list[torch.Tensor]]:
        cell = Cell(ASKED[home](), steers)
        return cell, list(cell.parameters())

    found = [is_right(make, length, **options) for options in OPTIONS for length in (1, 2, 3, 12)]
    if "draw" in home:
        assert all(found)


@pytest.mark.parametrize("steers", ["value", "detach", "slope"])
def test_truncated_backpropagation_by_a_counter_in_a_closure(steers: str) -> None:
    def make() -> tuple[Any, list[torch.Tensor]]:
        layer = nn.Linear(4, 4)
        t = -1

        def step(h: torch.Tensor, x: torch.Tensor) -> Any:
            nonlocal t
            t += 1
            if steers == "detach" and t % 4 == 0:
                h = h.detach()
            h = torch.tanh(layer(x) + h)
            y = Surrogate.apply(h - 0.1, 1 / (1 + t)) if steers == "slope" else h  # type: ignore[no-untyped-call]
            return h, y * float(t % 4 == 0) if steers == "value" else y

        return step, list(layer.parameters())

    xs = torch.randn(12, 3, 4)
    for options in OPTIONS:
        step, wanted = make()
        try:
            _, ys = lt.checkpointed_scan(step, torch.zeros(3, 4), xs, **options)
            gradients = torch.autograd.grad(ys.pow(2).sum(), wanted)
        except lt.CheckpointError:
            continue
        with torch.no_grad():
            again, theirs = make()
            for to, of in zip(theirs, wanted, strict=True):
                to.copy_(of)
        _, ys = lt.scan(again, torch.zeros(3, 4), xs)
        assert all(map(same_bits, gradients, torch.autograd.grad(ys.pow(2).sum(), theirs)))


def test_a_parameter_without_grad_is_state() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.count = nn.Parameter(torch.zeros(()), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            out: torch.Tensor = self.layer(x) * (self.count % 3)
            return out

    def make() -> tuple[Any, list[torch.Tensor]]:
        net = Frozen()
        return net, list(net.layer.parameters())

    assert all(is_right(make, length, **options) for options in OPTIONS for length in (2, 3, 12))
    net = Frozen()
    count = net.count
    lt.plan_for_loop(net, torch.randn(9, 3, 4), base=3)
    assert net.count is count
    assert net.count == 0
    ys = lt.checkpointed_for_loop(net, torch.randn(9, 3, 4), base=3)
    ys.sum().backward()
    assert net.count is count
    assert net.count == 9


def _late_norm() -> nn.Module:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.v: Any = None
            self.n = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.v is None:
                self.v = x
            else:
                self.n += 1
                self.v = self.norm(self.v + x) / self.n
            out: torch.Tensor = self.v * 1.0
            return out

    return Late()


def _one_norm_for_each_step() -> nn.Module:
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(12))
            self.t = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.t += 1
            out: torch.Tensor = self.norms[self.t - 1](x)
            return out

    return Norms()


def _late_list() -> nn.Module:
    class Delays(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.past: list[torch.Tensor] = []
            self.t = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.t += 1
            y: torch.Tensor = torch.tanh(self.layer(x) + sum(self.past[-2:]))
            if self.t > 4:
                self.past.append(y)
            return y

    return Delays()


@pytest.mark.parametrize("make", [_late_norm, _one_norm_for_each_step, _late_list])
def test_state_that_begins_to_change_late(make: Callable[[], nn.Module]) -> None:
    for options in OPTIONS[:5]:
        outcomes = []
        loops: list[Callable[..., Any]] = [lt.for_loop, partial(lt.checkpointed_for_loop, **options)]
        for loop in loops:
            torch.manual_seed(0)
            net = make()
            ys = loop(net, torch.randn(12, 3, 4))
            gradients = torch.autograd.grad(ys.pow(2).sum(), list(net.parameters()), allow_unused=True)
            outcomes.append([ys, *gradients, *net.buffers(), *vars(net).get("past", [])])
        for a, b in zip(*outcomes, strict=True):
            assert (a is None and b is None) or same_bits(a, b)


def test_a_backward_inside_the_step_counts_once() -> None:
    def run(loop: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer, local = nn.Linear(4, 4), nn.Linear(4, 1)

        def step(x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(layer(x))
            local(h.detach()).pow(2).mean().backward()
            return h

        loop(step, torch.randn(10, 3, 4)).pow(2).sum().backward()
        return [p.grad for p in (*layer.parameters(), *local.parameters()) if p.grad is not None]

    plain = run(lt.for_loop)
    assert len(plain) == 4
    for options in OPTIONS[:5]:
        assert all(map(same_bits, plain, run(partial(lt.checkpointed_for_loop, **options))))


def _hooked(into: list[torch.Tensor]) -> tuple[Any, nn.Module]:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda _, __, y: into.append(y))
    return lambda x: torch.tanh(layer(x)), layer


def _tracked(into: list[torch.Tensor]) -> tuple[Any, nn.Module]:
    layer, tracker = nn.Linear(4, 4), SimpleNamespace(seen=into)

    def step(x: torch.Tensor) -> torch.Tensor:
        tracker.seen.append(layer(x))
        return torch.tanh(x)

    return step, layer


COLLECTED: list[torch.Tensor] = []


def _global(into: list[torch.Tensor]) -> tuple[Any, nn.Module]:
    layer = nn.Linear(4, 4)
    globals()["COLLECTED"] = into

    def step(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = layer(x)
        COLLECTED.append(y)
        return y

    return step, layer


class _Shelf:
    kept: list[torch.Tensor]


def _shelved(into: list[torch.Tensor]) -> tuple[Any, nn.Module]:
    layer, _Shelf.kept = nn.Linear(4, 4), into

    def step(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = layer(x)
        _Shelf.kept.append(y)
        return y

    return step, layer


def _every_fifth(into: list[torch.Tensor]) -> tuple[Any, nn.Module]:
    layer, times = nn.Linear(4, 4), itertools.count(1)

    def step(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = layer(x)
        if next(times) % 5 == 0:
            into.append(y)
        return y

    return step, layer


@pytest.mark.parametrize("make", [_hooked, _tracked, _shelved, _global, _every_fifth])
def test_tensors_collected_on_the_side_do_not_lose_their_gradient_silently(make: Any) -> None:
    collected: list[torch.Tensor] = []
    step, _ = make(collected)

    def train() -> None:
        ys = lt.checkpointed_for_loop(step, torch.randn(12, 3, 4), base=4)
        (ys.sum() + sum(y.pow(2).sum() for y in collected)).backward()

    with pytest.raises(lt.CheckpointError, match="puts tensors with a gradient into"):
        train()


def test_another_thread_that_draws_in_between_is_found_out_or_makes_no_difference() -> None:
    """The mask shows in the outputs: whatever numbers it was drawn with, it has to be the one of the gradient."""
    done, x = threading.Event(), torch.ones(20, 300, 4)

    def draw() -> None:
        while not done.is_set():
            torch.rand(1)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(10):
            gain = torch.ones(4, requires_grad=True)
            ys = lt.checkpointed_for_loop(lambda x, gain=gain: torch.dropout(x * gain, 0.5, train=True), x, base=4)
            with suppress(lt.CheckpointError):
                (found,) = torch.autograd.grad(ys.sum(), gain)
                assert same_bits(found, ys.detach().sum((0, 1)))
    finally:
        done.set()
        thread.join()
    step, wanted = nn.Dropout(0.5), torch.ones(20, 300, 4, requires_grad=True)
    ys = lt.checkpointed_for_loop(step, wanted, base=4)  # with nobody beside
    assert same_bits(torch.autograd.grad(ys.sum(), wanted)[0], ys.detach())


def test_a_refusal_leaves_buffers_as_they_were() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.seen: list[float] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(1.0)
            out: torch.Tensor = self.norm(x)
            return out

    net = Normed()
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    seen = net.seen
    kept: list[torch.Tensor] = []

    def collecting(x: torch.Tensor) -> torch.Tensor:
        kept.append(x * net.norm.weight)
        out: torch.Tensor = net(x)
        return out

    with pytest.raises(lt.BudgetError):
        lt.checkpointed_for_loop(net, torch.randn(20, 3, 4), budget=10)
    with pytest.raises(lt.CheckpointError, match="into kept"):
        lt.checkpointed_for_loop(collecting, torch.randn(20, 3, 4), base=4)
    assert all(same_bits(buffer, before[name]) for name, buffer in net.named_buffers())
    assert net.seen is seen == []


PLANNED = 0


def test_planning_puts_counters_back_and_tells_of_what_it_cannot() -> None:
    layer, count, held = nn.Linear(4, 4), 0, SimpleNamespace(t=0)
    rows: list[int] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        global PLANNED
        PLANNED += 1
        count += 1
        held.t += 1
        out: torch.Tensor = layer(x)
        return out

    def noting(x: torch.Tensor) -> torch.Tensor:
        rows.append(1)
        out: torch.Tensor = layer(x)
        return out

    lt.plan_for_loop(step, torch.randn(9, 3, 4), base=3)
    assert (count, held.t, PLANNED) == (0, 0, 0)
    with pytest.warns(UserWarning, match=r"moved rows, outside"):
        lt.plan_for_loop(noting, torch.randn(9, 3, 4), base=3)


def test_iterators_and_schedules_in_modules_are_repeated() -> None:
    class Annealed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.slopes: Iterator[int] = itertools.count(1)
            self.scales = [0.5, 0.25, 2.0] * 4

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = Surrogate.apply(self.layer(x), 1 / next(self.slopes))  # type: ignore[no-untyped-call]
            out: torch.Tensor = y * self.scales.pop()
            return out

    def make() -> tuple[Any, list[torch.Tensor]]:
        net = Annealed()
        return net, list(net.parameters())

    assert all(is_right(make, length, **options) for options in OPTIONS[:5] for length in (2, 3, 12))


class Tensors(torch.autograd.Function):
    """A spike whose gradient has a slope that is a tensor, saved with the others."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, slope)
        return (x >= 0).to(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, slope = ctx.saved_tensors
        return grad * slope * (1 - x.abs()).clamp(min=0), None


class InContext(torch.autograd.Function):
    """A spike whose slope is somewhere in its context."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slope: Any, settings: Any) -> torch.Tensor:
        ctx.slope, ctx.settings = slope, settings
        ctx.save_for_backward(x)
        return (x >= 0).to(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * float(ctx.slope()) * (1 - x.abs()).clamp(min=0), None, None


def _in_context(h: torch.Tensor, slope: float, settings: Any) -> Any:
    return InContext.apply(h, lambda: slope, settings)  # type: ignore[no-untyped-call]


def _passing(h: torch.Tensor, weight: Any) -> Any:
    """The same value, and a weighted gradient."""
    return h + (h - h.detach()) * weight


STEERED: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "number": lambda h, t: Surrogate.apply(h, 1 / (1 + t)),  # type: ignore[no-untyped-call]
    "saved tensor": lambda h, t: Tensors.apply(h, torch.full((4,), 1 / (1 + t))),  # type: ignore[no-untyped-call]
    "saved number": lambda h, t: Tensors.apply(h, torch.tensor(1 / (1 + t))),  # type: ignore[no-untyped-call]
    "number of numpy": lambda h, t: _in_context(h, 1 / (1 + t), np.float32(t)),
    "tuple": lambda h, t: _in_context(h, 1 / (1 + t), (t, "annealed")),
    "dictionary": lambda h, t: _in_context(h, 1 / (1 + t), {"slopes": [t]}),
    "object": lambda h, t: _in_context(h, 1 / (1 + t), SimpleNamespace(slope=t)),
    "tensor in an object": lambda h, t: _in_context(h, 1 / (1 + t), SimpleNamespace(slope=torch.tensor(t))),
    "product with a number": lambda h, t: _passing(h, 1 / (1 + t)),
    "product with a tensor": lambda h, t: _passing(h, torch.full((4,), 1 / (1 + t))),
    "mask": lambda h, t: torch.where(torch.arange(4) < t % 5, h, h.detach()),
    "selection": lambda h, t: torch.cat([h[:, : t % 5].detach(), h[:, t % 5 :]], 1),
}


@pytest.mark.parametrize("way", STEERED)
def test_every_way_in_which_a_counter_steers_gradients_alone(way: str) -> None:
    def make() -> tuple[Any, list[torch.Tensor]]:
        layer, times = nn.Linear(4, 4), [0]

        def step(x: torch.Tensor) -> Any:
            times[0] += 1
            h = layer(x)
            return STEERED[way](h, times[0]).sin() + h

        return step, list(layer.parameters())

    for options in OPTIONS[:5]:
        is_right(make, 2, **options)  # or refused
    assert not any(is_right(make, 12, **options) for options in ({"base": 2}, {"checkpoints": 2}))


def test_noise_that_an_operation_leaves_unfilled_is_not_compared() -> None:
    def make() -> tuple[Any, list[torch.Tensor]]:
        layer, times = nn.Linear(4, 4), [0]

        def step(x: torch.Tensor) -> Any:
            times[0] += 1
            return nn.functional.rrelu(layer(x), training=False)

        return step, list(layer.parameters())

    assert all(is_right(make, 12, **options) for options in OPTIONS[:5])
