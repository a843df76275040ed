"""`lowtide bench`: runs the benchmarks one after the other, each in its own process, and prints a table of ratios.

Benchmarks are scripts (`benchmarks/` in the source, `lowtide/benchmarks/` once installed) that print as they go and
write their ratios to a file; see `benchmarks/ratios.py`. Torch and JAX are never loaded in the same process.
"""

from __future__ import annotations

import codecs
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import lowtide
from lowtide.cli.files import check_file, write
from lowtide.errors import InputError

EXAMPLE = """\b
Example:
  lowtide bench planners torch_rollouts --json ratios.json"""

NOTHING, PLAIN_NOTHING = "\N{EN DASH}", "-"
STOPPED = 130  # the exit code that shells report for a program that Ctrl-C ended


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark: the name of its script, what it compares, and the packages that it needs."""

    name: str
    about: str
    needs: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        """The packages that the benchmark needs and that are not installed."""
        return [package for package in self.needs if importlib.util.find_spec(package) is None]


BENCHMARKS = (
    Benchmark("planners", "planning, beside checkpoint-schedules and pyrevolve"),
    Benchmark("torch_rollouts", "rollouts, beside the plain loop and torch.utils.checkpoint", ("torch",)),
    Benchmark(
        "jax_rollouts",
        "rollouts, beside lax.scan, brainstate and equinox",
        ("jax", "brainstate", "brainpy", "braintools", "brainunit", "equinox"),
    ),
    Benchmark("torch_checkpoint", "calls of checkpoint, beside torch.utils.checkpoint", ("torch",)),
    Benchmark("torch_sequential", "layers, beside checkpoint_sequential", ("torch",)),
    Benchmark("torch_lean", "lean tapes, beside selective checkpointing", ("torch", "scipy", "transformers")),
    Benchmark("torch_models", "whole models, beside gradient checkpointing", ("torch", "scipy", "transformers")),
)


@dataclass(frozen=True, slots=True)
class RatioRow:
    """A ratio of a benchmark, or the reason why there is none."""

    benchmark: str
    what: str
    value: float | None = None
    limit: float | None = None
    kept: bool | None = None  # whether the limit is kept; None without a limit or a value
    why: str = ""


def complete_benchmark(incomplete: str) -> list[tuple[str, str]]:
    """The names of benchmarks that begin like this, with what they compare."""
    return [(each.name, each.about) for each in BENCHMARKS if each.name.startswith(incomplete)]


def bench_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="Which ones; all if left out.",
            autocompletion=complete_benchmark,
            show_default=False,
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes and few repeats: does it run at all?")] = False,
    list_them: Annotated[bool, typer.Option("--list", help="List the benchmarks and leave.")] = False,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the ratios to this file too.")] = None,
) -> None:
    """Time Lowtide beside its peers; one table of ratios.

    All of it takes the better part of an hour; --quick takes minutes, and its times say little. Ctrl-C stops it, and
    what was found until then is printed.
    """
    chosen = _chosen(names or [])
    if list_them:
        for each in chosen:
            typer.echo(f"{each.name:<17} {each.about}")
        return
    scripts = folder(Path(lowtide.__file__).parent)
    check_file(as_json, "--json")
    console = Console()
    rows, code = _run_all(chosen, scripts, quick, console)
    if as_json is not None:  # before printing, which can fail
        write(as_json, json.dumps(_document(rows, quick), indent=1))
    console.print(_table(rows, quick, _dash(console.encoding)))
    raise typer.Exit(code)


def folder(package: Path) -> Path:
    """The folder of the benchmarks: in the installed package, or beside the source tree that is imported."""
    for place in (package / "benchmarks", package.parent.parent / "benchmarks"):
        if (place / "ratios.py").is_file():
            return place
    raise InputError(
        f"the benchmarks are not part of the package in {package}; get Lowtide's source and run them from there"
    )


def _chosen(names: Sequence[str]) -> list[Benchmark]:
    known = {each.name: each for each in BENCHMARKS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)] or list(BENCHMARKS)


def _run_all(chosen: Sequence[Benchmark], scripts: Path, quick: bool, console: Console) -> tuple[list[RatioRow], int]:
    """The rows of all benchmarks, and the exit code; after one that fails, the others still run."""
    rows: list[RatioRow] = []
    code = 0
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}", markup=False),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("benchmarks", total=len(chosen), now="")
        for number, each in enumerate(chosen, start=1):
            progress.update(bar, description=each.name)
            try:
                console.rule(f"{each.name} ({number} of {len(chosen)})")
                rows += _run(each, scripts, quick, progress, bar)
            except KeyboardInterrupt:
                rows.append(RatioRow(each.name, each.about, why="stopped"))
                return rows, STOPPED
            except subprocess.CalledProcessError as error:
                code = 1
                rows.append(RatioRow(each.name, each.about, why=f"failed: exit code {error.returncode}"))
            progress.advance(bar)
    return rows, code


def _run(each: Benchmark, scripts: Path, quick: bool, progress: Progress, bar: Any) -> list[RatioRow]:
    """Run one benchmark, print its output as it arrives, and read its ratios; skip it if a package is missing."""
    if each.missing:
        why = f"skipped: {', '.join(each.missing)} not installed here"
        progress.console.print(why)
        return [RatioRow(each.name, each.about, why=why)]
    with TemporaryDirectory() as scratch:
        found = Path(scratch) / "ratios.json"
        command = [sys.executable, "-u", str(scripts / f"{each.name}.py"), "--ratios", str(found)]
        command += ["--quick"] if quick else []
        spoken = os.environ | {"PYTHONIOENCODING": "utf-8"}  # which `_lines` decodes, whatever the terminal's is
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=spoken) as process:
            assert process.stdout is not None  # it is a pipe
            try:
                for line, ended in _lines(process.stdout):
                    if ended:
                        progress.console.print(Text(line), soft_wrap=True)
                    progress.update(bar, now="" if ended else line[-40:])
            except KeyboardInterrupt:
                process.terminate()
                raise
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        return [RatioRow(each.name, **ratio) for ratio in json.loads(found.read_text(encoding="utf-8"))]


def _lines(stream: IO[bytes]) -> Iterator[tuple[str, bool]]:
    """Lines as they arrive, each with whether it is final: one that ends in a carriage return is overwritten."""
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    rest = ""
    while chunk := stream.read1(65536):  # type: ignore[attr-defined]  # a pipe's buffered reader has it
        *lines, rest = re.split("([\r\n])", rest + decode(chunk).replace("\r\n", "\n"))
        for line, end in zip(lines[::2], lines[1::2], strict=True):
            yield line, end == "\n"
    if rest:
        yield rest, True


def _table(rows: Sequence[RatioRow], quick: bool, dash: str = NOTHING) -> Table:
    note = "quick sizes: the limits are for the full ones" if quick else None
    table = Table(title="Ratios: Lowtide's figure by the other's", caption=note)
    table.add_column("benchmark", no_wrap=True)
    table.add_column("what")
    table.add_column("ratio", justify="right", no_wrap=True)
    table.add_column("limit", justify="right", no_wrap=True)
    table.add_column("kept?")
    for row in rows:
        if row.value is None:
            table.add_row(row.benchmark, Text(row.what), dash, _figure(row.limit, dash), Text(row.why))
        else:
            kept = {None: "", True: "yes", False: "NO"}[row.kept]
            table.add_row(row.benchmark, Text(row.what), _figure(row.value, dash), _figure(row.limit, dash), kept)
    return table


def _figure(value: float | None, dash: str) -> str:
    return dash if value is None else f"{value:.3f}"


def _dash(encoding: str) -> str:
    """The dash for a missing number, in a form that this encoding can write."""
    return NOTHING if NOTHING.encode(encoding, "ignore") else PLAIN_NOTHING


def _document(rows: Sequence[RatioRow], quick: bool) -> dict[str, Any]:
    """The table as JSON, which has no infinity: an infinite ratio has no value there."""
    return {
        "lowtide": lowtide.__version__,
        "quick": quick,
        "ratios": [
            {
                "benchmark": row.benchmark,
                "what": row.what,
                "value": row.value if row.value is not None and math.isfinite(row.value) else None,
                "limit": row.limit,
                "kept": row.kept,
                "why": row.why,
            }
            for row in rows
        ],
    }
