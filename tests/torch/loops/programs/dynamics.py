"""Solvers in the style of torchdiffeq, simulators, filters, samplers, learning in steps, reinforcement learning."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (as everybody does)

import lowtide.torch as lt
from tests.torch.loops.programs.program import For, Scan, While, program


class Field(nn.Module):
    """The right side of a neural differential equation, as in torchdiffeq's examples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
        self.nfe = 0

    def forward(self, t: Any, y: torch.Tensor) -> torch.Tensor:
        self.nfe += 1
        out: torch.Tensor = self.net(y**3)
        return out


# --- differential equations


def _euler(f: Any, t: Any, y: Any, dt: Any) -> Any:
    return y + dt * f(t, y)


def _midpoint(f: Any, t: Any, y: Any, dt: Any) -> Any:
    return y + dt * f(t + dt / 2, y + dt / 2 * f(t, y))


def _heun(f: Any, t: Any, y: Any, dt: Any) -> Any:
    k1 = f(t, y)
    return y + dt / 2 * (k1 + f(t + dt, y + dt * k1))


def _rk4(f: Any, t: Any, y: Any, dt: Any) -> Any:
    k1 = f(t, y)
    k2 = f(t + dt / 3, y + dt * k1 / 3)
    k3 = f(t + dt * 2 / 3, y + dt * (k2 - k1 / 3))
    k4 = f(t + dt, y + dt * (k1 - k2 + k3))
    return y + (k1 + 3 * (k2 + k3) + k4) * dt / 8


def _implicit(f: Any, t: Any, y: Any, dt: Any) -> Any:
    new = y
    for _ in range(3):
        new = y + dt * f(t + dt, new)
    return new


def _solver(name: str, method: Callable[..., Any]) -> None:
    @program(f"torchdiffeq: odeint, {name}")
    def make_loop(length: int) -> Scan:
        field, y0 = Field(), torch.tensor([[2.0, 0.0]]).requires_grad_()
        ts = torch.linspace(0, 1, length + 1)

        def step(y: torch.Tensor, t01: Any) -> Any:
            t0, t1 = t01
            y = method(field, t0, y, t1 - t0)
            return y, y

        return Scan(step, y0, (ts[:-1], ts[1:]), [field, y0])


for _name, _method in {
    "euler": _euler,
    "midpoint": _midpoint,
    "heun": _heun,
    "rk4": _rk4,
    "implicit": _implicit,
}.items():
    _solver(_name, _method)


@program("torchdiffeq: dopri5 with adaptive steps")
def _(length: int) -> While:
    field, y0 = Field(), torch.tensor([[2.0, 0.0]]).requires_grad_()

    def body(state: Any) -> Any:
        t, dt, y = state
        k1 = field(t, y)
        k2 = field(t + dt / 5, y + dt * k1 / 5)
        k3 = field(t + dt * 0.3, y + dt * (3 / 40 * k1 + 9 / 40 * k2))
        high, low = y + dt * (k1 - k2 + k3), y + dt * k2
        error = (high - low).detach().abs().max()
        accept = error < 0.05
        new = torch.where(accept, high, y)
        return torch.where(accept, t + dt, t), dt * torch.where(accept, 1.1, 0.7), new

    start = (torch.tensor(0.0), torch.tensor(0.05), y0)
    return While(lambda s: bool(s[0] < 2), body, start, [field, y0], most=length)


@program("torchdiffeq: adaptive steps counted in Python numbers")
def _(length: int) -> While:
    field, y0 = Field(), torch.tensor([[2.0, 0.0]]).requires_grad_()

    def body(state: dict[str, Any]) -> dict[str, Any]:
        y, dt = state["y"], state["dt"]
        full, half = _euler(field, 0, y, dt), _midpoint(field, 0, y, dt)
        if (full - half).abs().max().item() > 0.1:
            return state | {"dt": dt / 2, "tries": state["tries"] + 1}
        return {"t": state["t"] + dt, "dt": dt * 1.2, "y": half, "tries": state["tries"] + 1}

    start = {"t": 0.0, "dt": 0.1, "y": y0, "tries": 0}
    return While(lambda s: s["t"] < 3 and s["tries"] < 50, body, start, [field, y0], most=length)


@program("Euler-Maruyama of a stochastic equation")
def _(length: int) -> Scan:
    drift, diffusion = nn.Linear(2, 2), nn.Linear(2, 2)

    def step(y: torch.Tensor, dt: torch.Tensor) -> Any:
        y = y + drift(y) * dt + diffusion(y).sigmoid() * torch.randn_like(y) * dt.sqrt()
        return y, y

    return Scan(step, torch.zeros(3, 2), torch.full((length,), 0.1), [drift, diffusion])


@program("Brownian increments drawn before the loop")
def _(length: int) -> Scan:
    drift, dw = nn.Linear(2, 2), torch.randn(length, 3, 2) * 0.1
    return Scan(lambda y, w: (y + 0.1 * drift(y) + w, y), torch.zeros(3, 2), dw, [drift])


@program("noise of a generator of one's own")
def _(length: int) -> Scan:
    drift, g = nn.Linear(2, 2), torch.Generator().manual_seed(3)

    def step(y: torch.Tensor, _: Any) -> Any:
        y = y + 0.1 * drift(y) + 0.1 * torch.randn(y.shape, generator=g)
        return y, y

    return Scan(step, torch.zeros(3, 2), None, [drift, g], length=length)


@program("noise of numpy's generator")
def _(length: int) -> Scan:
    drift, rng = nn.Linear(2, 2), np.random.default_rng(3)

    def step(y: torch.Tensor, _: Any) -> Any:
        y = y + 0.1 * drift(y) + 0.1 * torch.from_numpy(rng.normal(size=(3, 2))).float()
        return y, y

    return Scan(step, torch.zeros(3, 2), None, [drift, rng], length=length)


@program("controlled equation along a path")
def _(length: int) -> Scan:
    field, path = nn.Linear(4, 8), torch.randn(length + 1, 3, 2).requires_grad_()
    dx = path[1:] - path[:-1]

    def step(z: torch.Tensor, x: torch.Tensor) -> Any:
        return z + (field(z).tanh().view(3, 4, 2) @ x[..., None])[..., 0], z

    return Scan(step, torch.zeros(3, 4), dx, [field, path])


@program("reversible Heun with two states")
def _(length: int) -> Scan:
    field = Field()

    def step(state: Any, _: Any) -> Any:
        y, z, f = state
        new = 2 * y - z + f * 0.1
        g = field(0, new)
        return (y + (f + g) * 0.05, new, g), y

    y0 = torch.ones(3, 2)
    return Scan(step, (y0, y0, torch.zeros(3, 2)), None, [field], length=length)


# --- simulators


@program("leapfrog of a Hamiltonian network, forces by autograd")
def _(length: int) -> Scan:
    energy = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def force(q: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            q = q if q.requires_grad else q.detach().requires_grad_()
            return -torch.autograd.grad(energy(q).sum(), q, create_graph=True)[0]

    def step(state: Any, _: Any) -> Any:
        q, p = state
        p = p + 0.05 * force(q)
        q = q + 0.1 * p
        p = p + 0.05 * force(q)
        return (q, p), q

    return Scan(step, (torch.randn(3, 2), torch.zeros(3, 2)), None, [energy], length=length)


@program("bodies under gravity")
def _(length: int) -> Scan:
    masses, x0 = nn.Parameter(torch.rand(4)), torch.randn(4, 2)

    def step(state: Any, _: Any) -> Any:
        x, v = state
        d = x[None] - x[:, None]
        a = (d * (masses[None, :, None] / (d.square().sum(-1, keepdim=True) + 0.1) ** 1.5)).sum(1)
        v = v + 0.01 * a
        return (x + 0.01 * v, v), x

    return Scan(step, (x0, torch.zeros(4, 2)), None, [masses], length=length)


@program("heat equation by a convolution")
def _(length: int) -> Scan:
    log_k, u0 = nn.Parameter(torch.tensor(-1.0)), torch.rand(1, 1, 8, 8).requires_grad_()
    stencil = torch.tensor([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]])[None, None]

    def step(u: torch.Tensor, _: Any) -> Any:
        padded = F.pad(u, (1, 1, 1, 1), mode="circular")
        return u + log_k.exp() * 0.2 * F.conv2d(padded, stencil), u.mean()

    return Scan(step, u0, None, [log_k, u0], length=length)


@program("wave equation with slices written in place")
def _(length: int) -> Scan:
    c = nn.Parameter(torch.tensor(0.3))

    def step(state: Any, _: Any) -> Any:
        u, before = state
        new = 2 * u - before
        new[1:-1] = new[1:-1] + c * (u[2:] - 2 * u[1:-1] + u[:-2])
        new[0] = 0
        return (new, u), new

    u0 = torch.sin(torch.linspace(0, math.pi, 12))
    return Scan(step, (u0, u0), None, [c], length=length)


@program("neural cellular automaton with random updates")
def _(length: int) -> Scan:
    rule = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))

    def step(x: torch.Tensor, _: Any) -> Any:
        update = rule(x) * (torch.rand(x.shape[0], 1, *x.shape[2:]) <= 0.5).float()
        alive = F.max_pool2d(x[:, 3:4], 3, stride=1, padding=1) > 0.1
        return (x + update) * alive, None

    seed = torch.zeros(2, 4, 6, 6)
    seed[:, 3, 3, 3] = 1.0
    return Scan(step, seed, None, [rule], length=length)


@dataclass
class Body:
    """A state as simulators have it."""

    x: torch.Tensor
    v: torch.Tensor
    t: float = 0.0


@program("simulator with a dataclass for its state")
def _(length: int) -> Scan:
    k = nn.Parameter(torch.tensor(2.0))

    def step(s: Body, _: Any) -> Any:
        v = s.v - 0.1 * k * s.x
        return Body(s.x + 0.1 * v, v, s.t + 0.1), s.x

    return Scan(step, Body(torch.ones(3), torch.zeros(3)), None, [k], length=length)


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


@program("frozen dataclass, changed by replace, in a tuple with a counter", outputs_vary=True)
def _(length: int) -> Scan:
    cell = nn.GRUCell(3, 3)

    def step(carry: Any, _: Any) -> Any:
        s, t = carry
        h = cell(s.x, s.hidden[0])
        return (replace(s, x=s.x + 0.1 * h, hidden=(h,)), t + 1), {"x": s.x, "t": t}

    return Scan(step, (Frozen(torch.ones(2, 3), (torch.zeros(2, 3),)), 0), None, [cell], length=length)


class Plain:
    """A state without any help from Python."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


@program("an object of one's own for a state", refused="a dataclass", instead=lambda length: _as_dataclass(length))
def _(length: int) -> Scan:
    w = nn.Parameter(torch.randn(3))
    return Scan(lambda s, _: (Plain(torch.tanh(s.x * w)), s.x), Plain(torch.ones(3)), None, [w], length=length)


def _as_dataclass(length: int) -> Scan:
    w = nn.Parameter(torch.randn(3))
    init = Body(torch.ones(3), torch.ones(3))
    return Scan(lambda s, _: (replace(s, x=torch.tanh(s.x * w)), s.x), init, None, [w], length=length)


@program(
    "an environment object that keeps its state",
    refused="part of the carry|attribute",
    instead=lambda length: _env(length),
)
def _(length: int) -> For:
    policy, env = nn.Linear(2, 1), SimpleNamespace(x=torch.zeros(3, 2))

    def step(_: torch.Tensor) -> Any:
        a = policy(env.x)
        env.x = env.x + 0.1 * torch.cat([a, -a], 1) + 0.1
        return env.x.square().sum(-1)

    return For(step, (torch.zeros(length),), [policy])


def _env(length: int) -> Scan:
    policy = nn.Linear(2, 1)

    def step(x: torch.Tensor, _: torch.Tensor) -> Any:
        a = policy(x)
        x = x + 0.1 * torch.cat([a, -a], 1) + 0.1
        return x, x.square().sum(-1)

    return Scan(step, torch.zeros(3, 2), torch.zeros(length), [policy])


@program("plant with friction that is called by a method")
def _(length: int) -> For:
    class Plant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mu, self.t = nn.Parameter(torch.tensor(0.1)), 0
            self.state = {"x": torch.zeros(2), "v": torch.ones(2)}

        def step(self, u: torch.Tensor) -> torch.Tensor:
            self.t += 1
            v = self.state["v"] * (1 - self.mu) + 0.1 * u
            self.state = {"x": self.state["x"] + 0.1 * v, "v": v}
            return self.state["x"]

    plant, us = Plant(), torch.randn(length, 2).requires_grad_()
    return For(plant.step, (us,), [plant, us])


@program("state dictionary of a module that is written by key")
def _(length: int) -> For:
    class Store(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.memory = nn.Linear(2, 2), {"h": torch.zeros(3, 2)}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.memory["h"] = torch.tanh(self.lin(x) + self.memory["h"])
            return self.memory["h"]

    net, xs = Store(), torch.randn(length, 3, 2)
    return For(net, (xs,), [net])


@program("records with and without grad in one dictionary")
def _(length: int) -> For:
    class Recording(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.h = nn.Linear(2, 2), torch.zeros(3, 2)
            self.record: dict[str, list[Any]] = {"h": [], "rate": [], "step": []}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.h = torch.tanh(self.lin(x) + self.h)
            self.record["h"].append(self.h)
            self.record["rate"].append(self.h.detach().mean())
            self.record["step"].append(len(self.record["h"]))
            return self.h

    net, xs = Recording(), torch.randn(length, 3, 2)
    return For(net, (xs,), [net])


@program("detached records in a module, and the latest of them")
def _(length: int) -> For:
    class Recording(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.seen, self.latest = nn.Linear(2, 2), [], None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.lin(x)
            self.latest = y.detach()
            self.seen.append(self.latest)
            return y

    net, xs = Recording(), torch.randn(length, 3, 2)
    return For(net, (xs,), [net])


# --- filters


@program("Kalman filter")
def _(length: int) -> Scan:
    a, log_q, zs = (
        nn.Parameter(torch.eye(2) * 0.9),
        nn.Parameter(torch.zeros(2)),
        torch.randn(length, 2).requires_grad_(),
    )

    def step(state: Any, z: torch.Tensor) -> Any:
        m, p = state
        m, p = a @ m, a @ p @ a.T + torch.diag(log_q.exp())
        gain = torch.linalg.solve(p + torch.eye(2), p).T
        nll = 0.5 * ((z - m) @ torch.linalg.solve(p + torch.eye(2), z - m) + torch.logdet(p + torch.eye(2)))
        return (m + gain @ (z - m), p - gain @ p), nll

    return Scan(step, (torch.zeros(2), torch.eye(2)), zs, [a, log_q, zs])


@program("square root Kalman filter by QR")
def _(length: int) -> Scan:
    a, zs = nn.Parameter(torch.eye(2) * 0.9 + 0.05), torch.randn(length, 2)

    def step(state: Any, z: torch.Tensor) -> Any:
        m, s = state
        s = torch.linalg.qr(torch.cat([(a @ s).T, 0.3 * torch.eye(2)]))[1].T
        p = s @ s.T
        gain = p @ torch.inverse(p + torch.eye(2))
        m = a @ m + gain @ (z - a @ m)
        return (m, torch.linalg.cholesky(p - gain @ p)), m

    return Scan(step, (torch.zeros(2), torch.eye(2)), zs, [a])


@program("extended Kalman filter, Jacobian by autograd")
def _(length: int) -> Scan:
    f, zs = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(length, 2)

    def step(state: Any, z: torch.Tensor) -> Any:
        m, p = state
        jac = torch.autograd.functional.jacobian(f, m, create_graph=True)
        m, p = f(m), jac @ p @ jac.T + 0.1 * torch.eye(2)
        gain = p @ torch.inverse(p + torch.eye(2))
        m = m + gain @ (z - m)
        return (m, p - gain @ p), m

    return Scan(step, (torch.zeros(2), torch.eye(2)), zs, [f])


@program("extended Kalman filter, Jacobian by torch.func", refused="leave out lean=True")
def _(length: int) -> Scan:
    f, zs = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(length, 2)

    def step(state: Any, z: torch.Tensor) -> Any:
        m, p = state
        jac = torch.func.jacrev(f)(m)
        m, p = f(m), jac @ p @ jac.T + 0.1 * torch.eye(2)
        gain = p @ torch.inverse(p + torch.eye(2))
        m = m + gain @ (z - m)
        return (m, p - gain @ p), m

    return Scan(step, (torch.zeros(2), torch.eye(2)), zs, [f])


@program("particle filter with resampling")
def _(length: int) -> Scan:
    f, zs = nn.Linear(1, 1), torch.randn(length, 1)

    def step(state: Any, z: torch.Tensor) -> Any:
        x, logw = state
        index = torch.multinomial(logw.exp(), x.shape[0], replacement=True)
        x = f(x[index]) + 0.3 * torch.randn_like(x)
        logw = -(z - x).square()[:, 0]
        evidence = logw.logsumexp(0)
        return (x, logw.log_softmax(0)), evidence

    return Scan(step, (torch.randn(7, 1), torch.full((7,), -math.log(7))), zs, [f])


@program("particle filter that resamples if it has to")
def _(length: int) -> Scan:
    f, zs = nn.Linear(1, 1), torch.randn(length, 1)

    def step(state: Any, z: torch.Tensor) -> Any:
        x, logw = state
        if (1 / logw.exp().square().sum()).item() < 4:
            x = x[torch.multinomial(logw.exp(), x.shape[0], replacement=True)]
            logw = torch.full_like(logw, -math.log(len(logw)))
        x = f(x) + 0.3 * torch.randn_like(x)
        logw = (logw - (z - x).square()[:, 0]).log_softmax(0)
        return (x, logw), (logw.exp()[:, None] * x).sum(0)

    return Scan(step, (torch.randn(7, 1), torch.full((7,), -math.log(7))), zs, [f])


@program("forward algorithm of a hidden Markov model")
def _(length: int) -> Scan:
    trans, emit, obs = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 6)), torch.randint(6, (length,))

    def step(alpha: torch.Tensor, o: torch.Tensor) -> Any:
        alpha = torch.logsumexp(alpha[:, None] + trans.log_softmax(1), 0) + emit.log_softmax(1)[:, o]
        return alpha, alpha.logsumexp(0)

    return Scan(step, torch.zeros(4), obs, [trans, emit])


@program("exponential moving average of statistics without grad")
def _(length: int) -> For:
    class Normaliser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(2, 2)
            self.register_buffer("mean", torch.zeros(2))
            self.register_buffer("n", torch.tensor(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.n += 1
                self.mean.lerp_(x.mean(0), 1 / self.n.item())
            out: torch.Tensor = self.lin(x - self.mean)
            return out

    net, xs = Normaliser(), torch.randn(length, 3, 2).requires_grad_()
    return For(net, (xs,), [net, xs])


@program("deep state space model with a posterior")
def _(length: int) -> Scan:
    prior, post, xs = nn.Linear(3, 6), nn.Linear(5, 6), torch.randn(length, 2, 2)

    def step(z: torch.Tensor, x: torch.Tensor) -> Any:
        (pm, ps), (qm, qs) = prior(z).chunk(2, -1), post(torch.cat([z, x], -1)).chunk(2, -1)
        q = torch.distributions.Normal(qm, F.softplus(qs) + 1e-3)
        z = q.rsample()
        kl = torch.distributions.kl_divergence(q, torch.distributions.Normal(pm, F.softplus(ps) + 1e-3)).sum()
        return z, kl

    return Scan(step, torch.zeros(2, 3), xs, [prior, post])


# --- samplers


@program("Langevin dynamics, samples detached")
def _(length: int) -> Scan:
    energy = nn.Sequential(nn.Linear(2, 8), nn.SiLU(), nn.Linear(8, 1))

    def step(x: torch.Tensor, _: Any) -> Any:
        x = x.detach().requires_grad_()
        grad = torch.autograd.grad(energy(x).sum(), x, create_graph=True)[0]
        x = x - 0.1 * grad + 0.1 * torch.randn_like(x)
        return x, x

    return Scan(step, torch.randn(3, 2), None, [energy], length=length)


@program("Langevin dynamics through all steps")
def _(length: int) -> Scan:
    energy, x0 = nn.Sequential(nn.Linear(2, 8), nn.SiLU(), nn.Linear(8, 1)), torch.randn(3, 2).requires_grad_()

    def step(x: torch.Tensor, _: Any) -> Any:
        with torch.enable_grad():
            if not x.requires_grad:
                x = x.requires_grad_()
            grad = torch.autograd.grad(energy(x).sum(), x, create_graph=True)[0]
        return x - 0.1 * grad + 0.1 * torch.randn_like(x), None

    return Scan(step, x0, None, [energy, x0], length=length)


@program("Langevin dynamics in a module that keeps the chain")
def _(length: int) -> For:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy, self.x = nn.Sequential(nn.Linear(2, 8), nn.SiLU(), nn.Linear(8, 1)), torch.randn(3, 2)

        def forward(self, noise: torch.Tensor) -> torch.Tensor:
            x = self.x.detach().requires_grad_()
            grad = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]
            self.x = x - 0.1 * grad + 0.1 * noise
            return self.x

    net = Chain()
    return For(net, (torch.randn(length, 3, 2),), [net])


@program("Hamiltonian Monte Carlo with acceptance", outputs_vary=True)
def _(length: int) -> Scan:
    scale = nn.Parameter(torch.ones(2))

    def logp(q: torch.Tensor) -> torch.Tensor:
        return -(q * scale).square().sum(-1) / 2

    def step(q: torch.Tensor, _: Any) -> Any:
        p = torch.randn_like(q)
        new, mom = q, p
        for _ in range(3):
            mom = mom - 0.1 * new * scale.square()
            new = new + 0.2 * mom
        log_a = logp(new) - logp(q) - mom.square().sum(-1) / 2 + p.square().sum(-1) / 2
        accept = torch.rand(q.shape[0]).log() < log_a
        return torch.where(accept[:, None], new, q), accept

    return Scan(step, torch.randn(3, 2), None, [scale], length=length)


@program("DDPM sampler")
def _(length: int) -> Scan:
    net, betas = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 2)), torch.linspace(1e-3, 0.2, length)
    ts = torch.arange(length).flip(0)

    def step(x: torch.Tensor, tb: Any) -> Any:
        t, beta = tb
        eps = net(torch.cat([x, t.float().expand(3, 1) / 10], 1))
        mean = (x - beta / (1 - beta).sqrt() * eps) / (1 - beta).sqrt()
        return mean + beta.sqrt() * torch.randn_like(x) * (t > 0), x

    return Scan(step, torch.randn(3, 2), (ts, betas.flip(0)), [net])


@program("DDIM sampler with guidance by a gradient")
def _(length: int) -> Scan:
    net, reward = nn.Linear(2, 2), nn.Linear(2, 1)

    def step(x: torch.Tensor, a: torch.Tensor) -> Any:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            guide = torch.autograd.grad(reward(y).sum(), y)[0]
        eps = net(x) - 0.1 * guide
        x0 = (x - (1 - a).sqrt() * eps) / a.sqrt()
        return a.sqrt() * x0 + (1 - a).sqrt() * eps, None

    return Scan(step, torch.randn(3, 2), torch.linspace(0.5, 0.9, length), [net, reward])


@program("Gibbs sampler of a restricted Boltzmann machine")
def _(length: int) -> Scan:
    w = nn.Parameter(torch.randn(4, 3) / 2)

    def step(v: torch.Tensor, _: Any) -> Any:
        ph = (v @ w).sigmoid()
        h = torch.bernoulli(ph).detach()
        pv = (h @ w.t()).sigmoid()
        return torch.bernoulli(pv).detach(), (ph.mean(), pv.mean())

    return Scan(step, torch.bernoulli(torch.full((5, 4), 0.5)), None, [w], length=length)


@program("Metropolis steps until a random number says stop")
def _(length: int) -> While:
    lin, drop = nn.Linear(2, 2), nn.Dropout(0.3)

    def body(x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * drop(torch.tanh(lin(x)))

    return While(lambda _: torch.rand(()).item() < 0.97, body, torch.randn(3, 2), [lin], most=length)


@program("a stop condition that draws from its own generator")
def _(length: int) -> While:
    lin, drop, g = nn.Linear(2, 2), nn.Dropout(0.3), torch.Generator().manual_seed(1)

    def body(x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * drop(torch.tanh(lin(x)))

    return While(lambda _: torch.rand((), generator=g).item() < 0.97, body, torch.randn(3, 2), [lin, g], most=length)


@program("Sinkhorn iterations")
def _(length: int) -> Scan:
    cost = nn.Parameter(torch.rand(4, 5))

    def step(uv: Any, _: Any) -> Any:
        u, v = uv
        u = -torch.logsumexp(v[None] - cost / 0.1, 1)
        v = -torch.logsumexp(u[:, None] - cost / 0.1, 0)
        return (u, v), None

    return Scan(step, (torch.zeros(4), torch.zeros(5)), None, [cost], length=length)


@program("power iteration until it has converged")
def _(length: int) -> While:
    a = nn.Parameter(torch.randn(4, 4))

    def body(state: Any) -> Any:
        x, _ = state
        new = F.normalize(a @ x, dim=0)
        return new, (new - x).detach().norm()

    return While(lambda s: s[1] > 1e-4, body, (torch.ones(4) / 2, torch.tensor(1.0)), [a], most=length)


@program("fixed point of a deep equilibrium model")
def _(length: int) -> While:
    lin, x = nn.Linear(4, 4), torch.randn(2, 4).requires_grad_()

    def body(state: Any) -> Any:
        z, _, k = state
        new = torch.tanh(0.5 * lin(z) + x)
        return new, (new - z).norm().item(), k + 1

    return While(lambda s: s[1] > 1e-5 and s[2] < 100, body, (torch.zeros(2, 4), 1.0, 0), [lin, x], most=length)


@program(
    "a trace that grows while a loop runs", refused="list that grows|full length", instead=lambda length: _trace(length)
)
def _(length: int) -> While:
    lin = nn.Linear(3, 3)

    def body(carry: Any) -> Any:
        h, past = carry
        return torch.tanh(lin(h)), [*past, h]

    return While(lambda c: len(c[1]) < length, body, (torch.ones(2, 3), []), [lin])


def _trace(length: int) -> While:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 3)
            self.past: list[torch.Tensor] = []

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            self.past.append(h)
            return torch.tanh(self.lin(h))

    body = Body()
    return While(lambda _: len(body.past) < length, body, torch.ones(2, 3), [body])


@program("a list in a module that grows while a loop runs")
def _(length: int) -> While:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 3)
            self.past: list[torch.Tensor] = []

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            self.past.append(h)
            return torch.tanh(self.lin(h)) + sum(self.past)

    body = Body()
    return While(lambda _: True, body, torch.ones(2, 3), [body], most=length)


@program("a delay line while a loop runs")
def _(length: int) -> While:
    lin = nn.Linear(3, 3)

    def body(past: tuple[torch.Tensor, ...]) -> Any:
        return (*past[1:], torch.tanh(lin(past[-1] + past[0])))

    return While(lambda _: True, body, (torch.ones(2, 3),) * 22, [lin], most=length)


@program("burn-in without grad while a loop runs")
def _(length: int) -> While:
    lin = nn.Linear(3, 3)

    def body(carry: Any) -> Any:
        h, k = carry
        with torch.set_grad_enabled(k >= 6):
            return torch.tanh(lin(h)), k + 1

    return While(lambda _: True, body, (torch.ones(2, 3), 0), [lin], most=length)


# --- learning inside of steps


@program("MAML: inner steps on a dictionary of parameters")
def _(length: int) -> Scan:
    net, x, y = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)), torch.randn(5, 1), torch.randn(5, 1)

    def step(params: dict[str, torch.Tensor], _: Any) -> Any:
        loss = F.mse_loss(torch.func.functional_call(net, params, (x,)), y)
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        return {name: p - 0.1 * g for (name, p), g in zip(params.items(), grads, strict=True)}, loss

    return Scan(step, dict(net.named_parameters()), None, [net], length=length)


@program("MAML with learned rates and torch.func.grad", refused="leave out lean=True")
def _(length: int) -> Scan:
    net, x, y = nn.Linear(2, 1), torch.randn(5, 2), torch.randn(5, 1)
    rates = nn.Parameter(torch.full((2,), 0.1))

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.mse_loss(torch.func.functional_call(net, params, (x,)), y)

    def step(params: dict[str, torch.Tensor], _: Any) -> Any:
        grads = torch.func.grad(loss)(params)
        return {n: p - r * grads[n] for (n, p), r in zip(params.items(), rates, strict=True)}, None

    init = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    return Scan(step, init, None, [rates, *init.values()], length=length)


@program("learned optimiser: an LSTM that gives updates")
def _(length: int) -> Scan:
    opt, out, a = nn.LSTMCell(1, 5), nn.Linear(5, 1), torch.randn(3, 3)

    def step(state: Any, _: Any) -> Any:
        theta, hc = state
        with torch.enable_grad():
            leaf = theta.detach().requires_grad_()
            grad = torch.autograd.grad((a @ leaf - 1).square().sum(), leaf)[0]
        hc = opt(grad[:, None].detach(), hc)
        theta = theta + 0.1 * out(hc[0])[:, 0]
        return (theta, hc), (a @ theta - 1).square().sum()

    return Scan(step, (torch.zeros(3), (torch.zeros(3, 5), torch.zeros(3, 5))), None, [opt, out], length=length)


@program("unrolled gradient descent with momentum on a bilevel problem")
def _(length: int) -> Scan:
    log_lam, x, y = nn.Parameter(torch.tensor(-2.0)), torch.randn(6, 3), torch.randn(6)

    def step(state: Any, _: Any) -> Any:
        w, m = state
        grad = x.T @ (x @ w - y) / 6 + log_lam.exp() * w
        m = 0.9 * m + grad
        return (w - 0.1 * m, m), None

    return Scan(step, (torch.zeros(3), torch.zeros(3)), None, [log_lam], length=length)


@program("test-time training: fast weights with an inner loss")
def _(length: int) -> Scan:
    k, v, q, xs = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3), torch.randn(length, 2, 4)

    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        grad = k(x).t() @ (k(x) @ w - v(x))
        w = w - 0.1 * grad
        return w, q(x) @ w

    return Scan(step, torch.zeros(3, 3), xs, [k, v, q])


@program("three-factor learning with eligibility traces")
def _(length: int) -> Scan:
    w, xs = nn.Parameter(torch.randn(4, 3) / 2), torch.rand(length, 2, 4)

    def step(state: Any, x: torch.Tensor) -> Any:
        v, trace, fast = state
        v = 0.9 * v + x @ (w + fast)
        s = v.sigmoid()
        trace = 0.8 * trace + torch.einsum("bi,bj->ij", x, s * (1 - s))
        return (v, trace, fast + 0.01 * trace * (s.mean() - 0.5)), s

    return Scan(step, (torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(4, 3)), xs, [w])


@program("Hebbian plasticity in buffers")
def _(length: int) -> For:
    class Plastic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.eta = nn.Parameter(torch.randn(4, 4) / 3), nn.Parameter(torch.tensor(0.1))
            self.register_buffer("hebb", torch.zeros(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(x @ (self.w + self.hebb))
            self.hebb = (1 - self.eta) * self.hebb + self.eta * x.t() @ y
            return y

    net = Plastic()
    return For(net, (torch.randn(length, 2, 4),), [net])


@program("a local classifier trained by backward inside of the step")
def _(length: int) -> For:
    layer, local = nn.Linear(4, 4), nn.Linear(4, 1)

    def step(x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(layer(x))
        local(h.detach()).square().mean().backward()
        return h

    return For(step, (torch.randn(length, 2, 4),), [layer, local])


# --- reinforcement learning


@program("policy gradient with log probabilities")
def _(length: int) -> Scan:
    policy = nn.Linear(3, 4)

    def step(s: torch.Tensor, _: Any) -> Any:
        dist = torch.distributions.Categorical(logits=policy(s))
        a = dist.sample()
        s = 0.9 * s + F.one_hot(a, 4)[:, :3].float()
        return s, (dist.log_prob(a), s.sum(-1).detach(), dist.entropy())

    return Scan(step, torch.zeros(2, 3), None, [policy], length=length)


@program("actor and critic with resets where episodes end", refused='use "sum"')
def _(length: int) -> Scan:
    body, pi, value = nn.GRUCell(3, 5), nn.Linear(5, 2), nn.Linear(5, 1)
    obs, done = torch.randn(length, 2, 3), torch.rand(length, 2) < 0.2

    def step(h: torch.Tensor, x: Any) -> Any:
        o, d = x
        h = body(o, h * (~d)[:, None])
        a = torch.distributions.Categorical(logits=pi(h)).sample()
        return h, {"value": value(h)[:, 0], "action": a}

    return Scan(step, torch.zeros(2, 5), (obs, done), [body, pi, value])


@program("generalised advantages, from the last step to the first")
def _(length: int) -> Scan:
    values = nn.Parameter(torch.randn(length, 2))

    def step(acc: torch.Tensor, x: Any) -> Any:
        r, v = x
        acc = r - v + 0.95 * acc
        return acc, acc

    return Scan(step, torch.zeros(2), (torch.randn(length, 2), values), [values])


@program("world model imagined ahead with straight-through codes")
def _(length: int) -> Scan:
    rnn, prior, actor = nn.GRUCell(6, 5), nn.Linear(5, 4), nn.Linear(5, 2)

    def step(state: Any, _: Any) -> Any:
        h, z = state
        a = torch.tanh(actor(h) + 0.1 * torch.randn(2, 2))
        h = rnn(torch.cat([z, a], 1), h)
        probs = prior(h).softmax(-1)
        one_hot = F.one_hot(torch.multinomial(probs, 1)[:, 0], 4).float()
        return (h, one_hot + probs - probs.detach()), (h, a)

    return Scan(step, (torch.zeros(2, 5), torch.zeros(2, 4)), None, [rnn, prior, actor], length=length)


@program("differentiable model predictive control")
def _(length: int) -> Scan:
    dyn, us = nn.Linear(3, 2), nn.Parameter(torch.zeros(length, 1))

    def step(x: torch.Tensor, u: torch.Tensor) -> Any:
        x = x + 0.1 * dyn(torch.cat([x, u]))
        return x, x.square().sum() + 0.1 * u.square().sum()

    return Scan(step, torch.ones(2), us, [dyn, us])


# --- how people write


@program("losses as Python numbers beside tensors", outputs_vary=True)
def _(length: int) -> For:
    lin = nn.Linear(3, 3)

    def step(x: torch.Tensor) -> Any:
        y = lin(x)
        return y, y.square().mean().item()

    return For(step, (torch.randn(length, 2, 3),), [lin])


@program("a growing list outside, guarded as the documentation says")
def _(length: int) -> For:
    lin, rec = nn.Linear(3, 3), []

    def step(x: torch.Tensor) -> Any:
        y = lin(x)
        if not lt.is_recomputing():
            rec.append(y.detach().mean())
        return y

    return For(step, (torch.randn(length, 2, 3),), [lin])


@program(
    "a counter outside", refused="does not do what it did|run again, raised", instead=lambda length: _counted(length)
)
def _(length: int) -> For:
    lin, rates, turns = nn.Linear(3, 3), torch.rand(length), count()
    return For(lambda x: lin(x) * rates[next(turns)], (torch.randn(length, 2, 3),), [lin])


def _counted(length: int) -> Scan:
    lin, rates = nn.Linear(3, 3), torch.rand(length)
    return Scan(lambda t, x: (t + 1, lin(x) * rates[t]), 0, torch.randn(length, 2, 3), [lin])


@program("an iterator outside", refused="run again", instead=lambda length: _zipped(length))
def _(length: int) -> For:
    lin, batches = nn.Linear(3, 3), iter(torch.randn(length, 2, 3))
    return For(lambda _: lin(next(batches)), (torch.zeros(length),), [lin])


def _zipped(length: int) -> For:
    lin = nn.Linear(3, 3)
    return For(lin, (torch.randn(length, 2, 3),), [lin])


@program("items of a list that is popped", refused="run again", instead=lambda length: _zipped(length))
def _(length: int) -> For:
    lin, items = nn.Linear(3, 3), list(torch.randn(length, 2, 3))
    return For(lambda _: lin(items.pop()), (torch.zeros(length),), [lin])


@program("inputs that are fetched by Steps")
def _(length: int) -> Scan:
    cell, items = nn.GRUCell(3, 4), [torch.randn(2, 3) for _ in range(length)]

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = cell(x, h)
        return h, h

    return Scan(step, torch.zeros(2, 4), lt.Steps(items), [cell], length=length)


@program("hooks that clip the gradients of all parameters, some of them unused")
def _(length: int) -> Scan:
    cell, unused = nn.GRUCell(3, 4), nn.Linear(2, 2)
    net = nn.ModuleDict({"cell": cell, "unused": unused})
    for p in net.parameters():
        p.register_hook(lambda g: g.clamp(-0.1, 0.1))

    class Stepping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, h: torch.Tensor, x: torch.Tensor) -> Any:
            h = self.net["cell"](x, h)
            return h, h

    step = Stepping()
    return Scan(step, torch.zeros(2, 4), torch.randn(length, 2, 3), [step])


@program("gradients of states are clipped by hooks inside of the step")
def _(length: int) -> Scan:
    cell, xs = nn.GRUCell(3, 4), torch.randn(length, 2, 3)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = cell(x, h)
        if h.requires_grad:
            h.register_hook(lambda g: g.clamp(-0.01, 0.01))
        return h, h

    return Scan(step, torch.zeros(2, 4), xs, [cell])


@program("shared weights before, in and after the loop")
def _(length: int) -> Scan:
    w, xs = nn.Parameter(torch.randn(3, 3) / 2), torch.randn(length, 2, 3)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.tanh(h @ w + x)
        return h, h

    return Scan(step, torch.zeros(2, 3) + torch.ones(2, 3) * 0.1, xs, [w])


@program("state in double precision beside single precision")
def _(length: int) -> Scan:
    w, xs = nn.Parameter(torch.randn(3)), torch.randn(length, 3)

    def step(acc: torch.Tensor, x: torch.Tensor) -> Any:
        acc = acc * 0.9 + (x * w).double()
        return acc, acc.float()

    return Scan(step, torch.zeros(3, dtype=torch.float64), xs, [w])


@program("integer and boolean states", refused='use "sum"')
def _(length: int) -> Scan:
    lin, xs = nn.Linear(3, 3), torch.randn(length, 2, 3)

    def step(state: Any, x: torch.Tensor) -> Any:
        counts, seen, h = state
        y = lin(x + h)
        fired = y > 0
        return (counts + fired.long(), seen | fired, y.tanh() * (~seen)), (y, counts)

    init = (torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2, 3))
    return Scan(step, init, xs, [lin])


@program("first state a Python number")
def _(length: int) -> Scan:
    lin, xs = nn.Linear(3, 3), torch.randn(length, 2, 3)

    def step(v: Any, x: torch.Tensor) -> Any:
        v = 0.9 * v + lin(x)
        return v, v.sigmoid()

    return Scan(step, 0.0, xs, [lin])


@program("cache in a dictionary that the first step fills")
def _(length: int) -> Scan:
    enc, lin, xs = nn.Linear(3, 3), nn.Linear(3, 3), torch.randn(length, 2, 3)

    def step(cache: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
        if "h" not in cache:
            cache = {"h": enc(x)}
        h = torch.tanh(lin(x) + cache["h"])
        return {"h": h}, h

    return Scan(step, {}, xs, [enc, lin])


@program("complex amplitudes of a quantum circuit")
def _(length: int) -> Scan:
    angles = nn.Parameter(torch.randn(length, 2))

    def step(psi: torch.Tensor, a: torch.Tensor) -> Any:
        c, s = torch.cos(a[0] / 2), torch.sin(a[0] / 2)
        gate = torch.stack([torch.stack([c + 0j, -1j * s]), torch.stack([-1j * s, c + 0j])])
        psi = gate @ psi * torch.exp(1j * a[1])
        return psi, psi.abs().square()

    return Scan(step, torch.tensor([1.0 + 0j, 0]), angles, [angles])


@program("backward of only some outputs, nested in structures", refused='use "sum"')
def _(length: int) -> Scan:
    lin, xs = nn.Linear(3, 3), torch.randn(length, 2, 3)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.tanh(lin(x) + h)
        return h, {"loss": h.square().mean(), "info": (h.detach(), [h.argmax(-1), None])}

    return Scan(step, torch.zeros(2, 3), xs, [lin])


@program("nothing needs a gradient")
def _(length: int) -> Scan:
    lin, xs = nn.Linear(3, 3).requires_grad_(False), torch.randn(length, 2, 3)
    return Scan(lambda h, x: (torch.tanh(lin(x) + h), h), torch.zeros(2, 3), xs, [lin])
