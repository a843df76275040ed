"""What a lean tape cannot do: it is right all the same and says so, or an error tells why. It is never wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide import BudgetError, CheckpointError, InputError
from tests.torch.calls import Function, drawn_leaf, plainly, same
from tests.torch.lean.calls import note, traced

CHANGED = "has been modified by an inplace operation"
_hidden = SimpleNamespace(scale=2.0)


def _outcome(y: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    return [y, *torch.autograd.grad(y.sum(), leaves)]


# --- something is changed in place before the backward


def _block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The weight is read again for its sigmoid, and saved only by the product."""
    return (x @ w).sin() * torch.sigmoid(w * x).exp()


@pytest.mark.parametrize("call", [0, 1, 2], ids=["traced", "second", "third"])
@pytest.mark.parametrize("which", ["argument", "parameter"])
def test_a_changed_argument_is_the_error_that_autograd_gives(which: str, call: int) -> None:
    for how in (plainly, lt.lean):
        x, w = drawn_leaf(4, 4), drawn_leaf(4, 4, seed=1)
        function = _block if which == "argument" else lambda x, w=w: _block(x, w)
        for number in range(call + 1):
            y = how(function, x, w) if which == "argument" else how(function, x)
            if number < call:
                y.sum().backward()
        with torch.no_grad():
            w.mul_(2)
        with pytest.raises(RuntimeError, match=CHANGED):
            y.sum().backward()


@pytest.mark.parametrize("call", [0, 1])
def test_an_argument_that_autograd_did_not_save(call: int) -> None:
    """Only making a value again reads it. A plain call has saved the value: it would not mind."""
    x, w = drawn_leaf(400), drawn_leaf(400, seed=1)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x + 1
        return y.sin() * y.cos() * w * y.exp()

    for number in range(call + 1):
        y = lt.lean(function, x, w)
        if number < call:
            y.sum().backward()
    expected = torch.autograd.grad(function(x, w).sum(), [x, w])
    with torch.no_grad():
        x.mul_(2)
    try:
        found = torch.autograd.grad(y.sum(), [x, w])
    except CheckpointError as error:
        assert CHANGED in str(error)  # noqa: PT017  (either is right)
    else:
        same(found, expected)


@pytest.mark.parametrize("call", [0, 1])
def test_a_parameter_that_only_a_recipe_reads(call: int) -> None:
    module = nn.LayerNorm(64)
    x = drawn_leaf(32, 64)
    for number in range(call + 1):
        y = lt.lean(lambda x: torch.sigmoid(module(x)) * x, x)
        if number < call:
            y.sum().backward()
    with torch.no_grad():
        module.bias.add_(1)  # no derivative needs it
    with pytest.raises(RuntimeError, match=CHANGED):
        y.sum().backward()


@pytest.mark.parametrize("call", [0, 1])
@pytest.mark.parametrize("what", ["kept", "output"])
def test_a_kept_tensor_is_changed(what: str, call: int) -> None:
    x, w = drawn_leaf(4, 4), drawn_leaf(4, 4, seed=1)

    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x @ w
        return y, y.sin().exp() if what == "kept" else y.square()

    for how in (plainly, lt.lean):
        for _ in range(call + 1):
            y, z = how(function, x, w)
        y.detach().add_(1)
        with pytest.raises(RuntimeError, match=CHANGED):
            z.sum().backward()


def test_bits_are_of_the_moment_when_they_were_saved() -> None:
    x = drawn_leaf(400)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.rand(400) > 0.5
        return x.exp() * mask, mask

    for _ in range(2):
        torch.manual_seed(0)
        y, mask = lt.lean(function, x)
        expected = x.detach().exp() * mask
        mask.logical_not_()
        try:
            found = torch.autograd.grad(y.sum(), x)
        except RuntimeError as error:
            assert CHANGED in str(error)  # noqa: PT017  (either is right)
        else:
            same(found, [expected])


# --- the call goes another way than the traced one


def _other_count(x: torch.Tensor, w: torch.Tensor, kind: str) -> torch.Tensor:
    y = x.sin() * w
    if x.sum() > 0:
        y = y.exp() * w.sigmoid()
    return y.tanh()


def _other_shape(x: torch.Tensor, w: torch.Tensor, kind: str) -> torch.Tensor:
    return (x[x > 0].sin().exp() * w.sum()).tanh().sum() * w


def _other_operation(x: torch.Tensor, w: torch.Tensor, kind: str) -> torch.Tensor:
    y = x.sin() if x.sum() > 0 else x.cos()
    return y.exp() * w * y


def _early_return(x: torch.Tensor, w: torch.Tensor, kind: str) -> torch.Tensor:
    y = (x * w).sin() * w
    if x.sum() > 0:
        return y.exp() * y
    y = y.sigmoid() * w
    return y.exp() * y.tanh()


def _other_order(x: torch.Tensor, w: torch.Tensor, kind: str) -> torch.Tensor:
    if x.sum() > 0:
        return (x.exp().clamp(max=9) * w.sigmoid()).sin() * x
    return (w.sigmoid() * x.exp().clamp(max=9)).sin() * x


WAYS = [_other_count, _other_shape, _other_operation, _early_return, _other_order]


@pytest.mark.parametrize("function", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("first", [1, -1])
def test_it_is_right_and_says_so_once(function: Function, first: int) -> None:
    x, w = drawn_leaf(40).detach().abs(), drawn_leaf(40, seed=1)
    given = [(sign * first * x + 0.1 * k).requires_grad_() for k, sign in enumerate([1, -1, 1, -1, -1])]
    expected = [_outcome(function(one, w, ""), [one, w]) for one in given]
    with warnings.catch_warnings(record=True) as said, lt.record(memory=False) as receipt:
        warnings.simplefilter("always")
        for one, outcome in zip(given, expected, strict=True):
            same(_outcome(lt.lean(function, one, w, f"first {first}"), [one, w]), outcome)
    assert len(said) == 1 if receipt.kept_whole else not said
    assert receipt.kept_whole in ((3, 4) if function is _other_shape else (0, 3))  # all that differ, or none
    if said:
        assert function.__qualname__ in str(said[0].message)
        assert "right" in str(said[0].message)
        assert said[0].filename == __file__
        assert receipt.receipt.kept_whole >= 3


@pytest.mark.filterwarnings("ignore:.* did not save what it saved")
def test_another_operation_with_results_of_the_same_form_is_told_by_its_node() -> None:
    x = drawn_leaf(40)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() if _hidden.scale > 1 else x.cos()
        return y.square() * x

    try:
        for _hidden.scale in (2.0, 2.0, 0.5, 0.5, 2.0):
            same(_outcome(lt.lean(function, x), [x]), _outcome(function(x), [x]))
    finally:
        _hidden.scale = 2.0


@pytest.mark.filterwarnings("ignore:.* did not save what it saved")
def test_a_function_that_goes_another_way_from_now_on_is_traced_again() -> None:
    x = drawn_leaf(40)

    def function(x: torch.Tensor) -> torch.Tensor:
        note()
        y = x.sin() if _hidden.scale > 1 else x.cos()
        return y.square() * x

    traced.clear()
    try:
        with lt.record(memory=False) as receipt:
            for _hidden.scale in (2.0, 2.0, *[0.5] * 6):
                lt.lean(function, x).sum().backward()
        assert traced == [True, False, False, False, False, True, False, False]
        assert receipt.kept_whole == 3
    finally:
        _hidden.scale = 2.0


def test_more_operations_after_those_of_the_trace() -> None:
    """The packs of the trace all fit; there are more of them."""
    x = drawn_leaf(40)

    def function(x: torch.Tensor, turns: list[int]) -> torch.Tensor:
        y = x.sin()
        while turns and turns.pop():
            y = (y.exp() * y).sin()
        return y

    for turns in ([0], [0, 1], [0, 1, 1], [0]):
        expected = _outcome(function(x, list(turns)), [x])
        same(_outcome(lt.lean(function, x, list(turns)), [x]), expected)


def test_a_function_that_goes_another_way_for_each_number() -> None:
    x = drawn_leaf(40)

    def function(x: torch.Tensor, turns: int) -> torch.Tensor:
        for _ in range(turns):
            x = x.sin() * x
        return x

    with warnings.catch_warnings(record=True) as said, lt.record(memory=False) as receipt:
        warnings.simplefilter("always")
        for turns in range(1, 14):
            same(_outcome(lt.lean(function, x, turns), [x]), _outcome(function(x, turns), [x]))
    assert len(said) == 1
    assert "many numbers" in str(said[0].message)
    assert receipt.kept_whole == 13 - 8


def test_an_error_in_the_function_is_the_functions() -> None:
    x = drawn_leaf(4)
    fails = [True]

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.exp() * x
        if fails[0]:
            raise KeyError("mine")
        return y.sin()

    for _ in range(2):
        for number in (True, False):
            fails[0] = number
            if number:
                with pytest.raises(KeyError, match="mine"):
                    lt.lean(function, x)
            else:
                same(_outcome(lt.lean(function, x), [x]), _outcome(function(x), [x]))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_backward_that_fails_may_be_tried_again() -> None:
    x, w = drawn_leaf(40), drawn_leaf(40, seed=1)
    fails = [True]

    def fail(grad: torch.Tensor) -> None:
        if fails[0]:
            raise KeyError("mine")

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x.sin() * w
        y.register_hook(fail)
        return y.exp().tanh() * w

    for _ in range(2):
        y = lt.lean(function, x, w)
        fails[0] = True
        with pytest.raises(KeyError, match="mine"):
            torch.autograd.grad(y.sum(), [x, w], retain_graph=True)
        fails[0] = False
        found = torch.autograd.grad(y.sum(), [x, w], retain_graph=True)
        same(found, torch.autograd.grad(function(x, w).sum(), [x, w]))
        same(torch.autograd.grad(y.sum(), [x, w]), found)


# --- something that nobody can see


def _reads_a_global(x: torch.Tensor) -> torch.Tensor:
    scale: float = _hidden.scale
    return (x.sin() * scale).exp() * x


def _draws_from_numpy(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * np.random.rand()).exp() * x  # noqa: NPY002  (the state is what this is about)


def test_a_number_in_a_global_object_is_no_silent_error() -> None:
    x = drawn_leaf(40)
    same(_outcome(lt.lean(_reads_a_global, x), [x]), _outcome(_reads_a_global(x), [x]))
    _hidden.scale = 3.0
    try:
        y = lt.lean(_reads_a_global, x)
        with pytest.raises(CheckpointError) as caught:
            y.sum().backward()
        for word in ("aten.", "_reads_a_global", "other numbers"):
            assert word in str(caught.value)
        # From now on it is known.
        for _hidden.scale in (3.0, 4.0, 5.0):
            same(_outcome(lt.lean(_reads_a_global, x), [x]), _outcome(_reads_a_global(x), [x]))
    finally:
        _hidden.scale = 2.0


def test_a_sign_of_zero_that_nobody_can_see_is_known_after_one_error() -> None:
    x, errors = drawn_leaf(40), 0

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.atan2(x.sin() * _hidden.scale, -x.exp()) * x

    try:
        for _hidden.scale in (0.0, -0.0, -0.0, 0.0, -0.0):
            expected, y = _outcome(function(x), [x]), lt.lean(function, x)
            try:
                same(_outcome(y, [x]), expected)
            except CheckpointError:
                errors += 1
        assert errors == 1
    finally:
        _hidden.scale = 2.0


def test_numbers_of_numpy_are_no_silent_error() -> None:
    x = drawn_leaf(40)
    errors = 0
    for number in range(6):
        np.random.seed(number)  # noqa: NPY002
        expected = _outcome(_draws_from_numpy(x), [x])
        np.random.seed(number)  # noqa: NPY002
        y = lt.lean(_draws_from_numpy, x)
        try:
            same(_outcome(y, [x]), expected)
        except CheckpointError as error:
            assert "_draws_from_numpy" in str(error)  # noqa: PT017  (either is right)
            errors += 1
    assert errors <= 1


@pytest.mark.parametrize("read", [lambda t: t.tolist(), lambda t: float(t.numpy()), lambda t: t.item(), float, int])
def test_a_number_that_was_read_from_a_tensor(read: Callable[[torch.Tensor], float]) -> None:
    """A plain call repeats nothing; a lean one is as right, or says what it could not see."""
    x = drawn_leaf(40)

    def function(x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return (x.sin() * read(number)).exp() * x

    errors = 0
    for number in range(5):
        given = torch.tensor(number + 1.25)
        try:
            same(_outcome(lt.lean(function, x, given), [x]), _outcome(function(x, given), [x]))
        except CheckpointError:
            errors += 1
    assert errors <= 1


# --- an operation that cannot run again


class _Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(10, 64))
        self.bias = nn.Parameter(torch.randn(64))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.table.index_select(0, index) + self.bias).exp()


@pytest.mark.parametrize("calls", [1, 2])
def test_a_failing_operation_is_named_with_its_block(calls: int) -> None:
    module, index = _Lookup(), torch.arange(10)
    for _ in range(calls):
        y = lt.lean(module, index)
    index.data.fill_(1000)  # autograd does not see it
    with pytest.raises(CheckpointError) as caught:
        y.sum().backward()
    assert "aten.index_select.default" in str(caught.value)
    assert "_Lookup" in str(caught.value)
    assert isinstance(caught.value.__cause__, IndexError | RuntimeError)


@pytest.mark.parametrize("calls", [1, 2])
def test_a_parameter_whose_memory_is_gone(calls: int) -> None:
    module, index = _Lookup(), torch.arange(10)
    for _ in range(calls):
        y = lt.lean(module, index)
    module.bias.untyped_storage().resize_(0)
    with pytest.raises(CheckpointError, match=r"\(64,\).*_Lookup.*freed"):
        y.sum().backward()


# --- what is asked for


@pytest.mark.parametrize("tape", ["half", "0%", "101%", "-5", "12.5", -1, 1.5, True, [1], "", "5 bananas", b"5%"])
def test_tapes_that_are_none(tape: Any) -> None:
    x = drawn_leaf(4)
    with pytest.raises(InputError):
        lt.Lean(nn.Tanh(), tape=tape)
    with pytest.raises(InputError):
        lt.lean(torch.tanh, x, tape=tape)
    lt.lean(torch.tanh, x)
    with pytest.raises(InputError):
        lt.lean(torch.tanh, x, tape=tape)


@pytest.mark.parametrize("call", [0, 1])
def test_a_tape_that_cannot_be_so_small(call: int) -> None:
    x, w = drawn_leaf(64, 64), drawn_leaf(64, 64, seed=1)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.dropout((x @ w).sigmoid() * w, 0.3)
        return (y @ w).exp().clamp(max=3) * y

    for _ in range(call):
        lt.lean(function, x, w)
    with pytest.raises(BudgetError) as caught:
        lt.lean(function, x, w, tape=100)
    assert caught.value.budget == 100
    assert caught.value.least > 100
    assert f"{caught.value.least:,} B" in str(caught.value)
    assert "lt.checkpoint" in str(caught.value)
    outcomes = []
    for way in (partial(lt.lean, function, tape=caught.value.least), function):
        torch.manual_seed(0)
        outcomes.append(_outcome(way(x, w), [x, w]))
    same(*outcomes)


@pytest.mark.parametrize("function", [None, 3, "name", [torch.sin]])
def test_what_is_no_function(function: Any) -> None:
    with pytest.raises(TypeError):
        lt.lean(function, torch.ones(3))
    with pytest.raises(TypeError):
        lt.lean_frontier(function, torch.ones(3))


@pytest.mark.parametrize("module", [None, torch.sin, nn.Linear, lambda x: x])
def test_what_is_no_module(module: Any) -> None:
    with pytest.raises(InputError, match=r"nn\.Module"):
        lt.Lean(module)
