"""Names of forms: a plan has nothing but them, so what is written must be read as the same."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lowtide.torch as lt
from lowtide import InputError, Plan
from lowtide.torch.lean_graph import LeanSize
from lowtide.torch.model_forms import KEEP, RERUN, Form, Way
from tests.torch.models import MODELS, Model, model, train
from tests.torch.odd_blocks import Mlp
from tests.torch.odd_models import odd, row_of
from tests.torch.test_nest_text import SIZES, nests

WAYS = (
    st.just(RERUN)
    | st.builds(lambda size: Way(lean=size), SIZES)
    | st.builds(lambda size: Way(rerun=True, lean=size), SIZES)
    | st.builds(lambda nest: Way(nest=nest), nests())
)
USUAL = st.from_regex(r"[a-z_0-9]{1,8}(\.[a-z_0-9]{1,8}){0,2}", fullmatch=True)


@given(st.lists(st.tuples(st.just("") | USUAL, WAYS), max_size=4))
def test_what_is_written_can_be_read(ways: list[tuple[str, Way]]) -> None:
    form = Form(tuple(ways))
    assert Form.parse(str(form)) == form


@given(st.text(max_size=30))
def test_anything_else_is_no_form(text: str) -> None:
    with contextlib.suppress(InputError):
        form = Form.parse(text)
        assert Form.parse(str(form)) == form


def test_how_they_look() -> None:
    assert str(Form()) == KEEP == "keep"
    assert str(Form((("", RERUN),))) == "rerun"
    assert str(Form((("", Way(lean=LeanSize(120, 16, strict=False))),))) == "lean 120 + 16 B"
    assert str(Form((("", Way(rerun=True, lean=LeanSize(120, 16, strict=False))),))) == "rerun, lean 120 + 16 B"
    assert (
        str(Form((("attn", RERUN), ("mlp", Way(lean=LeanSize(1, 2, strict=False))))))
        == "attn: rerun; mlp: lean 1 + 2 B"
    )


@pytest.mark.parametrize(
    "name", ["", "rerun, ", "sideways", "attn: ", "attn: keep", "lean 1", "rerun; ", "nest", ": rerun"]
)
def test_what_is_no_form(name: str) -> None:
    said = f"there is no form {name!r}: the plan was not made by plan_model of this version"
    with pytest.raises(InputError, match=re.escape(said)):
        Form.parse(name)


@pytest.mark.parametrize("name", [*MODELS, "vgg", "torch's own", "dictionary"])
def test_the_forms_of_real_plans(name: str) -> None:
    """Every menu begins with keep, has the others once each, and can be read."""
    made = model(name) if name in MODELS else odd(name)
    chain = made.plan("1GB").chain
    for k, block in enumerate(chain.names):
        names = [option.name for option in chain[k].menu]
        if block.startswith("("):
            assert names == [""] or names == [KEEP]
        else:
            assert names[0] == KEEP
            assert len(set(names)) == len(names) > 1
            assert [str(Form.parse(name)) for name in names] == names
            assert "rerun" in names


class OddlyNamed(nn.Module):
    """Its parts have names that forms are written with."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a b": Mlp(), "c: rerun; d": Mlp()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        for part in self.parts.values():
            x = part(x)
        return x


def test_submodules_with_the_oddest_names() -> None:
    def fresh() -> Model:
        torch.manual_seed(0)
        return row_of(OddlyNamed)

    plain = train(fresh())
    least = fresh().least()
    for peak in (least, (least + plain.peak) // 2):
        made = fresh()
        lt.apply(Plan.from_json(made.plan(peak).to_json()), made.module)
        found = train(made)
        found.assert_same(plain)
        assert found.peak <= peak
