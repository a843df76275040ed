"""Ordinary code is not refused: bars, meters, logs, guarded records, caches, and cells as their tutorials write them.

Each program is written once, around a core that computes, and run as a step of a loop, as a call of `checkpoint` and as
layers of a row. Results and gradients are those of the plain run, and nothing is raised. Where a container of the
user's grows in a rerun, one warning names it.
"""

from __future__ import annotations

import enum
import functools
import io
import logging
import re
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import snntorch
import torch
from snntorch import surrogate
from snntorch import utils as snntorch_utils
from spikingjelly.activation_based import functional as jelly_functional
from spikingjelly.activation_based import layer as jelly_layer
from spikingjelly.activation_based import neuron as jelly_neuron
from torch import nn
from tqdm import tqdm

import lowtide.torch as lt
from lowtide.torch.state import surroundings
from lowtide.torch.state.bits import same_bits
from tests.torch.state.partners import norse

ROWS, WIDTH, LENGTH, CALLS = 8, 6, 12, 4
FRONT_ENDS = ("loop", "checkpoint", "layers")
log = logging.getLogger(__name__)

Core = Callable[..., Any]


class Ordinary(NamedTuple):
    """A function around the core; what has to be so afterwards, told how often the plain program calls it."""

    function: Callable[..., Any]
    check: Callable[[int], None] = lambda calls: None


def _last(result: Any) -> torch.Tensor:
    """The tensor of a core's result: the output, where there is a state too."""
    out: torch.Tensor = result[1] if isinstance(result, tuple) else result
    return out


# --- what people do beside computing


def progress_bar(core: Core) -> Ordinary:
    bar = tqdm(total=1000, file=io.StringIO())

    def function(*args: Any) -> Any:
        result = core(*args)
        bar.update(1)
        return result

    return Ordinary(function)


def progress_bar_with_text(core: Core) -> Ordinary:
    bar = tqdm(total=1000, file=io.StringIO())

    def function(*args: Any) -> Any:
        result = core(*args)
        bar.set_postfix(mean=_last(result).mean().item())
        bar.update(1)
        return result

    return Ordinary(function)


class Meter:
    """A running average, as every training script has one."""

    def __init__(self) -> None:
        self.total, self.count, self.average = 0.0, 0, 0.0

    def update(self, value: float) -> None:
        self.total += value
        self.count += 1
        self.average = self.total / self.count


def meter(core: Core) -> Ordinary:
    losses = Meter()

    def function(*args: Any) -> Any:
        result = core(*args)
        losses.update(_last(result).square().mean().item())
        return result

    def check(calls: int) -> None:
        assert losses.count >= calls  # reruns are counted too, and nothing is put back

    return Ordinary(function, check)


METER = Meter()


def global_meter(core: Core) -> Ordinary:
    METER.count = 0

    def function(*args: Any) -> Any:
        result = core(*args)
        METER.update(_last(result).mean().item())
        return result

    def check(calls: int) -> None:
        assert METER.count >= calls

    return Ordinary(function, check)


def written_number(core: Core) -> Ordinary:
    """A counter in a closure that nothing reads but a report."""
    calls = 0

    def function(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return core(*args)

    def check(at_least: int) -> None:
        assert calls >= at_least

    return Ordinary(function, check)


def counter_of_kinds(core: Core) -> Ordinary:
    """How often each kind of call is made, in a container that the standard library has for it."""
    kinds: Counter[str] = Counter(calls=0)

    def function(*args: Any) -> Any:
        kinds["calls"] += 1
        return core(*args)

    return Ordinary(function)


def running_total(core: Core) -> Ordinary:
    """A sum for a report, as a tensor, so that nothing waits for a device."""
    total = torch.zeros(())

    def function(*args: Any) -> Any:
        total.add_(args[0].detach().mean())
        return core(*args)

    return Ordinary(function)


def histogram(core: Core) -> Ordinary:
    seen = np.zeros(4, dtype=np.int64)

    def function(*args: Any) -> Any:
        seen[int(args[0].detach().abs().sum()) % 4] += 1
        return core(*args)

    return Ordinary(function)


def timer(core: Core) -> Ordinary:
    spent = {"forward": 0.0}

    def function(*args: Any) -> Any:
        start = time.perf_counter()
        result = core(*args)
        spent["forward"] += time.perf_counter() - start
        return result

    return Ordinary(function)


def module_with_timer(core: Core) -> Ordinary:
    class Timed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seconds = 0.0

        def forward(self, *args: Any) -> Any:
            start = time.perf_counter()
            result = core(*args)
            self.seconds += time.perf_counter() - start
            return result

    return Ordinary(Timed())


def guarded_counter(core: Core) -> Ordinary:
    steps = 0

    def function(*args: Any) -> Any:
        nonlocal steps
        if not lt.is_recomputing():
            steps += 1
        return core(*args)

    def check(calls: int) -> None:
        assert steps == calls

    return Ordinary(function, check)


def guarded_record(core: Core) -> Ordinary:
    record: list[torch.Tensor] = []

    def function(*args: Any) -> Any:
        result = core(*args)
        if not lt.is_recomputing():
            record.append(_last(result).detach())
        return result

    def check(calls: int) -> None:
        assert len(record) == calls
        assert not any(tensor.requires_grad for tensor in record)

    return Ordinary(function, check)


STEP = 7


def global_step_that_is_read(core: Core) -> Ordinary:
    def function(*args: Any) -> Any:
        first, *rest = args
        return core(first * min(1.0, STEP / 100), *rest)  # a warm-up

    return Ordinary(function)


def trainer_that_is_read(core: Core) -> Ordinary:
    """A trainer's step and rate are read inside the function, and moved outside."""

    @dataclass
    class Trainer:
        step: int = 3
        rate: float = 0.5
        history: list[float] = field(default_factory=list)

    trainer = Trainer()

    def function(*args: Any) -> Any:
        first, *rest = args
        return core(first * (trainer.rate / trainer.step), *rest)

    return Ordinary(function)


def logging_(core: Core) -> Ordinary:
    def function(*args: Any) -> Any:
        result = core(*args)
        log.info("mean %.3f", _last(result).mean().item())
        return result

    return Ordinary(function)


def printing(core: Core) -> Ordinary:
    def function(*args: Any) -> Any:
        result = core(*args)
        print(f"mean {_last(result).mean().item():.3f}")
        return result

    return Ordinary(function)


def scheduler_that_is_read(core: Core) -> Ordinary:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)

    def function(*args: Any) -> Any:
        first, *rest = args
        return core(first * scheduler.get_last_lr()[0], *rest)

    return Ordinary(function)


def full_window(core: Core) -> Ordinary:
    """The latest numbers, in a deque that is full."""
    window: deque[float] = deque([0.0] * 3, maxlen=3)

    def function(*args: Any) -> Any:
        result = core(*args)
        window.append(_last(result).mean().item())
        return result

    return Ordinary(function)


def latest_in_a_dictionary(core: Core) -> Ordinary:
    metrics: dict[str, float] = {"mean": 0.0, "largest": 0.0}

    def function(*args: Any) -> Any:
        result = core(*args)
        metrics["mean"] = _last(result).mean().item()
        metrics["largest"] = max(metrics["largest"], _last(result).max().item())
        return result

    return Ordinary(function)


@functools.lru_cache
def decay(width: int, factor: float) -> torch.Tensor:
    return factor ** torch.arange(width, dtype=torch.float32)


def cached_function(core: Core) -> Ordinary:
    decay.cache_clear()

    def function(*args: Any) -> Any:
        first, *rest = args
        return core(first * decay(WIDTH, 0.9), *rest)

    return Ordinary(function)


def cached_by_hand(core: Core) -> Ordinary:
    cache: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def function(*args: Any) -> Any:
        first, *rest = args
        key = first.shape[-1], first.dtype
        if key not in cache:
            cache[key] = torch.linspace(0.5, 1.0, first.shape[-1], dtype=first.dtype)
        return core(first * cache[key], *rest)

    def check(calls: int) -> None:
        assert len(cache) == 1

    return Ordinary(function, check)


def cached_property(core: Core) -> Ordinary:
    class Masked(nn.Module):
        @functools.cached_property
        def mask(self) -> torch.Tensor:
            return torch.arange(WIDTH) % 2 + 0.5

        def forward(self, *args: Any) -> Any:
            first, *rest = args
            return core(first * self.mask, *rest)

    return Ordinary(Masked())


def lazily_built(core: Core) -> Ordinary:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask: torch.Tensor | None = None

        def forward(self, *args: Any) -> Any:
            first, *rest = args
            if self.mask is None:
                self.mask = torch.ones_like(first).tril()
            return core(first * self.mask, *rest)

    module = Masked()

    def check(calls: int) -> None:
        assert module.mask is not None

    return Ordinary(module, check)


def lazily_built_outside(core: Core) -> Ordinary:
    class Holder:
        mask: torch.Tensor | None = None

    holder = Holder()

    def function(*args: Any) -> Any:
        first, *rest = args
        if holder.mask is None:
            holder.mask = torch.ones_like(first).tril()
        return core(first * holder.mask, *rest)

    return Ordinary(function)


class Mode(enum.Enum):
    SOFT = "soft"
    HARD = "hard"


@dataclass(frozen=True)
class Config:
    gain: float = 0.7
    mode: Mode = Mode.SOFT
    sizes: tuple[int, ...] = (ROWS, WIDTH)


def configured(core: Core) -> Ordinary:
    config = Config()

    def function(*args: Any) -> Any:
        first, *rest = args
        assert tuple(first.shape) == config.sizes
        scaled = first * config.gain if config.mode is Mode.SOFT else first.sign()
        return core(scaled, *rest)

    return Ordinary(function)


@functools.lru_cache(maxsize=64)
def _recipe(pattern: str) -> tuple[list[str], list[str]]:
    left, right = pattern.split("->")
    return left.split(), right.split()


def rearranged(tensor: torch.Tensor, pattern: str) -> torch.Tensor:
    """As einops does it: a pattern is parsed once, and its recipe cached."""
    left, right = _recipe(pattern)
    return tensor.permute(*(left.index(axis) for axis in right))


def helper_functions(core: Core) -> Ordinary:
    _recipe.cache_clear()

    def function(*args: Any) -> Any:
        first, *rest = args
        turned = rearranged(first, "b c -> c b").softmax(0)
        return core(rearranged(turned, "c b -> b c"), *rest)

    return Ordinary(function)


def norms_and_dropout(core: Core) -> Ordinary:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)

        def forward(self, *args: Any) -> Any:
            first, *rest = args
            return core(self.drop(self.norm(first)), *rest)

    block = Block()

    def check(calls: int) -> None:
        assert block.norm.num_batches_tracked == calls

    return Ordinary(block, check)


ORDINARY = [
    progress_bar,
    progress_bar_with_text,
    meter,
    global_meter,
    written_number,
    counter_of_kinds,
    running_total,
    histogram,
    timer,
    module_with_timer,
    guarded_counter,
    guarded_record,
    global_step_that_is_read,
    trainer_that_is_read,
    logging_,
    printing,
    scheduler_that_is_read,
    full_window,
    latest_in_a_dictionary,
    cached_function,
    cached_by_hand,
    cached_property,
    lazily_built,
    lazily_built_outside,
    configured,
    helper_functions,
    norms_and_dropout,
]


# --- what grows


def unguarded_record(core: Core) -> Ordinary:
    rec: list[torch.Tensor] = []

    def function(*args: Any) -> Any:
        result = core(*args)
        spk = _last(result) > 0
        rec.append(spk.detach())
        return result

    def check(calls: int) -> None:
        assert len(rec) > calls  # a rerun runs it again, and nothing is taken out

    return Ordinary(function, check)


def unguarded_history(core: Core) -> Ordinary:
    rec: dict[str, list[float]] = {"mean": [], "largest": []}

    def function(*args: Any) -> Any:
        result = core(*args)
        rec["mean"].append(_last(result).mean().item())
        return result

    def check(calls: int) -> None:
        assert len(rec["mean"]) > calls

    return Ordinary(function, check)


REC: list[float] = []


def unguarded_global(core: Core) -> Ordinary:
    REC.clear()

    def function(*args: Any) -> Any:
        result = core(*args)
        REC.append(_last(result).mean().item())
        return result

    def check(calls: int) -> None:
        assert len(REC) > calls

    return Ordinary(function, check)


# --- running them


def _core(loops: bool) -> tuple[Core, nn.Parameter]:
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1)))

    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ weight).sin() + 0.5 * x

    def step(h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = call(h + x)
        return h, h * torch.sigmoid(h)

    return (step if loops else call), weight


def _drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def _loop(function: Any, option: dict[str, Any] | None) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    h, xs = _drawn(ROWS, WIDTH, seed=2), _drawn(LENGTH, ROWS, WIDTH, seed=3)
    if option is None:
        carry, ys = lt.scan(function, h, xs)
    else:
        carry, ys = lt.checkpointed_scan(function, h, xs, checkpoints=2, **option)
    return ys.square().sum() + carry.sum(), [h, xs], LENGTH


def _calls(function: Any, option: dict[str, Any] | None) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    x = _drawn(ROWS, WIDTH, seed=2)
    y: torch.Tensor = x
    for _ in range(CALLS):
        y = function(y) if option is None else lt.checkpoint(function, y, **option)
    return y.square().sum(), [x], CALLS


def _layers(function: Any, option: dict[str, Any] | None) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    x = _drawn(ROWS, WIDTH, seed=2)
    row = [torch.sin, function, torch.tanh, function, torch.sin, function, torch.tanh]
    y: torch.Tensor = x
    if option is None:
        for layer in row:
            y = layer(y)
    else:
        y = lt.sequential(row, x, **option)
    return y.square().sum(), [x], row.count(function)


RUNS = {"loop": _loop, "checkpoint": _calls, "layers": _layers}


def outcome(make: Callable[[Core], Ordinary], front_end: str, option: dict[str, Any] | None) -> list[torch.Tensor]:
    """The loss and the gradients of a program from a fresh start, plainly without an option."""
    torch.manual_seed(4)
    core, weight = _core(front_end == "loop")
    program = make(core)
    loss, leaves, calls = RUNS[front_end](program.function, option)
    gradients = torch.autograd.grad(loss, [weight, *leaves])
    if option is not None:
        program.check(calls)
    return [loss.detach(), *gradients]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(map(same_bits, found, expected))


# Loops compare graphs where a counter moves. Outside them it may steer the next call, which nothing would show.
COUNTING = {
    meter: "losses.count",
    global_meter: "METER.count",
    written_number: "calls",
    counter_of_kinds: "kinds['calls']",
    running_total: "total",
    histogram: "seen",
}
SILENT = [(make, end) for make in ORDINARY for end in FRONT_ENDS if end == "loop" or make not in COUNTING]


@pytest.mark.parametrize(("make", "front_end"), SILENT)
def test_it_is_not_refused_and_nobody_is_warned(
    make: Callable[[Core], Ordinary], front_end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = outcome(make, front_end, {})
    assert_same(found, outcome(make, front_end, None))


@pytest.fixture(autouse=True)
def _nothing_is_told_yet() -> None:
    """Every test begins as a process does: what grows is told once in each."""
    for known in (surroundings._looked, surroundings._told):
        known.clear()


def warned(make: Callable[[Core], Ordinary], front_end: str) -> list[str]:
    """The warnings of a program, whose results have to be right."""
    # Otherwise a rerun ends before the last line of the function, which is where these record.
    option = {"early_stop": False} if front_end == "checkpoint" else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = outcome(make, front_end, option)
    assert_same(found, outcome(make, front_end, None))
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize(("make", "name"), [(unguarded_record, "rec"), (unguarded_global, "REC")])
def test_what_grows_in_a_rerun_is_told_once_by_name(
    make: Callable[[Core], Ordinary], name: str, front_end: str
) -> None:
    (text,) = warned(make, front_end)
    assert re.search(rf"\b{name}\b", text)
    assert "is_recomputing" in text


@pytest.mark.parametrize("front_end", ["checkpoint", "layers"])
@pytest.mark.parametrize(("make", "name"), COUNTING.items())
def test_counters_that_move_in_a_rerun_are_told_once_by_name(
    make: Callable[[Core], Ordinary], name: str, front_end: str
) -> None:
    (text,) = warned(make, front_end)
    assert f"`{name}`" in text
    assert "is_recomputing" in text


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_what_grows_inside_something_is_told_once_at_most(front_end: str) -> None:
    assert len(warned(unguarded_history, front_end)) <= 1


# --- cells as their tutorials write them


class SnnTorchNet(nn.Module):
    """As in snnTorch's tutorials: leaky neurons whose state is handed on by hand, and everything recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 9), nn.Linear(9, 3)
        self.lif1 = snntorch.Leaky(beta=0.9, spike_grad=surrogate.fast_sigmoid(slope=25))
        self.lif2 = snntorch.Leaky(beta=0.9, spike_grad=surrogate.fast_sigmoid(slope=25))

    def begin(self) -> Any:
        return self.lif1.init_leaky(), self.lif2.init_leaky()

    def step(self, mems: Any, x: torch.Tensor) -> Any:
        spk1, mem1 = self.lif1(self.fc1(x), mems[0])
        spk2, mem2 = self.lif2(self.fc2(spk1), mems[1])
        return (mem1, mem2), (spk2, mem2)


def _snntorch_hidden() -> nn.Module:
    net = nn.Sequential(
        nn.Linear(WIDTH, 9),
        snntorch.Leaky(beta=0.9, init_hidden=True),
        nn.Linear(9, 3),
        snntorch.Synaptic(alpha=0.8, beta=0.9, init_hidden=True),
    )
    snntorch_utils.reset(net)
    return net


def _jelly() -> nn.Module:
    net = nn.Sequential(
        jelly_layer.Linear(WIDTH, 9),
        jelly_neuron.LIFNode(tau=2.0, v_threshold=0.2),
        jelly_layer.Linear(9, 3),
        jelly_neuron.ParametricLIFNode(init_tau=2.0, v_threshold=0.2),
    )
    jelly_functional.reset_net(net)
    return net


def over(plain: Callable[..., Any], ours: Callable[..., Any], option: dict[str, Any]) -> list[Callable[..., Any]]:
    """The plain loop, and ours with an option."""
    return [plain, functools.partial(ours, **option)]


def _tensors(ys: Any) -> torch.Tensor:
    parts = ys if isinstance(ys, tuple) else (ys,)
    return torch.stack([(part.float() + 0.1).square().sum() for part in parts]).sum()


@pytest.mark.parametrize("option", [{}, {"checkpoints": 1}, {"base": 3}], ids=str)
@pytest.mark.parametrize("make", [_snntorch_hidden, _jelly])
def test_cells_with_a_state_of_their_own(make: Callable[[], nn.Module], option: dict[str, Any]) -> None:
    found = []
    for run in over(lt.for_loop, lt.checkpointed_for_loop, option):
        torch.manual_seed(0)
        net, xs = make(), _drawn(LENGTH, ROWS, WIDTH, seed=3)
        loss = _tensors(run(net, xs))
        found.append([loss.detach(), *torch.autograd.grad(loss, [xs, *net.parameters()])])
    assert_same(*found)


@pytest.mark.parametrize("option", [{}, {"checkpoints": 1}, {"base": 3}], ids=str)
def test_a_net_of_snntorchs_tutorial_with_its_state_by_hand(option: dict[str, Any]) -> None:
    found = []
    for run in over(lt.scan, lt.checkpointed_scan, option):
        torch.manual_seed(0)
        net, xs = SnnTorchNet(), _drawn(LENGTH, ROWS, WIDTH, seed=3)
        mems = torch.zeros(ROWS, 9), torch.zeros(ROWS, 3)  # a carry has its shape from the start
        loss = _tensors(run(net.step, mems, xs)[1])
        found.append([loss.detach(), *torch.autograd.grad(loss, [xs, *net.parameters()])])
    assert_same(*found)


@pytest.mark.parametrize("option", [{}, {"checkpoints": 1}, {"base": 3}], ids=str)
def test_a_cell_of_norses_tutorial(option: dict[str, Any]) -> None:
    found = []
    for run in over(lt.scan, lt.checkpointed_scan, option):
        torch.manual_seed(0)
        first, cell, xs = nn.Linear(WIDTH, 9), norse.LIFCell(), _drawn(LENGTH, ROWS, WIDTH, seed=3)

        def step(state: Any, x: torch.Tensor, first: Any = first, cell: Any = cell) -> Any:
            spikes, state = cell(10 * first(x), state)
            return state, (spikes, state.v)

        state = norse.LIFFeedForwardState(v=torch.zeros(ROWS, 9), i=torch.zeros(ROWS, 9))
        loss = _tensors(run(step, state, xs)[1])
        found.append([loss.detach(), *torch.autograd.grad(loss, [xs, *first.parameters()])])
    assert_same(*found)


def test_whole_nets_of_snntorch_in_a_checkpoint_call() -> None:
    """The loop over time is inside the function, with lists, as the tutorials have it."""

    def forward(net: SnnTorchNet, xs: torch.Tensor) -> Any:
        mems, spk_rec, mem_rec = net.begin(), [], []
        for x in xs:
            mems, (spk, mem) = net.step(mems, x)
            spk_rec.append(spk)
            mem_rec.append(mem)
        return torch.stack(spk_rec), torch.stack(mem_rec)

    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        net, xs = SnnTorchNet(), _drawn(LENGTH, ROWS, WIDTH, seed=3)
        ys = lt.checkpoint(forward, net, xs) if checkpointed else forward(net, xs)
        loss = _tensors(ys)
        found.append([loss.detach(), *torch.autograd.grad(loss, [xs, *net.parameters()])])
    assert_same(*found)


# --- anything, where nothing is compared


def steering_number(core: Core) -> Ordinary:
    calls = 0

    def function(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        first, *rest = args
        return core(first / calls, *rest)

    return Ordinary(function)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("make", [*ORDINARY, steering_number])
def test_without_a_check_nothing_is_refused(
    make: Callable[[Core], Ordinary], front_end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome(make, front_end, {"check_rerun": False})
