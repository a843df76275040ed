"""Physics, world models, reinforcement learning, filters, samplers and learning rules, in the words of their papers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributions import Categorical, Independent, Normal, OneHotCategoricalStraightThrough, kl_divergence
from torch.func import functional_call, jacrev, jvp, vjp, vmap
from torch.nn import functional as F  # noqa: N812  (as everybody does)

from tests.torch.loops.programs.program import For, Scan, While, program

# --- physics


@program("cloth: springs between neighbours, damping, a ball that pushes")
def _(length: int) -> Scan:
    stiffness, drag = nn.Parameter(torch.tensor(20.0)), nn.Parameter(torch.tensor(0.1))
    grid = torch.stack(torch.meshgrid(torch.arange(3.0), torch.arange(3.0), torch.zeros(1), indexing="ij"), -1)[:, :, 0]
    pinned = torch.zeros(3, 3, 1)
    pinned[0] = 1.0

    def pull(p: torch.Tensor, axis: int) -> Any:
        d = p.diff(dim=axis)
        rest = d.norm(dim=-1, keepdim=True)
        f = stiffness * (rest - 1.0) * d / rest.clamp(min=1e-6)
        zero = torch.zeros_like(f.narrow(axis, 0, 1))
        return torch.cat([f, zero], axis) - torch.cat([zero, f], axis)

    def step(state: Any, wind: torch.Tensor) -> Any:
        p, v = state
        force = pull(p, 0) + pull(p, 1) + wind - drag * v
        v = (v + 0.01 * force) * (1 - pinned)
        p = p + 0.01 * v
        out = p - torch.tensor([1.0, 1.0, -1.0])
        away = out.norm(dim=-1, keepdim=True)
        p = torch.where(away < 1.2, torch.tensor([1.0, 1.0, -1.0]) + out / away * 1.2, p)
        return (p, v), p[..., 2].mean()

    return Scan(step, (grid.clone().requires_grad_(), torch.zeros(3, 3, 3)), torch.randn(length, 3), [stiffness, drag])


@program("cart pole under a policy, episodes that end are reset by a mask", outputs_vary=True)
def _(length: int) -> Scan:
    policy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def step(s: torch.Tensor, noise: torch.Tensor) -> Any:
        x, v, th, w = s.unbind(-1)
        force = 10 * torch.tanh(policy(s)[:, 0]) + noise
        temp = (force + 0.05 * w**2 * th.sin()) / 1.1
        acc = (9.8 * th.sin() - th.cos() * temp) / (0.5 * (4 / 3 - 0.1 * th.cos() ** 2 / 1.1))
        new = torch.stack(
            [x + 0.02 * v, v + 0.02 * (temp - 0.05 * acc * th.cos() / 1.1), th + 0.02 * w, w + 0.02 * acc], -1
        )
        done = (new[:, 2].abs() > 0.2) | (new[:, 0].abs() > 2.4)
        return torch.where(done[:, None], torch.zeros_like(new), new), {"reward": 1 - th**2, "done": done}

    return Scan(step, torch.randn(3, 4) * 0.05, torch.randn(length, 3), [policy])


@program("planning by gradient steps on actions inside of each control step")
def _(length: int) -> Scan:
    model, cost = nn.Linear(3, 2), nn.Parameter(torch.ones(2))

    def step(state: Any, target: torch.Tensor) -> Any:
        x, plan = state
        actions = plan
        for _ in range(2):
            actions = actions.detach().requires_grad_() if not actions.requires_grad else actions
            y, total = x, torch.zeros(())
            for a in actions.unbind(0):
                y = y + 0.1 * torch.tanh(model(torch.cat([y, a])))
                total = total + (cost * (y - target) ** 2).sum() + 0.01 * a.square().sum()
            (g,) = torch.autograd.grad(total, actions, create_graph=True)
            actions = actions - 0.5 * g
        x = x + 0.1 * torch.tanh(model(torch.cat([x, actions[0]])))
        return (x, torch.cat([actions[1:], actions[-1:]])), (x - target).square().sum()

    return Scan(step, (torch.zeros(2), torch.zeros(3, 1)), torch.randn(length, 2), [model, cost])


@program("Lenia: a growth function of a convolution by FFT")
def _(length: int) -> Scan:
    mu, kernel = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.rand(8, 8))

    def step(world: torch.Tensor, _: Any) -> Any:
        u = torch.fft.ifft2(torch.fft.fft2(world) * torch.fft.fft2(kernel.softmax(-1) / 8)).real
        growth = 2 * torch.exp(-((u - mu) ** 2) / 0.045) - 1
        return (world + 0.1 * growth).clamp(0, 1), world.mean()

    return Scan(step, torch.rand(8, 8), None, [mu, kernel], length=length)


@program("growing neural cellular automaton with alive masks and stochastic updates")
def _(length: int) -> Scan:
    net = nn.Sequential(nn.Conv2d(12, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1, bias=False))
    sobel = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]]) / 8
    filters = torch.stack([torch.tensor([[0.0, 0, 0], [0, 1, 0], [0, 0, 0]]), sobel, sobel.T]).repeat(4, 1, 1)[:, None]

    def alive(x: torch.Tensor) -> Any:
        return F.max_pool2d(x[:, 3:4], 3, 1, 1) > 0.1

    def step(x: torch.Tensor, _: Any) -> Any:
        before = alive(x)
        dx = net(F.conv2d(x, filters, padding=1, groups=4))
        x = x + dx * (torch.rand(len(x), 1, 6, 6) < 0.5)
        return x * (before & alive(x)), None

    start = torch.zeros(1, 4, 6, 6)
    start[:, :, 3, 3] = 1.0
    return Scan(step, start, None, [net], length=length)


@program("shallow water on a staggered grid, in place on clones")
def _(length: int) -> Scan:
    h0, g = torch.ones(6, 6), nn.Parameter(torch.tensor(9.8))
    h0[2:4, 2:4] += 0.1

    def step(s: dict[str, torch.Tensor], _: Any) -> Any:
        u, v, h = s["u"].clone(), s["v"].clone(), s["h"].clone()
        u[:, 1:-1] -= 0.01 * g * (h[:, 1:] - h[:, :-1])
        v[1:-1] -= 0.01 * g * (h[1:] - h[:-1])
        h -= 0.01 * (u.diff(dim=1) + v.diff(dim=0))
        return {"u": u, "v": v, "h": h}, h.square().mean()

    start = {"u": torch.zeros(6, 7), "v": torch.zeros(7, 6), "h": h0.requires_grad_(False)}
    return Scan(step, start, None, [g], length=length)


@program("rigid bodies: quaternions normalised, collisions by clamps")
def _(length: int) -> Scan:
    torque, bounce = nn.Parameter(torch.randn(3)), nn.Parameter(torch.tensor(0.8))

    def times(q: torch.Tensor, w: torch.Tensor) -> Any:
        a, v = q[:1], q[1:]
        return torch.cat([-(v @ w)[None], a * w + torch.linalg.cross(v, w)])

    def step(s: Any, _: Any) -> Any:
        (x, v), (q, w) = s
        v = v + 0.02 * torch.tensor([0.0, 0.0, -9.8])
        x = x + 0.02 * v
        hit = x[2] < 0
        v = torch.where(hit, v * torch.stack([torch.ones(()), torch.ones(()), -bounce]), v)
        w = w + 0.02 * torque
        q = F.normalize(q + 0.01 * times(q, w), dim=0)
        return ((torch.cat([x[:2], x[2:].clamp(min=0)]), v), (q, w)), (x, q)

    start = ((torch.tensor([0.0, 0, 1]), torch.zeros(3)), (torch.tensor([1.0, 0, 0, 0]), torch.zeros(3)))
    return Scan(step, start, None, [torque, bounce], length=length)


@program("Kuramoto oscillators with an adaptive coupling")
def _(length: int) -> Scan:
    omega, k = nn.Parameter(torch.randn(5)), nn.Parameter(torch.ones(5, 5))

    def step(s: Any, _: Any) -> Any:
        theta, a = s
        d = theta[None] - theta[:, None]
        return (theta + 0.05 * (omega + (a * k * d.sin()).mean(1)), a + 0.01 * (d.cos() - a)), torch.exp(
            1j * theta
        ).mean()

    return Scan(step, (torch.rand(5) * 6, torch.ones(5, 5)), None, [omega, k], length=length)


@program("ray marching: a distance field until all rays have hit", outputs_vary=True)
def _(length: int) -> While:
    net, d = nn.Sequential(nn.Linear(3, 8), nn.Softplus(), nn.Linear(8, 1)), F.normalize(torch.randn(5, 3), dim=-1)

    def body(s: Any) -> Any:
        t, hit = s
        p = t[:, None] * d
        far = p.norm(dim=-1) - 1.0 + 0.01 * net(p)[:, 0]
        return torch.where(hit, t, t + 0.5 * far.abs()), hit | (far.abs() < 1e-3)

    return While(
        lambda s: not bool(s[1].all()),
        body,
        (torch.full((5,), 2.0), torch.zeros(5, dtype=torch.bool)),
        [net],
        most=length,
    )


# --- solvers of others, as far as they are a step


@program("neural ODE with an adjoint-free RK4 and a running kinetic energy")
def _(length: int) -> Scan:
    f = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))

    def field(t: torch.Tensor, y: torch.Tensor) -> Any:
        return f(torch.cat([y, t.expand(len(y), 1)], -1))

    def step(s: Any, dt: torch.Tensor) -> Any:
        t, y, energy = s
        k1 = field(t, y)
        k2 = field(t + dt / 2, y + dt / 2 * k1)
        k3 = field(t + dt / 2, y + dt / 2 * k2)
        k4 = field(t + dt, y + dt * k3)
        return (t + dt, y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4), energy + dt * k1.square().sum(-1)), None

    return Scan(step, (torch.zeros(()), torch.randn(3, 2), torch.zeros(3)), torch.full((length,), 0.1), [f])


@program("continuous normalising flow with a trace by vmap of a vjp", refused="leave out lean=True")
def _(length: int) -> Scan:
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 2))

    def trace(z: torch.Tensor) -> Any:
        jacobian = vmap(jacrev(lambda y: functional_call(net, dict(net.named_parameters()), (y,))))(z)
        return jacobian.diagonal(dim1=-2, dim2=-1).sum(-1)

    def step(s: Any, dt: torch.Tensor) -> Any:
        z, log_p = s
        return (z + dt * net(z), log_p - dt * trace(z)), z

    return Scan(step, (torch.randn(3, 2), torch.zeros(3)), torch.full((length,), 0.1), [net])


@program("Jacobian-vector products along the path by torch.func.jvp")
def _(length: int) -> Scan:
    w = nn.Parameter(torch.randn(3, 3) / 2)

    def step(s: Any, x: torch.Tensor) -> Any:
        h, tangent = s
        h, tangent, *_ = jvp(lambda h: torch.tanh(h @ w + x), (h,), (tangent,))
        return (h, tangent), tangent.norm()

    return Scan(step, (torch.zeros(2, 3), torch.ones(2, 3)), torch.randn(length, 2, 3), [w])


@program("Gauss-Newton steps with vjp and a linear solve", refused="leave out lean=True")
def _(length: int) -> Scan:
    a, b = nn.Parameter(torch.randn(4, 2)), torch.randn(4)

    def step(x: torch.Tensor, damping: torch.Tensor) -> Any:
        r, pull, *_ = vjp(lambda x: torch.tanh(a @ x) - b, x)
        (jtr,) = pull(r)
        j = jacrev(lambda x: torch.tanh(a @ x))(x)
        x = x - torch.linalg.solve(j.T @ j + damping * torch.eye(2), jtr)
        return x, r.square().sum()

    return Scan(step, torch.zeros(2), torch.linspace(1, 0.1, length), [a])


# --- world models and reinforcement learning


@dataclass
class Belief:
    """What a recurrent state space model carries."""

    deter: torch.Tensor
    stoch: torch.Tensor
    logits: torch.Tensor


@program("Dreamer: recurrent states, straight-through codes, balanced divergence with free nats")
def _(length: int) -> Scan:
    cell, prior, post = nn.GRUCell(8, 6), nn.Linear(6, 6), nn.Linear(10, 6)
    inp, decoder = nn.Linear(8, 8), nn.Linear(12, 4)
    actions, embeds = torch.randn(length, 3, 2), torch.randn(length, 3, 4)
    first = torch.rand(length, 3) < 0.1

    def dist(logits: torch.Tensor) -> Any:
        mixed = 0.99 * logits.view(-1, 2, 3).softmax(-1) + 0.01 / 3
        return Independent(OneHotCategoricalStraightThrough(probs=mixed), 1)

    def step(s: Belief, x: Any) -> Any:
        action, embed, is_first = x
        keep = (~is_first)[:, None].float()
        h = cell(F.elu(inp(torch.cat([s.stoch * keep, action * keep], -1))), s.deter * keep)
        before, after = prior(h), post(torch.cat([h, embed], -1))
        z = dist(after).rsample().flatten(1)
        dynamics = kl_divergence(dist(after.detach()), dist(before)).clamp(min=0.1)
        representation = kl_divergence(dist(after), dist(before.detach())).clamp(min=0.1)
        error = (decoder(torch.cat([h, z], -1)) - embed).square().sum(-1)
        return Belief(h, z, after), error + 0.5 * dynamics + 0.1 * representation

    start = Belief(torch.zeros(3, 6), torch.zeros(3, 6), torch.zeros(3, 6))
    return Scan(step, start, (actions, embeds, first), [cell, prior, post, inp, decoder])


@program("imagined returns by lambda values, from the end, with a detached target network")
def _(length: int) -> Scan:
    value, target = nn.Linear(4, 1), nn.Linear(4, 1).requires_grad_(False)
    feats, rewards = torch.randn(length, 3, 4, requires_grad=True), torch.randn(length, 3)

    def step(after: torch.Tensor, x: Any) -> Any:
        feat, reward = x
        ret = reward + 0.99 * (0.05 * target(feat)[:, 0] + 0.95 * after)
        return ret, 0.5 * (value(feat.detach())[:, 0] - ret.detach()).square() - ret

    return Scan(step, torch.zeros(3), (feats, rewards), [value, target, feats])


@program("A2C: actions sampled, log probabilities, entropies and values as outputs", outputs_vary=True)
def _(length: int) -> Scan:
    body, actor, critic = nn.LSTMCell(3, 6), nn.Linear(6, 4), nn.Linear(6, 1)
    embed = nn.Embedding(4, 3)

    def step(state: Any, done: torch.Tensor) -> Any:
        (h, c), obs = state
        keep = (~done).float()[:, None]
        h, c = body(obs, (h * keep, c * keep))
        pi = Categorical(logits=actor(h))
        action = pi.sample()
        obs = (embed(action) + 0.5 * obs).detach()
        return ((h, c), obs), (action, pi.log_prob(action), pi.entropy(), critic(h)[:, 0])

    start = ((torch.zeros(2, 6), torch.zeros(2, 6)), torch.randn(2, 3))
    return Scan(step, start, torch.rand(length, 2) < 0.2, [body, actor, critic])


@program("V-trace targets in reverse with clipped importance weights")
def _(length: int) -> Scan:
    value, logits = torch.randn(length, 3, requires_grad=True), torch.randn(length, 3, 4, requires_grad=True)
    xs = {
        "r": torch.randn(length, 3),
        "v": value,
        "pi": logits,
        "mu": torch.randn(length, 3),
        "d": torch.rand(length, 3) < 0.1,
    }

    def step(state: Any, x: dict[str, torch.Tensor]) -> Any:
        acc, after = state
        rho = (x["pi"].log_softmax(-1)[:, 0] - x["mu"]).exp().clamp(max=1.0)
        gamma = 0.99 * (~x["d"]).float()
        acc = rho * (x["r"] + gamma * after - x["v"]) + gamma * rho * acc
        return (acc, x["v"]), (acc + x["v"]).detach() - x["v"]

    return Scan(step, (torch.zeros(3), torch.zeros(3)), xs, [value, logits])


@program("PPO rollout with Gaussian actions and a running normaliser of observations")
def _(length: int) -> For:
    class Agent(nn.Module):
        mean: torch.Tensor
        var: torch.Tensor
        count: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.net, self.log_std = nn.Linear(3, 2), nn.Parameter(torch.zeros(2))
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("var", torch.ones(3))
            self.register_buffer("count", torch.tensor(1e-4))
            self.obs = torch.randn(4, 3)

        @torch.no_grad()
        def normalise(self, x: torch.Tensor) -> Any:
            total = self.count + len(x)
            delta = x.mean(0) - self.mean
            self.mean += delta * len(x) / total
            self.var.copy_((self.var * self.count + x.var(0) * len(x)) / total)
            self.count.copy_(total)
            return (x - self.mean) / (self.var + 1e-8).sqrt()

        def forward(self, noise: torch.Tensor) -> Any:
            seen = self.normalise(self.obs)
            pi = Normal(self.net(seen), self.log_std.exp())
            action = pi.rsample()
            self.obs = self.obs * 0.9 + noise + F.pad(action, (0, 1)).detach()
            return pi.log_prob(action.detach()).sum(-1), -self.obs.square().sum(-1)

    agent = Agent()
    return For(agent, (torch.randn(length, 4, 3),), [agent])


@program("successor features with eligibility traces and TD errors")
def _(length: int) -> Scan:
    phi, w = nn.Linear(4, 5), nn.Parameter(torch.randn(5))

    def step(s: Any, x: Any) -> Any:
        trace, last = s
        obs, reward = x
        f = torch.relu(phi(obs))
        delta = reward + 0.95 * (f @ w).detach() - last @ w
        trace = 0.9 * 0.95 * trace + last.detach()
        return (trace, f), delta**2 + 0.01 * (trace * w).sum(-1)

    xs = (torch.randn(length, 2, 4), torch.randn(length, 2))
    return Scan(step, (torch.zeros(2, 5), torch.zeros(2, 5)), xs, [phi, w])


# --- filters and samplers


@program("particle filter: soft resampling, indices sorted, weights in logs")
def _(length: int) -> Scan:
    move, see = nn.Linear(2, 2), nn.Linear(2, 1)

    def step(s: Any, obs: torch.Tensor) -> Any:
        x, log_w = s
        x = move(x) + 0.1 * torch.randn_like(x)
        log_w = log_w + Normal(see(x)[:, 0], 0.5).log_prob(obs)
        evidence = torch.logsumexp(log_w, 0)
        w = (log_w - evidence).exp()
        q = 0.5 * w + 0.5 / len(w)
        places = torch.multinomial(q, len(w), replacement=True).sort().values
        return (x[places], (w / q).log()[places] - math.log(len(w))), evidence

    return Scan(step, (torch.randn(8, 2), torch.full((8,), -math.log(8))), torch.randn(length), [move, see])


@program("unscented Kalman filter with a Cholesky factor for its state")
def _(length: int) -> Scan:
    f, h = nn.Linear(2, 2), nn.Linear(2, 1)
    weights = torch.tensor([0.0, 0.25, 0.25, 0.25, 0.25])

    def step(s: Any, z: torch.Tensor) -> Any:
        m, chol = s
        spread = math.sqrt(2) * chol.T
        points = f(torch.cat([m[None], m + spread, m - spread]))
        m = weights @ points
        d = points - m
        p = (weights[:, None] * d).T @ d + 0.1 * torch.eye(2)
        y = h(points)
        e = y - weights @ y
        gain = ((weights[:, None] * d).T @ e) / ((weights[:, None] * e).T @ e + 0.1)
        m, p = m + gain[:, 0] * (z - weights @ y), p - 0.1 * gain @ gain.T
        return (m, torch.linalg.cholesky(p + 1e-3 * torch.eye(2))), m

    return Scan(step, (torch.zeros(2), torch.eye(2)), torch.randn(length, 1), [f, h])


@program("hidden Markov model: Viterbi path with back pointers as integers", outputs_vary=True)
def _(length: int) -> Scan:
    trans, emit = nn.Parameter(torch.randn(3, 3)), torch.randn(length, 3, requires_grad=True)

    def step(score: torch.Tensor, e: torch.Tensor) -> Any:
        best, back = (score[:, None] + trans.log_softmax(-1)).max(0)
        return best + e, back

    return Scan(step, torch.zeros(3), emit, [trans, emit])


@program("annealed importance sampling with Metropolis-adjusted Langevin moves")
def _(length: int) -> Scan:
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))

    def energy(x: torch.Tensor, beta: torch.Tensor) -> Any:
        return beta * net(x)[:, 0] + 0.5 * x.square().sum(-1)

    def drift(x: torch.Tensor, beta: torch.Tensor) -> Any:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            return torch.autograd.grad(energy(x, beta).sum(), x, create_graph=True)[0]

    def step(s: Any, betas: torch.Tensor) -> Any:
        x, log_w = s
        log_w = log_w + energy(x, betas[0]) - energy(x, betas[1])
        new = x - 0.05 * drift(x, betas[1]) + 0.3 * torch.randn_like(x)
        accept = torch.rand(len(x)) < (energy(x, betas[1]) - energy(new, betas[1])).exp()
        return (torch.where(accept[:, None], new, x), log_w), accept.float().mean()

    ladder = torch.linspace(0, 1, length + 1)
    return Scan(step, (torch.randn(4, 2), torch.zeros(4)), torch.stack([ladder[:-1], ladder[1:]], -1), [net])


@program("DDPM with self-conditioning and clipped samples, timesteps as inputs")
def _(length: int) -> Scan:
    net, time = nn.Linear(8 + 4, 4), nn.Embedding(60, 4)

    def step(s: Any, t: torch.Tensor) -> Any:
        x, guess = s
        noise = net(torch.cat([x, guess.detach(), time(t).expand(len(x), 4)], -1))
        guess = (x - 0.6 * noise).clamp(-1, 1)
        x = 0.9 * x + 0.1 * guess + (0.1 * torch.randn_like(x) if t > 0 else 0)
        return (x, guess), None

    return Scan(step, (torch.randn(3, 4), torch.zeros(3, 4)), torch.arange(length).flip(0), [net, time])


@program("consistency of two samplers of one network, noise of a generator made in the module")
def _(length: int) -> For:
    class Sampler(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.g = nn.Linear(4, 4), torch.Generator().manual_seed(5)
            self.x, self.y = torch.randn(2, 4), torch.randn(2, 4)

        def forward(self, sigma: torch.Tensor) -> Any:
            noise = torch.randn(2, 4, generator=self.g)
            self.x = self.x + sigma * (self.net(self.x) + noise)
            self.y = self.y + sigma * (self.net(self.y) - noise)
            return (self.x - self.y).square().sum()

    net = Sampler()
    return For(net, (torch.linspace(0.3, 0.01, length),), [net])


# --- learning rules


@program("e-prop: eligibility vectors, learning signals and a gradient set by hand")
def _(length: int) -> Scan:
    w_in, w_out = nn.Parameter(torch.randn(4, 5) / 2), nn.Parameter(torch.randn(5, 2) / 2)
    target = torch.randn(length, 3, 2)

    def step(s: Any, x: Any) -> Any:
        v, trace, grad = s
        pulse, wanted = x
        v = 0.9 * v + pulse @ w_in
        z = (v > 0.5).float()
        pseudo = (0.3 * (1 - (v - 0.5).abs()).clamp(min=0)).detach()
        trace = 0.9 * trace + pulse
        y = z @ w_out + (v * pseudo) @ w_out
        signal = (y - wanted).detach() @ w_out.detach().T
        grad = grad + torch.einsum("bi,bj->ij", trace, signal * pseudo)
        return ((v - z.detach()).detach(), trace, grad), (y - wanted).square().mean()

    start = (torch.zeros(3, 5), torch.zeros(3, 4), torch.zeros(4, 5))
    return Scan(step, start, (torch.rand(length, 3, 4).round(), target), [w_in, w_out])


@program("real-time recurrent learning: an influence matrix in the carry")
def _(length: int) -> Scan:
    w = nn.Parameter(torch.randn(3, 3) / 2)

    def step(s: Any, x: torch.Tensor) -> Any:
        h, influence = s
        new = torch.tanh(w @ h + x)
        d = 1 - new.detach() ** 2
        direct = torch.einsum("ik,j->ikj", torch.eye(3), h.detach()).reshape(3, 9)
        return (new.detach(), d[:, None] * (direct + w.detach() @ influence)), new.sum()

    return Scan(step, (torch.zeros(3), torch.zeros(3, 9)), torch.randn(length, 3), [w])


@program(
    "MAML: inner Adam on parameters in a dictionary, by functional_call and torch.func.grad",
    refused="leave out lean=True",
)
def _(length: int) -> Scan:
    net, rate = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)), nn.Parameter(torch.tensor(0.05))
    data = (torch.randn(length, 5, 2), torch.randn(length, 5, 1))
    start = {name: p.clone() for name, p in net.named_parameters()}

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> Any:
        return F.mse_loss(functional_call(net, params, (x,)), y)

    def step(s: Any, batch: Any) -> Any:
        params, m, t = s
        grads = torch.func.grad(loss)(params, *batch)
        m = {k: 0.9 * m[k] + 0.1 * g for k, g in grads.items()}
        params = {k: p - rate * m[k] / (1 - 0.9 ** (t + 1)) for k, p in params.items()}
        return (params, m, t + 1), loss(params, *batch)

    return Scan(step, (start, {k: torch.zeros_like(p) for k, p in start.items()}, 0), data, [net, rate])


@program("hyperparameter optimisation: the learned rate of SGD with momentum, unrolled")
def _(length: int) -> Scan:
    log_rate, momentum = nn.Parameter(torch.tensor(-3.0)), nn.Parameter(torch.tensor(0.5))
    w0, a = torch.randn(4), torch.randn(6, 4)

    def step(s: Any, target: torch.Tensor) -> Any:
        w, v = s
        with torch.enable_grad():
            leaf = w if w.requires_grad else w.detach().requires_grad_()
            value = (a @ leaf - target).square().mean()
            (g,) = torch.autograd.grad(value, leaf, create_graph=True)
        v = momentum.sigmoid() * v + g
        return (w - log_rate.exp() * v, v), value

    return Scan(step, (w0, torch.zeros(4)), torch.randn(length, 6), [log_rate, momentum])


@program("evolution strategy with mirrored noise, ranks and a moving average", outputs_vary=True)
def _(length: int) -> Scan:
    goal = nn.Parameter(torch.randn(3))

    def step(s: Any, _: Any) -> Any:
        mean, best = s
        eps = torch.randn(4, 3)
        eps = torch.cat([eps, -eps])
        scores = -(mean + 0.1 * eps - goal).square().sum(-1)
        ranks = scores.argsort().argsort().float() / 7 - 0.5
        mean = mean + 0.2 * (ranks[:, None] * eps).mean(0) + 0.01 * (goal - mean)
        return (mean, torch.maximum(best, scores.max())), ranks.argmax()

    return Scan(step, (torch.zeros(3), torch.tensor(-1e9)), None, [goal], length=length)


@program("predictive coding: latents relaxed in an inner loop that detaches")
def _(length: int) -> Scan:
    w = nn.Linear(3, 4)

    def step(z: torch.Tensor, x: torch.Tensor) -> Any:
        mu = z.detach()
        for _ in range(3):
            mu = mu.detach().requires_grad_()
            with torch.enable_grad():
                energy = (x - w(torch.tanh(mu))).square().sum() + 0.1 * (mu - z.detach()).square().sum()
                (g,) = torch.autograd.grad(energy, mu)
            mu = (mu - 0.1 * g).detach()
        return 0.5 * z + 0.5 * mu, (x - w(torch.tanh(mu))).square().mean()

    return Scan(step, torch.zeros(2, 3), torch.randn(length, 2, 4), [w])


@program("online contrastive memory: a queue in a buffer with a pointer, keys of a moving encoder")
def _(length: int) -> For:
    class MoCo(nn.Module):
        queue: torch.Tensor
        at: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(3, 8), dim=0))
            self.register_buffer("at", torch.zeros(1, dtype=torch.long))

        def forward(self, x: torch.Tensor) -> Any:
            q = F.normalize(self.q(x), dim=1)
            with torch.no_grad():
                for a, b in zip(self.k.parameters(), self.q.parameters(), strict=True):
                    a.mul_(0.9).add_(b, alpha=0.1)
                k = F.normalize(self.k(x), dim=1)
            logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone()], 1) / 0.1
            with torch.no_grad():
                at = int(self.at)
                self.queue[:, at : at + 2] = k.T
                self.at[0] = (at + 2) % 8
            return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long), reduction="none")

    net = MoCo()
    return For(net, (torch.randn(length, 2, 4),), [net])


_ROLES: dict[str, Callable[[], nn.Module]] = {
    "learned sizes by an MLP": lambda: nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 1)),
    "learned sizes by an LSTM over coordinates": lambda: nn.LSTM(2, 1),
}


def _learned_optimiser(name: str, make: Callable[[], nn.Module]) -> None:
    @program(f"learned optimiser with {name}")
    def make_loop(length: int) -> Scan:
        net, matrix = make(), torch.randn(4, 4)

        def step(s: Any, target: torch.Tensor) -> Any:
            w, hidden = s
            value = (matrix @ w - target).square().mean()
            g = 2 * matrix.T @ (matrix @ w - target).detach() / 4
            seen = torch.stack([g.abs().clamp(min=1e-6).log() / 10, g.sign()], -1)
            if isinstance(net, nn.LSTM):
                update, hidden = net(seen[None], hidden)
            else:
                update = net(seen)
            return (w + 0.1 * update.reshape(4), hidden), value

        hidden = (torch.zeros(1, 4, 1), torch.zeros(1, 4, 1)) if isinstance(net, nn.LSTM) else None
        return Scan(step, (torch.zeros(4), hidden), torch.randn(length, 4), [net])


for _name, _make in _ROLES.items():
    _learned_optimiser(_name, _make)
