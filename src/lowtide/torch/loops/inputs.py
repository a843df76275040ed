"""The inputs of a loop's steps: tensors indexed along their first axis, and `Steps`, which need not be in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from lowtide.checks import whole_number
from lowtide.errors import InputError
from lowtide.torch.state.trees import form_of, leaves_of

# Rows are taken from their tensors this many at once, which is cheaper than one by one; larger numbers gain nothing.
_MOST_ROWS_AT_ONCE = 64


class Steps:
    """One item for each step, fetched when the step runs: nothing is stacked, nothing stays in memory.

    `source` is anything that can be indexed (a memmap, a dataset, a list of items), or a function of the step's index.
    It is asked again for every rerun and must then return the same item. No gradient flows into items.

    Args:
        source: `source[k]` or `source(k)` is the input of step k: a tensor or any nested value.
        length: the number of steps; `len(source)` by default.
    """

    def __init__(self, source: Any, length: int | None = None) -> None:
        self._fetch: Callable[[int], Any]
        if hasattr(source, "__getitem__"):
            self._fetch = source.__getitem__
        elif callable(source):
            self._fetch = source
        else:
            raise InputError(
                f"Steps({type(source).__name__}): give something that can be indexed, or a function of the index"
            )
        self.length = None if length is None else whole_number(length, "Steps(length)", least=0)
        if self.length is None and hasattr(source, "__len__"):
            self.length = len(source)

    def __getitem__(self, k: int) -> Any:
        return self._fetch(k)

    def __repr__(self) -> str:
        return f"Steps(length={self.length})"


class Inputs:
    """The inputs of a whole loop; `rows` yields those of single steps.

    With `reverse`, step k gets the k-th item from the end, as in `jax.lax.scan`; `place(k)` is that item's index.
    Tensors that require a gradient are in `differentiable`.
    """

    def __init__(self, xs: Any, length: int | None, reverse: bool) -> None:
        self._form = form_of(xs)
        self._lists = _lists_in(xs)
        leaves = self._form.flatten(xs)
        names = self._form.names("xs")
        lengths = {name: _length(leaf, name) for leaf, name in zip(leaves, names, strict=True)}
        self.length = _common_length(lengths, length)
        self._last = self.length - 1 if reverse else None
        self._sources: list[Any] = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._single = self._sources[0] if type(self._form.unflatten(self._sources)) is torch.Tensor else None
        self.differentiable = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        self._wanted = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]

    def explain(self, error: Exception) -> None:
        """Add to an error of the first step what its author may not have meant by the inputs."""
        for length in self._lists:
            error.add_note(
                f"xs has a list of {length:,} tensors, and each step gets a list of {length:,}: one row of each. To "
                "give each step one item of the list, stack it: torch.stack(xs), or wrap it: lt.Steps(xs)"
            )

    def place(self, k: int) -> int:
        """The index of the item that step k gets, and of its output."""
        return k if self._last is None else self._last - k

    def rows(self, start: int, stop: int, leaves: list[torch.Tensor] | None = None) -> Iterator[Any]:
        """The inputs of steps [start, stop), one after another, detached from every graph.

        With `leaves`, differentiable inputs require a gradient, and are appended there as their step comes up.
        """
        for low in range(start, stop, _MOST_ROWS_AT_ONCE):
            high = min(low + _MOST_ROWS_AT_ONCE, stop)
            if self._single is not None and (leaves is None or not self.differentiable):
                yield from self._column(self._single, low, high)
                continue
            if not self._sources:
                for _ in range(low, high):
                    yield self._form.unflatten(())
                continue
            for items in zip(*(self._column(source, low, high) for source in self._sources), strict=True):
                if leaves is not None and self.differentiable:
                    for item, wanted in zip(items, self._wanted, strict=True):
                        if wanted:
                            leaves.append(item.requires_grad_())
                yield self._form.unflatten(items)

    def _column(self, source: Any, low: int, high: int) -> Iterable[Any]:
        """The items of one source for steps [low, high); a tensor is split at once, which is cheap."""
        first, last = self.place(low), self.place(high - 1)
        if not isinstance(source, Steps):
            items: tuple[torch.Tensor, ...] = source[min(first, last) : max(first, last) + 1].unbind(0)
            return items if first <= last else reversed(items)
        onward = 1 if first <= last else -1
        return (self._item(source, place) for place in range(first, last + onward, onward))

    def _item(self, source: Steps, place: int) -> Any:
        item = source[place]
        for leaf in leaves_of(item):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                raise InputError(
                    f"item {place:,} of Steps needs a gradient, which cannot reach it; give a stacked tensor as xs, "
                    "or detach the items"
                )
        return item

    def connected(self, xs: list[torch.Tensor]) -> Iterator[Any]:
        """The inputs of all steps, with the differentiable tensors replaced by `xs` and connected to their graphs."""
        replacements = iter(xs)
        sources = [
            next(replacements).unbind(0) if wanted else source
            for source, wanted in zip(self._sources, self._wanted, strict=True)
        ]
        for k in range(self.length):
            yield self._form.unflatten([source[self.place(k)] for source in sources])

    def blank(self) -> Any:
        """Zeros in the shapes of a step's input, for a loop of no steps."""
        if any(isinstance(source, Steps) for source in self._sources):
            raise InputError("Steps of length 0 do not say what a step gets, so the outputs' shapes cannot be known")
        return self._form.unflatten([source.new_zeros(source.shape[1:]) for source in self._sources])


def _lists_in(xs: Any) -> list[int]:
    """The lengths of lists of tensors that are given as inputs: somebody may mean one item for each step."""
    parts = xs if isinstance(xs, tuple) else (xs,)
    return [len(p) for p in parts if isinstance(p, list) and p and all(isinstance(t, torch.Tensor) for t in p)]


def _common_length(lengths: dict[str, int | None], length: int | None) -> int:
    """The number of steps on which all inputs that have one agree; `length` is the caller's."""
    known = {name: size for name, size in lengths.items() if size is not None}
    if length is not None:
        known["length"] = whole_number(length, "length", least=0)
    if not known:
        raise InputError(
            "how many steps? give length=, or xs with tensors or Steps that have a length (the arguments of a scan are "
            "f, init, xs: the first carry comes before the inputs)"
        )
    if len(set(known.values())) > 1:
        sizes = ", ".join(f"{name}: {size:,}" for name, size in known.items())
        raise InputError(
            f"unequal numbers of steps ({sizes}); give all of them the same first axis, and stack a list that has one "
            "item for each step: torch.stack(xs), or lt.Steps(xs)"
        )
    return next(iter(known.values()))


def _length(leaf: Any, name: str) -> int | None:
    """The number of steps that one of the inputs is for; None for `Steps` without a length."""
    if isinstance(leaf, Steps):
        return leaf.length
    if not isinstance(leaf, torch.Tensor):
        raise InputError(
            f"{name} is a {type(leaf).__name__}; give tensors with the steps along their first axis, "
            "or wrap what is to be indexed by step in lowtide.torch.Steps"
        )
    if leaf.dim() == 0:
        raise InputError(f"{name} has no axis to take steps along; give a tensor with the steps along its first axis")
    return leaf.shape[0]
