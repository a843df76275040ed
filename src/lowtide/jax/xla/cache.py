"""What compiled programs were found to take, so that none is compiled twice to be looked at.

There is one cache for all of `lowtide.jax`, and this module owns it. It keeps numbers by keys made of text and plans:
no array, no function, no program and no part of a model stays alive because of it. A key says everything that the
bytes of a program depend on, its platform included, so an entry never becomes wrong and nobody has to clear the cache;
beyond `_MOST_PROGRAMS` it forgets the one that was asked for the longest time ago. What JAX remembers is its own, and
`jax.clear_caches()` leaves this alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from threading import Lock

_MOST_PROGRAMS = 2048  # a model that is planned for one peak after the other asks for a few dozen
_known: dict[Hashable, int] = {}  # from the one asked for the longest time ago to the latest
_lock = Lock()


def digest(*texts: str) -> str:
    """A key that stands for texts, and does not hold them."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def program_bytes(key: Hashable, compile_program: Callable[[], int]) -> int:
    """The bytes of a program, compiled if they are not known.

    Args:
        key: what tells the program from all others, without holding any part of it.
        compile_program: compiles it and returns its bytes. The lock is not held meanwhile: two threads that ask for the
            same program at once both compile it, and find the same.
    """
    with _lock:
        found = _known.pop(key, None)
        if found is not None:
            _known[key] = found
            return found
    found = compile_program()
    with _lock:
        _known[key] = found
        while len(_known) > _MOST_PROGRAMS:
            del _known[next(iter(_known))]
    return found
