"""Settings that a rerun must find as the first run found them: autocast, default dtype, device, attention kernels."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar

import numpy as np
import torch

from lowtide.torch.memory import recording
from lowtide.torch.memory.accelerators import autocast_now
from lowtide.torch.state.generators import Randomness
from lowtide.torch.state.surroundings import Finds


def _settings() -> tuple[Any, ...]:
    """Default dtype and device, which attention kernels are allowed and in what order, overrides, and autocast."""
    return (
        torch.get_default_dtype(),
        # A default device is a mode on torch's stack; to ask for it takes longer than to look at the stack.
        torch.get_default_device() if torch._C._len_torch_function_stack() else None,
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch._C._get_overrideable_sdp_enabled(),
        torch._C._get_sdp_priority_order(),
        torch._C._is_torch_function_enabled(),
        torch.is_autocast_cache_enabled(),
        *autocast_now(),
    )


_AUTOCAST = 10  # where autocast begins in the settings
_OVERRIDES = 8
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

    def overrides(self) -> AbstractContextManager[None]:
        """Inside, classes of tensors override torch's functions if they did; while one is taken back, none does."""
        then = self._settings[_OVERRIDES]
        if then == torch._C._is_torch_function_enabled():
            return nullcontext()
        return torch._C._EnableTorchFunction() if then else torch._C.DisableTorchFunctionSubclass()

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
                stack.enter_context(self.overrides())
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
    finds = Finds(layers)
    with (
        torch.enable_grad(),
        Ambient().uncached(),
        recording.recomputing(),
        Randomness(finds.generators).aside(),
        gradients_aside([parameter for module in finds.modules for parameter in module.parameters()]),
    ):
        yield


@contextmanager
def gradients_aside(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, leaves have no gradient yet; afterwards they have the one they had."""
    held = [(tensor, tensor.grad) for tensor in tensors]
    for tensor, _ in held:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, gradient in held:
            tensor.grad = gradient


class RandomStates:
    """Where the generators of torch, Python and numpy are, and those of layers, to start again from there."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self._randomness = Randomness(Finds(layers).generators)

    def seeded(self, seed: int) -> RandomStates:
        """Other states, for this seed; those of layers are the same."""
        self.restore()
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002  (what layers use)
        return RandomStates(self._layers)

    def restore(self) -> None:
        """Put them back."""
        self._randomness.restore(self._randomness.start)
