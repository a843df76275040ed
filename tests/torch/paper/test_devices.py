"""Descriptions of cards."""

from __future__ import annotations

import pytest
import torch

from lowtide.errors import InputError
from lowtide.torch.paper import devices
from lowtide.torch.paper.devices import A100, H100, RTX4090, Device, device_of

TOY = Device(
    name="toy",
    memory=1,
    bandwidth=10.0,
    float32=4.0,
    float16=8.0,
    float64=2.0,
    start=0.5,
    compute_share=1.0,
    bandwidth_share=1.0,
)


@pytest.mark.parametrize(
    ("name", "device"),
    [("h100", H100), ("H100", H100), ("a100", A100), ("rtx4090", RTX4090), ("RTX 4090", RTX4090), (TOY, TOY)],
)
def test_a_device_is_found_by_its_name(name: str, device: Device) -> None:
    assert device_of(name) is device


@pytest.mark.parametrize("wrong", ["h1000", "", None, 3])
def test_other_names_are_answered_with_those_that_there_are(wrong: str) -> None:
    with pytest.raises(InputError, match="h100, a100, rtx4090, or a Device"):
        device_of(wrong)


def test_presets_are_attributes_that_an_editor_completes() -> None:
    assert {"H100", "A100", "RTX4090"} <= set(dir(devices))


def test_presets_are_what_their_data_sheets_say() -> None:
    assert [round(each.float16 / 1e12) for each in (H100, A100, RTX4090)] == [989, 312, 165]
    assert [round(each.float32 / 1e12, 1) for each in (H100, A100, RTX4090)] == [66.9, 19.5, 82.6]
    assert [each.bandwidth / 1e9 for each in (H100, A100, RTX4090)] == [3350, 2039, 1008]
    assert [each.memory / 1e9 for each in (H100, A100, RTX4090)] == [80, 80, 24]
    assert all(0 < share < 1 for each in (H100, A100, RTX4090) for share in (each.compute_share, each.bandwidth_share))


def test_the_slower_of_computing_and_moving_counts() -> None:
    assert TOY.seconds(8, 10, torch.float32) == 0.5 + 2
    assert TOY.seconds(8, 100, torch.float32) == 0.5 + 10
    assert TOY.seconds(0, 0, torch.float32) == 0.5


@pytest.mark.parametrize(
    ("dtype", "rate"),
    [
        (torch.float64, 2),
        (torch.float32, 4),
        (torch.float16, 8),
        (torch.bfloat16, 8),
        (torch.complex64, 4),
        (torch.int64, 4),
        (torch.float8_e4m3fn, 8),  # it has none of its own
    ],
)
def test_the_rate_is_that_of_the_numbers(dtype: torch.dtype, rate: int) -> None:
    assert TOY.seconds(16, 0, dtype) == 0.5 + 16 / rate


def test_a_card_with_eight_bit_numbers_has_a_rate_for_them() -> None:
    assert H100.seconds(1e15, 0, torch.float8_e5m2) < H100.seconds(1e15, 0, torch.float16)


@pytest.mark.parametrize("wrong", [{"memory": 0}, {"float32": -1.0}, {"start": -1e-6}, {"float8": 0.0}])
def test_figures_have_to_make_sense(wrong: dict[str, float]) -> None:
    figures = {"memory": 1, "bandwidth": 1.0, "float32": 1.0, "float16": 1.0, "float64": 1.0} | wrong
    with pytest.raises(InputError, match=next(iter(wrong))):
        Device(name="toy", **figures)  # type: ignore[arg-type]
