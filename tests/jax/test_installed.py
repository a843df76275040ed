"""What versions of jax have elsewhere: the ways of older versions, on the one that is installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax._src import core as private_core
from jax.extend import core

from lowtide.jax import installed


class Names(NamedTuple):
    """The debug information of jax 0.7."""

    arg_names: tuple[str, ...]
    result_paths: tuple[str, ...]


def test_what_moved_is_the_same_function() -> None:
    for name in ("jaxprs_in_params", "unmapped_aval"):
        assert getattr(installed, name) is getattr(private_core, name)


def test_what_core_does_not_have_is_looked_for_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(core, "jaxprs_in_params", raising=False)
    assert installed._of_core("jaxprs_in_params") is private_core.jaxprs_in_params


def test_types_of_older_versions() -> None:
    assert installed.varying_axes(SimpleNamespace(vma=frozenset({"i"}))) == ("i",)
    assert installed.varying_axes(jax.typeof(jnp.zeros(2))) == ()


def test_an_older_way_to_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(lax, "pcast")
    monkeypatch.setattr(lax, "pvary", lambda value, axes: (value, axes), raising=False)
    assert installed.varying(jnp.float32(1), ("i",)) == (1, ("i",))


def test_names_of_older_versions() -> None:
    assert installed.unnamed(Names(("a", "b"), ("c",)), 1, 2) == Names(("",), ("", ""))


def test_a_context_of_older_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[Any] = []
    context = installed.OlderContext(False)
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(context.value))
    with context(True):
        assert context.value is True
    assert context.value is False
    assert cleared == [True, False]
