"""The examples of functions and layers, small: figures are written, gradients agree, what they print is sane."""

from __future__ import annotations

import io
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

from examples import deep_networks, heavy_model, two_segments

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=120)


def _printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _is_figure(path: Path) -> bool:
    data = path.read_bytes()
    return data.startswith(PNG) and len(data) > 10_000


@pytest.mark.long
def test_the_heavy_model(tmp_path: Path, console: Console) -> None:
    runs = heavy_model.run(tmp_path / "new", calls=30, operations=20, console=console)
    plain, ours = runs[heavy_model.PLAIN], runs[heavy_model.OURS]
    assert plain.saved.peak == 600
    assert ours.saved.peak == 20  # those of one call
    assert ours.kept.peak <= 31
    assert plain.saved.alive == ours.saved.alive == ours.kept.alive == 0
    assert ours.gradients == plain.gradients
    assert _is_figure(tmp_path / "new" / "heavy-model.png")
    text = _printed(console)
    assert "y = 100,000, dy/dx = 1, dy/da = 100,000, the same with lt.checkpoint" in text
    assert text.count("same bits") == 2


def test_the_heavy_model_stops_at_another_gradient(monkeypatch: pytest.MonkeyPatch, console: Console) -> None:
    monkeypatch.setattr(heavy_model, "checkpoint", lambda function, *args: function(*args) * (1 + 1e-6))
    with pytest.raises(AssertionError, match=r"lt\.checkpoint: the gradients are not"):
        heavy_model.compare(3, 4, console)


def test_the_envelope_keeps_the_most_of_each_span() -> None:
    count = heavy_model.Count(began=0.0, seconds=[0.1, 0.2, 1.1, 3.9], counts=[1, 5, 2, 0])
    assert heavy_model.envelope(count, 4.0, bins=4) == ([0.5, 1.5, 2.5, 3.5], [5, 5, 2, 2])


@pytest.mark.long
def test_two_segments(tmp_path: Path, console: Console) -> None:
    rows = two_segments.run(tmp_path, 512, (64, *[32] * 6, *[16] * 6, 10), 1, console)
    plain, torchs, ours, budgeted = rows.values()
    assert plain.peak > torchs.peak > ours.peak > budgeted.peak
    assert plain.batch == 512
    assert torchs.batch <= ours.batch <= budgeted.batch
    assert budgeted.batch > 512
    assert _is_figure(tmp_path / "two-segments.png")
    assert "One training step, batch 512" in _printed(console)


def test_the_largest_batch_stays_within_the_memory() -> None:
    torch.manual_seed(0)
    model = two_segments.Plain((16, 16, 10))
    memory = two_segments.peak_bytes(model, 200, 16)
    batch = two_segments.largest_batch(model, memory, 64, 16)
    assert batch == 200
    assert two_segments.peak_bytes(model, batch + 8, 16) > memory


@pytest.mark.long
def test_deep_networks(tmp_path: Path, console: Console) -> None:
    networks = deep_networks.run(tmp_path, quick=True, console=console)
    mlp, vgg = networks
    assert len(mlp.torch) == 23
    assert len(vgg.torch) == 36
    for network in networks:
        assert network.lowtide
        assert max(point.peak for point in network.lowtide) <= network.plain.peak
    assert min(point.peak for point in mlp.lowtide) < mlp.plain.peak / 2
    assert _is_figure(tmp_path / "deep-networks.png")
    assert "VGG-16 shape, 37 layers" in _printed(console)


def test_the_frontier_keeps_what_nothing_beats() -> None:
    points = [
        deep_networks.Point(name, peak, seconds) for name, peak, seconds in [("a", 5, 1), ("b", 2, 3), ("c", 6, 2)]
    ]
    assert [point.name for point in deep_networks.frontier(points)] == ["b", "a"]


@pytest.mark.parametrize("example", [heavy_model, two_segments, deep_networks], ids=lambda each: each.__name__)
def test_the_command_lines(example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(example, "run", lambda *given, **named: calls.append((given, named)))
    example.main(["--quick", "--output", str(tmp_path)])
    example.main(["--output", str(tmp_path)])
    (quick, _), (whole, _) = calls
    assert quick[0] == whole[0] == tmp_path
    assert calls[0] != calls[1]
