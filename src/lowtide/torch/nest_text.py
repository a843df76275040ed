"""A row of layers in nested checkpoint calls, as text: "0 (1-2 (3 4~120+16)) 5".

Layers are numbers and ranges. Those in parentheses are one checkpoint call; a tilde is followed by the bytes that a
lean tape of them keeps, and makes again at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from lowtide.chain import Chain
from lowtide.errors import InputError
from lowtide.torch.layer_forms import run_lean, size_of_form
from lowtide.torch.lean_graph import LeanSize
from lowtide.torch.nest import Part, Runner
from lowtide.torch.traceless import Layer

_TOKEN = re.compile(r"(\()|(\))|([0-9]+)(?:-([0-9]+))?(?:~([0-9]+)\+([0-9]+))?|( +)")


@dataclass(frozen=True, slots=True)
class Leaf:
    """Layers [start, stop), called one after the other, with a whole tape or a lean one."""

    start: int
    stop: int
    lean: LeanSize | None = None

    def __str__(self) -> str:
        layers = str(self.start) if self.stop == self.start + 1 else f"{self.start}-{self.stop - 1}"
        return layers if self.lean is None else f"{layers}~{self.lean.tape}+{self.lean.working}"


@dataclass(frozen=True, slots=True)
class Nest:
    """Leaves, and groups of them that are checkpointed."""

    parts: tuple[Leaf | Nest, ...]

    def __str__(self) -> str:
        return " ".join(f"({part})" if isinstance(part, Nest) else str(part) for part in self.parts)

    @classmethod
    def of(cls, parts: tuple[Part, ...], bounds: tuple[tuple[int, int], ...], chain: Chain) -> Nest:
        """The nest of a plan for a row whose steps are these layers."""

        def within(parts: tuple[Part, ...]) -> Iterator[Leaf | Nest]:
            for part in parts:
                if part.inside:
                    yield Nest(tuple(within(part.inside)))
                elif part.option:
                    for k in range(part.start, part.stop):
                        size = size_of_form(chain[k].menu[part.option].name)
                        yield Leaf(*bounds[k], None if size is None else size._replace(strict=False))
                else:
                    yield Leaf(bounds[part.start][0], bounds[part.stop - 1][1])

        lead = (Leaf(0, bounds[0][0]),) if bounds[0][0] else ()
        return cls((*lead, *within(parts)))

    @classmethod
    def parse(cls, text: str) -> Nest:
        """The nest that was written so."""
        stack: list[list[Leaf | Nest]] = [[]]
        place = 0
        while place < len(text):
            match = _TOKEN.match(text, place)
            if match is None or (match[2] and len(stack) == 1):
                raise InputError(
                    f"{text!r} is no nest of layers: it cannot be read from {text[place : place + 10]!r} on"
                )
            place = match.end()
            if match[1]:
                stack.append([])
            elif match[2]:
                inner = cls(tuple(stack.pop()))
                stack[-1].append(inner)
            elif match[3]:
                size = None if match[5] is None else LeanSize(int(match[5]), int(match[6]), strict=False)
                stack[-1].append(Leaf(int(match[3]), int(match[4] or match[3]) + 1, size))
        if len(stack) > 1:
            raise InputError(f"{text!r} is no nest of layers: a parenthesis is not closed")
        return cls(tuple(stack[0]))

    def leaves(self) -> Iterator[Leaf]:
        """All of them, in order."""
        for part in self.parts:
            if isinstance(part, Nest):
                yield from part.leaves()
            else:
                yield part

    def check(self, row: nn.Module) -> None:
        """Say why a module cannot be run so."""
        layers, most = len(list(row.children())), max(leaf.stop for leaf in self.leaves())
        if not isinstance(row, nn.Sequential) or type(row).forward is not nn.Sequential.forward:
            raise InputError(
                f"the plan is for an nn.Sequential, and this {type(row).__name__} is none; plan again with plan_model"
            )
        if most != layers:
            raise InputError(
                f"the plan is for {most:,} layers, and this {type(row).__name__} has {layers:,}; plan again with "
                "plan_model"
            )

    def run(self, row: nn.Module, x: Any) -> Any:
        """Run the layers of an `nn.Sequential` so."""
        self.check(row)
        layers, leaves = list(row.children()), list(self.leaves())
        steps = tuple(tuple(layers[leaf.start : leaf.stop]) for leaf in leaves)

        def leanly(step: tuple[Layer, ...], k: int, _: int, state: Any) -> Any:
            size = leaves[k].lean
            assert size is not None
            return run_lean(step, state, size)

        return Runner(steps, {}, leanly).run(self._steps(0)[0], x)

    def _steps(self, first: int) -> tuple[tuple[Part, ...], int]:
        """As parts of a row whose steps are the leaves, from number `first` on; and the number after the last."""
        found = []
        for part in self.parts:
            if isinstance(part, Nest):
                inside, after = part._steps(first)
                found.append(Part(first, after, inside))
            else:
                after = first + 1
                found.append(Part(first, after, (), int(part.lean is not None)))
            first = after
        return tuple(found), first
