"""Homes of state: every place where a function may keep a counter that steers what it does at each call.

Each entry of `HOMES` is a small program in the making: handed a body, which takes the counter's number before its own
arguments, it returns a function that moves a counter of its own at every call. `steered.py` makes training programs of
these for every front end, and judges what becomes of them.

    python -m tests.torch.state.homes

prints the table as it stands on the page of the documentation.
"""

from __future__ import annotations

import copy
import enum
import functools
import itertools
import os
import queue
import random
import tempfile
import threading
import types
import weakref
from array import array
from collections import Counter, UserDict, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

MOST_CALLS = 2_000  # of one program; rows that are used up have as many entries


class Body(NamedTuple):
    """What a function computes: `call(number, *args)`, and the weight that it does that with."""

    call: Callable[..., Any]
    weight: nn.Parameter


@dataclass(frozen=True)
class Program:
    """A function with its counter, and how to look at that without moving it."""

    function: Callable[..., Any]
    contents: Callable[[], Any]
    place: Callable[[], object] = lambda: None  # the object that is the home; it has to stay the same one
    arguments: Callable[[], tuple[Any, ...]] = tuple  # of the next call, after those of the body
    carry: Any = None  # of a loop, at the start, beside that of the body


@dataclass(frozen=True)
class Home:
    """Where a counter lives.

    A home that is *repeated* is put back for a rerun: every program with it has to be right. Any other is the user's:
    it is never written, and a program that it makes differ is refused.
    """

    make: Callable[[Body], Program]
    repeated: bool
    front_ends: tuple[str, ...] = ("loop", "checkpoint", "lean", "layers", "model")


# --- things that count


@dataclass(frozen=True)
class Thing:
    """Something that counts: made anew, moved by a call, and looked at without being moved."""

    new: Callable[[], Any]
    tick: Callable[[Any], int]
    seen: Callable[[Any], Any]


def _grow(row: Any) -> int:
    row.append(len(row))
    return len(row) - 1


def _add(numbers: set[int]) -> int:
    numbers.add(len(numbers))
    return len(numbers) - 1


def _next_of_cycle(cycle: Any) -> int:
    """The next number, from a copy of the iterator inside: a copy of the cycle itself would share that, and move it."""
    (inside,) = cycle.__reduce__()[1]
    return int(next(copy.copy(inside)))


def _rotate(row: deque[int]) -> int:
    row.rotate(-1)
    return row[-1]


def _entry(key: Any) -> Callable[[Any], int]:
    def tick(mapping: Any) -> int:
        mapping[key] += 1
        return int(mapping[key]) - 1

    return tick


def _attribute(thing: Any) -> int:
    thing.n += 1
    return int(thing.n) - 1


def _inner(thing: Any) -> int:
    return _attribute(thing.inner)


def _in_place(tensor: torch.Tensor) -> int:
    tensor.add_(1)
    return int(tensor) - 1


def _through_data(tensor: torch.Tensor) -> int:
    tensor.data.add_(1)  # its version stays
    return int(tensor) - 1


def _queued(numbers: queue.Queue[int]) -> int:
    number = numbers.get()
    numbers.put(number + 1)
    return number


def _new_queue() -> queue.Queue[int]:
    numbers: queue.Queue[int] = queue.Queue()
    numbers.put(0)
    return numbers


def _optimized(scheduler: torch.optim.lr_scheduler.LRScheduler) -> int:
    scheduler.step()
    return int(scheduler.last_epoch) - 1


def _torch_scheduler() -> torch.optim.lr_scheduler.LRScheduler:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
    optimizer.step()  # the order that torch asks for
    return scheduler


def _written(path: Path) -> int:
    number = int(path.read_text())
    path.write_text(str(number + 1))
    return number


def _new_file() -> Path:
    path = Path(tempfile.mkdtemp()) / "steps"
    path.write_text("0")
    return path


def _set(variable: ContextVar[int]) -> int:
    number = variable.get()
    variable.set(number + 1)
    return number


def _weakly(numbers: weakref.WeakKeyDictionary[type, int]) -> int:
    numbers[Plain] += 1
    return numbers[Plain] - 1


def _new_local() -> threading.local:
    local = threading.local()
    local.n = 0
    return local


def _yielding() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


class Plain:
    """An object as anybody writes one."""

    def __init__(self) -> None:
        self.n = 0


class Outer:
    """An object in an object."""

    def __init__(self) -> None:
        self.inner = Plain()


class Deep:
    """A trainer as there are some: its counter is four objects down."""

    def __init__(self) -> None:
        self.fit = SimpleNamespace(epoch=SimpleNamespace(batch=Plain()))


class Slotted:
    """Without a dictionary."""

    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


@dataclass
class Data:
    """A dataclass."""

    n: int = 0
    name: str = "warm-up"


@dataclass
class Trainer:
    """A dataclass with a list."""

    losses: list[int] = field(default_factory=list)


class Scheduler:
    """A schedule of the user's own, as LambdaLR is one."""

    def __init__(self, rule: Callable[[int], float]) -> None:
        self.rule = rule
        self.epoch = 0
        self.value = rule(0)

    def step(self) -> int:
        """Move on; returns the number of the epoch before."""
        self.epoch += 1
        self.value = self.rule(self.epoch)
        return self.epoch - 1


class ClassNumber:
    """An object whose class counts."""

    n = 0


def _class_number(thing: ClassNumber) -> int:
    type(thing).n += 1
    return type(thing).n - 1


def _new_class_number() -> ClassNumber:
    ClassNumber.n = 0
    return ClassNumber()


def _draw_numpy(generator: np.random.Generator) -> int:
    return int(generator.integers(7))


def _draw_torch(generator: torch.Generator) -> int:
    return int(torch.randint(7, (), generator=generator))


def _number(thing: Any) -> int:
    return int(thing.n)


THINGS = {
    "list": Thing(list, _grow, list),
    "list, popped from": Thing(lambda: list(range(MOST_CALLS)), lambda row: int(row.pop(0)), list),
    "list in an object": Thing(Trainer, lambda thing: _grow(thing.losses), lambda thing: list(thing.losses)),
    "dictionary": Thing(lambda: {"n": 0}, _entry("n"), dict),
    "dictionary in a dictionary": Thing(
        lambda: {"a": {"n": 0}}, lambda outer: _entry("n")(outer["a"]), lambda outer: outer["a"]["n"]
    ),
    "list in a list": Thing(lambda: [[0]], lambda outer: _entry(0)(outer[0]), lambda outer: outer[0][0]),
    "object in a list": Thing(lambda: [Plain()], lambda row: _attribute(row[0]), lambda row: _number(row[0])),
    "tensor in a dictionary, changed in place": Thing(
        lambda: {"n": torch.zeros((), dtype=torch.int64)}, lambda row: _in_place(row["n"]), lambda row: int(row["n"])
    ),
    "deque": Thing(deque, _grow, list),
    "deque, rotated": Thing(lambda: deque(range(MOST_CALLS)), _rotate, list),
    "set": Thing(set, _add, set),
    "Counter": Thing(lambda: Counter(n=0), _entry("n"), dict),
    "UserDict": Thing(lambda: UserDict(n=0), _entry("n"), dict),
    "namespace": Thing(lambda: SimpleNamespace(n=0), _attribute, _number),
    "dataclass": Thing(Data, _attribute, _number),
    "plain object": Thing(Plain, _attribute, _number),
    "object with slots": Thing(Slotted, _attribute, _number),
    "object in an object": Thing(Outer, _inner, lambda thing: thing.inner.n),
    "object far down": Thing(
        Deep, lambda thing: _attribute(thing.fit.epoch.batch), lambda thing: _number(thing.fit.epoch.batch)
    ),
    "queue": Thing(_new_queue, _queued, lambda numbers: list(numbers.queue)),
    "numpy array": Thing(lambda: np.zeros(1, dtype=np.int64), _entry(0), lambda row: row.tolist()),
    "large numpy array": Thing(lambda: np.zeros(4000, dtype=np.int64), _entry(7), lambda row: int(row[7])),
    "numpy array of objects": Thing(lambda: np.array([0], dtype=object), _entry(0), lambda row: row.tolist()),
    "array.array": Thing(lambda: array("q", [0]), _entry(0), lambda row: row.tolist()),
    "bytearray": Thing(lambda: bytearray(1), _entry(0), bytes),
    "tensor, changed in place": Thing(lambda: torch.zeros((), dtype=torch.int64), _in_place, int),
    "tensor, changed through its data": Thing(lambda: torch.zeros((), dtype=torch.int64), _through_data, int),
    "itertools.count": Thing(itertools.count, next, lambda it: next(copy.copy(it))),
    "iterator of a list": Thing(lambda: iter(list(range(MOST_CALLS))), next, lambda it: it.__length_hint__()),
    "itertools.cycle": Thing(lambda: itertools.cycle(range(MOST_CALLS)), next, _next_of_cycle),
    "generator function": Thing(_yielding, next, lambda it: it.gi_frame.f_locals.get("number")),
    "scheduler of one's own": Thing(
        lambda: Scheduler(lambda epoch: 1 / (1 + epoch)), lambda schedule: int(schedule.step()), lambda it: it.epoch
    ),
    "scheduler of torch.optim": Thing(_torch_scheduler, _optimized, lambda scheduler: scheduler.last_epoch),
    "class attribute": Thing(_new_class_number, _class_number, lambda _: ClassNumber.n),
    "weak dictionary": Thing(lambda: weakref.WeakKeyDictionary({Plain: 0}), _weakly, dict),
    "thread-local": Thing(_new_local, _attribute, _number),
    "context variable": Thing(lambda: ContextVar("steps", default=0), _set, lambda variable: variable.get()),
    "file": Thing(_new_file, _written, lambda path: path.read_text()),
    "random.Random": Thing(lambda: random.Random(3), lambda draws: draws.randrange(7), lambda draws: draws.getstate()),
    "numpy Generator": Thing(lambda: np.random.default_rng(3), _draw_numpy, lambda draws: draws.bit_generator.state),
    "torch.Generator": Thing(
        lambda: torch.Generator().manual_seed(3), _draw_torch, lambda draws: draws.get_state().tolist()
    ),
}


# --- places of things


class Holding(nn.Module):
    """A module with a thing as an attribute."""

    def __init__(self, body: Body, thing: Thing) -> None:
        super().__init__()
        self.weight = body.weight
        self.call = body.call
        self.tick = thing.tick
        self.home = thing.new()

    def forward(self, *args: Any) -> Any:
        """Move the thing, and compute."""
        return self.call(self.tick(self.home), *args)


def in_module(name: str, *, repeated: bool = True) -> Home:
    """A thing that is an attribute of a module."""
    thing = THINGS[name]

    def make(body: Body) -> Program:
        module = Holding(body, thing)
        return Program(module, lambda: thing.seen(module.home), lambda: module.home)

    return Home(make, repeated=repeated)


def in_closure(name: str, *, repeated: bool = False) -> Home:
    """A thing that a function closes over."""
    thing = THINGS[name]

    def make(body: Body) -> Program:
        call, tick, home = body.call, thing.tick, thing.new()

        def function(*args: Any) -> Any:
            return call(tick(home), *args)

        return Program(function, lambda: thing.seen(home))

    return Home(make, repeated=repeated)


GLOBAL: Any = None


def in_global(name: str, *, repeated: bool = False) -> Home:
    """A thing that a function names among its globals."""
    thing = THINGS[name]

    def make(body: Body) -> Program:
        global GLOBAL
        GLOBAL = thing.new()
        call, tick = body.call, thing.tick

        def function(*args: Any) -> Any:
            return call(tick(GLOBAL), *args)

        return Program(function, lambda: thing.seen(GLOBAL), lambda: GLOBAL)

    return Home(make, repeated=repeated)


def in_argument(name: str) -> Home:
    """A thing that is handed over at every call."""
    thing = THINGS[name]

    def make(body: Body) -> Program:
        call, tick, home = body.call, thing.tick, thing.new()

        def function(x: torch.Tensor, home: Any) -> Any:
            return call(tick(home), x)

        return Program(function, lambda: thing.seen(home), arguments=lambda: (home,))

    return Home(make, repeated=True, front_ends=("checkpoint", "lean"))


# --- homes that are more than a thing in a place


class Counting(nn.Module):
    """A module that counts in a number."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.weight = body.weight
        self.call = body.call
        self.n: Any = 0

    def forward(self, *args: Any) -> Any:
        """Count, and compute."""
        self.n = self.n + 1
        return self.call(int(self.n) - 1, *args)


class Late(Counting):
    """Counts from its second call on, and has its first tensor by then."""

    def __init__(self, body: Body) -> None:
        super().__init__(body)
        self.state: torch.Tensor | None = None

    def forward(self, *args: Any) -> Any:
        """Count what comes after the first call, and compute."""
        if self.state is None:
            self.state = torch.zeros(1)
        else:
            self.n += 1
        return self.call(self.n, *args)


class Buffered(nn.Module):
    """A module that counts in a tensor."""

    def __init__(self, body: Body, kind: str) -> None:
        super().__init__()
        self.weight = body.weight
        self.call = body.call
        self.in_place = kind != "buffer"
        zero = torch.zeros((), dtype=torch.int64)
        if kind == "parameter":
            self.n = nn.Parameter(zero, requires_grad=False)
        else:
            self.register_buffer("n", zero)

    def forward(self, *args: Any) -> Any:
        """Count, and compute."""
        if self.in_place:
            self.n.add_(1)
        else:
            self.n = self.n + 1  # type: ignore[assignment]  # a buffer, where this is used
        return self.call(int(self.n) - 1, *args)


def _module_number(body: Body) -> Program:
    module = Counting(body)
    return Program(module, lambda: module.n)


def _late_number(body: Body) -> Program:
    module = Late(body)
    return Program(module, lambda: (module.n, module.state is None))


def _module_tensor(kind: str) -> Callable[[Body], Program]:
    def make(body: Body) -> Program:
        module = Buffered(body, kind)
        return Program(module, lambda: int(module.n), (lambda: module.n) if module.in_place else (lambda: None))

    return make


class Parent(nn.Module):
    """A module whose child counts in an object."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.child = Holding(body, THINGS["object in an object"])

    def forward(self, *args: Any) -> Any:
        """As the child does."""
        return self.child(*args)


def _child_object(body: Body) -> Program:
    module = Parent(body)
    return Program(module, lambda: module.child.home.inner.n, lambda: module.child.home.inner)


def _child_of_uncalled(body: Body) -> Program:
    net = nn.ModuleDict({"head": Counting(body), "other": nn.Linear(2, 2)})

    def function(*args: Any) -> Any:
        return net["head"](*args)

    return Program(function, lambda: net["head"].n)


def _read_of_uncalled(body: Body) -> Program:
    net, call = nn.Linear(2, 2), body.call
    net.register_buffer("n", torch.zeros((), dtype=torch.int64))

    def function(*args: Any) -> Any:
        return call(_attribute(net), *args)

    return Program(function, lambda: int(net.n))  # type: ignore[arg-type]  # a buffer


def _hook(body: Body) -> Program:
    """A forward hook counts in its module."""
    module = Counting(body)
    module.register_forward_pre_hook(lambda counting, _: setattr(counting, "n", counting.n + 1))
    return Program(module, lambda: module.n)


def _nonlocal_number(body: Body) -> Program:
    call, n = body.call, 0

    def function(*args: Any) -> Any:
        nonlocal n
        n += 1
        return call(n - 1, *args)

    return Program(function, lambda: n)


def _replaced_tensor(body: Body) -> Program:
    call, n = body.call, torch.zeros((), dtype=torch.int64)

    def function(*args: Any) -> Any:
        nonlocal n
        n = n + 1
        return call(int(n) - 1, *args)

    return Program(function, lambda: int(n))


class Phase(enum.Enum):
    """What is done at each step, in turn."""

    FIRST = 0
    SECOND = 1
    THIRD = 2


def _rebound(start: Any, following: Callable[[Any], Any], number: Callable[[Any], int]) -> Callable[[Body], Program]:
    """A variable of a closure that stands for another thing after each call."""

    def make(body: Body) -> Program:
        call, now = body.call, start

        def function(*args: Any) -> Any:
            nonlocal now
            before, now = now, following(now)
            return call(number(before), *args)

        return Program(function, lambda: now)

    return make


HELPERS = types.ModuleType("helpers")  # a module of the user's, with a global and a function that counts in it
exec("n = 0\ndef tick():\n    global n\n    n += 1\n    return n - 1\n", vars(HELPERS))


def _helpers_global(body: Body) -> Program:
    HELPERS.n = 0  # type: ignore[attr-defined]  # made by the code above
    call = body.call
    return Program(lambda *args: call(HELPERS.tick(), *args), lambda: HELPERS.n)


NUMBER = 0


def _global_number(body: Body) -> Program:
    global NUMBER
    NUMBER = 0
    call = body.call

    def function(*args: Any) -> Any:
        global NUMBER
        NUMBER += 1
        return call(NUMBER - 1, *args)

    return Program(function, lambda: NUMBER)


def _module_class(body: Body) -> Program:
    class Steered(nn.Module):
        n = 0

        def __init__(self) -> None:
            super().__init__()
            self.weight = body.weight
            self.call = body.call

        def forward(self, *args: Any) -> Any:
            type(self).n += 1
            return self.call(type(self).n - 1, *args)

    return Program(Steered(), lambda: Steered.n)


def _class_list(body: Body) -> Program:
    class Steered(nn.Module):
        numbers: list[int] = []  # noqa: RUF012  (shared by mistake, as it happens)

        def __init__(self) -> None:
            super().__init__()
            self.weight = body.weight
            self.call = body.call

        def forward(self, *args: Any) -> Any:
            return self.call(_grow(self.numbers), *args)

    return Program(Steered(), lambda: list(Steered.numbers), lambda: Steered.numbers)


class Behind(nn.Module):
    """A module with a property that stands for a global."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.weight = body.weight
        self.call = body.call

    @property
    def n(self) -> int:
        """The global."""
        return NUMBER

    @n.setter
    def n(self, number: int) -> None:
        global NUMBER
        NUMBER = number

    def forward(self, *args: Any) -> Any:
        """Count, and compute."""
        self.n += 1
        return self.call(self.n - 1, *args)


def _property(body: Body) -> Program:
    global NUMBER
    NUMBER = 0
    return Program(Behind(body), lambda: NUMBER)


def _function_attribute(body: Body) -> Program:
    call = body.call

    def function(*args: Any) -> Any:
        return call(_attribute(function), *args)

    function.n = 0  # type: ignore[attr-defined]  # what it is about
    return Program(function, lambda: _number(function))


def _default_argument(body: Body) -> Program:
    call = body.call
    numbers: list[int] = []

    def function(*args: Any, numbers: list[int] = numbers) -> Any:
        return call(_grow(numbers), *args)

    return Program(function, lambda: list(numbers), lambda: (function.__kwdefaults__ or {})["numbers"])


def _partial_keyword(body: Body) -> Program:
    call = body.call

    def function(*args: Any, state: Plain) -> Any:
        return call(_attribute(state), *args)

    bound = functools.partial(function, state=Plain())
    return Program(bound, lambda: bound.keywords["state"].n, lambda: bound.keywords["state"])


class Owner:
    """An object with a method that counts in numbers and lists of its own."""

    def __init__(self, body: Body) -> None:
        self.call = body.call
        self.n = 0
        self.numbers: list[int] = []

    def counted(self, *args: Any) -> Any:
        """Count in a number."""
        return self.call(_attribute(self), *args)

    def listed(self, *args: Any) -> Any:
        """Count in a list."""
        return self.call(_grow(self.numbers), *args)


def _method_number(body: Body) -> Program:
    owner = Owner(body)
    return Program(owner.counted, lambda: owner.n)


class SlottedOwner:
    """The same with slots."""

    __slots__ = ("body", "n")

    def __init__(self, body: Body) -> None:
        self.body = body
        self.n = 0

    def counted(self, *args: Any) -> Any:
        self.n += 1
        return self.body.call(self.n - 1, *args)


def _method_slot(body: Body) -> Program:
    owner = SlottedOwner(body)
    return Program(owner.counted, lambda: owner.n)


def _method_list(body: Body) -> Program:
    owner = Owner(body)
    return Program(owner.listed, lambda: list(owner.numbers), lambda: owner.numbers)


def _environment(body: Body) -> Program:
    os.environ["LOWTIDE_STEPS"] = "0"
    call = body.call

    def function(*args: Any) -> Any:
        number = int(os.environ["LOWTIDE_STEPS"])
        os.environ["LOWTIDE_STEPS"] = str(number + 1)
        return call(number, *args)

    return Program(function, lambda: os.environ["LOWTIDE_STEPS"])


def _python_random(body: Body) -> Program:
    call = body.call
    return Program(lambda *args: call(random.randrange(7), *args), random.getstate)


def _numpy_random(body: Body) -> Program:
    call = body.call

    def contents() -> Any:
        name, key, *rest = np.random.get_state(legacy=True)  # noqa: NPY002  (the global one is the home)
        return name, np.asarray(key).tolist(), rest

    return Program(lambda *args: call(int(np.random.randint(7)), *args), contents)  # noqa: NPY002


def _torch_random(body: Body) -> Program:
    call = body.call
    return Program(lambda *args: call(int(torch.randint(7, ())), *args), lambda: torch.get_rng_state().tolist())


def _carry(start: Callable[[], Any]) -> Callable[[Body], Program]:
    def make(body: Body) -> Program:
        call = body.call

        def function(carry: tuple[Any, Any], x: torch.Tensor) -> Any:
            h, n = carry
            h, y = call(int(n), h, x)
            return (h, n + 1), y

        return Program(function, lambda: None, carry=start())

    return make


def _number_argument(body: Body) -> Program:
    """The caller counts, and hands over the number."""
    call, numbers = body.call, itertools.count()

    def function(x: torch.Tensor, number: int) -> Any:
        return call(number, x)

    return Program(function, lambda: next(copy.copy(numbers)), arguments=lambda: (next(numbers),))


HOMES: dict[str, Home] = {
    # In modules
    "module: number": Home(_module_number, repeated=True),
    "module: number that begins to change late": Home(_late_number, repeated=True),
    "module: buffer, replaced": Home(_module_tensor("buffer"), repeated=True),
    "module: buffer, changed in place": Home(_module_tensor("buffer in place"), repeated=True),
    "module: parameter without grad": Home(_module_tensor("parameter"), repeated=True),
    **{
        f"module: {name}": in_module(name)
        for name in (
            "list",
            "list, popped from",
            "list in an object",
            "list in a list",
            "object in a list",
            "dictionary",
            "dictionary in a dictionary",
            "tensor in a dictionary, changed in place",
            "deque",
            "deque, rotated",
            "set",
            "Counter",
            "UserDict",
            "namespace",
            "dataclass",
            "plain object",
            "object with slots",
            "object in an object",
            "object far down",
            "numpy array",
            "large numpy array",
            "array.array",
            "bytearray",
            "tensor, changed in place",
            "tensor, changed through its data",
            "itertools.count",
            "iterator of a list",
            "scheduler of one's own",
            "random.Random",
            "numpy Generator",
            "torch.Generator",
        )
    },
    "module: object in a child": Home(_child_object, repeated=True),
    "module: set by a hook": Home(_hook, repeated=True),
    "module: child of a module that is not called": Home(_child_of_uncalled, repeated=True),
    "module: buffer of a module that is not called": Home(_read_of_uncalled, repeated=True),
    "module: class attribute": Home(_module_class, repeated=False),
    "module: list of the class": Home(_class_list, repeated=False),
    "module: property of a global": Home(_property, repeated=False),
    **{
        f"module: {name}": in_module(name, repeated=False)
        for name in (
            "queue",
            "itertools.cycle",
            "generator function",
            "scheduler of torch.optim",
            "weak dictionary",
            "thread-local",
            "file",
        )
    },
    # In arguments and in the carry
    "argument: number": Home(_number_argument, repeated=True, front_ends=("checkpoint", "lean")),
    **{
        f"argument: {name}": in_argument(name)
        for name in ("list", "dictionary", "deque", "dataclass", "plain object", "numpy array", "itertools.count")
    },
    "carry: number": Home(_carry(int), repeated=True, front_ends=("loop",)),
    "carry: tensor": Home(_carry(lambda: torch.zeros((), dtype=torch.int64)), repeated=True, front_ends=("loop",)),
    # Random numbers
    "Python's random": Home(_python_random, repeated=True),
    "numpy's random": Home(_numpy_random, repeated=True),
    "torch's random": Home(_torch_random, repeated=True),
    **{
        f"closure: {name}": in_closure(name, repeated=True)
        for name in ("random.Random", "numpy Generator", "torch.Generator")
    },
    # In closures
    "closure: number": Home(_nonlocal_number, repeated=False),
    "closure: tensor, replaced": Home(_replaced_tensor, repeated=False),
    "closure: member of an enumeration": Home(
        _rebound(Phase.FIRST, lambda phase: Phase((phase.value + 1) % 3), lambda phase: int(phase.value)),
        repeated=False,
    ),
    "closure: Decimal": Home(_rebound(Decimal(), lambda number: number + 1, int), repeated=False),
    **{
        f"closure: {name}": in_closure(name)
        for name in (
            "list",
            "list, popped from",
            "list in an object",
            "list in a list",
            "object in a list",
            "dictionary",
            "dictionary in a dictionary",
            "tensor in a dictionary, changed in place",
            "deque",
            "deque, rotated",
            "set",
            "Counter",
            "UserDict",
            "namespace",
            "dataclass",
            "plain object",
            "object with slots",
            "object in an object",
            "object far down",
            "numpy array",
            "large numpy array",
            "numpy array of objects",
            "array.array",
            "bytearray",
            "tensor, changed in place",
            "tensor, changed through its data",
            "itertools.count",
            "iterator of a list",
            "itertools.cycle",
            "generator function",
            "queue",
            "scheduler of one's own",
            "scheduler of torch.optim",
            "class attribute",
            "weak dictionary",
            "thread-local",
            "context variable",
            "file",
        )
    },
    # Elsewhere
    "global: number": Home(_global_number, repeated=False),
    **{f"global: {name}": in_global(name) for name in ("list", "plain object", "itertools.count", "context variable")},
    "global of another module": Home(_helpers_global, repeated=False),
    "function attribute": Home(_function_attribute, repeated=False),
    "default argument": Home(_default_argument, repeated=False),
    "partial: keyword object": Home(_partial_keyword, repeated=False),
    "bound method: number of the object": Home(_method_number, repeated=True),
    "bound method: number in a slot": Home(_method_slot, repeated=True),
    "bound method: list of the object": Home(_method_list, repeated=False),
    "environment variable": Home(_environment, repeated=False),
}


if __name__ == "__main__":
    from tests.torch.state.steered import table_text  # it imports this module under its own name

    print(table_text())
