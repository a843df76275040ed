"""The documentation is followed as a stranger would follow it, built without warnings, and complete."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import DOCS, ROOT, Reader, blocks, matches, name_of, pages, told

PAGES = {name_of(page): page for page in pages()}
SHORT = {  # the pages that run in less than a second
    "benchmarks",
    "coming_from/torch_checkpoint",
    "howto/inputs",
    "howto/lightning",
    "ideas/chain_and_tape",
    "ideas/lean_tape",
    "ideas/optimal_plans",
    "ideas/peak",
    "index",
}
# Those that run for more than two seconds; the tutorial, the README and the errors are read in every run nevertheless.
LENGTHY = {
    "coming_from/brainstate",
    "coming_from/equinox",
    "howto/brainstate",
    "howto/equinox",
    "howto/jax_models",
    "howto/models",
    "howto/report",
    "howto/spikingjelly",
    "howto/transformers",
}
# Every public function whose arguments the page of knobs lists; those of packages come from their `__all__`.
PACKAGES = (
    "lowtide.torch",
    "lowtide.transformers",
    "lowtide.lightning",
    "lowtide.jax",
    "lowtide.brainstate",
    "lowtide.report",
)
MORE = (
    "lowtide.StepCost",
    "lowtide.TapeOption",
    "lowtide.plan_chain",
    "lowtide.frontier",
    "lowtide.torch.measure.peak",
    "lowtide.torch.measure.storage_bytes",
    *(f"lowtide.torch.spiking.{name}" for name in ("LIF", "Expon", "reset")),
    *(f"lowtide.torch.spiking.{name}" for name in ("ReluGrad", "Sigmoid", "ATan", "Triangle", "SuperSpike")),
)
# What is given or raised, never called.
RESULTS = {
    *("A100", "Batch", "Comparison", "H100", "LeanPoint", "RTX4090", "Recording", "Story", "View", "tell"),
    *("BudgetError", "CheckpointError"),
}


def followed() -> list[Any]:
    """The pages with code, of which the lengthy ones are left to whole runs."""
    with_code = [name for name, page in PAGES.items() if list(told(page))]
    assert set(with_code) >= LENGTHY
    return [pytest.param(name, marks=_marks_of(name)) for name in with_code]


def _marks_of(name: str) -> tuple[pytest.MarkDecorator, ...]:
    if name in LENGTHY:
        return (pytest.mark.slow,)
    return () if name in SHORT else (pytest.mark.long,)


@pytest.mark.parametrize("name", followed())
def test_its_code_runs_and_prints_what_it_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")  # what is drawn for a terminal is as wide as that
    page = PAGES[name]
    reader = Reader(page)
    for block, said in told(page):
        printed = reader.do(block)
        place = f"{name}.md, line {block.line}"
        if said is None:
            assert not printed.strip(), f"{place} prints what the page does not show:\n{printed}"
        else:
            assert matches(said.text, printed), f"{place} should print\n{said.text}\nand prints\n{printed}"


def test_every_block_is_of_a_kind_that_is_looked_at() -> None:
    known = {"python", "sh", "text"}
    for name, page in PAGES.items():
        for block in blocks(page):
            assert block.language in known or block.language.startswith("{"), f"{name}.md, line {block.line}"


def test_no_page_is_a_stub() -> None:
    for name, page in PAGES.items():
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"coming soon|to be written|\bTODO\b|\bTBD\b", text, re.I), name


class _Page(HTMLParser):
    """Where a page leads, what can be led to, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors.add(given.get("id") or "")
        target = given.get("href") or given.get("src") or ""
        if tag == "a":
            self.links.append(target)
        elif tag in ("script", "link", "img", "iframe", "source"):
            self.loaded.append(target)


@pytest.mark.long
def test_it_is_built_without_warnings_its_links_lead_somewhere_and_it_loads_nothing_from_elsewhere(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    built = subprocess.run(
        [*command, "-d", str(tmp_path / "doctrees"), str(DOCS), str(tmp_path / "html")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    root = tmp_path / "html"
    found = {path: _Page(path.read_text(encoding="utf-8")) for path in root.rglob("*.html")}
    assert {name_of(page) for page in pages()} <= {path.relative_to(root).with_suffix("").as_posix() for path in found}
    for path, page in found.items():
        for target in page.loaded:
            assert not re.match(r"(https?:)?//", target), f"{path.name} loads {target}"
        for target in page.links:
            if re.match(r"(https?|mailto):", target):
                continue
            file, _, anchor = target.partition("#")
            there = (path.parent / file).resolve() if file else path
            assert there.exists(), f"{path.name} leads to {target}"
            assert not anchor or there not in found or anchor in found[there].anchors, f"{path.name}: {target}"
    styles = "".join(path.read_text(encoding="utf-8") for path in root.rglob("*.css"))
    assert not re.search(r"url\(['\"]?(https?:)?//|@import", styles)


def _public() -> list[str]:
    names = list(MORE)
    for package in PACKAGES:
        module = importlib.import_module(package)
        names += [
            f"{package}.{name}"
            for name in module.__all__
            if name not in RESULTS and not inspect.ismodule(getattr(module, name))
        ]
    return names


def _thing(name: str) -> Any:
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def _sections(page: str, marks: str) -> dict[str, str]:
    """The sections of a page by heading, for headings of one level."""
    parts = re.split(rf"^{marks} (.+)$", PAGES[page].read_text(encoding="utf-8"), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_argument_of_every_public_function_is_listed_with_its_default() -> None:
    sections = _sections("knobs", "###")
    assert set(sections) == set(_public())
    for name, section in sections.items():
        rows = dict(re.findall(r"^\| `\*{0,2}(\w+)` \| (.+?) \| .+ \|$", section, re.M))
        parameters = inspect.signature(_thing(name)).parameters
        assert list(rows) == list(parameters), name
        for parameter in parameters.values():
            assert rows[parameter.name] == _default(parameter), f"{name}({parameter.name})"


def _default(parameter: inspect.Parameter) -> str:
    if parameter.kind is parameter.VAR_POSITIONAL:
        return "any number"
    if parameter.kind is parameter.VAR_KEYWORD:
        return "any"
    if parameter.default is parameter.empty:
        return "needed"
    return f"`{parameter.default!r}`".replace("'", '"')


def _exceptions() -> set[str]:
    """Every exception class of the package that a user may meet: those that derive from Lowtide's."""
    bases: dict[str, set[str]] = {}
    for path in (ROOT / "src" / "lowtide").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    found = {"LowtideError"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return found


def test_every_exception_has_an_entry_with_a_cause_and_an_example_that_was_run() -> None:
    sections = _sections("errors", "##")
    assert set(sections) == _exceptions()
    for name, section in sections.items():
        assert "**Cause.**" in section, name
        assert "**Cure.**" in section or "**Use.**" in section, name
        assert "```python" in section, name
        assert f"except {name} as" in section, name
        assert "```text" in section, name


def test_it_says_that_nothing_was_run_on_a_gpu() -> None:
    for name in ("index", "when_not", "benchmarks"):
        text = " ".join(PAGES[name].read_text(encoding="utf-8").split())
        assert re.search(r"[Nn]othing (here )?has been run on a GPU", text), name
