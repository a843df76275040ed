"""Lean tapes of the blocks and language models that people train: the plain call's bits, in fewer bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import lowtide.torch as lt
from tests.torch.blocks import BLOCKS, LANGUAGE_MODELS, Block, LanguageModel, Size, block
from tests.torch.networks import differences

PRECISIONS = ["float32", "autocast"]
# Every block in one of them, and the others with the whole sweeps.
CASES = [
    pytest.param(name, precision, marks=() if (k + j) % 2 else pytest.mark.slow)
    for k, name in enumerate(BLOCKS)
    for j, precision in enumerate(PRECISIONS)
]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _forward(call: Callable[..., Any], made: Block, precision: str) -> list[torch.Tensor]:
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        return _tensors(call(*made.args, **made.kwargs))


def _outcome(call: Callable[..., Any], made: Block, precision: str, seed: int = 3) -> dict[str, Any]:
    """All that must agree after a forward and a backward with a fixed seed."""
    torch.manual_seed(seed)
    outputs = _forward(call, made, precision)
    with torch.random.fork_rng():
        loss = sum((each * torch.randn_like(each)).float().sum() for each in outputs if each.requires_grad)
    assert isinstance(loss, torch.Tensor)
    inputs = [each for each in _tensors((made.args, made.kwargs)) if each.requires_grad]
    parameters = dict(made.module.named_parameters())
    gradients = torch.autograd.grad(loss, [*inputs, *parameters.values()])
    assert all(bool(each.any()) for each in gradients)
    seen: dict[str, Any] = {f"output {k}": each.detach() for k, each in enumerate(outputs)}
    seen["requires grad"] = [each.requires_grad for each in outputs]
    names = [*(f"input {k}" for k in range(len(inputs))), *parameters]
    seen |= {f"gradient of {name}": each for name, each in zip(names, gradients, strict=True)}
    seen["random numbers"] = torch.get_rng_state()
    return seen


def _tape(call: Callable[..., Any], made: Block, precision: str) -> int:
    """Bytes that a forward made and that its graph alone holds until the backward."""
    with lt.measure.peak() as memory:
        graph = [each.grad_fn for each in _forward(call, made, precision)]
        held = memory.now
    del graph
    return held


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_a_block_has_the_bits_of_the_plain_call(name: str, precision: str) -> None:
    made = block(name)
    expected = [_outcome(made.module, made, precision, seed) for seed in (3, 4)]
    lean = lt.Lean(made.module)
    assert list(lean.state_dict()) == list(made.module.state_dict())
    with lt.record() as receipt:
        for seed in (3, 4, 4, 3):  # the first one is traced; hooks alone make the others
            assert differences(_outcome(lean, made, precision, seed), expected[seed - 3]) == []
    assert receipt.kept_whole == 0


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_that_is_evaluated_has_the_bits_of_the_plain_call(name: str) -> None:
    made = block(name)
    lean = lt.Lean(made.module)
    for training in (True, False, True, False):
        expected = _outcome(made.module.train(training), made, "float32")
        assert differences(_outcome(lean.train(training), made, "float32"), expected) == []


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_every_point_of_the_frontier_has_the_bits_of_the_plain_call(name: str, precision: str) -> None:
    made = block(name)
    expected = _outcome(made.module, made, precision)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        points = lt.lean_frontier(made.module, *made.args, **made.kwargs)
    assert len(points) > 1
    tapes = [point.tape for point in points]
    assert tapes == sorted(tapes, reverse=True)
    assert tapes[0] == points[0].plain_tape
    for tape in tapes:
        assert differences(_outcome(lt.Lean(made.module, tape=tape), made, precision), expected) == []


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_a_tape_has_the_bytes_that_its_point_says(name: str, precision: str) -> None:
    made = block(name, Size(width=64, tokens=32))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        points = lt.lean_frontier(made.module, *made.args, **made.kwargs)
    plain = _tape(made.module, made, precision)
    assert points[0].plain_tape == plain
    sizes = [each.untyped_storage().nbytes() for each in _tensors((made.args, made.kwargs))]
    # Arguments are there anyway, but a point counts those that nobody else would hold.
    arguments = {sum(some) for count in range(len(sizes) + 1) for some in combinations(sizes, count)}
    for point in points:
        lean = lt.Lean(made.module, tape=point.tape)
        _forward(lean, made, precision)
        assert point.tape - _tape(lean, made, precision) in arguments


def _training(whole: LanguageModel, steps: int) -> dict[str, Any]:
    """Losses and all parameters after some steps of gradient descent."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(whole.model.parameters(), lr=0.1)
    seen: dict[str, Any] = {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = whole.model(**whole.inputs).loss
        loss.backward()
        optimizer.step()
        seen[f"loss {step}"] = loss.detach()
    seen |= {name: each.detach() for name, each in whole.model.named_parameters()}
    seen["random numbers"] = torch.get_rng_state()
    return seen


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_a_language_model_with_lean_blocks_trains_as_the_plain_one(name: str) -> None:
    plain, lean = (LANGUAGE_MODELS[name]() for _ in range(2))
    for k, each in enumerate(lean.blocks):
        lean.blocks[k] = lt.Lean(each)
    assert list(lean.model.state_dict()) == list(plain.model.state_dict())
    assert differences(_training(lean, 3), _training(plain, 3)) == []


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_the_peak_of_a_language_model_falls_by_what_its_blocks_drop(name: str) -> None:
    size = Size(width=64, tokens=64, dropout=0.0, words=1024)  # the peak is at the loss, where a tape is all there is
    whole = LANGUAGE_MODELS[name](8, size)

    def peak() -> int:
        whole.model.zero_grad(set_to_none=True)
        with lt.measure.peak() as memory:
            whole.model(**whole.inputs).loss.backward()
        return memory.peak

    plain = peak()
    for k, each in enumerate(whole.blocks):
        whole.blocks[k] = lt.Lean(each)
    peak()
    made = block(name, size)
    everything = _tape(made.module, made, "float32")
    _forward(lean := lt.Lean(made.module), made, "float32")
    assert plain - peak() == pytest.approx(8 * (everything - _tape(lean, made, "float32")), rel=0.05)
