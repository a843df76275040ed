"""A bar moves once for each step forward and once backward, never for reruns."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

import lowtide.torch as lt
from lowtide import InputError
from lowtide.interface.progress import progress
from tests.interface.bars import Bar, drawn

LENGTH = 30
KNOBS: dict[str, dict[str, Any]] = {
    "none": {},
    "base": {"base": 4},
    "every tape": {"base": 100},
    "one snapshot": {"checkpoints": 1},
    "checkpoints": {"checkpoints": 3},
    "budget": {"budget": "1MB"},
    "small budget": {"budget": 700},
    "reverse": {"checkpoints": 2, "reverse": True},
    "sum": {"base": 4, "reduce": "sum"},
    "last": {"checkpoints": 3, "reduce": "last"},
    "with grad": {"checkpoints": 2, "advance_with_grad": True},
    "unchecked": {"checkpoints": 2, "check_rerun": None},
}


def run(pbar: Any, loop: Any = lt.checkpointed_scan, length: int = LENGTH, **options: Any) -> tuple[Any, list[int]]:
    """The loss of a small loop, and the runs of its steps, which go on being counted."""
    w = torch.full((3,), 0.9, requires_grad=True)
    runs = [0]

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        runs[0] += 1
        return torch.sin(h * w), h * x

    h, ys = loop(step, torch.ones(3), torch.ones(length, 3), pbar=pbar, **options)
    return h.sum() + ys.sum(), runs


@pytest.mark.parametrize("knob", KNOBS)
@pytest.mark.parametrize("length", [1, 2, LENGTH, 90])
def test_it_moves_once_for_each_step_forward_and_once_backward(knob: str, length: int) -> None:
    bar = Bar()
    loss, runs = run(bar, length=length, **KNOBS[knob])
    assert bar.moves == [1] * length
    assert runs[0] == length
    loss.backward()
    assert sum(bar.moves[length:]) == length
    assert min(bar.moves) > 0


def test_it_stands_still_while_steps_are_run_again() -> None:
    bar = Bar()
    loss, runs = run(bar, checkpoints=1)
    loss.backward()
    assert runs[0] == LENGTH * (LENGTH + 1) // 2
    assert bar.moves == [1] * (2 * LENGTH)


def test_it_stands_still_when_the_first_steps_have_to_be_begun_once_more() -> None:
    bar, calls = Bar(), [0]
    p = torch.ones(3, requires_grad=True)
    w = p * 0.9

    def step(h: torch.Tensor, _: Any) -> Any:
        calls[0] += 1
        return torch.sin(h * w) + p, None

    h, _ = lt.checkpointed_scan(step, torch.ones(3), length=6, base=6, pbar=bar)
    h.sum().backward()
    assert calls[0] >= 6
    assert sum(bar.moves) == 12


@pytest.mark.parametrize("loop", [lt.scan, lt.checkpointed_scan])
def test_without_grad_it_moves_forward_only(loop: Any) -> None:
    bar = Bar()
    with torch.no_grad():
        run(bar, loop)
    assert bar.moves == [1] * LENGTH


def test_plain_loops_move_forward_only() -> None:
    bar = Bar()
    loss, _ = run(bar, lt.scan)
    loss.backward()
    assert bar.moves == [1] * LENGTH
    bar = Bar()
    lt.for_loop(lambda x: x, torch.ones(5), pbar=bar)
    assert bar.moves == [1] * 5


def test_loops_without_a_carry_move_it_too() -> None:
    bar = Bar()
    w = torch.ones(3, requires_grad=True)
    lt.checkpointed_for_loop(lambda x: x * w, torch.ones(LENGTH, 3), pbar=bar, base=4).sum().backward()
    assert sum(bar.moves) == 2 * LENGTH


def test_a_loop_of_no_steps_does_not_move_it() -> None:
    bar = Bar()
    run(bar, length=0)
    assert bar.moves == []


def test_one_bar_serves_several_loops() -> None:
    bar = Bar()
    first, _ = run(bar, base=3)
    second, _ = run(bar, checkpoints=2)
    (first + second).backward()
    assert sum(bar.moves) == 4 * LENGTH


def test_a_tqdm_bar_of_ones_own_is_used_as_it_is() -> None:
    with pytest.importorskip("tqdm").tqdm(total=2 * LENGTH, disable=None) as bar:
        assert progress(bar, LENGTH, with_backward=True) is bar
        run(bar, base=4)[0].backward()


@pytest.mark.parametrize(
    ("pbar", "label"), [(True, "steps"), (7, "steps"), (1000, "steps"), ("training", "training")], ids=str
)
@pytest.mark.parametrize(("loop", "total"), [(lt.checkpointed_scan, 2 * LENGTH), (lt.scan, LENGTH)])
def test_a_bar_of_its_own_is_full_at_the_end(
    pbar: Any, label: str, loop: Any, total: int, capsys: pytest.CaptureFixture[str]
) -> None:
    loss, _ = run(pbar, loop)
    loss.backward()
    last = drawn(capsys.readouterr().err)
    assert last.startswith(f"{label}: 100%")
    assert re.search(rf"\b{total}/{total}\b", last)


@pytest.mark.parametrize("pbar", [None, False])
def test_no_bar_is_drawn_unless_asked_for(pbar: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run(pbar, base=4)[0].backward()
    assert capsys.readouterr().err == ""
    assert progress(pbar, 3, with_backward=True) is None


@pytest.mark.parametrize("pbar", [0, -3, 1.5, object, np.zeros(2), ("a",)], ids=repr)
@pytest.mark.parametrize("loop", [lt.checkpointed_scan, lt.scan])
def test_what_is_no_bar_is_refused(pbar: Any, loop: Any) -> None:
    message = f"pbar={pbar!r}: give True, a whole number of steps, a label, or an object with update(n)"
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        run(pbar, loop)
