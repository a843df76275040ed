"""A group of processes on this machine that train together."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn


def in_processes(count: int, work: Callable[[int], None], folder: Path) -> None:
    """Run `work(rank)` in this many processes, which are one group; what fails there is raised here."""
    if not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    names = [name for _, name in socket.if_nameindex()]
    interface = "lo" if "lo" in names else names[0]
    spawn(_joined, args=(count, work, str(folder), interface), nprocs=count)


def _joined(rank: int, count: int, work: Callable[[int], None], folder: str, interface: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    warnings.simplefilter("ignore")  # gloo warns of names that it cannot resolve
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=count)
    work(rank)
    dist.barrier()
    os._exit(0)  # gloo's threads now and then abort a process that ends in order, with or without checkpoints


def local(gradient: torch.Tensor) -> torch.Tensor:
    """A copy of a gradient, or of the shard of it that this process has."""
    part: Any = getattr(gradient, "_local_tensor", gradient)
    return part.clone()  # type: ignore[no-any-return]
