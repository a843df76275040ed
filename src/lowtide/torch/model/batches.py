"""`largest_batch`: how many examples a training step can take within a memory peak.

The least peak is predicted on paper for a few batch sizes, or by running small batches where that is impossible. It
grows about linearly with the size, so a line through two known points leads to the next size to try. The answer is
planned for real, and run once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from lowtide.checks import function
from lowtide.errors import BudgetError, InputError
from lowtide.interface.progress import Stages
from lowtide.plan import Plan
from lowtide.planners.blocks import least_peak
from lowtide.sizes import format_size, parse_size
from lowtide.torch.model.apply import check_model
from lowtide.torch.model.loss import Loss
from lowtide.torch.model.planning import plan_model, planning
from lowtide.torch.paper.devices import A100

_MOST_EXAMPLES = 2**24  # in a batch; it is an error if more would fit
_MOST_SIZES_TRIED = 48  # in one search
_FIRST_SIZES = (1, 2, 4, 8)  # the search begins at the first one that the model can be called with
_MOST_PADDED_EXAMPLES = 1024  # smaller batches may all take the same memory, because `make_batch` pads them to one size


class Batch(NamedTuple):
    """The largest batch that fits: its number of examples, and the plan with which it fits."""

    size: int
    plan: Plan


def largest_batch(
    model: nn.Module,
    make_batch: Callable[[int], Any],
    peak: int | str,
    *,
    optimizer: Any = None,
    loss: Loss | None = None,
    pbar: Any = None,
) -> Batch:
    """The largest batch with which a training step stays within a peak, and the plan for it, to be applied.

    Sizes are tried on paper; the answer is planned for real, and one step of it is run and measured. If the model's
    control flow depends on values, smaller batches are run for real, from the smallest on. A size is then tried only if
    it would fit even if bytes grew with the square of the size, or if it is one more than a size that fits.

    Args:
        model: see `plan_model`.
        make_batch: returns the model's arguments for a given number of examples: a dict of keyword arguments, a tuple
            of arguments, or one argument.
        peak: see `plan_model`.
        optimizer: see `plan_model`.
        loss: see `plan_model`.
        pbar: see `plan_model`; there is a bar for each size that is tried.

    Raises:
        BudgetError: not even one example fits; the error names the least peak that works for one.
        InputError: an argument cannot be used, or memory does not grow with the batch.
    """
    check_model(model)
    function(make_batch, "make_batch")
    asked = parse_size(peak, "peak")
    search = _Search(model, make_batch, optimizer, loss, pbar)
    best: Batch | None = None
    while best is None or search.largest(asked) > best.size:
        size = search.largest(asked)
        args, kwargs = arguments_of(make_batch(size))
        try:
            bar = _bar(pbar, size)
            plan = plan_model(model, *args, peak=asked, optimizer=optimizer, loss=loss, pbar=bar, **kwargs)
        except BudgetError as error:
            if size == search.smallest:
                raise
            search.learn(size, error.least)
        else:
            search.learn(size, least_peak(plan.chain))
            best = Batch(size, plan)
    return best


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments and keyword arguments that a batch is."""
    if isinstance(batch, Mapping):  # a BatchEncoding too
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    return (batch,), {}


class _Search:
    """The least peak of each batch size: predicted, times the ratio of the latest real one to its prediction."""

    def __init__(
        self, model: nn.Module, make_batch: Callable[[int], Any], optimizer: Any, loss: Loss | None, pbar: Any
    ) -> None:
        self._model = model
        self._make_batch = make_batch
        self._optimizer = optimizer
        self._loss = loss
        self._pbar = pbar
        self._on_paper = True
        self._predicted: dict[int, int] = {}
        self._turned_out: dict[int, int] = {}
        self._ratio = 1.0

    @property
    def smallest(self) -> int:
        """The smallest size that was tried."""
        return min(self._predicted)

    def learn(self, size: int, least: int) -> None:
        """Record the least peak that planning for real found for this size."""
        self._turned_out[size] = least
        self._ratio = least / self._predicted[size]

    def largest(self, peak: int) -> int:
        """The largest size whose least peak is at most this one."""
        try:
            return self._largest(peak)
        except _NotOnPaperError:  # the model reads values of tensors, perhaps only at some sizes
            self._on_paper = False
            self._predicted.clear()
            return self._largest(peak)

    def _largest(self, peak: int) -> int:
        first = self._begin()
        if self._least(first) > peak:
            ways = f"raise the peak, or take a smaller model: a batch of {first:,} does not fit"
            raise BudgetError(peak, self._least(first), ways, "peak")
        gap = 0
        for _ in range(_MOST_SIZES_TRIED):
            low = max(size for size in self._predicted if self._least(size) <= peak)
            high = min((size for size in self._predicted if size > low), default=0)
            if high == low + 1:
                break
            # On a curve, a line through two points may approach the answer by little each time. So if the gap was not
            # halved, bisect it.
            creeping, gap = bool(high) and 2 * (high - low) > gap > 0, high - low if high else 0
            self._least((low + high) // 2 if creeping else self._next(low, high, peak))
        return low

    def _begin(self) -> int:
        """The smallest size that the model can be called with: some models need more than one example."""
        if not self._predicted:
            for size in _FIRST_SIZES:
                try:
                    self._least(size)
                except ValueError as error:
                    if isinstance(error, InputError) or size == _FIRST_SIZES[-1]:
                        raise
                else:
                    break
        return self.smallest

    def _next(self, low: int, high: int, peak: int) -> int:
        """The size to try next: where a line through two known points meets the peak."""
        other = high or max((size for size in self._predicted if size < low), default=0)
        if not other:
            return 2 * low
        rise = (self._least(other) - self._least(low)) / (other - low)
        if rise <= 0 and low < _MOST_PADDED_EXAMPLES and not high:
            return 2 * low  # these batches may be padded to one size
        if rise <= 0:
            raise InputError(
                f"a step with {max(low, other):,} examples takes no more memory than one with {min(low, other):,}; "
                "let make_batch make as many as it is asked for"
            )
        guess = low + int((peak - self._least(low)) / rise)
        if not self._on_paper:
            guess = min(guess, self._careful(low, peak))
        if guess > _MOST_EXAMPLES:
            raise InputError(
                f"more than {_MOST_EXAMPLES:,} examples would fit into {format_size(peak)}; give a smaller peak, or "
                "choose"
            )
        guess = max(guess, low + 1)
        return min(guess, high - 1) if high else guess

    def _careful(self, low: int, peak: int) -> int:
        """The largest size that fits even if bytes grow with the square of the size, as attention's do."""
        (first, few), (second, more) = sorted((size, self._least(size)) for size in self._predicted)[:2]
        always = max(0, few - first * (more - few) // (second - first))  # bytes that do not depend on the size
        return int(low * math.sqrt((peak - always) / max(1, self._least(low) - always)))

    def _least(self, size: int) -> int:
        if size in self._turned_out:
            return self._turned_out[size]
        if size not in self._predicted:
            self._predicted[size] = self._predict(size)
        return int(self._predicted[size] * self._ratio)

    def _predict(self, size: int) -> int:
        args, kwargs = arguments_of(self._make_batch(size))
        device = A100 if self._on_paper else None
        try:
            stages = Stages(_bar(self._pbar, size), "planning")
            with planning(self._model, args, kwargs, self._optimizer, self._loss, device, stages) as found:
                return least_peak(found.measure(timed=False))
        except InputError as error:
            if not self._on_paper:
                raise
            raise _NotOnPaperError from error


def _bar(pbar: Any, size: int) -> Any:
    return f"a batch of {size:,}" if pbar is True else pbar


class _NotOnPaperError(Exception):
    """The model cannot be run on paper, with tensors that have no values."""
