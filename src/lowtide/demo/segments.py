"""A network in segments: torch's two with equal numbers of layers, and Lowtide within the memory that those take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import pairwise
from time import process_time
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

import lowtide.torch as lt
from lowtide.demo import tensors
from lowtide.demo.contest import PLAIN, Contest, Tool, with_lowtide
from lowtide.plan import Plan, Receipt

WIDTHS = (784, *[256] * 4, *[192] * 4, *[128] * 4, *[64] * 4, 10)
SMALL_WIDTHS = (32, *[24] * 4, *[12] * 4, 10)


@contextmanager
def contest(*, quick: bool) -> Iterator[Contest]:
    """The example: a classifier whose layers get smaller, with a batch of 2,048; a small one if `quick`."""
    with tensors.one_thread():
        widths, batch = (SMALL_WIDTHS, 1024) if quick else (WIDTHS, 2048)
        layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.GELU())]
        net = nn.Sequential(*layers[:-1])
        x, cotangent = torch.randn(batch, widths[0]), torch.randn(batch, widths[-1])

        def gradients(run: Callable[[torch.Tensor], Any]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
            output = run(x)
            return output.detach(), torch.autograd.grad(output, list(net.parameters()), cotangent)

        torchs = partial(gradients, partial(checkpoint_sequential, net, 2, use_reentrant=False))

        @cache
        def torchs_peak() -> int:
            return tensors.peak_of(torchs)

        works: dict[Tool, tensors.Work] = {
            PLAIN: partial(gradients, net),
            Tool("torch, 2 segments"): torchs,
            with_lowtide("2 segments"): partial(gradients, partial(lt.checkpoint_sequential, net, 2)),
            with_lowtide("torch's peak"): lambda: gradients(partial(lt.sequential, net, budget=torchs_peak())),
            with_lowtide("budget=40%"): partial(gradients, partial(lt.sequential, net, budget="40%")),
        }

        def page() -> tuple[Plan, Receipt | None]:
            plan = lt.plan_sequential(net, x, budget=torchs_peak())
            return plan, tensors.receipt_of(partial(gradients, partial(lt.sequential, net, plan=plan)))

        yield Contest(
            f"A network of {len(net)} layers in segments, batch {batch:,}, PyTorch",
            f"{tensors.NOTE} Lowtide's first budget is what torch's two segments were just measured to take.",
            {tool: partial(tensors.contestant, work) for tool, work in works.items()},
            process_time,
            repeats=1 if quick else 15,
            exact=True,
            page=page,
        )
