"""Step functions of the kinds that people train, made fresh from a seed, and the plain Python loop they are held to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import snntorch
import torch
from snntorch import utils as snntorch_utils
from spikingjelly.activation_based import functional as jelly_functional
from spikingjelly.activation_based import layer as jelly_layer
from spikingjelly.activation_based import neuron as jelly_neuron
from torch import nn

from lowtide.torch import spiking

BATCH, WIDTH, IN = 3, 5, 4


@dataclass
class Network:
    """A step `f(carry, x) -> (carry, y)` with everything whose value or gradient is compared."""

    step: Callable[[Any, Any], Any]
    init: Any
    xs: torch.Tensor
    leaves: list[torch.Tensor]  # what gradients are taken of
    module: nn.Module | None = None
    generators: list[torch.Generator] = field(default_factory=list)
    runs: list[int] = field(default_factory=lambda: [0])

    def counted(self, carry: Any, x: Any) -> Any:
        self.runs[0] += 1
        return self.step(carry, x)


def _xs(length: int, dtype: torch.dtype, *, spikes: bool = False) -> torch.Tensor:
    values = torch.rand(length, BATCH, IN, dtype=dtype)
    return ((values < 0.5).to(dtype) if spikes else values - 0.5).requires_grad_()


def lif(length: int, dtype: torch.dtype) -> Network:
    w1 = torch.randn(IN, WIDTH, dtype=dtype, requires_grad=True)
    w2 = torch.randn(WIDTH, 2, dtype=dtype, requires_grad=True)
    spike = spiking.ReluGrad()

    def step(carry: Any, x: torch.Tensor) -> Any:
        g, v, o = carry
        g = spiking.expon_step(g, x @ w1, 0.8)
        v, z = spiking.lif_step(v, g, spike=spike, leak=0.3)
        o = spiking.expon_step(o, z @ w2, 0.9)
        return (g, v, o), {"o": o, "z": z.detach()}

    zeros = [torch.zeros(BATCH, n, dtype=dtype) for n in (WIDTH, WIDTH, 2)]
    return Network(step, tuple(zeros), _xs(length, dtype, spikes=True), [w1, w2])


def gru(length: int, dtype: torch.dtype) -> Network:
    """Its output is its carry, the case that needs care to the last bit."""
    cell = nn.GRUCell(IN, WIDTH).to(dtype)
    h0 = torch.randn(BATCH, WIDTH, dtype=dtype, requires_grad=True)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = cell(x, h)
        return h, h

    return Network(step, h0, _xs(length, dtype), [h0, *cell.parameters()], cell)


def dropout(length: int, dtype: torch.dtype) -> Network:
    net = nn.Sequential(nn.Linear(IN + WIDTH, WIDTH), nn.Dropout(0.4), nn.Tanh()).to(dtype)
    h0 = torch.randn(BATCH, WIDTH, dtype=dtype, requires_grad=True)
    generator = torch.Generator().manual_seed(5)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = net(torch.cat([x, h], 1)) + 0.1 * h
        noise = torch.rand(h.shape, generator=generator, dtype=dtype)
        return h, (h * noise, h)

    return Network(step, h0, _xs(length, dtype), [h0, *net.parameters()], net, [generator])


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(IN, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.3)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.drop(self.norm(self.linear(x)))
        return out


def batch_norm(length: int, dtype: torch.dtype) -> Network:
    net = _Normed().to(dtype)
    return Network(lambda _, x: (None, net(x)), None, _xs(length, dtype), list(net.parameters()), net)


def shared_twice(length: int, dtype: torch.dtype) -> Network:
    """One weight used twice in a step, and a bias only in some steps."""
    w = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=dtype) / 3)
    v = nn.Parameter(torch.randn(IN, WIDTH, dtype=dtype))

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.tanh(torch.tanh(h @ w + x @ v) @ w)
        return h, [h, h * 2]

    return Network(step, torch.zeros(BATCH, WIDTH, dtype=dtype), _xs(length, dtype), [w, v])


def captured(length: int, dtype: torch.dtype) -> Network:
    """Weights that were computed before the loop, one of them from another one that the step uses too."""
    p = torch.randn(WIDTH, WIDTH, dtype=dtype, requires_grad=True)
    q = torch.randn(IN, WIDTH, dtype=dtype, requires_grad=True)
    w = p / p.norm()
    u = (q * 2).t()

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.tanh(h @ w + torch.nn.functional.linear(x, u)) * p[0]
        return h, h.sum(1)

    return Network(step, torch.ones(BATCH, WIDTH, dtype=dtype), _xs(length, dtype), [p, q])


class _SnnTorch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(IN, WIDTH)
        self.lif = snntorch.Leaky(beta=0.8, threshold=0.2, init_hidden=True)
        self.second = nn.Linear(WIDTH, 2)
        self.out = snntorch.Synaptic(alpha=0.7, beta=0.6, threshold=0.2, init_hidden=True, output=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.out(self.second(self.lif(self.first(x)).to(x.dtype)))


def snn_torch(length: int, dtype: torch.dtype) -> Network:
    net = _SnnTorch().to(dtype)
    snntorch_utils.reset(net)
    return Network(lambda _, x: (None, net(x)), None, _xs(length, dtype), list(net.parameters()), net)


def spiking_jelly(length: int, dtype: torch.dtype) -> Network:
    net = nn.Sequential(
        jelly_layer.Linear(IN, WIDTH),
        jelly_neuron.LIFNode(tau=2.0, v_threshold=0.1),
        jelly_layer.Linear(WIDTH, 2),
        jelly_neuron.ParametricLIFNode(init_tau=1.5, v_threshold=0.05),
    ).to(dtype)
    jelly_functional.reset_net(net)
    return Network(lambda _, x: (None, net(x)), None, _xs(length, dtype), list(net.parameters()), net)


def lif_modules(length: int, dtype: torch.dtype) -> Network:
    net = nn.Sequential(
        nn.Linear(IN, WIDTH),
        spiking.Expon(5.0),
        spiking.LIF(3.0, v_threshold=0.3),
        nn.Linear(WIDTH, 2),
        spiking.Expon(9.0),
    ).to(dtype)
    return Network(lambda _, x: (None, net(x)), None, _xs(length, dtype), list(net.parameters()), net)


NETWORKS: dict[str, Callable[[int, torch.dtype], Network]] = {
    "lif": lif,
    "gru": gru,
    "dropout": dropout,
    "batch_norm": batch_norm,
    "shared_twice": shared_twice,
    "captured": captured,
    "snn_torch": snn_torch,
    "spiking_jelly": spiking_jelly,
    "lif_modules": lif_modules,
}


def plain(net: Network, *, reverse: bool = False, reduce: str | None = None) -> tuple[Any, Any]:
    """The loop as anybody would write it."""
    carry, ys = net.init, []
    rows = list(net.xs.unbind(0))
    total: Any = None
    for x in reversed(rows) if reverse else rows:
        carry, y = net.counted(carry, x)
        leaves, spec = torch.utils._pytree.tree_flatten(y)
        ys.append(leaves)
        if reduce in ("sum", "mean"):
            total = [acc + leaf for acc, leaf in zip(total or [0] * len(leaves), leaves, strict=True)]
    if reduce in ("sum", "mean"):
        results = [acc / len(rows) for acc in total] if reduce == "mean" else total
    elif reduce == "last":
        results = ys[-1]
    else:
        columns = [list(column) for column in zip(*ys, strict=True)]
        results = [torch.stack(column[::-1] if reverse else column) for column in columns]
    return carry, torch.utils._pytree.tree_unflatten(results, spec)


def outcome(
    make: Callable[[], Network], run: Callable[[Network], Any], seed: int = 1
) -> tuple[dict[str, Any], Network]:
    """Everything that must agree to the last bit after running a fresh network forward and backward."""
    torch.manual_seed(seed)
    net = make()
    result = run(net)
    tensors = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    torch.manual_seed(99)
    loss = sum((t * torch.randn(t.shape, dtype=t.dtype)).sum() for t in tensors if t.requires_grad)
    seen: dict[str, Any] = {f"result {k}": t.detach().clone() for k, t in enumerate(tensors)}
    seen["requires grad"] = [t.requires_grad for t in tensors]
    assert isinstance(loss, torch.Tensor)
    wanted = [net.xs, *net.leaves]
    torch.manual_seed(7)
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    seen |= {f"grad {k}": g for k, g in enumerate(grads)}
    seen["rng after"] = torch.get_rng_state()
    seen |= {f"generator {k}": g.get_state() for k, g in enumerate(net.generators)}
    if net.module is not None:
        seen |= {f"hidden {name}": value for name, value in hidden_of(net.module).items()}
    return seen, net


def hidden_of(module: nn.Module) -> dict[str, Any]:
    """Every tensor a module keeps beside its parameters."""
    found: dict[str, Any] = {}
    for path, child in module.named_modules():
        values = {**child._buffers, **vars(child)}
        if isinstance(getattr(child, "_memories", None), dict):
            values |= child._memories
        found |= {f"{path}.{k}": v.detach().clone() for k, v in values.items() if isinstance(v, torch.Tensor)}
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what is not the same, bit by bit."""
    from lowtide.torch.state.bits import same_bits

    assert one.keys() == other.keys(), one.keys() ^ other.keys()

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return same_bits(a, b)
        return bool(a == b) if not isinstance(a, torch.Tensor) else False

    return [name for name in one if not same(one[name], other[name])]
