"""Bits of tensors: what is the same."""

from __future__ import annotations

import pytest
import torch

from lowtide.torch.state.bits import same_bits, words

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bits_tell_zeros_apart_and_nan_from_nothing(dtype: torch.dtype) -> None:
    zero, nan = torch.tensor([0.0]).to(dtype), torch.tensor([float("nan")]).to(dtype)
    assert same_bits(nan, nan.clone())
    assert same_bits(zero, zero.clone())
    assert torch.equal(zero, zero.neg())
    assert not same_bits(zero, zero.neg())
    assert not same_bits(zero, nan)
    assert not words(zero.requires_grad_()).requires_grad


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int64], ids=str)
def test_whole_numbers_are_their_own_words(dtype: torch.dtype) -> None:
    ones = torch.ones(3, dtype=dtype)
    assert words(ones).dtype == dtype
    assert not same_bits(ones, torch.zeros(3, dtype=dtype))


def test_bits_are_those_of_the_value_not_of_the_layout() -> None:
    value = torch.randn(3, 4, dtype=torch.complex64)
    assert same_bits(value.conj(), value.conj().resolve_conj())
    assert same_bits(value.conj().imag, -value.imag)
    assert same_bits(value.t(), value.t().contiguous())


def test_shape_and_dtype_belong_to_the_value() -> None:
    zeros = torch.zeros(4)
    assert not same_bits(zeros, torch.zeros(2, 2))
    assert not same_bits(zeros, torch.zeros(4, dtype=torch.int32))
    assert not same_bits(zeros, torch.zeros(4, device="meta"))
