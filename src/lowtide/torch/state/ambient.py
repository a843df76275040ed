"""What a rerun must find as the first run found it: random generators, autocast, default dtype, device and the like."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from lowtide.errors import InputError
from lowtide.torch.memory import recording
from lowtide.torch.state.hidden import Hidden

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


@cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()


def _settings() -> tuple[Any, ...]:
    """Default dtype and device, which attention kernels are allowed and in what order, and autocast."""
    settings = (
        torch.get_default_dtype(),
        # A default device is a mode on torch's stack; to ask for it takes longer than to look at the stack.
        torch.get_default_device() if torch._C._len_torch_function_stack() else None,
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch._C._get_overrideable_sdp_enabled(),
        tuple(torch._C._get_sdp_priority_order()),
        torch.is_autocast_cache_enabled(),
        ("cpu", torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    )
    if _has_cuda():  # pragma: no cover  (needs a GPU)
        settings += (("cuda", torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),)  # type: ignore[assignment]
    return settings


_AUTOCAST = 9  # where autocast begins in the settings
_SDPA_SETTERS: tuple[Callable[[Any], None], ...] = (
    torch._C._set_sdp_use_flash,
    torch._C._set_sdp_use_mem_efficient,
    torch._C._set_sdp_use_math,
    torch._C._set_sdp_use_cudnn,
    torch._C._set_sdp_use_overrideable,
    torch._C._set_sdp_priority_order,
)


def _set_globals(settings: tuple[Any, ...]) -> None:
    """Default dtype and attention kernels, which are global; the rest of the settings has contexts of its own."""
    torch.set_default_dtype(settings[0])
    for setter, value in zip(_SDPA_SETTERS, settings[2:], strict=False):
        setter(value)


class Ambient:
    """Autocast, default dtype and device and attention kernels as they are when it is made; the user's own contexts."""

    __slots__ = ("_contexts", "_settings")
    _usual: ClassVar[tuple[Any, ...]] = ()  # the settings that were met last, so that equal ones are one object

    def __init__(self, contexts: Iterable[Callable[[], AbstractContextManager[Any]]] = ()) -> None:
        settings = _settings()
        if settings != Ambient._usual:
            Ambient._usual = settings
        self._settings = Ambient._usual
        self._contexts = tuple(contexts)

    @property
    def casts(self) -> bool:
        """Whether autocast is on."""
        return any(enabled for _, enabled, _ in self._settings[_AUTOCAST:])

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

    def is_now(self) -> bool:
        """Whether everything is as it was, with nothing to enter."""
        return not self._contexts and _settings() == self._settings

    @contextmanager
    def again(self, *, cached: bool = False) -> Iterator[None]:
        """Inside, everything is as it was; autocast keeps copies of weights only if `cached`, and if it did then."""
        now, then = _settings(), self._settings
        _set_globals(then)
        try:
            with ExitStack() as stack:
                for (kind, enabled, cast), (_, is_enabled, _) in zip(then[_AUTOCAST:], now[_AUTOCAST:], strict=True):
                    if enabled or is_enabled:
                        keeps = cached and then[_AUTOCAST - 1]
                        stack.enter_context(torch.autocast(kind, cast, enabled, cache_enabled=keeps))
                if then[1] != now[1]:
                    stack.enter_context(then[1] or torch.device("cpu"))
                for context in self._contexts:
                    stack.enter_context(context())
                yield
        finally:
            _set_globals(now)


# --- runs for the sake of measuring, which leave no trace in generators or gradients


@contextmanager
def aside(layers: Sequence[Any]) -> Iterator[None]:
    """Inside, layers run with grad, and random numbers and gradients are put back afterwards."""
    hidden = Hidden(layers)
    with (
        torch.enable_grad(),
        Ambient().uncached(),
        recording.recomputing(),
        Randomness(hidden.generators).aside(),
        _other_randomness_aside(),
        _gradients_aside(hidden.modules),
    ):
        yield


@contextmanager
def _gradients_aside(modules: list[nn.Module]) -> Iterator[None]:
    """Inside, parameters have no gradient yet; afterwards they have the one they had."""
    held = [(parameter, parameter.grad) for module in modules for parameter in module.parameters(recurse=False)]
    for parameter, _ in held:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient


@contextmanager
def _other_randomness_aside() -> Iterator[None]:
    """Inside, anything may be drawn from the generators of Python and numpy; afterwards they are where they were."""
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  (what layers use)
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


class RandomStates:
    """Where the generators of torch, Python and numpy are, and those of modules, to start again from there."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self._of_torch = Randomness(Hidden(layers).generators)
        self._of_python, self._of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  (what layers use)
        found = [
            value
            for layer in layers
            if isinstance(layer, nn.Module)
            for module in layer.modules()
            for value in vars(module).values()
        ]
        self._pythons = [(value, value.getstate()) for value in found if isinstance(value, random.Random)]
        self._numpys = [(v, v.bit_generator.state) for v in found if isinstance(v, np.random.Generator)]

    def seeded(self, seed: int) -> RandomStates:
        """Other states, for this seed; those of modules are the same."""
        self.restore()
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        return RandomStates(self._layers)

    def restore(self) -> None:
        """Put them back."""
        self._of_torch.restore(self._of_torch.start)
        random.setstate(self._of_python)
        np.random.set_state(self._of_numpy)  # noqa: NPY002
        for own, state in self._pythons:
            own.setstate(state)
        for generator, of_bits in self._numpys:
            generator.bit_generator.state = of_bits
