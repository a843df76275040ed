"""Random generators: their states are read, recognised and put back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from lowtide.torch.state import generators
from lowtide.torch.state.generators import Generators

TORCH, PYTHON, NUMPY = generators._WITHOUT_DEVICES


@pytest.mark.parametrize("by_asking", [False, True])
def test_states_are_read_and_written(by_asking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if by_asking:  # where a generator's words are not where they are looked for
        monkeypatch.setattr(generators, "_python_words_are_known", lambda: False)
    sources: Any = (
        (TORCH, lambda: torch.rand(()).item()),
        (PYTHON, lambda: random.gauss(0, 1)),
        (NUMPY, np.random.randn),
        (generators._source_of(own := np.random.default_rng(3)), own.normal),
        (generators._source_of(old := np.random.RandomState(3)), old.standard_normal),
        (generators._source_of(other := random.Random(3)), lambda: other.gauss(0, 1)),
    )
    for source, draw in sources:
        for _ in range(3):  # a second normal number waits every other time
            draw()
            state = source.read()
            assert source.read(state) is state
            first = [draw() for _ in range(3)]
            assert source.read(state) is not state
            source.write(state)
            assert source.read(state) is state
            assert [draw() for _ in range(3)] == first


def test_a_second_normal_number_that_was_taken_is_noticed() -> None:
    np.random.randn()  # noqa: NPY002  (it is this one that is followed)
    state = NUMPY.read()
    if not state[1]["has_gauss"]:
        np.random.randn()  # noqa: NPY002
        state = NUMPY.read()
    number = np.random.randn()  # noqa: NPY002
    assert NUMPY.read(state) is not state
    NUMPY.write(state)
    assert np.random.randn() == number  # noqa: NPY002


def test_numpys_generator_is_followed_when_another_is_put_in_its_place() -> None:
    draw: Any = np.random.randn
    usual = np.random.mtrand.get_bit_generator()
    try:
        for bits in (np.random.MT19937(3), np.random.PCG64(3), np.random.MT19937(4)):
            before = NUMPY.read()
            np.random.mtrand.set_bit_generator(bits)
            assert NUMPY.read(before) is not before
            state = NUMPY.read()
            first = draw()
            assert NUMPY.read(state) is not state
            NUMPY.write(state)
            assert NUMPY.read(state) is state
            assert draw() == first
    finally:
        np.random.mtrand.set_bit_generator(usual)


def test_calls_between_which_nothing_is_drawn_share_the_states() -> None:
    first, second = Generators(), Generators()
    assert first._marks is second._marks
    own = torch.Generator()
    second.follow(own)
    assert (len(first._followed), len(second._followed)) == (0, 1)
    torch.rand(1)
    third = Generators()
    assert third._marks is not first._marks
    assert third._marks[1][1] is first._marks[1][1]  # Python's has not moved


def test_they_start_there_again_and_end_where_they_were() -> None:
    own = torch.Generator().manual_seed(3)

    def draw() -> list[float]:
        return [torch.rand(()).item(), random.random(), np.random.rand(), torch.rand((), generator=own).item()]  # noqa: NPY002

    found = Generators()
    found.follow(own)
    first = draw()
    with found.again():
        assert draw() == first
    after = draw()
    assert after != first
    with found.again():
        assert [*draw(), *draw()] == [*first, *after]


DRAWS: dict[str, Any] = {
    "torch": lambda: torch.randn(1).item(),
    "torch, whose normal number waits": lambda: torch.empty(1).normal_().item(),
    "Python": random.random,
    "Python, whose normal number waits": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "numpy, whose normal number waits": np.random.randn,
}


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("between", [0, 1, 700])
@pytest.mark.parametrize("name", DRAWS)
def test_a_rerun_draws_what_the_first_run_drew_and_leaves_no_trace(name: str, between: int, before: int) -> None:
    draw = DRAWS[name]
    for _ in range(before):
        draw()
    found = Generators()
    then = [source.read() for source in generators._shared()]
    first = [draw() for _ in range(between)]
    now = [draw() for _ in range(2)]
    for source, state in zip(generators._shared(), then, strict=True):
        source.write(state)
    assert [draw() for _ in range(between)] == first  # so the next two are those of before
    for _ in range(2):
        with found.again():
            again = [draw() for _ in range(between + 2)]
        assert again == [*first, *now]
    with found.again():  # nothing is drawn in this one
        pass
    assert [draw() for _ in range(2)] == now
