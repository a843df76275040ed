"""Programs that are compiled to be looked at: what XLA allocates for them. Nothing is run or allocated.

What one was found to take is remembered, so that none is compiled twice. Numbers are remembered, by keys made of text
and plans: no array, no function, no program and no part of a model stays alive because of it. A key says everything
that the bytes of a program depend on, its platform included, so an entry never becomes wrong. What JAX remembers is its
own, and `jax.clear_caches()` leaves this alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from typing import Any

import jax

from lowtide.interface.cache import Cache

# Optimisations of machine code take half of the time, and change nothing of what is allocated.
_QUICKLY = {"xla_backend_optimization_level": 0}
_MOST_PROGRAMS = 2048  # a model that is planned for one peak after the other asks for a few dozen

_bytes: Cache[int] = Cache(_MOST_PROGRAMS)


def memory_of(lowered: Any) -> Any:
    """XLA's account of the memory that a lowered program takes."""
    return lowered.compile(_QUICKLY if jax.default_backend() == "cpu" else None).memory_analysis()


def digest(*texts: str) -> str:
    """A key that stands for texts, and does not hold them."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def program_bytes(key: Hashable, compile_program: Callable[[], int]) -> int:
    """The bytes of a program, compiled if they are not known.

    Args:
        key: what tells the program from all others, without holding any part of it.
        compile_program: compiles it and returns its bytes. Two threads that ask for the same program at once both
            compile it, and find the same.
    """
    found = _bytes.get(key)
    if found is None:
        found = compile_program()
        _bytes.put(key, found)
    return found
