"""Hidden state: what a step keeps outside its arguments, found, carried along, restored for reruns.

It is in slots: attributes and buffers of modules, attributes of objects of the user's own, variables that a function
closes over. They are looked for in whatever the step function can reach; modules that it calls in other ways are met
when they are called.

Before the first step every slot is recorded; whatever has changed after the probe steps is carried: read into
snapshots, written back for reruns. A value is an opaque nested value, because the first step may find None, 0.0 or an
empty tensor where later ones find a state. Changes are found by comparing values, not only versions: BatchNorm's
statistics change without one.

In a module every change counts, of Python numbers too. Outside modules only tensors that take the place of others
count: a counter or a list that grows is the user's business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from threading import get_ident
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.nn.modules.module import register_module_forward_pre_hook

from lowtide.errors import CheckpointError, InputError
from lowtide.torch.state.bits import checksum, same_bits
from lowtide.torch.state.capture import edge_of
from lowtide.torch.state.reach import MISSING, MODULE_INTERNALS, Entry, Finds, FoundModule, FoundObject, Slot, Variable
from lowtide.torch.state.stand_in import StandIn
from lowtide.torch.state.trees import FormError, Opaque, TreeForm, form_of

# Leaves whose contents a step may change without assigning anything.
_MUTABLE = (np.ndarray, set)
# A container with more entries than this is data, not state.
_MOST_ENTRIES = 1000


class _Slots:
    """All slots found so far. `met` is called with each new one before any step has run that could change it."""

    def __init__(self, roots: Iterable[Any], met: Callable[[Slot], None]) -> None:
        self._met = met
        self._known: set[tuple[int, str]] = set()
        self._owners: list[tuple[dict[str, Any], str, bool]] = []
        self._modules: dict[int, nn.Module] = {}
        self.parameters: dict[int, str] = {}
        finds = Finds(roots)
        self.tensors = finds.tensors
        # numpy's and Python's generators are the user's own business in a loop.
        self.generators = [found for found in finds.generators if isinstance(found, torch.Generator)]
        for holder in finds.holders:
            match holder:
                case FoundModule(module, label):
                    self._see_module(module, label)
                case FoundObject(thing, label):
                    if type(thing).__dictoffset__:
                        self._see_mapping(vars(thing), label, in_module=False)
                case Variable():
                    met(holder)

    def modules(self) -> list[nn.Module]:
        """Every module that takes part."""
        return list(self._modules.values())

    def new_entries(self) -> Iterator[Slot]:
        """Slots of known owners that have come up since the last time; `met` is not called with them."""
        for mapping, path, in_module in self._owners:
            for key in list(mapping):
                if key not in MODULE_INTERNALS and (id(mapping), key) not in self._known:
                    self._known.add((id(mapping), key))
                    yield Entry(mapping, key, f"{path}.{key}", in_module)

    @contextmanager
    def meeting_modules(self) -> Iterator[None]:
        """Inside, every module that is called for the first time is met before it runs."""
        thread = get_ident()

        def meet(module: nn.Module, _: Any) -> None:
            if get_ident() == thread and id(module) not in self._modules:
                self._see_module(module, type(module).__name__)

        handle = register_module_forward_pre_hook(meet)
        try:
            yield
        finally:
            handle.remove()

    def _see_module(self, module: nn.Module, label: str) -> None:
        """A module takes part, and so does all that is inside it."""
        for path, child in module.named_modules(prefix=label):
            if id(child) in self._modules:
                continue
            self._modules[id(child)] = child
            if isinstance(child, torch.jit.ScriptModule):  # has no dictionaries of Python's
                continue
            self._see_mapping(child._buffers, path, in_module=True)
            self._see_mapping(vars(child), path, in_module=True)
            self.generators += [value for value in vars(child).values() if isinstance(value, torch.Generator)]
            for name, parameter in child.named_parameters(recurse=False):
                self.parameters.setdefault(id(parameter), f"{path}.{name}")

    def _see_mapping(self, mapping: dict[str, Any], path: str, in_module: bool) -> None:
        self._owners.append((mapping, path, in_module))
        for key in mapping:
            if key not in MODULE_INTERNALS and (id(mapping), key) not in self._known:
                self._known.add((id(mapping), key))
                self._met(Entry(mapping, key, f"{path}.{key}", in_module))


@dataclass(slots=True)
class _Value:
    """A slot's value in a snapshot, with the versions that its tensors had."""

    form: TreeForm
    leaves: list[Any]
    versions: list[int]


@dataclass(slots=True)
class HiddenState:
    """The values of all carried slots at one step."""

    values: list[_Value] = field(default_factory=list)

    def leaves(self) -> list[Any]:
        """All leaves in a row."""
        return [leaf for value in self.values for leaf in value.leaves]


class _Record:
    """A slot's value at some moment, so that a change can be seen and undone."""

    __slots__ = ("copies", "form", "leaves", "origins", "value", "versions")

    def __init__(self, value: Any, in_module: bool) -> None:
        self.value = value
        self.form, self.leaves = _opened(value)
        self.versions = _versions(self.leaves)
        # What a closure holds may be a whole data set: it is never copied, and changing it in place is refused.
        self.copies = [_copied(leaf) for leaf in self.leaves] if in_module else self.leaves
        # Tensors with a history: where it ends, and a tensor that still has it when the step has changed this one.
        self.origins = [
            (edge_of(leaf), leaf.view_as(leaf) if leaf is copy else leaf.clone())
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not isinstance(leaf, nn.Parameter)
            else None
            for leaf, copy in zip(self.leaves, self.copies, strict=True)
        ]

    def in_place(self) -> bool:
        """Whether a tensor of it has been changed in place since."""
        rows = zip(self.leaves, self.versions, self.copies, strict=True)
        return any(
            leaf._version != version or (leaf is not copy and not same_bits(leaf, copy))
            for leaf, version, copy in rows
            if isinstance(leaf, torch.Tensor)
        )

    def differs(self, value: Any) -> bool:
        """Whether `value` is another one."""
        if isinstance(self.form, Opaque) or value is MISSING:
            return value is not self.value
        try:
            leaves = self.form.flatten(value)
        except FormError:
            return True
        rows = zip(leaves, self.leaves, self.copies, strict=True)
        return not all(
            _same(new, copy) if isinstance(new, _MUTABLE) else new is old or _same(new, copy) for new, old, copy in rows
        )

    def snapshot(self) -> _Value:
        """The recorded value, as a snapshot holds it."""
        return _Value(self.form, list(self.copies), _versions(self.copies))

    def undo(self, slot: Slot) -> None:
        """Put everything back as it was recorded, into the very same objects."""
        with torch.no_grad():
            for leaf, copy in zip(self.leaves, self.copies, strict=True):
                if isinstance(leaf, torch.Tensor) and leaf is not copy and not same_bits(leaf, copy):
                    leaf.detach().copy_(copy)
                elif isinstance(leaf, np.ndarray):
                    leaf[...] = copy
                elif isinstance(leaf, set):
                    leaf.clear()
                    leaf.update(copy)
        _refill(self.value, self.form.unflatten(self.leaves))
        slot.set(self.value)


@dataclass(slots=True, eq=False)
class _Carried:
    slot: Slot
    in_place: bool
    start: _Record | None  # before the first step
    latest: _Record | None  # after the latest probe step


@dataclass(slots=True, eq=False)
class _Steady:
    """A slot that the probe steps left alone."""

    slot: Slot
    value: Any
    form: TreeForm
    leaves: list[Any]
    digest: list[Any]

    def is_as_it_was(self) -> bool:
        """Whether it still holds the same."""
        now, value = self.slot.get(), self.value
        if not self.slot.in_module:
            # The user's own variable, which is not state: only a tensor that is now another one, or changed, matters.
            return not isinstance(value, torch.Tensor) or (now is value and now._version == self.digest[0][0])
        if isinstance(value, torch.Tensor) and now is not value:
            return False
        leaves = _opened(now)[1]
        return len(leaves) == len(self.digest) and all(
            (leaf._version, checksum(leaf)) == old
            if isinstance(leaf, torch.Tensor)
            else leaf is old or _same(leaf, old)
            for leaf, old in zip(leaves, self.digest, strict=True)
        )


class Hidden:
    """The hidden state of a step, looked for in `roots`: its function, above all.

    Slots that are `named` are carried even if the first steps leave them alone.
    """

    def __init__(self, roots: Iterable[Any], named: Iterable[str] = ()) -> None:
        self._records: dict[Slot, _Record] = {}
        self._named = tuple(named)
        self._steady: list[_Steady] = []
        self._carried: list[_Carried] = []
        self._training: list[tuple[nn.Module, bool]] = []  # the mode that each module ran in
        self._slots = _Slots(roots, self._meet)

    def _meet(self, slot: Slot) -> None:
        self._records[slot] = _Record(slot.get(), slot.in_module)

    # --- finding

    @property
    def parameters(self) -> dict[int, str]:
        """Names of the parameters of all modules that take part, by identity."""
        return self._slots.parameters

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors that the step refers to."""
        return self._slots.tensors

    @property
    def generators(self) -> list[torch.Generator]:
        """Random generators that the step refers to."""
        return self._slots.generators

    @property
    def modules(self) -> list[nn.Module]:
        """Every module that takes part."""
        return self._slots.modules()

    def meeting_modules(self) -> AbstractContextManager[None]:
        """Inside, every module that is called for the first time is recorded before it runs."""
        return self._slots.meeting_modules()

    def probe(self, earlier: list[HiddenState]) -> None:
        """After a probe step: carry what has changed; `earlier` states get the values it had until now."""
        for slot in self._slots.new_entries():
            self._records[slot] = _Record(MISSING, slot.in_module)
        carried = {entry.slot for entry in self._carried}
        for entry in self._carried:
            entry.in_place |= entry.latest is not None and entry.latest.in_place()
            entry.latest = _Record(entry.slot.get(), in_module=True)
        for slot, record in self._records.items():
            if slot in carried:
                continue
            value, in_place = slot.get(), record.in_place()
            if in_place and not slot.in_module:
                raise CheckpointError(
                    f"the step changes {slot.label} in place, which is outside its arguments and its modules; assign "
                    "a new tensor instead, or pass it as part of the carry"
                )
            wanted = any(slot.label == name or slot.label.endswith(f".{name}") for name in self._named)
            differs = record.differs(value)
            if differs and not slot.in_module and not _counts(slot, record, value) and _leaks(record, value):
                raise CheckpointError(
                    f"the step puts tensors with a gradient into {slot.label}, through which it would be lost; return "
                    "them as outputs instead, or put them there detached"
                )
            if wanted or in_place or (differs and _counts(slot, record, value)):
                mutable = any(isinstance(leaf, _MUTABLE) for leaf in _opened(value)[1])
                kept = _Record(value, in_module=True)
                self._carried.append(_Carried(slot, in_place or wanted or mutable, record, kept))
                for state in earlier:
                    state.values.append(record.snapshot())

    def origins(self) -> list[tuple[GradientEdge, torch.Tensor] | None]:
        """For each leaf of the carried slots before the first step, where its history ends and a tensor that has it."""
        return [origin for entry in self._carried if entry.start is not None for origin in entry.start.origins]

    def settle(self) -> None:
        """The probe steps are over: of what is not carried, checksums are enough from here on."""
        carried = {entry.slot for entry in self._carried}
        labels = [slot.label for slot in self._records]
        for name in self._named:
            if not any(label == name or label.endswith(f".{name}") for label in labels):
                raise InputError(f"hidden={name!r} is not among what the step keeps: {', '.join(labels) or 'nothing'}")
        self._steady = [
            _Steady(slot, record.value, record.form, record.leaves, _digest(record.leaves, slot.in_module))
            for slot, record in self._records.items()
            if slot not in carried
        ]
        self._records = {slot: record for slot, record in self._records.items() if slot in carried}
        for entry in self._carried:
            entry.latest = None
        self._training = [(module, module.training) for module in self.modules]

    def strays(self) -> list[str]:
        """Names of slots that have changed since `settle` without being carried."""
        new = self._slots.new_entries()
        self._steady += [_Steady(slot, MISSING, Opaque(), [MISSING], [MISSING]) for slot in new]
        return [steady.slot.label for steady in self._steady if not steady.is_as_it_was()]

    # --- reading and writing

    def read(self, *, copy: bool = False) -> HiddenState:
        """The present values. Tensors that steps change in place are copied, the others only with `copy`."""
        values = []
        for entry in self._carried:
            form, leaves = _opened(entry.slot.get())
            if entry.in_place or copy:
                leaves = [_copied(leaf) for leaf in leaves]
            values.append(_Value(form, leaves, _versions(leaves)))
        return HiddenState(values)

    def write(self, state: HiddenState) -> None:
        """Put a snapshot's values into the slots, in containers of their own."""
        for entry, value in zip(self._carried, state.values, strict=True):
            if _versions(value.leaves) != value.versions:
                raise CheckpointError(
                    f"{entry.slot.label} was changed in place at a later step but not at the first ones, so its "
                    f"snapshots are spoilt; assign a new tensor instead, or name it: hidden=({entry.slot.label!r},)"
                )
            leaves = [_copied(leaf) for leaf in value.leaves] if entry.in_place else value.leaves
            entry.slot.set(value.form.unflatten(leaves))

    def leaves(self) -> list[Any]:
        """The leaves of the present values, uncopied."""
        return [leaf for entry in self._carried for leaf in _opened(entry.slot.get())[1]]

    def replace(self, leaves: list[Any]) -> None:
        """Put these leaves where the present ones are; containers stay the same objects."""
        rest = iter(leaves)
        for entry in self._carried:
            value = entry.slot.get()
            form, old = _opened(value)
            new = [next(rest) for _ in old]
            if not all(a is b for a, b in zip(new, old, strict=True)):
                rebuilt = form.unflatten(new)
                entry.slot.set(value if _refill(value, rebuilt) else rebuilt)

    def finish(self, finals: list[Any]) -> None:
        """Leave the final values in the slots: those with a gradient as the loop's results, the others as they are."""
        rows = zip(finals, self.leaves(), strict=True)
        self.replace([new if isinstance(new, torch.Tensor) and new.requires_grad else old for new, old in rows])

    def in_place(self) -> list[bool]:
        """For each leaf, whether steps change its slot in place."""
        return [entry.in_place for entry in self._carried for _ in _opened(entry.slot.get())[1]]

    def names(self) -> list[str]:
        """One name for each leaf."""
        return [name for entry in self._carried for name in _opened(entry.slot.get())[0].names(entry.slot.label)]

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
        """Put every recorded slot back as it was before the first step.

        Of slots that are not carried the objects are known by then, not what was changed in place in their tensors.
        """
        for slot, record in self._records.items():
            value = slot.get()
            if record.in_place() or (record.differs(value) and _counts(slot, record, value)):
                record.undo(slot)
        for steady in self._steady:
            if steady.slot.in_module and not steady.is_as_it_was():
                _refill(steady.value, steady.form.unflatten(steady.leaves))
                steady.slot.set(steady.value)
        for slot in self._slots.new_entries():
            slot.set(MISSING)

    def forget_start(self) -> None:
        """The loop ran through: what was there before the first step is needed no more."""
        self._records.clear()
        self._steady.clear()
        for entry in self._carried:
            entry.start = None


def _opened(value: Any) -> tuple[TreeForm, list[Any]]:
    large = isinstance(value, list | tuple | dict) and len(value) > _MOST_ENTRIES and not _begins_with_tensors(value)
    form = Opaque() if large or value is MISSING else form_of(value)
    return form, form.flatten(value)


def _begins_with_tensors(container: Any) -> bool:
    entries = container.values() if isinstance(container, dict) else container
    return any(isinstance(entry, torch.Tensor) for entry in islice(entries, 3))


def _versions(leaves: list[Any]) -> list[int]:
    return [leaf._version if isinstance(leaf, torch.Tensor) and not leaf.is_inference() else 0 for leaf in leaves]


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter):
        return leaf.detach().clone()
    return leaf.copy() if isinstance(leaf, _MUTABLE) else leaf


def _same(new: Any, old: Any) -> bool:
    """Whether a leaf that is another object holds the same value. Tensors never do: they were assigned on purpose."""
    if isinstance(new, np.ndarray) and isinstance(old, np.ndarray):
        return bool(np.array_equal(new, old))
    if isinstance(new, set):
        return bool(new == old)
    if isinstance(new, bool | int | float | complex | str | bytes):
        return type(new) is type(old) and bool(new == old or new != new)
    return False


def _refill(container: Any, rebuilt: Any) -> bool:
    """Give a dict, a list or a deque the contents of another and stay the same object; False for anything else."""
    if isinstance(container, dict):
        container.clear()
        container.update(rebuilt)
        return True
    if isinstance(container, list):
        container[:] = rebuilt
        return True
    if isinstance(container, deque):
        container.clear()
        container.extend(rebuilt)
        return True
    return False


def _counts(slot: Slot, record: _Record, value: Any) -> bool:
    """Whether a change is one of state: any in a module; elsewhere tensors that take the place of others."""
    if slot.in_module:
        return True
    leaves = _opened(value)[1]
    has_tensors = any(isinstance(leaf, torch.Tensor) for leaf in leaves)
    return has_tensors and (len(leaves) == len(record.leaves) or record.value is None)


def _leaks(record: _Record, value: Any) -> bool:
    """Whether a variable of the user's own now holds a tensor with a gradient that it did not hold before."""
    before = {id(leaf) for leaf in record.leaves}
    return any(
        isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None and id(leaf) not in before
        for leaf in _opened(value)[1]
    )


def _digest(leaves: list[Any], in_module: bool) -> list[Any]:
    return [
        (leaf._version, checksum(leaf) if in_module else 0) if isinstance(leaf, torch.Tensor) else _copied(leaf)
        for leaf in leaves
    ]


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


@contextmanager
def objects_aside(model: nn.Module) -> Iterator[None]:
    """Inside, attributes of plain objects that modules have may change; afterwards they are as they were."""
    held = [
        (vars(value), dict(vars(value)))
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in MODULE_INTERNALS and hasattr(value, "__dict__") and not isinstance(value, _NO_OBJECTS)
    ]
    try:
        yield
    finally:
        for attributes, before in held:
            attributes.clear()
            attributes.update(before)


# What has attributes, and is not an object that keeps state for a module.
_NO_OBJECTS = (type, FunctionType, MethodType, ModuleType, torch.Tensor, nn.Module, StandIn)
