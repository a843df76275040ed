"""The sdist and the wheel, built from the tree and tried in an environment that has nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from lowtide import __version__
from lowtide.cli.bench import BENCHMARKS
from lowtide.packages import TESTED, USED, series

ROOT = Path(__file__).parents[2]
SOURCE = "https://example.org/lowtide"
PIP = ["-m", "pip", "--quiet", "--disable-pip-version-check"]


def constraints() -> dict[str, str]:
    """The exact versions, by name."""
    return dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))


def test_what_is_tested_is_what_is_installed_for_the_tests() -> None:
    exact = {name.replace("-", "_"): version for name, version in constraints().items()}
    assert {name: series(exact[name]) for name in TESTED} == TESTED


def test_extras_ask_for_ranges_and_constraints_meet_them() -> None:
    project = (ROOT / "pyproject.toml").read_text().split("[project.scripts]")[0]
    asked = re.findall(r'"(\w+)((?:[>=!<]=?[\d.]+,?)+)"', project)
    assert {"torch", "jax", "transformers", "lightning", "scipy", "tqdm", "numpy"} <= {name for name, _ in asked}
    exact = {name.replace("-", "_"): version for name, version in constraints().items()}
    for name, terms in asked:
        for term in terms.split(","):
            if name in USED and term.startswith(">="):
                numbers = [tuple(map(int, text.split("."))) for text in (exact[name], term[2:])]
                assert numbers[0] >= numbers[1], name
            assert not (name in ("torch", "jax") and term.startswith("==")), name


def python(environment: Path) -> str:
    return str(environment / "bin" / "python")


def run(*command: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the sdist and the wheel, of a tree in which the address of the source is filled in."""
    folder = tmp_path_factory.mktemp("built")
    listed = run("git", "ls-files", "-co", "--exclude-standard", folder=ROOT)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.splitlines():
        (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, folder / "tree" / name)
    project = folder / "tree" / "pyproject.toml"
    project.write_text(project.read_text().replace('source = ""', f'source = "{SOURCE}"'))
    venv.create(folder / "builder", with_pip=True)
    install = run(python(folder / "builder"), *PIP, "install", "-c", str(ROOT / "constraints.txt"), "hatchling")
    assert install.returncode == 0, install.stderr
    build = run(
        python(folder / "builder"), "-m", "hatchling", "build", "-d", str(folder / "dist"), folder=project.parent
    )
    assert build.returncode == 0, build.stderr
    yield folder / "dist"
    shutil.rmtree(folder)


def metadata(dist: Path) -> Message:
    """The wheel's metadata."""
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        name = f"lowtide-{__version__}.dist-info/METADATA"
        return Parser().parsestr(wheel.read(name).decode())


@pytest.mark.slow
def test_the_metadata_is_complete_and_its_addresses_are_absolute(dist: Path) -> None:
    found = metadata(dist)
    assert found["Name"] == "lowtide"
    assert f"Source, {SOURCE}" in (found.get_all("Project-URL") or [])
    text = found.get_payload()
    assert isinstance(text, str)
    assert f'src="{SOURCE}/raw/HEAD/docs/report.png"' in text
    assert f"]({SOURCE}/blob/HEAD/docs/tutorial.md)" in text
    assert not re.findall(r'(?:\]\(|src=")(?!https:|#)', text)


@pytest.mark.slow
def test_both_hold_what_they_have_to(dist: Path) -> None:
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    assert {"lowtide/py.typed", *(f"lowtide/benchmarks/{each.name}.py" for each in BENCHMARKS)} <= names
    assert not [name for name in names if name.startswith("tests")]
    with tarfile.open(next(dist.glob("*.tar.gz"))) as sdist:
        held = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"hatch_build.py", "constraints.txt", "Makefile", "tests/packaging/test_wheel.py", "LICENSE"} <= held


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_in_a_clean_environment_nothing_is_a_traceback(dist: Path, tmp_path: Path, kind: str) -> None:
    venv.create(tmp_path / "bare", with_pip=True)
    there = python(tmp_path / "bare")
    built = str(next(dist.glob(kind)))
    install = run(there, *PIP, "install", "-c", str(ROOT / "constraints.txt"), built)
    assert install.returncode == 0, install.stderr
    lowtide = str(tmp_path / "bare" / "bin" / "lowtide")
    assert run(lowtide, "--version").stdout == f"lowtide {__version__}\n"
    assert 'pip install "lowtide[report]"' in run(lowtide, "--help").stdout
    for command in ("plan", "report", "bench", "demo"):
        done = run(lowtide, command, folder=tmp_path)
        assert done.returncode == 2
        assert (
            done.stderr
            == 'lowtide: the command line needs typer, which is not installed: pip install "lowtide[report]"\n'
        )
    doctor = run(lowtide, "doctor")
    assert doctor.returncode == 0, doctor.stderr
    assert "All 2 checks hold." in doctor.stdout
    assert "Traceback" not in doctor.stderr
    for front, package in (("torch", "torch"), ("jax", "jax")):
        done = run(there, "-c", f"import lowtide.{front}")
        assert f"lowtide.{front} needs {package}, which is not installed: pip install" in done.stderr
    plan = "import lowtide as l; print(l.plan_chain(l.Chain.equal(l.StepCost(1, 5), 9), 20).bill.plain_runs)"
    assert run(there, "-c", plan).stdout.strip().isdigit(), sys.version
