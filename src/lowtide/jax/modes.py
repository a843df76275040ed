"""Which derivatives a planned loop has, said where another is asked for; and loops that run plainly for comparison."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jax.interpreters import ad

from lowtide.errors import FunctionError

_FORWARD_MODE = (
    "a planned loop has no forward-mode derivative (jax.jvp, jax.jacfwd); give base=, which has every derivative, or use "
    "lowtide.jax.scan"
)


def refuse_forward_mode(leaves: Sequence[Any]) -> None:
    """Refuse results whose tangents were asked for directly; those of a gradient's own tangents do not come here."""
    if any(isinstance(leaf, ad.JVPTracer) for leaf in leaves):
        raise FunctionError(_FORWARD_MODE)


@contextmanager
def naming_the_knob() -> Iterator[None]:
    """Say of JAX's own refusal of forward mode which knob can."""
    try:
        yield
    except TypeError as error:
        if "forward-mode" in str(error) and "custom_vjp" in str(error):
            raise FunctionError(_FORWARD_MODE) from error
        raise


class _Thread(threading.local):
    plainly = False


_thread = _Thread()


def runs_plainly() -> bool:
    """Whether checkpointed loops are to run as plain ones."""
    return _thread.plainly


@contextmanager
def plainly(yes: bool = True) -> Iterator[None]:
    """Inside, checkpointed loops are traced as plain ones, if so: the other side of a comparison."""
    before = _thread.plainly
    _thread.plainly = yes
    try:
        yield
    finally:
        _thread.plainly = before
