"""Spiking neurons and surrogate gradients, small enough to read: LIF, Expon, and the spike functions.

The neurons are modules that keep their state in an attribute, as most spiking libraries do, so that a network of them
is a step function: `checkpointed_for_loop(net, spikes)`. Call `reset(net)` before a new sequence. The equations are
those of brainpy's `LIF` (soft reset) and `Expon`, with which they agree in float64.

A spike function returns 1 where x >= 0 and 0 elsewhere; the backward uses a surrogate of the derivative instead.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

__all__ = [
    "ATan",
    "Expon",
    "LIF",
    "ReluGrad",
    "Sigmoid",
    "SuperSpike",
    "Surrogate",
    "Triangle",
    "expon_step",
    "lif_step",
    "reset",
]
__dir__ = sorted(__all__).copy  # what `dir` and tab completion show


class _Spike(torch.autograd.Function):
    """Heaviside forward; backward multiplies by the surrogate, a function of x alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, surrogate: Surrogate) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.surrogate = surrogate
        return (x >= 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * ctx.surrogate.slope(x), None


class Surrogate(nn.Module):
    """A spike function: 1 where x >= 0, with `slope(x)` in place of its derivative."""

    def slope(self, x: torch.Tensor) -> torch.Tensor:
        """The derivative at x that the backward uses."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The spikes: 1 where x >= 0, else 0."""
        spikes: torch.Tensor = _Spike.apply(x, self)  # type: ignore[no-untyped-call]  # torch's own
        return spikes


class ReluGrad(Surrogate):
    """max(0, alpha*width - alpha*|x|): a triangle of height alpha*width over [-width, width]."""

    def __init__(self, alpha: float = 0.3, width: float = 1.0) -> None:
        super().__init__()
        self.alpha = alpha
        self.width = width

    def slope(self, x: torch.Tensor) -> torch.Tensor:
        """The surrogate derivative at x."""
        return torch.clamp(self.alpha * self.width - x.abs() * self.alpha, min=0)


class Sigmoid(Surrogate):
    """alpha * s * (1 - s) with s = sigmoid(alpha*x)."""

    def __init__(self, alpha: float = 4.0) -> None:
        super().__init__()
        self.alpha = alpha

    def slope(self, x: torch.Tensor) -> torch.Tensor:
        """The surrogate derivative at x."""
        s = torch.sigmoid(self.alpha * x)
        return self.alpha * s * (1 - s)


class ATan(Surrogate):
    """alpha / 2 / (1 + (pi/2 * alpha * x)^2)."""

    def __init__(self, alpha: float = 2.0) -> None:
        super().__init__()
        self.alpha = alpha

    def slope(self, x: torch.Tensor) -> torch.Tensor:
        """The surrogate derivative at x."""
        return self.alpha / 2 / (1 + (math.pi / 2 * self.alpha * x) ** 2)


class Triangle(Surrogate):
    """max(0, 1 - |x| / width) / width: a triangle of area 1 over [-width, width]."""

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        self.width = width

    def slope(self, x: torch.Tensor) -> torch.Tensor:
        """The surrogate derivative at x."""
        return torch.clamp(1 - x.abs() / self.width, min=0) / self.width


class SuperSpike(Surrogate):
    """1 / (1 + beta*|x|)^2 (Zenke and Ganguli, 2018)."""

    def __init__(self, beta: float = 10.0) -> None:
        super().__init__()
        self.beta = beta

    def slope(self, x: torch.Tensor) -> torch.Tensor:
        """The surrogate derivative at x."""
        return 1 / (1 + self.beta * x.abs()) ** 2


def expon_step(g: torch.Tensor, x: torch.Tensor, decay: float) -> torch.Tensor:
    """One step of an exponential synapse: the conductance decays, then x is added."""
    return g * decay + x


def lif_step(
    v: torch.Tensor,
    current: torch.Tensor,
    *,
    spike: Surrogate,
    leak: float,
    v_threshold: float = 1.0,
    v_reset: float = 0.0,
    v_rest: float = 0.0,
    resistance: float = 1.0,
    soft_reset: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of a leaky integrate-and-fire neuron: the new membrane potential, before reset, and its spikes.

    The last potential is reset first, where it had reached the threshold: by subtraction, or with `soft_reset=False` to
    `v_reset`. Then it leaks towards `v_rest` and integrates. `leak` is 1 - exp(-dt/tau).
    """
    span = v_threshold - v_reset
    fired = spike((v - v_threshold) / span)
    v = v - span * fired if soft_reset else v - (v.detach() - v_reset) * fired
    v = v + leak * (-v + v_rest + resistance * current)
    return v, spike((v - v_threshold) / span)


class Expon(nn.Module):
    """An exponential synapse with time constant `tau`, which keeps its conductance in `g`."""

    def __init__(self, tau: float, dt: float = 1.0) -> None:
        super().__init__()
        self.decay = math.exp(-dt / tau)
        self.g: torch.Tensor | None = None

    def reset(self) -> None:
        """Discard the state."""
        self.g = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Let the conductance decay, add x to it, and return it."""
        self.g = expon_step(torch.zeros_like(x) if self.g is None else self.g, x, self.decay)
        return self.g


class LIF(nn.Module):
    """Leaky integrate-and-fire neurons with time constant `tau`, which keep their membrane potential in `v`."""

    def __init__(
        self,
        tau: float,
        dt: float = 1.0,
        *,
        v_threshold: float = 1.0,
        v_reset: float = 0.0,
        v_rest: float = 0.0,
        resistance: float = 1.0,
        soft_reset: bool = True,
        spike: Surrogate | None = None,
    ) -> None:
        super().__init__()
        self.leak = -math.expm1(-dt / tau)
        self.v_threshold = v_threshold
        self.v_reset = v_reset
        self.v_rest = v_rest
        self.resistance = resistance
        self.soft_reset = soft_reset
        self.spike = spike if spike is not None else ReluGrad()
        self.v: torch.Tensor | None = None

    def reset(self) -> None:
        """Discard the state."""
        self.v = None

    def forward(self, current: torch.Tensor) -> torch.Tensor:
        """Integrate the current and return the spikes."""
        self.v, spikes = lif_step(
            torch.full_like(current, self.v_rest) if self.v is None else self.v,
            current,
            spike=self.spike,
            leak=self.leak,
            v_threshold=self.v_threshold,
            v_reset=self.v_reset,
            v_rest=self.v_rest,
            resistance=self.resistance,
            soft_reset=self.soft_reset,
        )
        return spikes


def reset(net: nn.Module) -> None:
    """Discard the state of every `LIF` neuron and `Expon` synapse in the network."""
    for module in net.modules():
        if isinstance(module, Expon | LIF):
            module.reset()
