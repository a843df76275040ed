"""Training as users write it: several calls of a loop, an optimizer, modules that keep things from call to call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal

import lowtide.torch as lt
from lowtide import CheckpointError
from lowtide.torch.state.bits import same_bits

OPTIONS: list[dict[str, Any]] = [{}, {"base": 2}, {"base": 5}, {"checkpoints": 1}, {"budget": 100_000}, {"lean": True}]
ROWS, WIDTH, LENGTH = 3, 4, 11
Make = Callable[[], tuple[nn.Module, Callable[..., torch.Tensor]]]


def plain_scan(f: Callable[..., Any], init: Any, xs: torch.Tensor, **_: Any) -> Any:
    """The loop as it would be without Lowtide."""
    carry, rows = init, []
    for x in xs:
        carry, y = f(carry, x)
        rows.append(y)
    return carry, torch.stack(rows)


def trained(make: Make, scan: Callable[..., Any], **options: Any) -> list[torch.Tensor | None]:
    """Losses, gradients and the final state of three steps of training."""
    torch.manual_seed(0)
    net, loss_of = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    found: list[torch.Tensor | None] = []
    for _ in range(3):
        optimizer.zero_grad()
        xs = torch.randn(LENGTH, ROWS, WIDTH)
        loss = loss_of(lambda f, init, xs=xs: scan(f, init, xs, **options))
        loss.backward()
        found += [loss, *(parameter.grad for parameter in net.parameters())]
        optimizer.step()
    return [*found, *net.parameters(), *net.buffers()]


def is_as_plain(make: Make, options: list[dict[str, Any]] = OPTIONS) -> bool:
    """Whether training with Lowtide is training without it, to the last bit."""
    plain = trained(make, plain_scan)
    for option in options:
        for a, b in zip(plain, trained(make, lt.checkpointed_scan, **option), strict=True):
            if not (a is b is None or (a is not None and b is not None and same_bits(a, b))):
                return False
    return True


def test_what_a_step_overwrites_unread_may_come_from_a_graph_that_is_gone() -> None:
    class Cell(nn.Module):
        """Keeps its last reset, as snnTorch's neurons do, which nobody reads or detaches."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.reset: torch.Tensor | None = None

        def forward(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            self.reset = torch.sigmoid(h)
            out: torch.Tensor = torch.tanh(self.layer(x) + h * self.reset)
            return out

    def make() -> Any:
        cell, last = Cell(), [torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)]

        def step(carry: Any, x: torch.Tensor) -> Any:
            h = cell(carry[0], x)
            return (h, h.sin()), h  # the second is for the caller

        def loss_of(scan: Callable[..., Any]) -> torch.Tensor:
            last[:], ys = scan(step, (last[0].detach(), last[1]))
            loss: torch.Tensor = ys.square().mean()
            return loss

        return cell, loss_of

    assert is_as_plain(make)


def test_a_state_whose_gradient_reaches_no_loss_may_come_from_a_graph_that_is_gone() -> None:
    def make() -> Any:
        cell, last = nn.GRUCell(WIDTH, WIDTH), [torch.zeros(ROWS, WIDTH)]

        def step(carry: Any, x: torch.Tensor) -> Any:
            k, h = carry
            h = cell(x, h.detach() if k == 6 else h)
            return (k + 1, h), h

        def loss_of(scan: Callable[..., Any]) -> torch.Tensor:
            (_, last[0]), _ = scan(step, (0, last[0]))
            return last[0].square().mean()

        return cell, loss_of

    assert is_as_plain(make, OPTIONS[:5])


def test_detached_recordings_in_a_list_of_a_module() -> None:
    class Recorder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(WIDTH, WIDTH)
            self.past: list[torch.Tensor] = []

        def forward(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            h = self.cell(x, h)
            self.past += [h.detach(), h.sum()] if len(self.past) % 3 == 0 else [h.detach()]
            return h

    def make() -> Any:
        net = Recorder()

        def loss_of(scan: Callable[..., Any]) -> torch.Tensor:
            net.past = []
            _, ys = scan(lambda h, x: (net(h, x),) * 2, torch.zeros(ROWS, WIDTH))
            loss: torch.Tensor = ys.square().mean() + torch.stack([each.sum() for each in net.past]).mean()
            return loss

        return net, loss_of

    assert is_as_plain(make, [option for option in OPTIONS if option != {"budget": 100_000}])


@pytest.mark.parametrize(
    "make_layer",
    [
        lambda: nn.LSTM(WIDTH, WIDTH, 2),
        lambda: nn.LSTM(WIDTH, WIDTH, 2, dropout=0.3),
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0).eval(),
        lambda: nn.MultiheadAttention(WIDTH, 2).eval(),
    ],
)
def test_layers_that_have_other_kernels_without_grad(make_layer: Callable[[], nn.Module]) -> None:
    def make() -> Any:
        layer = make_layer()

        def step(h: torch.Tensor, x: torch.Tensor) -> Any:
            given = (x + h)[None]
            out = layer(given, given, given) if isinstance(layer, nn.MultiheadAttention) else layer(given)
            h = (out[0] if isinstance(out, tuple) else out)[0]
            return h, h

        return layer, lambda scan: scan(step, torch.zeros(ROWS, WIDTH))[1].square().mean()

    assert is_as_plain(make, OPTIONS[:5])


def test_transforms_of_torch_func_in_a_step_whose_bytes_are_measured() -> None:
    steps = 0

    def make() -> Any:
        layer = nn.Linear(WIDTH, 1)

        def step(h: torch.Tensor, x: torch.Tensor) -> Any:
            nonlocal steps
            steps += 1
            slope = torch.func.grad(lambda p: torch.tanh(layer(x + p)).sum())(h)
            h = h - 0.1 * slope
            return h, h

        return layer, lambda scan: scan(step, torch.ones(ROWS, WIDTH))[1].square().mean()

    assert is_as_plain(make, OPTIONS[:5])
    steps = 0
    _, loss_of = make()
    loss_of(lambda f, init: lt.checkpointed_scan(f, init, torch.randn(LENGTH, ROWS, WIDTH), budget=100_000))
    assert steps == LENGTH  # what the run that could not be measured counted is put back


@pytest.mark.parametrize("keeps_in", ["carry", "module", "nothing"])
def test_leaves_that_a_step_makes_itself(keeps_in: str) -> None:
    """As Langevin sampling does, and norse's cells at their first step."""

    class Sampler(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(WIDTH, 8), nn.SiLU(), nn.Linear(8, 1))
            self.place = torch.zeros(ROWS, WIDTH)

        def forward(self, h: torch.Tensor, x: torch.Tensor) -> Any:
            if keeps_in != "carry":
                h = (self.place + x).detach().requires_grad_()
            energy = self.energy(h).sum()
            (slope,) = torch.autograd.grad(energy, h, retain_graph=True)
            h = (h - 0.1 * slope + 0.1 * torch.randn_like(h)).detach()
            if keeps_in != "nothing":
                h.requires_grad_()
            if keeps_in != "carry":
                self.place = h
            return h, energy

    def make() -> Any:
        net = Sampler()

        def loss_of(scan: Callable[..., Any]) -> torch.Tensor:
            net.place = torch.zeros(ROWS, WIDTH)
            start = torch.ones(ROWS, WIDTH, requires_grad=True)
            in_carry = keeps_in == "carry"
            _, energies = scan(net, start) if in_carry else scan(lambda _, x: (None, net(start, x)[1]), None)
            mean: torch.Tensor = energies.mean()
            return mean

        return net, loss_of

    assert is_as_plain(make)


def test_what_an_earlier_step_left_in_a_cache_is_refused_as_such() -> None:
    layer = orthogonal(nn.Linear(WIDTH, WIDTH))

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        return (torch.tanh(layer(h) + x),) * 2

    with parametrize.cached(), pytest.raises(CheckpointError, match="that an earlier step computed"):
        lt.checkpointed_scan(step, torch.ones(ROWS, WIDTH), torch.randn(LENGTH, ROWS, WIDTH), base=3)
    with parametrize.cached():
        assert layer.weight.requires_grad  # computed before the loop, as the message says
        _, ys = lt.checkpointed_scan(step, torch.ones(ROWS, WIDTH), torch.randn(LENGTH, ROWS, WIDTH), base=3)
        ys.sum().backward()


def test_a_list_of_an_object_that_grows_is_told_with_the_name_of_the_method() -> None:
    class Engine:
        def __init__(self) -> None:
            self.stiffness = torch.ones((), requires_grad=True)
            self.place = torch.zeros(ROWS, WIDTH)
            self.log: list[float] = []

        def advance(self, force: torch.Tensor) -> torch.Tensor:
            self.place = self.place + 0.1 * (force - self.stiffness * self.place)
            self.log.append(self.place.mean().item())
            return self.place

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ys = lt.checkpointed_for_loop(Engine().advance, torch.randn(LENGTH, ROWS, WIDTH), base=3)
        ys.sum().backward()
    assert [str(each.message).split(":")[0] for each in caught] == [
        "`self.log` grew while `advance` was recomputed for the backward"
    ]


@pytest.mark.parametrize("option", [{"base": 3}, {"checkpoints": 1}, {"base": 3, "check_rerun": False}], ids=str)
def test_an_iterator_that_has_ended_by_the_time_of_a_rerun(option: dict[str, Any]) -> None:
    gains, weight = iter(torch.rand(LENGTH)), torch.ones((), requires_grad=True)
    _, ys = lt.checkpointed_scan(
        lambda h, x: (torch.tanh(h * weight + x) * next(gains),) * 2,
        torch.zeros(ROWS, WIDTH),
        torch.randn(LENGTH, ROWS, WIDTH),
        **option,
    )
    with pytest.raises(CheckpointError, match=r"step.* raised StopIteration\(\), and did not at first") as raised:
        ys.sum().backward()
    assert isinstance(raised.value.__cause__, StopIteration)


@pytest.mark.parametrize("late", [1, 5])
def test_a_state_with_a_gradient_that_is_read_at_first_and_replaced_later(late: int) -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(WIDTH, WIDTH)
            self.start = nn.Parameter(torch.randn(ROWS, WIDTH))
            self.begin()

        def begin(self) -> None:
            self.h, self.steps = torch.tanh(self.start), 0

        def forward(self, _: Any, x: torch.Tensor) -> Any:
            y = self.cell(x, self.h)
            if self.steps >= late:
                self.h = y
            self.steps += 1
            return None, y

    def make() -> Any:
        cell = Cell()

        def loss_of(scan: Callable[..., Any]) -> torch.Tensor:
            cell.begin()
            loss: torch.Tensor = scan(cell, None)[1].square().mean()
            return loss

        return cell, loss_of

    with pytest.raises(CheckpointError, match=r"replaced at a later step.*name it: hidden=\('Cell.h',\)"):
        is_as_plain(make)
    plain = trained(make, plain_scan)
    for option in OPTIONS[:5]:
        ours = trained(make, lt.checkpointed_scan, **option, hidden=("Cell.h",))
        torch.testing.assert_close(ours, plain)  # to rounding: what is named is cloned, in case it is changed in place


def test_generators_in_objects_of_modules() -> None:
    class World:
        """As of reinforcement learning: numpy arrays, numbers and a generator of its own."""

        def __init__(self) -> None:
            self.rng = np.random.default_rng(0)
            self.place = np.zeros(WIDTH, np.float32)
            self.steps = 0

        def step(self, action: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            self.place = 0.9 * self.place + 0.1 * self.rng.normal(size=WIDTH).astype(np.float32)
            self.place += 0.01 * action.mean(0).numpy()
            return torch.from_numpy(self.place.copy())

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy = nn.Linear(WIDTH, WIDTH)
            self.world = World()

        def forward(self, h: torch.Tensor, x: torch.Tensor) -> Any:
            action = self.policy(h + x)
            seen = self.world.step(action.detach())
            return seen.expand_as(h), (action * seen).sum()

    def make() -> Any:
        agent = Agent()
        return agent, lambda scan: scan(agent, torch.zeros(ROWS, WIDTH))[1].mean()

    assert is_as_plain(make)
