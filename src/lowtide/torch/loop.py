"""A loop as the user asked for it, in one form for scans and for loops, with or without a fold of the outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lowtide.checks import function
from lowtide.folds import Fold, Reduce, fold_of
from lowtide.torch.inputs import Inputs
from lowtide.torch.outputs import Outputs, outputs_for
from lowtide.torch.stepping import StepFunction


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop in one form for all of the functions below: `f(carry, x) -> (carry, y)`."""

    target: Callable[..., Any]  # what the user gave: where hidden state is looked for, and what is compiled
    has_carry: bool
    init: Any
    inputs: Inputs
    reduce: Reduce

    def __post_init__(self) -> None:
        function(self.target, "f")
        fold_of(self.reduce)  # says so if there is no such word

    def outputs(self) -> Outputs:
        """Where the steps' outputs go; with a fold of the user's own there are none."""
        return outputs_for(self.reduce if isinstance(self.reduce, str) else None, self.inputs.length)

    def begin(self) -> Any:
        """The carry before the first step."""
        fold = self.fold
        return self.init if fold is None else (self.init, fold[0])

    def step(self, target: Callable[..., Any]) -> StepFunction:
        """The step that calls `target`; a fold of the user's own is part of it."""
        f = target if self.has_carry else lambda _, x: (None, target(*x))
        if self.fold is None:
            return f
        fold = self.fold[1]

        def folding(carry: Any, x: Any) -> Any:
            result = f(carry[0], x)
            if not isinstance(result, tuple | list) or len(result) != 2:
                return result  # the stepper says what is wrong with it
            return (result[0], fold(carry[1], result[1])), None

        return folding

    def result(self, carry: Any, ys: Any) -> tuple[Any, Any]:
        """Final carry and outputs as the user gets them."""
        return (carry, ys) if self.fold is None else (carry[0], carry[1])

    @property
    def fold(self) -> Fold | None:
        """The initial value and the function of a fold of the user's own."""
        return fold_of(self.reduce)
