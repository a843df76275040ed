"""The demo in its quick form, with the real packages; and its parts, against figures worked out by hand."""

from __future__ import annotations

import io
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from rich.console import Console

from lowtide.demo import NAMES, ResultRow, index, paper, run, tables, tensors, turns, vgg16
from lowtide.demo.contest import PLAIN, Contest, Contestant, Tool, ToolKind, with_lowtide
from lowtide.demo.equality import equality
from lowtide.errors import InputError
from lowtide.plan import Plan
from tests.report.browser import chromium

# Imported here, where lines are counted, whichever test comes first.
for example in ("heavy", "programs", "segments", "spiking_brainstate", "spiking_jax", "spiking_torch"):
    import_module(f"lowtide.demo.{example}")

PNG = b"\x89PNG\r\n\x1a\n"
KIB = 1024


@dataclass
class Shown:
    """A run of the whole: its rows, what it printed, what warnings came through, and where its files are."""

    rows: list[ResultRow]
    text: str
    warnings: list[str]
    output: Path

    def of(self, example: str) -> dict[str, ResultRow]:
        return {row.tool: row for row in self.rows if row.example == example}


def console() -> Console:
    return Console(file=io.StringIO(), width=80)


def printed(of: Console) -> str:
    assert isinstance(of.file, io.StringIO)
    return of.file.getvalue()


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    output, screen = tmp_path_factory.mktemp("demo") / "new" / "folder", console()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = run(screen, output, quick=True)
    return Shown(rows, printed(screen), [str(each.message) for each in caught], output)


@pytest.mark.long
def test_every_example_has_plain_the_usual_tool_and_lowtide(shown: Shown) -> None:
    assert list(dict.fromkeys(row.example for row in shown.rows)) == list(NAMES)
    for name in NAMES:
        plain, usual, *ours = shown.of(name)
        assert plain == "plain"
        assert usual.startswith(("torch", "jax", "brainstate", "every"))
        assert ours
        assert all(tool.startswith("Lowtide, ") for tool in ours)


@pytest.mark.long
@pytest.mark.parametrize("name", ["torch", "segments", "heavy"])
def test_gradients_in_torch_have_the_same_bits(shown: Shown, name: str) -> None:
    assert [row.gradients for row in shown.of(name).values()][1:] == ["same bits"] * (len(shown.of(name)) - 1)


@pytest.mark.long
@pytest.mark.parametrize("name", ["jax", "brainstate"])
def test_gradients_in_jax_agree_to_rounding(shown: Shown, name: str) -> None:
    for row in list(shown.of(name).values())[1:]:
        assert row.gradients == "same bits" or float(row.gradients.removesuffix(" off")) < 1e-5


@pytest.mark.long
def test_lowtide_takes_less_than_plain_and_keeps_its_budgets(shown: Shown) -> None:
    for row in shown.rows:
        assert row.peak < row.plain_peak or row.kind is not ToolKind.LOWTIDE
        assert (row.kind is ToolKind.LOWTIDE) == row.tool.startswith("Lowtide, ")
        assert (row.kind is ToolKind.PLAIN) == (row.tool == "plain")
        assert row.share == row.peak / row.plain_peak
    assert shown.of("torch")["Lowtide, budget=128KiB"].peak <= 128 * KIB
    assert shown.of("heavy")["Lowtide, budget=256KiB"].peak <= 256 * KIB
    segments = shown.of("segments")
    assert segments["Lowtide, torch's peak"].peak <= segments["torch, 2 segments"].peak
    assert segments["Lowtide, budget=40%"].share <= 0.4


@pytest.mark.long
def test_what_is_on_paper_is_not_timed(shown: Shown) -> None:
    for row in shown.rows:
        assert (row.seconds is None) == (row.example == "paper") == (row.gradients == "on paper")


@pytest.mark.long
def test_what_is_printed(shown: Shown) -> None:
    words = " ".join(shown.text.split())
    assert "every one was legal, and the bill is the one predicted." in words
    assert "The least budget that works is 384 KiB; less is refused before anything runs." in words
    assert (
        "VGG-16, batch 32, in 1.166 GiB instead of 2.177 GiB: 7 segments by count, 26% extra time; a plan, 8%." in words
    )
    heading = shown.text.index("On paper: the layers of a network, which are unequal")
    assert shown.text.index("every 141 steps") < heading < shown.text.index("VGG-16") < shown.text.index("PyTorch")
    assert words.count("includes the stacked outputs, which a budget does not count") == 2  # JAX and brainstate
    assert "All examples" in words
    lines = shown.text.splitlines()
    assert lines.pop(lines.index(f"Open {shown.output / 'index.html'}"))
    assert "Beside it: paper.html, paper.png, paper.json, torch.html, torch.png," in words
    assert "arning" not in words
    assert max(map(len, lines)) <= 80
    assert shown.warnings == []


@pytest.mark.long
def test_what_is_written(shown: Shown) -> None:
    expected = {"index.html", "paper.json"} | {f"{name}.{kind}" for name in NAMES for kind in ("html", "png")}
    assert {path.name for path in shown.output.iterdir()} == expected
    for name in NAMES:
        assert (shown.output / f"{name}.png").read_bytes().startswith(PNG)
        assert 'id="data"' in (shown.output / f"{name}.html").read_text()
    assert len(Plan.from_json((shown.output / "paper.json").read_text()).chain) == 20_000


@pytest.mark.long
def test_the_index_links_to_all_and_fetches_nothing(shown: Shown) -> None:
    page = (shown.output / "index.html").read_text()
    targets = set(re.findall(r'(?:href|src)="([^"]*)"', page))
    assert targets == {path.name for path in shown.output.iterdir()} - {"index.html"}
    assert page.count("<tr") == len(shown.rows) + len(NAMES)
    assert page.count('<tr class="ours">') == sum(row.kind is ToolKind.LOWTIDE for row in shown.rows)
    assert "http" not in page
    assert "<script" not in page
    assert "prefers-color-scheme: dark" in page


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_index_on_a_telephone(shown: Shown, scheme: Literal["light", "dark"]) -> None:
    with chromium() as browser:
        page = browser.new_context(viewport={"width": 390, "height": 800}, color_scheme=scheme).new_page()
        page.goto((shown.output / "index.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        # Every table that is wider than the page can be scrolled, and its edge is shaded.
        wide = "[...document.querySelectorAll('.wide')].map(one => getComputedStyle(one))"
        assert set(page.evaluate(f"{wide}.map(style => style.overflowX)")) == {"auto"}
        assert set(page.evaluate(f"{wide}.map(style => style.backgroundAttachment)")) == {
            "local, local, scroll, scroll"
        }
        assert page.evaluate("Math.max(...[...document.querySelectorAll('td')].map(one => one.clientWidth))") < 200
        picture = "getComputedStyle(document.querySelector('img'))"
        assert page.evaluate(f"[{picture}.backgroundColor, {picture}.padding]") == ["rgb(255, 255, 255)", "6.4px"]
        assert page.evaluate("document.querySelector('img').getBoundingClientRect().right") <= 390


@pytest.mark.long
def test_the_gradients_are_worth_comparing() -> None:
    """A silent network has zeros, which are the same in every way."""
    for name in ("spiking_torch", "spiking_jax", "spiking_brainstate", "segments", "heavy"):
        module = __import__(f"lowtide.demo.{name}", fromlist=["contest"])
        with module.contest(quick=True) as contest:
            gradients = contest.contestants[PLAIN]().run()
        assert all(np.any(np.asarray(gradient)) for gradient in gradients), name


@pytest.mark.long
def test_only_some(tmp_path: Path) -> None:
    rows = run(console(), tmp_path, quick=True, only=["heavy"])
    assert {row.example for row in rows} == {"heavy"}
    assert {path.name for path in tmp_path.iterdir()} == {"heavy.html", "heavy.png", "index.html"}


def test_an_example_that_is_none(tmp_path: Path) -> None:
    names = "paper, torch, jax, brainstate, segments, heavy"
    with pytest.raises(InputError, match=f"there is no example 'tensorflow'; there are {names}"):
        run(console(), tmp_path / "nothing", only=["torch", "tensorflow"])
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize(
    ("missing", "name", "said"),
    [
        ("torch", "torch", "torch: torch not installed: pip install 'lowtide[torch]'"),
        ("torch", "segments", "segments: torch not installed: pip install 'lowtide[torch]'"),
        ("jax", "jax", "jax: jax not installed: pip install 'lowtide[jax]'"),
        ("brainpy", "brainstate", "brainstate: brainpy not installed: pip install 'lowtide[brainstate]'"),
    ],
)
def test_a_package_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str, name: str, said: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)  # as Python marks what cannot be imported
    screen = console()
    assert run(screen, tmp_path, quick=True, only=[name]) == []
    assert printed(screen) == f"{said}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_the_rest_goes_on_without_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    screen = console()
    rows = run(screen, tmp_path, quick=True, only=["jax", "heavy"])
    assert {row.example for row in rows} == {"heavy"}
    assert printed(screen).startswith("jax: jax not installed: pip install 'lowtide[jax]'\n")


ONE = np.array([1.0, -2.0, 0.0, np.nan], np.float32)


@pytest.mark.parametrize(
    ("found", "exact", "words"),
    [
        ([1.0, -2.0, 0.0, np.nan], True, "same bits"),
        ([1.0, -2.0, -0.0, np.nan], True, "1 of 5 differ"),
        ([1.0, -2.0000002, 1e-45, np.nan], True, "2 of 5 differ"),
    ],
)
def test_bits_are_compared(found: Sequence[float], exact: bool, words: str) -> None:
    scalar = np.float32(3)
    assert equality([np.array(found, np.float32), scalar], [ONE, scalar], exact=exact) == words


def test_rounding_is_a_share_of_the_largest_entry() -> None:
    expected = [np.array([4.0, 1.0]), np.array([100.0])]
    assert equality([np.array([4.0, 1.5]), np.array([101.0])], expected, exact=False) == "1e-01 off"
    assert equality([np.array([1e-9])], [np.array([0.0])], exact=False) == "inf off"
    assert equality(expected, expected, exact=False) == "same bits"


def test_tensors_of_two_layouts_are_compared() -> None:
    square = torch.arange(6.0).reshape(2, 3)
    assert equality([square.t().contiguous().t()], [square], exact=True) == "same bits"


def test_contestants_take_turns_and_the_least_counts() -> None:
    log: list[str] = []
    x = with_lowtide("x")
    now, durations = [0.0], {PLAIN: iter([9.0, 2.0, 3.0]), x: iter([9.0, 5.0, 3.0])}

    def contestant(tool: Tool, peak: int) -> Contestant:
        def work() -> list[np.ndarray]:
            log.append(tool.name)
            now[0] += next(durations[tool])
            return [np.ones(3)]

        return Contestant(work, lambda: peak)

    contest = Contest(
        "",
        "",
        {PLAIN: lambda: contestant(PLAIN, 400), x: lambda: contestant(x, 100)},
        lambda: now[0],
        repeats=2,
        exact=True,
        page=lambda: pytest.fail("not asked for"),
    )
    said: list[str] = []
    plain, ours = turns.measure("here", contest, said.append)
    assert log == ["plain", "Lowtide, x"] * 3
    assert plain == ResultRow("here", "plain", 400, 400, 2.0, 1.0, "", ToolKind.PLAIN)
    assert ours == ResultRow("here", "Lowtide, x", 100, 400, 3.0, 1.5, "same bits", ToolKind.LOWTIDE)
    assert len(said) == turns.pieces(contest)
    assert said[-1] == "Lowtide, x: time, turn 2 of 2"


def test_a_peak_is_beyond_the_results() -> None:
    w = torch.ones(256, requires_grad=True)  # 1 KiB

    def work() -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        passing = torch.ones(512) * 2  # 2 KiB each, gone before anything else is made
        del passing
        y = w * 3
        (gradient,) = torch.autograd.grad(y, [w], torch.ones(256))
        return y.detach(), [gradient]

    assert tensors.peak_of(work) == 4 * KIB
    with torch.no_grad():
        assert tensors.peak_of(lambda: (w * 2, [w * 3])) == 0


def test_threads_and_random_numbers_are_put_back() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    with tensors.one_thread():
        first = torch.rand(3)
        assert torch.get_num_threads() == 1
    with tensors.one_thread():
        assert torch.equal(torch.rand(3), first)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_a_bill_that_is_another_is_said_to_be() -> None:
    plan = paper.rollout(quick=True)
    count, bill = paper.played(plan, lambda done: None)
    assert "is the one predicted" in paper.verdict(plan, count, bill)
    assert "is NOT the one predicted: Bill(plain_runs=0" in paper.verdict(plan, count, replace(bill, plain_runs=0))


def test_vgg16_has_its_layers() -> None:
    chain = vgg16()
    assert (len(chain), chain.name(0), chain.name(17)) == (18, "conv1_1", "pool5")


def test_figures_in_words() -> None:
    row = ResultRow("torch", "plain", 3 * KIB, 3_000 * KIB * KIB, 1.2345, 1.0, "")
    assert tables.cells(row) == ("torch", "plain", "3 KiB", "0.000%", "1.23 s", "1.00x", "")
    assert tables.cells(replace(row, plain_peak=6 * KIB, seconds=0.0123))[3:5] == ("50%", "12.3 ms")
    assert tables.cells(replace(row, plain_peak=120 * KIB))[3] == "2.5%"


def test_gradients_that_differ_are_in_the_table() -> None:
    screen = console()
    rows = [ResultRow("torch", "Lowtide, budget=128KiB", 2, 1, 2.0, 3.5, "12 of 700 differ")]
    screen.print(tables.table(rows, examples=True))
    assert "12 of 700 differ" in printed(screen)
    assert "200%" in printed(screen)
    assert "3.50x" in printed(screen)


def test_the_index_escapes(tmp_path: Path) -> None:
    row = ResultRow("a", "<b>&", 1, 1, 1.0, 1.0, "<i>")
    path = index.write([row], {"a": ('<"title">', "<note>")}, {"a": [tmp_path / "a.png"]}, tmp_path / "index.html")
    page = path.read_text()
    assert "<td>&lt;b&gt;&amp;</td>" in page
    assert "<td>&lt;i&gt;</td>" in page
    assert "<h2>&lt;&quot;title&quot;&gt;</h2><p>&lt;note&gt;</p>" in page
    assert 'alt="&lt;&quot;title&quot;&gt;: the plan"' in page
