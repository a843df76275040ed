"""Notes of what belongs to a module, each of one thing as it was before the first run, to be put back for a rerun.

Attributes, structures, tensors: all have the same three moments. When the first run is over a note is settled, and
keeps no more than it needs. For a rerun it is put back, and afterwards that is undone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from math import inf
from operator import is_
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.errors import CheckpointError
from lowtide.torch.memory.accelerators import is_of_host
from lowtide.torch.state.bits import same_bits
from lowtide.torch.state.structure import MISSING, Place, Structure

# Tensors outside modules' buffers are copied only up to this size; a larger one may be a whole data set.
SMALL = 64 * 1024
# Dictionaries among a module's internals that decide what a call of it does; the first is that of its parameters.
INSIDE = (
    *("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_hooks_with_kwargs"),
    *("_forward_hooks_always_called", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)


class _Held:
    """In a note, the place of a tensor that is kept with the call's arguments."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Note:
    """One thing as it was before the first run."""

    __slots__ = ()

    def settled(self, held: list[torch.Tensor]) -> Note | None:
        """After the first run: the note to keep. Tensors that were replaced move to `held`."""
        return self

    def put_back(self, held: list[torch.Tensor]) -> Any:
        """Make it as it was; returns what is there now."""

    def undo(self, now: Any) -> None:
        """After a rerun: make it as `put_back` found it."""

    def rewritten(self) -> torch.Tensor | None:
        """A tensor that was written in place since the first run began, so that autograd knows of it."""
        return None


class MappingsNote(Note):
    """Dictionaries of a module: its attributes, and those among them, most of which are empty and stay so."""

    __slots__ = ("_owners", "before")

    def __init__(self, owners: list[dict[str, Any]]) -> None:
        self._owners = owners
        self.before = self._now()

    def _now(self) -> list[dict[str, Any]]:
        return [entries_of(owner) if owner else _EMPTY for owner in self._owners]

    def settled(self, held: list[torch.Tensor]) -> Note | None:
        """Hold the entries that the first run has replaced."""
        for place, (now, before) in enumerate(zip(self._now(), self.before, strict=True)):
            if not same_entries(now, before):
                taken = {key: _hold(value, held) for key, value in before.items() if now.get(key, MISSING) is not value}
                self.before[place] = before | taken
        return self

    def put_back(self, held: list[torch.Tensor]) -> Any:
        """Give the dictionaries the entries that they had."""
        now = self._now()
        for owner, present, before in zip(self._owners, now, self.before, strict=True):
            if not same_entries(present, before):
                noted = {key: _resolved(value, held) for key, value in before.items()}
                self._fill(owner, self._but_for_others(noted, present))
        return now

    def _but_for_others(self, noted: dict[str, Any], present: dict[str, Any]) -> dict[str, Any]:
        """The entries that were noted, where the present ones are not somebody else's."""
        return noted

    def undo(self, now: Any) -> None:
        """Give the dictionaries the entries that they have now."""
        for owner, present, entries in zip(self._owners, self._now(), now, strict=True):
            if not same_entries(present, entries):
                self._fill(owner, entries)

    def _fill(self, owner: dict[str, Any], entries: dict[str, Any]) -> None:
        owner.clear()
        owner.update(entries)


_EMPTY: dict[str, Any] = {}


class ParametersNote(MappingsNote):
    """A module's parameters, which others may have replaced: FSDP has them gathered or sharded.

    Only one that took the place of another of its kind, as `functional_call` does it, is put back.
    """

    __slots__ = ()

    def _but_for_others(self, noted: dict[str, Any], present: dict[str, Any]) -> dict[str, Any]:
        return {key: noted[key] if _may_replace(noted.get(key), value) else value for key, value in present.items()}


def _may_replace(noted: Any, present: Any) -> bool:
    if not isinstance(noted, torch.Tensor) or not isinstance(present, torch.Tensor):
        return noted is None and present is None
    ordinary = type(noted) in _ORDINARY and type(present) in _ORDINARY
    return ordinary and noted.shape == present.shape and noted.untyped_storage().nbytes() >= noted.nbytes


_ORDINARY = (torch.Tensor, nn.Parameter, nn.Buffer)


class ManagedNote(MappingsNote):  # pragma: no cover  (FSDP: run by tests in processes of their own)
    """Attributes of a module that FSDP manages, but for its tensors: parameters, or what stands in their places."""

    __slots__ = ()

    def _now(self) -> list[dict[str, Any]]:
        return [{key: value for key, value in now.items() if not needs_grad(value)} for now in super()._now()]

    def _fill(self, owner: dict[str, Any], entries: dict[str, Any]) -> None:
        super()._fill(owner, entries | {key: value for key, value in owner.items() if needs_grad(value)})


def needs_grad(value: Any) -> bool:  # pragma: no cover  (FSDP: run by tests in processes of their own)
    """Whether it is a tensor that needs a gradient."""
    return isinstance(value, torch.Tensor) and value.requires_grad


def notes_of(module: nn.Module) -> Iterator[MappingsNote]:
    """Notes of a module's dictionaries."""
    attributes = vars(module)
    parameters, *others = (attributes[name] for name in INSIDE)
    if "_is_fsdp_managed_module" in attributes:  # pragma: no cover  (FSDP: run by tests in processes of their own)
        yield ManagedNote([attributes])
        yield MappingsNote(others)
    elif parameters:
        yield ParametersNote([parameters])
        yield MappingsNote([*others, attributes])
    else:
        yield MappingsNote([parameters, *others, attributes])


class StructureNote(Note):
    """What is at some places: containers, plain objects, arrays and iterators of modules, numbers of objects.

    A rerun finds copies there, and changes those.
    """

    __slots__ = ("_places", "_structure", "_tensors", "tensors")

    def __init__(self, places: list[Place], found: list[Any]) -> None:
        self._places = places
        self.tensors: list[torch.Tensor] = []
        self._structure = Structure([place.get() for place in places], self.tensors, found)
        self._structure.forget_originals()
        self._tensors: list[Any] = []

    def settled(self, held: list[torch.Tensor]) -> Note | None:
        """Hold the tensors, so that nobody writes to them."""
        self._tensors, self.tensors = [_hold(tensor, held) for tensor in self.tensors], []
        return self

    def put_back(self, held: list[torch.Tensor]) -> Any:
        """Put copies of what was there into the places."""
        now = [place.get() for place in self._places]
        tensors = self._tensors or self.tensors  # a backward inside the function comes before it is settled
        self.undo(self._structure.values([_resolved(tensor, held) for tensor in tensors]))
        return now

    def undo(self, now: Any) -> None:
        """Put into the places what `put_back` found there."""
        for place, value in zip(self._places, now, strict=True):
            place.set(value)


class VersionsNote(Note):
    """Tensors whose values have to stay what they are; whether they need a gradient is put back."""

    __slots__ = ("_flags", "_tensors", "_versions")

    def __init__(self, tensors: list[torch.Tensor], versions: list[int] | None = None) -> None:
        # Of a computed tensor an alias, which has its version: the tensor itself has a graph, in which may be earlier
        # calls, and they would all be kept.
        self._tensors = [tensor if tensor.is_leaf else tensor.detach() for tensor in tensors]
        self._versions = [tensor._version for tensor in tensors] if versions is None else versions
        self._flags = [tensor.requires_grad for tensor in self._tensors]

    def changed(self) -> tuple[torch.Tensor, int] | None:
        """A tensor that did not stay, and the version that it had."""
        for tensor, version in zip(self._tensors, self._versions, strict=True):
            if tensor._version != version:
                return tensor, version
        return None

    def put_back(self, held: list[torch.Tensor]) -> Any:
        """Have them need a gradient where they did."""
        now = [tensor.requires_grad for tensor in self._tensors]
        self._set(now, self._flags)
        return now

    def undo(self, now: Any) -> None:
        """Have them need a gradient where they do now."""
        self._set(self._flags, now)

    def _set(self, old: list[bool], new: list[bool]) -> None:
        if old != new:
            for tensor, before, flag in zip(self._tensors, old, new, strict=True):
                if before != flag and tensor.is_leaf:
                    tensor.requires_grad_(flag)


# Copies of tensors, so that calls that find the same values share one.
_copies: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor, int]] = {}


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    key = id(tensor)
    if tensor.nbytes > SMALL:
        return tensor.detach().clone()
    known = _copies.get(key)
    if known is None or known[0]() is not tensor or _is_other_now(tensor, known[1], known[2]):
        copy = tensor.detach().clone()
        known = _copies[key] = (weakref.ref(tensor, lambda _: _copies.pop(key, None)), copy, tensor._version)
    return known[1]


def _is_other_now(tensor: torch.Tensor, copy: torch.Tensor, version: int) -> bool:
    return is_changed(tensor, version, copy) and _may_differ(tensor, copy)


class ContentsNote(Note):
    """A tensor whose values may be changed in place. `steady` has the names of those that were seen not to be."""

    __slots__ = ("_copy", "_steady", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, steady: tuple[set[str], str] | None) -> None:
        self._tensor = tensor
        self._version = tensor._version
        self._steady = steady
        self._copy = _copy_of(tensor)

    def settled(self, held: list[torch.Tensor]) -> Note | None:
        """Keep the copy if it is needed, else only the version."""
        if self._tensor.requires_grad:  # it has become a part of the graph
            return VersionsNote([self._tensor], [self._version])
        if self._copy.nbytes <= SMALL or is_changed(self._tensor, self._version, self._copy):
            return self
        if self._steady is not None:
            self._steady[0].add(self._steady[1])
        return VersionsNote([self._tensor], [self._version])

    def put_back(self, held: list[torch.Tensor]) -> Any:
        """Write the values that the tensor had."""
        if not _is_other_now(self._tensor, self._copy, self._version):
            return None
        if self._tensor.shape != self._copy.shape:
            raise CheckpointError(
                f"a tensor of shape {tuple(self._copy.shape)} that the function uses was given the shape "
                f"{tuple(self._tensor.shape)}, so the rerun would not repeat it; make a new tensor instead"
            )
        now = self._tensor.detach().clone()
        self._tensor.data.copy_(self._copy)  # through `data` its version stays: for autograd nothing has happened
        return now

    def rewritten(self) -> torch.Tensor | None:
        """The tensor, if its version tells that it was written to."""
        return self._tensor if self._tensor._version != self._version else None

    def undo(self, now: Any) -> None:
        """Write the values that the tensor has now."""
        values = self._copy if now is None else now
        if (now is not None or is_changed(self._tensor, self._version, self._copy)) and _may_differ(
            self._tensor, values
        ):
            self._tensor.data.copy_(values)


def may_be_copied(tensor: torch.Tensor, most: float = SMALL) -> bool:
    """Whether the tensor is one that a function may change in place, and small enough to keep a copy of it."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
        and not tensor.requires_grad
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_nested
        and tensor.nbytes <= most
        and not tensor.is_inference()
        and 0 not in tensor.stride()
    )


def has_version(tensor: torch.Tensor) -> bool:
    """Whether torch counts how often the tensor is written to."""
    return not tensor.is_inference() and not tensor.is_meta and not isinstance(tensor, FakeTensor)


def is_changed(tensor: torch.Tensor, version: int, copy: torch.Tensor) -> bool:
    """Whether a tensor was written to since it had this version and these values; BatchNorm leaves the version.

    On a device, where to look would wait, what may be such statistics is taken to be changed.
    """
    if tensor._version != version:
        return True
    return not same_bits(tensor, copy) if is_of_host(tensor.device) else may_be_statistics(tensor)


def may_be_statistics(tensor: torch.Tensor) -> bool:
    """Whether the tensor may be running statistics, to which torch writes without counting a version."""
    return tensor.dim() == 1 and tensor.is_floating_point() and not isinstance(tensor, nn.Parameter)


def _may_differ(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    return not is_of_host(tensor.device) or not same_bits(tensor, copy)


def entries_of(owner: dict[Any, Any]) -> dict[Any, Any]:
    """A dictionary's entries as they are stored: some make something of them whenever they are asked."""
    return dict(owner) if type(owner).__getitem__ is dict.__getitem__ else dict(dict.items(owner))


def same_entries(now: dict[Any, Any], then: dict[Any, Any]) -> bool:
    """Whether the entries are the very same objects, under the same names."""
    if now is then:
        return True
    return len(now) == len(then) and all(map(is_, now.values(), then.values())) and all(map(is_, now, then))


def _hold(value: Any, held: list[torch.Tensor]) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
        return value
    if may_be_copied(value, inf):  # a note of its contents gives it the values that it had, so it has to be this one
        return value
    # Without its graph, which may be that of the step before, and so of all steps before it: autograd remembers the
    # node of a tensor that it saves even where hooks around it keep something else.
    held.append(value if value.is_leaf else value.detach().requires_grad_())
    return _Held(len(held) - 1)


def _resolved(value: Any, held: list[torch.Tensor]) -> Any:
    return held[value.index] if type(value) is _Held else value


# --- the tensors that a call was given, kept the way autograd keeps its own


class _Kept(torch.autograd.Function):
    """A node that saves tensors the way autograd does, through the hooks of the calls around."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.detach()


_anchor = torch.empty(0, requires_grad=True)


class KeptTensors:
    """Tensors kept for reruns: by themselves, or, inside other hooks, the way autograd saves them."""

    __slots__ = ("_changed", "_firsts", "_flags", "_node", "_tensors", "_versions")

    def __init__(self, tensors: list[torch.Tensor], through_hooks: bool) -> None:
        # Where a tensor was given first: attention, for one, asks whether its query is its key.
        places: dict[int, int] = {}
        self._firsts = [places.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)]
        self._flags = flags = [tensor.requires_grad for tensor in tensors]
        # Of those that the function changes in place; until it has run, of those that it may change.
        self._changed = _copies_among(tensors) if False in flags else {}
        self._node: Any = None
        self._tensors: list[torch.Tensor] = []
        self._versions: list[int] = []
        if through_hooks and tensors and not any(tensor.is_inference() for tensor in tensors):
            self._node = _Kept.apply(_anchor, *tensors).grad_fn  # type: ignore[no-untyped-call]  # torch's own
            return
        for tensor, needs_grad in zip(tensors, flags, strict=True):
            # Of a computed tensor only its values: the tensor itself may become a part of the graph that keeps it.
            self._tensors.append(tensor if needs_grad and tensor.is_leaf else tensor.detach())
            self._versions.append(tensor._version if needs_grad or not tensor.is_inference() else -1)

    def settle(self) -> Iterable[int]:
        """The function has run; returns the numbers of the tensors that it has changed in place."""
        if self._changed:
            self._changed = {k: note for k, note in self._changed.items() if is_changed(*note)}
        return self._changed

    def again(self) -> list[torch.Tensor]:
        """Twins of the tensors that belong to no graph, or an error if one was changed."""
        if self._node is not None:
            twins = [_twin(*pair) for pair in zip(self._node.saved_tensors, self._flags, strict=True)]
        else:
            twins = []
            for tensor, needs_grad, version in zip(self._tensors, self._flags, self._versions, strict=True):
                if version >= 0 and tensor._version != version and len(twins) not in self._changed:
                    raise CheckpointError(
                        f"argument tensor {len(twins)} of shape {tuple(tensor.shape)} was changed in place by the "
                        f"function or since it ran (version {version} then, {tensor._version} now), so the rerun would "
                        "not repeat it; change it after the backward, or make a new tensor"
                    )
                twins.append(tensor if needs_grad and tensor.requires_grad else _twin(tensor, needs_grad))
        for number, (_, _, values) in self._changed.items():
            if self._firsts[number] == number:
                twins[number] = values.clone()
        return [twins[first] for first in self._firsts]  # one that was given twice is one


def _copies_among(tensors: list[torch.Tensor]) -> dict[int, tuple[torch.Tensor, int, torch.Tensor]]:
    """By place, the tensors that may be copied, their versions and their copies."""
    return {k: (t, t._version, t.clone()) for k, t in enumerate(tensors) if may_be_copied(t)}


def _twin(tensor: torch.Tensor, needs_grad: bool) -> torch.Tensor:
    """The tensor itself, if it is a leaf that belongs to no graph, or one with its values that is such a leaf."""
    return tensor if tensor.requires_grad and tensor.is_leaf else tensor.detach().requires_grad_(needs_grad)
