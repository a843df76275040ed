"""The lean tape of one call: what its pack hook keeps, and what its unpack hook recomputes.

Every tensor that autograd saves becomes a `SavedTensor`. One that is kept holds the tensor. One that is dropped holds
the `SavedTensor`s from which it is recomputed, so that autograd, which frees a saved tensor when its operation has been
pulled back, decides how long those live. Tensors are held detached from their graph: the graph refers to its saved
tensors, and a reference back would be a cycle.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, cast

import torch

from lowtide.errors import CheckpointError
from lowtide.torch.lean.bitmasks import Bits, bits_of, bytes_in_bits
from lowtide.torch.lean.graph import DROP, IN_PLACE, KEEP, Recipe, Replay
from lowtide.torch.lean.trace import StorageView
from lowtide.torch.state.samples import Sample, compare_later, sample_of

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

_at_the_end = torch.autograd.Variable._execution_engine.queue_callback
_below_autograd = torch._C._AutoDispatchBelowADInplaceOrView
_without_autocast = torch._C._DisableAutocast


class SavedTensor:
    """A saved tensor: kept as `tensor`, or as `outer`, or recomputed from `value`.

    Attributes:
        index: its place among the call's packs; -1 for a given tensor.
        tensor: the tensor, detached from its graph; None if it was dropped or handed over.
        version: the tensor's version when it was saved.
        settled: its version when the call was over.
        value: the value of the recipe that it is a view of, if it is recomputed, unpacked from bits, or handed over.
        bits: how `tensor` is packed into bits, if it is.
        outer: what the hooks around the call returned for it, if it was handed over to them.
        sources: by value, the saved tensors from which it is recomputed; None if that is this one itself.
    """

    __slots__ = ("bits", "index", "outer", "settled", "sources", "tensor", "value", "version")

    def __init__(self, index: int, tensor: torch.Tensor, version: int) -> None:
        self.index = index
        self.tensor: torch.Tensor | None = tensor
        self.version = version
        # A change by the call itself, after the tensor was saved, is known from the trace, and the recipe expects the
        # changed values; a change after the call is an error. So recipes compare with the version at its end.
        self.settled = version
        self.value: int | None = None
        self.bits: Bits | None = None
        self.outer: Any = None
        self.sources: dict[int, SavedTensor] | None = None


class Doubt:
    """Whether a recipe recomputed something other than what was dropped: set by tapes, read before the next call."""

    __slots__ = ("is_raised",)

    def __init__(self) -> None:
        self.is_raised = False


class LeanTape:
    """The tape of one call.

    Args:
        name: the function's name in messages.
        around: the saved-tensor hooks that surround this call, if any; they get what is kept.

    Attributes:
        fits: whether the call has so far packed what its recipe expects.
        is_outdated: whether it does not fit because a tensor of arguments or modules has another shape or storage.
    """

    __slots__ = (
        *("_around", "_counts", "_doubt", "_given", "_lock", "_name", "_recipe"),
        *("_samples", "_shifts", "_slots", "_values", "_where", "__weakref__", "fits", "is_outdated"),
    )

    def __init__(self, name: str, around: Hooks | None) -> None:
        self._name = name
        self._around = around
        self._doubt: Doubt | None = None
        self._slots: list[SavedTensor] = []  # by index of pack; emptied when the call is over
        self._given: dict[int, SavedTensor] = {}  # by index among the call's tensors; likewise
        self._where: dict[int, int] = {}  # addresses of packs that are views of given tensors; likewise
        self._samples: dict[int, Sample] = {}  # of dropped values
        self._recipe: Recipe | None = None
        self._values: dict[int, torch.Tensor] = {}  # found or recomputed, and still needed in this backward
        self._shifts: dict[int, int] = {}  # by value: its offset in the storage relative to that in the trace
        self._counts: dict[int, int] = {}  # how often each value will still be used in this backward
        self._lock = threading.RLock()  # a backward may unpack from several threads
        self.fits = True
        self.is_outdated = False

    # --- packing

    def keep(self, tensor: torch.Tensor, version: int) -> SavedTensor:
        """Save a detached tensor, with the version it had, in a call that is traced."""
        slot = SavedTensor(len(self._slots), tensor, version)
        self._slots.append(slot)
        return slot

    def pack_everything(self, tensor: torch.Tensor) -> SavedTensor:
        """The pack hook of a call that need not be traced, because it is known to be like one that was."""
        return self.keep(tensor.detach(), tensor._version)

    @property
    def held(self) -> list[torch.Tensor]:
        """All tensors that were packed, until the call is over."""
        return [slot.tensor for slot in self._slots if slot.tensor is not None]

    def packing(self, recipe: Recipe, given: list[Any], doubt: Doubt) -> Callable[[torch.Tensor], SavedTensor]:
        """The pack hook of a call that follows a recipe."""
        self._open(recipe, given, doubt)
        shapes, dtypes, nodes, slots = recipe.shapes, recipe.dtypes, recipe.nodes, self._slots
        count, settle, places, strides = len(shapes), self._settle, recipe.places, recipe.strides
        sampled, where = recipe.sampled, self._where

        # Once a pack differs from what the recipe expects, this one and all later ones are kept. Those that were
        # dropped before have their sources already, so the call's gradients are right all the same.
        def pack(tensor: torch.Tensor) -> SavedTensor:
            index = len(slots)
            slot = SavedTensor(index, tensor.detach(), tensor._version)
            slots.append(slot)
            if (
                self.fits
                and index < count
                and tensor.shape == shapes[index]
                and tensor.dtype is dtypes[index]
                and (nodes[index] is None or type(tensor.grad_fn) is nodes[index])
                and (index not in places or (tensor.storage_offset(), tensor.stride()) == places[index])
                and (index not in strides or tensor.stride() == strides[index])
                and (index not in sampled or tensor.untyped_storage().nbytes() == sampled[index])
                and (index not in where or tensor.data_ptr() == where[index])
            ):
                settle(slot, tensor)
            else:
                self.fits = False
                if self._around is not None:
                    self._hand_over(slot, tensor)
            return slot

        return pack

    def close_traced(self, recipe: Recipe, given: list[Any], doubt: Doubt) -> None:
        """End a traced call: treat what it saved as if it had followed the recipe."""
        self._open(recipe, given, doubt)
        for slot in self._slots:
            assert slot.tensor is not None
            if slot.tensor._version == slot.version:
                self._settle(slot, slot.tensor)
        self.close()

    def _open(self, recipe: Recipe, given: list[Any], doubt: Doubt) -> None:
        self._recipe, self._doubt = recipe, doubt
        for place, view in recipe.given.items():
            tensor = given[place]
            untied = any(given[other].data_ptr() != tensor.data_ptr() for other in recipe.ties.get(place, ()))
            if untied or tensor.shape != view.size or tensor.stride() != view.stride:
                self.fits, self.is_outdated = False, True
                return
            self._given[place] = SavedTensor(-1, tensor.detach(), tensor._version)
        for index, (place, apart) in recipe.owners.items():
            self._where[index] = given[place].data_ptr() + apart

    def _settle(self, slot: SavedTensor, tensor: torch.Tensor) -> None:
        """Keep, drop or pack a saved tensor into bits, as the recipe says."""
        recipe, index = self._recipe, slot.index
        assert recipe is not None
        action = recipe.actions[index]
        if action == KEEP:
            # What the call changes in place after it was saved stays here, to be the error that it is in a plain call
            # if it is asked for: the hooks around would get it before the change, but after it in a traced call.
            if self._around is not None and index not in recipe.stale:
                slot.value = recipe.origins.get(index)
                if slot.value is not None and recipe.bases[slot.value] is None:
                    # The hooks may give back a copy, of what they were handed and no more: so they get all of it.
                    tensor = _whole(tensor)
                self._hand_over(slot, tensor)
        elif action == DROP:
            if index in recipe.sampled:
                value = recipe.value(index)
                self._sample(value, _viewed(tensor.detach(), recipe.made[value], 0))
        else:
            self._put_into_bits(slot, tensor)
        for dropped in recipe.release.get(index, ()):
            self._drop(self._slots[dropped])

    def _hand_over(self, slot: SavedTensor, tensor: torch.Tensor) -> None:
        assert self._around is not None
        slot.outer, slot.tensor = self._around[0](tensor), None

    def _sample(self, value: int, tensor: torch.Tensor) -> None:
        self._samples[value] = _sample_of(tensor)

    def _put_into_bits(self, slot: SavedTensor, tensor: torch.Tensor) -> None:
        recipe = self._recipe
        assert recipe is not None
        slot.value = recipe.value(slot.index)
        if slot.index not in recipe.origins:  # the bits are in the first pack of the value, and this is a later one
            self._drop(slot)
            return
        row = bits_of(tensor)
        if row is not None:
            slot.bits, kept = row
            self._sample(slot.value, _whole(tensor))
        else:  # in this call it has more than two different numbers
            kept = _whole(tensor)
        slot.tensor, slot.settled = kept, kept._version
        if self._around is not None:
            self._hand_over(slot, kept)

    def _drop(self, slot: SavedTensor) -> None:
        """Free a saved tensor; everything that it is recomputed from has been packed."""
        recipe = self._recipe
        assert recipe is not None
        slot.tensor, slot.value = None, recipe.value(slot.index)
        slot.sources = {
            number: self._given[source.given] if source.pack < 0 else self._slots[source.pack]
            for number, source in recipe.sources[slot.index].items()
        }

    def close(self) -> None:
        """End the call."""
        recipe, slots = self._recipe, self._slots
        assert recipe is not None
        self.fits = self.fits and len(slots) == len(recipe.shapes)
        for slot in (*self._given.values(), *(slots[index] for index in recipe.origins if index < len(slots))):
            if slot.tensor is not None:
                slot.settled = slot.tensor._version
        if self._around is not None:
            for slot in self._given.values():
                assert slot.tensor is not None
                self._hand_over(slot, slot.tensor)
        self._slots.clear()  # the graph refers to the tape, by its unpack hook, and so to this list
        self._where.clear()
        self._given = {}

    # --- unpacking

    def unpack(self, slot: SavedTensor) -> torch.Tensor:
        """The tensor that autograd saved."""
        if slot.value is not None:
            return self._again(slot, slot.value)
        if slot.tensor is None:
            assert self._around is not None
            return self._around[1](slot.outer)
        if slot.tensor._version != slot.version:
            self._was_changed(slot.tensor, slot.version)
        return slot.tensor

    def _again(self, slot: SavedTensor, value: int) -> torch.Tensor:
        recipe = self._recipe
        assert recipe is not None
        with self._lock:
            in_backward = self._begin()
            view = recipe.views[slot.index]
            assert view is not None
            try:
                tensor = _viewed(self._made(value, slot), view, self._shifts.get(value, 0))
            except BaseException:
                self._forget()  # so that another backward can start from the beginning
                raise
            self._spend(value)
            if not in_backward:
                self._forget()
        return tensor

    def _begin(self) -> bool:
        """Prepare for a backward; False if none is running, because a saved tensor is merely inspected."""
        if self._counts:
            return True
        recipe, latest, reference = self._recipe, _thread.latest(), weakref.ref(self)
        assert recipe is not None
        # A backward goes from call to call. What the previous one has left over, because outputs of it were not used,
        # will not be asked for.
        if latest is not None:
            latest._let_go()
        _thread.latest = reference
        self._counts = dict(recipe.uses)
        if self._around is not None:  # what the hooks around keep is unpacked by autograd once more
            for index, value in recipe.origins.items():
                self._counts[value] = self._counts.get(value, 0) + (recipe.actions[index] == KEEP)
        try:
            _at_the_end(_forgetting(reference))
        except RuntimeError:  # torch accepts such a callback only during a backward
            return False
        return True

    def _let_go(self) -> None:
        with self._lock:
            self._values.clear()
            self._shifts.clear()

    def _forget(self) -> None:
        with self._lock:
            self._let_go()
            self._counts = {}

    def _spend(self, value: int) -> None:
        """Count one use of a value; free it after the last."""
        left = self._counts[value] = self._counts.get(value, 0) - 1
        if left <= 0:
            self._values.pop(value, None)

    def _made(self, value: int, slot: SavedTensor) -> torch.Tensor:
        """A tensor that has the value's storage, found or recomputed."""
        recipe, values = self._recipe, self._values
        assert recipe is not None
        # Depth first: the values that an operation reads go on top of it, and it runs when none of them is missing.
        waiting = [value]
        while waiting:
            wanted = waiting[-1]
            replay = recipe.replays.get(wanted)
            if wanted in values:
                waiting.pop()
            elif replay is None:
                values[wanted] = self._found(wanted, slot)
            elif missing := [number for number in replay.reads if number not in values]:
                waiting += missing
            else:
                self._run(replay, wanted)
        return values[value]

    def _found(self, value: int, slot: SavedTensor) -> torch.Tensor:
        """A kept value: a tensor with its storage, or at least with the view of it that the recipe reads."""
        assert self._recipe is not None
        source = slot if slot.sources is None else slot.sources[value]
        base, tensor = self._recipe.bases[value], source.tensor
        if tensor is None:
            assert self._around is not None
            tensor = self._around[1](source.outer)
            if base is not None and tensor.stride() != base.stride:
                tensor = _restrided(tensor, base)
        elif tensor._version != source.settled:
            self._was_changed(tensor, source.settled)
        elif tensor.numel() and not tensor.untyped_storage().nbytes():
            raise CheckpointError(
                f"the storage of a tensor of shape {tuple(tensor.shape)}, which the backward of {self._name} reads, "
                "has been freed since; keep it until then, or call the function without lean"
            )
        if source.bits is not None:
            tensor = source.bits.tensor(tensor)
            if value in self._samples:
                self._compare(value, tensor, "what was kept in bits, unpacked")
        elif base is not None:
            self._shifts[value] = int(tensor.storage_offset()) - base.offset
        elif source.tensor is None:
            self._shifts[value] = int(tensor.storage_offset())
        return tensor

    def _run(self, replay: Replay, wanted: int) -> None:
        op, values, shifts = replay.op, self._values, self._shifts
        assert self._recipe is not None
        try:
            # The trace saw operations below autograd and autocast: its arguments are what the kernel got, casts done.
            with _below_autograd(), _without_autocast():
                args = [_filled(argument, values, shifts) for argument in op.args]
                kwargs = {name: _filled(argument, values, shifts) for name, argument in op.kwargs.items()}
                spare = self._recipe.in_place.get(replay)
                if spare is None:
                    result = op.func(*args, **kwargs)
                else:
                    result = IN_PLACE[op.func](*args, **kwargs, out=args[spare])
        except torch.OutOfMemoryError as error:  # pragma: no cover  (needs a GPU)
            error.add_note(f"while {op.func} of {self._name} ran again for the backward")
            raise
        except Exception as error:
            self._let_go()
            raise CheckpointError(
                f"{op.func}, an operation of {self._name}, was run again for the backward and failed: {error}"
            ) from error
        results = result if isinstance(result, tuple | list) else (result,)
        for place, number in replay.makes:
            if number == wanted or self._counts.get(number, 0) > 0:
                values[number] = made = results[place]
                if number in self._samples:
                    made = _viewed(made, self._recipe.made[number], 0)
                    self._compare(number, made, f"{op.func}, run again")
        for number in replay.reads:
            self._spend(number)

    def _compare(self, value: int, tensor: torch.Tensor, how: str) -> None:
        """Check that a sample of a recomputed value is that of the forward; on a device, when the backward ends.

        `how` says for the error how the value was recomputed.
        """
        then, now = self._samples[value], _sample_of(tensor)
        assert self._doubt is not None
        if isinstance(then, torch.Tensor) and isinstance(now, torch.Tensor):  # pragma: no cover  (needs a GPU)
            compare_later(then, now, partial(_other_numbers, how, self._name, self._doubt))
        elif then != now:
            raise _other_numbers(how, self._name, self._doubt)

    def _was_changed(self, tensor: torch.Tensor, version: int) -> NoReturn:
        raise CheckpointError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"{tensor.dtype} tensor of shape {tuple(tensor.shape)}, which the backward of {self._name} reads, is at "
            f"version {tensor._version}; expected version {version} instead. Change it after the backward, or make a "
            "new tensor"
        )


class PaperTape(LeanTape):
    """A lean tape on paper: it reads no values, and so compares none."""

    __slots__ = ()

    def _open(self, recipe: Recipe, given: list[Any], doubt: Doubt) -> None:
        self._recipe, self._doubt = recipe, doubt
        self._given = {place: SavedTensor(-1, given[place].detach(), given[place]._version) for place in recipe.given}

    def _sample(self, value: int, tensor: torch.Tensor) -> None:
        pass

    def _put_into_bits(self, slot: SavedTensor, tensor: torch.Tensor) -> None:
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


@dataclass(frozen=True, slots=True)
class _PaperBits:
    """How a tensor would be packed into bits."""

    count: int
    dtype: torch.dtype

    def tensor(self, bits: torch.Tensor) -> torch.Tensor:
        """A tensor of the size of the one that would be recovered from these bits."""
        return bits.new_empty(self.count).to(self.dtype)


def _filled(argument: Any, values: dict[int, torch.Tensor], shifts: dict[int, int]) -> Any:
    """An operation's argument with its views replaced by tensors."""
    if type(argument) is StorageView:
        return _viewed(values[argument.value], argument, shifts.get(argument.value, 0))
    if type(argument) is list or type(argument) is tuple:
        return [_filled(part, values, shifts) for part in argument]
    return argument


def _viewed(base: torch.Tensor, view: StorageView, shift: int) -> torch.Tensor:
    """The view of a tensor that has the value's storage, `shift` elements further on in it than in the trace."""
    offset = view.offset + shift
    if base.size() == view.size and base.stride() == view.stride and base.storage_offset() == offset:
        return base
    return base.as_strided(view.size, view.stride, offset)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's whole storage, flat."""
    tensor = tensor.detach()
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def _restrided(tensor: torch.Tensor, view: StorageView) -> torch.Tensor:
    """A copy of the tensor with the view's strides."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(view.size, view.stride, strict=True))
    return tensor.new_empty(extent).as_strided(view.size, view.stride, 0).copy_(tensor)


def _sample_of(tensor: torch.Tensor) -> Sample:
    """A sample of a dropped value, or of one recomputed."""
    if tensor.dtype is torch.uint8:  # not taken for a kernel's workspace: those are made by operations not run again
        tensor = tensor.view(torch.int8)
    return sample_of(tensor)


def _other_numbers(how: str, name: str, doubt: Doubt) -> CheckpointError:
    """The error for a value that is not what the forward had; the next call will be traced."""
    doubt.is_raised = True
    return CheckpointError(
        f"{how} for the backward of {name}, gave other numbers than the forward had, and `.grad` is not to be trusted "
        "after this error. Something has changed since the function was traced that neither its arguments nor its "
        "modules show: look for a counter, iterator or setting outside of them, and make it an attribute of the "
        "module, or an argument; or call the function without lean"
    )


class _TapeThread(threading.local):
    # The tape that last recomputed something in this thread. The reference is weak, so that a tape that autograd has
    # freed does not live until the next backward.
    latest: Callable[[], LeanTape | None] = staticmethod(lambda: None)


_thread = _TapeThread()


def _forgetting(reference: weakref.ref[LeanTape]) -> Callable[[], None]:
    """The callback for the end of a backward; it must not keep the tape alive until then."""

    def forget() -> None:
        tape = reference()
        if tape is not None:
            tape._forget()

    return forget
