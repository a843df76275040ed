"""What is said when a target cannot be found or planned: always what was found, and what would do."""

from __future__ import annotations

import sys

import pytest

from tests.cli.running import Runner

CODE = """
    import functools
    import math
    import torch
    import jax.numpy as jnp
    from torch import nn
    import lowtide
    import lowtide.torch as lt

    number = 3
    layers = [nn.Linear(2, 2)]
    net = nn.Linear(2, 2)
    chain = lowtide.Chain.equal(lowtide.StepCost(1, 5), 100)
    plan = lt.plan_for_loop(net, torch.zeros(5, 2))

    class Body(nn.Module):
        def __init__(self, width=2):
            super().__init__()
            self.blocks = nn.Sequential(nn.Linear(width, width))

    class Needy(nn.Module):
        def __init__(self, width):
            super().__init__()

    def step(carry, x):
        return carry, torch.sin(x)

    def one(x):
        return torch.sin(x)

    def bad(x):
        y = torch.sin(x)
        return y.reshape(7, 7)

    def broken():
        return math.sqrt(-1)

    def silent():
        raise RuntimeError

    def leaves():
        raise SystemExit(3)

    def nothing():
        pass

    def tuple_of_numbers():
        return 1, 2, 3

    def loop():
        return step, torch.zeros(2), torch.zeros(5, 2)

    def row():
        return layers, torch.zeros(2)

    def both(x):
        return torch.sin(x), jnp.sin(2.0)

    def neither(x):
        return x

    class Moody:
        @property
        def net(self):
            raise ValueError("not today")

        def __dir__(self):
            raise RuntimeError("no names")

    moody = Moody()

    tensor = torch.sin
    largest = max
"""


@pytest.fixture
def code(lowtide: Runner) -> Runner:
    lowtide.file("things.py", CODE)
    return lowtide


INPUT = ["--input", "float32[4,2]"]
STEPS = ["--steps", "5"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["things"], "'things' does not say what to plan; give module:name or path/to/file.py:name"),
        ([":make"], "':make' does not say what to plan"),
        (["things:"], "'things:' does not say what to plan"),
        (["things:ones"], "things has no 'ones'; did you mean one?"),
        (["things:net.wait"], "things:net has no 'wait'; did you mean"),
        (["things:net.weight.xyzzy"], "things:net.weight has no 'xyzzy'; it has "),
        (["things:step"], "things:step needs arguments: (carry, x). Give one --input for each"),
        (["things:step", *INPUT, *STEPS], "things:step needs arguments: (carry, x), which 1 --input does not fit"),
        (["things:one", *INPUT, *INPUT, *STEPS], "(x), which 2 --input do not fit"),
        (["things:Needy"], "things:Needy needs arguments: (width)"),
        (["things:largest"], "things:largest needs arguments: it does not say which"),
        (
            ["things:broken"],
            "things:broken failed: ValueError: math domain error (things.py, line 36, in broken: return math",
        ),
        (["things:silent"], "things:silent failed: RuntimeError (things.py, line 39, in silent: raise RuntimeError)"),
        (["things:leaves"], "things:leaves failed: SystemExit: 3 (things.py"),
        (["things:bad", *INPUT, *STEPS], "planning things:bad failed: RuntimeError: shape '[7, 7]' is invalid"),
        (["things:bad", *INPUT, *STEPS], "(things.py, line 33, in bad: return y.reshape(7, 7))"),
        (["things:net", "--input", "float32[4,3]", *STEPS], "failed: RuntimeError: mat1 and mat2 shapes cannot be"),
        (["things:nothing"], "things:nothing returned None, which cannot be planned. What can:"),
        (["things:number"], "things:number returned a int, which cannot be planned"),
        (["things:net"], "returned a Linear, which cannot be planned. What can: a function without parameters"),
        (["things:layers"], "returned a list, which cannot be planned"),
        (["things:tuple_of_numbers"], "returned a tuple of 3: (int, int, int), which cannot be planned"),
        (["things:layers", *INPUT, *STEPS], "things:layers is a list, which is no step"),
        (["things:net", *INPUT], "is a Linear, which is no row of layers; give --steps"),
        (["things:one", *INPUT], "is a function, which is no row of layers; give --steps"),
        (["things:Body", *INPUT], "or name a row of layers instead, such as its .blocks"),
        (["things:both", *INPUT, *STEPS], "uses both torch and jax, as far as can be seen; say which with --framework"),
        (["things:neither", *INPUT, *STEPS, "--framework", "tinygrad"], "--framework tinygrad: there is torch and jax"),
        (["things:chain", *STEPS], "things:chain is a Chain already; leave out --input and --steps"),
        (["things:plan", *INPUT], "things:plan is a Plan already; leave out --input and --steps"),
        (["things:plan", "--base", "3"], "things:plan is a plan already; leave out the knobs"),
        (["things:loop", "--disk-write", "1GB"], "snapshots of a function's own run stay in memory"),
        (["things:row", "--base", "3"], "layers are planned for a budget; give --budget instead of --base"),
        (["things:loop", "--state", "1KiB", "--chain", "x"], "things:loop is measured; leave out --state, --chain"),
        (["things:loop", "--base", "3", "--budget", "1GB"], "are two knobs"),
        (["things:one", "--input", "float32", *STEPS], "--input 'float32' is no dtype[shape]; write it like"),
        (["things:one", "--input", "float32[4,]", *STEPS], "is no dtype[shape]"),
        (["things:one", "--input", "float32[4,0]", *STEPS], "has no numbers in it"),
        (["things:one", "--input", "float31[4]", *STEPS], "--input float31: torch has no such dtype"),
        (["things:one", "--input", f"float32[{'9' * 5000}]", *STEPS], "--input float32: a size of that many digits is"),
        (
            ["things:one", "--input", "float32[99999999999,8]", *STEPS],
            "--input float32[99999999999,8]: torch cannot make such a tensor; give a smaller shape",
        ),
        (["things:layers", "--input", "qint8[4,8]"], "--input qint8[4,8]: torch cannot make such a tensor;"),
        (
            ["things:one", "--input", "float32[99999999999999999999]", *STEPS],
            "cannot make such a tensor; give a smaller",
        ),
        (["things:moody.net"], "reading 'net' of things:moody failed: ValueError: not today (things.py, line"),
        (["things:moody.other"], "reading 'other' of things:moody failed: RuntimeError: no names"),
        (["things:loop", "--sweep", "--save", "x.json"], "--sweep makes many plans; leave out --save"),
        (["--steps", "4", "--input", "float32[4]"], "there is no MODULE:NAME; leave out --input"),
        (["missing.py:make"], "there is no file missing.py in "),
    ],
)
def test_what_cannot_be_planned(code: Runner, arguments: list[str], why: str) -> None:
    assert why in code.refused("plan", *arguments)


def test_the_framework_that_is_asked_for(code: Runner) -> None:
    number, out, _ = code("plan", "things:neither", *INPUT, *STEPS, "--framework", "jax")
    assert number == 0
    assert out.startswith("chain     5 equal steps")
    said = code.refused("plan", "things:tensor", *INPUT, *STEPS, "--framework", "jax")
    assert "planning things:tensor failed: TypeError" in said


def test_modules_that_cannot_be_imported(lowtide: Runner) -> None:
    said = lowtide.refused("plan", "nowhere.at_all:make")
    assert f"there is no module 'nowhere.at_all' in {lowtide.folder}, nor on Python's path" in said
    assert "path/to/at_all.py:name" in said
    lowtide.file("asks.py", "import a_package_that_is_not_there\n")
    said = lowtide.refused("plan", "asks:make")
    assert "importing asks failed: ModuleNotFoundError: No module named 'a_package_that_is_not_there'" in said
    assert "(asks.py, line 1, in <module>: import a_package" in said
    lowtide.file("typo.py", "def make(:\n")
    assert "importing typo failed: SyntaxError: invalid syntax (typo.py, line 1)" in lowtide.refused(
        "plan", "typo:make"
    )
    lowtide.file("empty.py", "import sys\n")
    assert "empty has no 'make'; it has no names" in lowtide.refused("plan", "empty:make")


@pytest.mark.parametrize(
    "edit", ["sys.path.clear()", "sys.path = ['elsewhere']", "sys.path[:] = sys.path[2:]", "sys.path.insert(0, 'more')"]
)
def test_a_target_that_edits_pythons_path(lowtide: Runner, edit: str) -> None:
    lowtide.file("edits.py", f"import lowtide, sys\n{edit}\nchain = lowtide.Chain.equal(lowtide.StepCost(1, 5), 9)\n")
    assert lowtide("plan", "edits.py:chain", "--budget", "50%")[0] == 0  # the fixture looks at the path


def test_a_name_that_was_never_given(lowtide: Runner) -> None:
    code = """
        import torch

        def make():
            def step(carry, x):
                return (never, None) if carry is None else (carry + x, None)

            if step is None:
                never = 3
            return step, torch.zeros(2), torch.zeros(5, 2)
        """
    lowtide.file("unset.py", code)
    number, out, err = lowtide("plan", "unset.py:make")
    assert number == 0, err
    assert out.startswith("chain     5 equal steps")


def test_a_framework_that_nothing_shows(lowtide: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    lowtide.file("plainly.py", "layers = [abs]\nclosed = None\ndef make():\n    return layers, 1.0\n")
    assert "plainly:make uses both torch and jax" in lowtide.refused("plan", "plainly:make")
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.delitem(sys.modules, "jax")
    assert "plainly:make uses neither torch nor jax" in lowtide.refused("plan", "plainly:make")
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    said = lowtide.refused("plan", "plainly:make", "--framework", "torch")
    assert "torch is not installed here; install lowtide[torch]" in said
