"""The memory of an optimizer: the bytes of its state, and of the temporary tensors of one step.

A copy of the optimizer takes two steps on fake parameters, so nothing is allocated and the optimizer itself is not
touched. The copy has the state that the optimizer has already. The second step counts, with step counters set high, so
that it is like later ones. Numbers that a step reads from tensors are 1 on paper. Where it reads a bool, both answers
are tried, and the more expensive one counts.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.optim import Optimizer
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.errors import InputError
from lowtide.torch.memory.tracker import Log, storage_bytes, watching
from lowtide.torch.paper.fakes import Fakes
from lowtide.torch.paper.results import KnownValues

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
_STEPS_OF_AN_OLD_OPTIMIZER = 1000  # by then an optimizer has left behind whatever is special about its first steps
_WAY_OUT = "plan with optimizer=None, and take what it holds off the peak"


class OptimizerCost(NamedTuple):
    """The bytes of the state between steps, and the most bytes of temporary tensors in one step."""

    state: int
    transient: int


def optimizer_cost(
    optimizer: Optimizer | MakeOptimizer, parameters: Iterable[nn.Parameter], device: str | None = None
) -> OptimizerCost:
    """The bytes that an optimizer takes beside parameters and gradients, from its second step on.

    Args:
        optimizer: an optimizer, or a class or function that makes one from a list of parameters.
        parameters: the model's parameters, for the latter; with values, on the meta device, or fake.
        device: the device whose code path is taken; on "cuda", many optimizers update all parameters at once. None
            takes the device of the parameters, and so does a device that this build of torch cannot do without.

    Raises:
        InputError: a step cannot be taken on paper.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    if not isinstance(optimizer, Optimizer):
        optimizer = _made(optimizer, list(parameters), mode)
    _check_step(optimizer)
    try:
        return _dearest(optimizer, mode, device)
    except InputError:
        if device is None:
            raise
        return _dearest(optimizer, mode, None)


def _dearest(optimizer: Optimizer, mode: FakeTensorMode, device: str | None) -> OptimizerCost:
    answers = _Answers(yes=True)
    cost = _cost(optimizer, mode, device, answers)
    if answers.were_given:
        other = _cost(optimizer, mode, device, _Answers(yes=False))
        cost = OptimizerCost(max(cost.state, other.state), max(cost.transient, other.transient))
    return cost


def _made(make: Any, parameters: list[nn.Parameter], mode: FakeTensorMode) -> Optimizer:
    if not callable(make):
        raise InputError(
            f"optimizer is a {type(make).__name__}; give a torch.optim.Optimizer, or a class or function that makes "
            "one of a list of parameters"
        )
    fakes = Fakes(mode, None)
    with mode, KnownValues(None):
        optimizer = make([fakes.of(parameter) for parameter in parameters])
    if not isinstance(optimizer, Optimizer):
        raise InputError(f"optimizer= makes a {type(optimizer).__name__}, which is no torch.optim.Optimizer")
    return optimizer


def _check_step(optimizer: Optimizer) -> None:
    _, *wanted = inspect.signature(type(optimizer).step).parameters.values()
    if any(
        parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        for parameter in wanted
    ):
        raise InputError(f"a step of {type(optimizer).__name__} runs the model itself, through a closure; {_WAY_OUT}")


def _cost(optimizer: Optimizer, mode: FakeTensorMode, device: str | None, answers: _Answers) -> OptimizerCost:
    """The cost of a copy whose reads of tensors get these answers."""
    copy: Any = _Copies(Fakes(mode, device, _is_counter)).of(optimizer)
    fakes = [parameter for group in copy.param_groups for parameter in group["params"]]
    needing = [parameter for parameter in fakes if parameter.requires_grad]
    log = Log()
    with mode, KnownValues(None), answers, torch.no_grad(), _fakes_together():
        for parameter in fakes:
            parameter.requires_grad_(False)  # autograd would look for the device, which this machine may not have
        for parameter in needing:
            parameter.grad = torch.empty_like(parameter)
        try:
            type(copy).step(copy)  # an instance's `step` may be a scheduler's, which calls the original optimizer
            _make_old(copy.state)
            # No loop variable here: it would keep a state tensor alive that the step replaces.
            deque(map(log.see, _tensors_in(copy.state)), maxlen=0)
            mark = len(log.events)
            with watching(log):
                type(copy).step(copy)
        except Exception as error:
            raise InputError(
                f"{type(copy).__name__} cannot take a step on paper ({type(error).__name__}: {error}); {_WAY_OUT}"
            ) from error
    others = [*fakes, *(parameter.grad for parameter in needing if parameter.grad is not None)]
    held = storage_bytes([*others, *_tensors_in(copy.state)]) - storage_bytes(others)
    return OptimizerCost(held, log.level(mark, len(log.events))[1])


def _make_old(state: dict[Any, Any]) -> None:
    """Set step counters high, because some optimizers do more after their first steps."""
    for row in state.values():
        if isinstance(row, dict) and "step" in row:
            row["step"] += _STEPS_OF_AN_OLD_OPTIMIZER


@contextmanager
def _fakes_together() -> Iterator[None]:
    """Inside, optimizers with a `foreach` implementation use it for fake parameters too."""
    kinds: list[Any] = _foreach_supported_types
    kinds.append(FakeTensor)
    try:
        yield
    finally:
        kinds.remove(FakeTensor)


def _is_counter(tensor: torch.Tensor) -> bool:
    """Whether the tensor is one number on the CPU that steps read, such as the step count."""
    return tensor.numel() == 1 and tensor.device.type == "cpu"


def _tensors_in(thing: Any) -> list[torch.Tensor]:
    """The strided tensors in nested dicts, lists and tuples; keys of dicts are not searched."""
    if isinstance(thing, dict):
        thing = list(thing.values())
    if isinstance(thing, list | tuple):
        return [tensor for part in thing for tensor in _tensors_in(part)]
    return [thing] if isinstance(thing, torch.Tensor) and thing.layout is torch.strided else []


class _Copies:
    """Makes copies of optimizers, and of everything that they hold, with fake tensors."""

    def __init__(self, fakes: Fakes) -> None:
        self._fakes = fakes

    def of(self, thing: Any) -> Any:
        """A copy of an optimizer, a tensor or a container; anything else is returned as it is."""
        if isinstance(thing, Optimizer):
            copy = object.__new__(type(thing))
            for name, value in vars(thing).items():
                if name.endswith("_hooks"):
                    vars(copy)[name] = OrderedDict()
                elif name != "step":
                    vars(copy)[name] = self.of(value)
            return copy
        if isinstance(thing, torch.Tensor):
            return self._fakes.of(thing)
        if isinstance(thing, dict):
            copied = thing.copy()  # an empty one of the same class, such as a defaultdict
            copied.clear()
            copied.update((self.of(key), self.of(value)) for key, value in thing.items())
            return copied
        return type(thing)(map(self.of, thing)) if type(thing) in (list, tuple) else thing


class _Answers(TorchDispatchMode):
    """Answers reads of fake tensors, which have no values: with 1, or for a bool with the answer that is tried."""

    def __init__(self, *, yes: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._yes = yes
        self.were_given = False  # whether a bool was read

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if args[0].dtype is not torch.bool:
                return 1.0 if args[0].is_floating_point() else 1
            self.were_given = True
            return self._yes
