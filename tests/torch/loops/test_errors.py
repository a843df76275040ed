"""Nothing silent: what cannot be done right is refused with the step, the argument and a way out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide import (
    BudgetError,
    Chain,
    CheckpointError,
    Disk,
    FunctionError,
    InputError,
    StepCost,
    plan_chain,
)

XS = torch.randn(40, 2, 3)
H0 = torch.zeros(2, 3)


class Counter(nn.Module):
    """A module with state, to see that refusals leave it untouched."""

    v: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))
        self.register_buffer("v", torch.zeros(2, 3))
        self.norm = nn.BatchNorm1d(3)
        self.k = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.k += 1
        assert isinstance(self.v, torch.Tensor)
        self.v = self.v * 0.5 + self.norm(x) * self.w
        return self.v


def refused(
    step: Any, error: type[Exception], match: str, init: Any = H0, knob: dict[str, Any] | None = None, **options: Any
) -> None:
    """The loop, or its backward, is refused, and the module is as it was before the call that was refused."""
    net = Counter()
    before = {name: value.clone() for name, value in net.state_dict().items()}

    def whole(carry: Any, x: Any) -> Any:
        net(XS[0])
        return step(carry, x, net.k - 1)

    rng = torch.get_rng_state()
    options |= {"base": 7} if knob is None else knob

    def run() -> None:
        nonlocal before, rng
        carry, ys = lt.checkpointed_scan(whole, init, XS, **options)
        before = {name: value.clone() for name, value in net.state_dict().items()}
        rng = torch.get_rng_state()
        total = sum(t.sum() for t in torch.utils._pytree.tree_leaves((carry, ys)) if isinstance(t, torch.Tensor))
        assert isinstance(total, torch.Tensor)
        total.backward()

    with pytest.raises(error, match=match):
        run()
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(rng, torch.get_rng_state())


W = torch.randn(3, requires_grad=True)


def test_a_tensor_first_touched_after_the_first_step() -> None:
    late = torch.randn(3, requires_grad=True)
    made = late * 2
    for tensor, what in ((late, r"of shape \(3,\)"), (made, "computed before the loop")):

        def step(h: torch.Tensor, x: torch.Tensor, k: int, tensor: torch.Tensor = tensor) -> Any:
            h = torch.tanh(h * W + x)
            return h, h * tensor if k == 20 else h

        refused(step, CheckpointError, rf"step 20 uses a tensor {what} .* captures=")

    def named(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.tanh(h * W + x)
        return h, h * late if float(x[0, 0]) == float(XS[20, 0, 0]) else h

    _, ys = lt.checkpointed_scan(named, H0, XS, base=7, captures=(late,))
    rows, h = [], H0
    for x in XS:
        h, y = named(h, x)
        rows.append(y)
    assert torch.equal(torch.autograd.grad(ys.sum(), late)[0], torch.autograd.grad(torch.stack(rows).sum(), late)[0])


def test_another_tensor_in_the_place_of_one_is_found_at_the_second_step_or_with_check_rerun() -> None:
    weights = [torch.randn(3, requires_grad=True) for _ in range(40)]
    refused(lambda h, x, k: (h * weights[k % 40], None), CheckpointError, "step 1 uses a tensor")

    def window(h: torch.Tensor, x: torch.Tensor, k: int) -> Any:
        return torch.sin(h * weights[k % 40 == 17] + x), None

    refused(window, CheckpointError, "step 17 uses a tensor", check_rerun=True)


def test_a_captured_tensor_out_of_sight() -> None:
    hidden_from_view = W * 2

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            x, w = ctx.saved_tensors
            return grad * w, (grad * x).sum(0)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        scale: Any = Scale  # torch does not annotate apply
        return scale.apply(torch.sin(h) + x, hidden_from_view), None

    with pytest.raises(CheckpointError, match="name it: captures="):
        lt.checkpointed_scan(step, H0, XS, base=7)
    h, _ = lt.checkpointed_scan(step, H0, XS, base=7, captures=(hidden_from_view,))
    expected = H0
    for x in XS:
        expected, _ = step(expected, x)
    grads = [torch.autograd.grad(t.sum(), W, retain_graph=True)[0] for t in (h, expected)]
    torch.testing.assert_close(grads[0], grads[1])
    with pytest.raises(InputError, match="captures= is for tensors that need a gradient"):
        lt.checkpointed_scan(step, H0, XS, base=7, captures=(torch.ones(3),))


@pytest.mark.parametrize("options", [{"base": 7}, {"checkpoints": 2}, {}], ids=str)
@pytest.mark.parametrize("where", ["carry", "output"])
def test_a_step_whose_rerun_differs(options: dict[str, Any], where: str) -> None:
    draws = iter(np.random.default_rng(0).normal(size=10_000).tolist())

    def step(h: torch.Tensor, x: torch.Tensor, k: int) -> Any:
        noise = next(draws)
        h = torch.tanh(h * W + x + (noise if where == "carry" else 0))
        return h, h * noise if where == "output" else h

    refused(step, CheckpointError, "does not do what it did at first.*generators=.*What moved.*draws", knob=options)


def test_check_rerun_names_the_step() -> None:
    draws = iter(np.random.default_rng(0).normal(size=10_000).tolist())

    def step(h: torch.Tensor, x: torch.Tensor, k: int) -> Any:
        h = torch.tanh(h * W + x)
        return (h + next(draws) if k == 23 else h), h

    refused(step, CheckpointError, "step 23, run again, does not do what it did", check_rerun=True)


@pytest.mark.parametrize("at", [0, 1, 20, 39])
def test_a_carry_that_changes(at: int) -> None:
    def changing(make: Any) -> Any:
        return lambda h, x, k: (make(h) if k == at else torch.tanh(h * W), None)

    refused(changing(lambda h: h[:1]), InputError, rf"step {at} returned carry as \(1, 3\) torch.float32")
    refused(changing(lambda h: h.double()), InputError, rf"step {at} returned carry as \(2, 3\) torch.float64")
    refused(changing(lambda h: (h, h)), InputError, rf"step {at} returned a carry of another structure.*a tuple")
    refused(changing(lambda h: None), InputError, rf"step {at} returned a carry of another structure.*None")
    refused(changing(lambda h: 3), InputError, rf"step {at} returned carry as a int, it got")


@pytest.mark.parametrize("at", [1, 20, 39])
def test_a_carry_without_tensors_that_changes(at: int) -> None:
    """Nothing watches such a carry from step to step."""
    refused(
        lambda n, x, k: ((n, n) if k == at else n, torch.tanh(x * W)),
        InputError,
        rf"step {at} returned a carry of another structure.*a tuple",
        init=3,
    )


@pytest.mark.parametrize("at", [0, 1, 20, 39])
def test_an_output_that_changes(at: int) -> None:
    def changing(make: Any) -> Any:
        return lambda h, x, k: (torch.tanh(h * W), make(h) if k == at else h * 2)

    for make in (lambda h: h[:1], lambda h: h.double(), lambda h: 3):
        first = max(at, 1)
        refused(changing(make), InputError, rf"step {first} returned the output y as")
    refused(changing(lambda h: (h, h)), InputError, rf"step {max(at, 1)} returned an output of another form")


def test_a_carry_changed_in_place() -> None:
    def step(h: torch.Tensor, x: torch.Tensor, k: int) -> Any:
        with torch.no_grad():
            h += 1
        return torch.tanh(h * W + x), None

    init = torch.zeros(2, 3)
    refused(step, InputError, r"step 0 changed carry in place.*clone", init=init)

    def sometimes(h: torch.Tensor, x: torch.Tensor, k: int) -> Any:
        if k in (14, 21, 28):  # where snapshots are
            h.detach().add_(1)
        return torch.tanh(h * W + x), None

    refused(sometimes, InputError, r"step 14 changed carry in place")


def test_a_parameter_changed_in_place() -> None:
    layer = nn.Linear(3, 3)

    def hebbian(h: torch.Tensor, x: torch.Tensor, k: int) -> Any:
        out = torch.tanh(layer(h) + x)
        with torch.no_grad():
            layer.weight.mul_(0.99)
        return out, None

    refused(hebbian, CheckpointError, r"the steps change layer\.weight in place")
    w = torch.randn(3, requires_grad=True)

    def step(h: torch.Tensor, x: torch.Tensor, k: int) -> Any:
        out = torch.tanh(h * w + x)
        with torch.no_grad():
            w.mul_(0.99)
        return out, None

    refused(step, CheckpointError, "the steps change w in place")


def test_inputs_changed_between_forward_and_backward() -> None:
    w = torch.randn(3, requires_grad=True)
    h, _ = lt.checkpointed_scan(lambda h, x: (torch.tanh(h * w + x), None), H0, XS, base=7)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        h.sum().backward()


def test_a_step_that_does_not_return_a_pair() -> None:
    for result, what in ((torch.ones(2, 3), "a Tensor"), ((1, 2, 3), "3 values"), (None, "a NoneType")):

        def step(h: torch.Tensor, x: torch.Tensor, result: Any = result) -> Any:
            return result

        refused(lambda h, x, k, result=result: result, InputError, f"step 0 returned {what}; f must return a pair")
        with pytest.raises(InputError, match="must return a pair"):
            lt.checkpointed_scan(step, H0, XS, reduce=(0, lambda a, y: a))


@pytest.mark.parametrize(
    "loop", [lt.scan, lt.checkpointed_scan, lt.plan_scan], ids=lambda loop: str(getattr(loop, "__name__", loop))
)
def test_arguments_that_cannot_be_used(loop: Any) -> None:
    def f(h: torch.Tensor, x: Any) -> Any:
        return h, h

    for bad in (3, None, "f"):
        with pytest.raises(FunctionError, match="cannot be called") as caught:
            loop(bad, H0, XS)
        assert isinstance(caught.value, TypeError)
        assert isinstance(caught.value, ValueError)
    with pytest.raises(InputError, match=r"unequal numbers of steps \(xs\[0\]: 40, xs\[1\]: 39\)"):
        loop(f, H0, (XS, XS[1:]))
    with pytest.raises(InputError, match=r"unequal numbers of steps \(xs: 40, length: 5\)"):
        loop(f, H0, XS, 5)
    with pytest.raises(InputError, match="how many steps"):
        loop(f, H0)
    with pytest.raises(InputError, match=r"xs is a ndarray; .*Steps"):
        loop(f, H0, np.zeros((4, 3)))
    with pytest.raises(InputError, match=r"xs\[0\] has no axis"):
        loop(f, H0, (torch.tensor(1.0),))
    with pytest.raises(InputError, match="length"):
        loop(f, H0, length=-1)
    with pytest.raises(InputError, match="reduce='max' is not known"):
        loop(f, H0, XS, reduce="max")
    with pytest.raises(InputError, match=r"or \(init, fold\) with a function"):
        loop(f, H0, XS, reduce=(1, 2))
    with pytest.raises(InputError, match='reduce="sum" needs tensors'):
        loop(lambda h, x: (h, 1), H0, XS, reduce="sum")
    with pytest.raises(InputError, match=r'reduce="mean" needs outputs that can be divided, this one is torch\.int64'):
        loop(lambda h, x: (h, torch.tensor(1)), H0, XS, reduce="mean")


def test_knobs_that_cannot_be_used() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * W

    plan = lt.plan_for_loop(f, XS, base=3)
    options: dict[str, Any]
    for options in ({"base": 2, "checkpoints": 3}, {"budget": "1MB", "base": 2}, {"plan": plan, "budget": 5}):
        with pytest.raises(InputError, match="are two knobs"):
            lt.checkpointed_for_loop(f, XS, **options)
    for options, match in (
        ({"base": 0}, "base=0 is too small"),
        ({"base": True}, "base=True is a boolean"),
        ({"checkpoints": 1.5}, "checkpoints=1.5 is a float"),
        ({"budget": 0.5}, "budget=0.5 is a float"),
        ({"budget": "64M"}, "unit 'M'"),
        ({"plan": "plan"}, "plan='plan' is a str"),
        ({"unroll": 0}, "unroll=0 is too small"),
        ({"pbar": 0.5}, "pbar=0.5"),
        ({"generators": [3]}, "generators= has a int"),
    ):
        with pytest.raises(InputError, match=match):
            lt.checkpointed_for_loop(f, XS, **options)
    with pytest.raises(InputError, match="the plan is for 40 steps, the loop has 39"):
        lt.checkpointed_for_loop(f, XS[1:], plan=plan)


def test_a_budget_too_small_says_what_works_and_that_works() -> None:
    net = Counter()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(BudgetError) as caught:
        lt.checkpointed_for_loop(net, XS, budget=100)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert net.k == 0
    lt.checkpointed_for_loop(net, XS, budget=caught.value.least).sum().backward()
    with pytest.raises(BudgetError):
        lt.checkpointed_for_loop(net, XS, budget=caught.value.least - 1)


def test_while_loops_refuse_too() -> None:
    with pytest.raises(FunctionError, match="cond=3"):
        lt.checkpointed_while_loop(3, lambda c: c, H0)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(FunctionError, match="body=3"):
        lt.checkpointed_while_loop(lambda c: False, 3, H0)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(InputError, match="are two knobs"):
        lt.checkpointed_while_loop(lambda c: False, lambda c: c, H0, checkpoints=1, budget="1MB")
    with pytest.raises(BudgetError, match="the least that works"):
        lt.checkpointed_while_loop(lambda c: True, lambda c: c * W, H0, budget=10, max_steps=4)
    net = Counter()

    def body(carry: Any) -> Any:
        net(XS[0])
        return carry[0] * W, (carry[1] + 1 if carry[1] < 4 else None)

    with pytest.raises(InputError, match="step 4 returned a carry of another structure"):
        lt.checkpointed_while_loop(lambda c: True, body, (H0, 0), max_steps=10)
    assert net.k == 0


def test_a_carry_of_a_class_that_is_a_dictionary_is_named() -> None:
    class State(dict):  # type: ignore[type-arg]
        pass

    def step(state: Any, x: torch.Tensor) -> Any:
        h = torch.tanh(state["h"] * W + x)
        return State(h=h), h

    with pytest.raises(CheckpointError, match=r"the carry has a State, whose tensors .* in a tuple or a dict"):
        lt.checkpointed_scan(step, State(h=H0), XS, base=2)


def test_an_output_may_be_the_state_at_some_steps_only() -> None:
    w = torch.randn(3, requires_grad=True)

    def step(h: torch.Tensor, k: torch.Tensor) -> Any:
        h = torch.tanh(h * w + 0.1)
        return h, h if k % 3 else h * 2

    h, rows = H0, []
    for k in torch.arange(40):
        h, y = step(h, k)
        rows.append(y)
    expected = torch.autograd.grad((torch.stack(rows) ** 2).sum(), w)[0]
    knobs: list[dict[str, Any]] = [{"base": 1}, {"base": 7}, {"checkpoints": 3}, {}]
    for options in knobs:
        _, ys = lt.checkpointed_scan(step, H0, torch.arange(40), **options)
        assert torch.equal(torch.autograd.grad((ys**2).sum(), w)[0], expected)


def test_a_plan_with_snapshots_on_disk_is_refused() -> None:
    plan = plan_chain(Chain.equal(StepCost(8, 16), 40), 80, disk=Disk(1e-9, 1e-9))
    with pytest.raises(InputError, match="this plan has some on disk; plan without disk="):
        lt.checkpointed_for_loop(lambda x: x * W, XS, plan=plan)


def test_an_iterator_that_is_at_its_end_when_steps_are_measured_first_is_said_to_be() -> None:
    factors = iter([0.5, 0.25])
    w = torch.ones(4, requires_grad=True)

    def step(h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(h * w + x) * next(factors)
        return h, h.sum()

    with pytest.raises(CheckpointError, match="an iterator that it takes items from is at its end"):
        lt.checkpointed_scan(step, torch.zeros(4), torch.ones(2, 4), budget="40%")
