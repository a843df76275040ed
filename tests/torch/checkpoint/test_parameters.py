"""Parameters and buffers that were others in the first run: `functional_call` puts its own there and takes them away.

By the time of the backward the module has its old ones again. The rerun has to see those of the first run, also of
submodules that are read without being called.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import linear
from torch.nn.utils import parametrizations, parametrize, stateless

import lowtide.torch as lt
from lowtide.errors import CheckpointError
from lowtide.torch.state.bits import same_bits

Checkpoint = Callable[..., Any]


class TiedHead(nn.Module):
    """Reads the parameter of a submodule that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(self.norm(x), self.words.weight).sin() @ self.words.weight


class Attention(nn.Module):
    """Torch's own, which reads the parameters of its `out_proj`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x, x, x)[0]
        return result.sin()


class Uncalled(nn.Module):
    """Calls the method `forward` of torch's own, not the module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner.forward(x, x, x)[0]
        return result.sin()


class Holder(nn.Module):
    """Has parameters and a buffer, and is never called."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("scale", torch.rand(4) + 0.5)


class Buffers(nn.Module):
    """Reads the buffer of a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.held = Holder()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.held.scale).sin() * self.held.scale


class Reader(nn.Module):
    """Is asked by a method, which reads further inside."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.ModuleDict({"held": Holder()})

    def read(self, x: torch.Tensor) -> torch.Tensor:
        held: Any = self.deep["held"]
        result: torch.Tensor = (x @ held.weight).sin() * held.scale
        return result


class Nested(nn.Module):
    """Holds modules in modules, and calls none."""

    def __init__(self) -> None:
        super().__init__()
        self.outside = nn.ModuleList([Reader(), Reader()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        readers: Any = self.outside
        for reader in readers:
            x = reader.read(x)
        return x


class Named(nn.Module):
    """Gets at its submodules by names that are in no code."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(2):
            self.add_module(f"part{number}", Holder())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(2):
            held = getattr(self, f"part{number}")
            x = (x @ held.weight).sin() * held.scale
        return x


class Lists(nn.Module):
    """Parameters in a list and in a dictionary, which are modules."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.ParameterList([torch.randn(4, 4), torch.randn(4, 4)])
        self.table = nn.ParameterDict({"a": torch.randn(4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.row:
            x = (x @ weight).sin()
        result: torch.Tensor = x.square() * self.table["a"]
        return result


def orthogonal() -> nn.Module:
    head = TiedHead()
    parametrizations.orthogonal(head.words)
    return head


def weight_norm() -> nn.Module:
    head = TiedHead()
    parametrizations.weight_norm(head.words)
    return head


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "a tied head": TiedHead,
    "attention": Attention,
    "attention that is not called": Uncalled,
    "buffers": Buffers,
    "nested": Nested,
    "by names": Named,
    "lists of parameters": Lists,
    "orthogonal": orthogonal,
    "weight norm": weight_norm,
}


def call(module: nn.Module, x: torch.Tensor) -> Any:
    return module(x)


def call_forward(module: nn.Module, x: torch.Tensor) -> Any:
    return module.forward(x)


class Caller(nn.Module):
    """Is given the module that it calls."""

    def forward(self, module: nn.Module, x: torch.Tensor) -> Any:
        return module(x)

    def run(self, module: nn.Module, x: torch.Tensor) -> Any:
        return module.forward(x)


REACHED: dict[str, Callable[[Checkpoint, nn.Module, torch.Tensor], Any]] = {
    "the module": lambda checkpoint, block, x: checkpoint(block, x),
    "its forward": lambda checkpoint, block, x: checkpoint(block.forward, x),
    "its __call__": lambda checkpoint, block, x: checkpoint(block.__call__, x),
    "a part of its forward": lambda checkpoint, block, x: checkpoint(partial(block.forward), x),
    "a variable": lambda checkpoint, block, x: checkpoint(lambda x: block(x), x),
    "a variable's forward": lambda checkpoint, block, x: checkpoint(lambda x: block.forward(x), x),
    "an argument": lambda checkpoint, block, x: checkpoint(call, block, x),
    "an argument's forward": lambda checkpoint, block, x: checkpoint(call_forward, block, x),
    "an argument of its class's": lambda checkpoint, block, x: checkpoint(type(block).forward, block, x),
    "an argument of a module": lambda checkpoint, block, x: checkpoint(Caller(), block, x),
    "an argument of a method": lambda checkpoint, block, x: checkpoint(Caller().run, block, x),
    "an argument of a part": lambda checkpoint, block, x: checkpoint(partial(call_forward), block, x),
    "a list": lambda checkpoint, block, x: checkpoint(lambda row, x: row[0](x), [block], x),
    "a module around": lambda checkpoint, block, x: checkpoint(nn.Sequential(block), x),
    "an inner call": lambda checkpoint, block, x: checkpoint(lambda x: checkpoint(block, x).sin(), x),
    "an inner call of its forward": lambda checkpoint, block, x: checkpoint(lambda x: checkpoint(block.forward, x), x),
}
# Code that neither names the module's parts nor calls it: then they cannot be known.
UNKNOWN = {
    ("by names", reached)
    for reached in ("a variable's forward", "an argument's forward", "an argument of a method", "an argument of a part")
}


class Model(nn.Module):
    """A block behind a checkpoint call."""

    def __init__(self, block: nn.Module, reached: Callable[..., Any]) -> None:
        super().__init__()
        self.block = block
        self.reached = reached
        self.checkpoint: Checkpoint = plainly

    def forward(self, x: torch.Tensor) -> Any:
        return self.reached(self.checkpoint, self.block, x)


def plainly(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def others_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Other parameters and buffers for a model."""
    torch.manual_seed(3)
    buffers = {name: torch.rand_like(buffer) for name, buffer in model.named_buffers()}
    return {n: torch.randn_like(p).requires_grad_() for n, p in model.named_parameters()} | buffers


def gradients(
    model: Model | Parts, others: dict[str, torch.Tensor], checkpoint: Checkpoint
) -> list[torch.Tensor | None]:
    """Of the other parameters and of the input; the model's own get none."""
    model.checkpoint = checkpoint
    own = [*model.parameters(), *model.buffers()]
    torch.manual_seed(1)
    x = torch.randn(3, 4, requires_grad=True)
    y = functional_call(model, others, (x,))
    wanted = [x, *(other for other in others.values() if other.requires_grad)]
    found = torch.autograd.grad(y.square().sum(), wanted, allow_unused=True)
    assert all(a is b for a, b in zip([*model.parameters(), *model.buffers()], own, strict=True))
    return [y, *found]


def assert_same(found: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> None:
    assert [a is None for a in found] == [b is None for b in expected]
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True) if a is not None and b is not None)


@pytest.mark.parametrize(
    ("block", "reached"),
    [(block, reached) for block in BLOCKS for reached in REACHED if (block, reached) not in UNKNOWN],
)
def test_the_rerun_has_the_parameters_of_the_first_run(block: str, reached: str) -> None:
    torch.manual_seed(0)
    model = Model(BLOCKS[block](), REACHED[reached])
    others = others_of(model)
    expected = gradients(model, others, plainly)
    for _ in range(2):  # the second time, modules are known already
        assert_same(gradients(model, others, lt.checkpoint), expected)


class Base(nn.Module):
    """Parts of every kind, read where this module is not called: only functions inside it are."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: Any = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.words: Any = nn.ModuleDict({"in": nn.Embedding(5, 4), "out": nn.Embedding(5, 4)})
        self.grid: Any = nn.ModuleList([nn.ModuleList([Reader()])])
        self.chain: Any = nn.Sequential(Reader(), nn.Tanh())
        self.tied = TiedHead()
        self.register_module("gone", None)

    def read(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, getattr(self, "tied").words.weight).sin().sum(-1, keepdim=True) * x  # noqa: B009


class Parts(Base):
    """Overrides what it then calls."""

    def __init__(self, part: Callable[[Parts], Callable[[torch.Tensor], Any]]) -> None:
        super().__init__()
        self.part = part
        self.checkpoint: Checkpoint = plainly

    def read(self, x: torch.Tensor) -> torch.Tensor:
        return super().read(x).cos()

    def forward(self, x: torch.Tensor) -> Any:
        return self.checkpoint(self.part(self), x)


def by_helper(model: Parts) -> Callable[[torch.Tensor], Any]:
    heads = model.heads
    return lambda x: linear(x, heads[1].weight).sin() * heads[1].bias


def read_tied(model: Base, x: torch.Tensor) -> torch.Tensor:
    return linear(x, model.tied.words.weight).sin() @ model.tied.words.weight


PARTS: dict[str, Callable[[Parts], Callable[[torch.Tensor], Any]]] = {
    "in a list": lambda model: lambda x: linear(x, model.heads[0].weight).sin(),
    "a list": by_helper,
    "by a key": lambda model: lambda x: (x @ model.words["out"].weight.T).sin(),
    "by an attribute": lambda model: lambda x: (x @ model.words.out.weight.T).sin(),
    "in a list of lists": lambda model: lambda x: model.grid[0][0].read(x),
    "in a chain": lambda model: lambda x: model.chain[0].read(x),
    "in an argument": lambda model: lambda x: model.checkpoint(read_tied, model, x),
    "in an argument of a part": lambda model: lambda x: model.checkpoint(partial(read_tied, x=x), model),
    "a method that calls the one it overrides": lambda model: model.read,
}


@pytest.mark.parametrize("part", PARTS)
def test_parts_of_a_module_that_is_not_called(part: str) -> None:
    torch.manual_seed(0)
    model = Parts(PARTS[part])
    others = others_of(model)
    expected = gradients(model, others, plainly)
    assert_same(gradients(model, others, lt.checkpoint), expected)


def test_parameters_that_were_computed() -> None:
    """As in meta-learning: gradients go through the parameters to what they were made from."""
    torch.manual_seed(0)
    model = Model(TiedHead(), REACHED["a variable"])
    starts = {name: parameter.detach().requires_grad_() for name, parameter in model.named_parameters()}

    def run(checkpoint: Checkpoint) -> list[torch.Tensor | None]:
        model.checkpoint = checkpoint
        torch.manual_seed(1)
        x = torch.randn(3, 4)
        inner = functional_call(model, starts, (x,)).square().sum()
        steps = torch.autograd.grad(inner, list(starts.values()), create_graph=True)
        ahead = {name: start - 0.1 * step for (name, start), step in zip(starts.items(), steps, strict=True)}
        loss = functional_call(model, ahead, (x,)).square().sum()
        return [loss, *torch.autograd.grad(loss, list(starts.values()))]

    assert_same(run(lt.checkpoint), run(plainly))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_older_functional_call() -> None:
    torch.manual_seed(0)
    model = Model(Attention(), REACHED["an argument"])
    others = others_of(model)

    def run(checkpoint: Checkpoint) -> list[torch.Tensor | None]:
        model.checkpoint = checkpoint
        y = stateless.functional_call(model, others, (torch.ones(3, 4),))
        return [y, *torch.autograd.grad(y.square().sum(), list(others.values()))]

    assert_same(run(lt.checkpoint), run(plainly))


def test_parameters_of_a_part_are_checked_once_the_module_is_called() -> None:
    head, x = TiedHead(), torch.randn(3, 4, requires_grad=True)
    y = lt.checkpoint(call, nn.ModuleDict({"head": head})["head"], x)
    with torch.no_grad():
        head.words.weight.mul_(2)
    with pytest.raises(CheckpointError, match=r"words\.weight was changed in place"):
        y.sum().backward()


class Exponential(nn.Module):
    """A parametrization that saves for its backward, and something as large as the layer's input."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.exp()


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize(("forward", "backward"), [(True, False), (False, True), (True, True)])
def test_weights_that_are_cached(forward: bool, backward: bool, filled: bool) -> None:
    """Inside `cached` the weight is made once: a rerun must not make it where the first run did not."""

    def run(checkpoint: Checkpoint) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        layer = nn.Linear(4, 4, bias=False)
        parametrize.register_parametrization(layer, "weight", Exponential())
        x = torch.randn(4, 4, requires_grad=True)
        with parametrize.cached() if forward else nullcontext():
            start = layer(x) if filled else x
            y = checkpoint(layer, checkpoint(layer, start).sin())
        with parametrize.cached() if backward else nullcontext():
            found = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
            again = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
        assert parametrize._cache_enabled == 0
        assert parametrize._cache == {}
        return [y, *found, *again]

    assert_same(run(lt.checkpoint), run(plainly))


class Counting(nn.Module):
    """Counts its calls in a parameter, once that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(4, 4), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.count.requires_grad:
            self.count.add_(1)
        result: torch.Tensor = (self.layer(x) * self.count.detach().clone()).sin()
        return result


def test_a_parameter_that_is_frozen_after_the_first_call_may_be_a_counter() -> None:
    x, found = torch.linspace(-1, 1, 8).view(2, 4), []
    for call in (lambda net, x: net(x), lt.checkpoint):
        torch.manual_seed(0)
        net = Counting()
        call(net, x).sum().backward()
        net.count.requires_grad_(False)
        net.zero_grad()
        call(net, call(net, x)).square().sum().backward()
        found.append((net.layer.weight.grad, net.count.detach()))
    assert all(map(same_bits, *found))
