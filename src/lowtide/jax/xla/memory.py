"""What a compiled layer stores: which results become arrays in memory, and how long each is needed.

XLA fuses cheap operations into one pass over memory and computes their results again wherever they are read, so a tape
is not simply what `jax.vjp` saves. This module follows XLA's rules roughly: results of products, reductions and the
like are stored, and so are the inputs of a product, and results of expensive functions that two passes read. Everything
else is computed on the fly from what is stored. It is an estimate, from types alone: within a third for most layers,
half for convolutions. Where more is promised, the program is compiled (`layers/plans.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core

from lowtide.jax.installed import jaxprs_in_params
from lowtide.jax.xla.jaxprs import names, nbytes, transient

# Results are their inputs under another name.
_SAME_ARRAY = names("copy copy_p expand_dims name optimization_barrier reshape squeeze stop_gradient transpose")
# Functions that take too long to compute a result twice.
_EXPENSIVE = names(
    "acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma div erf erf_inv erfc exp exp2 expm1 igamma "
    "lgamma log log1p logistic pow rem rsqrt sin sinh sqrt tan tanh"
)
# Results are stored; inputs may be computed on the fly.
_STORES_RESULTS = names(
    "argmax argmin concatenate cumlogsumexp cummax cummin cumprod cumsum dynamic_update_slice gather random_bits "
    "reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_window reduce_window_max "
    "reduce_window_min reduce_window_sum select_and_gather_add select_and_scatter_add threefry2x32"
)
# Results are stored, and so are inputs.
_STORES_INPUTS_TOO = names(
    "all_gather all_to_all cholesky cond conv_general_dilated custom_call dot_general eigh fft io_callback lu psum "
    "psum_invariant pure_callback qr ragged_dot_general scan scatter scatter-add scatter_add sort svd top_k "
    "triangular_solve while"
)
# Elementwise operations are limited by memory bandwidth: one takes as long as this many operations of a product.
_PRODUCT_OPS_PER_ELEMENT = 16


@dataclass(frozen=True, slots=True)
class _XlaOp:
    """An operation on values of a graph; `inside` is the bytes that it needs while it runs, `work` its operations."""

    name: str
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    inside: int
    work: float

    @property
    def reads_arrays(self) -> bool:
        """Whether its inputs have to be in memory."""
        return self.name in _STORES_INPUTS_TOO

    @property
    def makes_arrays(self) -> bool:
        """Whether its results are in memory, no matter who reads them."""
        return self.name in _STORES_INPUTS_TOO or self.name in _STORES_RESULTS

    def stored_for(self, passes: int) -> bool:
        """Whether its results are in memory if this many passes read them."""
        return self.makes_arrays or (passes > 1 and self.name in _EXPENSIVE)


class XlaGraph:
    """The equations of several jaxprs, one after another, with calls inlined. Values are known by their index."""

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self.ops: list[_XlaOp] = []
        self._constant: set[int] = set()

    def values(self, avals: Iterable[Any]) -> list[int]:
        """Add values of these types; their indices."""
        first = len(self.bytes)
        self.bytes.extend(nbytes([aval]) for aval in avals)
        return list(range(first, len(self.bytes)))

    def add(self, jaxpr: core.Jaxpr, given: Sequence[int]) -> list[int]:
        """Append a jaxpr's equations, applied to the values `given`; the values of its results."""
        known: dict[Any, int] = dict(zip(jaxpr.invars, given, strict=True))
        known.update(zip(jaxpr.constvars, self._constants(jaxpr.constvars), strict=True))

        def find(var: Any) -> int:
            return self._constants([var])[0] if isinstance(var, core.Literal) else known[var]

        for eqn in jaxpr.eqns:
            name, reads = eqn.primitive.name, [find(var) for var in eqn.invars]
            inner = list(jaxprs_in_params(eqn.params))
            made: Sequence[int]
            if name in _SAME_ARRAY:
                made = reads
            elif inner and name not in _STORES_INPUTS_TOO and len(inner[0].invars) == len(reads):
                made = self.add(inner[0], reads)  # a call, or a custom derivative, whose first jaxpr is the function
            else:
                made = self.values(var.aval for var in eqn.outvars)
                self.ops.append(_XlaOp(name, tuple(reads), tuple(made), _inside(eqn, inner), _work(eqn)))
            known.update(zip(eqn.outvars, made, strict=True))
        return [find(var) for var in jaxpr.outvars]

    def _constants(self, vars_: Sequence[Any]) -> list[int]:
        values = self.values(var.aval for var in vars_)
        self._constant.update(values)
        return values

    def work(self, start: int, stop: int) -> float:
        """The floating point operations of ops [start, stop)."""
        return math.fsum(op.work for op in self.ops[start:stop])

    def made_of(self, given: Iterable[int]) -> set[int]:
        """The values that depend on `given` and constants alone."""
        found = set(given) | self._constant
        for op in self.ops:
            if found.issuperset(op.reads):
                found.update(op.makes)
        return found

    def stored(self, stop: int, wanted: Iterable[int]) -> set[int]:
        """The values made by the first `stop` ops that become arrays; those in `wanted` do in any case."""
        ops = self.ops[:stop]
        found = {value for op in ops if op.reads_arrays for value in op.reads} | set(wanted)
        # For each value the passes over memory that read it, directly or through values computed on the fly. Readers
        # come after makers, so going backwards all passes are known when an operation's results are decided.
        passes: dict[int, set[int]] = {}
        for place, op in reversed(list(enumerate(ops))):
            readers = set[int]().union(*(passes.get(value, ()) for value in op.makes))
            if op.stored_for(len(readers)):
                found.update(op.makes)
            if not found.isdisjoint(op.makes):
                readers = {place}
            for value in op.reads:
                passes.setdefault(value, set()).update(readers)
        return {value for op in ops for value in op.makes if value in found}


class Liveness:
    """The ranges of ops over which the values that the first `stop` ops of a graph read and store are needed.

    Args:
        graph: the ops.
        stop: the number of ops to consider.
        given: the values that exist before the first op and whose bytes count.
        until: the results, each with the index of the op until which it is needed, even if no op reads it then.
    """

    def __init__(self, graph: XlaGraph, stop: int, given: Iterable[int], until: Mapping[int, int]) -> None:
        self._graph = graph
        self._stored = graph.stored(stop, until)
        self._last = dict(until)
        self._born = dict.fromkeys(given, -1)
        sources: dict[int, set[int]] = {value: {value} for value in self._born}
        self._reads: list[set[int]] = []  # the stored values that each op reads, directly or through others
        for place, op in enumerate(graph.ops[:stop]):
            reads = set[int]().union(*(sources.get(value, ()) for value in op.reads))
            made = self._stored.intersection(op.makes)
            self._reads.append(reads)
            self._born.update(dict.fromkeys(made, place))
            sources.update((value, {value} if value in made else reads) for value in op.makes)
            if made:
                self._last.update((value, max(self._last.get(value, -1), place)) for value in reads)

    def across(self, place: int) -> set[int]:
        """The values from before op `place` that are needed at it or later."""
        return {value for value, born in self._born.items() if born < place <= self._last.get(value, -1)}

    def peak(self, start: int, stop: int, free: set[int]) -> int:
        """The most bytes at once while ops [start, stop) run, without the values in `free`."""
        bytes_, live = self._graph.bytes, self.across(start) - free
        most = sum(bytes_[value] for value in live)
        for place in range(start, stop):
            op = self._graph.ops[place]
            made = self._stored.intersection(op.makes)
            live |= made - free
            now = sum(bytes_[value] for value in live) + op.inside
            done = {value for value in live if self._last.get(value, -1) <= place}
            if not op.makes_arrays:  # an elementwise pass writes its results over inputs that are not needed again
                now -= min(sum(bytes_[value] for value in part) for part in (done & self._reads[place], made - free))
            most = max(most, now)
            live -= done
        return most


def _inside(eqn: Any, inner: Sequence[core.Jaxpr]) -> int:
    """The bytes that an equation needs while it runs, beside its inputs and results."""
    given = [var.aval for var in eqn.invars]
    match eqn.primitive.name:
        case "conv_general_dilated":
            # The gradient of a kernel contracts over the batch, and both factors are transposed for it.
            return nbytes(given) if eqn.params["dimension_numbers"].lhs_spec[0] else 0
        case "select_and_scatter_add":
            # The position of the largest element of each window: an integer of 4 bytes for each axis.
            return sum(4 * len(aval.shape) * int(aval.size) for aval in given)
        case _:
            return max(map(transient, inner), default=0)


def _work(eqn: Any) -> float:
    """The floating point operations of an equation."""
    inner = [sum(map(_work, sub.eqns)) for sub in jaxprs_in_params(eqn.params)]
    if inner:
        return float(max(inner) * eqn.params.get("length", 1))
    size = sum(int(var.aval.size) for var in eqn.outvars)
    match eqn.primitive.name:
        case "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            return float(2 * size * math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted))
        case "conv_general_dilated":
            kernel, numbers = eqn.invars[1].aval, eqn.params["dimension_numbers"]
            return float(2 * size * kernel.size / max(kernel.shape[numbers.rhs_spec[0]], 1))
        case _:
            return float(_PRODUCT_OPS_PER_ELEMENT * size)
