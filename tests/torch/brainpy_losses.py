# mypy: disable-error-code="attr-defined, no-untyped-call, untyped-decorator"
"""The tutorial's network in brainpy and brainstate, in float64, in a process of its own: the other side of test_parity.

    python brainpy_losses.py <epochs> <output.npz>

Writes the weights it began with, its inputs and labels, and every loss; and for single neurons with soft and hard reset
the currents, potentials, spikes, and gradients of a weighted sum of both with respect to the currents.
"""

from __future__ import annotations

import sys
from typing import Any

import brainpy
import brainstate
import braintools
import brainunit as u
import jax
import numpy as np

jax.config.update("jax_enable_x64", True)
brainstate.environ.set(precision=64)

Arrays = dict[str, Any]


class SNN(brainstate.nn.Module):
    def __init__(self, n_in: int, n_rec: int, n_out: int) -> None:
        super().__init__()
        self.i2r = brainstate.nn.Sequential(
            brainstate.nn.Linear(
                n_in,
                n_rec,
                w_init=braintools.init.KaimingNormal(unit=u.mA),
                b_init=braintools.init.ZeroInit(unit=u.mA),
            ),
            brainpy.state.Expon(n_rec, tau=5.0 * u.ms, g_initializer=braintools.init.Constant(0.0 * u.mA)),
        )
        self.r = brainpy.state.LIF(
            n_rec,
            tau=20.0 * u.ms,
            V_rest=0.0 * u.mV,
            V_reset=0.0 * u.mV,
            V_th=1.0 * u.mV,
            spk_fun=braintools.surrogate.ReluGrad(),
        )
        self.r2o = brainstate.nn.Linear(n_rec, n_out, w_init=braintools.init.KaimingNormal())
        self.o = brainpy.state.Expon(n_out, tau=10.0 * u.ms, g_initializer=braintools.init.Constant(0.0))

    def update(self, spike: Any) -> Any:
        return self.o(self.r2o(self.r(self.i2r(spike))))


def tutorial(epochs: int) -> Arrays:
    n_in, n_rec, n_out = 80, 8, 2
    num_step, num_sample = 400, 64
    dt = brainstate.environ.get_dt()
    x_data = (brainstate.random.rand(num_step, num_sample, n_in) < 5.0 * u.Hz * dt).astype(float)
    y_data = u.math.asarray(brainstate.random.rand(num_sample) < 0.5, dtype=int)
    net = SNN(n_in, n_rec, n_out)
    optimizer = braintools.optim.Adam(lr=2e-3)
    weights = net.states(brainstate.ParamState)
    optimizer.register_trainable_weights(weights)
    first, last = net.i2r[0].weight.value, net.r2o.weight.value
    arrays = {
        "x": np.asarray(x_data).astype(bool),
        "y": np.asarray(y_data),
        "enter.weight": np.asarray(first["weight"].to_decimal(u.mA)),
        "enter.bias": np.asarray(first["bias"].to_decimal(u.mA)),
        "leave.weight": np.asarray(last["weight"]),
        "leave.bias": np.asarray(last["bias"]),
    }

    def loss_fn() -> Any:
        preds = brainstate.transform.checkpointed_for_loop(net.update, x_data, base=16)
        preds = u.math.mean(preds, axis=0)
        return braintools.metric.softmax_cross_entropy_with_integer_labels(preds, y_data).mean()

    @brainstate.transform.jit
    def train_step() -> Any:
        brainstate.nn.init_all_states(net, batch_size=num_sample)
        grads, loss = brainstate.transform.grad(loss_fn, weights, return_value=True)()
        optimizer.update(grads)
        return loss

    return arrays | {"losses": np.array([float(train_step()) for _ in range(epochs)])}


def neurons(reset: str) -> Arrays:
    rng = np.random.default_rng(3)
    current, on_v, on_spikes = (rng.normal(1.0, 1.0, (60, 6)) for _ in range(3))
    cell = brainpy.state.LIF(
        6,
        R=1.5 * u.ohm,
        tau=4.0 * u.ms,
        V_rest=0.1 * u.mV,
        V_reset=-0.2 * u.mV,
        V_th=0.7 * u.mV,
        V_initializer=braintools.init.Constant(0.1 * u.mV),
        spk_fun=braintools.surrogate.ReluGrad(),
        spk_reset=reset,
    )

    def run(values: Any) -> Any:
        brainstate.nn.init_all_states(cell)

        def step(value: Any) -> Any:
            spikes = cell.update(value * u.mA)
            return cell.V.value.to_decimal(u.mV), spikes

        v, spikes = brainstate.transform.for_loop(step, values)
        return (v * on_v + spikes * on_spikes).sum(), (v, spikes)

    gradient, (v, spikes) = jax.grad(run, has_aux=True)(jax.numpy.asarray(current))
    named = {"current": current, "on_v": on_v, "on_spikes": on_spikes, "v": v, "spikes": spikes, "gradient": gradient}
    return {f"{reset}.{name}": np.asarray(value) for name, value in named.items()}


def main(epochs: int, path: str) -> None:
    brainstate.random.seed(11)
    with brainstate.environ.context(dt=1.0 * u.ms):
        arrays = tutorial(epochs) | neurons("soft") | neurons("hard")
    np.savez(path, allow_pickle=False, **arrays)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
