"""Sequence models: recurrences of recent papers, attention, memories, decoders, dynamic programs over time."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (as everybody does)
from torch.nn.utils import parametrizations

from tests.torch.loops.programs.program import For, Scan, program


def _xs(length: int, *shape: int) -> Any:
    return torch.randn(length, *(shape or (2, 4)), requires_grad=True)


# --- recurrences


@program("xLSTM: sLSTM with heads, normaliser and stabiliser in a dictionary")
def _(length: int) -> Scan:
    gates, rec, xs = nn.Linear(4, 16), nn.Parameter(torch.randn(2, 2, 8) / 3), _xs(length)
    norm = nn.GroupNorm(2, 4)

    def step(s: Any, x: torch.Tensor) -> Any:
        inner = torch.einsum("bhd,hdk->bhk", s["h"].view(2, 2, 2), rec).reshape(2, 16)
        i, f, z, o = (gates(x) + inner).chunk(4, -1)
        log_f = F.logsigmoid(f)
        m = torch.maximum(log_f + s["m"], i)
        i, f = torch.exp(i - m), torch.exp(log_f + s["m"] - m)
        c, n = f * s["c"] + i * torch.tanh(z), f * s["n"] + i
        h = torch.sigmoid(o) * c / n.clamp(min=1e-6)
        return {"c": c, "n": n, "h": h, "m": m}, norm(h)

    zeros = {name: torch.zeros(2, 4) for name in "cnhm"}
    return Scan(step, zeros, xs, [gates, rec, norm, xs])


@program("xLSTM: mLSTM with a matrix memory")
def _(length: int) -> Scan:
    proj, xs = nn.Linear(4, 14), _xs(length)

    def step(state: Any, x: torch.Tensor) -> Any:
        c, n, m = state
        q, k, v, i, f = proj(x).split([4, 4, 4, 1, 1], -1)
        log_f = F.logsigmoid(f)
        new = torch.max(log_f + m, i)
        f, i = (log_f + m - new).exp(), (i - new).exp()
        c = f[..., None] * c + i[..., None] * torch.einsum("bi,bj->bij", v, k / 2)
        n = f * n + i * k / 2
        scale = torch.maximum((n * q).sum(-1, keepdim=True).abs(), torch.exp(-new))
        return (c, n, new), torch.einsum("bij,bj->bi", c, q) / scale

    return Scan(step, (torch.zeros(2, 4, 4), torch.zeros(2, 4), torch.zeros(2, 1)), xs, [proj, xs])


@program("Mamba: a block with a causal convolution over a rolled window")
def _(length: int) -> Scan:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.out = nn.Linear(4, 16, bias=False), nn.Linear(8, 4, bias=False)
            self.conv, self.bias = nn.Parameter(torch.randn(8, 4) / 2), nn.Parameter(torch.zeros(8))
            self.x_proj, self.dt_proj = nn.Linear(8, 1 + 6, bias=False), nn.Linear(1, 8)
            self.a_log = nn.Parameter(torch.log(torch.arange(1.0, 4).repeat(8, 1)))
            self.d = nn.Parameter(torch.ones(8))

        def forward(self, state: Any, x: torch.Tensor) -> Any:
            conv_state, ssm = state
            u, z = self.inp(x).chunk(2, -1)
            conv_state = torch.cat([conv_state[..., 1:], u.unsqueeze(-1)], -1)
            u = F.silu((conv_state * self.conv).sum(-1) + self.bias)
            dt, b, c = self.x_proj(u).split([1, 3, 3], -1)
            dt = F.softplus(self.dt_proj(dt))
            a = torch.exp(dt[..., None] * -torch.exp(self.a_log))
            ssm = a * ssm + dt[..., None] * b[:, None] * u[..., None]
            y = (ssm * c[:, None]).sum(-1) + self.d * u
            return (conv_state, ssm), self.out(y * F.silu(z))

    block, xs = Block(), _xs(length)
    return Scan(block, (torch.zeros(2, 8, 4), torch.zeros(2, 8, 3)), xs, [block, xs])


@program("Mamba: its cache is written in place with roll and copy_ inside a module")
def _(length: int) -> For:
    class Block(nn.Module):
        window: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.lin = nn.Parameter(torch.randn(4, 3)), nn.Linear(4, 4)
            self.register_buffer("window", torch.zeros(2, 4, 3))

        def forward(self, x: torch.Tensor) -> Any:
            with torch.no_grad():
                self.window.copy_(torch.roll(self.window, -1, -1))
                self.window[:, :, -1] = x
            return self.lin((self.window.clone() * self.weight).sum(-1))

    block = Block()
    return For(block, (torch.randn(length, 2, 4),), [block])


@program("S4: a bilinear state space made from its parameters once per step, complex64")
def _(length: int) -> Scan:
    log_re, im = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.arange(4.0))
    b, c, log_dt = (nn.Parameter(torch.randn(4, dtype=d)) for d in (torch.cfloat, torch.cfloat, torch.float))
    xs = _xs(length, 2)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        a, dt = torch.complex(-log_re.exp(), im), log_dt.exp()
        bar = (1 + dt * a / 2) / (1 - dt * a / 2)
        h = bar * h + (dt / (1 - dt * a / 2) * b) * x[:, None]
        return h, 2 * (h * c).sum(-1).real

    return Scan(step, torch.zeros(2, 4, dtype=torch.cfloat), xs, [log_re, im, b, c, log_dt, xs])


@program("S5: two layers, states of a list of modules, residuals and norms")
def _(length: int) -> Scan:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rate, self.mix, self.norm = nn.Parameter(torch.randn(4)), nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, h: torch.Tensor, x: torch.Tensor) -> Any:
            h = torch.sigmoid(self.rate) * h + x
            return h, x + F.gelu(self.mix(self.norm(h)))

    layers, xs = nn.ModuleList([Layer(), Layer()]), _xs(length)

    def step(states: tuple[torch.Tensor, ...], x: torch.Tensor) -> Any:
        new = []
        for layer, h in zip(layers, states, strict=True):
            h, x = layer(h, x)
            new.append(h)
        return tuple(new), x

    return Scan(step, (torch.zeros(2, 4),) * 2, xs, [layers, xs])


@program("RetNet: retention with decay and a group norm, position by a counter tensor")
def _(length: int) -> Scan:
    qkv, xs = nn.Linear(4, 12, bias=False), _xs(length)
    angle = 1.0 / 10000 ** torch.linspace(0, 1, 2)

    def rotate(x: torch.Tensor, n: torch.Tensor) -> Any:
        cos, sin = (n * angle).cos().repeat_interleave(2), (n * angle).sin().repeat_interleave(2)
        return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin

    def step(state: Any, x: torch.Tensor) -> Any:
        s, n = state
        q, k, v = qkv(x).chunk(3, -1)
        s = 0.96 * s + rotate(k, n)[..., None] * v[:, None]
        return (s, n + 1), F.group_norm((rotate(q, n)[:, None] @ s)[:, 0], 2)

    return Scan(step, (torch.zeros(2, 4, 4), torch.tensor(0)), xs, [qkv, xs])


@program("RWKV-6: token shift, decay that depends on data, a bonus")
def _(length: int) -> Scan:
    mix, lin, xs = nn.Parameter(torch.rand(4)), nn.Linear(4, 16), _xs(length)
    bonus = nn.Parameter(torch.rand(4))

    def step(state: Any, x: torch.Tensor) -> Any:
        last, s = state
        r, k, v, w = lin(torch.lerp(x, last, mix)).chunk(4, -1)
        kv = k[..., None] * v[:, None]
        y = (r[:, None] @ (s + bonus[:, None] * kv))[:, 0]
        return (x, torch.exp(-torch.exp(w))[..., None] * s + kv), y * F.silu(y)

    return Scan(step, (torch.zeros(2, 4), torch.zeros(2, 4, 4)), xs, [mix, lin, bonus, xs])


@program("gated delta net with two heads and normalised keys")
def _(length: int) -> Scan:
    lin, xs = nn.Linear(4, 14), _xs(length)

    def step(s: torch.Tensor, x: torch.Tensor) -> Any:
        q, k, v, beta, alpha = lin(x).split([4, 4, 4, 1, 1], -1)
        k = F.normalize(k, dim=-1)
        old = torch.einsum("bij,bj->bi", s, k)
        s = alpha.sigmoid()[..., None] * s
        s = s + torch.einsum("bi,bj->bij", beta.sigmoid() * (v - old), k)
        return s, torch.einsum("bij,bj->bi", s, F.normalize(q, dim=-1))

    return Scan(step, torch.zeros(2, 4, 4), xs, [lin, xs])


@program(
    "TTT layer: fast weights by a gradient of torch.func.grad, normalised",
    refused="leave out lean=True",
)
def _(length: int) -> Scan:
    proj, xs = nn.Linear(4, 12), _xs(length)

    def inner(w: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return F.mse_loss(k @ w, v, reduction="sum")

    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        q, k, v = proj(x).chunk(3, -1)
        w = w - 0.1 * torch.func.grad(inner)(w, k, v)
        return w, q @ w

    return Scan(step, torch.eye(4), xs, [proj, xs])


@program("Legendre memory unit with constant matrices in buffers")
def _(length: int) -> For:
    class LMU(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            q = torch.arange(5.0)
            self.register_buffer("a", torch.eye(5) - 0.1 * torch.tril(torch.ones(5, 5)) * (2 * q[:, None] + 1))
            self.register_buffer("b", 0.1 * (2 * q + 1), persistent=False)
            self.enc, self.cell = nn.Linear(4, 1), nn.RNNCell(5, 6)
            self.m: Any = None
            self.h: Any = None

        def forward(self, x: torch.Tensor) -> Any:
            if self.m is None:
                self.m, self.h = x.new_zeros(len(x), 5), x.new_zeros(len(x), 6)
            self.m = self.m @ self.a.T + self.enc(x) * self.b
            self.h = self.cell(self.m, self.h)
            return self.h

    net, xs = LMU(), _xs(length)
    return For(net, (xs,), [net, xs])


@program("unitary recurrence by a matrix exponential at every step")
def _(length: int) -> Scan:
    a, xs = nn.Parameter(torch.randn(4, 4) / 3), _xs(length)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = F.relu(h @ torch.linalg.matrix_exp(a - a.T) + x)
        return h, h

    return Scan(step, torch.zeros(2, 4), xs, [a, xs])


@program("liquid time constants with several unfolded solver steps")
def _(length: int) -> Scan:
    lin, tau, xs = nn.Linear(7, 3), nn.Parameter(torch.ones(3)), _xs(length)

    def step(v: torch.Tensor, x: torch.Tensor) -> Any:
        for _ in range(4):
            f = torch.sigmoid(lin(torch.cat([x, v], -1)))
            v = (v + 0.25 * f) / (1 + 0.25 * (1 / F.softplus(tau) + f))
        return v, v

    return Scan(step, torch.zeros(2, 3), xs, [lin, tau, xs])


@program("LSTM with spectral norm and a weight norm that power-iterates in training")
def _(length: int) -> Scan:
    w_ih, xs = parametrizations.spectral_norm(nn.Linear(4, 12)), _xs(length)
    w_hh = parametrizations.weight_norm(nn.Linear(3, 12))

    def step(state: Any, x: torch.Tensor) -> Any:
        h, c = state
        i, f, g, o = (w_ih(x) + w_hh(h)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return (o.sigmoid() * c.tanh(), c), h

    return Scan(step, (torch.zeros(2, 3), torch.zeros(2, 3)), xs, [w_ih, w_hh, xs])


@program("locked dropout: a mask that is drawn at the first step and kept in the module")
def _(length: int) -> For:
    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(4, 6)
            self.mask: Any = None
            self.h: Any = None

        def forward(self, x: torch.Tensor) -> Any:
            if self.mask is None:
                self.mask = torch.bernoulli(torch.full((len(x), 6), 0.7)) / 0.7
                self.h = torch.zeros(len(x), 6)
            self.h = self.cell(x, self.h * self.mask)
            return self.h

    net, xs = Locked(), _xs(length)
    return For(net, (xs,), [net, xs])


@program("AWD-LSTM: DropConnect draws a recurrent matrix every tenth step")
def _(length: int) -> For:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w_ih, self.w_hh, self.t = nn.Linear(4, 6), nn.Parameter(torch.randn(6, 6) / 4), 0
            self.dropped: Any = None
            self.h: Any = 0.0

        def forward(self, x: torch.Tensor) -> Any:
            if self.t % 10 == 0:
                self.dropped = F.dropout(self.w_hh, 0.5, self.training)
            self.t += 1
            self.h = torch.tanh(self.w_ih(x) + (self.h @ self.dropped if self.t > 1 else 0))
            return self.h

    net, xs = Net(), _xs(length)
    return For(net, (xs,), [net, xs])


# --- attention and caches


class Block(nn.Module):
    """A decoder block whose cache is a tuple that it is handed and returns, grown by cat."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12, bias=False), nn.Linear(4, 4, bias=False)
        self.mlp, self.norm = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor, cache: Any) -> Any:
        q, k, v = self.qkv(self.norm(x)).view(len(x), 1, 3, 2, 2).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(len(x), 4))
        return x + self.mlp(x), (k, v)


@program("GPT with caches of all blocks in a list of a module")
def _(length: int) -> For:
    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks = nn.Embedding(7, 4), nn.ModuleList([Block(), Block()])
            self.caches: list[Any] = [None, None]

        def forward(self, token: torch.Tensor) -> Any:
            x = self.embed(token)
            for k, block in enumerate(self.blocks):
                x, self.caches[k] = block(x, self.caches[k])
            return x @ self.embed.weight.T

    net = GPT()
    return For(net, (torch.randint(0, 7, (length, 2)),), [net])


@program("GPT that samples its next token, states of a sliding window in a deque of a module")
def _(length: int) -> Scan:
    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block = nn.Embedding(7, 4), Block()
            self.window: deque[torch.Tensor] = deque(maxlen=4)

        def forward(self, token: torch.Tensor) -> Any:
            self.window.append(self.embed(token))
            cache, y = None, torch.zeros(2, 4)
            for x in self.window:
                y, cache = self.block(x, cache)
            return y @ self.embed.weight.T

    net = GPT()

    def step(token: torch.Tensor, _: Any) -> Any:
        logits = net(token)
        new = torch.multinomial(logits.softmax(-1), 1)[:, 0]
        return new, F.log_softmax(logits, -1).gather(1, new[:, None])

    return Scan(step, torch.zeros(2, dtype=torch.long), None, [net], length=length)


@program("key-value memory of fixed size written by index_copy and masked by position")
def _(length: int) -> Scan:
    qkv, xs = nn.Linear(4, 12), _xs(length)

    def step(state: Any, x: torch.Tensor) -> Any:
        keys, values, t = state
        q, k, v = qkv(x).chunk(3, -1)
        keys, values = keys.index_copy(1, t[None], k[:, None]), values.index_copy(1, t[None], v[:, None])
        scores = (keys @ q[..., None])[..., 0].masked_fill(torch.arange(keys.shape[1]) > t, -math.inf)
        return (keys, values, t + 1), (scores.softmax(-1)[:, None] @ values)[:, 0]

    rooms = torch.zeros(2, length, 4)
    return Scan(step, (rooms, rooms.clone(), torch.tensor(0)), xs, [qkv, xs])


@program("Bahdanau attention over an encoder that ran before the loop")
def _(length: int) -> Scan:
    encoder, cell = nn.GRU(4, 6, batch_first=True), nn.GRUCell(10, 6)
    attend, out, embed = nn.Linear(12, 1), nn.Linear(6, 5), nn.Embedding(5, 4)
    source = torch.randn(2, 7, 4, requires_grad=True)
    memory, h0 = encoder(source)
    mask = torch.tensor([[True] * 7, [True] * 5 + [False] * 2])

    def step(h: torch.Tensor, token: torch.Tensor) -> Any:
        scores = attend(torch.cat([memory, h[:, None].expand(-1, 7, -1)], -1))[..., 0]
        weights = scores.masked_fill(~mask, -1e9).softmax(-1)
        context = torch.bmm(weights[:, None], memory)[:, 0]
        h = cell(torch.cat([context, embed(token)], -1), h)
        return h, (out(h), weights)

    own = [encoder, cell, attend, out, embed, source]
    return Scan(step, h0[0], torch.randint(0, 5, (length, 2)), own)


@program("pointer network: chosen inputs are masked from then on")
def _(length: int) -> Scan:
    items, cell, query = torch.randn(2, 60, 4, requires_grad=True), nn.LSTMCell(4, 4), nn.Linear(4, 4)

    def step(state: Any, _: Any) -> Any:
        x, (h, c), used = state
        h, c = cell(x, (h, c))
        logits = torch.einsum("bnd,bd->bn", items, query(h)).masked_fill(used, -1e9)
        pick = logits.argmax(-1)
        used = used.scatter(1, pick[:, None], True)
        return (items[torch.arange(2), pick], (h, c), used), F.log_softmax(logits, -1).max(-1).values

    start = (torch.zeros(2, 4), (torch.zeros(2, 4), torch.zeros(2, 4)), torch.zeros(2, 60, dtype=torch.bool))
    return Scan(step, start, None, [items, cell, query], length=length)


@program("Transformer-XL: memory of a segment is detached")
def _(length: int) -> Scan:
    attention, xs = nn.MultiheadAttention(4, 2, batch_first=True), _xs(length, 2, 3, 4)

    def step(memory: torch.Tensor, x: torch.Tensor) -> Any:
        both = torch.cat([memory, x], 1)
        y, _ = attention(x, both, both, need_weights=False)
        return torch.cat([memory, (x + y).detach()], 1)[:, -6:], y

    return Scan(step, torch.zeros(2, 6, 4), xs, [attention, xs])


@program("block-recurrent transformer with gates between states")
def _(length: int) -> Scan:
    cross, gate, xs = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 4), _xs(length, 2, 3, 4)
    learned = nn.Parameter(torch.randn(1, 5, 4))

    def step(s: torch.Tensor, x: torch.Tensor) -> Any:
        new, weights = cross(s, x, x)
        g = gate(s).sigmoid()
        return g * s + (1 - g) * new, weights

    return Scan(step, learned.expand(2, -1, -1), xs, [cross, gate, learned, xs])


# --- memories


@program("differentiable neural computer: usage, links, read heads")
def _(length: int) -> Scan:
    n, w = 5, 3
    controller, xs = nn.LSTMCell(4 + w, 6), _xs(length)
    interface, out = nn.Linear(6, 4 * w + 6), nn.Linear(6 + w, 2)

    def content(memory: torch.Tensor, key: torch.Tensor, beta: torch.Tensor) -> Any:
        return (F.cosine_similarity(memory, key[:, None], -1) * F.softplus(beta)).softmax(-1)

    def step(s: dict[str, Any], x: torch.Tensor) -> Any:
        h, c = controller(torch.cat([x, s["read"]], -1), s["lstm"])
        key, add, erase, r_key, rest = interface(h).split([w, w, w, w, 6], -1)
        wb, rb, alloc_gate, write_gate, free, back = rest.unbind(-1)
        usage = (s["usage"] + s["ww"] - s["usage"] * s["ww"]) * (1 - free.sigmoid()[:, None] * s["rw"])
        ordered, order = usage.sort(-1)
        shifted = F.pad(ordered, (1, 0), value=1.0)[:, :-1].cumprod(-1)
        alloc = torch.zeros_like(usage).scatter(1, order, (1 - ordered) * shifted)
        a = alloc_gate.sigmoid()[:, None]
        ww = write_gate.sigmoid()[:, None] * (a * alloc + (1 - a) * content(s["mem"], key, wb[:, None]))
        mem = s["mem"] * (1 - ww[..., None] * erase.sigmoid()[:, None]) + ww[..., None] * add[:, None]
        link = (1 - ww[..., None] - ww[:, None]) * s["link"] + ww[..., None] * s["prec"][:, None]
        link = link * (1 - torch.eye(n))
        prec = (1 - ww.sum(-1, keepdim=True)) * s["prec"] + ww
        m = back.sigmoid()[:, None]
        rw = m * (s["rw"][:, None] @ link)[:, 0] + (1 - m) * content(mem, r_key, rb[:, None])
        read = (rw[:, None] @ mem)[:, 0]
        new = {"lstm": (h, c), "mem": mem, "usage": usage, "ww": ww, "rw": rw, "link": link, "prec": prec}
        return new | {"read": read}, out(torch.cat([h, read], -1))

    weights = {name: torch.zeros(2, n) for name in ("usage", "ww", "rw", "prec")}
    start: dict[str, Any] = {"lstm": (torch.zeros(2, 6), torch.zeros(2, 6)), "mem": torch.full((2, n, w), 1e-2)}
    start |= {"link": torch.zeros(2, n, n), "read": torch.zeros(2, w), **weights}
    return Scan(step, start, xs, [controller, interface, out, xs])


@program("neural stack with continuous pushes and pops")
def _(length: int) -> Scan:
    lin, xs = nn.Linear(4, 6), _xs(length)

    def step(state: Any, x: torch.Tensor) -> Any:
        values, strength, t = state
        v, push, pop = lin(x).split([4, 1, 1], -1)
        above = strength.flip(-1).cumsum(-1).flip(-1) - strength
        strength = (strength - (pop.sigmoid() - above).clamp(min=0)).clamp(min=0)
        now = F.one_hot(t, values.shape[1]).float()
        values, strength = values + now[..., None] * v[:, None], strength + now * push.sigmoid()
        weights = torch.minimum(strength, (1 - above).clamp(min=0))
        return (values, strength, t + 1), (weights[:, None] @ values)[:, 0]

    return Scan(step, (torch.zeros(2, length, 4), torch.zeros(2, length), torch.tensor(0)), xs, [lin, xs])


@program("modern Hopfield network: retrieval until it settles")
def _(length: int) -> Scan:
    patterns = nn.Parameter(torch.randn(6, 4))

    def step(xi: torch.Tensor, beta: torch.Tensor) -> Any:
        new = (beta * xi @ patterns.T).softmax(-1) @ patterns
        energy = -torch.logsumexp(beta * xi @ patterns.T, -1) / beta + 0.5 * xi.square().sum(-1)
        return new, (energy, (new - xi).detach().norm())

    return Scan(step, torch.randn(2, 4, requires_grad=True), torch.linspace(1, 4, length), [patterns])


@program("equilibrium propagation: free and nudged phases by gradients of an energy")
def _(length: int) -> Scan:
    w, x, target = nn.Parameter(torch.randn(4, 3) / 2), torch.randn(2, 4), torch.rand(2, 3)

    def step(state: Any, beta: torch.Tensor) -> Any:
        with torch.enable_grad():
            s = state.detach().requires_grad_()
            energy = 0.5 * s.square().sum() - (x @ w * s.sigmoid()).sum() + beta * (s - target).square().sum()
            (grad,) = torch.autograd.grad(energy, s, create_graph=True)
        return state - 0.2 * grad, energy

    return Scan(step, torch.zeros(2, 3), torch.linspace(0, 1, length), [w])


@program("fast weights of Ba et al. with an inner loop and a layer norm")
def _(length: int) -> Scan:
    slow, inp, norm, xs = nn.Linear(5, 5), nn.Linear(4, 5), nn.LayerNorm(5), _xs(length)

    def step(state: Any, x: torch.Tensor) -> Any:
        h, a = state
        drive = slow(h) + inp(x)
        a = 0.95 * a + 0.5 * h[..., None] * h[:, None]
        new = torch.relu(norm(drive))
        for _ in range(2):
            new = torch.relu(norm(drive + (new[:, None] @ a)[:, 0]))
        return (new, a), new

    return Scan(step, (torch.zeros(2, 5), torch.zeros(2, 5, 5)), xs, [slow, inp, norm, xs])


# --- decoders and dynamic programs


@program("beam search with gathered states and scores", outputs_vary=True)
def _(length: int) -> Scan:
    cell, out, embed = nn.GRUCell(4, 6), nn.Linear(6, 5), nn.Embedding(5, 4)

    def step(beam: Any, _: Any) -> Any:
        h, token, score = beam
        h = cell(embed(token), h)
        total = (score[:, None] + F.log_softmax(out(h), -1)).flatten()
        score, place = total.topk(3)
        parent, token = place // 5, place % 5
        return (h[parent], token, score), (token, parent)

    start = (torch.zeros(3, 6), torch.zeros(3, dtype=torch.long), torch.tensor([0.0, -1e9, -1e9]))
    return Scan(step, start, None, [cell, out, embed], length=length)


@program("scheduled sampling whose rate falls with an attribute of the model")
def _(length: int) -> Scan:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out, self.embed = nn.GRUCell(4, 6), nn.Linear(6, 5), nn.Embedding(5, 4)
            self.rate = 1.0

        def forward(self, state: Any, gold: torch.Tensor) -> Any:
            h, said = state
            self.rate *= 0.9
            token = torch.where(torch.rand(2) < self.rate, gold, said)
            h = self.cell(self.embed(token), h)
            logits = self.out(h)
            return (h, logits.argmax(-1)), F.cross_entropy(logits, gold, reduction="none")

    net = Decoder()
    start = (torch.zeros(2, 6), torch.zeros(2, dtype=torch.long))
    return Scan(net, start, torch.randint(0, 5, (length, 2)), [net])


@program("coverage penalty and copy distribution added by scatter")
def _(length: int) -> Scan:
    memory, source = torch.randn(2, 4, 6, requires_grad=True), torch.randint(0, 5, (2, 4))
    cell, out, gate = nn.GRUCell(6, 6), nn.Linear(6, 5), nn.Linear(6, 1)

    def step(state: Any, _: Any) -> Any:
        h, coverage, loss = state
        weights = ((memory * h[:, None]).sum(-1) - coverage).softmax(-1)
        h = cell((weights[..., None] * memory).sum(1), h)
        p = gate(h).sigmoid()
        vocabulary = (p * out(h).softmax(-1)).scatter_add(1, source, (1 - p) * weights)
        return (h, coverage + weights, loss + torch.minimum(weights, coverage).sum()), vocabulary.clamp(min=1e-9).log()

    start = (torch.zeros(2, 6), torch.zeros(2, 4), torch.tensor(0.0))
    return Scan(step, start, None, [memory, cell, out, gate], length=length)


@program("dynamic time warping, soft minimum along rows")
def _(length: int) -> Scan:
    costs = torch.rand(length, 6, requires_grad=True)

    def step(row: torch.Tensor, cost: torch.Tensor) -> Any:
        new = [row.new_full((), 1e3)]
        for j in range(6):
            new.append(cost[j] - torch.logsumexp(-torch.stack([row[j], row[j + 1], new[j]]), 0))
        return torch.stack(new), new[-1]

    return Scan(step, torch.cat([torch.zeros(1), torch.full((6,), 1e3)]), costs, [costs])


@program("semi-Markov forward scores over a window of past alphas")
def _(length: int) -> Scan:
    duration, move, xs = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(3, 3)), _xs(length, 3)

    def step(past: tuple[torch.Tensor, ...], x: torch.Tensor) -> Any:
        arrivals = torch.stack([torch.logsumexp(a[:, None] + move, 0) + d for a, d in zip(past, duration, strict=True)])
        alpha = torch.logsumexp(arrivals, 0) + x
        return (alpha, *past[:-1]), alpha

    return Scan(step, tuple(torch.zeros(3) for _ in range(4)), xs, [duration, move, xs])


@program("transducer loss: a row of the lattice per frame, by logaddexp")
def _(length: int) -> Scan:
    blank, label = (torch.randn(length, 5, requires_grad=True) for _ in range(2))

    def step(alpha: torch.Tensor, x: Any) -> Any:
        b, y = x
        stay, new = alpha + b, [alpha[0] + b[0]]
        for u in range(1, 5):
            new.append(torch.logaddexp(stay[u], new[-1] + y[u - 1]))
        return torch.stack(new), None

    return Scan(step, torch.tensor([0.0, -9, -9, -9, -9]), (blank, label), [blank, label], named={})


@program("structured inside scores, backwards with a mask of lengths")
def _(length: int) -> Scan:
    potentials, lengths = torch.randn(length, 2, 3, 3, requires_grad=True), torch.tensor([max(1, length - 2), length])

    def step(state: Any, x: Any) -> Any:
        beta, (phi, t) = state, x
        new = torch.logsumexp(phi + beta[:, None], -1)
        return torch.where((t < lengths)[:, None], new, beta), new.sum()

    return Scan(step, torch.zeros(2, 3), (potentials, torch.arange(length)), [potentials])
