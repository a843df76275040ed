"""From a trace to a recipe: what may be recomputed, what keeping costs, the frontier of all cuts, and one ready to run.

A `LeanGraph` expresses a trace in terms of a minimum cut, which `planners/cut.py` solves. A cut of it becomes a
`Recipe`: which saved tensors are kept, which are dropped, and how each of the latter is recomputed. A recipe never
reads a value that is held neither by the call's arguments nor by its modules nor by autograd's saved tensors (packs).
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import NamedTuple

import torch

from lowtide.errors import BudgetError, InputError
from lowtide.interface.cache import Cache
from lowtide.planners.cut import Cut, Operation, Value, everything, frontier, least_bytes
from lowtide.sizes import format_size, parse_budget
from lowtide.torch.lean.bitmasks import bits_of, bytes_in_bits
from lowtide.torch.lean.trace import Op, Pack, Source, StorageView, Trace
from lowtide.torch.memory.accelerators import seconds_now

_MOST_RECIPES = 64  # cached for one graph, each for another size of tape
_HEAVY_FACTOR = 30  # a heavy operation takes about this many times as long as moving its bytes
_NEGLIGIBLE_SHARE = 0.01  # of the largest saved value's bytes; smaller values are not worth an operation


class LeanSize(NamedTuple):
    """The most bytes of a lean tape, and of recomputed values that are alive at once.

    If no such tape exists, because arguments are larger than planned for, that is an error if `strict`. Otherwise, and
    if numbers have turned out to change from call to call, so that what has a number cannot be run again, what takes no
    heavy operation to recompute is dropped, with a warning.
    """

    tape: int
    working: int
    strict: bool = True


@dataclass(frozen=True, slots=True)
class LeanPoint:
    """A point of the frontier: a smaller tape for more time.

    Attributes:
        tape: bytes that are kept; arguments and parameters count only if nothing else would hold them.
        seconds: the measured time of recomputing the rest.
        plain_tape: bytes of the tape that keeps everything.
        again: the names of the operations that run again in the backward, in order.
        is_free: whether this is what `lean` does by default: no heavy operation runs again.
    """

    tape: int
    seconds: float
    plain_tape: int
    again: tuple[str, ...]
    is_free: bool = False
    _most_at_once: Callable[[], int] = field(default=lambda: 0, repr=False, compare=False)

    @property
    def working(self) -> int:
        """The most bytes of recomputed values that are alive at once, in one backward of the function."""
        return self._most_at_once()

    @property
    def size(self) -> LeanSize:
        """The tape and the recomputed bytes alive at once, which identify the point in a menu."""
        return LeanSize(self.tape, self.working)

    def __str__(self) -> str:
        share = f" ({self.tape / self.plain_tape:.0%} of {format_size(self.plain_tape)})" if self.plain_tape else ""
        counts = Counter(name.removeprefix("aten.").split(".")[0] for name in self.again)
        words = ", ".join(name if n == 1 else f"{n} {name}" for name, n in counts.items())
        return f"tape {format_size(self.tape)}{share}, {self.seconds * 1e3:,.3g} ms to run again: {words or 'nothing'}"


class LeanGraph:
    """A trace as a graph to be cut, with its cuts and recipes.

    Args:
        trace: the record of a call.
        bits: what `sizes_in_bits` returns for it.
        is_merged: whether it stands for several runs, which differ in numbers.
    """

    def __init__(self, trace: Trace, bits: dict[int, tuple[int, float]], *, is_merged: bool = False) -> None:
        self.trace = trace
        self._is_merged = is_merged
        self._bits = bits
        self._packed = {pack.view.value for pack in trace.packs if pack.view is not None}
        self._recipes: Cache[Recipe] = Cache(_MOST_RECIPES)

    # --- what callers ask for

    def recipe(self, tape: int | str | LeanSize | None) -> Recipe:
        """The fastest recipe with a tape of at most this size; with None, the least that reruns no heavy operation.

        Raises:
            BudgetError: there is none.
        """
        recipe = self._recipes.get(tape)
        if recipe is None:
            recipe = self._recipe(self._chosen(tape))
            self._recipes.put(tape, recipe)
        return recipe

    def points(self) -> tuple[LeanPoint, ...]:
        """The frontier, from the largest tape to the smallest."""
        return tuple(self._point(cut) for cut in self._cuts)

    def menu(self) -> list[LeanPoint]:
        """Points that are the same in every process, by falling bytes."""
        return [self._point(cut) for cut in self._settled_cuts]

    def merged(self, other: LeanGraph, *, numbers_differ: bool) -> LeanGraph | None:
        """One graph for two runs of the same operations; None if the operations differ.

        Operations whose numbers differ between the runs are not run again. If the runs were given different numbers, no
        operation that has a number is: those that agree so far may still differ in a later call.
        """
        ours, theirs = self.trace, other.trace
        if len(ours.ops) != len(theirs.ops) or ours.given != theirs.given or ours.packs != theirs.packs:
            return None
        pairs = list(zip(ours.ops, theirs.ops, strict=True))
        if any((a.func, a.inputs, a.outputs) != (b.func, b.inputs, b.outputs) for a, b in pairs):
            return None
        ops = [replace(b, never=_why_not_both(a, b, numbers_differ) or b.never or a.never) for a, b in pairs]
        return LeanGraph(replace(theirs, ops=ops), other._bits, is_merged=True)

    # --- the cut that is chosen

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
        if not size.strict or self._is_merged:
            why = (
                "Numbers that it is given or keeps change from call to call, so what they enter is not run again"
                if self._is_merged
                else "Plan with the largest arguments that will come"
            )
            warnings.warn(
                f"a lean tape of {size.tape:,} B was planned, and this call allows none: more is kept, and the peak "
                f"may be above the one that was asked for. {why}",
                stacklevel=2,
            )
            return self._light
        raise InputError(
            f"no lean tape was found here of {size.tape:,} B that makes {size.working:,} B again at once, as the plan "
            "says; plan again with plan_sequential"
        )

    def _bytes(self, tape: int | str) -> int:
        try:
            return parse_budget(tape, self._everything.bytes)
        except InputError:  # a percentage that comes to less than one byte
            return 0

    def _point(self, cut: Cut) -> LeanPoint:
        again = tuple(self.trace.ops[index].name for index in cut.rerun)
        # Computed only when it is asked for: for a long function it takes a while.
        working = partial(self._working, cut)
        return LeanPoint(cut.bytes, cut.seconds, self._everything.bytes, again, cut == self._light, working)

    def _working(self, cut: Cut) -> int:
        return self._recipe(cut).most_at_once({number: value.bytes for number, value in self.trace.values.items()})

    def _recipe(self, cut: Cut) -> Recipe:
        kept, small = ({self._numbers[place] for place in places} for places in (cut.kept, cut.small))
        return recipe_of(self.trace, kept, small, cut.rerun)

    # --- all cuts

    @cached_property
    def _everything(self) -> Cut:
        return everything(self._operations(heavy=True), self._values)

    @cached_property
    def _light(self) -> Cut:
        """The cut with the fewest bytes without a rerun of a heavy operation; negligibly small values are kept.

        It depends on no measured time, so the same function has the same tape in every process.
        """
        little = max((value.bytes for value in self._values if value.needed), default=0) * _NEGLIGIBLE_SHARE
        values = [replace(value, bytes=0, small=None) if value.bytes < little else value for value in self._unmeasured]
        return self._weighed(least_bytes(self._operations(heavy=False, measured=False), values))

    @cached_property
    def _cuts(self) -> tuple[Cut, ...]:
        """The frontier, from everything kept to the fewest bytes."""
        # By rising seconds, then bytes: a cut is on the frontier if it has fewer bytes than every one before it.
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

    def _weighed(self, cut: Cut) -> Cut:
        """The cut with its true bytes and seconds, in place of the weights it was found with."""
        forms = [small for place in sorted(cut.small) if (small := self._values[place].small) is not None]
        return replace(
            cut,
            bytes=sum(self._values[place].bytes for place in cut.kept) + sum(bytes_ for bytes_, _ in forms),
            seconds=sum(self.trace.ops[index].seconds for index in cut.rerun) + sum(seconds for _, seconds in forms),
        )

    # --- the graph that is cut

    @cached_property
    def _numbers(self) -> list[int]:
        """The numbers of the trace's values, by their index in the graph."""
        return list(self.trace.values)

    @cached_property
    def _places(self) -> dict[int, int]:
        return {number: place for place, number in enumerate(self._numbers)}

    @cached_property
    def _values(self) -> list[Value]:
        whole = sum(self.trace.values[number].bytes for number in self._packed)
        return [self._value(number, whole) for number in self._numbers]

    def _value(self, number: int, whole: int) -> Value:
        value, packed = self.trace.values[number], number in self._packed
        if value.maker is None:
            # Something else holds it, unless it is an argument that autograd would not have saved.
            given = self.trace.given
            free = packed or number not in given or given[number][0] >= self.trace.arguments
            return Value(0 if free else value.bytes, packed)
        # A value that autograd does not save cannot be kept, so it costs more than the whole tape. Keeping everything
        # that is saved is always a cut, and cheaper than one that keeps such a value: so no cheapest cut keeps it.
        return Value(value.bytes if packed else whole + 1, packed, self._bits.get(number))

    @cached_property
    def _unmeasured(self) -> list[Value]:
        """The graph's values, whose smaller forms take as many seconds as the whole value has bytes."""
        return [
            replace(value, small=(value.small[0], float(value.bytes))) if value.small else value
            for value in self._values
        ]

    def _operations(self, heavy: bool, *, measured: bool = True) -> list[Operation]:
        """The graph's operations; with `heavy`, matrix products and the like may run again too.

        Their seconds are the measured ones, or as many as the bytes that they move, which is the same in every process.
        """
        return [self._operation(index, op, heavy, measured) for index, op in enumerate(self.trace.ops)]

    def _operation(self, index: int, op: Op, heavy: bool, measured: bool) -> Operation:
        made = [self._places[view.value] for view in op.outputs if view is not None and self.trace.makes(index, view)]
        if not self._may_run(op) or (op.is_heavy and not heavy):
            seconds = math.inf
        else:
            seconds = op.seconds if measured else self._moved(op)
        return Operation(tuple(self._places[number] for number in op.inputs), tuple(dict.fromkeys(made)), seconds)

    def _moved(self, op: Op) -> float:
        views = [*op.views(), *(view for view in op.outputs if view is not None)]
        moved = sum(self.trace.values[view.value].dtype.itemsize * math.prod(view.size) for view in views)
        return float(moved * (_HEAVY_FACTOR if op.is_heavy else 1))

    def _may_run(self, op: Op) -> bool:
        """Whether the operation would return the same bits if it ran again in the backward.

        That is so if nothing that it reads or makes is changed after it, if all of that can be recreated as a view of a
        storage, and if something holds the inputs that were not made in the call or that were changed before it.
        """
        values = self.trace.values
        if op.never:
            return False
        for number in op.inputs:
            value = values[number]
            if op.time < value.changed or value.odd:
                return False
            if (value.maker is None or value.changed >= 0) and not self.trace.is_at_hand(number, op):
                return False
        return not any(values[view.value].changed >= 0 or values[view.value].odd for view in op.outputs if view)


def _why_not_both(op: Op, again: Op, numbers_differ: bool) -> str:
    if repr((op.args, op.kwargs)) != repr((again.args, again.kwargs)):  # `repr` distinguishes 0.0 from -0.0
        return "depends on a number that is not always the same"
    if numbers_differ and again.has_numbers:
        return "may depend on a number that is not always the same"
    return ""


def _price(cut: Cut) -> tuple[float, int]:
    return cut.seconds, cut.bytes


def sizes_in_bits(trace: Trace, held: list[torch.Tensor]) -> dict[int, tuple[int, float]]:
    """The bytes and seconds of each value that can be kept in bits.

    Args:
        trace: the record of a call.
        held: the tensors that were packed, whose values decide.
    """
    found = {}
    for number, index in trace.first.items():
        value = trace.values[number]
        if (value.two or value.dtype is torch.bool) and value.maker is not None and not value.odd:
            row = _size_in_bits(trace, held[index])
            if row is not None:
                found[number] = row
    return found


def _size_in_bits(trace: Trace, tensor: torch.Tensor) -> tuple[int, float] | None:
    device = trace.device
    if device is not None:
        size = bytes_in_bits(tensor)
        return None if size is None else (size, 2 * device.seconds(0, tensor.nbytes + size, tensor.dtype))
    began = seconds_now()
    row = bits_of(tensor)
    if row is None:
        return None
    bits, packed = row
    bits.tensor(packed)
    return packed.nbytes, seconds_now() - began


KEEP, DROP, BITS = range(3)
_aten = torch.ops.aten
# Element-wise operations, and their forms that write into a given tensor.
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
    """An operation to run again: the values it reads, and pairs of a result's index and the value that it becomes."""

    op: Op
    reads: tuple[int, ...]
    makes: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """A cut, ready to run. Packs are the tensors that autograd saves, by index.

    Attributes:
        shapes, dtypes, nodes: what each pack has to have; a node that is None is not compared.
        actions: what to do with each pack: KEEP, DROP or BITS.
        stale: packs whose values the call changes in place afterwards.
        views: each pack as a view of a value; None for a pack that is not a view.
        replays: by value, the operation that recomputes it.
        uses: how often each value is read in a backward.
        sources: by dropped pack, where to find each value that recomputing it starts from.
        release: by pack, the dropped packs whose sources have all been packed from then on.
        sampled: dropped packs of which a sample is kept, to check that recomputing returns the same; and the bytes that
            the storage of each has to have.
        made: by value that is recomputed, the view of it that its operation returns. The rest of its storage, if there
            is any, nobody fills: `mse_loss` allocates as many numbers as its arguments have, and returns one.
        given: by index among the call's tensors (of arguments and modules), the view of each that is read.
        bases: by value that recomputing starts from, the view that is found; see `Source`.
        origins: by pack, the value that is read from it.
        strides: by pack that a value is read from, the strides that it has to have.
        places: by pack that is recomputed, the offset in its storage and the strides that it has to have.
        ties: by index in `given`, the indices of other tensors that have to share its storage.
        owners: by pack that is a view of a tensor of the call's, that tensor's index, and how many bytes lie between
            the two. Another tensor there means another way, on which other tensors than those of `given` are read.
        in_place: by operation, the index of an argument that its result may overwrite.
    """

    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    nodes: list[type | None]
    actions: list[int]
    stale: set[int]
    views: list[StorageView | None]
    replays: dict[int, Replay]
    uses: Counter[int]
    sources: dict[int, dict[int, Source]]
    release: dict[int, list[int]]
    sampled: dict[int, int]
    made: dict[int, StorageView]
    given: dict[int, StorageView]
    bases: dict[int, StorageView | None]
    origins: dict[int, int]
    strides: dict[int, tuple[int, ...]]
    places: dict[int, tuple[int, tuple[int, ...]]]
    ties: dict[int, list[int]]
    owners: dict[int, tuple[int, int]]
    in_place: dict[Replay, int]

    def value(self, index: int) -> int:
        """The value that a pack is a view of."""
        view = self.views[index]
        assert view is not None
        return view.value

    def most_at_once(self, sizes: dict[int, int]) -> int:
        """The most bytes of recomputed values alive at once, if packs are unpacked from the last to the first."""
        run = _DryRun(self, sizes)
        for index in sorted(self.sources, reverse=True):
            run.make(self.value(index))
            run.spend(self.value(index))
        return run.most


class _DryRun:
    """Counts the bytes of recomputed values in the order in which a `LeanTape` makes and frees them."""

    def __init__(self, recipe: Recipe, sizes: dict[int, int]) -> None:
        self._replays = recipe.replays
        self._sizes = sizes
        self._left = Counter(recipe.uses)
        self._alive: set[int] = set()
        self._level = 0
        self.most = 0

    def make(self, number: int) -> None:
        waiting = [number]
        while waiting:
            replay = self._replays.get(waiting[-1])
            if waiting[-1] in self._alive:
                waiting.pop()
            elif missing := self._missing(replay):
                waiting += missing
            else:
                self._run(replay, waiting[-1])

    def spend(self, number: int) -> None:
        self._left[number] -= 1
        if self._left[number] <= 0 and number in self._alive:
            self._alive.remove(number)
            self._level -= self._sizes[number]

    def _missing(self, replay: Replay | None) -> list[int]:
        """The values that an operation reads and that have to be recomputed first; sources exist already."""
        reads = replay.reads if replay else ()
        return [number for number in reads if number in self._replays and number not in self._alive]

    def _run(self, replay: Replay | None, wanted: int) -> None:
        made = {number for _, number in replay.makes} if replay else {wanted}
        made = {number for number in made if self._left[number] > 0 or number == wanted} - self._alive
        self._alive |= made
        self._level += sum(self._sizes[number] for number in made)
        self.most = max(self.most, self._level)
        for number in replay.reads if replay else ():
            self.spend(number)


def recipe_of(trace: Trace, kept: set[int], small: set[int], rerun: Iterable[int]) -> Recipe:
    """The recipe that keeps the values `kept` whole and `small` in bits, and recomputes the rest by the ops `rerun`.

    The operations are in the order in which they ran, so each comes after those that make what it reads.
    """
    packs = trace.packs
    views = [pack.view for pack in packs]
    actions = [_action(trace, index, kept, small) for index in range(len(packs))]
    again = [_replay(trace, index) for index in rerun]
    replays = _makers(again)
    sources = _sources(trace, actions, again, replays)
    uses = _uses(again, [views[index] for index in sources])
    found = dict(chain.from_iterable(row.items() for row in sources.values()))
    given, origins = _given(found), _origins(found)
    return Recipe(
        shapes=[pack.shape for pack in packs],
        dtypes=[pack.dtype for pack in packs],
        nodes=[_node(trace, pack) for pack in packs],
        actions=actions,
        stale=set(filter(trace.is_stale, range(len(packs)))),
        views=views,
        replays=replays,
        uses=uses,
        sources=sources,
        release=_releases(actions, sources),
        sampled=_sampled(trace, actions),
        made=dict(chain.from_iterable(map(_made, again))),
        given=given,
        bases={number: source.base for number, source in found.items()},
        origins=origins,
        strides={index: view.stride for index, view in _picked(views, origins)},
        places={index: (view.offset, view.stride) for index, view in _picked(views, sources)},
        ties={place: trace.ties[place] for place in given if place in trace.ties},
        owners=_owners(trace) if given else {},
        in_place=_spares(trace, again, _passing(trace, replays, uses)),
    )


def _action(trace: Trace, index: int, kept: set[int], small: set[int]) -> int:
    view = trace.packs[index].view
    if view is None or view.value in kept or trace.is_stale(index):
        return KEEP
    return BITS if view.value in small else DROP


def _node(trace: Trace, pack: Pack) -> type | None:
    """The type of node that made a pack; None for one from before the call: in a rerun, arguments are leaves."""
    return None if pack.view is None or trace.values[pack.view.value].maker is None else pack.node


def _replay(trace: Trace, index: int) -> Replay:
    op = trace.ops[index]
    makes = ((k, view.value) for k, view in enumerate(op.outputs) if view is not None and trace.makes(index, view))
    return Replay(op, op.inputs, tuple(makes))


def _makers(again: list[Replay]) -> dict[int, Replay]:
    """By value, the operation that recomputes it."""
    return {number: replay for replay in again for _, number in replay.makes}


def _sources(
    trace: Trace, actions: list[int], again: list[Replay], replays: dict[int, Replay]
) -> dict[int, dict[int, Source]]:
    """For each dropped pack, where to find the values that recomputing it starts from."""
    # By recomputed value. An operation comes after the makers of what it reads, so their entries exist by its turn.
    starts: dict[int, dict[int, Source]] = {}
    for replay in again:
        row: dict[int, Source] = {}
        for number in replay.reads:
            row |= starts[number] if number in replays else {number: trace.source(number)}
        starts |= dict.fromkeys((number for _, number in replay.makes), row)
    sources = {}
    for index, pack in enumerate(trace.packs):
        if actions[index] != KEEP:
            assert pack.view is not None
            number = pack.view.value
            sources[index] = starts[number] if actions[index] == DROP else {number: trace.source(number)}
    return sources


def _uses(again: list[Replay], dropped: list[StorageView | None]) -> Counter[int]:
    """How often each value is read: by operations that run again, and by autograd, once for each dropped pack."""
    uses = Counter(number for replay in again for number in replay.reads)
    uses.update(view.value for view in dropped if view is not None)
    return uses


def _given(found: dict[int, Source]) -> dict[int, StorageView]:
    return {source.given: source.base for source in found.values() if source.base and source.pack < 0}


def _origins(found: dict[int, Source]) -> dict[int, int]:
    return {source.pack: number for number, source in found.items() if source.pack >= 0}


def _owners(trace: Trace) -> dict[int, tuple[int, int]]:
    owners = {}
    for index, pack in enumerate(trace.packs):
        if pack.view is not None and pack.view.value in trace.given:
            place, view = trace.given[pack.view.value]
            owners[index] = place, (pack.view.offset - view.offset) * pack.dtype.itemsize
    return owners


def _picked(views: list[StorageView | None], indices: Iterable[int]) -> Iterator[tuple[int, StorageView]]:
    """These packs with their views: of packs that are read from or recomputed, the place in the storage matters."""
    return ((index, view) for index in indices if (view := views[index]) is not None)


def _releases(actions: list[int], sources: dict[int, dict[int, Source]]) -> dict[int, list[int]]:
    """By pack, the dropped packs that can be freed once it has been packed.

    Not earlier: a value is dropped only when everything that it is recomputed from has been packed, so that a call that
    turns out to differ from the traced one in between still has it.
    """
    release: dict[int, list[int]] = {}
    for index, row in sources.items():
        if actions[index] == DROP:
            ready = max([index, *(source.pack for source in row.values())])
            release.setdefault(ready, []).append(index)
    return release


def _sampled(trace: Trace, actions: list[int]) -> dict[int, int]:
    """The first pack of each value that is dropped, and the bytes of its storage."""
    first: dict[int, int] = {}
    for index, pack in enumerate(trace.packs):
        if actions[index] == DROP and pack.view is not None:
            first.setdefault(pack.view.value, index)
    return {index: trace.values[number].bytes for number, index in first.items()}


def _made(replay: Replay) -> Iterator[tuple[int, StorageView]]:
    """The values that an operation makes, each as the view that it returns."""
    return ((number, view) for place, number in replay.makes if (view := replay.op.outputs[place]) is not None)


def _passing(trace: Trace, replays: dict[int, Replay], uses: Counter[int]) -> set[int]:
    """Values that are recomputed, read once, and never asked for by autograd."""
    packed = {pack.view.value for pack in trace.packs if pack.view is not None}
    return {number for number in replays if uses[number] == 1 and number not in packed}


def _spares(trace: Trace, again: list[Replay], passing: set[int]) -> dict[Replay, int]:
    """By operation, the index of an argument that nothing reads afterwards and that its result fits into."""
    places = ((replay, _spare(trace, replay.op, passing)) for replay in again)
    return {replay: place for replay, place in places if place is not None}


def _spare(trace: Trace, op: Op, passing: set[int]) -> int | None:
    # Each element of the result depends only on the elements at its own place, so it may be written there as soon as
    # those have been read, provided that all arguments that are views of the value are the same view.
    result = op.outputs[0] if len(op.outputs) == 1 else None
    if op.func not in IN_PLACE or result is None:
        return None
    made = trace.values[result.value]
    for place, view in enumerate(op.args):
        if type(view) is not StorageView or view.value not in passing or view[1:] != result[1:]:
            continue
        value = trace.values[view.value]
        alone = all(other == view for other in op.views() if other.value == view.value)
        if alone and (value.dtype, value.bytes) == (made.dtype, made.bytes):
            return place
    return None
