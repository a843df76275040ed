"""What a rerun must find as the first run found it: random generators, autocast, default dtype and device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from lowtide.errors import InputError

Mark = tuple[torch.Tensor, ...]


def _device_generators() -> list[torch.Generator]:
    if not torch.cuda.is_initialized():
        return []
    return list(torch.cuda.default_generators)  # pragma: no cover  (needs a GPU)


class Randomness:
    """The states of torch's own generators and of those that the step uses."""

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        self._generators = [torch.default_generator, *_device_generators()]
        for generator in generators:
            if not isinstance(generator, torch.Generator):
                raise InputError(f"generators= has a {type(generator).__name__}; give torch.Generator objects")
            if not any(generator is known for known in self._generators):
                self._generators.append(generator)
        self._mark: Mark = ()
        self.start = self.mark()

    def add(self, generator: torch.Generator, state: torch.Tensor) -> None:
        """Follow one more generator, which had `state` at the start."""
        if not any(generator is known for known in self._generators):
            self._generators.append(generator)
            self.start = (*self.start, state)

    def mark(self) -> Mark:
        """The present states. Where nothing was drawn since the last mark, it is that mark: no bytes, same object."""
        states = [generator.get_state() for generator in self._generators]
        if len(self._mark) < len(states):  # a generator was found since
            self._mark = tuple(states)
            return self._mark
        same = [torch.equal(new, old) for new, old in zip(states, self._mark, strict=True)]
        if not all(same):
            # The clone is for `measure`, which does not see what a generator makes.
            rows = zip(same, states, self._mark, strict=True)
            self._mark = tuple(old if equal else new.clone() for equal, new, old in rows)
        return self._mark

    def restore(self, mark: Mark) -> None:
        """Put the states back."""
        for generator, state in zip(self._generators, mark, strict=True):
            generator.set_state(state)
        self._mark = mark

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, anything may be drawn; afterwards the states are what they were."""
        held = [generator.get_state() for generator in self._generators]
        try:
            yield
        finally:
            for generator, state in zip(self._generators, held, strict=True):
                generator.set_state(state)


def mark_bytes(mark: Mark, start: Mark) -> int:
    """Bytes of a snapshot's random states that are not those of the start."""
    before = {id(state) for state in start}
    return sum(state.nbytes for state in mark if id(state) not in before)


class Ambient:
    """Autocast, default dtype and default device as they are when it is made, and the user's own contexts."""

    def __init__(self, contexts: Iterable[Callable[[], AbstractContextManager[Any]]] = ()) -> None:
        kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        self._casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        self._dtype = torch.get_default_dtype()
        self._device = torch.get_default_device()
        self._contexts = tuple(contexts)

    @property
    def casts(self) -> bool:
        """Whether autocast is on."""
        return any(enabled for _, enabled, _ in self._casts)

    @contextmanager
    def uncached(self) -> Iterator[None]:
        """Inside, autocast keeps no copies of weights: one made without grad would lose the gradient of a later use."""
        if not self.casts:
            yield
            return
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(cached)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, everything is as it was."""
        dtype = torch.get_default_dtype()
        with ExitStack() as stack:
            for kind, enabled, cast in self._casts:
                if enabled != torch.is_autocast_enabled(kind) or enabled:
                    stack.enter_context(torch.autocast(kind, cast, enabled, cache_enabled=False))
            if self._device != torch.get_default_device():
                stack.enter_context(self._device)
            for context in self._contexts:
                stack.enter_context(context())
            torch.set_default_dtype(self._dtype)
            try:
                yield
            finally:
                torch.set_default_dtype(dtype)
