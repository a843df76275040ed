"""Recurrent cells and sequence models, stepped by hand."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (as everybody does)

from tests.torch.loops.programs.program import For, Scan, program


def _xs(length: int, *shape: int) -> torch.Tensor:
    return torch.randn(length, *(shape or (2, 4))).requires_grad_()


# --- torch's cells, with every way in which people begin

_CELLS: dict[str, Callable[[], nn.Module]] = {
    "RNNCell": lambda: nn.RNNCell(4, 6),
    "RNNCell, relu": lambda: nn.RNNCell(4, 6, nonlinearity="relu"),
    "GRUCell": lambda: nn.GRUCell(4, 6),
    "GRUCell, no bias": lambda: nn.GRUCell(4, 6, bias=False),
    "LSTMCell": lambda: nn.LSTMCell(4, 6),
}


def _cell(name: str, make: Callable[[], nn.Module]) -> None:
    def step_of(cell: nn.Module) -> Any:
        def step(h: Any, x: torch.Tensor) -> Any:
            h = cell(x, h)
            return h, h[0] if isinstance(h, tuple) else h

        return step

    @program(f"{name}, no state given")
    def without(length: int) -> Scan:
        cell, xs = make(), _xs(length)
        return Scan(step_of(cell), None, xs, [cell, xs])

    @program(f"{name}, a learned first state")
    def learned(length: int) -> Scan:
        cell, xs, h0 = make(), _xs(length), nn.Parameter(torch.randn(1, 6) / 3)
        h = h0.expand(2, 6)
        return Scan(step_of(cell), (h, h * 0.5) if "LSTM" in name else h, xs, [cell, xs, h0])

    @program(f"{name}, state in the module")
    def held(length: int) -> For:
        class Holding(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.cell, self.h = make(), None

            def forward(self, x: torch.Tensor) -> Any:
                self.h = self.cell(x, self.h)
                return self.h[0] if isinstance(self.h, tuple) else self.h

        net, xs = Holding(), _xs(length)
        return For(net, (xs,), [net, xs])


for _name, _make in _CELLS.items():
    _cell(_name, _make)


# --- torch's layers, one step of the sequence at a time


def _layer(name: str, make: Callable[[], Any], given: bool) -> None:
    @program(f"{name} step by step, state {'given' if given else 'None'}")
    def make_loop(length: int) -> Scan:
        layer, xs = make(), _xs(length)
        size = layer.num_layers * (2 if layer.bidirectional else 1)

        def step(h: Any, x: torch.Tensor) -> Any:
            y, h = layer(x[None], h)
            return h, y[0]

        zeros = torch.zeros(size, 2, 6)
        h0 = ((zeros, zeros.clone()) if isinstance(layer, nn.LSTM) else zeros) if given else None
        return Scan(step, h0, xs, [layer, xs])


for _name, _layer_of in {
    "nn.LSTM": lambda: nn.LSTM(4, 6),
    "nn.LSTM, two layers": lambda: nn.LSTM(4, 6, num_layers=2),
    "nn.LSTM, two layers with dropout": lambda: nn.LSTM(4, 6, num_layers=2, dropout=0.3),
    "nn.GRU": lambda: nn.GRU(4, 6),
    "nn.GRU, two layers": lambda: nn.GRU(4, 6, num_layers=2),
    "nn.RNN, two layers": lambda: nn.RNN(4, 6, num_layers=2),
}.items():
    for _given in (True, False):
        _layer(_name, _layer_of, _given)


# --- cells of one's own


class LayerNormLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ih, self.hh = nn.Linear(4, 24, bias=False), nn.Linear(6, 24, bias=False)
        self.norm_i, self.norm_h, self.norm_c = nn.LayerNorm(24), nn.LayerNorm(24), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        h, c = state
        i, f, g, o = (self.norm_i(self.ih(x)) + self.norm_h(self.hh(h))).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(self.norm_c(c))
        return h, (h, c)


@program("LayerNorm LSTM")
def _(length: int) -> Scan:
    cell, xs = LayerNormLSTM(), _xs(length)

    def step(state: Any, x: torch.Tensor) -> Any:
        h, state = cell(x, state)
        return state, h

    return Scan(step, (torch.zeros(2, 6),) * 2, xs, [cell, xs])


@program("recurrent BatchNorm with statistics of each step")
def _(length: int) -> Scan:
    cell, norms, xs = nn.Linear(10, 6), nn.ModuleList(nn.BatchNorm1d(6) for _ in range(length)), _xs(length)

    def step(state: Any, x: torch.Tensor) -> Any:
        h, t = state
        h = torch.tanh(norms[t](cell(torch.cat([x, h], 1))))
        return (h, t + 1), h

    return Scan(step, (torch.zeros(2, 6), 0), xs, [cell, norms, xs])


@program("zoneout")
def _(length: int) -> Scan:
    cell, xs = nn.GRUCell(4, 6), _xs(length)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        new = cell(x, h)
        mask = torch.bernoulli(torch.full_like(h, 0.3))
        h = mask * h + (1 - mask) * new
        return h, h

    return Scan(step, torch.zeros(2, 6), xs, [cell, xs])


@program("variational dropout, one mask for all steps")
def _(length: int) -> Scan:
    cell, xs = nn.GRUCell(4, 6), _xs(length)
    mask = F.dropout(torch.ones(2, 6), 0.4)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = cell(x, h * mask)
        return h, h

    return Scan(step, torch.zeros(2, 6), xs, [cell, xs])


@program("weight drop: the matrix is masked once before the loop")
def _(length: int) -> Scan:
    w, xs = nn.Parameter(torch.randn(6, 6) / 3), _xs(length, 2, 6)
    dropped = F.dropout(w, 0.3)
    return Scan(lambda h, x: (torch.tanh(h @ dropped + x), h), torch.zeros(2, 6), xs, [w, xs])


@program("weight norm and spectral norm")
def _(length: int) -> For:
    net = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)),
        nn.Tanh(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)),
    )
    xs = _xs(length)
    return For(net, (xs,), [net, xs])


@program("orthogonal recurrent matrix")
def _(length: int) -> Scan:
    hh, xs = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4, bias=False)), _xs(length)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.relu(hh(h) + x)
        return h, h

    return Scan(step, torch.zeros(2, 4), xs, [hh, xs])


@program("IndRNN with two layers")
def _(length: int) -> Scan:
    w = nn.ParameterList([torch.randn(4, 6), torch.randn(6), torch.randn(6, 6), torch.randn(6)])
    xs = _xs(length)

    def step(hs: list[torch.Tensor], x: torch.Tensor) -> Any:
        h1 = torch.relu(x @ w[0] + w[1] * hs[0])
        h2 = torch.relu(h1 @ w[2] + w[3] * hs[1])
        return [h1, h2], h2

    return Scan(step, [torch.zeros(2, 6), torch.zeros(2, 6)], xs, [w, xs])


@program("clockwork RNN: groups move at their own pace")
def _(length: int) -> Scan:
    cell, xs = nn.RNNCell(4, 6), _xs(length)
    periods = torch.tensor([1, 1, 2, 2, 4, 4])

    def step(state: Any, x: torch.Tensor) -> Any:
        h, t = state
        h = torch.where(t % periods == 0, cell(x, h), h)
        return (h, t + 1), h

    return Scan(step, (torch.zeros(2, 6), torch.tensor(0)), xs, [cell, xs])


@program("minimal gated unit, dictionary state")
def _(length: int) -> Scan:
    f, c, xs = nn.Linear(10, 6), nn.Linear(10, 6), _xs(length)

    def step(state: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
        h = state["h"]
        gate = torch.sigmoid(f(torch.cat([x, h], -1)))
        h = (1 - gate) * h + gate * torch.tanh(c(torch.cat([x, gate * h], -1)))
        return {"h": h, "gate": gate}, {"h": h, "gate": gate.detach()}

    zeros = torch.zeros(2, 6)
    return Scan(step, {"h": zeros, "gate": zeros}, xs, [f, c, xs])


class CellState(NamedTuple):
    h: torch.Tensor
    c: torch.Tensor


@program("peephole LSTM, named tuple")
def _(length: int) -> Scan:
    lin, peep, xs = nn.Linear(10, 24), nn.Parameter(torch.randn(3, 6)), _xs(length)

    def step(s: CellState, x: torch.Tensor) -> Any:
        i, f, g, o = lin(torch.cat([x, s.h], 1)).chunk(4, 1)
        c = torch.sigmoid(f + peep[0] * s.c) * s.c + torch.sigmoid(i + peep[1] * s.c) * g.tanh()
        h = torch.sigmoid(o + peep[2] * c) * c.tanh()
        return CellState(h, c), h

    return Scan(step, CellState(torch.zeros(2, 6), torch.zeros(2, 6)), xs, [lin, peep, xs])


@program("ConvLSTM")
def _(length: int) -> Scan:
    conv, xs = nn.Conv2d(4, 12, 3, padding=1), _xs(length, 2, 1, 5, 5)

    def step(state: Any, x: torch.Tensor) -> Any:
        h, c = state
        i, f, g, o = conv(torch.cat([x, h], 1)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return (h, c), h

    return Scan(step, (torch.zeros(2, 3, 5, 5),) * 2, xs, [conv, xs])


@program("quasi-recurrent pooling")
def _(length: int) -> Scan:
    z, f, xs = nn.Linear(4, 6), nn.Linear(4, 6), _xs(length)

    def step(c: torch.Tensor, x: torch.Tensor) -> Any:
        gate = f(x).sigmoid()
        c = gate * c + (1 - gate) * z(x).tanh()
        return c, c

    return Scan(step, torch.zeros(2, 6), xs, [z, f, xs])


@program("diagonal state space, complex numbers")
def _(length: int) -> Scan:
    log_a, b, c = (nn.Parameter(torch.randn(4, dtype=torch.cfloat) / 2) for _ in range(3))
    xs = _xs(length)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.exp(-log_a.abs() + 1j * log_a.imag) * h + b * x
        return h, (c * h).real

    return Scan(step, torch.zeros(2, 4, dtype=torch.cfloat), xs, [log_a, b, c, xs])


@program("selective state space, as in Mamba")
def _(length: int) -> Scan:
    proj, a_log, xs = nn.Linear(4, 4 + 2 * 3), nn.Parameter(torch.randn(4, 3)), _xs(length)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        dt, b, c = proj(x).split([4, 3, 3], -1)
        dt = F.softplus(dt)[..., None]
        h = torch.exp(-dt * a_log.exp()) * h + dt * b[:, None] * x[..., None]
        return h, (h * c[:, None]).sum(-1)

    return Scan(step, torch.zeros(2, 4, 3), xs, [proj, a_log, xs])


@program("linear attention with a matrix for a state")
def _(length: int) -> Scan:
    qkv, xs = nn.Linear(4, 12), _xs(length)

    def step(s: torch.Tensor, x: torch.Tensor) -> Any:
        q, k, v = qkv(x).chunk(3, -1)
        s = s + torch.einsum("bi,bj->bij", F.elu(k) + 1, v)
        return s, torch.einsum("bi,bij->bj", F.elu(q) + 1, s)

    return Scan(step, torch.zeros(2, 4, 4), xs, [qkv, xs])


@program("delta rule with normalised keys")
def _(length: int) -> Scan:
    qkv, beta, xs = nn.Linear(4, 12), nn.Linear(4, 1), _xs(length)

    def step(s: torch.Tensor, x: torch.Tensor) -> Any:
        q, k, v = qkv(x).chunk(3, -1)
        k = F.normalize(k, dim=-1)
        old = torch.einsum("bij,bi->bj", s, k)
        s = s + torch.einsum("bi,bj->bij", k, beta(x).sigmoid() * (v - old))
        return s, torch.einsum("bij,bi->bj", s, q)

    return Scan(step, torch.zeros(2, 4, 4), xs, [qkv, beta, xs])


@program("RWKV time mixing")
def _(length: int) -> Scan:
    k, v, r, w = (nn.Linear(4, 4, bias=False) for _ in range(4))
    mix, xs = nn.Parameter(torch.rand(4)), _xs(length)

    def step(state: Any, x: torch.Tensor) -> Any:
        last, num, den, top = state
        mixed = x * mix + last * (1 - mix)
        key, value = k(mixed), v(mixed)
        new_top = torch.maximum(top, key)
        e1, e2 = torch.exp(top - new_top), torch.exp(key - new_top)
        num, den = e1 * num + e2 * value, e1 * den + e2
        return (x, num, den, new_top), w(r(mixed).sigmoid() * num / (den + 1e-6))

    init = (torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(2, 4), torch.full((2, 4), -1e4))
    return Scan(step, init, xs, [k, v, r, w, mix, xs])


@program("xLSTM, exponential gates and a stabiliser")
def _(length: int) -> Scan:
    lin, xs = nn.Linear(10, 24), _xs(length)

    def step(state: Any, x: torch.Tensor) -> Any:
        h, c, n, m = state
        i, f, z, o = lin(torch.cat([x, h], 1)).chunk(4, 1)
        f = F.logsigmoid(f)
        new = torch.maximum(f + m, i)
        i, f = torch.exp(i - new), torch.exp(f + m - new)
        c, n = f * c + i * z.tanh(), f * n + i
        return (o.sigmoid() * c / n.clamp(min=1e-6), c, n, new), h

    return Scan(step, tuple(torch.zeros(2, 6) for _ in range(4)), xs, [lin, xs])


@program("minLSTM in log space")
def _(length: int) -> Scan:
    lin, xs = nn.Linear(4, 18), _xs(length)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        f, i, new = lin(x).chunk(3, -1)
        lf, li = F.logsigmoid(f), F.logsigmoid(i)
        h = torch.logaddexp(lf + h, li + F.softplus(new).log())
        return h, h.exp()

    return Scan(step, torch.zeros(2, 6), xs, [lin, xs])


# --- memory and attention over what has been


@program("attention over a window of past states")
def _(length: int) -> Scan:
    q, cell, xs = nn.Linear(4, 6), nn.GRUCell(4, 6), _xs(length)

    def step(state: Any, x: torch.Tensor) -> Any:
        h, past = state
        weights = torch.softmax((past * q(x)[:, None]).sum(-1), -1)
        h = cell(x, h) + (weights[..., None] * past).sum(1)
        return (h, torch.cat([past[:, 1:], h[:, None]], 1)), h

    return Scan(step, (torch.zeros(2, 6), torch.zeros(2, 5, 6)), xs, [q, cell, xs])


class Cached(nn.Module):
    """Attention with a cache that is written at its place."""

    def __init__(self, length: int, fresh: bool) -> None:
        super().__init__()
        self.qkv, self.fresh = nn.Linear(4, 12), fresh
        self.register_buffer("keys", torch.zeros(2, length, 4), persistent=False)
        self.register_buffer("values", torch.zeros(2, length, 4), persistent=False)
        self.at = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        keys, values = (self.keys.clone(), self.values.clone()) if self.fresh else (self.keys, self.values)
        keys[:, self.at], values[:, self.at] = k, v
        self.keys, self.values, self.at = keys, values, self.at + 1
        keys, values = keys[:, : self.at], values[:, : self.at]
        return F.scaled_dot_product_attention(q[:, None], keys, values)[:, 0]


@program("cache of keys and values in buffers, copied before it is written")
def _(length: int) -> For:
    net, xs = Cached(length, fresh=True), _xs(length)
    return For(net, (xs,), [net, xs])


@program("cache of keys and values that grows by cat, in a module")
def _(length: int) -> For:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(4, 12)
            self.cache: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x)[:, None].chunk(3, -1)
            if self.cache is not None:
                k, v = torch.cat([self.cache[0], k], 1), torch.cat([self.cache[1], v], 1)
            self.cache = (k, v)
            return F.scaled_dot_product_attention(q, k, v)[:, 0]

    net, xs = Growing(), _xs(length)
    return For(net, (xs,), [net, xs])


@program("list of keys and values that grows, in a module")
def _(length: int) -> For:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(4, 12)
            self.keys: list[torch.Tensor] = []
            self.values: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            self.keys.append(k)
            self.values.append(v)
            return F.scaled_dot_product_attention(q[:, None], torch.stack(self.keys, 1), torch.stack(self.values, 1))[
                :, 0
            ]

    net, xs = Growing(), _xs(length)
    return For(net, (xs,), [net, xs])


@program(
    "list of states that grows in the carry",
    refused="list that grows",
    instead=lambda length: _growing_in_module(length),
    outputs_vary=True,
)
def _(length: int) -> Scan:
    cell, xs = nn.GRUCell(4, 6), _xs(length)

    def step(past: list[torch.Tensor], x: torch.Tensor) -> Any:
        h = cell(x, past[-1]) + sum(past) / len(past)
        return [*past, h], h

    return Scan(step, [torch.zeros(2, 6)], xs, [cell, xs])


def _growing_in_module(length: int) -> For:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.past = nn.GRUCell(4, 6), [torch.zeros(2, 6)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h: torch.Tensor = self.cell(x, self.past[-1]) + sum(self.past) / len(self.past)
            self.past.append(h)
            return h

    net, xs = Growing(), _xs(length)
    return For(net, (xs,), [net, xs])


@program("neural Turing machine")
def _(length: int) -> Scan:
    head, xs = nn.Linear(4 + 3, 3 + 1 + 3 + 3), _xs(length)

    def step(state: Any, x: torch.Tensor) -> Any:
        memory, read = state
        key, sharp, erase, add = head(torch.cat([x, read], 1)).split([3, 1, 3, 3], 1)
        w = torch.softmax(F.softplus(sharp) * F.cosine_similarity(memory, key[:, None], dim=-1), -1)[..., None]
        memory = memory * (1 - w * erase.sigmoid()[:, None]) + w * add[:, None]
        read = (w * memory).sum(1)
        return (memory, read), read

    return Scan(step, (torch.full((2, 5, 3), 0.1), torch.zeros(2, 3)), xs, [head, xs])


def _delays(many: int, length: int) -> For:
    class Delayed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.past: deque[torch.Tensor] = deque([torch.zeros(2, 4)] * many, maxlen=many)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.lin(x) + 0.5 * self.past[0])
            self.past.append(y)
            return y

    net, xs = Delayed(), _xs(length)
    return For(net, (xs,), [net, xs])


@program("delay of 5 steps in a deque")
def _(length: int) -> For:
    return _delays(5, length)


@program("delay of 25 steps in a deque")
def _(length: int) -> For:
    return _delays(25, length)


@program("delay of 25 steps in a tuple")
def _(length: int) -> Scan:
    lin, xs = nn.Linear(4, 4), _xs(length)

    def step(past: tuple[torch.Tensor, ...], x: torch.Tensor) -> Any:
        y = torch.tanh(lin(x) + 0.5 * past[0])
        return (*past[1:], y), y

    return Scan(step, (torch.zeros(2, 4),) * 25, xs, [lin, xs])


@program("delay of 25 steps in a tensor that is rolled")
def _(length: int) -> Scan:
    lin, xs = nn.Linear(4, 4), _xs(length)

    def step(past: torch.Tensor, x: torch.Tensor) -> Any:
        y = torch.tanh(lin(x) + 0.5 * past[0])
        return torch.cat([past[1:], y[None]]), y

    return Scan(step, torch.zeros(25, 2, 4), xs, [lin, xs])


# --- decoding


@program("decoder with attention, fed what it said before")
def _(length: int) -> Scan:
    emb, cell, out = nn.Embedding(7, 4), nn.GRUCell(4, 6), nn.Linear(6, 7)
    memory = nn.Parameter(torch.randn(2, 5, 6))

    def step(state: Any, _: Any) -> Any:
        h, token = state
        h = cell(emb(token), h)
        context = (torch.softmax((memory * h[:, None]).sum(-1), -1)[..., None] * memory).sum(1)
        logits = out(h + context)
        return (h, logits.argmax(-1)), logits

    init = (torch.zeros(2, 6), torch.zeros(2, dtype=torch.long))
    return Scan(step, init, None, [emb, cell, out, memory], length=length)


@program("decoder with scheduled sampling")
def _(length: int) -> Scan:
    emb, cell, out = nn.Embedding(7, 4), nn.GRUCell(4, 6), nn.Linear(6, 7)
    targets = torch.randint(7, (length, 2))

    def step(state: Any, target: torch.Tensor) -> Any:
        h, said = state
        token = target if torch.rand(1).item() < 0.5 else said
        h = cell(emb(token), h)
        logits = out(h)
        return (h, logits.argmax(-1)), F.cross_entropy(logits, target)

    init = (torch.zeros(2, 6), torch.zeros(2, dtype=torch.long))
    return Scan(step, init, targets, [emb, cell, out])


@program("decoder with teacher forcing by Python's random")
def _(length: int) -> Scan:
    import random

    emb, cell, out = nn.Embedding(7, 4), nn.GRUCell(4, 6), nn.Linear(6, 7)
    targets = torch.randint(7, (length, 2))

    def step(state: Any, target: torch.Tensor) -> Any:
        h, said = state
        token = target if random.random() < 0.5 else said
        h = cell(emb(token), h)
        logits = out(h)
        return (h, logits.argmax(-1)), F.cross_entropy(logits, target)

    init = (torch.zeros(2, 6), torch.zeros(2, dtype=torch.long))
    return Scan(step, init, targets, [emb, cell, out])


@program("decoder with a Gumbel softmax")
def _(length: int) -> Scan:
    cell, out, emb = nn.GRUCell(4, 6), nn.Linear(6, 7), nn.Linear(7, 4, bias=False)

    def step(state: Any, _: Any) -> Any:
        h, token = state
        h = cell(emb(token), h)
        token = F.gumbel_softmax(out(h), tau=0.7, hard=True)
        return (h, token), token

    init = (torch.zeros(2, 6), F.one_hot(torch.tensor([1, 2]), 7).float())
    return Scan(step, init, None, [cell, out, emb], length=length)


@program("padded sequences: finished rows keep their state")
def _(length: int) -> Scan:
    cell, xs = nn.GRUCell(4, 6), _xs(length)
    lengths = torch.tensor([max(1, length // 2), length])

    def step(state: Any, x: torch.Tensor) -> Any:
        h, t = state
        h = torch.where((t < lengths)[:, None], cell(x, h), h)
        return (h, t + 1), h

    return Scan(step, (torch.zeros(2, 6), 0), xs, [cell, xs])


@program("CTC forward variables")
def _(length: int) -> Scan:
    lin, xs = nn.Linear(4, 5), _xs(length)

    def step(alpha: torch.Tensor, x: torch.Tensor) -> Any:
        logp = lin(x).log_softmax(-1)
        shifted = F.pad(alpha, (1, 0), value=-1e4)[:, :-1]
        alpha = torch.logaddexp(alpha, shifted) + logp
        return alpha, alpha.logsumexp(-1)

    start = torch.full((2, 5), -1e4)
    start[:, 0] = 0
    return Scan(step, start, xs, [lin, xs])


@program("CRF forward algorithm", outputs_vary=True)
def _(length: int) -> Scan:
    lin, trans, xs = nn.Linear(4, 5), nn.Parameter(torch.randn(5, 5)), _xs(length)

    def step(alpha: torch.Tensor, x: torch.Tensor) -> Any:
        alpha = torch.logsumexp(alpha[:, :, None] + trans, 1) + lin(x)
        return alpha, None

    return Scan(step, torch.zeros(2, 5), xs, [lin, trans, xs])


@program("Viterbi with straight-through maxima", refused='use "sum"')
def _(length: int) -> Scan:
    lin, trans, xs = nn.Linear(4, 5), nn.Parameter(torch.randn(5, 5)), _xs(length)

    def step(score: torch.Tensor, x: torch.Tensor) -> Any:
        best, back = (score[:, :, None] + trans).max(1)
        return best + lin(x), back

    return Scan(step, torch.zeros(2, 5), xs, [lin, trans, xs])


# --- layers of torch that pick kernels, and models


@program("transformer encoder layer at every step, eval mode")
def _(length: int) -> Scan:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    return Scan(lambda h, _: (layer(h), h.mean()), torch.randn(2, 3, 4), None, [layer], length=length)


@program("transformer encoder layer at every step, with dropout")
def _(length: int) -> Scan:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2)
    return Scan(lambda h, _: (layer(h), h.mean()), torch.randn(3, 2, 4), None, [layer], length=length)


@program("universal transformer with a step embedding")
def _(length: int) -> Scan:
    attn, ff, emb = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 4), nn.Embedding(64, 4)

    def step(state: Any, _: Any) -> Any:
        h, t = state
        h = h + emb(torch.tensor(t))
        h = h + attn(h, h, h, need_weights=False)[0]
        h = F.layer_norm(h + torch.relu(ff(h)), (4,))
        return (h, t + 1), h[:, 0]

    return Scan(step, (torch.randn(2, 3, 4), 0), None, [attn, ff, emb], length=length)


@program("message passing on a graph")
def _(length: int) -> Scan:
    msg, gru = nn.Linear(12, 6), nn.GRUCell(6, 6)
    src, dst = torch.randint(5, (9,)), torch.randint(5, (9,))

    def step(h: torch.Tensor, _: Any) -> Any:
        m = torch.relu(msg(torch.cat([h[src], h[dst]], -1)))
        h = gru(torch.zeros_like(h).index_add(0, dst, m), h)
        return h, h.sum(0)

    return Scan(step, torch.randn(5, 6), None, [msg, gru], length=length)


@program("graph convolution with a sparse adjacency matrix")
def _(length: int) -> Scan:
    lin = nn.Linear(6, 6)
    index = torch.stack([torch.arange(5), (torch.arange(5) + 1) % 5])
    adjacency = torch.sparse_coo_tensor(index, torch.ones(5), (5, 5)).coalesce()

    def step(h: torch.Tensor, _: Any) -> Any:
        h = torch.tanh(torch.sparse.mm(adjacency, lin(h)))
        return h, h.sum(0)

    return Scan(step, torch.randn(5, 6), None, [lin], length=length)


class SparseBuffer(nn.Module):
    def __init__(self, layout: str) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        matrix = torch.eye(4).roll(1, 0)
        self.register_buffer("w", matrix.to_sparse() if layout == "coo" else matrix.to_sparse_csr())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.w @ self.lin(x).t()).t()


@program("sparse connectivity in a buffer, COO")
def _(length: int) -> For:
    net, xs = SparseBuffer("coo"), _xs(length)
    return For(net, (xs,), [net, xs])


@program("sparse connectivity in a buffer, CSR")
def _(length: int) -> For:
    net, xs = SparseBuffer("csr"), _xs(length)
    return For(net, (xs,), [net, xs])


@program("a sparse matrix of weights made before the loop")
def _(length: int) -> Scan:
    values, xs = nn.Parameter(torch.randn(6)), _xs(length, 2, 4)
    index = torch.tensor([[0, 1, 2, 3, 0, 2], [1, 2, 3, 0, 2, 1]])
    w = torch.sparse_coo_tensor(index, values, (4, 4))

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.tanh(torch.sparse.mm(w, h.t()).t() + x)
        return h, h

    return Scan(step, torch.zeros(2, 4), xs, [values, xs])


@program("a sparse parameter")
def _(length: int) -> Scan:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.eye(4).roll(1, 0).to_sparse())

        def forward(self, h: torch.Tensor, x: torch.Tensor) -> Any:
            h = torch.tanh(torch.sparse.mm(self.w, h.t()).t() + x)
            return h, h

    net, xs = Net(), _xs(length)
    return Scan(net, torch.zeros(2, 4), xs, [net, xs])


@program("sparse embedding")
def _(length: int) -> Scan:
    emb, cell, xs = nn.Embedding(9, 4, sparse=True), nn.GRUCell(4, 6), torch.randint(9, (length, 2))

    def step(h: torch.Tensor, token: torch.Tensor) -> Any:
        h = cell(emb(token), h)
        return h, h

    return Scan(step, torch.zeros(2, 6), xs, [emb, cell])


@program("embedding bag")
def _(length: int) -> For:
    bag, lin, xs = nn.EmbeddingBag(9, 4), nn.Linear(4, 3), torch.randint(9, (length, 2, 5))
    return For(lambda t: lin(bag(t)), (xs,), [bag, lin])


def _unoptimised(net: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Calls a scripted module without its optimiser, which rounds differently from the second or third call on."""

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.jit.optimized_execution(False):
            out: torch.Tensor = net(x)
        return out

    return step


@program("a scripted module")
def _(length: int) -> For:
    net, xs = torch.jit.script(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))), _xs(length)
    return For(_unoptimised(net), (xs,), [net, xs])


@program("a scripted module with BatchNorm")
def _(length: int) -> For:
    net, xs = torch.jit.script(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))), _xs(length)
    return For(_unoptimised(net), (xs,), [net, xs])


class ScriptedState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("v", torch.zeros(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.v = 0.5 * self.v + self.lin(x)
        return self.v.tanh()


@program("a scripted module with a state")
def _(length: int) -> For:
    net, xs = torch.jit.script(ScriptedState()), _xs(length)
    return For(_unoptimised(net), (xs,), [net, xs])


@program("a scripted module inside another one")
def _(length: int) -> For:
    net, xs = nn.Sequential(nn.Linear(4, 4), torch.jit.script(ScriptedState()), nn.Dropout(0.2)), _xs(length)
    return For(_unoptimised(net), (xs,), [net, xs])


@program("a traced module")
def _(length: int) -> For:
    net = torch.jit.trace(nn.Sequential(nn.Linear(4, 6), nn.Tanh()), torch.zeros(2, 4))
    xs = _xs(length)
    return For(_unoptimised(net), (xs,), [net, xs])


_LAZY: dict[str, Callable[[], nn.Module]] = {
    "LazyLinear": lambda: nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(3)),
    "LazyBatchNorm": lambda: nn.Sequential(nn.Linear(4, 6), nn.LazyBatchNorm1d()),
    "LazyConv": lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.LazyConv1d(3, 2), nn.LazyBatchNorm1d()),
}


def _lazy(name: str, make: Callable[[], nn.Module]) -> None:
    @program(
        f"{name}, not initialised before the loop", refused="LazyModule|[Ll]azy", instead=lambda length: warm(length)
    )
    def make_loop(length: int) -> For:
        net, xs = make(), _xs(length)
        return For(net, (xs,), [net, xs])

    def warm(length: int) -> For:
        net, xs = make(), _xs(length)
        net(xs[0].detach())
        return For(net, (xs,), [net, xs])


for _name, _lazy_of in _LAZY.items():
    _lazy(_name, _lazy_of)


@program("BatchNorm at every step")
def _(length: int) -> For:
    net, xs = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3)), _xs(length)
    return For(net, (xs,), [net, xs])


@program("InstanceNorm and GroupNorm")
def _(length: int) -> For:
    net = nn.Sequential(
        nn.Conv1d(1, 4, 3, padding=1), nn.InstanceNorm1d(4, affine=True, track_running_stats=True), nn.GroupNorm(2, 4)
    )
    xs = _xs(length, 2, 1, 6)
    return For(net, (xs,), [net, xs])


@program("autocast to bfloat16 in the step")
def _(length: int) -> Scan:
    cell, xs = nn.GRUCell(4, 6), _xs(length)
    lin = nn.Linear(6, 6)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = lin(h)
        h = cell(x, h + y.float())
        return h, y

    return Scan(step, torch.zeros(2, 6), xs, [cell, lin, xs])


@program("low rank adapters on frozen weights")
def _(length: int) -> Scan:
    base = nn.GRUCell(4, 6).requires_grad_(False)
    a, b, xs = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.zeros(2, 6)), _xs(length)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = base(x, h) + h @ a @ b
        return h, h

    return Scan(step, torch.zeros(2, 6), xs, [base, a, b, xs])


@program("truncated backpropagation: the state is detached every five steps")
def _(length: int) -> Scan:
    cell, xs = nn.GRUCell(4, 6), _xs(length)

    def step(state: Any, x: torch.Tensor) -> Any:
        h, t = state
        if t % 5 == 0:
            h = h.detach()
        h = cell(x, h)
        return (h, t + 1), h

    return Scan(step, (torch.zeros(2, 6), 0), xs, [cell, xs])


@program("burn-in without grad")
def _(length: int) -> Scan:
    return _burn_in(length, outputs=True)


def _burn_in(length: int, *, outputs: bool, steps: int = 20) -> Scan:
    cell, xs = nn.GRUCell(4, 6), _xs(length)

    def step(state: Any, x: torch.Tensor) -> Any:
        h, t = state
        with torch.set_grad_enabled(t >= steps):
            h = cell(x, h)
        return (h, t + 1), h if outputs else None

    return Scan(step, (torch.zeros(2, 6), 0), xs, [cell, xs])


@program("burn-in without grad, only the last state is used", outputs_vary=True)
def _(length: int) -> Scan:
    return _burn_in(length, outputs=False)


@program("burn-in without grad of three steps")
def _(length: int) -> Scan:
    return _burn_in(length, outputs=True, steps=3)


@program("echo state network with a frozen reservoir")
def _(length: int) -> Scan:
    w, w_in, out = torch.randn(20, 20) / 8, torch.randn(4, 20), nn.Linear(20, 2)
    xs = torch.randn(length, 2, 4)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = 0.7 * h + 0.3 * torch.tanh(h @ w + x @ w_in)
        return h, out(h)

    return Scan(step, torch.zeros(2, 20), xs, [out])


@program("adaptive computation time: halting weights")
def _(length: int) -> Scan:
    cell, halt, x = nn.GRUCell(4, 6), nn.Linear(6, 1), torch.randn(2, 4)

    def step(state: Any, _: Any) -> Any:
        h, total, mean = state
        h = cell(x, h)
        p = halt(h).sigmoid()
        p = torch.where(total + p > 1, (1 - total).clamp(min=0), p)
        return (h, total + p, mean + p * h), p

    return Scan(step, (torch.zeros(2, 6), torch.zeros(2, 1), torch.zeros(2, 6)), None, [cell, halt], length=length)


@program("hypernetwork: weights made before the loop")
def _(length: int) -> Scan:
    hyper, z, xs = nn.Linear(3, 4 * 4), torch.randn(3), _xs(length)
    w = hyper(z).view(4, 4)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.tanh(h @ w + x)
        return h, h

    return Scan(step, torch.zeros(2, 4), xs, [hyper, xs])


@program("transposed states and non-contiguous products")
def _(length: int) -> Scan:
    w, xs = nn.Parameter(torch.randn(5, 5) / 3), _xs(length, 2, 3, 5)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.tanh((h.transpose(1, 2).contiguous().transpose(1, 2) @ w) + x)
        return h, h.transpose(1, 2)

    return Scan(step, torch.zeros(2, 3, 5), xs, [w, xs])


@program("positional encoding by the step's number")
def _(length: int) -> Scan:
    lin, xs = nn.Linear(4, 4), _xs(length)

    def step(state: Any, x: torch.Tensor) -> Any:
        h, t = state
        pe = torch.tensor([math.sin(t / 10000 ** (k / 4)) for k in range(4)])
        h = torch.tanh(lin(h + x + pe))
        return (h, t + 1), h

    return Scan(step, (torch.zeros(2, 4), 0), xs, [lin, xs])
