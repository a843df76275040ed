"""The integer tables of a plan, followed over whole numbers: every stretch begins from its own state."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.actions import Action, Advance, Backward, Drop, Restore, Save, Tape, Tier
from lowtide.chain import Chain, Disk, StepCost
from lowtide.errors import InputError
from lowtide.jax.loops.lowering import Tables, tables
from lowtide.planners.choose import choose
from lowtide.planners.equal import Uniform
from lowtide.planners.revolve import Revolve
from lowtide.planners.sweep import Base, Sweep
from lowtide.planners.unequal import Hetero
from lowtide.simulate import simulate_actions


def follow(found: Tables, length: int) -> int:
    """Play the tables; state k is the number k. Gives the number of plain runs."""
    slots: list[int | None] = [None] * found.slots
    state, runs = 0, 0

    def leg(row: int) -> None:
        nonlocal state, runs
        slot, start, stop = (int(entry) for entry in found.legs[row])
        assert 0 <= slot < found.slots
        assert start == state  # what is stored and run from is where the leg says it is
        assert start < stop <= length
        slots[slot] = state
        state, runs = stop, runs + stop - start

    for row in range(found.sweep):
        leg(row)
    done, next_leg = length, found.sweep
    for number, row in enumerate(found.stretches):
        slot, first, end, start, taped, stop = (int(entry) for entry in row)
        if number == 0:
            assert (start, stop) == (state, length)  # taped by the forward pass, so nothing is left to tape
            assert (first, taped) == (end, start)
        else:
            restored = slots[slot]
            assert restored is not None
            state = restored
            assert (first, taped) == (next_leg, stop)
            for k in range(first, end):
                leg(k)
            assert state == start  # the stretch is taped from its own state
            next_leg = end
        assert stop == done  # and pulled back where the last one stopped
        assert 0 < stop - start <= found.rows
        done = start
    assert done == 0
    assert next_leg == len(found.legs) or (next_leg == 0 and found.legs.tolist() == [[0, 0, 0]])
    return runs


def of(schedule: Any, length: int) -> Tables:
    return tables(schedule.actions(Chain.equal(StepCost(3, 5), length)))


@settings(max_examples=300)
@given(st.integers(1, 400), st.integers(1, 30), st.integers(1, 40))
def test_slots_and_steps_of_tape(length: int, slots: int, steps: int) -> None:
    found = of(Revolve(slots, steps), length)
    bill = Revolve(slots, steps).bill(Chain.equal(StepCost(3, 5), length))
    assert follow(found, length) == bill.plain_runs
    assert found.slots == max(1, bill.peak_snapshots) <= slots
    assert found.rows <= steps
    assert len(found.stretches) + len(found.legs) <= 3 * length


@settings(max_examples=200)
@given(st.integers(1, 400), st.integers(1, 450))
def test_a_snapshot_every_so_many_steps(length: int, base: int) -> None:
    found = of(Base(base), length)
    count = -(-length // base)
    assert follow(found, length) == (count - 1) * base
    assert (found.slots, found.rows, len(found.stretches)) == (max(1, count - 1), min(base, length), count)
    assert found.sweep == count - 1


@settings(max_examples=100)
@given(st.integers(1, 200), st.integers(8, 300))
def test_memory_that_goes_to_either(length: int, memory: int) -> None:
    """Stretches get shorter the more snapshots are held; the buffers are as large as the largest of each."""
    schedule = Uniform(memory)
    found = of(schedule, length)
    assert follow(found, length) == schedule.bill(Chain.equal(StepCost(3, 5), length)).plain_runs


@settings(max_examples=100)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=20))
def test_stretches_of_any_lengths(stretches: list[int]) -> None:
    found = of(Sweep(tuple(stretches)), sum(stretches))
    assert follow(found, sum(stretches)) == sum(stretches[:-1])
    assert [int(stop - start) for *_, start, _, stop in found.stretches] == stretches[::-1]


def test_a_golden_one() -> None:
    """Two snapshots, five steps: the schedule of tests/planners/test_revolve.py."""
    found = of(Revolve(2), 5)
    assert found.legs.tolist() == [[0, 0, 3], [1, 3, 4], [0, 0, 1], [1, 1, 2]]
    assert found.stretches.tolist() == [
        [0, 0, 0, 4, 4, 5],
        [1, 2, 2, 3, 4, 4],
        [0, 2, 4, 2, 3, 3],
        [1, 4, 4, 1, 2, 2],
        [0, 4, 4, 0, 1, 1],
    ]
    assert (found.slots, found.rows, found.sweep) == (2, 1, 2)


def test_everything_taped_at_once() -> None:
    found = of(Base(7), 7)
    assert (found.legs.tolist(), found.stretches.tolist()) == ([[0, 0, 0]], [[0, 0, 0, 0, 0, 7]])
    assert (found.slots, found.rows, found.sweep) == (1, 7, 0)


def test_a_state_that_is_only_passed_through_goes_to_a_spare_slot() -> None:
    """A plan may run on from a state that it does not store; no planner for equal steps does."""
    actions: list[Action] = [
        Save(0), Advance(0, 1), Advance(1, 2), Tape(2, 3), Backward(2, 3),
        Restore(0), Advance(0, 1), Tape(1, 2), Backward(1, 2),
        Restore(0), Drop(0), Tape(0, 1), Backward(0, 1),
    ]  # fmt: skip
    found = tables(actions)
    assert follow(found, 3) == 3
    assert (found.slots, found.legs[1, 0]) == (2, 1)


def test_steps_that_are_taped_one_by_one_are_one_stretch() -> None:
    actions: list[Action] = [
        Save(0), Advance(0, 2), Tape(2, 3), Tape(3, 5), Backward(2, 5),
        Restore(0), Drop(0), Tape(0, 1), Tape(1, 2), Backward(0, 2),
    ]  # fmt: skip
    assert follow(tables(actions), 5) == 2


def test_a_plan_that_runs_while_a_tape_waits_is_refused() -> None:
    """Unequal steps: a cheap tape is kept, and a costly state is passed over."""
    chain = Chain.of([StepCost(1, 2), StepCost(9, 30), StepCost(1, 2), StepCost(9, 30), StepCost(1, 2)])
    refused = 0
    for budget in range(30, 80):
        try:
            schedule = choose(chain, budget).schedule
        except InputError:
            continue
        assert isinstance(schedule, Hetero)
        waiting = 0
        waits = False
        for action in schedule.actions(chain):
            waiting += isinstance(action, Tape) - isinstance(action, Backward)
            waits |= isinstance(action, Advance) and waiting > 0
        if waits:
            refused += 1
            with pytest.raises(InputError, match=r"runs steps \[.*\) while the tape of \[.*plan_scan"):
                tables(schedule.actions(chain))
    assert refused


def test_a_tape_that_is_pulled_back_in_parts_is_refused() -> None:
    with pytest.raises(InputError, match=r"pulls steps \[1, 3\) back in parts"):
        tables([Tape(0, 3), Backward(1, 3), Backward(0, 1)])


@pytest.mark.parametrize(
    "actions",
    [
        # Steps are run, and then run again from the start, before anything is taped.
        [Save(0), Advance(0, 1), Restore(0), Advance(0, 2), Tape(2, 3), Backward(2, 3),
         Restore(0), Advance(0, 1), Tape(1, 2), Backward(1, 2), Restore(0), Drop(0), Tape(0, 1), Backward(0, 1)],
        # A state is stored, and not run on from: no leg begins there.
        [Save(0), Advance(0, 2), Save(2), Tape(2, 3), Backward(2, 3), Restore(2), Drop(2),
         Restore(0), Advance(0, 1), Tape(1, 2), Backward(1, 2), Restore(0), Drop(0), Tape(0, 1), Backward(0, 1)],
    ],
)  # fmt: skip
def test_a_plan_that_restores_out_of_order_is_refused(actions: list[Action]) -> None:
    """They are legal, and tables would say something else."""
    bill = simulate_actions(Chain.equal(StepCost(3, 5), 3), actions)
    assert bill.plain_runs >= 3
    with pytest.raises(InputError, match=r"restores the state at step [02] out of order.*plan_scan"):
        tables(actions)


def test_snapshots_on_disk_are_refused() -> None:
    plan = choose(Chain.equal(StepCost(4, 10), 60), 40, disk=Disk(0.01, 0.01))
    assert any(getattr(action, "tier", None) is Tier.DISK for action in plan.actions())
    with pytest.raises(InputError, match="plan without disk="):
        tables(plan.actions())
