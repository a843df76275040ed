"""A cut, ready to run: which saved tensors are kept, which are dropped, and how each of those is made again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lowtide.planners.cut import Cut
from lowtide.torch.lean_trace import Op, Trace, View

if TYPE_CHECKING:
    from lowtide.torch.lean_graph import LeanGraph

KEEP, DROP, BITS = range(3)
_aten = torch.ops.aten
# Operations that go element by element, and their forms that write into a tensor that is given.
IN_PLACE = {
    _aten.mul.Tensor: _aten.mul.out,
    _aten.add.Tensor: _aten.add.out,
    _aten.sub.Tensor: _aten.sub.out,
    _aten.div.Tensor: _aten.div.out,
    _aten.tanh.default: _aten.tanh.out,
    _aten.exp.default: _aten.exp.out,
    _aten.sigmoid.default: _aten.sigmoid.out,
    _aten.neg.default: _aten.neg.out,
}


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """An operation to run again: what it reads, and which of its results are wanted as which value."""

    op: Op
    reads: tuple[int, ...]
    makes: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a recipe finds a value: in the pack of that number, or among what was given to the call.

    `base` is the view that it finds there; None for a value that was made in the call, whose whole storage is there.
    """

    pack: int
    given: int
    base: View | None


class Recipe:
    """A cut, ready to run.

    Attributes:
        shapes, dtypes, nodes: what each pack has to be like; a node that is None is not compared.
        actions: what to do with each pack: KEEP, DROP or BITS.
        views: each pack as a view of a value; None for one that is no view.
        replays: by value, the operation that makes it again.
        uses: how often each value is read in a backward.
        sources: by dropped pack, where to find each value that its making starts from.
        release: by pack, the dropped packs whose sources are all there from then on.
        sampled: dropped packs of which a few numbers are kept, to see that the same comes out again.
        given: which of the call's arguments and modules' tensors are read, and what view each is.
        bases: by value that making something starts from, the view that is found; see `Source`.
        origins: by pack, the values that are read from it.
        strides: by pack that recipes read from, those that it has to have.
        places: by pack that is made again, where it has to lie in its storage, and its strides.
        ties: by tensor in `given`, others that were given and that have the same storage.
        in_place: for operations whose result may overwrite an argument: which.
    """

    def __init__(self, graph: LeanGraph, cut: Cut) -> None:
        trace = graph.trace
        kept, small = graph.named(cut)
        self.shapes = [pack.like[0] for pack in trace.packs]
        self.dtypes = [pack.like[1] for pack in trace.packs]
        self.nodes = [
            pack.node if pack.view is not None and not graph.is_given(pack.view.value) else None
            for pack in trace.packs  # an argument is a leaf in a rerun, whatever made it
        ]
        self.views: list[View | None] = [pack.view for pack in trace.packs]
        self.actions = [
            KEEP if graph.is_stale(index) else self._action(view, kept, small) for index, view in enumerate(self.views)
        ]
        self._packed = {view.value for view in self.views if view is not None}
        self.replays: dict[int, Replay] = {}
        replays = [self._replay(trace, index) for index in cut.rerun]
        for replay in replays:
            for _, number in replay.makes:
                self.replays[number] = replay
        self.uses = Counter(number for replay in replays for number in replay.reads)
        self.sources: dict[int, dict[int, Source]] = {}
        self.release: dict[int, list[int]] = {}
        self.sampled: set[int] = set()
        self._find_sources(graph)
        found = {number: source for row in self.sources.values() for number, source in row.items()}
        self.given = {source.given: source.base for source in found.values() if source.base and source.pack < 0}
        self.bases = {number: source.base for number, source in found.items()}
        self.origins = {source.pack: number for number, source in found.items() if source.pack >= 0}
        self.in_place = {replay: place for replay in replays if (place := self._spare(trace, replay)) is not None}
        # Where a tensor lies matters for those that recipes read from, and for those that are made again.
        self.strides = {pack: view.stride for pack in self.origins if (view := self.views[pack]) is not None}
        self.places = {pack: (view.offset, view.stride) for pack in self.sources if (view := self.views[pack])}
        self.ties = {place: graph.ties[place] for place in self.given if place in graph.ties}

    def _spare(self, trace: Trace, replay: Replay) -> int | None:
        """The place of an argument that nobody reads after the operation, and that its result fits into."""
        op = replay.op
        if op.func not in IN_PLACE or len(op.outputs) != 1:
            return None
        (result,) = op.outputs
        for place, view in enumerate(op.args):
            if type(view) is not View or result is None or view[1:] != result[1:]:
                continue
            value, made = trace.values[view.value], trace.values[result.value]
            passing = view.value in self.replays and self.uses[view.value] == 1 and view.value not in self._packed
            alone = all(other == view for other in op.views() if other.value == view.value)
            if passing and alone and (value.dtype, value.bytes) == (made.dtype, made.bytes):
                return place
        return None

    def most_at_once(self, sizes: dict[int, int]) -> int:
        """Most bytes of values made again that are alive at once, if packs are asked for from the last to the first."""
        counts, alive, level, most = Counter(self.uses), set[int](), 0, 0

        def spend(number: int) -> None:
            nonlocal level
            counts[number] -= 1
            if counts[number] <= 0 and number in alive:
                alive.remove(number)
                level -= sizes[number]

        for index in sorted(self.sources, reverse=True):
            waiting = [self.value(index)]
            while waiting:
                replay = self.replays.get(waiting[-1])
                if waiting[-1] in alive:
                    waiting.pop()
                elif replay and (missing := [n for n in replay.reads if n in self.replays and n not in alive]):
                    waiting += missing
                else:
                    made = {number for _, number in replay.makes} if replay else {waiting[-1]}
                    made = {number for number in made if counts[number] > 0 or number == waiting[-1]} - alive
                    alive |= made
                    level += sum(sizes[number] for number in made)
                    most = max(most, level)
                    for number in replay.reads if replay else ():
                        spend(number)
            spend(self.value(index))
        return most

    def value(self, index: int) -> int:
        """The value that a pack is a view of."""
        view = self.views[index]
        assert view is not None
        return view.value

    @staticmethod
    def _action(view: View | None, kept: set[int], small: set[int]) -> int:
        if view is None or view.value in kept:
            return KEEP
        return BITS if view.value in small else DROP

    @staticmethod
    def _replay(trace: Trace, index: int) -> Replay:
        op = trace.ops[index]
        makes = tuple(
            (k, view.value) for k, view in enumerate(op.outputs) if view and trace.values[view.value].maker == index
        )
        return Replay(op, op.inputs, makes)

    def _find_sources(self, graph: LeanGraph) -> None:
        """For each dropped pack: what its making starts from, and when that is there."""
        starts: dict[int, dict[int, Source]] = {}
        for replay in dict.fromkeys(self.replays.values()):  # in order: what it reads comes first
            row: dict[int, Source] = {}
            for number in replay.reads:
                row |= starts[number] if number in self.replays else {number: graph.source(number)}
            starts |= dict.fromkeys((number for _, number in replay.makes), row)
        seen: set[int] = set()
        for index, view in enumerate(self.views):
            if self.actions[index] == DROP:
                assert view is not None
                self.sources[index] = starts[view.value]
                self.uses[view.value] += 1
                ready = max([index, *(source.pack for source in starts[view.value].values())])
                self.release.setdefault(ready, []).append(index)
                if view.value not in seen:
                    seen.add(view.value)
                    self.sampled.add(index)
            elif self.actions[index] == BITS:
                assert view is not None
                self.sources[index] = {view.value: graph.source(view.value)}
                self.uses[view.value] += 1
