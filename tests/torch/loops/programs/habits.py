"""How people write Python: states in containers of all kinds, records on the side, schedules, changes in place."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial, singledispatchmethod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (as everybody does)
from tqdm import tqdm

import lowtide.torch as lt
from tests.torch.loops.programs.program import For, Scan, While, program


def _xs(length: int, *shape: int) -> Any:
    return torch.randn(length, *(shape or (2, 4)), requires_grad=True)


# --- gradients that stop, begin late, or are changed


@program("state of the carry detached in place every third step")
def _(length: int) -> Scan:
    cell, xs = nn.GRUCell(4, 6), _xs(length)

    def step(state: Any, x: torch.Tensor) -> Any:
        h, t = state
        if t % 3 == 0:
            h.detach_()
        h = cell(x, h)
        return (h, t + 1), h

    return Scan(step, (torch.zeros(2, 6), 0), xs, [cell, xs])


@program("state in a module detached in place after it was used")
def _(length: int) -> For:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.h, self.t = nn.Linear(4, 4), torch.zeros(2, 4), 0

        def forward(self, x: torch.Tensor) -> Any:
            y = self.h * 0.9 + self.lin(x)
            self.t += 1
            if self.t % 4 == 0:
                self.h.detach_()
                y = y + self.h
            self.h = y
            return y * 2

    net, xs = Net(), _xs(length)
    return For(net, (xs,), [net, xs])


@program("detach_state method called between chunks, as for TBPTT")
def _(length: int) -> For:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.ModuleList([nn.LSTMCell(4, 4), nn.LSTMCell(4, 4)])
            self.states: list[Any] = [None, None]

        def detach(self) -> None:
            self.states = [None if s is None else tuple(t.detach() for t in s) for s in self.states]

        def forward(self, x: torch.Tensor, k: torch.Tensor) -> Any:
            if int(k) % 5 == 0:
                self.detach()
            for i, cell in enumerate(self.cells):
                self.states[i] = cell(x, self.states[i])
                x = self.states[i][0]
            return x

    net, xs = Net(), _xs(length)
    return For(net, (xs, torch.arange(length)), [net, xs])


@program("outputs without a gradient until warm-up is over")
def _(length: int) -> Scan:
    cell, head, xs = nn.GRUCell(4, 6), nn.Linear(6, 2), _xs(length)

    def step(state: Any, x: torch.Tensor) -> Any:
        h, t = state
        h = cell(x, h)
        y = head(h)
        return (h, t + 1), y if t >= 20 else y.detach()

    return Scan(step, (torch.zeros(2, 6), 0), xs, [cell, head, xs])


@program("a second head is used from step 20 on, and gives zeros before")
def _(length: int) -> Scan:
    cell, late, xs = nn.GRUCell(4, 6), nn.Linear(6, 2), _xs(length)

    def step(state: Any, x: torch.Tensor) -> Any:
        h, t = state
        h = cell(x, h)
        return (h, t + 1), (h, late(h) if t >= 20 else torch.zeros(2, 2))

    return Scan(step, (torch.zeros(2, 6), 0), xs, [cell, late, xs])


@program(
    "only every tenth output has a gradient",
    refused="advance_with_grad=True",
    instead=lambda length: _every_tenth(length, advance_with_grad=True),
)
def _(length: int) -> Scan:
    return _every_tenth(length)


def _every_tenth(length: int, **named: Any) -> Scan:
    cell, xs = nn.GRUCell(4, 6), _xs(length)

    def step(state: Any, x: torch.Tensor) -> Any:
        h, t = state
        h = cell(x, h)
        return (h, t + 1), h if t % 10 == 9 else h.detach()

    return Scan(step, (torch.zeros(2, 6), 0), xs, [cell, xs], named=named)


@program("the state is normed by a hook and its gradient scaled at each step")
def _(length: int) -> Scan:
    cell, xs = nn.GRUCell(4, 6), _xs(length)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = cell(x, h)
        if h.requires_grad:
            h.register_hook(lambda g: g * (1.0 / g.norm().clamp(min=1.0)))
        return h, h

    return Scan(step, torch.zeros(2, 6), xs, [cell, xs])


class Clip(torch.autograd.Function):
    """The identity with a gradient that is clamped."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, most: float) -> Any:
        ctx.most = most
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g.clamp(-ctx.most, ctx.most), None


@program("gradients clamped by a Function whose bound follows a schedule in the carry")
def _(length: int) -> Scan:
    cell, xs = nn.RNNCell(4, 6), _xs(length)

    def step(state: Any, x: torch.Tensor) -> Any:
        h, most = state
        h = Clip.apply(cell(x, h), most)  # type: ignore[no-untyped-call]  # torch's own
        return (h, most * 0.99), h

    return Scan(step, (torch.zeros(2, 6), 1.0), xs, [cell, xs])


@program("full backward hook on the cell that scales gradients")
def _(length: int) -> For:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.h = nn.Linear(8, 4), torch.zeros(2, 4)

        def forward(self, x: torch.Tensor) -> Any:
            self.h = torch.tanh(self.lin(torch.cat([x, self.h], -1)))
            return self.h

    net, xs = Net(), _xs(length)

    def halve(_: Any, grads: Any, __: Any) -> Any:
        return tuple(None if g is None else 0.5 * g for g in grads)

    net.lin.register_full_backward_hook(halve)
    return For(net, (xs,), [net, xs])


@program(
    "parameters frozen and thawed by a schedule",
    refused="gradient|differ|requires_grad",
    instead=lambda length: _masked_freeze(length),
)
def _(length: int) -> Scan:
    cell, xs = nn.RNNCell(4, 6), _xs(length)

    def step(state: Any, x: torch.Tensor) -> Any:
        h, t = state
        cell.weight_hh.requires_grad_(t % 2 == 0)
        h = cell(x, h)
        return (h, t + 1), h

    return Scan(step, (torch.zeros(2, 6), 0), xs, [cell, xs])


def _masked_freeze(length: int) -> Scan:
    cell, xs = nn.RNNCell(4, 6), _xs(length)

    def step(state: Any, x: torch.Tensor) -> Any:
        h, t = state
        w = cell.weight_hh if t % 2 == 0 else cell.weight_hh.detach()
        h = torch.tanh(F.linear(x, cell.weight_ih, cell.bias_ih) + F.linear(h, w, cell.bias_hh))
        return (h, t + 1), h

    return Scan(step, (torch.zeros(2, 6), 0), xs, [cell, xs])


@program("inference mode in a part of the step")
def _(length: int) -> Scan:
    teacher, cell, xs = nn.Linear(4, 6), nn.GRUCell(4, 6), _xs(length)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        with torch.inference_mode():
            target = teacher(x.detach())
        h = cell(x, h)
        return h, (h - target.clone()).square().mean()

    return Scan(step, torch.zeros(2, 6), xs, [teacher, cell, xs])


@program("teacher whose weights are a moving average, updated inside of the step")
def _(length: int) -> For:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4)
            self.teacher.requires_grad_(False)

        @torch.no_grad()
        def update(self) -> None:
            for t, s in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                t.copy_(0.9 * t + 0.1 * s)

        def forward(self, x: torch.Tensor) -> Any:
            self.update()
            y = self.student(x)
            return (y - self.teacher(x).clone()).square().mean(-1)

    net = Mean()
    return For(net, (torch.randn(length, 2, 4),), [net])


# --- containers


class Memory(NamedTuple):
    h: torch.Tensor
    extras: dict[str, Any]
    past: tuple[torch.Tensor, ...]


@program("named tuple with a dictionary and a tuple in it")
def _(length: int) -> Scan:
    cell, xs = nn.GRUCell(4, 4), _xs(length)

    def step(m: Memory, x: torch.Tensor) -> Any:
        h = cell(x, m.h) + 0.1 * m.past[-1]
        return m._replace(h=h, extras={"n": m.extras["n"] + 1, "mean": h.mean()}, past=(h, *m.past[:-1])), h

    start = Memory(torch.zeros(2, 4), {"n": 0, "mean": torch.tensor(0.0)}, (torch.zeros(2, 4), torch.zeros(2, 4)))
    return Scan(step, start, xs, [cell, xs])


@dataclass
class Latent:
    mean: torch.Tensor
    std: torch.Tensor
    tags: list[str] = field(default_factory=list)
    parent: Any = None

    def sample(self) -> Any:
        return self.mean + self.std * torch.randn_like(self.std)


@program("dataclass that holds a dataclass, with methods and text")
def _(length: int) -> Scan:
    lin, xs = nn.Linear(8, 8), _xs(length)

    def step(s: Latent, x: torch.Tensor) -> Any:
        mean, raw = lin(torch.cat([s.sample(), x], -1)).chunk(2, -1)
        return Latent(mean, F.softplus(raw), ["posterior"], Latent(s.mean, s.std, ["prior"])), mean

    start = Latent(
        torch.zeros(2, 4), torch.ones(2, 4), ["posterior"], Latent(torch.zeros(2, 4), torch.ones(2, 4), ["prior"])
    )
    return Scan(step, start, xs, [lin, xs])


@program("defaultdict of states by name, made when they are first asked for, in a module")
def _(length: int) -> For:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.states: dict[str, torch.Tensor] = defaultdict(lambda: torch.zeros(2, 4))
            self.hits: Counter[str] = Counter()

        def forward(self, x: torch.Tensor, k: torch.Tensor) -> Any:
            name = "even" if int(k) % 2 == 0 else "odd"
            self.hits[name] += 1
            self.states[name] = torch.tanh(self.lin(x) + self.states[name])
            return self.states[name]

    net, xs = Net(), _xs(length)
    return For(net, (xs, torch.arange(length)), [net.lin, xs])


@program("OrderedDict carry, keys moved to the end")
def _(length: int) -> Scan:
    lin, xs = nn.Linear(4, 4), _xs(length)

    def step(s: Any, x: torch.Tensor) -> Any:
        a, b = s["a"], s["b"]
        return OrderedDict(a=torch.tanh(lin(x) + b), b=a), {"sum": a + b, "none": None, "t": (a,)}

    return Scan(step, OrderedDict(a=torch.zeros(2, 4), b=torch.zeros(2, 4)), xs, [lin, xs])


class TensorDict(dict):  # type: ignore[type-arg]
    """A dictionary of tensors with a batch size, as others have it."""

    def to_state(self) -> TensorDict:
        return TensorDict({name: t.clone() for name, t in self.items()})


@program("a subclass of dict for a state", refused="TensorDict", instead=lambda length: _dict_state(length, dict))
def _(length: int) -> Scan:
    return _dict_state(length, TensorDict)


def _dict_state(length: int, kind: Any) -> Scan:
    cell, xs = nn.GRUCell(4, 6), _xs(length)

    def step(s: Any, x: torch.Tensor) -> Any:
        h = cell(x, s["h"])
        return kind({"h": h, "count": s["count"] + 1}), h

    return Scan(step, kind({"h": torch.zeros(2, 6), "count": torch.tensor(0)}), xs, [cell, xs])


Point = namedtuple("Point", "x v")


@program("namedtuple made by collections, as output too")
def _(length: int) -> Scan:
    lin = nn.Linear(2, 2)

    def step(p: Any, force: torch.Tensor) -> Any:
        v = p.v + 0.1 * (lin(p.x) + force)
        p = Point(p.x + 0.1 * v, v)
        return p, p

    return Scan(step, Point(torch.zeros(3, 2), torch.zeros(3, 2)), _xs(length, 3, 2), [lin])


@program("xs of nested dictionaries with tensors of several dtypes", outputs_vary=True)
def _(length: int) -> Scan:
    lin, embed = nn.Linear(7, 4), nn.Embedding(5, 3)
    xs: dict[str, Any] = {
        "obs": {"image": _xs(length), "token": torch.randint(0, 5, (length, 2))},
        "info": [torch.rand(length) < 0.3, (torch.linspace(0, 1, length, dtype=torch.float64),)],
    }

    def step(h: torch.Tensor, x: Any) -> Any:
        seen = torch.cat([x["obs"]["image"], embed(x["obs"]["token"])], -1)
        h = torch.where(x["info"][0], h, torch.tanh(lin(seen) + h * x["info"][1][0].float()))
        return h, {"h": h, "skipped": x["info"][0]}

    return Scan(step, torch.zeros(2, 4), xs, [lin, embed, xs["obs"]["image"]])


@program("outputs of booleans, integers, text and None", outputs_vary=True)
def _(length: int) -> Scan:
    cell, xs = nn.GRUCell(4, 6), _xs(length)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = cell(x, h)
        return h, {"h": h, "spikes": h > 0, "best": h.argmax(-1), "n": int((h > 0).sum()), "tag": "ok", "none": None}

    return Scan(step, torch.zeros(2, 6), xs, [cell, xs])


# --- views, strides, sizes


@program("inputs with swapped axes, an expanded state and strided outputs")
def _(length: int) -> Scan:
    lin, xs = nn.Linear(4, 4), torch.randn(2, 4, length, requires_grad=True)
    h0 = nn.Parameter(torch.randn(1, 4))

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.tanh(lin(x) + h)
        return h.t().contiguous().t(), h[:, ::2]

    return Scan(step, h0.expand(2, 4), xs.permute(2, 0, 1), [lin, xs, h0])


@program("state and output are views of one tensor")
def _(length: int) -> Scan:
    lin, xs = nn.Linear(8, 8), _xs(length)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        both = torch.tanh(lin(torch.cat([h, x], -1)))
        return both[:, :4], both[:, 4:]

    return Scan(step, torch.zeros(2, 4), xs, [lin, xs])


@program("state is a view of an output that was written in place")
def _(length: int) -> Scan:
    lin, xs = nn.Linear(4, 4), _xs(length)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        y = torch.zeros(2, 8)
        y[:, :4] = torch.tanh(lin(x) + h)
        y[:, 4:].copy_(h)
        return y.narrow(1, 0, 4), y

    return Scan(step, torch.zeros(2, 4), xs, [lin, xs])


@program("two states that are halves of one storage, from unbind")
def _(length: int) -> Scan:
    lin, xs = nn.Linear(4, 4), _xs(length)

    def step(s: Any, x: torch.Tensor) -> Any:
        a, b = torch.tanh(lin(torch.stack([s[0] + x, s[1] - x]))).unbind(0)
        return (b, a), a * b

    return Scan(step, tuple(torch.zeros(2, 2, 4).unbind(0)), xs, [lin, xs])


@program("batch of nothing")
def _(length: int) -> Scan:
    cell, xs = nn.GRUCell(4, 6), torch.randn(length, 0, 4, requires_grad=True)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = cell(x, h)
        return h, h.sum(-1)

    return Scan(step, torch.zeros(0, 6), xs, [cell, xs])


@program("scalars without axes for state, input and output")
def _(length: int) -> Scan:
    a, xs = nn.Parameter(torch.tensor(0.9)), torch.randn(length, requires_grad=True)
    return Scan(lambda h, x: (a * h + x.sin(), h * 2), torch.tensor(0.0), xs, [a, xs])


@program("channels-last images and a transposed kernel")
def _(length: int) -> Scan:
    conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's own
    xs = torch.randn(length, 1, 2, 5, 5, requires_grad=True)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.tanh(conv((h + x).contiguous(memory_format=torch.channels_last)))
        return h, h.mean((2, 3))

    return Scan(step, torch.zeros(1, 2, 5, 5).contiguous(memory_format=torch.channels_last), xs, [conv, xs])


@program("complex state with conjugates and a double loss")
def _(length: int) -> Scan:
    w, xs = nn.Parameter(torch.randn(3, 3, dtype=torch.cdouble)), torch.randn(length, 2, 3, dtype=torch.cdouble)

    def step(z: torch.Tensor, x: torch.Tensor) -> Any:
        z = z @ w / 3 + x.conj()
        z = z / (1 + z.abs())
        return z, (z.conj().mT, z.abs().double().sum())

    return Scan(step, torch.zeros(2, 3, dtype=torch.cdouble), xs, [w])


# --- changes in place


@program("buffer written by index_put and scatter_ at every step")
def _(length: int) -> For:
    class Table(nn.Module):
        table: torch.Tensor
        counts: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.lin, self.t = nn.Linear(4, 4), 0
            self.register_buffer("table", torch.zeros(8, 4))
            self.register_buffer("counts", torch.zeros(8, dtype=torch.long))

        def forward(self, x: torch.Tensor, at: torch.Tensor) -> Any:
            y = self.lin(x + self.table[at].clone())
            self.table[at] = y.detach() * 0.5
            self.counts.scatter_add_(0, at, torch.ones_like(at))
            self.t += 1
            return y

    net, xs = Table(), _xs(length)
    return For(net, (xs, torch.randint(0, 8, (length, 2))), [net, xs])


@program("a state with a gradient that a module changes in place")
def _(length: int) -> For:
    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.v = nn.Linear(4, 4), torch.zeros(2, 4)

        def forward(self, x: torch.Tensor) -> Any:
            self.v = self.v.clone()
            self.v.mul_(0.9).add_(self.lin(x))
            spikes = (self.v > 0.5).float()
            self.v -= spikes
            return torch.sigmoid(self.v)

    net, xs = Leaky(), _xs(length)
    return For(net, (xs,), [net, xs])


@program("carry cloned, then written in place with masks")
def _(length: int) -> Scan:
    lin, xs = nn.Linear(4, 4), _xs(length)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = h.clone()
        h[x > 0.5] = 0.0
        h += lin(x)
        h.clamp_(-2, 2)
        return h, h

    return Scan(step, torch.zeros(2, 4), xs, [lin, xs])


@program("out= arguments and a work buffer that is used again")
def _(length: int) -> For:
    class Work(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.work = nn.Linear(4, 4), torch.empty(2, 4)

        def forward(self, x: torch.Tensor) -> Any:
            with torch.no_grad():
                torch.mul(x, 2.0, out=self.work)
                scale = self.work.abs().mean()
            return self.lin(x) * scale

    net = Work()
    return For(net, (torch.randn(length, 2, 4),), [net])


# --- schedules, counters, side effects


@program("temperature and momentum follow schedules that are attributes")
def _(length: int) -> For:
    class Annealed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
            self.tau, self.step = 2.0, 0

        def forward(self, x: torch.Tensor) -> Any:
            self.norm.momentum = max(0.01, 0.5 * 0.95**self.step)
            self.tau = max(0.1, self.tau * 0.97)
            self.step += 1
            return F.gumbel_softmax(self.norm(self.lin(x)), self.tau)

    net, xs = Annealed(), _xs(length)
    return For(net, (xs,), [net, xs])


@program("progress bar with a description, inside of the step")
def _(length: int) -> For:
    lin, xs, bar = nn.Linear(4, 4), _xs(length), tqdm(total=length, disable=True)

    def step(x: torch.Tensor) -> Any:
        y = torch.tanh(lin(x))
        bar.update(1)
        bar.set_postfix(loss=y.mean().item())
        return y

    return For(step, (xs,), [lin, xs])


@program("numbers logged into lists and dictionaries outside")
def _(length: int) -> For:
    lin, xs = nn.Linear(4, 4), _xs(length)
    log: dict[str, list[float]] = defaultdict(list)

    def step(x: torch.Tensor) -> Any:
        y = torch.tanh(lin(x))
        log["mean"].append(y.mean().item())
        log["max"].append(float(y.max()))
        return y

    return For(step, (xs,), [lin, xs])


@program(
    "a generator object that yields what the module needs",
    refused="run again|another error|differ|generator",
    instead=lambda length: _indexed(length),
)
def _(length: int) -> For:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.rates = nn.Linear(4, 4), self.schedule()

        @staticmethod
        def schedule() -> Iterator[float]:
            rate = 1.0
            while True:
                yield rate
                rate *= 0.9

        def forward(self, x: torch.Tensor) -> Any:
            return self.lin(x) * next(self.rates)

    net, xs = Net(), _xs(length)
    return For(net, (xs,), [net.lin, xs])


def _indexed(length: int) -> For:
    lin, xs = nn.Linear(4, 4), _xs(length)
    return For(lambda x, k: lin(x) * 0.9 ** int(k), (xs, torch.arange(length)), [lin, xs])


@program("a local generator function inside of the step")
def _(length: int) -> Scan:
    lin, xs = nn.Linear(4, 4), _xs(length)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        def parts() -> Iterator[torch.Tensor]:
            for k in range(3):
                yield lin(x * k)

        h = torch.tanh(h + sum(parts()))
        return h, max(y.sum() for y in parts())

    return Scan(step, torch.zeros(2, 4), xs, [lin, xs])


@program("Python's random picks one of several cells at every step")
def _(length: int) -> Scan:
    cells, xs = nn.ModuleList([nn.GRUCell(4, 6), nn.GRUCell(4, 6), nn.GRUCell(4, 6)]), _xs(length)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = random.choice(list(cells))(x, h)
        return h, h

    return Scan(step, torch.zeros(2, 6), xs, [cells, xs])


@program("numpy draws augmentations in the step, states go through numpy and back")
def _(length: int) -> Scan:
    lin, xs = nn.Linear(4, 4), torch.randn(length, 2, 4)

    def step(state: Any, x: torch.Tensor) -> Any:
        h, hist = state
        if np.random.rand() < 0.5:  # noqa: NPY002
            x = x.flip(-1)
        h = torch.tanh(lin(x) + h)
        return (h, np.append(hist[1:], h.detach().numpy().mean())), h

    return Scan(step, (torch.zeros(2, 4), np.zeros(3)), xs, [lin])


@program("early exit by a mask, inner while loop whose length depends on data", outputs_vary=True)
def _(length: int) -> Scan:
    lin, xs = nn.Linear(4, 4), _xs(length)

    def step(state: Any, x: torch.Tensor) -> Any:
        h, done = state
        tries = 0
        new = h
        while new.norm() < 2.0 and tries < 4:
            new, tries = new + torch.tanh(lin(x)), tries + 1
        h = torch.where(done[:, None], h, new * 0.5)
        return (h, done | (h.norm(dim=-1) > 3)), (h, torch.tensor(tries))

    return Scan(step, (torch.zeros(2, 4), torch.zeros(2, dtype=torch.bool)), xs, [lin, xs])


@program("step is a partial of a method of a class with a call operator")
def _(length: int) -> Scan:
    class Policy:
        def __init__(self) -> None:
            self.net, self.scale = nn.GRUCell(4, 6), 0.5

        def __call__(self, gain: float, h: torch.Tensor, x: torch.Tensor) -> Any:
            h = self.net(x, h) * gain * 2
            return h, self.scale * h

    policy, xs = Policy(), _xs(length)
    return Scan(partial(policy, 0.5), torch.zeros(2, 6), xs, [policy.net, xs])


@program("an inner module swapped for another one at a certain step")
def _(length: int) -> For:
    class Grown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net: nn.Module = nn.Linear(4, 4)
            self.other, self.t = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), 0

        def forward(self, x: torch.Tensor) -> Any:
            self.t += 1
            net = self.net if self.t <= 5 else self.other
            return net(x)

    net, xs = Grown(), _xs(length)
    return For(net, (xs,), [net, xs])


@program("eval and train mode alternate inside of the step")
def _(length: int) -> For:
    net, drop = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Dropout(0.5)

    def step(x: torch.Tensor) -> Any:
        net.eval()
        with torch.no_grad():
            target = net(x)
        net.train()
        return F.mse_loss(net(drop(x)), target, reduction="none")

    return For(step, (_xs(length, 3, 4),), [net])


@program("singledispatch and properties: a state of two kinds of inputs")
def _(length: int) -> For:
    class Meter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.total: Any = 0

        @singledispatchmethod
        def add(self, value: Any) -> None:
            raise TypeError

        @add.register
        def _(self, value: torch.Tensor) -> None:
            self.total = self.total + value.detach().sum()

        @property
        def mean(self) -> Any:
            return self.total / 10

        def forward(self, x: torch.Tensor) -> Any:
            y = self.lin(x)
            self.add(y)
            return y * (1 + 0.01 * self.mean)

    net, xs = Meter(), _xs(length)
    return For(net, (xs,), [net, xs])


@program("mixed precision: autocast in the step, state kept in float32, double loss")
def _(length: int) -> Scan:
    net, xs = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), _xs(length)

    def step(state: Any, x: torch.Tensor) -> Any:
        h, total = state
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = net(h + x)
        h = h + y.float()
        return (h / (1 + h.norm()), total + y.double().square().sum()), y

    return Scan(step, (torch.zeros(2, 4), torch.zeros((), dtype=torch.float64)), xs, [net, xs])


@program("delays of different lengths in deques of a dictionary of a module")
def _(length: int) -> For:
    class Delays(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.lines = {d: deque([torch.zeros(2, 4)] * d, maxlen=d) for d in (1, 3, 7)}

        def forward(self, x: torch.Tensor) -> Any:
            y = torch.tanh(self.lin(x) + sum(line[0] for line in self.lines.values()))
            for line in self.lines.values():
                line.append(y)
            return y

    net, xs = Delays(), _xs(length)
    return For(net, (xs,), [net, xs])


@program("fetched by Steps from a list of dictionaries with texts")
def _(length: int) -> Scan:
    cell = nn.GRUCell(4, 6)
    items = [{"x": torch.randn(2, 4), "name": f"item {k}", "skip": k % 4 == 3} for k in range(length)]

    def step(h: torch.Tensor, item: Any) -> Any:
        if item["skip"]:
            return h, h * 0
        h = cell(item["x"], h)
        return h, h * len(item["name"])

    return Scan(step, torch.zeros(2, 6), lt.Steps(items), [cell], length=length)


@program("while loop over a dataclass until a norm is small")
def _(length: int) -> While:
    @dataclass
    class State:
        x: torch.Tensor
        step: int = 0
        last: float = 1e9

    w, b = nn.Parameter(torch.eye(3) * 2 + 0.1), torch.ones(3)

    def body(s: State) -> State:
        r = b - w @ s.x
        return State(s.x + 0.3 * r, s.step + 1, r.norm().item())

    return While(lambda s: s.last > 1e-3 and s.step < 60, body, State(torch.zeros(3)), [w], most=length)


@program("while loop: conjugate gradients")
def _(length: int) -> While:
    m, b = nn.Parameter(torch.randn(4, 4)), torch.randn(4, requires_grad=True)

    def body(s: Any) -> Any:
        x, r, p, rs = s
        a = m @ m.T + torch.eye(4)
        ap = a @ p
        alpha = rs / (p @ ap + 1e-12)
        x, r = x + alpha * p, r - alpha * ap
        new = r @ r
        return x, r, r + (new / (rs + 1e-12)) * p, new

    return While(lambda s: bool(s[3] > 1e-10), body, (torch.zeros(4), b, b, b @ b), [m, b], most=length)


@program(
    "while loop: decoding until every sequence has ended, with a cache in a module",
    refused="keep more and more.* pass checkpoints=",
)
def _(length: int) -> While:
    class Decode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.qkv = nn.Embedding(6, 4), nn.Linear(4, 12)
            self.keys: Any = None
            self.values: Any = None

        def forward(self, state: Any) -> Any:
            token, ended, score = state
            q, k, v = self.qkv(self.embed(token))[:, None].chunk(3, -1)
            self.keys = k if self.keys is None else torch.cat([self.keys, k], 1)
            self.values = v if self.values is None else torch.cat([self.values, v], 1)
            y = ((q @ self.keys.mT).softmax(-1) @ self.values)[:, 0]
            logits = y @ self.embed.weight.T
            best = logits.argmax(-1)
            score = score + torch.where(ended, 0.0, logits.log_softmax(-1).max(-1).values)
            return best, ended | (torch.rand(2) < 0.02), score

    net = Decode()
    start = (torch.zeros(2, dtype=torch.long), torch.zeros(2, dtype=torch.bool), torch.zeros(2))
    return While(lambda s: not s[1].all(), net, start, [net], most=length)
