from __future__ import annotations

import dataclasses
import json

import pytest

from lowtide.chain import Chain, Disk, StepCost, TapeOption, Working
from lowtide.errors import InputError
from lowtide.plan import Knob, Plan, Receipt
from lowtide.planners.choose import choose
from lowtide.planners.equal import Uniform
from lowtide.planners.online import Online
from lowtide.planners.tiers import Tiers
from lowtide.simulate import simulate

STEP = StepCost(10, 40, 0.5, 1.0, cotangent=10, working=Working(20, 30, 40), options=(TapeOption(20, 0.25, "lean"),))
EQUAL = Chain.equal(STEP, 250)
UNEQUAL = Chain.of([dataclasses.replace(STEP, tape=40 + k) for k in range(12)], [f"layer {k}" for k in range(12)])

PLANS = [
    choose(EQUAL, 300),
    choose(EQUAL, "20%"),
    choose(EQUAL, checkpoints=4),
    choose(EQUAL, base=7),
    choose(EQUAL),
    choose(EQUAL, 100, disk=Disk(0.01, 0.02)),
    choose(UNEQUAL, 200),
    choose(UNEQUAL, checkpoints=3),
    choose(UNEQUAL, base=4),
    choose(UNEQUAL),
    Plan.make(EQUAL, Knob("checkpoints", 5), Online(5)),
]


@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_a_plan_is_a_value_whose_bill_the_simulation_confirms(plan: Plan) -> None:
    assert simulate(plan) == plan.bill
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert list(again.actions()) == list(plan.actions())
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.knob = Knob("none")  # type: ignore[misc]  # that is the point


def test_json_without_the_backward_of_options_is_read_too() -> None:
    lean = TapeOption(20, 0.25, "lean", backward=70)
    plan = choose(Chain.equal(dataclasses.replace(STEP, options=(lean,)), 250), 500)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.chain[0].options == (lean,)
    older = json.loads(choose(UNEQUAL, 200).to_json())
    for step in older["chain"]["steps"]:
        for option in step["options"]:
            assert option.pop("backward") is None
    assert Plan.from_json(json.dumps(older)) == choose(UNEQUAL, 200)


def test_json_holds_parameters_and_no_actions() -> None:
    plan = choose(Chain.equal(StepCost(1, 5), 10**6), 60)
    document = json.loads(plan.to_json())
    assert document["planner"] == "uniform"
    assert document["parameters"] == {"memory": 60, "option": 0, "slots": None}
    assert len(plan.to_json()) < 1000


def test_the_text_reads_as_a_report() -> None:
    text = str(choose(Chain.equal(StepCost(1, 5), 10**6), 60))
    assert "1,000,000 equal steps, state 1 B, tape 5 B each" in text
    assert "budget=60 B" in text
    assert "3,927,077 plain and 1,000,000 taping: 4.927 forward runs per step" in text
    assert (
        "3,927,077 plain runs at least with 60 B of snapshots and tape\n          this plan makes 0 more: it is optimal"
        in text
    )
    assert "100.0% of the budget" in text
    assert "least memory that runs no step more than one extra time" in str(choose(EQUAL))
    assert "B of disk" in str(choose(EQUAL, 100, disk=Disk(0.01, 0.02)))
    online = Plan.make(EQUAL, Knob("checkpoints", 5), Online(5))
    assert online.bound is not None
    assert f"this plan makes {online.bill.plain_runs - online.bound.runs} more" in str(online)
    assert repr(online).startswith("<Plan of 250 steps by online, checkpoints=5: ")


def test_unequal_plans_say_what_happens_to_each_step() -> None:
    plan = choose(UNEQUAL, 200)
    decisions = plan.decisions()
    assert [decision.name for decision in decisions] == [f"layer {k}" for k in range(12)]
    assert sum(decision.plain_runs for decision in decisions) == plan.bill.plain_runs > 0
    assert any(decision.stored for decision in decisions)
    assert {decision.form for decision in decisions} <= {"keep", "lean"}
    assert all(str(decision) in str(plan) for decision in decisions)
    bare = Chain.of([StepCost(1, 2, options=(TapeOption(1, 0.0),)), StepCost(1, 3, options=(TapeOption(1, 0.0),))])
    assert str(choose(bare, 2).decisions()[1]).startswith("step 1 ")
    assert "tape: option 1" in str(choose(bare, 2))


def test_a_plan_of_no_time_has_no_time_factor() -> None:
    assert choose(Chain.equal(StepCost(1, 5, 0.0, 0.0), 10), 20).time_factor == 1.0


DISK = {"write": 1, "read": 1}
BILL = json.loads(choose(EQUAL, 300).to_json())["bill"]


def _tampered(**changes: object) -> str:
    return json.dumps(json.loads(choose(EQUAL, 300).to_json()) | changes)


def _with_chain(**changes: object) -> str:
    return _tampered(chain=json.loads(choose(EQUAL, 300).to_json())["chain"] | changes)


def _with_form(**way: object) -> str:
    option = {"tape": 1, "extra": 0.0, "name": "a", "backward": 0, "form": [way]}
    step = {"state": 1, "tape": 5, "forward": 1.0, "backward": 1.0, "working": {}, "options": [option]}
    return _with_chain(steps=[step])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (_with_chain(roles=["bogus"]), "does not have the form.*bogus"),
        (_with_chain(layers=[[1]]), "does not have the form.*unpack"),
        (_with_form(products="bogus"), "products='bogus' is not known; give one of all, weights, or none"),
        (_with_form(lean=["x", 1]), "tape='x' is a str"),
        ("{", "not JSON"),
        ("[]", '"lowtide": 1 is missing'),
        ('{"lowtide": 2}', '"lowtide": 1 is missing'),
        ('{"lowtide": 1}', "lacks chain, knob, planner, parameters, bill"),
        (_tampered(planner="magic"), "planner 'magic' is not known here; known are base, blocks, hetero"),
        (_tampered(parameters={"memory": 300, "colour": 1}), "does not have the form.*colour"),
        (_tampered(chain={"length": 3}), "does not have the form.*steps"),
        (_tampered(bill=BILL | {"plain_runs": 7}), "another version of planner 'uniform'.*plan again"),
        (_tampered(planner=[1]), r"planner \[1\] is not known"),
        (_tampered(parameters=[1]), "does not have the form"),
        (_tampered(parameters=None), "does not have the form"),
        (_tampered(parameters={"memory": 250, "option": 99}), "option=99 is not on a menu of 2 entries"),
        (_tampered(parameters={"memory": 250, "option": -1}), "option=-1 is too small"),
        (_tampered(parameters={"memory": 10**70}), "memory=.*too large"),
        (_tampered(planner="tiers", parameters={"memory": 250, "disk": 5}), "disk=5 is a int; give a Disk"),
        (
            _tampered(planner="tiers", parameters={"memory": 250, "disk": {"write": 1, "read": 1}, "period": -1}),
            "period=-1",
        ),
        (_tampered(planner="hetero", parameters={"decisions": [0] * 51}), "51 decisions do not fit"),
        (_tampered(planner="hetero", parameters={"decisions": ["x"]}), "1 decisions do not fit"),
        (_tampered(knob={"name": "magic", "value": 1}), "there is no knob 'magic'"),
        (_tampered(knob={"name": "budget", "value": "x"}), "value='x' is a str"),
        (_tampered(chain={"length": 1, "steps": [], "names": []}), "a chain of 1 steps was given 0 costs"),
        ("[" * 100_000, "not JSON"),
        (None, "not JSON"),
        (b"\xff\xfe\xff", "not JSON"),
        ('{"lowtide": ' + "1" * 5000 + "}", "not JSON"),
    ],
)
def test_json_that_is_not_a_plan_is_refused(text: str, why: str) -> None:
    with pytest.raises(InputError, match=f"(?s){why}"):
        Plan.from_json(text)


def test_schedules_that_do_not_fit_the_chain_are_refused() -> None:
    for schedule in (Uniform(100), Tiers(100, Disk(1.0, 1.0))):
        with pytest.raises(InputError, match="this planner is for equal steps"):
            Plan.make(UNEQUAL, Knob("budget", 100), schedule)
    with pytest.raises(InputError, match="the least that works is 50 B"):
        Plan.make(EQUAL, Knob("budget", 49), Uniform(49))


def test_receipts() -> None:
    receipt = Receipt(plain_runs=10, taping_runs=5, backward_runs=5, probe_runs=1, peak_memory=2048, seconds=0.25)
    assert Receipt.from_json(receipt.to_json()) == receipt
    assert hash(receipt) == hash(Receipt.from_json(receipt.to_json()))
    assert str(receipt) == (
        "runs    10 plain, 5 taping, 5 backward, 1 to measure\npeak    2 KiB of memory, 0 B of disk\ntime    0.25 s"
    )
    assert str(Receipt(peak_memory=2048, kept_whole=3)) == (
        "runs    3 lean calls kept their whole tape\npeak    2 KiB of memory, 0 B of disk\ntime    0 s"
    )
    assert [label for label, _ in Receipt(peak_memory=2048).lines()] == ["peak", "time"]
    with pytest.raises(InputError, match="lacks receipt"):
        Receipt.from_json('{"lowtide": 1}')
    with pytest.raises(InputError, match=r"does not have the form.*colour"):
        Receipt.from_json('{"lowtide": 1, "receipt": {"colour": 1}}')
    with pytest.raises(InputError, match="does not have the form"):
        Receipt.from_json('{"lowtide": 1, "receipt": 5}')
    with pytest.raises(InputError, match="plain_runs='x'"):
        Receipt.from_json('{"lowtide": 1, "receipt": {"plain_runs": "x"}}')
