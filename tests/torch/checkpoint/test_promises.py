"""What torch's own checkpoint promises, point by point: Lowtide's keeps it."""

from __future__ import annotations

import gc
import inspect
import math
import sys
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide.torch as lt
from lowtide import CheckpointError
from tests.torch.calls import Function, drawn_leaf, same
from tests.torch.checkpoint.calls import Log, both

# 1. The same words


def test_1_takes_every_word_that_torch_takes_with_its_default() -> None:
    theirs = inspect.signature(torch_checkpoint).parameters
    ours = inspect.signature(lt.checkpoint).parameters
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind, name
        if name != "context_fn":
            assert ours[name].default == parameter.default, name
    assert list(ours)[:2] == ["function", "args"]


@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_1_use_reentrant_is_accepted_and_nobody_is_warned(use_reentrant: bool | None) -> None:
    x = drawn_leaf(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = lt.checkpoint(lambda x, *, scale: x.sin().exp() * scale, x, use_reentrant=use_reentrant, scale=2.0)
        same(torch.autograd.grad(y.sum(), x), torch.autograd.grad((x.sin().exp() * 2.0).sum(), x))


def test_1_reentrant_behaves_as_non_reentrant() -> None:
    """torch's reentrant one gives no gradient where no argument wants one, and refuses autograd.grad."""
    w = drawn_leaf(3)
    y = lt.checkpoint(lambda x: (x * w).sin(), torch.ones(3), use_reentrant=True)
    same(torch.autograd.grad(y.sum(), w), torch.autograd.grad((torch.ones(3) * w).sin().sum(), w))


@pytest.mark.parametrize("preserve", [True, False])
def test_1_preserve_rng_state_is_not_handed_on(preserve: bool) -> None:
    x = drawn_leaf(3)
    lt.checkpoint(lambda x: x.sin(), x, preserve_rng_state=preserve).sum().backward()
    same([x.grad], [x.detach().cos()])


def test_1_without_preserve_rng_state_the_numbers_are_left_alone() -> None:
    """The rerun draws others then, as torch's does, and the generator moves on."""
    x, w = drawn_leaf(400), drawn_leaf(400, seed=1)
    y = lt.checkpoint(lambda x: nn.functional.dropout(x * w, 0.5).sin(), x, preserve_rng_state=False)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    try:
        y.sum().backward()
    except CheckpointError:
        return
    assert not torch.equal(torch.get_rng_state(), before)


def test_1_the_arguments_words_may_be_any_others() -> None:
    x = drawn_leaf(3)
    y = lt.checkpoint(lambda x, dim, out=None: (x * dim).sin(), x, dim=2, out=None)
    same([y], [(x * 2).sin()])


# 2. Any inputs and outputs, on the original graph


def test_2_outputs_are_the_objects_that_the_function_returned() -> None:
    x = drawn_leaf(3)
    kept: dict[str, Any] = {}

    def function(x: torch.Tensor, note: object) -> Any:
        y = x.sin()
        kept["out"] = {"y": y, "list": [y.exp(), None, "text", 3], "x": x, "note": note, "cut": y.detach()}
        return kept["out"]

    note = object()
    out = lt.checkpoint(function, x, note)
    assert out is kept["out"]
    assert out["x"] is x
    assert out["note"] is note
    assert out["y"].requires_grad
    assert not out["cut"].requires_grad
    assert type(out["y"].grad_fn).__name__ == "SinBackward0"
    y = x.sin()
    found = torch.autograd.grad(out["list"][0].sum() + out["y"].sum(), x)
    same(found, torch.autograd.grad(y.exp().sum() + y.sum(), x))


@pytest.mark.parametrize("result", [None, 3, "text", (), [], {}, object], ids=repr)
def test_2_a_function_may_return_anything(result: Any) -> None:
    x = drawn_leaf(3)
    assert lt.checkpoint(lambda x: (x.sin().exp(), result)[1], x) is result


def test_2_a_function_may_return_its_own_input_or_nothing_new() -> None:
    x = drawn_leaf(3)
    assert lt.checkpoint(lambda x: x, x) is x
    y = lt.checkpoint(lambda x: (x, x.sin().sin()), x)[0]
    assert y is x
    view = lt.checkpoint(lambda x: x.view(1, 3), x)
    same(torch.autograd.grad(view.sum(), x), [torch.ones(3)])


def test_2_inputs_need_not_require_grad() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.ones(5, 3)
    both(lambda checkpoint: torch.autograd.grad(checkpoint(net, x).square().sum(), list(net.parameters())))


def test_2_outputs_that_are_not_used_and_graphs_without_leaves() -> None:
    x = drawn_leaf(3)
    a, _ = lt.checkpoint(lambda x: (x.sin().exp(), x.cos().exp()), x)
    same(torch.autograd.grad(a.sum(), x), torch.autograd.grad(x.sin().exp().sum(), x))
    assert not lt.checkpoint(lambda x: x.sin(), torch.ones(3)).requires_grad


def test_2_hooks_fire_once_with_the_plain_values() -> None:
    def run(checkpoint: Function) -> list[Any]:
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        leaf = drawn_leaf(5, 3)
        x = leaf * 2
        seen: list[Any] = []

        def note(module: nn.Module, *grads: Any) -> None:
            seen.extend(grad.clone() for row in grads for grad in row)

        x.register_hook(lambda g: seen.append(g.clone()))
        leaf.register_hook(lambda g: seen.append(g.clone()))
        for parameter in net.parameters():
            parameter.register_hook(lambda g: seen.append(g.clone()))
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        for module in net.modules():
            module.register_full_backward_pre_hook(note)
            module.register_full_backward_hook(note)
        y = checkpoint(net, x)
        y.register_hook(lambda g: seen.append(g.clone()))
        y.square().sum().backward()
        return [*seen, leaf.grad, *(p.grad for p in net.parameters())]

    both(run)


def test_2_forward_hooks_run_in_the_first_run_and_in_the_rerun() -> None:
    """A forward hook may change the result, so it belongs to the function."""
    net = nn.Linear(3, 3)
    net.register_forward_hook(lambda m, i, o: o.sin())
    net.register_forward_pre_hook(lambda m, i: i[0] * 2)
    x = drawn_leaf(2, 3)
    both(lambda checkpoint: torch.autograd.grad(checkpoint(net, x).exp().sum(), [x, *net.parameters()]))


def test_2_a_weight_shared_by_two_checkpoints_is_bit_equal() -> None:
    w, x, u = drawn_leaf(4, 4), drawn_leaf(3, 4, seed=1), drawn_leaf(4, seed=2)

    def run(checkpoint: Function) -> Any:
        h = x
        for _ in range(3):
            h = checkpoint(lambda h: torch.tanh(torch.tanh(h @ w) @ w.t() + u), h)
        h = h + checkpoint(lambda h: (h @ w).sigmoid(), h)
        return torch.autograd.grad(h.square().sum() + w.square().sum(), [w, x, u])

    both(run)


def test_2_gradients_accumulate_where_the_plain_ones_do() -> None:
    w, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    y = lt.checkpoint(lambda x: (x * w).sin() + (other * 2).exp().detach(), torch.ones(3))
    y.sum().backward()
    assert other.grad is None
    y = lt.checkpoint(lambda x: (x * w).sin(), torch.ones(3))
    y.sum().backward()
    assert w.grad is not None
    same([w.grad], [torch.ones(3).cos() + torch.ones(3).cos()])


def test_2_backward_to_chosen_inputs_only() -> None:
    a, b = nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(3))
    y = lt.checkpoint(lambda x: ((x * a).sin() * b).exp(), torch.ones(3))
    y.sum().backward(inputs=[b])
    assert a.grad is None
    same([b.grad], torch.autograd.grad(((torch.ones(3) * a).sin() * b).exp().sum(), b))


def test_2_subclasses_and_sparse_and_integer_arguments() -> None:
    table, rows = nn.Parameter(torch.rand(5, 3)), torch.tensor([1, 4, 1])

    def run(checkpoint: Function) -> Any:
        y = checkpoint(
            lambda rows, *, table: nn.functional.embedding(rows, table, sparse=True).sin(), rows, table=table
        )
        (grad,) = torch.autograd.grad(y.sum(), table)
        return [grad.to_dense()]

    both(run)


# 3. Arguments are version-checked and go through outer hooks


def test_3_an_argument_changed_in_place_is_an_error() -> None:
    x = drawn_leaf(3) * 1
    y = lt.checkpoint(lambda x: x.sin().exp(), x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match=r"modified|changed"):
        y.sum().backward()


def test_3_arguments_go_through_the_outer_hooks() -> None:
    leaf = drawn_leaf(3)
    x = leaf * 1
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = lt.checkpoint(lambda x: x.sin().exp().sin(), x)
    assert any(tensor.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for tensor in packed)
    assert len(packed) <= 2
    same(torch.autograd.grad(y.sum(), leaf), torch.autograd.grad((leaf * 1).sin().exp().sin().sum(), leaf))


def test_3_save_on_cpu_outside_and_inside() -> None:
    x = drawn_leaf(3)

    def function(x: torch.Tensor) -> torch.Tensor:
        with save_on_cpu():
            return (x * 1).sin().exp()

    def run(checkpoint: Function) -> Any:
        with save_on_cpu():
            y = checkpoint(function, x * 1)
        return torch.autograd.grad(y.sum(), x)

    both(run)


def test_3_an_outer_checkpoint_frees_the_arguments_of_an_inner_one() -> None:
    x = drawn_leaf(64)
    made = Log()

    def outer(x: torch.Tensor) -> Any:
        y = x.exp()
        made.append(StorageWeakRef(y.untyped_storage()))
        return lt.checkpoint(lambda y: y.sin().cos(), y)

    out = lt.checkpoint(outer, x)
    assert made.items()[0].expired()
    same(torch.autograd.grad(out.sum(), x), torch.autograd.grad(x.exp().sin().cos().sum(), x))


# 4. The rerun's surroundings


def test_4_the_rerun_draws_the_forwards_numbers_and_leaves_none_drawn() -> None:
    x = drawn_leaf(100)

    def run(checkpoint: Function) -> Any:
        torch.rand(3)
        y = checkpoint(lambda x: nn.functional.dropout(x.sin(), 0.4).exp() * torch.rand(100), x)
        torch.rand(5)
        before = torch.get_rng_state()
        grads = torch.autograd.grad(y.sum(), x)
        assert torch.equal(torch.get_rng_state(), before)
        return [y, *grads, before]

    both(run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_4_autocast_is_as_it_was(dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x = drawn_leaf(4, 8)

    def run(checkpoint: Function) -> Any:
        with torch.autocast("cpu", dtype=dtype):
            y = checkpoint(net, x)
        assert y.dtype == dtype
        return [y, *torch.autograd.grad(y.float().square().sum(), [x, *net.parameters()])]

    both(run)


def test_4_autocast_inside_and_backward_under_another_autocast() -> None:
    w, x = drawn_leaf(8, 8), drawn_leaf(4, 8, seed=1)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x @ w
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = (y.sin() @ w).exp()
        return y.float() @ w

    def run(checkpoint: Function) -> Any:
        y = checkpoint(function, x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.autograd.grad(y.sin().sum(), [x, w])

    both(run)


def test_4_the_default_device_is_as_it_was() -> None:
    x = drawn_leaf(3)
    y = lt.checkpoint(lambda x: (x * (torch.ones(3) * 2)).sin(), x)
    with torch.device("meta"):
        (grad,) = torch.autograd.grad(y, x, torch.ones(3, device="cpu"))
    same([grad], torch.autograd.grad((x * (torch.ones(3) * 2)).sin().sum(), x))


def test_4_a_default_device_of_the_forward_is_set_in_the_rerun() -> None:
    devices = Log()
    x = drawn_leaf(3)

    def function(x: torch.Tensor) -> torch.Tensor:
        devices.append(torch.empty(1).device)
        return x.sin().exp()

    with torch.device("meta"):
        y = lt.checkpoint(function, x)
    torch.autograd.grad(y.sum(), x)
    assert devices.items() == [torch.device("meta")] * 2
    assert torch.empty(1).device == torch.device("cpu")


# 5. Lazy, one rerun for each backward, freed on unpacking


class _Counted:
    def __init__(self, function: Function) -> None:
        self._log = Log()
        self._function = function

    @property
    def runs(self) -> int:
        return len(self._log.items())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._log.append(None)
        return self._function(*args, **kwargs)


def test_5_one_rerun_and_only_when_needed() -> None:
    x = drawn_leaf(3)
    function = _Counted(lambda x: x.sin().exp().sin())
    y = lt.checkpoint(function, x)
    assert function.runs == 1
    torch.autograd.grad(x.sin().sum(), x)
    assert function.runs == 1
    y.sum().backward()
    assert function.runs == 2


def test_5_nested_calls_are_rerun_once_each_from_the_outside_in() -> None:
    """In its first run, in the rerun of every call around it, and in its own."""
    x = drawn_leaf(3)
    inner = _Counted(lambda x: x.sin().exp().sin())
    middle = _Counted(lambda x: lt.checkpoint(inner, x.cos()))
    outer = _Counted(lambda x: lt.checkpoint(middle, x.cos()))
    y = lt.checkpoint(outer, x)
    for runs in (2, 3):
        y.sum().backward(retain_graph=True)  # asks the innermost call first, whose arguments the others have to make
        assert (outer.runs, middle.runs, inner.runs) == (runs, runs, runs)


def test_5_what_saves_nothing_needs_no_rerun() -> None:
    x = drawn_leaf(3)
    function = _Counted(lambda x: x + 1 + x)
    lt.checkpoint(function, x).sum().backward()
    assert function.runs == 1


def test_5_a_second_backward_runs_again_and_frees_again() -> None:
    x = drawn_leaf(64)
    made = Log()

    def body(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        made.append(StorageWeakRef(y.untyped_storage()))
        return y.sin().cos().exp()

    function = _Counted(body)
    y = lt.checkpoint(function, x)
    assert made.items()[0].expired()
    expected = torch.autograd.grad(x.exp().sin().cos().exp().sum(), x)
    for k in range(3):
        same(torch.autograd.grad(y.sum(), x, retain_graph=True), expected)
        assert function.runs == k + 2
        assert all(reference.expired() for reference in made.items())
    same(torch.autograd.grad(y.sum(), x), expected)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), x)


def test_5_two_outputs_taken_back_one_after_the_other() -> None:
    x = drawn_leaf(3)
    function = _Counted(lambda x: (x.sin().exp(), (x * x).cos().exp()))
    a, b = lt.checkpoint(function, x)
    first = torch.autograd.grad(a.sum(), x, retain_graph=True)
    second = torch.autograd.grad(b.sum(), x)
    same(first, torch.autograd.grad(x.sin().exp().sum(), x))
    same(second, torch.autograd.grad((x * x).cos().exp().sum(), x))
    assert function.runs <= 3


def test_5_saved_tensors_go_one_by_one_as_the_backward_passes() -> None:
    """At the end of the function's backward nothing of the rerun is left, before the rest of the backward runs."""
    leaf = drawn_leaf(64)
    made = Log()
    left: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = x.sin()
            made.append(StorageWeakRef(x.untyped_storage()))
        return x

    x = leaf * 2
    x.register_hook(lambda _: left.append(sum(not reference.expired() for reference in made.items())))
    lt.checkpoint(function, x).sum().backward()
    assert left == [0]


# 6. Early stop


class _Operations(TorchDispatchMode):
    """Names of the operations that run, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("early_stop", [True, False])
def test_6_the_rerun_ends_with_the_last_tensor_that_is_needed(early_stop: bool) -> None:
    x, reached = drawn_leaf(3), Log()

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin().exp()
        math.sqrt(2)  # any call will do
        reached.append("end")
        return y.add(1)

    y = lt.checkpoint(function, x, early_stop=early_stop)
    with _Operations() as operations:
        found = torch.autograd.grad(y.sum(), x)
    same(found, torch.autograd.grad((x.sin().exp() + 1).sum(), x))
    assert operations.names.count("sin") == operations.names.count("exp") == 1
    assert operations.names.count("add") == (0 if early_stop else 1)
    assert reached.items() == ["end"] * (1 if early_stop else 2)


def test_6_a_profile_function_is_left_as_it_was() -> None:
    x = drawn_leaf(3)
    lt.checkpoint(torch.sin, x).sum().backward()
    assert sys.getprofile() is None
    seen: list[str] = []
    sys.setprofile(lambda frame, event, argument: seen.append(event))
    try:
        lt.checkpoint(lambda x: x.sin().exp(), x).sum().backward()
        own = sys.getprofile()
    finally:
        sys.setprofile(None)
    assert own is not None
    assert seen


def test_6_a_finalizer_after_the_last_tensor_runs_undisturbed() -> None:
    x, finalized = drawn_leaf(3), Log()

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        weakref.finalize(y, finalized.append, "gone")
        y = y.exp()
        y = y + 1
        return y * 2

    y = lt.checkpoint(function, x)
    y.sum().backward()
    del y
    assert finalized.items() == ["gone", "gone"]


def test_6_early_stop_passes_through_try_and_finally() -> None:
    """The function may catch what it likes, and its contexts are left."""
    x, order = drawn_leaf(3), Log()

    def function(x: torch.Tensor) -> torch.Tensor:
        try:
            y = x.sin().exp()
            order.append("tried")
        except Exception:
            order.append("caught")
            raise
        finally:
            order.append("left")
        return y

    y = lt.checkpoint(function, x)
    y.sum().backward()
    assert order.items()[:2] == ["tried", "left"]
    assert order.items().count("left") == 2
    same([x.grad], torch.autograd.grad(x.sin().exp().sum(), x))


# 7. Reruns that save something else


def _unstable(kinds: list[Function], **options: Any) -> None:
    x, runs = drawn_leaf(3), iter(kinds)
    y = lt.checkpoint(lambda x: next(runs)(x), x, **options)
    with pytest.raises(CheckpointError) as caught:
        y.sum().backward()
    assert isinstance(caught.value, RuntimeError)


def test_7_fewer_saved_tensors_are_an_error() -> None:
    _unstable([lambda x: x.sin().exp().sin(), lambda x: x.sin()])


def test_7_no_saved_tensors_are_an_error() -> None:
    _unstable([lambda x: x.sin().exp().sin(), lambda x: x + 1])


def test_7_more_saved_tensors_are_an_error_when_the_rerun_goes_to_its_end() -> None:
    _unstable([lambda x: x.sin(), lambda x: x.sin().sin().sin()], early_stop=False)


def test_7_other_shapes_and_dtypes_are_errors() -> None:
    _unstable([lambda x: (x * 1).sin(), lambda x: (x[:2] * 1).sin()])
    _unstable([lambda x: (x * 1).sin(), lambda x: x.double().sin()])


# 8. Nesting, backward inside, higher orders


def test_8_nesting_in_the_form_of_a_tree() -> None:
    w, x = drawn_leaf(4, 4), drawn_leaf(3, 4, seed=1)

    def run(checkpoint: Function) -> Any:
        def block(x: torch.Tensor, depth: int) -> Any:
            if depth == 0:
                return nn.functional.dropout(torch.tanh(x @ w), 0.2)
            x = checkpoint(block, x, depth - 1)
            return checkpoint(block, x, depth=depth - 1) * torch.sigmoid(x)

        y = checkpoint(block, x, 4)
        return [y, *torch.autograd.grad(y.square().sum(), [x, w])]

    both(run)


def test_8_backward_inside_the_function() -> None:
    x = drawn_leaf(3)

    def energy(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x.exp()).sum()

    def function(x: torch.Tensor) -> torch.Tensor:
        (force,) = torch.autograd.grad(energy(x), x, create_graph=True)
        return (force * x).cos()

    both(lambda checkpoint: torch.autograd.grad(checkpoint(function, x).sum(), x))


def test_8_backward_inside_through_an_inner_checkpoint() -> None:
    x = drawn_leaf(3)

    def run(checkpoint: Function) -> Any:
        def function(x: torch.Tensor) -> torch.Tensor:
            y = checkpoint(lambda x: x.sin().exp() * x, x)
            (force,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return (force * x).cos()

        return torch.autograd.grad(checkpoint(function, x).sum(), x)

    both(run)


def test_8_backward_inside_on_a_graph_of_its_own() -> None:
    w = drawn_leaf(3)

    def function(x: torch.Tensor) -> torch.Tensor:
        inner = x.detach().requires_grad_()
        with torch.enable_grad():
            (step,) = torch.autograd.grad(inner.sin().exp().sum(), inner)
        return (x * w - step).sin().exp()

    both(lambda checkpoint: torch.autograd.grad(checkpoint(function, torch.ones(3)).sum(), w))


def test_8_second_and_third_derivatives() -> None:
    x = drawn_leaf(4).double().detach().requires_grad_()

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x.exp()).tanh() * x.cos()

    def run(checkpoint: Function) -> Any:
        y, found = checkpoint(function, x).sum(), []
        for _ in range(3):
            (y,) = torch.autograd.grad(y, x, create_graph=True)
            found.append(y)
            y = y.square().sum()
        return found

    both(run)


def test_8_gradcheck_and_gradgradcheck() -> None:
    x, w = drawn_leaf(3).double().detach().requires_grad_(), drawn_leaf(3, seed=1).double().detach().requires_grad_()

    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        return lt.checkpoint(lambda x, *, w: (x * w).sin() * x.exp(), x, w=w)

    assert torch.autograd.gradcheck(function, (x, w))
    assert torch.autograd.gradgradcheck(function, (x, w))

    def gradient(x: torch.Tensor, w: torch.Tensor) -> Any:
        return torch.autograd.grad(function(x, w).sum(), (x, w), create_graph=True)

    assert torch.autograd.gradgradcheck(gradient, (x, w))  # the third


def test_8_a_checkpointed_gradient_is_differentiable_through_other_checkpoints() -> None:
    x, w = drawn_leaf(4), drawn_leaf(4, seed=1)

    def run(checkpoint: Function) -> Any:
        def step(x: torch.Tensor) -> torch.Tensor:
            return (x * w).sin().exp()

        y = checkpoint(lambda x: checkpoint(step, checkpoint(step, x)) * x, x)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, w])

    both(run)


# 9. No reference cycles


def _dies_without_gc(run: Callable[[Log], Any]) -> None:
    gc.collect()
    gc.disable()
    try:
        made = Log()
        run(made)
        assert made.items()
        assert all(reference.expired() for reference in made.items())
    finally:
        gc.enable()


def _keeping(made: Log, x: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    made.append(StorageWeakRef(y.untyped_storage()))
    return y.sin() * y


def test_9_a_graph_that_is_let_go_dies_without_the_garbage_collector() -> None:
    def run(made: Log) -> None:
        x = torch.rand(64) * drawn_leaf(64)
        made.append(StorageWeakRef(x.untyped_storage()))
        y = lt.checkpoint(_keeping, made, x)
        del x
        assert not made.items()[0].expired()
        del y

    _dies_without_gc(run)


def test_9_also_after_a_backward_with_retain_graph() -> None:
    def run(made: Log) -> None:
        x = torch.rand(64) * drawn_leaf(64)
        made.append(StorageWeakRef(x.untyped_storage()))
        y = lt.checkpoint(_keeping, made, x)
        del x
        y.sum().backward(retain_graph=True)
        y.sum().backward(retain_graph=True)
        del y

    _dies_without_gc(run)


def test_9_also_after_an_error_in_the_rerun() -> None:
    def run(made: Log) -> None:
        calls = iter([False, True])

        def function(x: torch.Tensor) -> torch.Tensor:
            if next(calls):
                raise KeyError("rerun")
            return _keeping(made, x)

        x = torch.rand(64) * drawn_leaf(64)
        made.append(StorageWeakRef(x.untyped_storage()))
        y = lt.checkpoint(function, x)
        del x
        with suppress(KeyError):
            y.sum().backward()
        del y, function

    _dies_without_gc(run)


def test_9_also_for_residual_sums_in_and_out_of_place() -> None:
    def added(made: Log) -> None:
        x = torch.rand(64) * drawn_leaf(64)
        for _ in range(3):
            made.append(StorageWeakRef(x.untyped_storage()))
            x = x + lt.checkpoint(_keeping, made, x)
        x.sum().backward()

    def added_in_place(made: Log) -> None:
        x = torch.rand(64) * drawn_leaf(64)
        made.append(StorageWeakRef(x.untyped_storage()))
        x += lt.checkpoint(_keeping, made, x)

    _dies_without_gc(added)
    _dies_without_gc(added_in_place)


def test_9_also_for_nested_ones_and_outputs_kept_in_the_function() -> None:
    def run(made: Log) -> None:
        x = torch.rand(64) * drawn_leaf(64)
        made.append(StorageWeakRef(x.untyped_storage()))
        y = lt.checkpoint(lambda x: lt.checkpoint(_keeping, made, lt.checkpoint(_keeping, made, x)), x)
        del x
        y.sum().backward()
        del y

    _dies_without_gc(run)


def test_9_also_where_the_backward_asks_for_a_part_only() -> None:
    def run(made: Log) -> None:
        x, other = torch.rand(64) * drawn_leaf(64), drawn_leaf(64, seed=1)

        def function(x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.sin().sin(), _keeping(made, other * 2)

        made.append(StorageWeakRef(x.untyped_storage()))
        y, unused = lt.checkpoint(function, x, other)
        del x
        y.sum().backward()
        del y, unused, function

    _dies_without_gc(run)


def test_9_the_function_itself_is_let_go() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    gc.collect()
    gc.disable()
    try:
        y = lt.checkpoint(net, torch.ones(2, 3))
        y.sum().backward()
        gone = weakref.ref(net)
        del y, net
        assert gone() is None
    finally:
        gc.enable()


# 10. Grad disabled, and exceptions


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_10_without_grad_it_is_a_plain_call(mode: Any) -> None:
    x = drawn_leaf(3)
    function = _Counted(lambda x, *, k: (x.sin().exp() * k, k))
    with mode():
        y, k = lt.checkpoint(function, x, k=2)
    assert function.runs == 1
    assert k == 2
    assert not y.requires_grad
    assert y.is_inference() == (mode is torch.inference_mode)
    same([y], [(x.sin().exp() * 2).detach()])


def test_10_a_function_may_enable_grad_itself_under_no_grad() -> None:
    x = drawn_leaf(3)

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return x.sin().exp()

    def run(checkpoint: Function) -> Any:
        with torch.no_grad():
            y = checkpoint(function, x)
        return torch.autograd.grad(y.sum(), x)

    both(run)


def test_10_a_function_may_disable_grad_itself() -> None:
    x, w = drawn_leaf(3), drawn_leaf(3, seed=1)

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = (x * w).exp()
        return (x * scale).sin() * w

    both(lambda checkpoint: torch.autograd.grad(checkpoint(function, x).sum(), [x, w]))


class _Odd(BaseException):
    pass


@pytest.mark.parametrize("kind", [ValueError, KeyError, StopIteration, GeneratorExit, _Odd])
def test_10_exceptions_pass_through_untouched(kind: type[BaseException]) -> None:
    error = kind("mine")

    def function(x: torch.Tensor) -> torch.Tensor:
        x.sin().exp()
        raise error

    with pytest.raises(kind) as caught:
        lt.checkpoint(function, drawn_leaf(3))
    assert caught.value is error
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    # Nothing is left behind: no hooks, no modes.
    x = drawn_leaf(3)
    kept = x.exp()
    assert kept.grad_fn is not None
    same(torch.autograd.grad(kept.sum(), x), [kept.detach()])


@pytest.mark.parametrize("kind", [ValueError, KeyError])
def test_10_exceptions_of_the_rerun_pass_through_untouched(kind: type[Exception]) -> None:
    error, calls = kind("mine"), iter([False, True, False])

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        if next(calls):
            raise error
        return y.exp()

    x = drawn_leaf(3)
    state = torch.get_rng_state()
    y = lt.checkpoint(function, x)
    with pytest.raises(kind) as caught:
        torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert caught.value is error
    assert torch.equal(torch.get_rng_state(), state)
    assert not lt.is_recomputing()
    same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(x.sin().exp().sum(), x))


def test_10_a_function_that_is_not_callable_is_refused_as_python_does() -> None:
    number: Any = 3
    with pytest.raises(TypeError, match="call"):
        lt.checkpoint(number, drawn_leaf(3))
