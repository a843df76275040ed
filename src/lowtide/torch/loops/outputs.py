"""What a loop makes of its steps' outputs: a stack, or with `reduce` something that does not grow with the length.

`reduce="sum"` is `acc = acc + y` in step order, beginning with 0, "mean" is that divided once by the number of steps,
"last" the last step's output. (A fold of the user's own is part of the state, because its gradient may need its value;
`Loop` makes it so.) What the engine needs to know of each: where a step's output goes, and which cotangent comes back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from lowtide.errors import InputError
from lowtide.torch.state.trees import FormError, TreeForm, form_of

Like = tuple[torch.Size, torch.dtype, torch.device]


class Outputs:
    """Outputs of equal form at every step, stacked along a new first axis.

    Leaves that are not tensors are kept in a list.
    """

    # Whether a step's output is used where it is made (a running sum), or after the whole loop (a stack).
    in_step_order = False
    # Whether the last step's output is all that counts.
    only_last = False

    def __init__(self, length: int) -> None:
        self.length = length
        self.form: TreeForm | None = None
        self.names: list[str] = []
        self._kept: list[Any] = []
        self._graphed: list[list[Any]] = []
        self._like: list[Like | None] = []
        self.is_tensor = False  # one tensor, not nested: by far the most frequent output

    # --- the form of an output

    def leaves(self, k: int, y: Any) -> list[Any]:
        """The leaves of step k's output, checked against those of the first one seen."""
        if self.is_tensor and isinstance(y, torch.Tensor) and (y.shape, y.dtype, y.device) == self._like[0]:
            return [y]
        if self.form is None:
            self._begin(y)
        assert self.form is not None
        try:
            leaves = self.form.flatten(y)
        except FormError as error:
            raise InputError(
                f"step {k:,} returned an output of another form: {error}; return the same at each step"
            ) from None
        if unlike := first_unlike(leaves, self._like, self.names):
            raise InputError(
                f"step {k:,} returned the output {unlike.name} as {unlike.now}, at the step before it was "
                f"{unlike.before}; return the same shape, dtype and device at each step"
            )
        return leaves

    def _begin(self, y: Any) -> None:
        self.form = form_of(y)
        leaves = self.form.flatten(y)
        self.names = self.form.names("y")
        self._like = [like_of(leaf) for leaf in leaves]
        self.is_tensor = isinstance(y, torch.Tensor)

    # --- outputs without their graph, as the engine hands them over

    def put(self, k: int, place: int, leaves: list[Any]) -> None:
        """Take the leaves of step k's output, which belongs at `place`, without their graph."""
        if not self._kept:
            self._kept = [self._room(leaf) for leaf in leaves]
        if self.is_tensor:
            self._kept[0][place] = leaves[0].detach()
            return
        for leaf, like, buffer in zip(leaves, self._like, self._kept, strict=True):
            if like is None:
                buffer[place] = leaf
            else:
                buffer[place] = leaf.detach()

    def take(self, k: int, place: int, y: Any) -> None:
        """`put` for the whole output of a step that ran without grad."""
        if self.is_tensor and type(y) is torch.Tensor and (y.shape, y.dtype, y.device) == self._like[0]:
            self._kept[0][place] = y
        else:
            self.put(k, place, self.leaves(k, y))

    def _room(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return [None] * self.length
        return leaf.new_empty((self.length, *leaf.shape))

    def results(self) -> list[Any]:
        """One result for each leaf, to be handed to `finish`; they are no longer kept here."""
        results, self._kept = self._kept, []
        return results

    def result_shape(self, leaf: torch.Tensor) -> tuple[int, ...]:
        """The shape of the result of an output leaf."""
        return (self.length, *leaf.shape)

    def cotangents(self, grad: torch.Tensor, places: list[int], last: int) -> Iterable[torch.Tensor | None]:
        """What comes back to the steps whose outputs went to `places`, given the cotangent of the result.

        `last` is where the last step's output went.
        """
        # Places rise or fall from step to step, so these are a whole range of them if nothing is missing.
        if len(places) > 1 and abs(places[-1] - places[0]) == len(places) - 1:
            rows = grad[min(places[0], places[-1]) : max(places[0], places[-1]) + 1].unbind(0)
            return rows if places[0] < places[-1] else reversed(rows)
        return [grad[place] for place in places]

    # --- outputs with their graph, as a plain loop keeps them

    def fresh(self) -> Outputs:
        """The same with nothing in it yet."""
        return Outputs(self.length)

    def keep(self, k: int, place: int, y: Any) -> None:
        """Take the output of step k with its graph, as a plain loop does."""
        if not self._graphed:
            self._graphed = [[]] * self.length
        self._graphed[place] = self.leaves(k, y)

    def graphed(self) -> list[Any]:
        """One result for each leaf of what `keep` was given, made by ordinary operations."""
        columns = [list(column) for column in zip(*self._graphed, strict=True)]
        return [
            column if like is None else torch.stack(column) for column, like in zip(columns, self._like, strict=True)
        ]

    def finish(self, results: list[Any]) -> Any:
        """What the user gets: `results` in the form of an output."""
        assert self.form is not None
        return self.form.unflatten(results)


class Sums(Outputs):
    """The sum of all steps' outputs, in step order, or their mean."""

    in_step_order = True

    def __init__(self, length: int, mean: bool) -> None:
        super().__init__(length)
        self._mean = mean

    def _begin(self, y: Any) -> None:
        super()._begin(y)
        assert self.form is not None
        for leaf in self.form.flatten(y):
            if not isinstance(leaf, torch.Tensor):
                raise InputError(
                    f'reduce="{"mean" if self._mean else "sum"}" needs tensors, the output is {leaf!r}; return the '
                    "tensor itself, without .item() or float(), or a fold of your own: reduce=(0, fold)"
                )
            if self._mean and not (leaf.is_floating_point() or leaf.is_complex()):
                raise InputError(
                    f'reduce="mean" needs outputs that can be divided, this one is {leaf.dtype}; use "sum"'
                )

    def put(self, k: int, place: int, leaves: list[Any]) -> None:
        """Add the leaves of step k's output, without their graph, in step order."""
        if self._kept:
            self._kept = [acc + leaf.detach() for acc, leaf in zip(self._kept, leaves, strict=True)]
        else:
            self._kept = [self._room(leaf) for leaf in leaves]

    def take(self, k: int, place: int, y: Any) -> None:
        """`put` for the whole output of a step that ran without grad."""
        self.put(k, place, self.leaves(k, y))

    def _room(self, leaf: Any) -> Any:
        return 0 + leaf.detach()

    def result_shape(self, leaf: torch.Tensor) -> tuple[int, ...]:
        """That of an output: a sum does not grow with the length."""
        return leaf.shape

    def cotangents(self, grad: torch.Tensor, places: list[int], last: int) -> Iterable[torch.Tensor | None]:
        """The cotangent of the sum, for every step."""
        return [grad] * len(places)

    def fresh(self) -> Outputs:
        """The same sum or mean with nothing in it yet."""
        return Sums(self.length, self._mean)

    def keep(self, k: int, place: int, y: Any) -> None:
        """Add the output of step k with its graph, as a plain loop does."""
        leaves = self.leaves(k, y)
        totals = self._graphed[0] if self._graphed else [0] * len(leaves)
        self._graphed = [[acc + leaf for acc, leaf in zip(totals, leaves, strict=True)]]

    def graphed(self) -> list[Any]:
        """The sums, made by ordinary operations."""
        return self._graphed[0]

    def finish(self, results: list[Any]) -> Any:
        """What the user gets; a mean is divided once, at the end."""
        return super().finish([acc / self.length for acc in results] if self._mean else results)


class Last(Outputs):
    """The last step's output alone."""

    only_last = True

    def put(self, k: int, place: int, leaves: list[Any]) -> None:
        """Take the leaves of step k's output if it is the last, without their graph."""
        if k == self.length - 1:
            self._kept = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def take(self, k: int, place: int, y: Any) -> None:
        """`put` for the whole output of a step that ran without grad."""
        self.put(k, place, self.leaves(k, y))

    def result_shape(self, leaf: torch.Tensor) -> tuple[int, ...]:
        """That of an output."""
        return leaf.shape

    def cotangents(self, grad: torch.Tensor, places: list[int], last: int) -> Iterable[torch.Tensor | None]:
        """The cotangent of the result for the last step, and None for the others."""
        return [grad if place == last else None for place in places]

    def fresh(self) -> Outputs:
        """The same with nothing in it yet."""
        return Last(self.length)

    def keep(self, k: int, place: int, y: Any) -> None:
        """Take the output of step k with its graph, in place of the one before."""
        self._graphed = [self.leaves(k, y)]

    def graphed(self) -> list[Any]:
        """The last step's leaves."""
        return self._graphed[0]


def outputs_for(reduce: str | None, length: int) -> Outputs:
    """The outputs that `reduce` asks for: None, "last", "sum" or "mean"."""
    if reduce is None:
        return Outputs(length)
    if reduce == "last":
        return Last(length)
    return Sums(length, mean=reduce == "mean")


def like_of(leaf: Any) -> Like | None:
    """What must stay the same of a tensor from step to step; None for anything else."""
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else None


class Unlike(NamedTuple):
    """A leaf that is not like the one before it: its name, and both in words."""

    name: str
    now: str
    before: str


def first_unlike(leaves: list[Any], likes: list[Like | None], names: list[str]) -> Unlike | None:
    """The first leaf that is not like the one before it; None if all are."""
    if [like_of(leaf) for leaf in leaves] == likes:
        return None
    rows = zip(names, map(like_of, leaves), leaves, likes, strict=True)
    name, now, leaf, like = next(row for row in rows if row[1] != row[3])
    kind = f"a {type(leaf).__name__}" if now is None else _in_words(now)
    return Unlike(name, kind, "no tensor" if like is None else _in_words(like))


def _in_words(like: Like) -> str:
    shape, dtype, device = like
    return f"{tuple(shape)} {dtype} on {device}"
