"""Programs that are compiled to be looked at: as many bytes as users' programs, and none compiled twice."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import lowtide.jax as lt
from lowtide.interface.cache import Cache
from lowtide.jax.xla import compiled
from tests.jax.networks import QUICK


def rollout(w: Any, xs: Any) -> Any:
    return lt.checkpointed_scan(lambda h, x: (jnp.tanh(h @ w + x), h.sum()), xs[0], xs, base=5)[1].sum()


def row(w: Any, xs: Any) -> Any:
    return lt.sequential([lambda x: jnp.tanh(x @ w), jnp.sin, lambda x: x @ w.T, jnp.cos] * 3, xs[0]).sum()


def stacked(w: Any, xs: Any) -> Any:
    return lax.scan(lambda h, x: (jnp.tanh(h @ w + x), h), xs[0], xs)[1].sum()


@pytest.mark.parametrize("loss", [rollout, row, stacked])
def test_compiled_quickly_it_is_allocated_the_same_bytes(loss: Any) -> None:
    lowered: Any = jax.jit(jax.grad(loss)).lower(jnp.eye(16), jnp.ones((40, 8, 16)))
    quickly, usually = compiled.memory_of(lowered), lowered.compile().memory_analysis()
    for found in (quickly, lowered.compile(QUICK).memory_analysis()):
        assert found.temp_size_in_bytes == usually.temp_size_in_bytes > 0


def test_the_program_that_was_asked_for_the_longest_time_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_bytes", Cache(2))
    asked: list[str] = []

    def ask(key: str) -> int:
        def compile_program() -> int:
            asked.append(key)
            return len(key)

        return compiled.program_bytes(key, compile_program)

    assert [ask(key) for key in ("a", "bb", "a", "ccc", "a")] == [1, 2, 1, 3, 1]
    assert asked == ["a", "bb", "ccc"]
    assert ask("bb") == 2
    assert asked[-1] == "bb"


def test_a_program_of_no_bytes_is_known_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_bytes", Cache(2))
    assert compiled.program_bytes("empty", lambda: 0) == 0
    assert compiled.program_bytes("empty", lambda: pytest.fail("compiled again")) == 0
