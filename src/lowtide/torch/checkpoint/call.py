"""`checkpoint(fn, *args)`: run a function, keep its arguments instead of its tape, and run it again for the backward.

The first run builds its graph as always, so that outputs, hooks, shared weights and the order of every sum are those of
the plain call. Only the tensors that autograd saves are not kept: a pair of saved-tensor hooks saves their numbers
instead. When the backward unpacks the first number, the function runs once more, and the tensors that autograd saves in
that rerun are those that the numbers stand for. The rerun finds its surroundings, random numbers and settings as the
first run found them, or raises an error (`surroundings.py`, `draws.py`, `ambient.py` and `mismatch.py` in `state/`).

Calls may be nested. The arguments of an inner call are then saved through the outer call's hooks, so they are not kept
either; before an inner call is rerun, the calls around it are, from the outside in.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import copy
from functools import partial
from itertools import count
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.checks import function as check_function
from lowtide.errors import CheckpointError, InputError, OtherDrawsError
from lowtide.torch.memory import recording
from lowtide.torch.state.ambient import Ambient
from lowtide.torch.state.bits import fingerprint
from lowtide.torch.state.draws import Draws, Standstill
from lowtide.torch.state.mismatch import Differs, Likeness, Naming, Place, in_words, value_in_words
from lowtide.torch.state.notes import KeptTensors
from lowtide.torch.state.reach import ATOMS
from lowtide.torch.state.surroundings import Surroundings, begin_meeting, end_meeting
from lowtide.torch.state.trees import TreeForm, form_of

Result = TypeVar("Result")
ContextPair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_set_grad = torch._C._set_grad_enabled
_transformed = torch._C._functorch.peek_interpreter_stack
_compiling = torch.compiler.is_compiling
_CHECKS = ("default", "none")
_LEAN_HOOKS_MODULE = "lowtide.torch.lean.tape"  # its pack hooks call ours: their frames are no part of the function


def checkpoint(
    function: Callable[..., Result],
    *args: Any,
    use_reentrant: bool | None = None,  # noqa: ARG001  (part of torch's signature)
    context_fn: Callable[[], ContextPair] | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    contexts: Iterable[Callable[[], AbstractContextManager[Any]]] = (),
    check_rerun: bool = False,
    **kwargs: Any,
) -> Result:
    """Call `function(*args, **kwargs)` without keeping its tape; the function runs again when the backward needs it.

    Results and gradients are those of the plain call to the last bit. Buffers and attributes that the function changes
    are changed once, and random numbers are the same in the rerun. Where that is impossible, an error is raised.

    Args:
        function: what to call: a module, a method or any other function.
        args: its arguments; tensors may be anywhere in tuples, lists and dicts.
        use_reentrant: accepted so that code for `torch.utils.checkpoint` runs; it makes no difference here.
        context_fn: returns two context managers, one for the first run and one for reruns, such as
            `create_selective_checkpoint_contexts`.
        determinism_check: "default" compares shape, dtype and device of the tensors that autograd saves in both runs;
            "none" compares only their number.
        debug: also remember where the first run saved each tensor, for the error message if a rerun differs.
        early_stop: end the rerun when it has made the last tensor that is needed, and has drawn the last random number
            of the first run, so that draws can be compared.
        preserve_rng_state: draw the same random numbers in the rerun: those of torch, Python and numpy, and of
            generators that the function can reach.
        contexts: functions that make context managers to be entered for reruns. Autocast, default dtype and device and
            `sdpa_kernel` are restored without being listed here.
        check_rerun: compare the values of the tensors that autograd saves in both runs, not only their shapes.
        kwargs: its keyword arguments.
    """
    if _compiling():  # pragma: no cover  (it is traced, not run)
        return _traced(function, args, kwargs, context_fn, preserve_rng_state)
    if not torch.is_grad_enabled() or recording.runs_plainly() or _transformed() is not None:
        return function(*args, **kwargs)
    if determinism_check not in _CHECKS:
        raise InputError(f"determinism_check={determinism_check!r} is not known; give one of {', '.join(_CHECKS)}")
    check_function(function, "function")
    stack = _thread.calls
    first, again = (None, None) if context_fn is None else context_fn()
    try:
        if len(stack) > 8:
            _make_room(24)
        call = _Call(function, args, kwargs, early_stop, Ambient(contexts), again)
        call.begin(stack, determinism_check == "none", check_rerun, debug, preserve_rng_state)
        if call.is_lazy:
            call.end(stack)
            return function(*args, **kwargs)
        try:
            if first is None:
                result = function(*args, **kwargs)
            else:
                with first:
                    result = function(*args, **kwargs)
        except BaseException:
            call.end(stack)
            raise
        drawn = call.end(stack)
    except RecursionError:
        if len(stack) < 20:  # the function's own recursion, not nested checkpoint calls
            raise
        raise CheckpointError(
            f"checkpoint calls are nested {len(stack):,} deep, and Python's stack of {sys.getrecursionlimit():,} "
            "frames is full; nest fewer of them, or raise sys.setrecursionlimit"
        ) from None
    call.finish(drawn)
    return result


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


class _CheckpointThread(threading.local):
    def __init__(self) -> None:
        self.calls: list[tuple[_Call, bool]] = []  # calls that are running, outermost first; True for a rerun


_thread = _CheckpointThread()


def _make_room(depth: int) -> None:
    """Recurse to this depth, so that a RecursionError is raised here rather than while a call cleans up."""
    if depth:
        _make_room(depth - 1)


class _Stop(BaseException):
    """Ends a rerun that has saved all it needs. Not an Exception, so that no `except Exception` catches it."""


# Equal likenesses (shape, dtype, device) are interned, and so are rows of them, because most calls are like the one
# before: a call then costs a reference instead of a tuple for each saved tensor.
_likenesses: dict[Likeness, Likeness] = {}
_rows: dict[int, tuple[Likeness, ...]] = {}  # by length, the latest row
_MOST_LIKENESSES = 10_000  # that are interned; above that the cache is cleared


class _Call:
    """One checkpoint call: what it takes to run the function again, and the tensors that the latest rerun saved."""

    __slots__ = (
        "_ambient",
        "_atoms",
        "_context",
        "_count",
        "_counter",
        "_draws",
        "_early_stop",
        "_ended",
        "_form",
        "_function",
        "_held",
        "_hidden",
        "_keys",
        "_likes",
        "_places",
        "_standstill",
        "_surroundings",
        "_values",
        "_wheres",
        "is_lazy",
        "outer",
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
        self._ended = False  # whether `_Stop` was raised in the latest rerun
        self._keys = tuple(kwargs)
        self._ambient = ambient
        self._context = context
        # The call around this one, and the range of its saved tensors that are our arguments.
        self.outer: tuple[_Call, int, int] | None = None
        self.is_lazy = False
        self.store: list[torch.Tensor | None] = []  # saved by the latest rerun; None once handed out
        self.versions: list[int] = []
        self._count = -1  # how many tensors the first run saved; -1 until it is over
        self._counter: Iterator[int] | None = None  # counts them where they are not compared
        self._likes: Any = None  # the likeness of each where they are
        self._values: list[tuple[int, str]] | None = None
        self._wheres: list[Place] | None = None
        self._hidden: KeptTensors | None = None
        self._surroundings: Surroundings | None = None
        self._draws: Draws | None = None  # in the first run, and after it if a generator may have moved
        self._standstill: Standstill | None = None  # after a first run that moved no generator
        self._take(args, kwargs)

    # --- the first run

    def _take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Split the arguments into tensors, which are kept for reruns, and the rest."""
        leaves: list[Any] = [*args, *kwargs.values()]
        self._form: TreeForm | None = None
        if any(type(leaf) not in ATOMS and not isinstance(leaf, torch.Tensor) for leaf in leaves):
            self._form = form_of(leaves)
            leaves = self._form.flatten(leaves)
        tensors, places = [], []
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
                places.append(place)
                leaves[place] = None
        self._atoms = leaves
        self._places = places
        self._keep_arguments(tensors)

    def _keep_arguments(self, tensors: list[torch.Tensor]) -> None:
        top = _top_hooks(False)
        around = getattr(top[1], "__self__", None) if top is not None else None
        if isinstance(around, _Call):
            before = around.saved_so_far()
            self._held = KeptTensors(tensors, through_hooks=True)
            self.outer = (around, before, around.saved_so_far())
        else:
            self._held = KeptTensors(tensors, through_hooks=top is not None)

    def begin(
        self, stack: list[tuple[_Call, bool]], uncompared: bool, values: bool, debug: bool, preserve_rng_state: bool
    ) -> None:
        """Begin the first run: until `end`, the hooks of this call are on and its surroundings are noted."""
        draws = Draws(self._function) if preserve_rng_state and _fake_mode() is None else None
        pack = self._noting_hook(uncompared, values, debug, draws is not None and draws.among_threads())
        try:
            self._surroundings = Surroundings(_ignored if draws is None else draws.follow)
            self._surroundings.find_call(self._function, self._atoms)
            _push_hooks(pack, self.unpack)
        except BaseException:
            if draws is not None:
                draws.leave()
            raise
        self.is_lazy = self._surroundings.is_lazy
        self._draws = draws
        if self.outer is not None and draws is not None:
            around, before, after = self.outer
            if around._draws is not None and after > before:
                around._draws.begin_inner(after, draws)
        begin_meeting(self._surroundings)
        stack.append((self, False))

    def _noting_hook(
        self, uncompared: bool, values: bool, debug: bool, among_threads: bool
    ) -> Callable[[torch.Tensor], int]:
        """The first run's pack hook: counts tensors or notes their likeness, and if needed their values and places."""
        pack: Callable[[torch.Tensor], int]
        if uncompared:
            self._counter = count()
            # `next(counter, tensor)` takes the tensor as its default and drops it, without running any Python.
            pack = partial(next, self._counter)
        else:
            self._likes = []
            pack = _noting(self._likes)
        if not (values or debug or among_threads):
            return pack
        self._values = [] if values or among_threads else None
        self._wheres = [] if debug else None
        return partial(self._pack_with_care, pack, values)

    def _pack_with_care(self, pack: Callable[[torch.Tensor], int], in_words: bool, tensor: torch.Tensor) -> int:
        if self._values is not None:
            self._values.append((fingerprint(tensor), value_in_words(tensor) if in_words else "of other values"))
        if self._wheres is not None:
            self._wheres.append(Place())
        return pack(tensor)

    def saved_so_far(self) -> int:
        """How many tensors the first run has saved, now or by its end."""
        if self._count >= 0:
            return self._count
        if self._counter is None:
            return len(self._likes)
        return next(copy(self._counter))  # a count cannot be read without advancing it

    def end(self, stack: list[tuple[_Call, bool]]) -> list[Any] | None:
        """End the first run, also after an exception; returns the states in which it left the random generators."""
        _pop_hooks()
        stack.pop()
        end_meeting()
        return None if self._draws is None else self._draws.leave()

    def finish(self, drawn: list[Any] | None) -> None:
        """After a first run without an exception, keep what a rerun needs and nothing else."""
        assert self._surroundings is not None
        self._count = self.saved_so_far()
        if self._draws is not None and drawn is not None:
            found = self._draws.finish(drawn, self._count)
            if isinstance(found, Standstill):
                self._draws, self._standstill = None, found
        self._held.settle()
        self._surroundings, hidden = self._surroundings.finish()
        if hidden:
            self._hidden = KeptTensors(hidden, through_hooks=_top_hooks(False) is not None)
        if self._likes is not None:
            row = tuple(self._likes)
            self._likes.clear()  # the graph holds the list, through the pack hook
            usual = _rows.setdefault(len(row), row)
            if usual != row:
                _rows[len(row)] = usual = row
            self._likes = usual

    # --- reruns

    def unpack(self, number: int) -> torch.Tensor:
        """The tensor that autograd saved under this number, handed out once and then released."""
        store = self.store
        tensor = store[number] if number < len(store) else None
        if tensor is None:
            tensor = self._again(number)
        store = self.store
        store[number] = None
        if tensor._version != self.versions[number]:
            raise CheckpointError(
                f"a tensor of shape {tuple(tensor.shape)} that autograd needs for the backward was changed in place "
                "after the function had used it; make a new tensor instead"
            )
        return tensor

    def _again(self, number: int) -> torch.Tensor:
        # An inner call's arguments are tensors that the call around it saved. Where that call no longer has them, it is
        # rerun first: from the outside in.
        waiting = [self]
        while (outer := waiting[-1].outer) is not None and outer[0]._lacks(outer[1], outer[2]):
            waiting.append(outer[0])
        for call in reversed(waiting):
            call.rerun()
        tensor = self.store[number]
        assert tensor is not None
        return tensor

    def _lacks(self, start: int, stop: int) -> bool:
        return not self.store or any(tensor is None for tensor in self.store[start:stop])

    def rerun(self) -> None:
        """Run the function again, and put the tensors that it saves into `store`."""
        if self._surroundings is not None and self._count >= 0:
            self._surroundings.check()
        wanted = self.saved_so_far()
        stops = self._early_stop and sys.getprofile() is None
        whole = self._count >= 0 and not (stops and self._draws is None)
        saved: list[torch.Tensor] = []
        versions: list[int] = []
        pack = self._packing(saved, versions, wanted, whole, self._draws if stops else None)
        try:
            self._run(pack, saved, whole)
            if len(saved) < wanted:
                self._too_few(len(saved), wanted)
        except Differs as differs:
            raise self._explained(differs) from None
        except OtherDrawsError as error:
            if not error.crowded or self._draws_from_torch():
                raise
        self.store, self.versions = list(saved), versions
        saved.clear()  # breaks a cycle: the rerun's graph holds the list, and its tensors hold the graph

    def _packing(
        self, saved: list[torch.Tensor], versions: list[int], wanted: int, whole: bool, draws: Draws | None
    ) -> Callable[[torch.Tensor], int]:
        """The rerun's pack hook.

        At the last tensor that is needed, it ends the rerun, before the operation that saves the tensor has run. But a
        tensor without a gradient, like the noise of rrelu, may be scratch space that the operation has yet to fill.
        Then a profile function ends the rerun at the next call or return of a function that is running now. Code that
        Python runs on its own meanwhile, such as a finalizer, is not interrupted.

        A rerun of the `whole` function is not ended here, unless all of its `draws` have been made by then.
        """
        likes, values = self._likes, self._values
        append, note = saved.append, versions.append
        running: set[int] = set()
        stopping = False

        def pack(tensor: torch.Tensor) -> int:
            nonlocal running, stopping
            number = len(saved)
            if number >= wanted:
                if whole and not stopping:
                    raise Differs(number, f"nothing more, after {wanted:,} tensors", in_words(_like(tensor)))
                return number  # the function has caught `_Stop` and goes on
            if likes is not None and likes[number] != (tensor.shape, tensor.dtype, tensor.device):
                raise Differs(number, in_words(likes[number]), in_words(_like(tensor)))
            if values is not None and values[number][0] != fingerprint(tensor):
                raise Differs(number, values[number][1], value_in_words(tensor))
            append(tensor)
            note(tensor._version)
            if number + 1 == wanted and (not whole or (draws is not None and draws.are_made())):
                stopping = True
                if tensor.requires_grad and (number == 0 or saved[-2].requires_grad):
                    self._ended = True
                    raise _Stop
                running = _frames_above(sys._getframe())
                sys.setprofile(stop)
            return number

        def stop(frame: FrameType, *_: object) -> None:  # pragma: no cover  (coverage is off inside a profile function)
            if id(frame) in running:
                raise _Stop

        return pack

    def _run(self, pack: Callable[[torch.Tensor], int], saved: list[torch.Tensor], whole: bool) -> None:
        leaves = list(self._atoms)
        for place, tensor in zip(self._places, self._held.again(), strict=True):
            leaves[place] = tensor
        if self._form is not None:
            leaves = self._form.unflatten(leaves)
        kwargs: dict[str, Any] = {}
        if self._keys:
            positional = len(leaves) - len(self._keys)
            kwargs = dict(zip(self._keys, leaves[positional:], strict=True))
            leaves = leaves[:positional]
        still = nullcontext() if self._standstill is None else self._standstill.again()
        if self._surroundings is None and self._draws is None and self._context is None and self._ambient.is_now():
            with still:
                self._run_here(pack, saved, leaves, kwargs)
            return
        with ExitStack() as contexts:
            if self._surroundings is not None:
                hidden = self._hidden.again() if self._hidden is not None else []
                contexts.enter_context(self._surroundings.as_before(hidden))
            if self._draws is not None:
                contexts.enter_context(self._draws.again(to_the_end=whole and self._values is None))
            contexts.enter_context(still)
            if not self._ambient.is_now():
                contexts.enter_context(self._ambient.again(cached=True))
            if self._context is not None:
                contexts.enter_context(self._context)
            self._run_here(pack, saved, leaves, kwargs)

    def _run_here(
        self, pack: Callable[[torch.Tensor], int], saved: list[torch.Tensor], args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        stack, grad, profile = _thread.calls, torch.is_grad_enabled(), sys.getprofile()
        stack.append((self, True))
        with recording.recomputing():
            _set_grad(True)
            _push_hooks(pack, saved.__getitem__)
            self._ended = False
            try:
                self._function(*args, **kwargs)
            except _Stop:
                pass
            except RuntimeError:
                if not self._ended:  # TorchScript turns every exception, `_Stop` too, into a RuntimeError
                    raise
            finally:
                if sys.getprofile() is not profile:
                    sys.setprofile(profile)
                _pop_hooks()
                _set_grad(grad)
                stack.pop()

    # --- what went wrong

    def _too_few(self, number: int, wanted: int) -> None:
        then = "another one" if self._likes is None else in_words(self._likes[number])
        raise Differs(number, then, f"nothing more, where the first run saved {wanted:,}")

    def _explained(self, differs: Differs) -> CheckpointError:
        """The error for a rerun that differs; runs once more up to that tensor, to find the operation and its line."""
        saved: list[torch.Tensor] = []
        naming, place, function = Naming(), None, ""

        def pack(tensor: torch.Tensor) -> int:
            nonlocal place, function
            if len(saved) == differs.number:
                place, function = Place(), naming.function
                raise _Stop
            saved.append(tensor)
            return len(saved) - 1

        def run() -> None:
            with naming:
                self._run(pack, saved, whole=False)

        try:
            run()
        except Exception:  # whatever it is, the first error is the one to report
            place = None
        where = ""
        if place is not None:
            where = f", saved by {function or 'an operation'}{self._at(place)}"
        elif self._wheres is not None and differs.number < len(self._wheres):
            where = f", which the first run saved{self._at(self._wheres[differs.number])}"
        hint = "state that it keeps where Lowtide cannot see it, branches on such state, kernels that do not repeat"
        if self._draws is not None:
            hint += ", other threads that draw from the same random generator"
        return CheckpointError(
            f"the rerun differs from the first run at saved tensor {differs.number:,}{where}: it was {differs.then}, "
            f"now it is {differs.now}. The function has to do the same each time it runs: look for {hint}"
        )

    def _at(self, place: Place) -> str:
        path = ""
        if place.module is not None:
            path = f" in {self._path_of(place.module)}"
        return f"{path} ({place.line})"

    def _path_of(self, module: nn.Module) -> str:
        return type(module).__name__ if self._surroundings is None else self._surroundings.path_of(module)

    def _draws_from_torch(self) -> bool:
        """Whether the function draws random numbers from torch; if not, another thread advanced the generator."""
        seeing, saved = _SeeingDraws(), []

        def pack(tensor: torch.Tensor) -> int:
            saved.append(tensor)
            return len(saved) - 1

        with seeing:
            self._run(pack, saved, whole=False)
        return seeing.seen


class _SeeingDraws(TorchDispatchMode):
    """Notes whether an operation draws random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _frames_above(frame: FrameType) -> set[int]:
    """The frames of the rerun that are above this one, except those of hooks; as ids, so that none is kept alive."""
    frames: set[int] = set()
    above = frame.f_back
    while above is not None and above.f_code is not _Call._run_here.__code__:
        if above.f_globals.get("__name__") != _LEAN_HOOKS_MODULE:
            frames.add(id(above))
        above = above.f_back
    return frames


def _ignored(_: Any) -> None:
    """Ignore a random generator: with `preserve_rng_state=False`, reruns need not draw the same numbers."""


def _fake_mode() -> object:
    """The active `FakeTensorMode`, in which tensors have no values; None if there is none."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def _like(tensor: torch.Tensor) -> Likeness:
    return tensor.shape, tensor.dtype, tensor.device


def _noting(likes: list[Likeness]) -> Callable[[torch.Tensor], int]:
    """A pack hook that notes each tensor's likeness and returns its number."""
    append, intern = likes.append, _likenesses.setdefault
    if len(_likenesses) > _MOST_LIKENESSES:  # a program whose shapes never repeat
        _likenesses.clear()

    def pack(tensor: torch.Tensor) -> int:
        like = (tensor.shape, tensor.dtype, tensor.device)
        append(intern(like, like))
        return len(likes) - 1

    return pack
