"""Transforms of functions around a loop: `torch.func.grad`, `vmap`, forward mode. A checkpointed loop has none of them.

Its backward runs steps again outside of them, where the tensors of their levels are nobody's.
"""

from __future__ import annotations

import torch

from lowtide.errors import FunctionError


def refuse_transforms(ours: str, plain: str) -> None:
    """Refuse to run inside a transform of `torch.func`; `plain` is what to use in place of `ours` there."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise FunctionError(
            f"{ours} is called inside a transform of torch.func (grad, vmap, jvp, ...), which cannot see through it; "
            f"take gradients with torch.autograd.grad(loss, tensors), or use {plain} inside the transform"
        )
