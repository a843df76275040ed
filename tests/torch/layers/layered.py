"""Rows of layers of the kinds that people train, made fresh from a seed, and the plain run they are held to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from lowtide.torch import measure
from lowtide.torch.memory.tracker import Log


@dataclass
class Layered:
    """Layers, an input, and what gradients are taken of."""

    layers: Any
    x: Any
    leaves: list[torch.Tensor]
    modules: list[nn.Module] = field(default_factory=list)


def _of(model: nn.Module, x: Any, *more: torch.Tensor) -> Layered:
    inputs = [leaf for leaf in tree_leaves(x) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Layered(model, x, [*parameters, *inputs, *more], list(model.modules()))


def vgg(width: int = 4, batch: int = 3, size: int = 16, *, in_place: bool = True, x_grads: bool = False) -> Layered:
    """VGG-16 with BatchNorm, its thirteen convolutions in five blocks."""
    layers: list[nn.Module] = []
    channels = 3
    for block, count in enumerate((2, 2, 3, 3, 3)):
        for _ in range(count):
            wider = width * 2 ** min(block, 3)
            layers += [nn.Conv2d(channels, wider, 3, padding=1), nn.BatchNorm2d(wider), nn.ReLU(inplace=in_place)]
            channels = wider
        if size > 1:
            size //= 2
            layers.append(nn.MaxPool2d(2))
    features = channels * size * size
    layers += [nn.Flatten(), nn.Linear(features, 16), nn.ReLU(inplace=in_place), nn.Dropout(), nn.Linear(16, 10)]
    side = size * 2 ** sum(isinstance(layer, nn.MaxPool2d) for layer in layers)
    return _of(nn.Sequential(*layers), torch.randn(batch, 3, side, side, requires_grad=x_grads))


def u_shaped(widths: tuple[int, ...] = (32, 16, 8, 4, 8, 16, 32), batch: int = 16) -> Layered:
    """An MLP whose widths fall and rise."""
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.GELU())]
    return _of(nn.Sequential(*layers), torch.randn(batch, widths[0]))


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.drop(self.out(attended.transpose(1, 2).reshape(batch, tokens, width)))
        out: torch.Tensor = x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))
        return out


def transformer(blocks: int = 5, width: int = 8, batch: int = 2, tokens: int = 6) -> Layered:
    layers = [nn.Embedding(11, width), *(Block(width) for _ in range(blocks)), nn.LayerNorm(width)]
    return _of(nn.Sequential(*layers, nn.Linear(width, 11)), torch.randint(0, 11, (batch, tokens)))


def norm_last(blocks: int = 5, width: int = 8, batch: int = 2, tokens: int = 6) -> Layered:
    """Blocks of torch's own, which attend to a copy of their input: no tape holds the input itself."""
    block = partial(nn.TransformerEncoderLayer, width, 2, 4 * width, 0.1, batch_first=True)
    return _of(nn.Sequential(*(block() for _ in range(blocks))), torch.randn(batch, tokens, width))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.second(torch.tanh(self.first(x)))
        return out


def residual(depth: int = 12, width: int = 8, batch: int = 4) -> Layered:
    return _of(nn.Sequential(*(Residual(width) for _ in range(depth))), torch.randn(batch, width, requires_grad=True))


def functions() -> Layered:
    """Functions of all kinds, one of them closing over a weight that was computed."""
    p = torch.randn(5, 5, requires_grad=True)
    w = p / p.norm()
    linear, norm = nn.Linear(5, 5), nn.BatchNorm1d(5)
    layers = [
        torch.sin,
        lambda x: x @ w,
        linear.forward,
        norm,
        torch.Tensor.tanh,
        lambda x: x * torch.rand(x.shape),
        linear,
        lambda x: x.relu_(),
        lambda x: x.view(-1),
        lambda x: x + p.sum(),
    ]
    x = torch.randn(4, 5, requires_grad=True)
    return Layered(layers, x, [p, x, *linear.parameters(), *norm.parameters()], [linear, norm])


class Split(nn.Module):
    """A tensor in, a dict out: a nested value between layers, one part of which nothing touches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return {"h": torch.tanh(self.linear(x)), "rest": (x * 2, None, "a word", torch.arange(3))}


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, tree: Any) -> Any:
        return {"h": torch.tanh(self.linear(tree["h"])) + 0.1 * tree["rest"][0], "rest": tree["rest"]}


class Join(nn.Module):
    def forward(self, tree: Any) -> Any:
        return tree["h"] * tree["rest"][0], tree["rest"][3]


def nested() -> Layered:
    layers = nn.ModuleList([Split(), Middle(), Middle(), Middle(), Join()])
    return _of(layers, torch.randn(3, 6, requires_grad=True))


def shared() -> Layered:
    """One layer several times, and the same weight in two layers."""
    linear, other = nn.Linear(6, 6), nn.Linear(6, 6)
    other.weight = linear.weight
    layers = nn.Sequential(linear, nn.Tanh(), other, nn.Tanh(), linear, nn.Tanh(), linear, nn.Dropout(0.2))
    return _of(layers, torch.randn(4, 6))


def frozen() -> Layered:
    """The first layers need no gradient."""
    front = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.Flatten())
    front.requires_grad_(False)
    layers = nn.Sequential(*front, nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    return _of(layers, torch.randn(3, 2, 6, 6))


def changes_its_input() -> Layered:
    """The first layers change the caller's tensor."""
    start = torch.randn(4, 6, requires_grad=True)
    layers = nn.Sequential(
        nn.Identity(), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)
    )
    return _of(layers, start * 2, start)


class Leaky(nn.Module):
    """Keeps a state of its own from call to call, and counts in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.v: Any = 0.0
        self.calls = 0
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.v = 0.5 * self.v + torch.tanh(self.linear(x))
        out: torch.Tensor = self.v
        return out


def stateful() -> Layered:
    layers = nn.Sequential(Leaky(), nn.Linear(6, 6), Leaky(), nn.BatchNorm1d(6, momentum=None), Leaky())
    return _of(layers, torch.randn(4, 6))


class Push(nn.Module):
    """The way down of a U-net: keeps its result for the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.aside = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, stack: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return torch.tanh(self.linear(stack[0])), self.aside(stack[0]), *stack[1:]


class Pop(nn.Module):
    """The way up; it adds to what was kept, in place if told so."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.in_place = in_place

    def forward(self, stack: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        top = self.linear(stack[0])
        return (stack[1].add_(top) if self.in_place else stack[1] + top), *stack[2:]


def u_net(in_place: bool = False) -> Layered:
    layers = nn.Sequential(
        *(Push() for _ in range(3)), nn.Identity(), *(Pop(in_place and k == 0) for k in range(3)), Join2()
    )
    start = torch.randn(4, 6, requires_grad=True)
    return _of(layers, (start * 1,), start)


class Join2(nn.Module):
    def forward(self, stack: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.sigmoid(stack[0])


class Slope(nn.Module):
    """Differentiates inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(self.linear(inner)).sum(), inner)
        out: torch.Tensor = x + slope * self.linear(x)
        return out


def slopes() -> Layered:
    return _of(nn.Sequential(Slope(), nn.Tanh(), Slope(), nn.Tanh(), Slope()), torch.randn(4, 6))


ROWS: dict[str, Callable[[], Layered]] = {
    "vgg": vgg,
    "vgg with x": lambda: vgg(x_grads=True),
    "u_shaped": u_shaped,
    "transformer": transformer,
    "norm_last": norm_last,
    "residual": residual,
    "functions": functions,
    "nested": nested,
    "shared": shared,
    "frozen": frozen,
    "changes_its_input": changes_its_input,
    "stateful": stateful,
    "u_net": u_net,
    "u_net in place": lambda: u_net(in_place=True),
    "slopes": slopes,
}


def plain(row: Layered) -> Any:
    """The layers one after the other, as anybody would write it."""
    x = row.x
    for layer in row.layers:
        x = layer(x)
    return x


def outcome(make: Callable[[], Layered], run: Callable[[Layered], Any], seed: int = 1) -> dict[str, Any]:
    """Everything that must agree to the last bit after running fresh layers forward and backward."""
    torch.manual_seed(seed)
    row = make()
    torch.manual_seed(seed + 1)
    result = run(row)
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    seen: dict[str, Any] = {f"result {k}": t.detach().clone() for k, t in enumerate(tensors)}
    seen["requires grad"] = [t.requires_grad for t in tensors]
    seen["rng"] = torch.get_rng_state()
    torch.manual_seed(99)
    loss = sum((t * torch.randn(t.shape)).sum() for t in tensors if t.requires_grad)
    assert isinstance(loss, torch.Tensor)
    torch.manual_seed(7)
    grads = torch.autograd.grad(loss, row.leaves, allow_unused=True)
    seen |= {f"grad {k}": grad for k, grad in enumerate(grads)}
    seen["rng after"] = torch.get_rng_state()
    seen |= {f"input {k}": t for k, t in enumerate(tree_leaves(row.x)) if isinstance(t, torch.Tensor)}
    return seen | kept_by(row)


def kept_by(row: Layered) -> dict[str, Any]:
    """Everything that the modules keep beside their submodules."""
    found: dict[str, Any] = {}
    for k, module in enumerate(row.modules):
        values = {**module._buffers, **module._parameters, **vars(module)}
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                found[f"{k} {name}"] = value.detach().clone()
            elif isinstance(value, int | float):
                found[f"{k} {name}"] = value
    return found


def assert_same(seen: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert seen.keys() == wanted.keys()
    for key, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(seen[key], value), key
        else:
            assert seen[key] == value, key


def peak_of(row: Layered, run: Callable[[Layered], Any]) -> int:
    """Most bytes at once beyond input, result, parameters and gradients, in the forward and the backward."""
    log = Log()
    with measure.watching(log):
        tensors = [t for t in tree_leaves(run(row)) if isinstance(t, torch.Tensor) and t.requires_grad]
    given = [torch.full_like(t, 1.5) for t in tensors]
    with measure.watching(log):
        grads = torch.autograd.grad(tensors, row.leaves, given, allow_unused=True)
    theirs = {log.number(t) for t in (*tensors, *grads) if t is not None}
    return log.level(0, len(log.events), theirs)[1]
