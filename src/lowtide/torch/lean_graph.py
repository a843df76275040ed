"""A trace as a graph for the minimum cut: what may be made again, what keeping costs, and the frontier of all cuts.

Not at hand, and so never read by a recipe, is what neither the call's arguments nor its modules nor autograd's packs
hold.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from time import perf_counter
from typing import NamedTuple

import torch

from lowtide.errors import BudgetError, InputError
from lowtide.planners.cut import Cut, Operation, Value, everything, frontier, least_bytes
from lowtide.sizes import format_size, parse_budget
from lowtide.torch.lean_bits import bits_of, bytes_in_bits
from lowtide.torch.lean_recipe import Recipe, Source
from lowtide.torch.lean_trace import Op, Trace, View

_HEAVIER = 30  # times as long as moving its bytes is about what a heavy operation takes
_NEXT_TO_NOTHING = 0.01  # of the largest value that is saved


class LeanSize(NamedTuple):
    """Most bytes of a lean tape, and of what is made again at once.

    Where no such tape can be had, because arguments are larger than planned for, that is an error if it is `strict`;
    otherwise what is free is dropped, with a warning.
    """

    tape: int
    working: int
    strict: bool = True


@dataclass(frozen=True, slots=True)
class LeanPoint:
    """A point of the frontier: a smaller tape for more time.

    Attributes:
        tape: bytes that are kept; arguments and parameters count only if nobody else would hold them.
        seconds: of making the rest again, as measured.
        plain_tape: bytes of the tape that keeps everything.
        again: the operations that run again in the backward, by name, in order.
        is_free: whether it is what `lean` does without being told: no heavy operation runs again.
    """

    tape: int
    seconds: float
    plain_tape: int
    again: tuple[str, ...]
    is_free: bool = False
    _most_at_once: Callable[[], int] = field(default=lambda: 0, repr=False, compare=False)

    @property
    def working(self) -> int:
        """Most bytes of values that were made again and are alive at once, in one backward of the function."""
        return self._most_at_once()

    @property
    def size(self) -> LeanSize:
        """Its tape, and what it makes again at once: what tells it from other points of a menu."""
        return LeanSize(self.tape, self.working)

    def __str__(self) -> str:
        share = f" ({self.tape / self.plain_tape:.0%} of {format_size(self.plain_tape)})" if self.plain_tape else ""
        counts = Counter(name.removeprefix("aten.").split(".")[0] for name in self.again)
        words = ", ".join(name if n == 1 else f"{n} {name}" for name, n in counts.items())
        return f"tape {format_size(self.tape)}{share}, {self.seconds * 1e3:,.3g} ms to run again: {words or 'nothing'}"


class LeanGraph:
    """A trace and what may be done with it.

    Args:
        trace: what the function did.
        given: for each value that the call's arguments and modules have, where it is among them, and what view.
        ties: for such places, others with the same tensor.
        arguments: how many of them are arguments; the rest is there with or without a tape.
        held: the tensors that were packed, for what only their values tell.
    """

    def __init__(
        self,
        trace: Trace,
        given: dict[int, tuple[int, View]],
        ties: dict[int, list[int]],
        arguments: int,
        held: list[torch.Tensor],
    ) -> None:
        self.trace = trace
        self._given = given
        self.ties = ties
        self._arguments = arguments
        self._packed = {pack.view.value for pack in trace.packs if pack.view is not None}
        self._first: dict[int, int] = {}  # the first pack of each value since it was last changed
        for index, pack in enumerate(trace.packs):
            if pack.view is not None and not self.is_stale(index):
                self._first.setdefault(pack.view.value, index)
        self.bits = self._find_bits(held)
        self._recipes: dict[int | str | LeanSize | None, Recipe] = {}

    def is_stale(self, index: int) -> bool:
        """Whether the value of a pack was changed in place after it."""
        pack = self.trace.packs[index]
        return pack.view is not None and pack.time < self.trace.values[pack.view.value].changed

    # --- the graph

    def _find_bits(self, held: list[torch.Tensor]) -> dict[int, tuple[int, float]]:
        """For each value that can be kept in bits: the bytes and seconds that it takes."""
        found = {}
        for number, index in self._first.items():
            value = self.trace.values[number]
            if (value.two or value.dtype is torch.bool) and value.maker is not None and not value.odd:
                row = self._in_bits(held[index])
                if row is not None:
                    found[number] = row
        return found

    def _in_bits(self, tensor: torch.Tensor) -> tuple[int, float] | None:
        device = self.trace.device
        if device is not None:
            size = bytes_in_bits(tensor)
            return None if size is None else (size, 2 * device.seconds(0, tensor.nbytes + size, tensor.dtype))
        began = perf_counter()
        row = bits_of(tensor)
        if row is None:
            return None
        bits, packed = row
        bits.tensor(packed)
        return packed.nbytes, perf_counter() - began

    @cached_property
    def _numbers(self) -> list[int]:
        """The trace's values in the order of the graph's."""
        return list(self.trace.values)

    @cached_property
    def _places(self) -> dict[int, int]:
        return {number: place for place, number in enumerate(self._numbers)}

    @cached_property
    def _whole(self) -> int:
        return sum(self.trace.values[number].bytes for number in self._packed)

    @cached_property
    def _values(self) -> list[Value]:
        return [self._value(number) for number in self._numbers]

    def _value(self, number: int) -> Value:
        value, packed = self.trace.values[number], number in self._packed
        if value.maker is None:
            # Others hold it, unless it is an argument that autograd would not have saved.
            free = packed or number not in self._given or self._given[number][0] >= self._arguments
            return Value(0 if free else value.bytes, packed)
        small = self.bits.get(number)
        # What autograd does not save cannot be kept: it is made dearer than all that it does save.
        return Value(value.bytes if packed else self._whole + 1, packed, small)

    def _operations(self, heavy: bool, *, measured: bool = True) -> list[Operation]:
        """The graph's operations; with `heavy`, matrix products and the like may run again too.

        Their seconds are as measured, or, the same at every time and place, as many as they move bytes.
        """
        return [
            Operation(
                tuple(self._places[number] for number in op.inputs),
                tuple(dict.fromkeys(self._places[v.value] for v in op.outputs if v and self._makes(index, v.value))),
                (op.seconds if measured else self._moved(op))
                if self._may_run(index, op) and (heavy or not op.is_heavy)
                else math.inf,
            )
            for index, op in enumerate(self.trace.ops)
        ]

    def _moved(self, op: Op) -> float:
        views = [*op.views(), *(view for view in op.outputs if view is not None)]
        moved = sum(self.trace.values[view.value].dtype.itemsize * math.prod(view.size) for view in views)
        return float(moved * (_HEAVIER if op.is_heavy else 1))

    def _makes(self, index: int, number: int) -> bool:
        return self.trace.values[number].maker == index

    def _may_run(self, index: int, op: Op) -> bool:
        """Whether it gives the same again: nothing that it reads or makes is changed later or out of reach."""
        values = self.trace.values
        if op.never:
            return False
        for number in op.inputs:
            value = values[number]
            if op.time < value.changed or value.odd:
                return False
            if (value.maker is None or value.changed >= 0) and not self._is_at_hand(number, op):
                return False
        return not any(values[view.value].changed >= 0 or values[view.value].odd for view in op.outputs if view)

    def _is_at_hand(self, number: int, op: Op) -> bool:
        """Whether what the operation reads of a value that it cannot be made from again is held by something."""
        if number in self._given and self.trace.values[number].changed < 0:
            return True
        if number not in self._first:
            return False
        view = self.trace.packs[self._first[number]].view
        whole = self.trace.values[number].maker is not None
        return whole or all(other == view for other in op.views() if other.value == number)

    # --- the cuts

    @cached_property
    def _everything(self) -> Cut:
        return everything(self._operations(heavy=True), self._values)

    @cached_property
    def _light(self) -> Cut:
        """The least bytes without a heavy operation; those of values that are next to nothing do not count."""
        little = max((value.bytes for value in self._values if value.needed), default=0) * _NEXT_TO_NOTHING
        values = [replace(value, bytes=0, small=None) if value.bytes < little else value for value in self._unmeasured]
        return self._weighed(least_bytes(self._operations(heavy=False, measured=False), values))

    @cached_property
    def _unmeasured(self) -> list[Value]:
        """The graph's values, with forms that take as many seconds as the whole has bytes."""
        return [
            replace(value, small=(value.small[0], float(value.bytes))) if value.small else value
            for value in self._values
        ]

    def _weighed(self, cut: Cut) -> Cut:
        """A cut with the bytes and seconds that it takes."""
        forms = [small for place in sorted(cut.small) if (small := self._values[place].small) is not None]
        return replace(
            cut,
            bytes=sum(self._values[place].bytes for place in cut.kept) + sum(bytes_ for bytes_, _ in forms),
            seconds=sum(self.trace.ops[index].seconds for index in cut.rerun) + sum(seconds for _, seconds in forms),
        )

    @cached_property
    def _cuts(self) -> tuple[Cut, ...]:
        """The frontier, from everything kept to the least bytes."""
        cuts = sorted({*frontier(self._operations(heavy=True), self._values), self._light}, key=_price)
        better: list[Cut] = []
        for cut in cuts:
            if not better or cut.bytes < better[-1].bytes:
                better.append(cut)
        return tuple(better)

    @cached_property
    def _settled_cuts(self) -> list[Cut]:
        """Cuts that do not depend on measured times, by falling bytes."""
        cuts = frontier(self._operations(heavy=True, measured=False), self._unmeasured)
        return sorted({self._light, *map(self._weighed, cuts)}, key=lambda cut: -cut.bytes)

    def points(self) -> tuple[LeanPoint, ...]:
        """The frontier."""
        return tuple(self._point(cut) for cut in self._cuts)

    def menu(self) -> list[LeanPoint]:
        """Points that are the same at every time and place, by falling bytes."""
        return [self._point(cut) for cut in self._settled_cuts]

    def _point(self, cut: Cut) -> LeanPoint:
        again = tuple(self.trace.ops[index].name for index in cut.rerun)
        # How much is made again at once takes a while to find out, for a long function.
        working = partial(self._working, cut)
        return LeanPoint(cut.bytes, cut.seconds, self._everything.bytes, again, cut == self._light, working)

    def recipe(self, tape: int | str | LeanSize | None) -> Recipe:
        """The fastest recipe whose tape is so small; None: all that needs no heavy operation is dropped.

        Raises:
            BudgetError: there is none.
        """
        if tape not in self._recipes:
            self._recipes[tape] = Recipe(self, self._chosen(tape))
        return self._recipes[tape]

    def _chosen(self, tape: int | str | LeanSize | None) -> Cut:
        if tape is None:
            return self._light
        if isinstance(tape, LeanSize):
            return self._chosen_for(tape)
        most = self._bytes(tape)
        fitting = [cut for cut in (self._everything, *self._cuts) if cut.bytes <= most]
        if not fitting:
            ways = "give tape= more bytes, or run the whole function again with lt.checkpoint"
            raise BudgetError(most, self._cuts[-1].bytes, ways)
        return min(fitting, key=_price)

    def _chosen_for(self, size: LeanSize) -> Cut:
        for cut in self._settled_cuts:
            if cut.bytes <= size.tape and self._working(cut) <= size.working:
                return cut
        if not size.strict:
            warnings.warn(
                f"a lean tape of {size.tape:,} B was planned, and this call allows none: more is kept, and the peak "
                "may be above the one that was asked for. Plan with the largest arguments that will come",
                stacklevel=2,
            )
            return self._light
        raise InputError(
            f"no lean tape was found here of {size.tape:,} B that makes {size.working:,} B again at once, as the plan "
            "says; plan again with plan_sequential"
        )

    def _working(self, cut: Cut) -> int:
        sizes = {number: value.bytes for number, value in self.trace.values.items()}
        return Recipe(self, cut).most_at_once(sizes)

    def _bytes(self, tape: int | str) -> int:
        try:
            return parse_budget(tape, self._everything.bytes)
        except InputError:  # a share of next to nothing
            return 0

    def merged(self, other: LeanGraph, *, numbers_differ: bool) -> LeanGraph | None:
        """Of two runs with the same operations: one in which those that differ in a number are not run again.

        Where the runs were given different numbers, that may still come for others: none that has a number is.
        """
        ops, others = self.trace.ops, other.trace.ops
        if len(ops) != len(others) or self._given != other._given or self.trace.packs != other.trace.packs:
            return None
        if any(
            (a.func, a.inputs, a.outputs) != (b.func, b.inputs, b.outputs) for a, b in zip(ops, others, strict=True)
        ):
            return None
        for op, again in zip(ops, others, strict=True):
            if repr((op.args, op.kwargs)) != repr((again.args, again.kwargs)):  # which tells 0.0 from -0.0
                again.never = "depends on a number that is not always the same"
            elif numbers_differ and again.has_numbers:
                again.never = "may depend on a number that is not always the same"
            again.never = again.never or op.never
        return other

    def source(self, number: int) -> Source:
        """Where to find a value that is kept."""
        if number in self._given and self.trace.values[number].changed < 0:
            return Source(-1, *self._given[number])
        first = self._first[number]
        return Source(first, -1, self.trace.packs[first].view if self.is_given(number) else None)

    def named(self, cut: Cut) -> tuple[set[int], set[int]]:
        """The values that a cut keeps in whole, and those that it keeps in bits, as the trace has them."""
        return {self._numbers[place] for place in cut.kept}, {self._numbers[place] for place in cut.small}

    def is_given(self, number: int) -> bool:
        """Whether the value was there before the call."""
        return self.trace.values[number].maker is None


def _price(cut: Cut) -> tuple[float, int]:
    return cut.seconds, cut.bytes
