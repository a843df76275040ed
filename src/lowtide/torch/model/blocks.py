"""Finds the blocks of a model by watching one forward: which submodules are called once, and how large their tapes are.

A block is a submodule that is called once, has a tape, and is one of a row: an entry of an `nn.ModuleList` or
`nn.Sequential`, or one of several of its class. An `nn.Sequential` of layers is one block, which can be run as nested
checkpoint calls. Where a model has none of these, the submodules that it calls itself are its blocks. The forward keeps
no tape: the tensors that autograd would save are counted and released.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lowtide.torch.memory.tracker import Dropped, Log, tensors_of, unpack_dropped, watching
from lowtide.torch.model.apply import ROOT
from lowtide.torch.model.loss import Loss, loss_of
from lowtide.torch.state.stand_in import StandIn, original, standing_in

# The share of all tapes below which a submodule is not worth a decision, and no block.
_LEAST_SHARE_OF_A_BLOCK = 0.002
# If a row inside a submodule has this share of its tape, the row's entries are the blocks instead of it ...
_SHARE_OF_A_ROW = 0.6
# ... unless the submodule has less than this share of all tapes.
_LEAST_SHARE_WITH_A_ROW = 0.1
# The share of a block's tape from which on a submodule of it may be rerun by itself.
_LEAST_SHARE_OF_A_CHILD = 0.15
_MOST_CHILDREN = 3  # submodules of a block that may be rerun by themselves; every set of them is a form to measure
# A call that is the only one with a tape inside another is looked into only if it has this many calls with a tape.
_LEAST_BLOCKS_INSIDE = 3


@dataclass(eq=False, slots=True)
class Call:
    """A call of a submodule.

    Attributes:
        path, module: the submodule.
        inside: the calls that it made, in order.
        needs: for each tensor among its arguments, whether it requires a gradient.
        forms: the metadata of each tensor among its arguments.
        tape: bytes of the tensors that autograd would save, of those made inside and not returned.
        packs: shape and dtype of each tensor that autograd would save, in order.
        given, returned: numbers of the storages of arguments and results.
        is_overwritten: whether an argument was changed in place after the call, which therefore cannot be rerun.
    """

    path: str
    module: nn.Module
    inside: list[Call] = field(default_factory=list)
    needs: tuple[bool, ...] = ()
    forms: tuple[Any, ...] = ()
    tape: int = 0
    packs: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)
    given: frozenset[int] = frozenset()
    returned: frozenset[int] = frozenset()
    is_overwritten: bool = False

    def below(self) -> Iterator[Call]:
        """All calls inside, at any depth."""
        for call in self.inside:
            yield call
            yield from call.below()


@dataclass(eq=False, slots=True)
class FoundBlock:
    """A block of a model.

    Attributes:
        call: its one call.
        is_row: whether it is an `nn.Sequential` to be run as nested checkpoint calls.
        share: the share of all tapes that is the block's.
        children: paths, relative to the block, of submodules that may be rerun by themselves.
    """

    call: Call
    is_row: bool
    share: float = 0.0
    children: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The block's path in the model; `ROOT` for the whole model."""
        return self.call.path or ROOT


class Survey:
    """One forward of a model, and the calls of submodules in it."""

    def __init__(self, model: nn.Module, loss: Loss | None) -> None:
        self._model = model
        self._loss = loss
        self._log = Log()
        self._root = Call("", model)
        self._stack = [self._root]
        self._packed: list[list[int]] = [[]]
        self._paths = {module: path for path, module in model.named_modules()}
        self._counts: Counter[nn.Module] = Counter()
        self._versions: list[tuple[Call, torch.Tensor, int]] = []
        self.notes: list[str] = []

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call the model and compute the loss, noting every call of a submodule."""
        scripted = [path for module, path in self._paths.items() if isinstance(module, torch.jit.ScriptModule)]
        taps = [
            _Tap(self, module)
            for module, path in self._paths.items()
            if module is not self._model and not any(f"{path}.".startswith(f"{other}.") for other in scripted)
        ]
        if scripted:
            self.notes.append(f"compiled by TorchScript, and so left as they are: {few(scripted)}")
        with standing_in(taps), watching(self._log), saved_tensors_hooks(self._pack, unpack_dropped):
            try:
                self._call(self._root, args, kwargs)
            except Dropped:
                self.notes.append("the model pulls something back in its forward: no block was planned")
                self._root.inside.clear()
        for call, tensor, version in self._versions:
            call.is_overwritten |= tensor._version != version
        self._versions.clear()

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a submodule that is called, and note the call."""
        call = Call(self._paths[module], module)
        self._counts[module] += 1
        self._stack[-1].inside.append(call)
        self._stack.append(call)
        self._packed.append([])
        try:
            return self._call(call, args, kwargs)
        finally:
            self._stack.pop()
            packed = self._packed.pop()
            self._packed[-1] += packed
            self._stack[-1].packs += call.packs

    def _call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call and note its tensors and its tape; the call of the model itself includes the loss."""
        log = self._log
        tensors = tensors_of((args, kwargs))
        call.needs = tuple(tensor.requires_grad for tensor in tensors)
        call.forms = tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors)
        call.given = frozenset(map(log.number, tensors)) - {0}
        first = len(log.sizes)  # storages are numbered from 1 as they are made
        if call is self._root:
            result = loss_of(self._model(*args, **kwargs), self._loss)
        else:
            result = original(call.module)(*args, **kwargs)
        if call.inside or self._is_entry(call):
            self._versions += [(call, t, t._version) for t in tensors if not t.is_inference()]
        call.returned = frozenset(map(log.number, tensors_of(result))) - {0}
        call.tape = log.bytes({number for number in self._packed[-1] if number > first} - call.returned)
        return result

    def _pack(self, tensor: torch.Tensor) -> None:
        self._packed[-1].append(self._log.number(tensor))
        self._stack[-1].packs.append((tensor.shape, tensor.dtype))

    # --- what is a block

    @property
    def tape(self) -> int:
        """The bytes of all tensors that autograd would save."""
        return self._root.tape

    def blocks(self) -> list[FoundBlock]:
        """The blocks in the order of their calls."""
        if self._is_row(self._root) and (self._repeats(self._root) or not self._has_a_row_inside(self._root)):
            return [FoundBlock(self._root, True, 1.0)]
        classes = Counter(type(call.module) for call in self._root.below() if call.inside)
        found = list(self._below(self._root, classes))
        if not found:
            found = [FoundBlock(call, self._is_row(call)) for call in self._only(self._root).inside if self._fits(call)]
            if found:
                self.notes.append("no submodule is one of a row, so the outermost ones were taken for blocks")
        self._note_left_out()
        for block in found:
            block.share = block.call.tape / self.tape
            if not block.is_row:
                block.children = self._children(block.call)
        return found

    def uncalled(self) -> dict[str, str]:
        """Entries of rows that were not called, each with the nearest of its class that was, those before it first."""
        found: dict[str, str] = {}
        for path, module in self._model.named_modules():
            if isinstance(module, nn.ModuleList | nn.Sequential):
                entries = [(f"{path}.{name}" if path else name, entry) for name, entry in module.named_children()]
                for k, (name, entry) in enumerate(entries):
                    likely = [*reversed(entries[:k]), *entries[k + 1 :]]
                    if not self._counts[entry]:
                        siblings = (n for n, e in likely if type(e) is type(entry) and self._counts[e] == 1)
                        sibling = next(siblings, None)
                        if sibling is not None:
                            found[name] = sibling
        return found

    def _below(self, call: Call, classes: Counter[type]) -> Iterator[FoundBlock]:
        for child in call.inside:
            if not self._fits(child):
                continue
            if self._is_row(child) and (self._repeats(child) or not self._has_a_row_inside(child)):
                yield FoundBlock(child, True)
            elif self._has_a_row_inside(child):
                yield from self._below(child, classes)
            elif self._is_entry(child) or classes[type(child.module)] > 1:
                yield FoundBlock(child, False)
            else:
                yield from self._below(child, classes)

    def _fits(self, call: Call) -> bool:
        """Whether the call can be planned: the module's only one, with a large enough tape and unchanged arguments."""
        is_large = call.tape > _LEAST_SHARE_OF_A_BLOCK * self.tape
        return self._counts[call.module] == 1 and is_large and not call.is_overwritten

    def _is_entry(self, call: Call) -> bool:
        parent, _, _ = call.path.rpartition(".")
        return isinstance(self._model.get_submodule(parent), nn.ModuleList | nn.ModuleDict | nn.Sequential)

    def _is_row(self, call: Call) -> bool:
        """Whether the module is an `nn.Sequential` that does nothing but call its entries, each once."""
        module = call.module
        entries = list(module.children())
        return (
            isinstance(module, nn.Sequential)
            and type(module).forward is nn.Sequential.forward
            and len(entries) > 1
            and [inner.module for inner in call.inside] == entries
            and all(self._counts[entry] == 1 for entry in entries)
        )

    def _repeats(self, call: Call) -> bool:
        """Whether a row has several entries of one class that has submodules and is no `nn.Sequential`."""
        kinds = Counter(type(inner.module) for inner in call.inside if inner.inside)
        return any(n > 1 and not issubclass(kind, nn.Sequential) for kind, n in kinds.items())

    def _has_a_row_inside(self, call: Call) -> bool:
        """Whether most of the call's tape belongs to a row of submodules of one class, each fed by the one before."""
        if call.tape < _LEAST_SHARE_WITH_A_ROW * self.tape:
            return False
        rows: dict[tuple[str, type], list[Call]] = {}
        for inner in call.below():
            parent = inner.path.rpartition(".")[0]
            if self._fits(inner) and self._is_entry(inner) and parent != call.path:
                rows.setdefault((parent, type(inner.module)), []).append(inner)
        for row in rows.values():
            chained = all(b.given & a.returned for a, b in pairwise(row))
            if len(row) > 1 and chained and sum(inner.tape for inner in row) >= _SHARE_OF_A_ROW * call.tape:
                return True
        return False

    def _only(self, call: Call) -> Call:
        """The call that this one wraps, at any depth: the only one inside that has a tape; else the call itself."""
        while len(taped := [inner for inner in call.inside if inner.tape]) == 1:
            if sum(inner.tape > 0 for inner in taped[0].inside) < _LEAST_BLOCKS_INSIDE or not self._fits(taped[0]):
                break
            call = taped[0]
        return call

    def _children(self, call: Call) -> tuple[str, ...]:
        inner = self._only(call)
        start = len(call.path) + 1 if call.path else 0
        least = _LEAST_SHARE_OF_A_CHILD * call.tape
        worth = [child for child in inner.inside if self._fits(child) and child.tape >= least]
        worth = sorted(worth, key=lambda child: -child.tape)[:_MOST_CHILDREN]
        return tuple(child.path[start:] for child in inner.inside if child in worth)

    def _note_left_out(self) -> None:
        overwritten = [call.path for call in self._root.below() if call.is_overwritten]
        if overwritten:
            self.notes.append(f"given what is changed in place afterwards, and so left as they are: {few(overwritten)}")
        paths = [
            self._paths[module]
            for module, times in self._counts.items()
            if times > 1 and any(True for _ in module.children()) and not isinstance(module, nn.ModuleList)
        ]
        if paths:
            self.notes.append(f"called more than once, and so left as they are: {few(paths)}")


def few(paths: Iterable[str]) -> str:
    """The outermost of these paths in a list, cut after the first five."""
    found = list(paths)
    outermost = [path for path in found if not any(path.startswith(f"{other}.") for other in found)]
    return ", ".join(outermost[:5]) + (f" and {len(outermost) - 5:,} more" if len(outermost) > 5 else "")


class _Tap(StandIn):
    """Reports calls of a submodule to the survey."""

    def __init__(self, survey: Survey, module: nn.Module) -> None:
        super().__init__(module)
        self._survey = survey

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the submodule through the survey."""
        return self._survey.enter(self.module, args, kwargs)
