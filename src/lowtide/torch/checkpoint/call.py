"""`checkpoint(fn, *args)`: run a function, keep its arguments instead of its tape, and run it again for the backward.

The first run builds its graph as always, so that outputs, hooks, shared weights and the order of every sum are those of
the plain call. Only the tensors that autograd saves are not kept: a pair of saved-tensor hooks saves their numbers
instead. When the backward unpacks the first number, the function runs once more, and the tensors that autograd saves in
that rerun are those that the numbers stand for. They are stored detached: the rerun's graph is not needed, and what the
backward never asks for must not keep it alive. The rerun finds owners, arguments, generators and settings as the
first run found them (`owners.py`, `structure.py`, `generators.py` and `ambient.py` in `state/`). Whatever else a
function can see is not followed; instead samples of what both runs save are compared, and a difference is an error
(`samples.py`, `mismatch.py`).

Calls may be nested. The arguments of an inner call are then saved through the outer call's hooks, so they are not kept
either; before an inner call is rerun, the calls around it are, from the outside in.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import copy
from functools import partial
from inspect import CO_VARKEYWORDS, Parameter, signature
from itertools import count
from operator import attrgetter
from typing import Any, NoReturn, TypeVar
from weakref import WeakMethod

import torch
import torch.utils.checkpoint
from torch import nn

from lowtide.checks import function as check_function
from lowtide.errors import CheckpointError, InputError
from lowtide.torch.memory import recording
from lowtide.torch.state.ambient import Ambient
from lowtide.torch.state.generators import Generators
from lowtide.torch.state.mismatch import Differs, Likeness, Naming, Place, in_words
from lowtide.torch.state.notes import KeptTensors
from lowtide.torch.state.owners import Owners, begin_meeting, end_meeting
from lowtide.torch.state.samples import (
    WHOLE,
    checksum,
    compare_later,
    is_gone,
    may_be_unfilled,
    memory_of,
    sample_of,
    whole_sample_of,
)
from lowtide.torch.state.structure import Structure
from lowtide.torch.state.surroundings import first_look

Result = TypeVar("Result")
ContextPair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_set_grad = torch._C._set_grad_enabled
_get_mode, _FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE
_transformed = torch._C._functorch.peek_interpreter_stack
_compiling = torch.compiler.is_compiling
_traces = torch._C._is_tracing  # whether `torch.jit.trace` is at work, which records operations, not graphs
_CHECKS = ("default", "none")
_TENSOR, _USUAL, _STRIDED, _CPU = torch.Tensor, {torch.Tensor, nn.Parameter}, torch.strided, torch.device("cpu")
_SIMPLE = frozenset({type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size})  # arguments
# An operation may save what it has yet to fill, such as the noise of rrelu, and so many tensors more before it runs.
_LATE = 1
# Operations that save tensors of which they leave parts unfilled, such as the noise of rrelu in eval.
_PARTLY_FILLED = frozenset(f"torch.{place}{name}" for place in ("", "nn.functional.") for name in ("ctc_loss", "rrelu"))
_like: Callable[[Any], Likeness] = attrgetter("shape", "dtype", "device")
_NO_CONTEXT = nullcontext()
_NO_CONTEXTS: tuple[Any, ...] = ()
_OTHER_VALUES = "its values are not those of the first run"


def checkpoint(
    function: Callable[..., Result],
    *args: Any,
    use_reentrant: bool | None = None,  # noqa: ARG001  (part of torch's signature)
    context_fn: Callable[[], ContextPair] | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    contexts: Iterable[Callable[[], AbstractContextManager[Any]]] = _NO_CONTEXTS,
    check_rerun: bool | None = None,
    **kwargs: Any,
) -> Result:
    """Call `function(*args, **kwargs)` without keeping its tape; the function runs again when the backward needs it.

    Results and gradients are those of the plain call to the last bit. What it changes in modules and arguments
    is changed once, and random numbers are the same in the rerun. Side effects on anything else happen again; where
    they make the rerun compute something else, an error is raised.

    Args:
        function: what to call: a module, a method or any other function.
        args: its arguments; tensors may be anywhere in tuples, lists and dicts.
        use_reentrant: accepted so that code for `torch.utils.checkpoint` runs; it makes no difference here.
        context_fn: returns two context managers, one for the first run and one for reruns, such as
            `create_selective_checkpoint_contexts`.
        determinism_check: "default" compares shape, dtype and device of the tensors that autograd saves in both runs;
            "none" compares only their number.
        debug: also remember where the first run saved each tensor, for the error message if a rerun differs.
        early_stop: end the rerun when it has made the last tensor that is needed.
        preserve_rng_state: draw the same random numbers in the rerun: those of torch, Python and numpy, and of
            generators in arguments, modules and closures.
        contexts: functions that make context managers to be entered for reruns. Autocast, default dtype and device and
            `sdpa_kernel` are restored without being listed here.
        check_rerun: what is compared of the tensors that autograd saves in both runs: by default samples, small
            tensors whole and at least 1,024 numbers of a large one; with True every bit, with False only shapes, which
            is the default with `preserve_rng_state=False` and with `determinism_check="none"`.
        kwargs: its keyword arguments.

    Raises:
        CheckpointError: in the backward, if the rerun differs from the first run; `.grad` is then not to be trusted.
    """
    if contexts is not _NO_CONTEXTS or check_rerun is not None:
        contexts, check_rerun, kwargs = _own_keywords(function, contexts, check_rerun, kwargs)
    if _compiling():  # pragma: no cover  (it is traced, not run)
        return _traced(function, args, kwargs, context_fn, preserve_rng_state)
    thread = recording.this_thread
    if not torch.is_grad_enabled() or thread.plainly or _transformed() is not None or _traces():
        return function(*args, **kwargs)
    if determinism_check not in _CHECKS:
        raise InputError(f"determinism_check={determinism_check!r} is not known; give one of {', '.join(_CHECKS)}")
    check_function(function, "function")
    if check_rerun is None and not preserve_rng_state:
        check_rerun = False  # other random numbers are other values
    noted = _Noted(determinism_check == "none", check_rerun, debug)
    stack = thread.running
    first, again = (None, None) if context_fn is None else context_fn()
    result: Any = None  # a context that suppresses an exception leaves it so
    try:
        if len(stack) > 8:
            _make_room(24)
        call = _Call(function, args, kwargs, early_stop, Ambient(contexts), again)
        call.begin(stack, noted, preserve_rng_state)
        try:
            if first is None:
                result = function(*args, **kwargs)
            else:
                with first:
                    result = function(*args, **kwargs)
        finally:
            call.end(stack)
    except RuntimeError as error:  # RecursionError is one
        _explain(error, len(stack))
        raise
    call.finish()
    return result  # type: ignore[no-any-return]


def _explain(error: RuntimeError, depth: int) -> None:
    """Say what an error has to do with checkpoint calls, `depth` of which are nested."""
    if "saved tensor hooks" in str(error) and not hasattr(error, "__notes__"):  # or an inner call has said it
        error.add_note(
            "this was called inside lowtide.torch.checkpoint, which needs such hooks: take the transform out of the "
            "call or put the call inside it, or use torch.autograd.grad(..., create_graph=True)"
        )
    if not isinstance(error, RecursionError) or depth < 20:  # or it is the function's own recursion
        return
    raise CheckpointError(
        f"checkpoint calls are nested {depth:,} deep, and Python's stack of {sys.getrecursionlimit():,} frames is "
        "full; nest fewer of them, or raise sys.setrecursionlimit"
    ) from None


def _own_keywords(
    function: Any, contexts: Any, check_rerun: Any, kwargs: dict[str, Any]
) -> tuple[Any, Any, dict[str, Any]]:
    """The two arguments that torch's checkpoint does not have, handed on to a function with parameters of their names.

    A function that takes any name is handed what cannot be meant for this one.
    """
    names, takes_any = _parameters_of(function)
    if contexts is not _NO_CONTEXTS and ("contexts" in names or (takes_any and not _are_contexts(contexts))):
        contexts, kwargs = _NO_CONTEXTS, {**kwargs, "contexts": contexts}
    if check_rerun is not None and ("check_rerun" in names or (takes_any and not isinstance(check_rerun, bool))):
        check_rerun, kwargs = None, {**kwargs, "check_rerun": check_rerun}
    return contexts, check_rerun, kwargs


def _parameters_of(function: Any) -> tuple[Sequence[str], bool]:
    """The names of a function's parameters, and whether it takes any other."""
    called = type(function).forward if isinstance(function, nn.Module) else function
    code = getattr(called, "__code__", None)
    if code is not None and not hasattr(called, "__wrapped__"):  # to ask for a signature takes 20 microseconds
        return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], bool(code.co_flags & CO_VARKEYWORDS)
    try:
        parameters = signature(called).parameters
    except (TypeError, ValueError):  # a function of C, which does not say
        return (), False
    return tuple(parameters), any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())


def _are_contexts(contexts: Any) -> bool:
    return isinstance(contexts, Iterable) and all(map(callable, contexts))


def _traced(
    function: Callable[..., Result],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context_fn: Callable[[], ContextPair] | None,
    preserve_rng_state: bool,
) -> Result:  # pragma: no cover  (it is traced, not run)
    """Call torch's own checkpoint, which `torch.compile` can trace."""
    if context_fn is not None:
        kwargs["context_fn"] = context_fn
    return torch.utils.checkpoint.checkpoint(  # type: ignore[no-any-return]  # torch's own
        function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs
    )


# Where `torch.compile` cannot trace the function, the call is made as if nothing were compiled. Without this, the
# compiler would trace `checkpoint` itself next, and find nothing but torch's checkpoint to be called.
_frames = torch._C._dynamo.eval_frame
_frames.set_code_exec_strategy(
    checkpoint.__code__, _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)
)


class _CheckpointThread(threading.local):
    has_stopped = False  # whether the latest rerun was ended


_thread = _CheckpointThread()


def _make_room(depth: int) -> None:
    """Recurse to this depth, so that a RecursionError is raised here rather than while a call cleans up."""
    if depth:
        _make_room(depth - 1)


class _Stop(BaseException):
    """Ends a rerun that has saved all it needs. Not an Exception, so that no `except Exception` catches it."""


def _stop() -> NoReturn:
    _thread.has_stopped = True
    raise _Stop


# By length, the latest row of likenesses (shape, dtype, device). Most calls are like the one before: such a call costs
# a reference instead of a tuple for each saved tensor.
_rows: dict[int, list[Likeness]] = {}
_MOST_ROWS = 1_000  # above that they are forgotten
_INTS = {int}  # the types of samples, unless some are on a device
_NO_NUMBERS: frozenset[int] = frozenset()  # an empty set of its own takes 216 bytes


class _Noted:
    """What the first run notes of the tensors that autograd saves: their number, likeness, samples and places."""

    __slots__ = ("_places", "_waiting", "count", "exempt", "late", "likes", "sample", "samples", "small")

    def __init__(self, uncompared: bool, check_rerun: bool | None, debug: bool) -> None:
        self.count = -1  # how many there are; -1 until the first run is over
        self.likes: Any = None if uncompared else []
        self.samples: Any = None if check_rerun is False or (uncompared and not check_rerun) else []
        self.exempt = _NO_NUMBERS  # numbers of tensors that no two runs have alike, or that are not asked for
        self.sample = whole_sample_of if check_rerun else sample_of  # as the first run takes them
        self.small = -1 if check_rerun else WHOLE  # bytes up to which a sample is a checksum of them all
        self.late = _NO_NUMBERS  # numbers of tensors that the operations which save them may have to fill yet
        self._waiting: list[tuple[int, torch.Tensor]] = []  # those of which no sample was taken so far
        self._places: list[Place] | Iterator[int] | None = [] if debug else None

    def hook(self) -> Callable[[torch.Tensor], int]:
        """The first run's pack hook."""
        if self.likes is not None and self.samples is not None and self._places is None:
            return self._usual_hook()
        if self.likes is None and self.samples is None and self._places is None:
            # `next(counter, tensor)` takes the tensor as its default and drops it, without running any Python.
            self._places = count()
            return partial(next, self._places)
        return self._pack_some

    def _usual_hook(self) -> Callable[[torch.Tensor], int]:
        """The quick hook, which notes likeness and sample. The graph keeps it, so its lists are emptied in the end."""
        samples, likes, waiting, small, sample = self.samples, self.likes, self._waiting, self.small, self.sample

        # Defaults are as quick as locals and take less room than a closure, of which every call would keep one.
        def pack(
            tensor: torch.Tensor,
            samples: Any = samples,
            likes: Any = likes,
            waiting: Any = waiting,
            small: int = small,
            sample: Any = sample,
            wait: Any = self._wait,
        ) -> int:
            if not tensor.requires_grad or waiting:
                likes.append(_like(tensor))
                wait(tensor)
            # What `sample_of` does with the usual tensor, without the call: half of the time goes into such calls.
            elif (
                (type(tensor) is _TENSOR or type(tensor) in _USUAL)
                and tensor.layout is _STRIDED
                and tensor.is_cpu
                and (size := tensor.nbytes) <= small
                and tensor.is_contiguous()
                and (memory := tensor.data_ptr())
            ):
                likes.append((tensor.shape, tensor.dtype, _CPU))
                samples.append(checksum(memory_of[size](memory)))
            else:
                likes.append(_like(tensor))
                samples.append(sample(tensor))
            return len(samples) - 1

        return pack

    def _pack_some(self, tensor: torch.Tensor) -> int:
        """Note what is asked for."""
        number = self.so_far()
        if self.likes is not None:
            self.likes.append(_like(tensor))
        if self.samples is not None:
            self._wait(tensor)
        if isinstance(self._places, list):
            self._places.append(Place())
        return number

    def _wait(self, tensor: torch.Tensor) -> None:
        """Take a sample of a tensor: later, if the operation that saves it may have to fill it yet, such as noise."""
        number = len(self.samples)
        if may_be_unfilled(tensor):
            self.samples.append(0)
            self.late |= {number}
            self._waiting.append((number, tensor))
        else:
            self.samples.append(self.sample(tensor))
        self._look_again(number - _LATE)

    def _look_again(self, below: int) -> None:
        while self._waiting and self._waiting[0][0] < below:
            number, tensor = self._waiting.pop(0)
            if is_gone(tensor):
                self.exempt |= {number}
            else:
                self.samples[number] = self.sample(tensor)

    def so_far(self) -> int:
        """How many tensors the first run has saved, now or by its end."""
        if self.count >= 0:
            return self.count
        for row in (self.likes, self.samples, self._places):
            if isinstance(row, list):
                return len(row)
        return next(copy(self._places))  # type: ignore[arg-type]  # a count cannot be read without advancing it

    def finish(self) -> None:
        """The first run is over."""
        self.count = self.so_far()
        self._look_again(self.count)
        if self.samples is not None:
            taken = self.samples
            self.samples = array("Q", taken) if set(map(type, taken)) <= _INTS else taken.copy()
            taken.clear()
        if self.likes is not None:
            row, usual = self.likes, _rows.get(self.count)
            if usual is None or usual != row:
                if len(_rows) >= _MOST_ROWS:
                    _rows.clear()
                _rows[self.count] = usual = row.copy()
            row.clear()
            self.likes = usual

    def place(self, number: int) -> Place | None:
        """Where in the user's code the tensor with this number was saved, if that was noted."""
        places = self._places
        return places[number] if isinstance(places, list) and number < len(places) else None


class _Call:
    """One checkpoint call: what it takes to run the function again, and the tensors that the latest rerun saved."""

    __slots__ = (
        "__weakref__",
        "_ambient",
        "_arguments",
        "_context",
        "_early_stop",
        "_function",
        "_generators",
        "_held",
        "_hidden",
        "_keys",
        "_noted",
        "_owners",
        "_places",
        "_structure",
        "decisions",
        "outer",
        "reached",
        "store",
        "versions",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        early_stop: bool,
        ambient: Ambient,
        context: AbstractContextManager[Any] | None,
    ) -> None:
        self._function = function
        self._early_stop = early_stop
        self._keys = tuple(kwargs)
        self._ambient = ambient
        self._context = context
        # The call around this one, and the range of its saved tensors that are our arguments.
        self.outer: tuple[_Call, int, int] | None = None
        self.decisions: list[Any] | None = None  # what calls inside remember
        self.reached = 0  # how many of these the present rerun has asked for
        self.store: list[torch.Tensor | None] = []  # saved by the latest rerun; None once handed out
        self.versions: list[int] = []
        self._noted: _Noted
        self._hidden: KeptTensors | None = None
        self._owners: Owners | None = None
        self._generators: Generators | None = None
        self._take(args, kwargs)

    # --- the first run

    def _take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Split the arguments into tensors, which are kept for reruns, and the rest."""
        values: list[Any] = [*args, *kwargs.values()]
        self._structure: Structure | None = None
        self._places: list[int] | None = None  # of the tensors; None where there is nothing else
        self._arguments: list[Any] = []
        tensors = values if _USUAL.issuperset(map(type, values)) else self._split(values)
        top = _top_hooks(False)
        around = getattr(top[1], "__self__", None) if top is not None else None
        if isinstance(around, _Call):
            before = around._noted.so_far()
            self._held = KeptTensors(tensors, through_hooks=True)
            self.outer = (around, before, around._noted.so_far())
        else:
            self._held = KeptTensors(tensors, through_hooks=top is not None)

    def _split(self, values: list[Any]) -> list[torch.Tensor]:
        """The tensors among the arguments; notes what else there is."""
        tensors: list[torch.Tensor] = []
        places: list[int] = []
        for place, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                tensors.append(value)
                places.append(place)
            elif type(value) not in _SIMPLE:
                tensors.clear()
                # Until the first run begins, `_arguments` has modules, functions and generators among them.
                self._structure = Structure(values, tensors, self._arguments)
                self._structure.forget_originals()
                return tensors
        for place in places:
            values[place] = None
        self._arguments, self._places = values, places
        return tensors

    def begin(self, stack: list[tuple[_Call, bool]], noted: _Noted, preserve_rng_state: bool) -> None:
        """Begin the first run: until `end`, the hooks of this call are on and its owners are noted."""
        self._noted = noted
        if preserve_rng_state and _get_mode(_FAKE) is None:  # fake tensors have no values
            self._generators = Generators()
        self._owners = owners = Owners(_ignored if self._generators is None else self._generators.follow)
        owners.find_call(self._function, self._arguments if self._structure is not None else [])
        if not owners.is_lazy:  # a lazy one becomes another module in its first run, so it runs plainly
            _push_hooks(noted.hook(), self.unpack)
        begin_meeting(owners)
        stack.append((self, False))

    def end(self, stack: list[tuple[_Call, bool]]) -> None:
        """End the first run, also after an exception."""
        assert self._owners is not None
        if not self._owners.is_lazy:
            _pop_hooks()
        stack.pop()
        end_meeting()

    def finish(self) -> None:
        """After a first run without an exception, keep what a rerun needs and nothing else."""
        assert self._owners is not None
        self._noted.finish()
        changed = self._held.settle()
        if changed and self.outer is not None:  # its copies of these are put in their place
            self.outer[0]._noted.exempt |= {self.outer[1] + number for number in changed}
        self._owners, hidden = self._owners.finish()
        if hidden:
            self._hidden = KeptTensors(hidden, through_hooks=_top_hooks(False) is not None)

    # --- reruns

    def unpack(self, number: int) -> torch.Tensor:
        """The tensor that autograd saved under this number, handed out once and then released."""
        store = self.store
        if number >= len(store) or (tensor := store[number]) is None:
            tensor = self._again(number)
            store = self.store
        store[number] = None
        if tensor._version != self.versions[number] and number not in self._noted.exempt:
            raise CheckpointError(
                f"a tensor of shape {tuple(tensor.shape)} that autograd needs for the backward was changed in place "
                "after the function had used it; make a new tensor instead"
            )
        return tensor

    def _again(self, number: int) -> torch.Tensor:
        if self.outer is not None:
            self._rerun_those_around()
        self.rerun()
        tensor = self.store[number]
        assert tensor is not None
        return tensor

    def _rerun_those_around(self) -> None:
        """Rerun calls around this one that no longer have its arguments, which they saved: from the outside in."""
        waiting: list[_Call] = []
        call = self
        while call.outer is not None and call.outer[0]._lacks(call.outer[1], call.outer[2]):
            call = call.outer[0]
            waiting.append(call)
        for call in reversed(waiting):
            call.rerun()

    def _lacks(self, start: int, stop: int) -> bool:
        return not self.store or any(tensor is None for tensor in self.store[start:stop])

    def rerun(self) -> None:
        """Run the function again, and put the tensors that it saves into `store`."""
        if self._owners is not None and self._noted.count >= 0:
            self._owners.check()
        others = () if self._structure is None else self._arguments
        effects = first_look((self._function, *others), counts=True)
        rerun = _Rerun(self._noted, stops=self._early_stop or self._noted.count < 0, error=self._explained)
        differs: Differs | None = None
        try:
            self._run(rerun.hook(), rerun.saved, rerun.finish)
        except Differs as found:
            differs = found.with_traceback(None)  # which has this frame, and all that the function had
        except Exception:
            differs = rerun.unlike()
            if differs is None:
                raise
        if differs is not None:
            self._refuse(differs)
            self.rerun()
            return
        self.store, self.versions = rerun.saved, rerun.versions
        if effects is not None:
            effects.tell()

    def _refuse(self, differs: Differs) -> None:
        """Raise the error for a rerun that differs, unless that is in the nature of the operation."""
        error = self._explained(differs)
        if error is not None:
            try:
                raise error
            finally:
                del error  # or it would be held by this frame, which its traceback holds

    def _run(
        self,
        pack: Callable[[torch.Tensor], int],
        saved: list[torch.Tensor | None],
        finish: Callable[[list[torch.Tensor]], None],
    ) -> None:
        """Run the function as it ran first, with this pack hook, and `finish` before anything is put back.

        It is handed the tensors that will then have other values.
        """
        is_now = self._ambient.is_now()
        if is_now:
            values, kwargs = self._given()
        else:
            with self._ambient.overrides():  # or arguments would be of other classes
                values, kwargs = self._given()
        if is_now and self._owners is None and self._context is None:
            with _NO_CONTEXT if self._generators is None else self._generators.again():
                self._run_here(pack, saved, values, kwargs)
                finish([])
            return
        rewritten: list[torch.Tensor] = []
        with ExitStack() as contexts:
            if self._owners is not None:
                hidden = self._hidden.again() if self._hidden is not None else []
                rewritten = contexts.enter_context(self._owners.as_before(hidden))
            if self._generators is not None:
                contexts.enter_context(self._generators.again())
            if not is_now:
                contexts.enter_context(self._ambient.again(cached=True))
            if self._context is not None:
                contexts.enter_context(self._context)
            self._run_here(pack, saved, values, kwargs)
            finish(rewritten)

    def _given(self) -> tuple[list[Any], dict[str, Any]]:
        """The arguments as they were given to the first run."""
        tensors = self._held.again()
        if self._structure is not None:
            values = self._structure.values(tensors)
        elif self._places is None:
            values = tensors
        else:
            values = list(self._arguments)
            for place, tensor in zip(self._places, tensors, strict=True):
                values[place] = tensor
        if not self._keys:
            return values, {}
        positional = len(values) - len(self._keys)
        return values[:positional], dict(zip(self._keys, values[positional:], strict=True))

    def _run_here(
        self,
        pack: Callable[[torch.Tensor], int],
        saved: list[torch.Tensor | None],
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> None:
        thread, grad = recording.this_thread, torch.is_grad_enabled()
        was_recomputing, around = thread.recomputing, _thread.has_stopped
        thread.running.append((self, True))
        self.reached = 0
        _set_grad(True)
        _push_hooks(pack, saved.__getitem__)  # type: ignore[arg-type]  # of tensors that are all there yet
        _thread.has_stopped = False
        try:
            thread.recomputing = True
            self._function(*args, **kwargs)
        except _Stop:
            pass
        except RuntimeError:
            if not _thread.has_stopped:  # TorchScript turns every exception, `_Stop` too, into a RuntimeError
                raise
        finally:
            _pop_hooks()
            _set_grad(grad)
            thread.recomputing = was_recomputing
            thread.running.pop()
            _thread.has_stopped = around  # this may be inside another rerun, which goes on

    # --- what went wrong

    def _explained(self, differs: Differs) -> CheckpointError | None:
        """The error for a rerun that differs; runs once more up to that tensor, to find the operation and its line.

        None if the operation is one that leaves parts of its results unfilled: from now on these are not compared.
        """
        naming, place, function = Naming(), None, ""
        saved: list[torch.Tensor | None] = []

        def pack(tensor: torch.Tensor) -> int:
            nonlocal place, function
            if len(saved) == differs.number:
                place, function = Place(), naming.function
                _stop()
            saved.append(tensor.detach())
            return len(saved) - 1

        try:
            with naming:
                self._run(pack, saved, lambda _: None)
        except Exception:  # whatever it is, the first error is the one to report
            place = None
        if function in _PARTLY_FILLED and differs.in_values:
            self._noted.exempt |= {differs.number}
            return None
        where, noted = "", self._noted.place(differs.number)
        if place is not None:
            where = f", saved by {function or 'an operation'}{self._at(place)}"
        elif noted is not None:
            where = f", which the first run saved{self._at(noted)}"
        return _difference(differs, where)

    def _at(self, place: Place) -> str:
        path = ""
        if place.module is not None:
            path = f" in {self._path_of(place.module)}"
        return f"{path} ({place.line})"

    def _path_of(self, module: nn.Module) -> str:
        return type(module).__name__ if self._owners is None else self._owners.path_of(module)


class _Rerun:
    """The tensors that autograd saves in one rerun, each compared with its twin in the first run."""

    __slots__ = ("_compares", "_error", "_late", "_noted", "_stops", "_unfilled", "_wanted", "saved", "versions")

    def __init__(self, noted: _Noted, *, stops: bool, error: Callable[[Differs], CheckpointError | None]) -> None:
        self._noted = noted
        self._wanted = noted.so_far()
        self._compares = noted.count >= 0 and noted.samples is not None  # before the first run is over some are missing
        self._stops = stops  # whether the rerun ends when it has all that is wanted
        self._error = error
        self._late: list[tuple[int, torch.Tensor]] = []  # which the operation that saves them may have to fill yet
        self._unfilled = -1 - _LATE  # the latest that may be of that kind
        self.saved: list[torch.Tensor | None] = []
        self.versions: list[int] = []

    def hook(self) -> Callable[[torch.Tensor], int]:
        """The rerun's pack hook.

        At the last tensor that is wanted it ends the rerun, before the operation that saves it has run; unless that
        operation may have to fill one of them yet: then at the next tensor.
        """
        noted, late, wanted, samples = self._noted, self._late, self._wanted, self._noted.samples
        saved, append, note, pack_constant = self.saved, self.saved.append, self.versions.append, self._pack_constant
        ends = wanted - 1 if self._stops else -1
        sample: Any = noted.sample if self._compares else None
        small, compare = noted.small if self._compares else -1, self._compare

        def pack(tensor: torch.Tensor) -> int:
            number = len(saved)
            if number >= wanted:
                return self._beyond(tensor)
            note(tensor._version)
            if not tensor.requires_grad:
                pack_constant(number, tensor)
            else:
                # Detached, unless it is a leaf, or what the backward never asks for would keep the rerun's graph, which
                # has this hook.
                append(tensor if tensor.is_leaf else tensor.detach())
                if sample is not None and not (
                    (type(tensor) is _TENSOR or type(tensor) in _USUAL)
                    and tensor.layout is _STRIDED
                    and tensor.is_cpu
                    and (size := tensor.nbytes) <= small
                    and tensor.is_contiguous()
                    and (at := tensor.data_ptr())
                    and checksum(memory_of[size](at)) == samples[number]
                ):
                    compare(number, tensor)
            if late:
                self._compare_late(number - _LATE)
            if number == ends and number - self._unfilled > _LATE:
                _stop()
            return number

        return pack

    def _pack_constant(self, number: int, tensor: torch.Tensor) -> None:
        """Save a tensor that needs no gradient, such as noise that its operation may have to fill yet."""
        self.saved.append(tensor)
        if may_be_unfilled(tensor) if self._noted.samples is None else number in self._noted.late:
            self._late.append((number, tensor))
            self._unfilled = number
        elif self._compares:
            self._compare(number, tensor)

    def _beyond(self, tensor: torch.Tensor) -> int:
        """A tensor more than is wanted: the rerun ends here, unless the function has caught `_Stop` and goes on."""
        if self._stops:
            return self._wanted if _thread.has_stopped else _stop()
        raise Differs(self._wanted, f"the first run saved no more than {self._wanted:,}, now {in_words(_like(tensor))}")

    def _compare(self, number: int, tensor: torch.Tensor) -> None:
        then, now = self._noted.samples[number], self._noted.sample(tensor)
        if isinstance(now, torch.Tensor) and isinstance(then, torch.Tensor):
            error = partial(_found_later, WeakMethod(self._error), self._noted, number, _like(tensor))
            compare_later(then, now, error)
        elif then != now and number not in self._noted.exempt:
            raise self.unlike() or Differs(number, f"{_OTHER_VALUES} ({in_words(_like(tensor))})", in_values=True)

    def _compare_late(self, below: int) -> None:
        while self._late and self._late[0][0] < below:
            number, tensor = self._late.pop(0)
            if self._compares and not is_gone(tensor):
                self._compare(number, tensor)

    def unlike(self) -> Differs | None:
        """The first tensor whose shape, dtype or device is not that of its twin."""
        likes = self._noted.likes
        rows: Any = zip(self.saved, () if likes is None else likes, strict=False)
        for number, (tensor, then) in enumerate(rows):
            if _like(tensor) != then:
                return Differs(number, f"it was {in_words(then)}, now it is {in_words(_like(tensor))}")
        return None

    def finish(self, rewritten: list[torch.Tensor]) -> None:
        """The function has run, or has been ended; `rewritten` tensors are about to have other values."""
        saved: Any = self.saved
        number, wanted, likes = len(saved), self._wanted, self._noted.likes
        self._compare_late(number)
        # Shape, dtype and device of all in one go: a tensor of another shape has other samples too, as a rule.
        if likes is not None and list(map(_like, saved)) != likes[:number]:
            differs = self.unlike()
            if differs is not None:
                raise differs
        if number < wanted:
            then = "another one" if likes is None else in_words(likes[number])
            raise Differs(number, f"there was {then}, now there is nothing more, where the first run saved {wanted:,}")
        if rewritten:
            storages = {tensor.untyped_storage()._cdata for tensor in rewritten}
            for number, tensor in enumerate(self.saved):
                assert tensor is not None
                if tensor.layout is torch.strided and tensor.untyped_storage()._cdata in storages:
                    self.saved[number] = copied = tensor.clone()
                    # One that the rerun itself wrote to is refused when it is asked for.
                    self.versions[number] = copied._version if tensor._version == self.versions[number] else -1


def _difference(differs: Differs, where: str) -> CheckpointError:
    return CheckpointError(
        f"the rerun differs from the first run at saved tensor {differs.number:,}{where}: {differs.how}. "
        "The function has to do the same each time it runs, and `.grad` is not to be "
        "trusted after this error. Look for a counter, iterator or cache outside its modules and arguments (make "
        "it an attribute of the module, or an argument), for a variable of a loop that a lambda uses (bind it: "
        "`lambda x, layer=layer: layer(x)`), for what was changed between forward and backward, for other threads "
        "that draw from the same random generator, and for kernels that do not repeat"
    )


def _found_later(
    explain: WeakMethod[Callable[[Differs], CheckpointError | None]], noted: _Noted, number: int, likeness: Likeness
) -> CheckpointError | None:
    """The error for a difference on a device, which is read when the backward ends.

    By then the call may be gone, with its arguments: to keep those of all calls would take much memory. Then nothing is
    said of tensors that their operations may have left unfilled, since it cannot be found out which these are.
    """
    differs, known = Differs(number, _OTHER_VALUES, in_values=True), explain()
    if known is not None:
        return known(differs)
    if number in noted.late:
        return None
    place = noted.place(number)
    where = f", {in_words(likeness)}" if place is None else f" ({place.line})"
    return _difference(differs, f"{where} (with check_rerun=True it is found in the rerun, with the operation)")


def _ignored(_: Any) -> None:
    """Ignore a random generator: with `preserve_rng_state=False`, reruns need not draw the same numbers."""
