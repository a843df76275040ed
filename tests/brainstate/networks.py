# mypy: disable-error-code="untyped-decorator"
"""Steps with States of every kind, each with everything that a loop over it can be seen to do.

A *case* takes a loop, makes its States anew, runs the loop and gives all results: outputs, gradients, and what the
States hold afterwards. The oracle is the same case with brainstate's own plain loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from brainstate.nn import Module

from tests.brainstate.partners import brainstate, transform, u
from tests.jax.networks import QUICK

Loop = Callable[..., Any]
Case = Callable[[Loop], Any]

STEPS = 13
KNOBS: list[dict[str, Any]] = [{}, {"base": 4}, {"checkpoints": 3}, {"budget": "16KiB"}, {"base": 40}]


def inputs(*shape: int, steps: int = STEPS) -> Any:
    return jnp.sin(jnp.arange(steps * max(1, jnp.zeros(shape).size)).reshape(steps, *shape) + 1.0)


def quick(f: Any) -> Any:
    """brainstate's own jit, compiled in a quarter of the time; without it every operation is compiled by itself."""
    return transform.jit(f, compiler_options=QUICK)


class Cell(Module):
    """Weights, a membrane with a unit, a counter, and a trace in a dict."""

    def __init__(self, n: int = 3) -> None:
        super().__init__()
        self.w = brainstate.ParamState({"w": jnp.linspace(-0.5, 0.7, n * n).reshape(n, n), "b": jnp.full(n, 0.1)})
        self.tau = brainstate.ParamState(5.0 * u.ms)
        self.v = brainstate.HiddenState(jnp.full(n, 0.2) * u.mV)
        self.count = brainstate.LongTermState(jnp.int32(0))
        self.trace = brainstate.ShortTermState({"mean": jnp.zeros(n), "first": 0.0})

    def update(self, x: Any) -> Any:
        decay = jnp.exp(-1.0 * u.ms / self.tau.value)
        v = self.v.value / u.mV
        self.v.value = (v * decay + jnp.tanh(x @ self.w.value["w"] + self.w.value["b"] + v)) * u.mV
        self.count.value = self.count.value + 1
        trace = self.trace.value
        self.trace.value = {"mean": 0.9 * trace["mean"] + 0.1 * v, "first": trace["first"] + v[0]}
        return self.v.value, self.count.value

    def seen(self) -> Any:
        """What the States hold."""
        return {str(path): state.value for path, state in brainstate.graph.states(self).items()}


def a_module(loop: Loop) -> Any:
    """Outputs, gradients of the weights, and all States, jitted."""
    cell = Cell()
    xs = inputs(3)

    def loss() -> Any:
        v, counts = loop(cell.update, xs)
        return (v / u.mV * inputs(3)).sum() + cell.trace.value["first"], (v, counts)

    @quick
    def both() -> Any:
        return transform.grad(loss, cell.states(brainstate.ParamState), has_aux=True, return_value=True)()

    return both(), cell.seen()


def without_gradients(loop: Loop) -> Any:
    """The loop as it is, neither jitted nor differentiated."""
    cell = Cell()
    return loop(cell.update, inputs(3)), cell.seen()


def hidden_gradients(loop: Loop) -> Any:
    """Gradients of what the States held before, and of the inputs."""
    cell = Cell()

    def loss(xs: Any) -> Any:
        v, _ = loop(cell.update, xs)
        return (v / u.mV).sum() + (cell.v.value / u.mV).prod()

    return quick(transform.grad(loss, {"v": cell.v, "tau": cell.tau}, argnums=0))(inputs(3)), cell.seen()


def random_numbers(loop: Loop) -> Any:
    """Noise from brainstate's own RandomState and from another one."""
    brainstate.random.seed(3)
    own = brainstate.random.RandomState(5)
    w = brainstate.ParamState(jnp.array([0.5, -0.2]))
    h = brainstate.HiddenState(jnp.zeros(2))

    def step(x: Any) -> Any:
        kept = brainstate.random.rand(2) < 0.7
        h.value = jnp.tanh(h.value + w.value * x + 0.3 * own.normal(size=(2,))) * kept
        return h.value

    def loss() -> Any:
        ys = loop(step, inputs())
        return (ys**2).sum(), ys

    results = quick(transform.grad(loss, {"w": w}, has_aux=True))()
    keys = [jax.random.key_data(state.value) for state in (brainstate.random.DEFAULT, own)]
    return results, keys, brainstate.random.rand(2), own.rand(2), h.value


def some_steps_write(loop: Loop) -> Any:
    """A State that is written in one branch only."""
    w = brainstate.ParamState(jnp.array(0.7))
    high = brainstate.ShortTermState(jnp.array(0.0))
    sums = brainstate.ShortTermState(jnp.array(0.0))

    def write(x: Any) -> Any:
        high.value = high.value * 0.5 + w.value * x

    def step(x: Any) -> Any:
        transform.cond(x > 0, write, lambda x: None, x)
        sums.value = sums.value + high.value**2
        return sums.value

    def loss() -> Any:
        return loop(step, inputs()).mean()

    return transform.grad(loss, {"w": w}, return_value=True)(), high.value, sums.value  # without jit


def loop_in_loop(loop: Loop) -> Any:
    """Both loops write the same State, and the inner one draws random numbers."""
    w = brainstate.ParamState(jnp.array([0.3, 0.4]))
    h = brainstate.HiddenState(jnp.zeros(2))

    def inner(x: Any) -> Any:
        h.value = jnp.tanh(h.value * 0.8 + w.value * x + 0.1 * brainstate.random.rand(2))
        return h.value

    def outer(x: Any) -> Any:
        ys = loop(inner, x * jnp.arange(1.0, 8.0))
        h.value = h.value + 0.1 * ys.mean(0)
        return ys.sum()

    def loss() -> Any:
        return loop(outer, inputs(steps=9)).sum()

    return quick(transform.grad(loss, {"w": w}, return_value=True))(), h.value, brainstate.random.rand()


def closed_over(loop: Loop) -> Any:
    """Values of an enclosing trace, which the step gets from nowhere."""
    h = brainstate.HiddenState(jnp.zeros(2))

    def loss(w: Any, scale: Any) -> Any:
        gain = jnp.exp(w)

        def step(x: Any) -> Any:
            h.value = jnp.sin(h.value + gain * x) * scale
            return h.value

        return loop(step, inputs(2)).sum()

    return transform.grad(loss, argnums=(0, 1), return_value=True)(jnp.array([0.1, 0.2]), 0.9), h.value


def python_numbers(loop: Loop) -> Any:
    """States that begin as Python numbers take the type that the step gives them."""
    total, count = brainstate.ShortTermState(0), brainstate.ShortTermState(1)

    def step(x: Any) -> Any:
        total.value = total.value + x
        count.value = count.value + 2
        return total.value * count.value

    return loop(step, inputs()), total.value, count.value


def mapped(loop: Loop) -> Any:
    """A loop for each row, with States of their own and random numbers of their own."""
    w = brainstate.ParamState(jnp.array([0.5, -0.3]))
    h = brainstate.HiddenState(jnp.zeros((4, 2)))

    def step(x: Any) -> Any:
        h.value = jnp.tanh(h.value * w.value + x + 0.1 * brainstate.random.rand(2))
        return h.value

    @transform.vmap(in_states=h, out_states=h)
    def rows(x: Any) -> Any:
        return loop(step, x)

    def loss() -> Any:
        return (rows(inputs(4, 2).swapaxes(0, 1)) ** 2).sum()

    return quick(transform.grad(loss, {"w": w}, return_value=True))(), h.value, brainstate.random.rand()


def mapped_gradients(loop: Loop) -> Any:
    """A gradient for each row."""
    w = brainstate.ParamState(jnp.array([[0.5, -0.3], [0.1, 0.2], [0.3, 0.3]]))
    h = brainstate.HiddenState(jnp.zeros((3, 2)))

    def step(x: Any) -> Any:
        h.value = jnp.tanh(h.value * w.value + x)
        return h.value

    def loss(x: Any) -> Any:
        return (loop(step, x) ** 2).sum()

    gradients = transform.vmap(transform.grad(loss, {"w": w}), in_states=[w, h], out_states=h)
    return quick(gradients)(inputs(3, 2).swapaxes(0, 1)), h.value


def new_states(loop: Loop) -> Any:
    """Networks that are made under `vmap_new_states`, one for each row."""

    @transform.vmap_new_states(state_tag="new", axis_size=3)
    def make() -> Any:
        cell = Cell(2)
        cell.v.value = cell.v.value + brainstate.random.rand(2) * u.mV
        return loop(cell.update, inputs(2))

    return make()


CASES: list[Case] = [
    a_module,
    without_gradients,
    hidden_gradients,
    random_numbers,
    some_steps_write,
    loop_in_loop,
    closed_over,
    python_numbers,
    mapped,
    mapped_gradients,
    new_states,
]
