"""What a call of `lt.checkpoint` costs beside `torch.utils.checkpoint` and a plain call, and the heavy model with it.

    python benchmarks/torch_checkpoint.py [--quick]

How it measures: CPU seconds of this process (`time.process_time`), one thread, so that a busy machine disturbs little.
What is compared takes turns in one process, each is run once before, and the least of the repeats counts. Torch's
checkpoint is the non-reentrant one. Beside each figure stands its limit, where there is one.

    a call        forward and backward of 3 operations, and of a chain of 100, on 8 numbers; that one also with
                  `check_rerun=False`, where nothing is read of the tensors that autograd saves
    a block       forward and backward of a module: 36 layers of width 16 on 8 rows, what is beyond the plain call's
                  time; a transformer block of width 512 on 2 x 128 tokens, the whole time
    without grad  the 3 operations under `torch.no_grad()`: there is nothing to save, so it should cost a call
    kept          bytes for each call that waits for its backward, beyond those of a plain call: the 3 operations, which
                  draw no random number. Python's objects (`tracemalloc`) and storages of tensors that Python holds;
                  and, as the operating system sees it, the growth of resident memory of a fresh process
    heavy model   1,000 calls of a function of 100 additions on one number, and of 100 x = sin(x * a). Each variant has
                  fresh processes of its own, taking turns: the growth of peak resident memory in the first forward and
                  backward, and the CPU seconds of the fastest one

An addition saves nothing for its backward, so there is nothing for a checkpoint to drop, nor to run again: what grows
is the graph itself. The loop keeps no graph.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import torch
from ratios import Ratio, command, cpu_in_turns, heading
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide.torch as lt
from lowtide.sizes import format_size

Function = Callable[..., torch.Tensor]
Call = Callable[..., torch.Tensor]
VARIANTS = ("plain", "torch", "lowtide", "loop")
ADDS, SINES = "100 additions", "100 sin(x * a)"
KEPT_LIMIT = 2048


def bare(function: Function, *args: torch.Tensor) -> torch.Tensor:
    return function(*args)


def torchs(function: Function, *args: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch_checkpoint(function, *args, use_reentrant=False)
    return result


def lowtides(function: Function, *args: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = lt.checkpoint(function, *args)
    return result


def unchecked(function: Function, *args: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = lt.checkpoint(function, *args, check_rerun=False)
    return result


CALLS: dict[str, Call] = {"plain": bare, "torch": torchs, "lowtide": lowtides}


def three(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return torch.cos(torch.sin(x) * a)


def hundred(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    for _ in range(50):
        x = torch.sin(x * a)
    return x


def adds(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    for _ in range(100):
        x = x + a
    return x


def sines(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    for _ in range(100):
        x = torch.sin(x * a)
    return x


def verdict(ratio: Ratio) -> str:
    return f"limit {ratio.limit:g}: {'kept' if ratio.kept else 'NOT KEPT'}"


def numbers() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.linspace(0.1, 0.9, 8, requires_grad=True), torch.linspace(0.5, 1.5, 8, requires_grad=True)


def cost_of_a_call(repeats: int) -> list[Ratio]:
    heading("A call, forward and backward")
    print(f"{'':<26}{'plain':>9}{'torch':>10}{'lowtide':>10}{'/plain':>9}{'/torch':>9}", flush=True)
    x, a = numbers()
    ratios = []

    def work(call: Call, function: Function, times: int) -> Callable[[], None]:
        def both() -> None:
            for _ in range(times):
                torch.autograd.grad(call(function, x, a).sum(), (x, a))

        return both

    for name, function, times, call, limit in (
        ("3 operations", three, 100, lowtides, 0.70),
        ("100 operations", hundred, 10, lowtides, 0.75),
        ("100 operations, unchecked", hundred, 10, unchecked, 0.65),
    ):
        seconds = cpu_in_turns([work(each, function, times) for each in (bare, torchs, call)], repeats)
        plain, theirs, ours = (each / times * 1e6 for each in seconds)
        ratios.append(Ratio(f"time of torch's checkpoint's, {name}", ours / theirs, limit))
        print(
            f"{name:<26}{plain:>6.0f} us{theirs:>7.0f} us{ours:>7.0f} us{ours / plain:>9.2f}{ours / theirs:>9.2f}  "
            f"/torch {verdict(ratios[-1])}",
            flush=True,
        )
    return ratios


def layers(depth: int = 36, width: int = 16) -> tuple[nn.Module, torch.Tensor]:
    kinds = (lambda: nn.Linear(width, width), lambda: nn.LayerNorm(width), nn.Tanh)
    row = nn.Sequential(*(kinds[number % 3]() for number in range(depth)))
    return row, torch.randn(8, width, requires_grad=True)


def transformer_block(width: int = 512) -> tuple[nn.Module, torch.Tensor]:
    block = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.1, batch_first=True)
    return block, torch.randn(2, 128, width, requires_grad=True)


def cost_of_a_block(repeats: int) -> list[Ratio]:
    heading("A block, forward and backward")
    print(f"{'':<26}{'plain':>10}{'torch':>11}{'lowtide':>11}{'/torch':>9}{'beyond plain':>14}", flush=True)
    ratios = []

    def work(call: Call, block: nn.Module, x: torch.Tensor, times: int) -> Callable[[], None]:
        def both() -> None:
            for _ in range(times):
                torch.autograd.grad(call(block, x).sum(), (x, *block.parameters()))

        return both

    for name, (block, x), times, is_beyond, limit in (
        ("36 layers", layers(), 10, True, 1.0),
        ("transformer block, 512", transformer_block(), 1, False, 1.02),
    ):
        seconds = cpu_in_turns([work(call, block, x, times) for call in CALLS.values()], repeats)
        plain, theirs, ours = (each / times * 1e3 for each in seconds)
        whole, beyond = ours / theirs, (ours - plain) / (theirs - plain)
        what = f"time beyond plain of torch's checkpoint's, {name}" if is_beyond else f"time of torch's, {name}"
        ratios.append(Ratio(what, beyond if is_beyond else whole, limit))
        print(
            f"{name:<26}{plain:>7.2f} ms{theirs:>8.2f} ms{ours:>8.2f} ms{whole:>9.2f}{beyond:>14.2f}  "
            f"{'beyond plain' if is_beyond else '/torch'} {verdict(ratios[-1])}",
            flush=True,
        )
    return ratios


def cost_without_grad(repeats: int, limit: float = 2.5) -> list[Ratio]:
    heading("A call of 3 operations without grad")
    x, a = numbers()
    times = 300

    def work(call: Call) -> Callable[[], None]:
        def forward() -> None:
            with torch.no_grad():
                for _ in range(times):
                    call(three, x, a)

        return forward

    def straight() -> None:
        with torch.no_grad():
            for _ in range(times):
                three(x, a)

    seconds = cpu_in_turns([straight, work(torchs), work(lowtides)], repeats)
    plain, theirs, ours = (each / times * 1e6 for each in seconds)
    ratio = Ratio("time of a bare call's without grad, 3 operations", ours / plain, limit)
    print(
        f"bare {plain:.1f} us, torch {theirs:.1f} us ({theirs / plain:.1f}x), lowtide {ours:.1f} us "
        f"({ours / plain:.1f}x); {verdict(ratio)}",
        flush=True,
    )
    return [ratio]


def live_calls(call: Call, count: int) -> list[torch.Tensor]:
    x, a = numbers()
    return [call(three, x, a) for _ in range(count)]


def held_by_python(call: Call, count: int) -> tuple[int, int]:
    """Bytes of Python's objects, and of storages that a Python object holds, while so many calls are alive."""
    live_calls(call, 10)
    gc.collect()
    before = storages()
    tracemalloc.start()
    alive = live_calls(call, count)
    gc.collect()
    objects, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    new = sum(size for key, size in storages().items() if key not in before)
    del alive
    return objects, new


def storages() -> dict[int, int]:
    found = [each.untyped_storage() for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    return {storage._cdata: storage.nbytes() for storage in found}


def bytes_kept(count: int) -> list[Ratio]:
    heading(f"Kept for a call that waits for its backward, {count:,} of them alive")
    print(f"{'':<10}{'Python':>10}{'storages':>10}{'beyond plain':>14}{'resident, beyond plain':>25}", flush=True)
    resident = {name: child("live", name, count)["growth"] / count for name in CALLS}
    plain = kept = math.nan
    for name, call in CALLS.items():
        objects, held = (each / count for each in held_by_python(call, count))
        if name == "plain":
            plain = objects + held
        kept, seen = objects + held - plain, resident[name] - resident["plain"]
        note = f"  limit {KEPT_LIMIT}: {'kept' if kept <= KEPT_LIMIT else 'NOT KEPT'}" if name == "lowtide" else ""
        print(f"{name:<10}{objects:>8.0f} B{held:>8.0f} B{kept:>12.0f} B{seen:>23.0f} B{note}", flush=True)
    return [Ratio(f"bytes kept for a call that waits, of {KEPT_LIMIT:,}", kept / KEPT_LIMIT, 1.0)]  # Lowtide is last


class HeavyModel(nn.Module):
    """The heavy model, with a call of any kind around its function."""

    def __init__(self, call: Call, function: Function, calls: int) -> None:
        super().__init__()
        self.call, self.function, self.calls = call, function, calls
        self.a = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All calls, one after the other."""
        for _ in range(self.calls):
            x = self.call(self.function, x, self.a)
        return x


class HeavyStep(nn.Module):
    """One call of it as the step of a loop, which keeps x."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.a = nn.Parameter(torch.tensor(1.0))
        self.x = torch.tensor(0.0)

    def forward(self) -> torch.Tensor:
        """One call."""
        self.x = self.function(self.x, self.a)
        return self.x


def heavy(variant: str, function: Function, calls: int) -> list[float]:
    """One forward and one backward; gives both gradients."""
    x = torch.tensor(0.5, requires_grad=True)
    if variant == "loop":
        step = HeavyStep(function)
        step.x = x
        y = lt.checkpointed_for_loop(step, length=calls, reduce="last")
        parameter = step.a
    else:
        model = HeavyModel(CALLS[variant], function, calls)
        y, parameter = model(x), model.a
    return [float(each) for each in torch.autograd.grad(y, (x, parameter))]


def resident(field: str) -> int:
    """Bytes of this process in memory now (VmRSS), or at the worst moment since `forget_peak` (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}: these figures need Linux")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def in_child(what: str, variant: str, count: int, repeats: int) -> dict[str, Any]:
    """What a fresh process measures: growth of its resident memory, seconds, gradients."""
    torch.set_num_threads(1)
    if what == "live":
        live_calls(CALLS[variant], 10)
        gc.collect()
        before = resident("VmRSS")
        alive = live_calls(CALLS[variant], count)
        growth = resident("VmRSS") - before
        del alive
        return {"growth": growth}
    function = adds if what == ADDS else sines
    heavy(variant, function, 5)
    gc.collect()
    forget_peak()
    before, began = resident("VmRSS"), process_time()
    gradients = heavy(variant, function, count)
    seconds, growth = process_time() - began, resident("VmHWM") - before
    for _ in range(repeats):
        began = process_time()
        heavy(variant, function, count)
        seconds = min(seconds, process_time() - began)
    return {"growth": growth, "seconds": seconds, "gradients": gradients}


def child(what: str, variant: str, count: int, repeats: int = 1) -> dict[str, Any]:
    given = [what, variant, str(count), str(repeats)]
    run = subprocess.run([sys.executable, __file__, "--child", *given], capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"the process for {what}, {variant} failed:\n{run.stderr}")
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


# Limits as multiples of plain: time, growth of memory.
HEAVY_LIMITS: dict[tuple[str, str], tuple[float, float]] = {
    (ADDS, "lowtide"): (1.5, 1.15),
    (SINES, "lowtide"): (2.0, 1.0),
    (ADDS, "loop"): (1.9, 0.2),
}


def heavy_model(what: str, calls: int, rounds: int) -> list[Ratio]:
    heading(f"Heavy model, {calls:,} calls of {what}")
    print(f"{'':<28}{'time':>9}{'/plain':>8}{'memory':>12}{'/plain':>8}", flush=True)
    seconds = dict.fromkeys(VARIANTS, math.inf)
    growth = dict.fromkeys(VARIANTS, sys.maxsize)
    for _ in range(rounds):
        expected: list[float] = []
        for variant in VARIANTS:
            measured = child(what, variant, calls, repeats=1)
            seconds[variant] = min(seconds[variant], measured["seconds"])
            growth[variant] = min(growth[variant], measured["growth"])
            expected = expected or measured["gradients"]
            assert measured["gradients"] == expected, f"{variant}: the gradients are not the plain model's"
    names = {
        "plain": "plain",
        "torch": "torch checkpoint",
        "lowtide": "lt.checkpoint",
        "loop": "lt.checkpointed_for_loop",
    }
    ratios = []
    for variant, name in names.items():
        time, memory = seconds[variant] / seconds["plain"], growth[variant] / growth["plain"]
        note = ""
        if (what, variant) in HEAVY_LIMITS:
            longest, most = HEAVY_LIMITS[what, variant]
            ratios.append(Ratio(f"time of the plain heavy model's, {what}, {name}", time, longest))
            ratios.append(Ratio(f"memory of the plain heavy model's, {what}, {name}", memory, most))
            note = f"  time {verdict(ratios[-2])}; memory {verdict(ratios[-1])}"
        print(
            f"{name:<28}{seconds[variant] * 1e3:>6.0f} ms{time:>8.2f}{format_size(growth[variant]):>12}{memory:>8.2f}"
            f"{note}",
            flush=True,
        )
    return ratios


def main(arguments: list[str]) -> list[Ratio]:
    parser = argparse.ArgumentParser(description="What a call of lt.checkpoint costs.")
    parser.add_argument("--quick", action="store_true", help="few repeats, a tenth of the calls")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        what, variant, count, repeats = given.child
        print(json.dumps(in_child(what, variant, int(count), int(repeats))))
        return []
    torch.set_num_threads(1)
    repeats, share, rounds = (5, 10, 1) if given.quick else (30, 1, 3)
    ratios = [*cost_of_a_call(repeats), *cost_of_a_block(repeats), *cost_without_grad(repeats)]
    ratios += bytes_kept(10_000 // share)
    for what in (ADDS, SINES):
        ratios += heavy_model(what, 1_000 // share, rounds)
    return ratios


if __name__ == "__main__":
    command(main)
