"""Checks of `lowtide.jax` on a device: gradients, bytes that XLA allocates, and speed, beside plain JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import lowtide.jax as lt
from lowtide.doctor.findings import Fact, Outcome
from lowtide.sizes import format_size

# Gradients are sums that are taken in another order, in 32 bits, on some devices with shorter factors.
_ROUNDING = 1e-3
# What a loop's program may take beyond its budget, because XLA decides about scratch memory.
_BEYOND, _BEYOND_BYTES = 1.05, 64 * 1024

PLAIN, OURS = "lax.scan", "Lowtide"
_TURNS = 6  # of each program that is timed

Scan = Callable[..., Any]


class ProgramSize(NamedTuple):
    """How large the programs are."""

    steps: int
    blocks: int
    width: int
    batch: int


QUICK, FULL = ProgramSize(24, 2, 16, 8), ProgramSize(400, 8, 256, 32)


def devices() -> dict[str, jax.Device]:
    """The CPU, and every device of the default backend."""
    return {
        f"{device.platform}:{device.id}": device for device in (*jax.local_devices(backend="cpu"), *jax.local_devices())
    }


def facts() -> Iterator[Fact]:
    """The backend and the devices."""
    yield Fact("jax backend", jax.default_backend())
    for name, device in devices().items():
        yield Fact(f"jax:{name}", device.device_kind)


def checks(device: jax.Device, *, quick: bool) -> dict[str, Callable[[], Outcome]]:
    """All checks of a device."""
    size = QUICK if quick else FULL
    loops = Loops(size)
    found = {
        "gradients: loop": partial(gradients, loops),
        "budget: loop": partial(loop_budget, loops),
        "peak: model": partial(model_peak, size),
        "speed: loop": partial(loop_speed, loops),
    }
    return {name: partial(_on, device, check) for name, check in found.items()}


def _on(device: jax.Device, check: Callable[[], Outcome]) -> Outcome:
    with jax.default_device(device):
        return check()


# --- the loop


def weights(size: ProgramSize) -> tuple[jax.Array, jax.Array]:
    """The parameters of the loop's step."""
    keys = jax.random.split(jax.random.key(0))
    return tuple(jax.random.normal(key, (size.width, size.width)) / size.width**0.5 for key in keys)


def inputs(size: ProgramSize) -> tuple[jax.Array, jax.Array]:
    """The loop's inputs: rows and keys for each step."""
    key = jax.random.key(1)
    return jax.random.normal(key, (size.steps, size.batch, size.width)), jax.random.split(key, size.steps)


def step(weights: Any, h: jax.Array, given: Any) -> tuple[jax.Array, None]:
    """A step of a recurrent network with dropout."""
    x, key = given
    new = jnp.tanh(h @ weights[0] + x @ weights[1])
    new = jnp.where(jax.random.bernoulli(key, 0.8, new.shape), new / 0.8, 0)
    return 0.5 * h + 0.5 * new, None


def loss(weights: Any, given: Any, scan: Scan) -> jax.Array:
    """The loss of the loop, run by this scan."""
    carry, _ = scan(partial(step, weights), jnp.zeros_like(given[0][0]), given)
    return jnp.sum(jnp.square(carry))


class Loops:
    """The loop's programs, by `lax.scan` and with Lowtide, each of which is compiled once."""

    def __init__(self, size: ProgramSize) -> None:
        self._size = size
        self._compiled: dict[str, Any] = {}

    @cached_property
    def given(self) -> tuple[Any, Any]:
        """The loop's parameters and inputs."""
        return weights(self._size), inputs(self._size)

    @cached_property
    def budget(self) -> int:
        """A budget for the loop: the least memory in which no step is run more than one extra time."""
        params, xs = self.given
        return lt.plan_scan(partial(step, params), jnp.zeros_like(xs[0][0]), xs).bill.peak_memory

    def program(self, name: str) -> Any:
        """The loss and its gradients, as a program."""
        if name not in self._compiled:
            scan: Scan = jax.lax.scan if name == PLAIN else partial(lt.checkpointed_scan, budget=self.budget)
            gradient = jax.value_and_grad(partial(loss, scan=scan))
            self._compiled[name] = jax.jit(gradient).lower(*self.given).compile()
        return self._compiled[name]


def gradients(loops: Loops) -> Outcome:
    """Loss and gradients are those of `lax.scan` but for rounding."""
    return _close(*(loops.program(name)(*loops.given) for name in (PLAIN, OURS)))


def _close(plain: Any, ours: Any) -> Outcome:
    """Whether two trees of arrays are the same but for rounding."""
    pairs = zip(jax.tree.leaves(plain), jax.tree.leaves(ours), strict=True)
    apart = max(float(jnp.max(jnp.abs(one - other)) / jnp.max(jnp.abs(one))) for one, other in pairs)
    return Outcome(apart <= _ROUNDING, f"at most {apart:.1e} of the largest entry apart")  # NaN does not hold


def loop_budget(loops: Loops) -> Outcome:
    """XLA allocates no more for a loop than its budget, but for a little scratch memory."""
    taken, usual = (int(loops.program(name).memory_analysis().temp_size_in_bytes) for name in (OURS, PLAIN))
    said = f"budget {format_size(loops.budget)}, {format_size(taken)} allocated, {format_size(usual)} by lax.scan"
    return Outcome(taken <= _BEYOND * loops.budget + _BEYOND_BYTES, said)


def loop_speed(loops: Loops) -> Outcome:
    """The time of a loop, beside `lax.scan`."""
    seconds = dict.fromkeys((PLAIN, OURS), float("inf"))
    for _ in range(_TURNS):
        for name in seconds:
            program = loops.program(name)
            began = perf_counter()
            jax.block_until_ready(program(*loops.given))
            seconds[name] = min(seconds[name], perf_counter() - began)
    return Outcome(None, f"Lowtide {seconds[OURS] / seconds[PLAIN]:.2f}x of lax.scan, {seconds[PLAIN] * 1e3:.3g} ms")


# --- the model


def model(params: Any, x: jax.Array) -> jax.Array:
    """The loss of a row of blocks."""
    for block in params["blocks"]:
        x = x + jax.nn.gelu(x @ block["up"]) @ block["down"]
    return jnp.mean(jnp.square(x))


def model_peak(size: ProgramSize) -> Outcome:
    """A model planned for 80% of its plain peak takes no more, and has the same gradients but for rounding."""
    keys = jax.random.split(jax.random.key(2), 2 * size.blocks)
    shape = size.width, 4 * size.width
    made = [0.1 * jax.random.normal(key, shape if k % 2 else shape[::-1]) for k, key in enumerate(keys)]
    params = {"blocks": [{"up": up, "down": down} for down, up in zip(made[::2], made[1::2], strict=True)]}
    x = jax.random.normal(keys[0], (size.steps * size.batch, size.width))
    plan = lt.plan_model(model, params, x, peak="80%")
    plain, ours = (jax.jit(jax.value_and_grad(f)).lower(params, x).compile() for f in (model, lt.apply(plan, model)))
    taken, usual = (_bytes(program) for program in (ours, plain))
    outcome = _close(plain(params, x), ours(params, x))
    peak = plan.knob.value or 0
    said = f"peak {format_size(peak)}, {format_size(taken)} allocated, {format_size(usual)} plain; {outcome.text}"
    return Outcome(outcome.holds and taken <= peak, said)


def _bytes(program: Any) -> int:
    """What XLA allocates for a program: arguments, results and temporaries."""
    memory = program.memory_analysis()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(kept + memory.temp_size_in_bytes)
