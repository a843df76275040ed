"""Places where values are kept: entries of dictionaries, such as a module's attributes, and slots of classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lowtide.torch.state.structure import slots_of

NUMBERS = frozenset({type(None), bool, int, float, complex, str, bytes})
MISSING: Any = object()


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One entry of a dictionary."""

    mapping: dict[Any, Any]
    key: Any
    label: str = ""

    def get(self) -> Any:
        """The value, or MISSING."""
        return self.mapping.get(self.key, MISSING)

    def set(self, value: Any) -> None:
        """Put a value there; MISSING removes what is there."""
        if value is MISSING:
            self.mapping.pop(self.key, None)
        else:
            self.mapping[self.key] = value


@dataclass(frozen=True, slots=True, eq=False)
class SlotEntry:
    """One attribute of an object for which its class has a slot."""

    owner: Any
    descriptor: Any
    label: str = ""

    def get(self) -> Any:
        """The value, or MISSING."""
        try:
            return self.descriptor.__get__(self.owner)
        except AttributeError:
            return MISSING

    def set(self, value: Any) -> None:
        """Put a value there; MISSING removes what is there."""
        if value is not MISSING:
            self.descriptor.__set__(self.owner, value)
        elif self.get() is not MISSING:
            self.descriptor.__delete__(self.owner)


Place = Entry | SlotEntry


def own_places(thing: Any) -> list[Place]:
    """Where an object of the user's has its numbers and tensors. Its containers are the user's, and not among them."""
    kind, attributes = type(thing).__name__, getattr(thing, "__dict__", {})
    places: list[Place] = [Entry(attributes, name, f"{kind}.{name}") for name in attributes]
    places += [SlotEntry(thing, slot, f"{kind}.{slot.__name__}") for slot in slots_of(thing)]
    return [place for place in places if _is_own(place.get())]


def _is_own(value: Any) -> bool:
    return value is MISSING or type(value) in NUMBERS or isinstance(value, torch.Tensor)
