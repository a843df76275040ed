"""Segments of equal tapes: torch's signature, the plain run's results, and a meaning or an error for every input."""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torchs

import lowtide.torch as lt
from lowtide import InputError
from lowtide.torch.layers.sequential import checkpoint_sequential, plan_sequential
from tests.torch.layers.layered import ROWS, Layered, assert_same, kept_by, outcome, peak_of, plain, residual, vgg


def runs(layers: Any, segments: int, x: Any, **options: Any) -> tuple[int, int]:
    """Steps that ran without a tape, and with one."""
    with lt.record() as receipt:
        result = checkpoint_sequential(layers, segments, x, **options)
        (result[0] if isinstance(result, tuple) else result).sum().backward()
    return receipt.plain_runs, receipt.taping_runs


@pytest.mark.untraced
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("segments", [1, 2, 3, 100])
def test_results_and_gradients_are_the_plain_runs_to_the_last_bit(name: str, segments: int) -> None:
    seen = outcome(ROWS[name], lambda row: checkpoint_sequential(row.layers, segments, row.x))
    assert_same(seen, outcome(ROWS[name], plain))


def test_they_are_torchs_where_torchs_are_the_plain_runs() -> None:
    seen = outcome(residual, lambda row: checkpoint_sequential(row.layers, 3, row.x))
    assert_same(
        seen, outcome(residual, lambda row: torchs.checkpoint_sequential(row.layers, 3, row.x, use_reentrant=False))
    )


@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_nobody_is_asked_about_use_reentrant(use_reentrant: bool | None) -> None:
    row = residual()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert runs(row.layers, 3, row.x, use_reentrant=use_reentrant) == (8, 12)


def test_all_segments_but_the_last_are_run_again() -> None:
    row = residual(12)
    assert runs(row.layers, 1, row.x) == (0, 0)  # nothing is checkpointed: it is the plain run
    assert runs(row.layers, 2, row.x) == (6, 12)
    assert runs(row.layers, 5, row.x) == (9, 12)
    assert runs(row.layers, 12, row.x) == (11, 12)
    assert runs(row.layers, 1000, row.x) == (11, 12)


def test_segments_have_tapes_of_equal_size() -> None:
    """Nine layers in five segments, of which torch makes 1, 1, 1, 1 and 5."""
    widths = [8, 8, 8, 8, 64, 64, 8, 8, 8, 8]
    layers = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))
    x = torch.randn(4, 8, requires_grad=True)
    plain_runs, taping_runs = runs(layers, 3, x)
    chain = plan_sequential(layers, x).chain
    last = sum(chain[k].tape for k in range(plain_runs, len(chain)))
    assert taping_runs == 9
    assert last <= 1.5 * chain.plain_tape / 3


def test_a_segment_never_begins_with_a_layer_that_works_in_place() -> None:
    row = vgg()
    for segments in range(2, 12):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checkpoint_sequential(row.layers, segments, row.x).sum().backward()


@pytest.mark.parametrize("segments", [2, 3, 5])
def test_the_peak_is_at_most_torchs_with_as_many_segments(segments: int) -> None:
    def torchs_run(row: Layered) -> Any:
        return torchs.checkpoint_sequential(row.layers, segments, row.x, use_reentrant=False)

    row = vgg(in_place=False, batch=8)
    checkpoint_sequential(row.layers, segments, row.x)  # measured before
    ours = peak_of(row, lambda row: checkpoint_sequential(row.layers, segments, row.x))
    assert ours <= peak_of(row, torchs_run)


@pytest.mark.long
def test_layers_are_measured_once_and_cut_alike_every_time() -> None:
    row = vgg()
    with lt.record() as receipt:
        checkpoint_sequential(row.layers, 4, row.x)
    assert receipt.probe_runs > 0
    counts = set()
    for _ in range(3):
        with lt.record() as receipt:
            checkpoint_sequential(row.layers, 4, row.x)
        assert receipt.probe_runs == 0
        counts.add((receipt.plain_runs, receipt.taping_runs))
        twin = vgg()
        checkpoint_sequential(twin.layers, 4, twin.x)
        with lt.record() as receipt:
            checkpoint_sequential(twin.layers, 4, twin.x)
        counts.add((receipt.plain_runs, receipt.taping_runs))
    assert len(counts) == 1


def test_a_tuple_is_one_value() -> None:
    def add(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return pair[0].tanh() + pair[1], pair[1].sin()

    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    seen = checkpoint_sequential([add] * 4, 2, (x, y))
    wanted = torchs.checkpoint_sequential([add] * 4, 2, (x, y), use_reentrant=False)
    assert all(map(torch.equal, seen, wanted))
    pairs = [torch.autograd.grad(a.sum() + b.sum(), (x, y)) for a, b in (seen, wanted)]
    assert all(map(torch.equal, *pairs))


def test_without_grad_every_layer_runs_once() -> None:
    calls: list[int] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * 2

    with torch.no_grad():
        assert torch.equal(checkpoint_sequential([double] * 6, 3, torch.ones(2)), torch.full((2,), 64.0))
    assert len(calls) == 6


def test_layers_that_need_no_gradient_run_plainly() -> None:
    x = torch.randn(3)
    assert torch.equal(checkpoint_sequential([torch.sin, torch.cos], 2, x), x.sin().cos())


def test_random_numbers_may_differ_in_the_rerun_if_asked_for() -> None:
    row = ROWS["transformer"]()
    checkpoint_sequential(row.layers, 3, row.x, preserve_rng_state=False).sum().backward()
    assert all(leaf.grad is not None for leaf in row.leaves)


def test_one_layer() -> None:
    layer = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    assert torch.equal(checkpoint_sequential([layer], 1, x), layer(x))
    assert torch.equal(checkpoint_sequential(nn.Sequential(layer), 2, x), layer(x))


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        (0, "segments=0 leaves no segment"),
        (-2, "segments=-2 is negative"),
        (True, "segments=True is a boolean"),
        (2.0, "segments=2.0 is a float"),
        ("2", "segments='2' is a str"),
        (None, "segments=None is a NoneType"),
    ],
)
def test_bad_segments_change_nothing(segments: Any, message: str) -> None:
    row = vgg()
    before = kept_by(row)
    with pytest.raises(InputError, match=message):
        checkpoint_sequential(row.layers, segments, row.x)
    with torch.no_grad(), pytest.raises(InputError, match=message):
        checkpoint_sequential(row.layers, segments, row.x)
    assert_same(kept_by(row), before)


def test_bad_functions() -> None:
    x = torch.ones(2)
    with pytest.raises(InputError, match="there are 0 layers to cut into segments"):
        checkpoint_sequential([], 1, x)
    with pytest.raises(InputError, match=r"functions is a Linear; give an nn.Sequential"):
        checkpoint_sequential(nn.Linear(2, 2), 1, x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"functions\[0\]='relu' is a str, which cannot be called"):
        checkpoint_sequential(["relu"], 1, x)  # type: ignore[list-item]


def test_a_layer_that_fails_leaves_the_model_as_it_was() -> None:
    norm = nn.BatchNorm1d(4)
    row = Layered([norm, nn.Linear(4, 4), nn.Linear(3, 3)], torch.randn(5, 4), [], [norm])
    before = kept_by(row)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        checkpoint_sequential(row.layers, 2, row.x)
    assert_same(kept_by(row), before)
