"""Loops of all kinds, of random sizes, with the most bytes that they hold as a second tracker sees it.

The odd ones among them have steps that are not alike, or keep tensors where autograd does not show them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lowtide.torch as lt
from lowtide.torch import measure
from lowtide.torch.state import generators


@dataclass
class RandomLoop:
    """A scan: its step, what it begins with, its inputs, the tensors whose gradients are wanted, and a context."""

    kind: str
    step: Callable[[Any, Any], tuple[Any, Any]]
    init: Any
    xs: Any
    wanted: list[torch.Tensor]
    reduce: Any = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    left: Callable[[], list[torch.Tensor]] = list  # tensors that the plain loop leaves behind too
    lean: bool = False

    def plain(self) -> tuple[Any, Any]:
        """The loop without a plan."""
        with self.around():
            return lt.scan(self.step, self.init, self.xs, reduce=self.reduce)

    def run(self, budget: int) -> tuple[Any, Any]:
        """The loop within a budget."""
        with self.around():
            return lt.checkpointed_scan(
                self.step, self.init, self.xs, budget=budget, reduce=self.reduce, lean=self.lean
            )


class _State(bytes):
    """The state of one of torch's generators, which tells when it is gone."""

    alive: list[int]  # one number: the bytes of all that are counted together

    def __del__(self) -> None:
        self.alive[0] -= len(self)


@contextmanager
def _states_counted(alive: list[int]) -> Iterator[None]:
    """Inside, the bytes of generator states that loops hold are added up."""
    read = generators.read  # type: ignore[attr-defined]

    def counted(address: int, size: int) -> bytes:
        if size < _START:
            return bytes(read(address, size))
        state = _State(read(address, size))
        state.alive = alive
        alive[0] += size
        return state

    generators.read = counted  # type: ignore[attr-defined,assignment]
    try:
        yield
    finally:
        generators.read = read  # type: ignore[attr-defined]


class Poll(TorchDispatchMode):
    """The bytes of storages that operations inside have made, counted after every one of them by asking all of them.

    And of generator states beyond those at the start.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.states = [0]
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in given:
                storage = leaf.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now + max(0, self.states[0] - _START))
        return result

    @property
    def now(self) -> int:
        """The bytes of storages that are alive."""
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        return sum(size for _, size in self._alive.values())


_START = len(torch.get_rng_state())


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def peaks(loop: RandomLoop, budget: int) -> tuple[int, int]:
    """The most bytes beyond inputs, outputs, parameters and gradients, by `lt.measure` and by `Poll`."""
    poll = Poll()
    with _states_counted(poll.states), measure.peak() as memory, poll:
        carry, ys = loop.run(budget)
        tensors = _tensors((carry, ys))
        outputs = measure.storage_bytes([*tensors, *loop.left()])
        forward = (memory.peak - outputs, poll.peak - outputs)
        before = poll.now
        loss = sum(t.sum() for t in tensors if t.requires_grad)
        assert isinstance(loss, torch.Tensor)
        cotangent = torch.ones_like(loss)
        outputs += poll.now - before
        memory.restart_peak()
        poll.peak = poll.now
        grads = torch.autograd.grad(loss, loop.wanted, cotangent, allow_unused=True)
        if loop.reduce == "mean":  # the gradients that come in are real tensors
            outputs += measure.storage_bytes(_tensors(ys))
        held = outputs + measure.storage_bytes([g for g in grads if g is not None])
    return max(forward[0], memory.peak - held), max(forward[1], poll.peak - held)


def kept_by_plain(loop: RandomLoop) -> int:
    """The bytes of all tapes."""
    poll = Poll()
    with poll:
        results = loop.plain()
        return poll.now - measure.storage_bytes([*_tensors(results), *loop.left()])


# --- kinds


def _linear(rng: random.Random, width: int, batch: int) -> tuple[Any, Any, list[torch.Tensor]]:
    w = (torch.randn(width, width) / width**0.5).requires_grad_()
    return lambda h, x: (torch.tanh(h @ w + x), h[:, :1] * 2), torch.zeros(batch, width), [w]


def _alike(rng: random.Random, width: int, batch: int, length: int) -> RandomLoop:
    cell = nn.GRUCell(width, width)
    return RandomLoop(
        "alike",
        lambda h, x: (cell(x, h), h.sum(1)),
        torch.zeros(batch, width),
        torch.randn(length, batch, width),
        list(cell.parameters()),
    )


def _wide(rng: random.Random, width: int, batch: int, length: int) -> RandomLoop:
    """A tape many times the state."""
    net = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    return RandomLoop(
        "wide",
        lambda h, x: (h + 0.1 * net(h + x), h.mean()),
        torch.zeros(batch, width),
        torch.randn(length, batch, width),
        list(net.parameters()),
    )


class Cache(nn.Module):
    """Attention to all steps so far: its state grows with each of them."""

    def __init__(self, width: int, *, listed: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.listed = listed
        self.keys: Any = [] if listed else None
        self.values: Any = [] if listed else None

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        k, v = self.k(h)[:, None], self.v(h)[:, None]
        if self.listed:
            self.keys.append(k)
            self.values.append(v)
            keys, values = torch.cat(self.keys, 1), torch.cat(self.values, 1)
        else:
            keys = self.keys = k if self.keys is None else torch.cat([self.keys, k], 1)
            values = self.values = v if self.values is None else torch.cat([self.values, v], 1)
        scores = (self.q(h)[:, None] @ keys.mT).softmax(-1)
        attended: torch.Tensor = (scores @ values)[:, 0]
        return attended


def _growing(rng: random.Random, width: int, batch: int, length: int) -> RandomLoop:
    cache = Cache(width, listed=rng.random() < 0.5)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.tanh(cache(h + x))
        return h, h.sum(1)

    return RandomLoop(
        "growing list" if cache.listed else "growing",
        step,
        torch.zeros(batch, width),
        torch.randn(length, batch, width),
        list(cache.parameters()),
        left=lambda: _tensors((cache.keys, cache.values)),
    )


def _uneven(rng: random.Random, width: int, batch: int, length: int) -> RandomLoop:
    """Every fifth step is heavier, with as many operations."""
    w = (torch.randn(width, width) / width**0.5).requires_grad_()
    times, first = rng.choice([2, 4, 8]), rng.randrange(5)
    heavy = torch.tensor([times if k % 5 == first else 1 for k in range(length)])

    def step(h: torch.Tensor, x: Any) -> Any:
        kicks, n = x
        h = torch.tanh(((h + kicks).repeat(int(n), 1) @ w).tanh().unflatten(0, (int(n), -1)).mean(0))
        return h, h.sum(1)

    return RandomLoop("uneven", step, torch.zeros(batch, width), (torch.randn(length, batch, width), heavy), [w])


def _dropout(rng: random.Random, width: int, batch: int, length: int) -> RandomLoop:
    step, init, leaves = _linear(rng, width, batch)
    drop = nn.Dropout(0.5)
    return RandomLoop("dropout", lambda h, x: step(drop(h), x), init, torch.randn(length, batch, width), leaves)


def _batch_norm(rng: random.Random, width: int, batch: int, length: int) -> RandomLoop:
    step, init, leaves = _linear(rng, width, batch + 2)
    norm = nn.BatchNorm1d(width)
    return RandomLoop(
        "batch norm",
        lambda h, x: step(norm(h), x),
        init,
        torch.randn(length, batch + 2, width),
        [*leaves, *norm.parameters()],
        left=list,
    )


def _reduced(rng: random.Random, width: int, batch: int, length: int) -> RandomLoop:
    w = (torch.randn(width, width) / width**0.5).requires_grad_()
    v = torch.randn(width, 3 * width, requires_grad=True)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.tanh(h @ w + x)
        return h, (h @ v, h * 2)

    fold = ((torch.zeros(batch, 3 * width), torch.zeros(batch, width)), lambda a, y: (a[0] + y[0], a[1] + y[1]))
    reduce = rng.choice(["sum", "mean", "last", fold])
    loop = RandomLoop("reduced", step, torch.zeros(batch, width), torch.randn(length, batch, width), [w, v])
    loop.reduce = reduce
    loop.kind = f"reduced {reduce if isinstance(reduce, str) else 'fold'}"
    return loop


def _packed(rng: random.Random, width: int, batch: int, length: int) -> RandomLoop:
    """Hooks around the loop, or in the step, that keep copies of what autograd saves."""
    step, init, leaves = _linear(rng, width, batch)

    def hooks() -> AbstractContextManager[Any]:
        return saved_tensors_hooks(lambda t: torch.cat([t.detach(), t.detach()]), lambda t: t[: len(t) // 2])

    inside = rng.random() < 0.5

    def packing(h: torch.Tensor, x: torch.Tensor) -> Any:
        with hooks():
            return step(h, x)

    kind = "packed inside" if inside else "packed"
    xs = torch.randn(length, batch, width)
    return RandomLoop(kind, packing if inside else step, init, xs, leaves, around=nullcontext if inside else hooks)


def _hooked(rng: random.Random, width: int, batch: int, length: int) -> RandomLoop:
    """A forward hook that keeps the last activations."""
    net = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    seen: dict[str, torch.Tensor] = {}
    net[1].register_forward_hook(lambda _, __, out: seen.__setitem__("last", out.detach()))

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = h + 0.1 * net(h + x)
        return h, h.mean()

    return RandomLoop(
        "hooked",
        step,
        torch.zeros(batch, width),
        torch.randn(length, batch, width),
        list(net.parameters()),
        left=lambda: list(seen.values()),
    )


KINDS: list[Callable[[random.Random, int, int, int], RandomLoop]] = [
    _alike,
    _wide,
    _growing,
    _uneven,
    _dropout,
    _batch_norm,
    _reduced,
    _packed,
    _hooked,
]


def random_loop(seed: int, *, short: bool = False) -> tuple[RandomLoop, float]:
    """A loop, and a share of the way from its least budget to all of its tapes.

    Near the least, where runs grow with the square of the length, loops are short, as they are with `short`.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    share = rng.choice([0.0, 0.02, 0.1, 0.3, 0.6, 1.0])
    length = rng.randint(1, 40 if short or share == 0 else 120)
    loop = rng.choice(KINDS)(rng, rng.randint(2, 48), rng.randint(1, 24), length)
    if rng.random() < 0.3:
        loop.wanted.append(loop.xs[0].requires_grad_() if isinstance(loop.xs, tuple) else loop.xs.requires_grad_())
    return loop, share
