"""The forms of real plans, and of models whose parts have odd names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide import CheckpointError, Plan
from lowtide.chain import Role
from lowtide.forms import KEEP, RERUN, LeanForm, Way, form_named
from lowtide.torch.model.apply import PlannedForward, unapplied
from lowtide.torch.model.forms import run_way
from tests.torch.models import MODELS, Model, model, train
from tests.torch.odd_blocks import WIDTH, Mlp
from tests.torch.odd_models import odd, row_of


@pytest.mark.long
@pytest.mark.parametrize("name", [*MODELS, "vgg", "torch's own", "dictionary"])
def test_the_forms_of_real_plans(name: str) -> None:
    """Every menu begins with keep, has the others once each, and their text is what earlier versions wrote."""
    made = model(name) if name in MODELS else odd(name)
    chain = made.plan("1GB").chain
    for k in range(len(chain)):
        forms = [option.form for option in chain[k].menu]
        assert forms[0] == KEEP
        if chain.role(k) is Role.BLOCK:
            assert len(set(forms)) == len(forms) > 1
            assert [form_named(str(form)) for form in forms] == forms
            assert RERUN in forms
        else:
            assert len(forms) == 1


class OddlyNamed(nn.Module):
    """Its parts have names that forms are written with."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a b": Mlp(), "c: rerun; d": Mlp()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        for part in self.parts.values():
            x = part(x)
        return x


@pytest.mark.long
def test_submodules_with_the_oddest_names() -> None:
    def fresh() -> Model:
        torch.manual_seed(0)
        return row_of(OddlyNamed)

    plain = train(fresh())
    least = fresh().least()
    for peak in (least, (least + plain.peak) // 2):
        made = fresh()
        lt.apply(Plan.from_json(made.plan(peak).to_json()), made.module)
        found = train(made)
        found.assert_same(plain)
        assert found.peak <= peak


@pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated:DeprecationWarning")
def test_blocks_with_a_scripted_part_are_kept_or_run_again_as_a_whole() -> None:
    """A lean tape is traced, which would undo what TorchScript made."""

    def fresh() -> Model:
        torch.manual_seed(0)
        made = row_of(Mlp)
        for block in made.module.blocks:  # type: ignore[union-attr]
            block.up = torch.jit.script(block.up)
        return made

    plain = train(fresh())
    least = fresh().least()
    made = fresh()
    plan = made.plan(least)
    for k in plan.chain.blocks():
        assert [option.form for option in plan.chain[k].menu] == [KEEP, RERUN]
    lt.apply(plan, made.module)
    found = train(made)
    found.assert_same(plain)
    assert found.peak <= least < plain.peak


class _CountedBack(torch.autograd.Function):
    """The same numbers; its backward counts those that are not 0."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, cotangent: torch.Tensor) -> Any:
        torch.nonzero(cotangent)
        return cotangent


class _Counting(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _CountedBack.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return out


def test_blocks_whose_shapes_depend_on_values_have_no_lean_tape() -> None:
    """In the backward too: each call may have another tape."""
    chain = row_of(_Counting).plan("1GB").chain
    forms = [option.form for k in chain.blocks() for option in chain[k].menu]
    assert RERUN in forms
    assert not any(form is not None and form.is_lean for form in forms)
    plain = row_of(Mlp).plan("1GB").chain
    assert any(option.form is not None and option.form.is_lean for k in plain.blocks() for option in plain[k].menu)


def test_a_lean_tape_that_was_planned_for_smaller_arguments_keeps_more_and_says_so() -> None:
    block, x = Mlp(), torch.randn(3, WIDTH, requires_grad=True)
    torch.manual_seed(1)
    expected = torch.autograd.grad(block(x).sum(), x)[0]
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="Plan with the largest arguments that will come"):
        y = run_way(Way(lean=LeanForm(1, 1)), block, (x,), {})
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


@pytest.mark.filterwarnings("ignore:a lean tape of")
@pytest.mark.parametrize("lean", [None, LeanForm(1, 1)], ids=str)
def test_reruns_of_either_form_are_compared_as_asked(lean: LeanForm | None) -> None:
    class Drifting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * numbers.pop(0)).sin()

    def backward(check_rerun: bool | None) -> None:
        numbers[:] = [1.0, 2.0, 2.0, 2.0]
        x = torch.randn(3, requires_grad=True)
        run_way(Way(rerun=True, lean=lean), Drifting(), (x,), {}, check_rerun).sum().backward()

    numbers: list[float] = []
    backward(False)
    for compared in (None, True):
        with pytest.raises(CheckpointError, match="differs from the first run"):
            backward(compared)


def test_what_others_have_put_around_a_plan_is_there_again_after_a_run_without_it() -> None:
    block = Mlp()
    planned = PlannedForward(block, Way(rerun=True), in_eval=True)
    planned.install()

    def around(x: torch.Tensor) -> Any:
        return 2 * planned(x)

    block.__dict__["forward"] = around
    with unapplied(block):
        assert not planned.is_on
    assert planned.is_on
    assert block.__dict__["forward"] is around
