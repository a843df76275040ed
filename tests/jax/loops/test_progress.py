"""A bar moves once for each step of a run, never for reruns, however the loop is transformed."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowtide.jax as lt
from lowtide import InputError
from lowtide.jax.loops.ticks import Ticks
from tests.jax.networks import quick

LENGTH = 30
KNOBS: dict[str, dict[str, Any]] = {
    "none": {},
    "base": {"base": 4},
    "every tape": {"base": 100},
    "one snapshot": {"checkpoints": 1},
    "budget": {"budget": "1MB"},
    "reverse": {"checkpoints": 2, "reverse": True},
    "base, reverse": {"base": 7, "reverse": True},
    "unroll": {"checkpoints": 2, "unroll": 4},
    "sum": {"base": 4, "reduce": "sum"},
    "last": {"checkpoints": 3, "reduce": "last"},
}


class Bar:
    def __init__(self) -> None:
        self.moves: list[int] = []

    def update(self, n: int) -> None:
        self.moves.append(n)

    def moved(self) -> list[int]:
        """The moves since the last time, when all that was told has arrived."""
        jax.effects_barrier()
        moves, self.moves = self.moves, []
        return moves


def loss(pbar: Any, loop: Any = lt.checkpointed_scan, length: int = LENGTH, **options: Any) -> Any:
    def run(w: Any, xs: Any = None) -> Any:
        xs = jnp.ones((length, 3)) if xs is None else xs
        h, ys = loop(lambda h, x: (jnp.sin(h * w), h * x), jnp.ones(3), xs, pbar=pbar, **options)
        return h.sum() + ys.sum()

    return run


W = jnp.full(3, 0.9)


@pytest.mark.parametrize("knob", KNOBS)
def test_it_moves_once_for_each_step_of_every_run(knob: str) -> None:
    bar = Bar()
    gradient = quick(jax.grad(loss(bar, **KNOBS[knob])))
    compiled = gradient.lower(W).compile()
    assert bar.moved() == []
    for _ in range(3):
        compiled(W)
        moves = bar.moved()
        assert sum(moves) == LENGTH
        assert min(moves) > 0


@pytest.mark.parametrize("knob", ["none", "base", "reverse"])
def test_without_a_gradient_it_moves_as_much(knob: str) -> None:
    bar = Bar()
    run = quick(loss(bar, **KNOBS[knob]))
    for _ in range(2):
        run(W)
        assert sum(bar.moved()) == LENGTH


@pytest.mark.parametrize("length", [1, 2, 7, 90])
def test_it_moves_by_one_and_with_base_by_a_stretch(length: int) -> None:
    bar = Bar()
    quick(jax.grad(loss(bar, length=length, checkpoints=2)))(W)
    assert bar.moved() == [1] * length
    quick(jax.grad(loss(bar, length=length, base=4)))(W)
    moves = bar.moved()
    assert sum(moves) == length
    assert max(moves) <= 4
    assert len(moves) <= -(-length // 4) + 1


@pytest.mark.long
@pytest.mark.parametrize("knob", ["none", "base"])
def test_outside_of_jit(knob: str) -> None:
    bar = Bar()
    jax.grad(loss(bar, **KNOBS[knob]))(W)
    assert sum(bar.moved()) == LENGTH


@pytest.mark.long
@pytest.mark.parametrize("knob", ["none", "base", "one snapshot"])
def test_a_batch_moves_it_once(knob: str) -> None:
    bar = Bar()
    run = loss(bar, **KNOBS[knob])
    batch = jnp.stack([W, W / 2, W / 3, W / 4])
    for f in (jax.vmap(jax.grad(run)), jax.grad(lambda w: jax.vmap(run)(w).sum())):
        quick(f)(batch)
        assert sum(bar.moved()) == LENGTH


@pytest.mark.parametrize("knob", ["none", "base"])
def test_a_tangent_moves_it_once(knob: str) -> None:
    bar = Bar()
    quick(lambda w: jax.jvp(loss(bar, **KNOBS[knob]), (w,), (w,)))(W)
    assert sum(bar.moved()) == LENGTH


@pytest.mark.parametrize(
    ("knob", "every"),
    [("none", 1), ("none", 7), ("none", 1000), ("base", 7), ("base", 30), ("reverse", 10), ("unroll", 7)],
)
def test_a_number_is_how_often_it_is_drawn(knob: str, every: int, capsys: pytest.CaptureFixture[str]) -> None:
    run = quick(jax.grad(loss(every, **KNOBS[knob])))
    for _ in range(2):  # a new bar each time
        run(W)
        jax.effects_barrier()
        assert full(capsys.readouterr().err, "steps")


def test_a_number_is_how_often_the_device_tells() -> None:
    moves: list[int] = []
    ticks = Ticks(7, LENGTH)

    class Told:
        def update(self, n: int) -> None:
            moves.append(n)

    ticks._make = Told

    def step(carry: Any, k: Any) -> Any:
        ticks.step(k)
        return carry, None

    quick(lambda ks: jax.lax.scan(step, 0, ks)[0])(jnp.arange(LENGTH))
    jax.effects_barrier()
    assert moves == [7, 7, 7, 7, 2]


def test_plain_loops_move_it_too() -> None:
    bar = Bar()
    quick(jax.grad(loss(bar, lt.scan)))(W)
    assert bar.moved() == [1] * LENGTH
    quick(jax.grad(loss(bar, lt.scan, reverse=True, unroll=4)))(W)
    assert bar.moved() == [1] * LENGTH
    quick(lambda xs: lt.for_loop(lambda x: x, xs, pbar=bar))(jnp.ones(5))
    assert bar.moved() == [1] * 5
    quick(jax.grad(lambda w: lt.checkpointed_for_loop(lambda x: x * w, jnp.ones(LENGTH), base=4, pbar=bar).sum()))(2.0)
    assert sum(bar.moved()) == LENGTH


def test_no_steps_do_not_move_it() -> None:
    bar = Bar()
    quick(jax.grad(loss(bar, length=0)))(W)
    assert bar.moved() == []


def test_one_bar_serves_several_loops() -> None:
    bar = Bar()
    quick(jax.grad(lambda w: loss(bar, base=3)(w) + loss(bar, checkpoints=2)(w)))(W)
    assert sum(bar.moved()) == 2 * LENGTH


def test_a_tqdm_bar_of_ones_own_is_used_as_it_is() -> None:
    with pytest.importorskip("tqdm").tqdm(total=LENGTH, disable=None) as bar:
        quick(jax.grad(loss(bar)))(W)
        jax.effects_barrier()
        assert bar.n in (LENGTH, 0)  # it does not count where nobody watches


def full(text: str, label: str) -> bool:
    """Whether the last state that a bar drew is a full one."""
    last = text.rstrip().rpartition("\r")[2]
    return last.startswith(f"{label}: 100%") and re.search(rf"\b{LENGTH}/{LENGTH}\b", last) is not None


@pytest.mark.parametrize(("pbar", "label"), [(True, "steps"), ("training", "training")], ids=str)
@pytest.mark.parametrize("loop", [lt.checkpointed_scan, lt.scan])
def test_a_bar_of_its_own_is_full_at_the_end(
    pbar: Any, label: str, loop: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    quick(jax.grad(loss(pbar, loop)))(W)
    jax.effects_barrier()
    assert full(capsys.readouterr().err, label)


@pytest.mark.parametrize("pbar", [None, False])
def test_no_bar_is_drawn_unless_asked_for(pbar: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = quick(jax.grad(loss(pbar, base=4)))
    assert "callback" not in run.lower(W).as_text()
    run(W)
    jax.effects_barrier()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("pbar", [0, -3, 1.5, object, np.zeros(2), ("a",)], ids=repr)
@pytest.mark.parametrize("loop", [lt.checkpointed_scan, lt.scan])
def test_what_is_no_bar_is_refused(pbar: Any, loop: Any) -> None:
    message = f"pbar={pbar!r}: give True, a whole number of steps, a label, or an object with update(n)"
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        loss(pbar, loop)(W)
