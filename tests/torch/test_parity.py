"""The spiking network of brainstate's tutorial, in PyTorch with Lowtide and in brainpy: the same losses in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lowtide.torch as lt
from examples.spiking_rollout import SpikingNet, lowtide_loss
from lowtide.torch import spiking

FEW, MANY = 20, 120  # epochs
Arrays = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def brainpy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Arrays]:
    """What brainpy computed, in a process of its own: float64 is a setting of the whole process in jax."""

    @cache
    def computed(epochs: int) -> Arrays:
        path = tmp_path_factory.mktemp("brainpy") / "run.npz"
        script = Path(__file__).with_name("brainpy_losses.py")
        command = [sys.executable, str(script), str(epochs), str(path)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=os.environ | {"JAX_PLATFORMS": "cpu"}
        )
        assert done.returncode == 0, done.stderr
        with np.load(path) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}

    return computed


@pytest.mark.long
@pytest.mark.parametrize("epochs", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_the_losses_of_the_tutorial_agree(
    epochs: int, brainpy: Callable[[int], Arrays], record_property: Callable[[str, object], None]
) -> None:
    theirs = brainpy(epochs)
    net = SpikingNet().double()
    with torch.no_grad():
        for name in ("enter", "leave"):
            linear = net.get_submodule(name)
            assert isinstance(linear, torch.nn.Linear)
            linear.weight.copy_(theirs[f"{name}.weight"].t())  # brainstate computes xW, torch xW^T
            linear.bias.copy_(theirs[f"{name}.bias"])
    spikes, labels = theirs["x"].double(), theirs["y"]
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    losses = []
    for _ in range(epochs):
        optimizer.zero_grad()
        loss = lowtide_loss(net, spikes, labels, base=20)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    expected = theirs["losses"]
    worst = float((torch.tensor(losses, dtype=torch.float64) - expected).abs().max())
    record_property(
        "figure",
        f"tutorial in float64, {epochs} losses from {losses[0]:.4f} to {losses[-1]:.4f}: "
        f"at most {worst:.1e} from brainpy",
    )
    assert losses[0] == pytest.approx(np.log(2), abs=1e-12)  # the network begins silent
    assert losses[-1] < 0.68
    assert worst <= 1e-12


@pytest.mark.long
@pytest.mark.parametrize("reset", ["soft", "hard"])
@pytest.mark.parametrize("knobs", [{"base": 7}, {"checkpoints": 3}], ids=str)
def test_neurons_agree_in_values_and_gradients(
    reset: str, knobs: dict[str, Any], brainpy: Callable[[int], Arrays]
) -> None:
    current, on_v, on_spikes, v, spikes, gradient = (
        brainpy(FEW)[f"{reset}.{name}"] for name in ("current", "on_v", "on_spikes", "v", "spikes", "gradient")
    )
    cell = spiking.LIF(tau=4.0, v_threshold=0.7, v_reset=-0.2, v_rest=0.1, resistance=1.5, soft_reset=reset == "soft")

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = cell(x)
        assert cell.v is not None
        return cell.v, z

    xs = current.requires_grad_()
    found_v, found_spikes = lt.checkpointed_for_loop(step, xs, **knobs)
    assert 50 < float(spikes.sum()) < 300  # some spike, some do not
    assert torch.equal(found_spikes, spikes)
    torch.testing.assert_close(found_v, v, rtol=0, atol=1e-14)
    (found,) = torch.autograd.grad((found_v * on_v + found_spikes * on_spikes).sum(), xs)
    torch.testing.assert_close(found, gradient, rtol=0, atol=1e-13)
