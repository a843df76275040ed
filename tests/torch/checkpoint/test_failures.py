"""Where torch's own checkpoint fails its users: each case here is right, or an error that says why."""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, count, repeat
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import lowtide.torch as lt
from lowtide import CheckpointError
from lowtide.torch.checkpoint.call import _found_later, _Noted
from tests.torch.calls import Function, drawn_leaf, plainly, same
from tests.torch.checkpoint.calls import Log, both

# Buffers and attributes are changed once


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("form", ["module", "closure", "partial", "method", "nested"])
def test_batch_norm_counts_once(form: str, momentum: float | None) -> None:
    x = drawn_leaf(6, 3)

    def run(checkpoint: Function) -> Any:
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=momentum), nn.Tanh(), nn.Linear(4, 2))
        buffers = dict(net.named_buffers())
        forms: dict[str, Function] = {
            "module": net,
            "closure": lambda x: net(x),
            "partial": functools.partial(net),
            "method": net.forward,
            "nested": lambda x: checkpoint(net, x * 1),
        }
        y = checkpoint(forms[form], x)
        first = [buffer.clone() for buffer in net.buffers()]
        grads = torch.autograd.grad(y.square().sum(), [x, *net.parameters()])
        assert buffers["1.num_batches_tracked"] == 1
        assert all(buffer is buffers[name] for name, buffer in net.named_buffers())
        return [y, *first, *grads, *net.buffers()]

    both(run)


def test_batch_norm_counts_every_call_of_a_loop_and_every_backward_once() -> None:
    x = drawn_leaf(6, 4)

    def run(checkpoint: Function) -> Any:
        norm = nn.BatchNorm1d(4)
        y = x
        for _ in range(5):
            y = torch.tanh(checkpoint(norm, y)) * 2
        first = torch.autograd.grad(y.sum(), [x, *norm.parameters()], retain_graph=True)
        second = torch.autograd.grad(y.square().sum(), [x, *norm.parameters()])
        assert int(norm.num_batches_tracked or 0) == 5
        return [*first, *second, *norm.buffers()]

    both(run)


@pytest.mark.parametrize("normalise", [nn.functional.batch_norm, nn.functional.instance_norm])
@pytest.mark.parametrize("how", ["arguments", "keywords"])
def test_statistics_that_are_no_buffers_are_updated_once(normalise: Function, how: str) -> None:
    x = drawn_leaf(6, 3, 4)
    word = "training" if normalise is nn.functional.batch_norm else "use_input_stats"

    def run(checkpoint: Function) -> Any:
        mean, var = torch.zeros(3), torch.ones(3)
        if how == "arguments":
            y = checkpoint(normalise, x, mean, var, **{word: True})
        else:
            y = checkpoint(normalise, x, running_mean=mean, running_var=var, **{word: True})
        first = [mean.clone(), var.clone()]
        grads = torch.autograd.grad(y.square().sum(), x)
        return [y, *first, *grads, mean, var]

    both(run)


def test_statistics_that_a_function_closes_over_are_the_users() -> None:
    mean, var, x = torch.zeros(3), torch.ones(3), drawn_leaf(6, 3)
    y = lt.checkpoint(lambda x: nn.functional.batch_norm(x, mean, var, training=True), x)
    with pytest.raises(CheckpointError, match=r"saved by torch.nn.functional.batch_norm.*attribute of the module"):
        y.square().sum().backward()


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_module_gets_its_parameters_in_the_first_run() -> None:
    def run(checkpoint: Function) -> Any:
        net, x = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2)), drawn_leaf(5, 3)
        y = checkpoint(net, x)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *net.parameters()])]

    both(run)


class _Cell(nn.Module):
    """Keeps its voltage as an attribute that the next call starts from."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.8))
        self.v: Any = torch.tensor(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.v = torch.tanh(self.v * self.w + x)
        return torch.sin(self.v * self.w)


class _PlainCell:
    """The same, and no module."""

    def __init__(self) -> None:
        self.w = torch.tensor(0.8, requires_grad=True)
        self.v: Any = torch.tensor(0.0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.v = torch.tanh(self.v * self.w + x)
        return torch.sin(self.v * self.w)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


class _BufferCell(nn.Module):
    """Changes its voltage in place, and has no gradient through it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.8))
        self.register_buffer("v", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v = self.v
        assert isinstance(v, torch.Tensor)
        with torch.no_grad():
            v.mul_(0.7).add_(x)
        return torch.sin(v.clone() * self.w)


CELLS: dict[str, Callable[[], tuple[Any, Function]]] = {
    "module": lambda: (lambda cell: (cell, cell))(_Cell()),
    "plain object": lambda: (lambda cell: (cell, cell))(_PlainCell()),
    "method": lambda: (lambda cell: (cell, cell.step))(_PlainCell()),
    "buffer": lambda: (lambda cell: (cell, cell))(_BufferCell()),
    "inside a module": lambda: (lambda cell: (cell, nn.Sequential(nn.Tanh(), cell)))(_Cell()),
    "closed over": lambda: (lambda cell: (cell, lambda x: cell(x)))(_Cell()),
}


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("calls", [1, 4])
def test_a_cell_that_keeps_its_voltage_gets_the_right_gradient(kind: str, calls: int) -> None:
    xs = [drawn_leaf(1, seed=k)[0].detach().requires_grad_() for k in range(calls)]

    def run(checkpoint: Function) -> Any:
        cell, function = CELLS[kind]()
        ys = [checkpoint(function, x) for x in xs]
        v = cell.v
        grads = torch.autograd.grad(sum(ys), [cell.w, *xs], retain_graph=True, allow_unused=True)
        assert cell.v is v
        return [*ys, v, *grads]

    both(run)


def test_a_plain_object_closed_over_is_right_or_an_error() -> None:
    x = torch.tensor(0.3)

    def run(checkpoint: Function) -> Any:
        cell = _PlainCell()
        y = checkpoint(lambda x: cell(x), checkpoint(lambda x: cell(x), x))
        return torch.autograd.grad(y, cell.w)

    expected = run(plainly)
    try:
        found = run(lt.checkpoint)
    except CheckpointError:
        return
    same(found, expected)


class _Counting(nn.Module):
    """Python numbers and containers as attributes, and a result that depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.log: list[int] = []
        self.seen: dict[str, Any] = {"last": None}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.log.append(self.calls)
        self.seen["last"] = self.calls
        return (x * self.calls).sin() * len(self.log)


def test_numbers_and_containers_of_a_module_are_changed_once() -> None:
    net, plain, x = _Counting(), _Counting(), drawn_leaf(3)
    y = lt.checkpoint(net, lt.checkpoint(net, x))
    found = torch.autograd.grad(y.sum(), x)
    assert (net.calls, net.log, net.seen) == (2, [1, 2], {"last": 2})
    same(found, torch.autograd.grad(plain(plain(x)).sum(), x))


def test_a_failed_backward_leaves_the_modules_state() -> None:
    net, x = nn.Sequential(nn.BatchNorm1d(3), nn.Tanh()), drawn_leaf(5, 3)
    calls = iter([None, ValueError("rerun")])

    def function(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = net(x)
        error = next(calls)
        if error is not None:
            raise error
        return y.exp()

    y = lt.checkpoint(function, x, early_stop=False)
    before = [buffer.clone() for buffer in net.buffers()]
    with pytest.raises(ValueError, match="rerun"):
        y.sum().backward()
    same(list(net.buffers()), before)


def test_an_exception_in_the_function_leaves_what_the_plain_call_leaves() -> None:
    def run(checkpoint: Function) -> Any:
        net, x = nn.BatchNorm1d(3), drawn_leaf(5, 3)

        def function(x: torch.Tensor) -> None:
            net(x).exp()
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            checkpoint(function, x)
        return [buffer.clone() for buffer in net.buffers()]

    both(run)


# Random numbers of every kind repeat


class _Draws:
    """A source of random numbers: how to seed it, where it is, and how a function draws from it."""

    def __init__(self, kind: str) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.numpy = np.random.default_rng(3)
        self.legacy = np.random.RandomState(3)
        self.python = random.Random(3)
        np.random.seed(3)  # noqa: NPY002  (the legacy one is what is tested)
        random.seed(3)
        torch.manual_seed(3)
        self.kind = kind

    def draw(self) -> torch.Tensor:
        match self.kind:
            case "torch":
                return torch.rand(3)
            case "torch.Generator":
                return torch.rand(3, generator=self.generator)
            case "torch.Generator in place":
                return torch.empty(3).uniform_(generator=self.generator)
            case "numpy":
                return torch.from_numpy(np.random.rand(3)).float()  # noqa: NPY002
            case "numpy default_rng":
                return torch.from_numpy(self.numpy.random(3)).float()
            case "numpy RandomState":
                return torch.from_numpy(self.legacy.rand(3)).float()
            case "python":
                return torch.tensor([random.random() for _ in range(3)])
            case "python Random":
                return torch.tensor([self.python.random() for _ in range(3)])
            case _:
                raise AssertionError(self.kind)

    def places(self) -> list[torch.Tensor]:
        """The next numbers of every source."""
        return [
            torch.rand(2),
            torch.rand(2, generator=self.generator),
            torch.from_numpy(np.random.rand(2)),  # noqa: NPY002
            torch.from_numpy(self.numpy.random(2)),
            torch.from_numpy(self.legacy.rand(2)),
            torch.tensor([random.random(), self.python.random()]),
        ]


GLOBAL = ["torch", "numpy", "python"]
OBJECTS = [
    "torch.Generator",
    "torch.Generator in place",
    "numpy default_rng",
    "numpy RandomState",
    "python Random",
]


def _noisy(checkpoint: Function, draws: _Draws, function: Function, *args: Any, **kwargs: Any) -> Any:
    w = drawn_leaf(3)
    y = checkpoint(function, w, *args, **kwargs)
    other = checkpoint(function, w * 2, *args, **kwargs)
    grads = torch.autograd.grad((y * other).sum(), w)
    return [y, *grads, *draws.places()]


class _Noisy(nn.Module):
    def __init__(self, draws: _Draws) -> None:
        super().__init__()
        self.draws = draws

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return (w * self.draws.draw()).sin() * w


@pytest.mark.parametrize("kind", GLOBAL + OBJECTS)
@pytest.mark.parametrize("how", ["closed over", "argument", "keyword", "in a list", "attribute"])
def test_draws_repeat(kind: str, how: str) -> None:
    def run(checkpoint: Function) -> Any:
        draws = _Draws(kind)
        if how == "closed over":
            return _noisy(checkpoint, draws, lambda w: (w * draws.draw()).sin() * w)
        if how == "argument":
            return _noisy(checkpoint, draws, lambda w, d: (w * d.draw()).sin() * w, draws)
        if how == "keyword":
            return _noisy(checkpoint, draws, lambda w, *, d: (w * d.draw()).sin() * w, d=draws)
        if how == "in a list":
            return _noisy(checkpoint, draws, lambda w, d: (w * d[0].draw()).sin() * w, [draws])
        return _noisy(checkpoint, draws, _Noisy(draws))

    both(run)


@pytest.mark.parametrize("kind", OBJECTS)
def test_draws_from_bare_generators_given_as_arguments_repeat(kind: str) -> None:
    def run(checkpoint: Function) -> Any:
        draws = _Draws(kind)
        if "torch" in kind:
            return _noisy(checkpoint, draws, lambda w, g: (w * torch.rand(3, generator=g)).sin() * w, draws.generator)
        if "default_rng" in kind:
            return _noisy(checkpoint, draws, lambda w, g: (w * float(g.random())).sin() * w, draws.numpy)
        if "RandomState" in kind:
            return _noisy(checkpoint, draws, lambda w, g: (w * float(g.rand())).sin() * w, draws.legacy)
        return _noisy(checkpoint, draws, lambda w, *, g: (w * g.random()).sin() * w, g=draws.python)

    both(run)


_OUT_OF_SIGHT: dict[str, Any] = {}


def _draw_out_of_sight() -> torch.Tensor:
    return _OUT_OF_SIGHT["draws"].draw()  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", OBJECTS)
def test_draws_from_objects_out_of_sight_repeat_or_are_an_error(kind: str) -> None:
    def run(checkpoint: Function) -> Any:
        _OUT_OF_SIGHT["draws"] = draws = _Draws(kind)
        return _noisy(checkpoint, draws, lambda w: (w * _draw_out_of_sight()).sin() * w)

    expected = run(plainly)
    try:
        found = run(lambda *args, **kwargs: lt.checkpoint(*args, check_rerun=True, **kwargs))
    except CheckpointError:
        return
    same(found, expected)


def test_slopes_drawn_inside_an_operation_repeat() -> None:
    """rrelu fills the tensor that autograd saves after it was saved."""
    x = drawn_leaf(50)

    def run(checkpoint: Function) -> Any:
        y = checkpoint(lambda x: nn.functional.rrelu(x * 1, training=True), x)
        torch.rand(3)
        return [y, *torch.autograd.grad(y.sum(), x)]

    both(run)


def test_reseeding_in_the_function_is_as_in_the_plain_run() -> None:
    def run(checkpoint: Function) -> Any:
        def function(w: torch.Tensor) -> torch.Tensor:
            torch.manual_seed(5)
            return nn.functional.dropout(w.sin(), 0.5) * torch.rand(3)

        w = drawn_leaf(3)
        y = checkpoint(function, w)
        torch.rand(2)
        before = torch.get_rng_state()
        grads = torch.autograd.grad(y.sum(), w)
        return [y, *grads, before, torch.get_rng_state()]

    both(run)


# The rerun's surroundings


def test_the_default_dtype_is_as_it_was() -> None:
    w = drawn_leaf(3)

    def run(checkpoint: Function) -> Any:
        torch.set_default_dtype(torch.float64)
        try:
            y = checkpoint(lambda w: (w * torch.full((3,), 0.1)).sin(), w)
        finally:
            torch.set_default_dtype(torch.float32)
        assert y.dtype == torch.float64
        return [y, *torch.autograd.grad(y.sum(), w)]

    both(run)


def test_the_default_dtype_of_the_backward_does_not_matter_and_is_left() -> None:
    w = drawn_leaf(3)
    y = lt.checkpoint(lambda w: (w * torch.full((3,), 0.1)).sin(), w)
    torch.set_default_dtype(torch.float64)
    try:
        found = torch.autograd.grad(y.sum(), w)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    same(found, torch.autograd.grad((w * torch.full((3,), 0.1)).sin().sum(), w))


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_the_attention_kernel_is_as_it_was(backend: SDPBackend) -> None:
    q, k, v = (drawn_leaf(2, 2, 8, 16, seed=seed) for seed in range(3))

    def run(checkpoint: Function) -> Any:
        with sdpa_kernel(backend):
            y = checkpoint(lambda q, k, v: nn.functional.scaled_dot_product_attention(q * 1, k * 1, v * 1), q, k, v)
        other = SDPBackend.FLASH_ATTENTION if backend is SDPBackend.MATH else SDPBackend.MATH
        with sdpa_kernel(other):
            return [y, *torch.autograd.grad(y.square().sum(), [q, k, v])]

    both(run)


_scale = 1.0


@contextmanager
def _scaled(value: float) -> Iterator[None]:
    global _scale
    before, _scale = _scale, value
    try:
        yield
    finally:
        _scale = before


def _scaled_sine(w: torch.Tensor) -> torch.Tensor:
    return (w * _scale).sin() * _scale


def test_contexts_that_are_named_are_entered_for_the_rerun() -> None:
    w = drawn_leaf(3)

    def run(checkpoint: Function) -> Any:
        options: dict[str, Any] = {} if checkpoint is plainly else {"contexts": [lambda: _scaled(3.0)]}
        with _scaled(3.0):
            y = checkpoint(_scaled_sine, w, **options)
        grads = torch.autograd.grad(y.sum(), w)
        assert _scale == 1.0
        return [y, *grads]

    both(run)


# Tensors in lists, dicts and keywords are inputs like others


def _change(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1)


@pytest.mark.parametrize("where", ["argument", "keyword", "list", "dict", "nested", "keyword list"])
def test_an_input_changed_in_place_is_an_error(where: str) -> None:
    leaf = drawn_leaf(3)
    x = leaf * 1

    def sine(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sin().exp()

    calls: dict[str, Callable[[], torch.Tensor]] = {
        "argument": lambda: lt.checkpoint(sine, x),
        "keyword": lambda: lt.checkpoint(lambda *, x: sine(x), x=x),
        "list": lambda: lt.checkpoint(lambda xs: sine(xs[1]), [None, x]),
        "dict": lambda: lt.checkpoint(lambda xs: sine(xs["x"]), {"x": x}),
        "nested": lambda: lt.checkpoint(lambda xs: sine(xs["a"][0][1]), {"a": [(1, x)]}),
        "keyword list": lambda: lt.checkpoint(lambda *, xs: sine(xs[0]), xs=[x]),
    }
    y = calls[where]()
    _change(x)
    with pytest.raises(CheckpointError, match=r"(?i)in place|changed|modified"):
        y.sum().backward()


def test_an_input_changed_in_place_in_the_function_itself_is_as_plain_or_an_error() -> None:
    def run(checkpoint: Function) -> Any:
        leaf = drawn_leaf(3)

        def function(x: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            return x.sin().exp()

        y = checkpoint(function, leaf * 1)
        return torch.autograd.grad(y.sum(), leaf)

    expected = run(plainly)
    try:
        found = run(lt.checkpoint)
    except RuntimeError:
        return
    same(found, expected)


def test_an_output_changed_in_place_is_as_plain() -> None:
    def run(checkpoint: Function) -> Any:
        leaf = drawn_leaf(3)
        y = checkpoint(lambda x: (x.sin() * x).cos() * 2, leaf * 1)
        y.mul_(3).add_(leaf)
        return torch.autograd.grad(y.sum(), leaf)

    both(run)


def test_a_residual_sum_in_place_is_right_or_an_error() -> None:
    """x is the argument, and changed afterwards: the plain run is right where exp saved only its result."""

    def run(checkpoint: Function) -> Any:
        leaf = drawn_leaf(3)
        x = leaf * 1
        x += checkpoint(lambda x: (x * 2).exp(), x)
        return torch.autograd.grad(x.sum(), leaf)

    expected = run(plainly)
    try:
        found = run(lt.checkpoint)
    except CheckpointError:
        return
    same(found, expected)


def test_containers_that_the_function_changes_are_as_they_were_in_the_rerun() -> None:
    def run(checkpoint: Function) -> Any:
        x, w = drawn_leaf(3), drawn_leaf(3, seed=1)

        def function(options: dict[str, Any], stack: list[Any], *, table: dict[str, Any]) -> Any:
            y = options.pop("x") * stack.pop()
            stack.append("used")
            table["inner"].append(len(table))
            table.setdefault("more", 1)
            return y.sin().exp() * len(table["inner"])

        options, stack, table = {"x": x}, [1, w], {"inner": [1]}
        y = checkpoint(function, options, stack, table=table)
        after = (dict(options), list(stack), {"inner": [1, 1], "more": 1})
        grads = torch.autograd.grad(y.sum(), [x, w])
        assert (options, stack, table) == after == ({}, [1, "used"], {"inner": [1, 1], "more": 1})
        return [y, *grads]

    both(run)


def test_containers_that_the_caller_changes_later_do_not_matter() -> None:
    x, w = drawn_leaf(3), drawn_leaf(3, seed=1)
    given = {"x": [x]}
    y = lt.checkpoint(lambda given: (given["x"][0] * w).sin(), given)
    given["x"][0] = torch.zeros(3)
    given["x"].append(x)
    same(torch.autograd.grad(y.sum(), [x, w]), torch.autograd.grad((x * w).sin().sum(), [x, w]))


@pytest.mark.parametrize("where", ["argument", "keyword", "list", "dict", "keyword list", "tuple", "closed over"])
def test_tensors_handed_to_an_inner_checkpoint_are_freed(where: str) -> None:
    x = drawn_leaf(64)
    made = Log()

    def sine(y: torch.Tensor) -> torch.Tensor:
        return y.sin().cos()

    def outer(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        made.append(StorageWeakRef(y.untyped_storage()))
        calls: dict[str, Callable[[], torch.Tensor]] = {
            "argument": lambda: lt.checkpoint(sine, y),
            "keyword": lambda: lt.checkpoint(sine, y=y),
            "list": lambda: lt.checkpoint(lambda ys: sine(ys[0]), [y]),
            "dict": lambda: lt.checkpoint(lambda ys: sine(ys["y"]), {"y": y}),
            "keyword list": lambda: lt.checkpoint(lambda *, ys: sine(ys[0]), ys=[y]),
            "tuple": lambda: lt.checkpoint(lambda ys: sine(ys[0][0]), ((y,), 3)),
            "closed over": lambda: lt.checkpoint(lambda: sine(y)),
        }
        return calls[where]()

    out = lt.checkpoint(outer, x, early_stop=False)
    if where != "closed over":  # a closure belongs to the function, and is held with it
        assert all(reference.expired() for reference in made.items())
    same(torch.autograd.grad(out.sum(), x), torch.autograd.grad(x.exp().sin().cos().sum(), x))
    del out
    assert len(made.items()) == 2
    assert all(reference.expired() for reference in made.items())


# Whatever is changed between forward and backward


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Linear(4, 3)
        self.scale = 2.0
        self.register_buffer("shift", torch.full((3,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.norm(self.first(x)) * self.scale)
        return torch.sin(self.second(self.drop(h)) * x + self.shift) * x


def _step_optimizer(net: _Net) -> None:
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(net.parameters(), lr=0.1).step()


def _replace_parameter(net: _Net) -> None:
    net.second.weight = nn.Parameter(net.second.weight.detach() * 2)


def _load(net: _Net) -> None:
    net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})


def _replace_shift(net: _Net) -> None:
    net.shift = torch.zeros(3)


def _shift_in_place(net: _Net) -> None:
    assert isinstance(net.shift, torch.Tensor)
    net.shift.zero_()


def _scale_other(net: _Net) -> None:
    net.scale = 3.0


CHANGES: dict[str, Callable[[_Net], object]] = {
    "optimizer step": _step_optimizer,
    "parameter replaced": _replace_parameter,
    "state loaded": _load,
    "switched to eval": lambda net: net.eval(),
    "part switched to eval": lambda net: net.drop.eval(),
    "buffer replaced": _replace_shift,
    "buffer changed in place": _shift_in_place,
    "attribute changed": _scale_other,
    "parameter frozen": lambda net: net.first.weight.requires_grad_(False),
    "used again": lambda net: net(torch.randn(5, 3)),
    "module replaced": lambda net: setattr(net, "second", nn.Linear(4, 3)),
    "probability changed": lambda net: setattr(net.drop, "p", 0.1),
    "forward hook added": lambda net: net.second.register_forward_hook(lambda m, i, o: o * 2) and None,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("form", ["module", "closure", "method"])
def test_a_module_changed_before_the_backward_is_right_or_an_error(change: str, form: str) -> None:
    def run(checkpoint: Function, changed: bool) -> Any:
        torch.manual_seed(2)
        net, x = _Net(), drawn_leaf(5, 3)
        leaves = [x, *net.parameters()]
        forms: dict[str, Function] = {"module": net, "closure": lambda x: net(x), "method": net.forward}
        y = checkpoint(forms[form], x)
        if changed:
            CHANGES[change](net)
        return torch.autograd.grad(y.sum(), leaves)

    expected = run(plainly, False)
    try:
        found = run(lt.checkpoint, True)
    except RuntimeError:
        return
    same(found, expected)


@pytest.mark.parametrize("change", ["in place", "rebound", "number rebound", "global rebound", "list"])
def test_a_closed_over_value_changed_before_the_backward_is_right_or_an_error(change: str) -> None:
    global _scale
    x, weight = drawn_leaf(3), drawn_leaf(3, seed=1)
    w, factor, bag = weight * 1, 2.0, [weight * 1]
    expected = torch.autograd.grad(((x * 1) * w * factor * bag[0] * _scale).sin().sum(), [x, weight], retain_graph=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        return ((x * 1) * w * factor * bag[0] * _scale).sin()

    y = lt.checkpoint(function, x)
    try:
        match change:
            case "in place":
                _change(w)
            case "rebound":
                w = torch.zeros(3)
            case "number rebound":
                factor = 5.0
            case "global rebound":
                _scale = 7.0
            case "list":
                bag[0] = torch.zeros(3)
        try:
            found = torch.autograd.grad(y.sum(), [x, weight])
        except RuntimeError:
            return
        same(found, expected)
    finally:
        _scale = 1.0


# Depth


def _nested(x: torch.Tensor, depth: int) -> torch.Tensor:
    return x.sin() if depth == 0 else lt.checkpoint(_nested, x.sin(), depth - 1)


def _deep(depth: int) -> tuple[Any, Any]:
    x = drawn_leaf(2)
    y = x
    for _ in range(depth + 1):
        y = y.sin()
    return torch.autograd.grad(_nested(x, depth).sum(), x), torch.autograd.grad(y.sum(), x)


def test_nested_150_deep_within_pythons_own_limit() -> None:
    assert sys.getrecursionlimit() == 1000
    found, expected = _deep(150)
    same(found, expected)


@pytest.mark.parametrize("depth", [200, 300, 450, 900, 5_000])
def test_deeper_than_pythons_stack_is_right_or_a_clear_error(depth: int) -> None:
    refusal = ""
    try:
        found, expected = _deep(depth)
    except CheckpointError as error:
        refusal = str(error)
    if depth == 5_000 or refusal:
        assert "deep" in refusal
        assert "recursion" in refusal.lower()
    else:
        same(found, expected)


def test_after_too_deep_a_nesting_everything_works_again() -> None:
    with pytest.raises(CheckpointError):
        _deep(5_000)
    assert not lt.is_recomputing()
    found, expected = _deep(20)
    same(found, expected)


def test_a_recursion_of_the_functions_own_is_its_own_error() -> None:
    def endless(x: torch.Tensor) -> torch.Tensor:
        return endless(x)

    with pytest.raises(RecursionError):
        lt.checkpoint(endless, drawn_leaf(3))


def test_with_a_higher_limit_it_nests_deeper() -> None:
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.extend(_deep(300))
        except BaseException as error:
            outcome.append(error)

    limit, size = sys.getrecursionlimit(), threading.stack_size(512 * 2**20)
    sys.setrecursionlimit(20_000)
    try:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        sys.setrecursionlimit(limit)
        threading.stack_size(size)
    found, expected = outcome
    same(found, expected)


# Values, names, words


def test_check_rerun_finds_values_that_differ_though_shapes_agree() -> None:
    x, numbers = drawn_leaf(3), iter([1.25, 1.75])
    y = lt.checkpoint(lambda x: (x * next(numbers)).sin(), x, check_rerun=True)
    with pytest.raises(CheckpointError):
        y.sum().backward()


def test_check_rerun_finds_a_single_bit_and_an_unused_difference() -> None:
    x, numbers = drawn_leaf(3), iter([1.0, 1.0 + 2**-23])
    y = lt.checkpoint(lambda x: (x * 3 * torch.tensor(next(numbers))).sin(), x, check_rerun=True)
    with pytest.raises(CheckpointError):
        y.sum().backward()


def test_check_rerun_is_content_with_what_repeats() -> None:
    x = drawn_leaf(5, 3)

    def run(checkpoint: Function) -> Any:
        net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Tanh())
        options: dict[str, Any] = {} if checkpoint is plainly else {"check_rerun": True}
        y = checkpoint(net, x, **options)
        nan = checkpoint(lambda x: (x * float("nan")).sin(), x, **options)
        return torch.autograd.grad(y.sum() + nan.sum(), [x, *net.parameters()])

    both(run)


class _Flaky(nn.Module):
    """A layer whose rerun differs."""

    def __init__(self, kinds: list[Function]) -> None:
        super().__init__()
        self._kinds = chain(kinds, repeat(kinds[-1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = next(self._kinds)(x)
        return y


def _flaky_net(kinds: list[Function]) -> nn.Module:
    net = nn.Module()
    net.body = nn.Sequential(nn.Linear(41, 41), nn.Sequential(nn.Sigmoid(), _Flaky(kinds)), nn.Linear(41, 41))
    net.forward = lambda x: net.body(x)  # type: ignore[operator]
    return net


def test_errors_name_the_module_the_op_and_both_shapes() -> None:
    net = _flaky_net([lambda x: (x * 2).tanh(), lambda x: (x[:, :37] * 2).tanh()])
    y = lt.checkpoint(net, torch.ones(2, 41))
    with pytest.raises(CheckpointError) as caught:
        y.sum().backward()
    message = str(caught.value)
    assert "body.1.1" in message
    assert "tanh" in message.lower() or "mul" in message.lower()
    assert "41" in message
    assert "37" in message


def test_errors_name_the_two_dtypes() -> None:
    net = _flaky_net([lambda x: (x * 2).tanh(), lambda x: (x.double() * 2).tanh().float()])
    y = lt.checkpoint(net, torch.ones(2, 41))
    with pytest.raises(CheckpointError, match="float64") as caught:
        y.sum().backward()
    assert "float32" in str(caught.value)
    assert "body.1.1" in str(caught.value)


def test_errors_about_values_name_the_module() -> None:
    fills = chain([0.125], repeat(0.375))
    net = _flaky_net([lambda x: (x * torch.full((1,), next(fills))).tanh()])
    y = lt.checkpoint(net, torch.ones(2, 41), check_rerun=True)
    with pytest.raises(CheckpointError) as caught:
        y.sum().backward()
    message = str(caught.value)
    assert "values" in message
    assert "body.1.1" in message


def test_errors_about_fewer_tensors_give_both_numbers() -> None:
    x = drawn_leaf(3)
    kinds: Iterator[Function] = iter([lambda x: x.sin().exp().tanh(), lambda x: x.sin()])
    y = lt.checkpoint(lambda x: next(kinds)(x), x)
    with pytest.raises(CheckpointError) as caught:
        y.sum().backward()
    assert "3" in str(caught.value)
    assert "1" in str(caught.value)


def test_is_recomputing_in_the_rerun_and_nowhere_else() -> None:
    x, seen = drawn_leaf(3), Log()

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(lt.is_recomputing())
        return x.sin().exp()

    y = lt.checkpoint(lambda x: lt.checkpoint(function, function(x)), x)
    assert seen.items() == [False, False]
    hooked: list[bool] = []
    x.register_hook(lambda _: hooked.append(lt.is_recomputing()))
    y.sum().backward()
    assert len(seen.items()) > 2
    assert all(seen.items()[2:])
    assert hooked == [False]
    assert not lt.is_recomputing()


def test_determinism_check_none_lets_other_shapes_pass() -> None:
    x, kinds = drawn_leaf(3), iter([torch.tensor(2.0), torch.tensor([2.0])])
    y = lt.checkpoint(lambda x: (x * 1) * next(kinds), x, determinism_check="none")
    same(torch.autograd.grad(y.sum(), x), [torch.full((3,), 2.0)])


@pytest.mark.parametrize("word", ["other", "", None, 3])
def test_other_determinism_checks_are_refused(word: Any) -> None:
    with pytest.raises(ValueError, match="determinism_check"):
        lt.checkpoint(lambda x: x.sin(), drawn_leaf(3), determinism_check=word)


def test_debug_shows_the_ops_of_both_runs() -> None:
    x = drawn_leaf(3)
    kinds: Iterator[Function] = iter([lambda x: x.sinh().cosh().exp(), lambda x: x.atan()])
    y = lt.checkpoint(lambda x: next(kinds)(x), x, debug=True)
    with pytest.raises(CheckpointError) as caught:
        y.sum().backward()
    assert all(name in str(caught.value) for name in ("sinh", "cosh", "exp", "atan"))


def test_debug_changes_no_result() -> None:
    net, x = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Tanh()), drawn_leaf(2, 3)

    def run(checkpoint: Function) -> Any:
        options: dict[str, Any] = {} if checkpoint is plainly else {"debug": True}
        return torch.autograd.grad(checkpoint(net, x, **options).sum(), [x, *net.parameters()])

    both(run)


def test_context_fn_gives_one_context_to_each_run() -> None:
    x, order = drawn_leaf(3), Log()

    @contextmanager
    def named(name: str) -> Iterator[None]:
        order.append(f"in {name}")
        try:
            yield
        finally:
            order.append(f"out {name}")

    def function(x: torch.Tensor) -> torch.Tensor:
        order.append("run")
        return x.sin().exp()

    y = lt.checkpoint(function, x, context_fn=lambda: (named("forward"), named("rerun")))
    assert order.items() == ["in forward", "run", "out forward"]
    same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(x.sin().exp().sum(), x))
    assert order.items()[3:] == ["in rerun", "run", "out rerun"]


class _OpCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("saved", [torch.ops.aten.mm.default, torch.ops.aten.sin.default])
def test_selective_checkpoint_contexts_keep_what_the_policy_says(saved: Any) -> None:
    x, w = drawn_leaf(3, 3), drawn_leaf(3, 3, seed=1)

    def function(x: torch.Tensor) -> torch.Tensor:
        return ((x @ w).sin() @ w).exp().sin()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op == saved else CheckpointPolicy.PREFER_RECOMPUTE

    y = lt.checkpoint(function, x, context_fn=functools.partial(create_selective_checkpoint_contexts, policy))
    with _OpCounter() as counter:
        found = torch.autograd.grad(y.sum(), [x, w])
    same(found, torch.autograd.grad(function(x).sum(), [x, w]))
    name = saved.overloadpacket.__name__
    other = "sin" if name == "mm" else "exp"
    backward_only = {"mm": 4, "sin": 0, "exp": 0}  # products of the backward itself
    assert counter.names.count(name) == backward_only[name]
    assert counter.names.count(other) > 0


# Other ways in and out


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, _ = ctx.saved_tensors
        _, y = ctx.saved_tensors
        return grads[0] * (y * x + y)


def test_saved_tensors_may_be_asked_for_twice() -> None:
    x = drawn_leaf(3)
    twice: Function = _Twice.apply
    both(lambda checkpoint: torch.autograd.grad(checkpoint(lambda x: twice(x * 1).sin(), x).sum(), x))
    both(lambda checkpoint: torch.autograd.grad(checkpoint(twice, x).sum(), x))


def test_saved_tensors_may_be_looked_at_from_outside() -> None:
    """Such as by a tool that draws the graph: it costs a rerun, and the gradient stays right."""
    x = drawn_leaf(3)
    y = lt.checkpoint(lambda x: (x * 2).sin(), x)
    node: Any = y.grad_fn
    same([node._saved_self.detach()], [(x * 2).detach()])
    same(torch.autograd.grad(y.sum(), x), torch.autograd.grad((x * 2).sin().sum(), x))


def _cubic(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x.exp() * x).tanh()


# Forward mode loads parts of torch that are written in its old script language.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "transform",
    [
        torch.func.grad,
        lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x))),
        torch.func.jacrev,
        lambda f: lambda x: torch.func.vjp(f, x)[1](torch.ones(())),
        lambda f: lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
        torch.func.hessian,
    ],
    ids=["grad", "vmap of grad", "jacrev", "vjp", "jvp", "hessian"],
)
def test_torch_func_over_it(transform: Any) -> None:
    x = drawn_leaf(3).detach()
    found = transform(lambda x: lt.checkpoint(_cubic, x).sum())(x)
    expected = transform(lambda x: _cubic(x).sum())(x)
    same(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(expected))


def test_torch_func_inside_it_is_right_or_an_error() -> None:
    """torch.func refuses saved-tensor hooks around it."""
    x, w = drawn_leaf(3), drawn_leaf(3, seed=1)

    def function(x: torch.Tensor) -> Any:
        return torch.func.grad(lambda x: (x * w).sin().exp().sum())(x).cos()

    try:
        found = torch.autograd.grad(lt.checkpoint(function, x).sum(), [x, w])
    except RuntimeError:
        return
    same(found, torch.autograd.grad(function(x).sum(), [x, w]))


def test_torchs_refusal_of_torch_func_inside_it_says_once_what_to_do() -> None:
    def slope(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda x: x.sin().sum())(x)  # type: ignore[no-any-return]

    with pytest.raises(RuntimeError, match="saved tensor hooks") as caught:
        lt.checkpoint(lambda x: lt.checkpoint(slope, x), drawn_leaf(3))
    (note,) = caught.value.__notes__
    assert "take the transform out of the call" in note


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forward_mode_passes_through() -> None:
    x = drawn_leaf(3).detach()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones(3))
        found = torch.autograd.forward_ad.unpack_dual(lt.checkpoint(_cubic, dual)).tangent
        expected = torch.autograd.forward_ad.unpack_dual(_cubic(dual)).tangent
    same([found], [expected])


def test_functional_call_parameters_are_right() -> None:
    net, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), drawn_leaf(2, 3)
    others = {name: (p.detach() * 2).requires_grad_() for name, p in net.named_parameters()}

    def run(checkpoint: Function) -> Any:
        y = checkpoint(lambda x: torch.func.functional_call(net, others, (x,)).sin(), x)
        return torch.autograd.grad(y.sum(), [x, *others.values()])

    both(run)


def test_functional_call_outside_is_right_or_an_error() -> None:
    """The parameters are put back before the backward, so a careless rerun would use others."""
    net, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), drawn_leaf(2, 3)
    others = {name: (p.detach() * 2).requires_grad_() for name, p in net.named_parameters()}

    class Outer(nn.Module):
        def __init__(self, checkpoint: Function) -> None:
            super().__init__()
            self.net = net
            self.checkpoint = checkpoint

        def forward(self, x: torch.Tensor) -> Any:
            return self.checkpoint(self.net, x).sin()

    def run(checkpoint: Function) -> Any:
        names = {f"net.{name}": value for name, value in others.items()}
        y = torch.func.functional_call(Outer(checkpoint), names, (x,))
        return torch.autograd.grad(y.sum(), [x, *others.values()])

    expected = run(plainly)
    try:
        found = run(lt.checkpoint)
    except CheckpointError:
        return
    same(found, expected)


@pytest.mark.parametrize("make", [lambda: nn.LSTM(3, 4), lambda: nn.MultiheadAttention(4, 2, dropout=0.3)])
def test_modules_with_several_inputs_and_outputs(make: Callable[[], nn.Module]) -> None:
    def run(checkpoint: Function) -> Any:
        net = make()
        if isinstance(net, nn.LSTM):
            x = drawn_leaf(5, 2, 3)
            y, (h, c) = checkpoint(net, x, (drawn_leaf(1, 2, 4), drawn_leaf(1, 2, 4, seed=2)))
            total = y.sum() + (h * c).sum()
        else:
            x = drawn_leaf(5, 2, 4)
            total = checkpoint(net, x, x * 2, value=x.sin(), need_weights=False)[0].square().sum()
        return torch.autograd.grad(total, [x, *net.parameters()], allow_unused=True)

    both(run)


def test_parametrizations_and_weight_norm() -> None:
    x = drawn_leaf(2, 3)

    def run(checkpoint: Function) -> Any:
        net = nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
            nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        )
        y = checkpoint(net, x)
        grads = torch.autograd.grad(y.square().sum(), [x, *net.parameters()])
        return [y, *grads, *(buffer.clone() for buffer in net.buffers())]

    both(run)


def test_a_graph_that_crosses_between_two_checkpoints() -> None:
    x, w = drawn_leaf(3), drawn_leaf(3, seed=1)

    def run(checkpoint: Function) -> Any:
        kept: list[torch.Tensor] = []

        def first(x: torch.Tensor) -> torch.Tensor:
            if not lt.is_recomputing():
                kept.append(x.sin() * w)
            return (x * w).exp()

        y = checkpoint(first, x)
        z = checkpoint(lambda y: (y * kept[0]).cos(), y)
        return torch.autograd.grad(z.sum(), [x, w])

    expected = run(plainly)
    try:
        found = run(lt.checkpoint)
    except CheckpointError:
        return
    same(found, expected)


def test_anomaly_mode_changes_no_result() -> None:
    x = drawn_leaf(3)

    def run(checkpoint: Function) -> Any:
        with torch.autograd.set_detect_anomaly(True):
            return torch.autograd.grad(checkpoint(_cubic, x).sum(), x)

    both(run)


# torch.compile


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fullgraph", [True, False])
def test_under_torch_compile_gradients_are_the_plain_ones(backend: str, fullgraph: bool) -> None:
    w, x = drawn_leaf(3, 3), drawn_leaf(2, 3, seed=1)

    def block(x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return torch.tanh(x @ w).sin() * scale

    def model(x: torch.Tensor) -> torch.Tensor:
        return lt.checkpoint(block, lt.checkpoint(block, x, scale=2.0), scale=3.0, use_reentrant=False) + 1

    y = torch.compile(model, backend=backend, fullgraph=fullgraph)(x)
    expected = block(block(x, scale=2.0), scale=3.0) + 1
    same([y], [expected])
    same(torch.autograd.grad(y.square().sum(), [x, w]), torch.autograd.grad(expected.square().sum(), [x, w]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("fresh_compiler")
def test_under_torch_compile_it_is_torchs_own_traced_version() -> None:
    graphs: list[str] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(module.print_readable(print_output=False))
        return module.forward

    net, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), drawn_leaf(2, 3)
    y = torch.compile(lambda x: lt.checkpoint(net, x) * 2, backend=backend, fullgraph=True)(x)
    assert any("checkpoint" in graph for graph in graphs)
    expected = net(x) * 2
    same([y], [expected])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_module_inside_a_checkpoint() -> None:
    net, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), drawn_leaf(2, 3)
    compiled = torch.compile(net, backend="aot_eager")
    y = lt.checkpoint(compiled, x)
    found = torch.autograd.grad(y.square().sum(), [x, *net.parameters()])
    same(found, torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_module_in_a_call_inside_another() -> None:
    """The outer call's hook on modules is there in the first run of the inner one, and compiled code depends on it."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.norm(x)  # type: ignore[no-any-return]

    net, x = Residual(), drawn_leaf(2, 3)
    expected = torch.autograd.grad(net(x * 2).square().sum(), [x, *net.parameters()])
    net.compile(backend="aot_eager")
    y = lt.checkpoint(lambda x: lt.checkpoint(net, x * 2), x)
    same(torch.autograd.grad(y.square().sum(), [x, *net.parameters()]), expected)


def test_the_operation_that_saved_something_else_is_named() -> None:
    calls = count()
    y = lt.checkpoint(lambda x: torch.sin(x.sum(0) if next(calls) else x), torch.ones(3, 4, requires_grad=True))
    with pytest.raises(CheckpointError, match=r"saved by torch\.sin \(test_failures\.py"):
        y.sum().backward()


def test_a_value_that_the_function_changes_after_it_was_saved_is_an_error() -> None:
    """As in the plain call; in the rerun nothing else could tell, for it makes the same change."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()  # whose backward needs the result
        y.add_(1)
        return y.sin() * x

    for call in (plainly, lt.checkpoint):
        x = drawn_leaf(5)
        y = call(function, x)
        with pytest.raises(RuntimeError, match=r"in ?place"):
            y.sum().backward()


@pytest.mark.parametrize("options", [{"check_rerun": False}, {"preserve_rng_state": False}], ids=str)
def test_other_shapes_are_an_error_though_no_value_is_compared(options: dict[str, Any]) -> None:
    x, sizes = drawn_leaf(6), iter([6, 3, 3])

    def function(x: torch.Tensor) -> torch.Tensor:
        part = x[: next(sizes)]
        return part.sin().sum() * x

    y = lt.checkpoint(function, x, **options)
    with pytest.raises(CheckpointError, match=r"it was .*6.*, now it is .*3"):
        y.sum().backward()


class _Gain(nn.Module):
    """Counts in a buffer, which is then a factor that autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.gain, torch.Tensor)
        self.gain.add_(1)
        return x * self.gain


def test_a_buffer_that_is_saved_and_counts_on_is_right_or_an_error() -> None:
    net, x = _Gain(), drawn_leaf(3)
    first = lt.checkpoint(net, x)
    with torch.no_grad():
        net(x)
    try:
        gradient = torch.autograd.grad(first.sum(), x)[0]
    except RuntimeError:  # as the plain call
        return
    assert torch.equal(gradient, torch.ones(3))
    assert net.state_dict()["gain"].tolist() == [2.0] * 3


def test_a_difference_that_is_read_when_the_call_is_gone_is_told_without_the_operation() -> None:
    likeness = (torch.Size([3]), torch.float32, torch.device("cpu"))
    noted = _Noted(uncompared=False, check_rerun=None, debug=False)

    def found(call: Any, number: int) -> CheckpointError | None:
        return _found_later(lambda: call, noted, number, likeness)  # type: ignore[arg-type]  # as a weak method is called

    assert "check_rerun=True" in str(found(None, 2))
    assert found(lambda _: None, 2) is None  # the call knows of an operation that leaves parts unfilled
    noted.late = frozenset({2})
    assert found(None, 2) is None
