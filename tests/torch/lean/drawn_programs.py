"""Random programs: Python functions made of drawn lines, each of which makes or changes a 4 x 4 tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

CALLS = 3

_serial = count()  # functions with equal code share their traces: each program is to have its own

# {o} is a new tensor, {a} and {b} are those that are there, {k} is a number; x, y, w, index and s are arguments.
POINTWISE = [
    "{o} = {a} * {b}",
    "{o} = {a} + {b}",
    "{o} = {a} - {b} * {k}",
    "{o} = {a} / ({b}.abs() + 1)",
    "{o} = {a}.tanh()",
    "{o} = {a}.sigmoid()",
    "{o} = {a}.clamp(max=3).exp()",
    "{o} = {a}.relu()",
    "{o} = F.gelu({a})",
    "{o} = F.gelu({a}, approximate='tanh')",
    "{o} = F.silu({a})",
    "{o} = F.softplus({a})",
    "{o} = F.leaky_relu({a}, {k})",
    "{o} = {a}.pow(2)",
    "{o} = {a}.abs().add(1).pow({k})",
    "{o} = ({a}.abs() + 0.1).sqrt()",
    "{o} = torch.where({a} > {b}, {a}, {b} * {k})",
    "{o} = torch.where({a} > 0, {b}, 0.0)",
    "{o} = {a}.clamp(-1.0, {k})",
    "{o} = torch.maximum({a}, {b})",
    "{o} = {a} * ({b} > 0)",
    "{o} = {a} * ({b} > {k}).to({a}.dtype)",
    "{o} = {a} * (({b} > {k}).float() * 2) - {a}",
    "{o} = {a}.masked_fill({b} > 0, {k})",
    "{o} = {a} * ({b} < 0).logical_or({a} > {k})",
    "{o} = {a}.to(torch.float64).sin().to({a}.dtype)",
    "{o} = {a}.to(torch.bfloat16).cos().to(torch.float32)",
    "{o} = {a} * index.to({a}.dtype)",
    "{o} = {a} * (index * 2 + 1)",
    "{o} = {a}.floor() * {b} + {a}.sign()",
    "{o} = {a} * s",
    "{o} = ({a} * s + {k}).sin()",
    "{o} = {a} * torch.tensor({k})",
    "{o} = torch.addcmul({a}, {b}, {a}, value={k})",
    "{o} = {a}.lerp({b}.to({a}.dtype), {k})",
]

REDUCING = [
    "{o} = {a}.cumsum(0)",
    "{o} = {a}.softmax(1)",
    "{o} = {a}.log_softmax(0)",
    "{o} = F.layer_norm({a}.float(), (4,), w[0], w[1])",
    "{o} = {a}.sum(0) + {b}",
    "{o} = {a} - {a}.mean(1, keepdim=True)",
    "{o} = {a} * {b}.sum()",
    "{o} = {a} * ({b} > 0).to({a}.dtype).mean()",
    "{o} = {a} / ({a}.float().std(1, keepdim=True) + 1)",
    "{o} = F.normalize({a}.float(), dim=0) * {b}",
    "{o} = {a} - {a}.logsumexp(1, keepdim=True)",
    "{o} = {a} * {b}.amax(1, keepdim=True)",
    "{o} = torch.cat([{a}, {b}])[2:6]",
    "{o} = torch.stack([{a}, {b}]).prod(0)",
    "p, q = {a}.chunk(2, 1); {o} = torch.cat([q, p * {k}], 1)",
    "p, q, r = {a}.split([1, 1, 2], 0); {o} = torch.cat([r.sin(), p * q, q])",
    "{o} = {a}[index[0]]",
    "{o} = {a}.gather(1, index)",
    "{o} = {a}.gather(1, ({b} > 0).long())",
    "{o} = {a}.index_select(0, index[1]) * {b}",
    "{o} = F.embedding(index[2], {a}) * {b}",
    "{o} = {a}.sort(1)[0] + {b}",
    "{o} = {a}.gather(1, {b}.argsort(1))",
    "{o} = {a}.scatter_add(0, index, {b}.to({a}.dtype))",
    "{o} = {a} * F.one_hot(index[3], 4)",
]

PRODUCTS = [
    "{o} = {a} @ {b}.to({a}.dtype)",
    "{o} = F.linear({a}.float(), w, w[0])",
    "{o} = torch.bmm({a}.reshape(2, 2, 4), {b}.to({a}.dtype).reshape(2, 4, 2)).repeat(1, 1, 2).reshape(4, 4)",
    "{o} = torch.einsum('ij,kj->ki', {a}.float(), {b}.float())",
    "{o} = torch.addmm({a}.float(), w, {b}.float())",
    "{o} = F.scaled_dot_product_attention({a}[None, None].float(), {b}[None, None].float(), w[None, None])[0, 0]",
    "{o} = F.conv1d({a}.float()[None], w[:, :, None])[0]",
]

VIEWS = [
    "{o} = {a}.t()",
    "{o} = {a}.t().sin()",
    "{o} = {a}.reshape(16).view(4, 4)",
    "{o} = {a}[1:2].expand(4, 4)",
    "{o} = {a}.unbind(0)[1] + {b}",
    "{o} = {a}.diagonal() * {b}",
    "{o} = {a}.unfold(1, 2, 2).reshape(4, 4).cos()",
    "{o} = {a}.contiguous().as_strided((4, 4), (1, 4))",
    "{o} = {a}[:, ::2].repeat(1, 2).sigmoid()",
    "{o} = {a}.flip(0) * {b}.roll(1, 1)",
    "{o} = {a}.narrow(0, 1, 2).exp().clamp(max=2).repeat(2, 1)",
    "{o} = torch.view_as_real(torch.view_as_complex({a}.float().reshape(4, 2, 2)) * 1j).reshape(4, 4)",
    "{o} = {a}.float().to(torch.complex64).exp().clone().conj().mul({b}).real.clamp(-2, 2)",
    "{o} = {a}.view_as({a}).unsqueeze(0).squeeze(0)",
    "{o} = torch.complex({a}.float(), {b}.float()).angle()",
]

IN_PLACE = [
    "{a}.add_({b})",
    "{a}.mul_({k})",
    "{a}.mul_({b})",
    "{a}.relu_()",
    "F.relu({a}, inplace=True)",
    "{a}.clamp_(-1, 1)",
    "{a}.sigmoid_()",
    "{a}.sin_()",
    "{a}[0] = {b}[1]",
    "{a}[:, 1] = {k}",
    "{a}[:, 1:3].copy_({b}[:, :2])",
    "{a}.t().mul_({k})",
    "{a}[1:3].add_({b}[1:3])",
    "{a}.diagonal().zero_()",
    "{a}[index[0] > 1] = {k}",
    "{a}.index_put_((index[0], index[1]), {b}[0].to({a}.dtype), accumulate=True)",
    "{a}.masked_fill_({b} > 0, {k})",
    "{a}.zero_().add_({b})",
    "{a}.detach().mul_({k})",
    "{a}.view(16)[2:5].mul_({k})",
    "{a}.copy_({b})",
    "{a} += {b} * {k}",
    "{a}.mul_(s)",
    "{a}.select(1, 2).exp_()",
    "p = torch.empty_like({a}); torch.mul({a}.detach(), {k}, out=p); {a} = {b} * p",
    "p = torch.zeros_like({b}); p[1:3] = {b}[1:3].sin(); {a} = p * {a}",
    "p = torch.zeros(2, 4, 4); p[0] = {a}; p[1] = {b}; {a} = p[0] * p[1]",
    "p = torch.empty(4, 4); p.copy_({b}).mul_({a}); {a} = p",
    "with torch.no_grad(): {a}.mul_({k})",
]

RANDOM = [
    "{o} = F.dropout({a}, 0.5)",
    "{o} = F.dropout({a}, 0.1) * {b}",
    "{o} = F.dropout({a}, 0.97) * {b}",
    "{o} = F.dropout({a}, 0.3, inplace=False).sin()",
    "{o} = F.alpha_dropout({a}, 0.4)",
    "{o} = F.rrelu({a}, training=True)",
    "{o} = {a} * torch.rand_like({b})",
    "{o} = {a} + torch.randn(4, 4) * {b}",
    "{o} = torch.bernoulli({a}.detach().sigmoid()) * {b}",
    "{o} = torch.bernoulli({a}.detach().sigmoid() * 0.1) * {b}.sum() * {b}",
    "{o} = (torch.rand(4, 4) > {k}).float() * {a} * s",
    "p = torch.zeros(4, 4); p[:2].bernoulli_(0.5); {o} = p * {a}",
    "p = torch.empty(4, 4).bernoulli_(0.3).mul_({b}.detach().float().sum()); {o} = p * {a}",
    "{o} = {a}[torch.randperm(4)] * {b}",
    "{o} = F.gumbel_softmax({a}.float(), hard=True)",
]

ISLANDS = [
    "{o} = {a}.detach() * {b}",
    "{o} = {a} + ({a}.sign() - {a}).detach()",
    "with torch.no_grad(): p = {a}.sin() * {b}\n    {o} = p * {b}",
    "with torch.enable_grad(): {o} = {a}.sin() * {b}",
    "with torch.no_grad(): p = torch.empty_like({a}).copy_({a}).mul_({k})\n    {o} = p * {b} + p",
]

CUSTOM = [
    "{o} = Spike.apply({a})",
    "{o} = Product.apply({a}, {b})",
    "{o} = Scale.apply({a}, {k})",
    "{o} = Twice.apply({a} * 1.0)",
    "{o} = KeepsOwn.apply({a})",
]

READING = [
    "{o} = {a} * {b}.sum().item()",
    "{o} = ({a} * {b}[0, 0].item()).sin() * {b}",
    "{o} = {a}[int(index[0, 0])].sin() * {b}",
    "p = int(index[0, 1]); {o} = torch.cat([{a}[p:], {a}[:p]]).sin() * {b}",
]

WILD = [
    "{o} = {a}.sin() * {b} if {a}.sum() > 0 else {a}.cos() * {b}",
    "{o} = {a}.exp().clamp(max=3) * {b} if {a}.sum() > 0 else {a}.clone()",
    "if index[0, 0] > 1: return {a} * {b}, {a}.exp()",
]


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        result: torch.Tensor = grad / (1 + x.abs()) ** 2
        return result


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y, x * y)
        return (x * y).sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, y, xy = ctx.saved_tensors
        wants = ctx.needs_input_grad
        return grad * xy.cos() * y if wants[0] else None, grad * xy.cos() * x if wants[1] else None


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, k: float) -> torch.Tensor:
        ctx.k = k
        return x * k

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.k, None


class Twice(torch.autograd.Function):
    """In place, and its result is saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        x.mul_(2)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        result: torch.Tensor = grad * 2 + 0 * x
        return result


class KeepsOwn(torch.autograd.Function):
    """It keeps its tensor where no hook sees it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.cosine = x.detach().cos()
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        cosine: torch.Tensor = ctx.cosine
        return grad * cosine


@dataclass(frozen=True)
class Program:
    """A drawn function, and how it is called."""

    lines: tuple[str, ...]
    results: tuple[str, ...]
    copies: bool  # whether it begins with copies of its arguments, which in-place operations may change

    @property
    def source(self) -> str:
        head = "x, y = x * 1.0, y * 1.0" if self.copies else "pass"
        body = "\n    ".join([head, *self.lines, f"return {', '.join(self.results)},"])
        return f"def program(x, y, w, index, s):\n    {body}\n"

    def __repr__(self) -> str:
        return self.source

    def function(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        names: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
        names |= {function.__name__: function for function in (Spike, Product, Scale, Twice, KeepsOwn)}
        exec(compile(self.source, "<a drawn program>", "exec"), names)
        made: Callable[..., tuple[torch.Tensor, ...]] = names["program"]
        made.__code__ = made.__code__.replace(co_firstlineno=next(_serial))
        return made


@st.composite
def programs(draw: st.DrawFn, lines: list[str], most: int = 9, copies: bool | None = None) -> Program:
    there = ["x", "y", "w"]
    found = []
    for place in range(draw(st.integers(1, most))):
        line = draw(st.sampled_from(lines))
        number = draw(st.sampled_from(["0.5", "1.25", "-0.75", "2.0"]))
        a, b = draw(st.sampled_from(there)), draw(st.sampled_from(there))
        new = f"v{place}"
        if line in IN_PLACE:
            if draw(st.booleans()):
                found.append(f"{new} = {a}.clone()")
                a = new
                there.append(new)
            elif a == "w":
                continue  # the caller's own
        elif "{o}" in line:
            there.append(new)
        found.append(line.format(o=new, a=a, b=b, k=number))
    results = (there[-1], draw(st.sampled_from(there)))
    return Program(tuple(found), results, draw(st.booleans()) if copies is None else copies)


@dataclass(frozen=True)
class Given:
    """What a program is called with: values that differ from call to call, in one of several forms."""

    form: str = "own"  # or slices, leaves, twice at first, twice at last, no grad

    def arguments(self, call: int) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
        """The tensors whose gradients are asked for, and the arguments."""
        generator = torch.Generator().manual_seed(call)
        rows = torch.randn(CALLS + 1, 2, 4, 4, generator=generator).requires_grad_()
        weight = torch.randn(4, 4, generator=generator).requires_grad_()
        index = torch.randint(0, 4, (4, 4), generator=generator)
        number = 0.5 + call
        if self.form == "slices":
            return [rows, weight], (rows[call][0], rows[call][1], weight, index, number)
        x, y = (rows[0][k].detach().clone().requires_grad_() for k in range(2))
        leaves = [x, y, weight]
        if self.form == "no grad":
            return [y, weight], (x.detach(), y * 1.0, weight, index, number)
        if self.form != "leaves":
            x, y = x * 1.0, y * 1.0
        if self.form == f"twice in call {call}":
            y = x
        return leaves, (x, y, weight, index, number)


def examples(examples: int) -> settings:
    """No time is spent on telling why an example fails."""
    phases = (Phase.explicit, Phase.generate, Phase.shrink)
    return settings(
        max_examples=examples, deadline=None, derandomize=True, phases=phases, suppress_health_check=list(HealthCheck)
    )


EVERYTHING = [*POINTWISE, *REDUCING, *PRODUCTS, *VIEWS, *IN_PLACE, *RANDOM, *ISLANDS, *CUSTOM]
