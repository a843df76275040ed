"""Threads share torch's generator: a call among others gives the gradient of its own output's mask, or an error."""

from __future__ import annotations

import faulthandler
import itertools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide import CheckpointError
from lowtide.torch.state.bits import same_bits

THREADS = 8


@pytest.fixture(autouse=True)
def _ends_rather_than_hangs() -> Iterator[None]:
    """Threads that wait for each other with the interpreter's lock held leave nobody else to say so."""
    faulthandler.dump_traceback_later(240, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(params=[5e-3, 5e-4], ids=["Python's own turns", "short turns"])
def turns(request: pytest.FixtureRequest) -> Iterator[float]:
    """How long a thread runs before others have their turn; what goes wrong depends on it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(request.param)
    yield request.param
    sys.setswitchinterval(before)


def _in_threads(calls: int, one: Callable[[int, int], str]) -> Counter[str]:
    """`one(thread, call)` in every thread at once; what each call came to, counted."""
    outcomes: list[str] = []
    start = threading.Barrier(THREADS)

    def work(thread: int) -> None:
        start.wait()
        for call in range(calls // THREADS):
            try:
                outcomes.append(one(thread, call))
            except CheckpointError:
                outcomes.append("refused")
            except BaseException as error:
                outcomes.append(f"{type(error).__name__}: {error}"[:200])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == calls
    return Counter(outcomes)


DROPS = 6


def _dropped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Dropped again and again, so that other threads draw in between; 0 where any mask is, else a multiple of w."""
    y = x * w
    for _ in range(DROPS):
        y = nn.functional.dropout(y, 0.1)
    return y


def _scale() -> float:
    """What is left of 1 that is never dropped."""
    return float((torch.ones(()) / 0.9) ** DROPS)


def _is_right(w: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the gradient has the mask of its own output."""
    (grad,) = torch.autograd.grad(y.sum(), w)
    left = y.detach() != 0
    return torch.equal(grad != 0, left) and torch.allclose(grad, left * _scale())


def _one(size: int) -> str:
    w = torch.rand(size).add(0.5).requires_grad_()
    return "right" if _is_right(w, lt.checkpoint(_dropped, torch.ones(size), w)) else "WRONG"


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "calls"),
    [
        (64, 400),
        (50_000, 400),
        pytest.param(64, 8_000, marks=pytest.mark.slow),
        pytest.param(4096, 8_000, marks=pytest.mark.slow),
        pytest.param(50_000, 2_000, marks=pytest.mark.slow),
    ],
)
def test_no_call_among_others_gets_a_wrong_mask(size: int, calls: int, turns: float, record_property: Any) -> None:
    found = _in_threads(calls, lambda thread, call: _one(size))
    record_property(
        "figure", f"checkpoint, dropout of {size:,} in {THREADS} threads, {calls:,} calls, turns {turns}: {dict(found)}"
    )
    assert set(found) <= {"right", "refused"}


@pytest.mark.usefixtures("turns")
@pytest.mark.parametrize("calls", [80, pytest.param(1_600, marks=pytest.mark.slow)])
def test_no_call_gets_a_wrong_mask_when_backwards_come_later(calls: int, record_property: Any) -> None:
    """Forward and backward of other threads lie between the forward and the backward of each."""

    def one(thread: int, call: int) -> str:
        made = []
        for _ in range(4):
            w = torch.rand(256).add(0.5).requires_grad_()
            made.append((w, lt.checkpoint(_dropped, torch.ones(256), w)))
        return "right" if all(_is_right(w, y) for w, y in reversed(made)) else "WRONG"

    found = _in_threads(calls, one)
    record_property("figure", f"checkpoint, four at a time in {THREADS} threads, {calls:,}: {dict(found)}")
    assert set(found) <= {"right", "refused"}


@pytest.mark.usefixtures("turns")
def test_other_threads_that_draw_without_checkpoint_cause_no_wrong_mask(record_property: Any) -> None:
    def one(thread: int, call: int) -> str:
        if thread % 2:
            for _ in range(4):
                torch.rand(100)
            return "drawn"
        return _one(256)

    found = _in_threads(400, one)
    record_property("figure", f"checkpoint, half of {THREADS} threads only draw: {dict(found)}")
    assert set(found) <= {"right", "refused", "drawn"}


def test_another_threads_draw_at_another_place_is_found_out() -> None:
    """It moves the generator equally far in both runs, so the end state does not show it; the mask does."""
    places = iter([0, 1])

    def drawing() -> None:
        thread = threading.Thread(target=lambda: torch.rand(100))
        thread.start()
        thread.join()

    def function(w: torch.Tensor) -> torch.Tensor:
        place = next(places, 1)
        if place == 0:
            drawing()
        y = nn.functional.dropout(w * 2, 0.5)
        if place == 1:
            drawing()
        return y

    w = torch.ones(100, requires_grad=True)
    y = lt.checkpoint(function, w)
    with pytest.raises(CheckpointError, match="other threads that draw"):
        torch.autograd.grad(y.sum(), w)


@pytest.mark.usefixtures("turns")
def test_calls_that_draw_nothing_are_never_refused() -> None:
    def one(thread: int, call: int) -> str:
        w = torch.linspace(0, 1, 64, requires_grad=True)
        if thread % 2:  # these move the generator
            with suppress(CheckpointError):
                _one(64)
            return "right"
        y = lt.checkpoint(lambda w: (w * 2).sin().exp(), w)
        (grad,) = torch.autograd.grad(y.sum(), w)
        (expected,) = torch.autograd.grad((w * 2).sin().exp().sum(), w)
        return "right" if same_bits(grad, expected) else "WRONG"

    assert _in_threads(400, one) == {"right": 400}


@pytest.mark.usefixtures("turns")
def test_threads_with_generators_of_their_own_are_never_refused() -> None:
    generators = [torch.Generator().manual_seed(k) for k in range(THREADS)]

    def noisy(w: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return w * torch.bernoulli(torch.full((64,), 0.5), generator=generator)

    def one(thread: int, call: int) -> str:
        w = torch.linspace(1, 2, 64, requires_grad=True)
        y = lt.checkpoint(noisy, w, generators[thread])
        (grad,) = torch.autograd.grad(y.sum(), w)
        return "right" if same_bits(grad, (y.detach() != 0) * torch.tensor(1.0)) else "WRONG"

    assert _in_threads(400, one) == {"right": 400}


@pytest.mark.usefixtures("turns")
def test_modules_with_state_of_their_own_in_threads() -> None:
    """One BatchNorm in each thread: statistics are updated once, and gradients are the plain ones."""

    def one(thread: int, call: int) -> str:
        x = torch.linspace(0, 1, 24).view(8, 3).requires_grad_()
        outcomes = []
        for checkpoint in (lambda f, x: f(x), lt.checkpoint):
            net = nn.BatchNorm1d(3)
            y = torch.tanh(checkpoint(net, checkpoint(net, x)))
            grads = torch.autograd.grad(y.square().sum(), [x, *net.parameters()])
            outcomes.append([*grads, *net.buffers()])
        return "right" if all(same_bits(a, b) for a, b in zip(*outcomes, strict=True)) else "WRONG"

    assert _in_threads(160, one) == {"right": 160}


def test_a_backward_in_another_thread_than_its_forward() -> None:
    w = torch.rand(100).add(0.5).requires_grad_()
    y = lt.checkpoint(_dropped, torch.ones(100), w)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(y.sum(), w)))
    thread.start()
    thread.join()
    assert torch.equal(found[0] != 0, y.detach() != 0)
    assert not lt.is_recomputing()


def test_two_threads_take_one_graph_back_at_once() -> None:
    """As data-parallel training in threads does it; both get the gradient."""
    for _ in range(10):
        w = torch.rand(100).add(0.5).requires_grad_()
        a, b = lt.checkpoint(lambda w: ((w * 2).sin().exp(), (w * 3).cos().exp()), w)
        found: dict[str, Any] = {}

        def take(name: str, y: torch.Tensor, w: torch.Tensor = w, found: dict[str, Any] = found) -> None:
            try:
                found[name] = torch.autograd.grad(y.sum(), w, retain_graph=True)[0]
            except CheckpointError as error:
                found[name] = error

        threads = [threading.Thread(target=take, args=pair) for pair in (("a", a), ("b", b))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expected = {
            "a": torch.autograd.grad((w * 2).sin().exp().sum(), w)[0],
            "b": torch.autograd.grad((w * 3).cos().exp().sum(), w)[0],
        }
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert isinstance(value, CheckpointError) or same_bits(value, expected[name])


def _in_a_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@pytest.mark.parametrize("draws_itself", [False, True])
def test_among_others_a_function_is_refused_only_if_it_draws(draws_itself: bool) -> None:
    """The generator is moved by another amount in every run; only where the function draws does it matter."""
    amounts = itertools.count(1)

    def function(x: torch.Tensor) -> torch.Tensor:
        _in_a_thread(lambda: torch.rand(next(amounts)))
        return nn.functional.dropout(x.sin()).exp() if draws_itself else x.sin()

    x = torch.ones(300, requires_grad=True)
    y = lt.checkpoint(function, x)
    if draws_itself:
        with pytest.raises(CheckpointError, match="other threads that draw from the same random generator"):
            y.sum().backward()
    else:
        y.sum().backward()
        assert x.grad is not None
        assert same_bits(x.grad, x.detach().cos())
