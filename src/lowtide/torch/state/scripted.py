"""What scripted and traced modules keep: they have no dictionaries of Python's, and list their attributes otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.torch.state.structure import MODULE_INTERNALS, SlotEntry


@dataclass(frozen=True, slots=True)
class _Attribute:
    """An attribute of a scripted module, read and written as a slot's descriptor is."""

    name: str

    def __get__(self, module: Any, kind: Any = None) -> Any:
        return getattr(module, self.name)

    def __set__(self, module: Any, value: Any) -> None:
        setattr(module, self.name, value)


def scripted_places(module: torch.jit.ScriptModule, path: str) -> Iterator[SlotEntry]:
    """Where a scripted module has its buffers and other attributes, which its code may assign."""
    for name, (_, is_parameter) in module._concrete_type.get_attributes().items():
        if not is_parameter and name not in MODULE_INTERNALS:
            yield SlotEntry(module, _Attribute(name), f"{path}.{name}")
