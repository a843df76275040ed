"""One function whose tape is not kept: `jax.checkpoint` with a rerun that waits until it is needed (`rerun.py`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from lowtide.checks import function
from lowtide.errors import InputError
from lowtide.jax.compare import runs_plainly
from lowtide.jax.layers.rerun import run_again
from lowtide.jax.layers.trace import arrays, trace_layer
from lowtide.jax.xla.jaxprs import has_loop


def checkpoint(
    fun: Callable[..., Any],
    *,
    prevent_cse: bool | Sequence[bool] = True,
    policy: Callable[..., bool] | None = None,
    static_argnums: int | tuple[int, ...] = (),
    static_argnames: str | Iterable[str] = (),
) -> Callable[..., Any]:
    """A function that computes what `fun` does, and is run again in the backward instead of keeping its tape.

    The arguments are those of `jax.checkpoint`, which saves nothing on the CPU: there XLA runs its reruns early, beside
    everything that is still stored, whereas here they wait. With a policy, or with a `prevent_cse` other than True, the
    result is that of `jax.checkpoint` itself. Each call outside of `jit` is traced again.

    Args:
        fun: a pure function.
        prevent_cse: keep XLA from merging first run and rerun, which would keep the tape after all; not needed inside
            `scan` and the loops of Lowtide.
        policy: which intermediate results to keep; see `jax.checkpoint_policies`.
        static_argnums: the indices of arguments that `fun` is specialised on.
        static_argnames: the names of such keyword arguments.
    """
    function(fun, "fun")
    if policy is not None or prevent_cse is not True:
        names_given: dict[str, Any] = (
            {"static_argnames": static_argnames} if static_argnames else {}
        )  # unknown to jax 0.8
        theirs: Callable[..., Any] = jax.checkpoint(
            fun,
            prevent_cse=prevent_cse,
            policy=policy,
            static_argnums=static_argnums,
            **names_given,
        )
        return theirs
    names = {static_argnames} if isinstance(static_argnames, str) else {*static_argnames}

    @functools.wraps(fun)
    def called(*args: Any, **kwargs: Any) -> Any:
        if runs_plainly():
            return fun(*args, **kwargs)
        places = _places(static_argnums, len(args))

        def run(given: tuple[dict[int, Any], dict[str, Any]]) -> Any:
            return fun(*(given[0].get(k, arg) for k, arg in enumerate(args)), **kwargs | given[1])

        by_place = {k: arg for k, arg in enumerate(args) if k not in places}
        by_name = {name: arg for name, arg in kwargs.items() if name not in names}
        leaves, tree = arrays((by_place, by_name), "arguments")
        layer, consts, form = trace_layer(run, leaves, tree, "fun")
        return form.unflatten(run_again(layer.run, consts, leaves, loops=has_loop(layer.jaxpr)))

    return called


def _places(static: int | tuple[int, ...], count: int) -> set[int]:
    places = (static,) if isinstance(static, int) else static
    for place in places:
        if not -count <= place < count:
            raise InputError(f"static_argnums={static!r} names argument {place} of a call with {count:,}; leave it out")
    return {place % count for place in places}
