"""`Lean` is a module like any other: its parameters, its `state_dict` and its training are those of the one inside."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import lowtide.torch as lt
from lowtide.torch.state.bits import same_bits
from tests.torch.calls import Function, drawn_leaf, plainly, same
from tests.torch.lean.calls import Gate, both, step, traced


@pytest.fixture(autouse=True)
def _afresh() -> None:
    traced.clear()


def test_it_has_what_the_module_has() -> None:
    module = Gate()
    lean = lt.Lean(module)
    for names in ("named_parameters", "named_buffers"):
        assert [name for name, _ in getattr(lean, names)()] == [name for name, _ in getattr(module, names)()]
    assert list(lean.state_dict()) == list(module.state_dict()) == ["weight", "shift", "norm.weight", "norm.bias"]
    assert all(a is b for a, b in zip(lean.parameters(), module.parameters(), strict=True))
    assert lean.norm is module.norm
    assert lean.weight is module.weight
    assert "tape=None" in repr(lean)
    assert "Gate" in repr(lean)
    assert repr(lt.Lean(module, tape="50%")).count("50%") == 1
    with pytest.raises(AttributeError):
        _ = lean.nothing


def test_state_is_loaded_and_saved() -> None:
    module, other = Gate(), Gate()
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
    Gate().load_state_dict(torch.load(file))
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
    plain = nn.Sequential(Gate(), nn.Linear(6, 6))
    lean = nn.Sequential(lt.Lean(plain[0]), plain[1])
    assert list(lean.state_dict()) == list(plain.state_dict())
    x = drawn_leaf(4, 6)
    for _ in range(3):
        same(step(lean, x, plain.parameters()), step(plain, x, plain.parameters()))


def test_training_and_evaluation() -> None:
    module = Gate()
    lean, x = lt.Lean(module), drawn_leaf(4, 6)
    for mode in (True, False, True, False):
        lean.train(mode)
        assert module.training is module.drop.training is lean.training is mode
        same(step(lean, x, module.parameters()), step(copy.deepcopy(module), x, ())[:2] + _grads(module, x))
    assert lean.eval() is lean
    assert not module.training


def _grads(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return step(module, x, module.parameters())[2:]


def test_another_dtype_is_traced_anew() -> None:
    module = Gate()
    lean, plain = lt.Lean(module), copy.deepcopy(module)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
        lean.to(dtype)
        plain.to(dtype)
        x = drawn_leaf(4, 6, dtype=dtype)
        for _ in range(2):
            same(step(lean, x, lean.parameters()), step(plain, x, plain.parameters()))


def test_parameters_of_another_dtype_shape_or_layout_are_traced_anew() -> None:
    index = torch.tensor([0, 2, 1])
    embedding = nn.Embedding(3, 4)
    module = nn.Sequential(embedding, nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid())
    with lt.record(memory=False) as receipt:
        for dtype in (torch.float32, torch.float64):
            module.to(dtype)
            for _ in range(2):
                expected = torch.autograd.grad(module(index).sum(), list(module.parameters()))
                same(torch.autograd.grad(lt.lean(module, index).sum(), list(module.parameters())), expected)
        module[2] = nn.Linear(4, 7, dtype=torch.float64)
        embedding.weight = nn.Parameter(embedding.weight.detach().t().contiguous().t())
        for _ in range(2):
            expected = torch.autograd.grad(module(index).sum(), list(module.parameters()))
            same(torch.autograd.grad(lt.lean(module, index).sum(), list(module.parameters())), expected)
    assert receipt.kept_whole == 0


@pytest.mark.filterwarnings("ignore:Scaled did not save what it saved")  # until it is traced anew
def test_parameters_in_another_memory_format() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 3, 4, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight.exp() * x).sin()

    module, x = Scaled(), drawn_leaf(2, 3, 4, 5)

    def run(call: Function, number: int) -> Any:
        if number == 2:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # its stub lacks it
        y = call(module, x)
        return [y, *torch.autograd.grad(y.sum(), [x, module.weight])]

    both(run, calls=4)


def test_copies_and_pickles_are_modules_of_their_own() -> None:
    lean, x = lt.Lean(Gate(), tape="60%"), drawn_leaf(4, 6)
    expected = step(lean, x, lean.parameters())
    for other in (copy.deepcopy(lean), pickle.loads(pickle.dumps(lean))):
        assert other.tape == "60%"
        assert other.weight is not lean.weight
        assert other.weight is other._module.weight
        same(step(other, x, other.parameters()), expected)
        with torch.no_grad():
            other.weight.zero_()
        assert not same_bits(other(x), expected[0])


@pytest.mark.parametrize("number", range(3))
def test_switching_gradients_on_and_off(number: int) -> None:
    module, x = Gate(), drawn_leaf(4, 6)
    lean, parameters = lt.Lean(module), list(module.parameters())
    for wanted in (True, False, True):
        parameters[number].requires_grad_(wanted)
        some = [parameter for parameter in parameters if parameter.requires_grad]
        for _ in range(2):
            same(step(lean, x, some), step(module, x, some))
    assert traced.count(True) == 2  # once for each


def test_without_gradients_it_is_a_plain_call() -> None:
    module, x = Gate(), drawn_leaf(4, 6)
    with torch.no_grad():
        lt.Lean(module)(x)
    with torch.inference_mode():
        lt.Lean(module)(x)
    assert traced == [False, False]
    assert lt.lean(lambda x: x + 1, 2) == 3


def test_nothing_that_wants_a_gradient() -> None:
    for _ in range(2):
        y = lt.lean(lambda x: x.exp() * x, torch.ones(3))
        assert not y.requires_grad


def test_an_optimizer_trains_it() -> None:
    plain = Gate()
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
    same(losses[5:], losses[:5])
    same(list(lean.parameters()), list(plain.parameters()))


def test_statistics_are_counted_once() -> None:
    modules = [nn.Sequential(nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    lean, x = lt.Lean(modules[1]), drawn_leaf(7, 5)
    for _ in range(3):
        same(step(lean, x, modules[1].parameters()), step(modules[0], x, modules[0].parameters()))
        same(list(lean.state_dict().values()), list(modules[0].state_dict().values()))


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
    given = [drawn_leaf(*shape, seed=k) for k, shape in enumerate(shapes)]
    for number in range(3):
        outcomes = []
        for call, one in ((plainly, plain), (lt.lean, module)):
            torch.manual_seed(number)
            y = call(one, *given)
            y = y[0] if isinstance(y, tuple) else y
            grads = torch.autograd.grad(y.square().sum(), [*given, *one.parameters()])
            outcomes.append([y, *grads, *one.state_dict().values()])
        same(*outcomes)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_modules_without_a_shape_yet() -> None:
    module = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Softplus())
    lean, x = lt.Lean(module), drawn_leaf(2, 5)
    for _ in range(3):
        y, z = lean(x), module(x)
        same([y, *torch.autograd.grad(y.sum(), x)], [z, *torch.autograd.grad(z.sum(), x)])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules() -> None:
    module = torch.jit.trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4))
    x = drawn_leaf(2, 4)
    for _ in range(3):
        y, z = lt.lean(module, x), module(x)
        same([y, *torch.autograd.grad(y.sum(), x)], [z, *torch.autograd.grad(z.sum(), x)])


def test_a_lean_module_of_a_lean_module() -> None:
    module, x = Gate(), drawn_leaf(4, 6)
    lean = lt.Lean(lt.Lean(module))
    assert list(lean.state_dict()) == list(module.state_dict())
    for mode in (False, True):
        lean.train(mode)
        assert module.training is module.drop.training is mode
        same(step(lean, x, module.parameters()), step(module, x, module.parameters()))


def test_state_is_loaded_where_it_is_inside_another() -> None:
    gate = Gate()
    module, other = nn.Sequential(lt.Lean(Gate())), nn.Sequential(gate)
    with torch.no_grad():
        gate.weight.mul_(2)
    module.load_state_dict(other.state_dict())
    same(list(module.state_dict().values()), list(other.state_dict().values()))


def test_one_that_has_no_module_yet_has_nothing() -> None:
    with pytest.raises(AttributeError):
        _ = lt.Lean.__new__(lt.Lean).anything


class _Sometimes(nn.Module):
    """One of two layers, by a draw that its tape does not show: they are alike but for their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU()) for _ in range(2))
        for number, parameter in enumerate(self.parameters()):
            nn.init.normal_(parameter, std=0.5 + number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers[random.random() < 0.5](x)
        return y


@pytest.mark.filterwarnings("ignore:.* did not save what it saved")
@pytest.mark.parametrize("call", [lt.lean, lambda net, x: lt.sequential([net, torch.sin], x)])
def test_a_layer_that_is_drawn_is_the_one_that_is_taken_back(call: Function) -> None:
    net = _Sometimes()

    def run(call: Function) -> list[Any]:
        random.seed(3)
        rows = []
        for number in range(12):
            x = drawn_leaf(4, 6, seed=number)
            gradients = torch.autograd.grad(call(net, x).sum(), [x, *net.parameters()], allow_unused=True)
            rows += list(gradients)
        return rows

    same(run(call), run(plainly if call is lt.lean else lambda net, x: net(x).sin()))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_tape_that_was_planned_for_one_way_need_not_exist_for_another() -> None:
    def repeated(x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            x = (x * 2).sin().exp()
        return x

    size = lt.lean_frontier(repeated, drawn_leaf(50), 1)[-1].size

    def run(call: Function) -> list[Any]:
        x = drawn_leaf(50)
        return [torch.autograd.grad(call(repeated, x, times).sum(), x)[0] for times in (1, 3, 1, 3)]

    same(run(lambda *args: lt.lean(*args, tape=size)), run(plainly))


class _Tied(nn.Module):
    """Two parameters that are one tensor until they are parted. What `b` enters saves nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(40, generator=torch.Generator().manual_seed(1)))
        self.b = self.a

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp((x * self.a).sin() + self.b) * x


def test_parameters_that_were_one_tensor_are_parted() -> None:
    net, x = _Tied(), drawn_leaf(40)

    def agree() -> None:
        outcomes = [torch.autograd.grad(call(net, x).sum(), [x, net.a, net.b]) for call in (plainly, lt.lean)]
        same(*outcomes)

    for _ in range(2):
        agree()
    net.b = nn.Parameter(net.a.detach() * 2)
    for _ in range(2):
        agree()


@pytest.mark.filterwarnings("error")
def test_a_hook_that_comes_and_goes_is_traced_anew() -> None:
    net, x = nn.Sequential(nn.Linear(40, 40), nn.SiLU(), nn.Tanh()), drawn_leaf(3, 40)

    def agree() -> None:
        for _ in range(2):
            same(*(torch.autograd.grad(call(net, x).sum(), [x, *net.parameters()]) for call in (plainly, lt.lean)))

    with lt.record(memory=False) as receipt:
        agree()
        hook = net[1].register_forward_hook(lambda _, __, y: y.exp() * y)
        agree()
        hook.remove()
        agree()
    assert receipt.kept_whole == 0
