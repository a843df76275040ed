"""Accelerators, asked by what torch has for all of them: which are in use, their generators, and the time.

Nothing here is said of one kind of device by name. An accelerator is in use from the moment at which torch has
initialised it. Only the clocks make anybody wait.
"""

from __future__ import annotations

from functools import cache
from time import perf_counter, process_time
from typing import Any

import torch


def is_of_host(device: torch.device) -> bool:
    """Whether a device's bytes are in the memory of the host; those of "meta" stand for them."""
    return device.type in ("cpu", "meta")


def module_in_use() -> Any:
    """The module of torch for the accelerator, such as `torch.cuda`; None if there is none, or it is not in use."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator)
    is_initialized = getattr(module, "is_initialized", module.is_available)  # "mps" is in use wherever there is one
    return module if is_initialized() else None


class _OnlyGenerator:
    """The generator of an accelerator that has one device, and does not hand out its generator ("mps")."""

    def __init__(self, module: Any) -> None:
        self.get_state, self.set_state = module.get_rng_state, module.set_rng_state


@cache
def generators_of(module: Any) -> tuple[Any, ...]:
    """The default generators of an accelerator's devices; once it is in use, these are always the same."""
    return tuple(getattr(module, "default_generators", ())) or (_OnlyGenerator(module),)


# Bound to names of their own, which are quickest to read.
_enabled, _casts_to = torch.is_autocast_enabled, torch.get_autocast_dtype
_accelerator = torch.accelerator.current_accelerator

Autocast = tuple[tuple[str, bool, torch.dtype], ...]


def autocast_now() -> Autocast:
    """For each type of device that there is here, whether autocast is on, and to what it casts."""
    cpu = "cpu", _enabled("cpu"), _casts_to("cpu")
    accelerator = _accelerator()
    if accelerator is None:
        return (cpu,)
    kind = accelerator.type
    return cpu, (kind, _enabled(kind), _casts_to(kind))


def seconds_now() -> float:
    """A clock to be read before and after: what accelerators have been asked for is done by then."""
    if module_in_use() is not None:
        here = torch.accelerator.current_device_index()
        for device in range(torch.accelerator.device_count()):
            # One that holds nothing has nothing to do, and to wait for it might be the first use that is made of it.
            if device == here or torch.accelerator.memory_allocated(device):
                torch.accelerator.synchronize(device)
    return perf_counter()


def cpu_seconds_now() -> float:
    """The same in CPU time, which other load on the machine affects least, unless an accelerator is in use."""
    return process_time() if module_in_use() is None else seconds_now()
