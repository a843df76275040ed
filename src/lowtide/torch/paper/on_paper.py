"""A model on paper: the same module object, with tensors that have shapes and no values.

Inside `on_paper` the model can be called, checkpointed and pulled back as usual. Nothing is allocated, and nothing is
computed except for masks, positions and other small whole numbers; afterwards everything is as it was. Operations are
those that torch chooses on the CPU, where attention with dropout keeps all its probabilities, and a GRU is a series of
small operations. A `PaperClock` adds up the time that they would take on a device.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.errors import InputError
from lowtide.torch.paper.devices import Device
from lowtide.torch.paper.fakes import Fakes
from lowtide.torch.paper.operations import seconds_of
from lowtide.torch.paper.results import KnownValues
from lowtide.torch.state.ambient import aside

_MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__)
_REGISTERED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_VALUE_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)
_UNSUPPORTED_ERRORS = (UnsupportedFakeTensorException, UnsupportedOperatorException)
_NO_FAKE_MESSAGE = "no fake impl registered"  # torch's error for third-party operations
# Torch's errors for a tensor without values that is read by something other than an operation.
_READ_MESSAGES = ("data pointer", ".numpy() is not supported", "numpy() on a")


@contextmanager
def on_paper(
    model: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """A context in which the model's tensors are fake; yields the arguments to call it with.

    Args:
        model: any module, on any device. One that was built under `torch.device("meta")` has never had values.
        args: its arguments; tensors may have values on any device, or be on the meta device, or fake. Whole numbers and
            masks that have values keep them.
        kwargs: its keyword arguments.

    Raises:
        InputError: the code inside depends on values that do not exist on paper; the error says where.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = Fakes(mode)
    with ExitStack() as stack:
        stack.enter_context(aside([]))
        stack.enter_context(_swapped(model, fakes))
        given = fakes.of_tree(args), fakes.of_tree(kwargs or {})
        stack.enter_context(mode)
        stack.enter_context(KnownValues())
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        try:
            yield given
        except Exception as error:
            explained = _explained(error, model)
            if explained is None:
                error.add_note(f"{_place(error, model)} ran on paper; if it runs with values, plan without on_paper")
                raise
            raise explained from error


class PaperClock(TorchDispatchMode):
    """Adds up the time that the operations inside, including a backward's, would take on a device: `seconds`.

    with PaperClock(devices.H100) as clock:
        loss = model(x).sum()
    print(clock.seconds)
    """

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.device = device
        self.seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.seconds += seconds_of(func, args, kwargs, result, self.device)
        return result


@contextmanager
def _swapped(model: nn.Module, fakes: Fakes) -> Iterator[None]:
    """A context in which the tensors of all modules are fake; afterwards all attributes of modules are as before."""
    modules = list(model.modules())
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(f"{type(module).__name__} is compiled by torch.jit; plan it without on_paper")
    before = [dict(vars(module)) for module in modules]
    inside = [{name: row[name].copy() for name in _REGISTERED} for row in before]
    try:
        for module in modules:
            _swap(module, fakes)
        yield
    finally:
        for module, attributes, registered in zip(modules, before, inside, strict=True):
            vars(module).clear()
            vars(module).update(attributes)
            for name, contents in registered.items():
                attributes[name].clear()
                attributes[name].update(contents)


def _swap(module: nn.Module, fakes: Fakes) -> None:
    rows: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    for row in rows:
        row.update({name: fakes.of(tensor) for name, tensor in row.items() if tensor is not None})
    for name, value in list(vars(module).items()):
        if name not in _MODULE_ATTRIBUTES:
            vars(module)[name] = fakes.of_tree(value)


def _explained(error: Exception, model: nn.Module) -> InputError | None:
    """The error to raise instead of one that is due to tensors without values; None for any other error."""
    read = isinstance(error, _VALUE_DEPENDENT_ERRORS) or any(words in str(error) for words in _READ_MESSAGES)
    if not read and not isinstance(error, _UNSUPPORTED_ERRORS) and _NO_FAKE_MESSAGE not in str(error):
        return None
    what = "looks at values of a tensor, which has none on paper" if read else f"cannot run on paper: {error}"
    return InputError(
        f"{_place(error, model)} {what}. Plan without on_paper, or give other arguments: whole numbers and masks as "
        "tensors with values, not on the meta device, or none, such as attention_mask=None"
    )


def _place(error: Exception, model: nn.Module) -> str:
    """The innermost module of the model that was running when an error was raised, and the line."""
    names = {id(module): name for name, module in model.named_modules()}
    where, line = "what was done with the model", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if id(owner) in names:
            where = f"{names[id(owner)] or 'the model'} ({type(owner).__name__})"
        if not frame.f_globals.get("__name__", "").startswith(("torch.", "lowtide.")):
            line = f", line {number} of {Path(frame.f_code.co_filename).name},"
    return where + line
