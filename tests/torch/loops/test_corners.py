"""Rare ways through the loops, each met by somebody."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide import CheckpointError
from lowtide.torch.state.bits import same_bits
from lowtide.torch.state.trees import FormError, form_of


def test_a_tape_that_stays_while_later_steps_run() -> None:
    """A plan for unequal steps may tape a step, advance from there, and come back: its state starts anew."""
    from lowtide import Chain, Plan, StepCost
    from lowtide.plan import Knob
    from lowtide.planners.choose import choose

    w = torch.randn(3, 3, requires_grad=True)
    costs = [StepCost(100, tape) for tape in (100, 3000, 3000, 100, 3000, 3000, 100, 100)]

    def step(h: torch.Tensor, _: Any) -> Any:
        h = torch.tanh(h @ w)
        return h, h

    h, rows = torch.ones(2, 3), []
    for _ in range(8):
        h, y = step(h, None)
        rows.append(y)
    expected = torch.autograd.grad(torch.stack(rows).square().sum(), w)[0]
    for budget in (3500, 4000, 6400, 7000, 9000):
        plan = choose(Chain.of(costs), budget)
        assert isinstance(plan, Plan)
        assert plan.knob == Knob("budget", budget)
        _, ys = lt.checkpointed_scan(step, torch.ones(2, 3), length=8, plan=plan)
        assert same_bits(torch.autograd.grad(ys.square().sum(), w)[0], expected)


def test_hidden_state_that_takes_another_form_later() -> None:
    class Growing(nn.Module):
        """Keeps its last two outputs, once there are two."""

        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))
            self.past: tuple[torch.Tensor, ...] = ()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(x * self.w + sum(self.past))
            self.past = (*self.past[-4:], y)
            return y

    outcomes = []
    xs = torch.randn(25, 3)
    loops: list[tuple[Any, dict[str, Any]]] = [
        (None, {}),
        (lt.checkpointed_for_loop, {"base": 4}),
        (lt.checkpointed_for_loop, {}),
    ]
    for loop, options in loops:
        torch.manual_seed(0)
        net = Growing()
        ys = torch.stack([net(x) for x in xs]) if loop is None else loop(net, xs, **options)
        outcomes.append((ys, torch.autograd.grad(ys.square().sum(), net.w)[0]))
    for found in outcomes[1:]:
        assert all(same_bits(a, b) for a, b in zip(outcomes[0], found, strict=True))


def test_a_tensor_in_a_module_that_is_changed_in_place_only_later() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))
            self.v = torch.zeros(3)
            self.k = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.k += 1
            if self.k < 9:
                self.v = self.v * 0.5 + x
            else:
                self.v.mul_(0.5).add_(x)
            return self.v.clone() * self.w

    ys = lt.checkpointed_for_loop(Late(), torch.randn(20, 3), base=4)
    with pytest.raises(CheckpointError, match=r"Late\.v was changed in place at a later step"):
        ys.sum().backward()
    ys = lt.checkpointed_for_loop(Late(), torch.randn(20, 3), base=4, hidden=("v",))
    ys.sum().backward()


def test_arrays_numbers_and_large_lists_in_modules() -> None:
    class Keeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))
            self.array = np.zeros(2)
            self.table = list(range(5000))
            self.rate = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.array = self.array + 1
            self.rate *= 0.9
            return x * self.w * float(self.array[0]) * self.rate

    nets = [Keeper(), Keeper()]
    nets[1].load_state_dict(nets[0].state_dict())
    xs = torch.randn(12, 3)
    expected = torch.stack([nets[0](x) for x in xs])
    ys = lt.checkpointed_for_loop(nets[1], xs, checkpoints=2)
    assert same_bits(ys, expected)
    assert same_bits(torch.autograd.grad(ys.sum(), nets[1].w)[0], torch.autograd.grad(expected.sum(), nets[0].w)[0])
    assert nets[1].array[0] == 12
    assert nets[1].rate == nets[0].rate


def test_a_dictionary_that_gets_new_entries_late_is_carried_from_then_on() -> None:
    class Memo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))
            self.memo: dict[int, float] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if float(x[0]) > 10:
                self.memo[0] = self.memo.get(0, 1.0) * 1.5
            return x * self.w * self.memo.get(0, 1.0)

    xs = torch.ones(20, 3)
    xs[12:] = 11
    outcomes = []
    for run in (lt.for_loop, partial(lt.checkpointed_for_loop, base=4)):
        torch.manual_seed(0)
        net = Memo()
        memo = net.memo
        ys = run(net, xs)
        outcomes.append((ys, *torch.autograd.grad(ys.sum(), net.w)))
        assert net.memo is memo
        assert net.memo == {0: 1.5**8}
    assert all(map(same_bits, *outcomes))


def test_a_variable_that_is_bound_by_the_first_step_is_refused_as_others_of_a_closure() -> None:
    w = torch.randn(3, requires_grad=True)

    def make(bound: bool = False) -> Any:
        if bound:
            state = torch.zeros(3)

        def step(x: torch.Tensor) -> torch.Tensor:
            nonlocal state
            try:
                state = torch.tanh(state + x * w)
            except NameError:
                state = x * w
            return state

        return step

    with pytest.raises(CheckpointError, match="puts tensors with a gradient into state, "):
        lt.checkpointed_for_loop(make(), torch.randn(9, 3), base=2)


def test_partials_lists_and_callable_objects_are_looked_through() -> None:
    import functools

    class Cell:
        def __init__(self) -> None:
            self.linear = nn.Linear(3, 3)
            self.net = nn.Sequential(self.linear, lt.spiking.Expon(3.0))

        def __call__(self, scale: float, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.net(x) * scale
            return out

    torch.manual_seed(0)
    cell = Cell()
    xs = torch.randn(9, 2, 3)
    f = functools.partial(cell, 2.0)
    expected = lt.for_loop(f, xs)
    gradient = torch.autograd.grad(expected.sum(), cell.linear.weight)[0]
    lt.spiking.reset(cell.net)
    ys = lt.checkpointed_for_loop(f, xs, base=2)
    assert same_bits(ys, expected)
    assert same_bits(torch.autograd.grad(ys.sum(), cell.linear.weight)[0], gradient)


def test_a_pair_may_be_a_list_and_a_default_dict_a_carry() -> None:
    w = torch.randn(3, requires_grad=True)

    def step(carry: Any, x: torch.Tensor) -> Any:
        return [defaultdict(None, b=carry["b"] * w, a=carry["a"] + x), carry["a"]]

    init = defaultdict(None, a=torch.zeros(3), b=torch.ones(3))
    expected = lt.scan(step, init, torch.ones(5, 3))
    carry, ys = lt.checkpointed_scan(step, init, torch.ones(5, 3), base=2)
    assert same_bits(carry["b"], expected[0]["b"])
    assert same_bits(ys, expected[1])
    assert torch.autograd.grad(carry["b"].sum(), w)[0].shape == (3,)


def test_values_that_cannot_be_compared_are_the_same_only_if_identical() -> None:
    class Box:
        def __init__(self, item: Any, label: Any) -> None:
            self.item, self.label = item, label

    torch.utils._pytree.register_pytree_node(
        Box, lambda box: ([box.item], box.label), lambda items, label: Box(next(iter(items)), label)
    )
    labels = np.zeros(3)
    form = form_of(Box(1, labels))
    assert form.flatten(Box(2, labels)) == [2]
    with pytest.raises(FormError, match="beside its leaves"):
        form.flatten(Box(2, np.zeros(3)))


def test_the_default_device_is_the_same_in_reruns() -> None:
    w = torch.randn(3, requires_grad=True)
    with torch.device("meta"):
        ys = lt.checkpointed_for_loop(
            lambda x: x * w * float(torch.ones(1).is_meta), torch.ones(5, 3, device="cpu"), base=2
        )
    ys.sum().backward()
    assert w.grad is not None
    assert torch.equal(w.grad, torch.full((3,), 5.0))


def test_no_gradient_comes_back_from_a_second_derivative_of_nothing() -> None:
    w = torch.randn(3, requires_grad=True)
    moves: list[int] = []

    class Bar:
        def update(self, n: int) -> None:
            moves.append(n)

    h, ys = lt.checkpointed_scan(
        lambda h, x: (h * 0.5, (x * w).detach() + h), torch.ones(3), torch.ones(6, 3), base=2, pbar=Bar()
    )
    assert not ys.requires_grad
    assert not h.requires_grad
    h, ys = lt.checkpointed_scan(lambda h, x: ((h * w).sin(), h), torch.ones(3), torch.ones(6, 3), base=2, pbar=Bar())
    moves.clear()
    torch.autograd.grad(ys.sum(), w, create_graph=True)
    assert sum(moves) == 6


def test_a_probed_tape_that_is_needed_after_a_plain_step() -> None:
    """A budget with room for all but one tape: the second step's tape was used up by measuring, so it is made again."""
    w = torch.randn(8, 8, requires_grad=True)
    net = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.GELU())])
    runs = [0]

    def step(h: torch.Tensor, _: Any) -> Any:
        runs[0] += 1
        return torch.tanh(net(h) @ w), None

    init = torch.ones(64, 8)
    h = init
    for _ in range(3):
        h, _y = step(h, None)
    expected = torch.autograd.grad(h.sum(), w)[0]
    with pytest.warns(UserWarning, match="moved runs"):
        chain = lt.plan_scan(step, init, length=3, base=1).chain
    seen = set()
    for budget in range(int(1.2 * chain[0].tape), int(13 * chain[0].tape), chain[0].tape // 4):
        runs[0] = 0
        try:
            with lt.record(memory=False) as receipt:
                h, _y = lt.checkpointed_scan(step, init, length=3, budget=budget)
                found = torch.autograd.grad(h.sum(), w)[0]
        except ValueError:
            continue
        assert same_bits(found, expected)
        assert runs[0] == receipt.plain_runs + receipt.taping_runs + receipt.probe_runs
        seen.add((receipt.plain_runs, receipt.probe_runs))
    assert (0, 0) in seen


def test_a_while_loop_without_grad_and_in_a_comparison() -> None:
    w = torch.randn(3, requires_grad=True)

    def run() -> torch.Tensor:
        out: torch.Tensor = lt.checkpointed_while_loop(
            lambda c: c[1] < 9, lambda c: ((c[0] * w).sin(), c[1] + 1), (torch.ones(3), 0), budget="10KB"
        )[0]
        return out.sum()

    assert lt.compare_gradients(run).same
    with torch.no_grad():
        assert not run().requires_grad


def test_comparisons_put_generators_back() -> None:
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    w = torch.randn(3, requires_grad=True)
    found = lt.compare_gradients(
        lambda: lt.checkpointed_for_loop(lambda x: w * torch.rand(3, generator=generator), torch.ones(9, 3), base=2)
    )
    assert found.same
    assert torch.equal(generator.get_state(), before)


def test_check_rerun_with_steps_that_need_grad() -> None:
    w = torch.randn(3, requires_grad=True)

    def step(h: torch.Tensor, _: Any) -> Any:
        h = (h * w).sin()
        if h.requires_grad:
            h.register_hook(lambda g: g)
        return h, h

    h, rows = torch.ones(3), []
    for _ in range(9):
        h, y = step(h, None)
        rows.append(y)
    expected = torch.autograd.grad(torch.stack(rows).sum(), w)[0]
    knobs: list[dict[str, Any]] = [{"check_rerun": True}, {"advance_with_grad": True}]
    for options in knobs:
        _, ys = lt.checkpointed_scan(step, torch.ones(3), length=9, base=3, **options)
        assert same_bits(torch.autograd.grad(ys.sum(), w)[0], expected)


def test_a_window_of_outputs_is_carried_with_grad_too() -> None:
    w = torch.randn(3, requires_grad=True)

    def step(window: Any, x: torch.Tensor) -> Any:
        y = torch.tanh(sum(window) * w + x)
        return (*window[1:], y), y

    xs = torch.randn(19, 3)
    init = (torch.zeros(3), torch.ones(3), torch.zeros(3))
    window, rows = init, []
    for x in xs:
        window, y = step(window, x)
        rows.append(y)
    expected = torch.autograd.grad(torch.stack(rows).square().sum(), w)[0]
    knobs: list[dict[str, Any]] = [{"base": 1}, {"base": 4}, {"checkpoints": 2}, {}, {"budget": "50KB"}]
    for options in knobs:
        for with_grad in (False, True):
            _, ys = lt.checkpointed_scan(step, init, xs, advance_with_grad=with_grad, **options)
            loss = ys.square().sum()
            for _ in range(2):
                assert same_bits(torch.autograd.grad(loss, w, retain_graph=True)[0], expected)


def test_a_late_change_that_does_not_come_again_is_as_in_the_plain_loop() -> None:
    calls = [0]

    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))
            self.mode = "first"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            if calls[0] == 15:
                self.mode = "second"
            return x * self.w

    net, xs = Once(), torch.randn(20, 3)
    lt.checkpointed_for_loop(net, xs, base=4).sum().backward()
    assert net.mode == "second"
    assert net.w.grad is not None
    assert same_bits(net.w.grad, torch.autograd.grad(sum((x * net.w).sum() for x in xs), net.w)[0])


def test_attributes_that_go_and_modules_that_are_met_when_called() -> None:
    w = torch.randn(3, requires_grad=True)

    class Cell:
        def __init__(self) -> None:
            self.first = True
            self.nets = {"a": nn.Sequential(nn.Linear(3, 3), lt.spiking.Expon(4.0))}

        def step(self, x: torch.Tensor) -> torch.Tensor:
            if hasattr(self, "first"):
                del self.first
            out: torch.Tensor = self.nets["a"](x) * w
            return out

    torch.manual_seed(0)
    cell = Cell()
    xs = torch.randn(11, 2, 3)
    expected = lt.for_loop(cell.step, xs)
    lt.spiking.reset(cell.nets["a"])
    ys = lt.checkpointed_for_loop(cell.step, xs, base=3)
    assert same_bits(ys, expected)
    assert same_bits(torch.autograd.grad(ys.sum(), w)[0], torch.autograd.grad(expected.sum(), w)[0])


def test_one_step_with_state_in_a_budget_and_a_while_loop_of_none() -> None:
    net = nn.Sequential(nn.Linear(3, 3), lt.spiking.LIF(4.0))
    ys = lt.checkpointed_for_loop(net, torch.randn(1, 2, 3), budget="1MB")
    assert torch.autograd.grad(ys.sum(), list(net.parameters()))[0].shape == (3, 3)
    init = (torch.ones(2), 5)
    assert lt.checkpointed_while_loop(lambda c: c[1] < 5, lambda c: c, init) is init


def _same_gradients(make: Any, knobs: list[dict[str, Any]] | None = None) -> None:
    """`make(loop, **options)` gives gradients; with Lowtide they are the plain loop's."""
    expected = make(lt.scan)
    for options in knobs or [{"base": 1}, {"base": 4}, {"checkpoints": 2}, {"base": 100}, {}]:
        found = make(lt.checkpointed_scan, **options)
        assert len(found) == len(expected)
        for a, b in zip(expected, found, strict=True):
            assert same_bits(a, b) if isinstance(a, torch.Tensor) else a == b


def test_several_outputs_of_one_operation_are_captured() -> None:
    def make(loop: Any, **options: Any) -> Any:
        torch.manual_seed(0)
        w = torch.randn(2, 4, 4, requires_grad=True)
        a, b = (w * 0.5).unbind(0)
        _, ys = loop(lambda h, x: (torch.tanh(h @ a + x @ b),) * 2, torch.zeros(2, 4), torch.randn(23, 2, 4), **options)
        return torch.autograd.grad(ys.sum(), w)

    _same_gradients(make)


def test_hooks_and_kept_gradients_of_captured_tensors() -> None:
    def make(loop: Any, **options: Any) -> Any:
        torch.manual_seed(0)
        a = torch.randn(4, 4, requires_grad=True)
        w = a * 0.5
        w.retain_grad()
        calls: list[int] = []
        w.register_hook(lambda g: calls.append(1) or g * 2)  # type: ignore[func-returns-value]  # on purpose
        _, ys = loop(lambda h, x: (torch.tanh(h @ w + x),) * 2, torch.zeros(2, 4), torch.randn(23, 2, 4), **options)
        ys.square().sum().backward()
        return [a.grad, w.grad, len(calls)]

    _same_gradients(make)


def test_the_same_tensor_twice_in_the_carry() -> None:
    def make(loop: Any, **options: Any) -> Any:
        torch.manual_seed(0)
        w = torch.randn(3, 3, requires_grad=True)
        xs = torch.randn(15, 2, 3, requires_grad=True)

        def step(carry: Any, x: torch.Tensor) -> Any:
            a, b, last = carry
            h = torch.tanh(a @ w + b.sin() + last * x)
            return (h, h, x), h

        zeros = torch.zeros(2, 3)
        _, ys = loop(step, (zeros, zeros, zeros), xs, **options)
        return torch.autograd.grad(ys.square().sum(), [w, xs])

    _same_gradients(make)


def test_the_backward_may_run_in_another_thread() -> None:
    import threading

    def make(loop: Any, **options: Any) -> Any:
        torch.manual_seed(0)
        w, v = torch.randn(8, 8, requires_grad=True), torch.randn(8, requires_grad=True)

        def step(h: torch.Tensor, x: torch.Tensor) -> Any:
            h = torch.tanh(h @ w + x * v) + 0.1 * h * v
            return h, h.sin()

        loss = loop(step, torch.zeros(4, 8), torch.randn(23, 4, 8), **options)[1].square().sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return [w.grad, v.grad]

    _same_gradients(make)


def test_a_tensor_used_in_a_window_only_is_refused_at_its_step() -> None:
    weights = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]

    def step(carry: Any, x: torch.Tensor) -> Any:
        h, k = carry
        h = torch.tanh(h @ weights[k == 9] + x)
        return (h, k + 1), h

    _, ys = lt.checkpointed_scan(step, (torch.zeros(2, 4), 0), torch.randn(23, 2, 4), base=4)
    with pytest.raises(CheckpointError, match="step 9 uses a tensor"):
        ys.sum().backward()


def test_values_that_change_places_are_seen() -> None:
    draws = iter(np.random.default_rng(0).integers(6, size=10_000).tolist())
    w = torch.randn(6, requires_grad=True)

    def step(_: Any, x: torch.Tensor) -> Any:
        action = torch.zeros(1, 6)
        action[0, next(draws)] = 1.0
        y = action + (w - w.detach()) * action
        return y, y

    _, ys = lt.checkpointed_scan(step, torch.zeros(1, 6), torch.ones(23, 1), base=4)
    with pytest.raises(CheckpointError, match="does not do what it did at first"):
        ys.sum().backward()


def test_tensors_that_leave_the_loop_by_a_list_are_refused() -> None:
    w = torch.randn(3, requires_grad=True)
    seen: list[torch.Tensor] = []

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.tanh(h * w + x)
        seen.append(h)
        return h, h

    with pytest.raises(CheckpointError, match="puts tensors with a gradient into seen"):
        lt.checkpointed_scan(step, torch.zeros(3), torch.randn(9, 3), base=3)


def test_a_carry_changed_in_place_in_the_middle_of_a_stretch() -> None:
    from lowtide import InputError

    w = torch.randn(4, requires_grad=True)

    def step(carry: Any, x: torch.Tensor) -> Any:
        h, k = carry
        if k == 7:
            with torch.no_grad():
                h.zero_()
        h = h * w.detach() + x * w
        return (h, k + 1), h

    for base in (4, 100):
        with pytest.raises(InputError, match=r"step 7 changed carry\[0\] in place"):
            lt.checkpointed_scan(step, (torch.zeros(2, 4), 0), torch.randn(23, 2, 4), base=base)


class _Collector(nn.Module):
    """Keeps every output, a window of them, a set and an array changed in place."""

    def __init__(self) -> None:
        from collections import deque

        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.5)
        self.all: list[torch.Tensor] = []
        self.window = deque([torch.zeros(2, 3)] * 3, maxlen=3)
        self.seen: set[int] = set()
        self.count = np.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.seen.add(len(self.seen))
        y = torch.tanh(self.drop(self.linear(x + self.window[0]))) * float(self.count[0])
        self.window.append(y)
        self.all.append(y)
        return y


def test_collections_in_modules_and_a_mode_switched_in_between() -> None:
    for length in (9, 1100):
        outcomes = []
        for loop, options in ((lt.for_loop, {}), (lt.checkpointed_for_loop, {"base": 40})):
            torch.manual_seed(0)
            net, xs = _Collector(), torch.randn(length, 2, 3)
            lt.plan_for_loop(net, xs, base=4)
            assert (len(net.all), len(net.seen), net.count[0]) == (0, 0, 0)
            assert all(entry.abs().sum() == 0 for entry in net.window)
            torch.manual_seed(1)
            run: Any = loop
            run(net, xs, **options)
            net.eval()
            loss = torch.stack(net.all).square().sum()
            outcomes.append((loss, *torch.autograd.grad(loss, list(net.parameters()))))
            assert (len(net.all), len(net.seen), net.count[0], net.training) == (length, length, length, False)
        for a, b in zip(*outcomes, strict=True):
            torch.testing.assert_close(a, b)


def test_generators_are_where_they_were_before_the_backward() -> None:
    own, xs = torch.Generator().manual_seed(5), torch.randn(12, 3, requires_grad=True)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.tanh(nn.functional.dropout(h + x, 0.5) + torch.rand(3, generator=own))
        return h, h * float(np.random.rand())  # noqa: NPY002  (what layers use)

    def draws() -> list[float]:
        return [float(torch.rand(1)), float(torch.rand(1, generator=own)), float(np.random.rand())]  # noqa: NPY002

    outcomes = []
    for goes_back in (False, True):
        torch.manual_seed(0)
        own.manual_seed(5)
        np.random.seed(0)  # noqa: NPY002
        ys = lt.checkpointed_scan(step, torch.zeros(3), xs, checkpoints=2)[1]
        drawn = draws()
        if goes_back:
            ys.sum().backward()
        outcomes.append([*drawn, *draws()])
    assert outcomes[0] == outcomes[1]


def test_planning_leaves_what_steps_change_in_place() -> None:
    norm = nn.BatchNorm1d(3)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    lt.plan_for_loop(norm, torch.randn(9, 4, 3), budget="100KB")
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())


@pytest.mark.parametrize("options", [{"base": 4}, {"checkpoints": 2}, {}], ids=str)
def test_the_last_output_may_have_no_gradient_where_the_others_have_one(options: dict[str, Any]) -> None:
    w = torch.randn(3, requires_grad=True)

    def step(h: torch.Tensor, k: torch.Tensor) -> Any:
        h = torch.tanh(h * w + 0.1)
        return h, h.detach() if k == 9 else h

    final, y = lt.checkpointed_scan(step, torch.ones(3), torch.arange(10), reduce="last", **options)
    assert final.requires_grad
    assert not y.requires_grad
