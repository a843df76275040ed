"""What a lean tape weighs, byte by byte; when what is made again goes; and that nothing stays behind."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from torch import nn
from torch.nn import functional as F  # noqa: N812  (everybody's name for it)

import lowtide.torch as lt
from lowtide.torch.state.bits import same_bits
from tests.torch.calls import drawn_leaf, plainly, same
from tests.torch.lean.calls import collecting_by_hand, tape_of
from tests.torch.lean.drawn_programs import (
    POINTWISE,
    PRODUCTS,
    RANDOM,
    REDUCING,
    VIEWS,
    Given,
    Program,
    examples,
    programs,
)

N = 64 * 64 * 4  # bytes of the tensors here


class _Block(nn.Module):
    """Attention's half of a layer is left out: norms, products, an activation, dropout."""

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor], p: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.activation, self.p = activation, p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.activation(self.up(self.norm(x))))
        return x + F.dropout(y, self.p) if self.p else x + y


def _gated(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x) * torch.sigmoid(x).exp()


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "gelu": lambda: _Block(F.gelu, 0.0),
    "relu, dropout": lambda: _Block(F.relu, 0.5),
    "gated, dropout": lambda: _Block(_gated, 0.1),
    "tanh in a row": lambda: nn.Sequential(
        *[nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Sigmoid()) for _ in range(3)]
    ),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 1, 3)
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_tape_weighs_what_its_point_says(name: str) -> None:
    torch.manual_seed(0)
    module, x = BLOCKS[name](), drawn_leaf(64, 64)
    points = lt.lean_frontier(module, x)
    assert len(points) >= 2
    assert points[0].plain_tape == tape_of(lambda: module(x))
    assert points[-1].tape < 0.75 * points[0].plain_tape
    for point in points:
        assert tape_of(partial(lt.lean, module, x, tape=point.tape)) == point.tape


@examples(25)
@given(programs([*POINTWISE, *REDUCING, *PRODUCTS, *VIEWS, *RANDOM], copies=True))
def test_the_tape_of_any_program_weighs_what_its_point_says(program: Program) -> None:
    # Everything is a result, so that the graph of all of it is there.
    names = tuple(line.split(" = ")[0] for line in "; ".join(program.lines).split("; ") if line.startswith("v"))
    function = replace(program, results=names).function()
    _, arguments = Given("leaves").arguments(0)
    # Arguments are there anyway, but a point counts those that nobody else would hold.
    there = lt.measure.storage_bytes([each for each in arguments if isinstance(each, torch.Tensor)])
    for point in lt.lean_frontier(function, *arguments)[::3]:
        with lt.measure.peak() as memory:
            outputs = lt.lean(function, *arguments, tape=point.tape)
            roots = [output.grad_fn for output in outputs]
            del outputs
            assert point.tape - there <= memory.now <= point.tape
            del roots


@pytest.mark.parametrize("name", BLOCKS)
def test_the_traced_call_has_the_same_tape_as_later_ones(name: str) -> None:
    torch.manual_seed(0)
    module, x = BLOCKS[name](), drawn_leaf(64, 64)
    sizes = [tape_of(lambda: lt.lean(module, x)) for _ in range(3)]
    assert sizes[0] == sizes[1] == sizes[2] < 0.75 * tape_of(lambda: module(x))


def test_an_argument_counts_if_only_the_recipe_holds_it() -> None:
    x, w = drawn_leaf(64, 64), drawn_leaf(64, 64, seed=1)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x + w  # nothing is saved: to make y again, both must be held
        return y.sin() * y.cos() * y.exp()

    tapes = [point.tape for point in lt.lean_frontier(function, x, w)]
    assert tapes[0] == 5 * N  # y, its sine and cosine, their product, its exponential
    assert tapes[-1] == N


def test_what_is_made_again_goes_within_the_backward() -> None:
    """A chain: if all that was dropped came back and stayed, the peak would be that of the plain call."""
    x = drawn_leaf(64, 64)

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x = x.sin().exp()
        return x

    def peak(call: Callable[[], torch.Tensor]) -> int:
        y = call()
        with lt.measure.peak() as memory:
            y.backward(torch.ones_like(y))
        x.grad = None
        return memory.peak

    points = lt.lean_frontier(function, x)
    middle = min(points, key=lambda point: abs(point.tape - 6 * N))
    _ = lt.lean(function, x)
    plain = peak(lambda: function(x))
    found = peak(lambda: lt.lean(function, x, tape=middle.tape))
    assert found <= plain + points[0].plain_tape - middle.tape + 2 * N


def test_values_are_shared_and_let_go_of_after_their_last_use() -> None:
    """Ten readers of one dropped value: it is made once, and is gone when the last of them has been pulled back."""
    x, weights = drawn_leaf(64, 64), [drawn_leaf(64, 64, seed=k) for k in range(10)]
    made: list[int] = []

    def function(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        y = x.sigmoid().sin()
        total = x
        for weight in weights:
            total = total + y * weight
        return total

    expected = torch.autograd.grad(function(x, weights).sum(), [x, *weights])
    for _ in range(2):
        z = lt.lean(function, x, weights)
        assert z.grad_fn is not None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            found = torch.autograd.grad(z.sum(), [x, *weights])
        names = [event.name for event in profile.events() or ()]
        made.append(names.count("aten::sin"))
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
    assert made == [1, 1]


def test_a_backward_leaves_nothing() -> None:
    torch.manual_seed(0)
    module, x = BLOCKS["gated, dropout"](), drawn_leaf(64, 64)
    for _ in range(2):
        with lt.measure.peak() as memory:
            y = lt.lean(module, x).sum()
            torch.autograd.grad(y, [x, *module.parameters()])
            assert memory.now == y.nbytes
            del y
            assert memory.now == 0


def test_a_backward_of_a_part_leaves_nothing_made() -> None:
    """What else it would have been used for does not keep it."""
    x, w = drawn_leaf(64, 64), drawn_leaf(64, 64, seed=1)

    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = (x @ w).sigmoid()
        return y.sin() * w, y.exp().tanh() * y

    for _ in range(2):
        first, second = lt.lean(function, x, w)
        with lt.measure.peak() as memory:
            grads = torch.autograd.grad(first.sum(), [x, w], retain_graph=True)
            assert memory.now <= sum(grad.nbytes for grad in grads)
            del grads
            assert memory.now == 0
        torch.autograd.grad(second.sum(), [x, w])


def test_the_backward_needs_no_more_than_that_of_the_plain_call() -> None:
    """What a call keeps goes as the backward goes, and not at its end."""
    torch.manual_seed(0)
    net = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU())])
    x, peaks = drawn_leaf(64, 64), []
    for call in (net, partial(lt.lean, net), partial(lt.lean, net)):
        with lt.measure.peak() as memory:
            y = call(x)
            grad = torch.ones_like(y)
            memory.restart_peak()
            torch.autograd.grad(y, [x, *net.parameters()], grad)
            peaks.append(memory.peak)
    assert max(peaks[1:]) <= peaks[0]


def test_nothing_at_all_is_kept() -> None:
    """All can be made again from arguments that others hold."""
    x, w = drawn_leaf(64, 64), drawn_leaf(64, 64, seed=1)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((x.sin() * w).exp() * x).tanh() @ w

    point = lt.lean_frontier(function, x, w)[-1]
    assert point.tape == 0
    expected = torch.autograd.grad(function(x, w).sum(), [x, w])
    for _ in range(2):
        assert tape_of(partial(lt.lean, function, x, w, tape=point.tape)) == 0
        found = torch.autograd.grad(lt.lean(function, x, w, tape=point.tape).sum(), [x, w])
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


# --- nothing stays behind


@pytest.fixture
def _no_collector() -> Iterator[None]:
    with collecting_by_hand():
        yield


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("name", BLOCKS)
def test_no_cycles(name: str, backward: bool) -> None:
    torch.manual_seed(0)
    module, x = BLOCKS[name](), drawn_leaf(64, 64)
    lt.lean(module, x).sum().backward()
    gc.collect()
    with lt.measure.peak() as memory:
        for _ in range(3):
            y = lt.lean(module, x)
            node = weakref.ref(y)
            if backward:
                torch.autograd.grad(y.sum(), [x, *module.parameters()])
            del y
            assert node() is None
            assert memory.now == 0
    assert gc.collect() == 0


@pytest.mark.usefixtures("_no_collector")
def test_no_cycles_in_the_traced_call() -> None:
    for backward in (True, False):
        x, w = drawn_leaf(64, 64), drawn_leaf(64, 64, seed=1)
        with lt.measure.peak() as memory:
            y = lt.lean(lambda x, w, _: (x.sin() * w).exp().tanh() * x, x, w, backward)
            if backward:
                torch.autograd.grad(y.sum(), [x, w])
            del y
            assert memory.now == 0


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("calls", [150, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tape", [None, "100%"])
def test_no_leak_over_many_calls(tape: str | None, calls: int) -> None:
    torch.manual_seed(0)
    module, x = _Block(F.gelu, 0.1), drawn_leaf(4, 64)

    def call(number: int) -> None:
        y = lt.lean(module, x, tape=tape)
        y = lt.lean(lambda y: (y.sin() * number).exp() * y, y, tape=tape)
        if number % 3:
            torch.autograd.grad(y.sum(), [x, *module.parameters()])

    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    for number in range(10):
        call(number)
    levels = [objects()]
    with lt.measure.peak() as memory:
        for _ in range(3):  # the tests' own machinery may make some objects meanwhile, but not each time
            for number in range(calls):
                call(number)
            assert memory.now == 0
            levels.append(objects())
    assert min(after - before for before, after in itertools.pairwise(levels)) <= 20, levels


@pytest.mark.usefixtures("_no_collector")
def test_traces_hold_no_tensors() -> None:
    x = drawn_leaf(64, 64)
    with lt.measure.peak() as memory:
        lt.lean_frontier(lambda x: (x.sin() * x).exp() @ x, x)
        gc.collect()
        assert memory.now == 0
    reference = weakref.ref(x)
    del x
    gc.collect()
    assert reference() is None


def test_a_value_is_not_written_over_while_another_view_of_it_is_read() -> None:
    x = drawn_leaf(4, 4)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * x
        return x * (y.unbind(0)[1] + y)

    expected = torch.autograd.grad(function(x).sum(), x)[0]
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(lt.lean(function, x, tape=0).sum(), x)[0], expected)


def test_parts_of_a_value_are_read_where_they_lie() -> None:
    x = drawn_leaf(40)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        return (y[1:] * y[:-1]).exp() * x[1:]

    for _ in range(3):
        same(*(torch.autograd.grad(call(function, x).sum(), x) for call in (plainly, lt.lean)))


def test_a_value_that_is_changed_after_it_was_read_is_read_no_more() -> None:
    x = drawn_leaf(40)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = y.sin().exp()
        with torch.no_grad():
            part = y.detach() + 0
            read = part.sigmoid()
            part.add_(1)
        return z * read * part

    for _ in range(3):
        same(*(torch.autograd.grad(call(function, x).sum(), x) for call in (plainly, lt.lean)))


def test_a_value_that_is_saved_before_what_it_is_made_from() -> None:
    x, w = drawn_leaf(5, 40), drawn_leaf(40, 40, seed=1)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        return torch.tanh(y) * y.sin()  # tanh saves its result, then sin what both are made from

    for _ in range(3):
        same(*(torch.autograd.grad(call(function, x, w).sum(), [x, w]) for call in (plainly, lt.lean)))


def test_a_value_is_not_written_over_before_its_second_reader_has_run() -> None:
    x = drawn_leaf(40)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        return torch.exp(y * 2) * torch.exp(y * 3)

    for _ in range(3):
        same(*(torch.autograd.grad(call(function, x).sum(), x) for call in (plainly, lt.lean)))
