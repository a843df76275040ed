"""Lean calls among others: autocast, threads, the compiler, transforms, saved-tensor hooks, checkpoints, processes."""

from __future__ import annotations

import functools
import os
import socket
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.spawn import spawn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide.torch as lt
from lowtide import InputError
from lowtide.torch.state.bits import same_bits
from tests.torch.calls import Function, drawn_leaf, plainly, same
from tests.torch.checkpoint import test_ddp as data_parallel
from tests.torch.lean.calls import Gate, both, noted, step, traced


@pytest.fixture(autouse=True)
def _afresh() -> None:
    traced.clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    module, x = Gate(), drawn_leaf(4, 6)

    def run(call: Function, number: int) -> Any:
        with torch.autocast("cpu", dtype, enabled=number != 2):
            y = call(module, x)
            z = call(module, x)  # the casts of weights are there already
        return [y, z, *torch.autograd.grad((y * z).sum(), [x, *module.parameters()])]

    both(run, calls=5)


def test_in_threads_at_once() -> None:
    module = Gate().eval()
    lean = lt.Lean(module)
    parameters = list(module.parameters())
    inputs = [drawn_leaf(4, 6, seed=k) for k in range(40)]
    expected = [torch.autograd.grad(module(x).square().sum(), [x, *parameters]) for x in inputs]
    meet = threading.Barrier(4)

    def work(part: int) -> list[Any]:
        meet.wait()
        return [torch.autograd.grad(lean(x).square().sum(), [x, *parameters]) for x in inputs[part::4]]

    with ThreadPoolExecutor(4) as pool:
        for part, found in enumerate(pool.map(work, range(4))):
            for left, right in zip(found, expected[part::4], strict=True):
                same(left, right)


@pytest.mark.filterwarnings("ignore:Scaled did not save what it saved")  # until it is traced anew
def test_parameters_of_another_layout_in_threads_at_once() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 3, 4, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight.exp() * x).sin()

    x = drawn_leaf(2, 3, 4, 5)
    for _ in range(10):
        module, meet = Scaled(), threading.Barrier(4)
        lt.lean(module, x)
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # its stub lacks it
        expected = torch.autograd.grad(module(x).sum(), [x, module.weight])

        def work(_: int, module: nn.Module = module, meet: threading.Barrier = meet) -> Any:
            meet.wait()
            return torch.autograd.grad(lt.lean(module, x).sum(), [x, *module.parameters()])

        with ThreadPoolExecutor(4) as pool:
            for found in pool.map(work, range(4)):
                same(found, expected)


def test_the_backward_in_other_threads() -> None:
    module, x = Gate(), drawn_leaf(4, 6)
    expected = step(module, x, module.parameters())
    for _ in range(2):
        torch.manual_seed(7)
        y = lt.lean(module, x)

        def backward(y: torch.Tensor = y) -> Any:
            return torch.autograd.grad(y.square().sum(), [x, *module.parameters()], retain_graph=True)

        with ThreadPoolExecutor(3) as pool:
            for found in [future.result() for future in [pool.submit(backward) for _ in range(9)]]:
                same(found, expected[1:])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_it_steps_aside_for_the_compiler() -> None:
    w = drawn_leaf(4, 4, seed=1)

    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w) * x

    def whole(x: torch.Tensor) -> torch.Tensor:
        return lt.lean(block, x).exp()

    def whole_plainly(x: torch.Tensor) -> torch.Tensor:
        return block(x).exp()

    x = drawn_leaf(4, 4)
    compiled, compiled_plainly = (
        torch.compile(each, fullgraph=True, backend="aot_eager") for each in (whole, whole_plainly)
    )
    for _ in range(2):
        y, z = compiled(x), compiled_plainly(x)
        same([y, *torch.autograd.grad(y.sum(), [x, w])], [z, *torch.autograd.grad(z.sum(), [x, w])])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_a_compiled_function_inside() -> None:
    w = drawn_leaf(4, 4, seed=1)
    compiled = torch.compile(lambda x: torch.tanh(x @ w) * x, backend="aot_eager")
    x = drawn_leaf(4, 4)

    def run(call: Function, number: int) -> Any:
        y = call(lambda x: noted(compiled(x.sin()).exp() * x), x)
        return [y, *torch.autograd.grad(y.sum(), [x, w])]

    both(run)
    assert not any(traced)  # a trace would undo the compiling


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_it_steps_aside_for_transforms() -> None:
    w = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))

    def function(x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ w) * x).exp().sum()

    x = drawn_leaf(3, 4).detach()
    lean = functools.partial(lt.lean, function)
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        same([transform(lean)(x)], [transform(function)(x)])
    same([torch.func.vmap(lean)(x)], [torch.func.vmap(function)(x)])
    same([torch.func.vmap(torch.func.grad(lean))(x)], [torch.func.vmap(torch.func.grad(function))(x)])
    same([lean(x)], [function(x)])


def test_it_steps_aside_where_hooks_are_off_and_for_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    module, x = Gate(), drawn_leaf(4, 6)
    with disable_saved_tensors_hooks("no hooks here"):
        same(step(lt.Lean(module), x, module.parameters()), step(module, x, module.parameters()))
        with pytest.raises(InputError, match="lean_frontier"):
            lt.lean_frontier(module, x)
    with FakeTensorMode() as mode:
        y = lt.lean(lambda x: (x.exp() * x).sin(), mode.from_tensor(torch.ones(3), static_shapes=True).requires_grad_())
    assert y.shape == (3,)


@pytest.mark.parametrize("context", [save_on_cpu, lambda: saved_tensors_hooks(torch.clone, torch.clone)])
def test_hooks_around_get_what_is_kept(context: Callable[[], Any]) -> None:
    module, x = Gate(), drawn_leaf(4, 6)

    def run(call: Function, number: int) -> Any:
        with context():
            y = call(module, x)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]

    both(run)
    packed: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.nbytes)
        return tensor

    for call in (plainly, lt.lean):
        packed.append(-1)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            call(module, x)
    middle = packed.index(-1, 1)
    assert sum(packed[middle + 1 :]) < sum(packed[1:middle])


def test_hooks_around_get_a_tensor_as_it_was_when_it_was_saved() -> None:
    """It is changed afterwards. Hooks that copy do not mind; autograd's own error is as good."""
    x = drawn_leaf(5)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.tanh()
        y.mul_(0.5)
        return x * y

    for _ in range(3):
        outcomes = []
        for call in (plainly, lt.lean):
            with saved_tensors_hooks(torch.clone, torch.clone):
                y = call(function, x)
            try:
                outcomes.append(torch.autograd.grad(y.sum(), x)[0])
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error)  # noqa: PT017  (either is right)
        assert len(outcomes) == 1 or same_bits(*outcomes)


@pytest.mark.parametrize("outer", [lt.checkpoint, functools.partial(torch_checkpoint, use_reentrant=False), lt.lean])
@pytest.mark.parametrize("inner", [lt.checkpoint, functools.partial(torch_checkpoint, use_reentrant=False), lt.lean])
def test_in_and_around_checkpoints(outer: Function, inner: Function) -> None:
    module, x = Gate(), drawn_leaf(4, 6)

    def nested(call: Function, inner: Function) -> Callable[[torch.Tensor], Any]:
        return lambda x: call(lambda x: inner(module, x.sin()).exp() * x, x)

    def run(lean: bool) -> Any:
        torch.manual_seed(0)
        call = outer if outer is not lt.lean or lean else plainly
        within = inner if inner is not lt.lean or lean else plainly
        y = nested(call, within)(x)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]

    expected = run(lean=False)
    for _ in range(3):
        same(run(lean=True), expected)


@pytest.mark.long
def test_in_a_sequence_of_layers() -> None:
    layers = [Gate() for _ in range(6)]
    x = drawn_leaf(4, 6)

    def run(call: Function, number: int) -> Any:
        y = lt.sequential([functools.partial(call, layer) for layer in layers], x)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *(p for layer in layers for p in layer.parameters())])]

    both(run)


def _work(rank: int, folder: str, interface: str) -> None:
    """What one process of two does; what fails here is raised in the test."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    warnings.simplefilter("ignore")  # gloo warns of names that it cannot resolve
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=data_parallel.WORLD)
    for options in data_parallel.OPTIONS:
        expected = data_parallel._train(plainly, rank, options)
        same(data_parallel._train(lt.lean, rank, options), expected)
    dist.barrier()
    os._exit(0)  # gloo's threads now and then abort a process that ends in order


@pytest.mark.long
def test_data_parallel_training(tmp_path: Path) -> None:
    if not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    names = [name for _, name in socket.if_nameindex()]
    spawn(_work, args=(str(tmp_path), "lo" if "lo" in names else names[0]), nprocs=data_parallel.WORLD)


def test_hooks_around_that_give_back_another_layout() -> None:
    x, w = drawn_leaf(6, 5), drawn_leaf(5, 6, seed=1)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        z = y.t()[1:].sin()
        return (z.exp() * z * y[1:]).cos()

    def run(call: Function, number: int) -> Any:
        with saved_tensors_hooks(lambda tensor: tensor.contiguous().clone(), lambda tensor: tensor):
            y = call(function, x, w)
        return [y, *torch.autograd.grad(y.sum(), [x, w])]

    both(run)


def test_hooks_around_get_arguments_that_only_a_recipe_reads() -> None:
    x = drawn_leaf(1000)
    seen: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.data_ptr())
        return tensor

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.expand(4, 1000) + 1.0  # x is not saved, and is a quarter of what is
        return (y * y.detach().exp()).sum()

    for _ in range(2):
        seen.clear()
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            y = lt.lean(function, x)
        assert seen == [x.data_ptr()]
        same(torch.autograd.grad(y, x), torch.autograd.grad(function(x), x))


@pytest.mark.parametrize("outer", [lt.checkpoint, functools.partial(torch_checkpoint, use_reentrant=False)])
def test_a_tensor_that_is_saved_in_vain_and_then_changed(outer: Function) -> None:
    """Only what is saved after the change is ever read."""
    x, w = drawn_leaf(5), drawn_leaf(5, seed=1)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        _ = x * x
        x.mul_(w)
        return x * x

    expected = torch.autograd.grad(function(x, w).sum(), [x, w])
    for _ in range(3):
        y = outer(lambda x, w: lt.lean(function, x, w), x, w)
        same(torch.autograd.grad(y.sum(), [x, w]), expected)


def test_hooks_around_that_give_back_an_argument_in_another_layout() -> None:
    x = drawn_leaf(20, 10)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.expand(4, 10, 20) + 1.0
        return (y * y.detach().exp()).sum()

    def run(call: Function, number: int) -> Any:
        with saved_tensors_hooks(lambda tensor: tensor.contiguous().clone(), lambda tensor: tensor):
            y = call(function, x.t())
        return [y, *torch.autograd.grad(y, x)]

    both(run)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_hooks_around_a_call_that_goes_another_way() -> None:
    x = drawn_leaf(5)

    def function(x: torch.Tensor, signs: list[torch.Tensor]) -> torch.Tensor:
        return (x.sin().exp() if signs[0] > 0 else x.exp().sin().tanh()) * x

    def run(call: Function, number: int) -> Any:
        with saved_tensors_hooks(torch.clone, torch.clone):
            y = call(function, x, [torch.tensor(1.0 - number % 2)])
        return [y, *torch.autograd.grad(y.sum(), x)]

    both(run, calls=4)


@torch.library.custom_op("lowtide_tests::twice", mutates_args=())
def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_operations_of_others_are_not_run_again() -> None:
    x = drawn_leaf(5)
    assert all("twice" not in name for name in lt.lean_frontier(lambda x: (_twice(x.detach()) * x).exp(), x)[-1].again)

    def run(call: Function, number: int) -> Any:
        y = call(lambda x: (_twice(x.detach()) * x).exp(), x)
        return [y, *torch.autograd.grad(y.sum(), x)]

    both(run)


def test_transforms_inside_are_refused_and_lean_is_named() -> None:
    with pytest.raises(RuntimeError, match="saved tensor hooks") as caught:
        lt.lean(lambda x: torch.func.grad(lambda t: (t.sin() * t).sum())(x) * x, drawn_leaf(5))
    assert "called by lean" in caught.value.__notes__[0]


@pytest.mark.filterwarnings("ignore:.*keep their whole tape")
def test_operations_that_save_other_tensors_while_they_are_traced() -> None:
    """The rerun of a first call, which was traced, saves what that saved; `ctc_loss` does something else in modes."""
    x, targets, lengths = drawn_leaf(7, 2, 5), torch.tensor([[1, 2], [3, 1]]), torch.tensor([7, 6])

    def function(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.ctc_loss(x.tanh().log_softmax(-1), targets, lengths, torch.tensor([2, 1]))

    expected = torch.autograd.grad(function(x), x)
    for _ in range(2):
        same(torch.autograd.grad(lt.checkpoint(lambda x: lt.lean(function, x), x), x), expected)


@pytest.mark.filterwarnings("error")
def test_another_default_dtype_is_traced_anew() -> None:
    x = drawn_leaf(40)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x.sin() * torch.full((40,), 0.5)) * x

    with lt.record(memory=False) as receipt:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            try:
                for _ in range(2):
                    same(*(torch.autograd.grad(call(function, x).sum(), x) for call in (plainly, lt.lean)))
            finally:
                torch.set_default_dtype(torch.float32)
    assert receipt.kept_whole == 0


def test_products_are_made_again_as_they_were_where_the_backward_casts() -> None:
    x, w = drawn_leaf(5, 40), drawn_leaf(40, 40, seed=1)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w).exp() * x

    def gradients(y: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.autograd.grad(y.sum(), [x, w])

    for _ in range(2):
        same(gradients(lt.lean(function, x, w, tape=0)), gradients(function(x, w)))
