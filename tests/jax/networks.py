"""Step functions of the kinds that people train, and the plain `lax.scan` they are held to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import saiunit
from jax import lax

BATCH, WIDTH, IN = 3, 5, 4

# Compiling takes nearly all the time of a test, and three quarters of it are optimisations of machine code, which
# change neither what is computed in which order nor what is allocated. Most that is asserted of bytes is compiled as
# users do, and so are the slow tests.
QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}

u: Any = saiunit  # makes its units when it is imported, where mypy cannot see them


@dataclass(frozen=True)
class Network:
    """A step `f(params, carry, x) -> (carry, y)` with everything whose value or gradient is compared."""

    step: Callable[[Any, Any, Any], Any]
    params: Any
    init: Any
    xs: Any
    length: int


def draw(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    """Random numbers in the precision of the moment."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale)


def quick(f: Callable[..., Any], **options: Any) -> Any:
    """`jax.jit`, compiled in a quarter of the time."""
    return jax.jit(f, compiler_options=QUICK, **options)


def filled(make: Callable[..., Any], *args: Any, seed: int) -> Any:
    """A module of equinox with random weights, without compiling its own draws."""
    shapes = jax.tree.leaves(like := equinox.filter_eval_shape(make, *args, key=jax.random.key(0)))
    weights = [draw(seed + k, *leaf.shape, scale=0.4) for k, leaf in enumerate(shapes)]
    return jax.tree.unflatten(jax.tree.structure(like), weights)


@jax.custom_jvp
def spike(v: jax.Array) -> jax.Array:
    """One above the threshold, else zero; as if it were a triangle where it is differentiated."""
    return (v > 0).astype(v.dtype)


@spike.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (v,), (dv,) = primals, tangents
    return spike(v), jnp.maximum(0.0, 1.0 - jnp.abs(v)) * 0.3 * dv


def lif(length: int) -> Network:
    """Leaky neurons with a surrogate gradient; the spikes are an output without one."""

    def step(params: Any, carry: Any, x: Any) -> Any:
        g, v, o = carry
        g = 0.8 * g + x @ params["w1"]
        z = spike(v - 0.5)
        v = v + 0.3 * (g - v) - 0.5 * z
        o = 0.9 * o + z @ params["w2"]
        return (g, v, o), {"o": o, "z": lax.stop_gradient(z)}

    params = {"w1": draw(1, IN, WIDTH), "w2": draw(2, WIDTH, 2)}
    init = (draw(3, BATCH, WIDTH), draw(4, BATCH, WIDTH), jnp.zeros((BATCH, 2)))
    return Network(step, params, init, draw(5, length, BATCH, IN), length)


def gru(length: int) -> Network:
    """Written out, with a dictionary for a carry; its output is its carry."""

    def step(params: Any, carry: Any, x: Any) -> Any:
        h = carry["h"]
        r, z = jnp.split(jax.nn.sigmoid(x @ params["wg"] + h @ params["ug"] + params["b"]), 2, axis=1)
        h = (1 - z) * h + z * jnp.tanh(x @ params["wh"] + (r * h) @ params["uh"])
        return {"h": h}, h

    params = {
        "wg": draw(1, IN, 2 * WIDTH, scale=0.5),
        "ug": draw(2, WIDTH, 2 * WIDTH, scale=0.3),
        "b": draw(3, 2 * WIDTH),
        "wh": draw(4, IN, WIDTH, scale=0.5),
        "uh": draw(5, WIDTH, WIDTH, scale=0.3),
    }
    return Network(step, params, {"h": draw(6, BATCH, WIDTH)}, draw(7, length, BATCH, IN), length)


def keys(length: int) -> Network:
    """Dropout from a random key in the carry, a key of the old kind, which is whole numbers, and a counter."""

    def step(params: Any, carry: Any, x: Any) -> Any:
        h, key, old, count = carry
        key, now = jax.random.split(key)
        kept = jax.random.bernoulli(now, 0.7, h.shape)
        h = jnp.tanh(h @ params + x["x"]) * kept * (1 + old[0] % 2)
        return (h, key, old + 1, count + x["n"]), {"h": h, "count": count, "key": now}

    xs = {"x": draw(1, length, BATCH, WIDTH), "n": jnp.asarray(np.arange(length, dtype=np.int32))}
    init = (draw(2, BATCH, WIDTH), jax.random.key(3), jax.random.PRNGKey(4), jnp.int32(5))
    return Network(step, draw(5, WIDTH, WIDTH, scale=0.3), init, xs, length)


def nested(length: int) -> Network:
    """Trees within trees, with None here and there, and an output that no gradient goes through."""

    def step(params: Any, carry: Any, x: Any) -> Any:
        (h, nothing), memory = carry
        h = jnp.tanh(h @ params[0]["w"] + x["a"][0] * params[1])
        memory = {"slow": 0.9 * memory["slow"] + h, "least": jnp.minimum(memory["least"], h), "none": None}
        return ((h, nothing), memory), [{"h": h.sum(1)}, None, (memory["slow"], h > 0)]

    init = (
        (draw(1, BATCH, WIDTH), None),
        {"slow": jnp.zeros((BATCH, WIDTH)), "least": jnp.ones((BATCH, WIDTH)), "none": None},
    )
    xs = {"a": [draw(2, length, BATCH, WIDTH), None], "b": None}
    return Network(step, [{"w": draw(3, WIDTH, WIDTH, scale=0.4)}, draw(4, WIDTH), None], init, xs, length)


def shared(length: int) -> Network:
    """One weight used twice, another one computed from it outside of the step, a third computed inside."""

    def step(params: Any, h: Any, x: Any) -> Any:
        w, made = params
        h = jnp.tanh(jnp.tanh(h @ w + x) @ w.T) @ (made / jnp.linalg.norm(made)) + made[0]
        return h, (h[:, 0], w[0, 0] * h.sum())

    def whole(w: Any, h: Any, x: Any) -> Any:
        return step((w, w @ w.T * 0.3), h, x)

    return Network(
        whole, draw(1, WIDTH, WIDTH, scale=0.4), draw(2, BATCH, WIDTH), draw(3, length, BATCH, WIDTH), length
    )


def without_inputs(length: int) -> Network:
    """xs=None: the length says how many steps there are."""

    def step(params: Any, h: Any, x: Any) -> Any:
        assert x is None
        return jnp.sin(h @ params + 0.1), h.sum(0)

    return Network(step, draw(1, WIDTH, WIDTH, scale=0.4), draw(2, BATCH, WIDTH), None, length)


def complex_numbers(length: int) -> Network:
    def step(params: Any, h: Any, x: Any) -> Any:
        h = h * jnp.exp(1j * params["phase"]) * 0.95 + x
        return h, (h @ params["out"], jnp.abs(h) ** 2)

    params = {"phase": draw(1, WIDTH), "out": draw(2, WIDTH, 2) + 1j * draw(3, WIDTH, 2)}
    xs = draw(4, length, BATCH, WIDTH) + 1j * draw(5, length, BATCH, WIDTH)
    return Network(step, params, draw(6, BATCH, WIDTH) + 0j, xs, length)


def equinox_gru(length: int) -> Network:
    cell = filled(equinox.nn.GRUCell, IN, WIDTH, seed=10)

    def step(cell: Any, h: Any, x: Any) -> Any:
        h = jax.vmap(cell)(x, h)
        return h, h[:, :2]

    return Network(step, cell, draw(1, BATCH, WIDTH), draw(2, length, BATCH, IN), length)


def equinox_lstm(length: int) -> Network:
    cell = filled(equinox.nn.LSTMCell, IN, WIDTH, seed=10)
    out = filled(equinox.nn.Linear, WIDTH, 2, seed=20)

    def step(modules: Any, state: Any, x: Any) -> Any:
        cell, out = modules
        state = cell(x, state)
        return state, out(state[0])

    return Network(step, (cell, out), (draw(1, WIDTH), draw(2, WIDTH)), draw(3, length, IN), length)


def units(length: int) -> Network:
    """Volts and milliamperes: quantities of saiunit in the carry, the inputs, the outputs and the weights."""

    def step(params: Any, v: Any, x: Any) -> Any:
        leak, resistance = params
        v = v + (resistance * x - leak * v) * 0.2
        return v, {"v": v, "p": v * v / resistance}

    params = (draw(1, WIDTH, scale=0.3), u.Quantity(draw(2, WIDTH), unit=u.kohm))
    xs = u.Quantity(draw(3, length, BATCH, WIDTH), unit=u.mamp)
    return Network(step, params, u.Quantity(draw(4, BATCH, WIDTH), unit=u.volt), xs, length)


@jax.tree_util.register_dataclass
@dataclass
class Layer:
    """A module as flax's nnx makes them: arrays are leaves, the rest is static."""

    kernel: Any
    bias: Any
    activation: str = field(metadata={"static": True})

    def __call__(self, x: Any) -> Any:
        y = x @ self.kernel if self.bias is None else x @ self.kernel + self.bias
        return getattr(jnp, self.activation)(y)


@jax.tree_util.register_dataclass
@dataclass
class Cell:
    """A state in the same manner."""

    h: Any
    age: Any
    name: str = field(metadata={"static": True})


def dataclasses(length: int) -> Network:
    def step(layers: Any, cell: Any, x: Any) -> Any:
        h = layers["inside"](cell.h) + layers["outside"](x)
        return Cell(h, cell.age + 1, cell.name), Layer(h, None, "tanh")

    layers = {
        "inside": Layer(draw(1, WIDTH, WIDTH, scale=0.4), draw(2, WIDTH), "tanh"),
        "outside": Layer(draw(3, IN, WIDTH), None, "sin"),
    }
    return Network(step, layers, Cell(draw(4, BATCH, WIDTH), jnp.int32(0), "cell"), draw(5, length, BATCH, IN), length)


NETWORKS: dict[str, Callable[[int], Network]] = {
    "lif": lif,
    "gru": gru,
    "keys": keys,
    "nested": nested,
    "shared": shared,
    "without_inputs": without_inputs,
    "complex_numbers": complex_numbers,
    "equinox_gru": equinox_gru,
    "equinox_lstm": equinox_lstm,
    "units": units,
    "dataclasses": dataclasses,
}


def weighed(tree: Any) -> Any:
    """A number that every float of a tree has a say in, each with a weight of its own."""

    def one(leaf: Any) -> Any:
        weights = jnp.cos(jnp.arange(leaf.size, dtype=leaf.real.dtype)).reshape(leaf.shape)
        return (leaf * weights).real.sum() + (leaf * jnp.sin(weights)).imag.sum()

    return sum((one(leaf) for leaf in jax.tree.leaves(tree) if is_float(leaf)), jnp.float32(0))


def is_float(leaf: Any) -> bool:
    return bool(jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.inexact))


def outcome(net: Network, scan: Callable[..., Any], jit: Callable[..., Any] = quick, **options: Any) -> dict[str, Any]:
    """Loss, last carry, outputs, and gradients of weights, first carry and inputs, from one compiled program."""
    tree: Any
    leaves, tree = jax.tree.flatten((net.params, net.init, net.xs))
    floats = [k for k, leaf in enumerate(leaves) if is_float(leaf)]
    rest = {k: leaf for k, leaf in enumerate(leaves) if k not in floats}

    def loss(some: list[Any], rest: dict[int, Any]) -> Any:
        given = {**rest, **dict(zip(floats, some, strict=True))}
        params, init, xs = tree.unflatten([given[k] for k in range(len(leaves))])
        carry, ys = scan(lambda carry, x: net.step(params, carry, x), init, xs, net.length, **options)
        return weighed((carry, ys)), (carry, ys)

    run = jit(jax.value_and_grad(loss, has_aux=True))
    (value, (carry, ys)), grads = run([leaves[k] for k in floats], rest)
    return flat({"loss": value, "carry": carry, "ys": ys, "gradients": grads})


def flat(tree: Any) -> dict[str, Any]:
    """The leaves by name, as numpy arrays; the form of the tree is one of them."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    return {"form": jax.tree.structure(tree)} | {jax.tree_util.keystr(path): numbers(leaf) for path, leaf in named}


def numbers(leaf: Any) -> Any:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def differences(one: dict[str, Any], other: dict[str, Any], within: float) -> list[str]:
    """What differs by more than a share of its own greatest value; what is not a float must be the same."""
    assert one.keys() == other.keys()
    assert one["form"] == other["form"]
    found = []
    for name in one.keys() - {"form"}:
        a, b = one[name], other[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            found.append(f"{name}: {a.shape} {a.dtype} and {b.shape} {b.dtype}")
        elif not np.issubdtype(a.dtype, np.inexact):
            if not np.array_equal(a, b):
                found.append(name)
        elif not np.isfinite(a).all() or (a.size and np.abs(a - b).max() > within * np.abs(a).max()):
            found.append(f"{name}: {np.abs(a - b).max():.2e} of {np.abs(a).max():.2e}")
    return found
