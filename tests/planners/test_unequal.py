from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.chain import Chain, StepCost, TapeOption, Working
from lowtide.errors import BudgetError, InputError
from lowtide.planners import unequal
from lowtide.planners.choose import choose
from lowtide.planners.equal import Uniform
from lowtide.planners.revolve import plain_runs
from lowtide.planners.unequal import Hetero
from lowtide.simulate import simulate
from tests.planners.exhaustive import cheapest
from tests.planners.strategies import chains, in_words_of_search

INFINITE = float("inf")


def planned_seconds(chain: Chain, budget: int) -> float:
    if budget < unequal.least(chain):
        return INFINITE
    bill = unequal.fastest(chain, budget).bill(chain)
    assert bill.peak_memory <= budget
    return bill.seconds


@pytest.mark.long
@settings(max_examples=150)
@given(chains(most=4), st.integers(2, 45))
def test_no_persistent_schedule_is_faster(chain: Chain, budget: int) -> None:
    assert planned_seconds(chain, budget) == cheapest(in_words_of_search(chain), budget, persistent=True)


@pytest.mark.slow
@settings(max_examples=1500)
@given(chains(most=5), st.integers(2, 55))
def test_no_persistent_schedule_is_faster_on_five_steps(chain: Chain, budget: int) -> None:
    assert planned_seconds(chain, budget) == cheapest(in_words_of_search(chain), budget, persistent=True)


@pytest.mark.parametrize("wide", range(4))
def test_any_step_of_a_run_may_be_the_one_that_needs_most(wide: int) -> None:
    steps = [StepCost(1, 6 + k, float(1 + k), 0.0, working=Working(advance=20 * (k == wide))) for k in range(4)]
    chain = Chain.of(steps)
    for budget in range(5, 32):
        assert planned_seconds(chain, budget) == cheapest(in_words_of_search(chain), budget, persistent=True)


@pytest.mark.long
@settings(max_examples=150)
@given(chains(most=4), st.integers(0, 30))
def test_levels_of_one_byte_are_exact(chain: Chain, more: int) -> None:
    """Where the budget has fewer bytes than the table has levels, nothing is rounded."""
    budget = unequal.least(chain) + more
    bill = unequal.by_levels(chain, budget).bill(chain)
    assert bill.peak_memory <= budget
    assert bill.seconds == cheapest(in_words_of_search(chain), budget, persistent=True)


@pytest.mark.long
@given(chains(most=7))
def test_the_least_of_long_chains_is_that_of_the_staircases(chain: Chain) -> None:
    peak, decisions = unequal._smallest(chain)
    assert peak == unequal.least(chain) == Hetero(decisions).bill(chain).peak_memory


def random_chain(rng: random.Random, length: int) -> Chain:
    states = [rng.randint(1, 4) for _ in range(length)]
    return Chain.of(StepCost(a, a + rng.randint(0, 4), float(rng.randint(1, 4)), 0.0) for a in states)


@pytest.mark.long
@pytest.mark.parametrize("count", [60, pytest.param(250, marks=pytest.mark.slow)])
def test_the_gap_to_unrestricted_schedules(count: int, record_property: Callable[[str, object], None]) -> None:
    """Schedules that drop something early and make it again can win: how often, and by how much, is printed."""
    rng = random.Random(7)
    ratios: list[float] = []
    while len(ratios) < count:
        chain = random_chain(rng, rng.randint(2, 5))
        budget = rng.randint(2, chain.plain_tape)
        unrestricted = cheapest(in_words_of_search(chain), budget)
        if unrestricted < INFINITE:
            ratios.append(planned_seconds(chain, budget) / unrestricted)
    equal = sum(ratio == 1.0 for ratio in ratios)
    record_property(
        "figure",
        f"persistent against unrestricted schedules, 2 to 5 unequal steps: equal in {equal} of {len(ratios)}, "
        f"worst {max(ratios):.3f}x",
    )
    assert min(ratios) >= 1.0
    assert equal >= 0.97 * len(ratios)
    assert max(ratios) < 1.25


@pytest.mark.long
@given(chains(most=5))
def test_the_least_budget_works_and_a_byte_less_does_not(chain: Chain) -> None:
    least = unequal.least(chain)
    assert unequal.fastest(chain, least).bill(chain).peak_memory <= least
    assert cheapest(in_words_of_search(chain), least, persistent=True) < INFINITE
    assert cheapest(in_words_of_search(chain), least - 1, persistent=True) == INFINITE


megabytes = st.sampled_from([1, 2, 1000, 2**20, 2**20 + 1, 2**26, 2**26 + 1])


@pytest.mark.long
@settings(max_examples=150)
@given(st.lists(st.tuples(megabytes, megabytes, st.integers(1, 4)), min_size=2, max_size=5), st.floats(0, 1))
def test_no_persistent_schedule_is_faster_in_megabytes(sizes: list[tuple[int, int, int]], share: float) -> None:
    """Bytes and megabytes side by side, from the least budget on: nothing is rounded."""
    chain = Chain.of([StepCost(a, a + more, float(forward), 0.0) for a, more, forward in sizes])
    least = unequal.least(chain)
    assert cheapest(in_words_of_search(chain), least - 1, persistent=True) == INFINITE
    for budget in (least, least + 1, least + int(share * chain.plain_tape)):
        assert planned_seconds(chain, budget) == cheapest(in_words_of_search(chain), budget, persistent=True)


@settings(max_examples=60)
@given(chains(most=7), st.integers(0, 30), st.integers(1, 10))
def test_more_memory_never_takes_longer(chain: Chain, extra: int, step_up: int) -> None:
    budget = unequal.least(chain) + extra
    assert planned_seconds(chain, budget + step_up) <= planned_seconds(chain, budget)


def network(length: int, seed: int) -> Chain:
    rng = random.Random(seed)
    states = [rng.randint(1_000, 100_000) for _ in range(length)]
    return Chain.of(
        StepCost(
            a,
            a + rng.randint(1_000, 500_000),
            rng.uniform(0.1, 1.0),
            rng.uniform(0.2, 2.0),
            cotangent=a,
            working=Working(a, a, 2 * a),
        )
        for a in states
    )


@pytest.mark.parametrize("share", [0.0, 0.01, 0.05, 0.2, 0.6])
def test_levels_keep_the_budget_and_come_close_to_the_exact_answer(share: float) -> None:
    chain = network(40, seed=3)
    least = unequal.least(chain)
    budget = least + int(share * chain.plain_tape)
    exact, levels = unequal.fastest(chain, budget).bill(chain), unequal.by_levels(chain, budget).bill(chain)
    assert exact.peak_memory <= budget
    assert levels.peak_memory <= budget
    assert exact.seconds <= levels.seconds
    if share:
        assert levels.seconds <= 1.02 * exact.seconds


def test_a_budget_that_rounding_would_miss_is_still_met() -> None:
    chain = network(60, seed=9)
    least = unequal.least(chain)
    assert unequal.by_levels(chain, least, levels=6).bill(chain).peak_memory == least
    # Where a tape is no larger than its state, part of the chain is taped in one go.
    bare = Chain.of([StepCost(1000 + k, 1000 + k) for k in range(60)])
    assert unequal.by_levels(bare, unequal.least(bare), levels=2).bill(bare).peak_memory == unequal.least(bare)


@pytest.mark.long
@pytest.mark.parametrize("length", [50, 230])
def test_long_chains(length: int) -> None:
    """Beyond 48 steps there are levels, beyond 200 neighbours are joined; what fits is kept, to the last byte."""
    chain = Chain.of([StepCost(1000, 100_000 + 17 * k) for k in range(length)])
    assert unequal.fastest(chain, chain.plain_tape).bill(chain).plain_runs == 0
    tight = choose(chain, "15%")
    assert tight.bill.peak_memory <= 0.15 * chain.plain_tape
    assert tight.time_factor < 1.33
    assert simulate(tight) == tight.bill


def test_slots_over_a_very_long_chain_count_runs() -> None:
    chain = Chain.of([StepCost(5, 7 + k % 2) for k in range(300)])
    assert choose(chain, checkpoints=6).bill.plain_runs == plain_runs(300, 6)


def test_equal_steps_get_no_worse_plan_from_the_planner_for_unequal_ones() -> None:
    for length, memory in [(12, 9), (20, 12), (30, 11)]:
        chain = Chain.equal(StepCost(1, 2, 1.0, 0.0), length)
        bill = unequal.fastest(chain, memory).bill(chain)
        assert bill.plain_runs == Uniform(memory).bill(chain).plain_runs


def test_a_menu_is_used_where_it_pays() -> None:
    lean = (TapeOption(2, 0.1, "lean"),)
    chain = Chain.of([StepCost(1, 10, 5.0, 5.0, options=lean), StepCost(1, 11, 5.0, 5.0, options=lean)])
    assert unequal.fastest(chain, 21).bill(chain).seconds == 20.0
    one_lean = choose(chain, 13)
    assert sorted(decision.form for decision in one_lean.decisions()) == ["keep", "lean"]
    assert one_lean.bill.seconds == pytest.approx(20.1)
    assert {decision.form for decision in choose(chain, 4).decisions()} == {"lean"}


def with_forms(chain: Chain, forms: int) -> Chain:
    """The same chain with smaller and smaller tapes on every menu, each of which needs more in its backward."""
    rng = random.Random(len(chain))
    steps = []
    for step in (chain[k] for k in range(len(chain))):
        options, extra = [], 0.0
        for form in range(1, forms):
            tape = step.state + int((step.tape - step.state) * (1 - form / forms))
            extra += rng.uniform(0.02, 0.2) * step.forward
            options.append(TapeOption(tape, extra, f"lean {form}", step.working.backward + form * step.state))
        steps.append(replace(step, options=tuple(options)))
    return Chain.of(steps)


def test_few_steps_with_many_forms_are_exact_too() -> None:
    assert unequal.is_exact(network(48, seed=1))
    assert not unequal.is_exact(network(49, seed=1))
    assert unequal.is_exact(with_forms(network(32, seed=1), 5))
    assert not unequal.is_exact(with_forms(network(33, seed=1), 5))


@pytest.mark.parametrize("share", [0.02, 0.2, 0.6])
def test_levels_come_close_with_menus(share: float) -> None:
    chain = with_forms(network(24, seed=3), 5)
    budget = unequal.least(chain) + int(share * chain.plain_tape)
    exact, levels = unequal.fastest(chain, budget).bill(chain), unequal.by_levels(chain, budget).bill(chain)
    assert max(exact.peak_memory, levels.peak_memory) <= budget
    assert exact.seconds <= levels.seconds <= 1.01 * exact.seconds


@pytest.mark.parametrize(
    ("length", "most"), [(60, 40), *(pytest.param(n, None, marks=pytest.mark.long) for n in (60, 230))]
)
def test_menus_of_long_chains_are_used(length: int, most: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of chains with more steps than are looked at one by one, neighbours are joined."""
    monkeypatch.setattr(unequal, "MOST_TABLE_STEPS", most or unequal.MOST_TABLE_STEPS)
    whole = Chain.of([StepCost(1000, 100_000 + 17 * k, working=Working(backward=500)) for k in range(length)])
    menus = with_forms(whole, 3)
    chain = Chain.of([menus[k] if k % 5 else whole[k] for k in range(length)])  # joined steps may differ in their forms
    plan = choose(chain, "50%")
    assert plan.bill.peak_memory <= 0.5 * whole.plain_tape
    assert plan.time_factor < 1.1  # with whole tapes alone it is 1.17
    assert {decision.form for decision in plan.decisions()} == {"keep", "lean 1", "lean 2"}
    assert simulate(plan) == plan.bill


@pytest.mark.parametrize("slots", [1, 2, 3, 20])
def test_with_slots_is_the_binomial_optimum_on_equal_costs(slots: int) -> None:
    for length in (1, 2, 9, 17):
        chain = Chain.of([StepCost(5, 7 + k % 2) for k in range(length)])
        schedule = unequal.with_slots(chain, slots)
        bill = schedule.bill(chain)
        assert bill.plain_runs == plain_runs(length, slots)
        assert bill.peak_snapshots <= slots


def test_budget_error_names_the_least() -> None:
    chain = network(10, seed=1)
    with pytest.raises(BudgetError) as caught:
        choose(chain, unequal.least(chain) - 1)
    assert caught.value.least == unequal.least(chain)
    assert choose(chain, caught.value.least).bill.peak_memory <= caught.value.least


def test_more_memory_never_takes_longer_on_a_network() -> None:
    chain = network(30, seed=2)
    least = unequal.least(chain)
    budgets = [least + k * chain.plain_tape // 150 for k in range(150)]
    seconds = [unequal.fastest(chain, budget).bill(chain).seconds for budget in budgets]
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(seconds))


@pytest.mark.parametrize("decisions", [(), (0,), (5,), (2, 0, 0), (0, 0, 0, 0)])
def test_decisions_that_do_not_fit_are_refused(decisions: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="do not fit a chain of 3 steps"):
        list(Hetero(decisions).actions(Chain.of([StepCost(1, 1), StepCost(1, 2), StepCost(1, 3)])))


def test_plans_pass_the_judge() -> None:
    plan = choose(network(30, seed=5), "20%")
    assert simulate(plan) == plan.bill
