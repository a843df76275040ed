"""Makes absolute addresses for the package's page, where relative ones lead nowhere, from the address of the source.

That address is in one place, `tool.hatch.metadata.hooks.custom.source` in pyproject.toml, to be filled by whoever
publishes. While it is empty the README stays as it is, and the package has no links.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE = re.compile(r"""(\]\(|src=")(?![a-z]+:|#)([^)"]+)""")


class Addresses(MetadataHookInterface):
    """The README and the links of the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add them to the metadata."""
        source = self.config["source"].rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, source) if source else text}
        metadata["urls"] = links(source) if source else {}


def absolute(text: str, source: str) -> str:
    """The text with absolute addresses of the source's pages and pictures."""

    def address(found: re.Match[str]) -> str:
        kind = "raw" if found[2].endswith(".png") else "blob"
        return f"{found[1]}{source}/{kind}/HEAD/{found[2]}"

    return RELATIVE.sub(address, text)


def links(source: str) -> dict[str, str]:
    """The links that the package's page shows."""
    pages = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md"}
    return {
        "Source": source,
        "Issues": f"{source}/issues",
        **{name: f"{source}/blob/HEAD/{page}" for name, page in pages.items()},
    }
