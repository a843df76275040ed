"""A deliberately wrong variant of one module, and the tests that are to catch it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Mutant:
    """`file`, which is relative to `src/lowtide`, with `after` in the one place that has `before`.

    `tests` are paths, or `path::test`; at least one of their tests has to fail.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def source(self) -> str:
        """The module as it is."""
        return (ROOT / "src" / "lowtide" / self.file).read_text()

    def changed(self) -> str:
        """The module with the mistake in it."""
        return self.source().replace(self.before, self.after, 1)
