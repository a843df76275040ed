"""Programs in which a call was silently wrong, crashed, or wrote what was not its own."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide import CheckpointError
from lowtide.torch.checkpoint import call
from lowtide.torch.state import samples
from tests.torch.calls import drawn_leaf, plainly, same


def _leaf(count: int = 3) -> torch.Tensor:
    return torch.linspace(0.1, 0.9, count).requires_grad_()


# --- changed between forward and backward


@pytest.mark.parametrize("entries", [3, 100_000])
def test_an_array_given_as_an_argument_may_be_refilled(entries: int) -> None:
    batch, x = np.ones(entries), _leaf(entries).double().detach().requires_grad_()
    y = lt.checkpoint(lambda x, batch: (x * torch.from_numpy(batch)).sin(), x, batch)
    batch[:] = 5.0
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().cos())
    assert (batch == 5.0).all()


@pytest.mark.parametrize("entries", [3, 400_000])
@pytest.mark.parametrize("way", ["tensor of it", "closed over", "large argument"])
def test_a_buffer_that_is_refilled_is_refused(way: str, entries: int) -> None:
    batch, x = np.ones(entries, dtype=np.float32), _leaf(entries)
    if way == "tensor of it":
        y = lt.checkpoint(lambda x, batch: (x + batch).sin(), x, torch.from_numpy(batch))
    elif way == "closed over":
        y = lt.checkpoint(lambda x: (x + torch.from_numpy(batch)).sin(), x)
    else:
        batch = np.ones(max(entries, 400_000), dtype=np.float32)
        y = lt.checkpoint(lambda x, batch: (x[0] + torch.from_numpy(batch)).sin(), x, batch)
    batch[:] = 5.0
    with pytest.raises(CheckpointError, match="values are not those of the first run"):
        y.sum().backward()


@pytest.mark.parametrize("whose", ["argument", "parameter", "closed over"])
def test_data_that_is_swapped_is_refused(whose: str) -> None:
    net, x, w = nn.Linear(3, 3), _leaf(), _leaf()
    y = lt.checkpoint(lambda x: (net(x * 2) * w).sin().exp(), x)
    tensor = {"argument": x, "parameter": net.weight, "closed over": w}[whose]
    tensor.data = torch.full_like(tensor, 7.0)
    with pytest.raises(CheckpointError, match="values are not those of the first run"):
        y.sum().backward()


class _Scaled(nn.Module):
    """Saves a buffer for the backward, and may write to it afterwards."""

    scale: torch.Tensor

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((3,), 3.0))
        self.writes = writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.scale
        if self.writes:
            self.scale.add_(1)
        return y


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_a_buffer_that_autograd_saves_and_that_is_written_to_later(inside: bool, early_stop: bool) -> None:
    """Plainly, the backward is refused. A rerun has the value that it had, unless it writes to it itself."""
    net, x = _Scaled(writes=inside), _leaf()
    y = lt.checkpoint(net, x, early_stop=early_stop)
    if not inside:
        net.scale.mul_(2)
    present = net.scale.clone()
    if inside:
        with pytest.raises(CheckpointError, match="changed in place after the function had used it"):
            y.sum().backward()
    else:
        y.sum().backward()
        assert x.grad is not None
        assert (x.grad == 3).all()
    assert torch.equal(net.scale, present)


# --- words that are the function's own


class _Takes(nn.Module):
    def forward(self, x: torch.Tensor, contexts: Any = None, check_rerun: Any = None) -> Any:
        return x.sin(), contexts, check_rerun


def _takes_any(x: torch.Tensor, **kwargs: Any) -> Any:
    return x.sin(), kwargs.get("contexts"), kwargs.get("check_rerun")


@pytest.mark.parametrize("function", [_Takes(), _Takes().forward, _takes_any])
@pytest.mark.parametrize("given", [{"contexts": 3}, {"check_rerun": "yes"}, {"contexts": [1], "check_rerun": 2.0}])
def test_words_of_the_functions_own_reach_it(function: Callable[..., Any], given: dict[str, Any]) -> None:
    y, contexts, check_rerun = lt.checkpoint(function, _leaf(), **given)
    assert contexts == given.get("contexts")
    assert check_rerun == given.get("check_rerun")
    y.sum().backward()
    with torch.no_grad():
        assert lt.checkpoint(function, _leaf(), **given)[1:] == (contexts, check_rerun)


def test_words_that_can_only_be_meant_for_checkpoint_are_its_own() -> None:
    entered: list[int] = []

    @contextlib.contextmanager
    def noting() -> Iterator[None]:
        entered.append(1)
        yield

    y, contexts, check_rerun = lt.checkpoint(_takes_any, _leaf(), contexts=[noting], check_rerun=True)
    y.sum().backward()
    assert (contexts, check_rerun) == (None, None)
    assert entered == [1]


# --- torch.compile and torch.jit


class _Broken(nn.Module):
    """A block in which the compiler gives up."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.layer(x))
        torch._dynamo.graph_break()
        return x.sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return lt.checkpoint(self.block, x).exp()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_block_that_cannot_be_compiled_counts_once(backend: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net, twin = _Broken(), _Broken()
    twin.load_state_dict(net.state_dict())
    compiled = torch.compile(net, backend=backend)
    for _ in range(3):
        x = torch.randn(4, 3)
        compiled(x).sum().backward()
        twin(x).sum().backward()
    assert int(net.norm.num_batches_tracked) == 3  # type: ignore[arg-type]
    for found, expected in zip(net.parameters(), twin.parameters(), strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        assert torch.equal(found.grad, expected.grad)
    torch._dynamo.reset()


class _Calls(nn.Module):
    """Calls a layer with a verb."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.layer, self.call = nn.Linear(3, 3), call

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(self.layer, x).sin()


@pytest.mark.filterwarnings("ignore:.torch.jit.trace")
@pytest.mark.parametrize("call", [lt.checkpoint, lt.lean, lambda layer, x: lt.sequential([layer, torch.sin], x)])
def test_it_can_be_traced(call: Any) -> None:
    net, x = _Calls(call), torch.randn(2, 3)
    traced, exported = torch.jit.trace(net, x), torch.export.export(net, (x,)).module()
    assert torch.equal(traced(x), net(x))
    assert torch.equal(exported(x), net(x))


# --- classes of tensors, and derivatives forward


class _Image(torch.Tensor):
    """Its results are of its class, and twice what a tensor's sine is."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # torch's
        return result * 2 if func is torch.Tensor.sin else result


def test_a_class_of_tensors_overrides_functions_in_the_rerun_too() -> None:
    """The backward of such a tensor runs without overrides."""
    net = nn.Linear(3, 3)

    def run(call: Any) -> list[torch.Tensor]:
        x = drawn_leaf(2, 3)

        def function(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = net(x.sin()) * x
            return y

        image = (x * 1).as_subclass(_Image)
        loss = call(function, image).square().mean()
        assert type(loss) is _Image
        loss.backward()  # type: ignore[no-untyped-call]  # a method, so that it is overridden
        found = [x.grad, *(parameter.grad for parameter in net.parameters())]
        net.zero_grad()
        return [gradient.as_subclass(torch.Tensor) for gradient in found if gradient is not None]

    same(run(lt.checkpoint), run(plainly))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("width", [32, 64])
def test_derivatives_forward_inside_it_are_right(width: int) -> None:
    """They save zeros that have no memory."""
    net, x = nn.Sequential(nn.Linear(width, width), nn.Tanh()), drawn_leaf(2, width)

    def run(call: Any) -> Any:
        y = call(lambda x: sum(torch.func.jvp(net, (x,), (torch.ones_like(x),))), x)
        return torch.autograd.grad(y.sum(), [x, *net.parameters()])

    same(run(lt.checkpoint), run(plainly))


# --- other threads, and the user's own containers


class _Trainer:
    """Keeps a model, and a queue that others fill."""

    def __init__(self) -> None:
        self.net, self.queue, self.steps = nn.Linear(3, 3), deque[Any](), 0

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        result: torch.Tensor = self.net(x).sin()
        if not lt.is_recomputing():
            self.queue.append(result)
        return result


@pytest.mark.parametrize("slots", [False, True])
def test_what_another_thread_appends_is_not_lost(slots: bool) -> None:
    class Slotted:
        __slots__ = ("__weakref__", "net", "queue", "steps")
        step = _Trainer.step
        __init__ = _Trainer.__init__

    trainer: Any = Slotted() if slots else _Trainer()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        thread = threading.Thread(target=lambda: [trainer.queue.append(number) for number in range(2_000)])
        thread.start()
        runs = 0
        while thread.is_alive() or runs < 20:
            lt.checkpoint(trainer.step, _leaf()).sum().backward()
            runs += 1
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert [item for item in trainer.queue if isinstance(item, int)] == list(range(2_000))
    assert trainer.steps == runs
    assert len(trainer.queue) == 2_000 + runs


@pytest.mark.parametrize("way", ["method", "closure"])
def test_what_another_thread_appends_during_a_rerun_is_not_lost(way: str) -> None:
    class Served(_Trainer):
        def step(self, x: torch.Tensor) -> torch.Tensor:
            if lt.is_recomputing():
                thread = threading.Thread(target=self.queue.append, args=("from outside",))
                thread.start()
                thread.join()
            result: torch.Tensor = self.net(x).sin()
            if len(self.queue) > 10_000:
                self.queue.clear()
            return result.exp()

    trainer = Served()
    trainer.queue.append("from before")
    function: Callable[..., Any] = trainer.step if way == "method" else lambda x: trainer.step(x)
    for _ in range(3):
        lt.checkpoint(function, _leaf()).sum().backward()
    assert list(trainer.queue) == ["from before", *["from outside"] * 3]


def test_a_queue_may_be_gone_through_while_backwards_run() -> None:
    trainer = _Trainer()
    for _ in range(3):
        lt.checkpoint(trainer.step, _leaf())
    for result in trainer.queue:
        result.sum().backward()
    assert len(trainer.queue) == trainer.steps == 3


@pytest.mark.parametrize("nested", [False, True])
def test_nested_dropout_with_the_backward_in_another_thread(nested: bool) -> None:
    drop, x = nn.Dropout(0.5), torch.ones(64, requires_grad=True)

    def inner(x: torch.Tensor) -> Any:
        return drop(x * 2)

    def outer(x: torch.Tensor) -> Any:
        return drop(lt.checkpoint(inner, x) if nested else inner(x)) * 3

    y = lt.checkpoint(outer, x)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(y.sum(), x)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], y.detach())


def test_a_context_that_suppresses_an_exception() -> None:
    def function(x: torch.Tensor) -> Any:
        kept.append(x.sin().exp())
        raise KeyError("given up")

    kept: list[torch.Tensor] = []
    x = _leaf()
    result = lt.checkpoint(
        function, x, context_fn=lambda: (contextlib.suppress(KeyError), contextlib.suppress(KeyError))
    )
    assert result is None
    kept[0].sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])


# --- how runs are compared


def test_a_function_of_c_may_be_called_with_every_option() -> None:
    x = _leaf()
    y = lt.checkpoint(torch.sin, x, check_rerun=True, contexts=[contextlib.nullcontext])
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], x.cos())


def test_the_same_numbers_in_another_shape_are_refused() -> None:
    shapes = iter([(2, 3), (3, 2), (3, 2)])

    def function(x: torch.Tensor) -> Any:
        return x.view(next(shapes)).sin().sum()

    y = lt.checkpoint(function, _leaf(6))
    with pytest.raises(CheckpointError, match=r"it was \(2, 3\).*now it is \(3, 2\)"):
        y.backward()


@pytest.mark.parametrize("differs", [False, True])
def test_samples_that_lie_on_a_device_are_compared_when_the_backward_ends(
    differs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_a_device(tensor: torch.Tensor) -> torch.Tensor:
        return samples._checksum_there(tensor.detach())

    monkeypatch.setattr(call, "sample_of", on_a_device)  # of tensors too large to be read whole
    factors = iter([1.0, 2.0, 2.0] if differs else [1.0] * 3)
    x = _leaf(5000)
    y = lt.checkpoint(lambda x: (x * next(factors)).sin().exp(), x)
    with pytest.raises(CheckpointError, match="saved tensor 0") if differs else contextlib.nullcontext():
        y.sum().backward()
    if not differs:
        assert x.grad is not None
        assert torch.equal(x.grad, torch.autograd.grad((z := _leaf(5000)).sin().exp().sum(), z)[0])


def test_noise_that_an_operation_leaves_unfilled_is_not_compared() -> None:
    """In eval rrelu saves noise that it does not draw: whatever was in that memory before."""
    dirt = iter(range(1, 100))

    def function(x: torch.Tensor) -> Any:
        torch.full_like(x, float(next(dirt)))  # and gone
        return nn.functional.rrelu(x * 2, training=False).sin()

    x = _leaf(500)
    for _ in range(3):
        y = lt.checkpoint(function, x)
        found = torch.autograd.grad(y.sum(), x)[0]
        assert torch.equal(found, torch.autograd.grad(nn.functional.rrelu(x * 2, training=False).sin().sum(), x)[0])
