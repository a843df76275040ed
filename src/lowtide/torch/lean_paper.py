"""Lean tapes on paper: the ones that a call could keep, with times from operation counts, and calls that keep one.

`lean` itself steps aside where tensors have no values: it looks at some, to see that the same comes out again. Here a
call is traced once, and modules that are alike, as the layers of a model, share the trace for as long as the fake mode
is there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.torch.devices import A100, Device
from lowtide.torch.lean_bits import Bits, bytes_in_bits
from lowtide.torch.lean_graph import LeanGraph, LeanPoint, LeanSize
from lowtide.torch.lean_recipe import Recipe
from lowtide.torch.lean_slots import Slot
from lowtide.torch.lean_tape import LeanTape
from lowtide.torch.lean_trace import Trace, tracing
from lowtide.torch.lean_watch import Sight

_FAKE = torch._C._TorchDispatchModeKey.FAKE


@dataclass(frozen=True, slots=True)
class _Known:
    """Traces of calls, by what calls have in common, and by modules that have been called."""

    alike: dict[Hashable, LeanGraph] = field(default_factory=dict)
    own: dict[Hashable, LeanGraph] = field(default_factory=dict)


_known: WeakKeyDictionary[FakeTensorMode, _Known] = WeakKeyDictionary()


def is_on_paper() -> bool:
    """Whether tensors have no values here."""
    return torch._C._get_dispatch_mode(_FAKE) is not None


def lean_menu_on_paper(device: Device, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[LeanPoint]:
    """The points of `lean_menu` for such a call, by falling bytes, with the seconds that they take on a device.

    To be called inside `on_paper`; the function is called once, with grad, if no call like it was traced before. Empty
    for a call that `lean` would leave alone: of compiled or scripted modules, or tensors that are not torch's own.
    """
    call = _Call(function, args, kwargs)
    if not call.sight.is_plain:
        return []
    graph = call.own
    if graph is None or graph.trace.device != device:
        with torch.enable_grad():
            _, graph = call.traced(device, _PaperTape(call.name, None, _no_doubt))
    return graph.menu()


def lean_on_paper(function: Callable[..., Any], *args: Any, tape: LeanSize | None, **kwargs: Any) -> Any:
    """`lean`, to be called inside `on_paper`."""
    call = _Call(function, args, kwargs)
    if not call.sight.is_plain or not torch.is_grad_enabled():
        return function(*args, **kwargs)
    lean_tape = _PaperTape(call.name, torch._C._autograd._top_saved_tensors_default_hooks(False), _no_doubt)
    graph = call.own
    if graph is not None:
        with saved_tensors_hooks(lean_tape.packing(graph.recipe(tape), call.sight.tensors), lean_tape.unpack):
            result = function(*args, **kwargs)
        lean_tape.close()
        return result
    with _Again():
        result, graph = call.traced(A100, lean_tape)  # which tape it is does not depend on times
    lean_tape.close_traced(graph.recipe(tape), call.sight.tensors)
    return result


class _Again(TorchDispatchMode):
    """Runs operations twice, as a traced call does, to time them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not (func.is_view or func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags):
            func(*args, **kwargs)
        return result


class _Call:
    """A call, and what is known of calls like it."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call = function, args, kwargs
        self.name = getattr(function, "__qualname__", type(function).__name__)
        self.sight = _PaperSight(function, args, kwargs)
        self._known = _known.setdefault(cast(FakeTensorMode, torch._C._get_dispatch_mode(_FAKE)), _Known())
        self._own = self.sight.key, tuple(map(id, self.sight.anchors))

    @property
    def own(self) -> LeanGraph | None:
        """The trace of such a call of the same modules."""
        return self._known.own.get(self._own)

    def traced(self, device: Device, lean_tape: LeanTape) -> tuple[Any, LeanGraph]:
        """The call's result, and its trace, or that of a call like it; the tape gets everything."""
        function, args, kwargs = self._call
        trace = Trace(device)
        key = self.sight.key, device, torch._C._current_graph_task_id() >= 0  # in a rerun, buffers may be others
        graph = self._known.alike.get(key)

        def pack(tensor: torch.Tensor) -> Slot:
            trace.pack(tensor)
            return lean_tape.pack_everything(tensor)

        hooks = saved_tensors_hooks(pack if graph is None else lean_tape.pack_everything, lean_tape.unpack)
        with hooks, tracing(trace) if graph is None else nullcontext():
            result = function(*args, **kwargs)
        if graph is None:
            given, ties = trace.given(self.sight.tensors)
            graph = LeanGraph(trace, given, ties, self.sight.arguments, lean_tape.held)
            self._known.alike[key] = graph
        self._known.own[self._own] = graph
        return result, graph


class _PaperSight(Sight):
    """A call on fake tensors, for which those are as plain as any; modules that are alike are the same."""

    __slots__ = ()

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(function, args, kwargs)
        forms = [(t.shape, t.dtype, t.layout is torch.strided and t.stride()) for t in self.tensors if t is not None]
        self.key = (self.key, tuple(forms), tuple(map(repr, self.numbers)))

    def _see_function(self, function: Any) -> None:
        super()._see_function(function)
        if isinstance(function, nn.Module):
            self._key[-1] = type(function), repr(function)

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


@dataclass(frozen=True, slots=True)
class _PaperBits:
    """How a tensor would be in bits."""

    count: int
    dtype: torch.dtype

    def tensor(self, bits: torch.Tensor) -> torch.Tensor:
        """See `Bits`."""
        return bits.new_empty(self.count).to(self.dtype)


class _PaperTape(LeanTape):
    """A tape that looks at no values."""

    __slots__ = ()

    def _open(self, recipe: Recipe, given: list[Any]) -> None:
        self._recipe = recipe
        self._given = {place: Slot(-1, given[place]) for place in recipe.given}

    def _sample(self, value: int, tensor: torch.Tensor) -> None:
        pass

    def _put_into_bits(self, slot: Slot, tensor: torch.Tensor) -> None:
        assert self._recipe is not None
        slot.value = self._recipe.value(slot.index)
        if slot.index not in self._recipe.origins:
            self._drop(slot)
            return
        ones = tensor.detach().ne(0)
        slot.bits = cast(Bits, _PaperBits(ones.numel(), tensor.dtype))
        slot.tensor = kept = ones.new_empty(bytes_in_bits(tensor) or 0, dtype=torch.uint8)
        slot.settled = kept._version
        if self._around is not None:
            self._hand_over(slot, kept)


def _no_doubt() -> None:
    """Nothing is compared."""
