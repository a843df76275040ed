"""A rerun that differs from the first run: found out as early as it can be told, and said in words that help.

Of every tensor that autograd saves in the first run its likeness is noted: shape, dtype, device, and a sample of its
values. The rerun has to save the same row of tensors. The first one that is not like its twin is
reported with the operation that saves it, the line of code and the path of the module.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name

Likeness = tuple[torch.Size, torch.dtype, torch.device]
_OURS = str(Path(str(sys.modules["lowtide"].__file__)).parent)
_PACKAGES = (str(Path(torch.__file__).parent), _OURS)


class Differs(BaseException):
    """Raised inside a rerun, at the first saved tensor that is not as it should be.

    Not an Exception, so that nobody between here and the rerun takes it for one of theirs.
    """

    def __init__(self, number: int, how: str, *, in_values: bool = False) -> None:
        super().__init__()
        self.number = number
        self.how = how
        self.in_values = in_values  # not in shape, dtype or number


class Place:
    """Where in the user's code something happens: a line, and the module that is running."""

    __slots__ = ("line", "module")

    def __init__(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        self.line = ""
        self.module: nn.Module | None = None
        while frame is not None and not (self.line and self.module is not None):
            code = frame.f_code
            if not self.line and not code.co_filename.startswith(_PACKAGES):
                text = linecache.getline(code.co_filename, frame.f_lineno).strip()
                self.line = f"{Path(code.co_filename).name}:{frame.f_lineno}: {text}"
            # Not of our own frames: a frame keeps the locals that it is asked for, an exception on its way among them.
            if self.module is None and code.co_varnames[:1] == ("self",) and not code.co_filename.startswith(_OURS):
                owner = frame.f_locals.get("self")
                self.module = owner if isinstance(owner, nn.Module) else None
            frame = frame.f_back


class Naming(TorchFunctionMode):
    """Knows by its name which of torch's functions is running."""

    def __init__(self) -> None:
        super().__init__()
        self.function = ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.function = resolve_name(func) or getattr(func, "__name__", "")
        return func(*args, **(kwargs or {}))


def in_words(likeness: Likeness) -> str:
    """A likeness for a message."""
    shape, dtype, device = likeness
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')} on {device}"
