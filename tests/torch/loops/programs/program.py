"""What a program is: a loop that somebody might have written; and what is compared of it with the plain loop.

The plain loop is written out here and uses nothing of Lowtide. Compared are outputs, the last state, gradients of
parameters and inputs, what modules and generators hold after the forward pass and after the backward, and which tensors
need a gradient, everything to the last bit. Instead, a program may be refused with the words that it names; the program
that it names as the way out then has to be right with the same option.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as trees

import lowtide.torch as lt
from lowtide import errors as lt_errors

Option = dict[str, Any]


@dataclass
class Scan:
    """`carry, y = step(carry, x)`; `own` is what takes gradients or keeps state: modules, tensors, other objects."""

    step: Callable[[Any, Any], Any]
    init: Any
    xs: Any
    own: list[Any] = field(default_factory=list)
    length: int | None = None
    named: Option = field(default_factory=dict)  # arguments that the program needs, such as generators=


@dataclass
class For:
    """`y = step(*x)`."""

    step: Callable[..., Any]
    xs: tuple[Any, ...]
    own: list[Any] = field(default_factory=list)
    length: int | None = None
    named: Option = field(default_factory=dict)


@dataclass
class While:
    """`carry = body(carry)` while `cond(carry)`."""

    cond: Callable[[Any], Any]
    body: Callable[[Any], Any]
    init: Any
    own: list[Any] = field(default_factory=list)
    most: int | None = None
    named: Option = field(default_factory=dict)


Loop = Scan | For | While
Make = Callable[[int], Loop]


@dataclass(frozen=True)
class Entry:
    """A program of the table: `make(length)` makes it afresh."""

    name: str
    make: Make
    refused: str | None = None  # what an error says, where it may be refused
    instead: Make | None = None  # the way out that the error names
    outputs_vary: bool = False  # they are no tensors, or a sum of them means nothing
    shortest: int = 1
    compiles: bool = False


TABLE: dict[str, Entry] = {}


def program(name: str, **about: Any) -> Callable[[Make], Make]:
    """Enter a program into the table."""

    def enter(make: Make) -> Make:
        assert name not in TABLE, name
        TABLE[name] = Entry(name, make, **about)
        return make

    return enter


# --- the plain loop


def _rows(xs: Any, length: int | None) -> list[Any]:
    if xs is None:
        return [None] * (length or 0)
    leaves, form = trees.tree_flatten(xs)
    columns = [
        leaf.unbind(0) if isinstance(leaf, torch.Tensor) else [leaf[k] for k in range(length or leaf.length)]
        for leaf in leaves
    ]
    count = len(columns[0]) if columns else length
    assert count is not None
    return [trees.tree_unflatten([column[k] for column in columns], form) for k in range(count)]


def _stacked(ys: list[Any]) -> Any:
    leaves, form = trees.tree_flatten(ys[0])
    columns = zip(*(trees.tree_leaves(y) for y in ys), strict=True)
    stacks = [
        torch.stack(column) if isinstance(leaf, torch.Tensor) else None if leaf is None else list(column)
        for leaf, column in zip(leaves, columns, strict=True)
    ]
    return trees.tree_unflatten(stacks, form)


def _added(total: Any, y: Any) -> Any:
    leaves, form = trees.tree_flatten(y)
    totals = [0] * len(leaves) if total is None else trees.tree_leaves(total)
    return trees.tree_unflatten([None if b is None else a + b for a, b in zip(totals, leaves, strict=True)], form)


def plain(loop: Loop, option: Option) -> tuple[Any, Any]:
    """The last carry and the outputs of a loop in plain Python."""
    if isinstance(loop, While):
        carry, k = loop.init, 0
        while (loop.most is None or k < loop.most) and loop.cond(carry):
            carry, k = loop.body(carry), k + 1
        return carry, None
    rows = _rows(loop.xs, loop.length)
    ys: list[Any] = []
    carry, reverse, reduce = getattr(loop, "init", None), option.get("reverse"), option.get("reduce")
    total = reduce[0] if isinstance(reduce, tuple) else None
    for x in reversed(rows) if reverse else rows:
        if isinstance(loop, Scan):
            carry, y = loop.step(carry, x)
        else:
            y = loop.step(*x)
        if reduce is None:
            ys.append(y)
        elif reduce == "last":
            total = y
        else:
            total = reduce[1](total, y) if isinstance(reduce, tuple) else _added(total, y)
    if reduce == "mean":
        total = trees.tree_map(lambda acc: None if acc is None else acc / len(rows), total)
    return carry, (_stacked(ys[::-1] if reverse else ys) if reduce is None else total)


# --- the same with Lowtide


def ours(loop: Loop, option: Option) -> tuple[Any, Any]:
    """The last carry and the outputs of a checkpointed loop."""
    option = loop.named | option
    if isinstance(loop, While):
        return lt.checkpointed_while_loop(loop.cond, loop.body, loop.init, max_steps=loop.most, **option), None
    if isinstance(loop, Scan):
        return lt.checkpointed_scan(loop.step, loop.init, loop.xs, loop.length, **option)
    return None, lt.checkpointed_for_loop(loop.step, *loop.xs, length=loop.length, **option)


def planned(loop: Loop, option: Option) -> Any:
    """A plan for the loop."""
    assert not isinstance(loop, While)
    option = {name: value for name, value in loop.named.items() if name == "hidden"} | option
    if isinstance(loop, Scan):
        return lt.plan_scan(loop.step, loop.init, loop.xs, loop.length, **option)
    return lt.plan_for_loop(loop.step, *loop.xs, length=loop.length, **option)


# --- what is compared


def _bits(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    numbers = tensor.resolve_conj().reshape(-1).contiguous()
    return tensor.dtype, tuple(tensor.shape), numbers.view(torch.uint8).numpy().tobytes()


def seen(value: Any, depth: int = 8, *, flags: bool = True) -> Any:
    """Everything in a value that can be compared, tensors by their bits."""
    if isinstance(value, torch.Tensor):
        if nn.parameter.is_lazy(value):
            return "uninitialized"
        return (_bits(value), value.requires_grad if flags else None)
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, np.ndarray | np.generic):
        return value.tobytes()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if depth == 0:
        return "..."
    return type(value).__name__, _parts(value, depth - 1, flags)


def _parts(value: Any, depth: int, flags: bool) -> Any:
    if isinstance(value, torch.jit.ScriptModule):
        return [(name, seen(buffer, depth, flags=flags)) for name, buffer in value.named_buffers()]
    if isinstance(value, nn.Module):
        own = {**value._buffers, **value._modules, **value._parameters}
        skipped = ("_hooks", "_modules", "_parameters", "_buffers", "_version", "_is_full")
        own |= {name: part for name, part in vars(value).items() if not any(s in name for s in skipped)}
        return [(name, seen(part, depth, flags=flags)) for name, part in sorted(own.items())]
    if isinstance(value, dict):
        return [(repr(name), seen(part, depth, flags=flags)) for name, part in value.items()]
    if isinstance(value, tuple | list | deque):
        return [seen(part, depth, flags=flags) for part in value]
    if is_dataclass(value) or type(value).__module__.startswith("tests."):
        return [(name, seen(part, depth, flags=flags)) for name, part in getattr(value, "__dict__", {}).items()]
    return None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors of results in a fixed order, those in objects of other classes too."""
    for leaf in trees.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module):
            yield from _tensors(list(vars(leaf).values()))


def _leaves(own: Iterable[Any]) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for thing in own:
        for leaf in thing.parameters() if isinstance(thing, nn.Module) else [thing]:
            if isinstance(leaf, torch.Tensor) and leaf.is_leaf and leaf.requires_grad:
                found[id(leaf)] = leaf
    return list(found.values())


def _loss(results: Any) -> torch.Tensor | None:
    parts = [
        (leaf.abs() if leaf.is_complex() else leaf).square().sum() * 0.5 + leaf.real.sum() * (0.3 + k)
        for k, leaf in enumerate(_tensors(results))
        if leaf.requires_grad
    ]
    return torch.stack([part.double() for part in parts]).sum() if parts else None


def _randomness() -> Any:
    return torch.get_rng_state().numpy().tobytes(), repr(np.random.get_state()), random.getstate()  # noqa: NPY002


def begin() -> None:
    """The same random numbers for every run."""
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)  # noqa: NPY002


Run = Callable[[Loop, Option], tuple[Any, Any]]


def outcome(make: Make, length: int, run: Run, option: Option) -> dict[str, Any]:
    """Everything that is compared of one run, by what it is."""
    begin()
    loop = make(length)
    found: dict[str, Any] = {}
    results = run(loop, option)
    found["results"] = seen(results)
    found["state after the forward"] = [seen(thing) for thing in loop.own]
    found["random numbers after the forward"] = _randomness()
    loss = _loss(results)
    if loss is not None:
        loss.backward()
        found["gradients"] = [None if leaf.grad is None else seen(leaf.grad) for leaf in _leaves(loop.own)]
    found["state after the backward"] = [seen(thing) for thing in loop.own]
    found["random numbers after the backward"] = _randomness()
    return found


# --- options


def fold(acc: Any, y: Any) -> Any:
    """A user's own fold: the sum of squares."""
    return acc + sum(t.detach().double().abs().square().sum() + t.sum() for t in _tensors(y))


OPTIONS: dict[str, Option] = {
    "none": {},
    "base=1": {"base": 1},
    "base=4": {"base": 4},
    "base=100": {"base": 100},
    "checkpoints=1": {"checkpoints": 1},
    "checkpoints=3": {"checkpoints": 3},
    "budget=least": {"budget": "least"},
    "budget=40%": {"budget": "40%"},
    "budget=1GiB": {"budget": "1GiB"},
    "plan": {"plan": {"base": 4}},
    "plan of a budget": {"plan": {"budget": "1GiB"}},
    "check_rerun=True": {"base": 4, "check_rerun": True},
    "check_rerun=False": {"base": 4, "check_rerun": False},
    "advance_with_grad": {"base": 4, "advance_with_grad": True},
    "advance_with_grad, budget=least": {"budget": "least", "advance_with_grad": True},
    "lean": {"base": 4, "lean": True},
    "lean, budget=least": {"budget": "least", "lean": True},
    "reverse": {"base": 4, "reverse": True},
    "reverse, no option": {"reverse": True},
    "sum": {"base": 4, "reduce": "sum"},
    "mean": {"checkpoints": 2, "reduce": "mean"},
    "last": {"base": 4, "reduce": "last"},
    "fold": {"base": 4, "reduce": (0.0, fold)},
}
WHILE_OPTIONS: dict[str, Option] = {
    "none": {},
    "checkpoints=1": {"checkpoints": 1},
    "checkpoints=3": {"checkpoints": 3},
    "budget=least": {"budget": "least"},
    "budget=1GiB": {"budget": "1GiB"},
    "check_rerun=True": {"checkpoints": 3, "check_rerun": True},
    "check_rerun=False": {"checkpoints": 3, "check_rerun": False},
    "lean": {"checkpoints": 2, "lean": True},
}
_OF_OURS = {"base", "checkpoints", "budget", "plan", "check_rerun", "advance_with_grad", "lean", "compile"}


def options_of(entry: Entry) -> dict[str, Option]:
    """The options that make sense for a program."""
    begin()
    if isinstance(entry.make(entry.shortest), While):
        return WHILE_OPTIONS
    left_out = {"sum", "mean", "fold"} if entry.outputs_vary else set()
    return {name: option for name, option in OPTIONS.items() if name not in left_out}


def _resolved(make: Make, length: int, option: Option) -> Option:
    """The option with its plan made, or the least budget found."""
    if "budget" in option:
        return option | {"budget": _budget(make, length, option)}
    if "plan" in option:
        begin()
        return option | {"plan": planned(make(length), option["plan"])}
    return option


def _budget(make: Make, length: int, option: Option) -> int | str:
    """A budget that works: the one asked for, or what errors say is the least."""
    asked = 1 if option["budget"] == "least" else option["budget"]
    for _ in range(3):  # where steps cost more from one to the next, the least does too
        begin()
        try:
            ours(make(length), option | {"budget": asked})
        except lt.BudgetError as error:
            asked = error.least
        except lt_errors.InputError as error:  # a share of what takes nothing
            asked = 1 if "less than one byte" in str(error) else asked
        else:
            break
    return asked


def differences(make: Make, length: int, option: Option) -> list[str]:
    """What is not as in the plain loop."""
    expected = outcome(make, length, plain, {k: v for k, v in option.items() if k not in _OF_OURS})
    found = outcome(make, length, ours, _resolved(make, length, option))
    return [name for name in expected if expected[name] != found[name]]


def verdict(entry: Entry, length: int, option: Option) -> str:
    """Whether it is "equal", or "refused" with a way out that works; or else what is wrong."""
    found = _judged(entry.make, length, option)
    if entry.refused is None or found == "equal" or not re.search(entry.refused, found):
        return found
    instead = "equal" if entry.instead is None else _judged(entry.instead, length, option)
    return "refused" if instead == "equal" else f"the way out: {instead}"


def _judged(make: Make, length: int, option: Option) -> str:
    try:
        wrong = differences(make, length, option)
    except Exception as error:
        kind = "" if isinstance(error, lt.CheckpointError | lt.BudgetError) else f"a bare {type(error).__name__}: "
        return f"{kind}{error}"
    return f"differs: {', '.join(wrong)}" if wrong else "equal"
