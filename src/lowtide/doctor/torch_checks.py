"""Checks of `lowtide.torch` on a device: bits, bytes, speed, and copies to the host, beside plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide.torch as lt
from lowtide.doctor import programs
from lowtide.doctor.findings import Fact, Outcome
from lowtide.doctor.programs import FULL, QUICK, Run, TrainingSize, TrainingStep
from lowtide.packages import needed_for
from lowtide.planners.blocks import for_peak
from lowtide.sizes import format_size
from lowtide.torch import measure

# An allocator rounds each tensor up, to 512 bytes for example: a share of what it says, and some bytes, are not held
# against a budget.
_ROUNDING, _ROUNDING_BYTES = 1.05, 64 * 1024
_TURNS = 8  # of each program that is timed; Lowtide learns about a function in the first few


def devices() -> dict[str, torch.device]:
    """The CPU, and every accelerator."""
    found = {"cpu": torch.device("cpu")}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = "" if accelerator is None else accelerator.type
    return found | {f"{kind}:{k}": torch.device(kind, k) for k in range(torch.accelerator.device_count())}


def facts() -> Iterator[Fact]:
    """The build and the devices."""
    yield Fact("torch build", f"{torch.__version__}, {torch.get_num_threads()} threads")
    for name, device in devices().items():
        called = getattr(torch.get_device_module(device), "get_device_name", str)
        yield Fact(f"torch:{name}", called(device))


def checks(device: torch.device, *, quick: bool) -> dict[str, Callable[[], Outcome]]:
    """All checks of a device."""
    size = QUICK if quick else FULL
    same = partial(same_bits, size=size, device=device)
    return {
        "bits: loop": partial(same, programs.LOOP),
        "bits: checkpoint": partial(same, programs.CHECKPOINT),
        "bits: layers": partial(same, programs.LAYERS),
        "random numbers": partial(same, programs.RANDOM),
        "hidden state": partial(same, programs.STATEFUL),
        "lean": partial(lean, size, device),
        "budget: loop": partial(loop_budget, size, device),
        "peak: model": partial(model_peak, size, device),
        "speed: loop": partial(loop_speed, size, device),
        "speed: checkpoint": partial(checkpoint_speed, size, device),
        "host copies": partial(host_copies, QUICK, device),
    }


# --- bits


def same_bits(program: TrainingStep, size: TrainingSize, device: torch.device) -> Outcome:
    """With Lowtide, everything that a step leaves behind has the plain step's bits."""
    one, other = (programs.results(run, *program.made(size, device)) for run in (program.plain, program.lowtide))
    different = programs.differences(one, other)
    said = f"{len(one)} tensors with the same bits"
    return Outcome(not different, f"different: {', '.join(different)}" if different else said)


# --- bytes


class Bytes(NamedTuple):
    """The bytes that some code took beyond those that were there before."""

    peak: int
    left: int
    reserved: int | None = None  # by the allocator, all in all; None where tensors were counted instead

    def __str__(self) -> str:
        of = "of tensors" if self.reserved is None else f"allocated, {format_size(self.reserved)} reserved"
        return f"{format_size(self.peak)} {of}"

    def within(self, limit: int) -> bool:
        """Whether the peak is within the limit, but for rounding by an allocator."""
        return self.peak <= (limit if self.reserved is None else limit * _ROUNDING + _ROUNDING_BYTES)


class Allocator(Protocol):
    """What `torch.accelerator`, `torch.cuda` and others say about the memory of a device."""

    def memory_allocated(self, device: torch.device) -> int:
        """Bytes now."""

    def max_memory_allocated(self, device: torch.device) -> int:
        """Bytes at the worst moment."""

    def max_memory_reserved(self, device: torch.device) -> int:
        """The same with what is kept for later."""

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        """Forget the worst moment."""


def allocator_of(device: torch.device) -> Allocator | None:
    """The statistics of the device's allocator; None on the CPU, and where it has none."""
    for found in (torch.accelerator, getattr(torch, device.type, None)):
        try:
            found.max_memory_reserved(device)  # type: ignore[union-attr]
        except (AttributeError, AssertionError, RuntimeError, ValueError):
            continue
        return found
    return None


def measured(run: Callable[[], Any], device: torch.device, allocator: Allocator | None) -> Bytes | None:
    """The bytes that a run takes: by the allocator, or on the CPU by its tensors; None if nobody can say."""
    if allocator is None:
        with measure.peak() as memory:
            result = run()
            left = memory.now
        del result
        return Bytes(memory.peak, left) if device.type == "cpu" else None
    synchronize(device)
    allocator.reset_peak_memory_stats(device)
    before = allocator.memory_allocated(device)
    result = run()
    synchronize(device)
    left = allocator.memory_allocated(device) - before
    del result
    return Bytes(allocator.max_memory_allocated(device) - before, left, allocator.max_memory_reserved(device))


_UNMEASURED = Outcome(None, "the device's allocator does not say how much is allocated")


def loop_budget(size: TrainingSize, device: torch.device, allocator: Allocator | None = None) -> Outcome:
    """A loop stays within the bytes that it was given, beside its results."""
    cell, xs = programs.LOOP.made(size, device)
    xs = xs.detach()
    plan = lt.plan_scan(lambda h, x: (cell(x, h), None), torch.zeros_like(xs[0]), xs)
    budget = plan.bill.peak_memory

    def run() -> torch.Tensor:
        loss = programs.scanned_with_lowtide(cell, xs, budget)
        loss.backward()
        return loss.detach()

    run()  # for what is allocated once
    cell.zero_grad()
    found = measured(run, device, allocator or allocator_of(device))
    if found is None:
        return _UNMEASURED
    # Gradients of the parameters; the last carry and its cotangent.
    results = measure.storage_bytes(list(cell.parameters())) + 2 * xs[0].nbytes
    said = f"budget {format_size(budget)}, {found}, {format_size(results)} of them results"
    return Outcome(found.within(budget + results), said)


def model_peak(size: TrainingSize, device: torch.device, allocator: Allocator | None = None) -> Outcome:
    """A model planned for a peak half way between the least and the plain one stays within it, with the plain bits."""
    plain_module, plain_x = programs.CHECKPOINT.made(size, device)
    plain = programs.results(programs.called, plain_module, plain_x)
    module, x = programs.CHECKPOINT.made(size, device)
    resident = measure.storage_bytes([*module.parameters(), *module.buffers(), x])
    everything = lt.plan_model(module, x, peak="1TiB", loss=programs.squares)
    most, *_, least = (point.peak for point in everything.frontier)
    peak = (most + least) // 2
    plan = for_peak(everything, peak)
    lt.apply(plan, module)
    found = measured(lambda: programs.results(programs.called, module, x), device, allocator or allocator_of(device))
    again, x = programs.CHECKPOINT.made(size, device)
    lt.apply(plan, again)
    different = programs.differences(plain, programs.results(programs.called, again, x))
    if found is None:
        return _UNMEASURED._replace(holds=False if different else None)
    total = found._replace(peak=found.peak + resident)
    said = f"peak {format_size(peak)} of {format_size(most)}, {total}"
    said += f"; different: {', '.join(different)}" if different else "; the same bits"
    return Outcome(total.within(peak) and not different, said)


def lean(size: TrainingSize, device: torch.device) -> Outcome:
    """A lean tape is smaller, and changes no bit."""
    with needed_for("lean"):
        import scipy  # type: ignore[import-untyped]  # noqa: F401
    outcome = same_bits(programs.LEAN, size, device)
    kept = []
    for run in (programs.LEAN.plain, programs.LEAN.lowtide):
        module, x = programs.LEAN.made(size, device)
        run(module, x)  # traced
        found = measured(partial(run, module, x), device, allocator_of(device))
        kept.append(0 if found is None else found.left)
    said = f"tape {format_size(kept[1])}, {format_size(kept[0])} plain; {outcome.text}"
    return Outcome(outcome.holds and (kept[1] < kept[0] or not any(kept)), said)


# --- seconds


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def fastest(runs: Mapping[str, Callable[[], Any]], device: torch.device) -> dict[str, float]:
    """The fastest of several turns of each, the runs taking turns."""
    seconds = dict.fromkeys(runs, float("inf"))
    for _ in range(_TURNS):
        for name, run in runs.items():
            synchronize(device)
            began = perf_counter()
            run()
            synchronize(device)
            seconds[name] = min(seconds[name], perf_counter() - began)
    return seconds


def ratios(program: TrainingStep, size: TrainingSize, device: torch.device, usual: Run) -> Outcome:
    """The time of a program with Lowtide and with torch's own checkpoint, as multiples of the plain one's."""
    module, x = program.made(size, device)
    runs = {"plain": program.plain, "Lowtide": program.lowtide, "torch.utils.checkpoint": usual}
    steps = {name: partial(programs.results, run, module, x) for name, run in runs.items()}
    seconds = fastest(steps, device)
    plain = seconds.pop("plain")
    said = ", ".join(f"{name} {taken / plain:.2f}x" for name, taken in seconds.items())
    return Outcome(None, f"{said} of plain, {plain * 1e3:.3g} ms")


def loop_speed(size: TrainingSize, device: torch.device) -> Outcome:
    """The time of a loop, beside a checkpoint call for each step."""

    def usual(cell: nn.Module, xs: torch.Tensor) -> torch.Tensor:
        return programs.scanned(partial(torch_checkpoint, cell, use_reentrant=False), xs)

    return ratios(programs.LOOP, size, device, usual)


def checkpoint_speed(size: TrainingSize, device: torch.device) -> Outcome:
    """The time of checkpoint calls, beside torch's."""

    def usual(net: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        for layer in net:
            x = torch_checkpoint(layer, x, use_reentrant=False)
        return programs.squares(x)

    return ratios(programs.CHECKPOINT, size, device, usual)


# --- copies to the host


class HostCopies(TorchDispatchMode):
    """Counts what makes the host wait for a device: single numbers that are read, and tensors that are copied to it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._device = device
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._device in {leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}:
            copied = isinstance(result, torch.Tensor) and result.device != self._device
            self.count += copied or func is torch.ops.aten._local_scalar_dense.default
        return result


def host_copies(size: TrainingSize, device: torch.device) -> Outcome:
    """A loop copies nothing to the host with each step that the plain loop does not copy."""
    few, many = (_copies(size, steps, device) for steps in (size.steps, 2 * size.steps))
    plain, ours = ((after - before) / size.steps for before, after in zip(few, many, strict=True))
    said = f"{ours:.3g} for each step, {plain:.3g} in the plain loop"
    if device.type == "cpu":
        return Outcome(None, f"numbers read: {said}; on the CPU nothing waits for them")
    return Outcome(ours <= plain, said)


def _copies(size: TrainingSize, steps: int, device: torch.device) -> list[int]:
    """The copies of a loop of so many steps, plainly and with Lowtide, once it is known how the steps go."""
    found = []
    for run in (programs.LOOP.plain, programs.LOOP.lowtide):
        module, xs = programs.LOOP.made(TrainingSize(steps, size.layers, size.width, size.batch), device)
        run(module, xs).backward()
        with HostCopies(xs.device) as copies:
            run(module, xs).backward()
        found.append(copies.count)
    return found
