"""The lean tape of one call: what its pack hook keeps, and what its unpack hook makes again.

Every saved tensor is a slot, a `SavedTensor`. One that is kept has it; one that is dropped has the slots that making it
again starts from, so that autograd, which lets go of a slot when its operation has been pulled back, decides how long
those stay. Tensors are held without their history: the graph holds on to its slots, and must not hold on to itself.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch

from lowtide.errors import CheckpointError
from lowtide.torch.lean.bitmasks import Bits, bits_of, bytes_in_bits
from lowtide.torch.lean.graph import DROP, IN_PLACE, KEEP, Recipe, Replay
from lowtide.torch.lean.trace import StorageView
from lowtide.torch.state.bits import same_bits, words

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

_PLACES_IN_SAMPLE, _NUMBERS_AT_PLACE = 64, 16  # of a dropped tensor, spread evenly over its storage
_at_the_end = torch.autograd.Variable._execution_engine.queue_callback
_below_autograd = torch._C._AutoDispatchBelowADInplaceOrView
_without_autocast = torch._C._DisableAutocast


class SavedTensor:
    """A saved tensor: `tensor`, or what the hooks around made of it (`outer`), or the `value` that it is made from.

    `sources` are the slots of the values that making it again starts from, where they are not this slot itself. With
    `bits`, the tensor is the value's bits.
    """

    __slots__ = ("bits", "index", "outer", "settled", "sources", "tensor", "value", "version")

    def __init__(self, index: int, tensor: torch.Tensor, version: int) -> None:
        self.index = index
        self.tensor: torch.Tensor | None = tensor  # without history
        self.version = version  # when it was saved
        # When the call was over: what the call itself changed after it was saved is known from the trace, and read as
        # the recipe expects it; a later change is an error.
        self.settled = version
        self.value: int | None = None
        self.bits: Bits | None = None
        self.outer: Any = None
        self.sources: dict[int, SavedTensor] | None = None


class Doubt:
    """Whether a recipe made something other than what was dropped. Tapes raise it, callers ask before the next call."""

    __slots__ = ("is_raised",)

    def __init__(self) -> None:
        self.is_raised = False


class LeanTape:
    """The tape of one call.

    Args:
        name: what messages call the function.
        around: the hooks of whoever has this call inside a call of its own; they get what is kept.

    Attributes:
        fits: whether the call has packed what its recipe says so far.
        is_outdated: whether that is because a tensor of the modules has another form.
    """

    __slots__ = (
        *("_around", "_counts", "_doubt", "_given", "_lock", "_name", "_recipe"),
        *("_samples", "_shifts", "_slots", "_unsure", "_values", "__weakref__", "fits", "is_outdated"),
    )

    def __init__(self, name: str, around: Hooks | None) -> None:
        self._name = name
        self._around = around
        self._doubt: Doubt | None = None
        self._slots: list[SavedTensor] = []  # until the call is over
        self._given: dict[int, SavedTensor] = {}  # until then
        self._samples: dict[int, int | torch.Tensor] = {}  # of what was dropped
        self._unsure: list[tuple[torch.Tensor, torch.Tensor, object]] = []  # what a GPU has still to compare
        self._recipe: Recipe | None = None
        self._values: dict[int, torch.Tensor] = {}  # made again, and still to be used in this backward
        self._shifts: dict[int, int] = {}  # by storage: how far its values lie from where they lay when traced
        self._counts: dict[int, int] = {}  # how often each value will be used in this backward
        self._lock = threading.RLock()  # a backward may ask from several threads
        self.fits = True
        self.is_outdated = False

    # --- packing

    def keep(self, tensor: torch.Tensor, version: int) -> SavedTensor:
        """A slot for a tensor without history, which had that version when it was saved, in a call that is traced."""
        slot = SavedTensor(len(self._slots), tensor, version)
        self._slots.append(slot)
        return slot

    def pack_everything(self, tensor: torch.Tensor) -> SavedTensor:
        """The pack hook of a call that is not traced, because it is known to go like another one that was."""
        return self.keep(tensor.detach(), tensor._version)

    @property
    def held(self) -> list[torch.Tensor]:
        """Everything that was packed, as long as the call is not over."""
        return [slot.tensor for slot in self._slots if slot.tensor is not None]

    def packing(self, recipe: Recipe, given: list[Any], doubt: Doubt) -> Callable[[torch.Tensor], SavedTensor]:
        """The pack hook of a call that goes by a recipe."""
        self._open(recipe, given, doubt)
        shapes, dtypes, nodes, slots = recipe.shapes, recipe.dtypes, recipe.nodes, self._slots
        count, settle, places, strides = len(shapes), self._settle, recipe.places, recipe.strides

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
            ):
                settle(slot, tensor)
            else:
                self.fits = False
                if self._around is not None:
                    self._hand_over(slot, tensor)
            return slot

        return pack

    def close_traced(self, recipe: Recipe, given: list[Any], doubt: Doubt) -> None:
        """The traced call is over: from now on it is as if it had gone by the recipe."""
        self._open(recipe, given, doubt)
        for slot in self._slots:
            assert slot.tensor is not None
            if slot.tensor._version == slot.version:
                self._settle(slot, slot.tensor)
            elif self._around is not None:  # it stays, for the error that it will be, and is counted as in later calls
                self._around[0](slot.tensor)
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

    def _settle(self, slot: SavedTensor, tensor: torch.Tensor) -> None:
        """Do with a saved tensor what the recipe says."""
        recipe, index = self._recipe, slot.index
        assert recipe is not None
        action = recipe.actions[index]
        if action == KEEP:
            if self._around is not None:
                slot.value = recipe.origins.get(index)
                if slot.value is not None and recipe.bases[slot.value] is None:
                    tensor = _whole(tensor)  # others may give a copy back, of what they were given and no more
                self._hand_over(slot, tensor)
        elif action == DROP:
            if index in recipe.sampled:
                self._sample(recipe.value(index), tensor)
        else:
            self._put_into_bits(slot, tensor)
        for dropped in recipe.release.get(index, ()):
            self._drop(self._slots[dropped])

    def _hand_over(self, slot: SavedTensor, tensor: torch.Tensor) -> None:
        assert self._around is not None
        slot.outer, slot.tensor = self._around[0](tensor), None

    def _sample(self, value: int, tensor: torch.Tensor) -> None:
        self._samples[value] = _sample_of(tensor.detach())

    def _put_into_bits(self, slot: SavedTensor, tensor: torch.Tensor) -> None:
        recipe = self._recipe
        assert recipe is not None
        slot.value = recipe.value(slot.index)
        if slot.index not in recipe.origins:  # the first pack of the value has its bits
            self._drop(slot)
            return
        self._sample(slot.value, tensor)
        row = bits_of(tensor)
        if row is not None:
            slot.bits, kept = row
        else:  # this time it has other numbers
            kept = _whole(tensor)
        slot.tensor, slot.settled = kept, kept._version
        if self._around is not None:
            self._hand_over(slot, kept)

    def _drop(self, slot: SavedTensor) -> None:
        """Let go of a tensor; what it is made from is there."""
        recipe = self._recipe
        assert recipe is not None
        slot.tensor, slot.value = None, recipe.value(slot.index)
        slot.sources = {
            number: self._given[source.given] if source.pack < 0 else self._slots[source.pack]
            for number, source in recipe.sources[slot.index].items()
        }

    def close(self) -> None:
        """The call is over."""
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
        self._slots.clear()  # the graph holds on to the list
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
                self._forget()  # another backward begins anew
                raise
            self._spend(value)
            if not in_backward:
                self._forget()
        return tensor

    def _begin(self) -> bool:
        """Get ready for a backward; False if there is none, because a saved tensor is only looked at."""
        if self._counts:
            return True
        recipe, latest, reference = self._recipe, _thread.latest(), weakref.ref(self)
        assert recipe is not None
        if latest is not None:  # a backward goes from call to call: what is left of that one will not be used
            latest._let_go()
        _thread.latest = reference
        self._counts = dict(recipe.uses)
        if self._around is not None:  # what they keep is asked for once
            for index, value in recipe.origins.items():
                self._counts[value] = self._counts.get(value, 0) + (recipe.actions[index] == KEEP)
        try:
            _at_the_end(_forgetting(reference))
        except RuntimeError:
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
            unsure, self._unsure = self._unsure, []
        for sample, again, how in unsure:  # pragma: no cover  (needs a GPU)
            if not same_bits(sample, again):
                self._differs(how)

    def _spend(self, value: int) -> None:
        """A value was used; let go of it if that was the last time."""
        left = self._counts[value] = self._counts.get(value, 0) - 1
        if left <= 0:
            self._values.pop(value, None)

    def _made(self, value: int, slot: SavedTensor) -> torch.Tensor:
        """A tensor that has the value's storage."""
        recipe, values = self._recipe, self._values
        assert recipe is not None
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
        """A value that is kept."""
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
            self._compare(value, tensor, "unpacking bits")
        elif base is not None:
            self._shifts[value] = int(tensor.storage_offset()) - base.offset
        elif source.tensor is None:
            self._shifts[value] = int(tensor.storage_offset())
        return tensor

    def _run(self, replay: Replay, wanted: int) -> None:
        op, values, shifts = replay.op, self._values, self._shifts
        assert self._recipe is not None
        try:
            # There the trace saw it: its arguments are what the kernel got, with all casts made.
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
                values[number] = results[place]
                self._compare(number, results[place], op.func)
        for number in replay.reads:
            self._spend(number)

    def _compare(self, value: int, tensor: torch.Tensor, how: object) -> None:
        """Check that a few of the numbers are those of the forward; on a GPU, at the end of the backward.

        `how` the tensor was made again is an operation, or words.
        """
        sample = self._samples.get(value)
        if sample is None:
            return
        again = _sample_of(tensor)
        if isinstance(sample, torch.Tensor) and isinstance(again, torch.Tensor):  # pragma: no cover  (needs a GPU)
            self._unsure.append((sample, again, how))
        elif sample != again:
            self._differs(how)

    def _differs(self, how: object) -> NoReturn:
        assert self._doubt is not None
        self._doubt.is_raised = True
        raise CheckpointError(
            f"{how}, for the backward of {self._name}, gave other numbers than the forward had: something changed "
            "since the function was traced that neither its arguments nor its modules show. Pass it as an argument, or "
            "call the function without lean"
        )

    def _was_changed(self, tensor: torch.Tensor, version: int) -> NoReturn:
        raise CheckpointError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"{tensor.dtype} tensor of shape {tuple(tensor.shape)}, which the backward of {self._name} reads, is at "
            f"version {tensor._version}; expected version {version} instead. Change it after the backward, or make a "
            "new tensor"
        )


class PaperTape(LeanTape):
    """A tape that looks at no values, and so compares none."""

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
    """How a tensor would be in bits."""

    count: int
    dtype: torch.dtype

    def tensor(self, bits: torch.Tensor) -> torch.Tensor:
        """A tensor as large as the one that these were the bits of."""
        return bits.new_empty(self.count).to(self.dtype)


def _filled(argument: Any, values: dict[int, torch.Tensor], shifts: dict[int, int]) -> Any:
    """An operation's argument, with tensors in the places of views."""
    if type(argument) is StorageView:
        return _viewed(values[argument.value], argument, shifts.get(argument.value, 0))
    if type(argument) is list or type(argument) is tuple:
        return [_filled(part, values, shifts) for part in argument]
    return argument


def _viewed(base: torch.Tensor, view: StorageView, shift: int) -> torch.Tensor:
    """The view of a tensor that has the value's storage, perhaps further on in it than when it was traced."""
    offset = view.offset + shift
    if base.size() == view.size and base.stride() == view.stride and base.storage_offset() == offset:
        return base
    return base.as_strided(view.size, view.stride, offset)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of the tensor's storage, flat."""
    tensor = tensor.detach()
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def _restrided(tensor: torch.Tensor, view: StorageView) -> torch.Tensor:
    """A copy of the tensor with the view's strides."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(view.size, view.stride, strict=True))
    return tensor.new_empty(extent).as_strided(view.size, view.stride, 0).copy_(tensor)


def _sample_of(tensor: torch.Tensor) -> int | torch.Tensor:
    """What tells a few numbers of the tensor's storage from others; on a GPU, which would wait, those numbers."""
    count = int(tensor.untyped_storage().nbytes() // tensor.element_size())
    if count > _PLACES_IN_SAMPLE * _NUMBERS_AT_PLACE:
        sample = tensor.as_strided((_PLACES_IN_SAMPLE, _NUMBERS_AT_PLACE), (count // _PLACES_IN_SAMPLE, 1), 0)
    else:
        sample = tensor.as_strided((count,), (1,), 0)
    if tensor.device.type != "cpu":  # pragma: no cover  (needs a GPU)
        return sample.clone()
    return hash(words(sample).numpy().tobytes())


class _TapeThread(threading.local):
    # Weak, as all that outlives a call is: what autograd has let go of must not live until the next backward.
    latest: Callable[[], LeanTape | None] = staticmethod(lambda: None)  # the tape that was last asked


_thread = _TapeThread()


def _forgetting(reference: weakref.ref[LeanTape]) -> Callable[[], None]:
    """What is done at the end of a backward, which must not keep the tape alive until then."""

    def forget() -> None:
        tape = reference()
        if tape is not None:
            tape._forget()

    return forget
