"""The chain: what each step costs in bytes and seconds.

Step k maps state k to state k+1. Its tape is what autograd saves while running it; by definition the
tape holds the step's own input, so `tape >= state`, and a state that is only about to be taped need not
be stored as well. A chain is either one step repeated (a rollout) or a row of unequal steps (layers).
Nothing is measured here: front ends measure, this module only holds the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate

from lowtide.checks import MOST_STEPS, MOST_TOTAL, keep_seconds, keep_whole
from lowtide.errors import InputError
from lowtide.forms import KEEP, Form
from lowtide.sizes import format_size


@dataclass(frozen=True, slots=True)
class Working:
    """Bytes beyond snapshots and tapes while one step runs: states in flight, cotangents, transients."""

    advance: int = 0
    tape: int = 0
    backward: int = 0

    def __post_init__(self) -> None:
        for name in ("advance", "tape", "backward"):
            keep_whole(self, name, least=0, label=f"working.{name}")


@dataclass(frozen=True, slots=True)
class TapeOption:
    """A smaller tape for a step, paid for with `extra` seconds of its backward.

    What the tape lacks is recomputed in that backward, which may then need more bytes beside the tape: `backward`
    bytes, or the step's `working.backward` if it is None. `form` is what a front end runs, None for a chain that exists
    only on paper; `name` is what people read, the form's text by default.
    """

    tape: int
    extra: float
    name: str = ""
    backward: int | None = None
    form: Form | None = None

    def __post_init__(self) -> None:
        if self.form is not None and not self.name:
            object.__setattr__(self, "name", str(self.form))
        keep_whole(self, "tape", least=1, label="option.tape")
        keep_seconds(self, "extra", label="option.extra")
        if self.backward is not None:
            keep_whole(self, "backward", least=0, label="option.backward")


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one step costs.

    Attributes:
        state: bytes of the state that the step starts from (1 for a step without state).
        tape: bytes that its tape holds, its input included.
        forward, backward: seconds, or any other unit as long as it is the same throughout.
        cotangent: bytes of the gradient of the input state, held while earlier steps run again.
        working: bytes beyond snapshots, tapes and that cotangent while the step runs; its `backward` applies to the
            whole tape, and to options without a `backward` of their own.
        options: smaller tapes for the same step.
        drawn: the part of `state` that no tape holds, because a step that is taped needs it no more: states of random
            generators.
    """

    state: int
    tape: int
    forward: float = 1.0
    backward: float = 2.0
    cotangent: int = 0
    working: Working = Working()
    options: tuple[TapeOption, ...] = ()
    drawn: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", tuple(self.options))
        keep_whole(self, "state", least=1)
        keep_whole(self, "drawn", least=0)
        keep_whole(self, "tape", least=1)
        keep_whole(self, "cotangent", least=0)
        for bytes_, what in [(self.tape, "tape")] + [(o.tape, "option.tape") for o in self.options]:
            if bytes_ < self.state - self.drawn:
                raise InputError(
                    f"{what}={bytes_:,} B is smaller than state={self.state:,} B: a tape holds its step's input; "
                    f"count the input in, which makes it at least {self.state:,} B"
                )
        keep_seconds(self, "forward")
        keep_seconds(self, "backward")

    @property
    def working_set(self) -> int:
        """Bytes beyond snapshots and tape at the step's worst moment, whichever form it is taped in."""
        return max(map(self.working_set_in, range(len(self.menu))))

    def working_set_in(self, form: int) -> int:
        """The same when the step is taped in the form of entry `form` of its menu."""
        # While the step itself is pulled back, its cotangents are part of `working.backward`.
        return max(max(self.working.advance, self.working.tape) + self.cotangent, self.pulling[form])

    @property
    def pulling(self) -> tuple[int, ...]:
        """For each entry of the menu, the bytes beyond the tape while the step is pulled back in that form."""
        usual = self.working.backward
        return usual, *(usual if option.backward is None else option.backward for option in self.options)

    @property
    def beside_tapes(self) -> tuple[int, ...]:
        """For each entry of the menu, the bytes beyond all tapes at the step's worst moment, taping or backward."""
        return tuple(max(self.working.tape, pulling) for pulling in self.pulling)

    @property
    def menu(self) -> tuple[TapeOption, ...]:
        """Every way to tape the step; entry 0 keeps the whole tape."""
        return (TapeOption(self.tape, 0.0, "keep", form=KEEP), *self.options)


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk tier: seconds to write and to read one byte. It is assumed to have room for every snapshot."""

    write: float
    read: float

    def __post_init__(self) -> None:
        keep_seconds(self, "write", label="disk.write")
        keep_seconds(self, "read", label="disk.read")


@dataclass(frozen=True, slots=True)
class Ways:
    """The costs of an equal step in each of the two ways of taping it.

    Attributes:
        several: the cost of a step in a stretch of several that are taped together.
        single: the cost of a step taped alone, which may need a little less beside its tape.
        floor: bytes that measuring these costs takes, so that no smaller budget works.
    """

    several: StepCost
    single: StepCost
    floor: int = 0

    def __post_init__(self) -> None:
        keep_whole(self, "floor", least=0, label="ways.floor")


class Role(StrEnum):
    """What a step of a whole model's chain stands for: a block, or something that no plan changes."""

    BLOCK = "block"
    BETWEEN = "between"  # before, between or after blocks
    LOSS = "loss"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class Chain:
    """A row of steps. Make one with `Chain.equal(step, length)` or `Chain.of(steps)`.

    Attributes:
        steps: the cost of each step, or one cost for all of them.
        length: the number of steps.
        names: a name for each step, for reports; empty if there are none.
        parameters, gradients: bytes that are held with or without a plan, and that no budget counts; for reports, and 0
            where they are not known.
        ways: the costs of both ways of taping equal steps, if they differ; `steps` has one, and planners choose.
        roles: for a whole model, the role of each step; empty where all steps are alike.
        layers: for a row of layers, the range [start, stop) of layers that make up each step; else empty.
    """

    steps: tuple[StepCost, ...]
    length: int
    names: tuple[str, ...] = ()
    parameters: int = 0
    gradients: int = 0
    ways: Ways | None = None
    roles: tuple[Role, ...] = ()
    layers: tuple[tuple[int, int], ...] = ()
    # Prefix sums of forward seconds, so that a run over [start, stop) costs one subtraction.
    _forward: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        keep_whole(self, "length", least=1, most=MOST_STEPS, label="steps")
        if len(self.steps) not in (1, self.length):
            raise InputError(
                f"a chain of {self.length:,} steps was given {len(self.steps):,} costs; "
                "give one cost for each step, or one for all of them"
            )
        if len(self.names) not in (0, self.length) or not all(isinstance(name, str) for name in self.names):
            raise InputError(f"a chain of {self.length:,} steps needs as many names, each a str, or none")
        for what, given in (("roles", self.roles), ("ranges of layers", self.layers)):
            if len(given) not in (0, self.length):
                raise InputError(f"a chain of {self.length:,} steps needs as many {what}, or none; got {len(given):,}")
        if self.ways is not None and self.steps not in ((self.ways.several,), (self.ways.single,)):
            raise InputError("a chain with two ways of taping has equal steps, and one of the two as their cost")
        keep_whole(self, "parameters", least=0, most=MOST_TOTAL)
        keep_whole(self, "gradients", least=0, most=MOST_TOTAL)
        object.__setattr__(self, "_forward", tuple(accumulate((s.forward for s in self.steps), initial=0.0)))

    @classmethod
    def equal(cls, step: StepCost, length: int) -> Chain:
        """`length` steps that all cost the same."""
        return cls((step,), length)

    @classmethod
    def of(cls, steps: Iterable[StepCost], names: Iterable[str] = (), roles: Iterable[Role] = ()) -> Chain:
        """Steps that each have a cost of their own; where all costs are the same, only one is stored."""
        steps = tuple(steps)
        if not steps:
            raise InputError("a chain needs at least one step; got an empty list")
        same = all(step == steps[0] for step in steps)
        return cls(steps[:1] if same else steps, len(steps), tuple(names), roles=tuple(roles))

    def with_steps(self, steps: Iterable[StepCost]) -> Chain:
        """The same chain with other costs."""
        return replace(self, steps=Chain.of(steps).steps, ways=None)

    def taped(self, step: StepCost) -> Chain:
        """The same chain of equal steps, at the cost of one of its two ways of taping."""
        return replace(self, steps=(step,))

    def name(self, k: int) -> str:
        """The name of step k on one line of at most 40 characters, or its number if it has no name."""
        if not self.names:
            return f"step {k:,}"
        name = " ".join(self.names[k].encode(errors="replace").decode().split())
        return name if len(name) <= 40 else f"{name[:18]}...{name[-19:]}"  # what differs is often the end

    def role(self, k: int) -> Role:
        """The role of step k."""
        return self.roles[k] if self.roles else Role.BLOCK

    def blocks(self) -> list[int]:
        """The steps that are blocks: all of them, except for what a whole model does outside of blocks."""
        return [k for k in range(self.length) if self.role(k) is Role.BLOCK]

    @property
    def is_equal(self) -> bool:
        """Whether all steps cost the same."""
        return len(self.steps) == 1

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, k: int) -> StepCost:
        return self.steps[0] if self.is_equal else self.steps[k]

    def forward_seconds(self, start: int, stop: int) -> float:
        """Seconds of running the steps [start, stop) once."""
        if self.is_equal:
            return (stop - start) * self.steps[0].forward
        return self._forward[stop] - self._forward[start]

    @property
    def plain_tape(self) -> int:
        """Bytes of all tapes together, which backpropagation without a plan keeps."""
        return self.length * self.steps[0].tape if self.is_equal else sum(s.tape for s in self.steps)

    @property
    def plain_seconds(self) -> float:
        """Seconds of one forward and one backward over the whole chain."""
        if self.is_equal:
            return self.length * (self.steps[0].forward + self.steps[0].backward)
        return math.fsum(s.forward + s.backward for s in self.steps)

    def __str__(self) -> str:
        if self.is_equal:
            step = self.steps[0]
            noun = "step" if self.length == 1 else "equal steps"
            return f"{self.length:,} {noun}, state {format_size(step.state)}, tape {format_size(step.tape)} each"
        states = [s.state for s in self.steps]
        return (
            f"{self.length:,} unequal steps, states {format_size(min(states))} to {format_size(max(states))}, "
            f"tapes {format_size(self.plain_tape)} in all"
        )
