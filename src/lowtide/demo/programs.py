"""Contestants in JAX: compiled programs, with the bytes that XLA allocates beside arguments and results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from lowtide.demo.contest import Contestant

NOTE = (
    "Peak: what XLA sets aside beside arguments and results. That includes the stacked outputs, which a budget does "
    "not count: with a budget of 2% it can be 2.6% of plain. Time: wall clock, after compiling."
)


def contestant(gradients: Callable[..., Any], *args: Any) -> Contestant:
    """The contestant that runs this function, compiled for these arguments."""
    program = jax.jit(gradients).lower(*args).compile()
    memory: Any = program.memory_analysis()
    return Contestant(
        lambda: jax.tree.leaves(jax.block_until_ready(program(*args))), lambda: int(memory.temp_size_in_bytes)
    )
