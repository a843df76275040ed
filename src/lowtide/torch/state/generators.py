"""Random generators, and where they were: a rerun starts where the first run did.

These are the generators that everybody shares (torch's own of every device in use, Python's and numpy's) and those
that a function was given. Afterwards they are where they were before the rerun. Whether a rerun has drawn the same
numbers is not asked here: the values that came of them are compared.

States are read at every call, so reading has to be cheap. `read` is handed a state that is likely to be the present
one, and returns that very object if it is: calls between which nothing is drawn share it.
"""

from __future__ import annotations

import ctypes
import functools
import pickle
import random
import struct
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from lowtide.errors import InputError
from lowtide.torch.memory import accelerators
from lowtide.torch.state.samples import read

KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)


class _Source(Protocol):
    """One generator."""

    def read(self, known: Any = None) -> Any:
        """Its state: the object `known`, if it is in that state."""

    def write(self, state: Any) -> None:
        """Go back to a state."""


# Bytes of a state that are compared. The first draw moves the position, the 624th makes all words anew: states of one
# generator with equal positions and first words are equal.
_ENOUGH = 64


class _TorchSource:
    __slots__ = ("_generator",)

    # A generator has a lock of its own, which a thread may hold while it waits for the interpreter's. Others have to
    # wait for a lock of Python's instead, because that lets the interpreter go.
    one_at_a_time: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def read(self, known: bytes | None = None) -> bytes:
        with self.one_at_a_time:
            state: torch.Tensor = self._generator.get_state()
        found: bytes = read(state.data_ptr(), state.numel())
        return known if found == known else found

    def beginning(self) -> bytes:
        """Its state when its device came into use: no number has been drawn from this seed."""
        twin = torch.Generator(self._generator.device)
        twin.manual_seed(self._generator.initial_seed())
        return _TorchSource(twin).read()

    def write(self, state: bytes) -> None:
        with self.one_at_a_time:
            # Made of bytes, so that nobody who counts tensors takes it for one of the function\'s.
            self._generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


class _PythonSource:
    """A `random.Random`; its state is the bytes of its position and its words, and the normal number that waits.

    To ask it for its state makes 625 numbers of Python's, which take longer than many a function, and ten times the
    room. The same numbers lie in the object, behind what every Python object begins with, and are read there; at import
    it is made sure that they do, and if not, the object is asked.
    """

    __slots__ = ("_all", "generator", "memory")

    def __init__(self, generator: random.Random) -> None:
        self.generator = generator
        address, are_known = id(generator) + object.__basicsize__, _python_words_are_known()
        self.memory = (ctypes.c_char * (_ENOUGH if are_known else 0)).from_address(address)
        self._all = (ctypes.c_char * (_PYTHONS_WORDS.size if are_known else 0)).from_address(address)

    def read(self, known: Any = None) -> Any:
        waits = self.generator.gauss_next  # type: ignore[attr-defined]
        if known is not None and self.memory and known[0].startswith(self.memory.raw) and known[1] == waits:
            return known
        words = self._all.raw or _words_of(self.generator)
        return known if known == (words, waits) else (words, waits)

    def write(self, state: Any) -> None:
        position, *words = _PYTHONS_WORDS.unpack(state[0])
        self.generator.setstate((random.Random.VERSION, (*words, position), state[1]))


_PYTHONS_WORDS = struct.Struct("=625I")  # the position and 624 words


def _words_of(generator: random.Random) -> bytes:
    *words, position = generator.getstate()[1]
    return _PYTHONS_WORDS.pack(position, *words)


@functools.cache
def _python_words_are_known() -> bool:
    """Whether the words of a `random.Random` lie where they are looked for."""
    base = random.Random.__base__
    if sys.implementation.name != "cpython" or base.__basicsize__ < object.__basicsize__ + _PYTHONS_WORDS.size:  # type: ignore[union-attr]
        return False  # pragma: no cover  (another Python)
    generator = random.Random(7)
    generator.random()
    return ctypes.string_at(id(generator) + object.__basicsize__, _PYTHONS_WORDS.size) == _words_of(generator)


def _same(state: Any, other: Any) -> bool:
    """Whether two states of numpy's, which have arrays in them, are equal."""
    return pickle.dumps(state) == pickle.dumps(other)


class _NumpySource:
    """A generator object of numpy's, old or new, or the bits behind a new one."""

    __slots__ = ("_bits", "_generator")

    def __init__(self, generator: np.random.Generator | np.random.RandomState | np.random.BitGenerator) -> None:
        self._generator = generator
        bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
        self._bits = bits if isinstance(bits, np.random.BitGenerator) else None

    def read(self, known: Any = None) -> Any:
        state = self._bits.state if self._bits is not None else self._generator.get_state(legacy=False)  # type: ignore[union-attr]
        return known if known is not None and _same(state, known) else state

    def write(self, state: Any) -> None:
        if self._bits is not None:
            self._bits.state = state
        else:
            self._generator.set_state(state)  # type: ignore[union-attr]


_numpys_bits = np.random.mtrand.get_bit_generator


class _NumpyGlobalSource:
    """The generator behind `np.random.rand` and its like.

    Numpy takes 30 microseconds to return its state. Its words are compared where numpy says that they are, and the
    state is asked for only where they have moved, or where a second normal number, made with each first one, waits: to
    take that one moves no word.
    """

    __slots__ = ("bits", "is_quick", "position", "words")
    _POSITION = 624 * 4  # where it is, behind the words

    def __init__(self) -> None:
        self.bits: Any = None  # whose words these are; users may set another
        self.is_quick = False  # whether there are words, and no number waited when the state was last asked for
        self.words = self.position = (ctypes.c_char * 0)()

    def read(self, known: Any = None) -> Any:
        bits = _numpys_bits()
        if bits is not self.bits:
            self.bits = bits
            if isinstance(bits, np.random.MT19937):
                address = bits.ctypes.state_address
                self.words = (ctypes.c_char * _ENOUGH).from_address(address)
                self.position = (ctypes.c_char * 4).from_address(address + self._POSITION)
            else:
                self.words = self.position = (ctypes.c_char * 0)()
        words = self.words.raw + self.position.raw
        if known is not None and words and words == known[0] and not known[1]["has_gauss"]:
            return known
        state: Any = np.random.get_state(legacy=False)  # noqa: NPY002  (it is this one that is followed)
        self.is_quick = bool(words) and not state["has_gauss"]
        if known is not None and words == known[0] and _same(state, known[1]):
            return known
        return words, state

    def write(self, state: Any) -> None:
        np.random.set_state(state[1])  # noqa: NPY002
        self.is_quick = bool(state[0]) and not state[1]["has_gauss"]


_TORCH = _TorchSource(torch.default_generator)
_PYTHON = _PythonSource(random.random.__self__)  # type: ignore[attr-defined]
_NUMPY = _NumpyGlobalSource()


# A generator, and a state of it.
_Mark = tuple[_Source, Any]


@functools.cache
def _sources_of(module: Any) -> tuple[_TorchSource, ...]:
    return tuple(map(_TorchSource, accelerators.generators_of(module)))


def _devices() -> tuple[_TorchSource, ...]:
    """The generators of accelerators in use."""
    module = accelerators.module_in_use()
    return () if module is None else _sources_of(module)


_WITHOUT_DEVICES = (_TORCH, _PYTHON, _NUMPY)


def _shared() -> tuple[_Source, ...]:
    """The generators that everybody shares."""
    return *_WITHOUT_DEVICES, *_devices()


def _since_in_use(known: int) -> list[_Mark]:
    """If `known` shared generators are none of a device: those of devices in use by now, and where they began."""
    return [(source, source.beginning()) for source in _devices()] if known == len(_WITHOUT_DEVICES) else []


Signs = tuple[Any, ...]

# Bound to names of their own, which are quickest to read: these are asked at every call of `checkpoint`.
_read_torchs, _write_torchs = torch.default_generator.get_state, torch.default_generator.set_state
_one_at_a_time = _TorchSource.one_at_a_time
_accelerator = torch.accelerator.current_accelerator
_first_bytes = (ctypes.c_char * _ENOUGH).from_address
_END = _read_torchs().numel() - _ENOUGH  # where the last bytes of torch's state begin


def _look() -> tuple[torch.Tensor, Signs | None]:
    """The state of torch's generator, and signs that are equal only while none of the shared generators has moved.

    No signs if each has to be asked for its state.
    """
    with _one_at_a_time:
        state = _read_torchs()
    if _numpys_bits() is not _NUMPY.bits or not _NUMPY.is_quick or not _PYTHON.memory:
        return state, None
    address = state.data_ptr()  # at the ends are the seed, the position, and the normal number that waits
    return state, (_words(), _first_bytes(address).raw, _first_bytes(address + _END).raw)


def _words() -> Signs:
    """Signs of Python's generator, numpy's, and those of accelerators."""
    signs = _PYTHON.memory.raw, _PYTHON.generator.gauss_next, _NUMPY.words.raw, _NUMPY.position.raw  # type: ignore[attr-defined]
    if _accelerator() is None:
        return signs
    return *signs, *(source.read() for source in _devices())


def _source_of(generator: Any) -> _Source:
    if isinstance(generator, torch.Generator):
        return _TorchSource(generator)
    return _PythonSource(generator) if isinstance(generator, random.Random) else _NumpySource(generator)


def state_of(generator: Any) -> Any:
    """The present state of a generator, as `Randomness` keeps it."""
    return _source_of(generator).read()


# The latest states of the shared ones, and their signs; calls that find the same have this very list. Not an attribute
# of a class: Python tells threads that read one of its new value only after it has let the old one go.
_latest: tuple[Signs | None, list[_Mark]] = (None, [])


class Generators:
    """Generators that a function may draw from, and the states in which its first run finds them."""

    __slots__ = ("_followed", "_marks", "_signs")

    def __init__(self) -> None:
        global _latest
        latest, (_, signs) = _latest, _look()
        if signs is None or latest[0] != signs:
            known = dict(latest[1])
            marks = [(source, source.read(known.get(source))) for source in _shared()]
            has_moved = any(state is not known.get(source) for source, state in marks)
            latest = _latest = (signs, marks if has_moved else latest[1])
        self._signs, self._marks = latest
        self._followed: list[_Mark] = []

    def follow(self, generator: Any) -> None:
        """Follow this generator too, which has not been drawn from yet."""
        source = _source_of(generator)
        self._followed.append((source, source.read()))

    def again(self) -> _StartingThere:
        """A context in which they start where the first run found them; afterwards they are where they were."""
        return _StartingThere(self._signs, self._marks, self._followed)


class _StartingThere:
    """See `Generators.again`; a class, because it is entered at every rerun and a generator function takes longer."""

    __slots__ = ("_followed", "_held", "_known", "_marks", "_shared", "_signs", "_torchs")

    def __init__(self, signs: Signs | None, shared: list[_Mark], followed: list[_Mark]) -> None:
        self._signs = signs  # None where the shared ones are not where they were
        self._shared = shared
        self._marks = self._followed = followed
        self._known = len(followed)
        self._held: list[Any] = []

    def __enter__(self) -> None:
        self._torchs, signs = _look()
        if self._signs is None or signs != self._signs:
            self._marks, self._signs = [*self._shared, *_since_in_use(len(self._shared)), *self._marks], None
        for source, state in self._marks:
            present = source.read(state)
            self._held.append(present)
            if present is not state:
                source.write(state)

    def __exit__(self, *_: object) -> None:
        if self._marks:
            for (source, state), held in zip(self._marks, self._held, strict=False):
                if held is not state or source.read(state) is not state:
                    source.write(held)
            # The rerun of a first run that is not over may go further, and be the first to find a generator.
            for source, state in self._followed[self._known :]:
                source.write(state)
        if self._signs is not None:
            with _one_at_a_time:
                _write_torchs(self._torchs)
            if _words() != self._signs[0]:
                for source, state in self._shared:
                    source.write(state)


# --- the steps of a loop, or runs for the sake of measuring: states along the way

Mark = tuple[Any, ...]  # a state of each generator


class Randomness:
    """The generators that everybody shares and some others, which can be put where they were at any mark."""

    __slots__ = ("_known", "_mark", "_seen", "_sources", "start")

    def __init__(self, generators: Iterable[Any] = ()) -> None:
        self._sources: list[_Source] = list(_shared())
        self._known = len(self._sources)
        self._seen: set[int] = {id(torch.default_generator), id(random.random.__self__)}  # type: ignore[attr-defined]
        self._mark: Mark = (None,) * len(self._sources)
        for generator in generators:
            if not isinstance(generator, KINDS):
                raise InputError(
                    f"generators= has a {type(generator).__name__}; give generators of torch, numpy or Python, such as "
                    "torch.Generator()"
                )
            if id(generator) not in self._seen:
                self._seen.add(id(generator))
                self._sources.append(_source_of(generator))
                self._mark = (*self._mark, None)
        self.start = self.mark()

    def add(self, generator: Any, state: Any) -> None:
        """Follow one more generator, which had `state` at the start."""
        if id(generator) not in self._seen:
            self._seen.add(id(generator))
            self._sources.append(_source_of(generator))
            self.start, self._mark = (*self.start, state), (*self._mark, None)

    def meet_devices(self) -> None:
        """Follow the generators of a device that came into use only now, from where they began."""
        for source, state in _since_in_use(self._known):
            self._known += 1
            self._sources.append(source)
            self.start, self._mark = (*self.start, state), (*self._mark, None)

    def mark(self) -> Mark:
        """The present states. Where nothing was drawn since the last mark, it is that mark: no bytes, same object."""
        states = [source.read(known) for source, known in zip(self._sources, self._mark, strict=True)]
        if any(new is not old for new, old in zip(states, self._mark, strict=True)):
            self._mark = tuple(states)
        return self._mark

    def restore(self, mark: Mark) -> None:
        """Put the states back."""
        for source, state in zip(self._sources, mark, strict=False):  # one that was found later stays where it is
            if source.read(state) is not state:
                source.write(state)
        self._mark = (*mark, *self._mark[len(mark) :])

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, anything may be drawn; afterwards the states are what they were."""
        mark = self.mark()
        try:
            yield
        finally:
            self.restore(mark)
            for source, state in _since_in_use(self._known):
                source.write(state)


def mark_bytes(mark: Mark, start: Mark) -> int:
    """Bytes of the states in a mark that are not those of the start."""
    before = {id(state) for state in start}
    return sum(_bytes_in(state) for state in mark if id(state) not in before)


def _bytes_in(value: Any) -> int:
    """The bytes of a generator's state: of torch's a string, of Python's and numpy's tuples, dicts, arrays, numbers."""
    match value:
        case bytes():
            return len(value)
        case tuple() | list():
            return 8 * len(value) + sum(map(_bytes_in, value))
        case dict():
            return sum(map(_bytes_in, value.values()))
    return int(getattr(value, "nbytes", 32))
