"""A loop's step as `lean` calls it: with everything that the step is known to read beside its arguments.

A step may keep state in its modules, and find modules through globals or the user's own objects. All of that affects
what autograd saves, so it is passed to `lean` together with the arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lowtide.errors import InputError
from lowtide.interface.cache import Cache
from lowtide.torch.lean.call import lean
from lowtide.torch.lean.guards import Guards
from lowtide.torch.memory.tracker import key_of, tensors_of
from lowtide.torch.state.hidden import Hidden

_holders: Callable[[int], int] = torch._C._storage_Use_Count
_one = torch.empty(1)
_PYTHON_HOLDERS = _holders(key_of(_one)) - 1  # references to a storage that Python adds to those of tensors
_MOST_STEPS_KNOWN = 512
# By a step's kind and forms, the most bytes that such a step needed while it ran and not afterwards. Cached across
# loops, because a later loop may find all of its steps traced.
_needed: Cache[int] = Cache(_MOST_STEPS_KNOWN)


class LeanStep:
    """`f(carry, x)` with a lean tape; `target` is the user's own function, for its name.

    `before` is called with each carry before the step, and is no part of it.
    """

    def __init__(
        self,
        f: Callable[[Any, Any], Any],
        hidden: Hidden,
        target: Any,
        before: Callable[[Any], Any] = lambda carry: carry,
    ) -> None:
        def step(carry: Any, x: Any, *_: Any) -> Any:
            return f(carry, x)

        step.__qualname__ = f"a step of {getattr(target, '__qualname__', type(target).__name__)}"
        self._step = step
        self._before = before
        self._kind: object = getattr(target, "__code__", type(target))
        self._hidden = hidden
        self._modules: list[nn.Module] = []
        self._known = 0
        self._held: set[int] | None = None  # None if nobody asks which storages the tape holds
        self._numbers: list[list[Any]] = []
        self.varies = False  # whether numbers that the step depends on were seen to change from one step to the next

    def __call__(self, carry: Any, x: Any) -> Any:
        """Run a step."""
        carry = self._before(carry)
        state = self._hidden.leaves()
        if self._held is None:
            return self._run(carry, x, state)
        self._compare_numbers(carry, x)
        given = tensors_of((carry, state))
        before = _others(given)
        result = self._run(carry, x, state)
        after = _others([*given, *tensors_of((result, self._hidden.leaves()))])
        self._held |= {key for key, others in after.items() if others > before.get(key, 0)}
        return result

    def _run(self, carry: Any, x: Any, state: list[torch.Tensor]) -> Any:
        try:
            return lean(self._step, carry, x, state, self._roots())
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            raise InputError(
                f"the step uses a transform of torch.func, of which no lean tape can be made ({error}); leave out "
                "lean=True"
            ) from error

    def _compare_numbers(self, carry: Any, x: Any) -> None:
        # Two lists, because the first changes its length where a state begins as a number and becomes a tensor: that is
        # not a number that varies, and must not hide one in the second.
        now = [Guards(_nothing, (carry, x), {}).numbers, Guards(self._step, (self._roots(),), {}).numbers]
        rows = zip(self._numbers, now, strict=False)
        self.varies |= any(len(old) == len(new) and old != new for old, new in rows)
        self._numbers = now

    def _roots(self) -> list[nn.Module]:
        """The modules that take part and are not inside another one."""
        modules = self._hidden.modules
        if len(modules) != self._known:
            self._known = len(modules)
            inside = {id(child) for module in modules for child in module.modules() if child is not module}
            self._modules = [module for module in modules if id(module) not in inside]
        return self._modules

    @contextmanager
    def watched(self, held: set[int]) -> Iterator[None]:
        """A context in which storages of a step's state and results that its tape holds are added to `held`.

        This is not done by saved-tensor hooks around the call: a lean tape that hands over what it keeps to other hooks
        holds it longer in the backward.
        """
        self._held = held
        try:
            yield
        finally:
            self._held = None

    def most_needed(self, forms: tuple[Any, ...], seen: int) -> int:
        """The most bytes that a step with these forms was ever seen to need while it ran and not afterwards.

        A step that is traced holds its whole tape while it runs. If numbers vary, later steps may be traced, so there
        has to be room for that even if the steps seen now were traced before.
        """
        key = (self._kind, *forms)
        most = max(seen, _needed.get(key) or 0)
        _needed.put(key, most)
        return most


def _others(tensors: list[torch.Tensor]) -> dict[int, int]:
    """For each storage of the tensors, the number of references to it beside theirs."""
    known = Counter(key_of(tensor) for tensor in {id(tensor): tensor for tensor in tensors}.values())
    return {key: _holders(key) - _PYTHON_HOLDERS - count for key, count in known.items()}


def _nothing() -> None:
    """A function without code of its own, so that guards of a call depend on the arguments only."""
