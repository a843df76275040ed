"""Something that stands in for a module's `forward`: an attribute of the module, found before its class's method.

Hooks, names, parameters and `state_dict` know nothing of it, and copies and pickles of the module have it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn


class StandIn:
    """Called instead of a module's `forward`.

    Attributes:
        module: whose `forward` it is.
        was: the one that the module itself, not its class, had before.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.was: Callable[..., Any] | None = module.__dict__.get("forward")

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What `inspect.signature` looks at."""
        return self.was or MethodType(type(self.module).forward, self.module)

    def install(self) -> None:
        """Stand in from now on."""
        self.module.__dict__["forward"] = self

    def remove(self) -> None:
        """Let the module be as it was, if this stands in now."""
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]
            if self.was is not None:
                self.module.__dict__["forward"] = self.was


def plainly(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module as if nothing stood in for its own `forward`, though perhaps for those of submodules."""
    forward = module.__dict__.get("forward")
    while isinstance(forward, StandIn):
        forward = forward.was
    return type(module).forward(module, *args, **kwargs) if forward is None else forward(*args, **kwargs)


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
