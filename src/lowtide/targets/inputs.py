"""Inputs described by dtype and shape, "float32[64,80]", and values of such inputs to plan with."""

from __future__ import annotations

import re
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.errors import InputError

_FORM = re.compile(r"\s*([a-z][a-z0-9_]*)\s*\[\s*((?:[0-9]+\s*(?:,\s*[0-9]+\s*)*)?)\]\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class InputForm:
    """The dtype and the shape of an input."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @classmethod
    def read(cls, text: str) -> InputForm:
        """The form of a text such as "float32[64,80]", or "float32[]" for a single number."""
        match = _FORM.fullmatch(text)
        if match is None:
            raise InputError(f"--input {text!r} is no dtype[shape]; write it like 'float32[64,80]' or 'int64[32]'")
        try:
            shape = tuple(int(size) for size in match[2].split(",")) if match[2] else ()
        except ValueError as error:  # Python refuses to parse thousands of digits
            raise InputError(f"--input {match[1]}: a size of that many digits is none; {error}") from error
        if 0 in shape:
            raise InputError(f"--input {text!r} has no numbers in it; give sizes of at least 1")
        return cls(match[1], shape)


def torch_tensors(forms: Sequence[InputForm]) -> list[Any]:
    """Tensors of these forms: normally distributed from a fixed seed, or zeros for integers and bools."""
    import torch

    generator = torch.Generator().manual_seed(0)
    made = []
    for form in forms:
        dtype = getattr(torch, form.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise _unknown(form, "torch", "float32, bfloat16, int64, bool")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about deprecated dtypes
                if dtype.is_floating_point or dtype.is_complex:
                    made.append(torch.randn(form.shape, generator=generator).to(dtype))
                else:
                    made.append(torch.zeros(form.shape, dtype=dtype))
        except (RuntimeError, TypeError) as error:  # more than memory holds, or a dtype that holds no numbers
            raise InputError(
                f"--input {form}: torch cannot make such a tensor; give a smaller shape, or another dtype such as "
                f"float32. It says: {textwrap.shorten(str(error), 160)}"
            ) from error
    return made


def jax_types(forms: Sequence[InputForm], steps: int | None) -> list[Any]:
    """Shapes and dtypes without values, which suffice for planning in JAX; `steps`, if given, is the first axis."""
    import jax
    from jax import dtypes
    from jax import numpy as jnp

    made = []
    for form in forms:
        try:
            dtype = jnp.dtype(form.dtype)
        except TypeError:
            raise _unknown(form, "jax", "float32, bfloat16, int32, bool") from None
        if dtypes.canonicalize_dtype(dtype) != dtype:
            raise InputError(f"--input {form.dtype}: JAX has it only with JAX_ENABLE_X64=1; set that, or give 32 bits")
        made.append(jax.ShapeDtypeStruct(form.shape if steps is None else (steps, *form.shape), dtype))
    return made


def _unknown(form: InputForm, framework: str, some: str) -> InputError:
    return InputError(f"--input {form.dtype}: {framework} has no such dtype; it has {some} and others")
