"""Every differentiable sample of torch's own operators and modules through `checkpoint`: bit-equal to plain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide.torch as lt
from tests.torch.checkpoint import operator_database as database
from tests.torch.checkpoint.operator_database import Tally, as_it_is, in_place, of_intermediates

# The samples provoke warnings of torch's own, beta features and the like.
pytestmark = pytest.mark.filterwarnings("ignore")

CHUNKS = 4
ALL_OF_THEM = [
    (torch.float64, as_it_is),
    (torch.float64, of_intermediates),
    (torch.float64, in_place),
    (torch.float32, as_it_is),
    (torch.bfloat16, as_it_is),
    (torch.complex64, as_it_is),
    (torch.complex64, of_intermediates),
]


def _judge(tally: Tally, record_property: Any, what: str) -> None:
    record_property("figure", f"checkpoint, {what}: {tally}")
    assert tally.wrong == []
    # The driver gelsy rounds by where its memory lies.
    assert [name for name in tally.unrepeatable if not name.startswith("linalg.lstsq")] == []


def _operators(dtype: torch.dtype, form: Any, chunk: int, chunks: int, first: int | None) -> Tally:
    tally = Tally()
    for op in database.operators(dtype)[chunk::chunks]:
        tally += database.check_operator(lt.checkpoint, op, dtype, first, form)
    return tally


def _modules(dtype: torch.dtype, chunk: int, chunks: int, first: int | None) -> Tally:
    tally = Tally()
    for info in database.modules(dtype)[chunk::chunks]:
        tally += database.check_module(lt.checkpoint, info, dtype, first)
    return tally


@pytest.mark.long
def test_the_first_sample_of_every_fourth_operator(record_property: Any) -> None:
    tally = _operators(torch.float64, of_intermediates, 0, 4, 1)
    _judge(tally, record_property, "first samples of every fourth operator")
    assert tally.compared > 120


@pytest.mark.long
def test_the_first_cases_of_every_module(record_property: Any) -> None:
    tally = _modules(torch.float32, 0, 1, 2)
    _judge(tally, record_property, "first cases of modules")
    assert tally.compared > 200


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_sample_of_operators_that_draw_random_numbers(dtype: torch.dtype, record_property: Any) -> None:
    tally = Tally()
    for op in database.operators(dtype):
        if "dropout" in op.name or "rrelu" in op.name or "attention" in op.name or "fractional" in op.name:
            tally += database.check_operator(lt.checkpoint, op, dtype)
    _judge(tally, record_property, f"operators that draw random numbers, {dtype}")
    assert tally.compared > 50


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize(("dtype", "form"), ALL_OF_THEM, ids=lambda value: getattr(value, "__name__", str(value)))
def test_every_sample_of_every_operator(dtype: torch.dtype, form: Any, chunk: int, record_property: Any) -> None:
    tally = _operators(dtype, form, chunk, CHUNKS, None)
    _judge(tally, record_property, f"operators, {dtype}, {form.__name__}, part {chunk + 1} of {CHUNKS}")
    assert tally.compared > 100


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(2))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_every_case_of_every_module(dtype: torch.dtype, chunk: int, record_property: Any) -> None:
    tally = _modules(dtype, chunk, 2, None)
    _judge(tally, record_property, f"modules, {dtype}, part {chunk + 1} of 2")
    assert tally.compared > 600


@pytest.mark.long
def test_the_comparison_finds_what_torchs_own_gets_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would prove nothing: rrelu draws its slopes twice, BatchNorm counts twice."""
    monkeypatch.setattr(database, "REPEATS", 20)

    def theirs(function: Any, *args: Any, **kwargs: Any) -> Any:
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)

    found = Tally()
    for op in database.operators(torch.float64):
        if op.name == "nn.functional.rrelu":
            found += database.check_operator(theirs, op, torch.float64)
    assert len(found.wrong) == 2
    found = Tally()
    for info in database.modules(torch.float64):
        if "BatchNorm" in info.name:
            found += database.check_module(theirs, info, torch.float64)
    assert len(found.wrong) == 16
    assert all("BatchNorm" in name for name in found.wrong)
