"""Builds and registers "tide", the device for tests that `tide.cpp` describes, and lets tests ask and limit it."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.backend_registration import rename_privateuse1_backend
from torch.utils.cpp_extension import include_paths, library_paths

from tests.device import kernels

NAME = "tide"
DEVICES = 2
rename_privateuse1_backend(NAME)
_SOURCE = Path(__file__).with_name("tide.cpp")
_BUILD = _SOURCE.parents[2] / "build"  # git ignores it, and `make clean` removes it
# Unoptimised, because that takes a third of the time to build: operations are run by the CPU's own kernels.
_FLAGS = ["-O0", "-g0", "-w", "-std=c++20", "-fPIC", "-shared"]


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    return shutil.which("c++")


def _built() -> Path:
    """The compiled device, built once for each version of the source, torch and Python; other processes wait."""
    name = f"lowtide_{NAME}"
    versions = (_SOURCE.read_text(), torch.__version__, sys.version, *_FLAGS)
    folder = _BUILD / f"{NAME}-{hashlib.sha256(repr(versions).encode()).hexdigest()[:16]}"
    library = folder / f"{name}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go of by the system when this process ends, however it ends
        if not library.exists():
            unfinished = library.with_suffix(".unfinished")
            includes = [f"-I{path}" for path in (*include_paths(), sysconfig.get_path("include"))]
            libraries = [f"-L{path}" for path in library_paths()]
            command = [
                compiler() or "c++",
                *_FLAGS,
                f"-DTORCH_EXTENSION_NAME={name}",
                *includes,
                str(_SOURCE),
                *libraries,
            ]
            names = ("c10", "torch_cpu", "torch", "torch_python")
            subprocess.run([*command, *(f"-l{each}" for each in names), "-o", str(unfinished)], check=True)
            unfinished.rename(library)
    return library


@functools.cache
def extension() -> Any:
    """The compiled device, registered with torch."""
    library = _built()
    spec = importlib.util.spec_from_file_location(library.stem, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch._register_device_module(NAME, _face(module))
    kernels.register()
    # The threads of backwards start with the first one; a process that ends before they have started is aborted.
    for device in range(DEVICES):
        torch.ones(1, device=f"{NAME}:{device}", requires_grad=True).sum().backward()
    return module


def is_there() -> bool:
    """Whether the device has been registered in this process."""
    return extension.cache_info().currsize > 0


class _Device:
    """The context in which a device is the current one."""

    def __init__(self, device: Any) -> None:
        self._index = torch._utils._get_device_index(device, optional=True)
        self._before = -1

    def __enter__(self) -> None:
        self._before = extension().exchange_device(self._index)

    def __exit__(self, *_: object) -> None:
        extension().exchange_device(self._before)


def _face(module: Any) -> types.ModuleType:
    """`torch.tide`: what torch asks of a backend in Python, as `torch.cuda` has it."""
    face = types.ModuleType(f"torch.{NAME}")
    generators = tuple(module.default_generator(k) for k in range(DEVICES))

    def generator(device: Any = NAME) -> torch.Generator:
        device = torch.device(device) if isinstance(device, str) else device
        index = device if isinstance(device, int) else device.index
        found: torch.Generator = generators[module.exchange_device(-1) if index is None else index]
        return found

    def seed_all(seed: int) -> None:
        for each in generators:
            each.manual_seed(seed)

    for name, thing in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: DEVICES,
        "current_device": lambda: module.exchange_device(-1),
        "set_device": lambda device: module.exchange_device(torch._utils._get_device_index(device)),
        "device": _Device,
        "default_generators": generators,
        "get_rng_state": lambda device=NAME: generator(device).get_state(),
        "set_rng_state": lambda state, device=NAME: generator(device).set_state(state),
        "manual_seed": lambda seed: generator().manual_seed(seed),
        "manual_seed_all": seed_all,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "synchronize": torch.accelerator.synchronize,
    }.items():
        setattr(face, name, thing)
    return face


def allocated(device: int = 0) -> int:
    """Bytes in use."""
    return torch.accelerator.memory_allocated(device)


@contextmanager
def limited(extra: int, device: int = 0) -> Iterator[None]:
    """Inside, the allocator refuses what is more than this beyond what is in use now."""
    extension().set_limit(device, allocated(device) + extra)
    try:
        yield
    finally:
        extension().set_limit(device, 0)


class Watch:
    """What the block made the host wait for, and the bytes that it took at its worst moment."""

    def __init__(self, device: int = 0) -> None:
        self._device = device
        self.counts: dict[str, int] = {}
        self.peak = 0  # bytes beyond those at the beginning

    def __enter__(self) -> Watch:
        self._counts = extension().counts(self._device)
        torch.accelerator.reset_peak_memory_stats(self._device)
        self._before = allocated(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        self.counts = {name: count - self._counts[name] for name, count in extension().counts(self._device).items()}
        self.peak = torch.accelerator.max_memory_allocated(self._device) - self._before

    @staticmethod
    @contextmanager
    def nothing() -> Iterator[Watch]:
        """A watch for a device that counts nothing."""
        yield Watch()

    @property
    def waits(self) -> int:
        """How often the host had to wait for the device."""
        return sum(self.counts.get(name, 0) for name in ("reads", "to_host", "syncs"))
