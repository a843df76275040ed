"""Recognises the framework of values without importing any: by their types, and by what functions refer to."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol

from lowtide.errors import InputError
from lowtide.plan import Plan

FRAMEWORKS = ("torch", "jax")
_OF_PACKAGE = {"torch": "torch", "jax": "jax", "jaxlib": "jax", "equinox": "jax"}


class FrontEnd(Protocol):
    """What planning a target needs from one of Lowtide's front ends."""

    Steps: Any  # only in torch's

    def plan_scan(self, *args: Any, **options: Any) -> Plan:
        """The plan of a step with a carry."""

    def plan_for_loop(self, *args: Any, **options: Any) -> Plan:
        """The plan of a step that keeps its state to itself."""

    def plan_sequential(self, *args: Any, **options: Any) -> Plan:
        """The plan of layers."""


def front_end(values: Any, framework: str | None, what: str) -> tuple[str, FrontEnd]:
    """The name of the framework that is asked for, or else that of the values, and Lowtide's front end for it.

    Raises:
        InputError: the values belong to none or to both, or the framework is unknown or not installed.
    """
    name = framework if framework is not None else _recognised(values, what)
    if name not in FRAMEWORKS:
        raise InputError(f"--framework {name}: there is {' and '.join(FRAMEWORKS)}")
    if importlib.util.find_spec(name) is None:
        raise InputError(f"{name} is not installed here; install lowtide[{name}]")
    front: Any = importlib.import_module(f"lowtide.{name}")
    return name, front


def _recognised(values: Any, what: str) -> str:
    # If the values themselves do not decide it, the frameworks that importing them has loaded do.
    found = set(_found(values, set())) or {name for name in FRAMEWORKS if name in sys.modules}
    if len(found) != 1:
        said = "both torch and jax" if found else "neither torch nor jax"
        raise InputError(f"{what} uses {said}, as far as can be seen; say which with --framework torch or jax")
    return found.pop()


def _found(value: Any, seen: set[int]) -> Iterator[str]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, ModuleType):
        yield from _of_name(value.__name__)
        return
    for base in type(value).__mro__:
        yield from _of_name(base.__module__)
    for part in _parts(value):
        yield from _found(part, seen)


def _of_name(name: str) -> Iterator[str]:
    package, _, rest = name.partition(".")
    package = rest.partition(".")[0] if package == "lowtide" else package
    if package in _OF_PACKAGE:
        yield _OF_PACKAGE[package]


def _parts(value: Any) -> Iterator[Any]:
    """The values that a value holds, or that a function refers to."""
    if isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, FunctionType):
        names = set(_names(value.__code__))
        yield from (held for name, held in value.__globals__.items() if name in names)
        yield from (cell.cell_contents for cell in value.__closure__ or () if cell != CellType())  # without empty cells
    elif hasattr(value, "__dict__"):
        yield from vars(value).values()


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
