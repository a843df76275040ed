"""A spiking network trained through a rollout, in PyTorch: the network and sizes of brainstate's tutorial.

Every tool sums the outputs as they are computed, because only their mean is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import process_time
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide.torch as lt
from lowtide.demo import tensors
from lowtide.demo.contest import PLAIN, Contest, Tool, with_lowtide
from lowtide.plan import Plan, Receipt

BUDGET = "128KiB"


class Rollout:
    """The network, its inputs and its loss: 80 channels that spike at 5 Hz, 8 neurons, 2 classes, 64 samples."""

    def __init__(self, steps: int) -> None:
        self.enter, self.leave = nn.Linear(80, 8), nn.Linear(8, 2)
        with torch.no_grad():
            # Four times the tutorial's weights, with which the untrained network is silent and most gradients are 0.
            self.enter.weight.normal_(std=4 * math.sqrt(2 / 80))
            self.leave.weight.normal_(std=math.sqrt(2 / 8))
        self.synapse, self.neurons, self.readout = lt.spiking.Expon(5.0), lt.spiking.LIF(20.0), lt.spiking.Expon(10.0)
        self.net = nn.Sequential(self.enter, self.synapse, self.neurons, self.leave, self.readout)
        self.spikes = (torch.rand(steps, 64, 80) < 0.005).float()
        self.labels = (torch.rand(64) < 0.5).long()

    def finish(self, mean: torch.Tensor) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Compute the loss and run the backward; returns the mean output and the gradients."""
        loss = nn.functional.cross_entropy(mean, self.labels)
        return mean.detach(), torch.autograd.grad(loss, list(self.net.parameters()))

    def plain(self) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """The plain loop, as anybody would write it."""
        lt.spiking.reset(self.net)
        return self.finish(self._run(0.0, self.spikes) / len(self.spikes))

    def torchs(self, size: int) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Segments of `size` steps in torch's checkpoint; the state of the neurons has to be passed along."""
        total: Any = 0.0
        states: Any = (None, None, None)
        for part in self.spikes.split(size):
            total, states = checkpoint(self._segment, total, states, part, use_reentrant=False)
        return self.finish(total / len(self.spikes))

    def lowtides(self, **knobs: Any) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """The same loop as one call of Lowtide."""
        lt.spiking.reset(self.net)
        return self.finish(lt.checkpointed_for_loop(self.net, self.spikes, reduce="mean", **knobs))

    def _segment(self, total: Any, states: Any, spikes: torch.Tensor) -> tuple[Any, Any]:
        self.synapse.g, self.neurons.v, self.readout.g = states
        return self._run(total, spikes), (self.synapse.g, self.neurons.v, self.readout.g)

    def _run(self, total: Any, spikes: torch.Tensor) -> Any:
        for x in spikes:
            total = total + self.net(x)
        return total

    def page(self) -> tuple[Plan, Receipt | None]:
        """The plan for the budget, and the receipt of a run of it."""
        lt.spiking.reset(self.net)
        plan = lt.plan_for_loop(self.net, self.spikes, budget=BUDGET, reduce="mean")
        return plan, tensors.receipt_of(partial(self.lowtides, plan=plan))


@contextmanager
def contest(*, quick: bool) -> Iterator[Contest]:
    """The example: the tutorial's 400 steps, or fewer if `quick`."""
    with tensors.one_thread():
        steps = 49 if quick else 400
        base = round(math.sqrt(steps))
        rollout = Rollout(steps)
        works: dict[Tool, tensors.Work] = {
            PLAIN: rollout.plain,
            Tool(f"torch, every {base} steps"): partial(rollout.torchs, base),
            with_lowtide(f"base={base}"): partial(rollout.lowtides, base=base),
            with_lowtide(f"budget={BUDGET}"): partial(rollout.lowtides, budget=BUDGET),
        }
        yield Contest(
            f"A spiking network through {steps:,} steps, PyTorch",
            tensors.NOTE,
            {tool: partial(tensors.contestant, work) for tool, work in works.items()},
            process_time,
            repeats=1 if quick else 12,
            exact=True,
            page=rollout.page,
        )
