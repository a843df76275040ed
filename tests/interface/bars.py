"""A bar that remembers its moves, and what a drawn one shows."""

from __future__ import annotations


class Bar:
    """Anything with `update(n)`."""

    def __init__(self) -> None:
        self.moves: list[int] = []

    def update(self, n: int) -> None:
        """Move on by n."""
        self.moves.append(n)


def drawn(text: str) -> str:
    """The last state that a bar drew."""
    return text.rstrip().rpartition("\r")[2]
