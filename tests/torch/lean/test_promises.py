"""What `lean` promises of a backward: gradients, hooks and saved tensors are those of the plain call."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import lowtide.torch as lt
from lowtide import BudgetError
from lowtide.torch.state.bits import same_bits
from tests.torch.calls import Function, drawn_leaf, same
from tests.torch.lean.calls import Gate, both


def test_hooks_fire_once() -> None:
    module, x = Gate(), drawn_leaf(4, 6)
    seen: list[str] = []
    module.register_forward_pre_hook(lambda *_: seen.append("before"))
    module.register_forward_hook(lambda *_: seen.append("after"))
    module.norm.register_full_backward_hook(lambda *_: seen.append("norm back"))
    module.norm.register_forward_hook(lambda *_: seen.append("norm"))
    lean = lt.Lean(module)
    lean.register_forward_hook(lambda *_: seen.append("lean"))
    for _ in range(3):
        seen.clear()
        lean(x).sum().backward()
        assert seen == ["before", "norm", "after", "lean", "norm back"]


def test_hooks_of_tensors_fire_once() -> None:
    seen: list[Any] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        y.register_hook(lambda grad: grad * 2)
        z = y.sin() * y
        z.register_hook(seen.append)
        return z.tanh()

    x = drawn_leaf(5)

    def run(call: Function, number: int) -> Any:
        seen.clear()
        found = torch.autograd.grad(call(function, x).sum(), x)
        assert len(seen) == 1
        return [*found, *seen]

    both(run)


def test_two_backwards_of_one_call() -> None:
    x, w = drawn_leaf(4, 4), drawn_leaf(4, 4, seed=1)
    for _ in range(2):
        y = lt.lean(lambda x, w: ((x @ w).sigmoid() * x).exp().tanh(), x, w)
        first = torch.autograd.grad(y.sum(), [x, w], retain_graph=True)
        same(torch.autograd.grad(y.sum(), [x, w], retain_graph=True), first)
        same(torch.autograd.grad(y.sum(), [x, w]), first)
        with pytest.raises(RuntimeError, match="a second time"):
            torch.autograd.grad(y.sum(), [x, w])


def test_second_derivatives() -> None:
    x, w = drawn_leaf(3, 3, dtype=torch.float64), drawn_leaf(3, 3, seed=1, dtype=torch.float64)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(x @ w) * x
        return (y.exp() * y).softmax(1)

    def lean(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return lt.lean(function, x, w)

    for _ in range(2):
        assert torch.autograd.gradcheck(lean, (x, w))
        assert torch.autograd.gradgradcheck(lean, (x, w))

    def run(call: Function, number: int) -> Any:
        y = call(function, x, w)
        first = torch.autograd.grad(y.square().sum(), [x, w], create_graph=True)
        second = torch.autograd.grad([f.square().sum() for f in first], [x, w], create_graph=True)
        third = torch.autograd.grad([f.sum() for f in second], [x, w])
        return [y, *first, *second, *third]

    both(run)


def test_gradients_of_some_inputs_only() -> None:
    x, w, v = drawn_leaf(4, 4), drawn_leaf(4, 4, seed=1), drawn_leaf(4, seed=2)

    def function(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = (x @ w).sigmoid() * v
        return y.exp() * x, (y.tanh() * w).sum()

    for which in ([x], [w], [v], [x, v]):

        def run(call: Function, number: int, which: list[torch.Tensor] = which) -> Any:
            outputs = call(function, x, w, v)
            some = torch.autograd.grad(outputs[1], which, retain_graph=True)
            return [*some, *torch.autograd.grad(outputs[0].sum(), which)]

        both(run)


def test_saved_tensors_may_be_looked_at() -> None:
    x = drawn_leaf(5)
    for _ in range(2):
        y = lt.lean(lambda x: (x.sin() * x).exp() * x, x)
        exponential = y.grad_fn._saved_self
        assert same_bits(exponential, (x.sin() * x).exp())
        same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(((x.sin() * x).exp() * x).sum(), x))


class _Sign(torch.autograd.Function):
    """It asks for what it saved twice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, y)
        ctx.set_materialize_grads(False)
        return x.sign() * y, x * y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        x, _ = ctx.saved_tensors
        _, y = ctx.saved_tensors
        first, second = grads
        assert first is not None
        return first * y if second is None else first * y + second * x, first * x


def test_custom_functions() -> None:
    x, w = drawn_leaf(4, 4), drawn_leaf(4, 4, seed=1)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        first, second = _Sign.apply(  # type: ignore[no-untyped-call]  # torch's own
            x.sigmoid() * w, (x @ w).exp()
        )
        y: torch.Tensor = first.tanh() + second.sin()
        return y

    def run(call: Function, number: int) -> Any:
        y = call(function, x, w)
        return [y, *torch.autograd.grad(y.sum(), [x, w])]

    both(run)


def test_the_frontier_of_a_function() -> None:
    x, w = drawn_leaf(32, 32), drawn_leaf(32, 32, seed=1)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(x @ w) * x
        return (y.exp() * y).sin().tanh() @ w

    points = lt.lean_frontier(function, x, w)
    assert points == lt.lean_frontier(function, x, w)  # it is not traced again
    assert all(a.tape > b.tape and a.seconds < b.seconds for a, b in pairwise(points))
    assert points[0].tape <= points[0].plain_tape
    assert not points[0].again
    assert points[0].seconds == 0
    assert all(point.again for point in points[1:])
    assert "tape" in str(points[-1])
    assert "sigmoid" in str(points[-1])
    with torch.no_grad():
        assert lt.lean_frontier(function, x, w)[0].plain_tape == points[0].plain_tape
    for point in points:
        y = lt.lean(function, x, w, tape=point.tape)
        same(torch.autograd.grad(y.sum(), [x, w]), torch.autograd.grad(function(x, w).sum(), [x, w]))


def test_reshaped_tensors_are_known_again() -> None:
    """Autograd has another node for them where operations are watched than where they are not."""
    x, w = drawn_leaf(4, 4), drawn_leaf(4, 4, seed=1)

    def run(call: Function, number: int) -> Any:
        y = call(lambda x, w: torch.einsum("ij,kj->ki", x.sin(), w).reshape(2, 8).exp().reshape(4, 4) * w, x, w)
        return [y, *torch.autograd.grad(y.sum(), [x, w])]

    with lt.record(memory=False) as receipt:
        both(run)
    assert receipt.kept_whole == 0


def test_a_share_of_next_to_nothing() -> None:
    x = drawn_leaf(1)
    with pytest.raises(BudgetError) as caught:
        lt.lean(lambda x: torch.rand(1) * x, x, tape="10%")
    assert caught.value.least > 0
