"""A block's call, made again and again by itself with arguments like those of its one call: its bytes and seconds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from lowtide.torch.capture import now
from lowtide.torch.measure import watching
from lowtide.torch.model_apply import run_in
from lowtide.torch.model_blocks import FoundBlock
from lowtide.torch.model_forms import Form
from lowtide.torch.operations import word_of
from lowtide.torch.step_pull import pulled, seed_of
from lowtide.torch.storages import Log, tensors_of
from lowtide.torch.traceless import left_as_it_was

# Operations whose results are as large as values say.
_OF_ANY_SIZE = frozenset({"nonzero", "masked_select", "unique", "_unique2", "unique_consecutive", "bincount"})


@dataclass(frozen=True, slots=True)
class CallBytes:
    """What a call holds between forward and backward, without its result; most bytes in each; the result's gradient."""

    held: int
    forward: int
    backward: int
    cotangent: int


class BlockCall:
    """A block's call, to be made again and again."""

    def __init__(self, block: FoundBlock, args: tuple[Any, ...], kwargs: dict[str, Any], on_paper: bool) -> None:
        self.block = block
        self._arguments = args, kwargs
        self._needs = block.call.needs
        self._on_paper = on_paper
        self.changes_arguments = False  # in place, which leaves of a graph do not allow

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Like those of the call, and leaves of a graph, or copies of such."""
        needs = iter(self._needs)

        def fresh(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return copy.deepcopy(leaf)
            if leaf.layout is not torch.strided:
                return leaf.detach()
            twin = leaf.detach().requires_grad_(next(needs))
            return twin.clone() if self.changes_arguments else twin

        args, kwargs = tree_map(fresh, self._arguments)
        return args, kwargs

    @contextmanager
    def given(self) -> Iterator[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
        """Inside, the block may change what it keeps; gives it, and arguments."""
        module = self.block.call.module
        torch.clear_autocast_cache()  # what another form has cast is not there for this one
        with nullcontext() if self._on_paper else left_as_it_was([module]), torch.enable_grad():
            yield module, *self.arguments()

    def watched(self, form: Form) -> CallBytes:
        """Run forward and backward in a form, counting bytes."""
        log = Log()
        with self.given() as (module, args, kwargs), run_in(form, module):
            if "lean" in str(form):  # where each call has another number, the second one is less lean than the first
                module.forward(*args, **kwargs)
                args, kwargs = self.arguments()
            since = now()
            with watching(log):
                result = module.forward(*args, **kwargs)
            outputs = {log.number(tensor) for tensor in tensors_of(result)} - {0}
            cotangent = sum(tensor.nbytes for tensor in tensors_of(result) if tensor.requires_grad)
            held, forward = log.level(0, len(log.events))
            held -= log.bytes(outputs)
            seed = seed_of(result)
            del result
            start, _ = log.level(0, len(log.events))
            mark = len(log.events)
            if seed is not None:
                with watching(log):
                    _pull(seed, args, kwargs, since)
            _, most = log.level(mark, len(log.events))
        return CallBytes(max(0, held), forward, start + most, cotangent)

    def timed(self, form: Form, clock: Callable[[], float]) -> tuple[float, float]:
        """Seconds of forward and backward in a form."""
        with self.given() as (module, args, kwargs), run_in(form, module):
            since, began = now(), clock()
            seed = seed_of(module.forward(*args, **kwargs))
            between = clock()
            if seed is not None:
                _pull(seed, args, kwargs, since)
            return between - began, clock() - between


class Looking(TorchDispatchMode):
    """Notes whether shapes depend on values, as where words are sent to experts: then each call has another tape."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.at_values = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.at_values |= word_of(func) in _OF_ANY_SIZE
        return func(*args, **(kwargs or {}))


def _pull(seed: torch.Tensor, args: Any, kwargs: Any, since: int) -> None:
    # Those that were changed in place are found like everything else that the block is given.
    pulled(seed, [t for t in tensors_of((args, kwargs)) if t.requires_grad and t.is_leaf], since)


def seconds_now() -> float:
    """Seconds, in which a busy machine counts as little as possible."""
    if torch.cuda.is_initialized():  # pragma: no cover
        torch.cuda.synchronize()
        return perf_counter()
    return process_time()
