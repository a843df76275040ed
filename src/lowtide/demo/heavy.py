"""A heavy function called many times: each call saves 100 tensors; checkpointed, only one call's are alive at once.

The original example adds, and an addition saves nothing for its backward. Here it multiplies, which saves its inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import process_time
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import lowtide.torch as lt
from lowtide.demo import tensors
from lowtide.demo.contest import PLAIN, Contest, Tool, with_lowtide
from lowtide.plan import Plan, Receipt

WIDTH = 1024
Results = tuple[torch.Tensor, Sequence[torch.Tensor]]


@contextmanager
def contest(*, quick: bool) -> Iterator[Contest]:
    """The example: 150 calls of 100 operations, or fewer if `quick`."""
    with tensors.one_thread():
        calls, operations, budget = (12, 10, "256KiB") if quick else (150, 100, "1MiB")
        x0 = torch.linspace(-1, 2, WIDTH).requires_grad_()
        a = torch.tensor(1.0001, requires_grad=True)

        def heavy_function(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
            for _ in range(operations):
                x = x * a
            return x

        def step(x: torch.Tensor, _: None) -> tuple[torch.Tensor, None]:
            return heavy_function(x, a), None

        def finish(x: torch.Tensor) -> Results:
            return x.detach(), torch.autograd.grad(x.sum(), (x0, a))

        def model(call: Any) -> Results:
            x = x0
            for _ in range(calls):
                x = call(x, a)
            return finish(x)

        def scan(**knobs: Any) -> Results:
            return finish(lt.checkpointed_scan(step, x0, length=calls, **knobs)[0])

        works: dict[Tool, tensors.Work] = {
            PLAIN: partial(model, heavy_function),
            Tool("torch checkpoint"): partial(model, partial(checkpoint, heavy_function, use_reentrant=False)),
            with_lowtide("checkpoint"): partial(model, partial(lt.checkpoint, heavy_function)),
            with_lowtide(f"budget={budget}"): partial(scan, budget=budget),
        }

        def page() -> tuple[Plan, Receipt | None]:
            plan = lt.plan_scan(step, x0, length=calls, budget=budget)
            return plan, tensors.receipt_of(partial(scan, plan=plan))

        yield Contest(
            f"A heavy model: {calls:,} calls of {operations} x = x * a, PyTorch",
            tensors.NOTE,
            {tool: partial(tensors.contestant, work) for tool, work in works.items()},
            process_time,
            repeats=1 if quick else 3,
            exact=True,
            page=page,
        )
