"""The tutorial as an example, in its quick form: figures are written, and what it prints is sane."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import brainstate_tutorial

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.long
def test_the_whole_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    brainstate_tutorial.main(["--quick", "--output", str(tmp_path / "new")])
    for name in ("brainstate_tutorial.png", "brainstate_memory.png"):
        data = (tmp_path / "new" / name).read_bytes()
        assert data.startswith(PNG)
        assert len(data) > 10_000
    text = capsys.readouterr().out
    assert "checkpointed training: first 0.6931 last 0.6" in text
    assert [name in text for name in ("plain for_loop", "brainstate, base=16", "Lowtide, base=16")] == [True] * 3


@pytest.mark.parametrize(("steps", "bases"), [(400, [2, 4, 8, 20, 50, 100, 200]), (60, [2, 4, 8, 20, 30])])
def test_bases_go_from_two_to_half(steps: int, bases: list[int]) -> None:
    assert brainstate_tutorial.bases_for(steps, quick=False) == bases
    assert brainstate_tutorial.bases_for(steps, quick=True) == [steps // 2]


@pytest.mark.long
def test_the_promise_is_least_near_the_square_root() -> None:
    bases = list(range(2, 201))
    sizes, _ = brainstate_tutorial.promised(400, bases)
    assert 14 <= bases[sizes.index(min(sizes))] <= 25
