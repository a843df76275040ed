"""An applied plan: the same module object, run another way in training, and exactly as before once it is taken away."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide import InputError, Plan
from lowtide.torch import measure
from lowtide.torch.model.apply import PlannedForward
from tests.torch.models import Model, model, schedule_of, train
from tests.torch.odd_blocks import WIDTH, Mlp
from tests.torch.odd_models import odd, on_x
from tests.torch.planned import KINDS, inside, made_of, measured, plan_of, products


@pytest.mark.parametrize("kind", KINDS)
def test_it_stays_the_object_that_it_is(kind: str) -> None:
    made = made_of(kind)
    module = made.module
    before, state = inside(module), module.state_dict()
    parameters, names, text = dict(module.named_parameters()), [n for n, _ in module.named_modules()], repr(module)
    signatures = [inspect.signature(part.forward) for part in module.modules()]
    assert lt.apply(plan_of(kind), module) is None  # type: ignore[func-returns-value]
    assert any(isinstance(part.__dict__.get("forward"), PlannedForward) for part in module.modules())
    assert list(module.state_dict()) == list(state)
    assert all(a is b for a, b in zip(module.parameters(), parameters.values(), strict=True))
    assert [name for name, _ in module.named_parameters()] == list(parameters)
    assert [name for name, _ in module.named_modules()] == names
    assert repr(module) == text
    assert [inspect.signature(part.forward) for part in module.modules()] == signatures
    lt.unapply(module)
    assert inside(module) == before
    lt.unapply(module)
    assert inside(module) == before


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_the_plain_ones_and_the_forms_are_used(kind: str) -> None:
    plain = train(made_of(kind))
    made = made_of(kind)
    lt.apply(plan_of(kind), made.module)
    found = train(made)
    found.assert_same(plain)
    assert train(made, seed=1).peak < plain.peak


def test_a_planned_forward_says_how_it_runs() -> None:
    made = made_of("rerun")
    lt.apply(plan_of("rerun"), made.module)
    assert repr(made.module.blocks[0].forward) == "<forward of Mlp: rerun>"  # type: ignore[index, union-attr]


@pytest.mark.parametrize("kind", KINDS)
def test_in_eval_and_without_grad_nothing_is_run_again(kind: str) -> None:
    made, plain = made_of(kind), made_of(kind)
    lt.apply(plan_of(kind), made.module)

    def step(one: Model) -> None:
        one.run()[1].backward()

    def forward(one: Model) -> None:
        with torch.no_grad():
            one.run()

    step(made)  # traced
    step(plain)
    assert products(lambda: step(plain)) <= products(lambda: step(made))
    assert products(lambda: forward(plain)) == products(lambda: forward(made))
    for one in (made, plain):
        one.module.eval()
        with torch.no_grad():
            for parameter in one.module.parameters():
                parameter.copy_(torch.ones_like(parameter))
    assert products(lambda: step(plain)) == products(lambda: step(made))
    train(made).assert_same(train(plain))
    with torch.inference_mode():
        assert torch.equal(made.module(*made.args), plain.module(*plain.args))


def test_reruns_are_there_in_training() -> None:
    made, plain = made_of("rerun"), made_of("rerun")
    lt.apply(plan_of("rerun"), made.module)
    with lt.record() as receipt:
        train(made)
    more = products(lambda: made.run()[1].backward()) - products(lambda: plain.run()[1].backward())
    assert more == 3 * 2  # three blocks, each with two products
    assert receipt.kept_whole == 0
    made.module.eval()
    assert products(lambda: made.run()[1].backward()) == products(lambda: plain.run()[1].backward())
    made.module.train()
    assert products(lambda: made.run()[1].backward()) - products(lambda: plain.run()[1].backward()) == more


def test_a_model_that_is_trained_in_eval_mode_runs_as_planned_in_it() -> None:
    made, plain = odd("in eval"), odd("in eval")
    lt.apply(made.plan(made.least()), made.module)
    found = train(made)
    found.assert_same(train(plain))
    assert found.peak < train(plain).peak


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_plan_counts(kind: str) -> None:
    made = made_of(kind)
    before = inside(made.module)
    lt.apply(measured(KINDS[kind][0]), made.module)  # keeps everything
    assert inside(made.module) == before
    lt.apply(plan_of(kind), made.module)
    lt.apply(plan_of(kind), made.module)
    once = made_of(kind)
    lt.apply(plan_of(kind), once.module)
    assert products(lambda: train(made)) == products(lambda: train(once))
    lt.unapply(made.module)
    assert inside(made.module) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies_have_the_plan_too(kind: str, how: str) -> None:
    made = made_of(kind)
    lt.apply(plan_of(kind), made.module)
    if how == "deepcopy":
        module = copy.deepcopy(made.module)
    elif how == "pickle":
        module = pickle.loads(pickle.dumps(made.module))
    else:
        file = io.BytesIO()
        torch.save(made.module, file)
        file.seek(0)
        module = torch.load(file, weights_only=False)
    planned = [part.__dict__["forward"] for part in module.modules() if "forward" in part.__dict__]
    assert planned
    assert all(isinstance(forward, PlannedForward) for forward in planned)
    assert all(forward.module in set(module.modules()) for forward in planned)
    copied, plain = made._replace(module=module), made_of(kind)
    expected = train(plain)
    found = train(copied)
    found.assert_same(expected)
    assert train(copied).peak < expected.peak
    assert all(parameter.grad is None for parameter in made.module.parameters())  # those of the original
    lt.unapply(module)
    assert not any("forward" in part.__dict__ for part in module.modules())
    assert any("forward" in part.__dict__ for part in made.module.modules())


@pytest.mark.long
def test_a_plan_from_json_runs_another_model_of_the_kind() -> None:
    first = model("gpt2")
    peak = first.least()
    plan = Plan.from_json(first.plan(peak).to_json())
    second, plain = model("gpt2", seed=5), model("gpt2", seed=5)
    lt.apply(plan, second.module)
    found = train(second)
    found.assert_same(train(plain))
    assert found.peak <= peak


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("towers", "the plan has a block 'blocks.0', and this Towers has none; plan again with plan_model"),
        ("one layer", "the plan has a block 'blocks.0', and this Linear has none; plan again with plan_model"),
    ],
)
def test_a_plan_for_another_model(name: str, said: str) -> None:
    made = odd(name)
    before = inside(made.module)
    with pytest.raises(InputError, match=re.escape(said)):
        lt.apply(plan_of("rerun"), made.module)
    assert inside(made.module) == before


def test_a_plan_for_another_model_leaves_the_one_that_is_applied() -> None:
    made = odd("towers")
    lt.apply(made.plan(made.least()), made.module)
    before = inside(made.module)
    with pytest.raises(InputError):
        lt.apply(plan_of("rerun"), made.module)
    assert inside(made.module) == before


def _apply_and_run(plan: Plan, made: Model) -> None:
    lt.apply(plan, made.module)
    made.run()


def test_a_plan_for_more_layers_than_there_are() -> None:
    made = on_x(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh()), 4, 3, 16, 16)
    with pytest.raises(InputError, match=r"the plan is for \d+ layers, and this Sequential has 2; plan again with"):
        _apply_and_run(plan_of("nest"), made)


def test_a_row_is_planned_for_a_sequential_alone() -> None:
    """Whatever else has as many submodules may call them otherwise."""
    row = made_of("nest").module
    other = nn.ModuleList(list(row.children()))
    with pytest.raises(InputError, match=r"the plan is for an nn\.Sequential, and this ModuleList is none; plan"):
        lt.apply(plan_of("nest"), other)
    assert not any("forward" in part.__dict__ for part in other.modules())


def test_what_is_no_plan_for_a_model() -> None:
    made = made_of("rerun")
    row = lt.plan_sequential([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)], torch.randn(2, 4))
    said = "the plan is one by {}, not one for a model; make one with plan_model"
    with pytest.raises(InputError, match=re.escape(said.format(row.planner))):
        lt.apply(row, made.module)
    with pytest.raises(InputError, match="the plan is a str, not one for a model; make one with plan_model"):
        lt.apply("8GiB", made.module)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"model is a list; give an nn\.Module"):
        lt.apply(plan_of("rerun"), [])  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"model is a NoneType; give an nn\.Module"):
        lt.unapply(None)  # type: ignore[arg-type]


def test_a_form_that_nobody_knows() -> None:
    plan = plan_of("rerun")
    with pytest.raises(InputError, match="there is no form with 'sideways': the plan is not of this version"):
        Plan.from_json(plan.to_json().replace('"rerun": true', '"sideways": true'))
    chain = plan.chain
    nameless = tuple(replace(option, name="sideways", form=None) for option in chain[0].options)
    steps = [replace(chain[k], options=nameless if chain[k].options else ()) for k in range(len(chain))]
    said = "there is no form 'sideways': the plan was not made by plan_model of this version"
    with pytest.raises(InputError, match=said):
        lt.apply(replace(plan, chain=chain.with_steps(steps)), made_of("rerun").module)


def test_planning_a_model_with_a_plan_is_planning_it_without() -> None:
    made = made_of("rerun")
    lt.apply(plan_of("rerun"), made.module)
    before = inside(made.module)
    plan = made.plan("1GB")
    assert set(schedule_of(plan).options) == {0}
    assert inside(made.module) == before
    assert plan.bill.peak_memory == measured("tied").bill.peak_memory


@pytest.mark.long
def test_plan_and_apply_in_one_line() -> None:
    made, plain = model("gpt2"), model("gpt2")
    peak = made.least()
    plan = lt.auto_checkpoint(made.module, peak=peak, **made.kwargs)
    assert plan.knob.value == peak
    found = train(made)
    found.assert_same(train(plain))
    assert found.peak <= peak


@pytest.mark.long
def test_a_receipt_has_the_measured_peak() -> None:
    made = model("gpt2")
    peak = made.least()
    plan = lt.auto_checkpoint(made.module, peak=peak, **made.kwargs)
    found = train(made)
    made.module.zero_grad()
    torch.manual_seed(1)
    with lt.record() as receipt:
        output, loss = made.run()
        loss.backward()
    del output
    parts = plan.chain.parameters + schedule_of(plan).optimizer + schedule_of(plan).inputs
    assert parts == made._replace(module=model("gpt2").module).resident
    assert parts + receipt.peak_memory == found.peak


class Wrapped(nn.Module):
    """What others wrap models in."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_a_wrapped_model_is_told_apart() -> None:
    said = "this Wrapped has none (give its .module, which it wraps); plan again with plan_model"
    with pytest.raises(InputError, match=re.escape(said)):
        lt.apply(plan_of("rerun"), Wrapped(made_of("rerun").module))


@pytest.mark.long
def test_a_block_of_its_own_is_measured_like_any_other() -> None:
    made = on_x(nn.Sequential(*(Mlp() for _ in range(4))), 32, WIDTH)
    before = measure.storage_bytes(list(made.module.parameters()))
    least = made.least()
    plan = made.plan(least)
    assert plan.chain.parameters == before
    lt.apply(plan, made.module)
    assert train(made).peak <= least
