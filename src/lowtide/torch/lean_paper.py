"""The lean tapes that a call could keep, found out on paper: on fake tensors, with times from operation counts.

Nothing is remembered, and the call keeps its whole tape: `lean` itself steps aside where tensors have no values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from lowtide.torch.devices import Device
from lowtide.torch.lean_graph import LeanGraph, LeanPoint
from lowtide.torch.lean_trace import Trace, tracing
from lowtide.torch.lean_watch import Sight


def lean_menu_on_paper(device: Device, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[LeanPoint]:
    """The points of `lean_menu` for such a call, by falling bytes, with the seconds that they take on a device.

    To be called inside `on_paper`; the function is called once, with grad. Empty for a call that `lean` would leave
    alone: of compiled or scripted modules, or tensors that are not torch's own.
    """
    sight = _PaperSight(function, args, kwargs)
    if not sight.is_plain:
        return []
    trace, held = Trace(device), list[torch.Tensor]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        trace.pack(tensor)
        held.append(tensor.detach())
        return held[-1]

    with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor), tracing(trace):
        function(*args, **kwargs)
    given, ties = trace.given(sight.tensors)
    return LeanGraph(trace, given, ties, sight.arguments, held).menu()


class _PaperSight(Sight):
    """A call on fake tensors, for which those are as plain as any."""

    __slots__ = ()

    def _see_tensor(self, tensor: torch.Tensor) -> None:
        plain = self.is_plain
        super()._see_tensor(tensor)
        if isinstance(tensor, FakeTensor):
            self.is_plain = plain

    def _see_parameters(self, found: Any) -> None:
        plain = self.is_plain
        super()._see_parameters(found)
        parameters = [parameter for row in found[2] for parameter in row.values() if parameter is not None]
        if all(isinstance(parameter, FakeTensor) for parameter in parameters):
            self.is_plain = plain
