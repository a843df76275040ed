from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.actions import Action, Advance, Backward, Drop, Restore, Save, Tape, Tier
from lowtide.chain import Chain, Disk, StepCost, TapeOption, Working
from lowtide.errors import PlanError
from lowtide.plan import Bill, Knob, Plan
from lowtide.planners.revolve import Revolve
from lowtide.simulate import judged, simulate_actions

THREE = Chain.equal(StepCost(state=10, tape=100, forward=1.0, backward=2.0), 3)

TWO_STEPS_RERUN: list[Action] = [
    Save(0), Advance(0, 1), Tape(1, 2), Backward(1, 2),
    Restore(0), Drop(0), Tape(0, 1), Backward(0, 1),
]  # fmt: skip


def test_everything_taped() -> None:
    assert simulate_actions(THREE, [Tape(0, 3), Backward(0, 3)]) == Bill(0, 3, 3, 300, 0, 0, 9.0)


def test_one_snapshot_and_one_tape_at_a_time() -> None:
    actions: list[Action] = [
        Save(0), Advance(0, 2), Tape(2, 3), Backward(2, 3),
        Restore(0), Advance(0, 1), Tape(1, 2), Backward(1, 2),
        Restore(0), Drop(0), Tape(0, 1), Backward(0, 1),
    ]  # fmt: skip
    assert simulate_actions(THREE, actions) == Bill(3, 3, 3, 110, 0, 1, 12.0)


def test_backward_may_stop_inside_a_tape_and_span_several() -> None:
    inside: list[Action] = [Tape(0, 3), Backward(1, 3), Backward(0, 1)]
    across: list[Action] = [Tape(0, 1), Tape(1, 3), Backward(0, 3)]
    assert simulate_actions(THREE, inside) == simulate_actions(THREE, across)


def test_working_sets_and_cotangents_count_where_they_are() -> None:
    step = StepCost(10, 100, cotangent=7, working=Working(advance=1000, tape=20, backward=500))
    chain = Chain.equal(step, 2)
    assert simulate_actions(chain, TWO_STEPS_RERUN).peak_memory == 10 + 1000
    lighter = Chain.equal(StepCost(10, 100, cotangent=7, working=Working(0, 20, 5)), 2)
    # The first tape is made beside the snapshot and before any cotangent, the second beside the cotangent.
    assert simulate_actions(lighter, TWO_STEPS_RERUN).peak_memory == 10 + 100 + 20
    heavier = Chain.equal(StepCost(10, 100, cotangent=17, working=Working(0, 20, 5)), 2)
    assert simulate_actions(heavier, TWO_STEPS_RERUN).peak_memory == 100 + 20 + 17


def test_the_cotangent_is_that_of_the_state_that_the_backward_has_reached() -> None:
    chain = Chain.of([StepCost(1, 50, cotangent=1000), StepCost(1, 2, cotangent=7)])
    assert simulate_actions(chain, TWO_STEPS_RERUN).peak_memory == 50 + 7


def test_unequal_steps_and_menus() -> None:
    chain = Chain.of(
        [
            StepCost(1, 10, 1.0, 2.0, options=(TapeOption(4, 0.5, "lean"),), working=Working(3, 3, 3)),
            StepCost(2, 20, 3.0, 4.0, working=Working(7, 1, 50)),
        ]
    )
    bill = simulate_actions(chain, [Tape(0, 1, 1), Tape(1, 2), Backward(0, 2)])
    assert bill == Bill(0, 2, 2, 4 + 20 + 50, 0, 0, 1 + 3 + 2 + 4 + 0.5)
    assert simulate_actions(chain, TWO_STEPS_RERUN).peak_memory == 1 + 20 + 50


def test_a_smaller_tape_may_need_more_in_its_backward() -> None:
    step = StepCost(1, 10, options=(TapeOption(4, 0.5, backward=30), TapeOption(5, 0.5)), working=Working(3, 3, 6))
    for chain in (Chain.equal(step, 2), Chain.of([step, replace(step, forward=3.0)])):

        def peak(*forms: int, chain: Chain = chain) -> int:
            tapes: list[Action] = [Tape(k, k + 1, form) for k, form in enumerate(forms)]
            return simulate_actions(chain, [*tapes, Backward(0, 2)]).peak_memory

        assert (peak(0, 0), peak(0, 1), peak(1, 0)) == (10 + 10 + 6, 10 + 4 + 30, 4 + 30)
        assert (peak(1, 1), peak(2, 2)) == (4 + 4 + 30, 5 + 5 + 6)
    taped_at_once: list[Action] = [Tape(0, 2, 1), Backward(0, 2)]
    assert simulate_actions(Chain.equal(step, 2), taped_at_once).peak_memory == 4 + 4 + 30


def test_disk() -> None:
    there = Tier.DISK
    actions: list[Action] = [
        Save(0, there), Advance(0, 2), Tape(2, 3), Backward(2, 3),
        Restore(0, there), Drop(0, there), Tape(0, 2), Backward(0, 2),
    ]  # fmt: skip
    bill = simulate_actions(THREE, actions, disk=Disk(write=0.5, read=0.25))
    assert bill == Bill(2, 3, 3, 200, 10, 1, 5 + 6 + 10 * 0.5 + 10 * 0.25)


ILLEGAL: list[tuple[list[Action], int, str]] = [
    ([Advance(1, 2)], 0, "does not start at the current state"),
    ([Advance(0, 0)], 0, "empty or out of order"),
    ([Advance(0, 4)], 0, "has reached state 3 already"),
    ([Tape(0, 3), Backward(2, 3), Advance(3, 3)], 2, "does not start at the current state"),
    ([Tape(0, 3), Backward(2, 3), Backward(2, 3)], 2, "the backward is at state 2"),
    ([Tape(0, 3), Backward(3, 3)], 1, "empty or out of order"),
    ([Tape(0, 2), Backward(2, 3)], 1, "the backward is at state 3|step 2 is not taped"),
    ([Tape(0, 2), Advance(2, 3), Backward(0, 3)], 2, "step 2 is not taped"),
    ([Save(0), Tape(0, 1), Restore(0), Tape(0, 1)], 3, "the tape of step 0 is kept: nothing runs below it"),
    ([Save(0), Tape(0, 1), Restore(0), Advance(0, 1)], 3, "the tape of step 0 is kept: nothing runs below it"),
    ([Save(1)], 0, "only the current state can be stored"),
    ([Save(0), Save(0)], 1, "is stored there already"),
    ([Save(0, Tier.DISK)], 0, "no disk tier"),
    ([Advance(0, 3), Save(3)], 1, "starts no step"),
    ([Restore(0)], 0, "state 0 is not stored there"),
    ([Save(0), Restore(0, Tier.DISK)], 1, "state 0 is not stored there"),
    ([Drop(0)], 0, "state 0 is not stored there"),
    ([Tape(0, 3, 1)], 0, "no entry 1 on the menu"),
    ([Tape(0, 3, -1)], 0, "no entry -1 on the menu"),
    ([Tape(0, 3), Backward(1, 3)], 2, "stopped at state 1 instead of 0"),
    ([Save(0), Tape(0, 3), Backward(0, 3)], 3, "1 snapshots are still stored"),
    (["nonsense"], 0, "is not an action"),  # type: ignore[list-item]  # that is the point
]


@pytest.mark.parametrize(("actions", "place", "why"), ILLEGAL)
def test_illegal_plans_are_refused_by_place_and_reason(actions: list[Action], place: int, why: str) -> None:
    with pytest.raises(PlanError, match=why) as caught:
        simulate_actions(THREE, actions)
    assert caught.value.place == place
    assert caught.value.action == (actions[place] if place < len(actions) else None)
    assert str(caught.value).startswith(f"action {place}")


def test_the_message_tells_the_state_of_things() -> None:
    chain = Chain.equal(StepCost(1, 1), 20)
    actions: list[Action] = []
    for k in range(10):
        actions += [Save(k), Advance(k, k + 1)]
    actions += [Tape(k, k + 1) for k in range(10, 19)]
    with pytest.raises(PlanError) as caught:
        simulate_actions(chain, [*actions, Restore(15)])
    message = str(caught.value)
    assert "Restore(step=15, tier=<Tier.MEMORY: 'memory'>)" in message
    assert "current state: 19; snapshots: ..., 2, 3, 4, 5, 6, 7, 8, 9; tapes: ..., [11, 12)" in message
    assert message.endswith("backward at 20)")
    with pytest.raises(PlanError, match="current state: none; snapshots: none; tapes: none"):
        simulate_actions(chain, [Tape(0, 20), Backward(0, 20), Drop(3)])


def test_judged_hands_out_legal_actions_only() -> None:
    plan = Plan.make(THREE, Knob("checkpoints", 2), Revolve(2))
    assert list(judged(plan)) == list(plan.actions())
