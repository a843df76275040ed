"""Accelerators, asked by what torch has for all of them: which are in use, their generators, and the time.

Nothing here is said of one kind of device by name. An accelerator is in use from the moment at which torch has
initialised it; nobody is made to wait for one, or initialised, but by `seconds_now`.
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


def autocast_kinds() -> tuple[str, ...]:
    """The types of devices of which autocast is asked for here."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def seconds_now() -> float:
    """A clock for costs, to be read before and after: what accelerators have been asked for is done by then.

    Without an accelerator it is CPU time, which other load on the machine affects least.
    """
    module = module_in_use()
    if module is None:
        return process_time()
    here = torch.accelerator.current_device_index()
    for device in range(torch.accelerator.device_count()):
        # A device that holds nothing has nothing to do, and waiting for it might be the first use that is made of it.
        if device == here or torch.accelerator.memory_allocated(device):
            torch.accelerator.synchronize(device)
    return perf_counter()
