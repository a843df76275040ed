"""Places where a step may keep state outside its arguments, one by one.

A slot is an attribute or a buffer of a module, an attribute of an object of the user's own, or a variable that a
function closes over. They are looked for in whatever the step function can reach; modules that it calls in other ways
are met when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lowtide.torch.reach import Entry, Reach, Slot, Variable

MODULE_INTERNALS = frozenset(nn.Module().__dict__)


class Slots(Reach):
    """All slots found so far. `met` is called with each new one before any step has run that could change it."""

    def __init__(self, roots: Iterable[Any], met: Callable[[Slot], None]) -> None:
        super().__init__()
        self._met = met
        self._known: set[tuple[int, str]] = set()
        self._owners: list[tuple[dict[str, Any], str, bool]] = []
        self._modules: dict[int, nn.Module] = {}
        self.parameters: dict[int, str] = {}
        self.generators: list[torch.Generator] = []
        self.tensors: list[torch.Tensor] = []
        for root in roots:
            self.find(root)

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
                self.on_module(module, type(module).__name__, None)

        handle = register_module_forward_pre_hook(meet)
        try:
            yield
        finally:
            handle.remove()

    def modules(self) -> list[nn.Module]:
        """Every module that takes part."""
        return list(self._modules.values())

    def on_module(self, module: nn.Module, label: str, names: frozenset[str] | None) -> None:
        """See `Reach`; all that is inside the module takes part too."""
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

    def on_object(self, thing: Any, label: str) -> None:
        """See `Reach`."""
        if type(thing).__dictoffset__:
            self._see_mapping(vars(thing), label, in_module=False)

    def on_variable(self, slot: Variable) -> None:
        """See `Reach`."""
        self._met(slot)

    def on_tensor(self, tensor: torch.Tensor, label: str) -> None:
        """See `Reach`."""
        self.tensors.append(tensor)

    def on_generator(self, generator: Any) -> None:
        """See `Reach`; numpy's and Python's are the user's own business in a loop."""
        if isinstance(generator, torch.Generator):
            self.generators.append(generator)

    def _see_mapping(self, mapping: dict[str, Any], path: str, in_module: bool) -> None:
        self._owners.append((mapping, path, in_module))
        for key in mapping:
            if key not in MODULE_INTERNALS and (id(mapping), key) not in self._known:
                self._known.add((id(mapping), key))
                self._met(Entry(mapping, key, f"{path}.{key}", in_module))
