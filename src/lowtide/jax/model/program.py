"""The compiled training step that a plan is for: the loss, its gradients, and the optimizer's step if there is one.

Nothing is run or allocated. A peak is compared with what XLA would allocate.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from lowtide.errors import FunctionError
from lowtide.jax.model.blocks import is_array
from lowtide.jax.model.costs import ResidentBytes
from lowtide.jax.model.forms import BlockForm, model_runner
from lowtide.jax.model.parts import Model
from lowtide.jax.xla.compiled import digest, memory_of, program_bytes
from lowtide.jax.xla.jaxprs import Leaves, is_float, nbytes, replaced


class Program:
    """The training step of a model, for any choice of forms."""

    def __init__(self, model: Model, params: Any, *, has_aux: bool, optimizer: Any, donate: bool) -> None:
        self._model, self._optimizer, self._donate = model, optimizer, donate
        _check(model, has_aux)
        types = [_type(leaf) for leaf in model.leaves]
        count = len(model.weights)
        self._moving = [k for k, leaf in enumerate(types[:count]) if is_float(leaf)]
        self._rest = [k for k in range(len(types)) if k not in {*self._moving}]
        self._types = types
        tree = jax.tree.map(lambda leaf: _type(leaf) if is_array(leaf) and is_float(_type(leaf)) else None, params)
        self._params = tree
        self._state = None if optimizer is None else jax.eval_shape(optimizer.init, tree)

    def resident(self) -> ResidentBytes:
        """The bytes that are held with any plan."""
        types = self._types
        weights, rest = ([types[k] for k in places] for places in (self._moving, self._rest))
        results = nbytes(var.aval for var in self._model.results)
        gradients = nbytes(weights)
        state = nbytes(jax.tree.leaves(self._state))
        anew = 0 if self._donate else gradients + state
        return ResidentBytes(
            parameters=gradients,
            optimizer=state,
            inputs=nbytes(rest),
            gradients=gradients,
            results=results + (anew if self._updates else gradients),
            optimizer_step=self._updates,
        )

    def bytes(self, chosen: Sequence[BlockForm]) -> int:
        """The bytes that XLA allocates for arguments, results and temporaries.

        XLA computes results in the order in which a program returns them, and the user's program may return the
        optimizer's state before or after the parameters. That is not known, so both are compiled and the larger counts.
        """
        run = model_runner(self._model, chosen)
        return max(self._allocated(run, state_first) for state_first in (False, True)[: 1 + self._updates])

    def _allocated(self, run: Any, state_first: bool) -> int:
        donated = (0, 1) if self._updates and self._donate else ()
        rest = [self._types[k] for k in self._rest]
        step = jax.jit(self._step(run, state_first), donate_argnums=donated)
        lowered: Any = step.lower(self._params, self._state, rest)
        key = digest(f"{jax.default_backend()} {donated}", lowered.as_text())
        return program_bytes(key, partial(_allocated, lowered))

    @property
    def _updates(self) -> bool:
        return self._optimizer is not None

    def _step(self, run: Any, state_first: bool) -> Any:
        def loss(params: Any, rest: Leaves) -> tuple[Any, Leaves]:
            leaves = replaced([None] * len(self._types), self._moving, jax.tree.leaves(params))
            results = run(replaced(leaves, self._rest, rest))
            return results[0], results[1:]

        def step(params: Any, state: Any, rest: Leaves) -> Any:
            found, gradients = jax.value_and_grad(loss, has_aux=True)(params, rest)
            if not self._updates:
                return found, gradients
            updates, state = self._optimizer.update(gradients, state, params)
            params = jax.tree.map(lambda leaf, update: (leaf + update).astype(leaf.dtype), params, updates)
            return (state, params, found) if state_first else (params, state, found)

        return step


def _allocated(lowered: Any) -> int:
    memory = memory_of(lowered)
    arguments, results = memory.argument_size_in_bytes, memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(arguments + results + memory.temp_size_in_bytes)


def _type(leaf: Any) -> Any:
    aval: Any = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _check(model: Model, has_aux: bool) -> None:
    """Refuse a loss that does not return one float, or returns more without `has_aux`."""
    value = model.results[0].aval if model.results else None
    if value is None or value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
        found = "nothing" if value is None else value.str_short()
        raise FunctionError(f"the loss returns {found} first; make it return one float, the value to be made small")
    if len(model.results) > 1 and not has_aux:
        raise FunctionError(
            f"the loss returns {len(model.results):,} arrays; has_aux=True if all but the first are extra"
        )
