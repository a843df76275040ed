"""One step of a loop: calls the user's function and checks what comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowtide.errors import InputError
from lowtide.torch.lean_step import LeanStep
from lowtide.torch.outputs import described, like_of
from lowtide.torch.trees import FormError, form_of

StepFunction = Callable[[Any, Any], tuple[Any, Any]]


class Stepper:
    """`f(carry, x) -> (carry, y)`, with a carry that keeps the form, shapes and dtypes it began with."""

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
        """The step for where a tape is wanted."""
        return self.f if self.lean is None else self.lean

    @contextmanager
    def without_lean(self) -> Iterator[None]:
        """Inside, tapes are whole."""
        lean, self.lean = self.lean, None
        try:
            yield
        finally:
            self.lean = lean

    def run(self, k: int, carry: Any, leaves: list[Any], x: Any) -> tuple[Any, list[Any], Any]:
        """Run step k from `carry`, whose leaves are `leaves`; gives the new carry, its leaves, and the output."""
        versions = self.versions(leaves)
        carry, y = self.call(k, carry, x)
        self.check_versions(k, leaves, versions)
        return carry, self.leaves(k, carry), y

    def versions(self, leaves: list[Any]) -> list[int]:
        """Counters of the tensors among the leaves, which go up when one is changed in place."""
        return [leaves[place]._version for place in self._tensors]

    def check_versions(self, k: int, leaves: list[Any], versions: list[int]) -> None:
        """Refuse step k if it changed what it got."""
        held = [leaves[place] for place in self._tensors]
        if [tensor._version for tensor in held] != versions:
            self._changed(k, held, versions)

    def watching(self, leaves: list[Any]) -> Callable[[int, Any], None] | None:
        """A quick check, to be called with each new carry: were the tensors of the one before changed in place."""
        if not self._tensors:
            return None
        held = [leaves[place] for place in self._tensors]
        versions = [tensor._version for tensor in held]

        def watch(k: int, carry: Any) -> None:
            nonlocal held, versions
            if [tensor._version for tensor in held] != versions:
                self._changed(k, held, versions)
            try:
                leaves = self.form.flatten(carry)
                held = [leaves[place] for place in self._tensors]
                versions = [tensor._version for tensor in held]
            except (FormError, AttributeError):
                self.leaves(k, carry)  # says what is wrong

        return watch

    def _changed(self, k: int, held: list[torch.Tensor], versions: list[int]) -> None:
        for place, tensor, version in zip(self._tensors, held, versions, strict=True):
            if tensor._version != version:
                raise InputError(
                    f"step {k:,} changed {self.names[place]} in place; snapshots hold that tensor, so make a new one "
                    "(h = h + x, not h += x), or begin the step with a clone"
                )

    def fits(self, carry: Any) -> bool:
        """Whether a carry has the form, shapes and dtypes of the first one."""
        try:
            return [like_of(leaf) for leaf in self.form.flatten(carry)] == self._like
        except FormError:
            return False

    def call(self, k: int, carry: Any, x: Any) -> tuple[Any, Any]:
        """The bare call: the pair that step k returned."""
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
        if [like_of(leaf) for leaf in leaves] != self._like:
            self._refuse(k, leaves)
        return leaves

    def _refuse(self, k: int, leaves: list[Any]) -> None:
        for leaf, like, name in zip(leaves, self._like, self.names, strict=True):
            if like_of(leaf) != like:
                was = "no tensor" if like is None else f"{tuple(like[0])} {like[1]} on {like[2]}"
                where = f" on {leaf.device}" if isinstance(leaf, torch.Tensor) else ""
                raise InputError(
                    f"step {k:,} returned {name} as {described(leaf)}{where}, it got {was}; return the same shape, "
                    "dtype and device, or give an init that has them"
                )
