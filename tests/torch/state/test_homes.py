"""Homes of state: wherever a counter lives that steers a function, the program is right, or it is refused.

The table itself is made by `steered.py` from the homes in `homes.py`, and stands on a page of the documentation.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide.torch as lt
from tests.torch.state.homes import HOMES, Body, Home, Program
from tests.torch.state.steered import (
    DOCUMENTED,
    FRONT_ENDS,
    VARIANTS,
    Run,
    SilentError,
    Verdict,
    judge,
    run_calls,
    runs_of_the_function,
    verdict,
)

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "reruns.md"
QUICK = ("loop", "checkpoint", "lean")
# Homes of every kind, for what takes long.
SOME = (
    "module: number",
    "module: list",
    "module: plain object",
    "module: itertools.count",
    "module: class attribute",
    "torch's random",
    "closure: number",
    "closure: list",
    "closure: iterator of a list",
    "global: number",
    "bound method: number of the object",
)
# All homes reach the same lines but these, which are traced.
TRACED = ("module: number", "module: parameter without grad", "closure: array.array", "closure: numpy array of objects")
MOST_DOCUMENTED = 4


def on_the_page() -> dict[tuple[str, str, str], str]:
    """The words of the page's table."""
    words: dict[tuple[str, str, str], str] = {}
    rows = re.findall(r"^\| (.+?) \|(.+)\|$", PAGE.read_text(encoding="utf-8"), re.M)
    for name, cells in rows:
        if name not in HOMES:
            continue
        for front_end, cell in zip(FRONT_ENDS, cells.split("|"), strict=True):
            if cell.strip() == "-":
                continue
            word, _, other = cell.strip().partition(" / ")
            words |= {(name, front_end, "value"): word, (name, front_end, "gradients"): other or word}
    return words


PAGE_WORDS = on_the_page()


def cells(front_ends: tuple[str, ...], names: tuple[str, ...] = tuple(HOMES)) -> list[tuple[str, str]]:
    return [(name, front_end) for name in names for front_end in front_ends if front_end in HOMES[name].front_ends]


def assert_allowed(name: str, front_end: str, variant: str, found: Verdict) -> None:
    place = f"{name}, {front_end}, {variant}: {found.why}"
    if (name, front_end, variant) in DOCUMENTED:
        return
    assert found.word == "right" or (found.word == "refused" and not HOMES[name].repeated), place


QUICK_CELLS = [
    pytest.param(name, front_end, marks=() if name in TRACED else pytest.mark.untraced)
    for name, front_end in cells(QUICK)
]


@pytest.mark.parametrize(("name", "front_end"), QUICK_CELLS)
def test_it_is_right_or_refused(name: str, front_end: str) -> None:
    for variant in VARIANTS:
        found = verdict(name, front_end, variant, quick=True)
        assert_allowed(name, front_end, variant, found)
        # What the page calls refused may still be right in these few programs.
        said = PAGE_WORDS[name, front_end, variant]
        assert found.word in {"right": ("right",), "refused": ("right", "refused"), "documented": ("silent",)}[said]


def _whole(name: str, front_end: str) -> None:
    for variant in VARIANTS:
        found = verdict(name, front_end, variant)
        assert_allowed(name, front_end, variant, found)
        word = "documented" if (name, front_end, variant) in DOCUMENTED else found.word
        assert PAGE_WORDS[name, front_end, variant] == word, found.why


@pytest.mark.long
@pytest.mark.parametrize(("name", "front_end"), cells(FRONT_ENDS, SOME))
def test_with_every_option_it_is_what_the_page_says(name: str, front_end: str) -> None:
    _whole(name, front_end)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "front_end"), [cell for cell in cells(FRONT_ENDS) if cell[0] not in SOME])
def test_so_it_is_for_every_home(name: str, front_end: str) -> None:
    _whole(name, front_end)


# --- the page


def test_the_page_has_every_cell() -> None:
    assert set(PAGE_WORDS) == {(*cell, variant) for cell in cells(FRONT_ENDS) for variant in VARIANTS}
    assert set(PAGE_WORDS.values()) <= {"right", "refused", "documented"}
    assert {key for key, word in PAGE_WORDS.items() if word == "documented"} == set(DOCUMENTED)


def test_few_cells_are_exceptions_and_each_has_a_reason_on_the_page() -> None:
    assert len(DOCUMENTED) <= MOST_DOCUMENTED
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert all(reason in text for reason in DOCUMENTED.values())


def test_there_are_enough_homes_and_those_in_modules_are_right() -> None:
    assert len(HOMES) >= 40
    assert sum(home.repeated for home in HOMES.values()) >= 30
    assert {word for (name, *_), word in PAGE_WORDS.items() if HOMES[name].repeated} == {"right"}


# --- the judge


@pytest.mark.long
@pytest.mark.parametrize("front_end", ["loop", "checkpoint", "layers", "model"])
@pytest.mark.parametrize("kind", [kind for kinds in VARIANTS.values() for kind in kinds])
@pytest.mark.filterwarnings("ignore:.*(keep their whole tape|a lean tape of)")  # numbers change at every call
def test_every_front_end_runs_the_function_again(front_end: str, kind: str) -> None:
    found = runs_of_the_function(HOMES["module: number"], kind, front_end)
    assert any(again > plain for plain, again in found)


@pytest.mark.parametrize("name", ["closure: number", "global: list", "function attribute"])
def test_the_judge_sees_a_program_that_is_silently_wrong(name: str) -> None:
    run = Run("unchecked", run_calls, {"check_rerun": False})
    with pytest.raises(SilentError, match="off"):
        judge(HOMES[name], "scaled", "checkpoint", run)


def test_the_judge_sees_a_home_that_is_written() -> None:
    numbers: list[int] = []

    def make(body: Body) -> Program:
        numbers.clear()

        def function(x: torch.Tensor) -> Any:
            if lt.is_recomputing():
                del numbers[1:]
            numbers.append(len(numbers))
            return body.call(numbers[-1], x)

        return Program(function, lambda: list(numbers))

    with pytest.raises(SilentError, match="its numbers were"):
        judge(Home(make, repeated=False), "slope", "checkpoint", Run("", run_calls, {}))
