"""Layers within a budget give what the plain run gives, to the last bit, and cost what the plan says."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide import BudgetError, CheckpointError, InputError, Plan
from lowtide.chain import Chain, Disk, StepCost, TapeOption
from lowtide.nest import nest_of_plan
from lowtide.planners.choose import choose, least_budget
from lowtide.torch.layers.sequential import Sequential, checkpoint_sequential, plan_sequential, sequential
from tests.torch.layers.layered import ROWS, Layered, assert_same, kept_by, outcome, plain, residual, u_shaped, vgg


def budgets(row: Layered, count: int) -> list[int]:
    """From the least that works to a little more than all tapes take."""
    chain = plan_sequential(row.layers, row.x).chain
    least = least_of(row)
    most = max(least, 1.2 * chain.plain_tape)
    return [int(least + (most - least) * k / (count - 1)) for k in range(count)]


def run_at(share: int, count: int, row: Layered) -> Any:
    return sequential(row.layers, row.x, budget=budgets(row, count)[share])


def least_of(row: Layered) -> int:
    with pytest.raises(BudgetError) as caught:
        plan_sequential(row.layers, row.x, budget=1)
    return caught.value.least


# --- the same results


@pytest.mark.long
@pytest.mark.parametrize("name", ROWS)
def test_results_and_gradients_are_the_plain_runs_to_the_last_bit(name: str) -> None:
    make = ROWS[name]
    wanted = outcome(make, plain)
    assert_same(outcome(make, lambda row: sequential(row.layers, row.x)), wanted)
    for share in range(4):
        assert_same(outcome(make, partial(run_at, share, 4)), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("seed", range(5))
def test_so_they_are_at_many_budgets(name: str, seed: int) -> None:
    make = ROWS[name]
    wanted = outcome(make, plain, seed)
    for share in range(12):
        assert_same(outcome(make, partial(run_at, share, 12), seed), wanted)


@pytest.mark.untraced
@pytest.mark.parametrize("name", ["vgg", "transformer", "nested", "u_net"])
def test_second_derivatives_are_the_plain_ones(name: str) -> None:
    def twice(row: Layered, budget: int | None) -> list[torch.Tensor | None]:
        torch.manual_seed(3)
        result = plain(row) if budget is None else sequential(row.layers, row.x, budget=budget)
        result = result[0] if isinstance(result, tuple) else result
        grads = torch.autograd.grad(result.square().sum(), row.leaves, create_graph=True, allow_unused=True)
        total = sum(grad.square().sum() for grad in grads if grad is not None)
        assert isinstance(total, torch.Tensor)
        return list(torch.autograd.grad(total, row.leaves, allow_unused=True))

    def fresh() -> Layered:
        torch.manual_seed(1)
        return ROWS[name]()

    least = budgets(fresh(), 3)[1]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        pairs = zip(twice(fresh(), least), twice(fresh(), None), strict=True)
        assert all(a is b or torch.equal(a, b) for a, b in pairs)  # type: ignore[arg-type]  # None is None


def test_hooks_on_layers_and_parameters_fire_as_in_the_plain_run() -> None:
    row = residual()
    fired: list[str] = []
    for k, layer in enumerate(row.layers):
        layer.first.weight.register_hook(lambda _, k=k: fired.append(f"gradient {k}"))
        layer.register_full_backward_hook(
            lambda *_, k=k: fired.append(f"backward {k}") if not lt.is_recomputing() else None
        )
    plain(row).sum().backward()
    wanted, fired[:] = list(fired), []
    sequential(row.layers, row.x, budget=least_of(row)).sum().backward()
    assert fired == wanted


def test_autocast_is_as_in_the_plain_run() -> None:
    def run(row: Layered, planned: bool) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return sequential(row.layers, row.x) if planned else plain(row)

    assert_same(outcome(vgg, lambda row: run(row, True)), outcome(vgg, lambda row: run(row, False)))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's own, between its parts
def test_in_code_that_is_compiled_layers_run_as_they_are() -> None:
    def run(row: Layered, planned: bool) -> Any:
        model = Sequential(row.layers) if planned else row.layers
        compiled = torch.compile(lambda x: torch.sin(model(torch.cos(x))), backend="eager")
        return compiled(row.x)

    assert_same(outcome(residual, lambda row: run(row, True)), outcome(residual, lambda row: run(row, False)))


def test_what_is_compiled_is_told_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    row = residual()
    assert torch.equal(sequential(row.layers, row.x), plain(row))
    assert torch.equal(checkpoint_sequential(row.layers, 2, row.x), plain(row))


def test_in_a_transform_of_functions_layers_run_plainly() -> None:
    row = residual()
    model = Sequential(row.layers, budget=1)
    parameters = dict(row.layers.named_parameters())
    x = row.x.detach()

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = torch.func.functional_call(model, parameters, (x,))
        return result.sum()

    seen = torch.func.grad(loss)(parameters)
    wanted = torch.autograd.grad(plain(row).sum(), list(parameters.values()))
    assert all(torch.allclose(grad, want) for grad, want in zip(seen.values(), wanted, strict=True))


# --- what it costs


@pytest.mark.untraced
@pytest.mark.parametrize(
    "name", ["vgg", "u_shaped", "transformer", "residual", "functions", "nested", "u_net", "frozen"]
)
def test_receipts_equal_bills(name: str) -> None:
    row = ROWS[name]()
    for budget in (None, *budgets(row, 6)):
        plan = plan_sequential(row.layers, row.x, budget=budget)
        row.x = row.x if isinstance(row.x, tuple) else row.x.detach().requires_grad_(row.x.requires_grad)
        with lt.record() as receipt:
            result = sequential(row.layers, row.x, budget=budget)
            result = result[0] if isinstance(result, tuple) else result
            result.sum().backward(retain_graph=name in ("u_net", "functions"))
        bill = plan.bill
        assert (receipt.plain_runs, receipt.taping_runs) == (bill.plain_runs, bill.taping_runs)
        assert (receipt.backward_runs, receipt.probe_runs) == (bill.backward_runs, 0)


@pytest.mark.long
def test_layers_are_measured_once_for_each_form_of_input() -> None:
    row = residual()

    def probes(x: torch.Tensor, budget: int | str | None = None) -> int:
        with lt.record() as receipt:
            sequential(row.layers, x, budget=budget).sum().backward()
        return receipt.probe_runs

    assert probes(row.x) > 0
    assert probes(torch.randn(4, 8, requires_grad=True)) == 0
    assert probes(row.x, "80%") == 0
    assert probes(torch.randn(4, 8)) > 0
    assert probes(torch.randn(5, 8, requires_grad=True)) > 0
    row.layers[2].first.weight.requires_grad_(False)
    assert probes(row.x) > 0
    row.layers.eval()
    assert probes(row.x) > 0
    assert probes(row.x) == 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert probes(row.x) > 0


def test_without_grad_nothing_is_measured_and_every_layer_runs_once() -> None:
    calls: list[torch.Tensor] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return x * 2

    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        assert torch.equal(sequential([double] * 4, x, budget=1), x * 16)
    assert len(calls) == 4


def test_layers_that_need_no_gradient_run_plainly() -> None:
    layers = [torch.sin, torch.cos, lambda x: x * 2]
    x = torch.randn(3)
    assert torch.equal(sequential(layers, x, budget=1), x.sin().cos() * 2)
    with pytest.raises(InputError, match="none of the 3 layers makes a tape"):
        plan_sequential(layers, x)


def test_layers_without_shapes_yet_run_plainly_at_first() -> None:
    def make() -> Layered:
        model = nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.Dropout(), nn.LazyLinear(2))
        return Layered(model, torch.randn(3, 4), [])

    def run(row: Layered, planned: bool) -> Any:
        result = sequential(row.layers, row.x) if planned else plain(row)
        row.leaves += row.layers.parameters()
        return result

    with pytest.raises(InputError, match="parameters without a shape yet"):
        plan_sequential(make().layers, torch.randn(3, 4))
    assert_same(outcome(make, lambda row: run(row, True)), outcome(make, lambda row: run(row, False)))


def test_a_comparison_runs_them_plainly_too() -> None:
    row = residual()
    comparison = lt.compare_gradients(lambda x: sequential(row.layers, x, budget=least_of(row)), row.x)
    assert comparison.same


# --- measuring leaves no trace


def everything(row: Layered) -> dict[str, Any]:
    grads = {f"grad {k}": leaf.grad for k, leaf in enumerate(row.leaves) if leaf.is_leaf}
    numpy_state = np.random.get_state()[1].tobytes()  # type: ignore[index]  # noqa: NPY002
    return kept_by(row) | grads | {"rng": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy_state}


@pytest.mark.untraced
@pytest.mark.parametrize("name", ROWS)
def test_measuring_leaves_no_trace(name: str) -> None:
    row = ROWS[name]()
    objects = [{key: id(value) for key, value in vars(module).items()} for module in row.modules]
    inputs = [t.detach().clone() for t in torch.utils._pytree.tree_leaves(row.x)]
    before = everything(row)
    plan_sequential(row.layers, row.x)
    assert_same(everything(row), before)
    assert [{key: id(value) for key, value in vars(module).items()} for module in row.modules] == objects
    assert all(map(torch.equal, torch.utils._pytree.tree_leaves(row.x), inputs))


@pytest.mark.parametrize("fails", ["in the forward", "in the backward"])
def test_a_layer_that_fails_leaves_no_trace(fails: str) -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            if fails == "in the forward":
                raise OSError("the layer's own")
            return x * 2

        @staticmethod
        def backward(*_: Any) -> Any:
            raise OSError("the layer's own")

    def draw(x: torch.Tensor) -> torch.Tensor:
        return x * random.random() * np.random.rand()  # noqa: NPY002

    norm = nn.BatchNorm1d(4)
    row = Layered([norm, nn.Dropout(), draw, Failing.apply, norm], torch.randn(3, 4), list(norm.parameters()), [norm])
    norm.weight.grad = torch.ones(4)
    before = everything(row)
    for run in (sequential, plan_sequential):
        with pytest.raises(OSError, match="the layer's own"):
            run(row.layers, row.x)
        assert_same(everything(row), before)


@pytest.mark.parametrize("make", [vgg, residual])
def test_a_budget_that_is_too_small_is_an_error_that_names_the_least_and_changes_nothing(
    make: Callable[[], Layered],
) -> None:
    row = make()
    before = everything(row)
    with pytest.raises(
        BudgetError, match=r"no plan fits budget=100 B: the least that works is [\d,]+ B; raise"
    ) as caught:
        sequential(row.layers, row.x, budget="100B")
    assert_same(everything(row), before)
    least = caught.value.least
    with pytest.raises(BudgetError):
        sequential(row.layers, row.x, budget=least - 1 if make is residual else int(0.95 * least))
    sequential(row.layers, row.x, budget=least)


def test_parts_inside_one_another_are_not_more_than_the_stack_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.torch.layers.sequential._MOST_DEPTH", 5)
    row = residual()
    least = least_budget(plan_sequential(row.layers, row.x).chain)
    with pytest.raises(BudgetError, match="the least that works") as caught:
        plan_sequential(row.layers, row.x, budget=least)
    plan = plan_sequential(row.layers, row.x, budget=caught.value.least)
    assert max(part.depth for part in nest_of_plan(plan)) <= 5


# --- plans


@pytest.mark.parametrize("name", ROWS)
def test_a_plan_runs_again_from_its_json(name: str) -> None:
    make = ROWS[name]

    def run(row: Layered) -> Any:
        text = plan_sequential(row.layers, row.x, budget=budgets(row, 4)[1]).to_json()
        return sequential(row.layers, row.x, plan=Plan.from_json(text))

    assert_same(outcome(make, run), outcome(make, plain))


def test_a_plans_steps_are_named_after_their_layers() -> None:
    row = vgg()
    names = plan_sequential(row.layers, row.x).chain.names
    assert names[:3] == ("0 Conv2d", "1-2 BatchNorm2d, ReLU", "3 Conv2d")
    assert names[-3:] == ("44-45 Linear, ReLU", "46 Dropout", "47 Linear")
    layers = [torch.sin, torch.cos, lambda x: x * 2]
    assert plan_sequential(layers, torch.ones(2, requires_grad=True)).chain.names == ("0 sin", "1-2 cos, <lambda>")


STEP = StepCost(state=2, tape=3)


@pytest.mark.parametrize(
    "chain", [Chain.equal(STEP, 9), Chain.of(StepCost(k % 3 + 1, k % 4 + 3, forward=k + 1.0) for k in range(9))]
)
@pytest.mark.parametrize(
    "knob", [{}, {"base": 4}, {"checkpoints": 2}, {"budget": 10}, {"budget": "60%"}, {"budget": 99}]
)
def test_every_plan_that_a_planner_makes_runs(chain: Chain, knob: dict[str, Any]) -> None:
    plan = choose(chain, **knob)
    row = residual(9)
    wanted = torch.autograd.grad(plain(row).sum(), row.leaves)
    with lt.record() as receipt:
        seen = torch.autograd.grad(sequential(row.layers, row.x, plan=plan).sum(), row.leaves)
    assert all(map(torch.equal, seen, wanted))
    assert (receipt.plain_runs, receipt.taping_runs) == (plan.bill.plain_runs, plan.bill.taping_runs)


def test_plans_with_a_disk_or_smaller_tapes_are_refused() -> None:
    layers = residual(9)
    on_disk = choose(Chain.equal(STEP, 9), 12, disk=Disk(0.0, 0.0))
    lean = choose(Chain.equal(StepCost(2, 6, options=(TapeOption(2, 0.0),)), 9), 24)
    for plan, why in ((on_disk, "is not one for layers"), (lean, "which layers do not have; plan again")):
        with pytest.raises(InputError, match=why):
            sequential(layers.layers, layers.x, plan=plan)


# --- what cannot be used


def test_bad_layers() -> None:
    x = torch.ones(2)
    for call in (sequential, plan_sequential):
        with pytest.raises(InputError, match=r"layers is a Linear; give an nn.Sequential, an nn.ModuleList, or a list"):
            call(nn.Linear(2, 2), x)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="layers is a generator"):
            call((layer for layer in [torch.sin]), x)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"layers\[1\]=3 is a int, which cannot be called; give a function"):
            call([torch.sin, 3], x)  # type: ignore[list-item]


def test_no_layers() -> None:
    x = torch.ones(2)
    assert sequential([], x) is x
    with pytest.raises(InputError, match="there are 0 layers, which need no plan; give at least one"):
        plan_sequential(nn.Sequential(), x)


def test_two_knobs_and_knobs_of_the_wrong_kind() -> None:
    row = residual()
    plan = plan_sequential(row.layers, row.x)
    with pytest.raises(InputError, match=r"budget='1MiB' and plan=<Plan.* are two knobs; give one of budget, plan"):
        sequential(row.layers, row.x, budget="1MiB", plan=plan)
    with pytest.raises(InputError, match="plan='best' is a str; give what plan_sequential returned"):
        sequential(row.layers, row.x, plan="best")  # type: ignore[arg-type]
    for budget, message in {
        1.5: "is a float",
        True: "is a boolean",
        "64M": "the unit 'M'",
        0: "less than one byte",
        "120%": "at most 100%",
    }.items():
        for call in (sequential, plan_sequential):
            with torch.no_grad(), pytest.raises(InputError, match=message):
                call(row.layers, row.x, budget=budget)  # type: ignore[arg-type]


def test_a_plan_for_another_number_of_layers() -> None:
    row = residual(6)
    plan = plan_sequential(row.layers, row.x)
    with pytest.raises(InputError, match="the plan is for 6 layers, and there are 5; plan again with plan_sequential"):
        sequential(row.layers[:5], row.x, plan=plan)
    unnamed = choose(Chain.equal(STEP, 6), 99)
    with pytest.raises(InputError, match="the plan is for 6 layers, and there are 7"):
        sequential(residual(7).layers, row.x, plan=unnamed)
    misnamed = choose(Chain.of([STEP] * 6, "abcdef"), 99)
    with pytest.raises(InputError, match="the plan's steps are not layers, but 'a'; plan again"):
        sequential(row.layers, row.x, plan=misnamed)


# --- the module


def wrapped() -> tuple[nn.Sequential, Sequential, torch.Tensor]:
    row = vgg()
    return row.layers, Sequential(row.layers, budget="60%"), row.x


def test_the_module_takes_the_submodules_under_their_names() -> None:
    model, planned, _ = wrapped()
    assert list(planned.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(planned, model, strict=True))
    planned.load_state_dict(model.state_dict())
    named = nn.Sequential()
    named.add_module("one", nn.Linear(2, 2))
    assert list(Sequential(named).state_dict()) == ["one.weight", "one.bias"]
    assert "budget='60%'" in repr(planned)
    assert isinstance(planned, nn.Sequential)


@pytest.mark.long
def test_the_module_gives_what_the_model_gives() -> None:
    def run(row: Layered) -> Any:
        with lt.record() as receipt:
            result = Sequential(row.layers, budget=budgets(row, 4)[1])(row.x)
        assert receipt.plain_runs > 0
        return result

    assert_same(outcome(vgg, run), outcome(vgg, plain))


def test_the_module_follows_train_and_eval() -> None:
    model, planned, x = wrapped()
    planned.eval()
    assert not model[0].training
    assert torch.equal(planned(x), model.eval()(x))
    planned.train()
    assert model[1].training
    assert not Sequential(model.eval()).training


@pytest.mark.long
def test_copies_and_pickles_of_the_module_work() -> None:
    _, planned, x = wrapped()
    for twin in (copy.deepcopy(planned), pickle.loads(pickle.dumps(planned))):
        assert twin.budget == "60%"
        torch.manual_seed(0)
        wanted = planned(x)
        torch.manual_seed(0)
        assert torch.equal(twin(x), wanted)
        assert twin[0] is not planned[0]


def test_the_module_is_indexed_and_changed_like_any_sequential() -> None:
    model, planned, _ = wrapped()
    assert planned[0] is model[0]
    assert planned[-1] is model[47]
    part = planned[1:4]
    assert isinstance(part, Sequential)
    assert list(part._modules) == ["1", "2", "3"]
    assert part.budget == "60%"
    planned.append(nn.Tanh())
    assert len(planned) == 49
    planned.insert(0, nn.Identity())
    planned.extend([nn.Identity()])
    planned.pop(0)
    del planned[-1]
    planned[0] = model[0]
    assert len(planned) == 49
    assert len(planned + model) == 97


def test_a_module_with_a_plan_runs_it() -> None:
    row = vgg()
    plan = plan_sequential(row.layers, row.x, budget=budgets(row, 4)[1])
    planned = Sequential(row.layers, plan=plan)
    with lt.record() as receipt:
        planned(row.x).sum().backward()
    assert receipt.plain_runs == plan.bill.plain_runs
    assert receipt.probe_runs == 0
    assert "plan=<Plan of" in repr(planned)
    with pytest.raises(InputError, match="the plan is for 48 layers, and there are 49"):
        planned.append(nn.Tanh())(row.x)


def test_a_module_of_something_else_is_refused() -> None:
    with pytest.raises(InputError, match=r"model is a ModuleList; give an nn.Sequential"):
        Sequential(nn.ModuleList())  # type: ignore[arg-type]
    with pytest.raises(InputError, match="is a float"):
        Sequential(nn.Sequential(), budget=0.5)  # type: ignore[arg-type]


# --- what is remembered


def test_plans_for_many_budgets_are_made_as_they_are_asked_for() -> None:
    row = residual(4)
    low, high = budgets(row, 2)
    peaks = [
        plan_sequential(row.layers, row.x, budget=low + (high - low) * k // 40).bill.peak_memory for k in range(41)
    ]
    assert peaks == sorted(peaks)


def test_what_is_known_of_layers_does_not_keep_them_alive() -> None:
    row = residual()
    sequential(row.layers, row.x)
    gone = weakref.ref(row.layers[0])
    del row
    gc.collect()
    assert gone() is None


def probe_runs(layers: list[Any], x: Any) -> int:
    """How often layers run to be measured: 0 where that is known."""
    with lt.record(memory=False) as receipt:
        sequential(layers, x)
    return receipt.probe_runs


def test_layers_of_every_kind_are_known_again() -> None:
    linear = nn.Linear(2, 2)
    unbound: Any

    def closes(x: torch.Tensor) -> Any:
        return linear(x) if x is not None else unbound

    held = partial(torch.add, other=linear.weight)
    for x in (torch.ones(2, 2), torch.ones(2, 2).t().expand(2, 2, 2)):
        assert probe_runs([torch.sin, linear.forward, closes, held, nn.functional.relu], x)
        assert not probe_runs([torch.sin, linear.forward, closes, held, nn.functional.relu], x)
    linear.eval()
    assert probe_runs([torch.sin, linear.forward, closes, held, nn.functional.relu], x)
    unbound = 1


def test_other_leaves_of_an_input_are_other_inputs() -> None:
    w = torch.randn(2, 2, requires_grad=True)

    def layer(pair: Any) -> Any:
        return pair[0] @ w, pair[1]

    layers, options = [layer, layer], {"a": 3, "b": None}
    assert probe_runs(layers, (torch.ones(2, 2), options))
    assert not probe_runs(layers, (torch.ones(2, 2), {"a": 3, "b": None}))
    assert probe_runs(layers, (torch.ones(2, 2), {"a": 4, "b": None}))
    assert probe_runs(layers, (torch.ones(2, 2), torch.eye(2).to_sparse()))
    assert not probe_runs(layers, (torch.ones(2, 2), torch.eye(2).to_sparse()))


def test_layers_without_weak_references_are_measured_each_time() -> None:
    w = torch.randn(2, 2, requires_grad=True)

    class Slotted:
        __slots__ = ()

        def __call__(self, x: Any) -> Any:
            return x @ w

    slotted = Slotted()
    assert probe_runs([slotted], torch.ones(2, 2))
    assert probe_runs([slotted], torch.ones(2, 2))


def test_sparse_and_expanded_states_pass_through() -> None:
    w = torch.randn(3, 3, requires_grad=True)
    layers = [
        lambda x: (x, torch.eye(3).to_sparse()),
        lambda pair: (pair[1] @ (pair[0] @ w), pair[1]),
        lambda pair: (pair[0].sum().expand(3, 3), pair[1]),
        lambda pair: pair[0] @ w,
        lambda x: torch.eye(3).to_sparse() @ torch.tanh(x),
    ]
    x = torch.randn(3, 3)
    wanted = torch.autograd.grad(plain(Layered(layers, x, [w])).sum(), w)
    assert torch.equal(torch.autograd.grad(sequential(layers, x).sum(), w)[0], wanted[0])


def test_a_layer_may_cut_the_gradient() -> None:
    row = Layered([nn.Linear(3, 3), torch.detach, nn.Linear(3, 3), torch.tanh], torch.ones(2, 3), [])
    weight = row.layers[2].weight
    wanted = torch.autograd.grad(plain(row).sum(), weight)
    assert torch.equal(torch.autograd.grad(sequential(row.layers, row.x).sum(), weight)[0], wanted[0])


def test_a_layer_may_pull_something_back_itself() -> None:
    def pulls(x: torch.Tensor) -> torch.Tensor:
        (x * 2).sum().backward()
        return torch.tanh(x.detach())

    first = nn.Linear(3, 3)
    assert len(plan_sequential([first, pulls, nn.Linear(3, 3)], torch.ones(2, 3)).chain) > 1
    assert first.weight.grad is None


def test_contexts_are_entered_for_reruns() -> None:
    inside: list[bool] = [False]

    @contextmanager
    def entered() -> Iterator[None]:
        inside[0] = True
        yield
        inside[0] = False

    def layer(x: torch.Tensor) -> torch.Tensor:
        assert inside[0]
        return torch.sin(x)

    x = torch.randn(64, requires_grad=True)
    with entered():
        plan = plan_sequential([layer] * 6, x)
        y = sequential([layer] * 6, x, plan=plan, contexts=[entered])
    assert plan.bill.plain_runs
    y.sum().backward()
    assert x.grad is not None


def test_a_rerun_that_computes_something_else_is_an_error_if_it_is_checked() -> None:
    calls = count()

    def differs(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) + next(calls)

    x = torch.randn(64, requires_grad=True)
    with pytest.warns(UserWarning, match=r"layer 0 .*differs\) computes something else.*moved calls"):
        plan = plan_sequential([differs] * 6, x)
    assert plan.bill.plain_runs
    with pytest.raises(CheckpointError, match="differs from the first run"):
        sequential([differs] * 6, x, plan=plan, check_rerun=True).sum().backward()


def test_the_u_shape_costs_less_where_it_is_narrow() -> None:
    row = u_shaped(batch=256)
    chain = plan_sequential(row.layers, row.x).chain
    assert chain[6].tape < chain[2].tape
    assert chain[6].tape < chain[11].tape
