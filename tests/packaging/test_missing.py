"""Without the packages of an extra, everything else works, and what needs them says how to have them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
import lowtide.torch as lt
from lowtide import MissingPackageError
from lowtide.cli import main
from lowtide.interface.progress import progress
from lowtide.packages import command, needed_for
from lowtide.planners import cut
from tests.packaging.hiding import forget, hide

SOURCE = Path(lowtide.__file__).parent.parent
REPORT = 'pip install "lowtide[report]"'
COMMANDS = [["plan", "--steps", "9"], ["report", "plan.json"], ["bench", "--quick"], ["demo"], ["plan", "--help"]]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No typer, rich and matplotlib."""
    forget(monkeypatch, *(f"lowtide.cli.{name}" for name in ("commands", "plan", "report", "bench", "demo", "doctor")))
    hide(monkeypatch, "typer", "rich", "matplotlib")


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and complaint of the command line; 0 where it returns."""
    code: Any = 0
    try:
        main(list(arguments))
    except SystemExit as stopped:
        code = stopped.code or 0
    return code, *capsys.readouterr()


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_command_says_what_to_install(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    complaint = f"lowtide: the command line needs typer, which is not installed: {REPORT}\n"
    assert answer(capsys, *arguments) == (2, "", complaint)


@pytest.mark.usefixtures("bare")
def test_the_version_and_help_need_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "--version") == (0, f"lowtide {lowtide.__version__}\n", "")
    for arguments in ([], ["--help"]):
        code, out, err = answer(capsys, *arguments)
        assert (code, err) == (0, "")
        assert REPORT in out
        assert "doctor" in out


@pytest.mark.usefixtures("bare")
def test_the_doctor_needs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = answer(capsys, "doctor", "--help")
    assert code == 0
    assert "--quick" in out


def test_an_example_of_every_command_is_in_the_help_without_typer() -> None:
    from lowtide.cli import bare
    from lowtide.cli.commands import app

    assert all((command.name or "") in bare.HELP for command in app.registered_commands)


def test_a_bar_without_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "tqdm")
    with pytest.raises(MissingPackageError, match=r"pbar.* needs tqdm, .* pip install tqdm; or give an object"):
        progress(True, 5, with_backward=False)
    with pytest.raises(MissingPackageError, match="pip install tqdm"):
        lt.checkpointed_for_loop(nn.Linear(2, 2), torch.zeros(3, 2), pbar=True)


def test_without_scipy_only_lean_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "scipy")
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)))
    x = torch.randn(64, 8)
    lt.sequential(net, x, budget="90%").sum().backward()
    forms = {str(option.form) for step in lt.plan_sequential(net, x, budget="90%").chain.steps for option in step.menu}
    assert not [form for form in forms if "lean" in form]
    with pytest.raises(MissingPackageError, match="a lean tape needs scipy, which is not installed: pip install scipy"):
        lt.lean(net[0], x)
    assert cut.everything([], []).bytes == 0


def test_without_scipy_a_model_is_planned_without_lean_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "scipy")
    net = nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
    x = torch.randn(512, 8)
    for on_paper in (False, True):
        plan = lt.plan_model(net, x, peak="1GiB", loss=torch.sum, on_paper=on_paper)
        assert not [option for step in plan.chain.steps for option in step.menu if "lean" in str(option.form)]


def test_other_missing_modules_speak_for_themselves() -> None:
    for name in ("no_such_package", "numpy.no_such_module", "torch.no_such_module"):
        with pytest.raises(ModuleNotFoundError, match=name) as caught, needed_for("this"):
            __import__(name)
        assert not isinstance(caught.value, MissingPackageError)


def test_commands_that_install() -> None:
    assert command("typer", "rich", "scipy") == 'pip install "lowtide[report]" scipy'


def test_it_is_an_import_error_with_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "tqdm")
    with pytest.raises(ImportError) as caught:
        progress(1, 5, with_backward=False)
    assert isinstance(caught.value, lowtide.LowtideError)
    assert caught.value.name == "tqdm"


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "hidden", "said"),
    [
        ("lowtide.torch", "torch", 'lowtide.torch needs torch, which is not installed: pip install "lowtide[torch]"'),
        ("lowtide.jax", "jax", 'lowtide.jax needs jax, which is not installed: pip install "lowtide[jax]"'),
        ("lowtide.torch", "scipy", None),
        (
            "lowtide.transformers",
            "transformers",
            'lowtide.transformers needs transformers, which is not installed: pip install "lowtide[transformers]"',
        ),
        (
            "lowtide.brainstate",
            "brainstate",
            'lowtide.brainstate needs brainstate, which is not installed: pip install "lowtide[brainstate]"',
        ),
    ],
)
def test_front_ends_in_a_fresh_process(module: str, hidden: str, said: str | None) -> None:
    code = f"import sys; sys.path.insert(0, {str(SOURCE)!r}); sys.modules[{hidden!r}] = None; import {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == (0 if said is None else 1), done.stderr
    assert said is None or done.stderr.strip().splitlines()[-1] == f"lowtide.errors.MissingPackageError: {said}"
