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
from lowtide.errors import FunctionError, InputError, LowtideError
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

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """A context in which an error of the first step is told what it may come from."""
        try:
            yield
        except (TypeError, AttributeError, RuntimeError, ValueError) as error:
            if not isinstance(error, LowtideError):
                self.inputs.explain(error)
                if self.has_carry and self.init is None:
                    error.add_note(
                        "init is None, so the first step got None for its carry; give the carry before the first step "
                        "as init, or let the step make it: if h is None: h = ..."
                    )
            raise

    @property
    def fold(self) -> Fold | None:
        """The initial value and the function of the user's own fold; None if there is none."""
        return fold_of(self.reduce)


class CarryForm:
    """The structure of a carry, and what must stay the same of its leaves."""

    def __init__(self, carry: Any) -> None:
        self.form = form_of(carry)
        self.names = self.form.names("carry")
        leaves = self.form.flatten(carry)
        self.likes = [like_of(leaf) for leaf in leaves]
        self.tensors = [k for k, like in enumerate(self.likes) if like is not None]

    def fits(self, carry: Any) -> bool:
        """Whether a carry has this structure, and leaves of these shapes and dtypes."""
        try:
            return [like_of(leaf) for leaf in self.form.flatten(carry)] == self.likes
        except FormError:
            return False

    def held(self, leaves: list[Any]) -> tuple[list[torch.Tensor], list[int]]:
        """The tensors among the leaves, and their versions, which rise when a tensor is changed in place."""
        tensors = [leaves[place] for place in self.tensors]
        return tensors, [tensor._version for tensor in tensors]

    def may_become(self, other: CarryForm) -> bool:
        """Whether a first carry of this form only begins what the other one is.

        A cell that is called with None, with a number or with a tensor of at most one element makes its state itself.
        """
        likes = dict(zip(other.names, other.likes, strict=True))
        return all(
            name in likes and (like == likes[name] or like is None or (like[0].numel() < 2 and likes[name] is not None))
            for name, like in zip(self.names, self.likes, strict=True)
        )


@dataclass(slots=True)
class Turn:
    """Where the runner is, for steps that have to know."""

    again: bool = False  # whether steps are run again
    resumed: bool = False  # whether the current state was put there, with only its step to come


class Stepper:
    """Calls `f(carry, x) -> (carry, y)`, and checks that the carry keeps its structure, shapes and dtypes.

    The first carry may have less than the others, where the first step makes the state; see `CarryForm.may_become`.
    """

    def __init__(self, f: StepFunction, init: Any) -> None:
        self.f = f
        self.lean: LeanStep | None = None  # the same with a lean tape
        self.turn = Turn()
        self.first = self.later = CarryForm(init)
        self.init: list[Any] = self.first.form.flatten(init)
        self._learning = True  # until the first step has run

    @property
    def names(self) -> list[str]:
        """The names of the leaves of all carries but the first."""
        return self.later.names

    def begin(self) -> Any:
        """The first carry, in containers of its own."""
        return self.first.form.unflatten(self.init)

    def before(self, k: int) -> CarryForm:
        """The form of the carry before step k."""
        return self.later if k > 0 else self.first

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
        held, versions = self.before(k).held(leaves)
        carry, y = self.call(k, carry, x)
        self._refuse_changed(k, held, versions)
        return carry, self.leaves(k, carry), y

    def watching(self, k: int, leaves: list[Any]) -> Callable[[int, Any], None] | None:
        """A quick check, to be called with each new carry, that the previous carry's tensors were not changed in place.

        `leaves` are those of the carry before step k. None if no carry has tensors.
        """
        if not self.first.tensors and not self.later.tensors:
            return None
        held, versions = self.before(k).held(leaves)

        def watch(k: int, carry: Any) -> None:
            nonlocal held, versions
            if [tensor._version for tensor in held] != versions:
                self._refuse_changed(k, held, versions)
            try:
                held, versions = self.later.held(self.later.form.flatten(carry))
            except (FormError, AttributeError):
                self.leaves(k, carry)  # raises the error

        return watch

    def _refuse_changed(self, k: int, held: list[torch.Tensor], versions: list[int]) -> None:
        """Refuse step k if it changed its carry in place."""
        form = self.before(k)
        for place, tensor, version in zip(form.tensors, held, versions, strict=True):
            if tensor._version != version:
                raise InputError(
                    f"step {k:,} changed {form.names[place]} in place; snapshots hold that tensor, so make a new one "
                    "(h = h + x, not h += x), or begin the step with a clone"
                )

    def fits(self, carry: Any) -> bool:
        """Whether a carry has one of the forms that carries have."""
        return self.later.fits(carry) or self.first.fits(carry)

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
        """The leaves of the carry that step k returned; k is -1 for the first carry."""
        if k == 0 and self._learning:
            self._learn(carry)
        form = self.before(k + 1)
        try:
            leaves = form.form.flatten(carry)
        except FormError as error:
            raise InputError(
                f"step {k:,} returned a carry of another structure than it got: {error}; {_KEEP_STRUCTURE}"
            ) from None
        if unlike := first_unlike(leaves, form.likes, form.names):
            raise InputError(
                f"step {k:,} returned {unlike.name} as {unlike.now}, it got {unlike.before}; return the same shape, "
                "dtype and device, or give an init that has them"
            )
        return leaves

    def _learn(self, carry: Any) -> None:
        """Learn from what step 0 returned which form all carries have from there on."""
        self._learning = False
        form = CarryForm(carry)
        # With the same names in another order, dictionaries are handed on in that order: a step may go through them.
        if form.names != self.first.names if self.first.fits(carry) else self.first.may_become(form):
            self.later = form


_KEEP_STRUCTURE = (
    "only the first step may make a state that init does not have (None, a number); from then on it has to keep its "
    "structure. For a list that grows, return its items as outputs, give it its full length in init, or keep it in an "
    "attribute of a module"
)


def refuse_transforms(ours: str, plain: str) -> None:
    """Refuse to run inside a transform of `torch.func`; `plain` is what to use in place of `ours` there.

    A backward runs steps again outside of it, where the tensors of its level are nobody's.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise FunctionError(
            f"{ours} is called inside a transform of torch.func (grad, vmap, jvp, ...), which cannot see through it; "
            f"take gradients with torch.autograd.grad(loss, tensors), or use {plain} inside the transform"
        )
