"""The example, in its quick form: figures are written, losses and gradients agree, figures that it prints are sane."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from examples import spiking_rollout

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=120)


def _printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.long
def test_the_whole_example(tmp_path: Path, console: Console) -> None:
    plain, ours = spiking_rollout.run(tmp_path / "new", epochs=4, steps=60, quick=True, console=console)
    assert len(plain) == 4
    assert plain == ours
    for name in ("spiking-loss.png", "spiking-memory.png"):
        data = (tmp_path / "new" / name).read_bytes()
        assert data.startswith(PNG)
        assert len(data) > 10_000
    text = _printed(console)
    assert "all losses equal to the last bit" in text
    assert text.count("same bits") == 5


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(spiking_rollout, "run", lambda *given, quick, console: calls.append((*given, quick)))
    spiking_rollout.main(["--quick", "--output", str(tmp_path)])
    spiking_rollout.main(["--output", str(tmp_path), "--epochs", "7"])
    assert calls == [(tmp_path, 3, 50, True), (tmp_path, 7, 400, False)]


def test_training_stops_at_a_loss_that_differs(monkeypatch: pytest.MonkeyPatch, console: Console) -> None:
    plain_loss = spiking_rollout.plain_loss
    monkeypatch.setattr(spiking_rollout, "plain_loss", lambda *args: plain_loss(*args) * (1 + 1e-6))
    with pytest.raises(AssertionError, match="epoch 0: the loss is"):
        spiking_rollout.train(2, 20, console)


@pytest.mark.long
def test_memory_against_length(console: Console) -> None:
    curves = spiking_rollout.memory_by_length([80, 320], console)
    plain, *ours = curves.values()
    assert plain[1] > 3.9 * plain[0]  # with the length
    assert ours[1][1] < 2.1 * ours[1][0]  # with its square root
    assert all(curve[1] < plain[1] / 9 for curve in ours)
    assert max(ours[2]) <= 128 * 1024  # within the budget


@pytest.mark.long
def test_memory_against_base(console: Console) -> None:
    curve = spiking_rollout.memory_by_base(144, 6, console)
    assert curve.bases == [1, 3, 7, 20, 53, 144]
    best = curve.measured.index(min(curve.measured))
    assert curve.bases[best] in (7, 20)  # near the square root
    for measured, planned, promised in zip(curve.measured, curve.planned, curve.promised, strict=True):
        assert promised <= planned
        assert 0.9 * planned <= measured <= planned


@pytest.mark.parametrize(("steps", "count"), [(400, 14), (50, 4), (7, 14), (1, 5)])
def test_bases(steps: int, count: int) -> None:
    bases = spiking_rollout.bases_up_to(steps, count)
    assert bases[0] == 1
    assert bases[-1] == steps
    assert len(bases) <= count
