"""Something that stands in for a module's `forward`: an attribute of the module, found before its class's method.

Hooks, names, parameters and `state_dict` know nothing of it, and copies and pickles of the module have it too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

_REPLICATE = "_replicate_for_data_parallel"
_NAME = "_lowtide_forward"  # where a module has what stands in, should others wrap its `forward` afterwards


class StandIn:
    """Called instead of a module's `forward`.

    Attributes:
        module: whose `forward` it is.
        was: the one that the module itself, not its class, had before.
        before: what stood in before.
        is_on: whether it does anything; it stays where others have wrapped it, and cannot be taken away.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.was: Callable[..., Any] | None = module.__dict__.get("forward")
        self.before: StandIn | None = module.__dict__.get(_NAME)
        self.is_on = True
        self._replicate = self.replica

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What `inspect.signature` looks at."""
        return self.was or MethodType(type(self.module).forward, self.module)

    @property
    def original(self) -> Callable[..., Any]:
        """The module's `forward` as it would be without this, and without what stood in before."""
        forward = self.was
        while isinstance(forward, StandIn):
            forward = forward.was
        return MethodType(type(self.module).forward, self.module) if forward is None else forward

    def install(self) -> None:
        """Stand in from now on."""
        self.is_on = True
        self.module.__dict__["forward"] = self.module.__dict__[_NAME] = self
        self.module.__dict__[_REPLICATE] = self._replicate

    def remove(self) -> None:
        """Let the module be as it was."""
        if self.module.__dict__.get(_NAME) is not self:
            return
        if self.module.__dict__.get("forward") is not self:
            self.is_on = False
            return
        replicate = None if self.before is None else self.before._replicate
        for name, value in (("forward", self.was), (_NAME, self.before), (_REPLICATE, replicate)):
            del self.module.__dict__[name]
            if value is not None:
                self.module.__dict__[name] = value

    def replica(self) -> nn.Module:
        """A copy of the module as `nn.DataParallel` makes them: with its own parameters, and so its own stand-in."""
        made: nn.Module = type(self.module)._replicate_for_data_parallel(self.module)
        twin = copy.copy(self)
        twin.module, twin._replicate = made, twin.replica
        if made.__dict__["forward"] is self:
            made.__dict__["forward"] = twin
        made.__dict__[_NAME], made.__dict__[_REPLICATE] = twin, twin._replicate
        return made


def stands_in(module: nn.Module) -> StandIn | None:
    """What stands in for a module's `forward`, if anything does."""
    found: StandIn | None = module.__dict__.get(_NAME)
    return found


def original(module: nn.Module) -> Callable[..., Any]:
    """A module's `forward` as if nothing stood in for it, though perhaps for those of submodules."""
    found = stands_in(module)
    if found is not None:
        return found.original
    forward: Callable[..., Any] | None = module.__dict__.get("forward")
    return MethodType(type(module).forward, module) if forward is None else forward


@contextmanager
def standing_in(row: Iterable[StandIn]) -> Iterator[None]:
    """Inside, all of these do."""
    installed: list[StandIn] = []
    try:
        for one in row:
            one.install()
            installed.append(one)
        yield
    finally:
        for one in reversed(installed):
            one.remove()
