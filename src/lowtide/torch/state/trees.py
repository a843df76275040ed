"""Nested values taken apart into leaves and put together again, fast enough to do it at every step.

The rules are those of torch's own pytrees (anything registered there is known here), with two exceptions: None has no
leaves, and an instance of a dataclass whose attributes are its fields is a container of them. A `Form` is learned once
from a value; taking apart a later value by it is also the check that the structure has not changed.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.utils import _pytree as torch_trees


class FormError(Exception):
    """A value that does not have the form it should have; the message says where and what it has instead."""


class TreeForm:
    """The structure of a nested value. Make one with `form_of`."""

    __slots__ = ("size",)

    size: int

    def flatten(self, value: Any) -> list[Any]:
        """The leaves of `value`, or FormError if it is built differently."""
        leaves: list[Any] = []
        self.take(value, leaves, "")
        return leaves

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        """A value of this form with these leaves; its containers are new."""
        return self.build(iter(leaves))

    def take(self, value: Any, leaves: list[Any], path: str) -> None:
        """Append the leaves of `value`, which sits at `path`."""
        raise NotImplementedError

    def build(self, leaves: Iterator[Any]) -> Any:
        """Put a value together from the leaves that come next."""
        raise NotImplementedError

    def names(self, prefix: str) -> list[str]:
        """One name for each leaf: `prefix` and the way down to it."""
        raise NotImplementedError


class _Leaf(TreeForm):
    __slots__ = ()

    def __init__(self) -> None:
        self.size = 1

    def flatten(self, value: Any) -> list[Any]:
        if not isinstance(value, torch.Tensor):
            self.take(value, [], "")
        return [value]

    def take(self, value: Any, leaves: list[Any], path: str) -> None:
        if value is None or _is_node(value) or _is_dataclass(value):
            raise FormError(f"{_described(value)}{_at(path)} where a single value was")
        leaves.append(value)

    def build(self, leaves: Iterator[Any]) -> Any:
        return next(leaves)

    def names(self, prefix: str) -> list[str]:
        return [prefix]


class Opaque(TreeForm):
    """Whatever a value is, it is one leaf."""

    __slots__ = ()

    def __init__(self) -> None:
        self.size = 1

    def flatten(self, value: Any) -> list[Any]:
        """Take the value itself."""
        return [value]

    def build(self, leaves: Iterator[Any]) -> Any:
        """Hand out the next leaf."""
        return next(leaves)

    def names(self, prefix: str) -> list[str]:
        """Name the value itself."""
        return [prefix]


class _Nothing(TreeForm):
    __slots__ = ()

    def __init__(self) -> None:
        self.size = 0

    def take(self, value: Any, leaves: list[Any], path: str) -> None:
        if value is not None:
            raise FormError(f"{_described(value)}{_at(path)} where None was")

    def build(self, leaves: Iterator[Any]) -> None:
        return None

    def names(self, prefix: str) -> list[str]:
        return []


class _Node(TreeForm):
    """A container: its type, the keys it is read by, and the forms of its entries."""

    __slots__ = ("entries", "keys", "kind", "read", "write")

    def __init__(
        self,
        kind: type,
        keys: list[str],
        entries: list[TreeForm],
        read: Callable[[Any], Iterable[Any]],
        write: Callable[[list[Any]], Any],
    ) -> None:
        self.kind = kind
        self.keys = keys
        self.entries = entries
        self.read = read
        self.write = write
        self.size = sum(entry.size for entry in entries)

    def take(self, value: Any, leaves: list[Any], path: str) -> None:
        if type(value) is not self.kind:
            raise FormError(f"{_described(value)}{_at(path)} where a {self.kind.__name__} was")
        try:
            children = list(self.read(value))
        except FormError as error:
            raise FormError(f"{error}{_at(path)}") from None
        if len(children) != len(self.entries):
            raise FormError(
                f"a {self.kind.__name__} of {len(children)}{_at(path)} where one of {len(self.entries)} was"
            )
        for entry, child, key in zip(self.entries, children, self.keys, strict=True):
            if type(entry) is _Leaf and isinstance(child, torch.Tensor):
                leaves.append(child)
            else:
                entry.take(child, leaves, path + key)

    def build(self, leaves: Iterator[Any]) -> Any:
        return self.write([entry.build(leaves) for entry in self.entries])

    def names(self, prefix: str) -> list[str]:
        pairs = zip(self.entries, self.keys, strict=True)
        return [name for entry, key in pairs for name in entry.names(prefix + key)]


def form_of(value: Any) -> TreeForm:
    """The form that `value` has."""
    if value is None:
        return _Nothing()
    kind = type(value)
    if kind is tuple or kind is list:
        keys = [f"[{k}]" for k in range(len(value))]
        return _Node(kind, keys, [form_of(child) for child in value], _itself, kind)
    if kind is dict or kind is OrderedDict:
        return _form_of_mapping(value, kind)
    if kind is defaultdict:
        return _form_of_mapping(value, lambda items: defaultdict(value.default_factory, items))
    if not _is_node(value):
        return _form_of_dataclass(value) if _is_dataclass(value) else _Leaf()
    children, context, keys = _opened(value)
    unflatten = torch_trees.SUPPORTED_NODES[_registered(value)].unflatten_fn

    def read(other: Any) -> Iterable[Any]:
        children, beside, _ = _opened(other)
        if not _equal(beside, context):
            raise FormError(f"a {kind.__name__} with {beside!r} beside its leaves where there was {context!r}")
        return children

    return _Node(kind, keys, [form_of(child) for child in children], read, lambda c: unflatten(c, context))


def leaves_of(value: Any) -> list[Any]:
    """The leaves alone."""
    return form_of(value).flatten(value)


def _form_of_mapping(value: dict[Any, Any], make: Callable[[Iterable[Any]], Any]) -> TreeForm:
    kind, names = type(value), list(value)

    def read(mapping: dict[Any, Any]) -> Iterable[Any]:
        if mapping.keys() != value_keys:
            raise FormError(f"a {kind.__name__} with the keys {list(mapping)} where there were {names}")
        return (mapping[name] for name in names)

    value_keys = dict.fromkeys(names).keys()
    return _Node(
        kind,
        [f"[{name!r}]" for name in names],
        [form_of(value[name]) for name in names],
        read,
        lambda children: make(zip(names, children, strict=True)),
    )


def _is_dataclass(value: Any) -> bool:
    """Whether it is an instance of a dataclass that keeps nothing but its fields."""
    if not is_dataclass(value) or isinstance(value, type | torch.nn.Module):
        return False
    return getattr(value, "__dict__", {}).keys() <= {field.name for field in fields(value)}


def _form_of_dataclass(value: Any) -> TreeForm:
    kind, names = type(value), [field.name for field in fields(value) if hasattr(value, field.name)]

    def write(children: list[Any]) -> Any:
        made = object.__new__(kind)  # not called: `__post_init__` has done its work on what these fields came from
        for name, child in zip(names, children, strict=True):
            object.__setattr__(made, name, child)
        return made

    return _Node(
        kind,
        [f".{name}" for name in names],
        [form_of(getattr(value, name)) for name in names],
        lambda other: [getattr(other, name) for name in names],
        write,
    )


def _itself(value: Iterable[Any]) -> Iterable[Any]:
    return value


_NODES = torch_trees.SUPPORTED_NODES


def _registered(value: Any) -> type:
    """The type that `value` is registered by: its own, or for named tuples the one they share."""
    return torch_trees._get_node_type(value)  # type: ignore[no-any-return]  # torch does not annotate it


def _is_node(value: Any) -> bool:
    return _registered(value) in _NODES


def _opened(value: Any) -> tuple[list[Any], Any, list[str]]:
    """Children, what is needed beside them, and their names, by torch's registry."""
    node = _NODES[_registered(value)]
    children, context = node.flatten_fn(value)
    if node.flatten_with_keys_fn is not None:
        keys = [str(key) for key, _ in node.flatten_with_keys_fn(value)[0]]
    else:
        keys = [f"[{k}]" for k in range(len(children))]
    return list(children), context, keys


def _equal(one: Any, other: Any) -> bool:
    """Whether two values are the same; False where they cannot be compared."""
    try:
        return bool(one == other)
    except Exception:
        return one is other


def _described(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _at(path: str) -> str:
    return f" at {path}" if path else ""
