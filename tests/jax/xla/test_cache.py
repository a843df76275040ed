"""The one cache of lowtide.jax: bounded, and what was asked for lately stays."""

from __future__ import annotations

import pytest

from lowtide.jax.xla import cache


def test_the_program_that_was_asked_for_the_longest_time_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_known", {})
    monkeypatch.setattr(cache, "_MOST_PROGRAMS", 2)
    compiled: list[str] = []

    def ask(key: str) -> int:
        def compile_program() -> int:
            compiled.append(key)
            return len(key)

        return cache.program_bytes(key, compile_program)

    assert [ask(key) for key in ("a", "bb", "a", "ccc", "a")] == [1, 2, 1, 3, 1]
    assert compiled == ["a", "bb", "ccc"]
    assert ask("bb") == 2
    assert compiled[-1] == "bb"


def test_a_program_of_no_bytes_is_known_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_known", {"empty": 0})
    assert cache.program_bytes("empty", lambda: pytest.fail("compiled again")) == 0
