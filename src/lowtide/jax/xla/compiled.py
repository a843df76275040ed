"""The bytes that XLA allocates for a program, found by compiling it. Nothing is run or allocated.

The bytes are cached, so that no program is compiled twice. Only numbers are cached, by keys made of text and plans: no
array, function, program or part of a model is kept alive. A key contains everything that the bytes of a program depend
on, its platform included, so an entry never becomes wrong. `jax.clear_caches()` does not clear this cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from typing import Any

import jax

from lowtide.interface.cache import Cache

# Optimising machine code takes half of the compile time, and does not change what is allocated.
_QUICK_COMPILE_OPTIONS = {"xla_backend_optimization_level": 0}
_MOST_PROGRAMS = 2048  # in the cache; planning a model for a series of peaks compiles a few dozen

_bytes: Cache[int] = Cache(_MOST_PROGRAMS)


def memory_of(lowered: Any) -> Any:
    """XLA's analysis of the memory that a lowered program takes."""
    return lowered.compile(_QUICK_COMPILE_OPTIONS if jax.default_backend() == "cpu" else None).memory_analysis()


def digest(*texts: str) -> str:
    """A short key that identifies texts without holding them."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def program_bytes(key: Hashable, compile_program: Callable[[], int]) -> int:
    """The bytes of a program, which is compiled if they are not known.

    Args:
        key: distinguishes the program from all others, without holding any part of it.
        compile_program: compiles it and returns its bytes. Two threads that ask for the same program at once both
            compile it, with the same result.
    """
    found = _bytes.get(key)
    if found is None:
        found = compile_program()
        _bytes.put(key, found)
    return found
