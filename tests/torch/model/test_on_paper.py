"""Whole models planned on paper: the least peak is that of a real plan, and nothing is allocated."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

import lowtide.torch as lt
from lowtide.errors import BudgetError, InputError
from tests.torch.models import MODELS, model

WIDTH = 32
MEMORY = Path("/proc/self/statm")


class Case(NamedTuple):
    """A model, and what it is called with."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}  # noqa: RUF012  (nobody changes it)
    loss: Callable[[Any], torch.Tensor] | None = None


def squared(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.narrow(functional.gelu(self.wide(self.norm(x))))
        return y


class Row(nn.Module):
    """Layers, one after the other."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Dense(nn.Module):
    """A layer that is given all that came before."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, 8, 3, padding=1)

    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.conv(functional.relu(self.norm(torch.cat(xs, 1)))), 0.1, self.training)


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Dense(8 * (k + 1)) for k in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        xs = [x]
        for layer in self.layers:
            xs.append(layer(*xs))
        return torch.cat(xs, 1).mean()


class Keeps(Layer):
    """Keeps something for the loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.kept = y.square().mean()
        return y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.outer(self.inner(x)[0])
        return y


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x))
        y += x
        result: torch.Tensor = self.relu(y)
        return result


def _mixed() -> Case:
    """Some layers in eval mode."""
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(), nn.Linear(WIDTH, WIDTH))
        for _ in range(4)
    ]
    model = Row([*layers]).train()
    for layer in layers[:2]:
        layer.eval()
    return Case(model, (torch.randn(200, WIDTH),), loss=squared)


def _keeping() -> Case:
    model = Row([Keeps() for _ in range(4)])
    kept: list[Any] = list(model.layers)
    return Case(model, (torch.randn(200, WIDTH),), loss=lambda y: squared(y) + sum(layer.kept for layer in kept))


ODD: dict[str, Callable[[], Case]] = {
    "dense": lambda: Case(DenseNet(), (torch.randn(4, 8, 16, 16),)),
    "some in eval mode": _mixed,
    "keeps for the loss": _keeping,
    "lstm": lambda: Case(Row([Recurrent() for _ in range(2)]), (torch.randn(8, 16, WIDTH),), loss=squared),
    "in place": lambda: Case(Row([InPlace() for _ in range(3)]), (torch.randn(4, 8, 16, 16),), loss=squared),
}


def made(name: str) -> Case:
    torch.manual_seed(0)
    if name in ODD:
        return ODD[name]()
    made = model(name)
    return Case(made.module, kwargs=made.kwargs)


def least(case: Case, **options: Any) -> int:
    """The least peak that works, as the error says."""
    with pytest.raises(BudgetError) as caught:
        lt.plan_model(case.model, *case.args, peak=1, loss=case.loss, **options, **case.kwargs)
    return caught.value.least


QUICK = ("gpt2", "dense", "some in eval mode", "lstm")


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in (*MODELS, *ODD)]
)
def test_the_least_peak_is_that_of_a_real_plan(name: str) -> None:
    case = made(name)
    paper, real = least(case, on_paper=True), least(case)
    assert real <= paper <= 1.06 * real  # the margin is a part of it
    # What it names works, and so does what is planned on paper.
    plan = lt.plan_model(case.model, *case.args, peak=paper, loss=case.loss, on_paper=True, **case.kwargs)
    assert plan.bill.peak_memory <= paper


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(MEMORY.read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.long
@pytest.mark.skipif(not MEMORY.exists(), reason="reads the memory of a process as Linux tells it")
def test_gpt2_is_planned_without_its_weights() -> None:
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
        model.loss_type = "ForCausalLM"
        words = torch.zeros(1, 256, dtype=torch.long)
    before = resident()
    plan = lt.plan_model(
        model.train(),
        input_ids=words,
        labels=words,
        use_cache=False,
        peak="1.5GB",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        on_paper=True,
    )
    gc.collect()
    assert resident() - before < 150 * 2**20
    assert plan.chain.parameters == 4 * 124_439_808
    assert sum(name.startswith("transformer.h.") for name in plan.chain.names) == 12
    assert plan.bill.peak_memory < 1.5e9
    assert all(parameter.is_meta for parameter in model.parameters())


# --- what it may be given


def row() -> Row:
    torch.manual_seed(0)
    return Row([Layer() for _ in range(3)])


DEVICE = lt.Device(name="mine", memory=10**9, bandwidth=1e11, float32=1e12, float16=2e12, float64=1e11)


@pytest.mark.long
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_models_and_arguments_may_be_anywhere(where: str) -> None:
    expected = least(Case(row(), (torch.randn(100, WIDTH),), loss=squared), on_paper=True, device=DEVICE)
    for place in ("cpu", "meta"):
        case = Case(row().to(where), (torch.empty(100, WIDTH, device=place),), loss=squared)
        assert least(case, on_paper=True, device=DEVICE) == expected


@pytest.mark.long
def test_an_optimizer_may_be_made_or_not() -> None:
    def least_with(**options: Any) -> int:
        return least(Case(model, (x,), loss=squared), on_paper=True, **options)

    model, x = row(), torch.randn(100, WIDTH)
    size = sum(parameter.nbytes for parameter in model.parameters())
    adam = least_with(optimizer=torch.optim.AdamW)
    assert adam == least_with(optimizer=torch.optim.AdamW(model.parameters()))
    assert adam >= least_with() + 2 * size
    with pytest.raises(InputError, match="optimizer is a str"):
        least_with(optimizer="adam")


@pytest.mark.long
def test_half_precision_takes_half() -> None:
    whole, half = (
        least(Case(row().to(dtype), (torch.randn(100, WIDTH, dtype=dtype),), loss=squared), on_paper=True)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert half == pytest.approx(whole / 2, rel=0.02)


@pytest.mark.long
def test_tied_and_frozen_parameters_count_once_and_have_no_gradients() -> None:
    model = row()
    first, second, third = (layer for layer in model.layers if isinstance(layer, Layer))
    size = first.wide.weight.nbytes
    plain = lt.plan_model(model, torch.randn(9, WIDTH), peak="1GB", loss=squared, on_paper=True).chain
    second.wide.weight = first.wide.weight
    third.wide.weight.requires_grad_(False)
    chain = lt.plan_model(model, torch.randn(9, WIDTH), peak="1GB", loss=squared, on_paper=True).chain
    assert (plain.parameters - chain.parameters, plain.gradients - chain.gradients) == (size, 2 * size)


class Looks(Layer):
    """Goes another way for other values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.mean() > 0 else x


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (row, {"device": "v100"}, "device='v100' is not known; give one of h100, a100, rtx4090, or a Device"),
        (row, {"device": 3}, "device=3 is not known"),
        (row, {"peak": "much"}, "peak"),
        (lambda: Row([Layer(), Looks()]), {}, r"layers\.1 \(Looks\), line \d+ of test_on_paper.py, looks at values"),
        (lambda: Row([nn.LazyLinear(3)]), {}, "is not initialised"),
    ],
    ids=["unknown device", "no device", "peak", "looks at values", "lazy"],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_what_cannot_be_planned_is_said(make: Callable[[], nn.Module], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        lt.plan_model(make(), torch.randn(9, WIDTH), loss=squared, on_paper=True, **{"peak": "1GB"} | options)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_sparse_and_quantized_tensors_are_refused() -> None:
    sparse = torch.eye(WIDTH).to_sparse()
    quantized = torch.quantize_per_tensor(torch.randn(9, WIDTH), 0.1, 0, torch.qint8)
    for x in (sparse, quantized):
        with pytest.raises(InputError, match="cannot be had on paper; plan it without on_paper"):
            lt.plan_model(row(), x, peak="1GB", loss=squared, on_paper=True)
