"""The house rules that no linter checks: sizes of folders, names of classes, complexity, docstrings, and the flow."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from radon.complexity import cc_visit

import lowtide

SOURCE, ROOT = Path(lowtide.__file__).parent, Path(__file__).parent.parent
MODULES = sorted(SOURCE.rglob("*.py"))
MOST_MODULES, MOST_COMPLEX, MOST_PAIRS, MOST_SAME_LINES = 16, 15, 3, 5
# Of these, the proof that reruns repeat first runs takes up to three, and devices take one.
MOST_FILES = {"for_loop": 30, "checkpoint": 12, "sequential": 34, "auto_checkpoint": 41, "jax_scan": 18}


def name_of(module: Path) -> str:
    """Its path inside the package."""
    return module.relative_to(SOURCE).as_posix()


def test_no_folder_has_too_many_modules() -> None:
    counts = Counter(module.parent for module in MODULES if module.name != "__init__.py")
    assert {name_of(folder): count for folder, count in counts.items() if count > MOST_MODULES} == {}


def test_a_class_name_means_one_thing() -> None:
    homes = defaultdict(list)
    for module in MODULES:
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(name_of(module))
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_nothing_is_too_complex() -> None:
    """By radon, which counts boolean operators and comprehensions too."""
    found = {
        (name_of(module), block.name)
        for module in MODULES
        for block in cc_visit(module.read_text())
        if block.complexity > MOST_COMPLEX
    }
    assert not found


@pytest.mark.parametrize("module", [m for m in MODULES if m.name == "__init__.py"], ids=name_of)
def test_every_folder_says_its_job(module: Path) -> None:
    text = ast.get_docstring(ast.parse(module.read_text()))
    assert text is not None
    assert len(text.split()) >= 8


def test_no_docstring_only_points_elsewhere() -> None:
    empty = [
        (name_of(module), node.name)
        for module in MODULES
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and (ast.get_docstring(node) or "").startswith("See `")
        and len((ast.get_docstring(node) or "").split()) < 4
    ]
    assert empty == []


def passed_over(node: ast.stmt) -> bool:
    """Whether it is an import, a docstring or a list of public names."""
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Expr(ast.Constant(str())) | ast.Assign([ast.Name("__all__")]):
            return True
    return False


def statements(module: Path) -> list[tuple[int, str]]:
    """The numbered lines of what runs: no signatures, decorators, imports, docstrings and lists of public names."""
    text = module.read_text()
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            left_out.update(range(first, node.body[0].lineno))
        elif isinstance(node, ast.stmt) and passed_over(node):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    numbered = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if number not in left_out)
    return [(number, line) for number, line in numbered if line and not line.startswith("#")]


def test_nothing_stands_twice() -> None:
    homes = defaultdict(list)
    for module in MODULES:
        lines = statements(module)
        for start in range(len(lines) - MOST_SAME_LINES):
            numbers, run = zip(*lines[start : start + MOST_SAME_LINES + 1], strict=True)
            homes[run].append(f"{name_of(module)}:{numbers[0]}")
    assert {run: places for run, places in homes.items() if len(places) > 1} == {}


def test_one_place_asks_whether_a_plan_is_a_models() -> None:
    """`report/kinds.py` does; everything else that shows plans asks the kind for what differs."""
    kinds = {"Blocks", "BlockSchedule", "ChainKind", "ModelKind"}
    asking = {
        name_of(module)
        for folder in ("report", "cli", "demo", "targets")
        for module in (SOURCE / folder).rglob("*.py")
        for node in ast.walk(ast.parse(module.read_text()))
        if (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance")
        or isinstance(node, ast.MatchClass)
        if kinds & {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    }
    assert asking == {"report/kinds.py"}


@pytest.mark.long
@pytest.mark.parametrize("call", MOST_FILES)
def test_a_call_passes_few_files_in_one_direction(call: str) -> None:
    command = [sys.executable, "-m", "tests.flow", call]
    found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert len(found["files"]) <= MOST_FILES[call], found["files"]
    assert len(found["pairs"]) <= MOST_PAIRS, found["pairs"]
