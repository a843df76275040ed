"""The tensors that a call was given, kept for reruns the way autograd keeps its own.

Lists, dicts and caches among the arguments are copied without their tensors (`structure.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from lowtide.errors import CheckpointError
from lowtide.torch.state.notes import is_changed, may_be_copied


class _Kept(torch.autograd.Function):
    """A node that saves tensors the way autograd does, through the hooks of the calls around."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.detach()


_anchor = torch.empty(0, requires_grad=True)


class KeptTensors:
    """Tensors kept for reruns: by themselves, or, inside other hooks, the way autograd saves them."""

    __slots__ = ("_changed", "_firsts", "_flags", "_node", "_tensors", "_versions")

    def __init__(self, tensors: list[torch.Tensor], through_hooks: bool) -> None:
        # Where a tensor was given first: attention, for one, asks whether its query is its key.
        places: dict[int, int] = {}
        self._firsts = [places.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)]
        self._flags = flags = [tensor.requires_grad for tensor in tensors]
        # Copies of those that the function changes in place; until it has run, of those that it may change.
        self._changed: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        if not all(flags):
            self._changed = {k: (t, t._version, t.clone()) for k, t in enumerate(tensors) if may_be_copied(t)}
        self._node: Any = None
        self._tensors: list[torch.Tensor] = []
        self._versions: list[int] = []
        if through_hooks and tensors and not any(tensor.is_inference() for tensor in tensors):
            self._node = _Kept.apply(_anchor, *tensors).grad_fn  # type: ignore[no-untyped-call]  # torch's own
            return
        for tensor, needs_grad in zip(tensors, flags, strict=True):
            # Of a computed tensor only its values: the tensor itself may become a part of the graph that keeps it.
            self._tensors.append(tensor if needs_grad and tensor.is_leaf else tensor.detach())
            self._versions.append(tensor._version if needs_grad or not tensor.is_inference() else -1)

    def settle(self) -> None:
        """The function has run."""
        if self._changed:
            self._changed = {k: note for k, note in self._changed.items() if is_changed(*note)}

    def again(self) -> list[torch.Tensor]:
        """Twins of the tensors that belong to no graph, or an error if one was changed."""
        if self._node is not None:
            twins = [_twin(*pair) for pair in zip(self._node.saved_tensors, self._flags, strict=True)]
        else:
            twins = []
            for tensor, needs_grad, version in zip(self._tensors, self._flags, self._versions, strict=True):
                if version >= 0 and tensor._version != version and len(twins) not in self._changed:
                    raise CheckpointError(
                        f"argument tensor {len(twins)} of shape {tuple(tensor.shape)} was changed in place by the "
                        f"function or since it ran (version {version} then, {tensor._version} now), so the rerun would "
                        "not repeat it; change it after the backward, or make a new tensor"
                    )
                twins.append(_twin(tensor, needs_grad))
        for number, (_, _, values) in self._changed.items():
            if self._firsts[number] == number:
                twins[number] = values.clone()
        return [twins[first] for first in self._firsts]  # one that was given twice is one


def _twin(tensor: torch.Tensor, needs_grad: bool) -> torch.Tensor:
    """The tensor itself, if it is a leaf that belongs to no graph, or one with its values that is such a leaf."""
    return tensor if tensor.requires_grad and tensor.is_leaf else tensor.detach().requires_grad_(needs_grad)
