"""Opens written pages in a real browser, and notes whatever they complain about or ask the network for."""

from __future__ import annotations

import base64
import json
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
DATA = re.compile(r'<script id="data" type="text/plain">(.*?)</script>', re.DOTALL)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser, or a skip that says which ones were looked for."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"the page is tested in a browser, and none of {', '.join(NAMES)} is on the PATH")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Visit:
    """A page that is open, and what went wrong in it."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def find(self, name: str) -> Locator:
        """The element that is there for tests under this name."""
        return self.page.locator(f'[data-test="{name}"]')

    def text(self, name: str) -> str:
        """What it says."""
        return self.find(name).inner_text()

    def show(self, index: int) -> None:
        """Move the slider to a view."""
        self.find("slider").fill(str(index))

    def wait_for_another(self, attribute: str, of: Locator, than: str, *, seconds: float = 30) -> None:
        """Until an attribute has another value. The page allows no eval, so `wait_for_function` looks only once."""
        expect(of).not_to_have_attribute(attribute, than, timeout=1_000 * seconds)

    def overflow(self) -> int:
        """Pixels by which the page is wider than its window."""
        pixels = self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        return int(pixels)


@contextmanager
def visit(
    browser: Browser,
    path: Path,
    *,
    width: int = 1280,
    scheme: Literal["light", "dark"] = "light",
) -> Iterator[Visit]:
    """The page, ready. On the way out: no complaint, no dialog, and no request but for the file itself."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce", accept_downloads=True
    )
    try:
        seen = Visit(context.new_page())
        seen.page.on("console", lambda message: seen.complaints.append(f"{message.type}: {message.text}"))
        seen.page.on("pageerror", lambda error: seen.complaints.append(str(error)))
        seen.page.on("dialog", lambda dialog: seen.complaints.append(f"dialog: {dialog.message}"))
        seen.page.on("request", lambda request: seen.requests.append(request.url))
        seen.page.goto(path.as_uri())
        seen.page.evaluate("window.lowtide.ready")
        yield seen
        assert not seen.complaints, seen.complaints
        asked = [url for url in seen.requests if not url.startswith("data:") and not url.startswith("blob:")]
        assert asked == [path.as_uri()], asked
    finally:
        context.close()


def data_of(path: Path) -> dict[str, Any]:
    """The data that a page was written with."""
    found = DATA.search(path.read_text(encoding="utf-8"))
    assert found is not None
    data: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(found[1])))
    return data


def without_data(path: Path, to: Path) -> Path:
    """The same page with its data taken out."""
    to.write_text(DATA.sub("", path.read_text(encoding="utf-8")), encoding="utf-8")
    return to
