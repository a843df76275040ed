"""Compares gradients with Lowtide and without it: whether they are the same, and what both programs cost.

The plain side of a comparison is the same function, traced while `runs_plainly()` is true: every loop, row of layers
and model of `lowtide.jax` asks for it, and then behaves as it would without Lowtide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowtide.checks import function
from lowtide.errors import FunctionError, InputError
from lowtide.interface.comparison import Compared, Comparison, share_of
from lowtide.jax.installed import user_context
from lowtide.jax.xla.jaxprs import Leaves, is_float, replaced
from lowtide.plan import Receipt

# A user context is part of the key of JAX's trace cache, so a function that was jitted before is traced again. Its
# value is local to a thread.
_plainly = user_context(False)


def runs_plainly() -> bool:
    """Whether the function being traced now is to behave as it would without Lowtide."""
    return bool(_plainly.value)


def compare_gradients(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Comparison:
    """Compile and run `fn(*args, **kwargs)` and its gradient twice: with Lowtide's loops as plain loops, and as is.

    `fn` returns a loss, or any pytree with floats in it, which are summed. Gradients are taken with respect to every
    float array among the arguments. Sums are taken in another order, so gradients agree to rounding, not to the last
    bit.

    Raises:
        FunctionError: `fn` has a while loop between its arguments and its result. A plain while loop has no
            reverse-mode derivative, so there is nothing to compare with.
        InputError: no argument is a float array, or nothing that `fn` returns has a gradient.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    leaves = [jnp.asarray(leaf) if isinstance(leaf, float | complex) else leaf for leaf in leaves]
    moving = [k for k, leaf in enumerate(leaves) if _is_float_array(leaf)]
    function(fn, "fn")
    if not moving:
        raise InputError("none of fn's arguments is a float array to take a gradient of; pass parameters as arguments")

    def loss(some: Leaves) -> Any:
        args, kwargs = jax.tree.unflatten(tree, replaced(leaves, moving, some))
        floats = [jnp.sum(leaf) for leaf in jax.tree.leaves(fn(*args, **kwargs)) if _is_float_array(leaf)]
        if not floats:
            raise InputError("fn returned nothing that has a gradient; return the loss")
        return jnp.real(sum(floats))

    some = [leaves[k] for k in moving]
    (value, gradients), plain = _run(loss, some, plainly=True)
    (other_value, other_gradients), ours = _run(loss, some, plainly=False)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path((args, kwargs))]
    rows = [_compared("the result", value, other_value)]
    for k, one, other in zip(moving, gradients, other_gradients, strict=True):
        rows.append(_compared(f"gradient of {_argument(names[k])}", one, other))
    return Comparison(tuple(rows), plain, ours)


def _run(loss: Callable[[Leaves], Any], some: Leaves, *, plainly: bool) -> tuple[Any, Receipt]:
    """The loss and its gradients, and a receipt with the bytes of temporaries that their program allocates."""
    with _plainly(plainly), _telling_of_while_loops():
        compiled = jax.jit(jax.value_and_grad(loss)).lower(some).compile()
    memory = compiled.memory_analysis()
    return compiled(some), Receipt(peak_memory=int(memory.temp_size_in_bytes) if memory is not None else 0)


@contextmanager
def _telling_of_while_loops() -> Iterator[None]:
    """Turn JAX's error about the plain while loop into one that says what can be done."""
    try:
        yield
    except ValueError as error:
        if "lax.while_loop" not in str(error):
            raise
        raise FunctionError(
            "fn has a while loop, and jax.lax.while_loop, which checkpointed_while_loop is compared with, has no "
            "reverse derivative; compare jax.grad(fn) with finite differences (jax.test_util.check_grads), or bound "
            "the loop: checkpointed_scan with a fixed length, whose steps leave the carry alone once it is done"
        ) from error


def _is_float_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and is_float(leaf)


def _argument(path: str) -> str:
    """The name of an argument by its path in (args, kwargs): [0][1]['w'] is argument [1]['w'], [1]['b'] keyword b."""
    return f"argument {path[3:]}" if path.startswith("[0]") else f"keyword {path[3:]}"


def _compared(name: str, one: Any, other: Any) -> Compared:
    one, other = np.asarray(one), np.asarray(other)
    rounding = 1e-12 if one.dtype in (np.float64, np.complex128) else 1e-3
    finite = np.isfinite(one)
    odd = np.array_equal(one[~finite], other[~finite], equal_nan=True)  # infinities and NaNs agree
    if not odd or not np.all(np.isfinite(other[finite])):
        return Compared(name, False, math.inf, math.inf, rounding)
    difference = float(np.max(np.abs(one[finite] - other[finite]), initial=0.0))
    largest = float(np.max(np.abs(one[finite]), initial=0.0))
    relative = share_of(difference, largest)
    return Compared(name, relative <= rounding, difference, relative, rounding)
