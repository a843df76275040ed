"""What people write in loops without a second thought is not refused, or is explained where it is wrong."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide import CheckpointError, FunctionError, InputError
from tests.torch.loops.programs.program import For, Scan, While, differences

OPTIONS: list[dict[str, Any]] = [{}, {"base": 1}, {"base": 4}, {"checkpoints": 2}]


def assert_plain(make: Any, *lengths: int, options: list[dict[str, Any]] = OPTIONS) -> None:
    """The program is the plain loop to the last bit."""
    for length in lengths:
        for option in options:
            assert differences(make, length, option) == [], (length, option)


# --- how a state begins


@pytest.mark.parametrize("begin", [None, 0.0, 0, torch.tensor(0.0), torch.zeros(0)], ids=repr)
def test_the_first_step_may_make_the_state(begin: Any) -> None:
    def make(length: int) -> Scan:
        lin = nn.Linear(3, 3)

        def step(h: Any, x: torch.Tensor) -> Any:
            h = torch.zeros(2, 3) if h is None or (isinstance(h, torch.Tensor) and h.numel() == 0) else h
            h = torch.tanh(lin(x) + h)
            return h, h

        return Scan(step, begin, torch.randn(length, 2, 3), [lin])

    assert_plain(make, 1, 2, 9)


def test_a_first_state_that_has_a_gradient_and_another_shape() -> None:
    def make(length: int) -> Scan:
        start, lin = nn.Parameter(torch.tensor(0.5)), nn.Linear(3, 3)
        return Scan(lambda h, x: ((torch.tanh(lin(x) + h),) * 2)[:2], start, torch.randn(length, 2, 3), [start, lin])

    assert_plain(make, 1, 2, 9)


def test_a_cell_of_a_while_loop_may_begin_with_none() -> None:
    def make(length: int) -> While:
        cell = nn.GRUCell(3, 4)

        def body(carry: Any) -> Any:
            return cell(torch.ones(2, 3), carry[0]), carry[1] + 1

        return While(lambda c: c[1] < length, body, (None, 0), [cell])

    assert_plain(make, 1, 2, 9, options=[{}, {"checkpoints": 1}, {"checkpoints": 3}])


def test_from_the_second_step_on_the_form_is_kept() -> None:
    with pytest.raises(
        InputError, match=r"step 1 returned a carry .* list of 2 where one of 1 was.*attribute of a module"
    ):
        lt.checkpointed_scan(lambda past, x: ([*past, x], None), [], torch.randn(5, 3), base=2)


def test_two_derivatives_of_a_loop_whose_first_step_makes_the_state() -> None:
    cell, xs = nn.RNNCell(3, 4).double(), torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)

    def run(loop: Any) -> torch.Tensor:
        h, _ = loop(lambda h, x: (cell(x, h), None), None, xs)
        (grad,) = torch.autograd.grad(h.square().sum(), xs, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), xs)
        return second

    torch.testing.assert_close(run(lt.scan), run(partial(lt.checkpointed_scan, base=2)))


@dataclass
class State:
    h: torch.Tensor
    t: int = 0


@dataclass
class Told:
    """It has more than its fields, so it is an object like any other."""

    h: torch.Tensor

    def __post_init__(self) -> None:
        self.norm = self.h.norm()


def test_dataclasses_are_containers() -> None:
    def make(length: int) -> Scan:
        lin = nn.Linear(3, 3)

        def step(s: State, x: torch.Tensor) -> Any:
            h = torch.tanh(lin(x) + s.h)
            return State(h, s.t + 1), (h, s.t)

        return Scan(step, State(torch.zeros(2, 3)), torch.randn(length, 2, 3), [lin])

    assert_plain(make, 1, 2, 9)
    last, ys = lt.checkpointed_scan(lambda s, x: (State(x, s.t + 1), s), State(torch.zeros(3)), torch.ones(4, 3))
    assert (last.t, ys.t) == (4, [0, 1, 2, 3])
    with pytest.raises(InputError, match=r"step 0 returned a carry .* State where a single value was"):
        lt.checkpointed_scan(lambda h, x: (State(h), None), torch.zeros(2, 3), torch.ones(4, 3))


class Plain:
    def __init__(self, h: torch.Tensor) -> None:
        self.h = h


@pytest.mark.parametrize("kind", [Plain, Told])
def test_objects_in_the_carry_are_named(kind: Any) -> None:
    w = torch.randn(3, requires_grad=True)
    with pytest.raises(CheckpointError, match=rf"the carry has a {kind.__name__}, whose tensors .* dataclass"):
        lt.checkpointed_scan(lambda s, x: (kind(s.h * w), None), kind(torch.ones(3)), torch.zeros(5), base=2)


# --- gradients that begin late


@pytest.mark.parametrize("delay", [3, 20])
def test_a_delay_line_of_any_length(delay: int) -> None:
    def make(length: int) -> Scan:
        lin = nn.Linear(3, 3)

        def step(past: Any, x: torch.Tensor) -> Any:
            y = torch.tanh(lin(x) + past[0])
            return (*past[1:], y), y

        return Scan(step, (torch.zeros(2, 3),) * delay, torch.randn(length, 2, 3), [lin])

    assert_plain(make, 3, 30)


def test_a_part_of_the_state_that_gets_its_gradient_at_one_late_step() -> None:
    def make(length: int) -> Scan:
        w = nn.Parameter(torch.randn(3))

        def step(state: Any, x: torch.Tensor) -> Any:
            a, b, k = state
            return (torch.tanh(a * w + x), b + a if k > 30 else b + 1, k + 1), None

        return Scan(step, (torch.zeros(3), torch.zeros(3), 0), torch.randn(length, 3), [w])

    assert_plain(make, 40)

    def once(length: int) -> Scan:
        w = nn.Parameter(torch.randn(3))

        def step(state: Any, x: torch.Tensor) -> Any:
            a, b, k = state
            return (torch.tanh(a * w + x), b + a if k == 20 else b * 1.5, k + 1), None

        return Scan(step, (torch.zeros(3), torch.zeros(3), 0), torch.randn(length, 3), [w])

    assert_plain(once, 40, options=[{"base": 40}])
    with pytest.raises(CheckpointError, match=r"carry\[1\] carries a gradient out of step.*advance_with_grad=True"):
        differences(once, 40, {"base": 4})
    assert_plain(once, 40, options=[{"base": 4, "advance_with_grad": True}])


def test_one_of_several_tensors_in_an_attribute_that_gets_its_gradient_late() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.states, self.k = nn.Linear(3, 3), [torch.zeros(2, 3), torch.zeros(2, 3)], 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h, c = self.states
            self.k += 1
            h = torch.tanh(self.lin(x) + h)
            self.states = [h, c * 0.9 + (h if self.k > 20 else h.detach())]
            return h

    def make(length: int) -> For:
        net = Net()
        return For(net, (torch.randn(length, 2, 3),), [net])

    assert_plain(make, 40, options=[*OPTIONS, {"budget": "least"}])


def test_outputs_whose_gradient_begins_late_and_ends_early() -> None:
    def make(length: int) -> Scan:
        lin = nn.Linear(3, 3)

        def step(state: Any, x: torch.Tensor) -> Any:
            h, k = state
            h = torch.tanh(lin(x) + h)
            return (h, k + 1), (h if 20 < k < 30 else h.detach())

        return Scan(step, (torch.zeros(2, 3), 0), torch.randn(length, 2, 3), [lin])

    assert_plain(make, 10, 40, options=[*OPTIONS, {"base": 4, "reduce": "sum"}, {"base": 4, "reduce": "last"}])


def test_a_dictionary_keeps_the_order_that_the_step_gives_it() -> None:
    def make(length: int) -> Scan:
        lin, h0 = nn.Linear(4, 2), nn.Parameter(torch.randn(3, 2))

        def step(state: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
            h = torch.tanh(lin(torch.cat(list(state.values()), -1)) + x)
            return {"b": h, "a": state["b"] * 0.5}, h

        return Scan(step, {"a": h0, "b": h0 * 2}, torch.randn(length, 3, 2), [lin, h0])

    assert_plain(make, 1, 2, 10)


# --- one tensor in several places


def test_a_first_state_that_sits_in_several_places() -> None:
    def make(length: int) -> Scan:
        h0, w = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 4))

        def step(state: Any, x: torch.Tensor) -> Any:
            p, q = state
            return (torch.tanh(w @ p + q.sin() + p * q + x), p * 0.5 + q.cos()), p + q

        return Scan(step, (h0, h0), torch.randn(length, 4), [h0, w])

    assert_plain(make, 1, 2, 10)
    grads: list[Any] = []
    for run in (lt.scan, partial(lt.checkpointed_scan, base=3)):  # with derivatives of derivatives
        torch.manual_seed(0)
        loop = make(6)
        _, ys = run(loop.step, loop.init, loop.xs)
        first = torch.autograd.grad(ys.square().sum(), loop.own, create_graph=True)
        grads.append(torch.autograd.grad(sum(g.square().sum() for g in first), loop.own))  # type: ignore[arg-type]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_delay_lines_that_hold_the_same_tensors() -> None:
    class Delays(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.lines = nn.Linear(4, 4), {d: deque([torch.zeros(2, 4)] * d, maxlen=d) for d in (1, 3, 7)}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.lin(x) + sum(line[0] for line in self.lines.values()))
            for line in self.lines.values():
                line.append(y)
            return y

    def make(length: int) -> For:
        net, xs = Delays(), torch.randn(length, 2, 4, requires_grad=True)
        return For(net, (xs,), [net, xs])

    assert_plain(make, 2, 10, 20, options=[*OPTIONS, {"budget": "least"}])


class HeldTwice(nn.Module):
    """A membrane potential under two names, changed in place under one and read under the other."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.v = nn.Linear(3, 3), torch.zeros(2, 3)
        self.w = self.v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.v += self.lin(x)
        self.w.mul_(0.5)
        return torch.tanh(self.v.clone())


@pytest.mark.parametrize("option", [{"base": 1}, {"base": 4}, {"base": 4, "lean": True}, {"budget": "least"}], ids=str)
def test_a_state_under_two_names_that_is_changed_in_place(option: dict[str, Any]) -> None:
    def make(length: int) -> For:
        net = HeldTwice()
        return For(net, (torch.randn(length, 2, 3),), [net])

    assert_plain(make, 1, 3, 10, options=[option])


def test_a_state_that_is_changed_in_place_is_off_the_graph_after_a_plan_was_made() -> None:
    net = HeldTwice()
    state = net.v
    base = torch.zeros(2, 2, 3)
    net.part = base[0]  # a view, which cannot be detached in place

    def step(x: torch.Tensor) -> Any:
        net.part += net.lin(x)
        return net(x)

    lt.plan_for_loop(step, torch.randn(5, 2, 3), budget="1GiB")
    assert net.v is state
    assert not net.v.requires_grad
    assert not net.part.requires_grad
    assert not net.v.any()
    assert not net.part.any()


# --- states that are detached in place


@pytest.mark.parametrize("reduce", [None, "sum"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_state_that_is_detached_in_place(nested: bool, reduce: str | None) -> None:
    def make(length: int) -> Scan:
        lin = nn.Linear(3, 3)

        def step(state: Any, x: torch.Tensor) -> Any:
            h, k = state
            if k % 3 == 2:
                h.detach_()  # and so is the output that it is
            h = torch.tanh(lin(x) + h)
            return (h, k + 1), ((h, h * 2) if nested else h)

        return Scan(step, (torch.zeros(2, 3), 0), torch.randn(length, 2, 3), [lin])

    assert_plain(make, 1, 2, 10, 20, options=[o | {"reduce": reduce} for o in (*OPTIONS, {"budget": "1GiB"})])


def test_a_state_that_is_detached_in_place_after_it_was_used() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.h, self.k = nn.Linear(3, 3), torch.zeros(2, 3), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.h * 0.9 + self.lin(x)
            self.k += 1
            if self.k % 4 == 0:
                self.h.detach_()
                y = y + self.h
            self.h = y
            doubled: torch.Tensor = y * 2
            return doubled

    def make(length: int) -> For:
        net = Net()
        return For(net, (torch.randn(length, 2, 3),), [net])

    assert_plain(make, 10, 20)


def test_a_bar_moves_once_even_if_the_backward_begins_again() -> None:
    class Bar:
        moved = 0

        def update(self, n: int) -> None:
            self.moved += n

    w, bar = torch.randn(3, requires_grad=True), Bar()

    def step(state: Any, x: torch.Tensor) -> Any:
        a, b, k = state
        return (torch.tanh(a * w + x), b + a if k > 30 else b + 1, k + 1), None

    (_, b, _), _ = lt.checkpointed_scan(step, (torch.zeros(3), torch.zeros(3), 0), torch.randn(40, 3), base=4, pbar=bar)
    b.sum().backward()
    assert bar.moved == 80


def test_steps_that_turn_grad_on_by_themselves() -> None:
    def make(length: int) -> Scan:
        lin = nn.Linear(3, 3)

        def step(state: Any, x: torch.Tensor) -> Any:
            h, t = state
            with torch.set_grad_enabled(t >= 4):
                h = torch.tanh(lin(x) + h)
            return (h, t + 1), None

        return Scan(step, (torch.zeros(2, 3), 0), torch.randn(length, 2, 3), [lin])

    assert_plain(make, 3, 30)


def test_one_tensor_in_two_places_of_the_results_has_one_gradient() -> None:
    def make(length: int) -> Scan:
        lin = nn.Linear(3, 3)

        def step(state: Any, x: torch.Tensor) -> Any:
            h = torch.tanh(lin(x) + state[0])
            return (h, h), (h, -h)

        return Scan(step, (torch.zeros(2, 3),) * 2, torch.randn(length, 2, 3), [lin])

    assert_plain(make, 1, 2, 9, options=[{"base": 4, "reduce": "last"}, {"reduce": "last"}])
    (a, b), (y, _) = lt.checkpointed_scan(make(5).step, make(5).init, make(5).xs, reduce="last")
    assert a is b is y


# --- kernels


def test_a_step_that_computes_something_else_without_grad_is_found_at_the_first_steps() -> None:
    def make(length: int) -> Scan:
        lin = nn.Linear(3, 3)

        def step(h: torch.Tensor, x: torch.Tensor) -> Any:
            h = torch.tanh(lin(x) + h) + (0 if torch.is_grad_enabled() else 1e-3)
            return h, h

        return Scan(step, torch.zeros(2, 3), torch.randn(length, 2, 3), [lin])

    assert_plain(make, 2, 30)


# --- modules of all kinds


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("v", torch.zeros(2, 3))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.v = 0.5 * self.v + self.norm(x) * self.calls
        return torch.tanh(self.v)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_modules_keep_their_state() -> None:
    def make(length: int) -> For:
        net = torch.jit.script(Scripted())

        def step(x: torch.Tensor) -> Any:
            with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]  # torch's own
                return net(x)

        return For(step, (torch.randn(length, 2, 3),), [net])

    assert_plain(make, 9)
    net = make(1).own[0]
    ys = lt.checkpointed_for_loop(net, torch.randn(9, 2, 3), base=2)
    ys.sum().backward()
    assert (net.calls, int(net.norm.num_batches_tracked)) == (9, 9)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_modules_are_to_be_initialised_before() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.LazyBatchNorm1d())
    with pytest.raises(InputError, match=r"1 \(LazyBatchNorm1d\) is not initialised.*call it on an input before"):
        lt.checkpointed_for_loop(net, torch.randn(9, 2, 3))
    net(torch.randn(2, 3))
    lt.checkpointed_for_loop(net, torch.randn(9, 2, 3)).sum().backward()


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(3).roll(1, 0).to_sparse())
        self.register_buffer("mask", torch.eye(3).to_sparse())

    def forward(self, h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.tanh(torch.sparse.mm(self.w, torch.sparse.mm(self.mask, h.t())).t() + x)
        return h, h


def test_sparse_parameters_and_buffers() -> None:
    def make(length: int) -> Scan:
        net = Sparse()
        return Scan(net, torch.zeros(2, 3), torch.randn(length, 2, 3), [net])

    assert_plain(make, 9, options=[{}, {"base": 4}, {"budget": "1MiB"}])


def test_hooks_of_parameters_without_a_gradient_are_not_called() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.used

    net, calls = Net(), list[str]()
    for name, p in net.named_parameters():
        p.register_hook(lambda grad, name=name: calls.append(name))
        p.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(f"{name} added"))
    for _ in range(2):  # the second time, what was added before is there
        lt.checkpointed_for_loop(net, torch.randn(9, 3), base=4).sum().backward()
    assert calls == ["used", "used added"] * 2
    (lt.checkpointed_for_loop(net, torch.randn(9, 3), base=4).sum() + net.unused.sum()).backward()
    assert sorted(calls[4:]) == ["unused", "unused added", "used", "used added"]
    lt.checkpointed_for_loop(net, torch.randn(9, 3), base=4).sum().backward()
    assert sorted(calls[8:]) == ["used", "used added"]


# --- while loops


@pytest.mark.parametrize("own", [False, True])
def test_a_condition_that_draws_random_numbers(own: bool) -> None:
    def make(length: int) -> While:
        lin, drop = nn.Linear(3, 3), nn.Dropout(0.3)
        g = torch.Generator().manual_seed(2) if own else torch.default_generator

        def body(h: torch.Tensor) -> torch.Tensor:
            return torch.tanh(drop(lin(h)))

        return While(lambda _: torch.rand((), generator=g).item() < 0.99, body, torch.ones(2, 3), [lin, g], most=length)

    options: list[dict[str, Any]] = [{}, {"checkpoints": 1}, {"checkpoints": 2}, {"checkpoints": 2, "lean": True}]
    assert_plain(make, 1, 9, options=options)


def test_a_list_in_a_module_that_grows_while_a_loop_runs() -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 3)
            self.past: list[Any] = []

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            self.past.append(h)
            result: torch.Tensor = torch.tanh(self.lin(h)) + sum(self.past)
            return result

    def make(length: int) -> While:
        body = Body()
        return While(lambda _: len(body.past) < length, body, torch.ones(2, 3), [body])

    assert_plain(make, 1, 2, 3, 9, options=[{}, {"checkpoints": 1}, {"checkpoints": 3}])


# --- transforms of functions


def loss(w: torch.Tensor, xs: torch.Tensor, loop: Any = lt.checkpointed_scan) -> torch.Tensor:
    h, _ = loop(lambda h, x: (torch.tanh(h * w + x), None), torch.zeros(3), xs)
    total: torch.Tensor = h.sum()
    return total


def test_transforms_around_a_loop_are_refused_with_what_works() -> None:
    w, xs = torch.randn(3), torch.randn(5, 3)
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.vmap):
        with pytest.raises(FunctionError, match=r"inside a transform of torch.func.*use lt.scan inside"):
            transform(partial(loss, xs=xs))(w)
    with pytest.raises(FunctionError, match="a plain `while` inside"):
        torch.func.grad(lambda w: lt.checkpointed_while_loop(lambda h: True, lambda h: h * w, w, max_steps=3).sum())(w)
    expected = torch.func.grad(partial(loss, loop=lt.scan))(w, xs)
    w.requires_grad_()
    assert torch.equal(torch.autograd.grad(loss(w, xs), w)[0], expected)


def test_a_lean_tape_is_not_made_of_a_transform() -> None:
    lin = nn.Linear(3, 3)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        return h + torch.func.jacrev(lin)(x), None

    with pytest.raises(InputError, match="leave out lean=True"):
        lt.checkpointed_scan(step, torch.zeros(3, 3), torch.randn(9, 3), base=2, lean=True)
    lt.checkpointed_scan(step, torch.zeros(3, 3), torch.randn(9, 3), base=2)[0].sum().backward()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        lt.checkpointed_for_loop(lin, torch.randn(9, 2, 4), base=2, lean=True)


# --- what is explained


LOOPS = [lt.scan, lt.checkpointed_scan]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_list_with_an_item_for_each_step_is_to_be_stacked(loop: Any) -> None:
    lin, items = nn.Linear(3, 3), [torch.randn(2, 3) for _ in range(5)]
    with pytest.raises(TypeError, match=r"a list of 5 tensors, .* torch\.stack\(xs\), or wrap it: lt\.Steps\(xs\)"):
        loop(lambda h, x: (lin(x) + h, None), torch.zeros(2, 3), items)
    loop(lambda h, x: (lin(x) + h, None), torch.zeros(2, 3), lt.Steps(items))
    with pytest.raises(InputError, match=r"unequal numbers of steps .* torch\.stack\(xs\)"):
        loop(lambda h, x: (h, None), torch.zeros(2, 3), [torch.ones(2), torch.ones(3)])


@pytest.mark.parametrize("loop", LOOPS)
def test_a_first_carry_that_is_missing(loop: Any) -> None:
    xs = torch.randn(5, 3)
    with pytest.raises(TypeError, match="init is None, so the first step got None"):
        loop(lambda h, x: (h + x, None), None, xs)
    with pytest.raises(InputError, match=r"how many steps\?.* f, init, xs"):
        loop(lambda h, x: (h + x, None), xs)


def test_numbers_in_place_of_tensors_are_not_added_up() -> None:
    with pytest.raises(InputError, match=r"without \.item\(\) or float\(\)"):
        lt.checkpointed_for_loop(lambda x: x.mean().item(), torch.randn(5, 3), reduce="mean")
    assert len(lt.checkpointed_for_loop(lambda x: x.mean().item(), torch.randn(5, 3))) == 5


def test_a_plan_for_a_smaller_batch_does_not_keep_the_budget_of_a_larger_one() -> None:
    cell = nn.GRUCell(3, 4)

    def run(batch: int, **options: Any) -> Any:
        make = lt.checkpointed_scan if "plan" in options else lt.plan_scan
        return make(lambda h, x: (cell(x, h), None), torch.zeros(batch, 4), torch.randn(20, batch, 3), **options)

    plan = run(2, budget="1MiB")
    run(2, plan=plan)[0].sum().backward()
    run(1, plan=plan)[0].sum().backward()
    with pytest.raises(InputError, match=r"of a larger batch\?\); plan again"):
        run(16, plan=plan)
    run(16, plan=run(2, base=4))[0].sum().backward()  # nothing was promised


@pytest.mark.parametrize(
    "options", [{"base": 2}, {"base": 2, "lean": True}, {"base": 2, "check_rerun": False}], ids=str
)
def test_iterators_and_lists_that_are_at_their_end_in_a_rerun(options: dict[str, Any]) -> None:
    lin = nn.Linear(3, 3)
    items = iter(torch.randn(9, 2, 3))
    with pytest.raises(
        CheckpointError, match=r"StopIteration.*an iterator that it takes items from.*lt\.Steps\(items\)"
    ):
        lt.checkpointed_for_loop(lambda _: lin(next(items)), torch.zeros(9), **options).sum().backward()
    stack = list(torch.randn(9, 2, 3))
    with pytest.raises(CheckpointError, match=r"pop from empty list.*a counter or a container.*Count in the carry"):
        lt.checkpointed_for_loop(lambda _: lin(stack.pop()), torch.zeros(9), **options).sum().backward()
