"""One function whose tape is not kept: `jax.checkpoint`, with what cannot be meant refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from lowtide.checks import function


def checkpoint(
    fun: Callable[..., Any],
    *,
    prevent_cse: bool | Sequence[bool] = True,
    policy: Callable[..., bool] | None = None,
    static_argnums: int | tuple[int, ...] = (),
    static_argnames: str | Iterable[str] = (),
) -> Callable[..., Any]:
    """The function that computes what `fun` does and is run again in the backward instead of keeping its tape.

    Args:
        fun: a pure function.
        prevent_cse: keep XLA from joining first run and rerun, which would keep the tape after all; not needed inside
            `scan` and the loops here.
        policy: which intermediate results to keep; see `jax.checkpoint_policies`.
        static_argnums: places of arguments that `fun` is specialised on.
        static_argnames: names of such arguments.
    """
    function(fun, "fun")
    wrapped: Callable[..., Any] = jax.checkpoint(
        fun,
        prevent_cse=prevent_cse,
        policy=policy,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
    )
    return wrapped
