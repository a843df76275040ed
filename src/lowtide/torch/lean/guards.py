"""Guards: what a call of a function depends on, found in microseconds and compared before a recipe is used.

`Guards` have a key, which is equal for calls that do the same operations; numbers in which such calls may differ, which
are compared one by one; and all tensors of arguments and modules, in which recipes find what they read. Anything else
(an object's containers, a file, a global that is not a number) is not followed: there the samples that a tape compares
show whether recomputing returned the same (`tape.py`). Modules are held by weak references only.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from lowtide.interface.cache import Cache
from lowtide.torch.memory.accelerators import autocast_now

_MOST_MODULES = 100_000  # called directly, whose trees are cached
_MOST_CODES = 4096  # functions whose names of globals are cached
_MOST_NUMBERS_OF_A_GLOBAL = 64  # in a list, tuple or dict; a longer one is taken for data and not compared

_NUMBERS = frozenset({int, float, complex})
_WORDS = frozenset(
    {
        bool,
        str,
        bytes,
        type(None),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        torch.Size,
        range,
        type,
    }
)
_TENSORS = frozenset({torch.Tensor, nn.Parameter})
_PLAIN = _NUMBERS | _WORDS
_FOLLOWED_IN_OBJECTS = (torch.Tensor, nn.Module, types.FunctionType, types.MethodType, functools.partial)
_PLAIN_DISPATCH = torch._C._disabled_torch_dispatch_impl
_MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__)
# Modules whose attributes do not affect what they compute.
_UNWATCHED_MODULES = frozenset({nn.Linear, nn.Identity, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ModuleList, nn.Sequential})
_hooks = itemgetter("_forward_pre_hooks", "_forward_hooks")
_needs_gradient = attrgetter("requires_grad")
_dtype = attrgetter("dtype")
_default_dtype = torch.get_default_dtype


class Guards:
    """What one call depends on, as far as it can be seen from outside.

    Attributes:
        key: equal for calls that do the same operations.
        numbers: Python numbers among arguments, and plain attributes of modules.
        tensors: the tensors of arguments, then those of modules.
        arguments: the number of tensors of arguments.
        is_plain: whether all tensors are ordinary ones and nothing is compiled, which a trace would undo.
        anchors: the modules that the key identifies by `id`.
    """

    __slots__ = ("_has_parameters", "_key", "_seen", "anchors", "arguments", "is_plain", "key", "numbers", "tensors")

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._key: list[Any] = []
        self._seen: set[int] = set()  # ids of containers, functions and objects, which may contain themselves
        self._has_parameters = False
        self.numbers: list[Any] = []
        self.tensors: list[Any] = []
        self.anchors: list[nn.Module] = []
        self.is_plain = True
        self._add_callable(function)
        for argument in args:
            self._add(argument)
        for name, argument in kwargs.items():
            self._key.append(name)
            self._add(argument)
        # Tensors that modules have as attributes count as arguments: unlike parameters and buffers they are compared
        # by the key, so they are added before `arguments` is fixed.
        states = [self._add_attributes(module) for module in self.anchors]
        self.arguments = len(self.tensors)
        if self.arguments > 1:
            self._add_aliases()
        for state in states:
            self._add_parameters(state)
        self.key: Hashable = (*self._key, autocast_now(), _default_dtype())

    # --- arguments: the most frequent kinds first

    def _add(self, value: Any) -> None:
        kind = type(value)
        if kind in _TENSORS:
            self._add_tensor(value)
        elif kind in _NUMBERS:
            self._key.append(kind)
            self.numbers.append(value if value else str(value))  # as text, because 0.0 == -0.0
        elif kind in _WORDS:
            self._key.append(value)
        elif isinstance(value, tuple):
            self._key += (kind, len(value))
            for part in value:
                self._add(part)
        elif isinstance(value, list | dict):
            self._add_container(value)
        else:
            self._add_record(value)

    def _add_container(self, container: list[Any] | dict[Any, Any]) -> None:
        if id(container) in self._seen:
            return
        self._seen.add(id(container))
        self._key += (type(container), len(container))
        if isinstance(container, dict):
            self._key += container
        for part in container.values() if isinstance(container, dict) else container:
            self._add(part)

    def _add_record(self, value: Any) -> None:
        """Add something that has a value: it is identified by that value, not by the object."""
        kind = type(value)
        if isinstance(value, torch.Tensor):
            self._add_tensor(value)
        elif kind is slice:
            self._add((value.start, value.stop, value.step))
        elif isinstance(value, np.generic):
            self._key.append(kind)
            self.numbers.append(str(value))
        elif isinstance(value, Enum):
            self._key += (kind, value.name)
        elif is_dataclass(value) and not isinstance(value, type):
            self._key.append(kind)
            for field in fields(value):
                self._add(getattr(value, field.name, None))
        else:
            self._add_callable(value)

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.is_nested:
            self.is_plain = False
            return
        strides = tensor.stride() if tensor.layout is torch.strided else tensor.layout
        self._key += (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, strides)
        self.tensors.append(tensor)
        kind = type(tensor)
        self._has_parameters |= kind is nn.Parameter
        if tensor.is_inference() or (kind not in _TENSORS and not _is_ordinary(tensor)):
            self.is_plain = False

    def _add_aliases(self) -> None:
        """Add which arguments share a storage, and their offsets in it."""
        places = [t.untyped_storage()._cdata if t.layout is torch.strided else id(t) for t in self.tensors]
        if len(set(places)) < len(places):
            first = {place: k for k, place in reversed([*enumerate(places)])}
            self._key += ("aliases", *[(first[p], self._apart(k, first[p])) for k, p in enumerate(places)])

    def _apart(self, k: int, other: int) -> int:
        tensor, first = self.tensors[k], self.tensors[other]
        return int(tensor.storage_offset() - first.storage_offset()) if tensor.layout is torch.strided else 0

    # --- functions, and what they hold

    def _add_callable(self, function: Any) -> None:
        if isinstance(function, nn.Module):
            self._add_module(function)
        elif isinstance(function, types.MethodType):
            self._add_callable(function.__func__)
            self._add(function.__self__)
        elif isinstance(function, types.FunctionType):
            self._add_function(function)
        elif isinstance(function, functools.partial):
            self._add_callable(function.func)
            self._add(function.args)
            self._add(function.keywords)
        elif isinstance(function, types.BuiltinFunctionType | types.MethodDescriptorType):
            self._key.append(function.__qualname__)
            owner = getattr(function, "__self__", None)
            if isinstance(owner, torch.Tensor):
                self._add(owner)
        else:
            self._add_object(function)

    def _add_module(self, module: nn.Module) -> None:
        # An `id` is safe in a key if whoever keeps the key removes it when the module dies: see `anchors`.
        self._key.append(id(module))
        self.anchors.append(module)

    def _add_function(self, function: types.FunctionType) -> None:
        """Add a function, identified by its code, not by the object: a lambda is often created again for each call."""
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        self.is_plain &= not hasattr(function, "_torchdynamo_orig_callable")
        self._key += (function.__code__, id(function.__globals__))
        self.numbers += [repr(function.__globals__.get(name)) for name in _globals_with_numbers(function)]
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._add(default)
        for cell in function.__closure__ or ():
            try:
                self._add(cell.cell_contents)
            except ValueError:  # not bound yet
                continue

    def _add_object(self, thing: Any) -> None:
        """Add an object of the user's, identified by its type and by its numbers, tensors, modules and functions.

        It is not identified by the object: one that is created again for every call would make every call different.
        """
        self._key.append(type(thing))
        self.is_plain &= not isinstance(thing, torch.jit.ScriptFunction)
        if id(thing) in self._seen:
            return
        self._seen.add(id(thing))
        for name, value in list(getattr(thing, "__dict__", {}).items()):
            if type(value) in _PLAIN:
                self._key.append(name)
                self.numbers.append(value)
            elif isinstance(value, _FOLLOWED_IN_OBJECTS):
                self._key.append(name)
                self._add(value)

    # --- modules, and what they hold

    def _add_attributes(self, root: nn.Module) -> _ModuleState:
        """Add the numbers and tensors that a module and those inside it have as attributes; their state."""
        tree, state = _looked_at(root)
        attributes = state.attributes
        self.is_plain &= not tree.is_compiled
        if tree.has_tensors:
            for tensor in [value for value in attributes if isinstance(value, torch.Tensor)]:
                self._add_tensor(tensor)
            attributes = [value for value in attributes if not isinstance(value, torch.Tensor)]
        self.numbers += attributes
        if tree.globals:
            self.numbers += [repr(names.get(name)) for names, name in tree.globals]
        return state

    def _add_parameters(self, state: _ModuleState) -> None:
        parameters = state.parameters()
        if not _TENSORS.issuperset(map(type, parameters)):
            self.is_plain &= all(map(_is_ordinary, parameters))
        if self._has_parameters:  # an argument may be one of these parameters
            arguments = self.tensors[: self.arguments]
            self._key += [k for k, p in enumerate(parameters) if any(p is argument for argument in arguments)]
        self._key += (tuple(state.hooks), tuple(map(_needs_gradient, parameters)), tuple(map(_dtype, parameters)))
        self.tensors += parameters
        if state.with_buffers:
            self.tensors += [buffer for row in state.with_buffers for buffer in row.values()]


class PaperGuards(Guards):
    """Guards on paper: fake tensors count as plain, and modules that are alike have equal keys."""

    __slots__ = ()

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(function, args, kwargs)
        forms = [(t.shape, t.dtype, t.layout is torch.strided and t.stride()) for t in self.tensors if t is not None]
        self.key = (self.key, tuple(forms), tuple(map(repr, self.numbers)))

    def _add_module(self, module: nn.Module) -> None:
        self._key.append((type(module), repr(module)))
        self.anchors.append(module)

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        plain = self.is_plain
        super()._add_tensor(tensor)
        if isinstance(tensor, FakeTensor):
            self.is_plain = plain

    def _add_parameters(self, state: _ModuleState) -> None:
        plain = self.is_plain
        super()._add_parameters(state)
        if all(isinstance(parameter, FakeTensor) for parameter in state.parameters()):
            self.is_plain = plain


def _is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether operations on the tensor are torch's own, and it has values."""
    return type(tensor).__torch_dispatch__ is _PLAIN_DISPATCH and not is_lazy(tensor)


class _ModuleState(NamedTuple):
    """The present state of a module and all modules inside it.

    Attributes:
        attributes: the values of watched attributes.
        hooks: the ids that torch gave to forward hooks.
        with_parameters, with_buffers: the dicts of the modules that have any.
    """

    attributes: list[Any]
    hooks: list[int]
    with_parameters: list[dict[str, Any]]
    with_buffers: list[dict[str, Any]]

    def parameters(self) -> list[torch.Tensor]:
        """All parameters, in order."""
        return [p for row in self.with_parameters for p in row.values() if p is not None]


@dataclass(frozen=True, slots=True, eq=False)
class _ModuleTree:
    """A module and all modules inside it: where to look at each call. Modules are known by index in `references`.

    Attributes:
        references: weak references to all modules, the outermost first.
        counts: the number of attributes of each.
        watched: a getter of the attributes that are compared, and the index of the module that has them.
        kinds: the types of those attributes.
        parents: the modules that have submodules.
        children: the ids of those submodules.
        with_parameters, with_buffers: the modules that have any.
        globals: globals with numbers that the modules' code names, each as a namespace and a name.
        has_tensors: whether an attribute is a tensor.
        is_compiled: whether a module is scripted or compiled.
    """

    references: list[weakref.ref[nn.Module]]
    counts: list[int]
    watched: list[tuple[Callable[[dict[str, Any]], tuple[Any, ...]], int]]
    kinds: list[type]
    parents: list[int]
    children: list[int]
    with_parameters: list[int]
    with_buffers: list[int]
    globals: list[tuple[dict[str, Any], str]]
    has_tensors: bool
    is_compiled: bool

    def state(self) -> _ModuleState | None:
        """The present state; None if the tree is outdated, because a module, an attribute or a type has changed."""
        try:
            # The reference to a module that has died returns None, which has no `__dict__`: an AttributeError.
            inside = [reference().__dict__ for reference in self.references]
            rows = [get(inside[k]) for get, k in self.watched]
        except (AttributeError, KeyError):
            return None
        attributes = list(chain.from_iterable(rows))
        if (
            list(map(len, inside)) != self.counts
            or list(map(type, attributes)) != self.kinds
            or [id(child) for k in self.parents for child in inside[k]["_modules"].values()] != self.children
        ):
            return None
        return _ModuleState(
            attributes,
            list(chain.from_iterable(chain.from_iterable(map(_hooks, inside)))),
            [inside[k]["_parameters"] for k in self.with_parameters],
            [inside[k]["_buffers"] for k in self.with_buffers],
        )


# By `id`, because a module may not be hashable. A tree refers to its modules weakly, so it keeps none alive.
_trees: Cache[_ModuleTree] = Cache(_MOST_MODULES)


def _looked_at(root: nn.Module) -> tuple[_ModuleTree, _ModuleState]:
    """A module's tree and present state; the tree is made again if the module has changed."""
    tree = _trees.get(id(root))
    state = None if tree is None else tree.state()
    if tree is None or state is None:
        tree = _tree_of(root)
        _trees.put(id(root), tree, [root])
        state = tree.state()
        assert state is not None
    return tree, state


def _tree_of(root: nn.Module) -> _ModuleTree:
    modules = list(root.modules())
    is_scripted = any(isinstance(module, torch.jit.ScriptModule) for module in modules)
    if is_scripted:  # scripted modules have no such attributes, and are called plainly
        modules = []
    watched = [(_getter(module), k) for k, module in enumerate(modules) if type(module) not in _UNWATCHED_MODULES]
    kinds = [type(value) for get, k in watched for value in get(modules[k].__dict__)]
    return _ModuleTree(
        references=[weakref.ref(module) for module in modules],
        counts=[len(module.__dict__) for module in modules],
        watched=watched,
        kinds=kinds,
        parents=_places_of("_modules", modules),
        children=[id(child) for module in modules for child in module._modules.values()],
        with_parameters=_places_of("_parameters", modules),
        with_buffers=_places_of("_buffers", modules),
        globals=_globals_of({type(module).forward for module in modules}),
        has_tensors=any(issubclass(kind, torch.Tensor) for kind in kinds),
        is_compiled=is_scripted or any(map(_is_compiled, modules)),
    )


def _places_of(registered: str, modules: list[nn.Module]) -> list[int]:
    """The indices of the modules that have something in this dict."""
    return [k for k, module in enumerate(modules) if module.__dict__[registered]]


def _getter(module: nn.Module) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """A function that returns the watched attributes of a module, from its `__dict__`, as a tuple."""
    inside = module.__dict__
    names = [name for name in inside if name == "training" or _is_watched(name, inside[name])]
    # An itemgetter of a single name does not return a tuple, so a single name is given twice.
    return itemgetter(*names, *(names if len(names) == 1 else ()))


def _is_watched(name: str, value: Any) -> bool:
    if name in _MODULE_ATTRIBUTES:
        return False
    if type(value) is tuple:
        return all(type(part) in _PLAIN for part in value)
    return type(value) in _PLAIN or isinstance(value, torch.Tensor | np.generic | Enum)


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def _globals_of(functions: set[Any]) -> list[tuple[dict[str, Any], str]]:
    return [
        (function.__globals__, name)
        for function in functions
        if isinstance(function, types.FunctionType)
        for name in _globals_with_numbers(function)
    ]


def _globals_with_numbers(function: types.FunctionType) -> list[str]:
    """The globals that a function names and that are numbers, or small containers of numbers."""
    names = function.__globals__
    return sorted(name for name in _names_in(function.__code__) if name in names and _is_number(names[name]))


def _is_number(value: Any) -> bool:
    if isinstance(value, list | tuple | dict) and len(value) <= _MOST_NUMBERS_OF_A_GLOBAL:
        return all(type(part) in _NUMBERS for part in (value.values() if isinstance(value, dict) else value))
    return type(value) in _NUMBERS or isinstance(value, np.generic)


# By `id`: hashing a code object takes longer the longer the code is.
_names: Cache[frozenset[str]] = Cache(_MOST_CODES)


def _names_in(code: types.CodeType) -> frozenset[str]:
    """Every name that the code, or code inside it, may look up outside."""
    names = _names.get(id(code))
    if names is None:
        inside = [part for part in code.co_consts if isinstance(part, types.CodeType)]
        names = frozenset(code.co_names).union(*map(_names_in, inside))
        _names.put(id(code), names, [code])
    return names
