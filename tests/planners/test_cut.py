from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog  # type: ignore[import-untyped]
from scipy.sparse import csr_array  # type: ignore[import-untyped]

from lowtide.errors import InputError
from lowtide.planners import cut
from lowtide.planners.cut import Cut, Operation, Value, everything, frontier, least_bytes

Graph = tuple[list[Operation], list[Value]]
Point = tuple[int, Fraction]


def checked(graph: Graph, found: Cut) -> Cut:
    """`found`, once it is seen to be a valid choice with a true bill that keeps and reruns nothing in vain."""
    operations, values = graph
    assert not found.kept & found.small
    assert list(found.rerun) == sorted(set(found.rerun))
    available, used = found.kept | found.small, {v for v, value in enumerate(values) if value.needed}
    for o in found.rerun:
        assert operations[o].seconds < math.inf
        assert available >= set(operations[o].inputs)
        assert not set(operations[o].outputs) & (found.kept | found.small)
        available |= set(operations[o].outputs)
        used |= set(operations[o].inputs)
    assert available >= used
    assert found.kept | found.small <= used
    assert all(used & set(operations[o].outputs) for o in found.rerun)
    packed = [form for v in found.small if (form := values[v].small) is not None]
    assert len(packed) == len(found.small)
    assert found.bytes == sum(values[v].bytes for v in found.kept) + sum(form[0] for form in packed)
    assert found.seconds == math.fsum([*(operations[o].seconds for o in found.rerun), *(form[1] for form in packed)])
    return found


def all_points(graph: Graph) -> set[Point]:
    """Bytes and seconds of every choice: each set of reruns, each set of smaller forms."""
    operations, values = graph
    points: set[Point] = set()
    able = [operation for operation in operations if operation.seconds < math.inf]
    for size in range(len(able) + 1):
        for again in itertools.combinations(able, size):
            wanted = {v for v, value in enumerate(values) if value.needed}
            wanted.update(*(operation.inputs for operation in again))
            stored = [values[v] for v in wanted.difference(*(operation.outputs for operation in again))]
            sums = {(0, sum(operation.seconds for operation in again))}
            for value in stored:
                forms = [(value.bytes, 0.0), *([] if value.small is None else [value.small])]
                sums = {(b + form[0], s + form[1]) for b, s in sums for form in forms}
            points |= {(b, Fraction(s)) for b, s in sums}
    return points


def corners(points: set[Point]) -> list[Point]:
    """The lower convex hull, from fewest seconds to fewest bytes."""
    hull: list[Point] = []
    for point in sorted(points, key=lambda point: (point[1], point[0])):
        if hull and point[0] >= hull[-1][0]:
            continue
        while len(hull) > 1 and rises(hull[-2], hull[-1], point) <= 0:
            hull.pop()
        hull.append(point)
    return hull


def rises(a: Point, b: Point, c: Point) -> Fraction:
    """Above 0 where the way from a over b to c lies below the line from a to c, 0 on it."""
    return (c[1] - a[1]) * (a[0] - b[0]) - (b[1] - a[1]) * (a[0] - c[0])


def point_of(found: Cut) -> Point:
    return found.bytes, Fraction(found.seconds)


@st.composite
def graphs(draw: st.DrawFn, most: int) -> Graph:
    """Operations with up to two outputs, arguments, parameters, smaller forms; sums of their seconds are exact."""
    byte, second = draw(st.sampled_from([(1, 0.25), (10**13, 2.0**-30), (4096, 1024.0)]))
    lengths = st.sampled_from([0.0, 1.0, 1.0, 2.0, 3.0, 5.0]).map(lambda length: length * second)
    reruns = st.integers(0, 7).flatmap(lambda dice: lengths if dice else st.just(math.inf))
    smaller = st.tuples(st.integers(0, 4).map(lambda size: size * byte), lengths)

    def value() -> Value:
        form = draw(st.one_of(st.none(), st.none(), smaller))
        return Value(draw(st.integers(0, 9)) * byte, draw(st.sampled_from([True, False, True])), form)

    values = [value() for _ in range(draw(st.integers(0, 2)))]
    operations = []
    for _ in range(draw(st.integers(most // 2, most))):
        known = st.integers(0, len(values) - 1) if values else st.nothing()
        inputs = draw(st.lists(known, max_size=3)) if values else []
        outputs = range(len(values), len(values) + draw(st.sampled_from([1, 1, 2])))
        values += [value() for _ in outputs]
        operations.append(Operation(tuple(inputs), tuple(outputs), draw(reruns)))
    return operations, values


def agrees_with_exhaustive_search(graph: Graph) -> None:
    points = all_points(graph)
    hull = corners(points)
    found = [point_of(checked(graph, each)) for each in frontier(*graph)]
    assert set(hull) <= set(found) <= points
    assert len(hull) == len(found) or all(on_an_edge(hull, point) for point in found)
    assert all(a[0] > b[0] and a[1] < b[1] for a, b in itertools.pairwise(found))
    fewest = min(points)
    assert point_of(checked(graph, least_bytes(*graph))) == fewest == found[-1]
    whole = checked(graph, everything(*graph))
    assert whole.kept == {v for v, value in enumerate(graph[1]) if value.needed}
    assert (whole.small, whole.rerun, whole.seconds) == (frozenset(), (), 0)
    assert found[0][1] == 0
    assert found[0][0] <= whole.bytes
    for price in (Fraction(1, 7), Fraction(3), Fraction(10**22, 3)):
        assert min(b + price * s for b, s in found) == min(b + price * s for b, s in points)


def on_an_edge(hull: list[Point], point: Point) -> bool:
    return point in hull or any(a[0] > point[0] > b[0] and rises(a, point, b) == 0 for a, b in itertools.pairwise(hull))


@pytest.mark.long
@settings(max_examples=250)
@given(graphs(most=6))
def test_the_frontier_is_the_hull_of_all_choices(graph: Graph) -> None:
    agrees_with_exhaustive_search(graph)


@pytest.mark.slow
@settings(max_examples=800)
@given(graphs(most=9))
def test_the_frontier_is_the_hull_of_all_choices_of_nine_operations(graph: Graph) -> None:
    agrees_with_exhaustive_search(graph)


def random_graph(operations: int, seed: int, *, needed: float) -> Graph:
    rng = random.Random(seed)
    values = [Value(0, True), Value(4096, True), Value(4096, False)]
    made = []
    for _ in range(operations):
        inputs = tuple(rng.randrange(max(0, len(values) - 8), len(values)) for _ in range(rng.randint(1, 3)))
        outputs = range(len(values), len(values) + rng.choice([1, 1, 1, 2]))
        for _ in outputs:
            size = 4096 * rng.randint(1, 2000)
            small = (size // 32, rng.random() * 1e-4) if rng.random() < 0.1 else None
            values.append(Value(size, rng.random() < needed, small))
        made.append(Operation(inputs, tuple(outputs), math.inf if rng.random() < 0.1 else rng.random() * 1e-3))
    return made, values


def cheapest_by_linear_program(graph: Graph, price: float) -> float:
    """Fewest bytes + price * seconds, by another way: the choice as a linear program, solved by HiGHS."""
    operations, values = graph
    cost = [0.0 if operation.seconds == math.inf else price * operation.seconds for operation in operations]
    cost += [min(value.bytes, (form := value.small or (value.bytes, 0.0))[0] + price * form[1]) for value in values]
    keep, available = len(operations), len(operations) + len(values)
    cost += [0.0] * len(values)
    maker = {v: o for o, operation in enumerate(operations) for v in operation.outputs}
    rows = [[(available + v, 1), (keep + v, -1), *([(maker[v], -1)] if v in maker else [])] for v in range(len(values))]
    rows += [[(o, 1), (available + v, -1)] for o, operation in enumerate(operations) for v in operation.inputs]
    entries = [(row, column, sign) for row, terms in enumerate(rows) for column, sign in terms]
    at_row, at_column, signs = (np.array(part) for part in zip(*entries, strict=True))
    limits = [(0, 0 if operation.seconds == math.inf else 1) for operation in operations]
    limits += [(0, 1)] * len(values) + [(int(value.needed), 1) for value in values]
    matrix = csr_array((signs, (at_row, at_column)), shape=(len(rows), len(cost)))
    unit = max(cost)
    solved = linprog(np.array(cost) / unit, A_ub=matrix, b_ub=np.zeros(len(rows)), bounds=limits, method="highs")
    return float(solved.fun) * unit


@pytest.mark.long
@pytest.mark.parametrize("needed", [0.02, 0.5])
def test_two_thousand_operations(needed: float) -> None:
    graph = random_graph(2000, 3, needed=needed)
    found = [checked(graph, each) for each in frontier(*graph)]
    assert found[0] == everything(*graph)
    assert found[-1] == least_bytes(*graph)
    assert 60 <= len(found) <= cut.MOST_POINTS
    assert found[-1].bytes == pytest.approx(cheapest_by_linear_program(graph, 0.0), rel=1e-9)
    for a, b, c in zip(found, found[1:], found[2:], strict=False):
        assert rises(point_of(a), point_of(b), point_of(c)) > 0
    middle = found[len(found) // 2 : len(found) // 2 + 2]
    price = (middle[0].bytes - middle[1].bytes) / (middle[1].seconds - middle[0].seconds)
    cheapest = cheapest_by_linear_program(graph, price)
    assert cheapest * (1 - 1e-9) <= middle[0].bytes + price * middle[0].seconds <= cheapest * 1.001


def test_every_price_on_a_middling_graph() -> None:
    graph = random_graph(60, 5, needed=0.4)
    found = frontier(*graph)
    assert len(found) < cut.MOST_POINTS
    for price in (1e3, 1e7, 1e8, 1e9, 1e10, 1e11):
        cheapest = min(each.bytes + price * each.seconds for each in found)
        assert cheapest == pytest.approx(cheapest_by_linear_program(graph, price), rel=1e-6)  # as exact as HiGHS is


def test_the_number_of_cuts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(300, 4, needed=0.4)
    monkeypatch.setattr(cut, "MOST_POINTS", 9)
    found = frontier(*graph)
    assert len(found) == 9
    assert found[0].kept == everything(*graph).kept
    assert found[-1] == least_bytes(*graph)


def test_a_cheap_operation_runs_again_and_a_dear_one_does_not() -> None:
    """x -> matmul -> h -> gelu -> a, with h and a needed: a is made again from h; h only from x, which is then kept."""
    operations = [Operation((0, 1), (2,), 8.0), Operation((2,), (3,), 0.5)]
    values = [Value(4, False), Value(0, True), Value(16, True), Value(16, True)]
    whole, bargain, least = frontier(operations, values)
    assert whole == Cut(frozenset({1, 2, 3}), frozenset(), (), 32, 0.0)
    assert bargain == Cut(frozenset({1, 2}), frozenset(), (1,), 16, 0.5)
    assert least == Cut(frozenset({0, 1}), frozenset(), (0, 1), 4, 8.5)


def test_a_mask_is_kept_as_bits_where_that_pays() -> None:
    operations = [Operation((0,), (1,), math.inf)]
    values = [Value(64, False), Value(32, True, (4, 0.25))]
    whole, bits = frontier(operations, values)
    assert whole == everything(operations, values)
    assert bits == Cut(frozenset(), frozenset({1}), (), 4, 0.25)
    larger = [values[0], replace(values[1], small=(33, 0.0))]
    assert frontier(operations, larger) == (everything(operations, larger),)


def test_what_is_free_comes_first() -> None:
    """A view costs no seconds: nothing is gained by keeping it."""
    operations = [Operation((), (0,), 1.0), Operation((0,), (1,), 0.0)]
    values = [Value(8, True), Value(8, True)]
    first, last = frontier(operations, values)
    assert first == Cut(frozenset({0}), frozenset(), (1,), 8, 0.0)
    assert last == Cut(frozenset(), frozenset(), (0, 1), 0, 1.0)
    assert everything(operations, values).bytes == 16


def test_one_byte_of_petabytes_decides() -> None:
    """A chain whose last value is needed is cut at its smallest value, however little smaller that is."""
    sizes = [2**48 - 7 * k % 50 for k in range(50)]
    operations = [Operation((k,), (k + 1,), 1.0) for k in range(49)]
    values = [Value(size, k == 49) for k, size in enumerate(sizes)]
    smallest = sizes.index(2**48 - 49)
    found = checked((operations, values), least_bytes(operations, values))
    assert found == Cut(frozenset({smallest}), frozenset(), tuple(range(smallest, 49)), 2**48 - 49, 49.0 - smallest)
    free = [replace(operation, seconds=0.0) for operation in operations]
    assert frontier(free, values) == (replace(found, seconds=0.0),)


@pytest.mark.parametrize(
    "graph",
    [
        ([], []),
        ([], [Value(5, True), Value(7, False)]),
        ([Operation((0, 0, 0), (1,), 1.0)], [Value(3, False), Value(7, True)]),
        ([Operation((0,), (1,), 0.0)] * 1, [Value(0, True), Value(0, True)]),
        ([Operation((0,), (1, 2), 1.0), Operation((1, 1), (3,), 0.0)], [Value(9, False)] * 4),
        ([Operation((), (0, 1), 5e-324)], [Value(2**48, True), Value(2**48, True, (0, 1e99))]),
        ([Operation((), (0,), 1e99), Operation((0,), (1,), 1e-9)], [Value(10**13, True), Value(10**13, True)]),
    ],
)
def test_corner_cases(graph: Graph) -> None:
    found = [checked(graph, each) for each in frontier(*graph)]
    points = all_points(graph)
    assert found[0].seconds == 0
    assert found[-1].bytes == min(points)[0]
    assert len(found) <= len(corners(points))
    assert checked(graph, everything(*graph)).seconds == 0


@pytest.mark.parametrize(
    ("operations", "message"),
    [
        ([Operation((), (0,), 1.0), Operation((), (1, 0), 1.0)], "operations 0 and 1 both make value 0"),
        ([Operation((), (1, 1), 1.0)], "operations 0 and 0 both make value 1"),
        ([Operation((2,), (1,), 1.0), Operation((), (2,), 1.0)], "operation 0 reads value 2, which operation 1 makes"),
        ([Operation((1,), (1,), 1.0)], "operation 0 reads value 1, which operation 0 makes"),
        ([Operation((3,), (1,), 1.0)], "operation 0 names value 3; there are 3"),
        ([Operation((0,), (-1,), 1.0)], "operation 0 names value -1; there are 3"),
    ],
)
def test_what_is_no_graph_is_refused(operations: list[Operation], message: str) -> None:
    for function in (everything, least_bytes, frontier):
        with pytest.raises(InputError, match=message):
            function(operations, [Value(1, True)] * 3)


def test_what_is_no_number_is_refused() -> None:
    for wrong in (-1.0, math.nan, -math.inf):
        with pytest.raises(InputError, match=r"operation\.seconds is not a time"):
            Operation((), (0,), wrong)
        with pytest.raises(InputError, match=r"value\.small seconds is not a time"):
            Value(4, True, (1, wrong))
    with pytest.raises(InputError, match=r"value\.bytes=-5 is too small"):
        Value(-5, True)
    with pytest.raises(InputError, match=r"value\.small bytes=-1 is too small"):
        Value(4, True, (-1, 1.0))
    with pytest.raises(InputError, match="bytes of all values=84,442,493,013,196,800 is too large"):
        everything([], [Value(2**48, False)] * 300)
