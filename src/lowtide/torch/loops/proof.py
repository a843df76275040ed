"""Proof that a loop's reruns repeat its first runs: samples of outputs and states, and graphs where something moves.

Every step is taped once, and then its output is compared with that of its first run; the state is compared wherever a
tape or a run without one ends. By default that is done by samples, with `check_rerun=True` by every bit and at every
step, with False not at all. Where a counter or an iterator outside moves while the first steps run, the graphs of
first runs and reruns are compared too, since such a thing can change a graph and no value (`state/surroundings.py`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.errors import CheckpointError
from lowtide.torch.state.capture import Graph, same_graph
from lowtide.torch.state.samples import Sample, compare_later, is_in_backward, sample_of, whole_sample_of
from lowtide.torch.state.structure import NUMBERS

_MASK = (1 << 64) - 1
_WAY_OUT = (
    "A step has to do the same each time it runs, and gradients are not to be trusted after this error. Make the "
    "counter, iterator or cache that it uses an attribute of a module, or part of the carry; draw random numbers from "
    "generators that the step names, or name the generator: generators=(g,); and change nothing between forward and "
    "backward"
)


@dataclass(frozen=True, slots=True)
class _Telling:
    """That an iterator or a list has come to its end by the time of a rerun is said to be that.

    No generator makes this context: `contextlib` takes an error that comes from a `StopIteration` for Python's own.
    """

    proof: Proof
    start: int
    stop: int

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if isinstance(error, StopIteration | LookupError):
            raise self.proof.raises(self.start, self.stop, error) from error


class Proof:
    """What first runs left of each step.

    Attributes:
        always: whether every bit is compared, at every step.
        never: whether nothing is.
        moving: names of what moved while the first steps ran; where there are any, graphs are compared.
        sample: takes a sample of a tensor.
    """

    def __init__(self, check_rerun: bool | None) -> None:
        self.always = check_rerun is True
        self.never = check_rerun is False
        self.moving: list[str] = []
        self.sample = whole_sample_of if self.always else sample_of
        self._outputs = array("Q")  # by step
        self._states: dict[int, list[Sample]] = {}  # by the number of steps that led there
        self._on_device: dict[int, list[Sample]] = {}  # by step, samples of outputs that are on a device
        # What the forward has run again already is compared in the backward: to read it would wait.
        self._waiting: list[tuple[torch.Tensor, torch.Tensor, Callable[[], CheckpointError]]] = []
        self._graphs: dict[int, Graph] = {}  # by step
        self._interned: dict[Any, Any] = {}

    @property
    def compares_graphs(self) -> bool:
        """Whether graphs are compared: steps are then taped one by one, and with grad at first too."""
        return bool(self.moving) and not self.never

    def output(self, step: int, leaves: list[Any]) -> None:
        """Note the output of a step's first run, or compare that of a rerun with it."""
        if self.never:
            return
        total = 0
        others: list[Sample] = []
        for leaf in leaves:
            sample = self._sample_of(leaf)
            if isinstance(sample, torch.Tensor):
                others.append(sample)
            else:
                total = (total * 1_000_003 + sample) & _MASK
        outputs = self._outputs
        if step >= len(outputs):
            outputs.extend([0] * (step - len(outputs)))
            outputs.append(total)
            if others:
                self._on_device[step] = others
            return
        if outputs[step] != total:
            raise self._differs(step, "its output is another")
        self._compare_on_device(others, self._on_device.get(step, []), step, "its output is another")

    def state(self, step: int, leaves: list[Any]) -> None:
        """Note the state after `step` steps of a first run, or compare that of a rerun with it."""
        if self.never:
            return
        now = [self._sample_of(leaf) for leaf in leaves]
        then = self._states.setdefault(step, now)
        if then is now:
            return
        # Hidden state that began to change later was not in it then, and stands at the end.
        for one, other in zip(then, now, strict=False):
            if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
                self._compare_on_device([other], [one], step - 1, "the state after it is another")
            elif one is not other and one != other:
                raise self._differs(step - 1, "the state after it, or after a step before it, is another")

    def graph(self, step: int, graph: Graph) -> None:
        """Note the graph of a step's first run, or compare that of a rerun with it."""
        known = self._interned.setdefault(graph[0], graph[0]), graph[1]
        then = self._graphs.setdefault(step, known)
        if then is not known and not same_graph(then, known):
            what = _first_difference(then, known)
            raise self._differs(step, f"its outputs are the same, but not how gradients flow through it: {what}")

    def forget(self) -> None:
        """Forget everything: the first runs begin again."""
        del self._outputs[:]
        self._states.clear()
        self._on_device.clear()
        self._waiting.clear()
        self._graphs.clear()

    def _sample_of(self, leaf: Any) -> Sample:
        if isinstance(leaf, torch.Tensor):
            return self.sample(leaf)
        return hash(leaf) & _MASK if type(leaf) in NUMBERS else 0

    def _compare_on_device(self, now: list[Sample], then: list[Sample], step: int, how: str) -> None:
        error: Callable[[], CheckpointError] = lambda: self._differs(step, how)  # noqa: E731
        for one, other in zip(then, now, strict=False):
            if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
                self._waiting.append((one, other, error))
        if is_in_backward():
            for pair in self._waiting:
                compare_later(*pair)
            self._waiting.clear()

    def telling(self, start: int, stop: int) -> _Telling:
        """A context in which steps [start, stop) run again: what they raise and did not at first is explained."""
        return _Telling(self, start, stop)

    def raises(self, start: int, stop: int, error: BaseException) -> CheckpointError:
        """What to raise where one of steps [start, stop), run again, raised an error that it did not at first."""
        steps = f"step {start:,}" if stop == start + 1 else f"one of the steps {start:,} to {stop - 1:,}"
        what = f"{steps}, run again, raised {type(error).__name__}({error}), and did not at first"
        if isinstance(error, StopIteration):
            why = (
                "an iterator that it takes items from is at its end after the first runs. Give the items as xs, "
                "stacked or as lt.Steps(items), or make the iterator an attribute of a module"
            )
        else:
            why = (
                "a counter or a container that it uses is not as it was at first. Count in the carry or in an "
                "attribute of a module, give what is indexed by step as xs, and take nothing out of containers outside"
            )
        return CheckpointError(f"{what}: {why}.{self._moving()}")

    def _moving(self) -> str:
        return f" What moved while the first steps ran: {', '.join(self.moving)}." if self.moving else ""

    def _differs(self, step: int, how: str) -> CheckpointError:
        return CheckpointError(
            f"step {step:,}, run again, does not do what it did at first: {how}. {_WAY_OUT}.{self._moving()} "
            "check_rerun=True finds the first such step, check_rerun=False compares nothing; if the step picks other "
            "kernels without grad, pass advance_with_grad=True"
        )


def _first_difference(then: Graph, now: Graph) -> str:
    for one, other in zip(then[0], now[0], strict=False):
        if one != other:
            at_first, here = _in_words(one), _in_words(other)
            differ = f"{at_first} at first, {here} now"
            return differ if at_first != here else f"{at_first} hands its gradient on to others than at first"
    if len(then[0]) != len(now[0]):
        return f"{len(then[0]):,} nodes and results at first, {len(now[0]):,} now"
    return "the operations are the same, but not the tensors that they have saved"


def _in_words(row: Any) -> str:
    if isinstance(row, tuple):
        numbers = ", ".join(f"{name}={value}" for name, value in row[1])
        return f"{row[0]}({numbers})"
    return "no gradient" if row is None else "a gradient"
