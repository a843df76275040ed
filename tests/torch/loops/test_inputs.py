"""What a loop hands to its steps, and what it makes of what they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lowtide.torch as lt
from lowtide import InputError
from lowtide.torch.loops.inputs import Inputs
from lowtide.torch.loops.outputs import Last, Outputs, Sums, outputs_for
from lowtide.torch.state.bits import same_bits

LENGTHS = [1, 2, 63, 64, 65, 128, 129, 200]


def places(inputs: Inputs) -> list[int]:
    return [inputs.place(k) for k in range(inputs.length)]


@pytest.mark.parametrize(
    ("source", "length", "expected"),
    [
        ([1, 2, 3], None, 3),
        ([1, 2, 3], 2, 2),
        (np.zeros((4, 2)), None, 4),
        (torch.zeros(5, 2), None, 5),
        (lambda k: k, 6, 6),
        (lambda k: k, None, None),
        (range(7), np.int64(7), 7),
        ([], None, 0),
    ],
    ids=["list", "first of a list", "numpy", "tensor", "function", "without length", "numpy's number", "empty"],
)
def test_steps_know_their_length(source: Any, length: int | None, expected: int | None) -> None:
    steps = lt.Steps(source, length)
    assert steps.length == expected
    assert repr(steps) == f"Steps(length={expected})"


def test_steps_ask_their_source_each_time() -> None:
    asked: list[int] = []

    def fetch(k: int) -> int:
        asked.append(k)
        return k * k

    steps = lt.Steps(fetch, 5)
    assert [steps[3], steps[3], steps[1]] == [9, 9, 1]
    assert asked == [3, 3, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lt.Steps(5), r"^Steps\(int\): give something that can be indexed, or a function of the index$"),
        (lambda: lt.Steps([1], -1), r"^Steps\(length\)=-1 is too small; give a whole number of at least 0$"),
        (lambda: lt.Steps([1], True), r"^Steps\(length\)=True is a boolean"),
        (lambda: lt.Steps([1], 1.5), r"^Steps\(length\)=1.5 is a float"),  # type: ignore[arg-type]
        (
            lambda: Inputs(None, None, False),
            r"^how many steps. give length=, or xs with tensors or Steps that have a length .the arguments",
        ),
        (lambda: Inputs(lt.Steps(lambda k: k), None, False), "^how many steps"),
        (lambda: Inputs(None, None, False), "or xs with tensors"),
        (lambda: Inputs(None, -2, False), "^length=-2 is too small"),
        (
            lambda: Inputs({"a": torch.zeros(1200), "b": lt.Steps([1, 2])}, 3, False),
            r"^unequal numbers of steps \(xs\['a'\]: 1,200, xs\['b'\]: 2, length: 3\); give .* the same first axis, and stack",  # noqa: E501
        ),
        (
            lambda: Inputs((torch.zeros(2), np.zeros(2)), None, False),
            r"^xs\[1\] is a ndarray; give tensors .*, or wrap what is .* by step in lowtide.torch.Steps$",
        ),
        (
            lambda: Inputs([torch.tensor(1.0)], 3, False),
            r"^xs\[0\] has no axis to take steps along; give a tensor with the steps along its first axis$",
        ),
        (
            lambda: Inputs(lt.Steps([]), None, False).blank(),
            "^Steps of length 0 do not say what a step gets, so the outputs' shapes cannot be known$",
        ),
    ],
)
def test_inputs_that_cannot_be_used_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize("length", [0, *LENGTHS])
@pytest.mark.parametrize("reverse", [False, True])
def test_rows_are_the_tensors_rows(length: int, reverse: bool) -> None:
    xs = torch.arange(2.0 * length).reshape(length, 2)
    inputs = Inputs(xs, None, reverse)
    expected = [row.tolist() for row in (xs.flip(0) if reverse else xs)]
    assert inputs.length == length
    assert places(inputs) == sorted(range(length), reverse=reverse)
    assert [row.tolist() for row in inputs.rows(0, length)] == expected
    assert [row.tolist() for row in inputs.connected([])] == expected


@given(st.integers(1, 200), st.data(), st.booleans())
def test_any_stretch_of_mixed_inputs(length: int, data: st.DataObject, reverse: bool) -> None:
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    inputs = Inputs({"t": torch.arange(length), "s": (lt.Steps(lambda k: {"k": k}), None)}, length, reverse)
    found = [(int(row["t"]), row["s"]) for row in inputs.rows(start, stop)]
    assert found == [(k, ({"k": k}, None)) for k in places(inputs)[start:stop]]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("reverse", [False, True])
def test_steps_alone_cross_chunks_in_order(length: int, reverse: bool) -> None:
    asked: list[int] = []
    inputs = Inputs(lt.Steps(lambda k: asked.append(k) or k), length, reverse)  # type: ignore[func-returns-value]
    assert list(inputs.rows(0, length)) == places(inputs) == asked
    assert list(inputs.connected([])) == places(inputs)


def test_items_are_fetched_when_their_step_comes() -> None:
    asked: list[int] = []
    inputs = Inputs(lt.Steps(lambda k: asked.append(k) or k), 100, False)  # type: ignore[func-returns-value]
    rows = inputs.rows(0, 100)
    assert (next(rows), next(rows)) == (0, 1)
    assert asked == [0, 1]


def test_a_loop_without_inputs_gives_the_empty_structure() -> None:
    assert list(Inputs(None, 70, False).rows(2, 70)) == [None] * 68
    assert list(Inputs((None, {}), 3, True).rows(0, 3)) == [(None, {})] * 3
    assert list(Inputs((), 2, False).connected([])) == [(), ()]


@pytest.mark.parametrize("reverse", [False, True])
def test_only_rows_of_what_is_differentiable_become_leaves(reverse: bool) -> None:
    wanted = torch.arange(70.0, requires_grad=True)
    inputs = Inputs((torch.arange(70), wanted, lt.Steps(range(70))), None, reverse)
    assert inputs.differentiable == [wanted]
    leaves: list[torch.Tensor] = []
    for k, (a, b, c) in enumerate(inputs.rows(0, 70, leaves)):
        assert len(leaves) == k + 1
        assert leaves[-1] is b
        assert (b.is_leaf, b.requires_grad, a.requires_grad) == (True, True, False)
        assert int(a) == int(b) == c == inputs.place(k)
    assert not any(row[1].requires_grad for row in inputs.rows(0, 70))


def test_one_differentiable_tensor_alone_becomes_leaves_too() -> None:
    inputs = Inputs(torch.ones(3, 2, requires_grad=True), None, False)
    leaves: list[torch.Tensor] = []
    rows = list(inputs.rows(0, 3, leaves))
    assert all(row is leaf for row, leaf in zip(rows, leaves, strict=True))
    assert not any(row.requires_grad for row in inputs.rows(0, 3))


def test_a_parameter_is_an_input_like_any_tensor() -> None:
    xs = nn.Parameter(torch.randn(5, 2))
    ys = lt.checkpointed_for_loop(lambda x: x * x, xs, base=2)
    assert same_bits(torch.autograd.grad(ys.sum(), xs)[0], 2 * xs)


def test_connected_rows_keep_their_graph() -> None:
    wanted = torch.arange(4.0, requires_grad=True)
    inputs = Inputs({"x": wanted, "n": torch.arange(4)}, None, True)
    total = torch.stack([row["x"] * row["n"] for row in inputs.connected([wanted])]).sum()
    assert torch.equal(torch.autograd.grad(total, wanted)[0], torch.arange(4.0))


@pytest.mark.parametrize("item", [torch.ones(2, requires_grad=True), {"a": (torch.ones(2, requires_grad=True), 1)}])
def test_an_item_that_needs_a_gradient_is_refused(item: Any) -> None:
    inputs = Inputs(lt.Steps([0] * 1234 + [item]), None, False)
    with pytest.raises(
        InputError,
        match=r"^item 1,234 of Steps needs a gradient, .* give a stacked tensor as xs, or detach the items$",
    ):
        list(inputs.rows(1200, 1235))


def test_blank_is_zeros_of_what_a_step_gets() -> None:
    xs = (torch.ones(0, 2, 3, dtype=torch.float64), {"n": torch.ones(0, dtype=torch.int32), "none": None})
    first, rest = Inputs(xs, None, False).blank()
    assert same_bits(first, torch.zeros(2, 3, dtype=torch.float64))
    assert same_bits(rest["n"], torch.tensor(0, dtype=torch.int32))
    assert rest["none"] is None


@pytest.mark.parametrize(("reduce", "kind"), [(None, Outputs), ("last", Last), ("sum", Sums), ("mean", Sums)], ids=str)
def test_each_reduction_has_its_outputs(reduce: str | None, kind: type[Outputs]) -> None:
    outputs = outputs_for(reduce, 3)
    assert type(outputs) is kind
    assert type(outputs.fresh()) is kind
    assert outputs.fresh().length == 3
    shape = outputs.result_shape(torch.zeros(4, 5))
    assert tuple(shape) == ((3, 4, 5) if reduce is None else (4, 5))
    rows = [torch.full((2,), float(k)) for k in range(3)]
    for k, row in enumerate(rows):
        outputs.put(k, k, outputs.leaves(k, row))
    oracle = {None: torch.stack(rows), "last": rows[2], "sum": sum(rows), "mean": sum(rows) / 3}
    assert torch.equal(outputs.finish(outputs.results()), torch.as_tensor(oracle[reduce]))
    assert outputs.results() == []


def test_sums_begin_with_zero_so_that_minus_zero_is_lost_as_in_a_plain_sum() -> None:
    ys = torch.tensor([-0.0, -0.0])
    total = lt.checkpointed_for_loop(lambda x: x * 1, ys.clone().requires_grad_(), reduce="sum", base=1)
    assert same_bits(total, torch.as_tensor(sum(ys)))


def test_sums_of_booleans_count() -> None:
    ys = torch.tensor([True, False, True])
    for loop in (lt.for_loop, lt.checkpointed_for_loop):
        assert loop(lambda x: x, ys, reduce="sum").tolist() == 2


def test_sums_refuse_what_cannot_be_added_or_divided() -> None:
    with pytest.raises(InputError, match=r'^reduce="sum" needs tensors, the output is \'a\'; return the tensor itself'):
        lt.checkpointed_for_loop(lambda _: "a", torch.ones(3), reduce="sum")
    with pytest.raises(InputError, match=r'^reduce="mean" needs tensors, the output is 1.5; return the tensor itself'):
        lt.checkpointed_for_loop(lambda _: 1.5, torch.ones(3), reduce="mean")
    with pytest.raises(
        InputError, match=r'^reduce="mean" needs outputs that can be divided, this one is torch.int64; use "sum"$'
    ):
        lt.checkpointed_for_loop(lambda x: x, torch.arange(3), reduce="mean")
    assert lt.checkpointed_for_loop(lambda x: x * 1j, torch.ones(4), reduce="mean").item() == 1j


@pytest.mark.parametrize("loop", [lt.for_loop, lt.checkpointed_for_loop])
@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (
            [torch.ones(2), torch.ones(2), torch.ones(3)],
            r"^step 2 returned the output y as \(3,\) torch.float32 on cpu, at .* it was \(2,\) torch.float32 on cpu; ",
        ),
        (
            [{"a": (torch.ones(2), 1)}] * 2 + [{"a": (torch.ones(2).double(), 1)}],
            r"step 2 returned the output y\['a'\]\[0\] as \(2,\) torch.float64",
        ),
        ([{"a": torch.ones(2), "k": 1}] * 2 + [{"a": 1.0, "k": 1}], r"step 2 returned the output y\['a'\] as a float"),
        (
            [{"k": 1}] * 2 + [{"k": torch.ones(2)}],
            r"y\['k'\] as \(2,\) torch.float32 on cpu, at the step before it was no tensor",
        ),
        (
            [torch.ones(2), torch.ones(2), (torch.ones(2),)],
            "step 2 returned an output of another form: a tuple where a single value was; return the same at each step",
        ),
    ],
)
def test_outputs_that_change_are_refused_with_their_step(loop: Any, outputs: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        loop(lambda k: outputs[int(k)], torch.arange(3))


def test_outputs_that_are_no_tensors_may_be_of_any_type() -> None:
    outputs = [1.0, "a", b"b"]
    for loop in (lt.for_loop, lt.checkpointed_for_loop):
        assert loop(lambda k: outputs[int(k)], torch.arange(3)) == outputs


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("reduce", "expected"),
    [(None, [1.0, 2.0, 3.0, 4.0]), ("sum", [5.0] * 4), ("mean", [1.25] * 4), ("last", [0.0, 0.0, 0.0, 5.0])],
    ids=["stack", "sum", "mean", "last"],
)
def test_cotangents_go_to_the_steps_that_made_the_outputs(
    reduce: str | None, expected: list[float], reverse: bool
) -> None:
    xs = torch.ones(4, requires_grad=True)
    weights = torch.arange(1.0, 5.0) if reduce is None else torch.tensor(5.0)
    if reduce == "last" and reverse:
        expected = expected[::-1]
    for base in (1, 2, 4):
        ys = lt.checkpointed_for_loop(lambda x: x * 1, xs, reduce=reduce, reverse=reverse, base=base)
        assert torch.autograd.grad((ys * weights).sum(), xs)[0].tolist() == expected


@pytest.mark.parametrize("reduce", [None, "sum", "mean", "last"])
def test_an_output_that_is_the_carry_gets_its_cotangent_once(reduce: str | None) -> None:
    w = torch.tensor([0.9, 1.1], requires_grad=True)
    xs = torch.ones(7, 2)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.sin(h * w + x)
        return h, h

    gradients = []
    for h, ys in (
        lt.scan(step, torch.ones(2), xs, reduce=reduce),
        lt.checkpointed_scan(step, torch.ones(2), xs, reduce=reduce, base=2),
    ):
        gradients.append(torch.autograd.grad((h * 3).sum() + ys.pow(2).sum(), w)[0])
    assert same_bits(*gradients)


@pytest.mark.parametrize("reduce", [None, "last"])
def test_what_is_no_tensor_is_kept_as_it_is(reduce: str | None) -> None:
    for loop in (lt.for_loop, lt.checkpointed_for_loop):
        ys = loop(lambda k: (int(k), k * 2.0), torch.arange(4), reduce=reduce)
        assert ys[0] == (3 if reduce else [0, 1, 2, 3])
        with torch.no_grad():
            quiet = loop(lambda k: (int(k), k * 2.0), torch.arange(4), reduce=reduce)
        assert quiet[0] == ys[0]
        assert torch.equal(quiet[1], ys[1])
