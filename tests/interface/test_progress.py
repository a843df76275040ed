"""Bars in every spelling, and bars for work whose length is known late."""

from __future__ import annotations

from typing import Any

import pytest

from lowtide import InputError
from lowtide.interface.progress import Stages, bars, progress
from tests.interface.bars import Bar, drawn


def test_a_bar_of_its_own_is_half_full_after_the_forward(capsys: pytest.CaptureFixture[str]) -> None:
    bar = progress("half", 2, with_backward=True)
    assert bar is not None
    bar.update(1)
    bar.update(1)
    assert not drawn(capsys.readouterr().err).startswith("half: 100%")
    bar.update(2)
    assert drawn(capsys.readouterr().err).startswith("half: 100%")


@pytest.mark.parametrize("pbar", [None, False])
def test_no_bar_is_made_unless_asked_for(pbar: Any) -> None:
    assert bars(pbar, 3, with_backward=True) is None
    assert progress(pbar, 3, with_backward=True) is None


def test_whatever_has_update_is_used_as_it_is() -> None:
    bar = Bar()
    assert progress(bar, 3, with_backward=True) is bar


@pytest.mark.parametrize("pbar", [0, -3, 1.5, object, ("a",), {"update": 1}], ids=repr)
def test_what_is_no_bar_is_refused(pbar: Any) -> None:
    for make in (lambda: progress(pbar, 3, with_backward=True), lambda: Stages(pbar, "planning")):
        with pytest.raises(InputError, match="give True, a whole number of steps, a label, or an object with update"):
            make()


def test_stages_move_once_each_and_never_back() -> None:
    bar = Bar()
    stages = Stages(bar, "planning")
    stages.begin(5)
    stages.move()
    stages.reach(2)
    stages.reach(4)  # was reached before
    assert bar.moves == [1, 2]
    stages.move()
    stages.move()
    assert bar.moves == [1, 2, 1, 1]
