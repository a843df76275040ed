"""The jax that is installed: that there is one, whether its version was tested, and what versions have elsewhere.

Imported before all else. What jax has moved, renamed or added since 0.7 is asked for here, and nowhere else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from lowtide.packages import check_version, needed_for

with needed_for("lowtide.jax"):
    import jax
from jax import lax
from jax.extend import core

check_version(jax)


def _of_core(name: str) -> Any:
    """A function of jax's core; versions before 0.10 have it in a private module, where it stays."""
    return getattr(core, name, None) or getattr(import_module("jax._src.core"), name)


jaxprs_in_params: Callable[[Mapping[str, Any]], Iterable[core.Jaxpr]] = _of_core("jaxprs_in_params")
unmapped_aval: Callable[[int, int, Any], Any] = _of_core("unmapped_aval")


def manual_axes(type_: Any) -> Any:
    """What an array's type says about the mesh axes that `shard_map` handles; equal for types that may be mixed."""
    return type_.manual_axis_type if hasattr(type_, "manual_axis_type") else type_.vma


def varying_axes(type_: Any) -> tuple[str, ...]:
    """Those of the axes along which the array's values differ."""
    axes = manual_axes(type_)
    return tuple(getattr(axes, "varying", axes))


def varying(value: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The value as one that differs along these mesh axes."""
    if not axes:
        return value
    of_lax: Any = lax  # either name is unknown to some version
    found: jax.Array = of_lax.pcast(value, axes, to="varying") if hasattr(lax, "pcast") else of_lax.pvary(value, axes)
    return found


def unnamed(debug_info: Any, inputs: int, results: int) -> Any:
    """The debug information of a jaxpr without the names of its inputs and results, which are others."""
    if hasattr(debug_info, "with_unknown_names"):
        return debug_info.with_unknown_names()
    return debug_info._replace(arg_names=("",) * inputs, result_paths=("",) * results)


class OlderContext:
    """What `jax.make_user_context` returns, for versions without it: no function that was traced before is used."""

    def __init__(self, value: Any) -> None:
        self._of_thread = threading.local()
        self._default = value

    @property
    def value(self) -> Any:
        """The value in this thread."""
        return getattr(self._of_thread, "value", self._default)

    @contextmanager
    def __call__(self, value: Any) -> Iterator[None]:
        """Inside, another value."""
        before = self.value
        self._set(value)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, value: Any) -> None:
        self._of_thread.value = value
        jax.clear_caches()


user_context: Callable[[Any], Any] = getattr(jax, "make_user_context", OlderContext)
