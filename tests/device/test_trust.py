"""What has to hold on an accelerator beside the plain bits: bytes, budgets, errors, random numbers, several devices."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide.torch as lt
from lowtide.torch.memory import accelerators
from tests.device import programs, tide

pytestmark = pytest.mark.usefixtures("the_tide")
TIDE = torch.device(tide.NAME, 0)


# --- bytes


def test_what_is_measured_is_what_the_allocator_counts() -> None:
    model = programs.Model("dropout", TIDE, TIDE)
    x = torch.randn(32, 16, device=TIDE)
    with tide.Watch() as watch, lt.measure.peak() as memory:
        torch.ones(1000)  # in the host's memory, which is not what counts
        model(x).backward()
    assert memory.peak == watch.peak
    assert memory.peaks["tide:0"] == memory.peak
    assert memory.peaks["cpu"] >= 4000


def test_the_users_statistics_are_not_touched() -> None:
    cell, xs = programs.Cell("plain", TIDE), torch.randn(16, 4, 8, device=TIDE)
    torch.empty(10_000_000, device=TIDE)
    before = torch.accelerator.max_memory_allocated(TIDE)
    with lt.record() as receipt:
        lt.checkpointed_scan(cell, cell.start(), xs, budget="90%")[1].sum().backward()
    assert torch.accelerator.max_memory_allocated(TIDE) == before
    assert 0 < receipt.peak_memory - receipt.held <= 0.9 * 16 * 256
    assert max(receipt.curve) == receipt.peak_memory - receipt.held


def test_each_device_has_a_line() -> None:
    other = torch.device("tide:1")
    model = programs.Model("plain", TIDE, other)
    x = torch.randn(32, 16, device=TIDE)
    with tide.Watch(0) as one, tide.Watch(1) as two, lt.measure.peak() as memory:
        model(x).backward()
    assert memory.peaks == {"tide:0": one.peak, "tide:1": two.peak}
    assert max(one.peak, two.peak) < memory.peak <= one.peak + two.peak


def test_bytes_of_the_host_are_not_planned() -> None:
    class OnBoth(programs.Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(TIDE)) + (x.repeat(100, 1) * 2).mean().to(TIDE)

    model, x = OnBoth("plain", TIDE, TIDE), torch.randn(32, 16)
    assert lt.measure.storage_bytes([x, *model.parameters()]) == lt.measure.storage_bytes(list(model.parameters()))
    plan = lt.plan_model(model, x, peak="10MiB")
    with tide.Watch() as watch:
        model(x).backward()
    held = lt.measure.storage_bytes([*model.parameters(), *model.buffers()])
    assert plan.bill.peak_memory == pytest.approx(held + watch.peak, rel=0.01)


@pytest.mark.parametrize("kind", ["plain", "gru", "lstm", "dropout", "hidden"])
@pytest.mark.parametrize("room", [1.0, 1.2, 2.0])
def test_a_loops_budget_is_kept_by_the_allocator(kind: str, room: float) -> None:
    cell = programs.Cell(kind, TIDE)
    xs, start = torch.randn(30, 4, 8, device=TIDE), cell.start()

    def train(call: Callable[[], Any]) -> Tensor:
        cell.reset()
        ys = call()[1]
        ys.sum().backward()
        return ys  # type: ignore[no-any-return]

    with pytest.raises(lt.BudgetError) as found:
        lt.plan_scan(cell, start, xs, budget=1)
    budget = int(room * found.value.least)
    train(lambda: lt.checkpointed_scan(cell, start, xs, budget=budget))
    cell.zero_grad()
    outputs = train(lambda: programs.plain_scan(cell, start, xs)).nbytes
    gradients = sum(parameter.nbytes for parameter in cell.parameters())
    cell.zero_grad()
    gc.collect()
    # The plain call holds the outputs, their cotangent, and the gradients; beside samples, 8 bytes each.
    with tide.limited(budget + 2 * outputs + gradients + 16 * 30 * 8 + 64), tide.Watch() as watch:
        train(lambda: lt.checkpointed_scan(cell, start, xs, budget=budget))
    assert watch.peak > gradients


@pytest.mark.parametrize(
    "kind",
    [
        "dropout",
        "norm",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("plain", "attention", "convolution", "relu")),
    ],
)
@pytest.mark.parametrize("room", [1.0, 1.5])
def test_a_models_peak_is_kept_by_the_allocator(kind: str, room: float) -> None:
    model = programs.Model(kind, TIDE, TIDE, TIDE)
    x = torch.randn(48, 16, device=TIDE)
    with pytest.raises(lt.BudgetError) as found:
        lt.plan_model(model, x, peak=1)
    peak = int(room * found.value.least)
    lt.auto_checkpoint(model, x, peak=peak)
    model(x).backward()
    model.zero_grad()
    gc.collect()
    resident = lt.measure.storage_bytes([x, *model.parameters(), *model.buffers()])
    with tide.limited(peak - resident):
        model(x).backward()


# --- time


def test_times_are_taken_when_the_device_has_done_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the clock of a host that stands still but where it waits."""
    monkeypatch.setattr(accelerators, "perf_counter", tide.extension().host_seconds)
    row = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 512, bias=False), nn.Linear(512, 16, bias=False)).to(TIDE)
    plan = lt.plan_sequential(row, torch.randn(8, 16, device=TIDE))
    forward = [plan.chain[k].forward for k in range(3)]
    assert forward[1] > 5 * forward[0] > 0
    cell, xs = programs.Cell("plain", TIDE), torch.randn(16, 4, 8, device=TIDE)
    assert lt.plan_scan(cell, cell.start(), xs, budget="90%").chain[0].backward > 0


def test_a_loop_that_is_not_timed_does_not_wait() -> None:
    cell, xs = programs.Cell("plain", TIDE), torch.randn(16, 4, 8, device=TIDE)
    with tide.Watch() as watch:
        lt.checkpointed_scan(cell, cell.start(), xs, budget="90%")
    assert watch.counts["syncs"] == 0


# --- errors


@pytest.mark.parametrize("call", ["checkpoint", "lean", "loop", "sequential", "model"])
def test_running_out_of_memory_inside_leaves_everything_as_it_was(call: str) -> None:
    model = programs.Model("dropout", TIDE, TIDE, TIDE)
    x = torch.randn(32, 16, device=TIDE)
    blocks, cell = model.blocks, programs.Cell("norm", TIDE)
    xs = torch.randn(16, 4, 8, device=TIDE)
    plan = lt.plan_sequential(list(blocks), x)
    ours = programs.Model("dropout", TIDE, TIDE, TIDE)
    lt.apply(lt.plan_model(ours, x, peak="10MiB"), ours)
    ways: dict[str, Callable[[], Any]] = {
        "checkpoint": lambda: lt.checkpoint(model, x).backward(),
        "lean": lambda: lt.lean(model, x).backward(),
        "loop": lambda: lt.checkpointed_scan(cell, cell.start(), xs, base=3)[1].sum().backward(),
        "sequential": lambda: lt.sequential(list(blocks), x, plan=plan).sum().backward(),
        "model": lambda: ours(x).backward(),
    }
    train = ways[call]
    for module in (model, cell, ours):
        module.zero_grad()
    train()
    expected = _state(model, cell, ours)
    with tide.Watch() as watch:
        train()
    needed = watch.peak
    for share in (0.1, 0.5, 0.9):
        for module in (model, cell, ours):
            module.zero_grad()
        buffers = [buffer.clone() for buffer in cell.buffers()]
        gc.collect()
        before, grad, casts = tide.allocated(), torch.is_grad_enabled(), torch.is_autocast_enabled("tide")
        try:
            with tide.limited(int(share * needed)):
                train()
        except torch.OutOfMemoryError:
            pass
        for module in (model, cell, ours):
            module.zero_grad()
        assert (torch.is_grad_enabled(), torch.is_autocast_enabled("tide")) == (grad, casts)
        assert not lt.is_recomputing()
        with torch.no_grad():
            for buffer, was in zip(cell.buffers(), buffers, strict=True):
                buffer.copy_(was)
        del buffers, buffer, was
        _assert_freed(before)
    torch.manual_seed(0)
    train()
    assert len(_state(model, cell, ours)) == len(expected)


def _state(*modules: nn.Module) -> list[Tensor]:
    return [parameter.grad for module in modules for parameter in module.parameters() if parameter.grad is not None]


def _assert_freed(before: int) -> None:
    for _ in range(50):
        gc.collect()
        if tide.allocated() <= before:
            return
        sleep(0.01)
    assert tide.allocated() <= before


def test_a_rerun_that_differs_is_refused_at_the_end_of_the_backward() -> None:
    calls = iter(range(100))
    x = torch.randn(6, 16, device=TIDE, requires_grad=True)

    def counts(x: Tensor) -> Tensor:
        return (x * (1 + next(calls))).exp()

    y = lt.checkpoint(counts, x)
    with pytest.raises(lt.CheckpointError, match="its values are not those of the first run"):
        y.sum().backward()


def test_rows_that_change_places_are_noticed() -> None:
    orders = iter([torch.arange(6), torch.arange(6).flip(0)])
    x = torch.randn(6, 16, device=TIDE, requires_grad=True)
    y = lt.checkpoint(lambda x: x[next(orders).to(TIDE)].exp(), x)
    with pytest.raises(lt.CheckpointError, match="its values are not those of the first run"):
        y.sum().backward()


def test_a_loop_whose_step_does_not_repeat_is_refused() -> None:
    factors = iter(range(1, 1000))
    w = torch.ones(8, device=TIDE, requires_grad=True)
    xs = torch.randn(16, 4, 8, device=TIDE)
    ys = lt.checkpointed_for_loop(lambda x: (x * w * next(factors)).sum(1), xs, checkpoints=2)
    with pytest.raises(lt.CheckpointError, match="does not do what it did at first"):
        ys.sum().backward()


def test_a_backward_on_two_devices_compares_on_both() -> None:
    calls = {"tide:0": iter(range(100)), "tide:1": iter(range(100))}
    x = torch.randn(6, 16, device=TIDE, requires_grad=True)
    for changing in calls:

        def counts(x: Tensor, changing: str = changing) -> Tensor:
            return (x * (1 + (next(calls[changing]) if str(x.device) == changing else 0))).exp()

        y = lt.checkpoint(counts, lt.checkpoint(counts, x).to("tide:1"))
        with pytest.raises(lt.CheckpointError, match="its values are not those of the first run"):
            y.sum().backward()


def test_debug_names_the_line_on_a_device_too() -> None:
    calls = iter(range(100))
    x = torch.randn(6, 16, device=TIDE, requires_grad=True)
    y = lt.checkpoint(lambda x: (x * (1 + next(calls))).exp(), x, debug=True)
    with pytest.raises(lt.CheckpointError, match=r"test_trust.py:\d+: "):
        y.sum().backward()


def test_noise_that_is_not_filled_everywhere_is_no_difference() -> None:
    x = torch.randn(600, 16, device=TIDE, requires_grad=True)
    lt.checkpoint(lambda x: nn.functional.rrelu(x.sin(), training=True).exp(), x).sum().backward()


# --- what calls keep, and when they wait, inside one another


@pytest.mark.parametrize("call", [lt.checkpoint, lt.lean], ids=["checkpoint", "lean"])
def test_arguments_of_calls_are_freed_one_by_one(call: Callable[..., Any]) -> None:
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(12))).to(TIDE)
    x = torch.randn(128, 32, device=TIDE)

    def peak(compare: bool | None) -> int:
        blocks.zero_grad()
        gc.collect()
        with tide.Watch() as watch:
            y = x
            for block in blocks:
                y = call(block, y, **({} if call is lt.lean else {"check_rerun": compare}))
            y.sum().backward()
        return watch.peak

    peak(None)
    # A sample is 8 bytes, and takes 8 KiB while it is made; the arguments would be 16 KiB each.
    assert peak(None) <= peak(False) + 12 * 10 * 8 + 8 * 1024


def test_one_read_however_calls_are_nested() -> None:
    cell, xs = programs.Cell("dropout", TIDE), torch.randn(8, 4, 8, device=TIDE)

    def inside(h: Tensor, x: Tensor) -> Any:
        return lt.checkpointed_scan(cell, h, x.unsqueeze(0).expand(3, 4, 8), base=2)

    def train(step: Callable[[Any, Tensor], Any]) -> None:
        lt.checkpointed_scan(step, cell.start(), xs, base=3)[1].sum().backward()

    steps: tuple[Callable[[Any, Tensor], Any], ...] = (
        lambda h, x: lt.checkpoint(cell, h, x),
        lambda h, x: lt.lean(cell, h, x),
        lambda h, x: lt.checkpoint(inside, h, x),
        inside,
    )
    for step in steps:
        train(step)
        with tide.Watch() as watch:
            train(step)
        assert watch.waits == 1


# --- several devices, generators, autocast


@pytest.mark.parametrize("call", ["checkpoint", "lean"])
def test_a_function_over_two_devices(call: str) -> None:
    other = torch.device("tide:1")
    model = programs.Model("dropout", TIDE, other, TIDE)
    x = torch.randn(6, 16, device=TIDE)
    run: Any = {"checkpoint": lt.checkpoint, "lean": lt.lean}[call]
    plain = programs.run(other, model, lambda: model(x))
    for _ in range(2):
        programs.assert_same(plain, programs.run(other, model, lambda: run(model, x)))


def test_a_loop_over_two_devices() -> None:
    one, two = programs.Cell("dropout", TIDE), programs.Cell("dropout", torch.device("tide:1"))
    both, xs = nn.ModuleList([one, two]), torch.randn(16, 4, 8, device=TIDE)

    def step(h: Any, x: Tensor) -> Any:
        a, y = one(h[0], x)
        b, z = two(h[1], y[:, None].expand(4, 8).to("tide:1"))
        return (a, b), z

    start = one.start(), two.start()
    plain = programs.run(torch.device("tide:1"), both, lambda: programs.plain_scan(step, start, xs))
    ours = programs.run(torch.device("tide:1"), both, lambda: lt.checkpointed_scan(step, start, xs, base=3))
    programs.assert_same(plain, ours)


def test_a_model_over_two_devices() -> None:
    model = programs.Model("dropout", TIDE, TIDE, torch.device("tide:1"), torch.device("tide:1"))
    x = torch.randn(32, 16, device=TIDE)
    plain = programs.run(torch.device("tide:1"), model, lambda: model(x))
    with pytest.raises(lt.BudgetError) as found:
        lt.plan_model(model, x, peak=1)
    lt.auto_checkpoint(model, x, peak=found.value.least)
    programs.assert_same(plain, programs.run(torch.device("tide:1"), model, lambda: model(x)))


@pytest.mark.parametrize("call", ["checkpoint", "lean", "loop"])
def test_autocast_is_that_of_the_first_run(device: torch.device, call: str) -> None:
    block, cell = programs.Block("plain").to(device), programs.Cell("plain", device)
    x, xs = torch.randn(6, 16, device=device), torch.randn(16, 4, 8, device=device)

    def step(h: Tensor, x: Tensor) -> Any:
        h, y = cell(h, x)
        return h.float(), y

    plain: dict[str, Callable[[], Any]] = {
        "checkpoint": lambda: block(x),
        "lean": lambda: block(x),
        "loop": lambda: programs.plain_scan(step, cell.start(), xs)[1],
    }
    ours: dict[str, Callable[[], Any]] = {
        "checkpoint": lambda: lt.checkpoint(block, x),
        "lean": lambda: lt.lean(block, x),
        "loop": lambda: lt.checkpointed_scan(step, cell.start(), xs, base=3)[1],
    }
    gradients = []
    for run in (plain[call], ours[call]):
        module = cell if call == "loop" else block
        module.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=call != "loop"):
            result = run()
        result.square().sum().backward()  # outside: the rerun finds autocast as the first run did
        gradients.append([parameter.grad.clone() for parameter in module.parameters()])  # type: ignore[union-attr]
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("call", ["checkpoint", "loop", "measuring"])
def test_the_first_run_may_be_what_initialises_the_device(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.get_device_module(tide.NAME)
    w = torch.ones(4, requires_grad=True)
    monkeypatch.setattr(module, "in_use", False, raising=False)
    monkeypatch.setattr(module, "is_initialized", lambda: module.in_use)

    def noisy(x: Tensor) -> Tensor:
        module.in_use = True
        return (x.to(TIDE) * torch.rand(4, device=TIDE)).exp().cpu()

    module.manual_seed_all(3)
    if call == "measuring":
        row = nn.Sequential(nn.Tanh(), _Noisy(noisy))
        lt.plan_sequential(row, w)
        y = row(w)
    elif call == "checkpoint":
        y = lt.checkpoint(noisy, w)
    else:
        y = lt.checkpointed_for_loop(lambda x: noisy(w * x), torch.ones(9, 4), base=3)
    y.sum().backward()
    ours, w.grad = w.grad, None
    module.manual_seed_all(3)
    if call == "measuring":
        y = row(w)
    else:
        y = noisy(w) if call == "checkpoint" else torch.stack([noisy(w) for _ in range(9)])
    y.sum().backward()
    assert torch.equal(ours, w.grad)  # type: ignore[arg-type]


class _Noisy(nn.Module):
    def __init__(self, noisy: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.noisy = noisy

    def forward(self, x: Tensor) -> Tensor:
        return self.noisy(x)


def test_an_accelerator_that_does_not_hand_out_its_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.get_device_module(tide.NAME)
    monkeypatch.delattr(module, "default_generators")
    (only,) = accelerators.generators_of.__wrapped__(module)
    state = only.get_state()
    first = torch.rand(3, device=TIDE)
    only.set_state(state)
    assert torch.equal(torch.rand(3, device=TIDE), first)


# --- streams


@pytest.mark.parametrize("call", ["checkpoint", "lean", "loop"])
def test_a_rerun_is_in_the_stream_of_the_first_run(call: str) -> None:
    cell, w = programs.Cell("plain", TIDE), torch.ones(4, 8, device=TIDE, requires_grad=True)
    host = torch.randn(8, 4, 8).pin_memory()
    used: list[int] = []

    def fetching(x: Tensor) -> Tensor:
        used.append(torch.accelerator.current_stream().stream_id)
        there = host[0].to(TIDE, non_blocking=True)  # arrives in that stream
        return (x * there).exp()

    def train(run: Callable[[], Any], stream: torch.Stream) -> Tensor:
        torch.accelerator.synchronize()
        with stream:
            y = run()
        torch.accelerator.current_stream().wait_stream(stream)
        y.sum().backward()
        found, w.grad = w.grad, None
        cell.zero_grad()
        assert found is not None
        return found

    def step(h: Tensor, x: Tensor) -> Any:
        y = fetching(w * x)
        return y.tanh() + h, y

    runs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "checkpoint": (lambda: fetching(w), lambda: lt.checkpoint(fetching, w)),
        "lean": (lambda: fetching(w), lambda: lt.lean(fetching, w)),
        "loop": (
            lambda: programs.plain_scan(step, cell.start(), host.to(TIDE))[1],
            lambda: lt.checkpointed_scan(step, cell.start(), host.to(TIDE), base=3)[1],
        ),
    }
    plain, ours = runs[call]
    expected = train(plain, torch.Stream(device=TIDE))
    used.clear()
    stream = torch.Stream(device=TIDE)
    assert torch.equal(train(ours, stream), expected)
    assert set(used) == {stream.stream_id}


def test_activations_in_pinned_memory() -> None:
    block, x = programs.Block("plain").to(TIDE), torch.randn(6, 16, device=TIDE)
    plain = programs.run(TIDE, block, lambda: block(x))
    for call in (lt.checkpoint, lt.lean):
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            programs.assert_same(plain, programs.run(TIDE, block, partial(call, block, x)))
