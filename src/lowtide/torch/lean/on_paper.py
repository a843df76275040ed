"""Lean tapes on paper: those that a call could keep, with times from operation counts, and calls that keep one.

`lean` itself does nothing where tensors have no values, because it compares samples of them. Here a call is traced
once, and modules that are alike, such as the layers of a model, share the trace for as long as the fake mode exists.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.interface.cache import Cache
from lowtide.torch.lean.graph import LeanGraph, LeanPoint, LeanSize, sizes_in_bits
from lowtide.torch.lean.guards import PaperGuards
from lowtide.torch.lean.tape import Doubt, PaperTape
from lowtide.torch.lean.trace import Tracer, tracing
from lowtide.torch.paper.devices import A100, Device

_FAKE_MODE_KEY = torch._C._TorchDispatchModeKey.FAKE
_MOST_CALLS = 10_000  # on paper whose graphs are cached
# Graphs of calls in a fake mode: by what such calls have in common, and by the modules that were called. Entries are
# removed when the mode dies. No graph refers to the mode, because traces have no tensors.
_alike: Cache[LeanGraph] = Cache(_MOST_CALLS)
_own: Cache[LeanGraph] = Cache(_MOST_CALLS)


def is_on_paper() -> bool:
    """Whether a fake mode is active, in which tensors have no values."""
    return torch._C._get_dispatch_mode(_FAKE_MODE_KEY) is not None


def lean_menu_on_paper(device: Device, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[LeanPoint]:
    """The points of `lean_menu` for a call, by falling bytes, with the seconds that they take on a device.

    To be called inside `on_paper`; the function is called once, with grad, if no call like it was traced before. Empty
    for a call that `lean` would run plainly: of compiled or scripted modules, or with tensor subclasses; and without
    scipy.
    """
    call = _PaperCall(function, args, kwargs)
    if not call.guards.is_plain or find_spec("scipy") is None:
        return []
    graph = call.graph
    if graph is None or graph.trace.device != device:
        with torch.enable_grad():
            _, graph = call.traced(device, PaperTape(call.name, None))
    return graph.menu()


def lean_on_paper(function: Callable[..., Any], *args: Any, tape: LeanSize | None, **kwargs: Any) -> Any:
    """`lean`, to be called inside `on_paper`."""
    call = _PaperCall(function, args, kwargs)
    if not call.guards.is_plain or not torch.is_grad_enabled():
        return function(*args, **kwargs)
    lean_tape = PaperTape(call.name, torch._C._autograd._top_saved_tensors_default_hooks(False))
    graph = call.graph
    if graph is not None:
        pack = lean_tape.packing(graph.recipe(tape), call.guards.tensors, Doubt())
        with saved_tensors_hooks(pack, lean_tape.unpack):
            result = function(*args, **kwargs)
        lean_tape.close()
        return result
    with _Again():
        result, graph = call.traced(A100, lean_tape)  # any device: which tape is kept does not depend on times
    lean_tape.close_traced(graph.recipe(tape), call.guards.tensors, Doubt())
    return result


class _PaperCall:
    """A call on paper, and the graph of calls like it."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call = function, args, kwargs
        self.name = getattr(function, "__qualname__", type(function).__name__)
        self.guards = PaperGuards(function, args, kwargs)
        self._mode = cast(FakeTensorMode, torch._C._get_dispatch_mode(_FAKE_MODE_KEY))
        self._own_key = id(self._mode), self.guards.key, tuple(map(id, self.guards.anchors))

    @property
    def graph(self) -> LeanGraph | None:
        """The graph of a call like this one with the same modules, if there was one."""
        return _own.get(self._own_key)

    def traced(self, device: Device, lean_tape: PaperTape) -> tuple[Any, LeanGraph]:
        """The call's result, and its graph or that of a call like it; the tape keeps everything."""
        function, args, kwargs = self._call
        # Whether a backward is running is part of the key: in a rerun, buffers may be other tensors.
        key = id(self._mode), self.guards.key, device, torch._C._current_graph_task_id() >= 0
        graph = _alike.get(key)
        if graph is not None:
            with saved_tensors_hooks(lean_tape.pack_everything, lean_tape.unpack):
                result = function(*args, **kwargs)
        else:
            tracer = Tracer(device)
            with saved_tensors_hooks(tracer.packing(lean_tape.keep), lean_tape.unpack), tracing(tracer):
                result = function(*args, **kwargs)
            trace = tracer.trace(self.guards.tensors, self.guards.arguments)
            graph = LeanGraph(trace, sizes_in_bits(trace, lean_tape.held))
            _alike.put(key, graph, [self._mode])
        _own.put(self._own_key, graph, [self._mode, *self.guards.anchors])
        return result, graph


class _Again(TorchDispatchMode):
    """Runs operations twice, as a traced call on real tensors does to time them."""

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
