"""The largest batch within a peak: it fits when measured, and a tenth more does not."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide import BudgetError, InputError
from lowtide.torch import measure
from lowtide.torch.memory.tracker import tensors_of
from lowtide.torch.model import batches
from tests.torch.models import MODELS, Size


def _measured(model: nn.Module, batch: dict[str, Any], optimizer: torch.optim.Optimizer) -> int:
    """Bytes at the worst moment of a second step."""
    for _ in range(2):
        state = [value for values in optimizer.state.values() for value in values.values()]
        held = [*model.parameters(), *model.buffers(), *tensors_of(batch), *tensors_of(state)]
        before = measure.storage_bytes(held)
        with measure.peak() as memory:
            output = model(**batch)
            output.loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        del output
    return before + memory.peak


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "layers", "peak"), [pytest.param("gpt2", 2, "700KB", marks=pytest.mark.slow), ("resnet", 1, 1_000_000)]
)
def test_it_fits_when_measured_and_a_tenth_more_does_not(
    name: str, layers: int, peak: int | str, record_property: Callable[[str, object], None]
) -> None:
    torch.manual_seed(0)
    model = MODELS[name](Size(layers=layers)).module.train()
    optimizer = torch.optim.AdamW(model.parameters())

    def make_batch(size: int) -> dict[str, Any]:
        return MODELS[name](Size(layers=layers, batch=size)).kwargs

    found = lt.largest_batch(model, make_batch, peak, optimizer=optimizer)
    asked = found.plan.knob.value
    assert asked is not None
    lt.apply(found.plan, model)
    measured = _measured(model, make_batch(found.size), optimizer)
    assert measured <= asked
    with pytest.raises(BudgetError, match="no plan fits peak"):
        lt.plan_model(model, peak=peak, optimizer=optimizer, **make_batch(-(-found.size * 11 // 10)))
    record_property("figure", f"{name} within {asked:,} B: {found.size} examples, measured {measured:,} B")


class _Reading(nn.Module):
    """Looks at values, so that nothing can be foretold on paper."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of what the blocks make of it."""
        for block in self.blocks:
            x = block(x) if x.sum().item() < 1e9 else x
        return x.mean()


FORMS: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x,
    lambda x: (x,),
    lambda x: [x],
    lambda x: {"x": x},
    lambda x: UserDict(x=x),
]


FORM_CASES = FORMS


@pytest.mark.parametrize("form", FORM_CASES)
def test_batches_of_every_form_and_models_that_look_at_values(form: Callable[[torch.Tensor], Any]) -> None:
    model = _Reading()
    found = lt.largest_batch(model, lambda size: form(torch.randn(size, 8)), "64KiB")
    assert found.size > 20
    assert found.plan.bill.peak_memory <= 64 * 1024


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 8), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Statistics of one example are none."""
        out: torch.Tensor = self.row(x).mean()
        return out


@pytest.mark.long
def test_models_that_need_more_than_one_example_and_batches_that_are_filled_up() -> None:
    assert lt.largest_batch(_Normed(), lambda size: torch.randn(size, 8), "64KiB").size > 20
    found = lt.largest_batch(_Reading(), lambda size: torch.randn(-(-size // 16) * 16, 8), "64KiB")
    assert found.size > 20
    with pytest.raises(ValueError, match="of no size"):
        lt.largest_batch(_Reading(), _raises, "64KiB")


def _raises(_: int) -> Any:
    raise ValueError("of no size")


def test_what_cannot_be_used() -> None:
    model = _Reading()
    with pytest.raises(BudgetError, match="a batch of 1 does not fit"):
        lt.largest_batch(model, lambda size: torch.randn(size, 8), 100)
    with pytest.raises(InputError, match="let make_batch make as many as it is asked for"):
        lt.largest_batch(model, lambda _: torch.randn(3, 8), "1MiB")
    with pytest.raises(InputError, match="more than 16,777,216 examples would fit"):
        lt.largest_batch(nn.Linear(8, 8), lambda size: torch.randn(size, 8), "1TiB", loss=torch.sum)
    with pytest.raises(InputError, match="has no loss"):
        lt.largest_batch(nn.Linear(2, 3), lambda size: torch.randn(size, 2), "1MiB")
    with pytest.raises(TypeError, match="make_batch"):
        lt.largest_batch(model, 3, "1MiB")  # type: ignore[arg-type]


def test_a_plan_that_does_not_work_after_all_makes_it_look_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a step turns out to take more than was foretold."""
    refused: list[int] = []

    def stubborn(model: nn.Module, x: torch.Tensor, *, peak: int, **more: Any) -> Any:
        if not refused:
            refused.append(len(x))
            raise BudgetError(peak, peak + 1000, "for once", "peak")
        return lt.plan_model(model, x, peak=peak, **more)

    monkeypatch.setattr(batches, "plan_model", stubborn)
    found = lt.largest_batch(_Reading(), lambda size: torch.randn(size, 8), "64KiB")
    assert found.size < refused[0]


def test_an_error_about_one_example_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, peak: int, **__: Any) -> Any:
        raise BudgetError(peak, peak + 1, "for once", "peak")

    monkeypatch.setattr(batches, "plan_model", refuses)
    with pytest.raises(BudgetError, match="for once"):
        lt.largest_batch(_Reading(), lambda size: torch.randn(size**8, 8), 20_000)


class _Attention(nn.Module):
    """As little as attends: every word to every other."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Each is a mean of all, the nearest count most."""
        out: torch.Tensor = x + self.mix((x @ x.mT).softmax(-1) @ x)
        return out


class _Attending(nn.Module):
    """Bytes grow with the square of the length; may look at values."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Attention() for _ in range(3))
        self.reads = reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of what the blocks make of it."""
        for block in self.blocks:
            x = block(x) if not self.reads or x.sum().item() < 1e9 else x
        return x.mean()


@pytest.mark.parametrize("reads", [pytest.param(False, marks=pytest.mark.long), True])
def test_lengths_are_found_without_one_that_is_far_too_long(reads: bool) -> None:
    asked: list[int] = []

    def make_batch(size: int) -> torch.Tensor:
        asked.append(size)
        return torch.randn(1, size, 8)

    found = lt.largest_batch(_Attending(reads=reads), make_batch, "512KiB")
    assert len(asked) < 30
    if reads:  # each is run
        assert max(asked) < 1.1 * found.size


class _ReadsWhenLong(_Attending):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Looks at values of long ones only."""
        self.reads = x.shape[1] > 8
        return super().forward(x)


@pytest.mark.long
def test_a_model_that_looks_at_values_only_at_some_sizes() -> None:
    asked: list[int] = []

    def make_batch(size: int) -> torch.Tensor:
        asked.append(size)
        return torch.randn(1, size, 8)

    found = lt.largest_batch(_ReadsWhenLong(reads=False), make_batch, "512KiB")
    again = asked.index(1, 1)  # from the smallest on
    assert max(asked[again:]) < 1.1 * found.size
