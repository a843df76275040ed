"""The blocks of a model, found in its parameters: the entries of its lists, by name.

A model in JAX is a pytree of parameters and a function. Its blocks are found in the pytree: entries that are alike, in
lists, tuples, and under numbered names (`layer_0`, `layer_1`). An entry's name is its path: "layers.3".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import numpy as np

from lowtide.errors import InputError

Path = tuple[Any, ...]
_NUMBERED = re.compile(r"(.*?)_?(\d+)")
_MOST_SHOWN = 8  # names in an error message


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, or the type of one; Python numbers are part of the program."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def found_blocks(params: Any) -> list[str]:
    """The names of a model's blocks."""
    return [dotted(path) for path in _rows((), params)]


def chosen_blocks(params: Any, wanted: Iterable[str]) -> list[str]:
    """The names of the parts of a model that match a name or a pattern, without those inside other such parts.

    Raises:
        InputError: a pattern matches nothing, or is not a str.
    """
    patterns, names = _patterns(wanted), _part_names(params)
    hits: set[str] = set()
    for pattern in patterns:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            shown = ", ".join(names[:_MOST_SHOWN]) + (", ..." if len(names) > _MOST_SHOWN else "")
            raise InputError(f"blocks={pattern!r} matches no part of the parameters; they have {shown or 'no arrays'}")
        hits.update(matching)
    return [name for name in names if name in hits and not any(name.startswith(f"{other}.") for other in hits)]


def _patterns(wanted: Any) -> list[str]:
    """The patterns as a list, also if there is only one."""
    patterns = [wanted] if isinstance(wanted, str) or not isinstance(wanted, Iterable) else list(wanted)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise InputError(f"blocks={wanted!r} is no name; give names or patterns of them, such as 'layers.*'")
    return patterns


def _part_names(params: Any) -> list[str]:
    """The names of all parts of a model that hold an array, outer ones first."""
    leaves = [path for path, leaf in jax.tree_util.tree_leaves_with_path(params) if is_array(leaf)]
    return list(dict.fromkeys(dotted(path[:end]) for path in leaves for end in range(1, len(path) + 1)))


def owners(paths: Sequence[Path], blocks: Iterable[str]) -> list[str | None]:
    """For each leaf, the block that it belongs to, or None."""
    known = set(blocks)
    starts = [[dotted(path[:end]) for end in range(len(path) + 1)] for path in paths]
    return [next((start for start in some if start in known), None) for some in starts]


def dotted(path: Path) -> str:
    """A path as people write it: layers.3."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _rows(path: Path, tree: Any) -> list[Path]:
    """The entries of the outermost rows of a tree, where a row is several entries that are alike.

    An entry that is itself nothing but a row, or that is unlike all others of its row, is searched instead: a list of
    lists, or a stack of blocks between a first and a last layer.
    """
    children = _children(tree)
    alike = _alike(tree, children)
    found: list[Path] = []
    for key, child in children.items():
        inside = _rows((*path, key), child)
        single = key in alike and not (isinstance(child, list | tuple) and inside)
        if single and any(map(is_array, jax.tree.leaves(child))):
            found.append((*path, key))
        else:
            found.extend(inside)
    return found


def _children(tree: Any) -> dict[Any, Any]:
    """The children of a tree, one level down; none if it is a leaf."""
    parts, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    return {path[0]: part for path, part in parts if path}


def _alike(tree: Any, children: Mapping[Any, Any]) -> set[Any]:
    """The keys of entries in rows with at least two entries of one kind, or in a list with a single entry.

    Bare arrays make a row only in lists: in a tuple, or under names, they are the parameters of one layer.
    """
    rows: dict[str, dict[Any, Any]] = {}
    for key, child in children.items():
        row = "" if isinstance(key, jax.tree_util.SequenceKey) else _stem(key)
        if row is not None and (isinstance(tree, list) or _children(child)):
            rows.setdefault(row, {})[key] = child
    return set[Any]().union(*(_alike_in(row, is_list=isinstance(tree, list)) for row in rows.values()))


def _alike_in(row: Mapping[Any, Any], *, is_list: bool) -> set[Any]:
    """The keys of a row's entries if two of them are of one kind; entries of other kinds too, unless they have rows.

    A stack of blocks between two layers of one kind is not itself a block. A single entry makes a row in a list.
    """
    kinds = {key: _kind(child) for key, child in row.items()}
    counts = Counter(kinds.values())
    alone = is_list and len(row) == 1 and all(map(_children, row.values()))
    several = {key for key, kind in kinds.items() if alone or counts[kind] > 1}
    return several | {key for key, child in row.items() if several and not _rows((), child)}


def _stem(key: Any) -> str | None:
    """The common part of numbered names: "layer#" for layer_3; None for names without a number."""
    match = _NUMBERED.fullmatch(dotted((key,)))
    return None if match is None else f"{match[1]}#"


def _kind(tree: Any) -> Any:
    """The kind of an entry: its type, and the names or the number of its children; for an array, its axes."""
    children = _children(tree)
    if children:
        return type(tree), tuple(map(str, children))
    return np.ndarray, np.ndim(tree) if is_array(tree) else None
