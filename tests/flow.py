"""Which files of the package a call passes, in order, and which pairs of them call both ways.

`python -m tests.flow NAME` runs one of the calls below in a process of its own, where nothing is cached, and prints
what it found as JSON. `test_layout.py` holds the limits.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import lowtide

_ROOT = str(Path(lowtide.__file__).parent) + "/"


def flow(call: Callable[[], Any]) -> dict[str, list[Any]]:
    """The files that a call passes, and the pairs of them in which each calls the other."""
    files: list[str] = []
    edges: set[tuple[str, str]] = set()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(_ROOT):
            return
        if name not in files:
            files.append(name)
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(_ROOT):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != name:
            edges.add((caller.f_code.co_filename, name))

    sys.setprofile(watch)
    threading.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    pairs = {(a, b) for a, b in edges if a < b and (b, a) in edges}
    return {
        "files": [name.removeprefix(_ROOT) for name in files],
        "pairs": [[a.removeprefix(_ROOT), b.removeprefix(_ROOT)] for a, b in sorted(pairs)],
    }


def for_loop() -> Callable[[], Any]:
    import torch
    from torch import nn

    import lowtide.torch as lt

    net = nn.Sequential(nn.Linear(8, 8), lt.spiking.LIF(tau=20.0), nn.Linear(8, 2), lt.spiking.Expon(tau=10.0))
    xs = torch.rand(60, 4, 8)
    return lambda: lt.checkpointed_for_loop(net, xs, budget="40KiB").sum().backward()


def checkpoint() -> Callable[[], Any]:
    import torch
    from torch import nn

    import lowtide.torch as lt

    block = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.1))
    x = torch.randn(4, 16, requires_grad=True)
    return lambda: lt.checkpoint(block, x).sum().backward()


def sequential() -> Callable[[], Any]:
    import torch
    from torch import nn

    import lowtide.torch as lt

    layers = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(8)])
    x = torch.randn(64, 32, requires_grad=True)
    return lambda: lt.sequential(layers, x, budget="60%").sum().backward()


def auto_checkpoint() -> Callable[[], Any]:
    import torch
    from torch import nn

    import lowtide.torch as lt

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)

        def forward(self, x: torch.Tensor) -> Any:
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList(Block() for _ in range(6)), nn.Linear(32, 4)

        def forward(self, x: torch.Tensor) -> Any:
            for block in self.blocks:
                x = block(x)
            return self.head(x).square().mean()

    model, x = Model(), torch.randn(512, 32)

    def run() -> None:
        lt.auto_checkpoint(model, x, peak="1.3MiB")
        model(x).backward()

    return run


def jax_scan() -> Callable[[], Any]:
    import jax
    from jax import numpy as jnp

    import lowtide.jax as lt

    def loss(w: Any, xs: Any) -> Any:
        start = jnp.zeros((4, 8))
        _, ys = lt.checkpointed_scan(lambda h, x: (jnp.tanh(h @ w + x), h.sum()), start, xs, budget="8KiB")
        return ys.sum()

    return lambda: jax.jit(jax.grad(loss))(jnp.eye(8), jnp.ones((50, 4, 8)))


CALLS = {call.__name__: call for call in (for_loop, checkpoint, sequential, auto_checkpoint, jax_scan)}

if __name__ == "__main__":
    print(json.dumps(flow(CALLS[sys.argv[1]]())))
