"""The forms in which a block of a model can be run, and their names, which are all that a plan has of them.

A form says for the block, and for submodules of it, which way their `forward` is run: "rerun" checkpoints it, "lean 120
+ 16 B" drops from its tape, "nest ..." runs an `nn.Sequential` as nested checkpoint calls. "keep" changes nothing. So a
block's form may be "attn: rerun; mlp: lean 120 + 16 B", and a plan, which is numbers and names, can be run anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from lowtide.errors import InputError
from lowtide.torch.checkpoint import checkpoint
from lowtide.torch.lean import lean
from lowtide.torch.lean_graph import LeanPoint, LeanSize
from lowtide.torch.lean_paper import is_on_paper, lean_on_paper
from lowtide.torch.nest_text import Nest

KEEP = "keep"
_LEAN = r"lean ([0-9]+) \+ ([0-9]+) B"
_WAY = re.compile(rf"(?P<rerun>rerun(?:$|, (?=lean)))?(?:{_LEAN})?")
_PART = re.compile(r"(?:(?P<path>[^ :;]+): )?(?P<way>.+)")
Plainly = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Way:
    """How a module's `forward` is run.

    Attributes:
        rerun: without a tape; again in the backward.
        lean: with a tape of this size, in the first run or in the rerun.
        nest: for an `nn.Sequential`: its layers in nested checkpoint calls.
    """

    rerun: bool = False
    lean: LeanSize | None = None
    nest: Nest | None = None

    def __str__(self) -> str:
        if self.nest is not None:
            return f"nest {self.nest}"
        words = ["rerun"] if self.rerun else []
        if self.lean is not None:
            words.append(f"lean {self.lean.tape} + {self.lean.working} B")
        return ", ".join(words)

    def run(self, plainly: Plainly, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `plainly(module, args, kwargs)` this way."""
        if self.nest is not None:
            return self.nest.run(module, *args, **kwargs)
        if self.rerun and self.lean is not None:
            return checkpoint(_leanly, plainly, module, args, kwargs, self.lean)
        if self.rerun:
            return checkpoint(plainly, module, args, kwargs)
        return _leanly(plainly, module, args, kwargs, self.lean)


def _leanly(
    plainly: Plainly, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], size: LeanSize | None
) -> Any:
    run = lean_on_paper if is_on_paper() else lean
    return run(plainly, module, args, kwargs, tape=size)


RERUN = Way(rerun=True)


def lean_way(point: LeanPoint, *, rerun: bool = False) -> Way:
    """The way that keeps this point of a lean frontier."""
    return Way(rerun=rerun, lean=LeanSize(point.tape, point.working, strict=False))


@dataclass(frozen=True, slots=True)
class Form:
    """For the block ("") and submodules of it, the way that each is run."""

    ways: tuple[tuple[str, Way], ...] = ()

    def __str__(self) -> str:
        return "; ".join(f"{path}: {way}" if path else str(way) for path, way in self.ways) or KEEP

    @classmethod
    def parse(cls, name: str) -> Form:
        """The form of that name."""
        if name == KEEP:
            return cls()
        ways = []
        for part in name.split("; "):
            match = _PART.fullmatch(part)
            way = None if match is None else _way(match["way"])
            if match is None or way is None:
                raise InputError(f"there is no form {name!r}: the plan was not made by plan_model of this version")
            ways.append((match["path"] or "", way))
        return cls(tuple(ways))


def _way(text: str) -> Way | None:
    if text.startswith("nest "):
        return Way(nest=Nest.parse(text[5:]))
    match = _WAY.fullmatch(text)
    if match is None or not text:
        return None
    size = None if match[2] is None else LeanSize(int(match[2]), int(match[3]), strict=False)
    return Way(rerun=bool(match["rerun"]), lean=size)
