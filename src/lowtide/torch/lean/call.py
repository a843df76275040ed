"""`lean(fn, *args)`: drop from a function's tape what is cheap to recompute from the rest of it.

The first call of a kind is traced (`trace.py`), and a minimum cut of the trace decides what is kept (`graph.py`). Later
calls have a pair of saved-tensor hooks and nothing else: the pack hook knows by counting what to drop, the unpack hook
recomputes it (`tape.py`). The same kernels on the same inputs return the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from lowtide.checks import function as check_function
from lowtide.errors import InputError
from lowtide.interface.cache import Cache
from lowtide.sizes import check_budget
from lowtide.torch.lean.graph import LeanGraph, LeanPoint, LeanSize, Recipe, sizes_in_bits
from lowtide.torch.lean.guards import Guards
from lowtide.torch.lean.tape import Doubt, LeanTape
from lowtide.torch.lean.trace import Tracer, tracing
from lowtide.torch.memory import recording

Result = TypeVar("Result")

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_hooks_are_on = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]  # it has no stub
_transformed = torch._C._functorch.peek_interpreter_stack
_compiling = torch.compiler.is_compiling
_traces = torch._C._is_tracing  # whether `torch.jit.trace` is at work, which runs a function again to see if it repeats
_FAKE_MODE_KEY = torch._C._TorchDispatchModeKey.FAKE

_MOST_KINDS = 2048  # of calls in the cache
_MOST_VARIANTS = 8  # of one kind of call, which differ in numbers
_MISFITS_BEFORE_TRACING = 3  # calls in a row that differ from the traced one, after which the next one is traced
_MOST_TRACINGS_FOR_MISFITS = 3  # of one kind of call; after that, calls that do not fit keep everything


def lean(
    function: Callable[..., Result], *args: Any, tape: int | str | LeanSize | None = None, **kwargs: Any
) -> Result:
    """Call `function(*args, **kwargs)` and keep a smaller tape: what is cheap to recompute is not kept.

    Results and gradients are those of the plain call to the last bit. The function itself is not run again: single
    operations are, in the backward, from what is kept. A call that differs from the traced one keeps everything.

    Args:
        function: what to call: a module, a method or any other function.
        args: its arguments.
        tape: the most bytes to keep: 67108864, "64MiB", or "50%" of the plain tape; the fastest such tape is chosen.
            None drops everything that takes no matrix product, attention, convolution or random draw to recompute.
        kwargs: its keyword arguments.

    Raises:
        BudgetError: no tape is that small; the error names the least that works.
        CheckpointError: in the backward, if what is made again is not what was dropped; `.grad` is then not to be
            trusted.
    """
    if _compiling() or not torch.is_grad_enabled() or recording.runs_plainly() or _steps_aside():
        return function(*args, **kwargs)
    check_function(function, "function")
    _check_tape(tape)
    found, again = look_up(function, args, kwargs), recording.remembered()
    if again is _PLAINLY or not found.guards.is_plain:
        # In a rerun FSDP may have gathered what was sharded in the first run: then it does not decide.
        recording.remember(_PLAINLY)
        return function(*args, **kwargs)
    result: Result = found.kind.call(function, args, kwargs, found, tape, again)
    return result


def lean_frontier(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[LeanPoint, ...]:
    """Every tape that `lean` can keep for such a call, from the largest and fastest to the smallest.

    The function is called once and traced; its result is discarded.
    """
    check_function(function, "function")
    with torch.enable_grad():
        if _steps_aside():
            raise InputError("lean_frontier cannot trace inside a transform, another lean call or a fake mode")
        return _graph_of(function, args, kwargs).points()


def lean_menu(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[LeanPoint]:
    """Like `lean_frontier`, but points that do not depend on measured times: for plans that are run elsewhere."""
    return _graph_of(function, args, kwargs).menu()


def _graph_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> LeanGraph:
    found = look_up(function, args, kwargs)
    return found.kind.traced(function, args, kwargs, found)


def can_lean(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether `lean` would do anything for such a call, here and now; without scipy it cannot."""
    return find_spec("scipy") is not None and not _steps_aside() and Guards(function, args, kwargs).is_plain


class FoundCall(NamedTuple):
    """What a call depends on, its kind, and its variant, which is None if it was not traced yet."""

    guards: Guards
    kind: _Kind
    variant: _Variant | None


def look_up(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> FoundCall:
    """What is known about such a call."""
    guards = Guards(function, args, kwargs)
    kind = _kinds.get(guards.key)
    if kind is None:
        kind = _kinds.setdefault(guards.key, _Kind(_name_of(function)), guards.anchors)
    return FoundCall(guards, kind, kind.variant(guards.numbers))


class Lean(nn.Module):
    """A module whose tape is lean: the same parameters, the same `state_dict`, the same results.

    Args:
        module: what to call. It is shared, not copied.
        tape: see `lean`.
    """

    def __init__(self, module: nn.Module, *, tape: int | str | None = None) -> None:
        if not isinstance(module, nn.Module):
            raise InputError(f"module is a {type(module).__name__}; give an nn.Module, or use lean for a function")
        _check_tape(tape)
        super().__init__()
        object.__setattr__(self, "_module", module)
        for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            object.__setattr__(self, shared, getattr(module, shared))
        self.training = module.training
        self.tape = tape

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result; its tape is lean."""
        return lean(self._module, *args, tape=self.tape, **kwargs)

    def train(self, mode: bool = True) -> Lean:
        """Set the mode of the module and of this one."""
        self._module.train(mode)
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own `state_dict`."""
        return self._module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load what the module's own `state_dict` returned."""
        return self._module.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._module._load_from_state_dict(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        # An attribute that the module has is set on the module.
        module = self.__dict__.get("_module")
        if module is not None and name not in self.__dict__ and name in module.__dict__:
            setattr(module, name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_module":  # missing in a copy that is still being made
                raise
            return getattr(self._module, name)

    def extra_repr(self) -> str:
        """The text that `repr` shows beside the submodules."""
        return f"{type(self._module).__name__}, tape={self.tape!r}"


def _check_tape(tape: int | str | LeanSize | None) -> None:
    if tape is not None and not isinstance(tape, LeanSize) and (tape != 0 or isinstance(tape, bool)):
        check_budget(tape)


def _steps_aside() -> bool:
    """Whether `lean` does nothing here.

    That is so inside a transform or `torch.jit.trace`, with fake tensors, where hooks are not allowed, and in another
    lean call, which covers this one.
    """
    if _transformed() is not None or _traces() or torch._C._get_dispatch_mode(_FAKE_MODE_KEY) is not None:
        return True
    if not _hooks_are_on():
        return True
    top = _top_hooks(False)
    return top is not None and isinstance(getattr(top[1], "__self__", None), LeanTape)


class _Decision(NamedTuple):
    """How a call was made."""

    key: Hashable
    recipe: Recipe
    doubt: Doubt
    traced: bool  # under modes, which have some operations save other tensors: `ctc_loss`, for one


_PLAINLY = object()  # the decision to call a function as it is


class _Variant:
    """Calls of a kind that run the same operations: those with these numbers, some of which may be any."""

    def __init__(self, numbers: list[Any], graph: LeanGraph) -> None:
        self._numbers = numbers
        self._free: set[int] = set()  # indices of the numbers that may be any
        self.graph = graph
        self.doubt = Doubt()  # once raised, a call is traced before this variant is used again

    def is_for(self, numbers: list[Any]) -> bool:
        """Whether calls with these numbers belong to the variant."""
        if self.doubt.is_raised:
            return False
        if numbers == self._numbers:
            return True
        if not self._free or len(numbers) != len(self._numbers):
            return False
        pairs = enumerate(zip(numbers, self._numbers, strict=True))
        return all(now == then or place in self._free for place, (now, then) in pairs)

    def takes_in(self, numbers: list[Any], graph: LeanGraph) -> bool:
        """Whether a call with other numbers ran the same operations; if so, it joins the variant.

        From then on, operations whose numbers differ are not run again.
        """
        if len(numbers) != len(self._numbers):
            return False
        pairs = enumerate(zip(numbers, self._numbers, strict=True))
        free = self._free | {place for place, (now, then) in pairs if now != then}
        merged = self.graph.merged(graph, numbers_differ=bool(free))
        if merged is None:
            return False
        self._free = free
        self.graph = merged
        self.doubt.is_raised = False
        return True


class _Kind:
    """All calls with the same key."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._variants: list[_Variant] = []
        self._has_warned = False
        self._misfits = 0  # in a row
        self._tracings_for_misfits = 0

    def variant(self, numbers: list[Any]) -> _Variant | None:
        """The variant of calls with these numbers, if it is known."""
        for variant in self._variants:
            if variant.is_for(numbers):
                return variant
        return None

    def call(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        found: FoundCall,
        tape: int | str | LeanSize | None,
        again: Any,
    ) -> Any:
        """Call the function with a lean tape; `again` is what the first run of the checkpoint call around decided."""
        guards, variant = found.guards, found.variant
        if isinstance(again, _Decision) and again.key == guards.key:
            # What was learned since would have the rerun of a checkpoint call save other tensors than its first run.
            with tracing(Tracer()) if again.traced else nullcontext():
                return self._follow(again.recipe, again.doubt, function, args, kwargs, guards)[0]
        if variant is None:
            if len(self._variants) >= _MOST_VARIANTS:
                self._say("goes another way for each of many numbers that it is given or keeps")
                recording.remember(_PLAINLY)
                return function(*args, **kwargs)
            result, variant, lean_tape = self._trace(function, args, kwargs, guards)
            recipe = self._recipe(variant, tape)
            recording.remember(_Decision(guards.key, recipe, variant.doubt, traced=True))
            lean_tape.close_traced(recipe, guards.tensors, variant.doubt)
            return result
        recipe = self._recipe(variant, tape)
        recording.remember(_Decision(guards.key, recipe, variant.doubt, traced=False))
        result, lean_tape = self._follow(recipe, variant.doubt, function, args, kwargs, guards)
        self._learn_from(lean_tape, variant)
        return result

    def _recipe(self, variant: _Variant, tape: int | str | LeanSize | None) -> Recipe:
        """The recipe for a tape, which was planned for one of the variants: others may have no such tape."""
        if isinstance(tape, LeanSize) and len(self._variants) > 1:
            tape = tape._replace(strict=False)
        return variant.graph.recipe(tape)

    def _follow(
        self, recipe: Recipe, doubt: Doubt, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], guards: Guards
    ) -> tuple[Any, LeanTape]:
        """Call the function and keep what the recipe says."""
        lean_tape = LeanTape(self._name, _top_hooks(False))
        _push_hooks(lean_tape.packing(recipe, guards.tensors, doubt), lean_tape.unpack)
        try:
            result = function(*args, **kwargs)
        finally:
            _pop_hooks()
        lean_tape.close()
        return result, lean_tape

    def _learn_from(self, lean_tape: LeanTape, variant: _Variant) -> None:
        """Note whether a call went the way of its variant."""
        if lean_tape.fits:
            self._misfits = 0
        elif lean_tape.is_outdated:
            variant.doubt.is_raised = True
        else:
            self._misfits += 1
            if self._misfits == _MISFITS_BEFORE_TRACING and self._tracings_for_misfits < _MOST_TRACINGS_FOR_MISFITS:
                self._misfits = 0
                self._tracings_for_misfits += 1
                variant.doubt.is_raised = True  # calls go another way from now on
            self._say("did not save what it saved when it was traced")

    def traced(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: FoundCall) -> LeanGraph:
        """The graph of such a call, which is traced if none has been."""
        return (found.variant or self._trace(function, args, kwargs, found.guards)[1]).graph

    def _trace(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], guards: Guards
    ) -> tuple[Any, _Variant, LeanTape]:
        tracer, lean_tape = Tracer(), LeanTape(self._name, _top_hooks(False))
        _push_hooks(tracer.packing(lean_tape.keep), lean_tape.unpack)
        try:
            with tracing(tracer):
                result = function(*args, **kwargs)
        except RuntimeError as error:
            if "saved tensor hooks" in str(error):
                error.add_note(f"{self._name} was called by lean, which needs them: call it without")
            raise
        finally:
            _pop_hooks()
        trace = tracer.trace(guards.tensors, guards.arguments)
        graph = LeanGraph(trace, sizes_in_bits(trace, lean_tape.held))
        variant = next((variant for variant in self._variants if variant.takes_in(guards.numbers, graph)), None)
        if variant is None:
            variant = _Variant(guards.numbers, graph)
            self._variants.append(variant)
        return result, variant, lean_tape

    def _say(self, what: str) -> None:
        recording.count(kept_whole=1)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self._name} {what}: such calls keep their whole tape. Results and gradients are right; "
                "receipts count these calls as kept_whole",
                stacklevel=5,
            )


# A key identifies modules by `id`, and a kind holds only numbers and traces, so neither keeps a model alive.
_kinds: Cache[_Kind] = Cache(_MOST_KINDS)


def _name_of(function: Any) -> str:
    if isinstance(function, nn.Module):
        return type(function).__name__
    return getattr(function, "__qualname__", type(function).__name__)
