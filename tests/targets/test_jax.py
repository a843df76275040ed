"""A user's own function in JAX: `lowtide plan module:name`."""

from __future__ import annotations

import pytest

from lowtide import Plan
from tests.cli.running import Runner

NETS = """
    import functools
    import equinox
    import jax
    import jax.numpy as jnp

    w = jnp.eye(8)

    def step(h, x):
        return jnp.tanh(h @ w + x), h.sum()

    def make():
        return step, jnp.zeros((4, 8)), jnp.ones((50, 4, 8))

    def endless():
        return (lambda h, _: (jnp.tanh(h @ w), None)), jnp.zeros((4, 8))

    def pure(x):
        return jnp.tanh(x @ w)

    jitted = jax.jit(pure)
    half = functools.partial(jnp.dot, w)

    class Holder:
        def __init__(self):
            self.weights = {"w": w}

        def call(self, x):
            return x @ self.weights["w"]

    holder = Holder()
    pairs = [(lambda p, x: jnp.tanh(x @ p), w)] * 4
    modules = equinox.nn.Sequential([equinox.nn.Linear(8, 8, key=jax.random.key(k)) for k in range(4)])

    def layers():
        return pairs, jax.ShapeDtypeStruct((4, 8), jnp.float32)
"""


@pytest.fixture
def nets(lowtide: Runner) -> Runner:
    lowtide.file("jnets.py", NETS)
    return lowtide


def planned(run: Runner, *arguments: str) -> Plan:
    code, out, err = run("plan", *arguments, "--json")
    assert (code, err) == (0, "")
    return Plan.from_json(out)


@pytest.mark.long
def test_a_loop_that_a_function_returns(nets: Runner) -> None:
    plan = planned(nets, "jnets:make", "--budget", "8KiB")
    assert len(plan.chain) == 50
    assert plan.chain[0].state == 4 * 8 * 4
    assert plan.bill.peak_memory <= 8192
    assert len(planned(nets, "jnets:endless", "--steps", "30").chain) == 30


@pytest.mark.parametrize("name", ["pure", "jitted", "half", "holder.call"])
def test_a_step_with_its_inputs(nets: Runner, name: str) -> None:
    shape = "8" if name == "half" else "32768,8"  # a terabyte of inputs, if they were made
    plan = planned(nets, f"jnets:{name}", "--input", f"float32[{shape}]", "--steps", "1000000")
    assert len(plan.chain) == 1_000_000


def test_layers(nets: Runner) -> None:
    plan = planned(nets, "jnets:layers")
    assert len(plan.chain) == 4
    assert planned(nets, "jnets:pairs", "--input", "float32[4,8]").chain == plan.chain
    assert len(planned(nets, "jnets:modules", "--input", "float32[8]").chain) == 4
    nets.file("joined.py", "layers = [lambda both: (both[0] + both[1], both[1])] * 3\n")
    two = planned(nets, "joined:layers", "--input", "float32[8]", "--input", "bfloat16[8]", "--framework", "jax")
    assert len(two.chain) >= 1


def test_dtypes(nets: Runner) -> None:
    said = nets.refused("plan", "jnets:pure", "--input", "float65[4,8]", "--steps", "3")
    assert "--input float65: jax has no such dtype; it has float32" in said
    said = nets.refused("plan", "jnets:pure", "--input", "float64[4,8]", "--steps", "3")
    assert "JAX has it only with JAX_ENABLE_X64=1" in said
