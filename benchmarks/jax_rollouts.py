"""What a checkpointed rollout in JAX costs beside `lax.scan`, a hand-nested scan, brainstate's and equinox's loops.

    python benchmarks/jax_rollouts.py [--quick] [--all-cores] [--only rollouts tutorial recording bytes length]

How it measures. Time: CPU seconds of this process (`time.process_time`), on one core. With more, XLA hands operations
from thread to thread: equinox's loops then take up to twice the CPU seconds and no fewer on the wall, which would
flatter Lowtide. (`--all-cores` leaves them all on; the column "wall" is then worth reading.) All loops of a table are
compiled first, then take turns in one process, each is run once before, and the least of the repeats counts. Memory:
`temp_size_in_bytes` of the compiled program, which is what XLA allocates besides arguments and results. A program is
the loss and the gradients of the weights, jitted, of the spiking network of brainstate's tutorial (80 inputs, n hidden,
2 outputs, batch 64).

    rollouts   time and memory, as multiples of plain's, which is `lax.scan`'s. nested: two scans, the inner one under
               `jax.checkpoint`, of the length nearest sqrt(T) that divides T. brainstate: base=16. equinox: as many
               checkpoints as it chooses, and as many as give it the memory of Lowtide without a knob
    tutorial   the same network out of brainpy's own neurons, T=400, through brainstate's loops
    recording  256 spikes of each step are an output of the loop, and part of the loss
    bytes      what plans predict beside what XLA compiled. A plan counts what the call holds beyond what the plain call
               holds too, so the stacked outputs and their cotangents are taken off. Their size is measured: it is the
               memory of the same loss after a scan that only fills the outputs, followed by one that only reads the
               cotangents backwards. (XLA gives both the same bytes where the loss lets it.)
    length     seconds to trace and compile (CPU, the lesser of T-1 and T), and a million steps

"away" is how far gradients are from plain's: the norm of the difference as a share of the norm, at the worst weight.
It is asserted to be small; float32 sums in another order never agree to the last bit.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter, process_time
from typing import Any

import brainpy
import brainstate
import braintools
import brainunit
import equinox.internal
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from ratios import Ratio, command, heading, in_turns

import lowtide.brainstate
import lowtide.jax as lt
from lowtide.errors import BudgetError
from lowtide.sizes import format_size

Step = Callable[[Any, Any], tuple[Any, Any]]
Scan = Callable[[Step, Any, Any], tuple[Any, Any]]
Knobs = dict[str, Any]
BATCH, INPUTS, CLASSES = 64, 80, 2
FAST, SLOW, LEAK = math.exp(-1 / 5), math.exp(-1 / 10), -math.expm1(-1 / 20)
CLOSE = 1e-3
u: Any = brainunit  # makes its units when it is imported, where mypy cannot see them


@jax.custom_jvp
def spike(x: jax.Array) -> jax.Array:
    """ReluGrad: a step whose derivative is taken to be a triangle."""
    return (x >= 0).astype(x.dtype)


@spike.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    return spike(x), jnp.maximum(0.0, 0.3 - 0.3 * jnp.abs(x)) * dx


def neurons(weights: Any, carry: Any, x: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
    """One step of the network: its state, what it puts out, its spikes."""
    (w1, b1, w2, b2), (g, v, o) = weights, carry
    g = g * FAST + x @ w1 + b1
    v = v - spike(v - 1)
    v = v + LEAK * (g - v)
    z = spike(v - 1)
    o = o * SLOW + z @ w2 + b2
    return (g, v, o), o, z


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()


@dataclass(frozen=True)
class Rollout:
    """The network, what it reads, and the loss; `recording` puts out its spikes too."""

    weights: tuple[jax.Array, ...]
    init: tuple[jax.Array, ...]
    xs: jax.Array
    labels: jax.Array
    recording: bool = False

    @property
    def length(self) -> int:
        """Steps."""
        return self.xs.shape[0]

    def step(self, weights: Any, carry: Any, x: jax.Array) -> tuple[Any, Any]:
        """One step as `lax.scan` wants it."""
        carry, o, z = neurons(weights, carry, x)
        return carry, (o, z) if self.recording else o

    def head(self, ys: Any, labels: jax.Array) -> jax.Array:
        """The loss of the outputs."""
        if not self.recording:
            return cross_entropy(ys.mean(0), labels)
        return cross_entropy(ys[0].mean(0), labels) + jnp.square(ys[1].mean(0) - 0.05).sum()

    def loss(self, scan: Scan, weights: Any, init: Any, xs: jax.Array, labels: jax.Array) -> jax.Array:
        """The loss with this loop."""
        _, ys = scan(partial(self.step, weights), init, xs)
        return self.head(ys, labels)

    def program(self, scan: Scan) -> Program:
        """Loss and gradients with this loop, compiled."""
        return Program.of(jax.value_and_grad(partial(self.loss, scan)), self.weights, self.init, self.xs, self.labels)

    def held(self) -> int:
        """Bytes of outputs and cotangents, which the plain call holds too; see the top of this file."""

        def fill_and_read(like: Any, labels: jax.Array) -> Any:
            def fill(k: jax.Array, _: None) -> tuple[jax.Array, Any]:
                return k + 1, jax.tree.map(lambda y: y + k, like)

            def read(total: Any, dy: Any) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, total, dy), None

            _, ys = lax.scan(fill, jnp.float32(0), None, self.length)
            loss, back = jax.vjp(partial(self.head, labels=labels), ys)
            return loss, lax.scan(read, like, back(jnp.ones_like(loss))[0], reverse=True)[0]

        _, one = jax.eval_shape(self.step, self.weights, self.init, self.xs[0])
        return Program.of(fill_and_read, jax.tree.map(lambda y: jnp.zeros(y.shape), one), self.labels).temp


@dataclass(frozen=True)
class Program:
    """A compiled function with its arguments, and the bytes that it allocates besides these and its results."""

    compiled: Any
    args: tuple[Any, ...]
    temp: int

    @classmethod
    def of(cls, function: Callable[..., Any], *args: Any) -> Program:
        """The function, jitted and compiled for these arguments."""
        compiled = jax.jit(function).lower(*args).compile()
        return cls(compiled, args, temp_bytes(compiled))

    def __call__(self) -> Any:
        """What it gives, when it is there."""
        out = self.compiled(*self.args)
        for leaf in jax.tree.leaves(out):
            leaf.block_until_ready()
        return out


def temp_bytes(compiled: Any) -> int:
    return int(compiled.memory_analysis().temp_size_in_bytes)


def initial(hidden: int) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...], np.random.Generator]:
    """Weights, state, and the generator that made them."""
    rng = np.random.default_rng(0)
    # Four times the tutorial's deviation: its untrained network is silent, and a silent one has zeros for gradients.
    w1 = rng.standard_normal((INPUTS, hidden), np.float32) * np.float32(4 * math.sqrt(2 / INPUTS))
    w2 = rng.standard_normal((hidden, CLASSES), np.float32) * np.float32(math.sqrt(2 / hidden))
    weights = (jnp.asarray(w1), jnp.zeros(hidden), jnp.asarray(w2), jnp.zeros(CLASSES))
    return weights, tuple(jnp.zeros((BATCH, n)) for n in (hidden, hidden, CLASSES)), rng


def spiking_rollout(hidden: int, length: int, *, recording: bool = False) -> Rollout:
    weights, init, rng = initial(hidden)
    xs = jnp.asarray(rng.random((length, BATCH, INPUTS), np.float32) < 0.005, jnp.float32)
    return Rollout(weights, init, xs, jnp.asarray(rng.integers(CLASSES, size=BATCH)), recording)


def nested(step: Step, init: Any, xs: Any, length: int | None = None) -> tuple[Any, Any]:
    """Two scans, as one writes them by hand."""
    length = length or xs.shape[0]
    segment = min((n for n in range(1, length + 1) if length % n == 0), key=lambda n: abs(n - math.sqrt(length)))
    inner = jax.checkpoint(partial(lax.scan, step, length=segment), prevent_cse=False)
    rows = jax.tree.map(lambda x: x.reshape(-1, segment, *x.shape[1:]), xs)
    carry, ys = lax.scan(inner, init, rows, length // segment)
    return carry, jax.tree.map(lambda y: y.reshape(length, *y.shape[2:]), ys)


def by_brainstate(step: Step, init: Any, xs: Any) -> tuple[Any, Any]:
    carry, ys = brainstate.transform.checkpointed_scan(step, init, xs, base=16)
    return carry, ys


def by_equinox(step: Step, init: Any, xs: Any, checkpoints: int | None = None) -> tuple[Any, Any]:
    return equinox.internal.scan(step, init, xs, kind="checkpointed", checkpoints=checkpoints)


def by_lowtide(step: Step, init: Any, xs: Any, length: int | None = None, **knobs: Any) -> tuple[Any, Any]:
    carry, ys = lt.checkpointed_scan(step, init, xs, length, **knobs)
    return carry, ys


def predicted(rollout: Rollout, **knobs: Any) -> int:
    """Bytes that the plan says."""
    plan = lt.plan_scan(partial(rollout.step, rollout.weights), rollout.init, rollout.xs, rollout.length, **knobs)
    return int(plan.bill.peak_memory)


def equinox_at(rollout: Rollout, temp: int) -> tuple[int, Program]:
    """Equinox's loop with the checkpoints that bring it nearest to these bytes, which grow evenly with them."""
    counts = [2, max(4, round(math.sqrt(rollout.length)))]
    programs = {count: rollout.program(partial(by_equinox, checkpoints=count)) for count in counts}
    for _ in range(3):
        low, high = counts[-2:]
        slope = (programs[high].temp - programs[low].temp) / (high - low)
        count = min(rollout.length, max(1, round(high + (temp - programs[high].temp) / max(slope, 1.0))))
        if count in programs:
            break
        counts.append(count)
        programs[count] = rollout.program(partial(by_equinox, checkpoints=count))
    best = min(programs, key=lambda count: abs(programs[count].temp - temp))
    return best, programs[best]


def away(found: Any, expected: Any, most: float = CLOSE) -> float:
    """How far gradients are from what is expected, at the worst weight; asserted to be little."""

    def one(a: jax.Array, b: jax.Array) -> float:
        norm = float(jnp.linalg.norm(b))
        assert norm > 0, "a gradient is zero: nothing was compared"
        return float(jnp.linalg.norm(a - b)) / norm

    far = max(one(a, b) for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    assert far < most, f"gradients are {far:.1e} away from what they should be"
    return far


def verdict(case: str, what: str, found: float, most: float) -> Ratio:
    print(f"  {'met   ' if found <= most else 'MISSED'} {what}: {found:.3f}, at most {most:.3f}", flush=True)
    return Ratio(f"{case}: {what}", found, most)


def alive(text: str) -> None:
    """A word to those who watch, beside the tables."""
    print(f"  ... {text}", file=sys.stderr, flush=True)


def compare(programs: dict[str, Program], length: int, repeats: int) -> dict[str, float]:
    """Print time and memory of programs beside the first, whose gradients all must have; their CPU seconds."""
    alive(f"running {len(programs)} programs {repeats + 1} times")
    taken = dict(zip(programs, in_turns(list(programs.values()), repeats), strict=True))
    plain = next(iter(programs))
    _, gradients = programs[plain]()
    print(f"{'':26} {'time':>7} {'wall':>7} {'memory':>7} {'temp':>11} {'us/step':>8} {'away':>9}", flush=True)
    for name, program in programs.items():
        cpu, wall = (mine / usual for mine, usual in zip(taken[name], taken[plain], strict=True))
        share, each, far = program.temp / programs[plain].temp, taken[name].cpu / length, away(program()[1], gradients)
        print(
            f"{name:26} {cpu:>7.2f} {wall:>7.2f} {share:>7.1%} {format_size(program.temp):>11} {each * 1e6:>8.1f} "
            f"{far:>9.1e}",
            flush=True,
        )
    return {name: seconds.cpu for name, seconds in taken.items()}


def loops_of(rollout: Rollout) -> Iterator[tuple[str, Program]]:
    """The loops of one table, Lowtide's first after plain, because equinox is brought to its memory."""
    yield "plain", rollout.program(lax.scan)
    ours = rollout.program(by_lowtide)
    yield "lowtide", ours
    base, least = round(math.sqrt(rollout.length)), predicted(rollout)
    yield f"lowtide base={base}", rollout.program(partial(by_lowtide, base=base))
    for budget in (least // 2, least * 2):
        try:
            yield f"lowtide budget={format_size(budget)}", rollout.program(partial(by_lowtide, budget=budget))
        except BudgetError as error:
            print(f"  {error}", flush=True)
    yield "nested", rollout.program(nested)
    yield "brainstate base=16", rollout.program(by_brainstate)
    yield "equinox", rollout.program(by_equinox)
    count, equal = equinox_at(rollout, ours.temp)
    yield f"equinox k={count}", equal


def rollouts(sizes: list[int], lengths: list[int], repeats: int) -> list[Ratio]:
    ratios: list[Ratio] = []
    for hidden in sizes:
        for length in lengths:
            heading(f"n={hidden}, T={length:,}: loss and gradients, as multiples of plain's")
            programs: dict[str, Program] = {}
            for name, program in loops_of(spiking_rollout(hidden, length)):
                alive(f"compiled {name}")
                programs[name] = program
            ratios += judge(hidden, length, programs, compare(programs, length, repeats))
    return ratios


def judge(hidden: int, length: int, programs: dict[str, Program], taken: dict[str, float]) -> list[Ratio]:
    """What Lowtide without a knob is meant to reach."""
    ours, memory = taken["lowtide"], programs["lowtide"].temp
    based, equal = (next(name for name in programs if name.startswith(word)) for word in ("lowtide base", "equinox k"))
    judged: list[tuple[str, float, float]] = []
    if hidden == 256:
        judged.append(("memory of plain's", memory / programs["plain"].temp, 1 / 10 if length == 400 else 1 / 25))
    judged.append(("time of plain's", ours / taken["plain"], 1.0 if hidden == 256 else 1.3))
    judged.append(("time of the nested scan's", ours / taken["nested"], 1.1))
    judged.append((f"the same, {based}", taken[based] / taken["nested"], 1.1))
    if length >= 4000:
        judged.append(("time of brainstate's", ours / taken["brainstate base=16"], 1 / 3))
        judged.append(("memory of brainstate's", memory / programs["brainstate base=16"].temp, 1 / 2))
    judged.append(("time of equinox's with the same memory", ours / taken[equal], 1 / 2))
    return [verdict(f"n={hidden}, T={length:,}", *each) for each in judged]


class SNN(brainstate.nn.Module):
    """The network of the tutorial."""

    def __init__(self, n_in: int, n_rec: int, n_out: int) -> None:
        super().__init__()
        cells: Any = brainpy.state
        surrogate: Any = braintools.surrogate
        scaled = braintools.init.KaimingNormal(scale=16 * 2, unit=u.mA)  # of the variance
        self.i2r = brainstate.nn.Sequential(
            brainstate.nn.Linear(n_in, n_rec, w_init=scaled, b_init=braintools.init.ZeroInit(unit=u.mA)),
            cells.Expon(n_rec, tau=5.0 * u.ms, g_initializer=braintools.init.Constant(0.0 * u.mA)),
        )
        self.r = cells.LIF(
            n_rec,
            tau=20.0 * u.ms,
            V_rest=0.0 * u.mV,
            V_reset=0.0 * u.mV,
            V_th=1.0 * u.mV,
            spk_fun=surrogate.ReluGrad(),
        )
        self.r2o = brainstate.nn.Linear(n_rec, n_out, w_init=braintools.init.KaimingNormal())
        self.o = cells.Expon(n_out, tau=10.0 * u.ms, g_initializer=braintools.init.Constant(0.0))

    def update(self, x: Any) -> Any:
        """One step."""
        return self.o(self.r2o(self.r(self.i2r(x))))


def tutorial(repeats: int) -> Ratio:
    heading("The tutorial's network through brainstate, n=8, T=400: gradients, as multiples of plain's")
    loops: dict[str, Callable[..., Any]] = {
        "plain, which is for_loop": brainstate.transform.for_loop,
        "brainstate base=16": partial(brainstate.transform.checkpointed_for_loop, base=16),
        "lowtide base=16": partial(lowtide.brainstate.checkpointed_for_loop, base=16),
        "lowtide": lowtide.brainstate.checkpointed_for_loop,
    }
    rollout = spiking_rollout(8, 400)
    args = rollout.xs, rollout.labels
    with brainstate.environ.context(dt=1.0 * u.ms):
        brainstate.random.seed(0)
        net = SNN(INPUTS, 8, CLASSES)

        def gradients(loop: Callable[..., Any], xs: jax.Array, labels: jax.Array) -> Any:
            def loss() -> Any:
                ys = u.math.mean(loop(net.update, xs), axis=0)
                return braintools.metric.softmax_cross_entropy_with_integer_labels(ys, labels).mean()

            brainstate.nn.init_all_states(net, batch_size=BATCH)
            found, value = brainstate.transform.grad(loss, net.states(brainstate.ParamState), return_value=True)()
            return value, found

        programs: dict[str, Program] = {}
        for name, loop in loops.items():
            alive(f"compiling {name}")
            jitted = brainstate.transform.jit(partial(gradients, loop))
            # Called through brainstate, which alone knows the states; memory is that of the same program.
            programs[name] = Program(jitted, args, temp_bytes(jitted.compile(*args)))
        compare(programs, rollout.length, repeats)
    usual, _, based, _ = (program.temp for program in programs.values())
    return verdict("tutorial, n=8, T=400", "memory of plain's, base=16", based / usual, 1 / 2)


def recording(hidden: int, lengths: list[int], repeats: int) -> list[Ratio]:
    ratios: list[Ratio] = []
    each: list[float] = []
    for length in lengths:
        heading(f"Recording {hidden} spikes of each step, n={hidden}, T={length:,}: as multiples of plain's")
        rollout = spiking_rollout(hidden, length, recording=True)
        loops: dict[str, Scan] = {"plain": lax.scan, "lowtide": by_lowtide, "nested": nested, "equinox": by_equinox}
        programs = {name: rollout.program(loop) for name, loop in loops.items()}
        taken = compare(programs, length, repeats)
        case = f"recording, n={hidden}, T={length:,}"
        ratios.append(verdict(case, "time of plain's", taken["lowtide"] / taken["plain"], 1.3))
        each.append(taken["lowtide"] / length)
        if length == lengths[0]:  # apart and once, because it copies all outputs at each of its steps
            compare({"plain": programs["plain"], "brainstate base=16": rollout.program(by_brainstate)}, length, 1)
    what = f"time of a step, T={lengths[-1]:,} to T={lengths[0]:,}"
    return [*ratios, verdict("recording", what, each[-1] / each[0], 1.2)]


def knobs_of(length: int, least: int) -> list[Knobs]:
    root = round(math.sqrt(length))
    knobs: list[Knobs] = [{}, *({"base": base} for base in (root // 2, root, 2 * root))]
    knobs += [{"budget": int(factor * least)} for factor in (0.5, 0.75, 2, 4)]
    return knobs + [{"checkpoints": count} for count in (5, 20)]


def bytes_said_and_compiled(sizes: list[int], lengths: list[int]) -> list[Ratio]:
    heading("Bytes that plans predict, and that XLA compiled beyond what plain holds too")
    print(f"{'n':>4} {'T':>6} {'knob':22} {'predicted':>11} {'compiled':>11} {'apart':>7}  above budget", flush=True)
    worst: dict[str, float] = {}
    beyond = 0.0
    cases = [(n, length, False) for n in sizes for length in lengths] + [(max(sizes), min(lengths), True)]
    for hidden, length, recording in cases:
        rollout = spiking_rollout(hidden, length, recording=recording)
        held = rollout.held()
        print(f"{hidden:>4} {length:>6,} outputs and cotangents: {format_size(held)}", flush=True)
        for knobs in knobs_of(length, predicted(rollout)):
            name = " ".join(f"{knob}={value:,}" for knob, value in knobs.items()) or "none"
            try:
                said = predicted(rollout, **knobs)
            except BudgetError as error:
                print(f"{hidden:>4} {length:>6,} {name:22} {error}", flush=True)
                continue
            found = rollout.program(partial(by_lowtide, **knobs)).temp - held
            apart, over = found / said - 1, ""
            kind = next(iter(knobs), "none")
            worst[kind] = max(worst.get(kind, 0.0), abs(apart))
            if "budget" in knobs:
                room = knobs["budget"] * 0.05 + 64 * 1024
                over = f"{max(0, found - knobs['budget']) / knobs['budget']:.1%}"
                beyond = max(beyond, (found - knobs["budget"]) / room)
            print(
                f"{hidden:>4} {length:>6,} {name:22} {format_size(said):>11} {format_size(found):>11} {apart:>+7.1%}  "
                f"{over}{' recording' * recording}",
                flush=True,
            )
    judged = [(f"compiled apart from predicted, at worst, knob {kind}", apart, 0.2) for kind, apart in worst.items()]
    judged.append(("compiled above the budget, as a share of 5% and 64 KiB, at worst", beyond, 1.0))
    return [verdict("bytes", *each) for each in judged]


def endless(hidden: int) -> tuple[Any, Any, Any, jax.Array]:
    """The network making its own inputs out of the number of the step: weights, state, step, labels."""
    weights, init, rng = initial(hidden)
    rates, phases = (jnp.asarray(rng.integers(1 << 16, size=(BATCH, INPUTS)), jnp.int32) for _ in range(2))

    def step(weights: Any, carry: Any, _: None) -> tuple[Any, None]:
        k, state, total = carry
        x = (((k * rates + phases) & 255) == 0).astype(jnp.float32)
        state, o, _spikes = neurons(weights, state, x)
        return (k + 1, state, total + o), None

    carry = (jnp.int32(0), init, jnp.zeros((BATCH, CLASSES)))
    return weights, carry, step, jnp.asarray(rng.integers(CLASSES, size=BATCH))


def length_of_rollout(lengths: list[int], budget: str) -> list[Ratio]:
    heading(f"Length: n=8, no inputs and no outputs, no knob; {lengths[-1]:,} steps with budget={budget}")
    weights, carry, step, labels = endless(8)

    def program(scan: Callable[..., Any], length: int) -> Program:
        def loss(weights: Any, carry: Any, labels: jax.Array) -> jax.Array:
            (_, _, total), _ = scan(partial(step, weights), carry, None, length)
            return cross_entropy(total / length, labels)

        return Program.of(jax.value_and_grad(loss), weights, carry, labels)

    print(f"{'T':>9} {'trace and compile':>18} {'temp':>11} {'runs/step':>10} {'away':>9}", flush=True)
    seconds: list[float] = []
    for length in lengths:
        best = math.inf
        for steps in (length - 1, length):  # two lengths, so that the second plan is made anew too
            began = process_time()
            last = program(by_lowtide, steps)
            best = min(best, process_time() - began)
        plan = lt.plan_scan(partial(step, weights), carry, None, length)
        seconds.append(best)
        # Plain keeps 26 KiB of tape for each step, so there is an end to what it can be asked.
        far = f"{away(last()[1], program(lax.scan, length)()[1]):.1e}" if length <= 40_000 else ""
        row = f"{length:>9,} {best:>16.2f} s {format_size(last.temp):>11} {plan.runs_per_step:>10.3f} {far:>9}"
        print(row, flush=True)
    ratios = [verdict("length", "trace and compile, longest to shortest", seconds[-1] / seconds[0], 1.5)]
    plan = lt.plan_scan(partial(step, weights), carry, None, lengths[-1], budget=budget)
    assert plan.bound is not None
    runs = plan.bill.plain_runs + plan.bill.taping_runs
    least = plan.bound.runs + plan.bill.taping_runs
    ratios.append(verdict(f"length, T={lengths[-1]:,}", "runs of the proven least", runs / least, 1.01))

    taken: list[float] = []
    found: list[Any] = []
    ours = program(partial(by_lowtide, budget=budget), lengths[-1])
    for name, work in (("lowtide", ours), ("nested", program(nested, lengths[-1]))):
        alive(f"running {lengths[-1]:,} steps once with {name}")
        began, clock = process_time(), perf_counter()
        found.append(work())
        taken.append(process_time() - began)
        print(
            f"{name:8} T={lengths[-1]:,}: {taken[-1]:.1f} s of CPU, {perf_counter() - clock:.1f} s on the wall, "
            f"{format_size(work.temp)}, the loss is {float(found[-1][0]):.6f}",
            flush=True,
        )
    ratios.append(verdict(f"length, T={lengths[-1]:,}", "time of the nested scan's", taken[0] / taken[1], 1.1))
    # So many float32 numbers added up one by one are good to two or three digits.
    print(f"gradients are {away(found[0][1], found[1][1], 0.05):.1e} away from the nested scan's", flush=True)
    return ratios


def on_one_core() -> None:
    """Start again on one core: XLA counts cores when it is imported."""
    cores = os.sched_getaffinity(0)
    if len(cores) > 1:
        os.sched_setaffinity(0, {max(cores)})
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


PARTS = ("rollouts", "tutorial", "recording", "bytes", "length")


def main(arguments: list[str]) -> list[Ratio]:
    parser = argparse.ArgumentParser(description="What a checkpointed rollout in JAX costs.")
    parser.add_argument("--quick", action="store_true", help="8 neurons, 400 steps, few repeats, 40,000 steps at most")
    parser.add_argument("--all-cores", action="store_true", help="let XLA have every core, and read the wall's clock")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts alone")
    given = parser.parse_args(arguments)
    if not given.all_cores:
        on_one_core()
    sizes, lengths, repeats = ([8], [400], 3) if given.quick else ([256, 8], [400, 4000], 7)
    print(f"jax {jax.__version__}, {len(os.sched_getaffinity(0))} core(s), {jax.devices()[0].device_kind}", flush=True)
    ratios: list[Ratio] = []
    if "rollouts" in given.only:
        ratios += rollouts(sizes, lengths, repeats)
    if "tutorial" in given.only:
        ratios.append(tutorial(repeats))
    if "recording" in given.only:
        ratios += recording(256, [100, 200] if given.quick else [800, 1600], repeats)
    if "bytes" in given.only:
        ratios += bytes_said_and_compiled(sizes, lengths)
    if "length" in given.only:
        ratios += length_of_rollout([400, 4000, 40_000] if given.quick else [400, 4000, 40_000, 1_000_000], "64MiB")
    return ratios


if __name__ == "__main__":
    command(main)
