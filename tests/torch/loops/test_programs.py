"""Programs as people write them do what they do in plain Python, with every option, or are told what to do instead."""

from __future__ import annotations

import pytest

from tests.torch.loops.programs import cells, dynamics, habits, memories, spiking, tutorials, worlds
from tests.torch.loops.programs.program import TABLE, options_of, verdict

LENGTHS = (1, 2, 3, 10, 57)
FILES = (cells, dynamics, spiking, habits, memories, tutorials, worlds)  # importing them fills the table
pytestmark = pytest.mark.filterwarnings("ignore")  # other people's packages warn when they are used


def test_there_are_many() -> None:
    assert len(TABLE) >= 400


@pytest.mark.parametrize("name", TABLE)
def test_a_cell_of_each(name: str) -> None:
    """One of its lengths with one of its options; which one, its place in the table says."""
    entry, place = TABLE[name], list(TABLE).index(name)
    options = list(options_of(entry).items())
    option, values = options[place * 5 % len(options)]
    assert verdict(entry, (3, 10, 2)[place % 3], values) in ("equal", "refused"), option


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE)
def test_every_length_with_every_option(name: str) -> None:
    entry = TABLE[name]
    found = {
        f"{length} steps, {option}": verdict(entry, length, values)
        for option, values in options_of(entry).items()
        for length in LENGTHS
        if length >= entry.shortest
    }
    assert {cell: said for cell, said in found.items() if said not in ("equal", "refused")} == {}
