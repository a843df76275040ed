from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.chain import Chain, StepCost, TapeOption, Working
from lowtide.errors import InputError
from lowtide.planners.sweep import Base, Sweep, least_sweep
from lowtide.simulate import simulate_actions
from tests.planners.strategies import chains


@given(
    st.integers(1, 60), st.integers(1, 70), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)
)
def test_base_costs_what_it_promises(length: int, base: int, adv: int, tap: int, back: int, cot: int) -> None:
    chain = Chain.equal(StepCost(3, 11, 0.5, 0.25, cotangent=cot, working=Working(adv, tap, back)), length)
    bill = Base(base).bill(chain)
    assert bill == simulate_actions(chain, Base(base).actions(chain))
    assert bill.plain_runs == length - ((length - 1) % base + 1)
    working = max(max(adv, tap) + cot, back)
    assert bill.peak_memory <= min(base, length) * 11 + -(-length // base) * 3 + working


@pytest.mark.parametrize("base", [1, 2, 7, 19])
def test_the_worst_moment_may_be_a_run_without_tape(base: int) -> None:
    chain = Chain.equal(StepCost(3, 11, cotangent=5, working=Working(advance=1000)), 20)
    bill = Base(base).bill(chain)
    assert bill == simulate_actions(chain, Base(base).actions(chain))
    assert bill.peak_memory == (-(-20 // base) - 1) * 3 + 1000


@pytest.mark.long
@given(chains(most=12), st.integers(1, 13))
def test_base_over_unequal_steps(chain: Chain, base: int) -> None:
    bill = Base(base).bill(chain)
    assert bill.peak_snapshots == -(-len(chain) // base) - 1
    assert bill.taping_runs == len(chain)
    steps = [chain[k] for k in range(len(chain))]
    stretches = [steps[start : start + base] for start in range(0, len(chain), base)]
    working = max(max(s.working.advance, s.working.tape, s.working.backward) for s in steps)
    tapes = max(sum(s.tape for s in stretch) for stretch in stretches)
    starts = sum(stretch[0].state for stretch in stretches)
    assert tapes <= bill.peak_memory <= tapes + starts + working + max(s.cotangent for s in steps)


def is_least_of_all_sweeps(chain: Chain) -> None:
    """Every way to cut the chain is tried, with every row of forms."""
    length = len(chain)
    peaks = []
    for cuts in itertools.product([False, True], repeat=length - 1):
        bounds = [0, *(k + 1 for k, cut in enumerate(cuts) if cut), length]
        stretches = tuple(stop - start for start, stop in itertools.pairwise(bounds))
        for forms in itertools.product(*(range(len(chain[k].menu)) for k in range(length))):
            peaks.append(Sweep(stretches, forms).bill(chain).peak_memory)
    assert least_sweep(chain).bill(chain).peak_memory == min(peaks)


@pytest.mark.long
@given(chains(most=4))
def test_least_sweep_is_the_least_of_all_sweeps(chain: Chain) -> None:
    is_least_of_all_sweeps(chain)


@pytest.mark.slow
@settings(max_examples=400)
@given(chains(most=5))
def test_least_sweep_is_the_least_of_all_sweeps_over_five_steps(chain: Chain) -> None:
    is_least_of_all_sweeps(chain)


def test_a_sweep_takes_smaller_tapes_only_where_they_lower_the_peak() -> None:
    def step(tape: int, backward: int | None) -> StepCost:
        return StepCost(10, tape, options=(TapeOption(20, 0.5, "lean", backward),), working=Working(backward=5))

    assert least_sweep(Chain.of([step(100, 60), step(101, 60)])) == Sweep((1, 1), (1, 1))
    # What the backward makes again is as large as what the tape lacks: nothing is won.
    assert least_sweep(Chain.of([step(100, 90), step(101, 91)])) == Sweep((1, 1))
    # The first step may keep its tape beside the lean one of the second, which is larger.
    assert least_sweep(Chain.of([step(30, 5), step(400, 60)])) == Sweep((1, 1), (0, 1))


def test_of_sweeps_with_the_least_peak_the_one_with_the_longest_last_stretch_is_taken() -> None:
    # Of the last two steps either one could be the last stretch, too; but the last stretch is run only once.
    assert least_sweep(Chain.of([StepCost(10, 100), StepCost(10, 20), StepCost(10, 20)])) == Sweep((1, 2))


@pytest.mark.parametrize("stretches", [(), (2, 2), (3, 0), (4,)])
def test_stretches_make_up_the_chain(stretches: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="do not make up a chain of 3"):
        Sweep(stretches).actions(Chain.equal(StepCost(1, 1), 3))


def test_every_step_has_a_form() -> None:
    with pytest.raises(InputError, match="2 forms of tape were given for a chain of 3 steps"):
        Sweep((3,), (0, 0)).actions(Chain.equal(StepCost(1, 1), 3))


@pytest.mark.parametrize("base", [0, -2, 1.5, True])
def test_base_is_checked(base: int) -> None:
    with pytest.raises(InputError, match="base="):
        Base(base)
