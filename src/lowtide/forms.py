"""The forms in which a step can be run, as values: the meaning of an entry of a step's menu.

A form holds, for a block and for modules inside it, the way in which each is run; the form without any way keeps the
whole tape. Being a value, it makes a plan that can be run anywhere. `document` and `form_of` are the one codec to JSON
and back. `str(form)` is for people; nothing is decided by it. Plans of earlier versions have only that text, which
`form_named` reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from lowtide.checks import keep_whole
from lowtide.errors import InputError
from lowtide.sizes import format_size


@dataclass(frozen=True, slots=True)
class LeanForm:
    """A lean tape: the most bytes that it keeps, and the most recomputed bytes that are alive at once."""

    tape: int
    working: int

    def __post_init__(self) -> None:
        keep_whole(self, "tape", least=0)
        keep_whole(self, "working", least=0)

    def __str__(self) -> str:
        return f"lean {self.tape} + {self.working} B"

    def in_words(self) -> str:
        """The same, with sizes as people write them."""
        return f"lean {format_size(self.tape)} + {format_size(self.working)}"


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Layers [start, stop), called one after another, with a whole tape or a lean one."""

    start: int
    stop: int
    lean: LeanForm | None = None

    def __str__(self) -> str:
        layers = str(self.start) if self.stop == self.start + 1 else f"{self.start}-{self.stop - 1}"
        return layers if self.lean is None else f"{layers}~{self.lean.tape}+{self.lean.working}"


@dataclass(frozen=True, slots=True)
class LayerNest:
    """A row of layers in nested checkpoint calls: ranges of layers, and nests of them that are run again together.

    As text, "0 (1-2 (3 4~120+16)) 5": the layers in parentheses are one checkpoint call, and a tilde is followed by the
    two numbers of the layers' `LeanForm`.
    """

    parts: tuple[LayerRange | LayerNest, ...]

    def __str__(self) -> str:
        return " ".join(f"({part})" if isinstance(part, LayerNest) else str(part) for part in self.parts)

    def ranges(self) -> Iterator[LayerRange]:
        """All ranges of layers in the nest, in order."""
        for part in self.parts:
            if isinstance(part, LayerNest):
                yield from part.ranges()
            else:
                yield part


@dataclass(frozen=True, slots=True)
class Way:
    """How one module is run.

    Attributes:
        rerun: run without a tape, and again in the backward.
        lean: the size of a lean tape, which the rerun keeps if there is one, else the first run.
        nest: for a row of layers, its nested checkpoint calls.
        kept: for a rerun, the names of values that the first run keeps.
        products: for a rerun, the products of arrays that the first run keeps: "all", or "weights" for those without a
            batch.
    """

    rerun: bool = False
    lean: LeanForm | None = None
    nest: LayerNest | None = None
    kept: tuple[str, ...] = ()
    products: str = ""

    def __post_init__(self) -> None:
        if self.products and self.products not in _PRODUCTS:
            raise InputError(f"products={self.products!r} is not known; give one of {', '.join(_PRODUCTS)}, or none")

    def __str__(self) -> str:
        return self._told(str)

    def in_words(self) -> str:
        """The same, with sizes as people write them."""
        return self._told(LeanForm.in_words)

    def _told(self, size: Callable[[LeanForm], str]) -> str:
        if self.nest is not None:
            return f"nest {self.nest}"
        words = ["rerun"] if self.rerun else []
        if self.lean is not None:
            words.append(size(self.lean))
        if self.kept:
            words.append(f"keep {', '.join(self.kept)}")
        if self.products:
            words.append(_PRODUCTS[self.products])
        return ", ".join(words)


_PRODUCTS = {"all": "keep products", "weights": "keep products of weights"}


class FormKind(StrEnum):
    """The kind of a form, in the words and the order in which reports count blocks: "8 kept, 3 lean"."""

    KEPT = "kept"
    LEAN = "lean"
    IN_PARTS = "in parts"  # modules inside the block each have a way of their own
    NESTED = "nested"
    RERUN = "rerun"
    OTHER = "other"  # an entry of a menu on paper, which has a name and no form


@dataclass(frozen=True, slots=True)
class Form:
    """The way in which a block (path "") and modules inside it (by path) are run; without any, the tape is kept."""

    ways: tuple[tuple[str, Way], ...] = ()

    def __str__(self) -> str:
        return self._told(str)

    def in_words(self) -> str:
        """The same, with sizes as people write them."""
        return self._told(Way.in_words)

    def _told(self, way_in_words: Callable[[Way], str]) -> str:
        told = [(path, way_in_words(way)) for path, way in self.ways]
        return "; ".join(f"{path}: {way}" if path else way for path, way in told) or "keep"

    @property
    def kind(self) -> FormKind:
        """The kind of the form: one way for the whole block, or a way for each of some of its parts."""
        if not self.ways:
            return FormKind.KEPT
        (path, way), *others = self.ways
        if path or others:
            return FormKind.IN_PARTS
        if way.nest is not None:
            return FormKind.NESTED
        return FormKind.RERUN if way.rerun else FormKind.LEAN

    @property
    def is_lean(self) -> bool:
        """Whether the block, or anything in it, is run with a lean tape."""
        return any(way.lean is not None or (way.nest is not None and _has_lean(way.nest)) for _, way in self.ways)

    @property
    def whole_lean(self) -> LeanForm | None:
        """The lean tape with which the whole block is run, if that is its one way and it is not run again."""
        match self.ways:
            case (("", Way(rerun=False, lean=LeanForm() as lean)),):
                return lean
        return None


def _has_lean(nest: LayerNest) -> bool:
    return any(part.lean is not None for part in nest.ranges())


KEEP = Form()
RERUN = Form((("", Way(rerun=True)),))


def lean_form(tape: int, working: int, *, rerun: bool = False) -> Form:
    """The form with a lean tape, in the first run or in the rerun."""
    return Form((("", Way(rerun=rerun, lean=LeanForm(tape, working))),))


# JSON. A form is a list of ways, each an object with the fields that differ from their defaults.


def document(form: Form) -> list[dict[str, Any]]:
    """The form as it is written to JSON."""
    return [_way_document(path, way) for path, way in form.ways]


def form_of(ways: Any) -> Form:
    """The form that `document` wrote."""
    return Form(tuple((way.get("path", ""), _way_of(way)) for way in ways))


def _way_document(path: str, way: Way) -> dict[str, Any]:
    written: dict[str, Any] = {"path": path} if path else {}
    if way.rerun:
        written["rerun"] = True
    if way.lean is not None:
        written["lean"] = [way.lean.tape, way.lean.working]
    if way.nest is not None:
        written["nest"] = _nest_document(way.nest)
    if way.kept:
        written["kept"] = list(way.kept)
    if way.products:
        written["products"] = way.products
    return written


def _way_of(written: dict[str, Any]) -> Way:
    unknown = sorted(written.keys() - {"path", "rerun", "lean", "nest", "kept", "products"})
    if unknown:
        raise InputError(f"there is no form with {', '.join(map(repr, unknown))}: the plan is not of this version")
    lean, nest = written.get("lean"), written.get("nest")
    return Way(
        rerun=bool(written.get("rerun", False)),
        lean=None if lean is None else LeanForm(*lean),
        nest=None if nest is None else _nest_of(nest),
        kept=tuple(written.get("kept", ())),
        products=written.get("products", ""),
    )


def _nest_document(nest: LayerNest) -> list[Any]:
    """The nest's parts: {"again": parts}, or [start, stop], or with a lean tape [start, stop, tape, working]."""
    return [
        {"again": _nest_document(part)} if isinstance(part, LayerNest) else _range_document(part) for part in nest.parts
    ]


def _range_document(part: LayerRange) -> list[int]:
    lean = [] if part.lean is None else [part.lean.tape, part.lean.working]
    return [part.start, part.stop, *lean]


def _nest_of(parts: list[Any]) -> LayerNest:
    return LayerNest(tuple(_nest_of(part["again"]) if isinstance(part, dict) else _range_of(*part) for part in parts))


def _range_of(start: int, stop: int, *lean: int) -> LayerRange:
    return LayerRange(start, stop, LeanForm(*lean) if lean else None)


# The text that plans of earlier versions have in place of a form.

_PART = re.compile(r"(?:(?P<path>[^ :;]+): )?(?P<way>.+)")
_WAY = re.compile(r"(?P<rerun>rerun(?:$|, (?=lean)))?(?:lean (?P<tape>[0-9]+) \+ (?P<working>[0-9]+) B)?")
_NEST = re.compile(r"(\()|(\))|([0-9]+)(?:-([0-9]+))?(?:~([0-9]+)\+([0-9]+))?|( +)")
_KEPT = "rerun, keep "


def form_named(text: str) -> Form | None:
    """The form that an earlier version wrote as this text, or None if the text is not that of a form."""
    if text == str(KEEP):
        return KEEP
    ways = []
    for part in text.split("; "):
        match = _PART.fullmatch(part)
        way = None if match is None else _way_named(match["way"])
        if match is None or way is None:
            return None
        ways.append((match["path"] or "", way))
    return Form(tuple(ways))


def _way_named(text: str) -> Way | None:
    if text.startswith("nest "):
        try:
            return Way(nest=nest_written(text.removeprefix("nest ")))
        except InputError:  # somebody's own name for an entry of a menu
            return None
    for products, words in _PRODUCTS.items():
        if text == f"rerun, {words}":
            return Way(rerun=True, products=products)
    if text.startswith(_KEPT):
        return Way(rerun=True, kept=tuple(text.removeprefix(_KEPT).split(", ")))
    match = _WAY.fullmatch(text)
    if match is None or not text:
        return None
    lean = None if match["tape"] is None else LeanForm(int(match["tape"]), int(match["working"]))
    return Way(rerun=bool(match["rerun"]), lean=lean)


def nest_written(text: str) -> LayerNest:
    """The nest of layers whose text this is.

    Raises:
        InputError: the text is not that of a nest.
    """
    stack: list[list[LayerRange | LayerNest]] = [[]]
    place = 0
    while place < len(text):
        match = _NEST.match(text, place)
        if match is None or (match[2] and len(stack) == 1):
            raise InputError(f"{text!r} is no nest of layers: it cannot be read from {text[place : place + 10]!r} on")
        place = match.end()
        if match[1]:
            stack.append([])
        elif match[2]:
            inner = LayerNest(tuple(stack.pop()))
            stack[-1].append(inner)
        elif match[3]:
            lean = None if match[5] is None else LeanForm(int(match[5]), int(match[6]))
            stack[-1].append(LayerRange(int(match[3]), int(match[4] or match[3]) + 1, lean))
    if len(stack) > 1:
        raise InputError(f"{text!r} is no nest of layers: a parenthesis is not closed")
    return LayerNest(tuple(stack[0]))
