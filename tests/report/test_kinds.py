"""The two kinds of plans: what a report asks of each, and that each has an answer of the right form."""

from __future__ import annotations

import pytest

from lowtide.planners.choose import choose
from lowtide.report.kinds import ChainKind, ModelKind, PlanKind, Section, kind_of
from lowtide.report.timeline import played
from tests.report.chains import network, on_disk, rollout
from tests.report.models import gpt, model_plan

MODEL = model_plan(gpt())
PLANS = {
    "loop": choose(rollout(), "5%"),
    "layers": choose(network(), "60%"),
    "disk": on_disk(),
    "rooms": choose(rollout(), "10%", rooms=True),
    "model": MODEL,
    "counted": model_plan(gpt(3), unit="FLOP"),
}


def test_a_plan_of_blocks_is_a_models_and_every_other_is_a_chains() -> None:
    found = {name: type(kind_of(plan)) for name, plan in PLANS.items()}
    models = {"model", "counted"}
    assert found == {name: ModelKind if name in models else ChainKind for name in PLANS}
    assert not issubclass(ModelKind, ChainKind)


@pytest.mark.parametrize("name", PLANS)
def test_bytes_and_texts_fit_their_names(name: str) -> None:
    plan = PLANS[name]
    kind: PlanKind = kind_of(plan)
    worst = played(plan).worst
    assert len(kind.parts_of(worst)) == len(kind.memory_parts)
    assert sum(kind.parts_of(worst)) == plan.bill.peak_memory
    assert len(kind.summary()) == len(kind.summary_titles)
    assert len(kind.frontier_titles) == 5
    assert {Section.FRONTIER, Section.MEMORY, Section.CODE} <= set(kind.sections)


def test_a_chain_has_steps_and_a_model_has_blocks() -> None:
    chain, model = kind_of(PLANS["loop"]), kind_of(MODEL)
    assert (Section.STEPS in chain.sections, Section.BLOCKS in chain.sections) == (True, False)
    assert (Section.STEPS in model.sections, Section.BLOCKS in model.sections) == (False, True)
    assert chain.block_rows() == ()
    assert len(model.block_rows()) == 12


def test_times_have_their_unit() -> None:
    assert kind_of(PLANS["loop"]).time(0.25) == "250 ms"
    assert kind_of(MODEL).time(0.25) == "250 ms"
    assert kind_of(PLANS["counted"]).time(2.5e9) == "2.5 GFLOP"


@pytest.mark.parametrize("name", PLANS)
def test_plans_for_other_limits_are_like_the_plan(name: str) -> None:
    plan = PLANS[name]
    made = list(kind_of(plan).plans(4))
    assert [other.bill.peak_memory for other in made] == sorted(other.bill.peak_memory for other in made)
    assert {kind_of(other).limit_name for other in made} == {kind_of(plan).limit_name}
    assert {(other.rooms, other.schedule.disk) for other in made} == {(plan.rooms, plan.schedule.disk)}
    assert made[0].bill.peak_memory <= kind_of(plan).least()
