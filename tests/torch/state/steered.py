"""Training programs that a counter steers, made of the homes of state for every front end, and what becomes of them.

A body computes something from the counter's number: its value depends on it, or only its gradient does (where to
detach; the slope of a surrogate gradient). A cell of the table is a home, a front end and one of the two. Its programs
are run plainly and with Lowtide, each from a fresh start, and the cell is

    right     if losses, gradients and what is in a repeated home are the plain program's to the last bit,
    refused   if some of them end with a `CheckpointError`, and the others are right,
    silent    if anything else happens in any of them.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.autograd.function import FunctionCtx

import lowtide.torch as lt
from lowtide.chain import Chain
from lowtide.errors import BudgetError, CheckpointError
from lowtide.plan import Knob, Plan
from lowtide.planners.blocks import Blocks
from lowtide.torch.state.bits import same_bits
from tests.torch.state.homes import HOMES, Body, Home, Program

ROWS, WIDTH = 16, 4
BLOCKS = 4
FRONT_ENDS = ("loop", "checkpoint", "lean", "layers", "model")
VARIANTS = {"value": ("scaled", "every third"), "gradients": ("cut", "slope", "straight through")}
# Cells that are neither right nor refused, with the reason; the page shows it.
DOCUMENTED: dict[tuple[str, str, str], str] = {}

# What an error has to name: a step, a layer, a module, or an operation with what it saved.
_CAUSE = re.compile(r"step \d|layer \d|saved by|was changed in place|gave other numbers")

Option = dict[str, Any]


# --- bodies


class Spike(torch.autograd.Function):
    """A step function with a surrogate gradient, whose slope is handed over as a number."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, slope: float) -> torch.Tensor:
        """Whether numbers are positive; the slope makes no difference here."""
        ctx.save_for_backward(x)
        ctx.slope = slope  # type: ignore[attr-defined]  # as torch's own tutorials do it
        return (x >= 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """The gradient of a steep or a flat sigmoid's cousin."""
        (x,) = ctx.saved_tensors
        return grads[0] / (1 + ctx.slope * x.abs()) ** 2, None


def _computed(kind: str, number: int, x: torch.Tensor, before: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What a body computes from its input, which may be cut off from what came before."""
    product = x @ weight
    if kind == "scaled":
        product = product / (1 + number)
    if kind == "slope":
        product = 0.5 * product + Spike.apply(product, 1.0 + number)  # type: ignore[no-untyped-call]  # torch's own
    if kind == "straight through":  # a soft gradient whose weight anneals; what is added is zero
        product = product + (product - product.detach()) / (1 + number)
    h = torch.sigmoid(product) if kind == "every third" and number % 3 else torch.tanh(product)
    return h * torch.sigmoid(h) + 0.5 * before


Log = SimpleQueue[tuple[int, int]]  # the program's place in its row, and the number; a queue has nothing to be watched


def body_of(kind: str, log: Log, *, place: int = 0, loops: bool = False) -> Body:
    """A body that notes the numbers which it is called with."""
    generator = torch.Generator().manual_seed(place)
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))

    def call(number: int, x: torch.Tensor) -> torch.Tensor:
        log.put((place, number))
        cut = x.detach() if kind == "cut" and number % 3 == 0 else x
        return _computed(kind, number, cut, x, weight)

    def step(number: int, h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log.put((place, number))
        if kind == "cut" and number % 3 == 0:  # truncated backpropagation
            h = h.detach()
        h = _computed(kind, number, h + x, h + x, weight)
        counts = kind != "every third" or number % 3 == 0
        return h, h if counts else torch.zeros_like(h)

    return Body(step if loops else call, weight)


# --- programs of the front ends


@dataclass(frozen=True)
class Setting:
    """What a program is made of: the programs of a home, whose bodies note what they see."""

    programs: list[Program]
    bodies: list[Body]
    log: Log
    # Training steps. After a backward a home of the user's has been moved by reruns too, as the page says, so that the
    # next step is another one than the plain program's.
    steps: int

    @classmethod
    def of(cls, home: Home, kind: str, front_end: str) -> Setting:
        """The same one every time, with all random numbers as at its start."""
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002  (a home)
        log: Log = SimpleQueue()
        count = BLOCKS if front_end == "model" else 1
        bodies = [body_of(kind, log, place=place, loops=front_end == "loop") for place in range(count)]
        return cls([home.make(body) for body in bodies], bodies, log, 2 if home.repeated else 1)

    @property
    def contents(self) -> list[Any]:
        """What is in the homes."""
        return [program.contents() for program in self.programs]

    def noted(self) -> list[tuple[int, int]]:
        """All that the log has; it is empty then."""
        return [self.log.get() for _ in range(self.log.qsize())]


def _drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _gradients(loss: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor | None]:
    return list(torch.autograd.grad(loss, leaves, allow_unused=True))


Tensors = list[torch.Tensor | None]


def run_loop(setting: Setting, option: Option | None, length: int) -> Tensors:
    """A rollout, whose outputs count differently."""
    program = setting.programs[0]
    h, xs = _drawn(ROWS, WIDTH, seed=7).requires_grad_(), _drawn(length, ROWS, WIDTH, seed=8).requires_grad_()
    init = h if program.carry is None else (h, program.carry)
    if option is None:
        carry, ys = lt.scan(program.function, init, xs)
    else:
        carry, ys = lt.checkpointed_scan(program.function, init, xs, **option)
    last = carry if program.carry is None else carry[0]
    loss = (ys * _drawn(*ys.shape, seed=9)).sum() + last.square().sum()
    count = [] if program.carry is None else [torch.as_tensor(carry[1])]
    return [loss.detach(), *count, *_gradients(loss, [h, xs, setting.bodies[0].weight])]


def run_calls(setting: Setting, option: Option | None) -> Tensors:
    """Training steps, each over three micro-steps with one backward."""
    program, found = setting.programs[0], list[torch.Tensor | None]()
    for step in range(setting.steps):
        x = _drawn(ROWS, WIDTH, seed=step).requires_grad_()
        losses = []
        for micro in range(3):
            y = _call(lt.checkpoint, option, program, x * (1 + micro))
            losses.append((y * _drawn(*y.shape, seed=micro)).sum())
        loss = torch.stack(losses).sum()
        found += [loss.detach(), *_gradients(loss, [x, setting.bodies[0].weight])]
    return found


def run_lean(setting: Setting, option: Option | None) -> Tensors:
    """Six training steps of a call each."""
    program, found = setting.programs[0], list[torch.Tensor | None]()
    for step in range(6):
        x = _drawn(ROWS, WIDTH, seed=step).requires_grad_()
        y = _call(lt.lean, option, program, x)
        loss = (y * _drawn(*y.shape, seed=step)).sum()
        found += [loss.detach(), *_gradients(loss, [x, setting.bodies[0].weight])]
    return found


def _call(call: Callable[..., Any], option: Option | None, program: Program, x: torch.Tensor) -> Any:
    if option is None:
        return program.function(x, *program.arguments())
    return call(program.function, x, *program.arguments(), **option)


def _row_of(setting: Setting) -> list[Callable[..., Any]]:
    function = setting.programs[0].function
    return [function, torch.sin, function, torch.tanh, function, function, torch.sin, function]


def run_layers(setting: Setting, option: Option | None) -> Tensors:
    """Training steps of two calls each; the function is a layer at several places of the row."""
    row, found = _row_of(setting), list[torch.Tensor | None]()
    for step in range(setting.steps):
        x = _drawn(ROWS, WIDTH, seed=step).requires_grad_()
        losses = []
        for micro in range(2):
            y = x * (1 + micro)
            if option is None:
                for layer in row:
                    y = layer(y)
            else:
                y = lt.sequential(row, y, **option)
            losses.append((y * _drawn(*y.shape, seed=micro)).sum())
        loss = torch.stack(losses).sum()
        found += [loss.detach(), *_gradients(loss, [x, setting.bodies[0].weight])]
    return found


class _Block(nn.Module):
    """A block around a function; the weight is a parameter of the model."""

    def __init__(self, function: Callable[..., Any], weight: nn.Parameter) -> None:
        super().__init__()
        self.function = function
        self.weight = weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def model_of(setting: Setting) -> nn.Sequential:
    """A model with a block for each program."""
    return nn.Sequential(
        *(
            program.function if isinstance(program.function, nn.Module) else _Block(program.function, body.weight)
            for program, body in zip(setting.programs, setting.bodies, strict=True)
        )
    )


def _summed(output: torch.Tensor) -> torch.Tensor:
    return output.square().sum()


def run_model(setting: Setting, option: Option | None) -> Tensors:
    """Training steps of two micro-steps each."""
    model, found = model_of(setting), list[torch.Tensor | None]()
    if option is not None:
        lt.apply(option["plan"], model)
    weights: list[torch.Tensor] = [body.weight for body in setting.bodies]
    for step in range(setting.steps):
        x = _drawn(ROWS, WIDTH, seed=step).requires_grad_()
        loss = _summed(model(x)) + _summed(model(2 * x))
        found += [loss.detach(), *_gradients(loss, [x, *weights])]
    return found


# --- what is run for a cell


class Run(NamedTuple):
    """A program with an option, and how to name it; it is handed a setting, and None for a plain run."""

    name: str
    program: Callable[..., Tensors]
    option: Option


def _least(plan: Callable[[], Any]) -> int:
    """The least that works, as the error names it."""
    try:
        plan()
    except BudgetError as error:
        return error.least
    raise AssertionError("a byte is enough")


def _with_room(least: int) -> int:
    """A little more: what is saved may depend on the number, and a plan is made for one."""
    return least * 5 // 4


def _loop_runs(home: Home, kind: str, quick: bool) -> Iterator[Run]:
    for length in (2, 12) if quick else (2, 3, 12):
        options: list[Option] = [{"checkpoints": 1}] if quick else [{}, {"base": 2}, {"checkpoints": 1}]
        if not quick:
            options += [{"checkpoints": 2}, {"checkpoints": 1, "check_rerun": True}]
            setting = Setting.of(home, kind, "loop")
            h, xs = _drawn(ROWS, WIDTH, seed=7).requires_grad_(), _drawn(length, ROWS, WIDTH, seed=8)
            program = setting.programs[0]
            init = h if program.carry is None else (h, program.carry)
            before = setting.contents
            least = _least(partial(lt.plan_scan, program.function, init, xs.requires_grad_(), budget=1))
            _unmoved(home, setting, before)
            options.append({"budget": least})
        for option in options:
            yield Run(f"T={length}, {option}", partial(run_loop, length=length), option)


def _checkpoint_runs(home: Home, kind: str, quick: bool) -> Iterator[Run]:
    for option in [{}] if quick else [{}, {"check_rerun": True}, {"early_stop": False}]:
        yield Run(str(option), run_calls, option)


def _lean_runs(home: Home, kind: str, quick: bool) -> Iterator[Run]:
    yield Run("6 calls", run_lean, {})


def _layer_runs(home: Home, kind: str, quick: bool) -> Iterator[Run]:
    setting = Setting.of(home, kind, "layers")
    row, x = _row_of(setting), _drawn(ROWS, WIDTH, seed=0).requires_grad_()
    before = setting.contents
    least = _least(lambda: lt.plan_sequential(row, x * 1, budget=1))
    _unmoved(home, setting, before)
    options: list[Option] = [{"budget": _with_room(least)}] if quick else [{"budget": _with_room(least)}, {}]
    for option in options:
        yield Run(str(option), run_layers, option)


def _model_runs(home: Home, kind: str, quick: bool) -> Iterator[Run]:
    setting = Setting.of(home, kind, "model")
    model, x = model_of(setting), _drawn(ROWS, WIDTH, seed=0).requires_grad_()
    before = setting.contents
    chain = lt.plan_model(model, x, peak="1GB", loss=_summed).chain
    _unmoved(home, setting, before)
    for form in ("rerun", "lean"):
        yield Run(form, run_model, {"plan": with_form(chain, form)})


def with_form(chain: Chain, form: str) -> Plan:
    """A plan with such a form for every block that has one."""
    menus = [[option.name.split()[0] for option in chain[k].menu] for k in range(len(chain))]
    options = tuple(menu.index(form) if form in menu else 0 for menu in menus)
    return Plan.make(chain, Knob("peak", 2**30), Blocks(options))


def _unmoved(home: Home, setting: Setting, before: list[Any]) -> None:
    """Planning leaves what is repeated as it was."""
    if home.repeated and setting.contents != before:
        raise SilentError(f"planning has moved it from {before} to {setting.contents}")


RUNS = {
    "loop": _loop_runs,
    "checkpoint": _checkpoint_runs,
    "lean": _lean_runs,
    "layers": _layer_runs,
    "model": _model_runs,
}


# --- verdicts


class SilentError(Exception):
    """A program that is neither right nor refused."""


@dataclass(frozen=True)
class Verdict:
    """What became of a cell, and of which program that was."""

    word: str
    why: str = ""


def verdict(name: str, front_end: str, variant: str, *, quick: bool = False) -> Verdict:
    """What becomes of a cell."""
    home, refused = HOMES[name], ""
    for kind in VARIANTS[variant]:
        where = f"{kind}, planning"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what grows in a rerun; that is tested with ordinary code
                for run in RUNS[front_end](home, kind, quick):
                    where = f"{kind}, {run.name}"
                    error = judge(home, kind, front_end, run)
                    refused = refused or (error and f"{where}: {error}")
        except CheckpointError as error:
            refused = refused or f"{where}: {error}"
        except SilentError as silent:
            return Verdict("silent", f"{where}: {silent}")
        except Exception as error:
            return Verdict("failed", f"{where}: {type(error).__name__}: {error}")
    return Verdict("refused", refused) if refused else Verdict("right")


def judge(home: Home, kind: str, front_end: str, run: Run) -> str:
    """Run a program plainly and with Lowtide; returns why it is refused, or nothing if it is right.

    Raises:
        SilentError: it is neither.
    """
    plain = Setting.of(home, kind, front_end)
    expected = run.program(plain, None)
    contents = plain.contents
    setting = Setting.of(home, kind, front_end)
    places = [program.place() for program in setting.programs]
    error = ""
    try:
        found = run.program(setting, run.option)
    except CheckpointError as raised:
        error = str(raised)
        if not _CAUSE.search(error):
            raise SilentError(f"it is refused without a cause: {error}") from raised
    else:
        _same(found, expected)
    pairs = zip(setting.programs, places, strict=True)
    # An iterator cannot be put back where it was, so a copy may take its place.
    if any(program.place() is not place for program, place in pairs if not isinstance(place, Iterator)):
        raise SilentError("another object has taken the place of the home")
    now = setting.contents
    if not home.repeated:
        _untouched(home, kind, front_end, setting.noted(), now)
    elif not error and now != contents:
        raise SilentError(f"the home has {_brief(now)}, plainly {_brief(contents)}")
    return error


def runs_of_the_function(home: Home, kind: str, front_end: str) -> list[tuple[int, int]]:
    """How often the function runs plainly and with Lowtide, for every program of a cell."""
    found = []
    for run in RUNS[front_end](home, kind, False):
        counts = []
        for option in (None, run.option):
            setting = Setting.of(home, kind, front_end)
            run.program(setting, option)
            counts.append(setting.log.qsize())
        found.append((counts[0], counts[1]))
    return found


def _same(found: Tensors, expected: Tensors) -> None:
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one is None or other is None:
            if one is not other:
                raise SilentError(f"tensor {place} is {'' if one is None else 'not '}None")
        elif not same_bits(one, other):
            off = float((one - other).abs().max() / other.abs().max())
            raise SilentError(f"tensor {place} is {off:.1%} off")


def _untouched(home: Home, kind: str, front_end: str, noted: list[tuple[int, int]], now: list[Any]) -> None:
    """Nothing but the function itself has written to a home of the user's: moved as often again, it is the same."""
    again = Setting.of(home, kind, front_end)
    h = torch.zeros(1, WIDTH)
    with torch.no_grad():
        for place, _ in noted:
            again.programs[place].function(*((h, h) if front_end == "loop" else (h,)))
    seen = again.noted()
    if seen != noted:
        raise SilentError(f"its numbers were {_brief(noted)} instead of {_brief(seen)}")
    if now != again.contents:
        raise SilentError(f"the home has {_brief(now)}, the function alone makes that {_brief(again.contents)}")


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) < 80 else f"{text[:60]} ... {text[-15:]}"


# --- the table


def table(front_ends: tuple[str, ...] = FRONT_ENDS) -> dict[tuple[str, str, str], Verdict]:
    """All verdicts."""
    return {
        (name, front_end, variant): verdict(name, front_end, variant)
        for name, home in HOMES.items()
        for front_end in front_ends
        if front_end in home.front_ends
        for variant in VARIANTS
    }


def table_text(found: dict[tuple[str, str, str], Verdict] | None = None) -> str:
    """The table as the page has it: a word where value and gradients fare alike, or one for each."""
    found = table() if found is None else found
    lines = ["| home | " + " | ".join(FRONT_ENDS) + " |", "|---" * (1 + len(FRONT_ENDS)) + "|"]
    for name in HOMES:
        cells = [_cell(found, name, front_end) for front_end in FRONT_ENDS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(found: dict[tuple[str, str, str], Verdict], name: str, front_end: str) -> str:
    words = [found[key].word for variant in VARIANTS if (key := (name, front_end, variant)) in found]
    return " / ".join(dict.fromkeys(words)) or "-"
