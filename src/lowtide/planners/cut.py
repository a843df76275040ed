"""The choice behind a lean tape, a minimum cut: which values that a backward needs are kept, and which recomputed.

Operations read values and make values. The backward needs some of the values. A value is available to it if it is kept,
whole or in a smaller form, or if the operation that made it runs again; for that, all the operation's inputs must be
available. For a price (bytes per second) the cheapest choice is a minimum cut of a network, and the cheapest choices
for all prices are the lower convex hull of all choices in the plane of bytes and seconds.

This module knows no framework and measures nothing. It does not consider the memory that operations need while they run
again, and it finds no choice that lies above the hull: such a choice is the best for no price.

It is the only part of Lowtide that needs scipy, and imports it when the first cut is made.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide import checks
from lowtide.errors import InputError
from lowtide.packages import needed_for

MOST_POINTS = 64  # of a frontier; finding them takes fewer than twice as many cuts
MOST_TOTAL_BYTES = 2**56  # of all values together
NEVER = 2**62  # a capacity above that of every cut that matters: those are below 2**61
# Costs, of bytes and seconds together, are rounded to whole numbers of parts: keeping all that is needed costs this
# many. With 10,000 operations and values, each rounded by at most half a part, a choice costs at most 1e-9 of that more
# than the cheapest.
COST_PARTS = 2**44
FLOW_BITS = 30  # of the capacities for scipy's maximum_flow, which adds two of them in 32 bits
ON_THE_LINE = 1e-9  # a point this close to the line through its neighbours, as a share of their distance, is on it
LEAST_SECONDS = 1e-200  # shorter times count as zero

Floats = NDArray[np.float64]
Longs = NDArray[np.int64]
Flags = NDArray[np.bool_]
Arcs = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation, which reads values and makes values.

    Attributes:
        inputs: the indices of the values that it reads.
        outputs: the indices of the values that it makes.
        seconds: the time of running it again; `math.inf` if it must not run again.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    seconds: float

    def __post_init__(self) -> None:
        if self.seconds != math.inf:
            checks.keep_seconds(self, "seconds", label="operation.seconds")


@dataclass(frozen=True, slots=True)
class Value:
    """A value that an operation makes, or that is given from outside.

    Attributes:
        bytes: the bytes that keeping it takes; 0 for a value that exists anyway, such as a parameter.
        needed: whether the backward needs it.
        small: a smaller form from which the same bits follow: its bytes, and the seconds of packing and unpacking it.
    """

    bytes: int
    needed: bool
    small: tuple[int, float] | None = None

    def __post_init__(self) -> None:
        checks.keep_whole(self, "bytes", least=0, label="value.bytes")
        if self.small is not None:
            size = checks.whole_number(self.small[0], "value.small bytes", least=0, most=checks.MOST_BYTES)
            object.__setattr__(self, "small", (size, checks.seconds(self.small[1], "value.small seconds")))


@dataclass(frozen=True, slots=True)
class Cut:
    """One choice of the values to keep and the operations to run again.

    Attributes:
        kept: values that are kept whole: those that the backward needs or that reruns read.
        small: values that are kept in their smaller form.
        rerun: operations that run again, in order.
        bytes: the bytes of everything that is kept.
        seconds: the time of all reruns, and of packing and unpacking.
    """

    kept: frozenset[int]
    small: frozenset[int]
    rerun: tuple[int, ...]
    bytes: int
    seconds: float


def everything(operations: Sequence[Operation], values: Sequence[Value]) -> Cut:
    """The cut that keeps every needed value whole and reruns nothing."""
    return _Graph(operations, values).everything()


def least_bytes(operations: Sequence[Operation], values: Sequence[Value]) -> Cut:
    """The cut with the fewest bytes; among those the one with the fewest seconds, to within rounding."""
    return _Graph(operations, values).least()


def frontier(operations: Sequence[Operation], values: Sequence[Value]) -> tuple[Cut, ...]:
    """Cuts from `everything` to `least_bytes`, bytes strictly falling and seconds strictly rising.

    They are the corners of the lower convex hull of all choices, and perhaps points on its edges. If there are more
    than `MOST_POINTS`, the largest gaps are filled first. If some bytes can be saved at no cost, the frontier begins
    with that choice and not with `everything`.
    """
    graph = _Graph(operations, values)
    first, last = graph.free(), graph.least()
    if first.bytes == last.bytes:
        return (first,)
    points = [first, last]
    gaps = [_gap(first, last)]
    while gaps and len(points) < MOST_POINTS:
        _, _, left, right = heapq.heappop(gaps)
        found = graph.at((left.bytes - right.bytes) / max(right.seconds - left.seconds, LEAST_SECONDS))
        if _below(left, found, right):
            points.append(found)
            heapq.heappush(gaps, _gap(left, found))
            heapq.heappush(gaps, _gap(found, right))
    return tuple(sorted(points, key=lambda cut: -cut.bytes))


def _gap(left: Cut, right: Cut) -> tuple[float, int, Cut, Cut]:
    """Two neighbours as an entry of a heap: the largest area between them first, ties broken by bytes."""
    return (right.bytes - left.bytes) * (right.seconds - left.seconds), left.bytes, left, right


def _below(left: Cut, found: Cut, right: Cut) -> bool:
    """Whether `found` lies between the two and below the line through them."""
    if not (left.bytes > found.bytes > right.bytes and left.seconds < found.seconds < right.seconds):
        return False
    saved = (left.bytes - found.bytes) / (left.bytes - right.bytes)
    paid = (found.seconds - left.seconds) / (right.seconds - left.seconds)
    return saved - paid > ON_THE_LINE


class _Graph:
    """The network of operations and values, built once; its capacities depend on the price.

    S -> operation: the cost of running it again. Operation -> each of its outputs (S -> value, if it is given): the
    cost of keeping that value, in the cheaper form. Input -> operation, and needed value -> T: infinite.

    Why a minimum cut is the cheapest choice: read "on T's side" as "runs again" for an operation, and as "is available"
    for a value. A finite cut has every needed value on T's side and, with an operation, all its inputs. A value on T's
    side whose maker is on S's side (or that is given) pays for being kept, one whose maker runs again pays nothing; so
    a finite cut is a valid choice that costs what the cut costs. Conversely, put the operations that a choice reruns,
    their inputs and the needed values on T's side: no infinite arc is cut, and the cut pays for the reruns and for
    those of these values whose maker does not run again, which that choice keeps too. So each choice costs at least as
    much as some cut, and each finite cut as much as some choice: the minima are equal.

    Nodes that must be on one side are merged with it: needed values with T, operations that never run again with S.
    Arcs into S, out of T, and from S to T do not affect the choice and are left out.
    """

    def __init__(self, operations: Sequence[Operation], values: Sequence[Value]) -> None:
        self.operations, self.values = operations, values
        self.maker = _makers(operations, values)
        forms = [value.small or (value.bytes, 0.0) for value in values]
        self.needed: Flags = np.array([value.needed for value in values], np.bool_)
        self.bytes: Longs = np.array([value.bytes for value in values], np.int64)
        self.small_bytes: Longs = np.array([form[0] for form in forms], np.int64)
        self.small_seconds: Floats = np.array([form[1] for form in forms], np.float64)
        self.seconds: Floats = np.array([operation.seconds for operation in operations], np.float64)
        self._connect()

    def _connect(self) -> None:
        source, sink = 0, 1
        node, place = self._numbered(source, sink)
        tails = [source if o is None else node[o] for o in self.maker]
        self.reruns = [o for o, at in enumerate(node) if at != source]
        self.keeps = [v for v, (tail, at) in enumerate(zip(tails, place, strict=True)) if tail != source or at != sink]
        rerun_arcs = [(source, node[o]) for o in self.reruns]
        keep_arcs = [(tails[v], place[v]) for v in self.keeps]
        read_arcs = [(place[v], node[o]) for o in self.reruns for v in self.operations[o].inputs if place[v] != sink]
        self._lay_out(rerun_arcs, keep_arcs, read_arcs)

    def _numbered(self, source: int, sink: int) -> tuple[list[int], list[int]]:
        """The node of each operation (the source if it never runs again) and of each value (the sink if needed)."""
        first_value = 2 + len(self.operations)
        self.nodes = first_value + len(self.values)
        node = [source if math.isinf(operation.seconds) else 2 + o for o, operation in enumerate(self.operations)]
        return node, [sink if value.needed else first_value + v for v, value in enumerate(self.values)]

    def _lay_out(self, rerun_arcs: Arcs, keep_arcs: Arcs, read_arcs: Arcs) -> None:
        """Store every arc and its reverse once, in the order of a CSR matrix, which is the order of scipy's flow."""
        arcs = np.array(rerun_arcs + keep_arcs + read_arcs, np.int64).reshape(-1, 2)
        forward, backward = arcs @ (self.nodes, 1), arcs @ (1, self.nodes)
        keys = np.unique(np.concatenate([forward, backward]))
        rows, columns = np.divmod(keys, self.nodes)
        self.rows, self.columns = rows.astype(np.int32), columns.astype(np.int32)
        self.reverse: Longs = np.searchsorted(keys, columns * self.nodes + rows)
        arc = np.searchsorted(keys, forward)
        self.rerun_arcs, self.keep_arcs, self.read_arcs = np.split(arc, np.cumsum([len(rerun_arcs), len(keep_arcs)]))

    def everything(self) -> Cut:
        return self._choice(np.zeros(len(self.operations), np.bool_), np.zeros(len(self.values), np.bool_))

    def free(self) -> Cut:
        """The choice with the fewest bytes among those that cost no seconds."""
        small = (self.small_bytes < self.bytes) & (self.small_seconds == 0)
        reruns = np.where(self.seconds > 0, NEVER, 0)
        return self._cheapest(reruns, np.where(small, self.small_bytes, self.bytes), small)

    def least(self) -> Cut:
        """The choice with the fewest bytes, and with the fewest seconds among those."""
        # Bytes take the high bits of a capacity, seconds the low ones: all seconds together are worth less than the
        # step from one sum of bytes to the next.
        small = self.small_bytes < self.bytes
        paid = np.where(small, self.small_seconds, 0.0)
        keeps = np.where(small, self.small_bytes, self.bytes)
        keeps //= max(int(np.gcd.reduce(keeps)), 1)  # the fewer bits the bytes take, the more are left for seconds
        most = int(keeps[self.needed].sum()) + 1
        bits = 60 - most.bit_length()
        part = 2.0 ** (bits - 1) / max(float(paid.sum() + self.seconds[self.reruns].sum()), LEAST_SECONDS)
        keeps = (np.minimum(keeps, most) << bits) + np.floor(paid * part).astype(np.int64)
        reruns = np.minimum(self.seconds * part, NEVER).astype(np.int64)
        return self._cheapest(reruns, keeps, small)

    def at(self, price: float) -> Cut:
        """The choice with the least bytes + price * seconds, rounded to parts for each operation and value."""
        with np.errstate(over="ignore"):  # infinity is limited to NEVER below
            in_small = self.small_bytes + price * self.small_seconds
            keeps = np.minimum(self.bytes, in_small)
            scale = COST_PARTS / max(float(keeps[self.needed].sum()), 1.0)
            reruns, keeps = (
                np.rint(np.minimum(costs * scale, NEVER)).astype(np.int64) for costs in (price * self.seconds, keeps)
            )
        return self._cheapest(reruns, keeps, in_small < self.bytes)

    def _cheapest(self, reruns: Longs, keeps: Longs, small: Flags) -> Cut:
        """The minimum cut for these costs of operations and values, as a choice."""
        room = np.zeros(len(self.rows), np.int64)
        room[self.read_arcs] = NEVER
        room[self.rerun_arcs] = reruns[self.reruns]
        # Needed outputs of one operation share one arc, from the operation to T: their costs are added.
        np.add.at(room, self.keep_arcs, keeps[self.keeps])
        side = self._sink_side(room, int(keeps[self.needed].sum()))
        return self._choice(side[2 : 2 + len(self.operations)], small)

    def _sink_side(self, room: Longs, bound: int) -> Flags:
        """The nodes on T's side of a minimum cut, exact for 62 bits; no flow is larger than `bound`.

        scipy's flow takes 32 bits. So the capacities are shifted to the right until the bound has `FLOW_BITS`, a
        maximum flow of those is subtracted from the capacities, and the remainder is solved again with a smaller shift.
        The remaining flow has to pass a minimum cut of the shifted capacities, through each arc of which less than one
        shifted unit is left: that bounds it by the number of arcs times the unit.
        """
        try:
            from scipy.sparse.csgraph import breadth_first_order, maximum_flow  # type: ignore[import-untyped]
        except ModuleNotFoundError:
            with needed_for("a lean tape"):
                raise
        shift = max(0, bound.bit_length() - FLOW_BITS)
        while True:
            capacities = np.minimum(room >> shift, 2**FLOW_BITS - 1).astype(np.int32)
            flow = maximum_flow(self._matrix(capacities, slice(None)), 0, 1).flow.data
            room -= flow.astype(np.int64) << shift
            if shift == 0:
                break
            shift = max(0, (len(room) << shift).bit_length() - FLOW_BITS)
        # The nodes from which T can still be reached are on its side: of equal minimum cuts, the one with the fewest
        # reruns.
        left = np.flatnonzero(room[self.reverse])
        reach = breadth_first_order(self._matrix(np.ones(len(left)), left), 1, return_predecessors=False)
        side = np.zeros(self.nodes, np.bool_)
        side[reach] = True
        return side

    def _matrix(self, data: NDArray[np.generic], arcs: Longs | slice) -> Any:
        from scipy.sparse import csr_array  # type: ignore[import-untyped]

        ends = np.zeros(self.nodes + 1, np.int32)
        np.cumsum(np.bincount(self.rows[arcs], minlength=self.nodes), out=ends[1:])
        return csr_array((data, self.columns[arcs], ends), shape=(self.nodes, self.nodes))

    def _choice(self, rerun: Flags, small: Flags) -> Cut:
        """The choice that reruns these operations and, of the values it keeps, packs these; its costs are exact."""
        again: list[int] = np.flatnonzero(rerun).tolist()
        wanted = set(np.flatnonzero(self.needed).tolist()).union(*(self.operations[o].inputs for o in again))
        stored = wanted.difference(*(self.operations[o].outputs for o in again))
        packed = frozenset(v for v in stored if small[v])
        kept = frozenset(stored - packed)
        return Cut(
            kept,
            packed,
            tuple(again),
            sum(self.values[v].bytes for v in kept) + int(self.small_bytes[list(packed)].sum()),
            math.fsum([*(self.operations[o].seconds for o in again), *(float(self.small_seconds[v]) for v in packed)]),
        )


def _makers(operations: Sequence[Operation], values: Sequence[Value]) -> list[int | None]:
    """The operation that makes each value, None for a value that is given; refuses lists that are no graph."""
    checks.whole_number(sum(value.bytes for value in values), "the bytes of all values", least=0, most=MOST_TOTAL_BYTES)
    maker: list[int | None] = [None] * len(values)
    for o, operation in enumerate(operations):
        for v in (*operation.inputs, *operation.outputs):
            if not 0 <= v < len(values):
                raise InputError(f"operation {o:,} names value {v:,}; there are {len(values):,}, counted from 0")
        for v in operation.outputs:
            if maker[v] is not None:
                raise InputError(
                    f"operations {maker[v]:,} and {o:,} both make value {v:,}; give each a number of its own"
                )
            maker[v] = o
    for o, operation in enumerate(operations):
        for v in operation.inputs:
            made = maker[v]
            if made is not None and made >= o:
                raise InputError(
                    f"operation {o:,} reads value {v:,}, which operation {made:,} makes; list makers before readers"
                )
    return maker
