"""Torch's own database of operators and modules, each sample run plainly and checkpointed, and compared bit by bit.

What a run gives: its outputs, the gradients of everything that wants one, buffers after the forward and after the
backward, and where the random numbers are at both places. The random numbers are moved between forward and backward,
so that a rerun which draws others shows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from hypothesis import settings
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from lowtide.torch.state.bits import same_bits

Checkpoint = Callable[..., Any]
Outcome = list[Any]

REPEATS = 400  # of a plain run, before it is said to repeat itself


@dataclass
class Tally:
    """How many samples were compared, and the names of those that differ."""

    compared: int = 0
    raised: int = 0  # alike, with and without checkpoint
    not_differentiable: int = 0
    unrepeatable: list[str] = field(default_factory=list)  # the plain run does not repeat itself
    wrong: list[str] = field(default_factory=list)

    def __iadd__(self, other: Tally) -> Tally:
        self.compared += other.compared
        self.raised += other.raised
        self.not_differentiable += other.not_differentiable
        self.unrepeatable += other.unrepeatable
        self.wrong += other.wrong
        return self

    def __str__(self) -> str:
        return (
            f"{self.compared:,} compared, {len(self.wrong)} differ ({self.raised:,} raise alike, "
            f"{self.not_differentiable:,} have no gradient, {len(self.unrepeatable):,} do not repeat plainly)"
        )


def _import_database() -> tuple[list[Any], list[Any]]:
    """The import freezes torch's flags and loads a profile of hypothesis: both are put back."""
    profile = settings.default
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.common_modules import module_db
    settings.register_profile("before", profile)
    settings.load_profile("before")
    torch.backends.__dict__["__allow_nonbracketed_mutation_flag"] = True
    return list(op_db), list(module_db)


_database: list[tuple[list[Any], list[Any]]] = []


def _databases() -> tuple[list[Any], list[Any]]:
    if not _database:
        _database.append(_import_database())
    return _database[0]


def operators(dtype: torch.dtype) -> list[Any]:
    """Every operator that has a gradient in this dtype."""
    return [op for op in _databases()[0] if op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")]


def modules(dtype: torch.dtype) -> list[Any]:
    """Every module that takes this dtype."""
    return [info for info in _databases()[1] if dtype in info.dtypes]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _copied(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _backward(outputs: list[torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor | None]:
    wanted = [y for y in outputs if y.requires_grad]
    made = torch.Generator().manual_seed(7)
    seeds = [torch.rand(y.shape, generator=made, dtype=torch.float64).to(y.dtype) - 0.3 for y in wanted]
    return list(torch.autograd.grad(wanted, leaves, seeds, allow_unused=True))


def _outcome(call: Callable[[], Any], finish: Callable[[Any], Any], parts: Callable[[], Any]) -> Outcome | None:
    """Everything that a run gives, or None where there is no gradient; an exception is an outcome too."""
    torch.manual_seed(11)
    try:
        result = call()
    except Exception as error:
        return [type(error), str(error)]
    leaves, buffers = parts()
    forward = [*_copied(_tensors(result)), *_copied(buffers), torch.get_rng_state()]
    others = [leaf for leaf in tree_leaves(result) if not isinstance(leaf, torch.Tensor)]
    structure = str(tree_flatten(result)[1])
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    outputs = _tensors(finish(result))
    if not wanted or not any(y.requires_grad for y in outputs):
        return None
    torch.manual_seed(12)
    try:
        grads = _backward(outputs, wanted)
    except Exception as error:
        return [type(error), str(error)]
    return [*forward, others, structure, *grads, *_copied(parts()[1]), torch.get_rng_state()]


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.layout != torch.strided or right.layout != torch.strided:
            left, right = left.to_dense(), right.to_dense()
        return same_bits(left, right)
    return bool(left == right)


def _alike(left: Outcome, right: Outcome) -> bool:
    return len(left) == len(right) and all(_same(a, b) for a, b in zip(left, right, strict=True))


def _repeats(plain: Callable[[], Outcome | None], expected: Outcome) -> bool:
    """Some kernels round by where their memory lies: the run is repeated with other memory taken before it."""
    taken = []
    for k in range(REPEATS):
        taken.append(torch.empty(8 * (k % 40 + 1), dtype=torch.uint8))
        again = plain()
        if again is None or not _alike(expected, again):
            return False
    return True


def _compare(name: str, plain: Callable[[], Outcome | None], checkpointed: Callable[[], Outcome | None]) -> Tally:
    expected = plain()
    if expected is None:
        return Tally(not_differentiable=1)
    found = checkpointed()
    raised = found is not None and len(found) == 2 and isinstance(found[0], type)
    if found is not None and _alike(expected, found):
        return Tally(raised=1) if raised else Tally(compared=1)
    if not _repeats(plain, expected):
        return Tally(unrepeatable=[name])
    return Tally(compared=1, wrong=[f"{name}: {found}"[:600] if raised else name])


def _own(tree: Any) -> Any:
    """Copies of what wants no gradient: a function may change it, such as the running mean of a normalisation."""
    return tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) and not leaf.requires_grad else leaf, tree
    )


def _made_inside(tree: Any) -> Any:
    """The same values, made by an operation: the function then saves tensors of its own."""
    return tree_map(lambda leaf: leaf * 1 if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf, tree)


def as_it_is(op: Any) -> Callable[..., Any]:
    function: Callable[..., Any] = op.op
    return function


def of_intermediates(op: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: op.op(*_made_inside(args), **_made_inside(kwargs))


def in_place(op: Any) -> Callable[..., Any] | None:
    change = op.get_inplace()
    return None if change is None else lambda x, *args, **kwargs: change(x.clone(), *args, **kwargs)


def check_operator(
    checkpoint: Checkpoint, op: Any, dtype: torch.dtype, first: int | None = None, form: Any = as_it_is
) -> Tally:
    """All samples of an operator, or the first of them."""
    function = form(op)
    if function is None:
        return Tally()
    torch.manual_seed(3)
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=True))
    tally = Tally()
    for k, sample in enumerate(samples[:first]):

        def run(call: Callable[..., Any], sample: Any = sample) -> Outcome | None:
            args, kwargs = _own((sample.input, *sample.args)), _own(sample.kwargs)
            tensors = _tensors((args, kwargs))
            others = [tensor for tensor in tensors if not tensor.requires_grad]
            return _outcome(lambda: call(*args, **kwargs), sample.output_process_fn_grad, lambda: (tensors, others))

        tally += _compare(
            f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''}[{k}]",
            partial(run, function),
            partial(run, partial(checkpoint, function)),
        )
    return tally


def _module_cases(info: Any, dtype: torch.dtype) -> Iterator[tuple[str, bool, Any]]:
    for training in (True, False) if info.train_and_eval_differ else (True,):
        torch.manual_seed(3)
        given = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
        for k, case in enumerate(given):
            if case.forward_input is not None:
                yield f"{info.name}[{k}{'' if training else ', eval'}]", training, case


def check_module(checkpoint: Checkpoint, info: Any, dtype: torch.dtype, first: int | None = None) -> Tally:
    """All cases of a module, or the first of them, trained and, where it differs, evaluated."""
    tally = Tally()
    for name, training, case in list(_module_cases(info, dtype))[:first]:
        made, given = case.constructor_input, case.forward_input

        def run(checkpointed: bool, made: Any = made, given: Any = given, training: bool = training) -> Outcome | None:
            torch.manual_seed(5)
            module: nn.Module = info.module_cls(*made.args, **made.kwargs).to(dtype).train(training)

            def parts() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
                inputs = _tensors((given.args, given.kwargs))
                return [*inputs, *module.parameters()], list(module.buffers())

            call: Callable[..., Any] = partial(checkpoint, module) if checkpointed else module
            return _outcome(lambda: call(*given.args, **given.kwargs), lambda result: result, parts)

        tally += _compare(name, partial(run, False), partial(run, True))
    return tally
