# mypy: disable-error-code="attr-defined, no-untyped-call"
"""brainstate's tutorial on long rollouts: its network, sizes and loss, with several loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import brainpy
import brainstate
import braintools
import brainunit as u

import lowtide.brainstate as lt
from lowtide.demo import programs
from lowtide.demo.contest import PLAIN, Contest, Contestant, Tool, with_lowtide
from lowtide.plan import Plan

BASE, SAMPLES = 16, 64


class Network(brainstate.nn.Module):
    """Linear, synapse, spiking neurons, linear, synapse: 80 inputs, 8 neurons, 2 classes."""

    def __init__(self) -> None:
        super().__init__()
        init = braintools.init
        enter = brainstate.nn.Linear(
            80, 8, w_init=init.KaimingNormal(scale=32.0, unit=u.mA), b_init=init.ZeroInit(unit=u.mA)
        )  # 16 times the tutorial's variance, with which the untrained network is silent and most gradients are 0
        synapse = brainpy.state.Expon(8, tau=5.0 * u.ms, g_initializer=init.Constant(0.0 * u.mA))
        neurons = brainpy.state.LIF(
            8,
            tau=20.0 * u.ms,
            V_rest=0.0 * u.mV,
            V_reset=0.0 * u.mV,
            V_th=1.0 * u.mV,
            spk_fun=braintools.surrogate.ReluGrad(),
        )
        leave = brainstate.nn.Linear(8, 2, w_init=init.KaimingNormal())
        readout = brainpy.state.Expon(2, tau=10.0 * u.ms, g_initializer=init.Constant(0.0))
        self.layers = brainstate.nn.Sequential(enter, synapse, neurons, leave, readout)

    def update(self, spikes: Any) -> Any:
        """Run one step of 1 ms."""
        return self.layers(spikes)


class Task:
    """The network, input spikes at 5 Hz, and a random class for each sample."""

    def __init__(self, steps: int) -> None:
        brainstate.random.seed(0)
        self.net = Network()
        self.spikes = (brainstate.random.rand(steps, SAMPLES, 80) < 0.005).astype(float)
        self.labels = u.math.asarray(brainstate.random.rand(SAMPLES) < 0.5, dtype=int)

    def contestant(self, loop: Callable[..., Any]) -> Contestant:
        """The contestant that computes gradients with this loop, as a pure function of the States, compiled."""

        def gradients(spikes: Any) -> Any:
            brainstate.nn.init_all_states(self.net, batch_size=SAMPLES)

            def loss() -> Any:
                mean = u.math.mean(loop(self.net.update, spikes), axis=0)
                return braintools.metric.softmax_cross_entropy_with_integer_labels(mean, self.labels).mean()

            return brainstate.transform.grad(loss, self.net.states(brainstate.ParamState))()

        brainstate.nn.init_all_states(self.net, batch_size=SAMPLES)
        pure = brainstate.transform.StatefulFunction(gradients).make_jaxpr(self.spikes)
        values = [state.value for state in pure.get_states(self.spikes)]

        def call(values: Any, spikes: Any) -> Any:
            return pure.jaxpr_call(values, spikes)[1]  # the gradients; the first item is the new values of the States

        return programs.contestant(call, values, self.spikes)

    def page(self) -> tuple[Plan, None]:
        """The plan without an option; there is no receipt."""
        brainstate.nn.init_all_states(self.net, batch_size=SAMPLES)
        return lt.plan_for_loop(self.net.update, self.spikes), None


@contextmanager
def contest(*, quick: bool) -> Iterator[Contest]:
    """The example: the tutorial's 400 steps, or fewer if `quick`."""
    with brainstate.environ.context(dt=1.0 * u.ms):
        steps = 32 if quick else 400
        task = Task(steps)
        loops: dict[Tool, Callable[..., Any]] = {
            PLAIN: brainstate.transform.for_loop,
            Tool(f"brainstate, base={BASE}"): partial(brainstate.transform.checkpointed_for_loop, base=BASE),
            with_lowtide(f"base={BASE}"): partial(lt.checkpointed_for_loop, base=BASE),
            with_lowtide("no knob"): lt.checkpointed_for_loop,
        }
        yield Contest(
            f"brainstate's tutorial, {steps:,} steps",
            programs.NOTE,
            {tool: partial(task.contestant, loop) for tool, loop in loops.items()},
            perf_counter,
            repeats=1 if quick else 60,
            exact=False,
            page=task.page,
        )
