# mypy: disable-error-code="attr-defined, no-untyped-call, untyped-decorator"
"""brainstate's tutorial on long rollouts, as printed, with the loop's name changed; and what each loop costs.

A spiking network of brainpy's is trained through 400 steps, 120 epochs. `SNN` and `make_train_step` are the tutorial's:
the only change is `lowtide.brainstate.checkpointed_for_loop`.

    python examples/brainstate_tutorial.py --output demo-output

Then one gradient is compiled with every loop: the plain one, brainstate's checkpointed one, and Lowtide's with several
knobs. Bytes are those that XLA sets aside for the program beside arguments and results. Two figures go to the output.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import brainpy
import brainstate
import braintools
import brainunit as u
import jax
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import lowtide.brainstate
from lowtide.sizes import format_size

BASE = 16
N_IN, N_REC, N_OUT, NUM_SAMPLE = 80, 8, 2, 64
GREY, BLUE, ORANGE, GREEN, RED = "#9a9a9a", "#1f6fb4", "#d9731a", "#2e8b57", "#b03a48"
PLAIN, THEIRS, OURS, NO_KNOB = "plain for_loop", f"brainstate, base={BASE}", f"Lowtide, base={BASE}", "Lowtide, no knob"
Loop = Callable[..., Any]
_SMALL: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 8}


def _of_base(base: int) -> str:
    return f"Lowtide, base={base}"


class SNN(brainstate.nn.Module):
    """The tutorial's network: linear, synapse, spiking neurons, linear, synapse."""

    def __init__(self, n_in: int, n_rec: int, n_out: int) -> None:
        super().__init__()
        self.i2r = brainstate.nn.Sequential(
            brainstate.nn.Linear(
                n_in,
                n_rec,
                w_init=braintools.init.KaimingNormal(unit=u.mA),
                b_init=braintools.init.ZeroInit(unit=u.mA),
            ),
            brainpy.state.Expon(n_rec, tau=5.0 * u.ms, g_initializer=braintools.init.Constant(0.0 * u.mA)),
        )
        self.r = brainpy.state.LIF(
            n_rec,
            tau=20.0 * u.ms,
            V_rest=0.0 * u.mV,
            V_reset=0.0 * u.mV,
            V_th=1.0 * u.mV,
            spk_fun=braintools.surrogate.ReluGrad(),
        )
        self.r2o = brainstate.nn.Linear(n_rec, n_out, w_init=braintools.init.KaimingNormal())
        self.o = brainpy.state.Expon(n_out, tau=10.0 * u.ms, g_initializer=braintools.init.Constant(0.0))

    def update(self, spike: Any) -> Any:
        """One step of 1 ms."""
        return self.o(self.r2o(self.r(self.i2r(spike))))


def make_train_step(
    net: SNN, x_data: Any, y_data: Any, num_sample: int, use_checkpoint: bool, base: int | None = BASE, **knobs: Any
) -> Callable[[], Any]:
    """The tutorial's training step; `base=None` and `knobs` are what Lowtide has besides."""
    optimizer = braintools.optim.Adam(lr=2e-3)
    optimizer.register_trainable_weights(net.states(brainstate.ParamState))

    def loss_fn() -> Any:
        if use_checkpoint:
            preds = lowtide.brainstate.checkpointed_for_loop(net.update, x_data, base=base, **knobs)
        else:
            preds = brainstate.transform.for_loop(net.update, x_data)
        preds = u.math.mean(preds, axis=0)
        return braintools.metric.softmax_cross_entropy_with_integer_labels(preds, y_data).mean()

    @brainstate.transform.jit
    def train_step() -> Any:
        brainstate.nn.init_all_states(net, batch_size=num_sample)
        grads, loss = brainstate.transform.grad(loss_fn, net.states(brainstate.ParamState), return_value=True)()
        optimizer.update(grads)
        return loss

    return train_step  # type: ignore[no-any-return]  # brainstate's decorators have no types


def make_task(num_step: int, seed: int = 0) -> tuple[SNN, Any, Any]:
    """The tutorial's network and data: spikes at 5 Hz, and a random class for each sample."""
    brainstate.random.seed(seed)
    rate = 5.0 * u.Hz * brainstate.environ.get_dt()
    x_data = (brainstate.random.rand(num_step, NUM_SAMPLE, N_IN) < rate).astype(float)
    y_data = u.math.asarray(brainstate.random.rand(NUM_SAMPLE) < 0.5, dtype=int)
    return SNN(N_IN, N_REC, N_OUT), x_data, y_data


def losses_of(step: Callable[[], Any], epochs: int, console: Console) -> list[float]:
    """Train, with a bar."""
    losses: list[float] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("compiling", total=epochs)
        for _ in range(epochs):
            losses.append(float(step()))
            progress.update(bar, advance=1, description=f"training, loss {losses[-1]:.4f}")
    return losses


@dataclass
class Compiled:
    """One gradient of the tutorial's loss, compiled with one loop."""

    name: str
    temp_bytes: int
    run: Callable[[], Any] = field(repr=False)
    seconds: float = math.inf


def compiled(name: str, loop: Loop, net: SNN, x_data: Any, y_data: Any) -> Compiled:
    """The gradient as a pure function of the States, and the bytes that XLA sets aside for it."""

    def gradient(x_data: Any) -> Any:
        brainstate.nn.init_all_states(net, batch_size=NUM_SAMPLE)

        def loss_fn() -> Any:
            preds = u.math.mean(loop(net.update, x_data), axis=0)
            return braintools.metric.softmax_cross_entropy_with_integer_labels(preds, y_data).mean()

        return brainstate.transform.grad(loss_fn, net.states(brainstate.ParamState))()

    brainstate.nn.init_all_states(net, batch_size=NUM_SAMPLE)
    pure = brainstate.transform.StatefulFunction(gradient).make_jaxpr(x_data)
    values = [state.value for state in pure.get_states(x_data)]
    program = jax.jit(pure.jaxpr_call).lower(values, x_data).compile()
    memory: Any = program.memory_analysis()
    return Compiled(name, memory.temp_size_in_bytes, lambda: jax.block_until_ready(program(values, x_data)))


def compile_all(loops: dict[str, Loop], num_step: int, console: Console) -> dict[str, Compiled]:
    """Every loop, compiled."""
    net, x_data, y_data = make_task(num_step)
    programs = {}
    with console.status("compiling") as status:
        for k, (name, loop) in enumerate(loops.items()):
            status.update(f"compiling {k + 1} of {len(loops)}: {name}")
            programs[name] = compiled(name, loop, net, x_data, y_data)
    return programs


def time_all(programs: Sequence[Compiled], repeats: int, console: Console) -> None:
    """Least seconds of each, taking turns, after one run that does not count."""
    with console.status("timing"):
        for turn in range(repeats + 1):
            for program in programs:
                began = perf_counter()
                program.run()
                if turn:
                    program.seconds = min(program.seconds, perf_counter() - began)


def promised(num_step: int, bases: Sequence[int]) -> tuple[list[int], int]:
    """Bytes of `base` tapes and `T/base` states for each base, and of the stacked outputs, which every loop has."""
    net, x_data, _ = make_task(num_step)
    brainstate.nn.init_all_states(net, batch_size=NUM_SAMPLE)
    step = lowtide.brainstate.plan_for_loop(net.update, x_data, base=BASE).chain[0]
    outputs = num_step * NUM_SAMPLE * N_OUT * x_data.dtype.itemsize
    return [base * step.tape + math.ceil(num_step / base) * step.state for base in bases], outputs


def bases_for(num_step: int, *, quick: bool) -> list[int]:
    """From 2 to T/2, evenly spread on a logarithmic axis; about the square root of T among them."""
    if quick:
        return [num_step // 2]
    candidates = (2, 4, 8, 20, 50, 100, 200, 400, 800)
    return [base for base in candidates if base < num_step // 2] + [num_step // 2]


def table_of(programs: dict[str, Compiled], num_step: int) -> Table:
    """Bytes and time of the four loops of the tutorial."""
    plain = programs[PLAIN]
    table = Table(title=f"{num_step:,} steps, one gradient", title_justify="left")
    table.add_column("loop")
    for heading in ("temp bytes", "of plain", "time", "of plain"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in (PLAIN, THEIRS, OURS, NO_KNOB):
        program = programs[name]
        share, ratio = program.temp_bytes / plain.temp_bytes, program.seconds / plain.seconds
        table.add_row(
            name, f"{program.temp_bytes:,}", f"{share:.0%}", f"{program.seconds * 1e3:.1f} ms", f"{ratio:.2f}x"
        )
    return table


def draw_losses(losses: Sequence[float], num_step: int, path: Path) -> None:
    """The tutorial's own plot."""
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(losses, color=BLUE)
    axes.set(xlabel="Epoch", ylabel="Training loss")
    axes.set_title(f"BPTT over a {num_step}-step rollout with gradient checkpointing", fontsize=11)
    _finish(axes)
    _save(figure, path)


def draw_memory(programs: dict[str, Compiled], num_step: int, bases: Sequence[int], path: Path) -> None:
    """Bytes and time over `base`, with the other loops as lines across."""
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    every = sorted({*bases, BASE})
    ours = [programs[_of_base(base)] for base in every]
    promise, outputs = promised(num_step, every)
    sizes = [program.temp_bytes for program in ours]
    left.plot(every, promise, ":", color=ORANGE, label="promise: base tapes + T/base states")
    left.plot(every, [size + outputs for size in promise], "--", color=ORANGE, label="promise + stacked outputs")
    left.plot(every, sizes, "o-", color=BLUE, label="Lowtide, base")
    right.plot(every, [program.seconds * 1e3 for program in ours], "o-", color=BLUE)
    for name, color in ((NO_KNOB, GREEN), (PLAIN, GREY), (THEIRS, RED)):
        left.axhline(programs[name].temp_bytes, color=color, linewidth=1.4, label=name)
        right.axhline(programs[name].seconds * 1e3, color=color, linewidth=1.4)
    least = min(sizes)
    best = every[sizes.index(least)]
    left.plot([best], [least], "o", color=BLUE, markersize=11, markerfacecolor="none")
    left.annotate(f"least: {format_size(least)} at base={best}", (best, least), xytext=(0, 30), **_SMALL, color=BLUE)
    left.set_yscale("log", base=2)
    left.yaxis.set_major_formatter(FuncFormatter(lambda size, _: format_size(int(size))))
    left.set(ylabel="temp bytes of the compiled gradient", title=f"Memory of one gradient, T = {num_step:,}")
    right.set(ylabel="milliseconds", title="Time of one gradient", ylim=(0, None))
    for axes in (left, right):
        root = math.sqrt(num_step)
        axes.axvline(root, color="#555555", linewidth=0.9, linestyle=(0, (1, 3)))
        axes.annotate(f"√T = {root:.3g}", (root, 0), xycoords=("data", "axes fraction"), xytext=(20, 4), **_SMALL)
        axes.set(xscale="log", xlabel="base")
        axes.set_xticks(every, ["" if base == BASE else str(base) for base in every])  # too near to its neighbour
        axes.xaxis.set_minor_formatter(NullFormatter())
        _finish(axes)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    _save(figure, path)


def _finish(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def run(output: Path, epochs: int, num_step: int, *, quick: bool, console: Console) -> dict[str, Compiled]:
    """Everything, in order: train, compile, time, draw. Gives what was measured."""
    ours = lowtide.brainstate.checkpointed_for_loop
    bases = bases_for(num_step, quick=quick)
    loops: dict[str, Loop] = {
        PLAIN: brainstate.transform.for_loop,
        THEIRS: partial(brainstate.transform.checkpointed_for_loop, base=BASE),
        OURS: partial(ours, base=BASE),
        NO_KNOB: ours,
        **{_of_base(base): partial(ours, base=base) for base in bases},
    }
    with brainstate.environ.context(dt=1.0 * u.ms):
        net, x_data, y_data = make_task(num_step)
        step = make_train_step(net, x_data, y_data, NUM_SAMPLE, use_checkpoint=True, base=BASE)
        losses = losses_of(step, epochs, console)
        console.print(f"checkpointed training: first {losses[0]:.4f} last {losses[-1]:.4f}")
        draw_losses(losses, num_step, output / "brainstate_tutorial.png")
        programs = compile_all(loops, num_step, console)
        time_all(list(programs.values()), 1 if quick else 10, console)
        console.print(table_of(programs, num_step))
        draw_memory(programs, num_step, bases, output / "brainstate_memory.png")
    console.print(
        f"figures: {output / 'brainstate_tutorial.png'} and {output / 'brainstate_memory.png'}", soft_wrap=True
    )
    return programs


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="brainstate's tutorial on long rollouts, with Lowtide's loop.")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for the figures")
    parser.add_argument("--epochs", type=int, default=120)
    parser.add_argument("--steps", type=int, default=400, help="steps of the rollout")
    parser.add_argument("--quick", action="store_true", help="3 epochs, 40 steps, few measurements")
    given = parser.parse_args(arguments)
    epochs, steps = (3, 40) if given.quick else (given.epochs, given.steps)
    run(given.output, epochs, steps, quick=given.quick, console=Console())


if __name__ == "__main__":
    main()
