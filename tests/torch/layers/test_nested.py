"""Layers in nested checkpoint calls: who calls steps in smaller forms how often, and nests as forms of a block."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

import lowtide.torch as lt
from lowtide import InputError, Plan
from lowtide.chain import Chain, StepCost, TapeOption
from lowtide.forms import LayerNest, lean_form, nest_written
from lowtide.nest import Part, copied_by, has_forms, kept_by, nest_of_plan, starts
from lowtide.plan import Knob, Schedule
from lowtide.planners.unequal import Hetero
from lowtide.torch.layers.costs import lean_points
from lowtide.torch.layers.nested import Forms, Layer, Runner, run_lean, run_nest
from lowtide.torch.lean.graph import LeanSize
from lowtide.torch.state.bits import same_bits
from tests.torch.planned import products

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks

MENU = (TapeOption(4, 0.1), TapeOption(3, 0.2))

# Advance over three steps, of which two are advanced over once more; steps 0 and 3 are taped in one form, 2 in another.
DEEP = Hetero((3, -1, 0, 2, -2, -1, 0))
DEEP_NEST = (
    Part(0, 3, (Part(0, 2, (Part(0, 1, option=1), Part(1, 2))), Part(2, 3, option=2))),
    Part(3, 4, option=1),
    Part(4, 5),
)


def planned(schedule: Schedule, length: int) -> Plan:
    return Plan.make(Chain.of([StepCost(2, 6 + k, options=MENU) for k in range(length)]), Knob("none"), schedule)


class Standin:
    """Calls layers with saved-tensor hooks of its own, which leave what is saved to those around them, and notes it."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self.saved = 0

    def __call__(self, layers: tuple[Layer, ...], step: int, option: int, state: Any) -> Any:
        self.calls.append((step, option))
        pack, unpack = _top_hooks(False) or (lambda tensor: (tensor.detach(),), lambda packed: packed[0])
        with saved_tensors_hooks(self._counted(pack), unpack):
            for layer in layers:
                state = layer(state)
        return state

    def _counted(self, pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def counting(tensor: torch.Tensor) -> Any:
            self.saved += 1
            return pack(tensor)

        return counting


def test_what_checkpoint_calls_hold_does_not_depend_on_forms() -> None:
    whole = nest_of_plan(planned(Hetero((3, 0, 0, 2, 0, 0, 0)), 5))
    for nest in (whole, DEEP_NEST):
        assert kept_by(nest, (1, 10, 100, 1000, 10_000)) == 2 * (111 + 11)  # and as much put aside in reruns
        assert copied_by(nest, (1, 10, 100, 1000, 10_000)) == [2, 2, 1, 0, 0]
        assert starts(nest) == {0}


def test_every_run_of_a_step_goes_through_the_same_function() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(3, 3, requires_grad=True) for _ in range(5)]
    x = torch.randn(2, 3, requires_grad=True)

    def layer(k: int) -> Layer:
        return lambda state: (state @ weights[k]).tanh()

    steps = tuple((layer(k), torch.sin) for k in range(5))
    expected = x
    for layers in steps:
        for each in layers:
            expected = each(expected)
    wanted = torch.autograd.grad(expected.sum(), [x, *weights])

    lean, plan = Standin(), planned(DEEP, 5)
    with lt.record(memory=False) as recording:
        y = Runner(steps, {"check_rerun": True}, lean).run(nest_of_plan(plan), x)
        assert lean.calls == [(0, 1), (2, 2), (3, 1)]
        found = torch.autograd.grad(y.sum(), [x, *weights])
    # The outer part again, whose inner part is run for the second time and then for the third.
    assert lean.calls[3:] == [(0, 1), (2, 2), (0, 1)]
    assert lean.saved == 6 * 4  # for each call, two of the product and one each of tanh and sin
    assert same_bits(y, expected)
    assert all(map(same_bits, found, wanted))
    bill, receipt = plan.bill, recording.receipt
    assert (receipt.plain_runs, receipt.taping_runs, receipt.backward_runs) == (
        bill.plain_runs,
        bill.taping_runs,
        bill.backward_runs,
    )


def test_steps_have_no_lean_forms_where_hooks_are_off() -> None:
    x = torch.ones(3, requires_grad=True)
    assert lean_points((torch.sin, torch.exp, torch.tanh), x)
    with disable_saved_tensors_hooks("none here"):
        assert lean_points((torch.sin, torch.exp, torch.tanh), x) == []


def test_a_lean_form_without_gradients_is_a_plain_run() -> None:
    forms = Forms(Chain.of([StepCost(2, 6, options=(TapeOption(4, 0.1, form=lean_form(4, 0)),))]))
    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        assert same_bits(forms((torch.sin, torch.exp), 0, 1, x), x.sin().exp())


def test_a_form_that_is_not_found_here_is_refused() -> None:
    layers = (nn.Linear(4, 4), nn.GELU())
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(InputError, match=r"no lean tape was found here of 0 B.*plan again with plan_sequential"):
        run_lean(layers, x, LeanSize(0, 0))
    assert not has_forms(nest_of_plan(planned(Hetero((3, 0, 0, 2, 0, 0, 0)), 5)))
    assert has_forms(DEEP_NEST)


def test_a_step_in_a_smaller_form_runs_plainly_without_gradients() -> None:
    chain = Chain.equal(StepCost(16, 32, options=(TapeOption(16, 0.0, form=lean_form(0, 0)),)), 1)
    x = torch.ones(4)
    with torch.no_grad():
        assert torch.equal(Forms(chain)((torch.sin,), 0, 1, x), torch.sin(x))


# Layers in nested checkpoint calls, as a form of a model's block


def row(count: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.GELU()) for _ in range(count)))


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("0-4", [1, 1, 1, 1, 1]),
        ("0 (1) 2-4", [1, 2, 1, 1, 1]),
        ("(0-1 (2) 3) 4", [2, 2, 3, 2, 1]),
        ("0 1~0+0 2-4", None),
    ],
)
@pytest.mark.filterwarnings("ignore:a lean tape of .* was planned, and this call allows none:UserWarning")
def test_it_runs_the_layers_with_the_plain_bits(text: str, runs: list[int] | None) -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    layers = row()

    def step(nest: LayerNest | None) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(1)
        y = layers(x) if nest is None else run_nest(nest, layers, x)
        return (y, *torch.autograd.grad(y.square().sum(), [x, *layers.parameters()]))

    expected, nest = step(None), nest_written(text)
    for _ in range(2):
        assert all(map(torch.equal, step(nest), expected))
    if runs is not None:
        assert products(lambda: step(nest)) - products(lambda: step(None)) == sum(runs) - len(runs)


@pytest.mark.parametrize("count", [4, 6])
def test_for_another_number_of_layers(count: int) -> None:
    said = f"the plan is for 5 layers, and this Sequential has {count}; plan again with plan_model"
    with pytest.raises(InputError, match=re.escape(said)):
        run_nest(nest_written("0 (1-3) 4"), row(count), torch.randn(2, 8))
