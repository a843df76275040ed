"""The forms in which a step of layers can be taped: whole, or lean in a few sizes.

A form's name says how many bytes its recipe keeps, and makes again at once, so that a plan, which is numbers and names,
can be run anywhere.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from lowtide.chain import Chain
from lowtide.errors import InputError
from lowtide.torch.lean import can_lean, lean, lean_menu
from lowtide.torch.lean_graph import LeanPoint, LeanSize
from lowtide.torch.step_seconds import through
from lowtide.torch.traceless import Layer

_NAME = re.compile(r"lean ([0-9]+) \+ ([0-9]+) B")
# Of a whole tape. A form that saves less is not worth a line on the menu.
_WORTHWHILE = 0.05


def lean_points(layers: tuple[Layer, ...], state: Any) -> list[LeanPoint]:
    """A few smaller tapes for these layers: all that is free, half of that, and twice as much.

    It runs the layers.
    """
    if not can_lean(through, layers, state):
        return []
    return worthwhile(lean_menu(through, layers, state))


def worthwhile(points: list[LeanPoint]) -> list[LeanPoint]:
    """Of the points of a menu, those near all that is free, half of that, and twice as much; the largest tape first."""
    free = next(point for point in points if point.is_free)
    saved = free.plain_tape - free.tape
    sizes = (free.plain_tape - saved / 2, free.tape, free.tape / 2)
    chosen = {min(points, key=lambda point, size=size: abs(point.tape - size)) for size in sizes}  # type: ignore[misc]
    worth = [point for point in chosen if point.tape < (1 - _WORTHWHILE) * point.plain_tape]
    return sorted(worth, key=lambda point: -point.tape)


def name_of_form(point: LeanPoint) -> str:
    """What the menu calls it."""
    return f"lean {point.tape} + {point.working} B"


def size_of_form(name: str) -> LeanSize | None:
    """The size that the menu's name for a form says, or None."""
    match = _NAME.fullmatch(name)
    return None if match is None else LeanSize(int(match[1]), int(match[2]))


def run_lean(layers: tuple[Layer, ...], state: Any, size: LeanSize) -> Any:
    """Run layers with a lean tape of at most that size."""
    return lean(through, layers, state, tape=size)


class Forms:
    """Runs the steps of a chain in the forms that its menus name."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain

    def __call__(self, layers: tuple[Layer, ...], step: int, option: int, state: Any) -> Any:
        """Run a step in one form."""
        name = self._chain[step].menu[option].name
        size = size_of_form(name)
        if size is None:
            raise InputError(
                f"the plan tapes step {step:,} in a form called {name!r}, which layers do not have; plan again with "
                "plan_sequential"
            )
        if not torch.is_grad_enabled():
            return through(layers, state)
        return run_lean(layers, state, size)
