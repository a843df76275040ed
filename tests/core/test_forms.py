"""Forms: what is written can be read again, as JSON and as the text of earlier versions; what their text says."""

from __future__ import annotations

import contextlib
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide import InputError
from lowtide.forms import (
    KEEP,
    RERUN,
    Form,
    LayerNest,
    LayerRange,
    LeanForm,
    Way,
    document,
    form_named,
    form_of,
    lean_form,
    nest_written,
)

SIZES = st.builds(LeanForm, st.integers(0, 10**12), st.integers(0, 10**12))
WORDS = st.from_regex(r"[a-z_0-9]{1,8}", fullmatch=True)


@st.composite
def nests(draw: st.DrawFn) -> LayerNest:
    """Ranges one after the other, some of them in nests of nests."""
    place = 0

    def parts(depth: int) -> tuple[LayerRange | LayerNest, ...]:
        nonlocal place
        found: list[LayerRange | LayerNest] = []
        for _ in range(draw(st.integers(1, 3))):
            if depth < 3 and draw(st.booleans()):
                found.append(LayerNest(parts(depth + 1)))
            else:
                start, place = place, place + draw(st.integers(1, 12))
                found.append(LayerRange(start, place, draw(st.none() | SIZES)))
        return tuple(found)

    return LayerNest(parts(0))


WAYS = (
    st.just(Way(rerun=True))
    | st.builds(lambda size: Way(lean=size), SIZES)
    | st.builds(lambda size: Way(rerun=True, lean=size), SIZES)
    | st.builds(lambda nest: Way(nest=nest), nests())
    | st.builds(lambda names: Way(rerun=True, kept=tuple(names)), st.lists(WORDS, min_size=1, max_size=3))
    | st.builds(lambda which: Way(rerun=True, products=which), st.sampled_from(["all", "weights"]))
)
PATHS = st.from_regex(r"[a-z_0-9]{1,8}(\.[a-z_0-9]{1,8}){0,2}", fullmatch=True)


@pytest.mark.long
@given(st.lists(st.tuples(st.text(max_size=9), WAYS), max_size=4))
def test_json_is_read_as_it_was_written(ways: list[tuple[str, Way]]) -> None:
    form = Form(tuple(ways))
    assert form_of(json.loads(json.dumps(document(form)))) == form


@given(st.lists(st.tuples(st.just("") | PATHS, WAYS), max_size=4))
def test_the_text_of_earlier_versions_is_read_as_the_same_form(ways: list[tuple[str, Way]]) -> None:
    form = Form(tuple(ways))
    assert form_named(str(form)) == form


@given(st.text(max_size=30))
def test_any_other_text_is_no_form(text: str) -> None:
    form = form_named(text)
    assert form is None or form_named(str(form)) == form


@pytest.mark.parametrize(
    "name", ["", "rerun, ", "sideways", "attn: ", "attn: keep", "lean 1", "rerun; ", "nest", ": rerun", "nest of birds"]
)
def test_what_is_no_form(name: str) -> None:
    assert form_named(name) is None


def test_how_they_look() -> None:
    assert (str(KEEP), str(RERUN), str(lean_form(120, 16))) == ("keep", "rerun", "lean 120 + 16 B")
    assert str(lean_form(120, 16, rerun=True)) == "rerun, lean 120 + 16 B"
    parts = Form((("attn", Way(rerun=True)), ("mlp", Way(lean=LeanForm(2048, 2)))))
    assert str(parts) == "attn: rerun; mlp: lean 2048 + 2 B"
    assert parts.in_words() == "attn: rerun; mlp: lean 2 KiB + 2 B"
    assert str(Form((("", Way(rerun=True, kept=("a", "b"))),))) == "rerun, keep a, b"
    assert str(Form((("", Way(rerun=True, products="weights")),))) == "rerun, keep products of weights"


def test_what_sort_they_are() -> None:
    nest = Form((("", Way(nest=nest_written("0 (1 2~4+1)"))),))
    parts = Form((("", Way(rerun=True)), ("attn", Way(rerun=True))))
    some = [KEEP, RERUN, lean_form(4, 1), lean_form(4, 1, rerun=True), nest, parts, Form((("attn", Way(rerun=True)),))]
    assert [form.kind for form in some] == ["kept", "rerun", "lean", "rerun", "nested", "in parts", "in parts"]
    assert [form.is_lean for form in some] == [False, False, True, True, True, False, False]
    assert [form.whole_lean for form in some] == [None, None, LeanForm(4, 1), None, None, None, None]


@given(nests())
def test_ranges_are_all_layers_in_order(nest: LayerNest) -> None:
    ranges = list(nest.ranges())
    assert [part.start for part in ranges] == [0, *(part.stop for part in ranges[:-1])]
    assert nest_written(str(nest)) == nest


@given(st.text("0123456789-~+() ", max_size=30))
def test_whatever_nest_can_be_read_is_written_the_same_way(text: str) -> None:
    with contextlib.suppress(InputError):
        nest = nest_written(text)
        assert nest_written(str(nest)) == nest


def test_how_a_nest_looks() -> None:
    inner = LayerNest((LayerRange(3, 4), LayerRange(4, 5, LeanForm(120, 16))))
    nest = LayerNest((LayerRange(0, 1), LayerNest((LayerRange(1, 3), inner)), LayerRange(5, 6)))
    assert str(nest) == "0 (1-2 (3 4~120+16)) 5"
    assert nest_written("0 (1-2 (3 4~120+16)) 5") == nest


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
        nest_written(text)
