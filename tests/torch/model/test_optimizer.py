"""What optimizers hold and need, told on paper, against real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import _foreach_supported_types
from transformers.optimization import Adafactor

from lowtide.errors import InputError
from lowtide.torch.memory.tracker import Log, storage_bytes, watching
from lowtide.torch.model.optimizer import OptimizerCost, optimizer_cost

Make = Callable[[list[nn.Parameter]], optim.Optimizer]


def _group(parameters: list[nn.Parameter], decay: float) -> dict[str, Any]:
    return {"params": parameters, "weight_decay": decay}


OPTIMIZERS: dict[str, Make] = {
    "Adam": lambda p: optim.Adam(p),
    "AdamW foreach": lambda p: optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: optim.AdamW(p, fused=True),
    "AdamW amsgrad": lambda p: optim.AdamW(p, amsgrad=True),
    "AdamW lr": lambda p: optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "AdamW groups": lambda p: optim.AdamW([_group(p[:2], 0.1), _group(p[2:], 0.0)]),
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD nesterov foreach": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "RMSprop": lambda p: optim.RMSprop(p, momentum=0.9, centered=True),
    "Adagrad": lambda p: optim.Adagrad(p),
    "Adadelta": lambda p: optim.Adadelta(p),
    "Adamax": lambda p: optim.Adamax(p),
    "NAdam": lambda p: optim.NAdam(p),
    "RAdam": lambda p: optim.RAdam(p),  # takes more room from its sixth step on
    "ASGD": lambda p: optim.ASGD(p),
    "Rprop": lambda p: optim.Rprop(p),
    "Adafactor": lambda p: optim.Adafactor(p),  # reads the norm of each parameter
    "Adafactor foreach": lambda p: optim.Adafactor(p, foreach=True),
    "Muon": lambda p: optim.Muon([each for each in p if each.dim() == 2]),
    "transformers Adafactor": lambda p: Adafactor(p),  # compares it
    "transformers Adafactor momentum": lambda p: Adafactor(p, beta1=0.9),
    "transformers Adafactor fixed": lambda p: Adafactor(p, lr=1e-3, relative_step=False, scale_parameter=False),
}
# These are like others above them.
_RARE = {"AdamW amsgrad", "SGD nesterov foreach", "SGD fused", "Adadelta", "Adamax", "NAdam", "ASGD", "Rprop"}
_RARE |= {"Adafactor foreach", "transformers Adafactor fixed", "transformers Adafactor momentum", "SGD"}
CASES = [pytest.param(name, marks=pytest.mark.slow if name in _RARE else ()) for name in OPTIMIZERS]


def network(device: str = "cpu") -> nn.Module:
    """Of matrices, vectors and a filter; one of them needs no gradient."""
    with torch.device(device):
        model = nn.Sequential(nn.Linear(40, 300), nn.LayerNorm(300), nn.Conv1d(4, 5, 3), nn.Linear(300, 7))
    model[1].bias.requires_grad_(False)
    return model


def parameters(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def take_steps(optimizer: optim.Optimizer, count: int) -> None:
    for _ in range(count):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
        optimizer.step()


def state_of(optimizer: optim.Optimizer) -> list[torch.Tensor]:
    rows = optimizer.state.values()
    return [value for row in rows for value in row.values() if isinstance(value, torch.Tensor)]


def measured(optimizer: optim.Optimizer) -> OptimizerCost:
    """What a step takes of an optimizer that has taken some."""
    log = Log()
    list(map(log.see, state_of(optimizer)))
    mark = len(log.events)
    with watching(log):
        optimizer.step()
    return OptimizerCost(storage_bytes(state_of(optimizer)), log.level(mark, len(log.events))[1])


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_a_real_optimizer(name: str) -> None:
    make = OPTIMIZERS[name]
    optimizer = make(parameters(network()))
    fresh = optimizer_cost(optimizer, [])
    assert fresh == optimizer_cost(make, parameters(network("meta")))
    take_steps(optimizer, 6)
    held = [tensor.clone() for tensor in state_of(optimizer)]
    used = optimizer_cost(optimizer, [])
    assert all(torch.equal(old, new) for old, new in zip(held, state_of(optimizer), strict=True))
    real = measured(optimizer)
    assert fresh == used == real
    if name != "SGD":
        assert real.state > 0


@pytest.mark.parametrize("name", ["Adam", "SGD momentum", "Adagrad", "Rprop", "Muon", "transformers Adafactor"])
def test_on_a_card_the_state_is_the_same(name: str) -> None:
    model = network("meta")
    here, there = (optimizer_cost(OPTIMIZERS[name], parameters(model), device) for device in (None, "cuda"))
    on_host = {"Adam": _counts_of_steps(model), "Adagrad": 4 * len(list(model.parameters()))}
    assert here.state == there.state + on_host.get(name, 0)


def _counts_of_steps(model: nn.Module) -> int:
    """The bytes of a number for each parameter, which some optimizers keep on the host."""
    return 4 * sum(parameter.requires_grad for parameter in model.parameters())


def test_on_a_card_all_parameters_are_taken_at_once() -> None:
    model = network("meta")
    there = optimizer_cost(optim.AdamW, parameters(model), "cuda")
    needing = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert there.transient == storage_bytes(needing)
    here = optimizer_cost(OPTIMIZERS["AdamW foreach"], parameters(model))
    assert there == here._replace(state=here.state - _counts_of_steps(model))
    assert FakeTensor not in _foreach_supported_types


def test_a_class_or_a_function_makes_the_optimizer() -> None:
    model = network("meta")
    frozen = lambda p: optim.Adam([each for each in p if each.requires_grad])  # noqa: E731
    assert optimizer_cost(optim.Adam, parameters(model)) == optimizer_cost(frozen, parameters(model))


def test_the_optimizer_is_left_alone() -> None:
    model = network()
    optimizer = optim.AdamW(parameters(model))
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)  # puts a step of its own on the optimizer
    before = {name: id(value) for name, value in vars(optimizer).items()}
    values = [parameter.clone() for parameter in model.parameters()]
    optimizer_cost(optimizer, [])
    assert {name: id(value) for name, value in vars(optimizer).items()} == before
    assert not optimizer.state
    assert not calls
    assert all(torch.equal(old, new) for old, new in zip(values, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    take_steps(optimizer, 1)
    scheduler.step()
    assert calls == ["hook"]


def test_an_optimizer_in_another_is_left_alone_too() -> None:
    class Around(optim.Optimizer):
        def __init__(self, inner: optim.Optimizer) -> None:
            self.inner = inner
            self.sizes = (1, 2)

        @property
        def param_groups(self) -> Any:  # type: ignore[override]
            return self.inner.param_groups

        @property
        def state(self) -> Any:  # type: ignore[override]
            return self.inner.state

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    inner = optim.Adam(parameters(network()))
    assert optimizer_cost(Around(inner), []) == optimizer_cost(inner, [])
    assert not inner.state


class Odd(optim.Optimizer):
    """Does what it is told with each gradient."""

    def __init__(self, params: Any, act: Callable[[torch.Tensor, dict[str, Any]], Any]) -> None:
        super().__init__(params, {})
        self.act = act

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.act(parameter.grad, self.state[parameter])


def test_where_a_step_asks_yes_or_no_the_dearer_answer_counts() -> None:
    def more(gradient: torch.Tensor, state: dict[str, Any]) -> None:
        if gradient.sum() > 0:
            state["more"] = gradient.clone()

    def less(gradient: torch.Tensor, state: dict[str, Any]) -> None:
        if not gradient.isfinite().all():
            return
        state["more"] = [gradient.clone()]

    for act in (more, less):
        cost = optimizer_cost(Odd([nn.Parameter(torch.zeros(10))], act), [])
        # Each step makes a new one before it lets go of the old.
        assert cost.state == 40
        assert cost.transient >= 40


def test_whole_numbers_are_read_as_one() -> None:
    def act(gradient: torch.Tensor, state: dict[str, Any]) -> None:
        state["rows"] = torch.zeros(int(gradient.argmax()), 5)

    assert optimizer_cost(Odd([nn.Parameter(torch.zeros(10))], act), []).state == 20


def test_a_step_with_a_closure_is_refused() -> None:
    with pytest.raises(InputError, match=r"LBFGS runs the model itself.*optimizer=None"):
        optimizer_cost(optim.LBFGS, parameters(network()))


@pytest.mark.parametrize("device", [None, "cuda"])
def test_a_step_that_cannot_be_taken_on_paper_is_refused(device: str | None) -> None:
    with pytest.raises(InputError, match=r"SparseAdam cannot take a step on paper.*dense.*optimizer=None"):
        optimizer_cost(optim.SparseAdam(parameters(network())), [], device)


@pytest.mark.parametrize(("wrong", "message"), [("adam", "is a str"), (lambda p: p, "makes a list")])
def test_other_things_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        optimizer_cost(wrong, parameters(network()))
