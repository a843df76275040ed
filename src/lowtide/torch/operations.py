"""What a torch operation does with what it is given, as far as its schema tells, and where that says too little."""

from __future__ import annotations

from typing import Any


def word_of(func: Any) -> str:
    """The operation's name without what comes before and after: "mul"."""
    name: str = func._schema.name
    return name.split("::")[-1]


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that the operation changes in place: tensors, or lists of them.

    Batch norms change running statistics in training, and some of them without their schema saying so.
    """
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    word = word_of(func)
    silently = "batch_norm" in word and "backward" not in word and bool(given.get("training", True))
    return [
        given[argument.name]
        for argument in func._schema.arguments
        if given.get(argument.name) is not None
        and (
            (argument.alias_info is not None and argument.alias_info.is_write)
            or (silently and argument.name in ("running_mean", "running_var"))
        )
    ]
