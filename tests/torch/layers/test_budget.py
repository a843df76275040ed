"""A budget is a promise: what layers hold beyond what the plain run holds too, measured, is at most the budget.

And a prediction: the plan's bill says how much it will be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torchs

import lowtide.torch as lt
from lowtide import BudgetError, Plan
from lowtide.chain import Chain
from lowtide.nest import has_forms
from lowtide.torch import measure
from lowtide.torch.layers.costs import measure_layers
from lowtide.torch.layers.sequential import LayerPlans, plan_sequential, sequential
from tests.torch.layers.layered import ROWS, Layered, norm_last, peak_of, plain, residual, transformer, u_shaped, vgg

SMALL: dict[str, Callable[[], Layered]] = {
    "vgg": lambda: vgg(width=4, batch=4, size=32),
    "vgg with x": lambda: vgg(width=4, batch=4, size=32, x_grads=True),
    "vgg not in place": lambda: vgg(width=4, batch=4, size=32, in_place=False),
    "u": lambda: u_shaped((64, 32, 16, 8, 4, 8, 16, 32, 64), batch=128),
    "u of halves": lambda: u_shaped((256, 128, 64, 32, 16, 8, 8, 16, 32, 64, 128, 256), batch=128),
    "transformer": lambda: transformer(blocks=8, width=16, batch=4, tokens=16),
    "norm last": lambda: norm_last(blocks=8, width=16, batch=4, tokens=16),
    "residual": lambda: residual(depth=30, width=16, batch=64),
}
LARGE: dict[str, Callable[[], Layered]] = {
    "vgg": lambda: vgg(width=16, batch=16, size=64),
    "vgg wide": lambda: vgg(width=32, batch=4, size=64),
    "u": lambda: u_shaped((512, 256, 128, 64, 32, 16, 32, 64, 128, 256, 512), batch=1024),
    "transformer": lambda: transformer(blocks=48, width=64, batch=4, tokens=64),
    "residual": lambda: residual(depth=100, width=64, batch=256),
}
# Not counted, because the plain run has them too: a second gradient of a weight used twice, what modules keep for the
# next call, what a layer differentiates inside.
UNCOUNTED = ("shared", "functions", "stateful", "slopes")
# States that pass by several layers are counted once for each.
COUNTED_TWICE = ("nested", "u_net", "u_net in place")


def least_of(row: Layered) -> int:
    with pytest.raises(BudgetError) as caught:
        plan_sequential(row.layers, row.x, budget=1)
    return caught.value.least


def run(budget: int | str, row: Layered) -> Any:
    return sequential(row.layers, row.x, budget=budget)


def check(row: Layered, budget: int, record: Callable[[str, object], None] | None = None) -> None:
    bill = plan_sequential(row.layers, row.x, budget=budget).bill
    peak = peak_of(row, partial(run, budget))
    assert peak <= bill.peak_memory <= budget
    assert peak >= 0.9 * bill.peak_memory
    if record is not None:
        record("figure", f"budget {budget:,} B: predicted {bill.peak_memory:,} B, measured {peak:,} B")


def shares(row: Layered, count: int) -> list[int]:
    least = least_of(row)
    everything = 1.1 * plan_sequential(row.layers, row.x).chain.plain_tape
    return [int(least + max(0.0, everything - least) * k / (count - 1)) for k in range(count)]


@pytest.mark.long
@pytest.mark.parametrize("count", [4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SMALL)
def test_the_measured_peak_is_within_the_budget_and_as_predicted(
    name: str, count: int, record_property: Callable[[str, object], None]
) -> None:
    torch.manual_seed(0)
    row = SMALL[name]()
    for budget in shares(row, count):
        check(row, budget, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_so_it_is_for_larger_ones(name: str, record_property: Callable[[str, object], None]) -> None:
    torch.manual_seed(0)
    row = LARGE[name]()
    for budget in shares(row, 8):
        check(row, budget, record_property)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in ROWS if name not in UNCOUNTED])
def test_so_it_is_for_rows_of_every_kind(name: str) -> None:
    torch.manual_seed(0)
    for share in range(3):
        row = ROWS[name]()
        budget = shares(row, 3)[share]
        if name in COUNTED_TWICE:
            assert peak_of(row, partial(run, budget)) <= budget
        else:
            check(row, budget)


@pytest.mark.untraced
@pytest.mark.parametrize("name", SMALL)
def test_with_no_budget_the_prediction_holds_too(name: str) -> None:
    torch.manual_seed(0)
    row = SMALL[name]()
    bill = plan_sequential(row.layers, row.x).bill
    peak = peak_of(row, lambda row: sequential(row.layers, row.x))
    assert 0.9 * bill.peak_memory <= peak <= bill.peak_memory
    assert bill.plain_runs < len(list(row.layers))


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_measuring_stays_within_the_least_budget(name: str) -> None:
    least = int(1.1 * least_of(SMALL[name]()))  # it depends a little on seconds where layers have buffers
    row = SMALL[name]()
    with measure.peak() as memory:
        result = sequential(row.layers, row.x, budget=least)
        largest = max(sum(p.nbytes for p in layer.parameters()) for layer in row.layers)
        assert memory.peak - result.nbytes <= least + 2 * largest  # a layer's own gradients, to time its backward


@pytest.mark.long
def test_a_share_of_all_tapes_is_a_budget_too() -> None:
    row = SMALL["transformer"]()
    tapes = plan_sequential(row.layers, row.x).chain.plain_tape
    for share in (20, 40, 90):
        budget = tapes * share // 100
        assert plan_sequential(row.layers, row.x, budget=f"{share}%").knob.value == budget
        assert peak_of(row, partial(run, f"{share}%")) <= budget


@pytest.mark.long
def test_all_tapes_are_kept_where_they_fit_and_nothing_runs_twice() -> None:
    row = SMALL["vgg"]()
    with lt.record() as receipt:
        sequential(row.layers, row.x, budget="1GB")
    assert receipt.plain_runs == 0


# --- beside torch's own


def torchs_run(segments: int, row: Layered) -> Any:
    return torchs.checkpoint_sequential(row.layers, segments, row.x, use_reentrant=False)


def extra_seconds(chain: Chain, bounds: list[int], layers_again: int) -> float:
    """Seconds, on paper, of running so many first layers once more."""
    return sum(chain[k].forward for k, stop in enumerate(bounds) if stop <= layers_again)


@pytest.mark.long
@pytest.mark.parametrize("name", ["vgg not in place", "u", "u of halves", "transformer", "norm last", "residual"])
def test_at_every_peak_of_torchs_the_plan_takes_less_extra_time_on_paper(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    torch.manual_seed(0)
    row = SMALL[name]()
    least, layers = least_of(row), len(list(row.layers))
    chain = plan_sequential(row.layers, row.x).chain
    stops = [int(step.split()[0].split("-")[-1]) + 1 for step in chain.names]
    ratios = []
    for segments in range(2, layers + 1, max(1, layers // 8)):
        peak = peak_of(row, partial(torchs_run, segments))
        if peak < least:
            continue
        again = layers // segments * (segments - 1)
        theirs = extra_seconds(chain, stops, again)
        ours = plan_sequential(row.layers, row.x, budget=peak).bill.seconds - chain.plain_seconds
        ratios.append((peak, ours / theirs))
        assert ours <= theirs * (1 + 1e-9)
    assert ratios
    record_property("figure", f"{name}: extra time at torch's lowest peak {min(ratios)[1]:.2f}x of torch's, on paper")


@pytest.mark.long
def test_a_deep_chain_at_two_roots_of_its_tapes_runs_layers_at_most_once_more() -> None:
    row = residual(depth=64, width=16, batch=64)
    chain = plan_sequential(row.layers, row.x).chain
    budget = 2 * 8 * max(chain[k].tape for k in range(len(chain)))
    plan = plan_sequential(row.layers, row.x, budget=budget)
    assert plan.bill.plain_runs <= 64
    assert plan.bill.seconds - chain.plain_seconds <= chain.forward_seconds(0, 64)


@pytest.mark.long
def test_a_layer_whose_input_no_tape_holds_is_a_step_if_its_own_tape_is_large() -> None:
    row = norm_last(blocks=5)
    names = plan_sequential(row.layers, row.x).chain.names
    assert names == tuple(f"{k} TransformerEncoderLayer" for k in range(5))
    layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Dropout(), nn.Softmax(-1), nn.Linear(8, 8))
    assert plan_sequential(layers, torch.ones(3, 8)).chain.names == (
        "0-1 Linear, ReLU",
        "2-4 Linear, Dropout, Softmax",
        "5 Linear",
    )


def test_the_byte_that_a_chain_has_for_the_callers_input_is_not_in_the_way() -> None:
    row = Layered(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2)), torch.randn(512, 64), [])
    row.leaves = list(row.layers.parameters())
    peak = peak_of(row, partial(torchs_run, 3))
    assert plan_sequential(row.layers, row.x, budget=peak).bill.peak_memory <= peak
    assert plan_sequential(row.layers, row.x).chain[0].state == 1


def test_no_budget_above_the_least_that_works_is_refused() -> None:
    """Checkpoint calls copy buffers, so that a plan for more of the chain may take less in all."""
    row = ROWS["stateful"]()
    measured = measure_layers(list(row.layers), row.x, forms=True)
    assert measured.chain is not None
    seconds = [(126, 217), (81, 130), (126, 165), (105, 121), (126, 165)]
    steps = [replace(measured.chain[k], forward=f, backward=b) for k, (f, b) in enumerate(seconds)]
    plans = LayerPlans(replace(measured, chain=measured.chain.with_steps(steps)))
    with pytest.raises(BudgetError) as caught:
        plans.plan(1)
    for budget in range(caught.value.least, 2 * caught.value.least):
        plan, _ = plans.plan(budget)
        assert plan.bill.peak_memory <= budget
        assert plan.knob.value == budget


def test_the_plain_run_holds_all_tapes() -> None:
    row = SMALL["residual"]()
    chain = plan_sequential(row.layers, row.x).chain
    assert peak_of(row, plain) >= chain.plain_tape
    assert isinstance(row.layers, nn.Sequential)


@pytest.mark.long
@pytest.mark.parametrize("name", ["transformer", "norm last"])
def test_a_plan_from_elsewhere_keeps_its_budget(name: str) -> None:
    torch.manual_seed(0)
    row, other = SMALL[name](), SMALL[name]()  # of the other nothing has been measured or traced
    measured, budget = measure_layers(list(row.layers), row.x, forms=True), shares(row, 8)[3]
    # With set times the choice does not depend on how busy the machine was: smaller tapes are the cheaper way.
    chain = measured.chain
    assert chain is not None
    steps = [
        replace(step, forward=1.0, backward=2.0, options=tuple(replace(form, extra=0.01) for form in step.options))
        for step in (chain[k] for k in range(len(chain)))
    ]
    plan, nest = LayerPlans(replace(measured, chain=chain.with_steps(steps))).plan(budget)
    assert has_forms(nest)
    plan = Plan.from_json(plan.to_json())
    peaks = [peak_of(other, lambda row: sequential(row.layers, row.x, plan=plan)) for _ in range(2)]
    assert max(peaks) <= budget
