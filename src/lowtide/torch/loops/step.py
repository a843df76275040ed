"""A step of a loop: the user's function in one form for scans and for loops, and the checks around a call of it.

The form is `f(carry, x) -> (carry, y)`. The carry of a for loop is None. The user's own fold is part of the step, and
its value part of the carry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.checks import function
from lowtide.errors import InputError
from lowtide.interface.options import Fold, Reduce, fold_of
from lowtide.torch.loops.inputs import Inputs
from lowtide.torch.loops.lean_step import LeanStep
from lowtide.torch.loops.outputs import Outputs, first_unlike, like_of, outputs_for
from lowtide.torch.state.trees import FormError, form_of

StepFunction = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop as the user wrote it: a function, its first carry, its inputs, and what happens to its outputs."""

    target: Callable[..., Any]  # the user's function: it is searched for hidden state, and may be compiled
    has_carry: bool
    init: Any
    inputs: Inputs
    reduce: Reduce

    def __post_init__(self) -> None:
        function(self.target, "f")
        fold_of(self.reduce)  # refuses a word that is not known

    def outputs(self) -> Outputs:
        """Where the steps' outputs go; with the user's own fold there are none."""
        return outputs_for(self.reduce if isinstance(self.reduce, str) else None, self.inputs.length)

    def begin(self) -> Any:
        """The carry before the first step."""
        fold = self.fold
        return self.init if fold is None else (self.init, fold[0])

    def step(self, target: Callable[..., Any]) -> StepFunction:
        """The step that calls `target`; the user's own fold is part of it."""
        f = target if self.has_carry else lambda _, x: (None, target(*x))
        if self.fold is None:
            return f
        fold = self.fold[1]

        def folding(carry: Any, x: Any) -> Any:
            result = f(carry[0], x)
            if not isinstance(result, tuple | list) or len(result) != 2:
                return result  # the stepper raises the error
            return (result[0], fold(carry[1], result[1])), None

        return folding

    def result(self, carry: Any, ys: Any) -> tuple[Any, Any]:
        """The final carry and the outputs, as the user gets them."""
        return (carry, ys) if self.fold is None else (carry[0], carry[1])

    @property
    def fold(self) -> Fold | None:
        """The initial value and the function of the user's own fold; None if there is none."""
        return fold_of(self.reduce)


class Stepper:
    """Calls `f(carry, x) -> (carry, y)`, and checks that the carry keeps its first structure, shapes and dtypes."""

    def __init__(self, f: StepFunction, init: Any) -> None:
        self.f = f
        self.lean: LeanStep | None = None  # the same with a lean tape
        self.form = form_of(init)
        self.init: list[Any] = self.form.flatten(init)
        self.names = self.form.names("carry")
        self._like = [like_of(leaf) for leaf in self.init]
        self._tensors = [k for k, like in enumerate(self._like) if like is not None]

    @property
    def taping(self) -> StepFunction:
        """The step for runs that keep a tape: lean, if there is such a step."""
        return self.f if self.lean is None else self.lean

    @contextmanager
    def without_lean(self) -> Iterator[None]:
        """A context in which tapes are whole."""
        lean, self.lean = self.lean, None
        try:
            yield
        finally:
            self.lean = lean

    def run(self, k: int, carry: Any, leaves: list[Any], x: Any) -> tuple[Any, list[Any], Any]:
        """Run step k from `carry`, whose leaves are `leaves`; the new carry, its leaves, and the output."""
        held = [leaves[place] for place in self._tensors]
        versions = [tensor._version for tensor in held]  # a tensor's version rises when it is changed in place
        carry, y = self.call(k, carry, x)
        self._refuse_changed(k, held, versions)
        return carry, self.leaves(k, carry), y

    def watching(self, leaves: list[Any]) -> Callable[[int, Any], None] | None:
        """A quick check, to be called with each new carry, that the previous carry's tensors were not changed in place.

        None if the carry has no tensors.
        """
        if not self._tensors:
            return None
        held = [leaves[place] for place in self._tensors]
        versions = [tensor._version for tensor in held]

        def watch(k: int, carry: Any) -> None:
            nonlocal held, versions
            if [tensor._version for tensor in held] != versions:
                self._refuse_changed(k, held, versions)
            try:
                leaves = self.form.flatten(carry)
                held = [leaves[place] for place in self._tensors]
                versions = [tensor._version for tensor in held]
            except (FormError, AttributeError):
                self.leaves(k, carry)  # raises the error

        return watch

    def _refuse_changed(self, k: int, held: list[torch.Tensor], versions: list[int]) -> None:
        """Refuse step k if it changed its carry in place."""
        for place, tensor, version in zip(self._tensors, held, versions, strict=True):
            if tensor._version != version:
                raise InputError(
                    f"step {k:,} changed {self.names[place]} in place; snapshots hold that tensor, so make a new one "
                    "(h = h + x, not h += x), or begin the step with a clone"
                )

    def fits(self, carry: Any) -> bool:
        """Whether a carry has the structure, shapes and dtypes of the first one."""
        try:
            return [like_of(leaf) for leaf in self.form.flatten(carry)] == self._like
        except FormError:
            return False

    def call(self, k: int, carry: Any, x: Any) -> tuple[Any, Any]:
        """Call step k without checks of its carry; the pair that it returned."""
        result = (self.taping if torch.is_grad_enabled() else self.f)(carry, x)
        if type(result) is tuple and len(result) == 2:
            return result
        if not isinstance(result, tuple | list) or len(result) != 2:
            what = f"{len(result)} values" if isinstance(result, tuple | list) else f"a {type(result).__name__}"
            raise InputError(f"step {k:,} returned {what}; f must return a pair (carry, output)")
        return result[0], result[1]

    def leaves(self, k: int, carry: Any) -> list[Any]:
        """The leaves of the carry that step k returned."""
        try:
            leaves = self.form.flatten(carry)
        except FormError as error:
            raise InputError(
                f"step {k:,} returned a carry of another structure than it got: {error}; return the structure that "
                "init has (to begin without a state, make the first one before the loop)"
            ) from None
        if unlike := first_unlike(leaves, self._like, self.names):
            raise InputError(
                f"step {k:,} returned {unlike.name} as {unlike.now}, it got {unlike.before}; return the same shape, "
                "dtype and device, or give an init that has them"
            )
        return leaves
