"""Costs that do not depend on measured times, so that the least peak does not."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, repeat

import pytest

from lowtide.chain import Chain, StepCost, TapeOption, Working
from lowtide.forms import RERUN, lean_form
from lowtide.planners.blocks import block_frontier, choose_blocks, least_peak, untimed
from lowtide.torch.layers import costs as layer_costs
from lowtide.torch.layers.costs import MeasuredLayers
from lowtide.torch.model import costs as model_costs
from tests.torch.odd_models import odd

LEAN = lean_form(40, 30)


def _chain(seconds: float) -> Chain:
    """Two blocks, with a form that takes so long."""
    options = (TapeOption(40, seconds, "lean", 30, LEAN), TapeOption(10, 2 * seconds, "rerun", 20, RERUN))
    step = StepCost(1, 100, seconds, seconds, working=Working(0, 10, 10), options=options)
    return Chain.of([step, step], ["a", "b"])


def test_seconds_do_not_matter() -> None:
    assert untimed(_chain(1e-3), ()) == untimed(_chain(7.0), ()).with_steps(
        [replace(step, forward=1e-3, backward=1e-3) for step in map(untimed(_chain(7.0), ()).__getitem__, range(2))]
    )


def test_forms_keep_their_places_and_bytes() -> None:
    chain = untimed(_chain(1.0), ())
    assert [(option.name, option.tape, option.backward) for option in chain[0].options] == [
        ("lean", 40, 30),
        ("rerun", 10, 20),
    ]
    assert least_peak(chain) == least_peak(_chain(1.0))


def test_what_was_found_by_seconds_is_never_chosen() -> None:
    chain = untimed(_chain(1.0), {("a", RERUN)})
    assert {point.options[0] for point in block_frontier(chain)} == {0, 1}
    assert {point.options[1] for point in block_frontier(chain)} == {0, 1, 2}
    assert choose_blocks(chain, least_peak(chain)) == (1, 2)


def test_layers_take_as_long_as_their_tapes_are_large() -> None:
    chain = _chain(1.0)
    row = MeasuredLayers(chain, (0, 0), (0, 0), (0, 0), ((0, 0), (0, 0)), ((0, 0), (0, 0)), 0).untimed()
    assert row.chain is not None
    assert (row.chain[0].forward, row.chain[0].backward) == (100.0, 200.0)
    assert [option.extra for option in row.chain[1].options] == [6.0, 9.0]
    assert [option.tape for option in row.chain[1].options] == [40, 10]


@pytest.mark.long
@pytest.mark.parametrize("name", ["nested", "spectral norm"])
def test_the_least_peak_is_the_same_whatever_is_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for seed in range(3):
        draw = random.Random(seed)
        clock = accumulate(draw.random() for _ in repeat(None)).__next__
        for module, name_of_clock in ((model_costs, "cpu_seconds_now"), (layer_costs, "seconds_now")):
            monkeypatch.setattr(module, name_of_clock, clock)
        found.add(odd(name).least())
    assert len(found) == 1
