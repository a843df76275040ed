"""`largest_batch`: how many examples a training step can take within a peak.

Bytes are predicted on paper for a few sizes, and where that cannot be done by running small ones; they grow in
proportion to the size, so that a line through two of them leads to the next to try. The answer is planned for real, and
run once.
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

_MOST_EXAMPLES = 2**24
_MOST_SIZES_TRIED = 48
_FIRST_SIZES = (1, 2, 4, 8)  # the first one that the model can be called with is where the search begins
_MOST_ALIKE_EXAMPLES = 1024  # batches up to this size may all be filled up to it, and take the same


class Batch(NamedTuple):
    """The largest batch that fits: how many examples, and the plan with which they do."""

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

    Sizes are tried on paper; the answer is planned for real, and one step of it is run and measured. Where a model
    looks at values, smaller sizes are run for real, from the smallest on, and none that would not fit if bytes grew
    with the square of the size, but for one example more.

    Args:
        model: see `plan_model`.
        make_batch: returns what the model is called with for so many examples: a dict of keyword arguments, a tuple of
            arguments, or one argument.
        peak: see `plan_model`.
        optimizer: see `plan_model`.
        loss: see `plan_model`.
        pbar: see `plan_model`; there is a bar for each size that is looked at.

    Raises:
        BudgetError: not even one example fits; it names the least peak that works for one.
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
    """What a model is called with for a batch."""
    if isinstance(batch, Mapping):  # a BatchEncoding too
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    return (batch,), {}


class _Search:
    """Least peaks for sizes of batches: predicted ones, corrected by those that turned out."""

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
        """The smallest size that was looked at."""
        return min(self._predicted)

    def learn(self, size: int, least: int) -> None:
        """What the least peak for this size turned out to be."""
        self._turned_out[size] = least
        self._ratio = least / self._predicted[size]

    def largest(self, peak: int) -> int:
        """The largest size whose least peak is at most this one."""
        try:
            return self._largest(peak)
        except _NotOnPaperError:  # it looks at values, perhaps only at some sizes
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
            # A line through two points of a curve may come nearer by little each time.
            creeping, gap = bool(high) and 2 * (high - low) > gap > 0, high - low if high else 0
            self._least((low + high) // 2 if creeping else self._next(low, high, peak))
        return low

    def _begin(self) -> int:
        """The smallest size that the model can be called with: some need more than one example."""
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
        """The size to look at next: where a line through two known ones meets the peak."""
        other = high or max((size for size in self._predicted if size < low), default=0)
        if not other:
            return 2 * low
        rise = (self._least(other) - self._least(low)) / (other - low)
        if rise <= 0 and low < _MOST_ALIKE_EXAMPLES and not high:
            return 2 * low  # batches may be filled up to one size
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
        always = max(0, few - first * (more - few) // (second - first))  # bytes that are there for any size
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
    """The model cannot be run without values."""
