"""Hidden state: what the steps of a loop keep in their modules, found, carried along, restored for reruns.

It is in slots: the attributes and buffers of every module that takes part, parameters without grad, and the numbers and
tensors of an object whose method is the step. Before the first step every slot is recorded. Whatever has changed when
one looks again (after each of the first steps, then wherever a snapshot is taken or a tape begins) is carried from
then on: read into snapshots, written for reruns. A slot may begin to change at any step: snapshots before that get the
value that it had from the start. Values are structures, because the first step may find None, 0.0, an empty tensor or
an empty list where later ones find a state.

Changes are found by comparing values, not only versions: BatchNorm's statistics change without one. Reruns work on
copies: the user's containers and objects are only touched by the first runs, as in a plain loop.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter, is_
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.module import register_module_forward_pre_hook

from lowtide.errors import CheckpointError, InputError
from lowtide.torch.memory.accelerators import is_of_host
from lowtide.torch.state.capture import edge_of
from lowtide.torch.state.generators import KINDS as GENERATORS
from lowtide.torch.state.notes import SMALL, is_changed, needs_grad
from lowtide.torch.state.samples import Sample, whole_sample_of
from lowtide.torch.state.scripted import scripted_places
from lowtide.torch.state.structure import MISSING, MODULE_INTERNALS, Entry, Place, Structure, own_places
from lowtide.torch.state.surroundings import Finds


class _Record:
    """The values of some slots before the first step, and copies of their tensors, which may be changed in place."""

    __slots__ = ("_sums", "copies", "generators", "origins", "slots", "structure", "tensors", "values", "versions")

    def __init__(self, slots: list[Place]) -> None:
        self.slots = slots
        self.values = [slot.get() for slot in slots]
        self.tensors: list[torch.Tensor] = []
        found: list[Any] = []
        self.structure = Structure(self.values, self.tensors, found)
        self.generators = [thing for thing in found if isinstance(thing, GENERATORS)]
        self.versions = list(map(_version, self.tensors))
        copied = _Copier()
        self.copies = [copied(tensor) if _is_readable(tensor) else None for tensor in self.tensors]
        self._sums: list[Sample] = [0] * len(self.tensors)  # of those whose copies were let go
        # Tensors with a history: where it ends, and a tensor that still has it when the step has changed this one.
        self.origins = [(edge_of(t), t.clone()) if _has_history(t) else None for t in self.tensors]

    def settle(self, carried: set[int]) -> None:
        """Keep copies of large tensors only for the slots at these places; of the others, checksums."""
        for place in set(range(len(self.slots))) - carried:
            for number in self.structure.row(place):
                copy = self.copies[number]
                if copy is not None and copy.nbytes > SMALL:
                    self.copies[number] = None
                    if is_of_host(copy.device):  # elsewhere versions have to do, since to read it would wait
                        self._sums[number] = whole_sample_of(copy)

    def is_changed_in_place(self, place: int) -> bool:
        """Whether tensors of the slot were written to since."""
        return any(map(self._has_other_contents, self.structure.row(place)))

    def _has_other_contents(self, number: int) -> bool:
        tensor, copy = self.tensors[number], self.copies[number]
        if _version(tensor) != self.versions[number]:
            return True
        if copy is not None:
            return is_changed(tensor, self.versions[number], copy)
        return bool(self._sums[number] != 0 and whole_sample_of(tensor) != self._sums[number])

    def replaced(self) -> list[int]:
        """The places of slots that have another value than the one recorded, or other things in it."""
        tensors: list[torch.Tensor] = []
        present = Structure([slot.get() for slot in self.slots], tensors)
        return [place for place in range(len(self.slots)) if not self._is_same(place, present, tensors)]

    def _is_same(self, place: int, present: Structure, tensors: list[torch.Tensor]) -> bool:
        before, now = self.structure.row(place), present.row(place)
        same = len(before) == len(now) and all(self.tensors[a] is tensors[b] for a, b in zip(before, now, strict=True))
        return same and self.structure.is_like(place, present, place)

    def part(self, places: list[int]) -> _Part:
        """The values of the slots at these places, as a snapshot holds them."""
        tensors = {}
        for number in (number for place in places for number in self.structure.row(place)):
            copy = self.copies[number]
            tensors[number] = self.tensors[number] if copy is None else copy
        return _Part(self.structure, places, tensors)

    def put_back(self) -> None:
        """Make every slot as it was, in the very same objects."""
        for number, (tensor, copy) in enumerate(zip(self.tensors, self.copies, strict=True)):
            if copy is not None and self._has_other_contents(number):
                tensor.data.copy_(copy)
            if tensor.requires_grad and self.origins[number] is None and not _is_trained(tensor):
                # What a step with grad has written to is part of its graph. A view cannot leave that in place.
                self.tensors[number] = tensor.detach() if tensor._is_view() else tensor.detach_()
        if changed := self.replaced():
            values = self.structure.put_back(self.tensors)
            for place in changed:
                self.slots[place].set(values[place])


class _Part:
    """The values of some slots in a snapshot: places in a structure, the tensors there, and their versions."""

    __slots__ = ("places", "structure", "tensors", "versions")

    def __init__(self, structure: Structure, places: list[int], tensors: dict[int, torch.Tensor]) -> None:
        self.structure = structure
        self.places = places
        self.tensors = tensors  # by their numbers in the structure
        self.versions = {number: _version(tensor) for number, tensor in tensors.items()}

    def leaves(self) -> list[torch.Tensor]:
        """The tensors at the places."""
        return [self.tensors[number] for place in self.places for number in self.structure.row(place)]


@dataclass(slots=True)
class HiddenState:
    """The values of all carried slots at one step."""

    parts: list[_Part] = field(default_factory=list)

    def leaves(self) -> list[torch.Tensor]:
        """All tensors in a row."""
        return [leaf for part in self.parts for leaf in part.leaves()]

    @property
    def count(self) -> int:
        """How many slots it has values of."""
        return sum(len(part.places) for part in self.parts)


@dataclass(slots=True, eq=False)
class _Carried:
    slot: Place
    in_place: bool  # whether steps change its tensors in place
    record: _Record  # of before the first step
    place: int  # in that record
    latest: list[tuple[weakref.ref[torch.Tensor], int]]  # its tensors after the latest look, with their versions


class Hidden:
    """The hidden state of a step, looked for in `roots`: its function, above all.

    Slots that are `named` are carried even if the first steps leave them alone.
    """

    def __init__(self, roots: Iterable[Any], named: Iterable[str] = ()) -> None:
        self.roots = tuple(roots)
        self.finds = Finds(self.roots)
        self.generators = list(self.finds.generators)
        self.parameters: dict[int, str] = {}  # names of the parameters of all modules that take part, by identity
        self._named = tuple(named)
        self._records: list[_Record] = []
        self._carried: list[_Carried] = []
        self._modules: dict[int, nn.Module] = {}
        self._owners: list[tuple[dict[str, Any], str]] = []
        self._known: set[tuple[int, str]] = set()
        self._training: list[tuple[nn.Module, bool]] = []  # the mode that each module ran in
        self._settled = False
        self.captured: set[GradientEdge] = set()  # where gradients of captured tensors arrive
        labels = self.finds.labels
        slots: list[Place] = []
        for module in self.finds.modules:
            slots += self._slots_of(module, labels.get(id(module), type(module).__name__))
        for thing in self.finds.objects:
            slots += own_places(thing)
        self._record(slots)
        self.generators += [generator for record in self._records for generator in record.generators]

    # --- finding

    @property
    def modules(self) -> list[nn.Module]:
        """Every module that takes part."""
        return list(self._modules.values())

    def _record(self, slots: list[Place]) -> None:
        if slots:
            self._records.append(_Record(slots))

    def _slots_of(self, root: nn.Module, label: str) -> Iterator[Place]:
        """The slots of a module and of all modules inside it."""
        for path, module in root.named_modules(prefix=label):
            if id(module) in self._modules:
                continue
            self._modules[id(module)] = module
            for name, parameter in module.named_parameters(recurse=False):
                self.parameters.setdefault(id(parameter), f"{path}.{name}")
            if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
                raise InputError(
                    f"{path} ({type(module).__name__}) is not initialised, which it can be only once; call it on an "
                    "input before, as it is done before an optimizer is made"
                )
            if isinstance(module, torch.jit.ScriptModule):
                yield from scripted_places(module, path)
            else:
                for mapping in (module._buffers, vars(module)):
                    yield from self._entries(mapping, path, list(mapping))
                    self._owners.append((mapping, path))
                frozen = [name for name, p in module._parameters.items() if p is not None and not p.requires_grad]
                yield from self._entries(module._parameters, path, frozen)

    def _entries(self, mapping: dict[str, Any], path: str, names: list[str]) -> Iterator[Place]:
        for name in names:
            if name not in MODULE_INTERNALS and (id(mapping), name) not in self._known:
                self._known.add((id(mapping), name))
                # Views of what FSDP has gathered take the place of parameters, and are its to put there.
                if not ("_is_fsdp_managed_module" in mapping and needs_grad(mapping[name])):
                    yield Entry(mapping, name, f"{path}.{name}")

    @contextmanager
    def meeting_modules(self) -> Iterator[None]:
        """Inside, every module that is called for the first time is recorded before it runs."""
        thread = get_ident()

        def meet(module: nn.Module, _: Any) -> None:
            if get_ident() == thread and id(module) not in self._modules:
                self._record(list(self._slots_of(module, type(module).__name__)))

        handle = register_module_forward_pre_hook(meet)
        try:
            yield
        finally:
            handle.remove()

    def _find_new(self) -> None:
        """Record attributes that have come up since: before, they were missing."""
        for mapping, path in self._owners:
            if len(mapping) and any((id(mapping), name) not in self._known for name in mapping):
                new = list(self._entries(mapping, path, list(mapping)))
                values = [slot.get() for slot in new]
                for slot in new:
                    slot.set(MISSING)
                self._record(new)
                for slot, value in zip(new, values, strict=True):
                    slot.set(value)

    def look(self) -> bool:
        """Carry whatever has changed; returns whether anything new is carried now."""
        self._find_new()
        for entry in self._carried:
            entry.in_place |= _are_changed(entry.latest)
        carried = {(id(entry.record), entry.place) for entry in self._carried}
        before = len(self._carried)
        for record in self._records:
            replaced = set(record.replaced())
            for place in range(len(record.slots)):
                if (id(record), place) not in carried:
                    self._carry_if_changed(record, place, is_replaced=place in replaced)
        self._note_latest(*self._present())
        return len(self._carried) > before

    def _note_latest(self, structure: Structure, tensors: list[torch.Tensor]) -> None:
        for place, entry in enumerate(self._carried):
            row = [tensors[number] for number in structure.row(place)]
            entry.latest = [(weakref.ref(tensor), _version(tensor)) for tensor in row]

    def _carry_if_changed(self, record: _Record, place: int, *, is_replaced: bool) -> None:
        slot, in_place = record.slots[place], record.is_changed_in_place(place)
        wanted = not self._settled and any(_is_called(slot.label, name) for name in self._named)
        if in_place or wanted or is_replaced:
            self._carry(slot, record, place, in_place=in_place or wanted)

    def _carry(self, slot: Place, record: _Record, place: int, *, in_place: bool) -> None:
        numbers = record.structure.row(place)
        if self._settled and in_place and any(record.copies[number] is None for number in numbers):
            raise CheckpointError(
                f"{slot.label} is changed in place at a later step but not at the first ones, and it is too large "
                f"to be copied just in case; name it: hidden=({slot.label!r},)"
            )
        origins = [record.origins[number] for number in numbers]
        if any(origin is not None and (self._settled or origin[0] in self.captured) for origin in origins):
            raise CheckpointError(
                f"{slot.label}, which has a gradient from before the loop, is replaced at a later step but not at "
                f"the first; name it: hidden=({slot.label!r},)"
            )
        self._carried.append(_Carried(slot, in_place, record, place, []))

    def complete(self, state: HiddenState) -> HiddenState:
        """Give a state the values that slots carried only since then had at that time: those of the start."""
        for record, entries in groupby(self._carried[state.count :], key=attrgetter("record")):
            state.parts.append(record.part([entry.place for entry in entries]))  # together: they may share objects
        return state

    def origins(self) -> list[tuple[GradientEdge, torch.Tensor] | None]:
        """For each leaf of the carried slots before the first step, where its history ends and a tensor that has it."""
        rows = ((entry.record, entry.record.structure.row(entry.place)) for entry in self._carried)
        return [record.origins[number] for record, row in rows for number in row]

    def settle(self) -> None:
        """The first steps are over: of what is not carried and large, checksums are enough from here on."""
        labels = [slot.label for record in self._records for slot in record.slots]
        for name in self._named:
            if not any(_is_called(label, name) for label in labels):
                raise InputError(f"hidden={name!r} is not among what the step keeps: {', '.join(labels) or 'nothing'}")
        for record in self._records:
            record.settle({entry.place for entry in self._carried if entry.record is record})
        self._training = [(module, module.training) for module in self.modules]
        self._settled = True

    def may_collect(self) -> bool:
        """Whether there are containers that steps have left alone so far and may put tensors into later."""
        carried = {(id(entry.record), entry.place) for entry in self._carried}
        return any(
            isinstance(value, list | dict | deque) and not value and (id(record), place) not in carried
            for record in self._records
            for place, value in enumerate(record.values)
        )

    def copied_bytes(self) -> int:
        """Bytes of copies that are kept in case a slot begins to change."""
        carried = {(id(entry.record), n) for entry in self._carried for n in entry.record.structure.row(entry.place)}
        return sum(
            copy.nbytes
            for record in self._records
            for number, copy in enumerate(record.copies)
            if copy is not None and (id(record), number) not in carried
        )

    # --- reading and writing

    def _present(self) -> tuple[Structure, list[torch.Tensor]]:
        tensors: list[torch.Tensor] = []
        return Structure([entry.slot.get() for entry in self._carried], tensors), tensors

    def read(self, carry: Iterable[Any], *, copy: bool = False) -> HiddenState:
        """The present values. Tensors that steps change in place are copied, the others only with `copy`.

        Those that are leaves of the `carry` too are not: no step changes them.
        """
        if not self._carried:
            return HiddenState()
        structure, tensors = self._present()
        structure.forget_originals()
        rows = ((entry, structure.row(place)) for place, entry in enumerate(self._carried))
        changed = {id(tensors[number]) for entry, row in rows if entry.in_place or copy for number in row}
        changed -= set(map(id, carry))
        copied = _Copier()
        held = {k: copied(tensor) if id(tensor) in changed else tensor for k, tensor in enumerate(tensors)}
        return HiddenState([_Part(structure, list(range(len(self._carried))), held)])

    def write(self, state: HiddenState, carry: Iterable[Any] = ()) -> None:
        """Put a snapshot's values into the slots, in containers of their own; `carry` has the leaves beside them."""
        if not self._carried:
            return
        entries = iter(self._carried)
        copied, kept = _Copier(), set(map(id, carry))
        for part in self.complete(state).parts:
            mine = [next(entries) for _ in part.places]
            for entry, place in zip(mine, part.places, strict=True):
                for number in part.structure.row(place):
                    if _version(part.tensors[number]) != part.versions[number]:
                        raise CheckpointError(
                            f"{entry.slot.label} was changed in place at a later step but not at the first ones, so "
                            f"its snapshots are spoilt; assign a new tensor instead, or name it: "
                            f"hidden=({entry.slot.label!r},)"
                        )
                    if entry.in_place and id(part.tensors[number]) not in kept:
                        copied(part.tensors[number])
            tensors = {number: copied.of(tensor) for number, tensor in part.tensors.items()}
            for entry, value in zip(mine, part.structure.values(tensors, part.places), strict=True):
                entry.slot.set(value)

    def leaves(self) -> list[torch.Tensor]:
        """The tensors of the present values, uncopied."""
        return self._present()[1]

    def replace(self, leaves: list[torch.Tensor]) -> None:
        """Put these tensors where the present ones are; containers stay the same objects."""
        structure, present = self._present()
        if not all(map(is_, leaves, present)):
            for entry, value in zip(self._carried, structure.put_back(leaves, rewinds=False), strict=True):
                entry.slot.set(value)
        self._note_latest(structure, leaves)

    def finish(self, finals: list[Any]) -> None:
        """Leave the final values in the slots: those with a gradient as the loop's results, the others as they are."""
        rows = zip(finals, self.leaves(), strict=True)
        self.replace([new if isinstance(new, torch.Tensor) and new.requires_grad else old for new, old in rows])

    def in_place(self) -> list[bool]:
        """For each leaf, whether steps change its slot in place."""
        return [entry.in_place for entry in self._slots_of_leaves()]

    def names(self) -> list[str]:
        """One name for each leaf."""
        return [entry.slot.label for entry in self._slots_of_leaves()]

    def _slots_of_leaves(self) -> list[_Carried]:
        structure, _ = self._present()
        return [entry for place, entry in enumerate(self._carried) for _ in structure.row(place)]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, slots may be written at will and modules are in the mode they ran in; afterwards all is as before."""
        held = [entry.slot.get() for entry in self._carried]
        modes = [(module, module.training) for module, _ in self._training]
        for module, training in self._training:
            module.training = training
        try:
            yield
        finally:
            for entry, value in zip(self._carried, held, strict=True):
                entry.slot.set(value)
            for module, training in modes:
                module.training = training

    def undo(self) -> None:
        """Put every recorded slot back as it was before the first step."""
        self._find_new()
        for record in reversed(self._records):
            record.put_back()

    def forget_start(self) -> None:
        """The loop ran through: what was there before the first step is needed no more."""
        self._records.clear()
        for entry in self._carried:
            entry.latest = []


def _is_called(label: str, name: str) -> bool:
    return label == name or label.endswith(f".{name}")


def _is_readable(tensor: torch.Tensor) -> bool:
    """Whether the tensor has bits that can be compared and copied."""
    ordinary = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided
    return ordinary and not tensor.is_nested and not tensor.is_inference() and not _is_trained(tensor)


def _is_trained(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _has_history(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and not isinstance(tensor, nn.Parameter)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _are_changed(tensors: list[tuple[weakref.ref[torch.Tensor], int]]) -> bool:
    """Whether one of the tensors, if it is alive, no longer has its version."""
    return any((tensor := found()) is not None and _version(tensor) != version for found, version in tensors)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        return tensor if tensor.requires_grad else nn.Parameter(tensor.detach().clone(), requires_grad=False)
    return tensor.detach().clone()


class _Copier:
    """Copies tensors. One that sits in several places stays one tensor."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._made:
            self._made[id(tensor)] = (tensor, _copied(tensor))
        return self.of(tensor)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of a tensor that was copied, and else the tensor itself."""
        return self._made.get(id(tensor), (tensor, tensor))[1]


# --- runs for the sake of measuring, which leave no trace in modules


@contextmanager
def left_as_it_was(layers: Iterable[Any]) -> Iterator[None]:
    """Inside, the layers may change what they keep; afterwards it is as it was."""
    hidden = Hidden(layers)
    hooks = [(found, dict(found)) for module in hidden.modules for found in _hooks_of(module)]
    try:
        with hidden.meeting_modules():
            yield
    finally:
        hidden.undo()
        for found, before in hooks:
            if found.keys() != before.keys():
                found.clear()
                found.update(before)


def _hooks_of(module: nn.Module) -> Iterator[dict[Any, Any]]:
    """Where a module has its hooks, which some register in their first forward."""
    for name, value in module.__dict__.items():
        if "_hooks" in name and isinstance(value, dict):
            yield value
