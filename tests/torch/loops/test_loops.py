"""Structures, lengths, derivatives of every kind: whatever the plain loop can do."""

from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide.torch.state.bits import same_bits
from tests.torch.networks import gru, plain

KNOBS: list[dict[str, Any]] = [{"base": 3}, {"checkpoints": 2}, {}, {"budget": "200KB"}]


class Pair(NamedTuple):
    h: torch.Tensor
    count: Any


@dataclass
class Point:
    position: torch.Tensor
    velocity: torch.Tensor


torch.utils._pytree.register_dataclass(Point)


def _check(step: Any, init: Any, xs: Any, leaves: list[torch.Tensor], length: int, items: Any, **options: Any) -> None:
    """Against a loop written out: final carry, outputs, gradients."""
    carry, ys = init, []
    for k in range(length):
        carry, y = step(carry, items(k))
        ys.append(y)
    rows = [torch.utils._pytree.tree_flatten(y) for y in ys]
    stacked = [torch.stack(list(column)) for column in zip(*(row[0] for row in rows), strict=True)]
    expected_y = torch.utils._pytree.tree_unflatten(stacked, rows[0][1])
    found_carry, found_y = lt.checkpointed_scan(step, init, xs, length, **options)
    for expected, found in ((carry, found_carry), (expected_y, found_y)):
        old, new = torch.utils._pytree.tree_flatten(expected), torch.utils._pytree.tree_flatten(found)
        assert old[1] == new[1]
        for a, b in zip(old[0], new[0], strict=True):
            assert same_bits(a, b) if isinstance(a, torch.Tensor) else a == b
    outcomes = []
    for result in ((carry, expected_y), (found_carry, found_y)):
        tensors = [
            t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad
        ]
        loss: Any = sum((t.abs() ** 2).sum() for t in tensors)
        outcomes.append(torch.autograd.grad(loss, leaves))
    for a, b in zip(*outcomes, strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("options", KNOBS, ids=str)
def test_nested_values_go_in_and_come_out(options: dict[str, Any]) -> None:
    w = torch.randn(3, 3, requires_grad=True)
    xs = {"a": torch.randn(11, 2, 3, requires_grad=True), "b": (torch.arange(11), None)}

    def step(carry: Any, x: Any) -> Any:
        pair, extra, nothing, point = carry
        h = torch.tanh(pair.h @ w + x["a"])
        point = Point(point.position + h, point.velocity * 0.9)
        carry = (Pair(h, pair.count + x["b"][0]), {"n": extra["n"] + 1, "label": "run"}, nothing, point)
        return carry, OrderedDict(y=h.sum(1), z=[h * 2, {"k": x["b"][0]}])

    init = (
        Pair(torch.zeros(2, 3), torch.tensor(0)),
        {"n": 0, "label": "start"},
        None,
        Point(torch.zeros(2, 3), torch.ones(2, 3, requires_grad=True)),
    )
    assert isinstance(xs["a"], torch.Tensor)
    leaves = [w, xs["a"]]
    rows = xs["a"].unbind(0)
    _check(step, init, xs, leaves, 11, lambda k: {"a": rows[k], "b": (torch.tensor(k), None)}, **options)


@pytest.mark.parametrize("options", KNOBS, ids=str)
@pytest.mark.parametrize("length", [1, 2, 3, 5, 17])
def test_any_length_without_inputs(length: int, options: dict[str, Any]) -> None:
    w = torch.randn(3, requires_grad=True)
    h0 = torch.randn(3, requires_grad=True)
    _check(lambda h, x: ((h * w).sin(), h), h0, None, [w, h0], length, lambda k: None, **options)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float16, torch.bfloat16], ids=str)
def test_complex_and_half_precision(dtype: torch.dtype) -> None:
    w = torch.randn(3, 3).to(dtype).requires_grad_()
    xs = torch.randn(9, 2, 3).to(dtype).requires_grad_()
    rows = xs.unbind(0)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.tanh(h @ w + x)
        return h, h

    _check(step, torch.zeros(2, 3, dtype=dtype), xs, [w, xs], 9, lambda k: rows[k], base=2)


def test_no_steps() -> None:
    net = nn.BatchNorm1d(3)
    w = torch.randn(3, 3)
    init = torch.ones(2, 3)
    before = torch.get_rng_state()

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        return h, {"y": net(x @ w) + torch.rand(3), "n": 1}

    for loop in (lt.scan, lt.checkpointed_scan):
        carry, ys = loop(step, init, torch.zeros(0, 2, 3))
        assert carry is init
        assert ys["y"].shape == (0, 2, 3)
        assert ys["n"] == []
        assert loop(step, init, length=0, reduce=(torch.tensor(4.0), lambda acc, y: acc + y))[1] == 4.0
    assert torch.equal(lt.checkpointed_for_loop(lambda x: x * 2, torch.zeros(0, 4), reduce="sum"), torch.zeros(4))
    assert int(net.num_batches_tracked or 0) == 0
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(ValueError, match="no steps has no value"):
        lt.checkpointed_for_loop(lambda x: x, torch.zeros(0, 4), reduce="mean")
    with pytest.raises(ValueError, match="Steps of length 0"):
        lt.checkpointed_for_loop(lambda x: x, lt.Steps([]))
    with pytest.raises(ValueError, match="needs no plan"):
        lt.plan_for_loop(lambda x: x, torch.zeros(0, 4))


def test_inputs_that_are_not_in_memory(tmp_path: Path) -> None:
    data = np.random.default_rng(0).normal(size=(13, 2, 3)).astype(np.float32)
    path = tmp_path / "inputs"
    np.memmap(path, np.float32, "w+", shape=data.shape)[:] = data
    disk = np.memmap(path, np.float32, "r", shape=data.shape)
    w = torch.randn(3, 3, requires_grad=True)

    def step(h: torch.Tensor, x: Any) -> Any:
        h = torch.tanh(h @ w + torch.as_tensor(np.array(x)))
        return h, h

    sources = [lt.Steps(disk), lt.Steps(list(data)), lt.Steps(lambda k: data[k], 13), lt.Steps(lambda k: data[k])]
    expected = lt.scan(step, torch.zeros(2, 3), lt.Steps(data))[1]
    gradient = torch.autograd.grad(expected.sum(), w)[0]
    for source in sources:
        for options in KNOBS:
            found = lt.checkpointed_scan(step, torch.zeros(2, 3), source, 13, **options)[1]
            assert same_bits(found, expected)
            assert same_bits(torch.autograd.grad(found.sum(), w)[0], gradient)
    backwards = lt.checkpointed_scan(step, torch.zeros(2, 3), {"s": sources[0]}["s"], reverse=True, base=4)[1]
    assert same_bits(backwards, lt.scan(step, torch.zeros(2, 3), sources[1], reverse=True)[1])
    assert repr(sources[2]) == "Steps(length=13)"


def test_steps_and_tensors_side_by_side() -> None:
    xs = torch.randn(5, 2, requires_grad=True)
    ys = lt.checkpointed_for_loop(lambda x, k: x["t"] * k, {"t": xs}, lt.Steps([1.0, 2.0, 3.0, 4.0, 5.0]), base=2)
    assert torch.equal(ys, xs * torch.arange(1.0, 6.0)[:, None])
    assert torch.equal(torch.autograd.grad(ys.sum(), xs)[0], torch.arange(1.0, 6.0)[:, None].expand(5, 2))


def test_outputs_that_are_not_tensors_come_in_a_list() -> None:
    ys = lt.checkpointed_for_loop(lambda x: {"k": int(x), "x": x * 1.0, "none": None}, torch.arange(4), base=2)
    assert ys == {"k": [0, 1, 2, 3], "x": ys["x"], "none": None}


def test_a_fold_of_ones_own() -> None:
    w = torch.randn(3, requires_grad=True)
    xs = torch.randn(17, 3)

    def fold(acc: Any, y: torch.Tensor) -> Any:
        return acc[0] * 0.9 + (y * w).sum(), acc[1] + 1

    total, count = torch.tensor(0.0), 0
    h = torch.zeros(3)
    for x in xs:
        h = torch.tanh(h * w + x)
        total, count = fold((total, count), h)
    expected = torch.autograd.grad(total, w)[0]
    loops: list[tuple[Any, dict[str, Any]]] = [(lt.scan, {}), *[(lt.checkpointed_scan, knob) for knob in KNOBS]]
    for loop, options in loops:
        carry, (found, n) = loop(
            lambda h, x: (torch.tanh(h * w + x),) * 2,
            torch.zeros(3),
            xs,
            reduce=(((torch.tensor(0.0), 0)), fold),
            **options,
        )
        assert (found.item(), n) == (total.item(), 17)
        assert same_bits(carry, h)
        assert same_bits(torch.autograd.grad(found, w)[0], expected)


@pytest.mark.parametrize("reduce", ["sum", "mean", "last", None])
@pytest.mark.parametrize("reverse", [False, True])
def test_the_plain_loops_are_the_plain_loop(reduce: str | None, reverse: bool) -> None:
    torch.manual_seed(0)
    net = gru(7, torch.float64)
    carry, ys = plain(net, reverse=reverse, reduce=reduce)
    found_carry, found = lt.scan(net.step, net.init, net.xs, reverse=reverse, reduce=reduce)
    assert same_bits(carry, found_carry)
    assert same_bits(ys, found)
    with torch.no_grad():
        for loop in (lt.scan, lt.checkpointed_scan):
            quiet = loop(net.step, net.init, net.xs, reverse=reverse, reduce=reduce)[1]
            assert same_bits(quiet, ys)
            assert not quiet.requires_grad


def test_where_nothing_needs_a_gradient_nothing_has_one() -> None:
    carry, ys = lt.checkpointed_scan(lambda h, x: (h + x, h), torch.zeros(2), torch.ones(5, 2), base=2)
    assert not carry.requires_grad
    assert not ys.requires_grad
    assert torch.equal(ys[:, 0], torch.arange(5.0))


@pytest.mark.parametrize("options", KNOBS, ids=str)
def test_gradients_can_be_taken_twice_and_differentiated(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    w = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    v = w
    h0 = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    xs = torch.randn(9, 2, 3, dtype=torch.float64, requires_grad=True)
    cell = nn.Sequential(nn.Linear(3, 3).double(), lt.spiking.Expon(4.0))

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.tanh(h @ w + x @ v + cell(x))
        return h, (h, h.sum())

    leaves = [w, h0, xs, *cell.parameters()]

    def second(run: Any) -> list[torch.Tensor]:
        nonlocal v
        v = w.t() * 2  # not a leaf, and computed from one that the step uses too
        lt.spiking.reset(cell)
        torch.manual_seed(1)
        h, (ys, sums) = run()
        loss = (ys**3).sum() + (h**2).sum() + sums.prod()
        once = torch.autograd.grad(loss, leaves, retain_graph=True)
        again = torch.autograd.grad(loss, leaves, create_graph=True)
        assert all(same_bits(a, b) for a, b in zip(once, again, strict=True))
        size = sum((g**2).sum() for g in again)
        assert isinstance(size, torch.Tensor)
        return [*once, *torch.autograd.grad(size, leaves)]

    def oracle() -> Any:
        h, ys, sums = h0, [], []
        for x in xs.unbind(0):
            h, (y, s) = step(h, x)
            ys.append(y)
            sums.append(s)
        return h, (torch.stack(ys), torch.stack(sums))

    expected = second(oracle)
    found = second(lambda: lt.checkpointed_scan(step, h0, xs, **options))
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert all(same_bits(a, b) for a, b in zip(expected[: len(leaves)], found[: len(leaves)], strict=True))


def test_backward_accumulates_as_usual_and_frees() -> None:
    w = torch.randn(3, requires_grad=True)
    for _ in range(2):
        ys = lt.checkpointed_for_loop(lambda x: (x * w).sin(), torch.ones(6, 3), base=2)
        ys.sum().backward()
    expected = 2 * torch.autograd.grad(torch.stack([(torch.ones(3) * w).sin() for _ in range(6)]).sum(), w)[0]
    torch.testing.assert_close(w.grad, expected)
    with pytest.raises(RuntimeError, match="second time"):
        ys.sum().backward()


def test_only_the_final_state_or_only_an_output_is_used() -> None:
    w = torch.randn(3, requires_grad=True)
    unused = torch.randn(3, requires_grad=True)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        return (h * w).sin(), (h.detach(), x * unused)

    h, (ys, zs) = lt.checkpointed_scan(step, torch.ones(3), torch.ones(7, 3), base=3)
    assert not ys.requires_grad
    grads = torch.autograd.grad(h.sum(), [w, unused], retain_graph=True, allow_unused=True)
    assert grads[1] is None
    assert grads[0] is not None
    assert torch.equal(torch.autograd.grad(zs[2].sum(), unused)[0], torch.ones(3))


def test_hooks_fire_once() -> None:
    w = nn.Parameter(torch.randn(3))
    fired: list[str] = []
    w.register_hook(lambda g: fired.append("parameter"))
    w.register_post_accumulate_grad_hook(lambda p: fired.append("accumulated"))
    product: torch.Tensor = w

    def fresh() -> None:
        nonlocal product
        product = w * 2
        product.register_hook(lambda g: g * 0)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = (h * w + product).sin()
        h.register_hook(lambda g: fired.append("step"))
        return h, h

    fresh()
    _, ys = lt.checkpointed_scan(step, torch.ones(3), torch.ones(8, 3), base=3)
    ys.sum().backward()
    assert sorted(fired) == ["accumulated", "parameter", *["step"] * 8]
    direct = w.grad
    w.grad = None
    fresh()
    h, rows = torch.ones(3), []
    for x in torch.ones(8, 3):
        h, _ = step(h, x)
        rows.append(h)
    torch.stack(rows).sum().backward()
    torch.testing.assert_close(direct, w.grad)


def test_a_step_may_differentiate_inside() -> None:
    """Forces as the gradient of an energy: the step needs grad also where no tape is kept."""
    k = torch.tensor([1.0, 2.0], requires_grad=True)

    def step(state: Any, _: Any) -> Any:
        q, p = state
        (force,) = torch.autograd.grad(-(k * q**2).sum() / 2, q, create_graph=True)
        return (q + 0.1 * p, p + 0.1 * force), (p**2).sum()

    q0, p0 = torch.ones(2, requires_grad=True), torch.zeros(2)
    state, energies = (q0, p0), []
    for _ in range(20):
        state, energy = step(state, None)
        energies.append(energy)
    expected = torch.autograd.grad(torch.stack(energies).sum(), [k, q0])
    for options in KNOBS:
        _, found = lt.checkpointed_scan(step, (q0, p0), length=20, **options)
        ours = torch.autograd.grad(found.sum(), [k, q0])
        assert all(same_bits(a, b) for a, b in zip(expected, ours, strict=True))


def test_autocast_is_the_same_in_reruns() -> None:
    cell = nn.GRUCell(3, 3)
    xs = torch.randn(10, 2, 3)

    def loss(run: Any, cache: bool) -> Any:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            ys = run()
        return ys, torch.autograd.grad(ys.float().pow(2).sum(), list(cell.parameters()))

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = cell(x, h).float()
        return h, h

    def oracle() -> torch.Tensor:
        h, ys = torch.zeros(2, 3), []
        for x in xs:
            h, y = step(h, x)
            ys.append(y)
        return torch.stack(ys)

    expected, gradients = loss(oracle, cache=False)
    for options in KNOBS:
        for cache in (True, False):
            found, ours = loss(
                lambda options=options: lt.checkpointed_scan(step, torch.zeros(2, 3), xs, **options)[1], cache
            )
            assert same_bits(found, expected)
            assert all(same_bits(a, b) for a, b in zip(ours, gradients, strict=True))
    _, cached = loss(oracle, cache=True)
    for a, b in zip(cached, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


def test_autocast_keeps_copies_of_weights_again_after_a_loop() -> None:
    cell, xs = nn.GRUCell(3, 3), torch.randn(10, 2, 3)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = cell(x, h).float()
        return h, h

    def fails(h: torch.Tensor, k: torch.Tensor) -> Any:
        return step(h, xs[k] / (7 // (7 - int(k))))

    for cache in (True, False):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            ys = lt.checkpointed_scan(step, torch.zeros(2, 3), xs, checkpoints=2)[1]
            assert torch.is_autocast_cache_enabled() == cache
            ys.sum().backward()
            assert torch.is_autocast_cache_enabled() == cache
            with pytest.raises(ZeroDivisionError):
                lt.checkpointed_scan(fails, torch.zeros(2, 3), torch.arange(10), checkpoints=2)
            assert torch.is_autocast_cache_enabled() == cache


def test_default_dtype_and_named_contexts_are_the_same_in_reruns() -> None:
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    entered = []

    class Context:
        def __enter__(self) -> None:
            entered.append(1)

        def __exit__(self, *_: Any) -> None:
            pass

    torch.set_default_dtype(torch.float64)
    try:
        ys = lt.checkpointed_for_loop(lambda x: w * torch.ones(3) * x, torch.ones(5, 3), base=2, contexts=[Context])
    finally:
        torch.set_default_dtype(torch.float32)
    ys.sum().backward()
    assert w.grad is not None
    assert torch.equal(w.grad, torch.full((3,), 5.0, dtype=torch.float64))
    assert entered == [1]
    assert torch.get_default_dtype() == torch.float32


def test_several_threads_at_once() -> None:
    results: dict[int, bool] = {}

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        w = torch.randn(4, 4, generator=generator, requires_grad=True)
        cell = nn.Sequential(nn.Linear(4, 4), lt.spiking.LIF(3.0))
        xs = torch.randn(40, 2, 4, generator=generator)
        outcomes = []
        loops: list[tuple[Any, dict[str, Any]]] = [(lt.for_loop, {}), (lt.checkpointed_for_loop, {"checkpoints": 3})]
        for loop, options in loops:
            lt.spiking.reset(cell)
            ys = loop(lambda x: torch.tanh(cell(x) @ w), xs, **options)
            outcomes.append((ys, *torch.autograd.grad(ys.sum(), [w, *cell.parameters()])))
        results[seed] = all(same_bits(a, b) for a, b in zip(*outcomes, strict=True))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(6), True)


def test_a_tensor_used_outside_too_agrees_to_a_rounding() -> None:
    w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    xs = torch.randn(30, 2, 4, dtype=torch.float64)
    losses = []
    loops: list[tuple[Any, dict[str, Any]]] = [(lt.scan, {}), (lt.checkpointed_scan, {"base": 5})]
    for loop, options in loops:
        _, ys = loop(lambda h, x: (torch.tanh(h @ w + x),) * 2, torch.zeros(2, 4).double(), xs, **options)
        losses.append(torch.autograd.grad(ys.sum() + (w**2).sum(), w)[0])
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-14, atol=1e-14)


def test_named_tuples_of_any_make() -> None:
    make = namedtuple("make", "h n")
    w = torch.randn(2, requires_grad=True)
    carry, _ = lt.checkpointed_scan(
        lambda c, x: (make(c.h * w, c.n + 1), None), make(torch.ones(2), 0), length=4, base=2
    )
    assert type(carry) is make
    assert carry.n == 4
    assert torch.equal(carry.h, ((w * w) * w) * w) or torch.allclose(carry.h, w**4)
