"""What `lean` and `Lean` promise: the same results and gradients, the same module, and one trace for equal calls."""

from __future__ import annotations

import copy
import functools
import gc
import io
import os
import pickle
import socket
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F  # noqa: N812  (everybody's name for it)
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide.torch as lt
from lowtide import InputError
from lowtide.torch.bits import same_bits
from tests.torch import test_checkpoint_ddp as data_parallel

Function = Callable[..., Any]
lean_module = sys.modules["lowtide.torch.lean"]  # the package has the function under that name
_traced: list[bool] = []  # of each call of a function that notes it


def _is_traced() -> bool:
    """Whether this call is traced: operations are watched then."""
    return torch._C._len_torch_dispatch_stack() > 0


def _note() -> None:
    _traced.append(_is_traced())


def _noted(result: torch.Tensor) -> torch.Tensor:
    _note()
    return result


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    _traced.clear()
    yield
    _traced.clear()


def _leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def _plainly(function: Function, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _same(left: Any, right: Any) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert (a is None and b is None) or same_bits(a, b)


def _both(run: Callable[[Function, int], Any], calls: int = 3) -> None:
    """The run with the plain call in place of lean, and with it, from the same seed, several times."""
    for number in range(calls):
        torch.manual_seed(number)
        expected = run(_plainly, number)
        torch.manual_seed(number)
        _same(run(lt.lean, number), expected)


class _Gate(nn.Module):
    """Much that can be dropped, and a bit of everything that a module has."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, generator=torch.Generator().manual_seed(3)))
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("shift", torch.full((width,), 0.25))
        self.register_buffer("hidden", torch.ones(width), persistent=False)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        _note()
        y = F.gelu(self.norm(x) @ self.weight + self.shift)
        z: torch.Tensor = self.drop(torch.sigmoid(y * scale) * y).tanh() * self.hidden
        return z


def _step(module: Function, x: torch.Tensor, parameters: Any) -> list[torch.Tensor]:
    torch.manual_seed(7)
    y = module(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *parameters])]


# --- a module like any other


def test_it_has_what_the_module_has() -> None:
    module = _Gate()
    lean = lt.Lean(module)
    for names in ("named_parameters", "named_buffers"):
        assert [name for name, _ in getattr(lean, names)()] == [name for name, _ in getattr(module, names)()]
    assert list(lean.state_dict()) == list(module.state_dict()) == ["weight", "shift", "norm.weight", "norm.bias"]
    assert all(a is b for a, b in zip(lean.parameters(), module.parameters(), strict=True))
    assert lean.norm is module.norm
    assert lean.weight is module.weight
    assert "tape=None" in repr(lean)
    assert "_Gate" in repr(lean)
    assert repr(lt.Lean(module, tape="50%")).count("50%") == 1
    with pytest.raises(AttributeError):
        _ = lean.nothing


def test_state_is_loaded_and_saved() -> None:
    module, other = _Gate(), _Gate()
    with torch.no_grad():
        other.weight.mul_(2)
    lean = lt.Lean(module)
    result = lean.load_state_dict(other.state_dict())
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert same_bits(module.weight, other.weight)
    file = io.BytesIO()
    torch.save(lean.state_dict(), file)
    file.seek(0)
    _Gate().load_state_dict(torch.load(file))
    with pytest.raises(RuntimeError, match="Missing key"):
        lean.load_state_dict({})


class _WithExtra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.extra = 5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).exp() * x

    def get_extra_state(self) -> int:
        return self.extra

    def set_extra_state(self, state: int) -> None:
        self.extra = state


def test_extra_state_goes_with_it() -> None:
    module = _WithExtra()
    lean = lt.Lean(module)
    assert list(lean.state_dict()) == list(module.state_dict()) == ["weight", "_extra_state"]
    assert lean.state_dict()["_extra_state"] == 5
    lean.load_state_dict(lean.state_dict() | {"_extra_state": 9})
    assert module.extra == lean.extra == 9
    lean.extra = 11
    assert module.extra == 11


def test_a_module_inside_another() -> None:
    plain = nn.Sequential(_Gate(), nn.Linear(6, 6))
    lean = nn.Sequential(lt.Lean(plain[0]), plain[1])
    assert list(lean.state_dict()) == list(plain.state_dict())
    x = _leaf(4, 6)
    for _ in range(3):
        _same(_step(lean, x, plain.parameters()), _step(plain, x, plain.parameters()))


def test_training_and_evaluation() -> None:
    module = _Gate()
    lean, x = lt.Lean(module), _leaf(4, 6)
    for mode in (True, False, True, False):
        lean.train(mode)
        assert module.training is module.drop.training is lean.training is mode
        _same(_step(lean, x, module.parameters()), _step(copy.deepcopy(module), x, ())[:2] + _grads(module, x))
    assert lean.eval() is lean
    assert not module.training


def _grads(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return _step(module, x, module.parameters())[2:]


def test_another_dtype_is_traced_anew() -> None:
    module = _Gate()
    lean, plain = lt.Lean(module), copy.deepcopy(module)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
        lean.to(dtype)
        plain.to(dtype)
        x = _leaf(4, 6, dtype=dtype)
        for _ in range(2):
            _same(_step(lean, x, lean.parameters()), _step(plain, x, plain.parameters()))


def test_parameters_of_another_dtype_shape_or_layout_are_traced_anew() -> None:
    index = torch.tensor([0, 2, 1])
    embedding = nn.Embedding(3, 4)
    module = nn.Sequential(embedding, nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid())
    with lt.record(memory=False) as receipt:
        for dtype in (torch.float32, torch.float64):
            module.to(dtype)
            for _ in range(2):
                expected = torch.autograd.grad(module(index).sum(), list(module.parameters()))
                _same(torch.autograd.grad(lt.lean(module, index).sum(), list(module.parameters())), expected)
        module[2] = nn.Linear(4, 7, dtype=torch.float64)
        embedding.weight = nn.Parameter(embedding.weight.detach().t().contiguous().t())
        for _ in range(2):
            expected = torch.autograd.grad(module(index).sum(), list(module.parameters()))
            _same(torch.autograd.grad(lt.lean(module, index).sum(), list(module.parameters())), expected)
    assert receipt.kept_whole == 0


def test_parameters_in_another_memory_format() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 3, 4, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight.exp() * x).sin()

    module, x = Scaled(), _leaf(2, 3, 4, 5)

    def run(call: Function, number: int) -> Any:
        if number == 2:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # its stub lacks it
        y = call(module, x)
        return [y, *torch.autograd.grad(y.sum(), [x, module.weight])]

    _both(run, calls=4)


def test_copies_and_pickles_are_modules_of_their_own() -> None:
    lean, x = lt.Lean(_Gate(), tape="60%"), _leaf(4, 6)
    expected = _step(lean, x, lean.parameters())
    for other in (copy.deepcopy(lean), pickle.loads(pickle.dumps(lean))):
        assert other.tape == "60%"
        assert other.weight is not lean.weight
        assert other.weight is other._module.weight
        _same(_step(other, x, other.parameters()), expected)
        with torch.no_grad():
            other.weight.zero_()
        assert not same_bits(other(x), expected[0])


@pytest.mark.parametrize("number", range(3))
def test_switching_gradients_on_and_off(number: int) -> None:
    module, x = _Gate(), _leaf(4, 6)
    lean, parameters = lt.Lean(module), list(module.parameters())
    for wanted in (True, False, True):
        parameters[number].requires_grad_(wanted)
        some = [parameter for parameter in parameters if parameter.requires_grad]
        for _ in range(2):
            _same(_step(lean, x, some), _step(module, x, some))
    assert _traced.count(True) == 2  # once for each


def test_without_gradients_it_is_a_plain_call() -> None:
    module, x = _Gate(), _leaf(4, 6)
    with torch.no_grad():
        lt.Lean(module)(x)
    with torch.inference_mode():
        lt.Lean(module)(x)
    assert _traced == [False, False]
    assert lt.lean(lambda x: x + 1, 2) == 3


def test_nothing_that_wants_a_gradient() -> None:
    for _ in range(2):
        y = lt.lean(lambda x: x.exp() * x, torch.ones(3))
        assert not y.requires_grad


def test_an_optimizer_trains_it() -> None:
    plain = _Gate()
    lean = lt.Lean(copy.deepcopy(plain))
    x, losses = torch.randn(4, 6), []
    for module in (plain, lean):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        torch.manual_seed(0)
        for _ in range(5):
            optimizer.zero_grad()
            loss = module(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    _same(losses[5:], losses[:5])
    _same(list(lean.parameters()), list(plain.parameters()))


def test_statistics_are_counted_once() -> None:
    modules = [nn.Sequential(nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    lean, x = lt.Lean(modules[1]), _leaf(7, 5)
    for _ in range(3):
        _same(_step(lean, x, modules[1].parameters()), _step(modules[0], x, modules[0].parameters()))
        _same(list(lean.state_dict().values()), list(modules[0].state_dict().values()))


MODULES: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "LSTM": (lambda: nn.LSTM(5, 6, 2, dropout=0.3), [(4, 3, 5)]),
    "GRU": (lambda: nn.GRU(5, 6, 2, dropout=0.3, bidirectional=True), [(4, 3, 5)]),
    "layer of a transformer": (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), [(2, 6, 16)]),
    "attention": (lambda: nn.MultiheadAttention(16, 4, dropout=0.2, batch_first=True), [(2, 6, 16)] * 3),
    "spectral norm": (lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(5, 5)), nn.Tanh()), [(3, 5)]),
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 5)), nn.Tanh()), [(3, 5)]),
    "instance norm": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), [(2, 3, 4, 4)]),
    "batch norm, in place": (lambda: nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(inplace=True)), [(2, 3, 4, 4)]),
}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_modules_of_torchs_own(name: str, train: bool) -> None:
    make, shapes = MODULES[name]
    torch.manual_seed(0)
    plain = make().train(train)
    module = copy.deepcopy(plain)
    given = [_leaf(*shape, seed=k) for k, shape in enumerate(shapes)]
    for number in range(3):
        outcomes = []
        for call, one in ((_plainly, plain), (lt.lean, module)):
            torch.manual_seed(number)
            y = call(one, *given)
            y = y[0] if isinstance(y, tuple) else y
            grads = torch.autograd.grad(y.square().sum(), [*given, *one.parameters()])
            outcomes.append([y, *grads, *one.state_dict().values()])
        _same(*outcomes)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_modules_without_a_shape_yet() -> None:
    module = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Softplus())
    x = _leaf(2, 5)
    for _ in range(3):
        y, z = lt.lean(module, x), module(x)
        _same([y, *torch.autograd.grad(y.sum(), x)], [z, *torch.autograd.grad(z.sum(), x)])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules() -> None:
    module = torch.jit.trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4))
    x = _leaf(2, 4)
    for _ in range(3):
        y, z = lt.lean(module, x), module(x)
        _same([y, *torch.autograd.grad(y.sum(), x)], [z, *torch.autograd.grad(z.sum(), x)])


def test_a_lean_module_of_a_lean_module() -> None:
    module, x = _Gate(), _leaf(4, 6)
    lean = lt.Lean(lt.Lean(module))
    assert list(lean.state_dict()) == list(module.state_dict())
    for mode in (False, True):
        lean.train(mode)
        assert module.training is module.drop.training is mode
        _same(_step(lean, x, module.parameters()), _step(module, x, module.parameters()))


# --- hooks, and backwards of every kind


def test_hooks_fire_once() -> None:
    module, x = _Gate(), _leaf(4, 6)
    seen: list[str] = []
    module.register_forward_pre_hook(lambda *_: seen.append("before"))
    module.register_forward_hook(lambda *_: seen.append("after"))
    module.norm.register_full_backward_hook(lambda *_: seen.append("norm back"))
    module.norm.register_forward_hook(lambda *_: seen.append("norm"))
    lean = lt.Lean(module)
    lean.register_forward_hook(lambda *_: seen.append("lean"))
    for _ in range(3):
        seen.clear()
        lean(x).sum().backward()
        assert seen == ["before", "norm", "after", "lean", "norm back"]


def test_hooks_of_tensors_fire_once() -> None:
    seen: list[Any] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        y.register_hook(lambda grad: grad * 2)
        z = y.sin() * y
        z.register_hook(seen.append)
        return z.tanh()

    x = _leaf(5)

    def run(call: Function, number: int) -> Any:
        seen.clear()
        found = torch.autograd.grad(call(function, x).sum(), x)
        assert len(seen) == 1
        return [*found, *seen]

    _both(run)


def test_two_backwards_of_one_call() -> None:
    x, w = _leaf(4, 4), _leaf(4, 4, seed=1)
    for _ in range(2):
        y = lt.lean(lambda x, w: ((x @ w).sigmoid() * x).exp().tanh(), x, w)
        first = torch.autograd.grad(y.sum(), [x, w], retain_graph=True)
        _same(torch.autograd.grad(y.sum(), [x, w], retain_graph=True), first)
        _same(torch.autograd.grad(y.sum(), [x, w]), first)
        with pytest.raises(RuntimeError, match="a second time"):
            torch.autograd.grad(y.sum(), [x, w])


def test_second_derivatives() -> None:
    x, w = _leaf(3, 3, dtype=torch.float64), _leaf(3, 3, seed=1, dtype=torch.float64)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(x @ w) * x
        return (y.exp() * y).softmax(1)

    def lean(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return lt.lean(function, x, w)

    for _ in range(2):
        assert torch.autograd.gradcheck(lean, (x, w))
        assert torch.autograd.gradgradcheck(lean, (x, w))

    def run(call: Function, number: int) -> Any:
        y = call(function, x, w)
        first = torch.autograd.grad(y.square().sum(), [x, w], create_graph=True)
        second = torch.autograd.grad([f.square().sum() for f in first], [x, w], create_graph=True)
        third = torch.autograd.grad([f.sum() for f in second], [x, w])
        return [y, *first, *second, *third]

    _both(run)


def test_gradients_of_some_inputs_only() -> None:
    x, w, v = _leaf(4, 4), _leaf(4, 4, seed=1), _leaf(4, seed=2)

    def function(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = (x @ w).sigmoid() * v
        return y.exp() * x, (y.tanh() * w).sum()

    for which in ([x], [w], [v], [x, v]):

        def run(call: Function, number: int, which: list[torch.Tensor] = which) -> Any:
            outputs = call(function, x, w, v)
            some = torch.autograd.grad(outputs[1], which, retain_graph=True)
            return [*some, *torch.autograd.grad(outputs[0].sum(), which)]

        _both(run)


def test_saved_tensors_may_be_looked_at() -> None:
    x = _leaf(5)
    for _ in range(2):
        y = lt.lean(lambda x: (x.sin() * x).exp() * x, x)
        exponential = y.grad_fn._saved_self
        assert same_bits(exponential, (x.sin() * x).exp())
        _same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(((x.sin() * x).exp() * x).sum(), x))


class _Sign(torch.autograd.Function):
    """It asks for what it saved twice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, y)
        ctx.set_materialize_grads(False)
        return x.sign() * y, x * y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        x, _ = ctx.saved_tensors
        _, y = ctx.saved_tensors
        first, second = grads
        assert first is not None
        return first * y if second is None else first * y + second * x, first * x


def test_custom_functions() -> None:
    x, w = _leaf(4, 4), _leaf(4, 4, seed=1)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        first, second = _Sign.apply(  # type: ignore[no-untyped-call]  # torch's own
            x.sigmoid() * w, (x @ w).exp()
        )
        y: torch.Tensor = first.tanh() + second.sin()
        return y

    def run(call: Function, number: int) -> Any:
        y = call(function, x, w)
        return [y, *torch.autograd.grad(y.sum(), [x, w])]

    _both(run)


# --- surroundings


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    module, x = _Gate(), _leaf(4, 6)

    def run(call: Function, number: int) -> Any:
        with torch.autocast("cpu", dtype, enabled=number != 2):
            y = call(module, x)
            z = call(module, x)  # the casts of weights are there already
        return [y, z, *torch.autograd.grad((y * z).sum(), [x, *module.parameters()])]

    _both(run, calls=5)


def test_in_threads_at_once() -> None:
    module = _Gate().eval()
    lean = lt.Lean(module)
    parameters = list(module.parameters())
    inputs = [_leaf(4, 6, seed=k) for k in range(40)]
    expected = [torch.autograd.grad(module(x).square().sum(), [x, *parameters]) for x in inputs]
    meet = threading.Barrier(4)

    def work(part: int) -> list[Any]:
        meet.wait()
        return [torch.autograd.grad(lean(x).square().sum(), [x, *parameters]) for x in inputs[part::4]]

    with ThreadPoolExecutor(4) as pool:
        for part, found in enumerate(pool.map(work, range(4))):
            for left, right in zip(found, expected[part::4], strict=True):
                _same(left, right)


def test_parameters_of_another_layout_in_threads_at_once() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 3, 4, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight.exp() * x).sin()

    x = _leaf(2, 3, 4, 5)
    for _ in range(10):
        module, meet = Scaled(), threading.Barrier(4)
        lt.lean(module, x)
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # its stub lacks it
        expected = torch.autograd.grad(module(x).sum(), [x, module.weight])

        def work(_: int, module: nn.Module = module, meet: threading.Barrier = meet) -> Any:
            meet.wait()
            return torch.autograd.grad(lt.lean(module, x).sum(), [x, *module.parameters()])

        with ThreadPoolExecutor(4) as pool:
            for found in pool.map(work, range(4)):
                _same(found, expected)


def test_the_backward_in_other_threads() -> None:
    module, x = _Gate(), _leaf(4, 6)
    expected = _step(module, x, module.parameters())
    for _ in range(2):
        torch.manual_seed(7)
        y = lt.lean(module, x)

        def backward(y: torch.Tensor = y) -> Any:
            return torch.autograd.grad(y.square().sum(), [x, *module.parameters()], retain_graph=True)

        with ThreadPoolExecutor(3) as pool:
            for found in [future.result() for future in [pool.submit(backward) for _ in range(9)]]:
                _same(found, expected[1:])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_it_steps_aside_for_the_compiler() -> None:
    w = _leaf(4, 4, seed=1)

    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w) * x

    def whole(x: torch.Tensor) -> torch.Tensor:
        return lt.lean(block, x).exp()

    def whole_plainly(x: torch.Tensor) -> torch.Tensor:
        return block(x).exp()

    x = _leaf(4, 4)
    compiled, compiled_plainly = torch.compile(whole, fullgraph=True), torch.compile(whole_plainly, fullgraph=True)
    for _ in range(2):
        y, z = compiled(x), compiled_plainly(x)
        _same([y, *torch.autograd.grad(y.sum(), [x, w])], [z, *torch.autograd.grad(z.sum(), [x, w])])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_a_compiled_function_inside() -> None:
    w = _leaf(4, 4, seed=1)
    compiled = torch.compile(lambda x: torch.tanh(x @ w) * x)
    x = _leaf(4, 4)

    def run(call: Function, number: int) -> Any:
        y = call(lambda x: compiled(x.sin()).exp() * x, x)
        return [y, *torch.autograd.grad(y.sum(), [x, w])]

    _both(run)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_it_steps_aside_for_transforms() -> None:
    w = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))

    def function(x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ w) * x).exp().sum()

    x = _leaf(3, 4).detach()
    lean = functools.partial(lt.lean, function)
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        _same([transform(lean)(x)], [transform(function)(x)])
    _same([torch.func.vmap(lean)(x)], [torch.func.vmap(function)(x)])
    _same([torch.func.vmap(torch.func.grad(lean))(x)], [torch.func.vmap(torch.func.grad(function))(x)])
    _same([lean(x)], [function(x)])


def test_it_steps_aside_where_hooks_are_off_and_for_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    module, x = _Gate(), _leaf(4, 6)
    with disable_saved_tensors_hooks("no hooks here"):
        _same(_step(lt.Lean(module), x, module.parameters()), _step(module, x, module.parameters()))
        with pytest.raises(InputError, match="lean_frontier"):
            lt.lean_frontier(module, x)
    with FakeTensorMode() as mode:
        y = lt.lean(lambda x: (x.exp() * x).sin(), mode.from_tensor(torch.ones(3), static_shapes=True).requires_grad_())
    assert y.shape == (3,)


@pytest.mark.parametrize("context", [save_on_cpu, lambda: saved_tensors_hooks(torch.clone, torch.clone)])
def test_hooks_around_get_what_is_kept(context: Callable[[], Any]) -> None:
    module, x = _Gate(), _leaf(4, 6)

    def run(call: Function, number: int) -> Any:
        with context():
            y = call(module, x)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]

    _both(run)
    packed: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.nbytes)
        return tensor

    for call in (_plainly, lt.lean):
        packed.append(-1)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            call(module, x)
    middle = packed.index(-1, 1)
    assert sum(packed[middle + 1 :]) < sum(packed[1:middle])


def test_hooks_around_get_a_tensor_as_it_was_when_it_was_saved() -> None:
    """It is changed afterwards. Hooks that copy do not mind; autograd's own error is as good."""
    x = _leaf(5)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.tanh()
        y.mul_(0.5)
        return x * y

    for _ in range(3):
        outcomes = []
        for call in (_plainly, lt.lean):
            with saved_tensors_hooks(torch.clone, torch.clone):
                y = call(function, x)
            try:
                outcomes.append(torch.autograd.grad(y.sum(), x)[0])
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error)  # noqa: PT017  (either is right)
        assert len(outcomes) == 1 or same_bits(*outcomes)


@pytest.mark.parametrize("outer", [lt.checkpoint, functools.partial(torch_checkpoint, use_reentrant=False), lt.lean])
@pytest.mark.parametrize("inner", [lt.checkpoint, functools.partial(torch_checkpoint, use_reentrant=False), lt.lean])
def test_in_and_around_checkpoints(outer: Function, inner: Function) -> None:
    module, x = _Gate(), _leaf(4, 6)

    def nested(call: Function, inner: Function) -> Callable[[torch.Tensor], Any]:
        return lambda x: call(lambda x: inner(module, x.sin()).exp() * x, x)

    def run(lean: bool) -> Any:
        torch.manual_seed(0)
        call = outer if outer is not lt.lean or lean else _plainly
        within = inner if inner is not lt.lean or lean else _plainly
        y = nested(call, within)(x)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]

    expected = run(lean=False)
    for _ in range(3):
        _same(run(lean=True), expected)


def test_in_a_sequence_of_layers() -> None:
    layers = [_Gate() for _ in range(6)]
    x = _leaf(4, 6)

    def run(call: Function, number: int) -> Any:
        y = lt.sequential([functools.partial(call, layer) for layer in layers], x)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *(p for layer in layers for p in layer.parameters())])]

    _both(run)


def _work(rank: int, folder: str, interface: str) -> None:
    """What one process of two does; what fails here is raised in the test."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    warnings.simplefilter("ignore")  # gloo warns of names that it cannot resolve
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=data_parallel.WORLD)
    for options in data_parallel.OPTIONS:
        expected = data_parallel._train(_plainly, rank, options)
        _same(data_parallel._train(lt.lean, rank, options), expected)
    dist.barrier()
    os._exit(0)  # gloo's threads now and then abort a process that ends in order


def test_data_parallel_training(tmp_path: Path) -> None:
    if not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    names = [name for _, name in socket.if_nameindex()]
    spawn(_work, args=(str(tmp_path), "lo" if "lo" in names else names[0]), nprocs=data_parallel.WORLD)


# --- arguments


class _Mode(Enum):
    SINE = 1
    COSINE = 2


@dataclass
class _Config:
    scale: float
    table: torch.Tensor


def test_arguments_of_every_kind() -> None:
    x, w = _leaf(4, 4), _leaf(4, 4, seed=1)

    def function(pair: tuple[Any, ...], *more: Any, table: dict[str, Any], part: slice, flag: bool = True) -> Any:
        x, (w, name) = pair
        y = (x @ w).sigmoid() * table["x"] * more[0]
        y = y[part].exp() * x[part]
        return {"y": y if flag else -y, "name": name, "pair": (y.sin(), None)}

    def run(call: Function, number: int) -> Any:
        result = call(
            function,
            (x, [w, "name"]),
            2.0,
            [None],
            table={"x": x, 1: object},
            part=slice(0, 2 + number % 2),
            flag=number > 1,
        )
        assert result["name"] == "name"
        return [result["y"], *torch.autograd.grad(result["pair"][0].sum() + result["y"].sum(), [x, w])]

    _both(run, calls=5)


@pytest.mark.parametrize(
    "value",
    [
        lambda k: float(k),
        lambda k: k + 1,
        lambda k: np.float64(k + 0.5),
        lambda k: np.int64(k + 1),
        lambda k: np.float32(k + 0.25),
        lambda k: complex(k + 1).real,
        lambda k: torch.tensor(k + 0.5),
        lambda k: -0.0 if k % 2 else 0.0,
    ],
)
def test_numbers_that_differ_from_call_to_call(value: Callable[[int], Any]) -> None:
    x = _leaf(5)

    def function(x: torch.Tensor, number: Any) -> torch.Tensor:
        _note()
        return torch.exp(x.sin() * number) * x

    def run(call: Function, number: int) -> Any:
        y = call(function, x, value(number))
        return [y, *torch.autograd.grad(y.sum(), x)]

    _both(run, calls=12)
    assert _traced.count(True) <= 2


def test_things_that_are_told_apart() -> None:
    x, table = _leaf(5), torch.ones(5)
    values = [
        _Mode.SINE,
        _Mode.COSINE,
        _Config(2.0, table),
        _Config(3.0, table),
        "word",
        "other",
        None,
        torch.sin,
        torch.cos,
    ]

    def function(x: torch.Tensor, thing: Any) -> torch.Tensor:
        _note()
        y = x.tanh()
        if isinstance(thing, _Mode):
            y = y.sin() if thing is _Mode.SINE else y.cos()
        elif isinstance(thing, _Config):
            y = y * thing.scale * thing.table
        elif callable(thing):
            y = thing(y)
        elif thing == "word":
            y = y.exp()
        return y.sigmoid() * y

    for thing in values * 3:
        y, z = function(x, thing), lt.lean(function, x, thing)
        _same([y, *torch.autograd.grad(y.sum(), x)], [z, *torch.autograd.grad(z.sum(), x)])


def test_arguments_that_share_memory_or_do_not() -> None:
    rows, other = _leaf(5, 40), _leaf(40, seed=1)

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        _note()
        return (a.sin() * b).exp() * b

    pairs = [(0, 0), (0, 1), (0, None), (1, 2), (3, 1), (2, 2), (None, None), (None, 3), (4, 4)]

    def run(call: Function, number: int) -> Any:
        a, b = (other if k is None else rows[k] for k in pairs[number])
        y = call(function, a, b) + 0 * (rows.sum() + other.sum())
        return [y, *torch.autograd.grad(y.sum(), [rows, other])]

    _both(run, calls=len(pairs))


def test_an_argument_that_is_a_parameter_or_is_not() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(_leaf(40).detach())
            self.other = self.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight.sin() * x).exp() * self.other

    module, x = Scaled(), _leaf(40, seed=1)

    def run(call: Function, number: int) -> Any:
        if number == 4:
            module.other = nn.Parameter(_leaf(40, seed=2).detach())
        y = call(module, module.weight if number in (0, 3) else x) + 0 * x
        return [y, *torch.autograd.grad(y.sum(), [module.weight, x])]

    _both(run, calls=6)


def test_a_global_tensor_in_another_layout() -> None:
    x = _leaf(8, 8)

    def run(call: Function, number: int) -> Any:
        _globals["weight"] = torch.randn(8, 8) if number != 1 else torch.randn(8, 8).t()
        y = call(_reads_a_global, x)
        return [y, *torch.autograd.grad(y.sum(), x)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may say that it keeps everything
        _both(run)


_globals: dict[str, torch.Tensor] = {}


def _reads_a_global(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * _globals["weight"]).exp() * _globals["weight"] * x


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nested_tensors_are_left_alone() -> None:
    x = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], requires_grad=True)
    for _ in range(2):
        assert lt.lean(lambda x: x.sin() * x, x).is_nested


def test_rows_of_one_tensor_share_a_trace() -> None:
    rows, w = _leaf(6, 40), _leaf(40, seed=1)

    def function(x: torch.Tensor) -> torch.Tensor:
        _note()
        return (x * w * x.sin()).exp() * x

    def run(call: Function, number: int) -> Any:
        y = call(function, rows[number])
        return [y, *torch.autograd.grad(y.sum(), [rows, w])]

    _both(run, calls=6)
    assert _traced.count(True) == 1


# --- traces


class _Counting(nn.Module):
    """Its numbers change with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.temperature = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _note()
        self.calls += 1
        self.temperature *= 0.9
        return (x.sin() / self.temperature).exp() * x.sigmoid()


def test_a_module_whose_numbers_change_with_each_call() -> None:
    plain, lean, x = _Counting(), lt.Lean(_Counting()), _leaf(5)
    for _ in range(30):
        y, z = plain(x), lean(x)
        _same([y, *torch.autograd.grad(y.sum(), x)], [z, *torch.autograd.grad(z.sum(), x)])
    assert lean.calls == 30
    assert _traced.count(True) <= 3


class _Stateful(nn.Module):
    """Its state is nothing at first, then a tensor: a leaky neuron."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, generator=torch.Generator().manual_seed(0)))
        self.v: Any = 0.0
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _note()
        self.v = self.v * 0.5 + x * self.weight
        spike = (self.v > 0.3).float()
        self.last = last = torch.sigmoid(self.v)
        return torch.sub(spike, last).detach() + last * x.exp()


def test_a_module_with_a_state_of_its_own() -> None:
    plain, module, x = _Stateful(), _Stateful(), _leaf(6)
    y, z = torch.zeros(6), torch.zeros(6)
    for _ in range(8):
        y, z = y + plain(x), z + lt.lean(module, x)
    _same([y, *torch.autograd.grad(y.sum(), [x, plain.weight])], [z, *torch.autograd.grad(z.sum(), [x, module.weight])])
    assert _traced[1::2].count(True) <= 3


def test_a_state_is_not_held_on_to() -> None:
    module, x = _Stateful(), _leaf(6)
    for _ in range(4):
        lt.lean(module, x)
    old = weakref.ref(module.v)
    module.v, module.last = 0.0, None
    assert old() is None


def test_functions_made_anew_for_each_call_are_traced_once() -> None:
    x, w = _leaf(5), _leaf(5, seed=1)
    before = len(lean_module._kinds)
    for number in range(40):
        k = number + 0.5

        def run(call: Function, k: float = k) -> Any:
            y = call(lambda x: _noted((x.sin() * k).exp() * w), x)
            return [y, *torch.autograd.grad(y.sum(), [x, w])]

        _same(run(lt.lean), run(_plainly))
    assert _traced.count(True) <= 2
    assert len(lean_module._kinds) <= before + 1


def test_numbers_in_default_arguments() -> None:
    x = _leaf(5)

    def run(call: Function, number: int) -> Any:
        def function(
            x: torch.Tensor, k: float = number + 0.5, *, table: tuple[torch.Tensor, ...] = (x,)
        ) -> torch.Tensor:
            _note()
            return (x.sin() * k).exp() * table[0]

        y = call(function, x)
        return [y, *torch.autograd.grad(y.sum(), x)]

    _both(run, calls=5)
    assert _traced.count(True) <= 2


def test_functions_that_call_each_other_and_themselves() -> None:
    x = _leaf(5)

    def even(x: torch.Tensor, n: int) -> torch.Tensor:
        return (x * 2).sigmoid() * x if n == 0 else odd(x.sin(), n - 1)

    def odd(x: torch.Tensor, n: int) -> torch.Tensor:
        return even(x.exp() * x, n - 1)

    def run(call: Function, number: int) -> Any:
        y = call(even, x, 4)
        return [y, *torch.autograd.grad(y.sum(), x)]

    _both(run)


class _Own:
    """An object that is no module."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.weight = _leaf(5, seed=4)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ((x.sin() * self.weight) * self.scale).exp() * x

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


def test_objects_of_ones_own_are_told_apart() -> None:
    x, first, second = _leaf(5), _Own(1.0), _Own(2.0)

    def run(call: Function, number: int) -> Any:
        own = first if number % 2 else second
        ways: list[Function] = [own, own.method, lambda x: own(x), functools.partial(own.method)]
        y = sum(call(way, x) for way in ways)
        return [y, *torch.autograd.grad(y.sum(), [x, own.weight])]

    _both(run, calls=4)


def test_equal_code_with_other_globals() -> None:
    x, functions = _leaf(5), []
    for scale in (2.0, 3.0):
        names = {"SCALE": scale}
        exec("def function(x):\n    return (x.sin() * SCALE).exp() * x\n", names)
        functions.append(names["function"])

    def run(call: Function, number: int) -> Any:
        y = call(functions[number % 2], x)
        return [y, *torch.autograd.grad(y.sum(), x)]

    _both(run, calls=4)


def test_a_module_that_is_gone_leaves_nothing() -> None:
    class Bound(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.act = self.own

        def own(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).exp() * x

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(x)

    x, before = _leaf(3), len(lean_module._kinds)
    references = []
    for _ in range(5):
        module = Bound()
        for _ in range(2):
            lt.lean(module, x).sum().backward()
        references.append(weakref.ref(module))
        del module
        gc.collect()
    assert [reference() for reference in references] == [None] * 5
    assert len(lean_module._kinds) <= before + 1


def test_attributes_come_and_go() -> None:
    module, x = _Gate().eval(), _leaf(4, 6)
    module.first = 1.0  # type: ignore[assignment]
    for change in ("", "other", "child", "none"):
        if change == "other":
            del module.first
            module.second = 2.0  # type: ignore[assignment]
        if change == "child":
            module.norm = nn.LayerNorm(6, elementwise_affine=False)
        if change == "none":
            module.drop = nn.Identity()  # type: ignore[assignment]
        for _ in range(2):
            _same(_step(functools.partial(lt.lean, module), x, [module.weight]), _step(module, x, [module.weight]))


# --- numbers about it


def test_the_frontier_of_a_function() -> None:
    x, w = _leaf(32, 32), _leaf(32, 32, seed=1)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(x @ w) * x
        return (y.exp() * y).sin().tanh() @ w

    points = lt.lean_frontier(function, x, w)
    assert points == lt.lean_frontier(function, x, w)  # it is not traced again
    assert all(a.tape > b.tape and a.seconds < b.seconds for a, b in pairwise(points))
    assert points[0].tape <= points[0].plain_tape
    assert not points[0].again
    assert points[0].seconds == 0
    assert all(point.again for point in points[1:])
    assert "tape" in str(points[-1])
    assert "sigmoid" in str(points[-1])
    with torch.no_grad():
        assert lt.lean_frontier(function, x, w)[0].plain_tape == points[0].plain_tape
    for point in points:
        y = lt.lean(function, x, w, tape=point.tape)
        _same(torch.autograd.grad(y.sum(), [x, w]), torch.autograd.grad(function(x, w).sum(), [x, w]))
