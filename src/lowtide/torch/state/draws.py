"""Random numbers that a function draws, so that a rerun draws the same ones, or it is known that it did not.

Every generator that the function can draw from is read before and after its first run: those of torch, Python and
numpy that everybody shares, and its own. Of those that moved, the state before is kept, with a hash of the state
after. A rerun starts from the one and must end at the other; having come there, it need not go on to its end. Nor has
it to draw what only comes after all that is needed of it, where an inner call has seen in which state that was.

A generator that did not move may have been drawn from all the same, and then put back; so where a function moved none,
a rerun starts from the same states too.

Shared generators can be moved by other threads at any time. Functions that are known to draw take turns. Threads that
draw by themselves take none, and where states agree it may be by chance; so as soon as several threads run
checkpointed functions, the values of what autograd saves are compared instead.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import struct
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from lowtide.errors import OtherDrawsError


class _Source(Protocol):
    """One generator."""

    name: str
    shared: bool

    def read(self) -> Any:
        """Its state, as a value that can be compared and hashed."""

    def is_at(self, state: Any) -> bool:
        """Whether it is in that state: asked at every call, and so without making a copy of it."""

    def write(self, state: Any) -> None:
        """Go back to a state."""


class _Words(bytearray):
    """A state that is compared with what lies in memory, wherever that is: bytes cannot be."""

    __slots__ = ()

    def __hash__(self) -> int:  # type: ignore[override]  # it is not changed
        return hash(bytes(self))


class _Torch:
    __slots__ = ("_generator", "name", "shared")

    def __init__(self, generator: torch.Generator, name: str, shared: bool = False) -> None:
        self._generator = generator
        self.name = name
        self.shared = shared

    # A generator has a lock of its own, which a thread may hold while it waits for the interpreter's. Others have to
    # wait for a lock of Python's instead, because that lets the interpreter go.
    _one_at_a_time: ClassVar[threading.Lock] = threading.Lock()

    def read(self) -> _Words:
        with self._one_at_a_time:
            return _Words(self._generator.get_state().numpy())

    def is_at(self, state: _Words) -> bool:
        with self._one_at_a_time:
            now = self._generator.get_state()
            return bool(state == _memory_at(now.data_ptr(), now.numel()))

    def write(self, state: _Words) -> None:
        tensor = torch.frombuffer(state, dtype=torch.uint8)
        with self._one_at_a_time:
            self._generator.set_state(tensor)


class _Python:
    """A `random.Random`.

    To ask it for its state makes 625 numbers, which takes longer than a small function runs. The same numbers lie in
    the object, behind what every Python object begins with, and are compared there; at import it is made sure that
    this is so, and if not, the object is asked.
    """

    __slots__ = ("_generator", "_there", "name", "shared")
    _WORDS = 625  # the position and 624 words

    def __init__(self, generator: random.Random, name: str, shared: bool = False) -> None:
        self._generator = generator
        self._there = _memory_at(id(generator) + object.__basicsize__, 4 * self._WORDS)
        self.name = name
        self.shared = shared

    def read(self) -> Any:
        if _PYTHON_LAYOUT_IS_KNOWN:
            return _Words(self._there), self._generator.gauss_next  # type: ignore[attr-defined]
        return self._generator.getstate()

    def is_at(self, state: Any) -> bool:
        if _PYTHON_LAYOUT_IS_KNOWN:
            return bool(state[0] == self._there and state[1] == self._generator.gauss_next)  # type: ignore[attr-defined]
        return bool(state == self._generator.getstate())

    def write(self, state: Any) -> None:
        if _PYTHON_LAYOUT_IS_KNOWN:
            position, *words = struct.unpack(f"={self._WORDS}I", state[0])
            state = (self._generator.VERSION, (*words, position), state[1])
        self._generator.setstate(state)


def _memory_at(address: int, size: int) -> Any:
    return (ctypes.c_char * size).from_address(address)


def _python_layout_is_known() -> bool:
    generator = random.Random(7)
    generator.random()
    size = type(generator).__base__.__basicsize__ - object.__basicsize__  # type: ignore[union-attr]
    if sys.implementation.name != "cpython" or size < 4 * _Python._WORDS:  # pragma: no cover
        return False
    position, *words = struct.unpack(
        f"={_Python._WORDS}I", ctypes.string_at(id(generator) + object.__basicsize__, 4 * _Python._WORDS)
    )
    return bool((*words, position) == generator.getstate()[1])


_PYTHON_LAYOUT_IS_KNOWN = _python_layout_is_known()


class _Numpy:
    """A generator object of numpy's, old or new, or the bits behind a new one."""

    __slots__ = ("_bits", "_generator", "name", "shared")

    def __init__(self, generator: np.random.Generator | np.random.RandomState | np.random.BitGenerator) -> None:
        self._generator = generator
        bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
        self._bits = bits if isinstance(bits, np.random.BitGenerator) else None
        self.name = f"a numpy {type(generator).__name__}"
        self.shared = False

    def is_at(self, state: bytes) -> bool:
        return state == self.read()

    def read(self) -> bytes:
        state = self._bits.state if self._bits is not None else self._generator.get_state()  # type: ignore[union-attr]
        return pickle.dumps(state)

    def write(self, state: bytes) -> None:
        if self._bits is not None:
            self._bits.state = pickle.loads(state)
        else:
            self._generator.set_state(pickle.loads(state))  # type: ignore[union-attr]


class _NumpyGlobal:
    """The generator behind `np.random.rand` and its like.

    Numpy takes 30 microseconds to give its state, so its words are compared where they are, and so is the second normal
    number, which it makes with each first one and keeps. Where that one lies is found out at import; if it cannot be,
    numpy is asked.
    """

    __slots__ = ("_bits", "_pending", "_there", "name", "shared")
    _WORDS = 624 * 4
    _SIZE = _WORDS + 4  # and the position

    def __init__(self) -> None:
        self.name = "numpy's global generator"
        self.shared = True
        self._bits: np.random.BitGenerator | None = None  # whose words lie there; it can be changed for another
        self._there: Any = None
        self._pending: Any = None
        if _GAUSS_OFFSET is not None:
            self._pending = _memory_at(id(np.random.mtrand._rand) + _GAUSS_OFFSET, 16)

    def read(self) -> Any:
        if self._is_known():
            return _Words(self._there), _Words(self._pending)
        return pickle.dumps(np.random.mtrand._rand.get_state(legacy=False))

    def is_at(self, state: Any) -> bool:
        if self._is_known() and isinstance(state, tuple):
            return bool(state[0] == self._there and state[1] == self._pending)
        return bool(state == self.read())

    def _is_known(self) -> bool:
        bits = np.random.mtrand.get_bit_generator()
        if bits is not self._bits:
            is_known = isinstance(bits, np.random.MT19937)
            self._there = _memory_at(bits.ctypes.state_address, self._SIZE) if is_known else None
            self._bits = bits
        return self._there is not None and _GAUSS_OFFSET is not None

    def write(self, state: Any) -> None:
        if not isinstance(state, tuple):
            np.random.set_state(pickle.loads(state))  # noqa: NPY002  (it is this one that is followed)
            return
        words, pending = state
        key = np.frombuffer(words[: self._WORDS], dtype=np.uint32)
        position = struct.unpack("=i", words[self._WORDS :])
        np.random.set_state(("MT19937", key, *position, *struct.unpack("=ixxxxd", pending)))  # noqa: NPY002


def _gauss_offset() -> int | None:
    """Where in a `RandomState` it says whether there is a second normal number, eight bytes before that number."""
    generator = np.random.RandomState(7)
    generator.standard_normal()
    pending: Any = generator.get_state(legacy=False)
    size = type(generator).__basicsize__
    offset = ctypes.string_at(id(generator), size).find(struct.pack("=ixxxxd", 1, pending["gauss"]))
    if offset < 0:  # pragma: no cover  (another numpy)
        return None
    generator.standard_normal()
    used: int = struct.unpack("=i", ctypes.string_at(id(generator) + offset, 4))[0]
    return None if used else offset


_GAUSS_OFFSET = _gauss_offset()


_CPU = _Torch(torch.default_generator, "torch's generator on the CPU", shared=True)
_PYTHON = _Python(random.random.__self__, "Python's random", shared=True)  # type: ignore[attr-defined]
_NUMPY = _NumpyGlobal()
_SHARED: tuple[_Source, ...] = (_CPU, _PYTHON, _NUMPY)


def _source_of(generator: Any) -> _Source:
    if isinstance(generator, torch.Generator):
        return _Torch(generator, f"a torch.Generator on {generator.device}")
    if isinstance(generator, random.Random):
        return _Python(generator, "a random.Random")
    return _Numpy(generator)


def _devices() -> tuple[_Source, ...]:
    if not torch.cuda.is_initialized():
        return ()
    return tuple(  # pragma: no cover  (needs a GPU)
        _Torch(generator, f"torch's generator on {generator.device}", shared=True)
        for generator in torch.cuda.default_generators
    )


class _Counts(threading.local):
    def __init__(self) -> None:
        self.entered = [0, 0]  # runs of this thread, and those among them that may disturb others
        self.active = [0, 0]


class _Traffic:
    """Which threads run checkpointed functions, to know whether two of them may have disturbed each other.

    Functions that are known to draw take turns, first runs and reruns alike, and do not disturb each other. Nobody
    waits for ever, because a function may itself wait for another thread: who has waited too long goes without a turn.
    """

    def __init__(self) -> None:
        self.turn = threading.RLock()
        self._lock = threading.Lock()
        self._entered = [0, 0]
        self._active = [0, 0]
        self._mine = _Counts()
        self._threads: set[threading.Thread] = set()

    def join(self) -> None:
        """From now on this thread is one that runs checkpointed functions."""
        self._threads.add(threading.current_thread())

    def several(self) -> bool:
        """Whether more than one thread is alive that does."""
        if len(self._threads) > 1:
            self._threads = {thread for thread in self._threads.copy() if thread.is_alive()}
        return len(self._threads) > 1

    def enter(self, disturbs: bool) -> tuple[bool, list[int], list[int]]:
        """A run begins; the ticket is for `leave`."""
        mine = self._mine
        with self._lock:
            for kind in range(1 + disturbs):
                for counts in (self._entered, self._active, mine.entered, mine.active):
                    counts[kind] += 1
            return disturbs, self._others(self._active, mine.active), self._others(self._entered, mine.entered)

    def leave(self, ticket: tuple[bool, list[int], list[int]], has_turn: bool) -> bool:
        """Whether another thread may have disturbed the run: with a turn, one that may disturb; without, any."""
        disturbs, were_active, had_entered = ticket
        mine = self._mine
        with self._lock:
            for kind in range(1 + disturbs):
                self._active[kind] -= 1
                mine.active[kind] -= 1
            entered = self._others(self._entered, mine.entered)
        return were_active[has_turn] > 0 or entered[has_turn] != had_entered[has_turn]

    @staticmethod
    def _others(everybody: list[int], mine: list[int]) -> list[int]:
        return [all_ - own for all_, own in zip(everybody, mine, strict=True)]


_traffic = _Traffic()
_PATIENCE = 10.0  # seconds to wait for a turn


class _Turn:
    """A rerun that writes states, in turn with others."""

    __slots__ = ("_ticket", "is_had")

    def __init__(self) -> None:
        self.is_had = _traffic.turn.acquire(timeout=_PATIENCE)
        self._ticket = _traffic.enter(disturbs=not self.is_had)

    def end(self) -> bool:
        """Whether another thread may have disturbed it."""
        crowded = _traffic.leave(self._ticket, self.is_had)
        if self.is_had:
            _traffic.turn.release()
        return crowded


# Functions, by the identity of their code or of themselves, that drew from a shared generator, and those that had the
# chance and did not. Should an identity be used again, it is put right at the next run.
_drawing: set[int] = set()
_quiet: set[int] = set()
_MOST_KNOWN = 100_000


def _learn(key: int, known: set[int], other: set[int]) -> None:
    if len(known) > _MOST_KNOWN:
        known.clear()
    known.add(key)
    other.discard(key)


def _read(sources: Iterable[_Source], usual: list[Any]) -> list[Any]:
    """The states of generators: the very ones that are usual, where they are in those."""
    return [
        state if state is not None and source.is_at(state) else source.read()
        for source, state in zip_longest(sources, usual)
    ]


class Draws:
    """The draws of one function's first run: make it before the run, `leave` and `finish` after it."""

    __slots__ = (
        *("_alone", "_crowded", "_has_turn", "_inner", "_key", "_last", "_moved", "_own", "_states", "_stopped"),
        "_ticket",
    )

    def __init__(self, function: Any) -> None:
        self._key = id(getattr(function, "__code__", function))
        self._has_turn = self._key in _drawing and _traffic.turn.acquire(timeout=_PATIENCE)
        self._ticket = _traffic.enter(disturbs=not self._has_turn and self._key not in _quiet)
        self._alone = threading.active_count() == 1
        self._crowded = False
        self._own: list[_Source] = []
        latest = Standstill.latest
        self._states = _read((*_SHARED, *_devices()), [] if latest is None else latest.states)
        self._moved: list[tuple[_Source, Any, int]] | None = None  # state before, hash of the state after
        self._inner: tuple[int, list[Any]] | None = None  # of the latest inner call: see `begin_inner`
        self._last: list[int] = []  # hashes of states from which on a rerun may be ended
        self._stopped: list[Any] | None = None  # states in which one was

    def follow(self, generator: Any) -> None:
        """Follow this generator too; it has not been drawn from yet."""
        source = _source_of(generator)
        self._own.append(source)
        self._states.append(source.read())

    def among_threads(self) -> bool:
        """Whether other threads may draw as well, so that values have to be compared: states may agree by chance."""
        _traffic.join()
        return _traffic.several() and self._key not in _quiet

    def leave(self) -> list[Any]:
        """The run is over, one way or another; returns where it has left the generators."""
        states = _read(self._sources(), self._states)
        self._crowded = _traffic.leave(self._ticket, self._has_turn)
        if self._has_turn:
            _traffic.turn.release()
        return states

    def begin_inner(self, saved: int, inner: Draws) -> None:
        """An inner call begins, whose arguments were the last of so many tensors that were saved."""
        self._inner = (saved, inner._states[: len(inner._states) - len(inner._own)])

    def finish(self, now: list[Any], saved: int) -> Draws | Standstill:
        """What a rerun needs, which has to save so many tensors."""
        if not self._crowded:
            if now == self._states:
                _learn(self._key, _quiet, _drawing)
                return Standstill.at(self._sources(), self._states, shared=not self._own)
            _learn(self._key, _drawing, _quiet)
        last = now
        if self._inner is not None and self._inner[0] == saved:
            # The arguments of that call are the last that is needed, and what it draws is its own business.
            last = [*self._inner[1], *now[len(self._inner[1]) :]]
        # Among several threads one may have put back the very state that another found: then all of it is kept.
        moved = [
            (source, before, after, enough)
            for source, before, after, enough in zip(self._sources(), self._states, now, last, strict=True)
            if before != after or (self._crowded and source.shared)
        ]
        self._moved = [(source, before, hash(after)) for source, before, after, _ in moved]
        self._last = [hash(enough) for _, _, _, enough in moved]
        self._inner = None
        self._states = []
        return self

    def _sources(self) -> tuple[_Source, ...]:
        return (*_SHARED, *_devices(), *self._own)

    @contextmanager
    def again(self, *, to_the_end: bool) -> Iterator[None]:
        """Inside, the same numbers are drawn; afterwards generators are where they were.

        A rerun that goes `to_the_end` must end where the first run did, unless its draws `are_made` before.
        """
        moved = self._moved
        if moved is None:  # the first run is not over yet
            moved = [(source, start, 0) for source, start in zip(self._sources(), self._states, strict=True)]
        turn = _Turn()
        held = [(source, source.read()) for source, _, _ in moved]
        try:
            for source, start, _ in moved:
                source.write(start)
            yield
            stopped, ends = self._stopped, []
            if to_the_end:
                ends = [source.read() for source, _, _ in moved] if stopped is None else stopped
        finally:
            self._stopped = None
            for source, state in held:
                source.write(state)
            crowded = turn.end()
        for (source, start, expected), end in zip(moved, ends, strict=False):
            if end == start and turn.is_had:
                continue  # nothing was drawn from this one; if it moved in the first run, another thread moved it
            _learn(self._key, _drawing, _quiet)
            # If others have drawn since, they may have done so then, unseen.
            seen_late = not self._alone and _traffic.several()
            disturbed = source.shared and (self._crowded or crowded or seen_late)
            if disturbed or (stopped is None and hash(end) != expected):
                raise _other_draws(source.name, disturbed)

    def are_made(self) -> bool:
        """Inside `again`: whether a rerun that has all it needs has drawn the same too, and so may be ended."""
        states = [source.read() for source, _, _ in self._moved or ()]
        if list(map(hash, states)) != self._last:
            return False
        self._stopped = states
        return True


class Standstill:
    """Where a first run found its generators, if it left all of them there.

    Calls between which nothing is drawn find the same states, and those that have no generator of their own share all
    of this, so that it takes no memory for each.
    """

    __slots__ = ("_sources", "states")
    latest: ClassVar[Standstill | None] = None  # of those that have no generator of their own

    def __init__(self, sources: tuple[_Source, ...], states: list[Any]) -> None:
        self._sources = sources
        self.states = states

    @classmethod
    def at(cls, sources: tuple[_Source, ...], states: list[Any], *, shared: bool) -> Standstill:
        """These generators in these states; `shared` if all of them are."""
        latest = cls.latest
        if latest is not None and shared and latest.states == states:
            return latest
        found = cls(sources, states)
        if shared:  # it must not keep anybody's own generator alive
            cls.latest = found
        return found

    def again(self) -> _StartingThere:
        """Inside, generators start where they did; afterwards they are where they were."""
        return _StartingThere(self)

    def elsewhere(self) -> list[tuple[_Source, Any, Any]]:
        """Generators that are in another state now: each with the state here, and that one."""
        pairs = zip(self._sources, self.states, strict=True)
        return [(source, state, source.read()) for source, state in pairs if not source.is_at(state)]


class _StartingThere:
    """See `Standstill.again`; a class, because at every rerun it is quicker than a generator function."""

    __slots__ = ("_held", "_start", "_turn")

    def __init__(self, start: Standstill) -> None:
        self._start = start
        self._turn: _Turn | None = None
        self._held: dict[_Source, Any] = {}

    def __enter__(self) -> None:
        if self._start.elsewhere():
            self._turn = _Turn()
            for source, state, now in self._start.elsewhere():
                self._held[source] = now
                source.write(state)

    def __exit__(self, *_: object) -> None:
        # Whatever the rerun moved: one that was ended early has put nothing back.
        for source, state, _now in self._start.elsewhere():
            self._held.setdefault(source, state)
        for source, state in self._held.items():
            source.write(state)
        if self._turn is not None:
            self._turn.end()


def _other_draws(source: str, crowded: bool) -> OtherDrawsError:
    why = (
        "another thread drew from it meanwhile; let each thread draw from a torch.Generator of its own, or run one "
        "at a time"
        if crowded
        else "draw the same numbers each time it runs, or pass preserve_rng_state=False if they may differ"
    )
    told = f"the rerun may have drawn other random numbers than the first run from {source}: {why}"
    return OtherDrawsError(told, crowded=crowded)
