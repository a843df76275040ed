"""`lowtide bench`: the real benchmarks in their quick form, and scripts that fail, print and stop as those might."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from lowtide.cli import bench
from lowtide.cli.bench import BENCHMARKS, Benchmark, folder
from tests.cli.running import Runner

NAMES = [each.name for each in BENCHMARKS]
SOURCE = Path(__file__).parent.parent.parent


def test_the_list_is_the_folder(lowtide: Runner) -> None:
    scripts = {path.stem for path in (SOURCE / "benchmarks").glob("*.py")}
    assert scripts == {*NAMES, "ratios"}
    code, out, _ = lowtide("bench", "--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == NAMES
    assert lowtide("bench", "--list", "planners")[1].count("\n") == 1


@pytest.mark.long
def test_planners(lowtide: Runner) -> None:
    code, out, _ = lowtide("bench", "planners", "planners", "--quick", "--json", "found.json")
    assert code == 0
    assert "planners (1 of 1)" in out
    assert "20,000 equal steps" in out
    assert out.index("20,000 equal steps") < out.index("Ratios")
    assert "quick sizes: the limits are for the full ones" in out
    found = json.loads((lowtide.folder / "found.json").read_text())
    assert found["quick"] is True
    values = {ratio["what"]: ratio["value"] for ratio in found["ratios"]}
    assert values["runs of the proven least, M=60 a=1 w=5"] == 1.0
    assert 1.0 < values["plain runs of unknown length by known, 10 slots, at worst"] < 1.1
    assert {ratio["benchmark"] for ratio in found["ratios"]} == {"planners"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "planners"])
def test_the_others(lowtide: Runner, name: str) -> None:
    code, out, _ = lowtide("bench", name, "--quick", "--json", "found.json")
    assert code == 0, out
    found = json.loads((lowtide.folder / "found.json").read_text())["ratios"]
    assert len(found) >= 4
    assert all(ratio["value"] is not None for ratio in found)


def test_a_package_that_is_missing(lowtide: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "brainpy", None)  # as if it were not installed
    code, out, _ = lowtide("bench", "jax_rollouts", "--json", "found.json")
    assert code == 0
    assert "skipped: brainpy not installed here" in out
    (ratio,) = json.loads((lowtide.folder / "found.json").read_text())["ratios"]
    assert (ratio["value"], ratio["kept"], ratio["why"]) == (None, None, "skipped: brainpy not installed here")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["plannars"], "there is no benchmark plannars; there are planners, torch_rollouts,"),
        (["planners", "--json", "."], "--json . is a folder; give the name of a file in it"),
        (["planners", "--json", "taken/found.json"], "--json taken/found.json cannot be written: "),
    ],
)
def test_what_cannot_be_run(lowtide: Runner, arguments: list[str], why: str) -> None:
    lowtide.file("taken", "")
    assert why in lowtide.refused("bench", *arguments)


@pytest.mark.long
def test_in_a_terminal_that_knows_ascii_alone(lowtide: Runner) -> None:
    """The benchmark prints more than ASCII, and so does the table elsewhere."""
    code = "from lowtide.cli import main; main(['bench', 'planners', '--quick', '--json', 'new/found.json'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        check=False,
        text=True,
        encoding="ascii",
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert "| 1.053 |     - |" in done.stdout
    assert json.loads((lowtide.folder / "new" / "found.json").read_text())["ratios"]
    assert done.stderr.startswith("wrote new/found.json (")


@pytest.mark.parametrize(("encoding", "dash"), [("utf-8", "\N{EN DASH}"), ("cp1252", "\N{EN DASH}"), ("latin-1", "-")])
def test_the_dash_that_an_encoding_has(encoding: str, dash: str) -> None:
    assert bench._dash(encoding) == dash


def test_where_the_benchmarks_are(lowtide: Runner) -> None:
    package = lowtide.folder / "site" / "lib" / "lowtide"
    package.mkdir(parents=True)
    with pytest.raises(ValueError, match=r"the benchmarks are not part of the package in .*get Lowtide's source"):
        folder(package)
    lowtide.file("site/benchmarks/ratios.py", "")
    assert folder(package) == lowtide.folder / "site" / "benchmarks"
    lowtide.file("site/lib/lowtide/benchmarks/ratios.py", "")
    assert folder(package) == package / "benchmarks"


SHARED = (SOURCE / "benchmarks" / "ratios.py").read_text()
WORDS = """
    import sys
    from ratios import Ratio, command

    def main(arguments):
        assert arguments == []
        text = "first [bold]line[/] \\u2713 of\\n a bar 1\\r a bar 2\\r\\nlast, without an end"
        sys.stdout.buffer.write(text.encode())
        return [
            Ratio("kept [b]", 0.5, 0.7),
            Ratio("not kept", 0.9, 0.7),
            Ratio("out of reach", float("inf"), 1.0),
            Ratio("no limit", 2.0),
            Ratio("left out", None, why="a peer is missing"),
        ]

    if __name__ == "__main__":
        command(main)
"""
FAILS = "raise SystemExit(7)"


def test_what_scripts_print_and_find(lowtide: Runner) -> None:
    scripts = lowtide.file("ratios.py", SHARED).parent
    lowtide.file("words.py", WORDS)
    lowtide.file("fails.py", FAILS)
    console = Console(file=io.StringIO(), width=90, force_terminal=True, color_system=None)
    chosen = [Benchmark("words", "about words"), Benchmark("fails", "about failing")]
    rows, code = bench._run_all(chosen, scripts, False, console)
    assert code == 1
    assert [(row.benchmark, row.what, row.limit, row.kept, row.why) for row in rows] == [
        ("words", "kept [b]", 0.7, True, ""),
        ("words", "not kept", 0.7, False, ""),
        ("words", "out of reach", 1.0, False, ""),
        ("words", "no limit", None, None, ""),
        ("words", "left out", None, None, "a peer is missing"),
        ("fails", "about failing", None, None, "failed: exit code 7"),
    ]
    console.print(bench._table(rows, quick=False))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "first [bold]line[/] \u2713 of\n" in text
    assert "last, without an end" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "│ words │ kept [b] │ 0.500 │ 0.700 │ yes │" in lines
    assert "│ words │ not kept │ 0.900 │ 0.700 │ NO │" in lines
    assert "│ words │ no limit │ 2.000 │ \N{EN DASH} │ │" in lines
    assert any("failed: exit code 7" in line for line in lines)
    found = bench._document(rows, quick=False)["ratios"]
    assert (found[2]["value"], found[2]["kept"]) == (None, False)
    json.dumps(found, allow_nan=False)


@pytest.fixture
def stoppable() -> Iterator[None]:
    """Inside, this process and those it starts can be interrupted, which a shell turns off for what runs behind it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.long
@pytest.mark.usefixtures("stoppable")
def test_ctrl_c(lowtide: Runner) -> None:
    """As a shell does it: the signal reaches the command and the benchmark that it runs."""
    code = "from lowtide.cli import main; main(['bench', 'planners', 'torch_rollouts'])"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while "equal steps" not in process.stdout.readline():
            pass
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.stdout.read(), process.stderr.read()
    assert process.returncode == 130
    assert "stopped" in out
    assert "torch_rollouts" not in out
    assert "Traceback" not in out + err


@pytest.mark.usefixtures("stoppable")
def test_stopped_between_lines(lowtide: Runner) -> None:
    """In this process: the script sends the signal to its parent, and would wait for ever."""
    scripts = lowtide.file("ratios.py", SHARED).parent
    lowtide.file(
        "waits.py",
        """
        import os, signal, time
        print("here", flush=True)
        os.kill(os.getppid(), signal.SIGINT)
        while True:
            time.sleep(1)
        """,
    )
    console = Console(file=io.StringIO(), width=90)
    rows, code = bench._run_all([Benchmark("waits", "about"), Benchmark("never", "")], scripts, False, console)
    assert code == bench.STOPPED
    assert [(row.benchmark, row.why) for row in rows] == [("waits", "stopped")]
