from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.chain import Chain, Role, StepCost, TapeOption, Working
from lowtide.errors import BudgetError, InputError
from lowtide.plan import FrontierPoint, Knob, Plan
from lowtide.planners.blocks import Blocks, block_frontier, choose_blocks, frontier_of, least_peak
from lowtide.planners.choose import choose
from lowtide.simulate import simulate
from tests.planners.strategies import chains

Pair = tuple[int, float]


def all_choices(chain: Chain) -> list[Pair]:
    """Peak and extra seconds of every choice there is, as playing it on paper finds them."""
    menus = [range(len(chain[k].menu)) for k in range(len(chain))]
    plans = [Plan.make(chain, Knob("peak", 1), Blocks(options)) for options in itertools.product(*menus)]
    bills = [simulate(plan) for plan in plans]
    return [(bill.peak_memory, bill.seconds - chain.plain_seconds) for bill in bills]


def unbeaten(pairs: list[Pair]) -> list[Pair]:
    """Those that no other beats, from the largest peak to the least."""
    best: list[Pair] = []
    for peak, extra in sorted(set(pairs)):
        if not best or extra < best[-1][1]:
            best.append((peak, extra))
    return best[::-1]


def judged(chain: Chain, points: tuple[FrontierPoint, ...]) -> list[object]:
    """The points as playing their choices on paper finds them."""
    bills = [simulate(Plan.make(chain, Knob("peak", point.peak), Blocks(point.options))) for point in points]
    return [(bill.peak_memory, pytest.approx(bill.seconds - chain.plain_seconds, abs=1e-9)) for bill in bills]


@pytest.mark.long
@settings(max_examples=200)
@given(chains(most=6))
def test_the_frontier_is_that_of_all_choices(chain: Chain) -> None:
    points = block_frontier(chain)
    assert [(point.peak, point.extra) for point in points] == unbeaten(all_choices(chain)) == judged(chain, points)


def transformer(blocks: int, entries: int, seed: int) -> Chain:
    """Blocks with menus of so many entries, as measuring finds them, and what happens around them."""
    rng = random.Random(seed)
    around, mib = 900 << 20, 1 << 20
    steps = [StepCost(1, 1, 0.0, 0.004, working=Working(backward=around + 300 * mib))]
    for _ in range(blocks):
        tape, forward = rng.randint(60, 90) * mib + 512 * rng.randint(0, 999), rng.uniform(0.004, 0.006)
        options, extra = [], 0.0
        for form in range(1, entries):
            extra += rng.uniform(0.05, 0.4) * forward
            backward = around + form * rng.randint(2, 9) * mib
            options.append(TapeOption(tape * (entries - form) // entries, extra, f"lean {form}", backward))
        working = Working(0, around, around + rng.randint(5, 20) * mib)
        steps.append(StepCost(1, tape, forward, 2 * forward, working=working, options=tuple(options)))
    steps.append(StepCost(1, 1, 0.001, 0.001, working=Working(backward=around + 150 * mib)))
    names = ["(optimizer step)", *(f"layers.{k}" for k in range(blocks)), "(loss)"]
    return Chain.of(steps, names, [Role.OPTIMIZER, *[Role.BLOCK] * blocks, Role.LOSS])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_it_is_exact_in_megabytes_and_milliseconds(seed: int) -> None:
    chain = transformer(5, 5, seed)
    points = block_frontier(chain)
    expected = unbeaten([(peak, round(extra, 12)) for peak, extra in all_choices(chain)])
    assert [point.peak for point in points] == [peak for peak, _ in expected]
    assert [point.extra for point in points] == pytest.approx([extra for _, extra in expected])


@settings(max_examples=60)
@given(chains(most=8), st.integers(2, 6))
def test_fewer_points_promise_only_what_they_keep(chain: Chain, most: int) -> None:
    exact, thinned = block_frontier(chain), frontier_of(chain, most)
    pairs = [(point.peak, point.extra) for point in thinned]
    assert pairs == judged(chain, thinned)
    assert thinned[-1].peak == exact[-1].peak
    assert thinned[0].extra == exact[0].extra
    assert len(thinned) <= most
    for peak, extra in pairs:
        assert extra >= next(point.extra for point in exact if point.peak <= peak)


@pytest.mark.long
def test_many_blocks_with_long_menus() -> None:
    """More pairs than are kept: all of them are promises, and little is lost to twice as many."""
    chain = transformer(200, 12, seed=1)
    points = block_frontier(chain)
    assert 1000 < len(points) <= 4096
    sampled = points[::200]
    assert [(point.peak, point.extra) for point in sampled] == judged(chain, sampled)
    more = frontier_of(chain, 2 * 4096)
    for point in sampled:
        assert point.extra <= 1.01 * next(finer.extra for finer in more if finer.peak <= point.peak) + 1e-12


@pytest.mark.parametrize("chain", [transformer(12, 5, seed=3), transformer(60, 12, seed=4)])
def test_less_memory_takes_longer_all_along_the_frontier(chain: Chain) -> None:
    points = block_frontier(chain)
    assert len(points) > 50
    assert all(a.peak > b.peak and a.extra < b.extra for a, b in itertools.pairwise(points))
    assert points[0].options == (0,) * len(chain)
    assert points[0].extra == 0.0


def test_equal_blocks_have_no_breakpoints_made_of_rounding() -> None:
    """Any two of them lean cost the same, in whatever order it is summed."""
    lean = (TapeOption(40, 0.1, "lean", 10), TapeOption(15, 0.3, "rerun", 30))
    block = StepCost(1, 100, 1.0, 2.0, working=Working(backward=5), options=lean)
    others = StepCost(1, 1, 0.0, 0.0, working=Working(backward=100))
    chain = Chain.of([others, *[block] * 10])
    points = block_frontier(chain)
    assert [point.peak for point in points] == sorted({point.peak for point in points}, reverse=True)
    assert all(later.extra - earlier.extra > 0.05 for earlier, later in itertools.pairwise(points))


def test_blocks_that_all_cost_the_same() -> None:
    chain = Chain.of([StepCost(1, 10, options=(TapeOption(2, 0.5, "rerun", 8),))] * 6)
    assert chain.is_equal
    assert [(point.peak, point.extra) for point in block_frontier(chain)] == unbeaten(all_choices(chain))


def test_an_option_that_costs_nothing_is_taken() -> None:
    chain = Chain.of([StepCost(1, 10, options=(TapeOption(2, 0.0, "free", 0),)), StepCost(1, 3)])
    assert block_frontier(chain) == (FrontierPoint(5, 0.0, (1, 0)),)


def test_times_too_small_to_count_do_no_harm() -> None:
    chain = Chain.of([StepCost(1, 10, options=(TapeOption(2, 5e-324, "lean", 0),)), StepCost(1, 3)])
    assert least_peak(chain) == 5


@pytest.mark.parametrize("margin", [0, 7 << 20])
def test_the_least_peak_works_and_a_byte_less_does_not(margin: int) -> None:
    chain = transformer(12, 5, seed=7)
    with pytest.raises(BudgetError) as caught:
        choose_blocks(chain, least_peak(chain) + margin - 1, margin=margin)
    least = caught.value.least
    assert least == least_peak(chain) + margin
    options = choose_blocks(chain, least, margin=margin)
    assert Plan.make(chain, Knob("peak", least), Blocks(options)).bill.peak_memory == least - margin
    with pytest.raises(BudgetError):
        choose_blocks(chain, least - 1, margin=margin)


def test_the_budget_error_gives_a_way_out() -> None:
    chain = transformer(3, 3, seed=1)
    with pytest.raises(BudgetError, match="raise the peak, or make the step smaller"):
        choose_blocks(chain, 1)
    with pytest.raises(BudgetError, match=r"the least that works is .* B; take a smaller model"):
        choose_blocks(chain, 1, ways="take a smaller model")


@pytest.mark.long
@given(chains(most=6), st.integers(0, 40), st.integers(0, 5))
def test_the_choice_keeps_the_peak_and_no_other_that_does_is_faster(chain: Chain, more: int, margin: int) -> None:
    asked = least_peak(chain) + margin + more
    options = choose_blocks(chain, asked, margin=margin)
    bill = Plan.make(chain, Knob("peak", asked), Blocks(options, margin=margin)).bill
    fitting = [extra for peak, extra in all_choices(chain) if peak <= asked - margin]
    assert bill.peak_memory <= asked - margin
    assert bill.seconds - chain.plain_seconds == min(fitting)


def model_plan(chain: Chain, peak: int) -> Plan:
    notes = ("'embed' is called twice, so it is kept as it is.", "Everything else is planned.")
    schedule = Blocks(choose_blocks(chain, peak), optimizer=600 << 20, inputs=4096, margin=1 << 20, notes=notes)
    return Plan.make(chain, Knob("peak", peak), schedule)


def test_the_bill_and_the_actions() -> None:
    chain = transformer(12, 5, seed=2)
    plan = model_plan(chain, (least_peak(chain) + block_frontier(chain)[0].peak) // 2)
    assert simulate(plan) == plan.bill
    assert (plan.bill.plain_runs, plan.bill.taping_runs, plan.bill.backward_runs) == (0, 14, 14)
    assert (plan.bill.peak_snapshots, plan.bill.peak_disk, plan.bound, plan.schedule.disk) == (0, 0, None, None)
    assert 1.0 < plan.time_factor < 1.5


def test_json_brings_it_back() -> None:
    chain = transformer(12, 5, seed=2)
    plan = model_plan(chain, least_peak(chain) + (100 << 20))
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert isinstance(again.schedule, Blocks)
    assert again.schedule.notes == ("'embed' is called twice, so it is kept as it is.", "Everything else is planned.")
    assert str(again.knob).startswith("peak=1.")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"options": (0, 0)}, "2 options do not fit a chain of 3 steps"),
        ({"options": (0, 0, 2)}, "step 2 has 1 forms of tape, and option 2 is none of them"),
        ({"options": (0, 0, -1)}, "options=-1 is too small"),
        ({"options": (0, 0, 0), "margin": -1}, "margin=-1 is too small"),
        ({"options": (0, 0, 0), "notes": "one"}, "notes='one' is no row of sentences"),
        ({"options": (0, 0, 0), "unit": 1}, "unit=1 is a int; give a str, such as 's'"),
        ({"options": (0, 0, 0), "notes": (1,)}, r"notes=\(1,\) is no row of sentences"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(parameters: dict[str, object], message: str) -> None:
    chain = Chain.of([StepCost(1, 1), StepCost(1, 2), StepCost(1, 3)])
    with pytest.raises(InputError, match=message):
        Plan.make(chain, Knob("peak", 10), Blocks(**parameters))  # type: ignore[arg-type]  # that is the point


def test_plans_have_their_frontier() -> None:
    chain = transformer(12, 5, seed=2)
    plan = model_plan(chain, least_peak(chain))
    assert plan.frontier == block_frontier(chain)
    with pytest.raises(InputError, match="planner 'hetero' has no frontier of blocks"):
        _ = choose(Chain.of([StepCost(1, 2), StepCost(1, 3)]), "100%").frontier
