"""Nested checkpoint calls as text: what is written can be read again, and runs as it says."""

from __future__ import annotations

import contextlib
import re
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lowtide import InputError
from lowtide.torch.lean_graph import LeanSize
from lowtide.torch.nest_text import Leaf, Nest
from tests.torch.planned import products

SIZES = st.builds(partial(LeanSize, strict=False), st.integers(0, 10**12), st.integers(0, 10**12))


@st.composite
def nests(draw: st.DrawFn) -> Nest:
    """Leaves one after the other, some of them in groups of groups."""
    place = 0

    def parts(depth: int) -> tuple[Leaf | Nest, ...]:
        nonlocal place
        found: list[Leaf | Nest] = []
        for _ in range(draw(st.integers(1, 3))):
            if depth < 3 and draw(st.booleans()):
                found.append(Nest(parts(depth + 1)))
            else:
                start, place = place, place + draw(st.integers(1, 12))
                found.append(Leaf(start, place, draw(st.none() | SIZES)))
        return tuple(found)

    return Nest(parts(0))


@given(nests())
def test_what_is_written_can_be_read(nest: Nest) -> None:
    assert Nest.parse(str(nest)) == nest


@given(nests())
def test_leaves_are_all_layers_in_order(nest: Nest) -> None:
    leaves = list(nest.leaves())
    assert [leaf.start for leaf in leaves] == [0, *(leaf.stop for leaf in leaves[:-1])]


@given(st.text("0123456789-~+() ", max_size=30))
def test_whatever_can_be_read_is_written_the_same_way(text: str) -> None:
    with contextlib.suppress(InputError):
        nest = Nest.parse(text)
        assert Nest.parse(str(nest)) == nest


def test_how_it_looks() -> None:
    inner = Nest((Leaf(3, 4), Leaf(4, 5, LeanSize(120, 16, strict=False))))
    nest = Nest((Leaf(0, 1), Nest((Leaf(1, 3), inner)), Leaf(5, 6)))
    assert str(nest) == "0 (1-2 (3 4~120+16)) 5"
    assert Nest.parse("0 (1-2 (3 4~120+16)) 5") == nest


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0 x", "'0 x' is no nest of layers: it cannot be read from 'x' on"),
        ("0)", "'0)' is no nest of layers: it cannot be read from ')' on"),
        ("(0 (1)", "'(0 (1)' is no nest of layers: a parenthesis is not closed"),
        ("0~5", "'0~5' is no nest of layers: it cannot be read from '~5' on"),
        ("0 ~1+2", "'0 ~1+2' is no nest of layers: it cannot be read from '~1+2' on"),
    ],
)
def test_what_is_no_nest(text: str, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        Nest.parse(text)


def row(count: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.GELU()) for _ in range(count)))


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("0-4", [1, 1, 1, 1, 1]),
        ("0 (1) 2-4", [1, 2, 1, 1, 1]),
        ("(0-1 (2) 3) 4", [2, 2, 3, 2, 1]),
        ("0 1~0+0 2-4", None),
    ],
)
@pytest.mark.filterwarnings("ignore:a lean tape of .* was planned, and this call allows none:UserWarning")
def test_it_runs_the_layers_with_the_plain_bits(text: str, runs: list[int] | None) -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    layers = row()

    def step(nest: Nest | None) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(1)
        y = layers(x) if nest is None else nest.run(layers, x)
        return (y, *torch.autograd.grad(y.square().sum(), [x, *layers.parameters()]))

    expected, nest = step(None), Nest.parse(text)
    for _ in range(2):
        assert all(map(torch.equal, step(nest), expected))
    if runs is not None:
        assert products(lambda: step(nest)) - products(lambda: step(None)) == sum(runs) - len(runs)


@pytest.mark.parametrize("count", [4, 6])
def test_for_another_number_of_layers(count: int) -> None:
    said = f"the plan is for 5 layers, and this Sequential has {count}; plan again with plan_model"
    with pytest.raises(InputError, match=re.escape(said)):
        Nest.parse("0 (1-3) 4").run(row(count), torch.randn(2, 8))
