"""Progress bars, brainstate's own among them: every step is shown once, and reruns never."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest
import tqdm.auto

import lowtide.brainstate as lt
from tests.brainstate.partners import brainstate, transform

STEPS = 10
XS = jnp.arange(1.0, STEPS + 1)


class Recorder:
    """Stands where tqdm stands, and writes down what it is told."""

    made: ClassVar[list[Recorder]] = []

    def __init__(self, *, total: int, **options: Any) -> None:
        self.total, self.options = total, options
        self.n, self.moves, self.labels, self.closed = 0, [0][:0], [""][:0], 0
        Recorder.made.append(self)

    def set_description(self, text: str, refresh: bool = True) -> None:
        self.labels.append(text)

    def update(self, n: int) -> None:
        self.n += n
        self.moves.append(n)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    Recorder.made.clear()
    monkeypatch.setattr(tqdm.auto, "tqdm", Recorder)
    return Recorder.made


def train(pbar: Any, runs: int = 1, **knobs: Any) -> None:
    w = brainstate.ParamState(jnp.array(0.5))
    h = brainstate.HiddenState(jnp.array(0.0))

    def step(x: Any) -> Any:
        h.value = jnp.sin(h.value + w.value * x)
        return h.value

    def loss() -> Any:
        return lt.checkpointed_for_loop(step, XS, pbar=pbar, **knobs).sum()

    gradient = transform.jit(transform.grad(loss, {"w": w}))
    for _ in range(runs):
        jax.block_until_ready(gradient())
    jax.effects_barrier()


@pytest.mark.long
@pytest.mark.parametrize("knobs", [{}, {"checkpoints": 2}, {"base": 2}, {"base": 3}], ids=str)
def test_each_step_is_shown_once_however_often_it_runs(knobs: dict[str, Any], made: list[Recorder]) -> None:
    train(transform.ProgressBar(freq=1), runs=2, **knobs)
    assert len(made) == 2  # one for each run of the compiled loop
    for bar in made:
        assert (bar.total, bar.n, bar.closed) == (STEPS, STEPS, 1)
        assert set(bar.labels) == {"Running for 10 iterations"}


@pytest.mark.parametrize(
    ("pbar", "moves"),
    [(4, [4, 4, 2]), (transform.ProgressBar(freq=4), [4, 4, 2]), (transform.ProgressBar(count=2), [5, 5])],
    ids=["whole number", "freq", "count"],
)
def test_a_bar_moves_in_parts_of_its_frequency(pbar: Any, moves: list[int], made: list[Recorder]) -> None:
    train(pbar)
    assert [bar.moves for bar in made] == [moves]


@pytest.mark.long
def test_true_is_every_step_and_false_is_none(made: list[Recorder]) -> None:
    train(False)
    train(None)
    assert made == []
    train(True)
    assert made[0].moves == [1] * STEPS


def test_a_description_can_tell_the_step(made: list[Recorder]) -> None:
    bar = transform.ProgressBar(freq=3, desc=("at {i}", lambda data: {"i": data["i"]}), colour="red")
    train(bar)
    assert made[0].labels == ["at 2", "at 5", "at 8", "at 9"]
    assert made[0].options == {"colour": "red"}


@pytest.mark.long
def test_other_bars_are_lowtides() -> None:
    class Counter:
        n = 0

        def update(self, n: int) -> None:
            self.n += n

    counter = Counter()
    train(counter, runs=3)
    assert counter.n == 3 * STEPS


def test_a_bar_of_the_plain_loop_is_brainstates(capsys: pytest.CaptureFixture[str]) -> None:
    lt.for_loop(jnp.sin, XS, pbar=transform.ProgressBar(freq=5, desc="plainly"))
    jax.effects_barrier()
    assert "plainly: 100%" in capsys.readouterr().err
