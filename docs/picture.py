"""Takes the README's pictures of a report page: `python docs/picture.py` writes docs/report*.png. Needs Chromium."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from playwright.sync_api import FloatRect, Page, sync_playwright
from torch import nn

import lowtide.torch as lt
from lowtide import report

WIDTH, MARGIN = 1180, 24
# From the top of the page, or of the first panel, to the end of the last.
PICTURES = {"report.png": (None, "#frontier"), "report_over_time.png": ("#schedule", "#memory")}


def write_page(folder: str) -> Path:
    """The page of a run like the README's first example."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(80, 64), lt.spiking.LIF(tau=20.0), nn.Linear(64, 2), lt.spiking.Expon(tau=10.0))
    xs = (torch.rand(400, 32, 80) < 0.05).float()
    plan = lt.plan_for_loop(net, xs, budget="512KiB")
    with lt.record() as receipt:
        lt.checkpointed_for_loop(net, xs, plan=plan).mean(0).square().sum().backward()
    return report.write(plan, receipt, Path(folder) / "plan.html")


def panel(page: Page, part: str) -> FloatRect:
    """Where the panel that has this part is."""
    box = page.locator(f"section:has({part})").bounding_box()
    assert box is not None
    return box


def main() -> None:
    """Write the page, and take its picture."""
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = write_page(folder)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
        page.goto(page_file.as_uri())
        page.evaluate("window.lowtide.ready")
        for name, (first, last) in PICTURES.items():
            top = 0 if first is None else panel(page, first)["y"] - MARGIN
            bottom = panel(page, last)["y"] + panel(page, last)["height"] + MARGIN
            page.screenshot(
                path=Path(__file__).with_name(name),
                full_page=True,
                clip={"x": 0, "y": top, "width": WIDTH, "height": bottom - top},
            )
        browser.close()


if __name__ == "__main__":
    main()
