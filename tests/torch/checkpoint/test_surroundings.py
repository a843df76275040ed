"""What a function keeps where nobody passes it: after forward and backward all is as the plain call leaves it."""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import random
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide import CheckpointError
from lowtide.torch.checkpoint import call
from lowtide.torch.state import owners
from lowtide.torch.state.bits import same_bits
from tests.torch.calls import Function, drawn_leaf, plainly, same

CASES: dict[str, Callable[[Function], Any]] = {}
GENERATOR = torch.Generator()
SETTINGS: dict[str, Any] = {"scale": 1.0}
FLAG: float | None = None
COUNT = 0


def case(function: Callable[[Function], Any]) -> Callable[[Function], Any]:
    CASES[function.__name__] = function
    return function


def _leaf() -> torch.Tensor:
    return torch.tensor([0.3, -0.7, 1.1], requires_grad=True)


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return same_bits(left, right)
    if isinstance(left, list | tuple | deque):
        return len(left) == len(right) and all(map(_equal, left, right))
    return bool(np.array_equal(left, right))


@case
def a_buffer_and_its_view(call: Function) -> Any:
    class Net(nn.Module):
        total: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3))
            self.flat = self.total.view(-1)

        def forward(self, x: torch.Tensor) -> Any:
            self.total.add_(1)
            return (x * self.total.clone()).sin()

    net, x = Net(), _leaf()
    call(net, x).sum().backward()
    return x.grad, net.total, net.flat


class Slotted:
    __slots__ = ("__private", "later", "n", "v")

    def __init__(self) -> None:
        self.n = 0
        self.v = torch.ones(3)
        self.__private = 1.0

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        self.v = self.v * 0.5 + x
        self.__private *= 2
        self.later = self.n
        return self.v.sin() * self.__private

    def state(self) -> Any:
        return self.n, self.v.detach(), self.__private, self.later


@case
def attributes_in_slots(call: Function) -> Any:
    cell, x = Slotted(), _leaf()
    y = call(cell.step, call(cell.step, x))
    y.sum().backward()
    return x.grad, cell.state()


@case
def attributes_in_slots_of_an_object_closed_over(call: Function) -> Any:
    cell, x = Slotted(), _leaf()
    call(lambda x: cell.step(x), x).sum().backward()
    return x.grad, cell.state()


@case
def the_second_normal_number_of_numpy(call: Function) -> Any:
    np.random.seed(3)  # noqa: NPY002  (what people still use)
    normal = np.random.randn
    x, found = _leaf(), []
    for _ in range(3):
        y = call(lambda x: (x * normal()).sin(), x)
        normal()
        y.sum().backward()
        found.append(tuple(np.random.get_state())[2:])  # noqa: NPY002
    return x.grad, found


@case
def generators_of_modules_that_are_met_late(call: Function) -> Any:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.torchs = torch.Generator().manual_seed(1)
            self.numpys = np.random.default_rng(2)
            self.older = np.random.RandomState(3)
            self.pythons = random.Random(4)

        def forward(self, x: torch.Tensor) -> Any:
            noise = torch.rand(3, generator=self.torchs) + self.numpys.normal() + self.older.normal()
            return (x * (noise + self.pythons.gauss(0, 1))).sin()

    several, x = nn.ModuleList([Noisy()]), _leaf()
    net: Any = several[0]
    call(lambda x: several[0](x), x).sum().backward()
    return x.grad, net.torchs.get_state(), net.numpys.normal(), net.older.normal(), net.pythons.random()


@case
def globals_in_the_forward_of_a_module(call: Function) -> Any:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            SETTINGS["scale"] *= 1.5
            return x * torch.rand(3, generator=GENERATOR) * SETTINGS["scale"]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> Any:
            return torch.sin(self.inner(x))

    GENERATOR.manual_seed(0)
    SETTINGS["scale"] = 1.0
    x = _leaf()
    call(Outer(), x).sum().backward()
    return x.grad, SETTINGS["scale"], GENERATOR.get_state()


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.v: Any = 0.0

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.v = self.v * 0.5 + x
        result: torch.Tensor = self.v.sin() * self.v
        return result


@case
def methods_of_children(call: Function) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = Cell()
            self.cells = nn.ModuleList([Cell(), Cell()])

        def run(self, x: torch.Tensor) -> Any:
            return self.cell.step(x)

    net, x = Net(), _leaf()
    y = call(lambda x: net.run(x), call(net.run, x))
    y = call(lambda x: net.cells[1].step(x), call(lambda x: net.cells[0].step(x), y))  # type: ignore[operator]
    y.sum().backward()
    return x.grad, [cell.v.detach() for cell in net.modules() if isinstance(cell, Cell)]


@case
def long_lists(call: Function) -> Any:
    history, x = list(range(2000)), _leaf()

    def function(x: torch.Tensor) -> Any:
        history.append(len(history))
        return (x * len(history)).sin()

    y = call(function, x)
    history.append(-1)
    y.sum().backward()
    return x.grad, history


@case
def containers_of_all_kinds(call: Function) -> Any:
    row: deque[float] = deque([1.0], maxlen=3)
    kinds = {"a"}
    table = {1: 1.0, (2, 3): 2.0}
    names, options = types.SimpleNamespace(n=1.0), argparse.Namespace(n=2.0)
    grown: list[float] = [1.0]
    add, array, x = grown.append, np.ones(3), _leaf()

    def function(x: torch.Tensor) -> Any:
        row.append(row[-1] + 1)
        kinds.add(f"{len(kinds)}")
        table[1] *= 2
        names.n *= 3
        options.n *= 5
        add(2.0)
        array[0] += 1
        return (x * (row[-1] * len(kinds) * table[1] * names.n * options.n * float(array[0]))).sin()

    call(function, x).sum().backward()
    return x.grad, row, sorted(kinds), table[1], names.n, options.n, grown, array


@case
def one_tensor_given_twice(call: Function) -> Any:
    a, x = torch.ones(3), _leaf()

    def function(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        a.add_(1)
        return (x * b.clone()).sin()

    call(function, x, a, a).sum().backward()
    return x.grad, a


@case
def a_lazy_batch_norm(call: Function) -> Any:
    net = nn.Sequential(nn.LazyBatchNorm1d(), nn.Tanh())
    x = torch.arange(12.0).view(4, 3).requires_grad_()
    for _ in range(3):
        call(net, x).square().sum().backward()
    return x.grad, list(net.buffers()), [p.grad for p in net.parameters()]


@case
def state_of_forward_hooks(call: Function) -> Any:
    features: list[Any] = []
    net, x = nn.Linear(3, 3), _leaf()
    nn.init.eye_(net.weight)
    net.register_forward_hook(lambda module, given, result: features.append(result.detach()))
    net.register_forward_pre_hook(lambda module, args, kwargs: (args, kwargs), with_kwargs=True)
    y = call(net, x)
    y.sum().backward()
    return x.grad, features


@case
def functions_and_tuples_as_attributes(call: Function) -> Any:
    def counter() -> Callable[[], int]:
        n = 0

        def count() -> int:
            nonlocal n
            n += 1
            return n

        return count

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = counter()
            self.pair = ([1.0], torch.zeros(3))

        def forward(self, x: torch.Tensor) -> Any:
            self.pair[0].append(2.0)
            self.pair[1].add_(1)
            return (x * self.count() * len(self.pair[0]) * self.pair[1].clone()).sin()

    net, x = Net(), _leaf()
    call(net, x).sum().backward()
    return x.grad, net.count(), net.pair[0], net.pair[1]


@case
def modules_that_are_equal_by_value(call: Function) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n = 1

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Net)

        def __hash__(self) -> int:
            return 1

        def forward(self, x: torch.Tensor) -> Any:
            self.n += 1
            return (x * self.n).sin()

    first, second, x = Net(), Net(), _leaf()
    call(second, call(first, call(first, x))).sum().backward()
    return x.grad, first.n, second.n


@case
def statistics_that_another_call_changes(call: Function) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.used = torch.ones(3)

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.used.clone()).sin()

        def decode(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.norm(x).sin()
            self.used.mul_(2)
            return result

    net, x = Net(), torch.arange(12.0).view(4, 3).requires_grad_()
    call(net.decode, call(net.encode, x)).square().sum().backward()
    return x.grad, list(net.buffers()), net.used


@case
def parameters_stepped_that_the_function_does_not_use(call: Function) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            for layer in (self.a, self.b):
                nn.init.eye_(layer.weight)
                nn.init.zeros_(layer.bias)

        def first(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(self.a(x))

        def second(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(self.b(x))

    net, x = Net(), _leaf()
    first, second = call(net.first, x).sum(), call(net.second, x).sum()
    first.backward()
    torch.optim.SGD(net.a.parameters(), 0.1).step()
    second.backward()
    return x.grad, [p.grad for p in net.parameters()]


@case
def parameters_frozen_before_the_backward(call: Function) -> Any:
    net, x = nn.Linear(3, 3), _leaf()
    nn.init.eye_(net.weight)
    y = call(lambda x: net(x).sin(), x)
    net.requires_grad_(False)
    y.sum().backward()
    return x.grad, [p.requires_grad for p in net.parameters()]


@case
def a_gradient_inside_after_an_inner_call(call: Function) -> Any:
    def function(x: torch.Tensor) -> Any:
        inner = [0.0]

        def closure(x: torch.Tensor) -> Any:
            inner.append(1.0)
            return (x * len(inner)).sin()

        y = call(closure, x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return slope * y

    x = _leaf()
    call(function, x).sum().backward()
    return x.grad


@case
def a_saved_tensor_of_a_branch_that_is_not_used(call: Function) -> Any:
    def function(x: torch.Tensor) -> Any:
        (x * 2).exp().add_(1)
        return x.sin().cos()

    x = _leaf()
    call(function, x, early_stop=False).sum().backward() if call is not plainly else function(x).sum().backward()
    return x.grad


@case
def a_function_that_catches_everything(call: Function) -> Any:
    def function(x: torch.Tensor) -> Any:
        for _ in range(3):
            try:
                y = x.sin().exp()
                len(y)
                return y
            except BaseException:
                continue
        raise AssertionError("gave up")

    x = _leaf()
    call(function, x).sum().backward()
    return x.grad


@case
def inference_tensors_in_inner_calls(call: Function) -> Any:
    with torch.inference_mode():
        scale = torch.full((3,), 2.0)

    def inner(x: torch.Tensor, scale: torch.Tensor) -> Any:
        return x.sin() + scale.clone()

    x = _leaf()
    call(lambda x: call(inner, x, scale).exp(), x).sum().backward()
    return x.grad


@case
def scripted_modules(call: Function) -> Any:
    net = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh()))
    call(net, torch.arange(12.0).view(4, 3)).sum().backward()
    return [p.grad is None for p in net.parameters()], list(net.buffers())


@case
def a_global_that_was_none(call: Function) -> Any:
    global FLAG
    FLAG, x = None, _leaf()

    def function(x: torch.Tensor) -> Any:
        return (x * (2.0 if FLAG is None else FLAG)).sin()

    y = call(function, x)
    FLAG = 3.0
    y.sum().backward()
    return x.grad, FLAG


@case
def a_global_that_the_function_counts(call: Function) -> Any:
    global COUNT
    COUNT, x = 0, _leaf()

    def function(x: torch.Tensor) -> Any:
        global COUNT
        COUNT += 1
        return (x * COUNT).sin()

    call(function, x).sum().backward()
    return x.grad, COUNT


@case
def a_chain_of_objects_and_odd_ones(call: Function) -> Any:
    class Node:
        def __init__(self, below: Any) -> None:
            self.below = below

    chain: Any = None
    for _ in range(3000):
        chain = Node(chain)

    class Loud:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

        def __repr__(self) -> str:
            raise RuntimeError("repr")

    loud, x, dead = Loud(), _leaf(), weakref.proxy(Node(None))
    table, held = {loud: 1.0}, (chain, loud, dead)

    def function(x: torch.Tensor) -> Any:
        return (x * (len(table) + len(held))).sin()

    call(function, x).sum().backward()
    return x.grad


@case
def partials_and_defaults(call: Function) -> Any:
    state, noise = [1.0], torch.Generator().manual_seed(0)

    def function(scale: list[float], x: torch.Tensor, *, noise: torch.Generator = noise) -> Any:
        scale[0] *= 2
        return (x * scale[0] * torch.rand(3, generator=noise)).sin()

    x = _leaf()
    call(functools.partial(function, state), x).sum().backward()
    return x.grad, state, noise.get_state()


# What is kept outside modules and arguments is the user's: it is not put back, and where it matters, that is an error.
THE_USERS_OWN = {
    *(
        "globals_in_the_forward_of_a_module",
        "long_lists",
        "containers_of_all_kinds",
        "functions_and_tuples_as_attributes",
    ),
    *("a_gradient_inside_after_an_inner_call", "a_global_that_was_none", "a_global_that_the_function_counts"),
    *("partials_and_defaults", "attributes_in_slots_of_an_object_closed_over"),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("name", sorted(CASES.keys() - THE_USERS_OWN))
def test_all_is_as_the_plain_call_leaves_it(name: str) -> None:
    torch.manual_seed(0)
    expected = CASES[name](plainly)
    torch.manual_seed(0)
    assert _equal(CASES[name](lt.checkpoint), expected)


@pytest.mark.parametrize("name", sorted(THE_USERS_OWN))
def test_what_is_neither_in_modules_nor_given_is_proved_or_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"saved by torch.*sin .*values are not those of the first run"):
        CASES[name](lt.checkpoint)


def test_what_is_left_over_of_a_rerun_is_not_handed_out_when_it_was_changed() -> None:
    a, b = _leaf(), _leaf()
    v = torch.ones(3)

    def function(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a * v, b * v

    first, second = lt.checkpoint(function, a, b)
    torch.autograd.grad(first.sum(), a, retain_graph=True)
    v.add_(1)
    with pytest.raises(CheckpointError, match="changed in place"):
        torch.autograd.grad(second.sum(), b)


def test_a_tensor_that_becomes_part_of_the_graph_is_refused() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept = torch.zeros(3)

        def forward(self, x: torch.Tensor) -> Any:
            self.kept.copy_(x.exp())
            return x.sin()

    y = lt.checkpoint(Keeping(), _leaf())
    with pytest.raises(CheckpointError, match=r"Keeping\.kept was changed in place"):
        y.sum().backward()


def test_a_tensor_without_a_name_is_refused_by_its_shape() -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = [torch.ones(40_000)]

        def forward(self, x: torch.Tensor) -> Any:
            return (x * self.table[0][0]).sin()

    net = Holding()
    y = lt.checkpoint(net, _leaf())
    net.table[0].add_(1)
    with pytest.raises(CheckpointError, match=r"a tensor of shape \(40000,\) that the function uses was changed"):
        y.sum().backward()


def test_a_module_that_is_out_of_sight_is_called_by_its_class() -> None:
    kinds = itertools.chain([torch.sin], itertools.repeat(lambda x: x.exp().sin()))

    class Unseen(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return next(kinds)(x)

    y = lt.checkpoint(lambda x: Unseen.forward(Unseen(), x), _leaf(), early_stop=False)
    with pytest.raises(CheckpointError, match="in Unseen "):
        y.sum().backward()


@pytest.mark.filterwarnings("ignore:Sparse")
def test_values_of_sparse_tensors_are_compared_too() -> None:
    indices, scale = torch.tensor([[0, 1], [1, 2]]), itertools.count(1.0)

    def function(values: torch.Tensor, x: torch.Tensor) -> Any:
        return torch.sparse.mm(torch.sparse_coo_tensor(indices, values * next(scale), (3, 3)), x)

    values, x = torch.ones(2, requires_grad=True), torch.ones(3, 2)
    y = lt.checkpoint(function, values, x, check_rerun=True)
    with pytest.raises(CheckpointError, match="the rerun differs"):
        y.sum().backward()


def test_a_tensor_that_is_resized_is_refused() -> None:
    net: Any = nn.Module()
    net.register_buffer("seen", torch.zeros(2))

    def function(x: torch.Tensor) -> Any:
        net.seen.resize_(4)
        return x.sin()

    y = lt.checkpoint(function, _leaf())
    with pytest.raises(CheckpointError, match=r"was given the shape \(4,\)"):
        y.sum().backward()


@pytest.mark.parametrize("options", [{"contexts": 5}, {"context_fn": lambda: 1 / 0}])
def test_a_call_that_fails_before_it_runs_leaves_nothing_behind(options: dict[str, Any]) -> None:
    drawing = nn.Dropout(0.5)
    lt.checkpoint(drawing, _leaf())
    with pytest.raises((TypeError, ZeroDivisionError)):
        lt.checkpoint(drawing, _leaf(), **options)
    _nothing_is_entered()


def test_where_hooks_are_forbidden_nothing_is_left_behind() -> None:
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"),
        pytest.raises(RuntimeError, match="no hooks"),
    ):
        lt.checkpoint(nn.Dropout(0.5), _leaf())
    _nothing_is_entered()


def _nothing_is_entered() -> None:
    assert owners._users == 0
    assert owners._meeting.owners == []


def test_modules_that_hold_themselves_are_freed() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 2.0
            self.act = lambda x: x * self.scale
            self.inner = nn.Linear(3, 3)
            self.inner.register_forward_hook(self.see)
            self.state: Any = None

        def see(self, module: nn.Module, given: Any, result: Any) -> None:
            pass

        def forward(self, x: torch.Tensor) -> Any:
            self.state = (self.act(self.inner(x)), 1)  # type: ignore[no-untyped-call]
            result: torch.Tensor = self.state[0].sin()
            return result

    net = Net()
    lt.checkpoint(net, _leaf()).sum().backward()
    net.state = None
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None


def test_values_do_not_matter_to_tensors_without_any() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to("meta")
    y = lt.checkpoint(net, torch.empty(4, 3, device="meta", requires_grad=True))
    y.sum().backward()
    assert net[0].weight.grad is not None
    with torch._subclasses.FakeTensorMode():
        net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
        lt.checkpoint(net, torch.ones(4, 3)).sum().backward()
        assert net[0].weight.grad is not None


def test_the_cache_of_likenesses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "_MOST_ROWS", 1)
    call._rows.clear()
    for count in range(1, 5):
        lt.checkpoint(lambda x, count=count: sum(x.sin() for _ in range(count)), _leaf()).sum().backward()
        assert len(call._rows) <= 1


def test_statistics_in_large_tensors_are_copied_until_they_are_known_to_stay() -> None:
    class Net(nn.Module):
        large: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("large", torch.zeros(50_000))
            self.changes = True

        def forward(self, x: torch.Tensor) -> Any:
            if self.changes:
                self.large.add_(1)
            return (x * self.large[0]).sin()

    net, x = Net(), _leaf()
    lt.checkpoint(net, x).sum().backward()
    assert float(net.large[0]) == 1
    net.changes = False
    for _ in range(2):
        lt.checkpoint(net, x).sum().backward()
    net.changes = True
    y = lt.checkpoint(net, x)
    with pytest.raises(CheckpointError, match=r"Net\.large was changed in place"):
        y.sum().backward()


@pytest.mark.parametrize("nested", [False, True])
def test_a_tensor_given_twice_is_one_in_the_rerun_too(nested: bool) -> None:
    """Attention asks whether its query is its key, and does something else if not."""
    attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 3, 16, requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = lt.checkpoint(attention, x, x, x)[0]
        return found

    (lt.checkpoint(run, x) if nested else run(x)).square().sum().backward()
    expected = torch.autograd.grad(attention(x, x, x)[0].square().sum(), x)[0]
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("nested", [False, True])
def test_a_cache_that_the_function_fills_in_place_is_as_it_was_in_the_rerun_too(nested: bool) -> None:
    """Each call finds what those before it have written, and writes a column more."""
    net = torch.nn.Linear(16, 16)

    def attend(h: torch.Tensor, cache: torch.Tensor, place: int) -> torch.Tensor:
        cache[:, place] = h.detach().mean(1)
        found: torch.Tensor = net(h) * cache.sum(1, keepdim=True)
        return found

    def run(call: Any) -> Any:
        x, cache = drawn_leaf(3, 16), torch.zeros(3, 4)

        def block(h: torch.Tensor, cache: torch.Tensor, place: int) -> Any:
            return call(attend, h, cache, place)

        h: Any = x
        for place in range(4):
            h = call(block, h, cache, place) if nested else block(h, cache, place)
        return *torch.autograd.grad(h.sum(), [x, *net.parameters()]), cache

    same(run(lt.checkpoint), run(plainly))


class _Makes(OrderedDict[str, type[nn.Module]]):
    """Like the activations of transformers: gives an instance of what it has."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


ACTIVATIONS = _Makes(tanh=nn.Tanh)


def test_a_dictionary_that_makes_something_of_its_entries_keeps_them() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    for _ in range(2):
        lt.checkpoint(lambda x: ACTIVATIONS["tanh"](layer(x)), x).sum().backward()
    assert dict.__getitem__(ACTIVATIONS, "tanh") is nn.Tanh


@pytest.mark.parametrize("early_stop", [True, False])
def test_numbers_of_an_object_are_as_they_were_when_a_rerun_ends_halfway(early_stop: bool) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.is_busy = False
            self.late: Any = None

        def step(self, x: torch.Tensor) -> torch.Tensor:
            self.is_busy = True
            result = (x * (1.0 if self.late is None else 2.0)).sin()
            self.is_busy = False
            return result

    trainer, x = Trainer(), _leaf()
    y = lt.checkpoint(trainer.step, x, early_stop=early_stop)
    del trainer.late
    y.sum().backward()
    assert vars(trainer) == {"is_busy": False}
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().cos())
