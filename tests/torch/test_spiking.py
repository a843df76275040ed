"""Spike functions and neurons against their equations, written out without autograd's help where that is possible."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.torch import spiking

POINTS = [-1e9, -3.0, -1.0, -0.7, -0.25, -1e-12, -0.0, 0.0, 5e-324, 1e-12, 0.1, 0.5, 0.999, 1.0, 1.5, 4.0, 1e9]


def _logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


SLOPES: list[tuple[spiking.Surrogate, Callable[[float], float]]] = [
    (spiking.ReluGrad(), lambda x: max(0.0, 0.3 - 0.3 * abs(x))),
    (spiking.ReluGrad(alpha=0.7, width=2.0), lambda x: max(0.0, 1.4 - 0.7 * abs(x))),
    (spiking.Sigmoid(), lambda x: 4 * _logistic(4 * x) * _logistic(-4 * x)),
    (spiking.Sigmoid(alpha=1.5), lambda x: 1.5 * _logistic(1.5 * x) * _logistic(-1.5 * x)),
    (spiking.ATan(), lambda x: 1 / (1 + (math.pi * x) ** 2)),
    (spiking.ATan(alpha=3.0), lambda x: 1.5 / (1 + (math.pi / 2 * 3 * x) ** 2)),
    (spiking.Triangle(), lambda x: max(0.0, 1 - abs(x))),
    (spiking.Triangle(width=0.5), lambda x: max(0.0, 1 - abs(x) / 0.5) / 0.5),
    (spiking.SuperSpike(), lambda x: 1 / (1 + 10 * abs(x)) ** 2),
    (spiking.SuperSpike(beta=100.0), lambda x: 1 / (1 + 100 * abs(x)) ** 2),
]


def _name(value: object) -> str:
    if not isinstance(value, spiking.Surrogate):
        return ""
    parameters = [f"{k}={v}" for k, v in vars(value).items() if isinstance(v, float)]
    return f"{type(value).__name__}({', '.join(parameters)})"


@pytest.mark.parametrize(("spike", "slope"), SLOPES, ids=_name)
def test_spikes_are_a_step_and_slopes_as_documented(spike: spiking.Surrogate, slope: Callable[[float], float]) -> None:
    x = torch.tensor(POINTS, dtype=torch.float64, requires_grad=True)
    spikes = spike(x)
    assert spikes.tolist() == [1.0 if point >= 0 else 0.0 for point in POINTS]
    incoming = torch.linspace(-2, 3, len(POINTS), dtype=torch.float64)
    (gradient,) = torch.autograd.grad(spikes, x, incoming)
    expected = [g * slope(point) for g, point in zip(incoming.tolist(), POINTS, strict=True)]
    assert gradient.tolist() == pytest.approx(expected, rel=1e-13, abs=1e-15)
    assert spike.slope(x).tolist() == pytest.approx([slope(point) for point in POINTS], rel=1e-13, abs=1e-15)


@pytest.mark.parametrize(("spike", "slope"), SLOPES, ids=_name)
def test_spikes_have_the_dtype_and_shape_of_what_they_come_from(
    spike: spiking.Surrogate, slope: Callable[[float], float]
) -> None:
    assert slope(0.0) > 0
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = torch.tensor([[-1.0, 0.0, 2.0]], dtype=dtype, requires_grad=True)
        spikes = spike(x)
        assert spikes.dtype == dtype
        assert spikes.tolist() == [[0.0, 1.0, 1.0]]
        (gradient,) = torch.autograd.grad(spikes.sum(), x)
        assert gradient.dtype == dtype
        assert gradient.shape == x.shape


@pytest.mark.parametrize(
    ("spike", "area"),
    [(spiking.Triangle(0.3), 1.0), (spiking.Sigmoid(), 1.0), (spiking.ATan(), 1.0), (spiking.ReluGrad(), 0.3)],
    ids=_name,
)
def test_the_area_under_a_slope(spike: spiking.Surrogate, area: float) -> None:
    x = torch.linspace(-2000, 2000, 4_000_001, dtype=torch.float64)
    assert float(torch.trapezoid(spike.slope(x), x)) == pytest.approx(area, rel=1e-3)


def test_a_slope_can_be_differentiated_again() -> None:
    x = torch.tensor([-0.4, 0.2], dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(spiking.ATan()(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    expected = [-2 * math.pi**2 * point / (1 + (math.pi * point) ** 2) ** 2 for point in x.tolist()]
    assert second.tolist() == pytest.approx(expected, rel=1e-13)


def test_a_surrogate_must_say_its_slope() -> None:
    with pytest.raises(NotImplementedError):
        spiking.Surrogate().slope(torch.zeros(1))


PARAMETERS: list[dict[str, Any]] = [
    {},
    {"v_threshold": 0.7, "v_reset": -0.2, "v_rest": 0.1, "resistance": 1.5},
    {"v_threshold": -50.0, "v_reset": -60.0, "v_rest": -58.0, "resistance": 12.0},
]


def _lif(current: list[float], tau: float, soft: bool, parameters: dict[str, float]) -> tuple[list[float], list[float]]:
    """One neuron in Python floats: the potentials before reset, and the spikes."""
    threshold, reset = parameters.get("v_threshold", 1.0), parameters.get("v_reset", 0.0)
    rest, resistance = parameters.get("v_rest", 0.0), parameters.get("resistance", 1.0)
    v, potentials, spikes = rest, [], []
    for value in current:
        if v >= threshold:
            v = v - (threshold - reset) if soft else reset
        v = rest + resistance * value + (v - rest - resistance * value) * math.exp(-1 / tau)
        potentials.append(v)
        spikes.append(1.0 if v >= threshold else 0.0)
    return potentials, spikes


@pytest.mark.parametrize("soft", [True, False], ids=["soft", "hard"])
@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_neurons_follow_their_equations(soft: bool, parameters: dict[str, Any]) -> None:
    torch.manual_seed(2)
    current = torch.rand(80, dtype=torch.float64) * 3
    cell = spiking.LIF(4.0, soft_reset=soft, **parameters)
    found = []
    for value in current:
        z = cell(value)
        assert cell.v is not None
        found.append((cell.v.item(), z.item()))
    potentials, spikes = _lif(current.tolist(), 4.0, soft, parameters)
    assert 3 < sum(spikes) < 77
    assert [z for _, z in found] == spikes
    assert [v for v, _ in found] == pytest.approx(potentials, rel=1e-12)


def _straight_through(x: torch.Tensor) -> torch.Tensor:
    """ReluGrad without a Function of its own: a constant step plus a line through zero with the slope."""
    slope = (0.3 - 0.3 * x.detach().abs()).clamp(min=0)
    return (x >= 0).to(x.dtype).detach() + slope * (x - x.detach())


@pytest.mark.parametrize("soft", [True, False], ids=["soft", "hard"])
@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_gradients_of_neurons_follow_their_equations(soft: bool, parameters: dict[str, Any]) -> None:
    torch.manual_seed(3)
    currents = (torch.rand(30, 5, dtype=torch.float64) * 3).requires_grad_()
    weights = torch.randn(2, 30, 5, dtype=torch.float64)
    cell = spiking.LIF(4.0, soft_reset=soft, **parameters)
    threshold, reset = parameters.get("v_threshold", 1.0), parameters.get("v_reset", 0.0)
    rest, resistance = parameters.get("v_rest", 0.0), parameters.get("resistance", 1.0)
    span, leak = threshold - reset, 1 - math.exp(-1 / 4)
    v = torch.full((5,), rest, dtype=torch.float64)
    losses: list[torch.Tensor] = [torch.zeros(()), torch.zeros(())]
    for current, (on_v, on_z) in zip(currents, weights.unbind(1), strict=True):
        z = cell(current)
        assert cell.v is not None
        losses[0] = losses[0] + (cell.v * on_v + z * on_z).sum()
        last = _straight_through((v - threshold) / span)
        v = v - (threshold - reset) * last if soft else v - (v.detach() - reset) * last
        v = v + leak * (-v + rest + resistance * current)
        losses[1] = losses[1] + (v * on_v + _straight_through((v - threshold) / span) * on_z).sum()
    found, expected = (torch.autograd.grad(loss, currents)[0] for loss in losses)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_synapses_decay_and_then_take_in() -> None:
    cell = spiking.Expon(tau=5.0, dt=0.5)
    inputs, g = [1.0, 0.0, 2.0, 0.0, 0.0], 0.0
    for value in inputs:
        g = g * math.exp(-0.1) + value
        assert cell(torch.tensor([value], dtype=torch.float64)).item() == pytest.approx(g, rel=1e-15)


def test_reset_forgets_every_state() -> None:
    net = nn.Sequential(nn.Sequential(spiking.Expon(5.0)), spiking.LIF(20.0, v_rest=0.25))
    x = torch.rand(3, 4)
    first = net(x)
    potential = net.get_submodule("1").v
    assert torch.equal(first, torch.zeros(3, 4))
    net(x)
    spiking.reset(net)
    assert net.get_submodule("0.0").g is None
    assert net.get_submodule("1").v is None
    net(x)
    assert torch.equal(net.get_submodule("1").v, potential)  # type: ignore[arg-type]
